"""sweep.sh: its grids, and sweeps that are killed, stopped, shared or have a run that fails."""
import os
import re
import signal
import subprocess
import sys

import pytest

import train
from conftest import ENV, ROOT, execute, links
from oec import common
from processes import folder_hash, times, wait_until

# It locks its folder and ends as train.py does, and notes each start in a file. While there is a file `hold`
# with a number in it, runs that start after so many others wait, until a signal ends them.
FAKE_TRAIN = '''
import os, signal, sys, time
sys.path.insert(0, {root!r})
from oec import common

def content(name):
    path = os.path.join({folder!r}, name)
    return open(path).read() if os.path.exists(path) else ''

def main(argv):
    out = dict(flag[2:].split('=', 1) for flag in argv if '=' in flag)['out']
    os.makedirs(out, exist_ok=True)
    with common.lock_folder(out):
        if os.path.exists(out + '/result.json'):
            return common.check(common.read_json(out + '/result.json')['argv'] == argv, 'other settings')
        stop, (name, status, says) = [], (content('broken') or ' 0 ').split(' ', 2)
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with open({folder!r} + '/started', 'a') as file:
            file.write(os.path.basename(out) + '\\n')
        common.check(name != os.path.basename(out), says, int(status))
        others = content('started').split().index(os.path.basename(out))
        while others >= int(content('hold') or 100) and not stop:
            time.sleep(0.01)
        if stop:
            time.sleep(0.3)  # saving takes its time
            print('stopped by a signal')
            return 143
        common.write_json(out + '/result.json', {{'argv': argv}})

common.program(main)
'''


class Sweep:
    """A folder of links in which sweep.sh makes ten runs of the stand-in, two at a time."""

    def __init__(self, folder):
        self.cwd, self.started, self.hold = links(str(folder / 'links')), folder / 'started', folder / 'hold'
        self.out, self.bin = folder / 'o$(touch${IFS}pwned)ut', folder / 'bin'
        self.bin.mkdir()
        (folder / 'fake.py').write_text(FAKE_TRAIN.format(root=ROOT, folder=str(folder)))
        # Of a plan it keeps the lines and makes names of method and learning rate: train.py would take
        # seconds, because it imports torch.
        self.program('python', f'''case $1 in
            train.py) shift; exec {sys.executable} {folder}/fake.py "$@" ;;
            analyze.py) [ ! -e {folder}/analysis ] || {{ echo $$ >{folder}/analysis; exec sleep 60; }} ;;
            -c) tee {folder}/plan | sed "s|.*--method=\\([^ ]*\\) --lr=\\([^ ]*\\).*|& --out=$3/\\1-\\2|" ;;
            esac''')
        self.env = {**ENV, 'PATH': f'{self.bin}{os.pathsep}{ENV["PATH"]}', 'OUT': str(self.out), 'JOBS': '2',
                    'DATA': str(folder), 'METHODS': 'baseline mu_centering', 'LRS': '1e-4 3e-4 1e-3 1e-2 0.1'}

    def program(self, name, text):
        (self.bin / name).write_text(f'#!/bin/sh\n{text}\n')
        (self.bin / name).chmod(0o755)

    def start(self, grid='demo', **env):
        pipe, env = subprocess.PIPE, {**self.env, **env}
        return subprocess.Popen(['bash', 'sweep.sh', *grid.split()], cwd=self.cwd, env=env, stdout=pipe,
                                stderr=pipe, text=True, start_new_session=True)

    def run(self, status=0, grid='demo', **env):
        return end(self.start(grid, **env), status)

    def start_and_hold(self, **env):
        """A sweep of which two runs are done and two wait."""
        self.hold.write_text('2')
        self.started.touch()
        started = self.start(**env)
        wait_until(lambda: len(self.starts()) == 4 and len(self.done()) == 2)
        return started

    def done(self):
        return {path: path.stat().st_mtime_ns for path in self.out.glob('*/result.json')}

    def starts(self):
        return self.started.read_text().split()

    def check_end(self, after):
        """All ten runs are done and, the first `after` starts apart, none was started twice."""
        assert len(self.done()) == 10 and len(set(self.starts()[after:])) == len(self.starts()[after:])
        assert not os.path.exists(os.path.join(self.cwd, 'pwned'))


def end(started, status):
    out, error = started.communicate(timeout=120)
    assert started.returncode == status, out + error
    return out, error


@pytest.fixture
def fake(tmp_path):
    return Sweep(tmp_path)


