"""tools/slurm.sh, with a stand-in for Slurm's scontrol."""
import os
import subprocess

import pytest

from conftest import ROOT


@pytest.fixture
def task(tmp_path):
    """task(line, list) runs slurm.sh -> its exit status, and how scontrol was called."""
    scripts = {
        'scontrol': 'echo "$@" $(cat saved) >>calls',
        'run': '''trap "sleep 0.3; echo saved >saved; exit $2" TERM
            # again and again, as slurm.sh does not know its run at once
            for i in $(seq 300); do kill -$1 $PPID; sleep 0.1; done'''}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{script}\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / 'calls').touch()

    def call(line, runs):
        (tmp_path / 'runs.txt').write_text(runs)
        env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_ARRAY_JOB_ID': '9',
               'SLURM_ARRAY_TASK_ID': line}
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
