"""One training run: what it leaves, logs and reports, and what it starts from."""
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import finish, folder_hash, process, refused
from model import GPT, METHODS, gpt_config
from small_runs import SMALL, assert_same, load, log_of, result_of, resume_from, signal_at, state_of

LONG = ('--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=15', '--ckpt_every=7', '--keep_every=30')


def test_what_a_run_leaves(trained):
    whole = trained('whole', *LONG)
    assert set(os.listdir(whole)) == {'.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt',
                                      'model_60.pt', 'result.json'}
    log, result, saved = log_of(whole), result_of(whole), load(whole)
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 15, 30, 45, 60]
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == result['model_step'] == 60
    assert saved['config'] == train.read_json(f'{whole}/config.json')
    assert_same(saved['model'], load(whole, 'model_60.pt')['model'])
    GPT(gpt_config(saved['config'])).load_state_dict(saved['model'])
    assert result['test_loss'] < result['init_loss'] - 1

    before = folder_hash(whole)
    shutil.copy(f'{whole}/model_60.pt', f'{whole}/ckpt.pt')  # as a kill in the last moment leaves it
    trained('whole', *LONG)
    assert folder_hash(whole) == before


@pytest.mark.parametrize('method', METHODS)
def test_diverged_run(trained, monkeypatch, capsys, method):
    """The log line of step 9 shows it, after a step whose weights are NaN, or else the save of step 8."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    for log_every, ckpt_every, last_line in ((3, 6, 9), (10, 2, 1)):
        out = trained(f'{log_every}', f'--method={method}', '--steps=30', f'--log_every={log_every}',
                      f'--ckpt_every={ckpt_every}', '--keep_every=6')
        saved, result = load(out), result_of(out)
        assert saved['step'] == 6 and all(w.isfinite().all() for w in saved['model'].values())
        assert_same(saved['model'], load(out, 'model_6.pt')['model'])
        assert result['test_loss'] is None and result['model_step'] == 6
        assert capsys.readouterr().out.splitlines()[-1].startswith('diverged: ')
        assert log_of(out)[-1]['step'] == last_line
        assert not {'ckpt.pt', 'model_12.pt'} & {*os.listdir(out)}


def test_a_gradient_that_is_not_finite(trained, monkeypatch):
    norms = iter([torch.tensor(x) for x in (1.0, 1.0, math.inf)])
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', lambda *_: next(norms))
    out = trained('run', '--steps=30')
    assert log_of(out)[-1]['step'] == 3 and math.isfinite(log_of(out)[-1]['loss']) and load(out)['step'] == 0


@pytest.mark.parametrize('log_every, untimed', [(1, 5), (2, 4), (10, 2)])
def test_times(trained, monkeypatch, log_every, untimed):
    """
    On a GPU where a step takes 100 s, the first with statistics and the first without 1,000 s more, the last
    two 500 s, and an evaluation 10,000 s. The run's speed is the median of those that count, also resumed.
    """
    clock = SimpleNamespace(now=0, to_wait=0, perf_counter=lambda: clock.now)
    compilation = {True: 1000, False: 1000}

    def train_step(*given, with_stats, real=train.train_step):
        clock.to_wait += (100 if given[3] < 59 else 500) + compilation.pop(with_stats, 0)
        return real(*given, with_stats=with_stats)

    def synchronize():
        clock.now, clock.to_wait = clock.now + clock.to_wait, 0

    def evaluate(*given):
        clock.to_wait += 10_000
        synchronize()
        return 0.0
    for where, name, replacement in ((train, 'train_step', train_step), (train, 'evaluate', evaluate),
                                     (train, 'time', clock), (torch.cpu, 'synchronize', synchronize)):
        monkeypatch.setattr(where, name, replacement)
    monkeypatch.setattr(GPT, 'mfu', lambda gpt, speed, device_name: speed / 100)
    flags = ('--steps=60', f'--log_every={log_every}', '--eval_every=15', '--keep_every=30')
    out = trained('run', *flags)
    speed = 4 * 32 / 100
    with open(f'{out}/log.jsonl') as file:
        entries = [entry for entry in map(json.loads, file) if 'loss' in entry and entry['step'] < 59]
    times = [(entry['tokens_per_second'], entry['mfu']) for entry in entries]
    assert times == untimed * [(None, None)] + (len(times) - untimed) * [(speed, speed / 100)]
    for _ in range(2):
        assert result_of(out)['train_seconds'] == pytest.approx(6000)
        assert result_of(out)['tokens_per_second'] == pytest.approx(speed)
        resume_from(out, 'model_30.pt')
        trained('run', *flags)


def test_init_from_a_checkpoint(corpus, trained, tmp_path):
    """
    It goes on at the step of the source with the settings of the command. The source is needed only to start:
    a run is killed before it has saved anything but its start, and resumes without it.
    """
    source = shutil.copy(trained('whole', *LONG) + '/model_30.pt', tmp_path)
    flags = [*LONG, f'--init_from={source}', '--method=mu_centering', '--beta2=0.5', '--eps=1e-5',
             '--ckpt_every=0']
    other = trained('other', *flags)
    start, line, *_ = log_of(other)
    assert start in log_of(tmp_path / 'whole') and (start['step'], line['step']) == (30, 35)
    result, optimizer = result_of(other), load(other, 'model_60.pt')['optimizer']
    assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(30 * 4 * 32)
    assert line['mu_norm'] < 1e-6 and result['init_loss'] is None
    assert all(state['step'] == 60 for state in optimizer['state'].values())
    assert {(*group['betas'], group['eps']) for group in optimizer['param_groups']} == {(0.9, 0.5, 1e-5)}

    kill = (signal_at, signal.SIGKILL, 'train_step', 12)
    argv = [*SMALL, f'--data={corpus}', f'--out={tmp_path}/killed', *flags]
    finish(process(train.main, argv, prepare=kill), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags), 'model_60.pt'), state_of(other, 'model_60.pt'))


def test_init_from_a_model(trained):
    """It begins at step 0, with the weights alone."""
    first = trained('first', '--steps=20', '--lr=1e-2')
    second = trained('second', '--steps=2', '--lr=1e-30', '--min_lr=0', f'--init_from={first}/model.pt')
    assert [entry['step'] for entry in log_of(second)] == [0, 1, 2, 2]
    assert result_of(second)['test_loss'] == result_of(first)['test_loss']
    assert result_of(second)['init_loss'] is None


def test_init_from_another_architecture(trained, tmp_path):
    source = trained('source', '--steps=2', '--keep_every=1') + '/model_1.pt'
    for flag in ('--weight_tying', '--rope_fraction=1', '--n_head=2', '--steps=1'):
        named = flag.strip('-').split('=')[0] + '='
        refused(lambda: trained('bad', '--steps=2', f'--init_from={source}', flag), source, named)  # noqa: B023
    assert folder_hash(tmp_path / 'bad') == {}


def test_wandb(trained, monkeypatch):
    """It gets every line of the log, in one run, also of a run that resumes."""
    seen = []
    wandb = SimpleNamespace(init=lambda **given: seen.append((given['id'], given['resume'])),
                            log=lambda record, step: seen.append(step), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    flags = ('--steps=2', '--keep_every=1', '--wandb=mine')
    out = trained('run', *flags)
    resume_from(out, 'model_1.pt')
    trained('run', *flags)
    run = (train.read_json(f'{out}/config.json')['run_id'], 'allow')
    assert seen == [run, 0, 1, 2, 2, run, 2, 2]


def test_rank_without_world_size(corpus, tmp_path, monkeypatch):
    """It is no rank, but something that a launcher has left."""
    monkeypatch.setenv('RANK', '1')
    spec = importlib.util.spec_from_file_location('train_again', train.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([*SMALL, '--steps=1', f'--data={corpus}', f'--out={tmp_path}'])
    assert result_of(tmp_path)['model_step'] == 1
