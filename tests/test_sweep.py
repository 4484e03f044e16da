"""sweep.sh: the commands of its grids. The runner: what runs, on which GPUs, after failures and kills."""
import io
import os
import random
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
LRS, SIZES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), '16M 29M 57M 109M 221M'.split()
FULL = {'steps': 100_000, 'seed': 1, 'data': 'data/fineweb', 'batch_size': 64}


# -------- sweep.sh
def sweep(*grid, status=0, **env):
    """What sweep.sh prints if a run has one GPU, or the line with which it refuses."""
    env = {'PATH': ENV['PATH'], 'NPROC': '1', 'DRY_RUN': '1', **env}  # and no variable of the caller's
    done = subprocess.run(['bash', 'sweep.sh', *grid], cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == status, done
    return done.stderr or done.stdout


def plan(grid, **env):
    """The settings of a grid's runs, as train.py reads them from the commands."""
    lines = [shlex.split(line) for line in sweep(grid, **env).splitlines()]
    return [train.parser.parse_args(line[2:]) for line in lines]


@pytest.mark.parametrize('grid, names, expected, all_have', [
    ('paper', 'lr size weight_tying method', product(LRS, SIZES, [False, True], PAPER), FULL),
    ('ablation', 'lr size method lam', product(LRS, SIZES, ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100]),
     {**FULL, 'weight_tying': False}),
    ('demo', 'method logits_dtype block_size', [
        ('baseline', 'bfloat16', 128), ('baseline', 'bfloat16', 104), ('baseline', 'float32', 128),
        ('mu_centering', 'bfloat16', 128), ('centered_head', 'bfloat16', 128)],
     {'size': 'tiny', 'lr': 0.01, 'steps': 300, 'mu_shift': 331, 'device': 'cpu', 'dtype': 'float32'})])
def test_grids(grid, names, expected, all_have):
    runs = plan(grid)
    assert Counter(tuple(getattr(run, name) for name in names.split()) for run in runs) == Counter(expected)
    assert all(vars(run).items() >= all_have.items() for run in runs)
    assert len({run.out for run in runs}) == len(runs)


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                SEEDS='7', STEPS='40', DATA='d &', OUT="o $(x)'", FLAGS='--beta2=0.99  --log_every=8\n')
    settings = dict(method='z_loss', size='29M', lr=0.05, weight_tying=True, lam=3e-5, seed=7, steps=40,
                    data='d &', out="o $(x)'/29M-tied-z_loss-lam3e-05-lr0.05-s7", beta2=0.99, log_every=8)
    assert vars(run).items() >= settings.items()
    drift, fp32 = plan('drift', METHODS='baseline', SEEDS='2', FLAGS='--batch_size=16')  # the user's win
    assert (drift.batch_size, fp32.out) == (16, 'out/drift_16M/16M-untied-baseline-lr0.3-s2-fp32head')
    assert {os.path.dirname(run.out) for run in plan('ablation')} == {'out/paper'}
    assert 'METHODS' in sweep('--help') and 'demo demo' in sweep('demo', 'demo', status=2)
    assert 'METHODS' in sweep(METHOD='mu_loss', status=2) and 'False' in sweep(TYING='False', status=2)


@pytest.mark.parametrize('gpus, env, n', [
    (8, {}, 8), (6, {}, 4), (6, {'JOBS': '2'}, 2), (0, {}, 1), (8, {'NPROC': '3'}, 3), (8, {'JOBS': '9'}, 1),
    (8, {'FLAGS': '--device=cpu'}, 1)])
