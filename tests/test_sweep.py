"""sweep.sh: its grids, and sweeps that are killed, shared or have a run that fails."""
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

import train
from conftest import ENV, ROOT, folder_hash

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()

# Stands in for train.py, which takes seconds to start. It notes its start and is done. The file `hold` has a
# number: runs that start after so many others wait. The run that the file `broken` names fails.
STAND_IN = '''
import os, sys, time
from pathlib import Path

out = Path(sys.argv[-1].removeprefix('--out='))
out.mkdir(parents=True, exist_ok=True)
me = f'{out.name} {os.getpid()} {os.environ.get("CUDA_VISIBLE_DEVICES")}'
print(me, file=open('started', 'a'))
others = Path('started').read_text().splitlines().index(me)
while others >= int(Path('hold').read_text()):
    time.sleep(0.01)
if Path('broken').read_text() == out.name:
    sys.exit('error: no luck')
print('done: test loss 1.25')
'''


class Sweep:
    """A folder in which sweep.sh makes ten runs of the stand-in, two at a time."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / 'o$(touch${IFS}pwned)*ut'
        (folder / 'bin').mkdir()
        (folder / 'train.py').write_text(STAND_IN)
        for name, text in {'started': '', 'broken': '', 'hold': '99'}.items():
            (folder / name).write_text(text)
        shutil.copy(Path(ROOT, 'sweep.sh'), folder)
        self.program('python', f'case $1 in train.py) exec {sys.executable} "$@" ;; esac')
        self.program('torchrun', 'exec python "${@:3}"')
        self.program('nvidia-smi', 'echo NVIDIA-SMI has failed, with a comma; exit 9')
        self.env = {**ENV, 'PATH': f'{folder}/bin:{ENV["PATH"]}', 'OUT': str(self.out),
                    'DATA': '.', 'JOBS': '2', 'METHODS': 'z_loss mu_loss', 'LRS': '1e-4 3e-4 1e-3 3e-2 0.1'}
        self.env.pop('CUDA_VISIBLE_DEVICES', None)

    def program(self, name, lines):
        (self.folder / 'bin' / name).write_text(f'#!/usr/bin/env bash\n{lines}\n')
        (self.folder / 'bin' / name).chmod(0o755)

    def start(self, grid='demo', cwd=None, script='sweep.sh', **env):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell cannot undo that it is ignored
        return subprocess.Popen(['bash', str(script), grid], cwd=cwd or self.folder, env={**self.env, **env},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)  # a process group of its own, as a terminal's job has

    def run(self, status=0, **given):
        sweep = self.start(**given)
        out, error = sweep.communicate(timeout=60)
        assert sweep.returncode == status, out + error
        return out, error

    def start_and_hold(self, runs, done, **env):
        """A sweep of which `runs` have started: so many of them are done, the others wait."""
        (self.folder / 'hold').write_text(str(done))
        sweep = self.start(**env)
        deadline = time.monotonic() + 60
        while (len(self.started()), self.done()) != (runs, done):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return sweep

    def started(self):
        """What the runs noted: name, process, GPUs."""
        return [line.split() for line in (self.folder / 'started').read_text().splitlines()]

    def done(self):
        return len(list(self.out.glob('*/sweep.done')))

    def plan(self, grid, **env):
        """The settings of a grid's runs, as train.py reads them from the commands of DRY_RUN=1."""
        lists = dict.fromkeys(('METHODS', 'LRS', 'OUT', 'DATA', 'JOBS'), '')
        lines = self.run(grid=grid, **{**lists, 'DRY_RUN': '1', **env})[0].splitlines()
        runs = [train.make_parser().parse_args(shlex.split(line)[2:]) for line in lines]
        assert len({run.out for run in runs}) == len(runs)
        return runs


@pytest.fixture
def fake(tmp_path):
    yield Sweep(tmp_path)
    (tmp_path / 'hold').write_text('99')  # nothing waits on after a test that failed


@pytest.mark.parametrize('grid, methods, lams, tyings, name', [
    ('paper', PAPER, [None], [False, True], '16M-tied-mu_loss-lr0.0003-s1'),
    ('ablation', ['z_loss', 'mu_loss'], [1e-7, None, 1e-1, 1e2], [False],
     '57M-untied-z_loss-lam1e-07-lr0.3-s1')])
def test_the_grids_of_the_paper(fake, grid, methods, lams, tyings, name):
    runs = fake.plan(grid)
    planned = [(run.method, run.lr, run.size, run.weight_tying, run.lam) for run in runs]
    lrs, sizes = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), '16M 29M 57M 109M 221M'.split()
    assert sorted(planned, key=str) == sorted(product(methods, lrs, sizes, tyings, lams), key=str)
    defaults = vars(train.make_parser().parse_args([]))
    for given in ('method', 'lr', 'size', 'weight_tying', 'lam', 'out'):
        del defaults[given]
    assert all(vars(run).items() >= defaults.items() for run in runs)  # 100,000 steps, seed 1, ...
    assert f'out/paper/{name}' in {run.out for run in runs}


def test_some_runs_of_the_demo_are_shifted(fake):
    runs = fake.plan('demo')
    assert {(run.method, run.lr, run.size) for run in runs} >= set(product(PAPER, [1e-2, 3e-1], ['tiny']))
    shifted = {(run.method, run.mu_shift, run.logits_dtype, run.lr) for run in runs if run.mu_shift}
    assert shifted == set(product(('baseline', 'mu_centering'), [1000], ('bfloat16', 'float32'), [0.01]))
    assert not any(run.mu_shift for run in fake.plan('demo', TYING='tied') + fake.plan('demo', LRS='3e-1'))


