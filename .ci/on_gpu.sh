#!/usr/bin/env bash
# What only a GPU can tell and results/gpu does not, most important first: the tests that depend on the
# device, time and memory of each size's step, controls of the shift. Each prints into RESULTS/<part>.txt.
#
#   bash .ci/on_gpu.sh                for LIMIT seconds (570): what does not end by then is cut off
#   DEVICE=cpu bash .ci/on_gpu.sh     tries this script with everything small
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONUNBUFFERED=1
if [ "${DEVICE:=cuda}" = cpu ]; then
  export CUDA_VISIBLE_DEVICES=''
  small=tiny sizes=tiny folder=gpu_cpu
  bench='--threads=1 --seconds=1 --vocab_size=512 --batch_size=8 --block_size=128'
  train='--threads=1 --dtype=float32 --steps=20 --block_size=128 --batch_size=8'
else
  small=16M sizes='221M 109M 57M 29M 16M' folder=gpu bench='--seconds=5' train='--steps=200'
fi
: "${RESULTS:=results/$folder}" "${LIMIT:=570}"
runs=out/$folder failed=''
mkdir -p "$RESULTS" || exit 1

part() {  # NAME SECONDS COMMAND...
  local seconds=$((LIMIT - SECONDS)) status
  ((seconds < $2)) || seconds=$2
  timeout --kill-after=10 $((seconds > 0 ? seconds : 1)) "${@:3}" >"$RESULTS/$1.txt" 2>&1; status=$?
  echo "$SECONDS s: $1, status $status (124: out of time), see $RESULTS/$1.txt"
  ((status == 0)) || failed+=" $1"
}

part tests 150 python -m pytest -v tests/test_model.py tests/test_head.py -k 'float64 or cuda'
for size in $sizes; do
  part steps-$size 120 python -m analysis.bench --device=$DEVICE --size=$size $bench \
    --methods=baseline,mu_loss,mu_centering
done
part data 60 python prepare_fineweb.py --source=stdlib --tokenizer=bytes --val_tokens=1e6 --out=$runs/text
for run in baseline-1000-float32 mu_centering-0-bfloat16 baseline-1000-bfloat16 baseline-0-bfloat16; do
  IFS=- read -r method shift dtype <<<"$run"
  part shift-$run 120 python train.py --device=$DEVICE --size=$small --data=$runs/text --lr=1e-2 $train \
    --eval_tokens=131072 --test_tokens=131072 --method=$method --mu_shift=$shift --logits_dtype=$dtype \
    --out=$runs/shift-$run
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
