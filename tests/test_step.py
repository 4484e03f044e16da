"""What a run does: defaults, batch order, test windows, and all of a run written out."""
import math

import numpy as np
import pytest
import torch

import prepare_fineweb
import train
from model import GPTConfig
from oec.common import write_json
from small_runs import load, log_of
from test_facts import close, equations, tiny_gpt


def settled(folder, *flags):
    """The settings of a command, with data of GPT-2's vocabulary."""
    return train.settle(train.make_parser().parse_args([f'--data={folder}', *flags]))


def test_defaults_are_appendix_a(tmp_path):
    expected = dict(
        beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, min_lr=1e-5, warmup=5000, steps=100_000,
        batch_size=64, block_size=2048, size='16M', n_layer=6, n_embd=224, n_head=4, vocab_size=50304,
        weight_tying=False, method='baseline', lam=None, cap=None, mu_shift=0.0, compile=True,
        eval_tokens=1_048_576, test_tokens=10_485_760, seed=1, micro_batch_size=16)
    args = vars(settled(tmp_path, '--device=cuda'))
    assert {name: args[name] for name in expected} == expected and GPTConfig.rope_fraction == 0.5
    assert {settled(tmp_path, f'--method={m}').lam for m in ('weight_decay', 'z_loss', 'mu_loss')} == {1e-4}
    assert settled(tmp_path, '--method=soft_capping').cap == 30 and settled(tmp_path, '--cap=15').cap == 15


@pytest.mark.parametrize('flags, unit, dtype', [
    ('--device=cuda', '', 'bfloat16'), ('--device=cpu', 'amx_bf16', 'bfloat16'),
    ('--device=cpu', 'avx512_bf16', 'bfloat16'), ('--device=cpu', 'avx512_f', 'float32'),
    ('--device=cpu --dtype=bfloat16', '', 'bfloat16'), ('--device=cuda --dtype=float32', '', 'float32')])
def test_dtype_is_what_the_machine_is_fast_in_also_of_logits(flags, unit, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {unit: True})
    args = settled(tmp_path, *flags.split())
    assert (args.dtype, args.logits_dtype) == (dtype, dtype)


def test_batch_order_is_pinned():
    """Values of the frozen RandomState stream: were they to change, old runs could not be resumed."""
    assert train.batch_windows(1, 0, 5, 1000).tolist() == [775, 813, 549, 55, 416]
    assert train.batch_windows(1, 300, 5, 1000).tolist() == [897, 578, 641, 935, 253]
    assert train.batch_windows(2**32 - 1, 7, 5, 10).tolist() == [1, 7, 8, 0, 3]


def test_every_epoch_visits_every_window_once():
    rng = np.random.RandomState(0)
    for _ in range(50):
        seed, n, batch_size = (int(rng.randint(1, high)) for high in (2**31, 60, 20))
        order = np.concatenate([train.batch_windows(seed, step, batch_size, n) for step in range(3 * n)])
        assert (np.sort(order.reshape(-1, n)) == np.arange(n)).all()


def shards(folder):
    """Writes a train and a val shard of 2,000 tokens below 60; returns the tokens."""
    tokens = np.cumsum(np.random.RandomState(0).randint(0, 3, 2000)) % 60
    for split in ('train', 'val'):
        prepare_fineweb.write_shard(str(folder / f'x_{split}_000000.bin'), tokens)
    write_json(str(folder / 'meta.json'), {'vocab_size': 60})
    return torch.from_numpy(tokens)


