"""sweep.sh: the commands of its grids. The runner: what runs, on which GPUs, after failures and signals."""
import functools
import io
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count, product
from pathlib import Path

import pytest
import torch

import train
from conftest import ENV, ROOT, refused
from tools import runner

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()
LRS = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = '16M 29M 57M 109M 221M'.split()


# -------- sweep.sh
def sweep(*grid, status=0, **env):
    """What sweep.sh prints, with the variables `env` and none of the caller's; on stderr if it fails."""
    env = {'PATH': ENV['PATH'], 'NPROC': '1', 'DRY_RUN': '1', **env}
    done = subprocess.run(['bash', 'sweep.sh', *grid], cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == status, done
    return done.stderr if status else done.stdout


def plan(*grid, **env):
    """The settings of a grid's runs, as train.py reads them from the commands: all that is on stdout."""
    runs = []
    for line in sweep(*grid, **env).splitlines():
        python, program, *flags = shlex.split(line)
        assert (python, program) == ('python', 'train.py')
        runs.append(train.parser.parse_args(flags))
    return runs


def assert_grid(runs, names, expected, same):
    """The runs have exactly the expected combinations of settings `names`, and all of them have `same`."""
    found = Counter(tuple(getattr(run, name) for name in names) for run in runs)
    assert found == Counter(expected)
    for run in runs:
        assert vars(run).items() >= same.items()
    assert len({run.out for run in runs}) == len(runs)


def test_the_papers_grids():
    same = {'steps': 100_000, 'seed': 1, 'data': 'data/fineweb', 'batch_size': 64, 'block_size': 2048}
    names = ['lr', 'size', 'weight_tying', 'method', 'lam']
    paper, ablation, check = plan(), plan('ablation'), plan('check')
    assert_grid(paper, names, product(LRS, SIZES, [False, True], PAPER, [None]), same)
    of_ablation = product(LRS, SIZES, [False], ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100])
    assert_grid(ablation, names, of_ablation, same)
    assert_grid(check, names, product([0.3], ['16M'], [False], ['baseline', 'mu_centering'], [None]), same)
    assert {os.path.dirname(run.out) for run in paper + ablation} == {'out/paper'}


def test_grids_for_a_cpu():
    same = {'size': 'laptop', 'final_gain': False, 'data': 'data/chars', 'batch_size': 4, 'block_size': 32,
            'device': 'cpu', 'threads': 1, 'dtype': 'float32', 'seed': 1, 'weight_tying': False}
    names = ['method', 'lr', 'lam', 'logits_dtype']
    demo = [('baseline', 1, None, 'bfloat16'), ('baseline', 1, None, 'float32'),
            ('mu_loss', 1, 0.1, 'bfloat16'), ('mu_centering', 1, None, 'bfloat16')]
    assert_grid(plan('demo'), names, demo, {**same, 'steps': 8000})
    laptop = [(method, lr, 0.1 if method == 'mu_loss' else None, 'bfloat16')
              for method in PAPER for lr in LRS]
    assert_grid(plan('laptop'), names, laptop, {**same, 'steps': 100_000})


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                SEEDS='7', STEPS='40', DATA='d &', OUT="o $(x)'", FLAGS='--beta2=0.99  --log_every=8\n')
    settings = {'method': 'z_loss', 'size': '29M', 'lr': 0.05, 'weight_tying': True, 'lam': 3e-5, 'seed': 7,
                'steps': 40, 'data': 'd &', 'out': "o $(x)'/29M-tied-z_loss-lam3e-05-lr0.05-s7",
                'beta2': 0.99, 'log_every': 8}
    assert vars(run).items() >= settings.items()
    run, = plan('laptop', METHODS='mu_loss', LRS='1e-3', FLAGS='--batch_size=16')
    assert run.batch_size == 16  # the user's flags win
    assert run.out == 'out/laptop/laptop-untied-mu_loss-lam0.1-lr0.001-s1'