def test_what_sweep_starts(tmp_path, gpus, env, n):
    """The runner, in its place, so that signals reach it; with as many GPUs a run as there are."""
    (tmp_path / 'python').write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec echo {gpus}\necho $$ "$@" >>calls; cat >>calls\n')
    (tmp_path / 'python').chmod(0o755)
    env = {'PATH': f'{tmp_path}:{ENV["PATH"]}', 'SIZES': '16M', 'LRS': '0.1', 'METHODS': 'mu_loss',
           'TYING': 'tied', 'DATA': 'data/stdlib', **env}
    started = subprocess.Popen(['bash', f'{ROOT}/sweep.sh'], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
    assert started.wait() == 0
    prepared, run, line = (tmp_path / 'calls').read_text().splitlines()
    assert prepared.endswith(' prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib')
    assert run == f'{started.pid} -m tools.runner --jobs={env.get("JOBS", 1)}'
    launch = 'python' if n == 1 else f'torchrun --standalone --nproc_per_node={n}'
    assert line.startswith(f'{launch} train.py --data=data/stdlib --size=16M')


# -------- the runner
# Stands in for train.py. What its runs do between their start and their end, a test writes to `act`.
TRAIN = """
import os, signal, sys, time
from pathlib import Path
out, notes = Path(next(word[6:] for word in sys.argv if word[:6] == '--out=')), open('notes', 'a')
def note(what): print(what, out.name, os.environ['CUDA_VISIBLE_DEVICES'], file=notes, flush=True)
def starts(): return Path('notes').read_text().count('start')
note('start' if os.getsid(0) == os.getpid() else 'start within reach of Ctrl-C')
signal.alarm(200), exec(Path('act').read_text())  # no test waits for ever
time.sleep(0.08)  # so that runs that are started together are seen together
out.mkdir(), (out / 'result.json').write_text('{}')
note('end')
print(*sys.argv)
"""


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

    def call(self, jobs=1, gpus='', act=''):
        """The runner with GPUs of such names -> its exit status, what it printed, what it analysed."""
        analysed, replace = [], self.monkeypatch.setattr
        Path('notes').write_text('')
        Path('act').write_text(act)
        self.monkeypatch.setenv('PATH', '/usr/bin:/bin')  # without this python
        self.monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
        if gpus[:2] == '0,':  # all there are
            self.monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
        replace(torch.cuda, 'device_count', lambda: len(gpus.split(',')) if gpus else 0)
        replace(torch.cuda, 'is_available', lambda: gpus != '')
        replace(train, 'WORLD_SIZE', 1)  # or the runner's would stay
        replace(train, 'check_same', lambda names, owner, config, *more, check=train.check_same: (
            config and check(names, owner, config, *more)))  # the runs of TRAIN leave no settings
        replace(runner.analyze, 'main', analysed.extend)
        replace(time, 'monotonic', count(0, 600).__next__)  # ten minutes a run
        replace(sys, 'stdin', io.StringIO('\n\n # python train.py\n'.join(self.lines)))
        with pytest.raises(SystemExit) as ended:
            runner.main([f'--jobs={jobs}'])
        return ended.value.code, ''.join(self.capsys.readouterr()).splitlines(), analysed

    def notes(self, what=''):  # [what, name, GPUs] of each start and end, or of one of these
        return [line.split(' ') for line in Path('notes').read_text().splitlines() if line.startswith(what)]


@pytest.fixture
def runs(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    yield Runs(corpus, monkeypatch, capsys)
    for handler in handlers:
        signal.signal(*handler)


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
        status, (first, *progress, _), analysed = runs.call(jobs, names, act)
        assert {*str(status).split()} & needs.keys() == {*fail} and bool(status) == bool(fail)
        assert first.startswith(f'{len(todo)} of 7 runs') and analysed == ['out/my runs']
        assert [line.split(' min left] ')[0] for line in progress] == [
            f'[{i}/{len(todo)}, about {10 * (len(todo) - i)}' for i in range(1, len(todo) + 1)]
        assert sum(line.endswith(': error: no luck') for line in progress) == len(fail)
        assert sorted(name for _, name, _ in runs.notes('start')) == sorted(todo)
        at_work = {}
        for what, name, given in runs.notes():
            if what == 'end':
                del at_work[name]
                continue
            at_work[name] = given.split(',') if given else []
            taken = Counter(sum(at_work.values(), []))
            assert len(at_work[name]) == needs[name] and len(at_work) <= jobs and taken.keys() <= {*gpus}
            assert all(n <= -(-jobs // len(gpus)) for n in taken.values())  # rounded up: some are shared
    log = Path('out/my runs/logs', f'{broken[0]}.log').read_text()  # of both times
    assert log.startswith('error: no luck\ntrain.py --size=tiny')
    runs.lines[0] = f'X=1 {runs.lines[0]}'  # which a shell would understand
    assert runs.call(jobs, names)[0] == 2


@pytest.mark.parametrize('number, ignored', [
    (signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGHUP, 1)])
def test_signals(runs, number, ignored):
    """Its two runs end, which have sessions of their own; what nohup ignores changes nothing."""
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN if ignored else default)  # whatever nohup or & have set
    for _ in range(4):
        runs.add()
    status, _, analysed = runs.call(2, act=f"""if out.name in ('r1', 'r2'):
    while starts() < 3: time.sleep(0.01)
    if out.name == 'r2': os.kill(os.getppid(), {number})
    if not {ignored}: time.sleep(100)""")
    if not ignored:
        assert 'the same command again' in status and not analysed and len(runs.notes()) == 4
        assert runs.call(2)[1][0].startswith('3 of 4 runs')
    assert len([*Path('out').glob('*/*/result.json')]) == 4


@pytest.mark.parametrize('flags, named', [
    (['--steps=7'], 'steps'), (['--seed=9'], 'second'), (['', '--seed=0'], 'second'), (['--bta=1'], '--bta'),
    (['--data=none'], 'none'), (['--device=cuda'], 'GPU'), (['', '--lr=1 --out="out/my runs/r0"'], '--out'),
    (['', '--out=y/r1'], '--out'), (['--seed=9 --beta2=0.9 --out="out/my runs/s/x"'], 'beta2=0.95')])
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
