"""The two heads: what is rounded where, whether compiled or not; chunks; the statistics of each position."""
import contextlib

import pytest
import torch
import torch.nn.functional as F

from model import SUBSETS, GPTConfig, logits_to_loss
from oec import head as head_py
from oec.common import UserError
from oec.head import compiled_head, loss_and_grad
from test_facts import HEAD_MODES, both_heads, chunks_of, close, config_64, generator, random_heads

BF16_UNIT = 2.0 ** -8  # largest relative error of one rounding to bf16 (8 significant bits)


@both_heads
@pytest.mark.parametrize('rounded', SUBSETS)
@pytest.mark.parametrize('method', ['baseline', 'soft_capping'])
def test_each_part_is_rounded_where_it_is_named_and_only_there(method, rounded, head, monkeypatch):
    """Products in float64, so that the parts rounded to bf16 are known to all digits."""
    monkeypatch.setattr(head_py, 'n_chunks', chunks_of(7))

    def low(part, x):
        return x.bfloat16().double() if part in rounded.split(',') else x
    config = config_64(method, cap=9.0, logits_dtype='bfloat16', rounded=rounded)
    for h, E, targets in random_heads(20):
        h_low, E_low = low('operands', h), low('operands', E)
        logits = low('logits', h_low @ E_low.T)
        tanh = torch.tanh(logits / 9)
        capped = low('logits', 9 * tanh) if method == 'soft_capping' else logits
        grad = low('gradient', capped.softmax(dim=1) - F.one_hot(targets, len(E)))
        if method == 'soft_capping':  # of the capped logits, then of those before
            grad = low('gradient', grad * (1 - tanh ** 2))
        expected = {'loss': F.cross_entropy(capped, targets, reduction='none'),
                    'logit_mean': capped.mean(dim=1), 'logit_std': capped.std(dim=1, correction=0),
                    'logit_absmax': capped.abs().amax(dim=1)}
        loss, stats = head(h.requires_grad_(), E.requires_grad_(), targets, config)
        with torch.no_grad():
            evaluated = head(h, E, targets, config)
        for total, of_each in ((loss.detach(), stats), evaluated):
            close(total, expected['loss'].sum(), rtol=1e-10, atol=1e-10)
            close({name: of_each[name] for name in expected}, expected, rtol=1e-9, atol=1e-9)
        exact = grad @ E_low, grad.T @ h_low
        for found, expected in zip(torch.autograd.grad(loss, (h, E)), exact, strict=True):
            close(found, expected, rtol=1e-9, atol=1e-10 * max(1, expected.abs().max().item()))


