"""One training run: what it logs and reports, how it ends if it is not finite, and what it starts from."""
import functools
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import finish, process, refused
from small_runs import SMALL, assert_same, at_step, kill, load, log_of, result_of, state_of


# -------- what it logs and reports
@pytest.mark.parametrize('flags, last_line, kept', [
    ('--method=mu_centering --ckpt_every=6', 8, 6),  # a logged loss shows it
    ('--method=mu_loss --lam=1e38 --grad_clip=0', 1, 0),  # a gradient whose norm overflows
    ('--method=norm_softmax --ckpt_every=2 --log_every=10', 1, 6)])  # the weights that step 8 would save
def test_run_that_is_not_finite(flags, last_line, kept, trained, monkeypatch, capsys):
    """It ends with the model of its last finite checkpoint, and no test loss."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    out = trained('run', '--steps=30', *flags.split())
    saved, result, log = load(out), result_of(out), log_of(out)
    assert saved['step'] == result['model_step'] == kept and result['test_loss'] is None
    assert all(w.isfinite().all() for w in saved['model'].values())
    assert log[-1]['step'] == last_line
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f'not finite: no test loss, and model.pt is that of step {kept}'
    if last_line == 8:  # else no step is timed
        assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(6 * 4 * 32)


def test_not_finite_before_a_log_line(trained, monkeypatch):
    source = trained('source', '--steps=4', '--keep_every=2') + '/model_2.pt'
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30)
    out = trained('run', '--steps=30', '--log_every=10', '--ckpt_every=1', f'--init_from={source}')
    assert len(log_of(out)) == 1 and result_of(out)['test_loss'] is None


def test_times(trained, monkeypatch, capsys):
    """
    The speed is that of steps alone, 100 s each. A step gets 1,000 s more where it may compile, the last two
    400 s. The GPU takes this time later, where the host waits for its numbers. A save takes 3,000 s, an
    evaluation 10,000 s.
    """
    clock = SimpleNamespace(now=0, of_gpu=0, perf_counter=lambda: clock.now)

    def train_step(model, optimizer, batch, step, *more, real=train.train_step, **named):
        clock.of_gpu += 100
        if step in (1, 3):  # the first one with statistics, and the first one without
            clock.of_gpu += 1000
        if step > 18:
            clock.of_gpu += 400
        return real(model, optimizer, batch, step, *more, **named)

    def wait(real, seconds, *given):
        clock.now += clock.of_gpu + seconds
        clock.of_gpu = 0
        return real(*given)
    monkeypatch.setattr(train, 'time', clock)
    monkeypatch.setattr(train, 'train_step', train_step)
    for name, seconds in (('log_record', 0), ('save_checkpoint', 3000), ('evaluate', 10_000)):
        monkeypatch.setattr(train, name, functools.partial(wait, getattr(train, name), seconds))
    out = trained('run', '--steps=20', '--log_every=2', '--eval_every=5', '--ckpt_every=7')

    lines = [line for line in log_of(out, times=True) if 'loss' in line]
    speed = 4 * 32 / 100
    assert [line['step'] for line in lines] == [1, *range(2, 21, 2)]
    assert [line.get('tokens_per_second') for line in lines] == [None] * 3 + [speed] * 7 + [speed / 5]
    assert re.search('^step 10/20 .* 16.7 min left$', capsys.readouterr().out, re.M)
    assert result_of(out)['tokens_per_second'] == pytest.approx(speed)  # the median
    assert result_of(out)['train_seconds'] == pytest.approx(2000)


def test_mfu(trained, monkeypatch):
    """On a card whose peak is known: 6 N + 12 layers width T FLOP a token, and no MFU elsewhere."""
    assert not any('mfu' in line for line in log_of(trained('unknown', '--steps=8', '--dtype=bfloat16')))
    monkeypatch.setitem(train.PEAK_FLOPS, 'cpu', 1e9)
    out = trained('known', '--steps=8', '--dtype=bfloat16')
    last = log_of(out, times=True)[-2]
    flop = 6 * result_of(out)['n_params'] + 12 * 1 * 32 * 32
    assert last['mfu'] == pytest.approx(last['tokens_per_second'] * flop / 1e9)


# -------- what it starts from
def test_init_from_a_checkpoint(corpus, trained, tmp_path):
    """It goes on at the source's step with the command's settings, and resumes without the source."""
    flags = '--method=mu_loss --lr=3e-2 --steps=40 --log_every=5 --eval_every=10 --keep_every=20'.split()
    whole = trained('whole', *flags)
    saved, source = load(whole, 'model_20.pt'), f'{tmp_path}/model_20.pt'
    torch.save(saved, source)
    flags += [f'--init_from={source}', '--method=mu_centering', '--beta2=0.5', '--eps=1e-5', '--ckpt_every=0']
    other = trained('other', *flags)

    start, line, *_ = log_of(other, times=True)
    assert start in log_of(whole) and (start['step'], line['step']) == (20, 25)
    assert line['mu_norm'] < 1e-6 and 'tokens_per_second' not in line  # while it compiles
    result, optimizer = result_of(other), load(other, 'model_40.pt')['optimizer']
    assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(20 * 4 * 32)
    assert all(state['step'] == 40 for state in optimizer['state'].values())
    group = optimizer['param_groups'][0]
    assert group['betas'] == (0.9, 0.5) and group['eps'] == 1e-5

    argv = [*SMALL, f'--data={corpus}', f'--out={tmp_path}/killed', *flags]  # it saves its start alone
    finish(process(train.main, argv, prepare=(at_step, 32, kill)), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags)), state_of(other))


@pytest.mark.parametrize('flag, named', [
    ('--weight_tying', 'weight_tying=False'), ('--rope_fraction=1', 'rope_fraction=0.5')])
def test_init_from_what_does_not_fit(flag, named, trained):
    """Where the shapes of the weights do not show it."""
    source = trained('source', '--steps=2') + '/model.pt'
    refused(lambda: trained('run', '--steps=2', flag, f'--init_from={source}'), source, named)


def test_init_from_a_model(trained):
    """It begins at step 0 with the weights alone, with another head too."""
    head = ('--method=norm_softmax', '--cap=3')
    source = trained('source', '--steps=2', *head)
    from_source = ('--steps=2', '--lr=1e-30', '--min_lr=0', f'--init_from={source}/model.pt')
    trained('run', *from_source)
    again = trained('again', *from_source, *head, '--seed=2')
    assert [entry['step'] for entry in log_of(again)] == [0, 1, 2, 2]
    assert result_of(again)['init_loss'] is None
    assert result_of(again)['test_loss'] == result_of(source)['test_loss']
