"""
The head, plain and in chunks: what is rounded where, the compiler, memory. A GPU has other products and
another compiler: if there is one, what it rounds in the head of the paper's runs.
"""

import pytest
import torch

from model import METHODS, GPTConfig, head_loss
from small_runs import assert_same
from test_facts import both_heads, close, generator, of_logits
from test_model import BF16_UNIT, on_device

ON_GPU = [('baseline', 'cuda')] if torch.cuda.is_available() else []


@both_heads
@pytest.mark.parametrize('method, device', [*((method, 'cpu') for method in METHODS), *ON_GPU])
def test_a_head_in_bf16_is_exact_up_to_its_roundings(method, device, head, monkeypatch):
    """
    bf16 logits, plain or in chunks of one position, against float64. h and E have few digits, so that the
    logits and their gradient D, each rounded once, are known up to the digits of fp32. dL/dh = D E is rounded
    once more; so is dL/dE = D^T h, but its chunks are exact for h of 1 and -1, and summed in fp32.
    """
    _, device = on_device(f'--device={device}')
    n = 128
    V, H = (512, 32) if device.type == 'cpu' else (50304, 224)
    cap = 10 if method == 'soft_capping' else None
    config = GPTConfig(head_mode=method, lam=0.01, cap=cap, logits_dtype='bfloat16')
    g = generator(0)
    h = (2.0 * torch.randint(0, 2, (n, H), generator=g) - 1).to(device).requires_grad_()
    E = (2 + torch.randint(-3, 4, (V, H), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    total, stats = head(h, E, targets, config)
    dh, dE = torch.autograd.grad(total, (h, E))
    more_digits = 1 + 2.0 ** -11  # which bf16 cannot hold
    assert_same(head(h.detach() * more_digits, E * more_digits, targets, config)[1], stats)

    h, E = h.detach().double(), E.detach().double()
    in_fp32 = GPTConfig(**{**vars(config), 'logits_dtype': 'float32'})
    loss, expected, D = of_logits((h @ E.T).bfloat16().float(), targets, in_fp32)
    close((total, stats), (loss, expected), rtol=1e-5, atol=1e-5)
    low, D, high = ((D.double() * x).bfloat16().double() for x in (1 - 2.0 ** -18, 1, 1 + 2.0 ** -18))
    tips = (high - low).abs()  # where the digits of fp32 decide which bf16 number it is
    once = BF16_UNIT if head is head_loss else 0
    for gradient, X, tip, Y, unit in ((dh, D, tips, E, BF16_UNIT), (dE, D.T, tips.T, h, once)):
        assert gradient.dtype == torch.float32 and gradient.norm() > 1e-4
        bound = unit * (X @ Y).abs() + (n * 2.0 ** -24 * X.abs() + tip) @ Y.abs()
        assert ((gradient - X @ Y).abs() <= bound).all()


@pytest.mark.parametrize('method, device', [
    *((method, 'cpu') for method in ('baseline', 'soft_capping', 'z_loss')), *ON_GPU])
def test_compiling_keeps_every_rounding_and_adds_none(method, device):
    """At a mean logit of 160 bf16 has whole numbers alone, and a rounding that is fused away shows."""
    torch._dynamo.reset()  # or it would stop compiling, and say nothing, after eight variants
    _, device = on_device(f'--device={device}')
    n, V = (64, 500) if device.type == 'cpu' else (512, 50304)
    g = generator(0)
    h = (1 + torch.randn(n, 32, generator=g) / 20).to(device).requires_grad_()
    E = (5 + torch.randn(V, 32, generator=g) / 2).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    results = []
    for dtype, compile in (('float32', False), ('bfloat16', False), ('bfloat16', True)):
        cap = 300.0 if method == 'soft_capping' else None
        config = GPTConfig(head_mode=method, lam=1e-4, cap=cap, logits_dtype=dtype)
        head = torch.compile(head_loss, dynamic=False) if compile else head_loss
        total, stats = head(h, E, targets, config)
        with torch.no_grad():
            _, in_evaluation = head(h, E, targets, config)
        results.append((stats, in_evaluation, torch.autograd.grad(total, (h, E))))
    (exact, _, _), (eager, eager_too, gradients), (compiled, compiled_too, compiled_gradients) = results
    assert exact['logit_mean'].min() > 120 and (exact['loss'] - eager['loss']).abs().mean() > 0.05
    close((compiled, compiled_too), (eager, eager_too), rtol=1e-5, atol=1e-4)
    for gradient, right in zip(compiled_gradients, gradients, strict=True):
        assert (gradient - right).norm() <= 1e-3 * right.norm()  # fp32 may tip single values in bf16
