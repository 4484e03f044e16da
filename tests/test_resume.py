"""A run that is killed or stopped ends as if nothing had been; a folder keeps its settings; forks."""
import functools
import itertools
import math
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model
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
        assert {*os.listdir(out)} == {
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
    """Another process is refused from before the checkpoint is read until all is saved."""
    def locked(real, *given):
        refused(lambda: train.lock_folder(f'{tmp_path}/run'), 'another process')
        return real(*given)
    for name in ('find_work', 'make_result'):
        monkeypatch.setattr(train, name, functools.partial(locked, getattr(train, name)))
    trained('run', '--steps=1')
    train.lock_folder(f'{tmp_path}/run').close()


# -------- signals
@pytest.mark.parametrize('numbers, status, step', [
    ([signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM, 3),  # scancel brings two
    ([signal.SIGUSR1], 128 + signal.SIGUSR1, 3),
    ([signal.SIGHUP], 128 + signal.SIGHUP, 3),
    ([signal.SIGINT], 128 + signal.SIGINT, 3),
    ([signal.SIGINT, signal.SIGINT], 1, 2)])  # a second Ctrl-C ends it at once
def test_signals(numbers, status, step, corpus, whole, tmp_path):
    """The run ends after a checkpoint of the step it is in; the same command goes on bit for bit."""
    flags = flags_of(corpus, tmp_path / 'run', '--ckpt_every=0')
    prepare = (at_step, 3, functools.partial(send, numbers))
    finish(process(train.main, flags, prepare=prepare), status)
    assert load(tmp_path / 'run', 'ckpt.pt')['step'] == step
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def hung_up_at_step_3():
    """A terminal is closed, and nohup has made this process ignore that."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(3, functools.partial(send, [signal.SIGHUP]))


@pytest.mark.parametrize('env, status', [({}, 0), ({'TORCHELASTIC_RUN_ID': 'none'}, 128 + signal.SIGHUP)])
def test_nohup(env, status, corpus, tmp_path):
    """A run goes on; a rank of torchrun, which sends it SIGHUP all the same and kills it soon, saves."""
    flags = flags_of(corpus, tmp_path / 'run')
    finish(process(train.main, flags, prepare=(hung_up_at_step_3,), env=env), status)


def test_final_test(trained, monkeypatch):
    """By then the last step is saved, and a signal ends the run as it does any program."""
    handlers = []

    def evaluate(model, windows, n_tokens, args, real=train.evaluate):
        handlers.append(signal.getsignal(signal.SIGINT))
        if n_tokens == args.test_tokens:
            assert load(args.out, 'ckpt.pt')['step'] == 2
        return real(model, windows, n_tokens, args)
    monkeypatch.setattr(train, 'evaluate', evaluate)
    trained('run', '--steps=2', '--eval_every=1', '--ckpt_every=0')
    before, within, after = handlers
    assert before == after != within


# -------- a folder keeps its settings and its checkpoint
def test_damaged_checkpoint(corpus, whole, tmp_path):
    """One flipped bit of a weight is refused, as is half a file: nothing is lost in silence."""
    copies = whole[1]
    begun = shutil.copytree(copies[len(copies) // 2], tmp_path / 'run')
    path = begun / 'ckpt.pt'
    saved = path.read_bytes()
    weight = load(begun, 'ckpt.pt')['model']['lm_head.weight'].numpy().tobytes()
    flipped = bytearray(saved)
    flipped[saved.index(weight)] ^= 1
    half = saved[:len(saved) // 2]
    for damaged in (flipped, half):
        path.write_bytes(damaged)
        refused(lambda: train.main(flags_of(corpus, begun)), path)
    path.unlink()  # as scratch disks do
    refused(lambda: train.main(flags_of(corpus, begun)), begun, 'ckpt.pt')


# Values that the run below does not have: what may not change when it resumes, and what may.
OTHER = """method=mu_loss lam=1 cap=5 no-final_gain size=16M weight_tying n_layer=2 n_embd=64 n_head=2
    vocab_size=512 block_size=16 rope_fraction=1 lr=1 min_lr=0 warmup=3 steps=50 batch_size=8 beta1=0.8
    beta2=0.9 eps=1e-7 grad_clip=0 seed=2 dtype=bfloat16 logits_dtype=bfloat16 init_from=x
    test_tokens=64""".split()
MAY_CHANGE = '''device=cpu micro_batch_size=1 compile threads=2 data=moved[1] out=run log_every=2 eval_every=7
    eval_tokens=64 ckpt_every=7 keep_every=7'''.split()


def test_what_may_change(corpus, tmp_path, monkeypatch):
    """Each flag is refused by its name or passes; one that is newer than the run had its default."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, 'moved[1]')
    flags = [*SMALL, '--method=z_loss', '--steps=40', f'--data={corpus}', '--out=before']
    args = train.read_command(flags)
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
        assert train.read_command([*flags, f'--{flag}']).run_id == args.run_id

    path = Path('moved[1]/stdlib_val_000000.bin')
    path.write_bytes(shard(train.read_shard(path) ^ 1))
    train.fingerprint.cache_clear()
    refused(lambda: train.read_command([*flags, '--data=moved[1]']), 'data_fingerprint=')


# -------- forks
def whole_and_resumed(trained, monkeypatch, *flags):
    """Two runs of nine steps, the second of which is stopped in step 6 and resumed."""
    flags = ['--steps=9', '--keep_every=9', '--lr=1e-2', *flags]
    whole = trained('whole', *flags)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', train.train_step)  # which comes back at the end
        at_step(6, functools.partial(send, [signal.SIGTERM]))
        with pytest.raises(SystemExit):
            trained('resumed', *flags)
    return whole, trained('resumed', *flags)


def with_optimizer(monkeypatch, make_optimizer):
    """train.make_model makes this optimizer."""
    def make_model(args, make_model=train.make_model):
        model, _ = make_model(args)
        return model, make_optimizer(model, args)
    monkeypatch.setattr(train, 'make_model', make_model)


class TwoOptimizers:
    """One for the blocks' matrices, as Muon would be, and AdamW for all else. Each step lowers both rates."""

    def __init__(self, model, args):
        blocks = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is q for q in blocks)]
        self.both = torch.optim.SGD(blocks, args.lr, 0.9), torch.optim.AdamW(others, args.lr)

    @property
    def param_groups(self):  # load_state_dict makes new ones: a list would be out of date
        return [group for optimizer in self.both for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.both:
            optimizer.step()
        for group in self.param_groups:
            group['lr_scale'] = group.get('lr_scale', 1) * 0.9

    def state_dict(self):
        return [optimizer.state_dict() for optimizer in self.both]

    def load_state_dict(self, saved):
        for optimizer, state in zip(self.both, saved, strict=True):
            optimizer.load_state_dict(state)


def test_optimizer_of_ones_own(trained, monkeypatch):
    """What its groups hold acts on the schedule, is logged, and is resumed."""
    with_optimizer(monkeypatch, TwoOptimizers)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))

    expected = []
    for step in range(1, 10):
        cosine = 1e-5 + 0.5 * (1 + math.cos(math.pi * (step - 1) / 9)) * (1e-2 - 1e-5)
        expected.append(cosine * 0.9 ** (step - 1))
    assert [line['lr'] for line in log_of(resumed) if 'lr' in line] == pytest.approx(expected)
    last = load(resumed, 'model_9.pt')['optimizer']
    assert [state['param_groups'][0]['lr'] for state in last] == pytest.approx(2 * expected[-1:])


