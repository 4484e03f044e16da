#!/usr/bin/env bash
# One task of a Slurm job array: trains the run in line SLURM_ARRAY_TASK_ID of a list. Edit it.
#
#     DRY_RUN=1 NPROC=4 bash sweep.sh >runs.txt
#     python -m tools.runner --check <runs.txt        # refuses now what the tasks would refuse
#     sbatch --array=1-420%8 tools/slurm.sh runs.txt  # 8 runs at a time
#     sbatch --dependency=afterany:JOB --wrap='python analyze.py out/paper'
#
# A task that is requeued, or submitted again, goes on from its last checkpoint, if it is not done.
#SBATCH --gpus-per-node=4         # NPROC of the list
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue                 # where nodes fail or jobs are preempted
#SBATCH --signal=B:USR1@300       # to this script, five minutes before the time limit
#SBATCH --output=slurm-%A_%a.log  # a log for each line of the list,
#SBATCH --open-mode=append        # which goes on when the task is requeued

line=${SLURM_ARRAY_TASK_ID:?is not set: submit with --array=1-N}
task="${SLURM_ARRAY_JOB_ID}_$line"
command=$(sed -n "${line}p" "$1") || exit  # if there is no such list
if [ -z "$command" ]; then
  echo "error: $1 has no line $line" >&2
  exit 2
fi
echo "$(date), $(hostname): $command"

# With --nodes=2 --ntasks-per-node=1 each run spans two nodes, with one torchrun on each
if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then
  if [[ $command != *--standalone* ]]; then
    echo "error: line $line is no torchrun --standalone, which several nodes need" >&2
    exit 2
  fi
  endpoint=$(scontrol show hostnames | head -n 1):$((10000 + SLURM_JOB_ID % 20000))
  nodes="--nnodes=$SLURM_NTASKS --rdzv_backend=c10d --rdzv_endpoint=$endpoint --rdzv_id=$task"
  command="srun --cpus-per-task=$SLURM_CPUS_PER_TASK ${command/--standalone/$nodes}"
fi

end_run() {  # a run that gets SIGTERM saves a checkpoint of its step and ends
  if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then
    scancel --signal=TERM "$task"  # in all nodes; a signal to srun would kill what it has started
  else
    kill -TERM $run 2>/dev/null
  fi
}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # else torchrun kills a run 30 s after a signal
requeue=no
trap end_run TERM  # from scancel, or as the job is preempted
trap 'requeue=yes; end_run' USR1

eval "$command &"  # with & inside eval, $! is the run itself and not a shell around it
run=$!
wait $run
status=$?
while kill -0 $run 2>/dev/null; do  # a signal has ended `wait`, but not yet the run
  wait $run
  status=$?
done

if [ $requeue = yes ] && [ $status != 0 ]; then
  scontrol requeue "$task"  # not SLURM_JOB_ID: one task of the array has the id of the whole array
fi
exit $status
