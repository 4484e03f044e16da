"""The head, also on a GPU if there is one: what it rounds, plain and compiled, what it keeps for backward."""
import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import train
from model import GPTConfig
from small_runs import float64_model, state_of
from test_facts import close, generator, head, of_logits, tiny_gpt, token_batch

ON_GPU = [('baseline', 'cuda')] if torch.cuda.is_available() else []


@pytest.mark.parametrize('device', ['cpu', *(device for _, device in ON_GPU)])
@pytest.mark.parametrize('offset', [0, 1e5, -12_000])
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
    ('baseline', 'cpu'), ('z_loss', 'cpu'), ('soft_capping', 'cpu'), ('norm_softmax', 'cpu'), *ON_GPU])
def test_bf16_head(method, device):
    """bf16 rounds the logits and their gradient D once, and once more D E and D^T h; all else is in fp32."""
    n, V, H = (128, 512, 32) if device == 'cpu' else (128, 50304, 224)
    config = GPTConfig(head_mode=method, lam=0.01, cap=10 if method == 'soft_capping' else None,
                       logits_dtype='bfloat16')
    g = generator(0)  # h and E have few digits: their products are exact
    h = (2.0 * torch.randint(0, 2, (n, H), generator=g) - 1).to(device).requires_grad_()
    E = (2 + torch.randint(-3, 4, (V, H), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)
    total, stats = head(h, E, targets, config)
    gradients = torch.autograd.grad(n * total, (h, E))

    # the same in fp32, of the rounded logits: they are the embeddings, where h are unit vectors
    h, E = h.detach().double(), E.detach().double()
    config.logits_dtype = 'float32'
    rounded = (h @ E.T).bfloat16().float().T.requires_grad_()
    expected = head(torch.eye(n, device=device), rounded, targets, config)
    close((total, stats), expected, rtol=1e-5, atol=1e-5)
    D = torch.autograd.grad(n * expected[0], rounded)[0].T.bfloat16().double()
    for gradient, right in zip(gradients, (D @ E, D.T @ h), strict=True):
        equal = gradient == right.bfloat16().float()
        assert equal.float().mean() > 0.9  # not all, as the last digits of fp32 may tip one over


def test_centered_head():
    """With a planted vector of norm 331 it loses no digit, as E - mu is in fp32; the baseline does."""
    g = generator(0)
    h = torch.randn(200, 32, generator=g)
    E = torch.randn(500, 32, generator=g) / 6 + 331 * 32 ** -0.5
    targets = torch.randint(500, (200,), generator=g)

    def loss(method, dtype):
        _, stats = head(h, E, targets, GPTConfig(head_mode=method, logits_dtype=dtype))
        return stats['loss'].mean().item()

    exact = loss('baseline', 'float64')
    assert abs(loss('centered_head', 'bfloat16') - exact) < 1e-3
    assert abs(loss('baseline', 'bfloat16') - exact) > 0.1


def forward_and_backward(model, gpt, tokens, targets):
    """The statistics, the gradients, and the tensors that are kept for them."""
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        objective, stats = model(tokens, targets)
    return stats, torch.autograd.grad(objective, (gpt.E, gpt.wte.weight)), kept


@pytest.mark.parametrize('method, device', [('baseline', 'cpu'), ('norm_softmax', 'cpu'), *ON_GPU])
def test_compiled_model(method, device):
    """It rounds as the plain one. Of N x V one tensor is kept for the gradient, the logits in bf16."""
    torch._dynamo.reset()  # or it would stop compiling, and say nothing, after eight variants
    V = 500 if device == 'cpu' else 50304
    tokens, targets = (x.to(device) for x in token_batch(0))
    gpt = tiny_gpt(method, n_layer=0, vocab_size=V, dtype='float32', logits_dtype='float32').to(device)
    with torch.no_grad():
        gpt.wte.weight.add_(torch.randn(16, generator=generator(0)).to(device))  # all h are alike
        # at this mean logit, 150, bf16 has whole numbers alone: a rounding that is fused away shows
        gpt.E.mul_(500 ** 0.5 / 3).add_(10 * gpt.hidden(tokens).mean(dim=(0, 1)))

    exact, exact_gradients, _ = forward_and_backward(gpt, gpt, tokens, targets)
    gpt.config.logits_dtype = 'bfloat16'
    plain, plain_gradients, _ = forward_and_backward(gpt, gpt, tokens, targets)
    compiled = torch.compile(gpt, dynamic=False)
    stats, gradients, kept = forward_and_backward(compiled, gpt, tokens, targets)
    assert (exact['loss'] - plain['loss']).abs().mean() > 0.02
    close(stats, plain, rtol=1e-5, atol=1e-4)
    for ours, rounded, unrounded in zip(gradients, plain_gradients, exact_gradients, strict=True):
        assert (ours - rounded).norm() <= 0.1 * (unrounded - rounded).norm()  # fp32 may tip single values
    assert [x.dtype for x in kept if x.numel() == targets.numel() * V] == [torch.bfloat16]


def test_compiled_run(trained, monkeypatch):
    """In float64 it is the eager one, in training and in evaluation."""
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    monkeypatch.setattr(train, 'make_model', float64_model)
    flags = ('--method=mu_loss', '--weight_tying', '--steps=4', '--keep_every=4')
    compiled, eager = (state_of(trained(*given, *flags)) for given in (('compiled', '--compile'), ('eager',)))
    close(compiled, eager, rtol=1e-10, atol=1e-12)
