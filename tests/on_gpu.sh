#!/usr/bin/env bash
# What only a GPU can tell, most important first: the tests of test_gpu.py, time and memory of a step and of
# the head, training on real text with a shifted mean, two longer runs.
#
#   bash tests/on_gpu.sh
#
# What is done is written at once, to a folder of the device and the README.md beside it, whose section about
# the device is printed at the end. What does not fit into the time left is left out, with a line.
# Environment variables:
#   MINUTES     of all parts together (default 25)
#   PARTS       some of: tests steps heads text shift long (default: all)
#   OUT         folder of the devices' folders (default results/gpu)
#   WORK        folder of tokens and runs (default out/gpu); finished runs in there are not made again
#   DEVICE=cpu  tries the script itself on a CPU, with everything small (default OUT: out/gpu/results)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

ALL='tests steps heads text shift long'
: "${MINUTES:=25}" "${PARTS:=$ALL}" "${WORK:=out/gpu}"
export DEVICE=${DEVICE:-cuda} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[[ $MINUTES =~ ^[0-9]{1,4}$ ]] || refuse "MINUTES should be a whole number, is '$MINUTES'"
for part in $PARTS; do
  [[ " $ALL " == *" $part "* ]] || refuse "PARTS should be some of $ALL, has '$part'"
done
case $DEVICE in
  cuda)
    found=$(python tests/on_gpu.py machine) || exit
    read -r NAME METHODS <<<"$found"
    [ "$NAME" != cpu ] || refuse 'no CUDA here; DEVICE=cpu tries this script on a CPU'
    : "${OUT:=results/gpu}"
    SIZES='16M 221M' WIDTHS='224 832' SHIFTS='1000 0 300 100' SHIFTED='baseline mu_centering zero_sum'
    FASTER=1 STEPS=300 MOST_STEPS=100000 LR_SUM=5000 TEXT='300000000 50257'
    BENCH='--seconds=10' PREPARE='--val_tokens=2e6'
    TRAIN='--size=16M --eval_tokens=131072 --test_tokens=1048576' ;;
  cpu)
    : "${OUT:=out/gpu/results}"
    NAME=cpu METHODS='baseline mu_centering' SIZES=tiny WIDTHS=64 SHIFTS=1000 SHIFTED=baseline
    FASTER=4 STEPS=20 MOST_STEPS=20 LR_SUM=1 TEXT='400000 300'
    BENCH='--threads=1 --seconds=0.1 --batch_size=2 --block_size=32 --vocab_size=512 --tokens=256'
    PREPARE='--val_tokens=20000 --workers=1'
    TRAIN='--size=tiny --n_layer=1 --n_embd=32 --block_size=32 --batch_size=4 --eval_tokens=128
           --test_tokens=256 --threads=1 --logits_dtype=bfloat16 --log_every=5' ;;
  *) refuse "DEVICE should be cuda or cpu, is '$DEVICE'" ;;
esac
HERE=$OUT/$NAME RUNS=$WORK/$NAME DATA=$WORK/tokens END=$((60 * MINUTES)) FAILED= CHILD=
mkdir -p "$HERE" "$RUNS" || exit 1
stop() { trap '' INT TERM HUP; [ -z "$CHILD" ] || { kill "$CHILD"; wait; }; exit "$1"; }
trap 'stop 130' INT
trap 'stop 143' TERM HUP
say() { printf '%4d s  %s\n' $SECONDS "$*" | tee -a "$HERE/log.txt"; }
wanted() { [[ " $PARTS " == *" $1 "* ]]; }

