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
    """Copies a folder before each change, as a kill then would leave it; what is renamed should be synced."""
    numbers, synced = itertools.count(), {}

    def fsync(file):
        synced[os.readlink(f'/proc/self/fd/{file}')] = os.fstat(file).st_size

    def hook(event, given):  # what it writes itself is not in `out`
        changes = event in ('os.rename', 'os.remove') or event == 'open' and set(given[1] or '') & set('aw')
        if changes and str(given[0]).startswith(out):
            shutil.copytree(out, f'{copies}/{next(numbers):03}')
            assert event != 'os.rename' or synced.pop(given[0]) == os.path.getsize(given[0])
    os.fsync = fsync
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


def test_killed_at_any_moment(corpus, whole, tmp_path, monkeypatch):
    """What was being written is half there; the log has half a line more, or has lost its end."""
    def read_checkpoint(path, read=train.read_checkpoint):  # under a lock, or what another saves is lost
        refused(lambda: train.lock_folder(os.path.dirname(path)), 'another process')
        return read(path)
    monkeypatch.setattr(train, 'read_checkpoint', read_checkpoint)
    (run, copies), steps = whole, []
    for i, copy in enumerate(copies):
        out = shutil.copytree(copy, tmp_path / copy.name)
        for file in out.glob('*.tmp'):
            os.truncate(file, file.stat().st_size // 2)
        log = out / 'log.jsonl'
        if log.exists() and not (out / 'result.json').exists():
            text = log.read_text()
            log.write_text(text + '{"step": 1' if i % 2 else text[:len(text) // 2])
        steps.append(load(out, 'ckpt.pt')['step'] if (out / 'ckpt.pt').exists() else -1)
        train.main(flags_of(corpus, out))
        assert_same(state_of(out), state_of(run))
        assert {name for name in os.listdir(out) if not name.endswith('.diff')} == {  # of code not committed
            '.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_2.pt', 'model_4.pt', 'result.json'}
    assert {*steps} == {-1, 0, 2, 3, 4} and len(copies) > 25


def test_lost_files(corpus, whole, begun):
    """A run that has lost what it would go on from, or that it is done, does not start over."""
    done = shutil.copytree(whole[0], begun.parent / 'done')
    for out, lost in ((begun, 'ckpt.pt'), (done, 'result.json')):
        os.unlink(out / lost)
        before = folder_hash(out)
        for more in ((), (f'--init_from={done}/model_2.pt',)):
            refused(lambda: train.main(flags_of(corpus, out, *more)), out, lost)  # noqa: B023
        assert folder_hash(out) == before


def test_checkpoints_that_are_not_ours(corpus, begun):
    """Damaged, of another program, or with a Path: in a pickle that is a call of any function of Python's."""
    good, parts = (begun / 'ckpt.pt').read_bytes(), load(begun, 'ckpt.pt')
    zeroed = good[:50_000] + bytes(400) + good[50_400:]  # in the midst of the weights
    for content in (good[:-1], zeroed, [1, 2], {**parts, 'more': Path('x')}, {'model': {}}):
        torch.save(content, begun / 'ckpt.pt')
        if isinstance(content, bytes):
            (begun / 'ckpt.pt').write_bytes(content)
        before = folder_hash(begun.parent)
        for flags in ((begun,), (f'{begun}2', f'--init_from={begun}/ckpt.pt')):
            refused(lambda: train.main(flags_of(corpus, *flags)), 'ckpt.pt')  # noqa: B023
        assert folder_hash(begun.parent) == before


def test_other_data(corpus, begun, tmp_path):
    """Are refused, by each rank too, but not another place. A flag that older code lacked had its default."""
    other = shutil.copytree(corpus, tmp_path / 'other')
    path = other / 'stdlib_train_000001.bin'
    tokens = train.read_shard(path)
    path.write_bytes(shard([*tokens[:-1], tokens[-1] ^ 1]))
    args = train.resolve_args(train.parser.parse_args(flags_of(other, begun)))
    args.data_fingerprint = 'of rank 0'
    refused(lambda: train.run(args, None), '--data of rank ')
    refused(lambda: train.main(flags_of(other, begun)), f'{begun}/ckpt.pt has data_fingerprint=')
    path.write_bytes(shard(tokens))
    parts = load(begun, 'ckpt.pt')
    train.save({name: part for name, part in parts.items() if name != 'optimizer'}, f'{begun}/ckpt.pt')
    with pytest.raises(KeyError, match='optimizer'):  # as a fork's EMA: it is not begun anew
        train.main(flags_of(corpus, begun))
    del parts['config']['rope_fraction']
    train.save(parts, f'{begun}/ckpt.pt')
    refused(lambda: train.main(flags_of(other, begun, '--rope_fraction=1')), 'rope_fraction=')
    config = train.read_json(f'{begun}/config.json')
    train.save({**config, 'commit': 'older'}, f'{begun}/config.json')
    train.main(flags_of(other, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert train.read_json(f'{begun}/config.json')['commit'] == f'older {config["commit"]}'
    assert load(begun)['step'] == 4  # the last step is saved without --ckpt_every too


# Values that the run below does not have: what may not change when it resumes, and what may.
OTHER = """method=mu_loss lam=1 cap=5 mu_shift=1 size=16M weight_tying n_layer=2 n_embd=64 n_head=2
    vocab_size=512 block_size=16 rope_fraction=1 lr=1 min_lr=0 warmup=3 steps=50 batch_size=8 beta1=0.8
    beta2=0.9 eps=1e-7 grad_clip=0 seed=2 dtype=bfloat16 logits_dtype=bfloat16 init_from=x log_every=2
    eval_every=7 eval_tokens=64 test_tokens=64""".split()
MAY_CHANGE = 'device=cpu micro_batch_size=1 compile threads=2 data=moved[1] out=run ckpt_every=7 keep_every=7'
ARCHITECTURE = 'n_layer=2 n_embd=64 n_head=2 vocab_size=512 weight_tying rope_fraction=1'.split()


def test_what_may_change(corpus, tmp_path, monkeypatch):
    """Each flag is refused by its name or passes, to resume and to start from the model of another run."""
    begun = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, 'run', lambda args, *_: begun.append(args))
    shutil.copytree(corpus, 'moved[1]')
    flags = [*SMALL, '--method=z_loss', '--steps=40', f'--data={corpus}', '--out=before']
    train.main(flags)
    machine = dict.fromkeys(['device', 'processes', 'torch', 'device_name', 'commit'], 'another')
    train.save({'model': {}, 'step': 1, 'config': vars(begun[0]) | machine}, 'before/ckpt.pt')
    shutil.copytree('before', 'run')
    from_model = ['--out=new', '--init_from=before/ckpt.pt']
    for may_not, flag in [*(([], flag) for flag in OTHER), *((from_model, flag) for flag in ARCHITECTURE)]:
        named = 'before/ckpt.pt has ', f' {flag.split("=")[0]}='
        refused(lambda: train.main([*flags, *may_not, f'--{flag}']), *named)  # noqa: B023
    may = [*MAY_CHANGE.split(), *({*OTHER} - {*ARCHITECTURE, 'mu_shift=1', 'init_from=x'})]
    for flag in may:
        train.main([*flags, *(from_model if flag in OTHER else []), f'--{flag}'])
    assert len(begun) == 1 + len(may)
