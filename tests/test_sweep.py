"""sweep.sh: its grids, what it skips, who gets which GPU, sweeps that are killed or have a run that fails."""
import os
import shlex
import shutil
import signal
import subprocess
import time
from itertools import product

import pytest

import train
from conftest import ENV, ROOT, refused

PAPER = 'baseline weight_decay z_loss soft_capping mu_loss mu_centering'.split()

# Stands in for train.py, which takes seconds to start. It notes its start and is done. A run with HOLD in its
# name waits for the file `go`, the run BROKEN fails.
PYTHON = r"""#!/usr/bin/env bash
echo "$@" >>python
case $1 in
  train.py) ;;
  analyze.py) exit $ANALYSIS ;;
  -) cat >check.py; printf '%s\0' "$@" >check.args; exit ;;
  *) exit $TORCH ;;
esac
out=${!#} && out=${out#--out=} && name=${out##*/}
echo "${CUDA_VISIBLE_DEVICES-}" >>started
while [[ $name == *${HOLD-no run}* && ! -e go ]]; do sleep 0.01; done
[ "$name" != "$BROKEN" ] || { echo error: no luck; exit 1; }
mkdir -p "$out" && touch "$out/result.json"
"""


class Sweep:
    """A folder in which sweep.sh, called by a link, makes ten runs of the stand-in, two at a time."""
    def __init__(self, folder):
        self.folder, self.out = folder, folder / 'my $(touch pwned) runs'
        files = {'bin/python': PYTHON, 'bin/torchrun': 'python "${@:3}"', 'bin/nvidia-smi': 'echo "$GPUS"',
                 'train.py': '', 'started': '', 'a_train_1.bin': '', 'data/stdlib/a_train_1.bin': ''}
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        shutil.copy(f'{ROOT}/sweep.sh', folder)
        (folder / 'bin/link').symlink_to('../sweep.sh')
        self.env = {**ENV, 'PATH': f'{folder}/bin:{ENV["PATH"]}', 'GPUS': 'NVIDIA-SMI has failed, again',
                    'OUT': str(self.out), 'DATA': str(folder), 'JOBS': '2',
                    'METHODS': 'z_loss mu_loss', 'LRS': '1e-4 3e-4 1e-3 3e-2 0.1'}
        self.env.pop('CUDA_VISIBLE_DEVICES', None)

    def start(self, grid='demo', script='link', cwd='bin', **env):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell cannot undo that it is ignored
        return subprocess.Popen(  # in a process group of its own, as a terminal's job has
            ['bash', script, grid], cwd=self.folder / cwd, env={**self.env, **env}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def run(self, status=0, **given):
        sweep = self.start(**given)
        printed = sweep.communicate(timeout=60)
        assert sweep.returncode == status, printed
        return printed

    def held(self, started, done, **given):
        """Starts a sweep and returns it when so many of its runs have started and are done."""
        sweep = self.start(**given)
        deadline = time.monotonic() + 60
        while (len(self.gpus()), self.done()) != (started, done):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return sweep

    def gpus(self):  # of each run that has started
        return (self.folder / 'started').read_text().splitlines()

    def done(self):
        return len(list(self.out.glob('*/sweep.done')))

    def plan(self, grid, **env):
        """The settings of a grid's runs, as train.py reads them from the commands of DRY_RUN=1."""
        lists = dict.fromkeys(('METHODS', 'LRS', 'OUT', 'DATA', 'JOBS'), '')
        given = {**lists, 'DRY_RUN': '1', **env}
        lines = self.run(grid=grid, script='sweep.sh', cwd='.', **given)[0].splitlines()
        return [train.parser.parse_args(shlex.split(line)[2:]) for line in lines]


@pytest.fixture
def fake(tmp_path):
    yield Sweep(tmp_path)
    (tmp_path / 'go').touch()  # nothing waits on after a test that failed


@pytest.mark.parametrize('grid, methods, lams, tyings', [
    ('paper', PAPER, [None], [0, 1]), ('ablation', ['z_loss', 'mu_loss'], [1e-7, None, 0.1, 100], [0])])
def test_grids_of_the_paper(fake, grid, methods, lams, tyings):
    runs = fake.plan(grid)
    planned = {(run.method, run.lr, run.size, run.weight_tying, run.lam) for run in runs}
    lrs, sizes = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), '16M 29M 57M 109M 221M'.split()
    assert planned == set(product(methods, lrs, sizes, tyings, lams)) and len(planned) == len(runs)
    assert {(run.steps, run.seed, run.data) for run in runs} == {(100_000, 1, 'data/fineweb')}
    assert all(run.out.startswith(f'out/paper/{run.size}-') for run in runs)


