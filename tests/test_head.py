"""The head, also on a GPU if there is one: what it rounds, plain and compiled, what it keeps for backward."""
import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import train
from model import METHODS, GPTConfig
from small_runs import assert_same, float64_model, state_of
from test_facts import close, generator, head, of_logits, tiny_gpt, token_batch
from test_model import BF16_UNIT

ON_GPU = [('baseline', 'cuda')] if torch.cuda.is_available() else []


@pytest.mark.parametrize('device', ['cpu', *(device for _, device in ON_GPU)])
@pytest.mark.parametrize('offset', [0, 331, 12_000, 1e5, -12_000])
def test_offset(offset, device):
    """An offset of all logits costs no digit: loss and gradient are float64's of the same logits."""
    g = generator(0)
    logits = (3 * torch.randn(50, 500, generator=g) + offset).to(device)
    targets = torch.randint(500, (50,), generator=g).to(device)
    for method in ('baseline', 'z_loss'):
        config = GPTConfig(head_mode=method, lam=1e-3)
        _, stats, gradient = of_logits(logits, targets, config)
        _, exact, exact_gradient = of_logits(logits.double(), targets, config)
        close(stats['loss'].double(), exact['loss'], rtol=1e-6, atol=1e-6)
        close(stats['reg'].double(), exact['reg'], rtol=1e-6, atol=0)
        assert (gradient - exact_gradient).norm() <= 2.0 ** -22 * exact_gradient.norm()


@pytest.mark.parametrize('method, device', [
    *((method, 'cpu') for method in METHODS if method != 'centered_head'), *ON_GPU])
def test_bf16_head(method, device):
    """It is float64's, if bf16 rounds the logits and their gradient D once, and once more D E and D^T h."""
    n, V, H = (128, 512, 32) if device == 'cpu' else (128, 50304, 224)
    cap = 10 if method == 'soft_capping' else None
    config = GPTConfig(head_mode=method, lam=0.01, cap=cap, logits_dtype='bfloat16')
    g = generator(0)  # h and E have few digits, so that the logits and D are known up to those of fp32
    h = (2.0 * torch.randint(0, 2, (n, H), generator=g) - 1).to(device).requires_grad_()
    E = (2 + torch.randint(-3, 4, (V, H), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    total, stats = head(h, E, targets, config)
    dh, dE = torch.autograd.grad(n * total, (h, E))
    more_digits = 1 + 2.0 ** -11  # which bf16 cannot hold
    assert_same(head(h.detach() * more_digits, E * more_digits, targets, config)[1], stats)

    h, E = h.detach().double(), E.detach().double()
    in_fp32 = GPTConfig(**{**vars(config), 'logits_dtype': 'float32'})
    rounded = (h @ E.T).bfloat16().float().T.requires_grad_()  # the embeddings, where h are unit vectors
    loss, expected = head(torch.eye(n, device=device), rounded, targets, in_fp32)
    D = torch.autograd.grad(n * loss, rounded)[0].T
    close((total, stats), (loss, expected), rtol=1e-5, atol=1e-5)
    low, D, high = ((D.double() * x).bfloat16().double() for x in (1 - 2.0 ** -18, 1, 1 + 2.0 ** -18))
    tips = (high - low).abs()  # where the digits of fp32 decide which bf16 number it is
    for gradient, X, tip, Y in ((dh, D, tips, E), (dE, D.T, tips.T, h)):
        assert gradient.dtype == torch.float32 and gradient.norm() > 1e-4
        bound = BF16_UNIT * (X @ Y).abs() + (n * 2.0 ** -24 * X.abs() + tip) @ Y.abs()
        assert ((gradient - X @ Y).abs() <= bound).all()


def test_centered_head():
    """With a planted vector of norm 331 h's gradient is right, which the baseline's rounding turns."""
    g = generator(0)
    h, vector = torch.randn(200, 32, generator=g).requires_grad_(), torch.randn(32, generator=g)
    E = torch.randn(500, 32, generator=g) / 6 + 331 * vector / vector.norm()
    targets, gradients = torch.randint(500, (200,), generator=g), []
    for method, dtype in (('baseline', 'float64'), ('baseline', 'bfloat16'), ('centered_head', 'bfloat16')):
        objective, stats = head(h, E, targets, GPTConfig(head_mode=method, logits_dtype=dtype))
        gradients += torch.autograd.grad(objective, h)
    exact, baseline, centered = gradients
    assert stats['logit_absmax'].max() < 10
    assert (centered - exact).norm() < 4 * BF16_UNIT * exact.norm() < 0.1 * (baseline - exact).norm()


@pytest.mark.parametrize('method, device', [
    *((method, 'cpu') for method in ('soft_capping', 'norm_softmax')), *ON_GPU])
def test_compiled_model(method, device):
    """It rounds as the plain one. Of N x V one tensor is kept for the gradient, the logits in bf16."""
    torch._dynamo.reset()  # or it would stop compiling, and say nothing, after eight variants
    V = 500 if device == 'cpu' else 50304
    tokens, targets = (x.to(device) for x in token_batch(0))
    results = []
    for dtype, compiled in (('float32', False), ('bfloat16', False), ('bfloat16', True)):
        gpt = tiny_gpt(method, n_layer=0, vocab_size=V, cap=300.0 if method == 'soft_capping' else None,
                       lam=1e-4, dtype='float32', logits_dtype=dtype).to(device)
        with torch.no_grad():
            gpt.wte.weight.add_(torch.randn(16, generator=generator(0)).to(device))  # all h are alike
            # at this mean logit, 150, bf16 has whole numbers alone: a rounding that is fused away shows
            gpt.E.mul_(500 ** 0.5 / 3).add_(10 * gpt.hidden(tokens).mean(dim=(0, 1)))
        run = torch.compile(gpt, dynamic=False) if compiled else gpt
        kept = []
        with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # noqa: B023
            objective, stats = run(tokens, targets)
        results.append((stats, torch.autograd.grad(objective, (gpt.E, gpt.wte.weight))))
    (exact, in_fp32), (plain, in_bf16), (compiled, gradients) = results
    assert (exact['loss'] - plain['loss']).abs().mean() > 0.02
    close(compiled, plain, rtol=1e-5, atol=1e-4)
    for gradient, right, unrounded in zip(gradients, in_bf16, in_fp32, strict=True):
        assert (gradient - right).norm() <= 0.1 * (unrounded - right).norm()  # fp32 may tip single values
    assert [x.dtype for x in kept if x.numel() == targets.numel() * V] == [torch.bfloat16]


def test_compiled_run(trained, monkeypatch):
    """In float64 it is the eager one, in training and in evaluation."""
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    monkeypatch.setattr(train, 'make_model', float64_model)
    flags = ('--method=mu_loss', '--weight_tying', '--steps=4', '--keep_every=4')
    compiled, eager = (state_of(trained(*given, *flags)) for given in (('compiled', '--compile'), ('eager',)))
    close(compiled, eager, rtol=1e-10, atol=1e-12)
