#!/usr/bin/env bash
# One task of a Slurm job array: the run in line SLURM_ARRAY_TASK_ID of a list. Edit it.
#
#     DRY_RUN=1 NPROC=4 FLAGS=--device=cuda bash sweep.sh >runs.txt  # a run needs its GPUs
#     sbatch --array=1-420%8 tools/slurm.sh runs.txt  # 8 runs at a time
#     sbatch --gpus=1 --dependency=afterany:JOB --wrap='python analyze.py out/paper'
#
# A task that is requeued, or submitted again, goes on from its last checkpoint.
#SBATCH --gpus-per-node=4         # NPROC of the list
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue                 # where nodes fail or jobs are preempted
#SBATCH --signal=B:USR1@300       # to this script, five minutes before the time limit
#SBATCH --output=slurm-%A_%a.log  # a log for each line of the list,
#SBATCH --open-mode=append        # which goes on when the task is requeued

command=$(sed -n "${SLURM_ARRAY_TASK_ID:?is not set: submit with --array=1-N}p" "$1")
: "${command:?: $1 has no line $SLURM_ARRAY_TASK_ID}"

# the run saves its step and ends on TERM: before the time limit, by scancel, at a preemption
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300  # seconds to save in; before PyTorch 2.12 it is 30
trap 'kill $run' TERM
trap 'kill $run; requeue=yes' USR1
eval "$command &"  # with & inside eval, $! is the run itself and not a shell around it
run=$!
while kill -0 $run 2>/dev/null; do
  wait $run  # until it ends, or until a signal
done
wait $run  # which has ended
status=$?

if [ "$requeue" ] && [ $status != 0 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $status
