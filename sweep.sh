#!/usr/bin/env bash
# A grid of runs: skips what is done, resumes what is half done, names what failed, then calls analyze.py.
#
#   bash sweep.sh                 the paper's grid: 6 methods x 7 learning rates x 5 sizes x 2 tyings
#   bash sweep.sh ablation        its λ grid: z_loss and mu_loss, untied
#   bash sweep.sh demo            a grid for a CPU: prepares its data, minutes
#   bash sweep.sh proxy           the drift until bf16 feels it, on a CPU, three seeds: prepares its data, under an hour on two cores
#   bash sweep.sh status          what is done, running, waiting and failed of the sweeps in out/ (or of the one in OUT), and the time left
#
# Narrow or widen any of them by environment variables, lists separated by spaces:
#   METHODS (default: the paper's six; all: those that it cites too; each also with +mu_centering)
#   SIZES LRS TYING (untied tied) LAMS (default: each method's own) SEEDS STEPS
#   NPROC   processes of a run (default: the GPUs there are, else 1)     JOBS     runs at a time (default 1; demo, proxy: the cores)
#   OUT     folder of the runs (default out/<grid>)                      DATA     folder of the shards
#   RETRIES tries again of a failed run (default 1)                      DRY_RUN=1  print one complete command a line, for this folder; run nothing
#   LOGITS_DTYPE=float32  without the rounding of the logits to bf16 (default: as --dtype; demo, proxy: bfloat16); give it its own OUT
#   WATCH=1 refresh the report, results/<sweep>/report.html, after each finished run (it is always written at the end)
# Several sweeps may work on one OUT, from one machine or many: a run's folder is locked while it runs, and the others take the next.
set -uf  # a * in a variable is no file name
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
export LC_ALL=C
cores() { env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu; }  # nproc takes OMP_NUM_THREADS for them
refuse() { printf 'error: %s\n' "${1//$'\n'/ }" >&2; exit 2; }
[ $# -le 1 ] || refuse "one grid at a time, not '$*'"

# One line a run of the plan in $1/logs: its state, name, seconds so far, step, steps.
states() {
  local name state log steps
  while read -r name; do
    log=$(grep -s '"elapsed"' "$1/$name/log.jsonl" | tail -n 1)
    steps=$(sed -n 's/^  "steps": \([0-9]*\).*/\1/p' "$1/$name/config.json" 2>/dev/null)
    if [ -f "$1/$name/result.json" ]; then state=done
    elif [ -f "$1/$name/.lock" ] && ! python -c 'import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB); fcntl.flock(f, fcntl.LOCK_UN)' "$1/$name/.lock" 2>/dev/null
    then state=running
    elif [ -f "$1/logs/$name.failed" ]; then state=failed
    else state=waiting; fi
    printf '%s %s %d %d %d\n' $state "$name" "$(sed 's/.*"elapsed": \([0-9]*\).*/\1/' <<<"$log")" "$(sed 's/.*"step": \([0-9]*\).*/\1/' <<<"$log")" "${steps:-0}"
  done <"$1/logs/plan"
}

if [ "${1-}" = status ]; then
  [ -z "${OUT-}" ] || [ -f "$OUT/logs/plan" ] || refuse "OUT=$OUT: no sweep has worked there"
  set +f
  for plan in "${OUT:-out/"*"}"/logs/plan; do
    out=${plan%/logs/plan}
    [ -f "$plan" ] || refuse "no sweep has worked in out/; another folder is named by OUT"
    printf '%s: ' "$out"
    states "$out" | awk '  # time left: what the runs of a size take, so far, times what they still have to do
      { size = $2; sub(/-.*/, "", size); part = $1 == "done" ? 1 : $5 ? $4 / $5 : 0; n[$1]++; seconds[size] += $3; parts[size] += part }
      $1 == "running" || $1 == "waiting" { need[size] += 1 - part }
      $1 == "running" { lines = lines "  running " $2 ", step " $4 " of " $5 "\n" }
      $1 == "failed" { lines = lines "  failed " $2 "\n" }
      END {
        for (size in need) if (parts[size]) left += need[size] * seconds[size] / parts[size]; else if (need[size]) unknown = 1
        printf "%d runs, %d done, %d running, %d waiting, %d failed, ", NR, n["done"], n["running"], n["waiting"], n["failed"]
        if (unknown) print "time left not known yet"; else printf "about %d s left\n", left / (n["running"] ? n["running"] : 1)
        printf "%s", lines
      }'
  done
  exit
fi

export GRID=${1:-paper}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
export DEVICES=${CUDA_VISIBLE_DEVICES-$([ "$gpus" -gt 0 ] && seq -s, 0 $((gpus - 1)))}
export GPUS=$(tr ',' '\n' <<<"$DEVICES" | grep -c .)
ALSO= OWN_DATA= TOKENIZER=
case $GRID in
  paper)
    : "${METHODS:=baseline weight_decay z_loss soft_capping mu_loss mu_centering}" "${SIZES:=16M 29M 57M 109M 221M}"
    : "${LRS:=3e-4 1e-3 3e-3 1e-2 3e-2 1e-1 3e-1}" "${TYING:=untied tied}" "${STEPS:=100000}" "${DATA:=data/fineweb}" ;;
  ablation)
    : "${METHODS:=z_loss mu_loss}" "${SIZES:=16M 29M 57M 109M 221M}"
    : "${LRS:=3e-4 1e-3 3e-3 1e-2 3e-2 1e-1 3e-1}" "${TYING:=untied}" "${LAMS:=1e-7 1e-4 1e-1 1e2}" "${STEPS:=100000}" "${DATA:=data/fineweb}" ;;
  demo)
    : "${METHODS:=baseline weight_decay z_loss soft_capping mu_loss mu_centering}"
    [ "${LAMS:-}" ] || ALSO=1e-1  # of z_loss and mu_loss, beside the default
    : "${SIZES:=tiny}" "${LRS:=1e-2 1e-1 3e-1}" "${TYING:=untied}" "${STEPS:=1000}" "${DATA:=data/stdlib}" "${NPROC:=1}"
    : "${JOBS:=$(cores)}"
    : "${LOGITS_DTYPE:=bfloat16}"
    OWN_DATA=data/stdlib TOKENIZER=bytes
    export OMP_NUM_THREADS=1 ;;
  proxy)  # few tokens a step, each rare, and a narrow model: what makes the drift fast (README, What we measured)
    : "${METHODS:=baseline z_loss mu_loss mu_centering}" "${SIZES:=tiny}" "${LRS:=1e-2 3e-2 1e-1 3e-1}" "${SEEDS:=1 2 3}"
    : "${TYING:=untied}" "${STEPS:=32000}" "${DATA:=data/stdlib_bpe}" "${NPROC:=1}" "${JOBS:=$(cores)}"
    : "${LOGITS_DTYPE:=bfloat16}"
    OWN_DATA=data/stdlib_bpe TOKENIZER='bpe --val_tokens=1e6'
    export OMP_NUM_THREADS=1 ;;
  *) refuse "no grid '$GRID'; should be paper, ablation, demo, proxy or status" ;;