def test_the_variables_replace_the_lists_of_a_grid(fake):
    run, = fake.plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                     SEEDS='7', STEPS='40', DATA='d', OUT='o/x', FLAGS='--beta2=0.99  --log_every=8')
    assert (run.method, run.size, run.lr, run.weight_tying, run.lam) == ('z_loss', '29M', 0.05, True, 3e-5)
    assert (run.seed, run.steps, run.data, run.beta2, run.log_every) == (7, 40, 'd', 0.99, 8)
    assert run.out == 'o/x/29M-tied-z_loss-lam3e-05-lr0.05-s7'
    assert {run.data for run in fake.plan('demo', DATA='my data&', OUT='my runs&')} == {'my data&'}


@pytest.mark.parametrize('env, given', [
    ({}, ['0,1', '2,3']), ({'NPROC': '3'}, ['0,1,2', '3,4,5']),
    ({'CUDA_VISIBLE_DEVICES': '5,4'}, ['4', '5']), ({'CUDA_VISIBLE_DEVICES': '-1'}, ['-1', '-1'])])
def test_each_run_has_its_own_gpus(fake, env, given):
    """Of six: a power of two of them, which divides the batch, if NPROC does not say."""
    fake.program('nvidia-smi', ''.join(f'echo "GPU {i}: NVIDIA H100 (UUID: a)"\n' for i in range(6)))
    assert re.fullmatch('error: .*JOBS=7.*\n', fake.run(2, grid='paper', JOBS='7', DRY_RUN='1')[1])  # too few
    fake.run(grid='paper', JOBS='7', FLAGS='--device cpu', DRY_RUN='1')  # no GPU at all
    sweep = fake.start_and_hold(2, 0, grid='paper', SIZES='16M', **env)
    assert sorted(line[2] for line in fake.started()) == given
    os.killpg(sweep.pid, signal.SIGTERM)
    sweep.communicate()


@pytest.mark.parametrize('name', ['KILL', 'INT', 'TERM'])
def test_a_sweep_that_a_signal_ended_has_no_runs_left_and_resumes(fake, name):
    """The signal goes to the process group, as Ctrl-C in a terminal does."""
    sweep = fake.start_and_hold(4, 2)
    os.killpg(sweep.pid, getattr(signal, f'SIG{name}'))
    sweep.communicate(timeout=60)  # until all that hold its output have ended, the runs too
    assert sweep.returncode != 0 and fake.done() == 2 and len(fake.started()) == 4
    (fake.folder / 'hold').write_text('99')
    fake.run()
    assert fake.done() == 10 and len(fake.started()) == 12  # two of them for the second time
    before, (out, error) = folder_hash(fake.out), fake.run()
    assert out.startswith('0 of 10 runs') and error == '' and folder_hash(fake.out) == before
    assert not (fake.folder / 'pwned').exists()


def test_a_sweep_that_was_killed_alone_starts_no_more_runs(fake):
    sweep = fake.start_and_hold(4, 2)
    sweep.kill()
    sweep.wait()
    (fake.folder / 'all').write_text('99')
    os.replace(fake.folder / 'all', fake.folder / 'hold')  # which the runs are reading
    sweep.communicate(timeout=60)
    assert fake.done() == len(fake.started()) == 4


def test_the_demo_makes_its_data_and_the_status_is_that_of_the_analysis(fake):
    fake.program('python', f'''echo "$@" >> {fake.folder}/python
case $1 in train.py) exec {sys.executable} "$@" ;; analyze.py) exit 7 ;; esac''')
    fake.run(7, DATA='data/stdlib', LRS='0.1')
    lines = (fake.folder / 'python').read_text().splitlines()
    assert lines[1] == 'prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib'
    assert '--data=data/stdlib ' in lines[2] and lines[-1] == f'analyze.py {fake.out}'


def test_a_run_that_fails_is_named_and_does_not_stop_the_others(fake):
    broken = fake.folder / 'broken'
    broken.write_text('tiny-untied-mu_loss-lr0.001-s1')
    for left in (10, 1):  # the same command tries that one alone
        out, error = fake.run(1)
        assert out.startswith(f'{left} of 10 runs') and fake.done() == 9
        assert f'[{left}/{left}, about 0 min left]' in out and f'{broken.read_text()}: error: no luck' in out
        assert broken.read_text() in error and error.count('tiny-untied-') == 1
    assert fake.run(1, STEPS='7')[0].startswith('10 of 10 runs')  # others


def test_it_finds_the_clone(fake, tmp_path):
    """By a link from elsewhere; and a copy that sbatch starts in the clone."""
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'link').symlink_to(fake.folder / 'sweep.sh')
    fake.run(cwd=other, script=other / 'link', LRS='0.1')
    fake.run(script=shutil.copy(fake.folder / 'sweep.sh', other))
    assert fake.done() == len(fake.started()) == 10


@pytest.mark.parametrize('wrong, named', [
    ({'JOBS': '0'}, 'JOBS=0'), ({'NPROC': 'x'}, 'NPROC=x'), ({'LRS': '1e-1 0.1'}, '-lr0.1-s1'),
    ({'grid': 'none'}, 'none'), ({'grid': 'demo demo'}, 'demo demo'), ({'cwd': '/'}, 'clone'), ({}, 'torch')])
def test_what_is_wrong_is_one_line(fake, wrong, named, tmp_path):
    fake.program('python', 'exit 1')  # no torch
    script = shutil.copy(fake.folder / 'sweep.sh', tmp_path / 'bin') if 'cwd' in wrong else 'sweep.sh'
    error = fake.run(2, script=script, **wrong)[1]
    assert re.fullmatch('error: .*\n', error) and named in error and not fake.out.exists()
