"""sweep.sh: its grids, and sweeps that are killed, stopped, shared or have a run that fails."""
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import common
import train
from conftest import ENV, ROOT, links, sweep
from model import METHODS
from processes import children, folder_hash, wait_until

# It locks, logs, resumes and saves as train.py does, in ten steps of 0.05 s, and notes each start in a file.
FAKE_TRAIN = '''
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
import common

def main(argv):
    flags = dict(flag[2:].split('=', 1) for flag in argv if '=' in flag)
    out, name = flags['out'], os.path.basename(flags['out'])
    with common.lock_folder(out):
        if os.path.exists(out + '/result.json'):
            return 0
        with open({folder!r} + '/started', 'a') as file:
            file.write(name + '\\n')
        if os.path.exists({folder!r} + '/broken') and open({folder!r} + '/broken').read() == name:
            raise common.UserError('oh no', 1)
        common.write_json(out + '/config.json', flags)
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with open(out + '/log.jsonl', 'a+') as log:
            log.seek(0)
            for step in range(len(log.readlines()) + 1, 11):
                time.sleep(0.05)
                print(json.dumps({{'step': step}}), file=log, flush=True)
                if stop:
                    time.sleep(0.3)  # saving takes its time
                    return 143
        common.write_json(out + '/result.json', {{}})

common.run(main)
'''


