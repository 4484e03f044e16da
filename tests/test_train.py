"""One training run: what it leaves, logs and reports, what it starts from, what a fork may add."""
import json
import math
import os
import re
import shutil
import signal
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import model
import train
from conftest import refused
from model import GPT, gpt_config
from oec import common, data, machine
from processes import finish, folder_hash, process
from runs import SMALL, assert_same, load, log_of, result_of, signal_at_step

LONG = (*SMALL, '--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=20', '--ckpt_every=7', '--keep_every=30')
COLUMNS = '''method size n_params weight_tying lam cap lr seed steps dtype logits_dtype init_loss test_loss
    diverged diverged_step mu_norm lr_sum train_seconds tokens_per_second device mu_shift rounded center_every
    init_from'''


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, with bf16 logits; returns its folder."""
    def train_one(name, *flags, status=0):
        always = ('--logits_dtype=bfloat16', '--log_every=1', f'--data={corpus}', f'--out={tmp_path}/{name}')
        assert train.main([*SMALL, *always, *flags]) == status
        return str(tmp_path / name)
    return train_one


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """An uninterrupted run of LONG: its folder."""
    out = str(tmp_path_factory.mktemp('runs') / 'whole')
    assert train.main([*LONG, f'--data={corpus}', f'--out={out}']) == 0
    return out


@pytest.fixture(scope='module')
def stopped(corpus, tmp_path_factory):
    """LONG, stopped at step 25: its folder, with a ckpt.pt."""
    out = str(tmp_path_factory.mktemp('runs') / 'stopped')
    stop = (signal_at_step, signal.SIGTERM, 25)
    finish(process(train.main, [*LONG, f'--data={corpus}', f'--out={out}'], prepare=stop), 143)
    return out


def test_a_run_leaves_what_the_design_says(whole):
    assert set(os.listdir(whole)) == {'.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt',
                                      'model_60.pt', 'result.json'}
    log, result, saved = log_of(whole), result_of(whole), load(whole)
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 20, 40, 60]
    assert set(result) >= set(COLUMNS.split()) and result['steps'] == 60 and result['lam'] == 1e-4
    assert result['diverged'] is None and result['diverged_step'] is None
    assert result['init_loss'] == log[0]['test_loss'] == pytest.approx(math.log(320), abs=0.3)
    assert result['test_loss'] == log[-1]['test_loss'] < result['init_loss'] - 1
    args = SimpleNamespace(lr=3e-2, min_lr=1e-5, steps=60, warmup=3)
    assert result['lr_sum'] == pytest.approx(sum(train.learning_rate(i, args) for i in range(60)))
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 60
    assert saved['config'] == common.read_json(os.path.join(whole, 'config.json'))
    mu = saved['model']['lm_head.weight'].mean(dim=0)
    assert result['mu_norm'] == pytest.approx(mu.norm().item(), rel=1e-6) == log[-2]['mu_norm']


def test_test_loss_is_over_exactly_the_tokens_asked_for(whole, corpus, trained):
    """Or over as many as there are, if that is fewer."""
    saved = load(whole)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    tokens = data.read_shard(f'{corpus}/stdlib_val_000000.bin')[:257].astype(np.int64)
    windows = torch.from_numpy(tokens).unfold(0, 33, 32)
    assert windows.shape == (8, 33)  # 256 test tokens
    with torch.no_grad():
        product = gpt.hidden(windows[:, :-1]).bfloat16().float() @ gpt.E.bfloat16().float().T
    logits = product.bfloat16().float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
    assert result_of(whole)['test_loss'] == pytest.approx(loss.item(), rel=1e-5)
    config = load(trained('all', '--steps=1', '--test_tokens=1e9'))['config']
    assert config['test_tokens'] == 19_999 // 32 * 32 and config['eval_tokens'] == 128


def test_compile_gives_the_same_losses(trained):
    flags = ('--method=soft_capping', '--steps=3', '--lr=1e-3')
    for a, b in zip(log_of(trained('a', *flags)), log_of(trained('b', *flags, '--compile')), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-3, abs=1e-3) for k, v in b.items()}


@pytest.mark.parametrize('lr, method, dtype', [
    ('1e30', 'baseline', 'float32'), ('1e32', 'mu_centering', 'float32'),
    ('1e30', 'weight_decay', 'bfloat16'), ('1e32', 'coupled_adam', 'float32'),
    ('1e10', 'soft_capping', 'float32'), ('1e32', 'z_loss', 'float64')])
def test_a_run_that_is_no_longer_finite_ends_with_finite_weights(trained, lr, method, dtype):
    out = trained('run', f'--lr={lr}', f'--method={method}', f'--dtype={dtype}', f'--logits_dtype={dtype}',
                  '--lam=1', '--warmup=0', '--steps=30', '--log_every=10', '--keep_every=10')
    result, saved = result_of(out), load(out)
    assert all(bool(torch.isfinite(w).all()) for w in saved['model'].values())
    assert result['diverged'] == 1 and math.isnan(result['test_loss'])
    assert 0 < result['diverged_step'] == saved['step'] + 1 <= 30
    assert not os.path.exists(os.path.join(out, 'ckpt.pt'))
    if method == 'baseline':  # one update was made, then none; the host sees that at step 10
        assert saved['step'] == 1 and result['lr_sum'] == float(lr) and log_of(out)[-2]['step'] == 10
        assert not os.path.exists(os.path.join(out, 'model_10.pt'))


def test_the_time_left_is_of_the_steps_left_and_a_stop_keeps_the_seconds(trained, monkeypatch, capsys):
    """By a clock on which a step takes 100 s and an evaluation 10,000 s. It stops between log lines."""
    now, flags = [0.0], ('--steps=60', '--log_every=20', '--eval_every=10')

    def taking(seconds, real):
        def call(*args):
            now[0] += seconds
            return real(*args)
        return call
    monkeypatch.setattr(machine, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, 'train_step', taking(100, train.train_step))
    monkeypatch.setattr(train, 'evaluate', taking(10_000, train.evaluate))
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', train.train_step)  # restored at the end
        signal_at_step(signal.SIGTERM, 25)
        out = trained('run', *flags, status=143)
    assert load(out, 'ckpt.pt')['so_far']['step_seconds'] == 2500
    assert trained('run', *flags) == out
    left = re.findall(r'([0-9]+:[0-9:]+) left', capsys.readouterr().out)
    assert left == ['1:38:20', '1:06:40', '0:33:20', '0:00:00']
    with open(f'{out}/log.jsonl') as file:
        rates = [entry['tokens_per_second'] for entry in map(json.loads, file) if 'loss' in entry]
    result = result_of(out)
    assert rates == [4 * 32 / 100] * 4 and result['tokens_per_second'] == 4 * 32 / 100
    assert result['train_seconds'] == 60 * 100 + 7 * 10_000


def test_steps_that_a_device_still_works_on_are_no_part_of_an_evaluation(monkeypatch):
    """The host of a GPU is ahead of it: here by three steps of 100 s, as an evaluation of 7 s begins."""
    now, ahead = [0.0], [300]

    def synchronize():
        now[0] += ahead.pop()
        ahead.append(0)
    monkeypatch.setattr(machine, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, 'synchronize', synchronize)
    so_far = {'elapsed': 50, 'step_seconds': 20}
    clock = machine.Clock(so_far, 3, torch.device('cuda'))
    with clock.paused():
        now[0] += 7
    assert clock.seconds_per_step(6) == 100 and so_far == {'elapsed': 357, 'step_seconds': 320}


def test_centering_beside_any_method_has_its_name_and_its_steps(trained):
    for flags, every, centered in (
            (['--method=z_loss', '--center_every=1'], 1, [True] * 4),
            (['--method=baseline', '--center_every=2'], 2, [False, True] * 2),
            (['--method=mu_centering', '--center_every=10'], 10, [False] * 4),
            (['--method=mu_centering'], None, [True] * 4)):
        out = trained(f'{flags[0]}-{every}', *flags, '--steps=4')
        assert [e['mu_norm'] < 1e-6 for e in log_of(out)[1:-1]] == centered
        assert result_of(out)['center_every'] == every
        name = train.run_name(train.parser().parse_args(flags))
        assert ('-center' in name) == (every is not None) == (f'-center{every}-' in name)


def test_init_from_a_checkpoint_or_a_kept_model_ends_as_if_never_stopped(
        corpus, whole, stopped, tmp_path, capsys):
    for step, source in ((25, stopped), (30, f'{whole}/model_30.pt')):
        out = str(tmp_path / f'from_{step}')
        assert train.main([*LONG, f'--data={corpus}', f'--init_from={source}', f'--out={out}']) == 0
        assert "Adam's moments" not in capsys.readouterr().out
        assert log_of(out)[0]['step'] == step
        assert log_of(out)[1:] == [e for e in log_of(whole) if e['step'] > step]
        assert_same(load(out)['model'], load(whole)['model'])
        assert result_of(out)['init_loss'] == result_of(whole)['init_loss']
        assert result_of(out)['init_from'] == source


def test_init_from_with_another_method_needs_its_source_only_to_start(corpus, stopped, tmp_path):
    source, whole, killed = tmp_path / 'ckpt.pt', tmp_path / 'whole', tmp_path / 'killed'
    shutil.copy(os.path.join(stopped, 'ckpt.pt'), source)
    flags = [*LONG, '--method=mu_centering', '--ckpt_every=0', f'--data={corpus}', f'--init_from={source}']
    kill = (signal_at_step, signal.SIGKILL, 4)
    finish(process(train.main, [*flags, f'--out={killed}'], prepare=kill), -signal.SIGKILL)
    assert train.main([*flags, f'--out={whole}']) == 0
    os.unlink(source)
    assert train.main([*flags, f'--out={killed}']) == 0
    assert log_of(killed) == log_of(whole) and log_of(whole)[1]['mu_norm'] < 1e-6


def test_init_from_a_final_model_says_that_adam_starts_anew(corpus, whole, tmp_path, capsys):
    longer = str(tmp_path / 'longer')
    flags = [*LONG, f'--data={corpus}', f'--init_from={whole}', '--steps=80', f'--out={longer}']
    assert train.main(flags) == 0 and result_of(whole)['init_from'] is None
    assert re.search("^.*model.pt.*Adam's moments|^.*whole.*Adam's moments", capsys.readouterr().out, re.M)
    assert [e['step'] for e in log_of(longer)] == [60, 65, 70, 75, 80, 80]


def test_init_from_what_cannot_work_writes_nothing(corpus, whole, stopped, tmp_path):
    (tmp_path / 'x.pt').write_bytes(b'not a checkpoint')
    flags = [*LONG, f'--data={corpus}', f'--out={tmp_path}/bad']
    for source, more, named in ((f'{tmp_path}/x.pt', '--lr=1', 'x.pt'), (tmp_path, '--lr=1', '.pt'),
                                (whole, '--lr=1', '--steps=60'), ('', '--lr=1', 'checkpoint'),
                                (f'{whole}/model_30.pt', '--weight_tying', 'weight_tying'),
                                (f'{whole}/model_30.pt', '--rope_fraction=1', 'rope_fraction'),
                                (f'{whole}/model_30.pt', '--n_embd=64', 'model_30.pt')):
        refused(lambda: train.main([*flags, f'--init_from={source}', more]), named)  # noqa: B023
    assert os.listdir(tmp_path) == ['x.pt']
    run = shutil.copytree(stopped, tmp_path / 'run')  # a model is no checkpoint to resume from
    shutil.copy(f'{whole}/model.pt', run / 'ckpt.pt')
    before = folder_hash(run)
    refused(lambda: train.main([*LONG, f'--data={corpus}', f'--out={run}']), 'ckpt.pt')
    assert folder_hash(run) == before


def test_a_new_flag_leaves_the_runs_of_before_as_they_were(corpus, whole, stopped, tmp_path, monkeypatch):
    """What config.json lacks counts as its default, and a field of the model's config too."""
    @dataclass
    class LargerConfig(model.GPTConfig):
        sharpness: float = 2.0
    parser = train.parser

    def larger_parser():
        p = parser()
        p.add_argument('--sharpness', type=float, default=2.0)
        return p
    monkeypatch.setattr(model, 'GPTConfig', LargerConfig)
    monkeypatch.setattr(train, 'parser', larger_parser)
    lacking = load(whole)['config']
    assert gpt_config(lacking).sharpness == 2.0 and gpt_config(lacking).head_mode == 'mu_loss'
    assert gpt_config({**lacking, 'gone': 1}) == gpt_config(lacking)  # a field that is no more
    run = shutil.copytree(stopped, tmp_path / 'run')
    refused(lambda: train.main([*LONG, f'--data={corpus}', f'--out={run}', '--sharpness=3']), 'sharpness=')
    assert train.main([*LONG, f'--data={corpus}', f'--out={run}']) == 0
    assert_same(load(run)['model'], load(whole)['model'])
