"""A run that is killed or stopped ends as if nothing had been; a folder keeps its settings; forks."""
import functools
import itertools
import math
import os
import shutil
import signal
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model
import train
from conftest import finish, process, refused
from small_runs import SMALL, assert_same, at_step, load, log_of, shard, state_of, without_times


def flags_of(corpus, out, *more):
    return [*SMALL, '--method=mu_centering', '--lr=3e-2', '--steps=4', '--ckpt_every=3',
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
        assert {*os.listdir(out)} == {
            '.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_2.pt', 'model_4.pt', 'result.json'}
    assert {*steps} == {-1, 0, 2, 3, 4} and len(copies) > 25


def at_step_3(monkeypatch, act):
    """Runs of this process call act() as they begin step 3."""
    def train_step(model, optimizer, batch, step, *more, train_step=train.train_step, **named):
        if step == 3:
            act()
        return train_step(model, optimizer, batch, step, *more, **named)
    monkeypatch.setattr(train, 'train_step', train_step)


def test_shards_that_are_added_under_a_run(corpus, whole, tmp_path, monkeypatch):
    """prepare_fineweb.py may still be at work: the run has not read them."""
    data = shutil.copytree(corpus, tmp_path / 'data')
    train_shard = data / 'stdlib_train_000000.bin'
    at_step_3(monkeypatch, lambda: shutil.copy(train_shard, data / 'stdlib_train_000009.bin'))
    train.main(flags_of(data, tmp_path / 'run'))
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_signals(number, corpus, whole, tmp_path):
    """The run ends after a checkpoint of the step it is in; the same command goes on bit for bit."""
    flags = flags_of(corpus, tmp_path / 'run', '--ckpt_every=0')
    sent = functools.partial(send, [number])
    finish(process(train.main, flags, prepare=(at_step, 3, sent)), 128 + number)
    assert load(tmp_path / 'run', 'ckpt.pt')['step'] == 3
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def send(numbers, model):
    for number in numbers:
        signal.raise_signal(number)


def hung_up_at_step_3():
    """A terminal is closed, and nohup has made this process ignore that."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(3, functools.partial(send, [signal.SIGHUP]))


@pytest.mark.parametrize('env, status', [({}, 0), ({'TORCHELASTIC_RUN_ID': 'none'}, 128 + signal.SIGHUP)])
def test_nohup(env, status, corpus, tmp_path):
    """A run goes on; a rank of torchrun, which sends it SIGHUP all the same and kills it soon, saves."""
    flags = flags_of(corpus, tmp_path / 'run')
    finish(process(train.main, flags, prepare=(hung_up_at_step_3,), env=env), status)


def test_second_ctrl_c(corpus, tmp_path):
    """Ends a run at once; a second SIGTERM, which Slurm's scancel brings, does not."""
    twice = {signal.SIGINT: (1, 0), signal.SIGTERM: (128 + signal.SIGTERM, 3)}
    for number, (status, step) in twice.items():
        out = tmp_path / str(number)
        flags = flags_of(corpus, out, '--ckpt_every=0', '--keep_every=0')
        prepare = (at_step, 3, functools.partial(send, 2 * [number]))
        finish(process(train.main, flags, prepare=prepare), status)
        assert load(out, 'ckpt.pt')['step'] == step


def test_signals_in_the_final_test(trained, monkeypatch):
    """They end a run as they do any program: its last step is saved."""
    handlers = []

    def evaluate(*given, evaluate=train.evaluate):
        handlers.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])
        return evaluate(*given)
    monkeypatch.setattr(train, 'evaluate', evaluate)
    trained('run', '--steps=2', '--eval_every=1')
    before, within, after = handlers
    assert before == after == [signal.SIG_DFL, signal.default_int_handler] != within


