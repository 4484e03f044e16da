"""sweep.sh: the commands of its grids. The runner: what runs, on which GPUs, after failures and signals."""
import io
import os
import random
import re
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
from conftest import ENV, ROOT
from tools import runner

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()
LRS = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = '16M 29M 57M 109M 221M'.split()


# -------- sweep.sh
def sweep(*grid, status=0, **env):
    """sweep.sh's stdout and stderr, with the variables `env` and none of the caller's."""
    env = {'PATH': ENV['PATH'], 'NPROC': '1', 'DRY_RUN': '1', **env}
    done = subprocess.run(['bash', 'sweep.sh', *grid], cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == status, done
    return done.stdout, done.stderr


def plan(*grid, **env):
    """The settings of a grid's runs, as train.py reads them from the commands: all that is on stdout."""
    runs = []
    for line in sweep(*grid, **env)[0].splitlines():
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
    assert_grid(plan(), names, product(LRS, SIZES, [False, True], PAPER, [None]), same)
    ablation = product(LRS, SIZES, [False], ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100])
    assert_grid(plan('ablation'), names, ablation, same)
    for grid in ('paper', 'ablation'):
        assert {os.path.dirname(run.out) for run in plan(grid)} == {'out/paper'}


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
    assert len(plan('demo', TYING='untied tied')) == 8

    out = {run.method: run.out for run in plan('laptop', LRS='1e-3')}
    assert out['mu_loss'] == 'out/laptop/laptop-untied-mu_loss-lam0.1-lr0.001-s1'
    assert out['z_loss'] == 'out/laptop/laptop-untied-z_loss-lr0.001-s1'


def test_how_long_it_takes():
    _, message = sweep('laptop', JOBS='2')  # 21 rounds of 5.2 minutes
    assert '42 x' in message and '111 min' in message
    _, message = sweep('laptop', JOBS='4', STEPS='1e4', METHODS='mu_loss', SEEDS='1 2')  # 4 rounds of 0.52
    assert '14 x' in message and '4 min' in message


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                SEEDS='7', STEPS='40', DATA='d &', OUT="o $(x)'", FLAGS='--beta2=0.99  --log_every=8\n')
    settings = {'method': 'z_loss', 'size': '29M', 'lr': 0.05, 'weight_tying': True, 'lam': 3e-5, 'seed': 7,
                'steps': 40, 'data': 'd &', 'out': "o $(x)'/29M-tied-z_loss-lam3e-05-lr0.05-s7",
                'beta2': 0.99, 'log_every': 8}
    assert vars(run).items() >= settings.items()
    assert plan('demo', FLAGS='--batch_size=16')[0].batch_size == 16  # the user's flags win


def test_what_sweep_refuses_and_notes():
    assert 'METHODS' in sweep('--help')[0]
    assert 'demo demo' in sweep('demo', 'demo', status=2)[1]
    assert 'False' in sweep(TYING='False', status=2)[1]
    commands, note = sweep('demo', METHOD='mu_loss', LR='3')  # names without the S have no effect
    assert commands == sweep('demo')[0] and 'METHODS' in note and 'LRS' in note


@pytest.mark.parametrize('gpus, env, n', [
    (8, {}, 8), (6, {}, 4), (6, {'JOBS': '2'}, 2), (0, {}, 1), (8, {'NPROC': '3'}, 3), (8, {'JOBS': '9'}, 1),
    (8, {'FLAGS': '--device=cpu'}, 1)])
