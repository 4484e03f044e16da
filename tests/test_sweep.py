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


def test_check():
    """Two runs, or as the variables say; stdout has the commands alone."""
    names = ['method', 'size', 'weight_tying', 'lr', 'steps', 'batch_size', 'block_size', 'lam', 'cap']
    same = ('16M', False, 0.3, 100_000, 64, 2048, None, None)
    assert_grid(plan('check'), names, [('baseline', *same), ('mu_centering', *same)], {'final_gain': True})
    assert 'check trains 2 runs' in sweep('check')[1]
    assert [run.size for run in plan('check', METHODS='mu_loss', SIZES='16M 29M')] == ['16M', '29M']


@pytest.mark.parametrize('threads', ['1', '64'])
def test_jobs_of_the_demo(threads, tmp_path):
    """As many as there are cores, whatever OMP_NUM_THREADS says."""
    (tmp_path / 'python').write_text('#!/bin/sh\necho "$@" >>calls\n')
    (tmp_path / 'python').chmod(0o755)
    env = {'PATH': f'{tmp_path}:{ENV["PATH"]}', 'OMP_NUM_THREADS': threads}
    subprocess.run(['bash', f'{ROOT}/sweep.sh', 'demo'], cwd=tmp_path, env=env, check=True)
    *_, started = (tmp_path / 'calls').read_text().splitlines()
    assert started == f'-m tools.runner --jobs={len(os.sched_getaffinity(0))}'


def test_variables():
    run, = plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                SEEDS='7', STEPS='40', DATA='d &', OUT="o $(x)'", FLAGS='--beta2=0.99  --log_every=8\n')
    settings = {'method': 'z_loss', 'size': '29M', 'lr': 0.05, 'weight_tying': True, 'lam': 3e-5, 'seed': 7,
                'steps': 40, 'data': 'd &', 'out': "o $(x)'/29M-tied-z_loss-lam3e-05-lr0.05-s7",
                'beta2': 0.99, 'log_every': 8}
    assert vars(run).items() >= settings.items()
    assert plan('demo', FLAGS='--batch_size=16')[0].batch_size == 16  # the user's flags win


def test_what_sweep_refuses():
    assert 'METHODS' in sweep('--help')[0]
    assert 'demo demo' in sweep('demo', 'demo', status=2)[1]
    assert 'False' in sweep(TYING='False', status=2)[1]


@pytest.mark.parametrize('gpus, env, n', [
    (8, {}, 8), (6, {'JOBS': '2'}, 3), (0, {}, 1), (8, {'NPROC': '3'}, 3), (8, {'JOBS': '9'}, 1),
    (8, {'FLAGS': '--device=cpu'}, 1)])
def test_what_sweep_starts(tmp_path, gpus, env, n):
    """The runner, in its place, so that signals reach it; with as many GPUs a run as there are."""
    (tmp_path / 'python').write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec echo {gpus}\necho $$ "$@" >>calls; cat >>calls\n')
    (tmp_path / 'python').chmod(0o755)
    env = {'PATH': f'{tmp_path}:{ENV["PATH"]}', 'SIZES': '16M', 'LRS': '0.1', 'METHODS': 'mu_loss',
           'TYING': 'tied', 'DATA': 'data/chars', **env}
    started = subprocess.Popen(['bash', f'{ROOT}/sweep.sh'], cwd=tmp_path, env=env,
                               stdin=subprocess.DEVNULL)
    assert started.wait() == 0
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

note('start')
signal.alarm(200)  # no test waits for ever
exec(Path('act').read_text())
time.sleep(0.08)  # so that runs that are started together are seen together
(out / 'result.json').write_text('{}')
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
        status, (first, *progress), analysed = runs.call(f'--jobs={jobs}', gpus=names, act=act)
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
    log = Path('out/my runs', broken[0], 'run.log').read_text()  # of both times
    assert log.startswith('error: no luck\ntrain.py --size=tiny')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals(runs, number):
    """r1 and r2 are at work when the runner is signalled: they end before it."""
    for _ in range(4):
        runs.add()
    act = f'''if out.name in ('r1', 'r2'):
    while starts() < 3: time.sleep(0.01)
    if out.name == 'r2': os.kill(os.getppid(), {number:d})
    time.sleep(100)'''
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    status, _, analysed = runs.call('--jobs=2', act=act)
    assert 'same command resumes' in status and not analysed
    signal.signal(signal.SIGINT, before)
    assert [name for _, name, *_ in runs.notes('end')] == ['r0']
    for _, _, pid, _ in runs.notes('start'):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)

    runs.capsys.readouterr()
    status, printed, analysed = runs.call('--jobs=2')
    assert status == 0 and printed[0].startswith('3 of 4 runs') and analysed
    assert len([*Path('out').glob('*/*/result.json')]) == 4


@pytest.mark.parametrize('flags, named', [
    (['', '--bta=1'], '--bta'), (['', '--data=none'], 'none'), (['', '--lr=nan'], '--lr'),
    (['--out="out/my runs/s/x"'], 'seed=9')])