def test_other_data(corpus, begun, tmp_path):
    """Are refused, but not another place."""
    other = shutil.copytree(corpus, tmp_path / 'other')
    path = other / 'stdlib_train_000001.bin'
    tokens = train.read_shard(path)
    for changed in ([*tokens[:-1], tokens[-1] ^ 1], tokens[:-1]):
        path.write_bytes(shard(changed))
        train.fingerprint.cache_clear()
        refused(lambda: train.main(flags_of(other, begun)), f'{begun} has', 'data_fingerprint=')
    path.write_bytes(shard(tokens))
    train.fingerprint.cache_clear()
    train.main(flags_of(other, begun, '--micro_batch_size=2', '--ckpt_every=0', '--keep_every=0'))
    assert train.read_json(f'{begun}/config.json')['data'] == str(other)
    assert load(begun)['step'] == 4  # the last step is saved without --ckpt_every too


def test_damaged_checkpoint(corpus, begun):
    """One flipped bit of a weight is refused, as is half a file: nothing is lost in silence."""
    path = begun / 'ckpt.pt'
    whole = path.read_bytes()
    weight = load(begun, 'ckpt.pt')['model']['lm_head.weight'].numpy().tobytes()
    i = whole.index(weight)
    for damaged in (whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1:], whole[:len(whole) // 2]):
        path.write_bytes(damaged)
        refused(lambda: train.main(flags_of(corpus, begun)), f'{path} cannot be read')
    path.unlink()  # as scratch disks do
    refused(lambda: train.main(flags_of(corpus, begun)), f'{begun} has lost its ckpt.pt')


def test_state_that_cannot_be_read_back(trained, monkeypatch, tmp_path):
    """What a fork saves is read once before the first step, not after a day."""
    def save_checkpoint(state, *more, save_checkpoint=train.save_checkpoint):
        generator = types.SimpleNamespace(state_dict=lambda: np.random.RandomState(0).get_state())
        save_checkpoint({**state, 'generator': generator}, *more)
    monkeypatch.setattr(train, 'save_checkpoint', save_checkpoint)
    monkeypatch.setattr(train, 'train_step', None)  # no step is taken
    with pytest.raises(ValueError, match='ckpt.pt cannot be read'):
        trained('run', '--steps=2')


# Values that the run below does not have: what may not change when it resumes, and what may.
OTHER = """method=mu_loss lam=1 cap=5 no-final_gain size=16M weight_tying n_layer=2 n_embd=64 n_head=2
    vocab_size=512 block_size=16 rope_fraction=1 lr=1 min_lr=0 warmup=3 steps=50 batch_size=8 beta1=0.8
    beta2=0.9 eps=1e-7 grad_clip=0 seed=2 dtype=bfloat16 logits_dtype=bfloat16 init_from=x
    test_tokens=64""".split()
MAY_CHANGE = '''device=cpu micro_batch_size=1 compile threads=2 data=moved[1] out=run log_every=2 eval_every=7
    eval_tokens=64 ckpt_every=7 keep_every=7'''


def test_what_may_change(corpus, tmp_path, monkeypatch):
    """Each flag is refused by its name or passes; one that is newer than the run had its default."""
    begun = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, 'run', lambda args, **_: begun.append(args))
    shutil.copytree(corpus, 'moved[1]')
    flags = [*SMALL, '--method=z_loss', '--steps=40', f'--data={corpus}', '--out=before']
    train.main(flags)
    machine = dict.fromkeys(['device', 'processes', 'torch', 'device_name', 'commit'], 'another')
    older = vars(begun[0]) | machine
    del older['rope_fraction']
    train.save(older, 'before/config.json')
    train.save({}, 'before/ckpt.pt')
    for flag in OTHER:
        name = flag.split('=')[0].removeprefix('no-')
        refused(lambda: train.main([*flags, f'--{flag}']), 'before has a run with ', f'{name}=')  # noqa: B023
    shutil.copytree('before', 'run')
    for flag in MAY_CHANGE.split():
        train.main([*flags, f'--{flag}'])
    assert len(begun) == 1 + len(MAY_CHANGE.split())
    assert {args.run_id for args in begun} == {begun[0].run_id}


class Prodigy(torch.optim.AdamW):
    """As Prodigy, it keeps a factor of its learning rate in its groups."""

    def step(self):
        for group in self.param_groups:
            group['d'] = group.get('d', 1.0) * 1.1
            group['lr'] *= group['d']
        super().step()


