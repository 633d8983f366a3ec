#!/usr/bin/env bash
# run_pretrain_gpt.sh in all layouts that two processes on a CPU can have, a checkpoint written and
# read, the run that read it compared with one that never stopped, layouts compared with one process,
# and a planted bug that must be named. Takes half an hour on two busy cores.
#
#   OUT=runs run_every_layout.sh CHECKOUT [LAYOUT ...]      (default: all)
set -uo pipefail
[[ $# -ge 1 && -f $1/pretrain_gpt.py ]] || { sed -n '2,7p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd); checkout=$(realpath "$1"); shift
out=$(realpath -m "${OUT:-runs}"); failed=0
export UPGUARD_SKETCH=1  # other layouts add up in another order: sketches tell rounding from faults
plain="--hidden-dropout 0 --attention-dropout 0"
tp2="--tensor-model-parallel-size 2"

flags() {
  case $1 in
    tp1) echo "$plain" ;;
    tp2 | whole) echo "$plain $tp2" ;;
    tp2-sp) echo "$tp2 --sequence-parallel" ;;  # with dropout
    sp | unmarked) echo "$plain $tp2 --sequence-parallel" ;;
    pp2) echo "$plain --pipeline-model-parallel-size 2" ;;
    vpp2) echo "$plain --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1" ;;
    dp2) echo "$plain --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" ;;
    ep2) echo "$plain --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2 --disable-bias-linear" ;;
    save) echo "$plain $tp2 --save $out/checkpoint --save-interval 2" ;;
    load) echo "$plain $tp2 --load $out/checkpoint --train-iters 5 --override-opt-param-scheduler" ;;
    *) echo "no layout $1" >&2; return 1 ;;
  esac
}

once() {  # LAYOUT: recorded one time
  # shellcheck disable=SC2046  # words on purpose
  ONLY=1 OUT=$out/$1 "$here/run_pretrain_gpt.sh" "$checkout" $(flags "$1") || failed=1
}

[[ $# -gt 0 ]] || set -- tp1 tp2 tp2-sp pp2 vpp2 dp2 ep2 save load resumed across unmarked
for layout in "$@"; do
  echo "== $layout"
  case $layout in
    across)  # those that have one process's weights and samples
      once sp
      for other in tp2 sp dp2; do
        upguard compare "$out/tp1/baseline" "$out/$other/baseline" || failed=1
      done ;;
    resumed)
      STEPS=5 once whole
      upguard compare "$out/whole/baseline" "$out/load/baseline" || failed=1 ;;
    unmarked)
      PROGRAM=$here/unmarked_norm.py once unmarked
      upguard compare "$out/sp/baseline" "$out/unmarked/baseline"; [[ $? == 1 ]] || failed=1
      upguard check "$out/unmarked/baseline"; [[ $? == 1 ]] || failed=1 ;;
    *)
      [[ $layout == tp1 ]] && processes=1 || processes=2
      # shellcheck disable=SC2046
      NPROC=$processes OUT=$out/$layout \
        "$here/run_pretrain_gpt.sh" "$checkout" $(flags "$layout") || failed=1 ;;
  esac
done
exit $failed