@pytest.mark.parametrize('change, named', [
    (lambda p, lr: ([*p], 2 * lr), 'lr_scale'),  # a rate of its own, which the schedule would overwrite
    (lambda p, lr: (p[1:], lr), 'lacks a parameter'),  # which would never train
    (lambda p, lr: ([*p, p[0]], lr), 'has one twice')])  # which would take two steps
@pytest.mark.filterwarnings('ignore:optimizer contains a parameter group with duplicate')
def test_optimizer_that_cannot_be_right(trained, monkeypatch, change, named):
    with_optimizer(monkeypatch, lambda model, args: torch.optim.AdamW(
        *change([*model.parameters()], args.lr)))
    with pytest.raises(AssertionError, match=named):
        trained('run', '--steps=1')


def test_random_numbers(trained, monkeypatch):
    """A resumed run draws what the whole one draws, for a batch and for dropout in the model."""
    def noisy_batch(*given, real=train.load_batch):
        return [(tokens, targets ^ torch.randint(2, targets.shape)) for tokens, targets in real(*given)]

    def with_dropout(mlp, x, real=model.SwiGLU.forward):
        return F.dropout(real(mlp, x), 0.2, training=mlp.training)
    monkeypatch.setattr(train, 'load_batch', noisy_batch)
    monkeypatch.setattr(model.SwiGLU, 'forward', with_dropout)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))


def test_state_that_cannot_be_read_back(trained, monkeypatch):
    """What a fork saves is read once before the first step, not after a day."""
    def save_checkpoint(state, *more, real=train.save_checkpoint):
        generator = types.SimpleNamespace(state_dict=lambda: np.random.RandomState(0).get_state())
        real({**state, 'generator': generator}, *more)
    monkeypatch.setattr(train, 'save_checkpoint', save_checkpoint)
    monkeypatch.setattr(train, 'train_step', None)  # no step is taken
    with pytest.raises(ValueError, match='ckpt.pt'):
        trained('run', '--steps=2')


def test_wandb(trained, monkeypatch):
    """A resumed run goes on in its run of W&B."""
    inits, records = [], []
    wandb = types.SimpleNamespace(
        init=lambda **given: inits.append(given), summary={},
        log=lambda record, step: records.append(without_times(record)))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    whole, resumed = whole_and_resumed(trained, monkeypatch, '--wandb=project')
    assert records == log_of(whole) + log_of(resumed)
    assert wandb.summary['test_loss'] == log_of(resumed)[-1]['test_loss']
    of_whole, of_stopped, of_resumed = inits
    assert of_whole['id'] != of_stopped['id'] == of_resumed['id'] and of_resumed['resume'] == 'allow'
