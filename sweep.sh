#!/usr/bin/env bash
# A grid of runs: skips what is done, resumes what was stopped, names what failed, then calls analyze.py.
#
#   bash sweep.sh            the paper's grid: 6 methods x 7 learning rates x 5 sizes x 2 tyings
#   bash sweep.sh ablation   its grid of λ: z_loss and mu_loss, untied
#   bash sweep.sh demo       a grid for a CPU without a network: minutes
#   bash sweep.sh shift      what a shifted mean costs under BF16, and why: the demo's model, three seeds
#   bash sweep.sh proxy      the drift until BF16 feels it, on a CPU, three seeds: under an hour on two cores
#
# Environment variables narrow or widen any of them; lists are separated by spaces:
#   METHODS (all: every method; z_loss:1e-1 names a λ) SIZES LRS TYING (untied tied) LAMS SEEDS STEPS SHIFTS
#   NPROC   processes per run (default: the GPUs there are, else 1)
#   JOBS    runs at a time (default 1; of a CPU's grid, its cores)
#   OUT     folder of the runs (default out/<grid>)
#   DATA    folder of the shards
#   LOGITS_DTYPE=float32 leaves out the rounding of the logits to bf16
#   DRY_RUN=1 prints one complete command per line instead of running it
# The same command again resumes and retries. Several sweeps may share one OUT: a run in training is locked.
# `python analyze.py OUT` says what is done, running, waiting and failed.
set -uf  # a * in a variable is no file name
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
export DEVICES=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((gpus - 1)))}
GPUS=$(tr ',' '\n' <<<"$DEVICES" | grep -c .)
MORE= EXTRA= TOKENIZER= OWN_DATA= GRID=${1:-paper}
PAPER='baseline weight_decay z_loss soft_capping mu_loss mu_centering'
case $GRID in
  paper | ablation)
    [ "$GRID" = paper ] || : "${METHODS:=z_loss mu_loss}" "${TYING:=untied}" "${LAMS:=1e-7 1e-4 1e-1 1e2}"
    : "${SIZES:=16M 29M 57M 109M 221M}" "${LRS:=3e-4 1e-3 3e-3 1e-2 3e-2 1e-1 3e-1}" "${STEPS:=100000}"
    : "${TYING:=untied tied}" "${DATA:=data/fineweb}" "${JOBS:=1}" "${NPROC:=$((GPUS > 0 ? GPUS : 1))}" ;;
  demo)
    if [ -z "${METHODS:-}" ]; then  # and what a shifted mean costs, beside the baseline without a shift
      for extra in 'baseline --mu_shift=300' 'baseline --mu_shift=1000' 'mu_centering --mu_shift=1000' \
          'zero_sum --mu_shift=1000' 'centered_head --mu_shift=1000' \
          'baseline --mu_shift=1000 --rounded=none'; do
        EXTRA+="--lr=1e-2 --size=tiny --seed=1 --method=$extra"$'\n'
      done
    fi
    : "${LRS:=1e-2 3e-1}" "${STEPS:=1000}" "${DATA:=data/stdlib}"
    OWN_DATA=data/stdlib TOKENIZER=bytes MORE='--batch_size=8 --block_size=128 --log_every=2' ;;
  shift)
    : "${METHODS:=baseline z_loss mu_centering zero_sum centered_head}" "${SEEDS:=1 2 3}"
    : "${SHIFTS:=0 30 100 300 1000}"
    for shift in $SHIFTS; do for seed in $SEEDS; do
      case $shift in 300 | 1000)  # and for the baseline, which of the roundings it is
        for parts in none operands logits gradient operands,logits operands,gradient logits,gradient; do
          EXTRA+="--method=baseline --lr=1e-2 --size=tiny --seed=$seed --mu_shift=$shift"
          EXTRA+=" --rounded=$parts"$'\n'
        done ;;
      esac
    done; done
    : "${LRS:=1e-2}" "${STEPS:=1000}" "${DATA:=data/stdlib}"
    OWN_DATA=data/stdlib TOKENIZER=bytes MORE='--batch_size=8 --block_size=128' ;;
  proxy)  # few tokens per step, each of them rare, and a narrow model: what makes the drift fast
    : "${METHODS:=baseline z_loss mu_loss mu_centering}" "${LRS:=1e-2 3e-2 1e-1 3e-1}" "${STEPS:=32000}"
    : "${SEEDS:=1 2 3}" "${DATA:=data/stdlib_bpe}"
    OWN_DATA=data/stdlib_bpe TOKENIZER='bpe --val_tokens=1e6'
    MORE='--n_layer=1 --n_embd=8 --n_head=1 --batch_size=4 --block_size=16 --compile --log_every=50' ;;
  *) refuse "no grid '$GRID'; should be paper, ablation, demo, shift or proxy" ;;
