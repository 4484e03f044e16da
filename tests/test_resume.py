"""A run that is killed, stopped or out of disk ends as if nothing had been; files are not trusted."""
import contextlib
import functools
import gc
import itertools
import math
import os
import re
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch

import train
from conftest import finish, folder_hash, process, refused
from small_runs import SMALL, assert_same, at_step, kill, load, log_of, shard, state_of, without_times


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
    """Are refused, but not another place. A flag that older code lacked had its default."""
    other = shutil.copytree(corpus, tmp_path / 'other')
    path = other / 'stdlib_train_000001.bin'
    tokens = train.read_shard(path)
    path.write_bytes(shard([*tokens[:-1], tokens[-1] ^ 1]))
    refused(lambda: train.main(flags_of(other, begun)), 'ckpt.pt', '110000 tokens then, 110000 now')
    path.write_bytes(shard(tokens[:-1]))
    refused(lambda: train.main(flags_of(other, begun)), 'ckpt.pt', '110000 tokens then, 109999 now')
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


def at_step_3(monkeypatch, act):
    """Runs of this process call act() as they begin step 3."""
    def train_step(model, optimizer, batch, step, *more, train_step=train.train_step, **named):
        if step == 3:
            act()
        return train_step(model, optimizer, batch, step, *more, **named)
    monkeypatch.setattr(train, 'train_step', train_step)


def test_shards_that_change_under_a_run(corpus, whole, tmp_path, monkeypatch):
    """The test would be of other text; with the shards as they were the same command ends the run."""
    data = shutil.copytree(corpus, tmp_path / 'data')
    val = data / 'stdlib_val_000000.bin'
    good = val.read_bytes()
    flags = flags_of(data, tmp_path / 'run')
    with monkeypatch.context() as patch:
        at_step_3(patch, lambda: val.write_bytes(good[:1024] + good[1026:] + good[1024:1026]))
        refused(lambda: train.main(flags), f'--data={data} have changed')
    refused(lambda: train.main(flags), 'ckpt.pt', 'have changed')
    val.write_bytes(good)
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def test_shards_that_are_added_under_a_run(corpus, whole, tmp_path, monkeypatch):
    """prepare_fineweb.py may still be at work: the run has not read them."""
    data = shutil.copytree(corpus, tmp_path / 'data')
    train_shard = data / 'stdlib_train_000000.bin'
    at_step_3(monkeypatch, lambda: shutil.copy(train_shard, data / 'stdlib_train_000009.bin'))
    train.main(flags_of(data, tmp_path / 'run'))
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


def test_lock_that_does_nothing(corpus, whole, tmp_path, monkeypatch):
    """On some network disks two processes both get the lock: the first one ends before it writes again."""
    out = tmp_path / 'run'
    monkeypatch.setattr(train.fcntl, 'flock', lambda *_: None)
    second = []

    def start_second():
        if not second:  # in the first process
            second.append(process(train.main, flags_of(corpus, out), prepare=(without_flock,)))
            finish(second[0], 0)
    with monkeypatch.context() as patch:
        at_step_3(patch, start_second)
        refused(lambda: train.main(flags_of(corpus, out)), f'{out} is now in use by another process')
    assert_same(state_of(out), state_of(whole[0]))


def without_flock():
    train.fcntl.flock = lambda *_: None


def test_end_and_resume_keep_no_copy(corpus, whole, tmp_path, monkeypatch):
    """The end reads nothing back; after a resume the weights and moments are no longer a view of ckpt.pt."""
    saved = [copy for copy in whole[1] if (copy / 'ckpt.pt').exists()]
    begun = shutil.copytree(next(x for x in saved if load(x, 'ckpt.pt')['step'] == 3), tmp_path / 'run')
    read = []

    def read_checkpoint(path, read_checkpoint=train.read_checkpoint):
        read.append(path)
        return read_checkpoint(path)
    monkeypatch.setattr(train, 'read_checkpoint', read_checkpoint)

    def look(optimizer):
        gc.collect()
        assert read == 2 * [f'{begun}/ckpt.pt']
        assert 'ckpt.pt' not in Path('/proc/self/maps').read_text()
        return contextlib.nullcontext()
    monkeypatch.setattr(train, 'checked_groups', look)
    train.main(flags_of(corpus, begun))
    assert len(read) == 2


def send(number, model):
    signal.raise_signal(number)


@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_signals(number, status, corpus, whole, tmp_path):
    """The run ends after a checkpoint of the step it is in; the same command goes on bit for bit."""
    flags = flags_of(corpus, tmp_path / 'run', '--ckpt_every=0')
    finish(process(train.main, flags, prepare=(at_step, 3, functools.partial(send, number))), status)
    assert load(tmp_path / 'run', 'ckpt.pt')['step'] == 3
    train.main(flags)
    assert_same(state_of(tmp_path / 'run'), state_of(whole[0]))


