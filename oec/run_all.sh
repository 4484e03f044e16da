# The second half of sweep.sh: `$program train.py FLAGS` for each line of $plan, $JOBS at a time, and then
# analyze.py. Of each run $OUT/logs has NAME.log, what it printed, and NAME.done, the flags with which it
# ended, or NAME.failed, its last words; `plan` names all that were ever planned here, for analyze.py.
logs=$OUT/logs
{ mkdir -p "$logs" && touch "$logs/plan"; } 2>/dev/null || refuse "OUT=$OUT: cannot be made or written"
sed 's|.*/||' <<<"$plan" | grep -vxFf "$logs/plan" >>"$logs/plan"
todo=$(while read -r flags; do
  name=${flags##*/}
  rm -f "$logs/$name.failed"
  # What is done is skipped if it had these very flags; otherwise train.py says whether it had these settings.
  [ -f "$OUT/$name/result.json" ] && grep -qsxFe "$flags" "$logs/$name.done" || echo "$flags"
done <<<"$plan" | cat -n)
total=$(grep -c . <<<"$todo") began=$(date +%s)
echo "$total of $(wc -l <<<"$plan") runs to do in $OUT, $JOBS at a time; what each prints is in $logs"

run() {  # a line of todo: number, flags
  read -r i flags <<<"$1"
  name=${flags##*/} log=$logs/${flags##*/}.log
  [ -z "${SLOT:-}" ] ||  # each job has its own GPUs
    export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT * NPROC + 1))-$((SLOT * NPROC + NPROC)) <<<"$devices")
  [ ! -f "$OUT/$name/result.json" ] || program=python  # it is done; torchrun would take longer to say so
  bytes=$(cat "$log" 2>/dev/null | wc -c)
  $program train.py $flags >>"$log" 2>&1 </dev/null
  status=$?
  # torchrun ends with 1 whatever its processes ended with, and in many lines of its own
  said=$(tail -c +$((bytes + 1)) "$log" | grep -E '^(error|stopped|done)| is done$' | tail -n 1)
  case "$status $said" in
    0\ *) echo "$flags" >"$logs/$name.done" ;;
    3\ * | 130\ * | 143\ * | *'stopped by a signal'* | *'another process'*) ;;  # not failed
    *) echo "$OUT/$name: ${said:-see $log}" >"$logs/$name.failed" ;;
  esac
  minutes=$((($(date +%s) - began) * (total - i) / i / 60))  # below 0 once the clock was set back
  echo "[$i/$total, about ${minutes/#-*/0} min left] $name: status $status, ${said:-see $log}"
}
export -f run
export OUT NPROC program total began devices logs

# The runs and the analysis are a process group of their own, to which the signals to this script go.
slots=$([ "$JOBS" -gt 1 ] && [ "$gpus" -ge $((JOBS * NPROC)) ] && echo --process-slot-var=SLOT)
set -m
{
  printf %s "$todo" | tr '\n' '\0' | xargs -0 -r -n 1 -P "$JOBS" $slots bash -fc 'run "$1"' sweep
  exec python analyze.py "$OUT"
} &
group=$! stopped=
set +m
trap 'stopped=130; kill -TERM -- -"$group"' INT
trap 'stopped=143; kill -TERM -- -"$group"' TERM HUP
while kill -0 -- -"$group" 2>/dev/null; do wait "$group" 2>/dev/null; status=$?; sleep 0.2; done
[ -z "$stopped" ] || { echo 'stopped; the same command resumes' >&2; exit "$stopped"; }
failed=$(grep -rh --include='*.failed' . "$logs") || exit $status
printf 'failed; the same command tries again, from the start if you remove the folder:\n%s\n' "$failed" >&2
exit 1
