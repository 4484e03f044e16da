"""A run that is killed, stopped or out of disk ends as if nothing had been; files are not trusted."""
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from conftest import refused
from oec import common, data, machine
from oec.run_folder import RunFolder
from processes import finish, folder_hash, process
from runs import SMALL, assert_same, at_call, load, signal_at_step, state_of

FLAGS = (*SMALL, '--method=mu_centering', '--weight_tying', '--lr=3e-2', '--steps=12', '--log_every=1',
         '--ckpt_every=4', '--eval_every=3', '--keep_every=6', '--dtype=float32')


def flags_of(corpus, out, *more):
    return [*FLAGS, f'--data={corpus}', f'--out={out}', *more]


def copy_at_each_change(out, copies):
    """Copies the folder `out` before each change to its files: it is what a kill then would leave."""
    numbers = itertools.count()
    copying = False

    def hook(event, given):
        nonlocal copying
        writes = event == 'open' and (given[2] & (os.O_WRONLY | os.O_RDWR) or set(given[1] or '') & set('aw'))
        if (writes or event in ('os.rename', 'os.remove')) and str(given[0]).startswith(out) and not copying:
            copying = True
            shutil.copytree(out, os.path.join(copies, f'{next(numbers):03}'))
            copying = False
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


def test_a_signal_ends_a_run_at_once_and_the_same_command_resumes(corpus, whole, tmp_path):
    out = tmp_path / 'run'
    errors = tmp_path / 'stderr'
    for place, number, which, status, step in (
            ('train_step', 2, signal.SIGINT, 130, 0), ('train_step', 7, signal.SIGTERM, -signal.SIGTERM, 6),
            ('train_step', 5, signal.SIGKILL, -signal.SIGKILL, 8), ('evaluate', 2, signal.SIGINT, 130, 12)):
        hook = (at_call, place, number, signal.raise_signal, which)
        finish(process(train.main, flags_of(corpus, out), stderr=errors, prepare=hook), status)
        assert load(out, 'ckpt.pt')['step'] == step and errors.read_text() == ''
    train.main(flags_of(corpus, out))
    assert_same(state_of(out), state_of(whole[0]))


def test_one_of_several_copies_has_the_folder(corpus, whole, begun):
    before = folder_hash(begun)
    with common.lock_folder(str(begun)):
        refused(lambda: train.main(flags_of(corpus, begun)), begun, status=3)
    assert folder_hash(begun) == before
    done = RunFolder(str(whole[0]), load(whole[0])['config'])  # of one that looked before the run was done
    refused(lambda: done.begin(0), whole[0], status=3)


def test_a_file_replaces_the_old_one_once_it_is_on_disk(corpus, tmp_path, monkeypatch):
    """So does the log, before a checkpoint counts on its length; the rename, too, is made to last."""
    done = []
    fsync = os.fsync
    replace = os.replace

    def noting_fsync(file):
        done.append(('fsync', os.readlink(f'/proc/self/fd/{file}'), os.fstat(file).st_size))
        fsync(file)

    def noting_replace(old, new):
        done.append(('replace', str(new), os.path.getsize(old)))
        replace(old, new)
    monkeypatch.setattr(os, 'fsync', noting_fsync)
    monkeypatch.setattr(os, 'replace', noting_replace)
    out = str(tmp_path / 'run')
    train.main(flags_of(corpus, out, '--steps=4'))
    replaced = [i for i, (what, *_) in enumerate(done) if what == 'replace']
    names = [os.path.basename(done[i][1]) for i in replaced]
    assert names == ['config.json', 'ckpt.pt', 'ckpt.pt', 'model.pt', 'result.json']
    for i, name in zip(replaced, names, strict=True):
        _, path, size = done[i]
        assert done[i - 1] == ('fsync', f'{path}.tmp', size) and done[i + 1][:2] == ('fsync', out)
        assert name != 'ckpt.pt' or done[i - 2][:2] == ('fsync', f'{out}/log.jsonl')


