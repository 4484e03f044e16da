#!/usr/bin/env bash
# bash .ci/on_gpu.sh [tests] [speed] [stop]
#
# What only a GPU can tell, all three parts or those named, most important first:
#   tests   the numbers on the device: gradients against float64, the head's roundings, the compiled model
#   speed   time and memory of the step of 16M and 221M, beside those of 2102aab, whose loss is log Z - l_t
#   stop    a run of 16M on the shards in DATA gets SIGTERM, ends after a checkpoint and is resumed
#
# Each command's output goes to a file in OUT (out/gpu_logs). What has not ended LIMIT seconds (570) after the
# start is cut off. The code of 2102aab is taken from git unless it lies in BEFORE (out/2102aab).
# DEVICE=cpu bash .ci/on_gpu.sh is a trial with everything tiny.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
: "${DEVICE:=cuda}" "${LIMIT:=570}" "${BEFORE:=out/2102aab}" "${DATA:=data/fineweb_small}"
logs=${OUT:-out/gpu_logs} sizes='16M 221M' bench='--seconds=8' failed=''
mkdir -p "$logs" && logs=$(realpath "$logs") || exit 1
run="--lr=0.1 --steps=2000 --ckpt_every=0 --batch_size=16 --block_size=512 --test_tokens=1e6 --out=out/gpu_stop"
export PYTHONUNBUFFERED=1
if [ "$DEVICE" = cpu ]; then
  sizes=tiny bench='--seconds=1 --batch_size=2 --block_size=128 --threads=1'
  export CUDA_VISIBLE_DEVICES=''
  DATA=data/stdlib run+=' --device=cpu --threads=1 --size=tiny --block_size=128 --eval_tokens=4e3'
fi

part() {  # NAME SECONDS COMMAND...
  local seconds=$((LIMIT - SECONDS)) status
  ((seconds < $2)) || seconds=$2
  timeout --kill-after=10 $((seconds > 0 ? seconds : 1)) "${@:3}" >"$logs/$1.txt" 2>&1
  status=$?
  echo "$SECONDS s: $1, status $status (124: out of time), see $logs/$1.txt"
  ((status == 0)) || failed+=" $1"
}

for what in ${*:-tests speed stop}; do
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
    stop)
      rm -rf out/gpu_stop
      part stop 120 bash -c "timeout 60 python train.py --data=$DATA $run; [ -e out/gpu_stop/ckpt.pt ]"
      part resume 200 python train.py --data=$DATA $run
      head -n 3 "$logs/resume.txt" ;;  # from which step
    *) echo "no part $what" >&2; exit 2 ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