esac
: "${SEEDS:=1}" "${NPROC:=$((GPUS > 0 ? GPUS : 1))}" "${JOBS:=1}" "${OUT:=out/$GRID}" "${RETRIES:=1}" "${DRY_RUN:=0}" "${WATCH:=0}"
for name in NPROC JOBS STEPS RETRIES; do
  case ${!name} in *[!0-9]* | '' | 0?* | ??????????*) refuse "$name should be a whole number, is '${!name}'" ;; esac
done
for name in NPROC JOBS STEPS; do
  [ "${!name}" -gt 0 ] || refuse "$name should be at least 1"
done
# a list's name, what its entries should be, the pattern that says so
each_should() {
  local x
  [[ ${!1} == *[![:space:]]* ]] || refuse "$1 is empty; should be $2"
  for x in ${!1}; do [[ $x =~ ^($3)$ ]] || refuse "$1 has '$x'; should be $2"; done
}
one_of() { each_should "$1" "some of $(xargs <<<"$2")" "$(xargs <<<"$2" | tr ' ' '|')"; }
all=$(awk '/^METHODS = /{on = 1} on{print} on && /\)/{exit}' model.py | sed 's/METHODS = //' | tr -d "(),'" | xargs)
[ "$METHODS" != all ] || METHODS=$all
each_should METHODS "some of $all, each also with +mu_centering" "(${all// /|})([+]mu_centering)?"
one_of SIZES "$(sed -n "s/^    '\(.*\)': dict(n_layer.*/\1/p" model.py)"
one_of TYING 'untied tied'
each_should LRS 'numbers above 0, such as 1e-1' '[0-9]*[1-9][0-9]*[.]?[0-9]*([eE][-+]?[0-9]+)?|[0-9]*[.][0-9]*[1-9][0-9]*([eE][-+]?[0-9]+)?'
[ -z "${LAMS-}" ] || each_should LAMS 'numbers, such as 1e-4' '([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?'
[ -z "${LOGITS_DTYPE:=}" ] || one_of LOGITS_DTYPE 'bfloat16 float32'
each_should SEEDS 'whole numbers' '0|[1-9][0-9]{0,9}'
case $OUT in -*) OUT=./$OUT ;; esac
[ -d "$DATA" ] || [ "$DRY_RUN" != 0 ] || [ "$DATA" = "$OWN_DATA" ] || refuse "DATA=$DATA: no such folder; make it with prepare_fineweb.py --out"
export LOGITS_DTYPE STEPS DATA OUT NPROC JOBS RETRIES

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
  [ "$LOGITS_DTYPE" ] && COMMAND+=(--logits_dtype="$LOGITS_DTYPE")
  [ "$GRID" = demo ] && COMMAND+=(--batch_size=8 --block_size=128 --device=cpu --threads=1 --eval_every=0)
  [ "$GRID" = proxy ] && COMMAND+=(--n_layer=1 --n_embd=8 --n_head=1 --batch_size=4 --block_size=16
                                   --device=cpu --threads=1 --compile --eval_every=0 --log_every=200)
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
  local log=$OUT/logs/$1.log status try told= first=$SECONDS
  trap 'told=1' TERM INT  # the run has been told as well: it saves and says so
  [ -f "$OUT/$1/result.json" ] && return 0
  rm -f "$OUT/logs/$1.failed"
  command_of "$@"
  # several jobs on several GPUs: each gets its own
  [ "$GPUS" -ge $((NPROC * JOBS)) ] && [ "$JOBS" -gt 1 ] &&
    export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT * NPROC + 1))-$((SLOT * NPROC + NPROC)) <<<"$DEVICES")
  for ((try = 0; try <= RETRIES; try++)); do
    "${COMMAND[@]}" >>"$log" 2>&1 </dev/null
    status=$?
    if [ "$told" ] && [ $status != 0 ]; then status=143; fi  # torchrun ends with 1, whatever its processes said
    case $status in 0 | 2 | 3 | 130 | 143) break ;; esac
  done
  local finished=$(count_finished) seconds=$(($(date +%s) - BEGIN)) line
  line="[$finished/$TOTAL, $seconds s"
  [ "$finished" -gt "$ALREADY" ] && line+=", about $((seconds * (TOTAL - finished) / (finished - ALREADY))) s left"
  line+="]"
  case $status in
    0) echo "$line $1: $(tail -n 1 "$log" | cut -d, -f1) ($((SECONDS - first)) s)" ;;
    3) echo "$line $1: another process is at it" ;;
    130 | 143) echo "$line $1: interrupted, the same command goes on from its checkpoint"; touch "$INTERRUPTED"; return 255 ;;
    *) echo "$line $1: FAILED with status $status: $(tail -n 1 "$log" | cut -c1-200)"
       touch "$OUT/logs/$1.failed"; return 1 ;;
  esac
}
export -f command_of count_finished run_one