def test_after_a_full_disk_the_old_checkpoint_resumes(corpus, whole, tmp_path):
    """Full for the first checkpoint, and within a line of the log."""
    out = tmp_path / 'run'
    finish(process(train.main, flags_of(corpus, out), file_limit=100_000), 1)
    finish(process(train.main, flags_of(corpus, out), prepare=(signal_at_step, signal.SIGKILL, 6)), -9)
    limit = (out / 'log.jsonl').stat().st_size + 100
    finish(process(train.main, flags_of(corpus, out), file_limit=limit), 1)
    assert load(out, 'ckpt.pt')['step'] == 4
    os.makedirs(out / 'config.json.tmp' / 'x')  # root cannot write there either
    refused(lambda: train.main(flags_of(corpus, out)), f'{out}/config.json', status=1)
    shutil.rmtree(out / 'config.json.tmp')
    train.main(flags_of(corpus, out))
    assert_same(state_of(out), state_of(whole[0]))


class Evil:
    """Unpickled, it makes a file in the current folder."""

    def __reduce__(self):
        return os.mkdir, ('evil',)


def test_a_checkpoint_that_is_damaged_or_would_run_code_is_one_line(corpus, begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = (begun / 'ckpt.pt').read_bytes()
    parts = load(begun, 'ckpt.pt')
    for content in (b'', b'x', good[:-1], good[:len(good) // 2], [1, 2], {**parts, 'progress': Evil()},
                    {name: parts[name] for name in parts if name != 'step'}):
        if isinstance(content, bytes):
            (begun / 'ckpt.pt').write_bytes(content)
        else:
            torch.save(content, begun / 'ckpt.pt')
        before = folder_hash(tmp_path)
        refused(lambda: train.main(flags_of(corpus, begun)), 'ckpt.pt')
        assert folder_hash(tmp_path) == before and not os.path.exists('evil')
    (begun / 'ckpt.pt').write_bytes(good)
    os.truncate(begun / 'log.jsonl', 100)
    refused(lambda: train.main(flags_of(corpus, begun)), 'log.jsonl')


def test_a_command_with_other_settings_or_other_data_is_not_this_run(corpus, begun, tmp_path):
    other = shutil.copytree(corpus, tmp_path / 'other')
    moved = shutil.copytree(corpus, tmp_path / 'moved')
    tokens = np.array(data.read_shard(str(other / 'stdlib_train_000001.bin')))
    tokens[-1] += 1
    data.write_shard(str(other / 'stdlib_train_000001.bin'), tokens)
    before = folder_hash(tmp_path)
    for name, change in (('data_fingerprint', f'--data={other}'), ('--lr', '--lr=1e-2'),
                         ('--seed', '--seed=2'), ('--steps', '--steps=13'), ('--dtype', '--dtype=bfloat16'),
                         ('--log_every', '--log_every=2'), ('--weight_tying', '--no-weight_tying')):
        refused(lambda: train.main(flags_of(corpus, begun, change)), begun, f'{name}=')  # noqa: B023
        assert folder_hash(tmp_path) == before
    train.main(flags_of(moved, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert (begun / 'result.json').exists()
    os.truncate(begun / 'config.json', 10)
    refused(lambda: train.main(flags_of(corpus, begun)), 'config.json')


def test_a_default_of_another_machine_is_refused_by_the_flag_that_gives_it(corpus, tmp_path, monkeypatch):
    flags = [flag for flag in flags_of(corpus, tmp_path / 'run') if not flag.startswith('--dtype')]
    monkeypatch.setattr(machine, 'default_dtype', lambda *_: 'float32')
    train.main(flags)
    monkeypatch.setattr(machine, 'default_dtype', lambda *_: 'bfloat16')
    refused(lambda: train.main(flags), '--dtype=float32')
    train.main([*flags, '--dtype=float32'])
