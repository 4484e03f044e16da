"""sweep.sh: its grids, and sweeps that are killed, stopped, shared or have a run that fails."""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

import train
from conftest import ENV, ROOT, folder_hash, times
from oec import common

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()
LRS = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = '16M 29M 57M 109M 221M'.split()

# Stands in for train.py, which takes seconds to start. It locks its folder, notes its start and is done. If
# the file `hold` has a number, runs that start after so many others wait. The run that `broken` names dies.
STAND_IN = '''
import os, signal, time
from pathlib import Path
from oec import common

def text(name):
    return Path(name).read_text() if Path(name).exists() else ''

def main(argv):
    out = Path(argv[-1].removeprefix('--out='))
    with common.lock_folder(out):
        me = f'{out.name} {os.getpgid(0)} {os.getpid()} {os.environ.get("CUDA_VISIBLE_DEVICES")}'
        print(me, file=open('started', 'a'))
        others = text('started').splitlines().index(me)
        while others >= int(text('hold') or 100):
            time.sleep(0.01)
        if text('broken') == out.name:
            os.kill(os.getpid(), signal.SIGKILL)
        common.write_json(out / 'result.json', {})
        print('done: test loss 1.25')

common.program(main)
'''


class Sweep:
    """A folder in which sweep.sh makes ten runs of the stand-in, two at a time."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / 'o$(touch${IFS}pwned)*ut'
        (folder / 'bin').mkdir()
        (folder / 'sweep.sh').symlink_to(Path(ROOT, 'sweep.sh'))
        (folder / 'stand_in.py').write_text(STAND_IN)
        self.program('python', f'case $1 in train.py) exec {sys.executable} stand_in.py "${{@:2}}" ;; '
                     '-c) cat >/dev/null ;; esac')
        self.program('torchrun', 'set -m; python "${@:3}" &\n'  # no process of its own group, and not at once
                     'trap "sleep 0.3; kill $!" TERM; wait $! || { wait; exit 1; }')
        self.program('nvidia-smi', 'echo NVIDIA-SMI has failed, with a comma; exit 9')
        self.env = {**ENV, 'PATH': f'{folder}/bin:{ENV["PATH"]}', 'PYTHONPATH': ROOT, 'OUT': str(self.out),
                    'DATA': '.', 'JOBS': '2', 'METHODS': 'z_loss mu_loss', 'LRS': '1e-4 3e-4 1e-3 3e-2 0.1'}
        self.env.pop('CUDA_VISIBLE_DEVICES', None)

    def program(self, name, lines):
        (self.folder / 'bin' / name).write_text(f'#!/usr/bin/env bash\n{lines}\n')
        (self.folder / 'bin' / name).chmod(0o755)

    def start(self, grid='demo', **env):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell cannot trap what is ignored
        return subprocess.Popen(['bash', 'sweep.sh', *grid.split()], cwd=self.folder, env={**self.env, **env},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)  # or a broken sweep.sh would end pytest with it

    def start_and_hold(self, runs, done, **env):
        """A sweep of which `runs` have started: so many of them are done, the others wait."""
        (self.folder / 'hold').write_text(str(done))
        started = self.start(**env)
        deadline = time.monotonic() + 60
        while (len(self.started()), self.done()) != (runs, done):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return started

    def run(self, status=0, grid='demo', **env):
        return end(self.start(grid, **env), status)

    def started(self):
        """What the runs noted: name, process group, process, GPUs."""
        path = self.folder / 'started'
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def done(self):
        return len(list(self.out.glob('*/sweep.done')))

    def plan(self, grid, **env):
        """The settings of a grid's runs, as train.py reads them from the commands of DRY_RUN=1."""
        lists = {name: '' for name in ('METHODS', 'LRS', 'OUT', 'DATA', 'JOBS')}
        lines = self.run(grid=grid, **{**lists, 'DRY_RUN': '1', **env})[0].splitlines()
        runs = [train.parse_flags(line.split()[2:]) for line in lines]
        assert len({run.out for run in runs}) == len(runs)
        return runs


def end(started, status):
    out, error = started.communicate(timeout=60)
    assert started.returncode == status, out + error
    return out, error


@pytest.fixture
def fake(tmp_path):
    yield Sweep(tmp_path)
    (tmp_path / 'hold').unlink(missing_ok=True)  # nothing waits on after a test that failed


@pytest.mark.parametrize('grid, methods, lams, tyings, name', [
    ('paper', PAPER, [None], [False, True], '16M-tied-mu_loss-lr0.0003-s1'),
    ('ablation', ['z_loss', 'mu_loss'], [1e-7, 1e-4, 1e-1, 1e2], [False],
     '57M-untied-z_loss-lam1e-07-lr0.3-s1')])
def test_the_grids_of_the_paper(fake, grid, methods, lams, tyings, name):
    runs = fake.plan(grid)
    found = [(run.method, run.lr, run.size, run.weight_tying, run.lam) for run in runs]
    assert sorted(found, key=str) == sorted(product(methods, LRS, SIZES, tyings, lams), key=str)
    given = {'method', 'lr', 'size', 'weight_tying', 'lam', 'out'}
    defaults = {name: value for name, value in vars(train.parse_flags([])).items() if name not in given}
    assert all(vars(run).items() >= defaults.items() for run in runs)  # 100,000 steps, seed 1, ...
    assert f'out/{grid}/{name}' in {run.out for run in runs}


