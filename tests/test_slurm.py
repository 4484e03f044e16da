"""tools/slurm.sh, with a stand-in for scontrol and srun; then on a real Slurm, where there is one."""
import os
import re
import shutil
import subprocess
import time

import pytest

from conftest import ENV, ROOT
from small_runs import SMALL, assert_same, load, log_of


# -------- one task
@pytest.fixture
def task(tmp_path):
    """task(line, list, **variables) runs slurm.sh -> its exit status, and all that was called of Slurm."""
    scripts = {
        'scontrol': 'case $1 in show) echo node1; echo node2;; *) echo "$@" $(cat saved) >>calls;; esac',
        'srun': 'echo "$@" >>calls',
        'run': '''trap "sleep 0.3; echo saved >saved; exit $2" TERM
            # again and again, as slurm.sh does not know its run at once
            for i in $(seq 300); do kill -$1 $PPID; sleep 0.1; done'''}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{script}\n')
        (tmp_path / name).chmod(0o755)

    (tmp_path / 'calls').touch()

    def call(line, runs, **variables):
        (tmp_path / 'runs.txt').write_text(runs)
        env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_ARRAY_JOB_ID': '9',
               'SLURM_ARRAY_TASK_ID': line, **variables}
        done = subprocess.run(['bash', f'{ROOT}/tools/slurm.sh', 'runs.txt'], env=env, cwd=tmp_path,
                              timeout=60)
        return done.returncode, (tmp_path / 'calls').read_text()
    return call


@pytest.mark.parametrize('line', ['', '2'])
def test_without_a_line(task, line, tmp_path):
    """Neither a job without --array nor one that is longer than its list may seem done."""
    status, _ = task(line, 'touch ran\n')
    assert status != 0 and not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('run, requeued', [
    ('run USR1 143', 'requeue 9_1 saved\n'), ('run USR1 0', ''), ('run TERM 143', '')])
def test_signals(task, run, requeued):
    """The run saves and ends; then, at its time limit, the task requeues itself, if the run is not done."""
    status = int(run.split()[-1])
    assert task('1', f'{run}\n') == (status, requeued)


def test_several_nodes(task):
    """Each task has a port of its own. A list of one-process runs would train each of them twice."""
    runs = 'torchrun --standalone --nproc_per_node=4 train.py --lr=1\npython train.py\n'
    variables = {'SLURM_NTASKS': '2', 'SLURM_CPUS_PER_TASK': '8'}
    task('1', runs, SLURM_JOB_ID='9', **variables)
    status, calls = task('1', runs, SLURM_JOB_ID='20010', **variables)
    assert status == 0
    assert re.findall(r'--nnodes=2 .*--rdzv_endpoint=node1:(\d+) .*=4 train.py --lr=1', calls) == [
        '10009', '10010']
    assert task('2', runs, SLURM_JOB_ID='11', **variables) == (2, calls)


# -------- a real Slurm
def call(*command):
    done = subprocess.run(command, cwd=ROOT, env=ENV, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done
    return done.stdout.strip()


def wait_until(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, call('squeue')
        time.sleep(0.5)


def starts(log):
    """The steps from which the run of a task's log was started."""
    return [int(step) for step in re.findall(r'from step (\d+)', log.read_text())]


def test_array(corpus, tmp_path):
    """
    Runs on two nodes, which are one here. The first task of two gets the signal that comes before the time
    limit: its ranks save, it requeues itself and no other task, goes on, and ends as the second one.
    """
    if not shutil.which('sbatch') or subprocess.run(['scontrol', 'ping']).returncode != 0:
        pytest.skip('no controller of Slurm answers')
    run = ' '.join(['torchrun --standalone --nproc_per_node=1 train.py', *SMALL, '--steps=3000',
                    '--log_every=100', '--ckpt_every=0', '--eval_every=0', f'--data={corpus}'])
    a, b = tmp_path / 'a', tmp_path / 'b'
    (tmp_path / 'runs.txt').write_text(f'{run} --out={a}\n{run} --out={b}\n')
    job = call('sbatch', '--parsable', '--gpus-per-node=0', '--cpus-per-task=1', '--time=10', '--ntasks=2',
               '--array=1-2', f'--output={tmp_path}/%a.log', 'tools/slurm.sh', f'{tmp_path}/runs.txt')

    log = a / 'log.jsonl'
    wait_until(lambda: log.exists() and '"step": 300,' in log.read_text())
    call('scancel', '--signal=USR1', '--batch', f'{job}_1')
    wait_until(lambda: 'JobState=PENDING' in call('scontrol', 'show', 'job', f'{job}_1'))
    # soon, not after two minutes; within a second Slurm would end it with "Job credential revoked"
    call('scontrol', 'update', f'JobId={job}_1', 'StartTime=now+5')
    wait_until(lambda: (a / 'result.json').exists() and (b / 'result.json').exists())

    first, second = starts(tmp_path / '1.log')
    assert first == 0 and second >= 300
    assert starts(tmp_path / '2.log') == [0]
    assert log_of(a) == log_of(b)
    assert_same(load(a)['model'], load(b)['model'])