if [ "$DRY_RUN" != 0 ]; then
  plan | xargs -0 -n 7 bash -c 'command_of "$@"; printf "%q " "${COMMAND[@]}"; echo' sweep
  exit
fi

if [ "$DATA" = "$OWN_DATA" ]; then
  python prepare_fineweb.py --source=stdlib --tokenizer=$TOKENIZER --out="$DATA" || exit
fi
export NAMES=$(plan | tr '\0' '\n' | awk 'NR % 7 == 1')
export TOTAL=$(($(wc -w <<<"$NAMES"))) BEGIN=$(date +%s) ALREADY=$(count_finished)
export INTERRUPTED=$OUT/logs/interrupted.$$
mkdir -p "$OUT/logs" && rm -f "$INTERRUPTED" && touch "$OUT/logs/plan" || exit 1
plan_now=$(sort -u "$OUT/logs/plan" - <<<"$NAMES") && printf '%s\n' "$plan_now" >"$OUT/logs/plan.$$" && mv "$OUT/logs/plan.$$" "$OUT/logs/plan" || exit 1
echo "$TOTAL runs in $OUT, $ALREADY of them done, $JOBS at a time; the output of each is in $OUT/logs"
if [ "$GPUS" -gt 0 ]; then slot=--process-slot-var=SLOT; else slot=; fi
watching=$OUT/logs/watching.$$

