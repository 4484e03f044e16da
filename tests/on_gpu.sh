#!/usr/bin/env bash
# What only a GPU can tell, most important first: the tests of test_gpu.py, time and memory of a step and of
# the head, training with a shifted mean. What each prints goes to results/gpu/<part>.txt as it is written.
#
#   bash tests/on_gpu.sh                a part that would end after MINUTES (default 25) is cut off
#   DEVICE=cpu bash tests/on_gpu.sh     tries this script with everything small; writes to out/gpu_cpu
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export DEVICE=${DEVICE:-cuda} PYTHONUNBUFFERED=1
if [ "$DEVICE" = cpu ]; then
  small=tiny large=tiny methods=baseline,mu_centering results=out/gpu_cpu grid=shift steps=60
  flags='--threads=1 --seconds=1' text='--tokens=2e5' tokenizers=('bytes')
else
  small=16M large=221M methods=baseline,weight_decay,z_loss,soft_capping,mu_loss,mu_centering
  results=results/gpu grid=paper steps=300 flags= text= tokenizers=('gpt2' 'bpe --vocab_size=50257')
fi
mkdir -p $results && failed= end=$((60 * ${MINUTES:-25})) || exit 1

part() {  # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 status=0
  shift 2
  [ $((end - SECONDS)) -gt 0 ] || { echo "$name: no time left"; failed+=" $name"; return 1; }
  timeout --foreground --kill-after=20 $((seconds < end - SECONDS ? seconds : end - SECONDS)) "$@" \
    >"$results/$name.txt" 2>&1 || status=$?
  echo "$SECONDS s: $name, status $status (124: out of time), see $results/$name.txt"
  [ $status = 0 ] || { failed+=" $name"; return 1; }
}

part tests 600 python -m pytest -m gpu -v tests/test_gpu.py
part steps_small 400 python -m oec.bench --device=$DEVICE --sizes=$small $flags
part steps_large 600 python -m oec.bench --device=$DEVICE --sizes=$large --methods=$methods $flags
part heads 200 python -m oec.bench --device=$DEVICE --sizes=$small,$large --head $flags
for tokenizer in "${tokenizers[@]}"; do  # GPT-2's ranks may not be at hand; learned byte pairs always are
  DATA=out/gpu_text_${tokenizer%% *}
  part tokens 200 python prepare_fineweb.py --source=stdlib --tokenizer=$tokenizer --val_tokens=1e5 $text \
    --out=$DATA && failed=${failed% tokens} && break
done
METHODS='baseline mu_centering' SHIFTS='1000 0 300' LRS=1e-2 SIZES=$small SEEDS=1 TYING=untied STEPS=$steps \
  DATA=$DATA OUT=out/gpu_shift_$small part shift 900 bash sweep.sh $grid
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
