"""sweep.sh: the commands of its grids. The runner: what runs, on which GPUs, after failures and kills."""
import io
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from itertools import count, product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import ENV, ROOT, finish, process, refused
from tools import runner

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()
VARIABLES = 'METHODS SIZES LRS TYING LAMS SEEDS STEPS NPROC JOBS OUT DATA FLAGS DRY_RUN'.split()
CLEAN = {name: value for name, value in ENV.items() if name not in VARIABLES}


# -------- sweep.sh
def sweep(*grid, status=0, **env):
    """What sweep.sh prints if its runs have a GPU each, or the line with which it refuses."""
    done = subprocess.run(['bash', 'sweep.sh', *grid], cwd=ROOT, env={**CLEAN, 'NPROC': '1', **env}, text=True,
                          capture_output=True)
    assert done.returncode == status, done
    return done.stderr if status else done.stdout


def plan(grid, **env):
    """The settings of a grid's runs, as train.py reads them from the commands."""
    lines = [shlex.split(line) for line in sweep(grid, DRY_RUN='1', **env).splitlines()]
    assert all(line[:2] == ['python', 'train.py'] for line in lines)
    return [train.parser.parse_args(line[2:]) for line in lines]


@pytest.mark.parametrize('grid, methods, lams, tyings', [
    ('paper', PAPER, [None], [0, 1]), ('ablation', ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100], [0])])
def test_grids_of_the_paper(grid, methods, lams, tyings):
    runs = plan(grid)
    planned = {(run.method, run.lr, run.size, run.weight_tying, run.lam) for run in runs}
    lrs, sizes = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), '16M 29M 57M 109M 221M'.split()
    assert planned == set(product(methods, lrs, sizes, tyings, lams)) and len(planned) == len(runs)
    assert {(run.steps, run.seed, run.data) for run in runs} == {(100_000, 1, 'data/fineweb')}
    assert len({run.out for run in runs}) == len(runs)
    assert all(run.out.startswith(f'out/paper/{run.size}-') for run in runs)


def test_demo():  # has the same dtypes on every CPU
    runs = plan('demo')
    assert {(run.device, run.threads, run.dtype, run.lr) for run in runs} == {('cpu', 1, 'float32', 0.01)}
    assert {(run.size, run.steps, run.batch_size, run.mu_shift) for run in runs} == {('tiny', 300, 4, 331)}
    assert sorted((run.method, run.logits_dtype, run.block_size) for run in runs) == [
        ('baseline', 'bfloat16', 104), ('baseline', 'bfloat16', 128), ('baseline', 'float32', 128),
        ('centered_head', 'bfloat16', 128), ('mu_centering', 'bfloat16', 128)]
    assert [run.method for run in plan('demo', METHODS='z_loss')] == ['z_loss']


def test_drift():
    runs = plan('drift')
    heads = {(run.method, run.logits_dtype) for run in runs}
    assert heads == {*product(('baseline', 'mu_centering'), ('bfloat16', 'float32')), ('mu_loss', 'bfloat16')}
    assert sorted(run.seed for run in runs) == 5 * [1] + 5 * [2] + 5 * [3]
    assert {(run.lr, run.steps, run.batch_size, run.block_size) for run in runs} == {(0.3, 12500, 8, 512)}
    assert {run.batch_size for run in plan('drift', FLAGS='--batch_size=16')} == {16}  # the user's flags win
    assert 'out/drift_16M/16M-untied-baseline-lr0.3-s2-fp32head' in {run.out for run in runs}


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5', SEEDS='7',
                STEPS='40', DATA='d &', OUT="o $(x)'", FLAGS='--beta2=0.99  --log_every=8\n')
    assert (run.method, run.size, run.lr, run.weight_tying, run.lam) == ('z_loss', '29M', 0.05, True, 3e-5)
    assert (run.seed, run.steps, run.data, run.beta2, run.log_every) == (7, 40, 'd &', 0.99, 8)
    assert run.out == "o $(x)'/29M-tied-z_loss-lam3e-05-lr0.05-s7"
    assert 'METHODS' in sweep('--help')
    assert 'demo demo' in sweep('demo', 'demo', status=2)
    assert 'METHODS' in sweep(METHOD='mu_loss', status=2) and 'False' in sweep(TYING='False', status=2)