# Analyzes again whenever more runs are done, until $watching goes or this script ends.
watch() {
  local seen=$ALREADY now
  while [ -f "$watching" ] && kill -0 $$ 2>/dev/null; do
    now=$(count_finished)
    [ "$now" -gt "$seen" ] && python analyze.py "$OUT" >"$OUT/logs/analyze.log" 2>&1 </dev/null
    seen=$now
    sleep 1
  done
}

# a process group of their own, so that a signal to this script stops and saves all runs; SIGUSR1 has them save alone
trap '' USR1
set -m
plan | xargs -0 -n 7 -P "$JOBS" $slot bash -c 'run_one "$@"' sweep &
set +m
runs=$(jobs -p) xargs=$! stopped=0
if [ "$WATCH" != 0 ]; then touch "$watching"; watch & fi
trap 'kill -USR1 -- -"$runs"' USR1
trap 'stopped=130; kill -INT -- -"$runs"' INT
trap 'stopped=143; kill -TERM -- -"$runs"' TERM HUP
while wait "$xargs"; [ $? -gt 128 ] && kill -0 -- -"$runs" 2>/dev/null; do :; done
for ((i = 0; stopped > 0 && i < 300; i++)); do kill -0 -- -"$runs" 2>/dev/null || break; sleep 0.2; done  # until they have saved
trap - INT TERM HUP
rm -f "$watching"
if [ -f "$INTERRUPTED" ] || [ "$stopped" -gt 0 ]; then
  rm -f "$INTERRUPTED"
  echo "stopped; bash sweep.sh $GRID goes on" >&2
  exit $((stopped > 0 ? stopped : 130))
fi

wait  # a refresh that is at work holds the folder of the results
python analyze.py "$OUT" --theory
status=$?
failed=$(for name in $NAMES; do [ -f "$OUT/logs/$name.failed" ] && printf '%s\n' "$name"; done)
if [ -n "$failed" ]; then
  printf '%s\n' "FAILED, see $OUT/logs/<name>.log:" "$failed" >&2
  exit 1
fi
[ "$(count_finished)" = "$TOTAL" ] || echo "$((TOTAL - $(count_finished))) runs are not done: another process has them; the same command takes up what it leaves"
exit $status
