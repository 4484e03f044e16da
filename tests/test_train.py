"""One training run: what it leaves, logs and reports, what it starts from, what a fork may add."""
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
from conftest import refused
from model import GPT, METHODS, gpt_config
from oec import common, data
from processes import finish, folder_hash, process
from runs import SMALL, assert_same, load, log_of, result_of, signal_at, state_of

LONG = ('--method=mu_loss', '--lr=3e-2', '--steps=60', '--logits_dtype=bfloat16', '--log_every=5',
        '--eval_every=20', '--ckpt_every=7', '--keep_every=30')


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, in fp32, and returns its folder."""
    def train_one(name, *flags):
        always = ('--dtype=float32', '--log_every=1', f'--data={corpus}', f'--out={tmp_path}/{name}')
        train.main([*SMALL, *always, *flags])
        return str(tmp_path / name)
    return train_one


def resume(trained, out, kept, *flags):
    """Trains on from what a kill leaves of the run `out` when --keep_every has just kept `kept`."""
    new = f'{out}-resumed'
    os.makedirs(new)
    for file, copy in (('config.json', 'config.json'), ('log.jsonl', 'log.jsonl'), (kept, 'ckpt.pt')):
        shutil.copy(os.path.join(out, file), os.path.join(new, copy))
    return trained(os.path.basename(new), *flags)


def test_a_run_leaves_what_the_design_says_and_is_then_done(trained, corpus):
    whole = trained('whole', *LONG)
    assert set(os.listdir(whole)) == {'.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt',
                                      'model_60.pt', 'result.json'}
    log, result, saved = log_of(whole), result_of(whole), load(whole)
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)]
    assert [e['step'] for e in log if 'test_loss' in e] == [0, 20, 40, 60]
    assert set(saved) == {'model', 'step', 'config'} and saved['step'] == 60
    assert saved['config'].items() <= common.read_json(f'{whole}/config.json').items()

    torch.manual_seed(1)
    gpt = GPT(gpt_config(saved['config']))
    windows = data.Windows(corpus, 'val', 32, 320)
    init_loss = train.evaluate(gpt, windows, 128, 4)  # of --eval_tokens
    gpt.load_state_dict(saved['model'])
    expected = {'n_params': gpt.n_params(), 'mu_norm': gpt.E.mean(dim=0).norm().item(),
                'init_loss': init_loss, 'test_loss': train.evaluate(gpt, windows, 256, 4)}
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert set(result) == {*expected, 'train_seconds', 'tokens_per_second'}
    assert init_loss == pytest.approx(math.log(320), abs=0.3) and result['test_loss'] < init_loss - 1

    before = folder_hash(whole)
    trained('whole', *LONG)
    assert folder_hash(whole) == before


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
    resumed = resume(trained, compiled, 'model_2.pt', *flags, '--compile')
    assert_same(state_of(resumed, 'model_4.pt'), state_of(compiled, 'model_4.pt'))


def test_muon_head_steps_E_with_muon_and_the_rest_with_adamw_and_resumes_to_its_own_bits(trained):
    """Muon's update is lr 0.2 sqrt(V) times a matrix whose singular values are near 1; mu stays."""
    flags = ('--steps=20', '--lr=1e-2', '--warmup=0', '--keep_every=1', '--n_embd=64')
    adamw = trained('adamw', *flags)
    muon = trained('muon', *flags, '--method=muon_head')
    first, others = (load(out, 'model_1.pt')['model'] for out in (muon, adamw))
    torch.manual_seed(1)
    update = first.pop('lm_head.weight') - GPT(gpt_config(load(muon)['config'])).E
    sigma = torch.linalg.svdvals(update) / (1e-2 * 0.2 * math.sqrt(320))
    assert abs(sigma[:32] - 1).max() < 0.3  # of 64; the smallest ones need more iterations
    del others['lm_head.weight']
    assert_same(first, others)
    assert result_of(muon)['mu_norm'] < 0.1 * result_of(adamw)['mu_norm']
    resumed = resume(trained, muon, 'model_10.pt', *flags, '--method=muon_head')
    assert_same(state_of(resumed, 'model_20.pt'), state_of(muon, 'model_20.pt'))


@pytest.mark.parametrize('method', METHODS)
def test_a_run_that_is_no_longer_finite_leaves_its_last_checkpoint(trained, monkeypatch, method):
    """A log line shows it at step 8, or else the save of that step."""
    monkeypatch.setattr(train, 'learning_rate', lambda step, args: 1e30 if step == 7 else 1e-2)
    for log_every, ckpt_every, last_line in ((2, 6, 8), (10, 2, 1)):
        out = trained(f'{log_every}', f'--method={method}', '--steps=30', f'--log_every={log_every}',
                      f'--ckpt_every={ckpt_every}', '--keep_every=6')
        saved, result = load(out), result_of(out)
        assert saved['step'] == 6 and all(w.isfinite().all() for w in saved['model'].values())
        assert_same(saved['model'], load(out, 'model_6.pt')['model'])
        assert math.isnan(result['test_loss']) and math.isfinite(result['mu_norm'])
        assert log_of(out)[-1]['step'] == last_line
        assert not {'ckpt.pt', 'model_12.pt'} & {*os.listdir(out)}


