"""results/natural/arms.py: what each arm changes."""
from types import SimpleNamespace

import torch

import train
from model import GPT, GPTConfig, head_logits
from results.natural import arms

CONFIG = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=8)
ARGS = SimpleNamespace(method='baseline', lr=0.1, min_lr=0.1, warmup=0, steps=10, grad_clip=0)


def make():
    """A model, its optimizer and a batch."""
    torch.manual_seed(1)
    gpt = GPT(CONFIG)
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    tokens = torch.randint(64, (4, 9))
    return gpt, optimizer, [(tokens[:, :-1], tokens[:, 1:])]


def test_heads():
    """BF16's values or fp32's, and a gradient that is rounded to BF16 or exact."""
    torch.manual_seed(1)
    h = torch.randn(32, 16)
    E = torch.randn(64, 16)
    weights = torch.randn(32, 64)
    found = {}
    for head in (head_logits, arms.exact_gradient, arms.bf16_gradient, arms.random_scale):
        leaf = E.clone().requires_grad_()
        logits = head(h, leaf, CONFIG)
        found[head] = logits.detach(), torch.autograd.grad((weights * logits).sum(), leaf)[0]

    fp32, exact = found[head_logits]
    bf16 = (h.bfloat16() @ E.bfloat16().T).float()
    rounded = weights.bfloat16().float().T @ h
    assert not torch.equal(bf16, fp32)
    torch.testing.assert_close(found[arms.exact_gradient], (bf16, exact))
    torch.testing.assert_close(found[arms.bf16_gradient], (fp32, rounded))
    values, gradient = found[arms.random_scale]
    assert torch.equal(values, bf16)
    assert 0 < (gradient - exact).norm() < 2**-8 * exact.norm()


def test_momentum(monkeypatch):
    """E moves by η times the momentum, bias corrected; with one gradient that is the gradient."""
    gpt, optimizer, batch = make()
    before = gpt.E.detach().clone()
    objective, _ = gpt(*batch[0])
    gradient = torch.autograd.grad(objective, gpt.E)[0]
    args = SimpleNamespace(**{**vars(ARGS), 'method': 'coupled_adam'})
    monkeypatch.setattr(train, 'coupled_adam_step', arms.momentum_step)
    train.train_step(gpt, optimizer, batch, 1, args)
    torch.testing.assert_close(before - gpt.E.detach(), 0.1 * gradient, atol=1e-6, rtol=1e-4)


def test_center():
    """After a step the weighted mean of E is 0."""
    gpt, optimizer, batch = make()
    weights = torch.arange(64.0) / torch.arange(64.0).sum()
    arms.center(gpt, optimizer, weights)
    train.train_step(gpt, optimizer, batch, 1, ARGS)
    assert (weights @ gpt.E).abs().max() < 1e-6
    assert gpt.E.mean(dim=0).abs().max() > 1e-3


def test_slow_gain():
    """AdamW's first step moves each weight by its learning rate, and the gain by a hundredth."""
    gpt, optimizer, batch = make()
    arms.slow_down_gain(gpt, optimizer, 0.01)
    before = [p.detach().clone() for p in gpt.parameters()]
    train.train_step(gpt, optimizer, batch, 1, ARGS)
    for p, was in zip(gpt.parameters(), before, strict=True):
        largest = (p.detach() - was).abs().max().item()
        assert abs(largest - (0.001 if p is gpt.norm_f.weight else 0.1)) < 1e-4
