"""
The head: what is rounded where, plain and compiled, and what it keeps for the backward pass. A GPU has other
matmuls and another compiler: if there is one, what it rounds in the head of the paper's runs.
"""
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import model
from model import METHODS, GPTConfig, head_loss
from small_runs import assert_same
from test_facts import close, generator, of_logits, tiny_gpt, token_batch
from test_model import BF16_UNIT, on_device

ON_GPU = [('baseline', 'cuda')] if torch.cuda.is_available() else []


@pytest.mark.parametrize('method, device', [*((method, 'cpu') for method in METHODS), *ON_GPU])
def test_bf16_head(method, device):
    """
    It is exact up to its roundings: bf16 logits against float64. h and E have few digits, so that the logits
    and their gradient D, each rounded once, are known up to the digits of fp32. dL/dh = D E and dL/dE = D^T h
    are rounded once more.
    """
    on_device(f'--device={device}')
    n = 128
    V, H = (512, 32) if device == 'cpu' else (50304, 224)
    cap = 10 if method == 'soft_capping' else None
    config = GPTConfig(head_mode=method, lam=0.01, cap=cap, logits_dtype='bfloat16')
    g = generator(0)
    h = (2.0 * torch.randint(0, 2, (n, H), generator=g) - 1).to(device).requires_grad_()
    E = (2 + torch.randint(-3, 4, (V, H), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    total, stats = head_loss(h, E, targets, config)
    dh, dE = torch.autograd.grad(total, (h, E))
    more_digits = 1 + 2.0 ** -11  # which bf16 cannot hold
    assert_same(head_loss(h.detach() * more_digits, E * more_digits, targets, config)[1], stats)

    h, E = h.detach().double(), E.detach().double()
    in_fp32 = GPTConfig(**{**vars(config), 'logits_dtype': 'float32'})
    loss, expected, D = of_logits((h @ E.T).bfloat16().float(), targets, in_fp32)
    close((total, stats), (loss, expected), rtol=1e-5, atol=1e-5)
    low, D, high = ((D.double() * x).bfloat16().double() for x in (1 - 2.0 ** -18, 1, 1 + 2.0 ** -18))
    tips = (high - low).abs()  # where the digits of fp32 decide which bf16 number it is
    for gradient, X, tip, Y in ((dh, D, tips, E), (dE, D.T, tips.T, h)):
        assert gradient.dtype == torch.float32 and gradient.norm() > 1e-4
        bound = BF16_UNIT * (X @ Y).abs() + (n * 2.0 ** -24 * X.abs() + tip) @ Y.abs()
        assert ((gradient - X @ Y).abs() <= bound).all()


def kept_for_backward(call, n):
    """What call() returns, and the dtypes of the tensors of n elements that it keeps for the gradient."""
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        returned = call()
    return returned, [x.dtype for x in kept if x.numel() == n]


@pytest.mark.parametrize('method, device', [
    *((method, 'cpu') for method in ('soft_capping', 'z_loss', 'norm_softmax')), *ON_GPU])
def test_compiled_head(method, device):
    """
    Compiling keeps every rounding and adds none: at a mean logit of 160 bf16 has whole numbers alone, and a
    rounding that is fused away shows. One tensor of N x V is kept, in bf16.
    """
    torch._dynamo.reset()  # or it would stop compiling, and say nothing, after eight variants
    on_device(f'--device={device}')
    n, V = (64, 500) if device == 'cpu' else (512, 50304)
    g = generator(0)
    h = (1 + torch.randn(n, 32, generator=g) / 20).to(device).requires_grad_()
    E = (5 + torch.randn(V, 32, generator=g) / 2).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    results = []
    for dtype, compiled in (('float32', False), ('bfloat16', False), ('bfloat16', True)):
        cap = 300.0 if method == 'soft_capping' else None
        config = GPTConfig(head_mode=method, lam=1e-4, cap=cap, logits_dtype=dtype)
        head = torch.compile(head_loss, dynamic=False) if compiled else head_loss
        (total, stats), kept = kept_for_backward(lambda: head(h, E, targets, config), n * V)  # noqa: B023
        results.append((stats, torch.autograd.grad(total, (h, E))))
    (exact, _), (plain, gradients), (compiled, compiled_gradients) = results
    assert (exact['loss'] - plain['loss']).abs().mean() > 0.02
    close(compiled, plain, rtol=1e-5, atol=1e-4)
    for gradient, right in zip(compiled_gradients, gradients, strict=True):
        assert (gradient - right).norm() <= 1e-3 * right.norm()  # fp32 may tip single values in bf16
    assert kept == [torch.bfloat16]


def test_compiled_model():
    """Likewise, all that training compiles. The digits of fp32 may tip a hidden state of a few positions."""
    torch._dynamo.reset()
    tokens, targets = token_batch(0)
    losses = []
    for dtype, compiled in (('float32', False), ('bfloat16', False), ('bfloat16', True)):
        gpt = tiny_gpt('z_loss', dtype='float32', logits_dtype=dtype, vocab_size=500)
        with torch.no_grad():
            gpt.wte.weight.add_(torch.randn(16, generator=generator(0)))  # so that all h are alike
            gpt.E.mul_(8).add_(10 * gpt.hidden(tokens).mean(dim=(0, 1)))
        run = torch.compile(gpt, dynamic=False) if compiled else gpt
        (_, stats), kept = kept_for_backward(lambda: run(tokens, targets), 64 * 500)  # noqa: B023
        losses.append(stats['loss'])
    exact, plain, compiled = losses
    assert (exact - plain).abs().median() > 0.02
    assert ((compiled - plain).abs() > 1e-4).sum() <= 3 and stats['logit_mean'].min() > 120
    assert kept == [torch.bfloat16]


def test_what_a_fork_adds_to_the_head_trains(monkeypatch):
    """A bias of the logits: its gradient is the mean of softmax(l) - onehot(t)."""
    gpt = tiny_gpt()
    gpt.bias = torch.nn.Parameter(torch.randn(64, generator=generator(0), dtype=gpt.E.dtype))
    head_logits = model.head_logits
    monkeypatch.setattr(model, 'head_logits', lambda h, E, config: head_logits(h, E, config) + gpt.bias)
    tokens, targets = token_batch(0)
    gpt(tokens, targets)[0].backward()
    p = (gpt.hidden(tokens) @ gpt.E.T + gpt.bias).softmax(dim=-1)
    onehot = torch.nn.functional.one_hot(targets, 64)
    close(gpt.bias.grad, (p - onehot).flatten(0, 1).mean(dim=0), rtol=1e-12, atol=1e-15)
    close(gpt.logits(tokens).softmax(dim=-1), p, rtol=1e-12, atol=0)
