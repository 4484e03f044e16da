"""A run that is killed, stopped or out of disk ends as if nothing had been; files are not trusted."""
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import train
from conftest import finish, folder_hash, process, refused
from small_runs import SMALL, assert_same, load, shard, signal_at, state_of

FLAGS = (*SMALL, '--method=coupled_adam', '--weight_tying', '--lr=3e-2', '--steps=12', '--ckpt_every=4',
         '--eval_every=3', '--keep_every=6')


def flags_of(corpus, out, *more):
    return [*FLAGS, f'--data={corpus}', f'--out={out}', *more]


def copy_at_each_change(out, copies):
    """Copies the folder `out` before each change to its files: it is what a kill then would leave."""
    numbers = itertools.count()

    def hook(event, given):  # what it writes itself is not in `out`
        changes = event in ('os.rename', 'os.remove') or event == 'open' and set(given[1] or '') & set('aw')
        if changes and str(given[0]).startswith(out):
            shutil.copytree(out, os.path.join(copies, f'{next(numbers):03}'))
    sys.addaudithook(hook)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """A run of FLAGS that nothing stops: its folder, and those of its copies, by time."""
    folder = tmp_path_factory.mktemp('whole')
    hook = (copy_at_each_change, str(folder / 'run'), str(folder / 'copies'))
    finish(process(train.main, flags_of(corpus, folder / 'run'), prepare=hook), 0)
    return folder / 'run', sorted((folder / 'copies').iterdir())


@pytest.fixture
def begun(whole, tmp_path):
    """The run as a kill half way would leave it."""
    return Path(shutil.copytree(whole[1][len(whole[1]) // 2], tmp_path / 'run'))


def test_killed_at_any_moment(corpus, whole, tmp_path):
    """
    Before each change to its files: what was being written is half there. The log has half a line more, or
    has lost its end, as it may if the machine stops.
    """
    run, copies = whole
    steps = set()
    for i, copy in enumerate(copies):
        out = shutil.copytree(copy, tmp_path / copy.name)
        for file in out.glob('*.tmp'):
            os.truncate(file, file.stat().st_size // 2)
        log = out / 'log.jsonl'
        if log.exists() and not (out / 'result.json').exists():
            text = log.read_text()
            log.write_text(text + '{"step": 1' if i % 2 else text[:len(text) // 2])
        steps.add(load(out, 'ckpt.pt')['step'] if (out / 'ckpt.pt').exists() else None)
        train.main(flags_of(corpus, out))
        assert_same(state_of(out), state_of(run))
        assert {*os.listdir(out)} == {*os.listdir(run)}
    assert steps == {None, 0, 4, 6, 8, 12} and len(copies) > 40


def test_signals_and_full_disks(corpus, whole, tmp_path):
    out = tmp_path / 'run'

    def stopped(status, *prepare):
        finish(process(train.main, flags_of(corpus, out), tmp_path / 'stderr', prepare=prepare), status)

    def full_at(size):  # the largest size of a file
        stopped(1, resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
        assert 'Error' in (tmp_path / 'stderr').read_text()
    full_at(100_000)  # within the first checkpoint
    stopped(1, signal_at, signal.SIGINT, 'train_step', 2)
    stopped(-signal.SIGKILL, signal_at, signal.SIGKILL, 'train_step', 6)
    full_at((out / 'log.jsonl').stat().st_size + 100)  # within a line of the log
    assert load(out, 'ckpt.pt')['step'] == 4
    stopped(1, signal_at, signal.SIGINT, 'evaluate', 3)  # the last one
    assert load(out, 'ckpt.pt')['step'] == 12
    train.main(flags_of(corpus, out))
    assert_same(state_of(out), state_of(whole[0]))


def test_a_folder_in_use(corpus, begun):
    before = folder_hash(begun)
    with train.lock_folder(str(begun)):
        refused(lambda: train.main(flags_of(corpus, begun)), begun, 'another process')
    assert folder_hash(begun) == before


def test_a_folder_is_locked_before_it_is_read(corpus, begun, monkeypatch):
    """Else what another process saves in between would be overwritten by a run from the start."""
    read_json = train.read_json

    def other_process(path):
        if path == f'{begun}/config.json':
            refused(lambda: train.lock_folder(str(begun)))
        return read_json(path)
    monkeypatch.setattr(train, 'read_json', other_process)
    train.main(flags_of(corpus, begun))


def test_files_are_on_disk_before_they_replace_others(corpus, tmp_path, monkeypatch):
    synced = {}  # path -> its size on disk

    def fsync(file):
        synced[os.readlink(f'/proc/self/fd/{file}')] = os.fstat(file).st_size

    def replace(old, new):
        assert os.path.getsize(old) == synced.pop(old)
        os.rename(old, new)
        replaced.add(os.path.basename(new))
    replaced = set()
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    train.main(flags_of(corpus, tmp_path / 'run'))
    assert replaced >= {'config.json', 'ckpt.pt', 'model_6.pt', 'model.pt', 'result.json'}


def test_checkpoints_that_are_not_ours(corpus, begun):
    """Damaged, of another run, or with a Path: in a pickle that is a call of any function of Python's."""
    good = (begun / 'ckpt.pt').read_bytes()
    parts = load(begun, 'ckpt.pt')
    others = [{**parts, 'config': {**parts['config'], name: value}} for name, value in (
        ('lr', 0.5), ('rope_fraction', 1.0), ('data_fingerprint', 'x'))]
    for content in (b'', good[:-1], [1, 2], {**parts, 'more': Path('x')}, {'model': {}}, *others):
        torch.save(content, begun / 'ckpt.pt')
        if isinstance(content, bytes):
            (begun / 'ckpt.pt').write_bytes(content)
        before = folder_hash(begun)
        refused(lambda: train.main(flags_of(corpus, begun)), 'ckpt.pt')
        assert folder_hash(begun) == before


def test_other_settings_or_data(corpus, begun, tmp_path):
    other, moved = (shutil.copytree(corpus, tmp_path / name) for name in ('other', 'moved'))
    path = other / 'stdlib_train_000001.bin'
    path.write_bytes(shard([*train.read_shard(path)[:-1], 0]))
    for name in ('config.json', 'ckpt.pt'):  # of code that lacked a flag
        saved = load(begun, name) if name == 'ckpt.pt' else {'config': train.read_json(begun / name)}
        del saved['config']['rope_fraction']
        train.save(saved if name == 'ckpt.pt' else saved['config'], str(begun / name))
    before = folder_hash(tmp_path)
    for flag in ('data_fingerprint', 'lr', 'dtype', 'rope_fraction'):
        value = {'data_fingerprint': f'--data={other}', 'dtype': '--dtype=bfloat16'}.get(flag, f'--{flag}=1')
        refused(lambda: train.main(flags_of(corpus, begun, value)), begun, f'{flag}=')  # noqa: B023
        assert folder_hash(tmp_path) == before
    train.main(flags_of(moved, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert (begun / 'result.json').exists()
