"""A run that is killed or stopped ends as if nothing had been; a folder keeps its settings."""
import fcntl
import functools
import itertools
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest

import train
from conftest import finish, process, refused
from small_runs import SMALL, assert_same, at_step, load, log_of, send, shard, state_of, without_times


def flags_of(corpus, out, *more):
    return [*SMALL, '--method=mu_centering', '--lr=3e-2', '--steps=4', '--ckpt_every=3',
            '--eval_every=2', '--keep_every=2', f'--data={corpus}', f'--out={out}', *more]


# -------- kills
def copy_at_each_change(out, copies):
    """Copies a folder before each change in it, as a kill then would leave it."""
    numbers = itertools.count()

    def hook(event, given):
        writes = event == 'open' and set(given[1] or '') & set('aw')
        if (writes or event in ('os.rename', 'os.remove')) and str(given[0]).startswith(out):
            shutil.copytree(out, f'{copies}/{next(numbers):03}')
    sys.addaudithook(hook)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """A run that nothing stops: its folder, and those of its copies, by time."""
    folder = tmp_path_factory.mktemp('whole')
    hook = (copy_at_each_change, str(folder / 'run'), str(folder / 'copies'))
    finish(process(train.main, flags_of(corpus, folder / 'run'), prepare=hook), 0)
    return folder / 'run', sorted((folder / 'copies').iterdir())


