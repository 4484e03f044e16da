#!/usr/bin/env bash
# A grid of runs: skips what is done, resumes what is half done, names what failed, then calls analyze.py.
#
#   bash sweep.sh                 the paper's grid: 6 methods x 7 learning rates x 5 sizes x 2 tyings
#   bash sweep.sh ablation        its λ grid: z_loss and mu_loss, untied
#   bash sweep.sh demo            a grid for a CPU: prepares its data, minutes
#
# Narrow or widen any of them by environment variables, lists separated by spaces:
#   METHODS (each also with +mu_centering) SIZES LRS TYING (untied tied) LAMS (default: each method's own) SEEDS STEPS
#   NPROC   processes of a run (default: the GPUs there are, else 1)     JOBS     runs at a time (default 1; demo: the cores)
#   OUT     folder of the runs (default out/<grid>)                      DATA     folder of the shards
#   RETRIES tries again of a failed run (default 1)                      DRY_RUN=1  print one complete command a line, for this folder; run nothing
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
export LC_ALL=C

export GRID=${1:-paper}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
export DEVICES=${CUDA_VISIBLE_DEVICES-$([ "$gpus" -gt 0 ] && seq -s, 0 $((gpus - 1)))}
export GPUS=$(tr ',' '\n' <<<"$DEVICES" | grep -c .)
case $GRID in
  paper)
    : "${METHODS:=baseline weight_decay z_loss soft_capping mu_loss mu_centering}" "${SIZES:=16M 29M 57M 109M 221M}"
    : "${LRS:=3e-4 1e-3 3e-3 1e-2 3e-2 1e-1 3e-1}" "${TYING:=untied tied}" "${STEPS:=100000}" "${DATA:=data/fineweb}" ;;
  ablation)
    : "${METHODS:=z_loss mu_loss}" "${SIZES:=16M 29M 57M 109M 221M}"
    : "${LRS:=3e-4 1e-3 3e-3 1e-2 3e-2 1e-1 3e-1}" "${TYING:=untied}" "${LAMS:=1e-7 1e-4 1e-1 1e2}" "${STEPS:=100000}" "${DATA:=data/fineweb}" ;;
  demo)
    : "${METHODS:=baseline weight_decay z_loss soft_capping mu_loss mu_centering max_z_loss norm_softmax coupled_adam cosine_reg laplace_reg spectrum_control}"
    [ "${LAMS:-}" ] || ALSO=1e-1  # of z_loss and mu_loss, beside the default
    : "${SIZES:=tiny}" "${LRS:=1e-2 1e-1 3e-1}" "${TYING:=untied}" "${STEPS:=1000}" "${DATA:=data/stdlib}" "${NPROC:=1}"
    : "${JOBS:=$(nproc 2>/dev/null || sysctl -n hw.ncpu)}"
    export OMP_NUM_THREADS=1 ;;
  *) echo "error: no grid '$GRID'; should be paper, ablation or demo" >&2; exit 2 ;;
esac
: "${SEEDS:=1}" "${NPROC:=$((GPUS > 0 ? GPUS : 1))}" "${JOBS:=1}" "${OUT:=out/$GRID}" "${RETRIES:=1}" "${DRY_RUN:=0}"
for name in NPROC JOBS STEPS RETRIES; do
  case ${!name} in *[!0-9]* | '') echo "error: $name should be a whole number, is '${!name}'" >&2; exit 2 ;; esac
done
for name in NPROC JOBS STEPS; do
  [ "${!name}" -gt 0 ] || { echo "error: $name should be at least 1" >&2; exit 2; }
done
export STEPS DATA OUT NPROC JOBS RETRIES

# The plan: seven fields a run, each ended by a NUL, so that nothing in them is taken for code.
plan() {
  local size tying lr method head own lam lams seed name defaults
  defaults=" $(sed -n 's/^LAM = //p' model.py | tr -d "{}',:") "  # name λ name λ ...
  for size in $SIZES; do for tying in $TYING; do for lr in $LRS; do for method in $METHODS; do
    head=${method%+mu_centering}
    own=${defaults#* "$head" }
    if [ "$own" = "$defaults" ]; then own=; lams=1e-4; else own=${own%% *}; lams=${LAMS:-$own}; fi
    case $head in weight_decay) lams=$own ;; z_loss | mu_loss) lams+=" ${ALSO:-}" ;; esac
    for lam in $lams; do for seed in $SEEDS; do
      name=$size-$tying-$method
      [ "$own" ] && name+=-lam$(printf %g "$lam")
      printf '%s\0' "$name-lr$(printf %g "$lr")-s$seed" "$size" "$tying" "$method" "$lr" "$lam" "$seed"
    done; done
  done; done; done; done
}