def test_a_dry_run_prints_the_papers_grid_with_the_names_of_train(tmp_path):
    folder = links(str(tmp_path / 'checkout'))
    done = execute('bash', 'sweep.sh', cwd=folder, DRY_RUN='1', JOBS='2', CUDA_VISIBLE_DEVICES='0,1,2,3',
                   FLAGS='--center_every=1  --beta2=0.99')
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(line[:4] == 'torchrun --standalone --nproc_per_node=2 train.py'.split() for line in lines)
    runs = [train.parser().parse_args(line[4:]) for line in lines]
    assert {(args.center_every, args.beta2, args.lam) for args in runs} == {(1, 0.99, None)}
    assert [args.out for args in runs] == [f'out/paper/{train.run_name(args)}' for args in runs]
    assert len({args.out for args in runs}) == len(runs) == 6 * 7 * 5 * 2
    assert os.listdir(tmp_path) == ['checkout'] and not os.path.exists(os.path.join(folder, 'out'))


@pytest.mark.parametrize('grid, size', [('ablation', ''), ('demo', ''), ('proxy', ''), ('shift', ''),
                                        ('shift', '16M')])
def test_the_flags_of_a_grid_are_those_of_train(fake, tmp_path, grid, size):
    out, _ = fake.run(grid=grid, SIZES=size, METHODS='', LRS='', NPROC='4', DRY_RUN='1')
    assert out.startswith('torchrun --standalone --nproc_per_node=4 train.py --size=')
    runs = {}
    for line in (tmp_path / 'plan').read_text().splitlines():
        args = train.parser().parse_args(line.split())
        assert runs.setdefault(train.run_name(args), args) == args  # of one name only if they are the same
    if grid == 'ablation':
        assert {args.lam for args in runs.values()} == {1e-7, 1e-4, 1e-1, 1e2}


def test_each_of_several_jobs_has_its_own_gpus(fake, tmp_path):
    """Four GPUs that nvidia-smi names; each training notes which it was given and waits for the others."""
    fake.program('nvidia-smi', 'for i in 0 1 2 3; do echo "GPU $i: H200"; done')
    fake.program('torchrun', 'shift 2; exec python "$@"')
    (tmp_path / 'fake.py').write_text(f"""import os, time
print(os.environ.get("CUDA_VISIBLE_DEVICES", ""), file=open("{tmp_path}/given", "a"))
while len(open("{tmp_path}/given").readlines()) < int(os.environ["JOBS"]):
    time.sleep(0.01)
raise SystemExit(1)""")
    fake.env.pop('CUDA_VISIBLE_DEVICES', None)
    for env, given in ((dict(NPROC='2'), ['0,1', '2,3']), (dict(NPROC='4', JOBS='1'), ['', '']),
                       (dict(NPROC='1', CUDA_VISIBLE_DEVICES='5,7'), ['5', '7'])):
        fake.run(status=1, METHODS='baseline', LRS='1e-3 1e-2', **env)
        assert sorted((tmp_path / 'given').read_text().splitlines()) == given
        (tmp_path / 'given').unlink()


@pytest.mark.skipif(sys.platform != 'linux', reason='kills the processes that /proc names')
def test_a_sweep_that_is_killed_resumes_and_two_share_its_runs(fake):
    first = fake.start_and_hold()
    with open(f'/proc/{first.pid}/task/{first.pid}/children') as children:
        for child in children.read().split():  # all of it at once, as when a machine goes down
            os.killpg(os.getpgid(int(child)), signal.SIGKILL)
    first.kill()
    first.communicate()
    before = fake.done()
    fake.hold.unlink()
    for one in [fake.start(), fake.start()]:
        end(one, 0)
    assert before.items() <= fake.done().items()
    fake.check_end(after=4)
    before, (out, error) = folder_hash(fake.out), fake.run()
    assert out.startswith('0 of 10 runs') and error == '' and folder_hash(fake.out) == before  # all are done


@pytest.mark.parametrize('nproc', ['1', '2'])
def test_a_signal_to_a_sweep_saves_all_its_runs(fake, nproc):
    """It starts no other, leaves no process, and resumes; torchrun ends with 1 however its processes end."""
    fake.program('torchrun', 'trap : TERM INT\nshift 2\npython "$@" || exit 1')
    first = fake.start_and_hold(NPROC=nproc)
    first.terminate()
    assert 'resumes' in end(first, 143)[1]
    assert len(fake.done()) == 2 and not list(fake.out.glob('logs/*.failed'))
    assert len(set(fake.starts())) == len(fake.starts()) == 4
    fake.hold.unlink()
    fake.run()
    fake.check_end(after=4)