class TwoOptimizers:
    """Muon for the matrices of the blocks, AdamW for all else; `rates` are those of both in each step."""

    def __init__(self, model, args):
        blocks = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is q for q in blocks)]
        self.both = torch.optim.Muon(blocks, lr=args.lr), torch.optim.AdamW(others, lr=args.lr)
        self.rates = []

    @property
    def param_groups(self):  # load_state_dict makes new ones: a list would be out of date
        return [group for optimizer in self.both for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.both:
            optimizer.step()
        self.rates.append([group['lr'] for group in self.param_groups])

    def state_dict(self):
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.both)}

    def load_state_dict(self, saved):
        for i, optimizer in enumerate(self.both):
            optimizer.load_state_dict(saved[str(i)])


def with_optimizer(monkeypatch, make_optimizer):
    """train.make_model makes this optimizer; returns a list to which each one is added."""
    made = []

    def make_model(args, make_model=train.make_model):
        model, _ = make_model(args)
        made.append(make_optimizer(model, args))
        return model, made[-1]
    monkeypatch.setattr(train, 'make_model', make_model)
    return made


def whole_and_resumed(trained, monkeypatch, *flags):
    """Two runs of nine steps; an error ends the second one in step 8, after the checkpoint of step 6."""
    flags = ['--steps=9', '--ckpt_every=6', '--keep_every=9', '--lr=1e-2', *flags]
    whole = trained('whole', *flags)

    def train_step(model, optimizer, batch, step, *more, train_step=train.train_step, **named):
        if step == 8:
            raise InterruptedError
        return train_step(model, optimizer, batch, step, *more, **named)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', train_step)
        with pytest.raises(InterruptedError) as caught:
            trained('resumed', *flags)
        traceback.clear_frames(caught.tb)  # which hold the folder's lock
    return whole, trained('resumed', *flags)


def rates(step):
    """The schedule's, of whole_and_resumed: no warm-up in nine steps."""
    return 1e-5 + 0.5 * (1 + math.cos(math.pi * (step - 1) / 9)) * (1e-2 - 1e-5)


def test_optimizer_with_a_state_in_its_groups(trained, monkeypatch):
    with_optimizer(monkeypatch, lambda model, args: Prodigy(model.parameters(), lr=args.lr))
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))
    logged = [line['lr'] for line in log_of(resumed) if 'lr' in line]
    assert logged == pytest.approx([rates(step) * 1.1 ** step for step in range(1, 10)])
    assert load(resumed, 'model_9.pt')['optimizer']['param_groups'][0]['d'] == pytest.approx(1.1 ** 9)


