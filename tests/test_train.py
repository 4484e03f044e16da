"""One training run: what it logs and reports, how it diverges, and what it starts from."""
import dataclasses
import os
import re
import runpy
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

import model
import train
from conftest import finish, process, refused
from small_runs import SMALL, assert_same, at_step, kill, load, log_of, result_of, state_of


@pytest.mark.parametrize('flags, last_line, kept', [
    ('--method=mu_centering --ckpt_every=6', 8, 6), ('--method=mu_loss --lam=1e38', 1, 0),
    ('--method=norm_softmax --ckpt_every=2 --log_every=10', 1, 6)])
def test_diverged_run(flags, last_line, kept, trained, monkeypatch, capsys):
    """Shows in a logged loss, a gradient whose norm overflows, or the weights that step 8 would save."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    out = trained('run', '--steps=30', *flags.split())
    saved, result = load(out), result_of(out)
    assert saved['step'] == kept and all(w.isfinite().all() for w in saved['model'].values())
    assert result['test_loss'] is None and result['model_step'] == kept
    *_, last = (line for line in log_of(out) if 'logit_mean' in line)
    ended = capsys.readouterr().out.splitlines()[-1]
    assert ended == f'diverged: test loss nan, mean logit {last["logit_mean"]:.1f}'
    assert log_of(out)[-1]['step'] == last_line
    if last_line == 8:  # else no step is timed
        assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(6 * 4 * 32)


def test_log_lines(trained):
    """The first step, the last one and, unless --log_every is 0, its multiples."""
    for log_every, logged in ((0, [1, 5]), (2, [1, 2, 4, 5])):
        out = trained(f'run{log_every}', '--steps=5', f'--log_every={log_every}')
        assert [line['step'] for line in log_of(out) if 'loss' in line] == logged


def test_last_line(trained, capsys):
    out = trained('run', '--steps=2')
    test_loss, mean = result_of(out)['test_loss'], log_of(out)[-2]['logit_mean']
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f'done: test loss {test_loss:.4f}, mean logit {mean:.1f}'


def test_mfu(trained, monkeypatch):
    """On a card whose peak is known: 6 N + 12 layers width T FLOP a token, and no MFU elsewhere."""
    assert not any('mfu' in line for line in log_of(trained('unknown', '--steps=8')))
    monkeypatch.setitem(train.PEAK_FLOPS, 'cpu', 1e9)
    out = trained('known', '--steps=8')
    *_, last, _ = log_of(out, times=True)
    flop = 6 * result_of(out)['n_params'] + 12 * 1 * 32 * 32
    assert last['mfu'] == pytest.approx(last['tokens_per_second'] * flop / 1e9)


def test_statistic_of_ones_own(trained, monkeypatch):
    """One number for the whole micro-batch is logged as one for each position is: their mean."""
    def head_loss(logits, *given, head_loss=model.head_loss):
        objective, stats = head_loss(logits, *given)
        return objective, {**stats, 'first': logits.detach()[0, 0], 'all_first': logits.detach()[:, 0]}
    monkeypatch.setattr(model, 'head_loss', head_loss)
    one, *_ = (line for line in log_of(trained('run', '--steps=2', '--micro_batch_size=2')) if 'loss' in line)
    assert one['first'] and one['first'] != one['all_first']


def test_fields_and_flags(monkeypatch):
    """A field of GPTConfig that no flag sets would keep its default in silence."""
    forked = dataclasses.make_dataclass('GPTConfig', [('dropout', float, 0.1)], bases=(model.GPTConfig,))
    monkeypatch.setattr(model, 'GPTConfig', forked)
    with pytest.raises(AssertionError, match='dropout'):
        runpy.run_path(train.__file__)


def test_modes(trained, monkeypatch):
    """What a fork adds, such as dropout, is on in training and off in evaluation."""
    modes, forward = [], train.GPT.forward
    monkeypatch.setattr(train.GPT, 'forward', lambda gpt, *given, **named: (
        modes.append(gpt.training), forward(gpt, *given, **named))[1])
    trained('run', '--steps=2', '--eval_every=1')
    assert modes == [False, True, False, True, False, False]


def test_unfinished_shards(corpus, trained, tmp_path):
    """Are refused: the run could not be resumed once there are more."""
    data = shutil.copytree(corpus, tmp_path / 'data')
    train.save({**train.read_json(f'{data}/meta.json'), 'done': False}, f'{data}/meta.json')
    refused(lambda: trained('run', '--steps=1', f'--data={data}'), f'{data} is unfinished')


def test_times(trained, monkeypatch, capsys):
    """A step takes 100 s, the first of each kind 1,000 s more, the last two 500 s, an evaluation 10,000 s."""
    clock = SimpleNamespace(now=0, to_wait=0, perf_counter=lambda: clock.now)  # to_wait: for the device

    compilation = {True: 1000, False: 1000}
    def train_step(*given, with_stats, real=train.train_step, **of_a_fork):
        clock.to_wait += (100 if given[3] < 19 else 500) + compilation.pop(with_stats, 0)
        return real(*given, with_stats=with_stats, **of_a_fork)

    def wait():  # where numbers go to the CPU
        clock.now, clock.to_wait = clock.now + clock.to_wait, 0

    def log_record(*given, real=train.log_record):
        wait()
        return real(*given)

    def evaluate(*given):
        wait()
        clock.now += 10_000
        given[0].E.data.fill_(3)  # as a fork's EMA takes its place
        return 0.0
    for where, name, replacement in ((train, 'train_step', train_step), (train, 'evaluate', evaluate),
                                     (train, 'time', clock), (train, 'log_record', log_record)):
        monkeypatch.setattr(where, name, replacement)
    out = trained('run', '--steps=20', '--log_every=2', '--eval_every=5', '--ckpt_every=0')
    lines, speed = [line for line in log_of(out, times=True) if 'loss' in line], 4 * 32 / 100
    assert [line['tokens_per_second'] for line in lines[:-1]] == 3 * [None] + 7 * [speed]
    shown = rf'^step 10/20 .* logit_max {lines[5]["logit_max"]:.6g} .* tokens_per_second {speed:g} .* left$'
    assert re.search(shown, capsys.readouterr().out, re.M)
    assert result_of(out)['train_seconds'] == pytest.approx(2000)
    assert result_of(out)['tokens_per_second'] == pytest.approx(speed)  # the median of those that count
    assert (load(out)['model']['lm_head.weight'] == 3).all()  # what was tested


def test_init_from_a_checkpoint(corpus, trained, tmp_path):
    """It goes on at the source's step with the command's settings, and resumes without the source."""
    flags = '--method=mu_loss --lr=3e-2 --steps=40 --log_every=5 --eval_every=10 --keep_every=20'.split()
    whole = trained('whole', *flags)
    saved, source = load(whole, 'model_20.pt'), f'{tmp_path}/model_20.pt'
    saved['optimizer']['param_groups'][0]['lr_scale'] = 0.1  # is not this command's
    torch.save(saved, source)
    flags += [f'--init_from={source}', '--method=mu_centering', '--beta2=0.5', '--eps=1e-5', '--ckpt_every=0']
    other = trained('other', *flags)
    start, line, *_ = log_of(other, times=True)
    assert start in log_of(whole) and (start['step'], line['step']) == (20, 25)
    assert line['mu_norm'] < 1e-6 and line['tokens_per_second'] is None  # while it compiles
    result, optimizer = result_of(other), load(other, 'model_40.pt')['optimizer']
    assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(20 * 4 * 32)
    assert all(state['step'] == 40 for state in optimizer['state'].values())
    assert [*map(optimizer['param_groups'][0].get, ('betas', 'eps', 'lr_scale'))] == [(0.9, 0.5), 1e-5, None]
    refused(lambda: trained('other', *flags, '--lr=1'), f'{other} has a run with lr=0.03')
    argv = [*SMALL, f'--data={corpus}', f'--out={tmp_path}/killed', *flags]  # it saves its start alone
    finish(process(train.main, argv, prepare=(at_step, 32, kill)), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags)), state_of(other))


@pytest.mark.parametrize('flags, named', [
    ('--steps=2', 'has reached --steps=2'), ('--steps=9 --weight_tying', 'has weight_tying=False'),
    ('--steps=9 --rope_fraction=1', 'has rope_fraction=0.5')])
def test_init_from_what_does_not_fit(flags, named, trained):
    """Where the shapes of the weights do not show it. Its moments would be of other parameters."""
    source = trained('source', '--steps=2', '--keep_every=2') + '/model_2.pt'
    refused(lambda: trained('run', *flags.split(), f'--init_from={source}'), source, named)


def test_init_from_a_model(trained, capsys):
    """It begins at step 0 with the weights alone, with another head too."""
    head = ('--method=norm_softmax', '--cap=3')
    source = [trained('source', '--steps=2', *head) for _ in range(2)][0]
    assert f'{source} is done' in capsys.readouterr().out
    from_source = ('--steps=2', '--lr=1e-30', '--min_lr=0', f'--init_from={source}/model.pt')
    trained('run', *from_source)
    again = trained('again', *from_source, *head, '--seed=2')
    assert [entry['step'] for entry in log_of(again)] == [0, 1, 2, 2]
    result = result_of(again)
    assert (result['init_loss'], result['test_loss']) == (None, result_of(source)['test_loss'])


def test_environment(monkeypatch):
    """A RANK without a WORLD_SIZE is something that a launcher has left; TF32 is nobody's fp32."""
    monkeypatch.setenv('RANK', '1')
    torch.set_float32_matmul_precision('high')
    assert runpy.run_path(train.__file__)['master_process']
    assert torch.get_float32_matmul_precision() == 'highest'