def test_a_run_that_fails_does_not_stop_the_others(fake, tmp_path):
    """One that was stopped, or that another sweep is at work on, did not fail."""
    broken = 'mu_centering-1e-3'
    fake.program('torchrun', 'shift 2\npython "$@" || exit 1')  # it ends with 1 however its processes end
    cases = [('1', 143, 'oh no'), ('1', 130, 'oh no'), ('1', 3, 'oh no'), ('2', 143, 'stopped by a signal'),
             ('2', 3, 'another process is at work'), ('2', 2, 'oh no'), ('1', 1, 'oh no')]
    for i, (nproc, status, says) in enumerate(cases):
        (tmp_path / 'broken').write_text(f'{broken} {status} {says}')
        out, error = fake.run(status=int(status < 3), NPROC=nproc)
        assert out.startswith(f'{1 if i else 10} of 10 runs') and len(fake.done()) == 9
        shown = status if nproc == '1' else 1
        assert re.search(rf'^\[.*{broken}: status {shown}, error: {says}$', out, re.MULTILINE)
        failed = [path.name for path in fake.out.glob('logs/*.failed')]
        assert failed == [f'{broken}.failed'][:status < 3]
        assert error.splitlines()[1:] == [f'{fake.out}/{broken}: error: {says}'][:status < 3]
    plan = (fake.out / 'logs' / 'plan').read_text().split()
    assert len(plan) == 10 and set(plan) == set(fake.starts())
    (tmp_path / 'broken').unlink()
    out, error = fake.run()  # the same command tries it again, and that one alone
    assert out.startswith('1 of 10 runs') and error == '' and len(fake.starts()) == 17
    assert not list(fake.out.glob('logs/*.failed')) and len(fake.done()) == 10


def test_a_run_that_is_done_with_other_settings_is_named_and_left_alone(fake):
    """It is done by a line of DRY_RUN=1, as in a SLURM array. Of runs of one name only the first is made."""
    one, run = dict(METHODS='baseline', LRS='1e-2', LAMS='3 4'), fake.out / 'baseline-1e-2'
    task = dict(cwd=fake.cwd, env={**fake.env, 'LINE': fake.run(DRY_RUN='1', **one)[0]})
    subprocess.run(['sh', '-c', '$(echo "$LINE")'], check=True, **task)
    before = folder_hash(run)
    assert '--lam=3' in common.read_json(run / 'result.json')['argv']
    for env, left, status in ((one, 1, 0), (one, 0, 0), ({**one, 'STEPS': '7'}, 1, 1), (one, 0, 0)):
        out, error = fake.run(status=status, **env)
        assert out.startswith(f'{left} of 1 runs') and folder_hash(run) == before
        assert error.splitlines()[1:] == [f'{run}: error: other settings'][:status]


def test_a_signal_ends_the_analysis(fake, tmp_path):
    (tmp_path / 'analysis').touch()
    started = fake.start(METHODS='baseline', LRS='1e-2')
    wait_until(lambda: (tmp_path / 'analysis').read_text())
    started.terminate()
    assert 'resumes' in end(started, 143)[1]


@pytest.mark.parametrize('wrong', [
    'METHOD=z_loss', 'JOB=', 'NPROCS=2', 'DRYRUN=1', 'METHODS= ', 'TYING=Tied', 'JOBS=a[$(touch pwned)]',
    'NPROC=-1', 'DATA=a b', 'DATA=/nowhere', 'OUT=a b', 'OUT=/dev/null/x', 'grid=none', 'grid=demo demo'])
def test_a_grid_or_a_variable_that_is_none_is_refused_with_one_line(fake, wrong):
    name, value = wrong.split('=')
    before = times(fake.cwd)
    _, error = fake.run(status=2, **{name: value})
    assert error.startswith('error: ') and error.count('\n') == 1 and name in error
    assert times(fake.cwd) == before and not fake.started.exists()


def test_what_train_refuses_is_one_line_and_a_variable_no_pattern_nor_code(tmp_path):
    folder = links(str(tmp_path / 'checkout'))
    before = times(folder)
    done = execute('bash', 'sweep.sh', cwd=folder, check=2, METHODS='* $(touch${IFS}pwned)')
    assert done.stderr.startswith('error: argument --method: ') and done.stderr.count('\n') == 1
    assert "'*'" in done.stderr and times(folder) == before


@pytest.mark.parametrize('minutes', [10, -10])
def test_the_time_left_is_that_of_the_runs_left(fake, tmp_path, minutes):
    """By a clock on which each run takes ten minutes, and by one that is set back."""
    fake.program('date', f'echo . >>{tmp_path}/clock; echo $(($(wc -l <{tmp_path}/clock) * {minutes} * 60))')
    left = re.findall(r'^\[([0-9]+)/10, about (-?[0-9]+) min left', fake.run(JOBS='1')[0], re.MULTILINE)
    assert left == [(str(i), str(max(0, minutes * (10 - i)))) for i in range(1, 11)]