# part NAME SECONDS FILE COMMAND...: runs a command if it should be done in the time left, for at most twice
# SECONDS. Its output replaces FILE, or follows that of earlier commands of this script. SPENT is its time.
declare -A BEGUN
part() {
  local name=$1 needs=$(($2 / FASTER)) file=$3 left=$((END - SECONDS)) status=0
  shift 3
  if [ $needs -ge $left ]; then
    say "left out: $name (about $needs s, $((left > 0 ? left : 0)) s are left)"
    return 1
  fi
  [ "${BEGUN[$file]:-}" ] || : >"$file"
  BEGUN[$file]=1 SPENT=$SECONDS
  timeout --kill-after=20 $((2 * needs < left ? 2 * needs : left)) "$@" >>"$file" 2>&1 &
  CHILD=$!
  wait $CHILD || status=$?
  CHILD= SPENT=$((SECONDS - SPENT))
  say "$name: $SPENT s$([ $status = 0 ] || echo ", status $status (124: out of time), see $file")"
  [ $status = 0 ] || FAILED+=" $name;"
  python tests/on_gpu.py report "$OUT"
  return $status
}

TORCH=$(python -c 'import importlib.metadata as m; print(m.version("torch"))')
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
echo "# $(date -u +%Y-%m-%d), ${NAME//_/ }, torch $TORCH, commit $COMMIT; $MINUTES minutes for: $PARTS" |
  tee -a "$HERE/log.txt"

if wanted tests; then
  part tests 300 "$HERE/tests.txt" python -m pytest -vv -m gpu -p no:cacheprovider tests/test_gpu.py
fi

if wanted steps; then
  others=(${METHODS#baseline})
  for size in $SIZES; do  # six methods in a process, so that the memory has room for all their models
    for ((i = 0; i < ${#others[@]}; i += 5)); do
      methods=$(IFS=,; echo "baseline,${others[*]:i:5}")
      part "step of $size: $methods" 120 "$HERE/steps.txt" \
        python bench.py --device=$DEVICE --sizes=$size --methods=$methods $BENCH
    done
  done
fi

if wanted heads; then
  for width in $WIDTHS; do
    part "head of width $width" 60 "$HERE/heads.txt" \
      python bench.py --device=$DEVICE --head --width=$width --tokens=32768 $BENCH
  done
fi

if wanted text && flags=$(python tests/on_gpu.py text "$WORK/packages.jsonl" $TEXT); then
  mapfile -t flags <<<"$flags"
  part "tokens: ${flags[*]}" 150 "$WORK/tokens.txt" \
    python prepare_fineweb.py "${flags[@]}" --out="$DATA" $PREPARE
fi

# run NAME SECONDS FLAGS...: a training run
run() {
  part "$1" "$2" "$RUNS/$1.txt" python train.py --data="$DATA" --device=$DEVICE --out="$RUNS/$1" \
    --eval_every=0 $TRAIN "${@:3}" && say "  $(tail -n 1 "$RUNS/$1.txt")"
}

if wanted shift; then
  SPENT=$((100 / FASTER))
  for shift in $SHIFTS; do
    for method in $SHIFTED; do  # should take as long as the one before; a minute is kept for the tables
      run "$method-shift$shift" $((FASTER * SPENT + 60)) --method=$method --mu_shift=$shift --steps=$STEPS
    done
  done
fi

if wanted long; then  # as many steps as fit, at a learning rate whose sum over them is LR_SUM
  seconds=$(((END - SECONDS - 90 / FASTER) / 2))
  read -r steps lr < <(python tests/on_gpu.py steps $seconds $MOST_STEPS $LR_SUM "$RUNS")
  for method in baseline mu_centering; do
    [ "$steps" -ge $STEPS ] || { say "left out: long run of $method ($steps steps in $seconds s)"; continue; }
    run "$method-lr$lr" $((FASTER * seconds)) --method=$method --lr=$lr --steps=$steps
  done
fi

if wanted shift || wanted long; then
  part 'tables of the runs' 60 "$WORK/tables.txt" python tests/on_gpu.py tables "$RUNS" "$WORK/tables" &&
    cp "$WORK"/tables/{results,curves}.csv "$HERE"
fi
echo
python tests/on_gpu.py report "$OUT" "$NAME"
[ -z "$FAILED" ] || { echo "failed:${FAILED%;}" >&2; exit 1; }