# Values that the run below does not have: what may not change when it resumes, and what may.
OTHER = """method=mu_loss lam=1 cap=5 no-final_gain size=16M weight_tying n_layer=2 n_embd=64 n_head=2
    vocab_size=512 block_size=16 rope_fraction=1 lr=1 min_lr=0 warmup=3 steps=50 batch_size=8 beta1=0.8
    beta2=0.9 eps=1e-7 grad_clip=0 seed=2 dtype=bfloat16 logits_dtype=bfloat16 init_from=x log_every=2
    eval_every=7 eval_tokens=64 test_tokens=64""".split()
MAY_CHANGE = 'device=cpu micro_batch_size=1 compile threads=2 data=moved[1] out=run ckpt_every=7 keep_every=7'
ARCHITECTURE = ['n_layer=2', 'n_embd=64', 'n_head=2', 'vocab_size=512', 'weight_tying', 'rope_fraction=1',
                'no-final_gain']


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
        named = 'before/ckpt.pt has ', f' {flag.split("=")[0].removeprefix("no-")}='
        refused(lambda: train.main([*flags, *may_not, f'--{flag}']), *named)  # noqa: B023
    may = [*MAY_CHANGE.split(), *({*OTHER} - {*ARCHITECTURE, 'init_from=x'})]
    for flag in may:
        train.main([*flags, *(from_model if flag in OTHER else []), f'--{flag}'])
    assert len(begun) == 1 + len(may)


class Prodigy(torch.optim.AdamW):
    """As Prodigy, it keeps a factor of its learning rate in its groups."""

    def step(self):
        for group in self.param_groups:
            group['d'] = group.get('d', 1.0) * 1.1
            group['lr'] *= group['d']
        super().step()


class TwoOptimizers:
    """Muon for the matrices of the blocks, AdamW for all else; `rates` are those of both in each step."""

    def __init__(self, model, args, rejoin=True):
        blocks = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is q for q in blocks)]
        self.both = torch.optim.Muon(blocks, lr=args.lr), torch.optim.AdamW(others, lr=args.lr)
        self.rejoin, self.rates = rejoin, []
        self.join()

    def join(self):
        self.param_groups = [group for optimizer in self.both for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.both:
            optimizer.step()
        self.rates.append([group['lr'] for optimizer in self.both for group in optimizer.param_groups])

    def state_dict(self):
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.both)}

    def load_state_dict(self, saved):
        for i, optimizer in enumerate(self.both):
            optimizer.load_state_dict(saved[str(i)])
        if self.rejoin:
            self.join()


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


def test_scheduler_of_pytorch(trained, monkeypatch):
    """What it does to the rates after a step has no effect, and the log does not say that it had one."""
    made = with_optimizer(monkeypatch, lambda model, args: torch.optim.AdamW(model.parameters(), lr=args.lr))

    def max_of_ranks(value, max_of_ranks=train.max_of_ranks):  # which `run` calls after train_step
        made[-1].param_groups[0]['lr'] = 7.0
        return max_of_ranks(value)
    monkeypatch.setattr(train, 'max_of_ranks', max_of_ranks)
    logged = [line['lr'] for line in log_of(trained('run', '--steps=9', '--lr=1e-2')) if 'lr' in line]
    assert logged == pytest.approx([rates(step) for step in range(1, 10)])


def test_two_optimizers(trained, monkeypatch):
    """Each one follows the schedule, before and after it resumes, and takes over another run's moments."""
    made = with_optimizer(monkeypatch, TwoOptimizers)
    whole, resumed = whole_and_resumed(trained, monkeypatch)
    first, second = (load(out, 'model_9.pt') for out in (whole, resumed))
    assert_same(second['model'], first['model'])
    assert_same(second['optimizer'], first['optimizer'])
    for optimizer, steps in zip(made, (range(1, 10), range(1, 8), range(7, 10)), strict=True):
        assert optimizer.rates == [pytest.approx(2 * [rates(step)]) for step in steps]

    trained('longer', '--steps=12', '--lr=1', f'--init_from={whole}/model_9.pt')
    adamw = made[-1].both[1]
    assert {int(moments['step']) for moments in adamw.state.values()} == {12}
    rate = 1e-5 + 0.5 * (1 + math.cos(math.pi * 9 / 12)) * (1 - 1e-5)  # of the longer schedule
    assert made[-1].rates[0] == pytest.approx([rate, rate])


def test_two_optimizers_whose_groups_are_lost(trained, monkeypatch):
    """load_state_dict has made new groups: the schedule would set the rate of groups that nobody has."""
    with_optimizer(monkeypatch, functools.partial(TwoOptimizers, rejoin=False))
    with pytest.raises(AssertionError, match='param_groups'):
        whole_and_resumed(trained, monkeypatch)


class InheritingWrapper(torch.optim.Optimizer):
    """Two optimizers in one whose state_dict, inherited, has the moments of neither."""

    def __init__(self, model, args):
        others = [p for p in model.parameters() if p is not model.E]
        self.both = torch.optim.AdamW([model.E], lr=args.lr), torch.optim.AdamW(others, lr=args.lr)
        super().__init__([group for optimizer in self.both for group in optimizer.param_groups], {})

    def step(self):
        for optimizer in self.both:
            optimizer.step()