# Sets COMMAND for one run of the plan.
command_of() {
  COMMAND=(python)
  [ "$NPROC" -gt 1 ] && COMMAND=(torchrun --standalone --nproc_per_node="$NPROC")
  COMMAND+=(train.py --method="$4" --lr="$5" --size="$2" --lam="$6" --seed="$7" --steps="$STEPS" --data="$DATA" --out="$OUT/$1")
  [ "$3" = tied ] && COMMAND+=(--weight_tying)
  [ "$GRID" = demo ] && COMMAND+=(--batch_size=8 --block_size=128 --logits_dtype=bfloat16 --device=cpu --threads=1 --eval_every=0)
  return 0
}

# How many runs of the plan are done.
count_finished() {
  local name n=0
  for name in $NAMES; do [ -f "$OUT/$name/result.json" ] && n=$((n + 1)); done
  echo "$n"
}

# One run, its output in $OUT/logs; 255 makes xargs stop where the run was interrupted.
run_one() {
  local log=$OUT/logs/$1.log status try first=$SECONDS
  [ -f "$OUT/$1/result.json" ] && return 0
  command_of "$@"
  # several jobs on several GPUs: each gets its own
  [ "$GPUS" -ge $((NPROC * JOBS)) ] && [ "$JOBS" -gt 1 ] &&
    export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT * NPROC + 1))-$((SLOT * NPROC + NPROC)) <<<"$DEVICES")
  for ((try = 0; try <= RETRIES; try++)); do
    "${COMMAND[@]}" >>"$log" 2>&1 </dev/null
    status=$?
    case $status in 0 | 2 | 3 | 130 | 143) break ;; esac
  done
  local finished=$(count_finished) seconds=$(($(date +%s) - BEGIN)) line
  line="[$finished/$TOTAL, $seconds s"
  [ "$finished" -gt "$ALREADY" ] && line+=", about $((seconds * (TOTAL - finished) / (finished - ALREADY))) s left"
  line+="]"
  case $status in
    0) echo "$line $1: $(tail -n 1 "$log" | cut -d, -f1) ($((SECONDS - first)) s)" ;;
    3) echo "$line $1: another process is at it" ;;
    130 | 143) echo "$line $1: interrupted, the same command goes on from its checkpoint"; touch "$OUT/logs/interrupted"; return 255 ;;
    *) echo "$line $1: FAILED with status $status: $(tail -n 1 "$log" | cut -c1-200)"
       printf '%s\n' "$1" >>"$OUT/logs/failed"; return 1 ;;
  esac
}
export -f command_of count_finished run_one

if [ "$DRY_RUN" != 0 ]; then
  plan | xargs -0 -n 7 bash -c 'command_of "$@"; printf "%q " "${COMMAND[@]}"; echo' sweep
  exit
fi

if [ "$GRID" = demo ] && [ "$DATA" = data/stdlib ]; then
  python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out="$DATA" || exit
fi
export NAMES=$(plan | tr '\0' '\n' | awk 'NR % 7 == 1')
export TOTAL=$(($(wc -w <<<"$NAMES"))) BEGIN=$(date +%s) ALREADY=$(count_finished)
mkdir -p "$OUT/logs" && rm -f "$OUT/logs/failed" "$OUT/logs/interrupted" || exit 1
echo "$TOTAL runs in $OUT, $ALREADY of them done, $JOBS at a time; the output of each is in $OUT/logs"
if [ "$GPUS" -gt 0 ]; then slot=--process-slot-var=SLOT; else slot=; fi
plan | xargs -0 -n 7 -P "$JOBS" $slot bash -c 'run_one "$@"' sweep
[ -f "$OUT/logs/interrupted" ] && { echo "stopped; bash sweep.sh $GRID goes on" >&2; exit 130; }

python analyze.py "$OUT"
status=$?
if [ -s "$OUT/logs/failed" ]; then
  echo "FAILED, see $OUT/logs/<name>.log:" >&2
  cat "$OUT/logs/failed" >&2
  exit 1
fi
exit $status