def assert_exact_up_to_bf16(head, config, n, device):
    """
    A head with bf16 products and logits, of n positions, against float64. h and E - mu have few digits, so
    that the logits are exact in any order of summation, and their gradient D is known up to the digits of
    fp32, which may tip it to the next bf16 number. Besides, the products may be rounded once: so the gradient
    of h is off by at most 3 BF16_UNIT |D| |E|, that of E by 3 BF16_UNIT |D|^T |h|.
    """
    g = generator(0)
    half = torch.randint(-3, 4, (config.vocab_size // 2, config.n_embd), generator=g) / 4
    E = (0.5 + torch.cat((half, -half))).to(device).requires_grad_()
    h = (torch.randint(-3, 4, (n, config.n_embd), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(config.vocab_size, (n,), generator=g).to(device)
    total, stats = head(h, E, targets, config)
    gradients = torch.autograd.grad(total, (h, E))
    if device == 'cpu' and config.head_mode != 'zero_sum':  # the product was one of bf16 units, not of fp32
        assert torch.equal(gradients[0], gradients[0].bfloat16().float())

    h, E = h.detach().double(), E.detach().double()
    mu, E = E.mean(dim=0), E - (E.mean(dim=0) if config.head_mode == 'centered_head' else 0)
    logits = (h @ E.T).bfloat16().float().requires_grad_()  # in fp32: they should be capped there
    loss, expected = logits_to_loss(logits, targets, config)
    D = torch.autograd.grad(loss, logits)[0].bfloat16().double()
    close(total, loss, rtol=1e-5, atol=0)
    close({name: stats[name] for name in expected}, expected, rtol=1e-4, atol=1e-3)
    exact, bounds = [D @ E, D.T @ h], [D.abs() @ E.abs(), D.T.abs() @ h.abs()]
    if config.head_mode == 'zero_sum':
        exact[0] -= D.sum(dim=1, keepdim=True) * mu
        bounds[0] += D.abs().sum(dim=1, keepdim=True) * mu.abs()
    for found, right, bound in zip(gradients, exact, bounds, strict=True):
        assert ((found - right).abs() <= 3 * BF16_UNIT * bound + 1e-7).all() and found.norm() > 1e-4


@both_heads
@pytest.mark.parametrize('method', HEAD_MODES)
def test_a_head_in_bf16_is_exact_up_to_its_roundings(method, head, monkeypatch):
    monkeypatch.setattr(head_py, 'n_chunks', chunks_of(50))
    config = GPTConfig(head_mode=method, n_embd=32, vocab_size=512, lam=0.01, cap=10.0, dtype='bfloat16',
                       logits_dtype='bfloat16')
    assert_exact_up_to_bf16(head, config, 128, 'cpu')


@both_heads
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_the_gradient_of_logits_in_fp32_is_not_rounded(dtype, head):
    """Whatever the products are in. Those with h and E may be rounded once, beside the digits of fp32."""
    g, config = generator(0), GPTConfig(dtype=dtype)
    h, E = (torch.randn(n, 16, generator=g).requires_grad_() for n in (64, 100))
    targets = torch.randint(100, (64,), generator=g)
    found = torch.autograd.grad(head(h, E, targets, config)[0], (h, E))
    h, E = (x.detach().to(getattr(torch, dtype)).double() for x in (h, E))
    D = (h @ E.T).softmax(dim=1) - F.one_hot(targets, len(E))
    for gradient, right, bound in zip(found, (D @ E, D.T @ h), (D.abs() @ E.abs(), D.T.abs() @ h.abs()),
                                      strict=True):
        once = BF16_UNIT * right.abs() if dtype == 'bfloat16' else 0
        assert ((gradient - right).abs() <= once + 1e-5 * bound).all()


def assert_compiling_keeps_every_rounding(head, config, n, device):
    """A compiler that fuses a cast down with the cast up again would undo what the paper studies."""
    g, V = generator(0), config.vocab_size
    logits = (10 * torch.randn(n, V, generator=g)).to(device, getattr(torch, config.dtype))
    targets = torch.randint(V, (n,), generator=g).to(device)
    torch.compiler.reset()  # or it would stop compiling, and say nothing, after eight of these
    compiled = head.keywords['per_chunk']
    for with_stats in (False, True):
        (expected, eager, _), (found, loss, _) = (f(logits.clone(), targets, config, with_stats)
                                                  for f in (loss_and_grad, compiled))
        close(loss, eager, rtol=1e-5, atol=0)
        # fp32 may tip a value to the next bf16 number here and there; a missing rounding would change most
        expected, found = expected.float(), found.float()
        assert ((found - expected).abs() > 1e-5 * expected.abs() + 1e-30).float().mean() < 0.01
        assert torch.equal(found, found.bfloat16().float()) == ('gradient' in config.rounded.split(','))


@pytest.mark.skipif(torch.__version__ < '2.13', reason='older CPU compilers drop casts, and are refused')
@pytest.mark.parametrize('method, rounded', [
    *(('baseline', rounded) for rounded in ('none', 'logits', 'gradient')),
    *((method, 'logits,gradient') for method in ('baseline', 'soft_capping', 'z_loss', 'norm_softmax'))])
def test_compiling_keeps_every_rounding_and_adds_none(method, rounded):
    config = GPTConfig(head_mode=method, vocab_size=200, logits_dtype='bfloat16', lam=1e-4, rounded=rounded)
    assert_compiling_keeps_every_rounding(compiled_head(config, torch.device('cpu')), config, 16, 'cpu')


@pytest.mark.parametrize('method, dtype, logits_dtype, kept', [
    ('baseline', 'float32', 'float32', True), ('baseline', 'bfloat16', 'bfloat16', True),
    ('baseline', 'float32', 'bfloat16', False), ('soft_capping', 'bfloat16', 'bfloat16', False)])
def test_a_compiler_that_drops_a_rounding_is_refused(method, dtype, logits_dtype, kept, monkeypatch):
    """Before torch 2.13 it drops those of fp32 numbers that stay fp32: seen on a CPU and on a GPU."""
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.11.0+cu128'))
    config = GPTConfig(head_mode=method, dtype=dtype, logits_dtype=logits_dtype)
    with contextlib.nullcontext() if kept else pytest.raises(UserError, match='--compile in torch 2.11'):
        compiled_head(config, torch.device('cpu'))