esac
[ $# -le 1 ] || refuse "one grid at a time, not '$*'"
if [ "$TOKENIZER" ]; then  # a grid for a CPU
  MORE+=' --device=cpu --threads=1 --eval_every=0'
  : "${SIZES:=tiny}" "${LOGITS_DTYPE:=bfloat16}" "${JOBS:=$(getconf _NPROCESSORS_ONLN)}" "${NPROC:=1}"
  export OMP_NUM_THREADS=1
fi
: "${METHODS:=$PAPER}" "${TYING:=untied}" "${LAMS:=}" "${SEEDS:=1}" "${SHIFTS:=0}" "${OUT:=out/$GRID}"
: "${LOGITS_DTYPE:=}"
case $OUT in -*) OUT=./$OUT ;; esac
for name in NPROC JOBS; do
  [[ ${!name} =~ ^[1-9][0-9]{0,3}$ ]] || refuse "$name should be a whole number from 1, is '${!name}'"
done
MORE+="${LOGITS_DTYPE:+ --logits_dtype=$LOGITS_DTYPE} --steps=$STEPS"
export METHODS SIZES LRS TYING LAMS SEEDS SHIFTS EXTRA STEPS NPROC JOBS OUT DATA MORE GPUS

# The plan: per run a line with its name and its flags, from Python, which knows methods, flags and names.
plan=$(python - <<'PLAN'
import itertools, os
from common import UserError, parse_args, run
from model import METHODS, base_method
from train import parser, run_name

def main(_):
    names = 'SIZES', 'TYING', 'LRS', 'METHODS', 'SHIFTS', 'SEEDS'
    lists = {name: os.environ[name].split() for name in names}
    for name, values in lists.items():
        if not values:
            raise UserError(f'{name} is empty')
    if not set(lists['TYING']) <= {'untied', 'tied'}:
        raise UserError(f'TYING should have untied, tied or both, is {os.environ["TYING"]!r}')
    lists['METHODS'] = list(METHODS) if lists['METHODS'] == ['all'] else lists['METHODS']
    plan = []
    for size, tying, lr, method, shift, seed in itertools.product(*lists.values()):
        method, _, lam = method.partition(':')
        lams = os.environ['LAMS'].split() if METHODS.get(base_method(method)) and not lam else []
        for lam in lams or [lam]:
            flags = [f'--method={method}', f'--lr={lr}', f'--size={size}', f'--seed={seed}']
            flags += [f'--lam={lam}'] if lam else []
            flags += [f'--mu_shift={shift}'] if shift != '0' else []
            plan.append(flags + (['--weight_tying'] if tying == 'tied' else []))
    plan += [line.split() for line in os.environ['EXTRA'].splitlines()]
    named = {run_name(parse_args(parser(), flags + os.environ['MORE'].split())): flags for flags in plan}
    for name, flags in named.items():
        print(name, *flags)

run(main)
PLAN
) || exit
[ -d "$DATA" ] || [ "$DATA" = "$OWN_DATA" ] || [ "${DRY_RUN:-0}" != 0 ] ||
  refuse "DATA=$DATA: no such folder; make it with prepare_fineweb.py --out"
export NAMES=$(cut -d' ' -f1 <<<"$plan")