@pytest.mark.parametrize('gpus, env, n', [
    (8, {}, 8), (6, {}, 4), (6, {'JOBS': '2'}, 2), (0, {}, 1), (8, {'NPROC': '3'}, 3), (8, {'JOBS': '9'}, 1),
    (8, {'FLAGS': '--device=cpu'}, 1)])
def test_what_sweep_starts(tmp_path, gpus, env, n):
    """The runner, in its place, so that signals reach it; with as many GPUs a run as there are."""
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec echo {gpus}\necho $$ "$@" >>calls; cat >>calls\n')
    python.chmod(0o755)
    env = {**CLEAN, 'PATH': f'{tmp_path}:{ENV["PATH"]}', 'SIZES': '16M', 'LRS': '0.1', 'METHODS': 'mu_loss',
           'TYING': 'tied', 'DATA': 'data/stdlib', **env}
    started = subprocess.Popen(['bash', f'{ROOT}/sweep.sh'], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
    assert started.wait() == 0
    prepared, run, line = (tmp_path / 'calls').read_text().splitlines()
    assert prepared.endswith(' prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib')
    assert run == f'{started.pid} -m tools.runner --jobs={env.get("JOBS", 1)}'
    launch = 'python' if n == 1 else f'torchrun --standalone --nproc_per_node={n}'
    assert line.startswith(f'{launch} train.py --data=data/stdlib --size=16M --method=mu_loss')


# -------- the runner
# Stands in for train.py: waits for the file `go` if its run is named in `hold`, fails if it is named in `broken`.
TRAIN = """
import os, sys, time
from pathlib import Path
def note(what): os.write(notes, f'{what} {out.name} {os.environ["CUDA_VISIBLE_DEVICES"]}\\n'.encode())
out, notes = Path(sys.argv[-1].removeprefix('--out=')), os.open('notes', os.O_WRONLY | os.O_APPEND)
note('start')
while out.name in Path('hold').read_text() and not Path('go').exists(): time.sleep(0.01)
broken = out.name in Path('broken').read_text()
if not broken: out.mkdir(), (out / 'result.json').touch()
note('end')
sys.exit('error: no luck' if broken else print(*sys.argv))
"""


class Runs:
    """A folder with a list of commands, in which the runner is called."""

    def __init__(self, corpus, monkeypatch, capsys):
        self.corpus, self.monkeypatch, self.capsys, self.lines = corpus, monkeypatch, capsys, []
        for name, text in ('train.py', TRAIN), ('launch', 'shift; exec python "$@"'):
            Path(name).write_text(text)
        for name in 'notes', 'hold', 'broken':
            Path(name).touch()
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'H100')
        monkeypatch.setattr(train, 'find_start', lambda run: (Path(run.out, 'result.json').exists(), None))

    def add(self, *flags, processes=1):
        launch = 'python' if processes == 1 else f'sh launch --nproc_per_node={processes}'
        i = len(self.lines)
        self.lines.append(f'{launch} train.py --size=tiny --block_size=32 --batch_size=12 --data={self.corpus} '
                          f'--seed={i} {shlex.join(flags)} --out="out/my runs/r{i}"')

    def call(self, *argv, gpus=''):
        """The runner with GPUs of such names -> its exit status, what it printed, what it analysed."""
        analysed = []
        self.monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
        self.monkeypatch.setattr(torch.cuda, 'device_count', lambda: len(gpus.split(',')) if gpus else 0)
        self.monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpus != '')
        self.monkeypatch.setattr(runner.analyze, 'main', analysed.extend)
        self.monkeypatch.setattr('sys.stdin', io.StringIO('\n\n'.join(self.lines)))
        with pytest.raises(SystemExit) as ended:
            runner.main(argv)
        return ended.value.code, self.capsys.readouterr().out.splitlines(), analysed

    def notes(self, what=''):
        """[what, name, GPUs] of each start and end, or of one of these."""
        return [line.split(' ') for line in Path('notes').read_text().splitlines() if line.startswith(what)]

    def after(self, n_notes, act):
        """Calls `act` when there are so many notes."""
        def wait():
            while len(self.notes()) < n_notes:
                time.sleep(0.01)
            act()
        Thread(target=wait, daemon=True).start()


