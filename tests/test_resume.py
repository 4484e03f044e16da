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

import prepare_fineweb
import train
from conftest import finish, folder_hash, process, refused
from oec import common, data
from small_runs import SMALL, assert_same, load, signal_at, state_of

FLAGS = (*SMALL, '--method=coupled_adam', '--weight_tying', '--lr=3e-2', '--steps=12', '--log_every=1',
         '--ckpt_every=4', '--eval_every=3', '--keep_every=6', '--dtype=float32')


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


def test_a_run_killed_at_any_moment_ends_as_if_never_stopped(corpus, whole, tmp_path):
    """Before each change to its files; what was being written is half there, and so is a line of the log."""
    run, copies = whole
    steps = set()
    for copy in copies:
        out = shutil.copytree(copy, tmp_path / copy.name)
        for file in out.glob('*.tmp'):
            os.truncate(file, file.stat().st_size // 2)
        if (out / 'log.jsonl').exists() and not (out / 'result.json').exists():
            (out / 'log.jsonl').open('a').write('{"step": 1')
        steps.add(load(out, 'ckpt.pt')['step'] if (out / 'ckpt.pt').exists() else None)
        train.main(flags_of(corpus, out))
        assert_same(state_of(out), state_of(run))
        assert {*os.listdir(out)} - {'ckpt.pt'} == {*os.listdir(run)}, out  # no .tmp
    assert steps == {None, 0, 4, 6, 8, 12} and len(copies) > 40


def test_after_signals_and_full_disks_the_same_command_resumes(corpus, whole, tmp_path):
    out = tmp_path / 'run'

    def stopped(status, *prepare):
        flags = flags_of(corpus, out)
        finish(process(train.main, flags, stderr=tmp_path / 'stderr', prepare=prepare), status)

    def full_at(size):  # the largest size of a file
        stopped(1, resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
        assert 'Error' in (tmp_path / 'stderr').read_text()
    full_at(100_000)  # within the first checkpoint
    stopped(130, signal_at, signal.SIGINT, 'train_step', 2)
    stopped(-signal.SIGKILL, signal_at, signal.SIGKILL, 'train_step', 6)
    full_at((out / 'log.jsonl').stat().st_size + 100)  # within a line of the log
    assert load(out, 'ckpt.pt')['step'] == 4
    stopped(130, signal_at, signal.SIGINT, 'evaluate', 3)  # the last one
    assert load(out, 'ckpt.pt')['step'] == 12
    train.main(flags_of(corpus, out))
    assert_same(state_of(out), state_of(whole[0]))


def test_one_of_several_copies_has_the_folder(corpus, whole, begun):
    before = folder_hash(begun)
    with common.lock_folder(str(begun)):
        refused(lambda: train.main(flags_of(corpus, begun)), begun, 'another process')
    assert folder_hash(begun) == before


def test_a_file_replaces_the_old_one_once_it_is_on_disk(corpus, tmp_path, monkeypatch):
    """So does the log, before a checkpoint counts on its length; the rename, too, is made to last."""
    done = []
    synced = {}  # the size of each file then

    def fsync(file):
        path = os.readlink(f'/proc/self/fd/{file}')
        synced[path] = os.fstat(file).st_size
        done.append(f'fsync {os.path.basename(path)}')

    def replace(old, new):
        assert os.path.getsize(old) == synced[old]
        os.rename(old, new)
        done.append(f'replace {os.path.basename(new)}')
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    train.main(flags_of(corpus, tmp_path / 'run', '--steps=4'))

    def saved(name):
        return [f'fsync {name}.tmp', f'replace {name}']
    checkpoint = ['fsync log.jsonl', *saved('ckpt.pt')]
    assert done == [*saved('config.json'), *2 * checkpoint, *saved('model.pt'), *saved('result.json')]


def test_a_checkpoint_that_is_damaged_or_could_run_code_is_one_line(corpus, begun):
    """Or of another run. A Path is in a pickle what malice would be: a call of any function of Python's."""
    good = (begun / 'ckpt.pt').read_bytes()
    parts = load(begun, 'ckpt.pt')
    others = [{**parts, 'config': {**parts['config'], **other}} for other in (
        {'lr': 0.5}, {'rope_fraction': 1.0}, {'data_fingerprint': 'x'})]
    for content in (b'', good[:-1], [1, 2], {**parts, 'more': Path('x')}, {'model': {}}, *others):
        torch.save(content, begun / 'ckpt.pt')
        if isinstance(content, bytes):
            (begun / 'ckpt.pt').write_bytes(content)
        before = folder_hash(begun)
        named = 'ckpt.pt' if content not in others else begun
        refused(lambda: train.main(flags_of(corpus, begun)), named)
        assert folder_hash(begun) == before
    (begun / 'ckpt.pt').write_bytes(good)


def test_a_command_with_other_settings_or_other_data_is_not_this_run(corpus, begun, tmp_path):
    other = shutil.copytree(corpus, tmp_path / 'other')
    moved = shutil.copytree(corpus, tmp_path / 'moved')
    shard = str(other / 'stdlib_train_000001.bin')
    prepare_fineweb.write_shard(shard, [*data.read_shard(shard)[:-1], 0])
    before = folder_hash(tmp_path)
    for name, change in (('data_fingerprint', f'--data={other}'), ('--lr', '--lr=1e-2'),
                         ('--dtype', '--dtype=bfloat16')):
        refused(lambda: train.main(flags_of(corpus, begun, change)), begun, f'{name}=')  # noqa: B023
        assert folder_hash(tmp_path) == before
    config = common.read_json(str(begun / 'config.json'))
    del config['cap']  # a flag that older code lacked
    common.write_json(str(begun / 'config.json'), config)
    train.main(flags_of(moved, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert (begun / 'result.json').exists()
    os.truncate(begun / 'config.json', 10)
    refused(lambda: train.main(flags_of(corpus, begun)), 'config.json')
