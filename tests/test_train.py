"""One training run: what it leaves, logs and reports, and what it starts from."""
import json
import math
import os
import re
import runpy
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import finish, process, refused
from small_runs import SMALL, assert_same, at_step, kill, load, log_of, result_of, state_of

LONG = ('--method=mu_loss', '--lr=3e-2', '--steps=40', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=10', '--ckpt_every=7', '--keep_every=20')


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """The folder of a run with the flags LONG."""
    folder = str(tmp_path_factory.mktemp('runs') / 'whole')
    train.main([*SMALL, *LONG, f'--data={corpus}', f'--out={folder}'])
    return folder


def test_what_a_run_leaves(whole):
    assert {name for name in os.listdir(whole) if not name.endswith('.diff')} == {  # of code not committed
        '.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_20.pt', 'model_40.pt', 'result.json'}
    saved = load(whole)
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 40
    assert saved['config'] == train.read_json(f'{whole}/config.json')
    assert_same(saved['model'], load(whole, 'model_40.pt')['model'])
    assert len(saved['config']['commit'].split()) == 1


@pytest.mark.parametrize('method, log_every, ckpt_every, last_line', [
    ('mu_centering', 3, 6, 9), ('norm_softmax', 10, 2, 1)])
def test_diverged_run(method, log_every, ckpt_every, last_line, trained, monkeypatch, capsys):
    """The log line of step 9 shows it, after a step whose weights are NaN, or else the save of step 8."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    out = trained('run', f'--method={method}', '--steps=30', f'--log_every={log_every}',
                  f'--ckpt_every={ckpt_every}', '--keep_every=6')
    saved, result = load(out), result_of(out)
    assert saved['step'] == 6 and all(w.isfinite().all() for w in saved['model'].values())
    assert_same(saved['model'], load(out, 'model_6.pt')['model'])
    assert result['test_loss'] is None and result['model_step'] == 6
    assert capsys.readouterr().out.splitlines()[-1].startswith('diverged: ')
    assert log_of(out)[-1]['step'] == last_line
    assert not {'ckpt.pt', 'model_12.pt'} & {*os.listdir(out)}


def test_a_gradient_that_is_not_finite(trained, monkeypatch):
    norms = iter([torch.tensor(x) for x in (1.0, 1.0, torch.inf)])
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', lambda *_: next(norms))
    out = trained('run', '--steps=30', '--ckpt_every=0')
    assert log_of(out)[-1]['step'] == 3 and load(out)['step'] == 0


def test_modes(trained, monkeypatch):
    """What a fork adds, such as dropout, is on in training and off in evaluation."""
    modes, forward = [], train.GPT.forward
    monkeypatch.setattr(train.GPT, 'forward', lambda gpt, *given, **named: (
        modes.append(gpt.training), forward(gpt, *given, **named))[1])
    trained('run', '--steps=2', '--eval_every=1')
    assert modes == [False, True, False, True, False, False]


def test_result_of_a_diverged_run():
    """Its time is that of the steps that it made."""
    log = [{'step': 0, 'val_loss': 6.0}, {'step': 10, 'loss': 5.0, 'tokens_per_second': 64.0}]
    saved = {'step': 10, 'log': '\n'.join(map(json.dumps, log))}
    args = SimpleNamespace(init_from=None, batch_size=4, block_size=32, steps=1000)
    assert train.make_result(saved, 1, math.nan, args)['train_seconds'] == 10 * 4 * 32 / 64


@pytest.mark.parametrize('mean, said', [
    (-63.9, 'nothing'), (64, 'hundredths of a nat; center'), (-256, 'a tenth of a nat and more; center')])
def test_verdict(mean, said):
    assert said in train.verdict(mean)


def test_times(trained, monkeypatch, capsys):
    """A step takes 100 s, the first of each kind 1,000 s more, the last two 500 s, an evaluation 10,000 s."""
    clock = SimpleNamespace(now=0, to_wait=0, perf_counter=lambda: clock.now)  # to_wait: for the device
    compilation = {True: 1000, False: 1000}

    def train_step(*given, with_stats, real=train.train_step):
        clock.to_wait += (100 if given[3] < 19 else 500) + compilation.pop(with_stats, 0)
        return real(*given, with_stats=with_stats)

    def synchronize():
        clock.now, clock.to_wait = clock.now + clock.to_wait, 0

    def evaluate(*given):
        clock.now += 10_000
        return 0.0
    for where, name, replacement in ((train, 'train_step', train_step), (train, 'evaluate', evaluate),
                                     (train, 'time', clock), (torch.cpu, 'synchronize', synchronize)):
        monkeypatch.setattr(where, name, replacement)
    out = trained('run', '--steps=20', '--log_every=2', '--eval_every=5')
    assert re.search(r'^step 10/20 .* 16\.7 min left$', capsys.readouterr().out, re.M)  # 1,000 s
    speed = 4 * 32 / 100
    lines = [json.loads(line) for line in Path(out, 'log.jsonl').read_text().splitlines()]
    speeds = [line['tokens_per_second'] for line in lines if 'loss' in line]
    assert speeds[:-1] == 4 * [None] + 6 * [speed]
    assert result_of(out)['train_seconds'] == pytest.approx(2000)
    assert result_of(out)['tokens_per_second'] == pytest.approx(speed)  # the median of those that count


def test_init_from_a_checkpoint(whole, corpus, trained, tmp_path, monkeypatch):
    """It goes on at the source's step with the command's settings, and resumes without the source."""
    source = shutil.copy(f'{whole}/model_20.pt', tmp_path)
    flags = [*LONG, f'--init_from={source}', '--method=mu_centering', '--beta2=0.5', '--eps=1e-5',
             '--ckpt_every=0']
    other = trained('other', *flags)
    start, line, *_ = log_of(other)
    assert start in log_of(whole) and (start['step'], line['step']) == (20, 25)
    result, optimizer = result_of(other), load(other, 'model_40.pt')['optimizer']
    assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(20 * 4 * 32)
    assert line['mu_norm'] < 1e-6 and result['init_loss'] is None
    assert all(state['step'] == 40 for state in optimizer['state'].values())
    assert {(*group['betas'], group['eps']) for group in optimizer['param_groups']} == {(0.9, 0.5, 1e-5)}
    refused(lambda: trained('other', *flags, '--lr=1'), f'{other} has lr=0.03', '--init_from=')
    refused(lambda: trained('new', *flags, '--steps=20'), source, '--steps=20')  # it is of step 20

    argv = [*SMALL, f'--data={corpus}', f'--out={tmp_path}/killed', *flags]  # it saves its start alone
    finish(process(train.main, argv, prepare=(at_step, 32, kill)), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags)), state_of(other))

    def make_model(args, make=train.make_model):  # with other groups, in which moments would be another's
        gpt, _ = make(args)
        return gpt, torch.optim.AdamW([{'params': [p]} for p in gpt.parameters()])
    monkeypatch.setattr(train, 'make_model', make_model)
    with pytest.raises(ValueError, match='group'):  # PyTorch's own
        trained('grouped', *LONG, f'--init_from={whole}/model_20.pt')


@pytest.mark.parametrize('flags, before, now', [
    (('--cap=3',), 'cap=3', 'None'), (('--method=norm_softmax',), 'method=norm_softmax', 'baseline')])
def test_init_from_a_model(flags, before, now, trained, capsys):
    """It begins at step 0 with the weights alone; another head, and text that it has seen, are said."""
    source = trained('source', '--steps=2', *flags)
    from_source = ('--steps=2', '--lr=1e-30', '--min_lr=0', f'--init_from={source}/model.pt')
    trained('run', *from_source)
    printed = capsys.readouterr().out
    assert f'model.pt has {before}, this run {now}\n' in printed and 'has seen the next 8 windows' in printed
    again = trained('again', *from_source, *flags)
    assert ', this run' not in capsys.readouterr().out
    trained('another', *from_source, '--seed=2')
    assert 'has seen' not in capsys.readouterr().out
    assert [entry['step'] for entry in log_of(again)] == [0, 1, 2, 2]
    result = result_of(again)
    assert (result['init_loss'], result['test_loss']) == (None, result_of(source)['test_loss'])


def test_environment(monkeypatch):
    """A RANK without a WORLD_SIZE is something that a launcher has left; TF32 is nobody's fp32."""
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('TORCHINDUCTOR_FREEZING', '1')  # the first weights would be compiled into the model
    torch.set_float32_matmul_precision('high')
    assert runpy.run_path(train.__file__)['master_process']
    assert torch.get_float32_matmul_precision() == 'highest' and 'TORCHINDUCTOR_FREEZING' not in os.environ


@pytest.mark.parametrize('meta, rows', [(None, 50304), ({'vocab_size': 257}, 320)])
def test_meta_of_the_data(meta, rows, tmp_path):
    if meta:
        train.save(meta, f'{tmp_path}/meta.json')
    assert train.resolve_args(train.parser.parse_args([f'--data={tmp_path}'])).vocab_size == rows