def test_four_runs_of_the_demo_are_shifted(fake):
    runs = fake.plan('demo')
    shifted = {(run.method, run.mu_shift, run.logits_dtype, run.lr) for run in runs if run.mu_shift}
    assert shifted == {('baseline', 300, 'bfloat16', 0.01), ('baseline', 1000, 'bfloat16', 0.01),
                       ('baseline', 1000, 'float32', 0.01), ('mu_centering', 1000, 'bfloat16', 0.01)}
    assert {(run.method, run.lr, run.size) for run in runs} >= set(product(PAPER, [1e-2, 3e-1], ['tiny']))


def test_the_variables_replace_the_lists_of_a_grid(fake):
    run, = fake.plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                     SEEDS='7', STEPS='40', DATA='d', OUT='o/x', FLAGS='--beta2=0.99  --log_every=8')
    assert (run.method, run.size, run.lr, run.weight_tying, run.lam) == ('z_loss', '29M', 0.05, True, 3e-5)
    assert (run.seed, run.steps, run.data, run.beta2, run.log_every) == (7, 40, 'd', 0.99, 8)
    assert run.out == 'o/x/29M-tied-z_loss-lam3e-05-lr0.05-s7'


@pytest.mark.parametrize('there, jobs, nproc, given', [
    (3, 1, '', ['0,1']), (6, 2, '', ['0,1', '2,3']), (6, 2, '3', ['0,1,2', '3,4,5'])])
def test_each_run_has_its_own_gpus(fake, there, jobs, nproc, given):
    """A power of two of them, which divides the batch, if NPROC does not say. Too few are refused."""
    fake.program('nvidia-smi', f'seq 0 {there - 1}')
    first = fake.start_and_hold(jobs, 0, grid='paper', SIZES='16M', NPROC=nproc, JOBS=str(jobs))
    assert sorted(line[3] for line in fake.started()) == given
    first.terminate()
    end(first, 143)
    assert fake.run(2, 'paper', NPROC='4')[1].count('\n') == 1


@pytest.mark.parametrize('name, status, nproc', [
    ('KILL', -9, '1'), ('INT', 130, '1'), ('TERM', 143, '2'), ('HUP', 129, '2')])
def test_a_sweep_that_a_signal_ended_has_no_runs_left_and_resumes(fake, name, status, nproc):
    first = fake.start_and_hold(4, 2, NPROC=nproc)
    first.send_signal(getattr(signal, f'SIG{name}'))
    if name == 'KILL':  # all of it, the script first, as when a machine goes down
        os.killpg(int(fake.started()[0][1]), signal.SIGKILL)
    end(first, status)
    for run, *_ in fake.started():
        common.lock_folder(fake.out / run, wait=name == 'KILL').close()  # refused while the run is alive
    assert fake.done() == 2 and len(fake.started()) == 4
    (fake.folder / 'hold').unlink()
    fake.run()
    assert fake.done() == 10 and len(fake.started()) == 12  # two of them for the second time
    before, (out, error) = folder_hash(fake.out), fake.run()
    assert out.startswith('0 of 10 runs') and error == '' and folder_hash(fake.out) == before
    assert not (fake.folder / 'pwned').exists()


def test_a_run_that_fails_is_named_and_does_not_stop_the_others(fake):
    broken = fake.folder / 'broken'
    broken.write_text('tiny-untied-mu_loss-lr0.001-s1')
    for left in (10, 1):  # the same command tries that one alone
        out, error = fake.run(1)
        assert out.startswith(f'{left} of 10 runs') and fake.done() == 9
        assert broken.read_text() in error and error.count('tiny-untied-') == 2  # its name and its log

    broken.unlink()
    lost = fake.out / 'tiny-untied-z_loss-lr0.001-s1'
    shutil.rmtree(lost)
    with common.lock_folder(lost):  # by a second sweep, which is no failure of this one
        out, error = fake.run()
    assert out.startswith('2 of 10 runs') and error == '' and fake.done() == 9
    assert fake.run(STEPS='7')[0].startswith('10 of 10 runs')  # others


@pytest.mark.parametrize('wrong', [
    'METHODS= ', 'TYING=Tied', 'LRS=1e-2\r', 'LAMS=big', 'JOBS=a[$(touch pwned)]', 'JOBS=2\n3', 'NPROC=08',
    'FLAGS=--eps 1 --lr 2', 'DATA=a b', 'DATA=/nowhere', 'OUT=a b', 'OUT=/dev/null/x', 'grid=none',
    'grid=demo demo', 'SIZES=* tiny'])
def test_what_is_wrong_is_refused_with_one_line_and_nothing_is_written(fake, wrong):
    name, value = wrong.split('=')
    before = times(fake.folder)
    real = {'PATH': ENV['PATH']} if name == 'SIZES' else {}  # train.py refuses that
    error = fake.run(2, **{name: value, **real})[1]
    assert re.fullmatch(f'error: .*{name.rstrip("S")}.*\n', error, re.IGNORECASE)
    assert times(fake.folder) == before and ("'*'" in error) == ('*' in value)  # no file names
