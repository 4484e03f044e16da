"""One training run: what it leaves, logs and reports; signals, --init_from, --compile, and forks."""
import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import analyze
import checkpoint
import common
import data
import model
import train
from conftest import ENV, ROOT, refused
from model import GPT, METHODS, gpt_config
from processes import finish, one_line, process, wait_until
from runs import (
    SMALL,
    assert_same,
    fitting,
    load,
    log_of,
    ranks,
    result_of,
    signal_at_step,
    sigterm_to_rank_1,
)


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, with bf16 logits; returns its folder."""
    def train_one(name, *flags):
        out, always = str(tmp_path / name), ('--logits_dtype=bfloat16', '--log_every=1')
        assert train.main([*SMALL, *always, f'--data={corpus}', f'--out={out}', *flags]) == 0
        return out
    return train_one


LONG = (*SMALL, '--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=20', '--ckpt_every=7', '--keep_every=30')


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """An uninterrupted run of LONG: its folder."""
    out = str(tmp_path_factory.mktemp('runs') / 'whole')
    assert train.main([*LONG, f'--data={corpus}', f'--out={out}']) == 0
    return out


# --------------------------------------------------------------------------------------------------
# what a run leaves


def test_a_run_leaves_what_the_design_says(whole):
    files = ['.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt', 'model_60.pt', 'result.json']
    assert sorted(os.listdir(whole)) == files
    log, result = log_of(whole), result_of(whole)
    config = common.read_json(os.path.join(whole, 'config.json'))
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 20, 40, 60]
    with open(os.path.join(whole, 'log.jsonl')) as file:
        first = json.loads(file.readlines()[1])
    assert ' '.join(first) == ('step loss reg lr grad_norm mu_norm logit_mean logit_mean_spread logit_std '
                               'logit_absmax logit_max gradient_sum tokens_per_second mfu elapsed')
    assert set(result) <= set(analyze.COLUMNS) and result['steps'] == 60 and result['lam'] == 1e-4
    assert result['diverged'] is None and result['diverged_step'] is None
    assert result['init_loss'] == pytest.approx(math.log(320), abs=0.3)
    assert result['test_loss'] < result['init_loss'] - 1
    args = train.parser().parse_args(['--lr=3e-2', '--steps=60', '--warmup=3'])
    assert result['lr_sum'] == pytest.approx(sum(train.learning_rate(i, args) for i in range(60)))
    saved = load(whole)
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 60 and saved['config'] == config
    mu = saved['model']['lm_head.weight'].mean(dim=0)
    assert result['mu_norm'] == pytest.approx(mu.norm().item(), rel=1e-6)


def test_test_loss_is_over_exactly_the_tokens_asked_for(whole, corpus):
    saved = load(whole)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    tokens = np.concatenate(data.load_shards(corpus, 'val'))[:257].astype(np.int64)
    windows = torch.from_numpy(tokens).unfold(0, 33, 32)
    assert windows.shape == (8, 33)  # 256 test tokens
    with torch.no_grad():
        product = gpt.hidden(windows[:, :-1]).bfloat16().float() @ gpt.E.bfloat16().float().T
    logits = product.bfloat16().float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
    assert result_of(whole)['test_loss'] == pytest.approx(loss.item(), rel=1e-5)


def test_reported_loss_is_the_bare_cross_entropy(trained):
    """With a huge lambda the regulariser is large; the loss beside it is that of the weights without it."""
    first = {method: log_of(trained(method, f'--method={method}', '--lam=50', '--steps=1'))[1]
             for method in ('baseline', 'mu_loss', 'z_loss')}
    assert first['mu_loss']['loss'] == first['z_loss']['loss'] == first['baseline']['loss']
    assert first['baseline']['reg'] == 0 and first['mu_loss']['reg'] > 0.01 and first['z_loss']['reg'] > 1000


def test_logits_dtype_reaches_the_model(trained):
    losses = {dtype: log_of(trained(dtype, '--steps=1', f'--logits_dtype={dtype}'))[1]['loss']
              for dtype in ('bfloat16', 'float32')}
    assert losses['bfloat16'] != losses['float32']


def test_the_published_shape_runs_on_a_cpu(trained):
    out = trained('run', '--size=16M', '--n_layer=6', '--n_embd=224', '--steps=2', '--batch_size=1')
    assert result_of(out)['n_params'] == 15572480
    assert result_of(out)['init_loss'] == pytest.approx(10.83, abs=0.05)


def test_compile_gives_the_same_losses(trained):
    flags = ('--method=soft_capping', '--steps=3', '--lr=1e-3')
    for a, b in zip(log_of(trained('a', *flags)), log_of(trained('b', *flags, '--compile')), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-3, abs=1e-3) for k, v in b.items()}


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    """Lines after it go, half a line goes, and so does the final test loss, which is measured again."""
    lines = ['{"step": 0, "test_loss": 6}', '{"step": 5, "loss": 5}', '{"step": 5, "test_loss": 5}',
             '{"step": 10, "loss": 4}', '{"step": 10, "test_loss": 4}']
    for step, steps, kept in ((None, 10, 0), (5, 10, 3), (7, 10, 3), (10, 20, 5), (10, 10, 4)):
        folder = tmp_path / f'{step}-{steps}'
        folder.mkdir()
        (folder / 'log.jsonl').write_text('\n'.join(lines) + '\n{"step": 1')
        checkpoint.Run(str(folder), {'steps': steps, 'wandb': None}, master=True).begin(step)
        assert (folder / 'log.jsonl').read_text().splitlines() == lines[:kept]


NOT_FINITE = (('1e30', 'baseline', 'float32', 'plain'), ('9e32', 'mu_centering', 'float32', 'chunked'),
              ('1e30', 'weight_decay', 'bfloat16', 'chunked'), ('1e10', 'soft_capping', 'float32', 'chunked'),
              ('9e32', 'z_loss', 'float64', 'chunked'))


def test_a_run_that_is_no_longer_finite_ends_with_its_last_finite_weights(corpus, tmp_path):
    """As far as --lr goes, and without a word on stderr."""
    for lr, method, dtype, head in NOT_FINITE:
        out, errors = str(tmp_path / method), tmp_path / 'stderr'
        flags = [*SMALL, f'--lr={lr}', f'--method={method}', f'--dtype={dtype}', f'--head={head}', '--lam=1',
                 '--warmup=0', '--steps=30', '--log_every=10', f'--data={corpus}', f'--out={out}']
        finish(process(train.main, flags, stderr=errors), 0)
        result, saved = result_of(out), load(out)
        assert errors.read_text() == '' and not os.path.exists(os.path.join(out, 'ckpt.pt'))
        assert all(bool(torch.isfinite(w).all()) for w in saved['model'].values()), method
        assert result['diverged'] == 1 and 0 < result['diverged_step'] <= 30
        assert math.isnan(result['test_loss'])
        if method == 'baseline':  # one update was made, then none; the host sees that at step 10
            assert result['diverged_step'] == 2 and saved['step'] == 1 and result['lr_sum'] == float(lr)
            assert log_of(out)[-2]['step'] == 10


# --------------------------------------------------------------------------------------------------
# signals


def test_sigusr1_saves_and_continues_and_sigterm_stops(corpus, tmp_path):
    out = tmp_path / 'run'
    flags = [*SMALL, '--steps=100000', f'--data={corpus}', f'--out={out}', '--ckpt_every=0']
    running = process(train.main, flags, prepare=functools.partial(signal_at_step, signal.SIGUSR1, 20))
    wait_until((out / 'ckpt.pt').exists)
    assert load(out, 'ckpt.pt')['step'] == 20
    finish(process(train.main, flags, stderr=tmp_path / 'stderr'), 3)
    assert 'another process' in one_line(tmp_path / 'stderr') and running.is_alive()
    running.terminate()
    finish(running, 143)
    assert load(out, 'ckpt.pt')['step'] > 20


def test_a_signal_to_one_rank_between_log_lines_stops_all_together(corpus, tmp_path):
    """They agree at the next log step; torchrun resumes there."""
    out = tmp_path / 'run'
    flags = [*SMALL, '--steps=60', '--log_every=20', '--ckpt_every=0', f'--data={corpus}', f'--out={out}']
    stop = functools.partial(sigterm_to_rank_1, 25)
    for rank in ranks(2, flags, tmp_path / 'stderr', prepare=stop):
        finish(rank, 143)
    assert load(out, 'ckpt.pt')['step'] == 40
    torchrun = ['torchrun', '--standalone', '--nproc_per_node=2', 'train.py', *flags]
    done = subprocess.run(torchrun, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and 'resuming at step 40' in done.stdout, done.stderr
    assert [e['step'] for e in log_of(out) if 'loss' in e] == [1, 20, 40, 60]


# --------------------------------------------------------------------------------------------------
# --init_from


@pytest.fixture(scope='module')
def stopped(corpus, tmp_path_factory):
    """LONG, stopped at step 25: its folder, with a ckpt.pt."""
    out = str(tmp_path_factory.mktemp('runs') / 'stopped')
    stop = functools.partial(signal_at_step, signal.SIGTERM, 25)
    finish(process(train.main, [*LONG, f'--data={corpus}', f'--out={out}'], prepare=stop), 143)
    return out


def test_a_deterministic_run_resumes_with_the_same_micro_batch(corpus, tmp_path):
    """What fits follows the free memory, and a sum in another order has other bits."""
    def run(name, *fits, status=0):
        flags = (*SMALL, '--steps=12', '--log_every=1', '--deterministic', f'--data={corpus}')
        prepare = functools.partial(fitting, *fits)
        finish(process(train.main, [*flags, f'--out={tmp_path / name}'], prepare=prepare), status)
        return load(tmp_path / name)['model'] if status == 0 else None
    whole = run('whole', 1)
    assert any(not torch.equal(a, b) for a, b in zip(whole.values(), run('at_once', 4).values(), strict=True))
    run('stopped', 1, functools.partial(signal_at_step, signal.SIGTERM, 5), status=143)
    assert_same(run('stopped', 4), whole)


def test_what_fits_a_gpu(monkeypatch):
    """At most 0.7 of the free memory by the estimate of the docstring, and the next divisor would not fit."""
    config, device, found = gpt_config({'method': 'baseline', 'vocab_size': 50304}), torch.device('cuda'), {}
    for gigabytes, head, compiled in itertools.product((8, 20, 80), ('chunked', 'plain'), (True, False)):
        monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda _, free=gigabytes * 1e9: (free, free))
        config.head, (of_H, of_F) = head, (31, 4.7) if compiled else (40, 8)
        per_token = 6 * (of_H * 224 + of_F * 768) + (20 * 50304 if head == 'plain' else 0)
        most = 0.7 * gigabytes * 1e9 / per_token / 2048
        micro = found[gigabytes, head, compiled] = train.fitting_micro_batch(64, config, device, compiled)
        assert 64 % micro == 0 and (micro <= most or micro == 1) and (2 * micro > most or micro == 64)
    assert [found[8, 'chunked', True], found[8, 'chunked', False], found[80, 'plain', True]] == [32, 16, 16]


def test_init_from_with_the_same_settings_ends_as_if_never_stopped(corpus, whole, stopped, tmp_path):
    out = str(tmp_path / 'run')
    assert train.main([*LONG, f'--data={corpus}', f'--init_from={stopped}', f'--out={out}']) == 0
    assert log_of(out)[0]['step'] == 25
    assert log_of(out)[1:] == [e for e in log_of(whole) if e['step'] > 25]
    assert_same(load(out)['model'], load(whole)['model'])
    assert common.read_json(os.path.join(out, 'config.json'))['init_from'] == stopped


def test_init_from_with_another_method_needs_its_source_only_to_start(corpus, stopped, tmp_path):
    source = shutil.copy(os.path.join(stopped, 'ckpt.pt'), tmp_path)
    flags = [*LONG, '--method=mu_centering', '--ckpt_every=0', f'--data={corpus}', f'--init_from={source}']
    assert train.main([*flags, f'--out={tmp_path}/whole']) == 0
    killed = process(train.main, [*flags, f'--out={tmp_path}/killed'])
    wait_until((tmp_path / 'killed' / 'ckpt.pt').exists)  # which is there from the beginning
    killed.kill()
    finish(killed, -signal.SIGKILL)
    assert load(tmp_path / 'killed', 'ckpt.pt')['step'] == 25
    os.unlink(source)
    assert train.main([*flags, f'--out={tmp_path}/killed']) == 0
    log = log_of(tmp_path / 'killed')
    assert log == log_of(tmp_path / 'whole')
    assert log[1]['step'] == 30 and log[1]['mu_norm'] < 1e-6  # centered, from its first step on


def test_init_from_a_kept_model_and_what_cannot_work(corpus, whole, tmp_path):
    """Without an optimizer state; the learning rate is that of the step."""
    flags = [*LONG, '--method=coupled_adam', f'--data={corpus}', f'--out={tmp_path}/run']
    assert train.main([*flags, f'--init_from={whole}/model_30.pt']) == 0
    log, other = ({e['step']: e for e in log_of(run) if 'loss' in e} for run in (tmp_path / 'run', whole))
    assert list(log) == [35, 40, 45, 50, 55, 60] and log[35]['lr'] == other[35]['lr']
    assert abs(log[35]['loss'] - other[30]['loss']) < 0.5
    (tmp_path / 'x.pt').write_bytes(b'not a checkpoint')
    flags[-1] = f'--out={tmp_path}/bad'
    for source, more, named in ((f'{tmp_path}/x.pt', '--lr=1', 'x.pt'), (tmp_path, '--lr=1', '.pt'),
                                (whole, '--lr=1', '--steps=60'),
                                (f'{whole}/model_30.pt', '--n_embd=64', 'model_30.pt')):
        command = [*flags, f'--init_from={source}', more]
        refused(lambda command=command: train.main(command), named)
    assert not (tmp_path / 'bad').exists()


# --------------------------------------------------------------------------------------------------
# what a fork adds


def test_a_method_whose_name_only_contains_mu_centering_does_not_center(trained, monkeypatch):
    parser = train.parser

    def larger_parser():
        p = parser()
        method = next(action for action in p._actions if action.dest == 'method')
        method.choices = [*method.choices, 'mu_centering_ema', 'mu_centering_ema+mu_centering']
        return p
    monkeypatch.setitem(METHODS, 'mu_centering_ema', None)
    monkeypatch.setattr(train, 'parser', larger_parser)
    new, baseline, both = (trained(method, '--steps=3', '--lr=0.1', f'--method={method}') for method in
                           ('mu_centering_ema', 'baseline', 'mu_centering_ema+mu_centering'))
    assert_same(load(new)['model'], load(baseline)['model'])
    assert result_of(both)['mu_norm'] < 1e-6 < result_of(new)['mu_norm']


def test_a_new_field_of_the_config_leaves_runs_and_old_models_as_they_were(trained, whole, monkeypatch):
    @dataclass
    class LargerConfig(model.GPTConfig):
        sharpness: float = 2.0
    before = trained('old', '--steps=3')
    monkeypatch.setattr(model, 'GPTConfig', LargerConfig)
    assert_same(load(trained('new', '--steps=3'))['model'], load(before)['model'])
    lacking = load(whole)['config']
    assert gpt_config(lacking).sharpness == 2.0 and gpt_config(lacking).method == 'mu_loss'
    assert gpt_config({**lacking, 'gone': 1}) == gpt_config(lacking)  # a field that is no more
    trained('on', '--steps=61', f'--init_from={whole}')