def test_killed_at_any_moment(corpus, whole, tmp_path):
    """What was being written is half there; the log has half a line more, or has lost its end."""
    run, copies = whole
    steps = set()
    for i, copy in enumerate([*copies, run]):
        out = shutil.copytree(copy, tmp_path / copy.name)
        for file in out.glob('*.tmp'):
            os.truncate(file, file.stat().st_size // 2)
        log = out / 'log.jsonl'
        is_done = (out / 'result.json').exists()
        if log.exists() and not is_done:
            text = log.read_text()
            log.write_text(text + '{"step": 1' if i % 2 else text[:len(text) // 2])
        steps.add(load(out, 'ckpt.pt')['step'] if (out / 'ckpt.pt').exists() else None)

        train.main(flags_of(corpus, out))
        assert_same(state_of(out), state_of(run))
        assert is_done or train.read_json(out / 'config.json')['out'] == str(out)  # where it is now
        left = {*os.listdir(out)} - {'ckpt.pt' if is_done else ''}  # killed just before it was removed
        assert left == {
            '.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_2.pt', 'model_4.pt', 'result.json'}
    assert steps == {None, 0, 2, 3, 4} and len(copies) > 25


def test_saved_files_are_synced(tmp_path, monkeypatch):
    """All of a file is on disk before it gets its name: a power cut leaves no empty one."""
    calls = []
    monkeypatch.setattr(os, 'fsync', lambda number: calls.append(os.fstat(number).st_size))
    monkeypatch.setattr(os, 'replace', lambda *paths: calls.append('replace'))
    train.save(b'text', f'{tmp_path}/file')
    assert calls == [4, 'replace']


def test_lock(trained, monkeypatch, tmp_path):
    """Another process is refused from before the checkpoint is read until the result is saved."""
    def locked(real, *given):
        refused(lambda: train.lock_folder(f'{tmp_path}/run'), 'another process')
        return real(*given)
    for name in ('make_model', 'finish'):
        monkeypatch.setattr(train, name, functools.partial(locked, getattr(train, name)))
    trained('run', '--steps=1')
    train.lock_folder(f'{tmp_path}/run').close()


def test_disk_without_locks(trained, monkeypatch, capsys):
    """As some network disks are: the run goes on, and says so."""
    monkeypatch.setattr(fcntl, 'flock', lambda *given: os.open('', 0))
    trained('run', '--steps=1')
    assert 'run is not locked: ' in capsys.readouterr().out


# -------- signals
@pytest.mark.parametrize('numbers, status, step', [
    ([signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM, 3),  # scancel brings two
    ([signal.SIGUSR1], 128 + signal.SIGUSR1, 3),
    ([signal.SIGHUP], 128 + signal.SIGHUP, 3),
    ([signal.SIGINT], 128 + signal.SIGINT, 3),
    ([signal.SIGINT, signal.SIGINT], -signal.SIGINT, 2)])  # a second Ctrl-C ends it at once
def test_signals(numbers, status, step, corpus, whole, tmp_path):
    """The run ends after a checkpoint of the step it is in; the same command goes on bit for bit."""
    flags = flags_of(corpus, tmp_path / 'run', '--ckpt_every=0')
    prepare = (at_step, 3, functools.partial(send, numbers))
    finish(process(train.main, flags, prepare=prepare), status)
    assert load(tmp_path / 'run', 'ckpt.pt')['step'] == step
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def no_reader(step, numbers):
    """Standard output is a pipe that nobody reads; in this step come signals."""
    end, pipe = os.pipe()
    os.close(end)
    os.dup2(pipe, 1)
    at_step(step, functools.partial(send, numbers))


@pytest.mark.parametrize('numbers, step', [([signal.SIGINT], 3), ([], 4)])
def test_without_a_reader(numbers, step, corpus, whole, tmp_path):
    """Ctrl-C of `train.py | tee log` ends tee at once: the step is saved. Without one the run ends."""
    flags = flags_of(corpus, tmp_path / 'run', '--ckpt_every=0')
    started = process(train.main, flags, prepare=(no_reader, 3, numbers))
    started.join(120)
    assert load(tmp_path / 'run', 'ckpt.pt' if numbers else 'model.pt')['step'] == step
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def hung_up_at_step_3():
    """A terminal is closed, and nohup has made this process ignore that."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(3, functools.partial(send, [signal.SIGHUP]))


def test_nohup(corpus, tmp_path):
    """Under nohup a run goes on."""
    flags = flags_of(corpus, tmp_path / 'run')
    finish(process(train.main, flags, prepare=(hung_up_at_step_3,)), 0)


def test_wandb(trained, monkeypatch):
    """It gets the settings, and what the log gets."""
    inits, records = [], []
    wandb = types.SimpleNamespace(init=lambda **given: inits.append(given), finish=lambda: inits.clear(),
                                  log=lambda record, step: records.append(without_times(record)))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    first, second = (trained(name, '--steps=2', '--wandb=project') for name in ('first', 'second'))
    assert records == log_of(first) + log_of(second)
    run, = inits  # the first one has been finished
    assert (run['project'], run['name'], run['config']['steps']) == ('project', second, 2)


# -------- a folder keeps its settings
# Values that the run below does not have: what may not change when it resumes, and what may.
OTHER = """method=mu_loss lam=1 cap=5 no-final_gain size=16M weight_tying n_layer=2 n_embd=64 n_head=2
    vocab_size=512 block_size=16 rope_fraction=1 lr=1 min_lr=0 warmup=3 steps=50 batch_size=8 beta1=0.8
    beta2=0.9 eps=1e-7 grad_clip=0 seed=2 dtype=bfloat16 logits_dtype=bfloat16 init_from=x
    test_tokens=64""".split()
MAY_CHANGE = '''device=cpu micro_batch_size=1 compile data=moved[1] out=run log_every=2 eval_every=7
    eval_tokens=64 ckpt_every=7 keep_every=7'''.split()


def test_what_may_change(corpus, tmp_path, monkeypatch):
    """Each flag is refused by its name or passes; one that is newer than the run had its default."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, 'moved[1]')
    flags = [*SMALL, '--method=z_loss', '--steps=40', f'--data={corpus}', '--out=before']
    args, *_ = train.read_command(flags)
    machine = dict.fromkeys(['device', 'processes', 'torch', 'device_name', 'commit'], 'another')
    older = vars(args) | machine
    del older['rope_fraction']
    os.mkdir('before')
    train.save(older, 'before/config.json')
    shutil.copytree('before', 'run')

    for flag in OTHER:
        name = flag.split('=')[0].removeprefix('no-')
        command = [*flags, f'--{flag}']
        refused(lambda: train.read_command(command), 'before has a run with ', f'{name}=')  # noqa: B023
    for flag in MAY_CHANGE:
        train.read_command([*flags, f'--{flag}'])

    Path('moved[1]/stdlib_val_000000.bin').write_bytes(shard(range(999)))
    refused(lambda: train.read_command([*flags, '--data=moved[1]']), 'val_tokens=20000, not 999')


def test_copied_checkpoint(corpus, whole, tmp_path):
    """In a folder without a config.json it tells its settings itself."""
    copy = next(copy for copy in whole[1] if (copy / 'ckpt.pt').exists())
    (tmp_path / 'run').mkdir()
    shutil.copy(copy / 'ckpt.pt', tmp_path / 'run')
    refused(lambda: train.main(flags_of(corpus, tmp_path / 'run', '--lr=1')), 'run has a run with lr=0.03')
