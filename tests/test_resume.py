"""A run that is killed, stopped or out of disk ends as if nothing had been; files are not trusted."""
import itertools
import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch

import train
from conftest import refused
from oec import common, data, machine, run_folder
from processes import finish, folder_hash, hold, one_line, process, wait_until
from runs import SMALL, assert_same, at_call, keep_checkpoint, load, signal_at_step, state_of

FLAGS = (*SMALL, '--method=mu_centering', '--weight_tying', '--lr=3e-2', '--steps=12', '--log_every=1',
         '--ckpt_every=4', '--eval_every=3', '--keep_every=6', '--dtype=float32')


def flags_of(corpus, out, *more):
    return [*FLAGS, f'--data={corpus}', f'--out={out}', *more]


def copy_at_each_change(out, copies):
    """Copies the folder `out` before each change to its files: it is what a kill then would leave."""
    numbers, copying = itertools.count(), False

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
    """Runs of FLAGS that nothing stops: dtype -> (its state, folder of the copies at each change)."""
    found = {}
    for dtype in ('float32', 'bfloat16'):
        folder = tmp_path_factory.mktemp(dtype)
        hook = (copy_at_each_change, str(folder / 'run'), str(folder / 'copies'))
        finish(process(train.main, flags_of(corpus, folder / 'run', f'--dtype={dtype}'), prepare=hook), 0)
        final = folder / 'copies' / max(os.listdir(folder / 'copies'))  # before ckpt.pt is removed
        found[dtype] = state_of(final), folder
    return found


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_run_killed_at_any_moment_ends_as_if_never_stopped(corpus, whole, dtype, tmp_path, monkeypatch):
    """Before each change to its files; what was being written is half there, and so is a line of the log."""
    monkeypatch.setattr(run_folder.RunFolder, 'drop_checkpoint', lambda run: None)
    state, folder = whole[dtype]
    copies, steps = sorted((folder / 'copies').iterdir()), set()
    for copy in copies[:: 1 if dtype == 'float32' else 3]:
        out = shutil.copytree(copy, tmp_path / copy.name)
        for file in out.glob('*.tmp'):
            os.truncate(file, file.stat().st_size // 2)
        if (out / 'log.jsonl').exists() and not (out / 'result.json').exists():
            (out / 'log.jsonl').open('a').write('{"step": 1')
        steps.add(load(out, 'ckpt.pt')['step'] if (out / 'ckpt.pt').exists() else None)
        assert train.main(flags_of(corpus, out, f'--dtype={dtype}')) == 0
        assert_same(state_of(out), state)
        assert {*os.listdir(out)} - {'ckpt.pt'} == {*os.listdir(folder / 'run')}, out  # no .tmp
    assert steps == {None, 0, 4, 8, 12} and len(copies) > 40


def test_signals_in_steps_and_evaluations_lose_nothing(corpus, whole, tmp_path):
    """One that comes in the final evaluation ends the run at once: all its steps are saved."""
    out, errors = tmp_path / 'run', tmp_path / 'stderr'
    for place, number, which, status, step in (
            ('evaluate', 1, signal.SIGTERM, 143, 1), ('train_step', 2, signal.SIGINT, 130, 3),
            ('evaluate', 2, signal.SIGTERM, 143, 7), ('evaluate', 2, signal.SIGTERM, -signal.SIGTERM, 12),
            ('evaluate', 1, signal.SIGINT, -signal.SIGINT, 12)):
        hook = (at_call, place, number, signal.raise_signal, which)
        finish(process(train.main, flags_of(corpus, out), stderr=errors, prepare=hook), status)
        assert load(out, 'ckpt.pt')['step'] == step and errors.read_text() == ''
    finish(process(train.main, flags_of(corpus, out), prepare=(keep_checkpoint,)), 0)
    assert_same(state_of(out), whole['float32'][0])


def test_one_of_several_copies_has_the_folder_until_it_is_killed(corpus, whole, tmp_path):
    out, here = tmp_path / 'run', tmp_path / 'here'
    first = process(train.main, flags_of(corpus, out), prepare=(at_call, 'train_step', 7, hold, str(here)))
    wait_until(here.exists)
    before = folder_hash(out)
    finish(process(train.main, flags_of(corpus, out), stderr=tmp_path / 'stderr'), 3)
    assert str(out) in one_line(tmp_path / 'stderr') and folder_hash(out) == before
    first.kill()
    finish(first, -signal.SIGKILL)
    finish(process(train.main, flags_of(corpus, out), prepare=(keep_checkpoint,)), 0)
    assert_same(state_of(out), whole['float32'][0])


def test_a_file_replaces_the_old_one_once_it_is_on_disk(tmp_path, monkeypatch):
    """The rename, too, is made to last. What a kill leaves is tested with the runs above."""
    done, fsync, replace = [], os.fsync, os.replace

    def noting_fsync(file):
        done.append('folder' if os.path.isdir(f'/proc/self/fd/{file}') else os.fstat(file).st_size)
        fsync(file)
    monkeypatch.setattr(os, 'fsync', noting_fsync)
    monkeypatch.setattr(os, 'replace', lambda *paths: done.append('replace') or replace(*paths))
    common.write_atomic(str(tmp_path / 'file'), lambda file: file.write(b'new' * 1000))
    assert done == [3000, 'replace', 'folder']


def stdout_to_a_full_disk():
    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)