def test_schedule_of_ones_own(trained, monkeypatch):
    """A plateau schedule halves lr_scale every third step: it acts, is logged and resumed."""
    def train_step(model, optimizer, batch, step, *more, train_step=train.train_step, **named):
        output = train_step(model, optimizer, batch, step, *more, **named)
        for group in optimizer.param_groups:
            group['lr_scale'] = 0.5 ** (step // 3)
        return output
    monkeypatch.setattr(train, 'train_step', train_step)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))
    logged = [line['lr'] for line in log_of(resumed) if 'lr' in line]
    assert logged == pytest.approx([rates(step) * 0.5 ** ((step - 1) // 3) for step in range(1, 10)])


@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='PyTorch has Muon from 2.9 on')
def test_two_optimizers(trained, monkeypatch):
    """Each one follows the schedule, before and after it resumes."""
    made = with_optimizer(monkeypatch, TwoOptimizers)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    first, second = (load(out, 'model_9.pt') for out in (whole, resumed))
    assert_same(second['model'], first['model'])
    assert_same(second['optimizer'], first['optimizer'])
    for optimizer, steps in zip(made, (range(1, 10), range(1, 8), range(7, 10)), strict=True):
        assert optimizer.rates == [pytest.approx(2 * [rates(step)]) for step in steps]


def test_rate_of_ones_own(trained, monkeypatch):
    """A group's own rate, which the schedule would overwrite, is an error before the first step."""
    with_optimizer(monkeypatch, lambda model, args: torch.optim.AdamW(model.parameters(), lr=2 * args.lr))
    with pytest.raises(AssertionError, match='lr_scale'):
        trained('run', '--steps=1')


@pytest.mark.parametrize('choose', [lambda p: p[1:], lambda p: [*p, p[0]]])
@pytest.mark.filterwarnings('ignore:optimizer contains a parameter group with duplicate')
def test_parameters_of_ones_own(trained, monkeypatch, choose):
    """A parameter that the optimizer lacks would never train; one that it has twice takes two steps."""
    with_optimizer(monkeypatch, lambda model, args: torch.optim.AdamW(
        choose([*model.parameters()]), lr=args.lr))
    with pytest.raises(AssertionError, match='lacks a parameter'):
        trained('run', '--steps=1')


def test_noise_in_a_batch(trained, monkeypatch):
    """What load_batch draws comes again; no batch is drawn before the checkpoint of the step before."""
    events = []

    def load_batch(windows, step, args, load_batch=train.load_batch):
        events.append(('batch', step))
        return [(tokens, targets ^ torch.randint(2, targets.shape))
                for tokens, targets in load_batch(windows, step, args)]

    def save_checkpoint(state, step, *more, save_checkpoint=train.save_checkpoint):
        events.append(('save', step))
        save_checkpoint(state, step, *more)
    monkeypatch.setattr(train, 'load_batch', load_batch)
    monkeypatch.setattr(train, 'save_checkpoint', save_checkpoint)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))
    assert events.index(('batch', 7)) > events.index(('save', 6))


def test_dropout(trained, monkeypatch):
    """A resumed run draws what the whole one draws."""
    forward = model.SwiGLU.forward
    monkeypatch.setattr(model.SwiGLU, 'forward',
                        lambda mlp, x: F.dropout(forward(mlp, x), 0.2, training=mlp.training))
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    assert_same(state_of(resumed), state_of(whole))


def test_ema(corpus, tmp_path):
    """A fork's average of the weights, in `state`, is resumed; at the end it is tested and saved."""
    source = Path(train.__file__).read_text()
    for line, more in (
            ("    state = {'model': model, 'optimizer': optimizer}\n",
             "    ema = torch.optim.swa_utils.AveragedModel(model)\n    state['ema'] = ema\n"),
            ('        stopped = max_of_ranks(max(signals, default=0))  # all ranks stop at the same step\n',
             '        ema.update_parameters(model)\n        if step == die_at:\n            return 1\n'),
            ('    test_loss = math.nan\n', '    model.load_state_dict(ema.module.state_dict())\n')):
        assert source.count(line) == 1
        source = source.replace(line, line + more)
    fork = types.ModuleType('fork')
    fork.__file__ = train.__file__
    exec(source, fork.__dict__)

    def run(out, die_at):
        fork.die_at = die_at
        fork.main([*SMALL, '--steps=9', '--ckpt_every=6', '--keep_every=9', '--lr=1e-2',
                   f'--data={corpus}', f'--out={tmp_path}/{out}'])
    run('whole', 0)
    with pytest.raises(SystemExit):
        run('resumed', 8)
    run('resumed', 0)
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    assert_same(state_of(resumed), state_of(whole))
    ema = load(whole, 'model_9.pt')['ema']
    assert int(ema['n_averaged']) == 9
    assert_same(load(whole)['model'], {name: ema[f'module.{name}'] for name in load(whole)['model']})


def test_wandb(trained, monkeypatch):
    """A resumed run goes on in its run of W&B."""
    inits, records = [], []
    wandb = types.SimpleNamespace(init=lambda **given: inits.append(given), summary={},
                                  log=lambda record, step: records.append(without_times(record)))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    _, resumed = whole_and_resumed(trained, monkeypatch, '--wandb=project')
    assert inits[0]['id'] != inits[1]['id'] == inits[2]['id'] and inits[2]['resume'] == 'allow'
    assert records[-4:] == log_of(resumed)[-4:]
    assert wandb.summary['test_loss'] == log_of(resumed)[-1]['test_loss']
