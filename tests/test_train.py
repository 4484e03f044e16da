"""One training run: what it leaves, logs and reports, what it starts from, what a fork may add."""
import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from conftest import refused
from model import GPT, METHODS, GPTConfig, gpt_config
from oec import common, data
from processes import finish, folder_hash, process
from runs import SMALL, assert_same, load, log_of, result_of, signal_at_step, state_of

LONG = (*SMALL, '--method=mu_loss', '--lr=3e-2', '--steps=60', '--dtype=float32', '--logits_dtype=bfloat16',
        '--log_every=5', '--eval_every=20', '--ckpt_every=7', '--keep_every=30')
RESULT = {'n_params', 'init_loss', 'test_loss', 'mu_norm', 'train_seconds', 'tokens_per_second'}


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, in fp32; returns its folder."""
    def train_one(name, *flags):
        always = ('--dtype=float32', '--log_every=1', f'--data={corpus}', f'--out={tmp_path}/{name}')
        train.main([*SMALL, *always, *flags])
        return str(tmp_path / name)
    return train_one


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """An uninterrupted run of LONG: its folder."""
    out = str(tmp_path_factory.mktemp('runs') / 'whole')
    finish(process(train.main, [*LONG, f'--data={corpus}', f'--out={out}']), 0)
    return out


def test_a_run_leaves_what_the_design_says_and_is_then_done(whole, corpus):
    assert set(os.listdir(whole)) == {'.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt',
                                      'model_60.pt', 'result.json'}
    log, result, saved = log_of(whole), result_of(whole), load(whole)
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 20, 40, 60]
    assert set(result) == RESULT
    assert result['init_loss'] == log[0]['test_loss'] == pytest.approx(math.log(320), abs=0.3)
    assert result['test_loss'] == log[-1]['test_loss'] < result['init_loss'] - 1
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 60
    config = common.read_json(os.path.join(whole, 'config.json'))
    assert saved['config'].items() <= config.items() and config['lam'] == 1e-4
    mu = saved['model']['lm_head.weight'].mean(dim=0)
    assert result['mu_norm'] == pytest.approx(mu.norm().item(), rel=1e-6) == log[-2]['mu_norm']
    before = folder_hash(whole)
    train.main([*LONG, f'--data={corpus}', f'--out={whole}'])
    assert folder_hash(whole) == before


def test_test_losses_are_over_windows_that_lie_evenly_over_the_val_shard(corpus, trained):
    """As many tokens as asked for, before training and after it, or as many as there are."""
    tokens = torch.from_numpy(data.read_shard(f'{corpus}/stdlib_val_000000.bin').astype(np.int64))
    windows = tokens.unfold(0, 33, 32)

    def loss(gpt, n):
        chosen = windows[[i * len(windows) // n for i in range(n)]]
        with torch.no_grad():
            return pytest.approx(gpt(chosen[:, :-1], chosen[:, 1:])[0].item(), rel=1e-5)
    for n, asked in ((8, '256'), (len(windows), '1e9')):
        out = trained(asked, f'--test_tokens={asked}', '--steps=3')
        saved = load(out)
        torch.manual_seed(1)
        gpt = GPT(gpt_config(saved['config']))
        assert result_of(out)['init_loss'] == loss(gpt, 4)  # of --eval_tokens
        gpt.load_state_dict(saved['model'])
        assert result_of(out)['test_loss'] == loss(gpt, n)


def test_a_compiled_run_has_the_losses_of_an_eager_one_and_resumes_to_its_own_bits(trained):
    flags = ('--method=soft_capping', '--steps=4', '--lr=1e-3', '--keep_every=2')
    torch._dynamo.utils.counters.clear()
    eager = log_of(trained('eager', *flags))
    graphs = torch._dynamo.utils.counters['stats']
    assert not graphs
    compiled = trained('compiled', *flags, '--compile')
    assert graphs['unique_graphs'] >= 4  # body and head, each in training and in evaluation
    for a, b in zip(eager, log_of(compiled), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in b.items()}
    resumed = trained('resumed', *flags, '--compile', f'--init_from={compiled}/model_2.pt')
    assert log_of(resumed)[1:] == [entry for entry in log_of(compiled) if entry['step'] > 2]
    assert_same(load(resumed, 'model_4.pt')['optimizer'], load(compiled, 'model_4.pt')['optimizer'])


def go_on_from(out, name, new):
    """Makes `new` the folder of a run that was killed when --keep_every had just kept `name`."""
    os.makedirs(new)
    for file, copy in (('config.json', 'config.json'), ('log.jsonl', 'log.jsonl'), (name, 'ckpt.pt')):
        shutil.copy(os.path.join(out, file), os.path.join(new, copy))


@pytest.mark.parametrize('method', METHODS)
def test_a_run_that_is_no_longer_finite_leaves_its_last_checkpoint(trained, tmp_path, monkeypatch, method):
    """So does one that resumed. A log line shows it at step 8, or else the save of that step."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    for log_every, ckpt_every in ((2, 6), (10, 2)):
        flags = (f'--method={method}', '--steps=30', f'--log_every={log_every}', f'--ckpt_every={ckpt_every}',
                 '--keep_every=6')
        out = trained(f'{log_every}', *flags)
        go_on_from(out, 'model_6.pt', tmp_path / f'{log_every}-resumed')
        for folder in (out, trained(f'{log_every}-resumed', *flags)):
            saved, result = load(folder), result_of(folder)
            assert saved['step'] == 6 and all(w.isfinite().all() for w in saved['model'].values())
            assert_same(saved['model'], load(out, 'model_6.pt')['model'])
            assert math.isnan(result['test_loss']) and math.isfinite(result['mu_norm'])
            assert log_of(folder)[-1]['step'] == (8 if log_every == 2 else 1)
            assert not {'ckpt.pt', 'model_12.pt'} & {*os.listdir(folder)}


