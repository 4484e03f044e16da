"""sweep.sh: the commands of its grids, a small sweep. The runner: what runs, on which GPUs, what fails."""
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

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
    env = {'PATH': ENV['PATH'], 'DRY_RUN': '1', **env}
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
    assert_grid(paper, names, itertools.product(LRS, SIZES, [False, True], PAPER, [None]), same)
    of_ablation = itertools.product(LRS, SIZES, [False], ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100])
    assert_grid(ablation, names, of_ablation, same)
    of_check = [(0.3, '16M', False, 'baseline', None), (0.3, '16M', False, 'mu_centering', None)]
    assert_grid(check, names, of_check, same)
    assert {os.path.dirname(run.out) for run in paper + ablation} == {'out/paper'}


def test_grids_for_a_cpu():
    same = {'size': 'laptop', 'final_gain': False, 'data': 'data/chars', 'batch_size': 4, 'block_size': 32,
            'device': 'cpu', 'dtype': 'float32', 'seed': 1, 'weight_tying': False}
    names = ['method', 'lr', 'lam', 'logits_dtype']
    demo = [('baseline', 1, None, 'bfloat16'), ('baseline', 1, None, 'float32'),
            ('mu_loss', 1, 0.1, 'bfloat16'), ('mu_centering', 1, None, 'bfloat16')]
    assert_grid(plan('demo'), names, demo, {**same, 'steps': 8000})
    laptop = [(method, lr, 0.1 if method == 'mu_loss' else None, 'bfloat16')
              for method in PAPER for lr in LRS]
    assert_grid(plan('laptop'), names, laptop, {**same, 'steps': 100_000})


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                SEEDS='7', STEPS='40', DATA='d', OUT='o', FLAGS='--beta2=0.99  --log_every=8')
    settings = {'method': 'z_loss', 'size': '29M', 'lr': 0.05, 'weight_tying': True, 'lam': 3e-5, 'seed': 7,
                'steps': 40, 'data': 'd', 'out': 'o/29M-tied-z_loss-lam3e-05-lr0.05-s7',
                'beta2': 0.99, 'log_every': 8}
    assert vars(run).items() >= settings.items()
    run, = plan('laptop', METHODS='mu_loss', LRS='1e-3', FLAGS='--batch_size=16')
    assert run.batch_size == 16  # the user's flags win
    assert run.out == 'out/laptop/laptop-untied-mu_loss-lam0.1-lr0.001-s1'
    assert sweep('check', NPROC='4').startswith('torchrun --standalone --nproc_per_node=4 train.py --data=')


def test_what_sweep_refuses():
    assert 'demo demo' in sweep('demo', 'demo', status=2)
    assert 'False' in sweep(TYING='False', status=2)


def test_small_sweep(corpus, tmp_path):
    """A run that fails is named. The others are trained and analysed."""
    flags = '--block_size=32 --batch_size=4 --device=cpu --eval_tokens=64 --test_tokens=64'
    sweep_folder = tmp_path / f'{os.getpid()}'
    failed = sweep_folder / 'tiny-untied-mu_loss-lam0.1-lr0.1-s1'
    failed.mkdir(parents=True)
    (failed / 'ckpt.pt').write_text('no checkpoint')
    env = {'HOME': str(tmp_path), 'METHODS': 'baseline mu_loss', 'SIZES': 'tiny', 'TYING': 'untied',
           'LRS': '1e-1', 'STEPS': '3', 'DATA': corpus, 'OUT': str(sweep_folder), 'FLAGS': flags}
    assert failed.name in sweep('laptop', status=1, DRY_RUN='0', **env)
    results = Path(ROOT, 'results', sweep_folder.name)
    assert 'baseline' in (results / 'results.csv').read_text()
    shutil.rmtree(results)


# -------- the runner
class StandIn:
    """In place of a run's subprocess.Popen: it ends when it has been polled some times."""

    def __init__(self, runs, words, env, stdout, stderr):
        self.runs, self.out = runs, Path(stdout.name).parent
        self.gpus = [gpu for gpu in env['CUDA_VISIBLE_DEVICES'].split(',') if gpu]
        self.threads = env['OMP_NUM_THREADS']
        self.polls_left = next(runs.polls)
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
        return 1  # the result decides

    def terminate(self):
        self.calls.append('terminate')

    def wait(self):
        self.calls.append('wait')