def test_the_clock_has_the_steps_after_the_second_log_line_and_nothing_else(trained, monkeypatch):
    """A step takes 100 s, but the host of a GPU goes on after 1; an evaluation takes 10,000 s."""
    flags = ('--steps=60', '--log_every=10', '--eval_every=15', '--keep_every=30')
    now = SimpleNamespace(host=0, device=0)
    real_step = train.train_step

    def train_step(*given, **named):
        now.device = max(now.host, now.device) + 100
        now.host += 1
        return real_step(*given, **named)

    def synchronize(device):
        now.host = max(now.host, now.device)

    def evaluate(*given):
        now.host += 10_000
        return 0.0
    monkeypatch.setattr(train, 'time', SimpleNamespace(perf_counter=lambda: now.host))
    monkeypatch.setattr(train, 'train_step', train_step)
    monkeypatch.setattr(train, 'evaluate', evaluate)
    monkeypatch.setattr(train.machine, 'synchronize', synchronize)
    rate = 4 * 32 / 100
    out = trained('run', *flags)
    with open(f'{out}/log.jsonl') as file:
        rates = [entry['tokens_per_second'] for entry in map(json.loads, file) if 'loss' in entry]
    assert rates == [None, None, *[rate] * 5]
    assert result_of(out)['train_seconds'] == 5000 and result_of(out)['tokens_per_second'] == rate
    result = result_of(resume(trained, out, 'model_30.pt', *flags))  # steps 11 to 30 and 51 to 60
    assert result['train_seconds'] == 3000 and result['tokens_per_second'] == rate


def test_a_shift_has_the_norm_asked_for_and_only_rounding_tells(trained):
    """In fp32 the logits of some hundreds are good to 1e-5; in bf16 their unit is 1 or 2."""
    losses = []
    for flags in ('--mu_shift=0', '--mu_shift=300', '--mu_shift=300 --logits_dtype=bfloat16'):
        result = result_of(trained(flags, '--steps=1', *flags.split()))
        losses.append(result['init_loss'])
        assert result['mu_norm'] == pytest.approx(300 if '300' in flags else 0, abs=0.05)
    assert abs(losses[1] - losses[0]) < 1e-4 and abs(losses[2] - losses[0]) > 1e-2


def test_init_from_goes_on_as_if_never_stopped_and_needs_its_source_only_to_start(corpus, trained, tmp_path):
    """With the same method; or with another one, killed before it has saved anything but its start."""
    whole = trained('whole', *LONG)
    source = shutil.copy(f'{whole}/model_30.pt', tmp_path)
    flags = [*LONG, f'--init_from={source}']
    same = trained('same', *flags)
    assert log_of(same)[0]['step'] == 30
    assert log_of(same)[1:] == [e for e in log_of(whole) if e['step'] > 30]
    assert_same(*(load(out, 'model_60.pt')['optimizer'] for out in (same, whole)))

    flags += ['--method=mu_centering', '--ckpt_every=0']
    other = trained('other', *flags)
    assert log_of(other)[1]['mu_norm'] < 1e-6
    kill = (signal_at, signal.SIGKILL, 'train_step', 12)
    flags[:0] = [*SMALL, '--dtype=float32', f'--data={corpus}']
    finish(process(train.main, [*flags, f'--out={tmp_path}/killed'], prepare=kill), -signal.SIGKILL)
    os.unlink(source)
    assert_same(state_of(trained('killed', *flags), 'model_60.pt'), state_of(other, 'model_60.pt'))

    for source, flag, named in (('/nowhere.pt', '', '/nowhere.pt'), (f'{whole}/model.pt', '', '--steps=60'),
                                (f'{whole}/model_30.pt', '--weight_tying', 'weight_tying')):
        refused(lambda: trained('bad', *LONG, f'--init_from={source}', *flag.split()), named)  # noqa: B023
    assert not os.path.exists(tmp_path / 'bad')


def test_wandb_gets_every_line_of_the_log_and_one_run_for_a_run_that_resumes(trained, monkeypatch):
    seen = []

    def init(project, resume, id, **_):
        seen.append((project, resume, id))
        return SimpleNamespace(log=lambda entry, step: seen.append((step, entry.get('loss'))))
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(__spec__='any', init=init))
    flags = ('--steps=6', '--keep_every=3', '--wandb=mine')
    out = trained('run', *flags)
    first, *logged = seen
    assert first[:2] == ('mine', 'allow')
    assert logged == [(e['step'], e.get('loss')) for e in log_of(out)]
    os.unlink(f'{out}/result.json')
    os.rename(f'{out}/model_3.pt', f'{out}/ckpt.pt')
    trained('run', *flags)
    assert seen[9:] == [first, *logged[4:]]