@pytest.mark.parametrize('n_tokens, n', [(16 * 10 + 5, 10), (10**9, 124)])  # or all windows there are
def test_evaluation_is_the_bare_cross_entropy_of_the_evenly_spaced_windows(n_tokens, n, tmp_path):
    """Of fp32 losses, which test_facts.py holds to the cross entropy, without reg, summed in float64."""
    tokens = shards(tmp_path)
    gpt = tiny_gpt('z_loss', dtype='float32', logits_dtype='float32')
    windows = torch.stack([tokens[16 * (i * 124 // n):][:17] for i in range(n)])
    with torch.no_grad():
        losses = [gpt(part[:, :-1], part[:, 1:])[1]['loss'] for part in windows.split(4)]
    test_loss = train.evaluate(gpt, train.Windows(str(tmp_path), 'val', 16, 60), n_tokens, micro_batch_size=4)
    assert test_loss == pytest.approx(torch.cat(losses).double().mean().item(), rel=1e-13)


@pytest.mark.parametrize('method, clip, tying', [
    ('baseline', 0, ''), ('baseline', 1, '--weight_tying'), ('mu_loss', 0.05, ''), ('mu_centering', 0.5, ''),
    ('weight_decay', 0, ''), ('coupled_adam', 1, '')])
def test_a_run_is_adamw_of_appendix_a_on_the_pinned_batches(method, clip, tying, tmp_path):
    """train.main and its log against a training written out. In two micro-batches reg counts once."""
    tokens = shards(tmp_path)
    flags = dict(data=tmp_path, out=tmp_path / 'run', dtype='float32', device='cpu', seed=5, grad_clip=clip,
                 n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16, lr=0.03, min_lr=1e-3, warmup=2,
                 steps=8, batch_size=4, micro_batch_size=2, eval_tokens=64, test_tokens=64, method=method,
                 eps=1e-4, log_every=3, **({'lam': 0.3} if method in ('mu_loss', 'weight_decay') else {}))
    train.main([f'--{name}={value}' for name, value in flags.items()] + tying.split())

    gpt = tiny_gpt(seed=5, weight_tying=bool(tying))
    moments = {p: (0, 0) for p in gpt.parameters()}
    expected = {}
    rates = [0.01, 0.02, *(1e-3 + 0.029 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(6))]
    for t, lr in enumerate(rates, 1):
        starts = 16 * train.batch_windows(5, t - 1, 4, 124)
        windows = torch.stack([tokens[start:start + 17] for start in starts])
        h, targets = gpt.hidden(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
        loss, reg = equations(method, h, gpt.E, targets, 0.3, 0)
        gradients = torch.autograd.grad(loss + reg, list(moments))
        norm = sum(g.square().sum() for g in gradients).sqrt()
        logits = h @ gpt.E.T
        mean = logits.mean(dim=1)
        expected[t] = {
            'loss': loss, 'reg': reg, 'lr': lr, 'grad_norm': norm, 'logit_mean': mean.mean(),
            'logit_mean_spread': mean.std(correction=0), 'logit_max': logits.abs().max(),
            'logit_std': logits.std(dim=1, correction=0).mean(),
            'logit_absmax': logits.abs().amax(dim=1).mean()}
        scale = min(1, clip / (norm + 1e-6)) if clip else 1  # the 1e-6 is PyTorch's
        with torch.no_grad():
            for p, g in zip(moments, gradients, strict=True):
                m, v = moments[p]
                m, v = moments[p] = 0.9 * m + 0.1 * scale * g, 0.95 * v + 0.05 * (scale * g) ** 2
                if method == 'coupled_adam' and p is gpt.E:
                    v = v.mean(dim=0)
                if method == 'weight_decay' and p is gpt.E:
                    p *= 1 - 0.3
                p -= lr * m / (1 - 0.9 ** t) / ((v / (1 - 0.95 ** t)).sqrt() + 1e-4)
            if method == 'mu_centering':
                gpt.E.sub_(gpt.E.mean(dim=0))
            expected[t]['mu_norm'] = gpt.E.mean(dim=0).norm()
    weights = load(tmp_path / 'run')['model']  # in fp32
    close(weights, dict(gpt.state_dict()), rtol=0, atol=1e-5, check_dtype=False)
    logged = [entry for entry in log_of(tmp_path / 'run') if 'loss' in entry]
    assert [entry['step'] for entry in logged] == [1, 3, 6, 8]
    for entry in logged:
        values = {name: torch.as_tensor(value).item() for name, value in expected[entry['step']].items()}
        assert {name: entry[name] for name in values} == pytest.approx(values, rel=1e-4, abs=1e-6)
