"""What a run does: defaults, schedule, batch order, the step, and all of a run written out."""
import math

import numpy as np
import pytest
import torch

import train
from analysis import paper
from model import METHODS, ON_WEIGHTS, GPTConfig, embeddings_to_loss
from oec import data
from oec.common import write_json
from runs import assert_same
from test_facts import HEAD_MODES, both_heads, close, equations, tiny_gpt, token_batch, train_steps, weights


def settled(folder, *flags, world_size=4):
    """The settings of a run on a GPU of `world_size` processes, with data of GPT-2's vocabulary."""
    args = train.parser().parse_args(['--device=cuda', f'--data={folder}', *flags])
    train.settle(args, world_size)
    return args


def test_defaults_are_appendix_a(tmp_path):
    expected = dict(
        beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, min_lr=1e-5, warmup=5000, steps=100_000,
        batch_size=64, block_size=2048, size='16M', n_layer=6, n_embd=224, n_head=4, rope_fraction=0.5,
        vocab_size=50304, weight_tying=False, method='baseline', cap=30.0, dtype='bfloat16', seed=1,
        logits_dtype='bfloat16', compile=True, eval_tokens=1_048_576, test_tokens=10_485_760)
    args = settled(tmp_path)
    assert {name: getattr(args, name) for name in expected} == expected
    for method, lam in (('weight_decay', 1e-4), ('z_loss', 1e-4), ('mu_loss', 1e-4),
                        ('max_z_loss', 2e-4), ('cosine_reg', 1.0)):  # Baichuan 2, Gao et al.
        assert settled(tmp_path, f'--method={method}').lam == lam
    assert settled(tmp_path, '--lam=7').lam is None  # of a method that has none, and in no name
    assert train.run_name(train.parser().parse_args(['--lam=7'])) == train.run_name(args)
    assert [m for m in METHODS if settled(tmp_path, f'--method={m}').center_every] == ['mu_centering']


def test_dtype_is_what_the_machine_has_units_for_and_only_rounded_changes_it(tmp_path, monkeypatch):
    def on(device, *flags, **units):
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: units)
        args = settled(tmp_path, f'--device={device}', *flags)
        return args.dtype, args.logits_dtype
    low, fp32, emulated = ('bfloat16', 'bfloat16'), ('float32', 'float32'), ('float32', 'bfloat16')
    for device, units in (('cuda', {}), ('cpu', {'amx_bf16': True}),
                          ('cpu', {'avx512_bf16': True, 'amx_bf16': False})):
        assert on(device, **units) == on(device, '--logits_dtype=bfloat16', **units) == low
        assert on(device, '--logits_dtype=float32', **units) == ('bfloat16', 'float32')
        assert on(device, '--dtype=float32', **units) == fp32
        assert on(device, '--rounded=none', **units) == emulated
    assert on('cpu', avx512_f=True) == on('cpu', amx_bf16=False) == fp32
    assert on('cpu', '--logits_dtype=bfloat16') == emulated
    assert on('cpu', '--dtype=bfloat16') == low


def test_batch_order_is_pinned():
    """Values of the frozen RandomState stream: were they to change, old runs could not be resumed."""
    assert data.batch_windows(1, 0, 5, 1000).tolist() == [775, 813, 549, 55, 416]
    assert data.batch_windows(1, 300, 5, 1000).tolist() == [897, 578, 641, 935, 253]
    assert data.batch_windows(2**32 - 1, 7, 5, 10).tolist() == [1, 7, 8, 0, 3]


def test_every_epoch_visits_every_window_once():
    rng = np.random.RandomState(0)
    for _ in range(50):
        seed, n, batch_size = (int(rng.randint(1, high)) for high in (2**31, 60, 20))
        order = np.concatenate([data.batch_windows(seed, step, batch_size, n) for step in range(3 * n)])
        assert (np.sort(order.reshape(-1, n)) == np.arange(n)).all()