# Sets COMMAND for a line of the plan.
command_of() {
  local name=${1%% *} flags=${1#* }
  COMMAND=(python)
  [ "$NPROC" -gt 1 ] && COMMAND=(torchrun --standalone --nproc_per_node="$NPROC")
  COMMAND+=(train.py $flags $MORE --data="$DATA" --out="$OUT/$name")
}

count_done() {
  local name n=0
  for name in $NAMES; do [ -f "$OUT/$name/result.json" ] && n=$((n + 1)); done
  echo "$n"
}

# Runs a line of the plan, with its output in $OUT/logs. 255 makes xargs stop: the sweep was told to.
run_one() {
  local name=${1%% *} told= status n seconds progress
  [ -f "$OUT/$name/result.json" ] && return 0
  trap 'told=1' TERM INT  # the run was told as well: it saves and says so
  command_of "$1"
  rm -f "$OUT/logs/$name.failed"
  if [ "$GPUS" -ge $((NPROC * JOBS)) ] && [ "$JOBS" -gt 1 ]; then  # each job has its own GPUs
    export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT * NPROC + 1))-$((SLOT * NPROC + NPROC)) <<<"$DEVICES")
  fi
  "${COMMAND[@]}" >>"$OUT/logs/$name.log" 2>&1 </dev/null
  status=$?
  [ "$told" ] && [ $status != 0 ] && status=143  # torchrun ends with 1 however its processes ended
  n=$(count_done) seconds=$(($(date +%s) - BEGIN)) progress=
  [ "$n" -gt "$ALREADY" ] && progress=", about $((seconds * (TOTAL - n) / (n - ALREADY))) s left"
  progress="[$n/$TOTAL$progress] $name:"
  case $status in
    0) echo "$progress $(tail -n 1 "$OUT/logs/$name.log" | cut -d, -f1)" ;;
    3) echo "$progress another process is at work on it" ;;
    130 | 143) echo "$progress stopped, the same command resumes it"; touch "$STOPPED"; return 255 ;;
    *) echo "$progress FAILED with status $status: $(tail -n 1 "$OUT/logs/$name.log" | cut -c1-200)"
       touch "$OUT/logs/$name.failed" ;;
  esac
}
export -f command_of count_done run_one

if [ "${DRY_RUN:-0}" != 0 ]; then
  while read -r line; do command_of "$line"; printf '%q ' "${COMMAND[@]}"; echo; done <<<"$plan"
  exit
fi
if [ "$DATA" = "$OWN_DATA" ]; then
  python prepare_fineweb.py --source=stdlib --tokenizer=$TOKENIZER --out="$DATA" || exit
fi
mkdir -p "$OUT/logs" || exit 1
export TOTAL=$(wc -l <<<"$plan") ALREADY=$(count_done) BEGIN=$(date +%s) STOPPED=$OUT/logs/stopped.$$
touch "$OUT/logs/plan"
names=$(sort -u "$OUT/logs/plan" - <<<"$NAMES") && printf '%s\n' "$names" >"$OUT/logs/plan.$$" &&
  mv "$OUT/logs/plan.$$" "$OUT/logs/plan" || exit 1
echo "$((TOTAL)) runs in $OUT, $ALREADY of them done, $JOBS at a time; the output of each is in $OUT/logs"

# The runs are a process group of their own, so that a signal to this script reaches and saves them all.
trap '' USR1
set -m
slot=$([ "$GPUS" -eq 0 ] || echo --process-slot-var=SLOT)  # which xargs has on Linux only
printf '%s' "$plan" | tr '\n' '\0' | xargs -0 -n 1 -P "$JOBS" $slot bash -f -c 'run_one "$1"' sweep &
set +m
runs=$(jobs -p) xargs=$! stopped=0
trap 'kill -USR1 -- -"$runs"' USR1
trap 'stopped=130; kill -INT -- -"$runs"' INT
trap 'stopped=143; kill -TERM -- -"$runs"' TERM HUP
while wait "$xargs"; [ $? -gt 128 ] && kill -0 -- -"$runs" 2>/dev/null; do :; done
for ((i = 0; stopped > 0 && i < 300; i++)); do  # until they have saved
  kill -0 -- -"$runs" 2>/dev/null || break
  sleep 0.2
done
trap - INT TERM HUP
if [ -f "$STOPPED" ] || [ "$stopped" -gt 0 ]; then
  rm -f "$STOPPED"
  echo "stopped; bash sweep.sh $GRID resumes" >&2
  exit $((stopped > 0 ? stopped : 130))
fi

python analyze.py "$OUT" --theory
status=$?
failed=$(for name in $NAMES; do [ -f "$OUT/logs/$name.failed" ] && echo "$name"; done)
if [ "$failed" ]; then
  printf '%s\n' "FAILED, see $OUT/logs/<name>.log; the same command tries again:" "$failed" >&2
  exit 1
fi
exit $status
