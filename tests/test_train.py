"""One training run: what it leaves, logs and reports, and what it starts from."""
import json
import math
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

import model
import train
from conftest import execute, finish, folder_hash, process, refused
from model import GPT, METHODS, gpt_config
from small_runs import SMALL, assert_same, load, log_of, result_of, signal_at, state_of

LONG = ('--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=15', '--ckpt_every=7', '--keep_every=30')


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, and returns its folder."""
    def train_one(name, *flags):
        train.main([*SMALL, f'--data={corpus}', f'--out={tmp_path}/{name}', *flags])
        return str(tmp_path / name)
    return train_one


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
    assert {*result} == {'n_params', 'init_loss', 'test_loss', 'model_step', 'train_seconds', 'tokens_per_second'}
    assert result['test_loss'] < result['init_loss'] - 1

    before = folder_hash(whole)
    shutil.copy(f'{whole}/model_60.pt', f'{whole}/ckpt.pt')  # as a kill in the last moment leaves it
    trained('whole', *LONG)
    assert folder_hash(whole) == before


def test_compiled_run(trained):
    """It has the losses of an eager one, and goes on from a checkpoint to its own bits."""
    flags = ('--method=soft_capping', '--steps=4', '--lr=1e-3', '--keep_every=2')
    torch._dynamo.utils.counters.clear()
    eager = trained('eager', *flags)
    graphs = torch._dynamo.utils.counters['stats']
    assert not graphs
    compiled = trained('compiled', *flags, '--compile')
    assert graphs['unique_graphs'] >= 2  # in training and in evaluation
    for a, b in zip(log_of(eager), log_of(compiled), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in b.items()}
    state = state_of(compiled, 'model_4.pt')
    resume_from(compiled, 'model_2.pt')
    torch._dynamo.reset()
    assert_same(state_of(trained('compiled', *flags, '--compile'), 'model_4.pt'), state)


def resume_from(folder, kept):
    """Makes a done run one that was killed after a checkpoint which it has kept."""
    os.unlink(f'{folder}/result.json')
    shutil.copy(f'{folder}/{kept}', f'{folder}/ckpt.pt')


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
    two 500 s, and an evaluation 10,000 s: the last do not count, nor do steps before the loop has settled.
    """
    clock = SimpleNamespace(now=0, to_wait=0, perf_counter=lambda: clock.now)
    compilation = {True: 1000, False: 1000}
    real_step = train.train_step

    def train_step(model, optimizer, batch, step, args, with_stats):
        clock.to_wait += (100 if step < 59 else 500) + compilation.pop(with_stats, 0)
        return real_step(model, optimizer, batch, step, args, with_stats=with_stats)

    def synchronize():
        clock.now += clock.to_wait
        clock.to_wait = 0

    def evaluate(*given):
        synchronize()
        clock.now += 10_000
        return 0.0
    for where, name, replacement in ((train, 'train_step', train_step), (train, 'evaluate', evaluate),
                                     (train, 'time', clock), (torch.cpu, 'synchronize', synchronize)):
        monkeypatch.setattr(where, name, replacement)
    monkeypatch.setattr(model, 'PEAK_TFLOPS', {'cpu': 1e-6})
    flags = ('--steps=60', f'--log_every={log_every}', '--eval_every=15', '--keep_every=30')
    out = trained('run', *flags)
    rate = 4 * 32 / 100
    with open(f'{out}/log.jsonl') as file:
        entries = [entry for entry in map(json.loads, file) if 'loss' in entry and entry['step'] < 59]
    rates = [entry['tokens_per_second'] for entry in entries]
    assert rates == untimed * [None] + (len(rates) - untimed) * [rate]
    mfus = [entry['mfu'] for entry in entries]
    mfu = GPT(gpt_config(load(out)['config'])).mfu(rate, 'cpu')
    assert mfus == untimed * [None] + (len(rates) - untimed) * [mfu]
    result = result_of(out)
    assert [result['train_seconds'], result['tokens_per_second']] == pytest.approx([6000, rate])
    resume_from(out, 'model_30.pt')
    assert result_of(trained('run', *flags)) == pytest.approx(result)