@pytest.mark.parametrize('center_every', [0, 1])
@pytest.mark.parametrize('method', METHODS)
def test_adam_makes_no_step_once_a_gradient_is_not_finite(method, center_every):
    """
    Nor once the gradients are finite again, be it the first step or a later one. Decay and centering go on
    until the host sees it, which leaves the weights finite.
    """
    for bad in (1, 3):
        gpt = tiny_gpt(method)
        train.shift_mean(gpt.E, 10, seed=1)
        steps = train_steps(gpt, method, 5, center_every=center_every)
        for step in range(1, 6):
            before, scale = weights(gpt), math.nan if step == bad else 1
            hook = gpt.wte.weight.register_hook(lambda gradient, scale=scale: gradient * scale)
            next(steps)
            hook.remove()
            after = weights(gpt)
            E, its_E = before.pop('lm_head.weight'), after.pop('lm_head.weight')
            if step >= bad:
                assert_same(after, before)
                E = 0.7 * E if method == 'weight_decay' else E
                E = E - E.mean(dim=0) if center_every else E
                if method not in ON_WEIGHTS or method in paper.NAMES:  # a fork's may do what it likes to E
                    close(its_E, E, rtol=1e-14, atol=1e-14)
                assert torch.isfinite(its_E).all()
            assert step >= bad or not torch.equal(its_E, E)


def test_a_diverged_E_raises_nothing_and_is_seen_by_its_gradient():
    """spectrum_control takes eigenvalues, which LAPACK refuses to find for what is not finite."""
    huge = torch.full((90, 8), 1e30, requires_grad=True)
    penalty = embeddings_to_loss(huge, GPTConfig(head_mode='spectrum_control', lam=1.0))
    assert not torch.isfinite(torch.autograd.grad(penalty, huge)[0]).all()


@pytest.mark.parametrize('method', METHODS)
def test_a_step_does_not_depend_on_how_its_batch_is_cut_and_a_regulariser_counts_once(method):
    results = []
    for micro_batches in (1, 4):
        gpt = tiny_gpt(method)
        results.append((list(train_steps(gpt, method, 3, micro_batches=micro_batches)), weights(gpt)))
    close(*results, rtol=1e-9, atol=1e-11)
    with torch.no_grad():  # no penalty is part of the loss that is logged
        close(results[0][0][0][0]['loss'], tiny_gpt(method)(*token_batch(1))[1]['loss'])
    regularised = METHODS[method] is not None and method in HEAD_MODES
    assert all((stats['reg'] != 0).all() == regularised for stats, _ in results[0][0])


@both_heads
@pytest.mark.parametrize('method, clip', [('baseline', 0.0), ('mu_loss', 0.05), ('mu_centering', 0.5)])
def test_a_run_is_adamw_of_appendix_a_on_the_pinned_batches(method, clip, head, tmp_path, monkeypatch):
    """train.main against a training written out: batches, loss, gradient clipping, Adam, schedule, method."""
    tokens = np.cumsum(np.random.RandomState(0).randint(0, 3, 2000)) % 60
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / f'x_{split}_000000.bin'), tokens)
    write_json(str(tmp_path / 'meta.json'), {'vocab_size': 60})
    flags = dict(data=tmp_path, out=tmp_path / 'run', dtype='float64', device='cpu', seed=5, grad_clip=clip,
                 n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16, lr=0.03, min_lr=1e-3, warmup=2,
                 steps=8, batch_size=4, micro_batch_size=2, eval_tokens=64, test_tokens=64, method=method,
                 **({'lam': 0.3} if method == 'mu_loss' else {}))
    monkeypatch.setattr(train, 'chunked_head', head)
    train.main([f'--{name}={value}' for name, value in flags.items()])

    gpt = tiny_gpt(seed=5)
    moments = {p: (0, 0) for p in gpt.parameters()}
    rates = [0.01, 0.02, *(1e-3 + 0.029 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(6))]
    for t, lr in enumerate(rates, 1):
        starts = 16 * data.batch_windows(5, t - 1, 4, (len(tokens) - 1) // 16)
        windows = torch.from_numpy(np.stack([tokens[start:start + 17] for start in starts]))
        h, targets = gpt.hidden(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
        gradients = torch.autograd.grad(sum(equations(method, h, gpt.E, targets, 0.3, 0)), list(moments))
        norm = sum(g.square().sum() for g in gradients).sqrt()
        scale = clip / (norm + 1e-6) if clip else 1  # the 1e-6 is PyTorch's
        assert scale <= 1
        with torch.no_grad():
            for p, g in zip(moments, gradients, strict=True):
                m, v = moments[p]
                m, v = moments[p] = 0.9 * m + 0.1 * scale * g, 0.95 * v + 0.05 * (scale * g) ** 2
                p -= lr * m / (1 - 0.9 ** t) / ((v / (1 - 0.95 ** t)).sqrt() + 1e-8)
            if method == 'mu_centering':
                gpt.E.sub_(gpt.E.mean(dim=0))
    found = torch.load(tmp_path / 'run' / 'model.pt', weights_only=True)['model']
    close(found, dict(gpt.state_dict()), rtol=0, atol=1e-9)
