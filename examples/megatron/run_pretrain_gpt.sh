#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, unedited, on this machine's CPU: trained without UpGuard, with
# UPGUARD=1 alone, and with --upguard. Losses must be the same, and both traces equal and complete.
#
#   run_pretrain_gpt.sh CHECKOUT [MEGATRON FLAGS ...]
#   NPROC=2 OUT=runs/tp2 run_pretrain_gpt.sh ~/Megatron-LM --tensor-model-parallel-size 2 --sequence-parallel
#
# CHECKOUT: of github.com/NVIDIA/Megatron-LM, tag core_v0.16.1 (`git clone --branch core_v0.16.1`).
# Needs, beside upguard-plugin[megatron]: pybind11 einops regex sentencepiece six, make and g++.
# Exit code: 0 where all is equal, else that of `upguard compare` or `upguard check`, or 4: other losses.
set -euo pipefail
[[ $# -ge 1 && -f $1/pretrain_gpt.py ]] || { sed -n '2,11p' "$0" >&2; exit 2; }
checkout=$1; shift
out=$(realpath -m "${OUT:-runs/pretrain_gpt}")
mkdir -p "$out"
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
# What `upguard run --cpu` does for a command: CUDA is emulated, in every process.
startup=$(python -c 'import upguard_plugin.launch as l; print(list(l.__path__)[0])')/sitecustomize
export UPGUARD_CPU=1 PYTHONPATH=$startup${PYTHONPATH:+:$PYTHONPATH}

train() {  # NAME [FLAGS ...]
  local log=$out/$1.log; shift
  (cd "$checkout" && timeout "${LIMIT_S:-600}" torchrun --nproc-per-node "${NPROC:-2}" \
    --rdzv-backend c10d --rdzv-endpoint localhost:0 "${PROGRAM:-pretrain_gpt.py}" \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters "${STEPS:-3}" --lr 1e-3 --min-lr 1e-4 \
    --lr-decay-style cosine --lr-decay-iters 5 --weight-decay 0.1 --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --position-embedding-type rope \
    --log-interval 1 --eval-iters 2 --eval-interval 2 --split 90,10,0 \
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization \
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion \
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "$@") \
    > "$log" 2>&1 || { tail -n 25 "$log" >&2; return 1; }
}

losses() {  # NAME: losses and gradient norms of every step, and of the evaluation
  grep -oE 'iteration +[0-9]+/|(lm|load_balancing|mtp_1|validation)[a-z_ ]* loss( value)?: [^ |]+|grad norm: [^ |]+' "$out/$1.log"
}

[[ -n ${ONLY:-} ]] || train off "$@"
rm -rf "$out/baseline" "$out/target"
UPGUARD=1 UPGUARD_OUTPUT_DIR=$out/baseline train baseline "$@"
[[ -z ${ONLY:-} ]] || exit 0
train target --upguard --upguard-output-dir "$out/target" "$@"

losses off | paste -sd ' '
for run in baseline target; do
  diff <(losses off) <(losses $run) || { echo "other losses in $run" >&2; exit 4; }
done
upguard check "$out/baseline"
upguard compare "$out/baseline" "$out/target"
