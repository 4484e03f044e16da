"""One training run: what it leaves, logs and reports, what it starts from; what the benchmark compares."""
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
from analysis import bench
from conftest import finish, folder_hash, process, refused
from model import GPT, METHODS, gpt_config
from oec import common
from small_runs import SMALL, assert_same, load, log_of, result_of, signal_at, state_of

LONG = ('--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=15', '--ckpt_every=7', '--keep_every=30')


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, in fp32, and returns its folder."""
    def train_one(name, *flags):
        always = ('--dtype=float32', '--log_every=1', f'--data={corpus}', f'--out={tmp_path}/{name}')
        train.main([*SMALL, *always, *flags])
        return str(tmp_path / name)
    return train_one


def test_a_run_leaves_what_the_design_says_and_is_then_done(trained, corpus):
    whole = trained('whole', *LONG)
    assert set(os.listdir(whole)) == {'.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt',
                                      'model_60.pt', 'result.json'}
    log, result, saved = log_of(whole), result_of(whole), load(whole)
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 15, 30, 45, 60]
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 60
    assert saved['config'].items() <= common.read_json(f'{whole}/config.json').items()

    torch.manual_seed(1)
    gpt = GPT(gpt_config(saved['config']))
    windows = train.Windows(corpus, 'val', 32, 320)
    expected = {'n_params': gpt.n_params(), 'init_loss': train.evaluate(gpt, windows, 128, 4)}
    gpt.load_state_dict(saved['model'])
    expected['test_loss'] = train.evaluate(gpt, windows, 256, 4)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    gpt.load_state_dict(load(whole, 'model_30.pt')['model'])
    on_the_way, = (entry['test_loss'] for entry in log if 'test_loss' in entry and entry['step'] == 30)
    assert on_the_way == pytest.approx(train.evaluate(gpt, windows, 128, 4), rel=1e-6)
    assert set(result) == {*expected, 'train_seconds', 'tokens_per_second'}
    assert result['test_loss'] < result['init_loss'] - 1

    before = folder_hash(whole)
    trained('whole', *LONG)
    assert folder_hash(whole) == before


def test_a_compiled_run_has_the_losses_of_an_eager_one_and_goes_on_to_its_own_bits(trained):
    flags = ('--method=soft_capping', '--steps=4', '--lr=1e-3', '--keep_every=2')
    torch._dynamo.utils.counters.clear()
    eager = trained('eager', *flags)
    graphs = torch._dynamo.utils.counters['stats']
    assert not graphs
    compiled = trained('compiled', *flags, '--compile')
    assert graphs['unique_graphs'] >= 2  # in training and in evaluation
    for a, b in zip(log_of(eager), log_of(compiled), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in b.items()}
    again = trained('again', *flags, '--compile', f'--init_from={compiled}/model_2.pt')
    assert_same(load(again)['model'], load(compiled)['model'])


@pytest.mark.parametrize('method', METHODS)
def test_a_run_that_is_no_longer_finite_leaves_its_last_checkpoint(trained, monkeypatch, capsys, method):
    """The log line of step 9 shows it, after a step whose weights are NaN, or else the save of step 8."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    for log_every, ckpt_every, last_line in ((3, 6, 9), (10, 2, 1)):
        out = trained(f'{log_every}', f'--method={method}', '--steps=30', f'--log_every={log_every}',
                      f'--ckpt_every={ckpt_every}', '--keep_every=6')
        saved, result = load(out), result_of(out)
        assert saved['step'] == 6 and all(w.isfinite().all() for w in saved['model'].values())
        assert_same(saved['model'], load(out, 'model_6.pt')['model'])
        assert math.isnan(result['test_loss'])
        assert capsys.readouterr().out.splitlines()[-1].startswith('diverged: ')
        assert log_of(out)[-1]['step'] == last_line
        if last_line == 9:  # a time, extrapolated to all steps that it ran
            assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(9 * 4 * 32)
        assert not {'ckpt.pt', 'model_12.pt'} & {*os.listdir(out)}


def test_a_gradient_alone_can_show_that_a_run_is_no_longer_finite(trained, monkeypatch):
    norms = iter([torch.tensor(x) for x in (1.0, 1.0, math.inf)])
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', lambda *_: next(norms))
    out = trained('run', '--steps=30')
    assert log_of(out)[-1]['step'] == 3 and math.isfinite(log_of(out)[-1]['loss']) and load(out)['step'] == 0