class Sweep:
    """A folder of links in which sweep.sh makes ten runs of the stand-in, two at a time."""

    def __init__(self, folder):
        self.cwd, self.out, self.started = links(str(folder / 'checkout')), folder / 'out', folder / 'started'
        self.bin, plans = folder / 'bin', folder.parent / 'plans'
        self.bin.mkdir()
        plans.mkdir(exist_ok=True)
        (folder / 'meta.json').write_text('{}')
        (folder / 'fake.py').write_text(FAKE_TRAIN.format(root=ROOT, folder=str(folder)))
        # the plan, which takes Python seconds because it imports torch, is kept for all sweeps that are alike
        self.program('python', f'''case $1 in
            train.py) shift; exec {sys.executable} {folder}/fake.py "$@" ;;
            analyze.py) ;;
            -) plan={plans}/$(env | grep -E '^(METHODS|LRS|SHIFTS|EXTRA|MORE)=' | cksum | tr ' ' -)
               [ -f "$plan" ] || {{ {sys.executable} - >"$plan.$$" && mv "$plan.$$" "$plan"; }}
               cat "$plan" ;;
            esac''')
        self.env = {**ENV, 'PATH': f'{self.bin}{os.pathsep}{ENV["PATH"]}', 'OUT': str(self.out), 'JOBS': '2',
                    'DATA': str(folder), 'METHODS': 'baseline mu_centering', 'LRS': '1e-4 3e-4 1e-3 1e-2 0.1'}

    def program(self, name, text):
        (self.bin / name).write_text(f'#!/bin/sh\n{text}\n')
        (self.bin / name).chmod(0o755)

    def start(self, **env):
        return subprocess.Popen(['bash', 'sweep.sh', 'demo'], cwd=self.cwd, env={**self.env, **env},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

    def run(self, status=0, **env):
        return end(self.start(**env), status)

    def done(self):
        return {path: path.stat().st_mtime_ns for path in self.out.glob('*/result.json')}

    def starts(self):
        return self.started.read_text().split()


def end(started, status):
    out, error = started.communicate(timeout=120)
    assert started.returncode == status, out + error
    return out, error


@pytest.fixture
def fake(tmp_path):
    return Sweep(tmp_path)


def assert_each_ran_once(fake, after):
    """All ten runs are done, with each step made once; after so many starts none was started twice."""
    assert len(fake.done()) == 10
    for path in fake.done():
        log = (path.parent / 'log.jsonl').read_text().splitlines()
        assert [json.loads(line)['step'] for line in log] == list(range(1, 11)), path
    starts = fake.starts()[after:]
    assert len(starts) == len(set(starts))


# --------------------------------------------------------------------------------------------------
# the grids


def test_the_grids_have_the_names_and_flags_of_train(tmp_path):
    folder = links(str(tmp_path / 'checkout'))
    every = ' '.join((*METHODS, 'max_z_loss+mu_centering'))
    grids = {'paper': dict(NPROC='4'), 'ablation': {}, 'demo': {}, 'proxy': {}, 'shift': {},
             'demo two': dict(METHODS='z_loss:1e-1 baseline', SHIFTS='0 30'),
             'demo every': dict(METHODS=every, LAMS='1e-2', LOGITS_DTYPE='float32')}
    with ThreadPoolExecutor(2) as pool:
        dry = pool.map(lambda grid: sweep(folder, grid.split()[0], DRY_RUN='1', **grids[grid]), grids)
    lines = {grid: done.stdout.splitlines() for grid, done in zip(grids, dry, strict=True)}
    runs, parser = {}, train.parser()
    for grid in grids:
        flags = [shlex.split(line.split(' train.py ')[1]) for line in lines[grid]]
        runs[grid] = [parser.parse_args(one) for one in flags]
        assert len({args.out for args in runs[grid]}) == len(lines[grid])
        for args in runs[grid]:
            assert args.out == f'out/{grid.split()[0]}/{train.run_name(args)}'
    assert len(lines['paper']) == 6 * 7 * 5 * 2 and len(lines['ablation']) == 2 * 4 * 7 * 5
    torchrun = 'torchrun --standalone --nproc_per_node=4 train.py '
    assert all(line.startswith(torchrun) for line in lines['paper'])
    assert {args.data for args in runs['paper']} == {'data/fineweb'}
    assert {args.lam for args in runs['paper']} == {None}  # the method's own
    assert {args.lam for args in runs['ablation']} == {1e-7, 1e-4, 1e-1, 1e2}
    assert len(runs['demo']) == 6 * 2 + 6 and {args.lam for args in runs['demo']} == {None}
    assert {args.mu_shift for args in runs['demo']} == {0, 300, 1000}
    assert {(args.method, args.lam) for args in runs['demo two']} == {('z_loss', 0.1), ('baseline', None)}
    assert len(runs['demo two']) == 2 * 2 * 2 and {args.mu_shift for args in runs['demo two']} == {0, 30}
    # four methods at five norms, and seven more subsets of roundings at two of them, for three seeds each
    assert len(runs['shift']) == (5 * 5 + 7 * 2) * 3 and len({args.rounded for args in runs['shift']}) == 8
    demo, proxy = runs['demo'][0], runs['proxy'][0]
    assert (demo.device, demo.logits_dtype, demo.data, demo.steps) == ('cpu', 'bfloat16', 'data/stdlib', 1000)
    assert (proxy.device, proxy.logits_dtype, proxy.data) == ('cpu', 'bfloat16', 'data/stdlib_bpe')
    assert (proxy.n_embd, proxy.batch_size * proxy.block_size, proxy.steps) == (8, 64, 32000)
    assert len(runs['proxy']) == 4 * 4 * 3
    for args in runs['demo every']:
        assert args.lam == (1e-2 if METHODS[args.method.removesuffix('+mu_centering')] else None)
        assert args.logits_dtype == 'float32'
    assert os.listdir(tmp_path) == ['checkout'] and not os.path.exists(os.path.join(folder, 'out'))


def test_what_is_in_the_variables_is_data(fake, tmp_path):
    odd = tmp_path / 'a  b\'c"d$(touch pwned)`touch pwned`;touch pwned&*\\'
    odd.mkdir()
    few = dict(DATA=str(odd), METHODS='baseline', LRS='1e-3')
    fake.run(OUT=f'{odd}/out', **few)
    line = fake.run(OUT=f'{odd}/dry', DRY_RUN='1', **few)[0]
    assert line.count('\n') == 1
    subprocess.run(['bash', '-c', line], cwd=fake.cwd, env=fake.env, check=True)
    for out in ('out', 'dry'):
        config = common.read_json(str(odd / out / 'tiny-untied-baseline-lr0.001-s1' / 'config.json'))
        assert config['data'] == str(odd)
    assert not list(tmp_path.glob('**/pwned'))


def test_each_of_several_jobs_has_its_own_gpus(fake, tmp_path):
    """On a machine that is not there: nvidia-smi names four GPUs, a training notes which it was given."""
    fake.program('nvidia-smi', 'for i in 0 1 2 3; do echo "GPU $i: H200"; done')
    fake.program('torchrun', 'shift 2; exec python "$@"')
    note = f'print(os.environ.get("CUDA_VISIBLE_DEVICES", ""), file=open("{tmp_path}/given", "a"))'
    (tmp_path / 'fake.py').write_text(f'import os, sys, time\n{note}\ntime.sleep(1)\nsys.exit(1)\n')
    fake.env.pop('CUDA_VISIBLE_DEVICES', None)
    for env, given in ((dict(NPROC='2'), {'0,1', '2,3'}), (dict(NPROC='4', JOBS='1'), {''}),
                       (dict(NPROC='1', CUDA_VISIBLE_DEVICES='5,7'), {'5', '7'})):
        fake.run(status=1, METHODS='baseline', LRS='1e-3 1e-2', **env)
        assert set((tmp_path / 'given').read_text().splitlines()) == given
        (tmp_path / 'given').unlink()


# --------------------------------------------------------------------------------------------------
# kills, signals, failures


@pytest.mark.skipif(sys.platform != 'linux', reason='kills the processes that /proc names')
def test_a_sweep_that_is_killed_resumes_and_two_share_its_runs(fake):
    first = fake.start()
    wait_until(lambda: len(fake.done()) >= 2)
    time.sleep(0.2)
    for child in children(first.pid):  # all of it at once, as when a machine goes down
        os.killpg(os.getpgid(child), signal.SIGKILL)
    first.kill()
    first.communicate()
    before, starts = fake.done(), len(fake.starts())
    assert 2 <= len(before) < 10
    for one in [fake.start(), fake.start()]:
        end(one, 0)
    assert before.items() <= fake.done().items()
    assert_each_ran_once(fake, after=starts)
    starts = fake.starts()
    assert '10 runs in' in fake.run()[0] and fake.starts() == starts  # all are done


def assert_stopped(fake, first):
    """The sweep `first`, told to stop, saves its runs, starts no other, leaves no process, and resumes."""
    wait_until(lambda: len(fake.done()) >= 2)
    time.sleep(0.2)
    first.terminate()
    assert 'resumes' in end(first, 143)[1]
    assert len(fake.done()) < 10 and not list(fake.out.glob('logs/*.failed'))
    before, starts = folder_hash(fake.out), fake.starts()
    time.sleep(0.3)
    assert folder_hash(fake.out) == before and len(set(starts)) == len(starts)
    fake.run()
    assert_each_ran_once(fake, after=len(starts))


def test_a_signal_to_a_sweep_saves_all_its_runs(fake):
    assert_stopped(fake, fake.start())


def test_a_signal_to_a_sweep_of_torchruns_is_no_failure(fake):
    """torchrun ends with 1 however its processes ended."""
    fake.program('torchrun', 'trap : TERM INT\nshift 2\npython "$@" || exit 1')
    assert_stopped(fake, fake.start(NPROC='2'))


def test_a_run_that_fails_does_not_stop_the_others(fake, tmp_path):
    broken = 'tiny-untied-mu_centering-lr0.001-s1'
    (tmp_path / 'broken').write_text(broken)
    out, error = fake.run(status=1)
    assert error.splitlines()[1:] == [broken] and len(fake.done()) == 9
    assert f'{broken}: FAILED with status 1: error: oh no' in out
    assert [path.name for path in fake.out.glob('logs/*.failed')] == [f'{broken}.failed']
    assert re.search(r'^\[8/10, about [0-9]+ s left\] tiny-untied-\S*: ', out, re.MULTILINE), out
    plan = (fake.out / 'logs' / 'plan').read_text().splitlines()
    assert len(plan) == 10 and set(plan) == set(fake.starts())
    (tmp_path / 'broken').unlink()
    out, error = fake.run()  # the same command tries it again, and that one alone
    assert '10 runs in' in out and '9 of them done' in out and error == '' and len(fake.starts()) == 11
    assert not list(fake.out.glob('logs/*.failed')) and len(fake.done()) == 10


def test_a_real_sweep_ends_with_its_results(swept):
    assert '4 runs in out/demo, 0 of them done' in swept.stdout and '[4/4, about 0 s left]' in swept.stdout
    with open(os.path.join(swept.results, 'results.csv')) as file:
        norms = {(row['method'], row['lr']): float(row['mu_norm']) for row in csv.DictReader(file)}
    centered = {run for run, norm in norms.items() if norm < 1e-3}
    assert len(norms) == 4 and centered == {('mu_centering', '0.01'), ('mu_centering', '0.1')}
