#!/usr/bin/env bash
# Records Megatron-LM's own pretrain_gpt.py, unedited, twice on this machine's CPU, and compares.
#
#   run_pretrain_gpt.sh CHECKOUT [MEGATRON FLAGS ...]
#   NPROC=2 OUT=runs/tp2 run_pretrain_gpt.sh ~/Megatron-LM --tensor-model-parallel-size 2 --sequence-parallel
#
# CHECKOUT: of github.com/NVIDIA/Megatron-LM, tag core_v0.16.1 (`git clone --branch core_v0.16.1`).
# Needs, beside upguard-plugin[megatron]: pybind11 einops regex sentencepiece six, make and g++.
# Exit code: that of `upguard compare`, 0 where the two trainings are equal bit by bit.
set -euo pipefail
[[ $# -ge 1 && -f $1/pretrain_gpt.py ]] || { sed -n '2,10p' "$0" >&2; exit 2; }
checkout=$1; shift
out=$(realpath -m "${OUT:-runs/pretrain_gpt}")
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
  local run=$1; shift
  (cd "$checkout" && upguard run --cpu --output "$run" -- \
    torchrun --nproc-per-node "${NPROC:-2}" --rdzv-backend c10d --rdzv-endpoint localhost:0 pretrain_gpt.py \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters "${STEPS:-3}" --lr 1e-3 --min-lr 1e-4 \
    --lr-decay-style cosine --lr-decay-iters 5 --weight-decay 0.1 --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --position-embedding-type rope \
    --log-interval 1 --eval-iters 2 --eval-interval 2 --split 90,10,0 \
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization \
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion \
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "$@")
}

train "$out/baseline" "$@"
train "$out/target" "$@"
upguard compare "$out/baseline" "$out/target"