def test_demo(fake):  # has the same dtypes on every CPU
    runs = fake.plan('demo')
    assert {(run.device, run.threads, run.dtype) for run in runs} == {('cpu', 1, 'float32')}
    planned = {(run.method, run.lr, run.mu_shift, run.logits_dtype) for run in runs}
    shifted = product(('baseline', 'mu_centering'), [0.01], [1000], ('bfloat16', 'float32'))
    assert planned == {*product(PAPER, [0.01, 0.3], [0], ['bfloat16']), *shifted} and len(runs) == 16
    planned = fake.run(DATA='', LRS='0.1', DRY_RUN='1')[0].splitlines()
    fake.run(7, DATA='', LRS='0.1', ANALYSIS='7')
    _, *started = (line for line in (fake.folder / 'python').read_text().splitlines() if line[:2] != '- ')
    prepare = 'prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib'
    trained = [' '.join(shlex.split(line)[1:]) for line in planned]
    assert [started[0], *sorted(started[1:])] == [prepare, f'analyze.py {fake.out}', *sorted(trained)]


def test_drift(fake):
    assert 'METHODS' in fake.run(grid='--help')[0]
    runs = fake.plan('drift')
    heads = {(run.method, run.logits_dtype) for run in runs}
    assert heads == {*product(('baseline', 'mu_centering'), ('bfloat16', 'float32')), ('mu_loss', 'bfloat16')}
    assert sorted(run.seed for run in runs) == 5 * [1] + 5 * [2] + 5 * [3]
    assert {(run.lr, run.steps, run.batch_size, run.block_size) for run in runs} == {(0.3, 12500, 8, 512)}
    assert {(run.eval_tokens, run.test_tokens) for run in runs} == {(2**20, 10 * 2**20)}
    for grid in ('drift', 'demo'):  # the user's flags win
        assert {run.batch_size for run in fake.plan(grid, FLAGS='--batch_size=16')} == {16}
    assert 'out/drift_16M/16M-untied-baseline-lr0.3-s2-fp32head' in {run.out for run in runs}
    assert 'none' in fake.run(2, grid='paper', DATA='none')[1]  # no shards, no run


def test_variables(fake):
    run, = fake.plan('ablation', METHODS=' z_loss\n', SIZES='29M', LRS='5e-2', TYING='tied', LAMS='3e-5',
                     SEEDS='7', STEPS='40', DATA='d &', OUT='o x', FLAGS='--beta2=0.99  --log_every=8')
    assert (run.method, run.size, run.lr, run.weight_tying, run.lam) == ('z_loss', '29M', 0.05, True, 3e-5)
    assert (run.seed, run.steps, run.data, run.beta2, run.log_every) == (7, 40, 'd &', 0.99, 8)
    assert run.out == 'o x/29M-tied-z_loss-lam3e-05-lr0.05-s7'
    printed = fake.run(DRY_RUN='1', DATA='d', OUT='o')[0]  # called in bin, to which they are relative
    assert f'--data={fake.folder}/bin/d ' in printed and f'--out={fake.folder}/bin/o/tiny-' in printed


@pytest.mark.parametrize('env, given', [
    ({}, ['0,1', '2,3']), ({'NPROC': '3'}, ['0,1,2', '3,4,5']),
    ({'CUDA_VISIBLE_DEVICES': '5,4', 'JOBS': '3'}, list('455')),
    ({'CUDA_VISIBLE_DEVICES': '9,8,7,6', 'JOBS': '1'}, ['9,8,7,6'])])
def test_shared_gpus(fake, env, given):
    gpus = '\n'.join(f'GPU {i}: NVIDIA H100 (UUID: a)' for i in range(6))
    methods = ' '.join(PAPER[:len(given)])
    fake.run(grid='paper', SIZES='16M', TYING='tied', LRS='1', METHODS=methods, GPUS=gpus, **env)
    assert sorted(fake.gpus()) == given


@pytest.mark.parametrize('kill, name, done', [
    (os.killpg, 'INT', 2), (os.kill, 'TERM', 2), (os.killpg, 'KILL', 2), (os.kill, 'KILL', 4)])
