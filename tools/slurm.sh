#!/usr/bin/env bash
# One task of a Slurm job array: trains the run in line SLURM_ARRAY_TASK_ID of a list. Edit it for your cluster.
#
#     DRY_RUN=1 NPROC=4 bash sweep.sh >runs.txt
#     python -m tools.runner --check <runs.txt        # refuses now what the jobs would refuse
#     sbatch --array=1-420%8 tools/slurm.sh runs.txt  # 8 runs at a time
#     sbatch --dependency=afterany:ID --wrap='python analyze.py out/paper'
#
# A task that is requeued or submitted again goes on from its last checkpoint, and one whose run is done ends.
#SBATCH --gpus=4                  # NPROC of the list
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue                 # where nodes fail or jobs are preempted
#SBATCH --signal=B:USR1@300       # to this script, five minutes before its time is up
#SBATCH --output=slurm-%A_%a.log  # one for each line of the list
#SBATCH --open-mode=append        # also when it is requeued

command=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
echo "$(hostname), $(date): $command"
if [ -z "$command" ] || [ "${command:0:1}" = '#' ]; then
  exit
fi

requeue=no
trap 'kill -TERM $run 2>/dev/null' TERM  # from scancel, or as the job is preempted: the run saves and ends
trap 'kill -TERM $run 2>/dev/null; requeue=yes' USR1

eval "$command &"
run=$!
wait $run
status=$?
while kill -0 $run 2>/dev/null; do  # a signal has ended `wait`, but not yet the run
  wait $run
  status=$?
done

if [ $requeue = yes ] && [ $status != 0 ]; then
  # not SLURM_JOB_ID, which is that of the whole array in one of its tasks
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $status