def test_what_sweep_starts(tmp_path, gpus, env, n):
    """The runner, in its place, so that signals reach it; with as many GPUs a run as there are."""
    (tmp_path / 'python').write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec echo {gpus}\necho $$ "$@" >>calls; cat >>calls\n')
    (tmp_path / 'python').chmod(0o755)
    env = {'PATH': f'{tmp_path}:{ENV["PATH"]}', 'SIZES': '16M', 'LRS': '0.1', 'METHODS': 'mu_loss',
           'TYING': 'tied', 'DATA': 'data/chars', **env}
    started = subprocess.Popen(['bash', f'{ROOT}/sweep.sh'], cwd=tmp_path, env=env, text=True,
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, message = started.communicate()
    assert started.returncode == 0 and ('no GPU' in message) == (gpus == 0)
    prepared, run, line = (tmp_path / 'calls').read_text().strip().splitlines()
    assert prepared.endswith(' prepare_fineweb.py --source=stdlib --tokenizer=chars --out=data/chars')
    assert run == f'{started.pid} -m tools.runner --jobs={env.get("JOBS", 1)}'
    launch = 'python' if n == 1 else f'torchrun --standalone --nproc_per_node={n}'
    assert line.startswith(f'{launch} train.py --data=data/chars --size=16M')


# -------- the runner
# Stands in for train.py. What its runs do between their start and their end, a test writes to `act`.
TRAIN = """
import os, signal, sys, time
from pathlib import Path

out = Path(next(word[6:] for word in sys.argv if word.startswith('--out=')))
notes = open('notes', 'a')

def note(what):
    print(what, out.name, os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'], file=notes, flush=True)

def starts():
    return Path('notes').read_text().count('start')

note('start' if os.getsid(0) == os.getpid() else 'start within reach of Ctrl-C')
signal.alarm(200)  # no test waits for ever
exec(Path('act').read_text())
time.sleep(0.08)  # so that runs that are started together are seen together
out.mkdir()
(out / 'result.json').write_text('{}')
note('end')
print(*sys.argv)
"""


def check_start(done, source, settings, real=train.check_start):
    """train.check_start, but for the runs of TRAIN, which leave no settings."""
    if Path(settings.out, 'config.json').exists():
        real(done, source, settings)


class Runs:
    """A folder with a list of commands, in which the runner is called."""

    def __init__(self, corpus, monkeypatch, capsys):
        self.monkeypatch, self.capsys, self.lines = monkeypatch, capsys, []
        self.flags = f'--size=tiny --block_size=32 --batch_size=12 --dtype=float32 --data={corpus}'
        Path('train.py').write_text(TRAIN)
        Path('launch').write_text('shift; exec python "$@"')

    def add(self, flags='', processes=1):
        launch = 'python' if processes == 1 else f'sh launch --nproc_per_node={processes}'
        name = f'--seed={len(self.lines)} --out="out/my runs/r{len(self.lines)}"'
        self.lines.append(f'{launch} train.py {self.flags} {name} {flags}')

    def call(self, *flags, gpus='', act=''):
        """The runner with GPUs of such names -> its exit status, what it printed, what it analysed."""
        analysed = []
        Path('notes').write_text('')
        Path('act').write_text(act)
        self.monkeypatch.setenv('PATH', '/usr/bin:/bin')  # without this python
        self.monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
        if gpus.startswith('0,'):  # all there are
            self.monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
        replace = self.monkeypatch.setattr
        replace(torch.cuda, 'device_count', lambda: len(gpus.split(',')) if gpus else 0)
        replace(torch.cuda, 'is_available', lambda: gpus != '')
        replace(train, 'check_start', check_start)
        replace(runner.analyze, 'main', analysed.extend)
        replace(time, 'monotonic', count(0, 600).__next__)  # ten minutes a run
        replace(sys, 'stdin', io.StringIO('\n\n # python train.py\n'.join(self.lines)))
        status = 0
        try:
            runner.main([*flags])
        except SystemExit as end:
            status = end.code
        return status, ''.join(self.capsys.readouterr()).splitlines(), analysed

    def notes(self, what=''):
        """[what, name, pid, GPUs] of each start and end, or of one of these."""
        lines = Path('notes').read_text().splitlines()
        return [line.split(' ') for line in lines if line.startswith(what)]


@pytest.fixture
def runs(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Runs(corpus, monkeypatch, capsys)


@pytest.mark.parametrize('names, jobs', [('0,1,2,3', 2), ('7,2,5,4', 1), ('GPU-a,GPU-b', 2), ('0,1', 3)])
def test_any_list(runs, names, jobs):
    """Of runs on one GPU, several, or none, of which two fail and are tried again by the same command."""
    rng, gpus = random.Random(names), names.split(',')
    needs = {f'r{i}': rng.choice([0, 1, max(1, len(gpus) // jobs)]) for i in range(7)}
    for n in needs.values():
        runs.add(f'--device={"cuda" if n else "cpu"}', n or 1)
    broken = rng.sample([*needs], 2)
    for fail, todo in (broken, [*needs]), ([], broken):
        act = f'''while starts() < {min(jobs, len(todo))}: time.sleep(0.01)  # as many go at once
if out.name in {fail}: note('end'), sys.exit('error: no luck')'''
        status, (first, *progress, _), analysed = runs.call(f'--jobs={jobs}', gpus=names, act=act)
        assert {*re.findall('r[0-9]', str(status))} == {*fail} and bool(status) == bool(fail)
        assert first.startswith(f'{len(todo)} of 7 runs') and analysed == ['out/my runs']
        assert [line.split(' min left] ')[0] for line in progress] == [
            f'[{i}/{len(todo)}, about {10 * (len(todo) - i)}' for i in range(1, len(todo) + 1)]
        assert sum(line.endswith(': error: no luck') for line in progress) == len(fail)
        assert sorted(name for _, name, *_ in runs.notes('start')) == sorted(todo)
        at_work = {}
        for what, name, _, given in runs.notes():
            if what == 'end':
                del at_work[name]
                continue
            at_work[name] = given.split(',') if given else []
            taken = Counter(sum(at_work.values(), []))
            assert len(at_work[name]) == needs[name] and len(at_work) <= jobs and taken.keys() <= {*gpus}
            assert all(n <= -(-jobs // len(gpus)) for n in taken.values())  # rounded up: some are shared
    log = Path('out/my runs/logs', f'{broken[0]}.log').read_text()  # of both times
    assert log.startswith('error: no luck\ntrain.py --size=tiny')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                                    signal.SIGUSR2])
def test_signals(runs, number):
    """r1 and r2 are at work, in sessions of their own, when the runner is signalled: they end before it."""
    for _ in range(4):
        runs.add()
    act = f'''if out.name in ('r1', 'r2'):
    while starts() < 3: time.sleep(0.01)
    if out.name == 'r2': os.kill(os.getppid(), {number})
    time.sleep(100)'''
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, or behind &, this process ignores some
    status, printed, analysed = runs.call('--jobs=2', act=act)
    signal.signal(number, before)
    assert status == 128 + number and 'same command resumes' in printed[-1] and not analysed
    assert [name for _, name, *_ in runs.notes('end')] == ['r0']
    for _, _, pid, _ in runs.notes('start'):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)

    status, printed, analysed = runs.call('--jobs=2')
    assert status == 0 and printed[0].startswith('3 of 4 runs') and analysed
    assert len([*Path('out').glob('*/*/result.json')]) == 4


def test_nohup(runs):
    """A signal that is ignored, as SIGHUP by nohup, changes nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    runs.add()
    status, _, analysed = runs.call(act='os.kill(os.getppid(), signal.SIGHUP)')
    signal.signal(signal.SIGHUP, before)
    assert status == 0 and analysed


def test_after_the_runs_signals_act_as_before(runs):
    """So that Ctrl-C ends an analysis."""
    runs.add()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    runs.call()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize('flags, named', [
    (['--steps=7'], 'steps'), (['--seed=9'], 'same name'), (['', '--seed=0'], 'same name'),
    (['--bta=1'], '--bta'), (['--data=none'], 'none'), (['--device=cuda'], 'GPU'),
    (['', '--lr=1 --out="out/my runs/r0"'], '--out'), (['', '--out=y/r1'], 'y/r1'),
    (['--seed=9 --beta2=0.9 --out="out/my runs/s/x"'], 'beta2=0.95')])
def test_what_is_refused_before_the_first_run(runs, flags, named):
    """By train.py; or by analyze.py, which could not compare it with x or another of the list."""
    args = train.resolve_args(train.parser.parse_args([*runs.flags.split(), '--seed=9']))
    args.data_fingerprint = train.fingerprint(train.open_data(args))
    Path('out/my runs/s/x').mkdir(parents=True)
    train.save(vars(args), 'out/my runs/s/x/config.json')
    train.save({}, 'out/my runs/s/x/result.json')
    for of_run in flags:
        runs.add(of_run)
    status, printed, _ = runs.call()
    assert status == 2 and named in printed[-1] and len(printed) < 3 and not runs.notes()


@pytest.mark.parametrize('line, named', [
    ('X=1 python train.py --out=out/x/a', 'X=1'), ('python train.pi --out=out/x/a', 'train.pi'),
    ('python train.py --out=$NOWHERE/a', 'NOWHERE'), ('# python train.py --out=out/x/a', 'no commands')])
def test_lines_that_are_no_command(runs, line, named):
    runs.lines = [line]
    status, printed, _ = runs.call()
    assert status == 2 and named in printed[-1] and not Path('out').exists()


def test_shell_variables(runs, monkeypatch):
    """They are what a shell would make of them: no folder is named $SCRATCH."""
    monkeypatch.setenv('SCRATCH', 'my scratch')
    for folder in ('$SCRATCH', '${SCRATCH}'):
        runs.add()
        runs.lines[-1] = runs.lines[-1].replace('out/my runs', f'{folder}/out')
    status, _, analysed = runs.call()
    assert status == 0 and analysed == ['my scratch/out']
    assert {path.parent.name for path in Path('my scratch/out').glob('*/result.json')} == {'r0', 'r1'}


def test_escaped_variables(runs, monkeypatch):
    """To the shell that runs a list under Slurm they are a folder's name, so that no runner expands them."""
    monkeypatch.setenv('SCRATCH', 'scratch')
    runs.add()
    runs.lines[-1] = runs.lines[-1].replace('out/my runs', '\\$SCRATCH/out')
    status, _, analysed = runs.call()
    assert status == 2 and not analysed and not Path('scratch').exists()


@pytest.mark.parametrize('task, runs_list', [('', 'runs.txt'), ('1', 'lost.txt')])
def test_slurm_without_a_line(task, runs_list, tmp_path):
    """Neither a job without --array nor a lost list may seem done; without --array nothing is run."""
    (tmp_path / 'runs.txt').write_text('touch ran\n')
    env = {**os.environ, 'SLURM_ARRAY_JOB_ID': '9', 'SLURM_ARRAY_TASK_ID': task}
    done = subprocess.run(['bash', f'{ROOT}/tools/slurm.sh', runs_list], env=env, cwd=tmp_path)
    assert done.returncode != 0 and not (tmp_path / 'ran').exists()


def test_done_by_another_runner(runs):
    """Two runners of one list at once: a run that the other one has done meanwhile has not failed."""
    runs.add()
    status, _, analysed = runs.call(act="""out.mkdir()
(out / 'result.json').write_text('{}')
sys.exit('error: the folder is locked by another process')""")
    assert status == 0 and analysed


def test_preempted(runs):
    """A run that a signal has ended after a checkpoint is not done, and the same command goes on."""
    runs.add()
    status, printed, _ = runs.call(act="sys.exit(143)")
    assert 'r0' in status and printed[0].startswith('1 of 1')
    assert runs.call()[0] == 0


def test_check_starts_nothing(runs, monkeypatch):
    """On a login node without GPUs, where runs on GPUs have begun, in their default dtype."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {})
    runs.flags = runs.flags.replace('--dtype=float32', '')
    runs.add(processes=4)
    runs.add(processes=4)
    args = train.parser.parse_args([*runs.flags.split(), '--seed=0', '--device=cuda'])
    train.resolve_args(args, 4)
    args.data_fingerprint = train.fingerprint(train.open_data(args))
    done = Path('out/my runs/r0')
    done.mkdir(parents=True)
    train.save(vars(args), str(done / 'config.json'))
    train.save({}, str(done / 'result.json'))

    status, printed, analysed = runs.call('--check')
    assert status == 0 and len(printed) == 1 and printed[0].startswith('1 of 2 runs')
    assert not analysed and not runs.notes() and sorted(os.listdir('out/my runs')) == ['r0']
    runs.lines[1] += ' --batch_size=6'
    status, printed, _ = runs.call('--check')
    assert status == 2 and 'batch_size=6' in printed[-1]


def test_processes_of_several_nodes():
    launcher = 'torchrun --nnodes=2 --nproc-per-node 4 --rdzv_endpoint=host:29500'
    assert runner.read_launcher(launcher.split()) == 8
    assert runner.read_launcher(['python']) == 1


def test_data_are_read_once(runs, monkeypatch):
    """The fingerprint of shards that all runs share."""
    calls = []
    real = train.fingerprint
    monkeypatch.setattr(train, 'fingerprint', lambda data: calls.append(data) or real(data))
    for _ in range(5):
        runs.add()
    assert runs.call()[0] == 0 and len(calls) == 1
