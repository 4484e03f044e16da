"""tools/slurm.sh on a real Slurm, where there is one: arrays, requeue, signals, scancel, a dependent job."""
import re
import shutil
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from conftest import ENV, ROOT
from small_runs import SMALL, load, log_of, result_of, without_times


def call(*command):
    done = subprocess.run(command, cwd=ROOT, env=ENV, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done
    return done.stdout


def wait_until(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, call('squeue')
        time.sleep(0.5)


def of_task(task, name):
    """What `scontrol show job` says of a task, such as its JobState."""
    return re.search(rf'\b{name}=(\S+)', call('scontrol', 'show', 'job', task))[1]


@pytest.fixture(autouse=True)
def slurm():
    if not shutil.which('sbatch'):
        pytest.skip('no Slurm')
    if subprocess.run(['scontrol', 'ping'], capture_output=True, timeout=60).returncode != 0:
        pytest.skip('no controller of Slurm answers')


@pytest.fixture
def array(corpus, tmp_path):
    """
    array(names, *flags) submits one run for each name, in tmp_path/out, and returns the array's id. They have
    no checkpoint but what a signal makes them save.
    """
    submitted = []

    def submit(names, *flags, steps=3000, launch='python'):  # some 10 seconds
        run = [launch, 'train.py', *SMALL, '--log_every=100', '--ckpt_every=0', '--eval_every=0',
               f'--steps={steps}', f'--data={corpus}']
        lines = [' '.join([*run, f'--out={tmp_path}/out/{name}']) for name in names]
        Path(tmp_path, 'runs.txt').write_text('\n'.join(lines) + '\n')
        task = call('sbatch', '--parsable', '--gpus-per-node=0', '--cpus-per-task=1', '--time=10', *flags,
                    f'--array=1-{len(names)}', f'--output={tmp_path}/%a.log',
                    'tools/slurm.sh', f'{tmp_path}/runs.txt').strip()
        submitted.append(task)
        return task

    yield submit
    subprocess.run(['scancel', *submitted], capture_output=True)


def has_begun(folder):
    """Whether a run is past its step 300."""
    log = Path(folder, 'log.jsonl')
    return log.exists() and '"step": 300,' in log.read_text()


def wait_for_results(*folders):
    wait_until(lambda: all(Path(folder, 'result.json').exists() for folder in folders))


def assert_same_run(folder, other):
    assert log_of(folder) == log_of(other)
    assert without_times(result_of(folder)) == without_times(result_of(other))
    weights, others = load(folder)['model'], load(other)['model']
    assert all(weights[name].equal(others[name]) for name in others)


def start_again(task):
    """
    Starts a requeued task soon, and not after two minutes; within a second Slurm would end it with "Job
    credential revoked".
    """
    call('scontrol', 'update', f'JobId={task}_1', 'StartTime=now+5')


def starts(log):
    """The steps from which the run of a task's log was started."""
    return [int(step) for step in re.findall(r'from step (\d+)', Path(log).read_text())]


def test_array_and_analysis(array, tmp_path):
    """A run and a log for each line; the analysis waits for the array."""
    task = array(['a', 'b'])
    analyse = f'python analyze.py {tmp_path}/out/a --out={tmp_path}/results'
    analysis = call('sbatch', '--parsable', f'--dependency=afterany:{task}',
                    f'--output={tmp_path}/analysis.log', f'--wrap={analyse}').strip()
    wait_for_results(tmp_path / 'out/a', tmp_path / 'out/b')
    assert_same_run(tmp_path / 'out/a', tmp_path / 'out/b')
    for log in ('1.log', '2.log'):
        assert starts(tmp_path / log) == [0]
    wait_until(lambda: of_task(analysis, 'JobState') == 'COMPLETED')
    assert len(pd.read_csv(tmp_path / 'results/results.csv')) == 1


def test_requeue(array, tmp_path):
    """One task of two is requeued in the midst of its run, and ends as the other one."""
    task = array(['a', 'b'])
    wait_until(lambda: has_begun(tmp_path / 'out/a'))
    call('scontrol', 'requeue', f'{task}_1')
    wait_until(lambda: of_task(f'{task}_1', 'JobState') == 'PENDING')
    start_again(task)
    wait_for_results(tmp_path / 'out/a', tmp_path / 'out/b')
    first, second = starts(tmp_path / '1.log')
    assert first == 0 and second >= 300
    assert starts(tmp_path / '2.log') == [0]
    assert_same_run(tmp_path / 'out/a', tmp_path / 'out/b')


def test_time_limit(array, tmp_path):
    """Slurm's signal before the limit: the task requeues itself, and no other task of the array."""
    task = array(['a', 'b'], '--time=60', '--signal=B:USR1@480', steps=8000)  # after 52 minutes
    wait_until(lambda: has_begun(tmp_path / 'out/a'))
    call('scontrol', 'update', f'JobId={task}_1', 'TimeLimit=8')  # now
    wait_until(lambda: of_task(f'{task}_1', 'Restarts') == '1')
    wait_until(lambda: of_task(f'{task}_1', 'JobState') == 'PENDING')
    call('scontrol', 'update', f'JobId={task}_1', 'TimeLimit=20')
    start_again(task)
    wait_for_results(tmp_path / 'out/a', tmp_path / 'out/b')
    first, second = starts(tmp_path / '1.log')
    assert first == 0 and second >= 300
    assert starts(tmp_path / '2.log') == [0]
    assert_same_run(tmp_path / 'out/a', tmp_path / 'out/b')


def test_scancel(array, tmp_path):
    """A cancelled task stays cancelled; submitted again it goes on."""
    task = array(['a'])
    wait_until(lambda: has_begun(tmp_path / 'out/a'))
    call('scancel', task)
    wait_until(lambda: of_task(f'{task}_1', 'JobState') == 'CANCELLED')
    assert not Path(tmp_path, 'out/a/result.json').exists()
    array(['a', 'b'])
    wait_for_results(tmp_path / 'out/a', tmp_path / 'out/b')
    assert starts(tmp_path / '1.log')[1] >= 300
    assert_same_run(tmp_path / 'out/a', tmp_path / 'out/b')


def test_several_nodes(array, tmp_path):
    """A run with a torchrun in each of two nodes, which are one here: all save at the signal and go on."""
    task = array(['a'], '--ntasks=2', launch='torchrun --standalone --nproc_per_node=1')
    wait_until(lambda: has_begun(tmp_path / 'out/a'))
    call('scancel', '--signal=USR1', '--batch', f'{task}_1')
    wait_until(lambda: of_task(f'{task}_1', 'JobState') == 'PENDING')
    start_again(task)
    wait_for_results(tmp_path / 'out/a')
    first, second = starts(tmp_path / '1.log')
    assert first == 0 and second >= 300
    assert [line['step'] for line in log_of(tmp_path / 'out/a')] == [0, 1, *range(100, 3001, 100), 3000]