def test_the_clock_has_the_steps_after_the_second_log_line_and_nothing_else(
        trained, tmp_path, monkeypatch):
    """
    A step takes 100 s, but the host of a GPU goes on after 1; an evaluation takes 10,000 s; the first step
    with statistics and the first one without compile, for 5,000 s, also after a kill.
    """
    flags = ('--steps=60', '--log_every=10', '--eval_every=15', '--keep_every=30')
    now = {'host': 0.0, 'device': 0.0}
    kinds = set()

    def train_step(*given, with_stats):
        now['host'] += 1 if with_stats in kinds else 5_000
        now['device'] = max(now['host'] - 1, now['device']) + 100
        kinds.add(with_stats)
        return real_step(*given, with_stats=with_stats)

    def synchronize(*_):
        now['host'] = max(now['host'], now['device'])

    def evaluate(*given):
        synchronize()
        now['host'] += 10_000
        return real_evaluate(*given)
    real_step, real_evaluate = train.train_step, train.evaluate
    monkeypatch.setattr(train, 'time', SimpleNamespace(perf_counter=lambda: now['host']))
    monkeypatch.setattr(train, 'train_step', train_step)
    monkeypatch.setattr(train, 'evaluate', evaluate)
    monkeypatch.setattr(train.machine, 'synchronize', synchronize)
    rate = 4 * 32 / 100
    out = trained('run', *flags)
    with open(f'{out}/log.jsonl') as file:
        rates = [entry['tokens_per_second'] for entry in map(json.loads, file) if 'loss' in entry]
    assert rates == [None, None, *[rate] * 5]
    assert result_of(out)['train_seconds'] == 5000 and result_of(out)['tokens_per_second'] == rate
    kinds.clear()
    go_on_from(out, 'model_30.pt', tmp_path / 'resumed')
    result = result_of(trained('resumed', *flags))  # steps 11 to 30 and 51 to 60
    assert result['train_seconds'] == 3000 and result['tokens_per_second'] == rate


def test_a_shift_has_the_norm_asked_for_and_only_rounding_tells(trained):
    """In fp32 the logits of some hundreds are good to 1e-5 a step; in bf16 their unit is 1 or 2."""
    losses = {}
    for norm in (0, 300):
        for dtype in ('float32', 'bfloat16'):
            out = trained(f'{norm}-{dtype}', f'--mu_shift={norm}', f'--logits_dtype={dtype}', '--steps=8',
                          '--keep_every=8', '--lr=1e-3')
            losses[norm, dtype] = np.array([e['loss'] for e in log_of(out) if 'loss' in e])
            assert result_of(out)['mu_norm'] == pytest.approx(norm, abs=0.05)
    assert abs(losses[300, 'float32'] - losses[0, 'float32']).max() < 1e-3
    assert abs(losses[300, 'bfloat16'] - losses[0, 'bfloat16']).max() > 1e-2


