#!/usr/bin/env bash
# bash .ci/on_gpu.sh [tests] [speed] [drift]
#
# What only a GPU can tell, all three parts or those named, most important first:
#   tests   the numbers on the device: gradients against float64, the head's roundings, the compiled model
#   speed   time and memory of the step of 16M and 221M, beside those of 2102aab, whose loss is log Z - l_t
#   drift   bash sweep.sh drift of seed 3 (SEEDS), on the shards in DATA
#
# Each command's output goes to a file in OUT (out/gpu_logs). What has not ended LIMIT seconds (570) after the
# start is cut off; drift alone needs most of that. The code of 2102aab is taken from git unless it lies in
# BEFORE (out/2102aab). DEVICE=cpu bash .ci/on_gpu.sh is a trial with everything tiny.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
: "${DEVICE:=cuda}" "${LIMIT:=570}" "${BEFORE:=out/2102aab}" "${DATA:=data/fineweb_small}" "${SEEDS:=3}"
logs=${OUT:-out/gpu_logs} sizes='16M 221M' bench='--seconds=8' failed=''
mkdir -p "$logs" && logs=$(realpath "$logs") || exit 1
export PYTHONUNBUFFERED=1 DATA SEEDS OUT=out/gpu_drift
if [ "$DEVICE" = cpu ]; then
  sizes=tiny bench='--seconds=1 --batch_size=2 --block_size=128 --threads=1'
  export CUDA_VISIBLE_DEVICES='' DATA=data/stdlib SIZES=tiny STEPS=20 JOBS=1 METHODS=baseline
  export FLAGS='--device=cpu --threads=1 --dtype=float32 --block_size=128 --eval_tokens=4e3 --test_tokens=4e3'
fi

part() {  # NAME SECONDS COMMAND...
  local seconds=$((LIMIT - SECONDS)) status
  ((seconds < $2)) || seconds=$2
  timeout --kill-after=10 $((seconds > 0 ? seconds : 1)) "${@:3}" >"$logs/$1.txt" 2>&1
  status=$?
  echo "$SECONDS s: $1, status $status (124: out of time), see $logs/$1.txt"
  ((status == 0)) || failed+=" $1"
}

for what in ${*:-tests speed drift}; do
  case $what in
    tests)
      part tests 150 python -m pytest -v tests/test_head.py tests/test_model.py ;;
    speed)
      [ -d "$BEFORE" ] || { mkdir -p "$BEFORE" && git archive 2102aab | tar -x -C "$BEFORE"; }
      for size in $sizes; do
        flags="--device=$DEVICE --size=$size $bench --methods=baseline,mu_loss,mu_centering"
        part speed-$size-before 120 env -C "$BEFORE" python -m analysis.bench $flags
        part speed-$size 120 python -m tools.bench $flags
      done ;;
    drift)
      part drift 560 bash sweep.sh drift
      tail -n 2 "$OUT"/logs/*.log >"$logs/drift-runs.txt"  # how far each one came
      cp results/gpu_drift/{results,curves}.csv "$logs" || failed+=' csv' ;;
    *) echo "no part $what" >&2; exit 2 ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