@pytest.mark.parametrize('log_every, untimed', [(1, 5), (2, 4), (10, 2)])
def test_the_clock_has_steps_after_compilation_alone(trained, monkeypatch, log_every, untimed):
    """
    On a GPU where a step takes 100 s, an evaluation 10,000 s, and 1,000 s more the first step with statistics
    and the first without. Only steps with statistics run at first if log_every is 1 or 2.
    """
    clock = SimpleNamespace(now=0, to_wait=0, perf_counter=lambda: clock.now)
    compile = {True: 1000, False: 1000}
    real_step = train.train_step

    def train_step(*given, with_stats):
        clock.to_wait += 100 + compile.pop(with_stats, 0)
        return real_step(*given, with_stats)

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
    monkeypatch.setitem(train.PEAK_TFLOPS, 'cpu', 1e-6)
    flags = ('--steps=60', f'--log_every={log_every}', '--eval_every=15', '--keep_every=30')
    out = trained('run', *flags)
    rate = 4 * 32 / 100
    with open(f'{out}/log.jsonl') as file:
        entries = [entry for entry in map(json.loads, file) if 'loss' in entry]
    rates = [entry['tokens_per_second'] for entry in entries]
    assert rates == untimed * [None] + (len(rates) - untimed) * [rate]
    assert entries[-1]['mfu'] == rate * GPT(gpt_config(load(out)['config'])).flops_per_token() / 1e6
    result = result_of(out)
    assert [result['train_seconds'], result['tokens_per_second']] == pytest.approx([6000, rate])
    os.unlink(f'{out}/result.json')
    os.rename(f'{out}/model_30.pt', f'{out}/ckpt.pt')
    assert result_of(trained('run', *flags)) == pytest.approx(result)


def test_the_benchmark_takes_the_median_over_turns_of_the_ratio_within_a_turn(capsys, monkeypatch):
    """On a machine that becomes ten times slower within the third turn the ratio of the medians is 20."""
    seconds = iter([100, 100, 1, 2, 1, 2, 1, 20, 10, 20, 10, 20])  # the first step of each compiles
    monkeypatch.setattr(bench, 'timed', lambda call, device: call() and next(seconds))
    bench.main([*SMALL, '--vocab_size=512', '--seconds=1', '--methods=baseline,mu_loss'])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith('|')][2:]
    assert [row[1:8:2] for row in rows] == [
        ['baseline', '1000.00', '128', '1.000'], ['mu_loss', '20000.00', '6', '2.000']]


def test_a_shift_has_the_norm_asked_for(trained):
    assert log_of(trained('run', '--steps=1', '--mu_shift=300'))[1]['mu_norm'] == pytest.approx(300, abs=0.1)


def test_init_from_goes_on_as_if_never_stopped_and_needs_its_source_only_to_start(corpus, trained, tmp_path):
    """With another method, killed before it has saved anything but its start; see also the compiled run."""
    whole = trained('whole', *LONG)
    source = shutil.copy(f'{whole}/model_30.pt', tmp_path)
    flags = [*LONG, f'--init_from={source}', '--method=mu_centering', '--ckpt_every=0']
    other = trained('other', *flags)
    assert [e['step'] for e in log_of(other)][:2] == [30, 35] and log_of(other)[1]['mu_norm'] < 1e-6
    result, of_whole = result_of(other), result_of(whole)
    assert result['init_loss'] is None and of_whole['init_loss'] > 0
    assert result['train_seconds'] * result['tokens_per_second'] == pytest.approx(30 * 4 * 32)
    changed = load(trained('changed', *flags, '--beta2=0.5', '--steps=31', '--keep_every=31'), 'model_31.pt')
    assert changed['optimizer']['param_groups'][0]['betas'] == (0.9, 0.5)
    kill = (signal_at, signal.SIGKILL, 'train_step', 12)
    flags[:0] = [*SMALL, '--dtype=float32', f'--data={corpus}']
    finish(process(train.main, [*flags, f'--out={tmp_path}/killed'], prepare=kill), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags), 'model_60.pt'), state_of(other, 'model_60.pt'))

    other_rope = load(whole, 'model_30.pt')
    other_rope['config']['rope_fraction'] = 1.0
    torch.save(other_rope, tmp_path / 'rope.pt')
    for source, flag, named in (('/nowhere.pt', '', '/nowhere.pt'), (f'{whole}/model.pt', '', '--steps=60'),
                                (f'{whole}/model_30.pt', '--weight_tying', 'weight_tying'),
                                (f'{tmp_path}/rope.pt', '', 'rope_fraction')):
        refused(lambda: trained('bad', *LONG, f'--init_from={source}', *flag.split()), named)  # noqa: B023
    assert not os.path.exists(tmp_path / 'bad')


def test_wandb_gets_every_line_of_the_log_in_one_run(trained, monkeypatch, tmp_path):
    """A run that resumes goes on there as well. Without wandb or its key nothing is written."""
    seen = []

    def init(project, id, name, resume, config):
        seen.append((project, id, resume))
    wandb = SimpleNamespace(init=init, log=lambda entry, step: seen.append((step, entry.get('loss'))))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    flags = ('--steps=2', '--keep_every=2', '--wandb=mine')
    out = trained('run', *flags)
    run_id = common.read_json(f'{out}/config.json')['run_id']
    assert seen[0] == ('mine', run_id, 'allow')
    assert seen[1:] == [(e['step'], e.get('loss')) for e in log_of(out)]
    os.rename(f'{out}/model_2.pt', f'{out}/ckpt.pt')
    os.unlink(f'{out}/result.json')
    del seen[:]
    with common.lock_folder(out):
        refused(lambda: trained('run', *flags), out)
        assert seen == []  # that of a run in progress is left alone
    trained('run', *flags)
    assert seen[0] == ('mine', run_id, 'allow')