def test_a_full_disk_is_one_line_and_the_old_checkpoint_resumes(corpus, whole, tmp_path):
    """Full for the first checkpoint, within a line of the log, for the terminal, for each other file."""
    out, errors = tmp_path / 'run', tmp_path / 'stderr'

    def fails(*named, **how):
        finish(process(train.main, flags_of(corpus, out), stderr=errors, **how), 1)
        assert all(name in one_line(errors) for name in named) and not list(out.glob('*.tmp'))
    fails(f'{out}/ckpt.pt', 'File too large', file_limit=100_000)
    finish(process(train.main, flags_of(corpus, out), prepare=(signal_at_step, signal.SIGTERM, 5)), 143)
    before = load(out, 'ckpt.pt')
    fails(f'{out}/log.jsonl', file_limit=(out / 'log.jsonl').stat().st_size + 100)
    assert (out / 'log.jsonl').read_bytes()[-1:] != b'\n'
    fails('No space left on device', prepare=(stdout_to_a_full_disk,))
    assert_same(load(out, 'ckpt.pt'), before)
    for name in ('config.json', 'ckpt.pt', 'model_6.pt', 'model.pt', 'result.json'):
        os.makedirs(out / f'{name}.tmp' / 'x')  # root cannot write there either
        refused(lambda: train.main(flags_of(corpus, out)), f'{out}/{name}', status=1)
        shutil.rmtree(out / f'{name}.tmp')
        load(out, 'ckpt.pt')
    finish(process(train.main, flags_of(corpus, out), prepare=(keep_checkpoint,)), 0)
    assert_same(state_of(out), whole['float32'][0])


class Evil:
    """Unpickled, it makes a file in the current folder."""

    def __reduce__(self):
        return os.mkdir, ('evil',)


def test_a_checkpoint_that_is_damaged_or_would_run_code_is_one_line(corpus, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = shutil.copytree(whole['float32'][1] / 'copies' / '030', tmp_path / 'run')
    good, parts = (out / 'ckpt.pt').read_bytes(), load(out, 'ckpt.pt')
    middle = len(good) // 2
    for content in (b'', good[:-1], good[:middle] + bytes([good[middle] ^ 16]) + good[middle + 1:], [1, 2],
                    {**parts, 'so_far': Evil()}, {name: parts[name] for name in parts if name != 'step'},
                    {**parts, 'model': {'x': torch.ones(3)}}, {**parts, 'optimizer': {'state': 'x'}},
                    {**parts, 'config': {}}):  # the last one, of a version that did not say its format
        if isinstance(content, bytes):
            (out / 'ckpt.pt').write_bytes(content)
        else:
            torch.save(content, out / 'ckpt.pt')
        before = folder_hash(tmp_path)
        refused(lambda: train.main(flags_of(corpus, out)), 'ckpt.pt')
        assert folder_hash(tmp_path) == before and not os.path.exists('evil')


def test_a_command_with_other_settings_or_other_data_is_not_this_run(corpus, whole, tmp_path):
    out = shutil.copytree(whole['float32'][1] / 'copies' / '030', tmp_path / 'run')
    other, moved = tmp_path / 'other', shutil.copytree(corpus, tmp_path / 'moved')
    shutil.copytree(corpus, other)
    tokens = np.array(data.read_shard(str(other / 'stdlib_train_000001.bin')))
    tokens[-1] += 1
    data.write_shard(str(other / 'stdlib_train_000001.bin'), tokens)
    before = folder_hash(tmp_path)
    for name, change in (('data_fingerprint', f'--data={other}'), ('--lr', '--lr=1e-2'),
                         ('--seed', '--seed=2'), ('--steps', '--steps=13'), ('--dtype', '--dtype=bfloat16'),
                         ('--center_every', '--center_every=2'), ('--log_every', '--log_every=2'),
                         ('--weight_tying', '--no-weight_tying')):
        refused(lambda change=change: train.main(flags_of(corpus, out, change)), out, f'{name}=')
        assert folder_hash(tmp_path) == before
    os.unlink(out / 'config.json')
    refused(lambda: train.main(flags_of(corpus, out, '--lr=7')), '--lr')  # which the checkpoint has too
    may_change = ('--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0', '--threads=1')
    assert train.main(flags_of(moved, out, *may_change)) == 0
    os.truncate(out / 'result.json', 10)
    refused(lambda: train.main(flags_of(corpus, out)), 'result.json')


def test_what_follows_from_the_machine_stays_when_a_run_goes_on_elsewhere(corpus, tmp_path, monkeypatch):
    """The same command, begun where there are no units for bf16, resumes where there are, and on a GPU."""
    flags = [*flags_of(corpus, tmp_path / 'run'), '--steps=8']
    flags = [flag for flag in flags if 'tokens' not in flag and 'dtype' not in flag]
    monkeypatch.setattr(machine, 'default_dtype', lambda *_: 'float32')
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', train.train_step)
        signal_at_step(signal.SIGTERM, 4)
        assert train.main(flags) == 143
    monkeypatch.setattr(machine, 'default_dtype', lambda *_: 'bfloat16')
    assert train.main(flags) == 0
    config = load(tmp_path / 'run')['config']
    assert config['dtype'] == config['logits_dtype'] == 'float32' and config['eval_tokens'] < 20_000