class Runs:
    """The runner's list in an empty folder, and what it has started."""

    def __init__(self, corpus, monkeypatch):
        self.flags = f'--size=tiny --block_size=32 --batch_size=12 --data={corpus}'
        self.lines, self.started = [], []
        self.polls = itertools.cycle([1, 2, 3])  # until a run ends
        self.unlucky = ''  # the names of runs that leave no result
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(subprocess, 'Popen', functools.partial(StandIn, self))
        monkeypatch.setattr(time, 'sleep', lambda seconds: None)

    def add(self, flags='', launch='python'):
        self.lines.append(f'{launch} train.py {self.flags} --out=out/r{len(self.lines)} {flags}')

    def call(self, *flags):
        self.started.clear()
        self.monkeypatch.setattr(sys, 'stdin', io.StringIO('\n\n'.join(self.lines)))
        runner.main([*flags])


@pytest.fixture
def runs(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Runs(corpus, monkeypatch)


@pytest.mark.parametrize('visible, gpus, flags, processes, jobs', [
    (None, '0 1 2 3', [], 1, 4), (None, '0 1 2 3', [], 2, 2), ('7,2,5,4', '7 2 5 4', [], 3, 1),
    ('GPU-a,GPU-b', 'GPU-a GPU-b', ['--jobs=4'], 1, 4)])
def test_gpus(runs, monkeypatch, visible, gpus, flags, processes, jobs):
    """A run has GPUs of its own, unless more jobs are asked for. The user's number of threads stays."""
    gpus = gpus.split()
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: len(gpus))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    for _ in range(9):
        runs.add('--device=cuda', f'torchrun --nproc_per_node={processes}' if processes > 1 else 'python')
    runs.call(*flags)
    assert len(runs.started) == 9
    assert max(len(run.at_work) for run in runs.started) == jobs
    for run in runs.started:
        assert len(run.gpus) == len({*run.gpus}) == processes and run.threads == '3'
        taken = Counter(gpu for other in run.at_work for gpu in other.gpus)
        assert taken.keys() <= {*gpus}
        assert max(taken.values()) <= max(1, jobs * processes / len(gpus))


def test_cores(runs, monkeypatch):
    """On a CPU as many runs at a time as there are cores, with a thread each unless the user says more."""
    cores = len(os.sched_getaffinity(0))
    for _ in range(cores + 2):
        runs.add('--device=cpu')
    monkeypatch.delenv('OMP_NUM_THREADS')
    runs.call()
    assert max(len(run.at_work) for run in runs.started) == cores
    assert {run.threads for run in runs.started} == {'1'}


def test_time_left(runs, monkeypatch, capsys):
    """It counts by rounds: four runs of a minute each, two at a time."""
    for _ in range(4):
        runs.add('--device=cpu')
    runs.polls = itertools.repeat(1)
    seconds = iter([0, 60, 60, 120, 120])
    monkeypatch.setattr(runner, 'time', SimpleNamespace(monotonic=seconds.__next__, sleep=time.sleep))
    runs.call('--jobs=2')
    assert re.findall('about ([0-9]+) min', capsys.readouterr().out) == ['1', '1', '0', '0']


def test_failures(runs, capsys):
    """They are named, end nothing else, and are tried again by the same command."""
    for _ in range(3):
        runs.add('--device=cpu')
    runs.unlucky = 'r1'
    with pytest.raises(SystemExit, match=': r1$'):
        runs.call('--jobs=1')
    printed = capsys.readouterr().out.splitlines()
    assert re.findall('[0-9]+', printed[0]) == ['0', '0', '3']
    assert [line.split('left] ')[1] for line in printed[1:]] == [f'r{i}: log of r{i}' for i in range(3)]

    runs.unlucky = ''
    Path('out/r1/ckpt.pt').touch()
    runs.add('--device=cpu')
    runs.call()
    assert [run.out.name for run in runs.started] == ['r1', 'r3']
    assert re.findall('[0-9]+', capsys.readouterr().out.splitlines()[0]) == ['2', '1', '1']


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals(runs, number, monkeypatch):
    """The runs at work are told to save, and end before the runner does."""
    for _ in range(3):
        runs.add('--device=cpu')
    monkeypatch.setattr(time, 'sleep', lambda seconds: signal.raise_signal(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & switches off
    with pytest.raises(SystemExit, match='130'):
        runs.call('--jobs=2')
    assert [run.calls for run in runs.started] == 2 * [['terminate', 'wait']]


def test_what_is_refused_before_the_first_run(runs, monkeypatch):
    """A list without GPUs for it, two lines with one --out; what train.py would refuse."""
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # on a machine without any
    runs.add()
    for flags, *named in [('--device=cuda', '1 GPUs'), ('--out=out/r0', '--out'), ('--lam=1', '--lam')]:
        runs.add(flags)
        refused(lambda: runs.call('--jobs=2'), *named)
        runs.lines.pop()
    args, *_ = train.read_command(shlex.split(f'{runs.flags} --seed=9'))
    os.makedirs('out/r0')
    train.save(vars(args), 'out/r0/config.json')
    refused(runs.call, 'seed=9')
    assert not runs.started