def test_init_from_goes_on_as_if_never_stopped_and_needs_its_source_only_to_start(corpus, whole, tmp_path):
    """With the same method; or with another one, killed before it has saved anything but its start."""
    source = shutil.copy(f'{whole}/model_30.pt', tmp_path)
    flags = [*LONG, f'--data={corpus}', f'--init_from={source}']
    train.main([*flags, f'--out={tmp_path}/same'])
    assert log_of(tmp_path / 'same')[0]['step'] == 30
    assert log_of(tmp_path / 'same')[1:] == [e for e in log_of(whole) if e['step'] > 30]
    assert_same(*(load(out, 'model_60.pt')['optimizer'] for out in (tmp_path / 'same', whole)))

    flags += ['--method=mu_centering', '--ckpt_every=0']
    train.main([*flags, f'--out={tmp_path}/other'])
    kill = (signal_at_step, signal.SIGKILL, 12)
    finish(process(train.main, [*flags, f'--out={tmp_path}/killed'], prepare=kill), -signal.SIGKILL)
    os.unlink(source)
    train.main([*flags, f'--out={tmp_path}/killed'])
    assert_same(*(state_of(tmp_path / name, 'model_60.pt') for name in ('killed', 'other')))
    assert log_of(tmp_path / 'other')[1]['mu_norm'] < 1e-6


def test_init_from_what_cannot_work_writes_nothing(corpus, whole, tmp_path):
    (tmp_path / 'x.pt').write_bytes(b'not a checkpoint')
    flags = [*LONG, f'--data={corpus}', f'--out={tmp_path}/bad']
    kept = f'{whole}/model_30.pt'
    for source, more, named in ((f'{tmp_path}/x.pt', '--lr=1', 'x.pt'), (tmp_path, '--lr=1', tmp_path),
                                ('/nowhere.pt', '--lr=1', '/nowhere.pt'),
                                (f'{whole}/model.pt', '--lr=1', '--steps=60'),
                                (kept, '--weight_tying', 'weight_tying'), (kept, '--n_embd=64', 'n_embd=32')):
        refused(lambda: train.main([*flags, f'--init_from={source}', more]), named)  # noqa: B023
    assert os.listdir(tmp_path) == ['x.pt']


def test_a_new_flag_leaves_the_runs_of_before_as_they_were(corpus, whole, tmp_path, monkeypatch):
    """They resume, with its default; so does what a fork adds to the model's config, or takes away."""
    parser = train.parser

    def larger_parser():
        p = parser()
        p.add_argument('--sharpness', type=float, default=2.0)
        return p
    monkeypatch.setattr(train, 'parser', larger_parser)
    go_on_from(whole, 'model_30.pt', tmp_path / 'run')
    train.main([*LONG, f'--data={corpus}', f'--out={tmp_path}/run'])
    assert_same(load(tmp_path / 'run')['model'], load(whole)['model'])
    settings = load(whole)['config']
    del settings['cap'], settings['logits_dtype']
    config = gpt_config({**settings, 'gone': 1})
    assert (config.cap, config.logits_dtype, config.n_embd) == (GPTConfig.cap, GPTConfig.logits_dtype, 32)


WANDB = """
def init(**given):
    print('init', given['project'], given['resume'], given['id'], file=open({path!r}, 'a'))
    return __import__('wandb')

def log(entry, step):
    print('log', step, entry.get('loss'), file=open({path!r}, 'a'))
"""


def test_wandb_gets_every_line_of_the_log_and_one_run_for_a_run_that_resumes(trained, tmp_path, monkeypatch):
    """A module that writes down what comes stands for the package, which needs an account."""
    path = tmp_path / 'seen.txt'
    (tmp_path / 'wandb.py').write_text(WANDB.format(path=str(path)))
    monkeypatch.syspath_prepend(tmp_path)
    out = trained('run', '--steps=6', '--keep_every=3', '--wandb=mine')
    first, *logged = path.read_text().splitlines()
    assert first.startswith('init mine allow ') and len(logged) == 8
    assert logged == [f'log {e["step"]} {e.get("loss")}' for e in log_of(out)]
    os.unlink(f'{out}/result.json')
    os.rename(f'{out}/model_3.pt', f'{out}/ckpt.pt')
    trained('run', '--steps=6', '--keep_every=3', '--wandb=mine')
    again = path.read_text().splitlines()[9:]
    assert again == [first, *logged[4:]]