@pytest.fixture
def runs(corpus, tmp_path, monkeypatch, capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)
    yield Runs(corpus, monkeypatch, capsys)
    Path('go').touch()  # nothing waits on after a test that failed
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize('seed', range(3))
def test_any_list(runs, seed):
    """Of runs on one GPU, several, or none, of which two fail and are tried again by the same command."""
    rng = random.Random(seed)
    names, jobs = rng.choice(['0,1,2,3', '7,2,5,4', 'GPU-a,GPU-b,GPU-c']), rng.choice([1, 2, 3])
    gpus = names.split(',')
    needs = {f'r{i}': rng.choice([0, 1, len(gpus) // jobs]) for i in range(7)}  # no two have to share a GPU
    for n in needs.values():
        runs.add(f'--device={"cuda" if n else "cpu"}', processes=n or 1)
    broken = rng.sample([*needs], 2)
    for fail, todo in (broken, [*needs]), ([], broken):
        Path('broken').write_text(' '.join(fail))
        Path('notes').write_text('')
        status, printed, analysed = runs.call(f'--jobs={jobs}', gpus=names)
        assert {*str(status).split()} & needs.keys() == {*fail} and bool(status) == bool(fail)
        assert analysed == ['out/my runs'] and printed[0].startswith(f'{len(todo)} of 7 runs')
        assert sum('error: no luck' in line for line in printed) == len(fail)
        assert sorted(name for _, name, _ in runs.notes('start')) == sorted(todo)
        at_work = {}
        for what, name, given in runs.notes():
            if what == 'start':
                assert len(at_work) < jobs
                at_work[name] = given.split(',') if given else []
                taken = sum(at_work.values(), [])
                assert len(at_work[name]) == needs[name] and len({*taken} & {*gpus}) == len(taken)
            else:
                del at_work[name]
    log = Path('out/my runs/logs', f'{broken[0]}.log').read_text()  # of both times
    assert log.startswith('error: no luck\ntrain.py --size=tiny')


def test_shared_gpu(runs):
    for _ in range(3):
        runs.add()
    Path('hold').write_text('r0 r1 r2')
    runs.after(3, Path('go').touch)
    assert runs.call('--jobs=3', gpus='5,4')[0] == 0
    assert sorted(given for _, _, given in runs.notes('start')) == ['4', '5', '5']


def test_minutes_left(runs, monkeypatch):
    clock = count(0, 600)  # ten minutes a run
    monkeypatch.setattr(runner, 'time', SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    for _ in range(4):
        runs.add()
    progress = [line.split(' min left] ') for line in runs.call()[1][1:5]]
    assert [left for left, _ in progress] == [f'[{n}/4, about {40 - 10 * n}' for n in (1, 2, 3, 4)]
    assert progress[2][1].startswith('r2: train.py --size=tiny')  # the last line of its log


@pytest.mark.parametrize('name', ['INT', 'TERM', 'HUP', 'HUP, ignored'])
def test_signals(runs, name):
    """Its two runs end, and nothing else in its process group; nohup's ignored signal changes nothing."""
    number = getattr(signal, f'SIG{name[:4].strip(",")}')
    if 'ignored' in name:
        signal.signal(number, signal.SIG_IGN)
    for _ in range(4):
        runs.add()
    Path('hold').write_text('r1 r2')
    other = subprocess.Popen(['sleep', '100'])
    runs.after(4, lambda: (os.kill(os.getpid(), number), 'ignored' in name and Path('go').touch()))
    status, _, analysed = runs.call('--jobs=2')
    assert other.poll() is None
    other.kill()
    if 'ignored' not in name:
        assert 'the same command again' in status and not analysed and len(runs.notes()) == 4
        Path('go').touch()
        status, printed, analysed = runs.call('--jobs=2')
        assert printed[0].startswith('3 of 4 runs') and len(runs.notes('start')) == 6
    assert status == 0 and analysed and len(runs.notes('end')) == 4