def test_init_from_a_checkpoint(corpus, trained, tmp_path):
    """
    It goes on at the step of the source with the settings of the command. The source is needed only to start:
    a run is killed before it has saved anything but its start, and resumes without it.
    """
    source = shutil.copy(trained('whole', *LONG) + '/model_30.pt', tmp_path)
    flags = [*LONG, f'--init_from={source}', '--method=mu_centering', '--beta2=0.5', '--eps=1e-5',
             '--ckpt_every=0']
    other = trained('other', *flags)
    assert [e['step'] for e in log_of(other)][:2] == [30, 35] and log_of(other)[1]['mu_norm'] < 1e-6
    assert log_of(other)[0]['test_loss'] == next(e for e in log_of(tmp_path / 'whole') if e['step'] == 30
                                                 and 'test_loss' in e)['test_loss']
    assert result_of(other)['init_loss'] is None
    speed, seconds = (result_of(other)[name] for name in ('tokens_per_second', 'train_seconds'))
    assert seconds * speed == pytest.approx(30 * 4 * 32)
    group, = load(other, 'model_60.pt')['optimizer']['param_groups']
    assert (group['betas'], group['eps']) == ((0.9, 0.5), 1e-5)
    assert all(s['step'] == 60 for s in load(other, 'model_60.pt')['optimizer']['state'].values())

    kill = (signal_at, signal.SIGKILL, 'train_step', 12)
    argv = [*SMALL, f'--data={corpus}', f'--out={tmp_path}/killed', *flags]
    finish(process(train.main, argv, prepare=kill), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags), 'model_60.pt'), state_of(other, 'model_60.pt'))


def test_init_from_a_model(trained):
    """It begins at step 0 with the weights alone."""
    first = trained('first', '--steps=20', '--lr=1e-2')
    second = trained('second', '--steps=3', f'--init_from={first}/model.pt', '--test_tokens=128')
    steps = [e['step'] for e in log_of(second)]
    assert steps == [0, 1, 2, 3, 3] and result_of(second)['init_loss'] is None
    evaluated = trained('evaluated', '--steps=1', '--lr=1e-30', '--min_lr=0', f'--init_from={first}/model.pt')
    assert result_of(evaluated)['test_loss'] == result_of(first)['test_loss']


def test_init_from_another_architecture(trained, tmp_path):
    source = trained('source', '--steps=2', '--keep_every=1')
    for flags, named in (('--weight_tying', 'weight_tying='), ('--rope_fraction=1', 'rope_fraction='),
                         ('--n_head=2', 'n_head='), ('--steps=1', '--steps=1')):
        given = [f'--init_from={source}/model_1.pt', '--steps=2', *flags.split()]
        refused(lambda: trained('bad', *given), named)  # noqa: B023
    refused(lambda: trained('bad', '--init_from=/nowhere.pt'), '/nowhere.pt')
    assert folder_hash(tmp_path / 'bad') == {}


def test_wandb(trained, monkeypatch):
    """It gets every line of the log, in one run, also of a run that resumes."""
    seen = []

    def init(project, id, name, resume, config):
        seen.append((project, id, resume))
    wandb = SimpleNamespace(init=init, log=lambda entry, step: seen.append((step, entry.get('loss'))),
                            __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    flags = ('--steps=2', '--keep_every=1', '--wandb=mine')
    out = trained('run', *flags)
    run_id = train.read_json(f'{out}/config.json')['run_id']
    assert seen[0] == ('mine', run_id, 'allow')
    assert seen[1:] == [(e['step'], e.get('loss')) for e in log_of(out)]
    resume_from(out, 'model_1.pt')
    del seen[:]
    trained('run', *flags)
    assert seen == [('mine', run_id, 'allow'), *[(e['step'], e.get('loss')) for e in log_of(out)[-2:]]]


def test_the_rank_of_a_launcher_alone_is_none(corpus, tmp_path):
    """Slurm's environment, say, may have RANK without WORLD_SIZE."""
    execute('python', 'train.py', *SMALL, '--steps=1', f'--data={corpus}', f'--out={tmp_path}', RANK='1')
    assert result_of(tmp_path)['model_step'] == 1