def test_killed_sweep(fake, kill, name, done):
    """Its two runs end too; not if it is killed alone by what it cannot catch."""
    sweep = fake.held(4, 2, HOLD='lr0.0003')
    kill(sweep.pid, getattr(signal, f'SIG{name}'))
    sweep.wait(timeout=60)
    (fake.folder / 'go').touch()
    sweep.communicate(timeout=60)  # until all that hold its output have ended, the runs too
    assert sweep.returncode != 0 and fake.done() == done and len(fake.gpus()) == 4
    fake.run()
    assert fake.done() == 10 and len(fake.gpus()) == 14 - done and not (fake.folder / 'pwned').exists()


def test_skipped_runs(fake):
    """What is done with the same settings, of which JOBS is none; for a copy, as sbatch starts one, too."""
    settings = {'LRS': '0.1'}
    for todo, name, value in ((2, 'JOBS', '2'), (0, 'JOBS', '1'), (2, 'STEPS', '7'), (2, 'FLAGS', '--eps=1'),
                              (2, 'FLAGS', ''), (2, 'DATA', '../data/stdlib')):
        settings[name] = value
        assert fake.run(**settings)[0].startswith(f'{todo} of 2 runs')
    (fake.out / 'tiny-untied-z_loss-lr0.1-s1/result.json').unlink()
    copy = shutil.copy(fake.folder / 'sweep.sh', fake.folder / 'bin/copy')
    settings['DATA'] = f'{fake.folder}/bin/../data/stdlib'
    assert fake.run(script=copy, cwd='.', **settings)[0].startswith('1 of 2 runs')


def test_failed_run(fake):
    broken = 'tiny-untied-mu_loss-lr0.001-s1'
    for left in (10, 1):  # the same command tries that one alone
        out, error = fake.run(1, BROKEN=broken)
        assert out.startswith(f'{left} of 10 runs') and f'{broken}: error: no' in out and fake.done() == 9
        assert f'[{left}/{left}, about 0 min left]' in out and broken in error and error.count('tiny-') == 1


@pytest.mark.parametrize('wrong, named', [
    ({'JOBS': '0'}, 'JOBS=0'), ({'NPROC': '7', 'grid': 'paper', 'CUDA_VISIBLE_DEVICES': '0'}, 'NPROC=7'),
    ({'LRS': '1e-1 0.1'}, '-lr0.1-s1'), ({'grid': 'demo demo'}, 'demo demo'), ({}, 'torch'),
    ({'METHOD': 'mu_loss'}, 'METHODS'), ({'TYING': 'False'}, 'TYING=False')])
def test_wrong_settings(fake, wrong, named):
    line = fake.run(2, TORCH='1', **wrong)[1].splitlines()[-1]
    assert line.startswith('error: ') and named in line and not fake.out.exists()


@pytest.mark.parametrize('wrong, named', [
    ({}, ''), ({'METHODS': 'baseline mu-loss'}, "'mu-loss'"), ({'FLAGS': '--bta=1'}, '--bta=1'),
    ({'SEEDS': '1 01'}, '-s01'), ({'LAMS': 'default 1e-4'}, '-lam0.0001-'),
    ({'SEEDS': '1 2', 'FLAGS': '--seed=3'}, '-s2'), ({'STEPS': '7'}, 'its steps'),
    ({'DATA': 'other'}, 'its data_fingerprint'), ({'DATA': 'other', 'STEPS': '7', 'OUT': 'new'}, '')])
def test_what_is_refused_before_the_first_run(fake, wrong, named, corpus, monkeypatch):
    """By a check that gets the flags of every run and the folder, which has a run; made in this process."""
    other = shutil.copytree(corpus, fake.folder / 'bin/other')
    (other / 'stdlib_train_000001.bin').unlink()
    shards = [train.Windows(corpus, split, 1, 257).shards for split in ('train', 'val')]
    args = train.resolve_args(train.parser.parse_args(
        ['--size=tiny', '--lr=0.5', '--steps=300', f'--data={corpus}']))
    (fake.out / 'old').mkdir(parents=True)
    args.data_fingerprint = train.fingerprint(*shards)
    train.save(vars(args), f'{fake.out}/old/config.json')
    fake.run(**{'grid': 'paper', 'SIZES': 'tiny', 'TYING': 'untied', 'LRS': '1', 'STEPS': '300',
                'DATA': corpus, **wrong})
    monkeypatch.setattr('sys.argv', (fake.folder / 'check.args').read_text().split('\0')[:-1])
    code = compile((fake.folder / 'check.py').read_text(), 'check', 'exec')
    refused(lambda: exec(code, {}), named) if named else exec(code, {})