def test_what_sweep_refuses():
    assert 'demo demo' in sweep('demo', 'demo', status=2)
    assert 'False' in sweep(TYING='False', status=2)


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize('grid, gpus, env, jobs, processes', [
    ('paper', 8, {}, 1, 8), ('paper', 6, {'JOBS': '2'}, 2, 3), ('paper', 0, {}, 1, 1),
    ('paper', 8, {'NPROC': '3'}, 1, 3), ('paper', 8, {'FLAGS': '--device=cpu'}, 1, 1),
    ('demo', 8, {'OMP_NUM_THREADS': '64'}, CORES, 1)])  # it has as many jobs as there are cores
def test_what_sweep_starts(tmp_path, grid, gpus, env, jobs, processes):
    """The runner, in its place, so that signals reach it; with as many GPUs a run as there are."""
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec echo {gpus}\necho $$ "$@" >>calls; cat >>calls\n')
    python.chmod(0o755)
    env = {'PATH': f'{tmp_path}:{ENV["PATH"]}', 'DATA': 'data/chars', **env}
    started = subprocess.Popen(['bash', f'{ROOT}/sweep.sh', grid], cwd=tmp_path, env=env,
                               stdin=subprocess.DEVNULL)
    assert started.wait() == 0
    prepared, run, line, *_ = (tmp_path / 'calls').read_text().splitlines()
    assert prepared.endswith(' prepare_fineweb.py --source=stdlib --tokenizer=chars --out=data/chars')
    assert run == f'{started.pid} -m tools.runner --jobs={jobs}'
    launch = 'python' if processes == 1 else f'torchrun --standalone --nproc_per_node={processes}'
    assert line.startswith(f'{launch} train.py --data=data/chars --size=')


# -------- the runner
class StandIn:
    """In place of a run's subprocess.Popen: it ends when it has been polled once to three times."""

    def __init__(self, runs, words, env, stdout, stderr):
        self.runs, self.out = runs, Path(stdout.name).parent
        self.gpus = env['CUDA_VISIBLE_DEVICES'].split(',') if env['CUDA_VISIBLE_DEVICES'] else []
        self.polls_left = 1 + len(runs.started) % 3
        self.calls = []
        runs.started.append(self)
        self.at_work = [run for run in runs.started if run.polls_left]  # as this one starts
        stdout.write(f'log of {self.out.name}\n'.encode())

    def poll(self):
        self.polls_left -= 1
        if self.polls_left:
            return None
        if self.out.name not in self.runs.unlucky:
            train.save({}, f'{self.out}/result.json')
        return 1  # the result decides: another runner may have done this run meanwhile

    def terminate(self):
        self.calls.append('terminate')

    def wait(self):
        self.calls.append('wait')


class Runs:
    """The runner's list in an empty folder, and what it has started and analysed."""

    def __init__(self, corpus, monkeypatch):
        self.flags = f'--size=tiny --block_size=32 --batch_size=12 --data={corpus}'
        self.lines, self.started, self.analysed = [], [], []
        self.unlucky = ''  # the names of runs that leave no result
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(subprocess, 'Popen', functools.partial(StandIn, self))
        monkeypatch.setattr(runner.analyze, 'main', self.analysed.append)
        monkeypatch.setattr(time, 'sleep', lambda seconds: None)
        monkeypatch.setattr(time, 'monotonic', count(0, 600).__next__)  # ten minutes a run

    def add(self, flags='', launch='python'):
        self.lines.append(f'{launch} train.py {self.flags} --out="out/my runs/r{len(self.lines)}" {flags}')

    def call(self, *flags):
        self.started.clear()
        self.analysed.clear()
        self.monkeypatch.setattr(sys, 'stdin', io.StringIO('\n\n # python train.py\n'.join(self.lines)))
        runner.main([*flags])


@pytest.fixture
def runs(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Runs(corpus, monkeypatch)


@pytest.mark.parametrize('visible, gpus, jobs, processes', [
    (None, '0 1 2 3', 2, 2), ('7,2,5,4', '7 2 5 4', 1, 3), ('GPU-a,GPU-b', 'GPU-a GPU-b', 3, 1)])
def test_gpus(runs, monkeypatch, visible, gpus, jobs, processes):
    """`jobs` runs at a time, each on the GPUs that the fewest others use; one of the runs needs none."""
    gpus = gpus.split()
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: len(gpus))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    launch = 'python' if processes == 1 else f'torchrun --nproc_per_node={processes}'
    needs = 2 * [processes] + [0] + 4 * [processes]
    for n in needs:
        runs.add('--device=cuda', launch) if n else runs.add('--device=cpu')
    runs.call(f'--jobs={jobs}')
    assert [len(run.gpus) for run in runs.started] == needs
    assert max(len(run.at_work) for run in runs.started) == jobs
    for run in runs.started:
        taken = Counter(gpu for other in run.at_work for gpu in other.gpus)
        assert taken.keys() <= {*gpus}
        assert max(taken.values(), default=0) <= math.ceil(jobs / len(gpus))  # shared if there are too few