def test_wrapper_that_would_not_resume(trained, monkeypatch):
    """It is refused in its first step, and not after a kill: it would lose its moments and its schedule."""
    with_optimizer(monkeypatch, InheritingWrapper)
    with pytest.raises(AssertionError, match='param_groups'):
        trained('run', '--steps=2')


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


def test_state_added_too_late(trained, monkeypatch, tmp_path, capsys):
    """An EMA that is saved, but not loaded, would begin anew: refused. --init_from says that it leaves it."""
    def save_checkpoint(state, *more, save_checkpoint=train.save_checkpoint):
        state['ema'] = torch.nn.Linear(1, 1)
        save_checkpoint(state, *more)
    monkeypatch.setattr(train, 'save_checkpoint', save_checkpoint)
    refused(lambda: whole_and_resumed(trained, monkeypatch), 'resumed/ckpt.pt', 'ema')
    trained('other', '--steps=12', f'--init_from={tmp_path}/whole/model_9.pt')
    assert 'model_9.pt also has ema, ' in capsys.readouterr().out


def test_draws_in_the_final_test(trained, monkeypatch):
    """A run that was killed between its last checkpoint and its test draws there what a whole run draws."""
    killed = [False, True, False]  # in the tests of these runs

    def evaluate(model, windows, n_tokens, args, evaluate=train.evaluate):
        if n_tokens == args.test_tokens and killed.pop(0):
            raise InterruptedError
        return evaluate(model, windows, n_tokens, args) + torch.rand(()).item()
    monkeypatch.setattr(train, 'evaluate', evaluate)
    flags = '--steps=2', '--keep_every=2'
    whole = trained('whole', *flags)
    with pytest.raises(InterruptedError) as caught:
        trained('resumed', *flags)
    traceback.clear_frames(caught.tb)
    assert_same(state_of(trained('resumed', *flags)), state_of(whole))


def test_another_micro_batch_size(trained, monkeypatch, capsys):
    """A resume says so: dropout would draw other numbers, and experts see other sequences together."""
    flags = '--steps=2', '--micro_batch_size=4'
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', None)
        with pytest.raises(TypeError) as caught:
            trained('run', *flags)
        traceback.clear_frames(caught.tb)
    capsys.readouterr()
    trained('run', *flags[:1], '--micro_batch_size=2')
    assert 'ckpt.pt has micro_batch_size=4, this run 2' in capsys.readouterr().out


class Tracker:
    """As W&B, it joins the records of a step, and of a run that it knows it takes later steps alone."""

    def __init__(self):
        self.runs = {}
        self.summary = {}

    def init(self, id, **named):
        self.rows = self.runs.setdefault(id, {})
        self.start = max(self.rows, default=-1) + 1

    def log(self, record, step):
        if step >= self.start:
            self.rows.setdefault(step, {}).update(without_times(record))

    def finish(self):
        pass


@pytest.mark.parametrize('last_sent', [4, 7])
def test_tracker(last_sent, trained, monkeypatch, tmp_path):
    """It may lack lines of before the checkpoint, or have some of after it: it ends with the whole log."""
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, 'wandb', tracker)

    def resume_tracked(log_so_far, args, start_tracker=train.start_tracker):
        if log_so_far:  # the run was interrupted in step 8
            shutil.copytree(tmp_path / 'resumed', tmp_path / 'copy')
            for rows in tracker.runs.values():
                for step in range(last_sent + 1, 10):
                    rows.pop(step, None)
        start_tracker(log_so_far, args)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'start_tracker', resume_tracked)
        _, resumed = whole_and_resumed(trained, patch, '--wandb=project', '--eval_every=5')
    copied = trained('copy', '--steps=9', '--ckpt_every=6', '--keep_every=9', '--lr=1e-2', '--eval_every=5',
                     '--wandb=project')
    assert len(tracker.runs) == 3  # a copied folder is another run
    for out, rows in zip((resumed, copied), [*tracker.runs.values()][1:], strict=True):
        joined = {}
        for record in log_of(out):
            joined.setdefault(record['step'], {}).update(record)
        assert rows == {step: {name: x for name, x in record.items() if x is not None}
                        for step, record in joined.items()}
    assert tracker.summary['test_loss'] == log_of(copied)[-1]['test_loss']


def test_wandb(corpus, tmp_path):
    """The real one, offline: both parts of a killed run have its id, and the second one has every step."""
    pytest.importorskip('wandb')
    env = {'WANDB_MODE': 'offline', 'WANDB_DIR': str(tmp_path), 'WANDB_CONSOLE': 'off'}
    flags = [*SMALL, '--steps=9', '--ckpt_every=6', '--wandb=project', f'--data={corpus}',
             f'--out={tmp_path}/run']
    parts = []
    for prepare, status in (((at_step, 8, kill), -signal.SIGKILL), ((), 0)):
        finish(process(train.main, flags, env=env, prepare=prepare), status)
        parts += {*tmp_path.glob('wandb/offline-run-*/*.wandb')} - {*parts}
    first, second = parts
    assert first.name == second.name
    found = re.findall(rb'_step\x82\x01(.)(.+)', second.read_bytes())  # its length and what begins with it
    assert {int(text[:ord(length)]) for length, text in found} >= {*range(10)}
