"""A run that is killed, stopped or out of disk ends as if nothing had been; files are not trusted."""
import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import train
from conftest import finish, folder_hash, process, refused
from small_runs import SMALL, assert_same, load, shard, state_of


def flags_of(corpus, out, *more):
    return [*SMALL, '--method=coupled_adam', '--weight_tying', '--lr=3e-2', '--steps=4', '--ckpt_every=3',
            '--eval_every=2', '--keep_every=2', f'--data={corpus}', f'--out={out}', *more]


def copy_at_each_change(out, copies):
    """Copies the folder `out` before each change to its files: it is what a kill then would leave."""
    numbers = itertools.count()

    def hook(event, given):  # what it writes itself is not in `out`
        changes = event in ('os.rename', 'os.remove') or event == 'open' and set(given[1] or '') & set('aw')
        if changes and str(given[0]).startswith(out):
            shutil.copytree(out, f'{copies}/{next(numbers):03}')
    sys.addaudithook(hook)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """A run that nothing stops: its folder, and those of its copies, by time."""
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
    assert steps == {None, 0, 2, 3, 4} and len(copies) > 25


def test_a_folder_in_use(corpus, begun, monkeypatch):
    """It is locked before it is read: what is saved in between would else be lost."""
    def read_checkpoint(path, read=train.read_checkpoint):
        refused(lambda: train.lock_folder(str(begun)), begun, 'another process')
        return read(path)
    monkeypatch.setattr(train, 'read_checkpoint', read_checkpoint)
    train.main(flags_of(corpus, begun))


def test_files_are_synced(corpus, tmp_path, monkeypatch):
    synced = {}

    def fsync(file):
        synced[os.readlink(f'/proc/self/fd/{file}')] = os.fstat(file).st_size

    def replace(old, new):
        assert synced.pop(old) == os.path.getsize(old)
        os.rename(old, new)
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    train.main(flags_of(corpus, tmp_path / 'run'))


def test_checkpoints_that_are_not_ours(corpus, begun):
    """Damaged, of another program, or with a Path: in a pickle that is a call of any function of Python's."""
    good = (begun / 'ckpt.pt').read_bytes()
    parts = load(begun, 'ckpt.pt')
    for content in (good[:-1], [1, 2], {**parts, 'more': Path('x')}, {'model': {}}):
        torch.save(content, begun / 'ckpt.pt')
        if isinstance(content, bytes):
            (begun / 'ckpt.pt').write_bytes(content)
        before = folder_hash(begun)
        refused(lambda: train.main(flags_of(corpus, begun)), 'ckpt.pt')
        assert folder_hash(begun) == before


def test_other_settings_or_data(corpus, begun, tmp_path):
    """They are refused, but not another place; the checkpoint is of code that lacked one of the flags."""
    other, moved = (shutil.copytree(corpus, tmp_path / name) for name in ('other', 'moved'))
    path = other / 'stdlib_train_000001.bin'
    path.write_bytes(shard([*train.read_shard(path)[:-1], 0]))
    parts = load(begun, 'ckpt.pt')
    del parts['config']['rope_fraction']
    train.save(parts, f'{begun}/ckpt.pt')
    before = folder_hash(tmp_path)
    for flag, name in ((f'--data={other}', 'data_checksum'), ('--lr=1', 'lr'),
                       ('--rope_fraction=1', 'rope_fraction')):
        refused(lambda: train.main(flags_of(corpus, begun, flag)), begun, f'{name}=')  # noqa: B023
        assert folder_hash(tmp_path) == before
    train.main(flags_of(moved, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert (begun / 'result.json').exists()