def test_failures(runs, capsys):
    """They are named, end nothing else, and are tried again by the same command."""
    for _ in range(3):
        runs.add()
    runs.unlucky = 'r0 r1 r2'
    with pytest.raises(SystemExit, match=': r0 r1 r2$'):
        runs.call()
    assert not runs.analysed  # there is nothing

    runs.unlucky = 'r1'
    capsys.readouterr()
    with pytest.raises(SystemExit, match=': r1$'):
        runs.call()
    assert runs.analysed == [['out/my runs']]
    assert capsys.readouterr().out.splitlines()[1:] == [
        '[1/3, about 20 min left] r0: log of r0', '[2/3, about 10 min left] r1: log of r1',
        '[3/3, about 0 min left] r2: log of r2']

    runs.unlucky = ''
    runs.call()
    assert [run.out.name for run in runs.started] == ['r1']


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals(runs, number, monkeypatch):
    """The runs at work are told to save, and end before the runner does."""
    for _ in range(3):
        runs.add()
    monkeypatch.setattr(time, 'sleep', lambda seconds: signal.raise_signal(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & switches off
    with pytest.raises(SystemExit, match='resumes'):
        runs.call('--jobs=2')
    assert [run.calls for run in runs.started] == 2 * [['terminate', 'wait']] and not runs.analysed


def save_config(folder, flags, processes=1):
    """As a run of these flags leaves it."""
    os.makedirs(folder)
    args = train.read_command(shlex.split(flags), processes)
    train.save(vars(args), f'{folder}/config.json')


def test_what_is_refused_before_the_first_run(runs):
    """What train.py itself would refuse: a flag, the folder of another run."""
    runs.add()
    refused(lambda: runs.call('--jobs=0'), '--jobs')
    runs.add('--lr=nan')
    refused(runs.call, '--lr')
    save_config('out/my runs/r1', f'{runs.flags} --seed=9')
    runs.lines[1] = runs.lines[1].replace('--lr=nan', '')
    refused(runs.call, 'seed=9')
    assert not runs.started


def test_check_starts_nothing(runs, capsys):
    """On a login node without GPUs, where runs on GPUs have begun, in their default dtype."""
    for _ in range(2):
        runs.add(launch='torchrun --nproc_per_node=4')
    save_config('out/my runs/r0', f'{runs.flags} --device=cuda', 4)
    train.save({}, 'out/my runs/r0/result.json')
    runs.call('--check')
    assert capsys.readouterr().out.startswith('1 of 2 runs')
    assert not runs.analysed and not runs.started and os.listdir('out/my runs') == ['r0']


def test_processes(corpus, tmp_path, monkeypatch):
    """They are of the runner's Python, with $SCRATCH as a shell has it; their logs go on."""
    (tmp_path / 'train.py').write_text("""if True:
        import sys
        from pathlib import Path
        out = Path(sys.argv[-1].removeprefix('--out='))
        if not (out / 'run.log').read_text():
            sys.exit('no luck')
        (out / 'result.json').write_text('{}')
        print(out)""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PATH', '/usr/bin:/bin')
    monkeypatch.setenv('SCRATCH', 'my scratch')
    monkeypatch.setattr(runner.analyze, 'main', lambda folders: None)
    command = f'python train.py --size=tiny --block_size=32 --data={corpus} --out="$SCRATCH/r0"'
    monkeypatch.setattr(sys, 'stdin', io.StringIO(command))
    with pytest.raises(SystemExit, match='r0'):
        runner.main([])
    monkeypatch.setattr(sys, 'stdin', io.StringIO(command))
    runner.main([])
    assert Path('my scratch/r0/run.log').read_text() == 'no luck\nmy scratch/r0\n'
