"""The two heads: what is rounded where, whether compiled or not; chunks; the statistics of each position."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import head as head_py
from common import UserError
from head import add_product, chunked_head, compiled_head
from model import SUBSETS, GPTConfig, logits_to_loss, plain_head
from test_facts import HEAD_MODES, both_heads, chunks_of, close, config_64, generator, random_heads

BF16_UNIT = 2.0 ** -9  # largest relative error of one rounding to bf16 (8 significant bits)


@both_heads
@pytest.mark.parametrize('rounded', SUBSETS)
@pytest.mark.parametrize('method', ['baseline', 'soft_capping'])
def test_each_part_is_rounded_where_it_is_named_and_only_there(method, rounded, head, monkeypatch):
    """Products in float64, so that the parts rounded to bf16 are known to all digits."""
    monkeypatch.setattr(head_py, 'n_chunks', chunks_of(7))

    def low(part, x):
        return x.bfloat16().double() if part in rounded else x
    config = config_64(method, cap=9.0, logits_dtype='bfloat16', rounded=rounded)
    for h, E, targets in random_heads(20):
        h_low, E_low = low('operands', h), low('operands', E)
        logits = low('logits', h_low @ E_low.T)
        tanh = torch.tanh(logits / 9)
        capped = low('logits', 9 * tanh) if method == 'soft_capping' else logits
        grad = low('gradient', capped.softmax(dim=1) - F.one_hot(targets, len(E)))
        if method == 'soft_capping':  # of the capped logits, then of those before
            grad = low('gradient', grad * (1 - tanh ** 2))
        loss, _ = head(h.requires_grad_(), E.requires_grad_(), targets, config)
        with torch.no_grad():
            in_evaluation, _ = head(h, E, targets, config)
        for found in (loss.detach(), in_evaluation):
            close(found, F.cross_entropy(capped, targets, reduction='sum'), rtol=1e-10, atol=1e-10)
        exact = grad @ E_low, grad.T @ h_low
        for found, expected in zip(torch.autograd.grad(loss, (h, E)), exact, strict=True):
            close(found, expected, rtol=1e-9, atol=1e-10 * max(1, expected.abs().max().item()))


@pytest.mark.parametrize('method', HEAD_MODES)
def test_heads_agree_within_bf16_rounding(method, monkeypatch):
    """
    Each head rounds the logit gradient D to bf16, the plain one D E and D^T h too: the gradient of h is off
    by at most 2 BF16_UNIT |D| |E|, that of E by 2 BF16_UNIT |D|^T |h|.
    """
    monkeypatch.setattr(head_py, 'n_chunks', chunks_of(50))
    g = generator(1)
    h = torch.randn(128, 32, generator=g).bfloat16().float().requires_grad_()
    E = (torch.randn(500, 32, generator=g) + 0.5).bfloat16().float().requires_grad_()
    targets = torch.randint(500, (128,), generator=g)
    config = GPTConfig(head_mode=method, lam=0.01, cap=10.0, dtype='bfloat16', logits_dtype='bfloat16')
    (a, stats_a), (b, stats_b) = (head(h, E, targets, config) for head in (plain_head, chunked_head))
    close(a, b, rtol=1e-6, atol=0)
    close(stats_a, {name: stats_b[name] for name in stats_a}, rtol=1e-5, atol=1e-3)
    logits = (h @ E.T).bfloat16().detach().requires_grad_()
    D = torch.autograd.grad(logits_to_loss(logits, targets, config)[0], logits)[0].float().abs()
    plain, chunked = (torch.autograd.grad(loss, (h, E)) for loss in (a, b))
    for x, y, bound in zip(plain, chunked, (D @ E.abs(), D.T @ h.abs()), strict=True):
        assert ((x - y).abs() <= 4 * BF16_UNIT * bound + 1e-7).all() and x.norm() > 1e-2
        assert torch.equal(x, x.bfloat16().float()) and not torch.equal(y, y.bfloat16().float())


@both_heads
@pytest.mark.parametrize('dtype, logits_dtype, probability', [
    ('float32', 'float32', 0.142), ('float32', 'bfloat16', 0.091),
    ('bfloat16', 'bfloat16', 0.091), ('bfloat16', 'float32', 0.142)])
def test_the_example_of_the_introduction(dtype, logits_dtype, probability, head):
    """A logit of 128.5 among ten of 128 becomes 128 in bf16: the probability 0.142 becomes 0.091."""
    h, E = torch.tensor([[128.0, 1.0]]), torch.tensor([[1.0, 0.5]] + [[1.0, 0.0]] * 10)
    config, target = GPTConfig(dtype=dtype, logits_dtype=logits_dtype), torch.tensor([0])
    loss, _ = head(h.requires_grad_(), E, target, config)
    assert abs(math.exp(-loss.item()) - probability) < 5e-4


def test_capped_bf16_logits_are_rounded_once_more():
    g = generator(0)
    logits = (30 * torch.randn(64, 100, generator=g)).bfloat16()
    targets = torch.randint(100, (64,), generator=g)
    capped = (9 * torch.tanh(logits.float() / 9)).bfloat16()
    config = GPTConfig(head_mode='soft_capping', cap=9.0, logits_dtype='bfloat16')
    _, stats = logits_to_loss(logits, targets, config)
    expected = F.cross_entropy(capped.double(), targets, reduction='none')
    close(stats['loss'].double(), expected, rtol=1e-5, atol=1e-5)


@both_heads
def test_the_centered_head_feels_no_shift_under_any_rounding(head):
    """With whole numbers and 2^7 rows E - mu is exact, so the loss and both gradients are the same bits."""
    config = GPTConfig(head_mode='centered_head', dtype='float32', logits_dtype='bfloat16')
    for seed in range(10):
        g, results = generator(seed), []
        h, targets = torch.randn(50, 16, generator=g), torch.randint(128, (50,), generator=g)
        E, shift = (torch.randint(-9, 9, (n, 16), generator=g).float() for n in (128, 1))
        for E_ in (E, E + 1000 * shift):
            h_, E_ = h.clone().requires_grad_(), E_.clone().requires_grad_()
            loss, stats = head(h_, E_, targets, config)
            results.append([loss, *torch.autograd.grad(loss, (h_, E_)), *stats.values()])
        assert all(map(torch.equal, *results))


@pytest.mark.skipif(torch.__version__ < '2.13', reason='older CPU compilers drop casts, and are refused')
@pytest.mark.parametrize('method, rounded', [
    *(('baseline', rounded) for rounded in ('none', 'logits', 'gradient')),
    *((method, 'logits,gradient') for method in ('baseline', 'soft_capping', 'z_loss', 'norm_softmax'))])
def test_compiling_keeps_every_rounding_and_adds_none(method, rounded):
    """A compiler that fuses a cast down with the cast up again would undo what the paper studies."""
    g = generator(0)
    logits, targets = 30 * torch.randn(16, 200, generator=g), torch.randint(200, (16,), generator=g)
    if method == 'baseline':  # the example of the introduction among the rest
        logits[0], targets[0] = -1e4, 0
        logits[0, :11] = torch.tensor([128.5] + [128.0] * 10)
    config = GPTConfig(logits_dtype='bfloat16', head_mode=method, lam=1e-4, rounded=rounded)
    results = []
    for head in (chunked_head, compiled_head(config)):
        h = logits.clone().requires_grad_()
        loss, _ = head(h, torch.eye(200), targets, config)  # with e_i . h = h_i
        results.append((loss.detach(), *torch.autograd.grad(loss, h)))
    (eager, expected), (loss, found) = results
    close(loss, eager, rtol=1e-6, atol=0)
    # fp32 may tip a value over to the next bf16 number here and there; a missing rounding would change most
    assert ((expected - found).abs() > 1e-5 * expected.abs() + 1e-30).float().mean() < 0.01
    assert torch.equal(found, found.bfloat16().float()) == ('gradient' in rounded)
    if method == 'baseline':  # the gradient is p - 1, which may be rounded itself
        assert abs(1 + found[0, 0] - (0.091 if 'logits' in rounded else 0.142)) < BF16_UNIT


def test_a_compiler_that_drops_a_rounding_is_refused(monkeypatch):
    """Before torch 2.13 it drops those of fp32 numbers that stay fp32: seen on a CPU and on a GPU."""
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.11.0+cu128'))
    for method, dtype, logits_dtype in itertools.product(HEAD_MODES, *2 * [('float32', 'bfloat16')]):
        config = GPTConfig(head_mode=method, dtype=dtype, logits_dtype=logits_dtype)
        if logits_dtype == 'bfloat16' and (dtype == 'float32' or method == 'soft_capping'):
            with pytest.raises(UserError, match='--compile in torch 2.11'):
                compiled_head(config)
        else:
            compiled_head(config)


@pytest.mark.parametrize('low, wide', [('bfloat16', 'float32'), ('float32', 'float32')])
def test_products_of_narrow_numbers_are_summed_in_the_wide_dtype(low, wide):
    """1024 products of numbers with 8 bits: a bf16 sum, or a result rounded to bf16, would be off by 2^-9."""
    low, wide, g = getattr(torch, low), getattr(torch, wide), generator(0)
    a, b = (torch.randn(shape, generator=g).to(low) for shape in ((5, 1024), (1024, 7)))
    for beta in (0, 1):
        out = torch.randn(5, 7, generator=g).to(wide)
        expected = beta * out.double() + a.double() @ b.double()
        scale = a.double().abs() @ b.double().abs() + 1
        out[0, 0] = out[0, 0] if beta else math.nan  # memory that was not written yet
        add_product(out, a, b, beta)
        assert ((out - expected).abs() <= 1024 * torch.finfo(wide).eps / 2 * scale).all()


def test_a_gpu_has_chunks_that_fill_it_and_leave_most_of_its_memory(monkeypatch):
    class Tokens(list):
        device = torch.device('cuda')
    for gibibytes, chunks in ((8, 50), (24, 17), (80, 8), (141, 8)):
        memory = type('', (), {'total_memory': gibibytes * 2**30})
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda _, memory=memory: memory)
        n = head_py.n_chunks(Tokens(range(131_072)), range(50_304))
        largest = -(-131_072 // n)
        assert n == chunks and largest <= 16384 and largest * 50_304 * 2 <= gibibytes * 2**30 / 32


@both_heads
@pytest.mark.parametrize('method', ['baseline', 'z_loss', 'soft_capping'])
def test_statistics_of_each_position_are_their_definitions(method, head, monkeypatch):
    monkeypatch.setattr(head_py, 'n_chunks', chunks_of(7))
    for h, E, targets in random_heads(20):
        logits, log_Z = h @ E.T, torch.logsumexp(h @ E.T, dim=1)
        if method == 'soft_capping':
            logits = 9 * torch.tanh(logits / 9)
        bare = {'loss': F.cross_entropy(logits, targets, reduction='none'),
                'reg': 0.3 * log_Z ** 2 * (method == 'z_loss')}
        more = {'logit_mean': logits.mean(dim=1), 'logit_std': logits.std(dim=1, correction=0),
                'logit_absmax': logits.abs().amax(dim=1)}
        h.requires_grad_()
        for training, expected in itertools.product((True, False), (bare, bare | more)):
            with torch.set_grad_enabled(training):
                found = head(h, E, targets, config_64(method, lam=0.3, cap=9.0), expected is not bare)[1]
            close({name: found[name] for name in expected}, expected, rtol=1e-9, atol=1e-9)
            assert found.keys() - expected <= {'gradient_sum'}