def test_what_is_refused_before_the_first_run(runs, flags, named):
    """By train.read_command, as train.py itself would; x is there, with another seed."""
    args = train.read_command([*runs.flags.split(), '--seed=9', '--out=out/my runs/s/x'])
    Path(args.out).mkdir(parents=True)
    train.save(vars(args), f'{args.out}/config.json')
    for of_run in flags:
        runs.add(of_run)
    status, printed, _ = runs.call()
    assert status == 2 and named in printed[-1] and len(printed) < 3 and not runs.notes()


def test_no_jobs(runs):
    runs.add()
    status, printed, _ = runs.call('--jobs=0')
    assert status == 2 and '--jobs' in printed[-1] and not runs.notes()


def test_check_starts_nothing(runs):
    """On a login node without GPUs, where runs on GPUs have begun, in their default dtype."""
    runs.flags = runs.flags.replace('--dtype=float32', '')
    runs.add(processes=4)
    runs.add(processes=4)
    done = 'out/my runs/r0'
    args = train.read_command([*runs.flags.split(), '--seed=0', '--device=cuda', f'--out={done}'], 4)
    Path(done).mkdir(parents=True)
    train.save(vars(args), f'{done}/config.json')
    train.save({}, f'{done}/result.json')

    status, printed, analysed = runs.call('--check')
    assert status == 0 and len(printed) == 1 and printed[0].startswith('1 of 2 runs')
    assert not analysed and not runs.notes() and os.listdir('out/my runs') == ['r0']
    runs.lines[0] += ' --eps=1'
    status, printed, _ = runs.call('--check')
    assert status == 2 and 'eps=' in printed[-1]


def test_shell_variables(runs, monkeypatch):
    """They are what a shell would make of them: no folder is named $SCRATCH."""
    monkeypatch.setenv('SCRATCH', 'my scratch')
    for folder in ('$SCRATCH', '${SCRATCH}'):
        runs.add()
        runs.lines[-1] = runs.lines[-1].replace('out/my runs', f'{folder}/out')
    status, _, analysed = runs.call()
    assert status == 0 and analysed == ['my scratch/out']
    assert {path.parent.name for path in Path('my scratch/out').glob('*/result.json')} == {'r0', 'r1'}


@pytest.mark.parametrize('task, runs_list', [('', 'runs.txt'), ('1', 'lost.txt')])
def test_slurm_without_a_line(task, runs_list, tmp_path):
    """Neither a job without --array nor a lost list may seem done; without --array nothing is run."""
    (tmp_path / 'runs.txt').write_text('touch ran\n')
    env = {**os.environ, 'SLURM_ARRAY_JOB_ID': '9', 'SLURM_ARRAY_TASK_ID': task}
    done = subprocess.run(['bash', f'{ROOT}/tools/slurm.sh', runs_list], env=env, cwd=tmp_path)
    assert done.returncode != 0 and not (tmp_path / 'ran').exists()


def test_slurm_with_several_nodes(tmp_path):
    """Each task has a port of its own. A list of one-process runs would train each of them twice."""
    for name, line in (('scontrol', 'echo node1; echo node2'), ('srun', 'echo "$@"')):
        (tmp_path / name).write_text(f'#!/bin/sh\n{line}\n')
        (tmp_path / name).chmod(0o755)
    lines = ['torchrun --standalone --nproc_per_node=4 train.py --lr=1', 'python train.py']
    (tmp_path / 'runs.txt').write_text('\n'.join(lines))
    env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_ARRAY_JOB_ID': '9', 'SLURM_NTASKS': '2',
           'SLURM_CPUS_PER_TASK': '8'}
    ports = []
    for line, job, status in (('1', '9', 0), ('1', '20010', 0), ('3', '9', 2), ('2', '11', 2)):
        env |= {'SLURM_ARRAY_TASK_ID': line, 'SLURM_JOB_ID': job}
        done = subprocess.run(['bash', f'{ROOT}/tools/slurm.sh', 'runs.txt'], env=env, cwd=tmp_path,
                              text=True, capture_output=True)
        assert done.returncode == status
        ports += re.findall(r'--nnodes=2 .*--rdzv_endpoint=node1:(\d+) .*=4 train.py --lr=1', done.stdout)
    assert ports == ['10009', '10010']
    assert 'line 2' in done.stderr


def test_nothing_to_analyse(runs):
    """All runs fail before they begin: the line that names them is what is left."""
    runs.add()
    status, _, analysed = runs.call(act="sys.exit('error: no luck')")
    assert 'r0' in status and not analysed


def test_done_by_another_runner(runs):
    """Two runners of one list at once: a run that the other one has done meanwhile has not failed."""
    runs.add()
    status, _, analysed = runs.call(act="""(out / 'result.json').write_text('{}')
sys.exit('error: the folder is locked by another process')""")
    assert status == 0 and analysed


def test_preempted(runs):
    """A run that a signal has ended after a checkpoint is not done, and the same command goes on."""
    runs.add()
    status, printed, _ = runs.call(act="sys.exit(143)")
    assert 'r0' in status and printed[0].startswith('1 of 1')
    assert runs.call()[0] == 0
