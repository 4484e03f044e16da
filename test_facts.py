"""
The paper's Facts, every method's mathematics, and the definitions that the numbers rest on; in float64 unless
rounding is the point.

Whoever adds a method adds its equation to `equations`. The tests that run over METHODS then hold both heads,
their gradients and the evaluation to it.
"""
import itertools
import math
import os
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import analyze
import data
import model
import tables
import train
from common import UserError, write_json
from model import (
    GPT,
    METHODS,
    SIZES,
    ChunkedHead,
    GPTConfig,
    embeddings_to_loss,
    logits_to_loss,
    loss_and_grad,
    plain_head,
)

F64 = torch.float64
BF16_UNIT = 2.0 ** -9  # largest relative error of one rounding to bf16 (8 significant bits)
close = torch.testing.assert_close


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(g, *shape):
    return torch.randn(*shape, generator=g, dtype=F64)


def config_64(method='baseline', **more):
    return GPTConfig(**{'method': method, 'dtype': 'float64', 'logits_dtype': 'float64', **more})


def random_heads(n=60):
    """
    (h (N, H), E (V, H), targets (N,)) of many shapes, the mean of E near 0 or far out; every other time the
    largest logit is 1e4 or more, every third time all targets are equal, every fifth time there is one token.
    """
    for seed in range(n):
        g = generator(seed)
        N, V, H = (int(torch.randint(2, high, (), generator=g)) for high in (40, 300, 33))
        h, E = normal(g, 1 if seed % 5 == 0 else N, H), normal(g, V, H)
        E += normal(g, H) * 10 ** float(torch.empty(()).uniform_(-2, 2, generator=g))
        if seed % 2 == 0:
            h *= max(1, 1e4 / (h @ E.T).abs().max())
        targets = torch.randint(V, (len(h),), generator=g)
        yield h, E, targets[:1].expand(len(h)) if seed % 3 == 0 else targets


def tiny_gpt(method='baseline', seed=0, **more):
    """A GPT of one layer, in float64 unless `more` says otherwise; `method` may end in +mu_centering."""
    torch.manual_seed(seed)
    shape = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16)
    config = config_64(model.base_method(method), **{'lam': 0.3, **shape, **more})
    return GPT(config).to(F64 if config.dtype == 'float64' else torch.float32)


def weights(gpt):
    return {name: p.detach().clone() for name, p in gpt.named_parameters()}


def token_batch(seed, n=4):
    """(tokens, targets), each (n, 16); half of the vocabulary never occurs."""
    tokens = torch.randint(64, (n, 17), generator=generator(seed)) // 2
    return tokens[:, :-1], tokens[:, 1:]


def adamw(gpt):
    return torch.optim.AdamW(gpt.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_steps(gpt, method, n, optimizer=None, lr=0.01, micro_batches=1, **more):
    """n optimizer steps of train.train_step; yields the statistics and the gradient norm of each."""
    optimizer, finite = optimizer or adamw(gpt), torch.ones(())
    args = train.parser().parse_args([f'--method={method}', '--lam=0.3'])
    vars(args).update(more)
    for step in range(1, n + 1):
        batch = list(zip(*(x.chunk(micro_batches) for x in token_batch(step)), strict=True))
        yield train.train_step(gpt, gpt, optimizer, batch, step, lr, args, finite, False)


# --------------------------------------------------------------------------------------------------
# the Facts


def test_fact_1_the_mean_logit_is_mu_times_h():
    for h, E, _ in random_heads():
        close((h @ E.T).mean(dim=1), h @ E.mean(dim=0), rtol=1e-10, atol=1e-10)


def test_fact_2_centering_sets_the_mean_logit_to_zero_and_changes_nothing_else():
    for h, E, targets in random_heads():
        results = []
        for embeddings in (E, E - E.mean(dim=0)):
            h_, E_ = h.clone().requires_grad_(), embeddings.clone().requires_grad_()
            logits = h_ @ E_.T
            loss = F.cross_entropy(logits, targets)
            results.append((logits, logits.softmax(-1), loss, *torch.autograd.grad(loss, (h_, E_))))
        (logits, *before), (centered, *after) = results
        scale = logits.abs().max().item()
        close(centered.mean(dim=1), torch.zeros(len(h), dtype=F64), rtol=0, atol=1e-13 * scale)  # (i)
        close(centered.std(dim=1), logits.std(dim=1), rtol=1e-10, atol=1e-13 * scale)            # (ii)
        close(before, after, rtol=1e-9, atol=1e-12 * max(1, scale))                              # (iii)


@pytest.mark.parametrize('lr', [1e-3, 1e-2])
def test_fact_2_iii_in_50_steps_centering_affects_no_other_parameter_and_no_optimizer_state(lr):
    results = []
    for method in ('baseline', 'mu_centering'):
        gpt = tiny_gpt(method)
        start, optimizer = weights(gpt), adamw(gpt)
        list(train_steps(gpt, method, 50, optimizer, lr=lr, grad_clip=0.5))
        # both moments, of E as well: its gradients are the same
        moments = [optimizer.state[p][name] for p in gpt.parameters() for name in ('exp_avg', 'exp_avg_sq')]
        results.append((weights(gpt), moments))
    (base, base_moments), (centered, centered_moments) = results
    shift = base.pop('lm_head.weight') - centered.pop('lm_head.weight')
    assert (base['wte.weight'] - start['wte.weight']).abs().max() > 1e-3  # it did train
    close(base, centered, rtol=0, atol=1e-9)
    assert shift.norm() > 1e-3
    close(shift, shift[:1].expand_as(shift), rtol=0, atol=1e-9)  # one vector for all output embeddings
    for ours, theirs in zip(centered_moments, base_moments, strict=True):
        scale = theirs.abs().max().item()
        assert scale > 0
        close(ours, theirs, rtol=0, atol=1e-9 * scale)


def fact_3_terms(h, E):
    """
    r_emb (V,), r_cos and r_log of one h (H,) (Eq. 11), and the two factors that the paper's proof cancels:
    max_i(|e_i| |cos(h, e*_i)|) and max_i(|e_i| |cos(h, e_i)|).
    """
    E_star = E - E.mean(dim=0)
    norm, norm_star = E.norm(dim=1), E_star.norm(dim=1)
    cos, cos_star = (E @ h) / (norm * h.norm()), (E_star @ h) / (norm_star * h.norm())
    r_cos = cos_star.abs().max() / cos.abs().max()
    r_log = (E_star @ h).abs().max() / (E @ h).abs().max()
    return norm_star / norm, r_cos, r_log, (norm * cos_star.abs()).max(), (norm * cos.abs()).max()


def test_fact_3_as_it_holds():
    for h, E, _ in random_heads():
        r_emb, _, r_log, top, bottom = fact_3_terms(h[0], E)
        assert r_log <= r_emb.max() * top / bottom * (1 + 1e-9)
        # with embeddings of one length the paper's own statement holds
        r_emb, r_cos, r_log, _, _ = fact_3_terms(h[0], E / E.norm(dim=1, keepdim=True))
        assert not ((r_emb < 1).all() and r_cos < 1) or r_log < 1


def test_fact_3_does_not_hold_as_the_paper_states_it():
    E = torch.tensor([[-1.0, 3.0]] * 999 + [[10.0, 1000.0]], dtype=F64)
    r_emb, r_cos, r_log, _, _ = fact_3_terms(torch.tensor([1.0, 0.0], dtype=F64), E)
    assert r_emb.max() < 0.9961 and abs(r_cos - 0.035) < 5e-4  # the premise holds
    assert abs(r_log - 1.099) < 5e-4                           # the conclusion does not


@pytest.mark.parametrize('method', ['baseline', 'zero_sum', 'centered_head'])
@pytest.mark.parametrize('shift', [0.0, 100.0])
def test_fact_2_in_50_steps_neither_a_shift_of_all_embeddings_nor_its_cures_change_the_rest(method, shift):
    results = []
    for method_, norm in (('baseline', 0.0), (method, shift)):
        gpt = tiny_gpt(method_)
        train.shift_mean(gpt.E, norm, seed=1)
        mu = gpt.E.detach().mean(dim=0)
        losses = [stats['loss'] for stats, _ in train_steps(gpt, method_, 50)]
        results.append((torch.stack(losses), weights(gpt), mu))
    (losses, base, mu), (shifted_losses, shifted, shifted_mu) = results
    close((shifted_mu - mu).norm(), torch.tensor(shift, dtype=F64))
    close(shifted_losses, losses, rtol=0, atol=1e-9)
    difference = shifted.pop('lm_head.weight') - base.pop('lm_head.weight')
    close(shifted, base, rtol=0, atol=1e-9)
    close(difference, (shifted_mu - mu).expand_as(difference), rtol=0, atol=1e-9)


def gradient_rounded_to_bf16(method='baseline'):
    return config_64(method, logits_dtype='bfloat16', rounded='gradient')


def test_fact_4_a_rounded_gradient_of_the_logits_pushes_h_along_mu(chunks_of):
    """
    The gradient of the logits g = p - y sums to 0 over the vocabulary, rounded to bf16 it is g + delta.
    So dL/dh is the exact one plus (sum_i delta_i) mu plus sum_i delta_i (e_i - mu). The middle term is 0
    where mu is, and zero_sum takes it away.
    """
    chunks_of(7)
    for h, E, targets in random_heads():
        p, mu = (h @ E.T).softmax(dim=1), E.mean(dim=0)
        g = p - F.one_hot(targets, len(E))
        delta = g.bfloat16().double() - g
        scale = E.abs().max().item()
        close(g.sum(dim=1), torch.zeros(len(h), dtype=F64), rtol=0, atol=1e-12)
        along_mu, rest = delta.sum(dim=1)[:, None] * mu, delta @ (E - mu)
        for method, expected in (('baseline', g @ E + along_mu + rest), ('zero_sum', g @ E + rest)):
            for head in (plain_head, ChunkedHead.apply):
                h_ = h.clone().requires_grad_()
                loss, _ = head(h_, E, targets, gradient_rounded_to_bf16(method))
                close(torch.autograd.grad(loss, h_)[0], expected, rtol=1e-9, atol=1e-11 * scale)
        found = analyze.statistics([(h, targets)], E, gradient_rounded_to_bf16())['gradient_sum']
        close(found, delta.sum(dim=1), rtol=1e-9, atol=1e-12)
        centered = E - mu
        close((g + delta) @ centered, g @ E + rest, rtol=1e-9, atol=1e-11 * scale)


def test_fact_4_below_2_to_the_minus_9_the_rounding_of_p_t_minus_1_is_minus_p_t():
    """
    For every p_t that bf16 has. So the rounded gradient sums to less than 0 on average, if most p_t are that
    small; above 2^-9 an error has either sign.
    """
    p = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    p = p[p <= 1].double()
    lost = (p - 1).bfloat16() == -1
    assert torch.equal(lost, p <= BF16_UNIT) and lost.sum() > 10_000  # a tie goes to the even -1
    g = generator(0)
    logits = normal(g, 4096, 1000)  # most p_t are below 2^-9
    targets = torch.multinomial(logits.softmax(dim=1), 1, generator=g)  # as often as the model predicts
    grad = logits.softmax(dim=1).scatter_add(1, targets, -torch.ones(4096, 1, dtype=F64))
    error = grad.bfloat16().double() - grad
    of_target = error.gather(1, targets)
    sums, others = error.sum(dim=1), error.sum(dim=1) - of_target.squeeze(1)
    for values, expected in ((others, 0.0), (sums, of_target.mean().item())):
        assert abs(values.mean().item() - expected) < 5 * values.std().item() / 64  # standard error of 4096
    assert sums.mean() < -5 * sums.std() / 64


@pytest.mark.parametrize('chunked', [False, True])
def test_the_centered_head_feels_no_shift_under_any_rounding(chunked):
    """With whole numbers and 2^7 rows E - mu is exact, so the loss and both gradients are the same bits."""
    config = GPTConfig(method='centered_head', dtype='float32', logits_dtype='bfloat16')
    for seed in range(10):
        g, results = generator(seed), []
        h, targets = torch.randn(50, 16, generator=g), torch.randint(128, (50,), generator=g)
        E, shift = (torch.randint(-9, 9, (n, 16), generator=g).float() for n in (128, 1))
        for E_ in (E, E + 1000 * shift):
            h_, E_ = h.clone().requires_grad_(), E_.clone().requires_grad_()
            loss, stats = head_loss(h_, E_, targets, config, chunked)
            results.append([loss, *torch.autograd.grad(loss, (h_, E_)), *stats.values(),
                            *model.head_stats(h, E_, targets, config).values()])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize('rounded', ['none', 'operands', 'logits', 'gradient', 'operands,logits',
                                     'operands,gradient', 'logits,gradient', 'operands,logits,gradient'])
def test_each_part_is_rounded_where_it_is_named_and_only_there(rounded, chunks_of):
    """Products in float64, so that the parts rounded to bf16 are known to all digits in both heads."""
    chunks_of(7)
    def low(part, x):
        return x.bfloat16().double() if part in rounded else x
    config = config_64(logits_dtype='bfloat16', rounded=rounded)
    for h, E, targets in random_heads(20):
        h_low, E_low = low('operands', h), low('operands', E)
        logits = low('logits', h_low @ E_low.T).requires_grad_()
        loss = F.cross_entropy(logits, targets, reduction='sum')
        grad = low('gradient', torch.autograd.grad(loss, logits)[0])
        exact = grad @ E_low, grad.T @ h_low
        close(model.head_stats(h, E, targets, config)['loss'], loss.detach(), rtol=1e-10, atol=1e-10)
        h.requires_grad_(), E.requires_grad_()
        total, _ = ChunkedHead.apply(h, E, targets, config)
        for found, expected in zip(torch.autograd.grad(total, (h, E)), exact, strict=True):
            close(found, expected, rtol=1e-9, atol=1e-10 * max(1, expected.abs().max().item()))
        # in the plain head a gradient that passes a rounded logit or operand is rounded there, if any is
        unit = 2 * BF16_UNIT if 'gradient' in rounded else 1e-9
        total, _ = plain_head(h, E, targets, config)
        bounds = grad.abs() @ E_low.abs(), grad.abs().T @ h_low.abs()
        for found, expected, bound in zip(torch.autograd.grad(total, (h, E)), exact, bounds, strict=True):
            assert ((found - expected).abs() <= unit * bound + 1e-10).all()


# --------------------------------------------------------------------------------------------------
# every method is its equation, in both heads


STEP = 3  # the optimizer step, which decides the rows that laplace_reg samples


def equations(method, h, E, targets, lam, cap):
    """
    (mean cross entropy, regulariser) of a method, straight from the equations of its paper. It shares no code
    with model.py.

    To add a method, add two lines: `if method == ...:` and what it does to `logits`, or the `return` with its
    regulariser. A method that acts on the weights alone needs a test of its own instead, such as
    test_coupled_adam_is_its_equation.
    """
    logits = raw = h @ E.T
    if method == 'soft_capping':
        logits = cap * torch.tanh(raw / cap)
    if method == 'norm_softmax':
        logits = raw / raw.std(dim=1, correction=0, keepdim=True)
    shift = logits.max(dim=1).values  # so that no exponential overflows
    log_Z = (logits - shift[:, None]).exp().sum(dim=1).log() + shift
    loss = -(logits[torch.arange(len(h)), targets] - log_Z).mean()
    V, H = E.shape
    mu = E.sum(dim=0) / V
    unit = E / E.norm(dim=1, keepdim=True)
    if method == 'z_loss':
        return loss, lam * (log_Z ** 2).mean()
    if method == 'max_z_loss':
        return loss, lam * (raw.max(dim=1).values ** 2).mean()
    if method == 'mu_loss':
        return loss, lam * (mu @ mu)
    if method == 'cosine_reg':
        return loss, lam * (unit @ unit.T * (1 - torch.eye(V))).sum() / V ** 2
    if method == 'laplace_reg':
        rows = [(STEP * 256 + i) % V for i in range(256)] if V > 256 else range(V)
        return loss, lam * torch.stack([(-(unit[i] - unit).square().sum(dim=1)).exp() for i in rows]).mean()
    if method == 'spectrum_control':
        prior = [math.sqrt(2 * V / (V + H)) * math.exp(-k / H) for k in range(1, min(V, H) + 1)]
        return loss, lam * (torch.linalg.svdvals(E) - torch.tensor(prior, dtype=F64)).square().sum()
    return loss, torch.zeros((), dtype=F64)


def head_loss(h, E, targets, config, chunked):
    """What training minimises, a mean over positions, from one of the two heads; and its statistics."""
    loss, stats = (ChunkedHead.apply if chunked else plain_head)(h, E, targets, config)
    stats.pop('gradient_sum', None)  # which only the chunked head can see
    return loss / len(h) + embeddings_to_loss(E, config, STEP), stats


@pytest.fixture
def chunks_of(monkeypatch):
    """chunks_of(n): the chunked head takes n tokens at a time."""
    return lambda n: monkeypatch.setattr(model, 'n_chunks', lambda h, E: -(-len(h) // n))


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('chunked', [False, True])
def test_each_method_is_its_equation_in_training_and_evaluation(method, chunked, chunks_of):
    """Chunks may be of one token, larger than the input, or not divide it."""
    tol = 1e-6 if method == 'spectrum_control' else 1e-10  # a Gram matrix squares a condition number of 1e4
    config = config_64(method, lam=0.3, cap=5.0)
    for i, (h, E, targets) in enumerate(random_heads(30)):
        chunks_of((1, 7, 64)[i % 3])
        h, E = h.requires_grad_(), E.requires_grad_()
        loss, reg = equations(method, h, E, targets, 0.3, 5.0)
        ours, stats = head_loss(h, E, targets, config, chunked)
        close(ours, loss + reg, rtol=tol, atol=tol)
        close(stats['loss'] / len(h), loss.detach(), rtol=1e-10, atol=1e-10)  # without the regulariser
        close(stats['reg'] / len(h) + embeddings_to_loss(E, config, STEP), reg, rtol=tol, atol=tol)
        close(model.head_stats(h, E, targets, config), stats, rtol=1e-10, atol=1e-10)
        for a, b in zip(*(torch.autograd.grad(x, (h, E)) for x in (ours, loss + reg)), strict=True):
            assert (a - b).norm() <= tol * b.norm() + 1e-11  # the scale of h or E cancels in norm_softmax


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('chunked', [False, True])
def test_gradcheck(method, chunked, chunks_of):
    chunks_of(2)
    g = generator(0)
    h, E = (normal(g, n, 4).requires_grad_() for n in (5, 9))
    targets, config = torch.randint(9, (5,), generator=g), config_64(method, lam=0.5, cap=2.0)
    assert torch.autograd.gradcheck(lambda h, E: head_loss(h, E, targets, config, chunked)[0], (h, E))


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_heads_agree_within_bf16_rounding(method, dtype, chunks_of):
    """
    Each head rounds the logit gradient D and its products to bf16 once: the gradient of h is off by at most 2
    BF16_UNIT |D| |E|, that of E by 2 BF16_UNIT |D|^T |h|.
    """
    chunks_of(50)
    g = generator(1)
    h = torch.randn(128, 32, generator=g).bfloat16().float().requires_grad_()
    E = (torch.randn(500, 32, generator=g) + 0.5).bfloat16().float().requires_grad_()
    targets = torch.randint(500, (128,), generator=g)
    config = GPTConfig(method=method, lam=0.01, cap=10.0, dtype=dtype, logits_dtype='bfloat16')
    (a, stats_a), (b, stats_b) = (head_loss(h, E, targets, config, chunked) for chunked in (False, True))
    close(a, b, rtol=1e-6, atol=0)
    close(stats_a, stats_b, rtol=1e-5, atol=1e-3)
    logits = (h @ E.T).bfloat16().detach().requires_grad_()
    D = torch.autograd.grad(logits_to_loss(logits, targets, config)[0], logits)[0].float().abs() / len(h)
    gradients = (torch.autograd.grad(loss, (h, E)) for loss in (a, b))
    for x, y, bound in zip(*gradients, (D @ E.abs(), D.T @ h.abs()), strict=True):
        assert bool(((x - y).abs() <= 4 * BF16_UNIT * bound + 1e-7).all())
        assert x.norm() > 1e-4


# --------------------------------------------------------------------------------------------------
# rounding


@pytest.mark.parametrize('dtype, logits_dtype, probability', [
    ('float32', 'float32', 0.142), ('float32', 'bfloat16', 0.091),
    ('bfloat16', 'bfloat16', 0.091), ('bfloat16', 'float32', 0.142)])
@pytest.mark.parametrize('chunked', [False, True])
def test_the_example_of_the_introduction(dtype, logits_dtype, probability, chunked):
    """A logit of 128.5 among ten of 128 becomes 128 in bf16: the probability 0.142 becomes 0.091."""
    h, E = torch.tensor([[128.0, 1.0]]), torch.tensor([[1.0, 0.5]] + [[1.0, 0.0]] * 10)
    config, target = GPTConfig(dtype=dtype, logits_dtype=logits_dtype), torch.tensor([0])
    loss, _ = head_loss(h.requires_grad_(), E, target, config, chunked)
    for found in (loss, model.head_stats(h, E, target, config)['loss']):
        assert abs(math.exp(-found.item()) - probability) < 5e-4


def test_capped_logits_are_rounded_once_more():
    g = generator(0)
    logits = (30 * torch.randn(64, 100, generator=g)).bfloat16()
    targets = torch.randint(100, (64,), generator=g)
    capped = (9 * torch.tanh(logits.float() / 9)).bfloat16()
    config = GPTConfig(method='soft_capping', cap=9.0, logits_dtype='bfloat16')
    _, stats = logits_to_loss(logits, targets, config)
    close(stats['loss'].double(), F.cross_entropy(capped.double(), targets, reduction='none'),
          rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.__version__ < '2.13', reason='older CPU compilers drop casts, and train.py refuses')
@pytest.mark.parametrize('method, rounded', [
    ('baseline', 'operands,logits,gradient'), ('soft_capping', 'operands,logits,gradient'),
    ('z_loss', 'operands,logits,gradient'), ('norm_softmax', 'operands,logits,gradient'),
    ('baseline', 'none'), ('baseline', 'logits'), ('baseline', 'gradient')])
def test_compiling_keeps_every_rounding_and_adds_none(method, rounded):
    """A compiler that fuses a cast down with the cast up again would undo what the paper studies."""
    g = generator(0)
    products, targets = 30 * torch.randn(16, 200, generator=g), torch.randint(200, (16,), generator=g)
    if method == 'baseline':  # the example of the introduction among the rest
        products[0], targets[0] = -1e4, 0
        products[0, :11] = torch.tensor([128.5] + [128.0] * 10)
    config = GPTConfig(logits_dtype='bfloat16', method=method, rounded=rounded)
    compiled = model.compile_head(loss_and_grad, config)
    (grad, eager, _), (found, loss, _) = (function(products.clone(), targets, config, False)
                                          for function in (loss_and_grad, compiled))
    close(loss, eager, rtol=1e-6, atol=0)
    # fp32 may tip a value over to the next bf16 number here and there; a missing rounding would change most
    assert ((grad - found).abs() > 1e-5 * grad.abs() + 1e-30).float().mean() < 0.01
    assert torch.equal(found, found.bfloat16().float()) == ('gradient' in rounded)
    if method == 'baseline':  # the gradient is p - 1, which may be rounded itself
        assert abs(1 + found[0, 0] - (0.091 if 'logits' in rounded else 0.142)) < BF16_UNIT


def test_a_compiler_that_drops_a_rounding_is_refused(monkeypatch):
    """Before torch 2.13 it drops those of fp32 numbers that stay fp32: seen on a CPU and on a GPU."""
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.11.0+cu128'))
    for method, dtype, logits_dtype in itertools.product(METHODS, *2 * [('float32', 'bfloat16')]):
        config = GPTConfig(method=method, dtype=dtype, logits_dtype=logits_dtype)
        if logits_dtype == 'bfloat16' and (dtype == 'float32' or method == 'soft_capping'):
            with pytest.raises(UserError, match='--compile in torch 2.11'):
                model.compile_head(loss_and_grad, config)
        else:
            model.compile_head(loss_and_grad, config)


def test_a_gpu_has_chunks_that_fill_it_and_leave_most_of_its_memory(monkeypatch):
    class Tokens(list):
        device = torch.device('cuda')
    for gibibytes, chunks in ((8, 50), (24, 17), (80, 8), (141, 8)):
        memory = type('', (), {'total_memory': gibibytes * 2**30})
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda _, memory=memory: memory)
        n = model.n_chunks(Tokens(range(131_072)), range(50_304))
        largest = -(-131_072 // n)
        assert n == chunks and largest <= 16384 and largest * 50_304 * 2 <= gibibytes * 2**30 / 32


def test_train_refuses_that_compiler_before_it_begins(monkeypatch):
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.11.0+cu128'))
    rounds = ['--compile', '--logits_dtype=bfloat16']
    for device, flags in (('cuda', ['--method=soft_capping']), ('cpu', rounds)):
        with pytest.raises(UserError, match='--compile in torch 2.11'):
            train.fill_in(train.parser().parse_args(flags), device, 1)
    train.fill_in(train.parser().parse_args([]), 'cuda', 1)


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
        model.add_product(out, a, b, beta)
        assert ((out - expected).abs() <= 1024 * torch.finfo(wide).eps / 2 * scale).all()


def test_the_spread_of_the_logit_mean_survives_its_squares():
    """At a mean logit of 1152 (the published 16M baseline) fp32 squares would lose a spread of 0.6."""
    mean = 1152 + 0.6 * torch.randn(4096, 1, generator=generator(0))
    stats = model.sum_stats(model.logit_stats(mean + torch.linspace(-1, 1, 64)))
    variance = stats['logit_mean_squared'] / 4096 - (stats['logit_mean'] / 4096) ** 2
    assert math.sqrt(variance) == pytest.approx(mean.double().std(correction=0).item(), rel=1e-3)


# --------------------------------------------------------------------------------------------------
# what the paper claims of its methods


def test_z_loss_treats_positive_and_negative_logits_differently():
    """A single logit that rises is held back; one that falls to minus infinity is not."""
    def z_loss(logit, others):
        """The regulariser, and the slope of what is minimised along this logit."""
        logit = torch.tensor(logit, dtype=F64, requires_grad=True)
        logits = torch.cat((logit[None], others))[None]
        loss, stats = logits_to_loss(logits, torch.tensor([1]), config_64('z_loss', lam=1.0))
        return stats['reg'], torch.autograd.grad(loss, logit)[0]
    for seed in range(20):
        others = normal(generator(seed), 5)
        assert z_loss(4.0 + seed / 4, others)[0] > z_loss(-4.0 - seed / 4, others)[0] + 1e-3
        assert abs(z_loss(-40.0, others)[1]) < 1e-12
        assert z_loss(40.0, others)[1] > 79  # d log^2 Z / d l = 2 log Z, and the cross entropy's 1


@pytest.mark.parametrize('V', [2, 10, 50304])
def test_z_loss_is_minimised_by_the_uniform_and_the_one_hot_configuration(V):
    """
    Appendix B, Eq. 24 and 25: at l_j = -log V, and as l_i = 0 and all other l_j -> -infinity, z-loss and its
    gradient vanish although the mean logit is far from 0.
    """
    one_hot = torch.full((1, V), -1e3, dtype=F64)
    one_hot[0, 0] = 0
    for logits in (torch.full((1, V), -math.log(V), dtype=F64), one_hot):
        logits.requires_grad_()
        (total, stats), (bare, _) = (logits_to_loss(logits, torch.tensor([0]), config_64(method, lam=1.0))
                                     for method in ('z_loss', 'baseline'))
        assert stats['reg'] < 1e-20 and torch.autograd.grad(total - bare, logits)[0].abs().max() < 1e-10
        assert logits.mean() <= -math.log(2) + 1e-12


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('lr', [0.0, 1e-3, 0.1])
def test_weight_decay_is_its_equation_and_makes_the_output_embeddings_no_more_isotropic(lr, tying):
    """E <- (1 - lam) E - lr u (Eq. 2): at any learning rate a step is the baseline's step and -lam E."""
    base, decayed = tiny_gpt(weight_tying=tying), tiny_gpt('weight_decay', weight_tying=tying)
    with torch.no_grad():
        base.E.add_(1)
        start = decayed.E.copy_(base.E).clone()
    for gpt, method in ((base, 'baseline'), (decayed, 'weight_decay')):
        list(train_steps(gpt, method, 1, lr=lr))
    close(decayed.E, base.E - 0.3 * start, rtol=0, atol=1e-14)
    for p, q in zip(base.parameters(), decayed.parameters(), strict=True):
        assert p is base.E or torch.equal(p, q)
    if lr == 0:  # the decay alone scales mu and the deviations from it alike
        mu, mu_0 = decayed.E.mean(dim=0), start.mean(dim=0)
        close((decayed.E - mu) / mu.norm(), (start - mu_0) / mu_0.norm())


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('method, n', [('mu_centering', 1), ('mu_centering', 3), ('z_loss+mu_centering', 1)])
def test_centering_leaves_no_more_than_rounding_after_every_nth_step(method, n, tying):
    """|mu| <= 2^-23 |E|_F in fp32, alone and together with another method."""
    gpt = tiny_gpt(method, dtype='float32', logits_dtype='float32', weight_tying=tying)
    for step, (stats, _) in enumerate(train_steps(gpt, method, 30, lr=0.3, center_every=n), 1):
        E = gpt.E.detach().double()
        centered = E.mean(dim=0).norm() <= 2.0 ** -23 * E.norm()
        assert centered == (step % n == 0) and (stats['reg'] > 0) == ('z_loss' in method)


def test_a_method_is_not_found_by_a_part_of_its_name():
    assert [method for method in METHODS if train.centers(method)] == ['mu_centering']
    assert train.centers('z_loss+mu_centering') and not train.centers('mu_centering_ema')


@pytest.mark.parametrize('method', [*METHODS, 'z_loss+mu_centering'])
def test_nothing_changes_once_a_gradient_is_not_finite(method):
    """Not by centering either, which has a mean to take away, nor once the gradients are finite again."""
    gpt = tiny_gpt(method)
    with torch.no_grad():
        gpt.E.add_(1)
    before = weights(gpt)
    hook = gpt.wte.weight.register_hook(lambda gradient: gradient * math.nan)
    for _ in train_steps(gpt, method, 3):
        hook.remove()
        assert all(torch.equal(p, before[name]) for name, p in gpt.named_parameters())


@pytest.mark.parametrize('method', ['z_loss', 'max_z_loss', 'mu_loss', 'cosine_reg', 'laplace_reg',
                                    'spectrum_control', 'z_loss+mu_centering'])
def test_a_regulariser_counts_once_per_step_however_the_batch_is_cut(method):
    results = []
    for micro_batches in (1, 4):
        gpt = tiny_gpt(method)
        results.append((list(train_steps(gpt, method, 3, micro_batches=micro_batches)), weights(gpt)))
    close(*results, rtol=1e-9, atol=1e-11)
    assert all(stats['reg'] != 0 for stats, _ in results[0][0])


# --------------------------------------------------------------------------------------------------
# what the methods of other papers claim


def reg_of(method, E, step=0):
    """A regulariser of the embeddings E (V, H) alone, lambda = 1."""
    return embeddings_to_loss(E, config_64(method, lam=1.0), step)


def test_laplace_reg_is_descended_along_the_graph_laplacian_and_samples_every_pair_in_turn():
    g = generator(0)
    unit = F.normalize(normal(g, 200, 6) + 1).requires_grad_()
    gradient = torch.autograd.grad(reg_of('laplace_reg', unit), unit)[0]
    unit = unit.detach()
    W = torch.exp(-torch.cdist(unit, unit).square())
    flow = -4 * (torch.diag(W.sum(dim=1)) - W) @ unit / 200 ** 2  # L = D - W
    flow -= (flow * unit).sum(dim=1, keepdim=True) * unit         # along the sphere
    close(gradient, flow, rtol=1e-9, atol=1e-12)
    # with more than 256 embeddings each step has its own sample; together they are the mean over all pairs
    unit = F.normalize(normal(g, 640, 6))
    steps = [reg_of('laplace_reg', unit, step).item() for step in range(6)]
    of_all = torch.exp(-torch.cdist(unit, unit).square()).mean().item()
    assert np.mean(steps[:5]) == pytest.approx(of_all, rel=1e-9)  # 5 x 256 = 2 x 640
    assert steps[0] != steps[1] and steps[0] == steps[5]


def test_spectrum_control_is_zero_at_its_prior_alone_and_sees_no_rotation():
    g = generator(0)
    V, H = 90, 8
    U, Q = (torch.linalg.qr(normal(g, n, H))[0] for n in (V, H))
    prior = math.sqrt(2 * V / (V + H)) * torch.exp(-torch.arange(1, H + 1, dtype=F64) / H)
    E = U @ torch.diag(prior) @ Q.T
    assert reg_of('spectrum_control', E) < 1e-24
    for shift in (0.1, 1.0, 100.0):  # of all embeddings together: it shows in the largest singular value
        value = reg_of('spectrum_control', E + shift)
        assert value > 0.5 * V * H * shift ** 2 - 5
        assert reg_of('spectrum_control', (E + shift) @ Q) == pytest.approx(value.item(), rel=1e-9)
    huge = torch.full((V, H), 1e30, requires_grad=True)  # a diverged E raises nothing, and ends the run
    penalty = embeddings_to_loss(huge, GPTConfig(method='spectrum_control'))
    assert not torch.isfinite(torch.autograd.grad(penalty, huge)[0]).all()


@pytest.mark.parametrize('tying', [False, True])
def test_coupled_adam_is_its_equation_and_leaves_all_else_to_adam(tying):
    """theta <- theta - lr m_hat / (sqrt(nu_hat) + eps), nu_hat of E the mean of v_hat over the vocabulary."""
    gpt = tiny_gpt('coupled_adam', weight_tying=tying)
    expected = {p: p.detach().clone() for p in gpt.parameters()}
    moments, gradients, optimizer = {p: (0, 0) for p in expected}, {}, adamw(gpt)
    optimizer.register_step_pre_hook(lambda *_: gradients.update({p: p.grad.clone() for p in expected}))
    for t, _ in enumerate(train_steps(gpt, 'coupled_adam', 8, optimizer), 1):
        for p, gradient in gradients.items():
            m, v = moments[p]
            m, v = moments[p] = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient ** 2
            v_hat = v / (1 - 0.95 ** t)
            nu_hat = v_hat.mean(dim=0) if p is gpt.E else v_hat
            expected[p] -= 0.01 * m / (1 - 0.9 ** t) / (nu_hat.sqrt() + 1e-8)
            close(p.detach(), expected[p], rtol=1e-10, atol=1e-12)


def test_it_is_the_second_moment_in_adam_that_causes_the_common_shift_of_the_embeddings():
    """
    The logit gradients sum to zero over the vocabulary, so SGD leaves mu where it is, and so does Adam with
    one second moment for all embeddings (Coupled Adam).
    """
    for h, E, targets in random_heads(20):
        E.requires_grad_()
        gradient = torch.autograd.grad(head_loss(h, E, targets, config_64(), True)[0], E)[0]
        assert gradient.sum(dim=0).norm() <= 1e-12 * gradient.norm() * len(E)
    drift = {}
    for name, method in (('SGD', 'baseline'), ('Adam', 'baseline'), ('Coupled Adam', 'coupled_adam')):
        gpt = tiny_gpt(method)
        start = gpt.E.detach().clone()
        sgd = torch.optim.SGD(gpt.parameters(), lr=1, momentum=0.9, fused=True)
        optimizer, lr = (sgd, 0.1) if name == 'SGD' else (adamw(gpt), 0.01)
        steps = train_steps(gpt, method, 60, optimizer, lr=lr)
        drift[name] = [(gpt.E.detach() - start).mean(dim=0).norm().item() for _ in steps]
        assert (gpt.E - start).norm() > 0.1  # the embeddings do move, each its own way
    assert max(drift['SGD'] + drift['Coupled Adam']) < 1e-13
    assert drift['Adam'][-1] > 0.05 and drift['Adam'][::10] == sorted(drift['Adam'][::10])


# --------------------------------------------------------------------------------------------------
# Table 1, computed


def centered_log_probabilities(logits, method):
    """log p_t minus its mean over t, for logits (V,): what the softmax sees of them."""
    config = config_64(method, lam=0.0, cap=3.0)
    losses = [logits_to_loss(logits[None], torch.tensor([t]), config)[0] for t in range(len(logits))]
    return torch.stack(losses).mean() - torch.stack(losses)


def force(method, h, E):
    """What the method alone does to E (V, H): its change, or the negative gradient of its regulariser."""
    if method in ('weight_decay', 'mu_centering'):
        gpt = tiny_gpt(method)
        with torch.no_grad():
            gpt.E.copy_(E)
        list(train_steps(gpt, method, 1, lr=0.0))
        return gpt.E.detach() - E
    if method in ('soft_capping', 'norm_softmax'):
        return torch.zeros_like(E)  # no more than another model: nothing acts on E but its cross entropy
    targets, E = torch.zeros(len(h), dtype=torch.int64), E.clone().requires_grad_()
    total, bare = (head_loss(h, E, targets, config_64(m, lam=1.0), False)[0] for m in (method, 'baseline'))
    return -torch.autograd.grad(total - bare, E)[0]


@pytest.mark.parametrize('method, intervention, symmetry, suppression', [
    ('soft_capping', 'model', 'yes', 'no'),
    ('weight_decay', 'training', 'yes', 'no'),
    ('z_loss', 'training', 'no', 'no'),
    ('mu_loss', 'training', 'yes', 'yes'),
    ('mu_centering', 'training', 'yes', 'yes'),
    ('max_z_loss', 'training', 'no', 'no'),  # from here on not in the paper's table
    ('norm_softmax', 'model', 'yes', 'no'),
    ('cosine_reg', 'training', 'yes', 'yes'),
    ('laplace_reg', 'training', 'yes', 'yes'),
    ('spectrum_control', 'training', 'yes', 'yes')])
def test_table_1_overview_of_methods(method, intervention, symmetry, suppression):
    """
    intervention: in the model, if the same logits give other probabilities. symmetry: l -> -l reverses what
    the softmax sees, and E -> -E the force on E. suppression of anisotropy: the force shrinks mu, in absolute
    terms and against the spread around it, even where h is orthogonal to mu and the logits show nothing.
    """
    g = generator(0)
    h, E, logits = normal(g, 5, 16), normal(g, 64, 16) + normal(g, 16), 2 * normal(g, 9) + 1
    mu = E.mean(dim=0)
    seen, mirrored = (centered_log_probabilities(x, method) for x in (logits, -logits))
    in_model = not torch.allclose(seen, logits - logits.mean(), atol=1e-9)
    odd = torch.allclose(force(method, h, E), -force(method, h, -E), atol=1e-9)
    orthogonal = h - (h @ mu / (mu @ mu))[:, None] * mu
    f, spread = force(method, orthogonal, E), E - mu
    growth_of_mu = f.mean(dim=0) @ mu / (mu @ mu)  # relative rates
    growth_of_spread = (f * spread).sum() / spread.square().sum()
    assert in_model == (intervention == 'model')
    assert (odd and torch.allclose(seen, -mirrored, atol=1e-9)) == (symmetry == 'yes')
    assert bool(growth_of_mu < min(0, growth_of_spread) - 1e-9) == (suppression == 'yes')


# --------------------------------------------------------------------------------------------------
# the README's "in your own training loop", and Appendix E


def readme_functions():
    """center and mu_loss as the README gives them."""
    readme = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'README.md')
    with open(readme, encoding='utf-8') as file:
        first_line = '# mu-centering and mu-loss in any PyTorch training loop\n'
        block = re.search(rf'```python\n({first_line}.*?)```', file.read(), re.DOTALL)
    names = {}
    exec(block[1], names)
    return names['center'], names['mu_loss']


def own_loop(gpt, W, method, rank=0, world_size=1):
    """Anybody's training loop with the README's lines: three steps on this rank's share of each batch."""
    center, mu_loss = readme_functions()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        gpt(*(x.chunk(world_size)[rank] for x in token_batch(step)))[0].backward()
        if method == 'mu_loss':
            mu_loss(W, lam=0.3).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        if method == 'mu_centering':
            center(W)


LOOPS = [(method, tying) for method in ('mu_centering', 'mu_loss') for tying in (False, True)]


@pytest.mark.parametrize('method, tying', LOOPS)
def test_the_readmes_lines_do_what_train_py_does(method, tying):
    base, own, ours = (tiny_gpt(m, weight_tying=tying) for m in ('baseline', 'baseline', method))
    own_loop(base, base.E, 'baseline')
    own_loop(own, own.E, method)
    list(train_steps(ours, method, 3))
    close(weights(own), weights(ours), rtol=0, atol=1e-12)
    assert (own.E - base.E).norm() > 1e-3  # the method did something


def under_fsdp2(rank):
    """The README's lines with a model whose E of 61 rows is sharded into 31 and 30."""
    from torch.distributed.fsdp import fully_shard
    for method, tying in LOOPS:
        sharded, ours = (tiny_gpt(m, vocab_size=61, weight_tying=tying) for m in ('baseline', method))
        fully_shard(sharded)
        W = sharded.lm_head.weight
        assert W.to_local().shape == (31 - rank, 16)
        own_loop(sharded, W, method, rank, 2)
        list(train_steps(ours, method, 3))
        for p, q in zip(sharded.parameters(), ours.parameters(), strict=True):
            close(p.full_tensor(), q, rtol=0, atol=1e-12)
        assert method == 'mu_loss' or W.full_tensor().mean(dim=0).norm() < 1e-14


def split_embeddings(rank):
    """
    The README's lines with an E that is split across the vocabulary or the hidden dimension, as a DTensor and
    as a plain tensor. The collectives, seen by PyTorch's communication debug mode: over the vocabulary only
    all_reduce (of H numbers), across the hidden dimension none.
    """
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    center, mu_loss = readme_functions()
    mesh, full = init_device_mesh('cpu', (2,)), normal(generator(0), 61, 16) + 1
    mu = full.mean(dim=0)
    gradient = (0.6 * mu / 61).expand(61, 16)  # of 0.3 mu . mu
    for dim, collectives in ((0, {'all_reduce'}), (1, set())):
        E = distribute_tensor(full, mesh, [Shard(dim)]).requires_grad_()
        with CommDebugMode() as seen:
            penalty = mu_loss(E, lam=0.3)
            penalty.backward()
            center(E)
        assert {str(op).split('.')[-1] for op, n in seen.get_comm_counts().items() if n} == collectives
        close(penalty.full_tensor(), 0.3 * mu @ mu)
        close(E.grad.full_tensor(), gradient)
        close(E.full_tensor(), full - mu)

        part = full.tensor_split(2, dim)[rank].clone().requires_grad_()
        group = dist.group.WORLD if dim == 0 else None
        penalty = mu_loss(part, lam=0.3, group=group)
        penalty.backward()
        center(part, group)
        assert dim == 1 or penalty.item() == pytest.approx((0.3 * mu @ mu).item())
        close(part.grad, gradient.tensor_split(2, dim)[rank])
        close(part, (full - mu).tensor_split(2, dim)[rank])


def process_of_two(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    under_fsdp2(rank)
    split_embeddings(rank)
    dist.destroy_process_group()


def test_the_readmes_lines_in_two_processes_are_those_of_one_and_appendix_e_needs_no_communication(tmp_path):
    torch.multiprocessing.spawn(process_of_two, (str(tmp_path / 'store'),), nprocs=2)


# --------------------------------------------------------------------------------------------------
# the model


def test_sizes_are_the_published_ones():
    with torch.device('meta'):
        for size, n in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
            for tying in (False, True):
                assert round(GPT(GPTConfig(**SIZES[size], weight_tying=tying)).n_params() / 1e6, 1) == n
        flops = GPT(GPTConfig(**SIZES['16M'])).flops_per_token() * 64 * 2048
    assert flops == pytest.approx(1.44e13, rel=2e-3)


@pytest.mark.parametrize('tying', [False, True])
def test_initialisation(tying):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**SIZES['16M'], weight_tying=tying))
    H, V, hidden = 224, 50304, 768
    mlp, head = math.sqrt(2 / (H + hidden)), math.sqrt(2 / (H + V))
    expected = {'attn.qkv': math.sqrt(2 / (4 * H)), 'attn.proj': 0.02 / math.sqrt(12), 'mlp.gate': mlp,
                'mlp.up': mlp, 'mlp.down': mlp, 'lm_head': head, 'wte': head if tying else H ** -0.5}
    for name, p in gpt.named_parameters():
        kind = '.'.join(name.split('.')[-3:-1])
        if 'norm' in name:
            assert bool((p == 1).all()), name  # gains
        else:
            assert p.std().item() == pytest.approx(expected[kind], rel=5 / math.sqrt(p.numel())), name
    tokens = torch.randint(V, (2, 129), generator=generator(0))
    with torch.no_grad():
        _, stats = gpt(tokens[:, :-1], tokens[:, 1:])
    assert stats['loss'].item() / 256 == pytest.approx(math.log(V), abs=0.1)


@pytest.mark.parametrize('size, checksum', [
    ('tiny', -39.735), ('16M', 4907.620), ('29M', 1633.058),
    ('57M', 14627.919), ('109M', 28414.591), ('221M', 64294.009)])
def test_a_seed_gives_the_weights_of_the_published_runs(size, checksum):
    """Its tolerance is well above an error in the last bit of each weight, which another CPU may make."""
    torch.manual_seed(1)
    parameters = GPT(GPTConfig(**SIZES[size])).parameters()
    sums = [(i + 1) * p.double().sum().item() for i, p in enumerate(parameters) if p.dim() == 2]
    assert sum(sums) == pytest.approx(checksum, abs=0.05)


def test_rope_depends_on_distance_alone_and_turns_the_first_half():
    config = GPTConfig(n_embd=64, n_head=2, block_size=32)
    cos, sin = (t.double() for t in model.rope_tables(config))
    q, k = (normal(generator(seed), 1, 1, 1, 32).expand(1, 1, 32, 32) for seed in (0, 1))
    scores = model.rotate(q, cos, sin) @ model.rotate(k, cos, sin).transpose(-1, -2)
    for distance in range(-31, 32):
        values = scores[0, 0].diagonal(distance)
        close(values, values[:1].expand_as(values), rtol=0, atol=1e-5)  # the tables are fp32
    assert torch.equal(model.rotate(q, cos, sin)[..., 16:], q[..., 16:]) and cos.shape == (32, 32)
    # frequencies from the rotated half: theta_j = 10000^(-2j/16)
    theta = 10000.0 ** (-torch.arange(8, dtype=F64) / 8)
    close(cos[1], torch.cat((theta.cos().repeat_interleave(2), torch.ones(16))), rtol=0, atol=1e-7)


def reference_hidden(w, tokens, n_layer, n_head):
    """Final hidden states (T, H) of one sequence, from Appendix A and sharing no code with model.py."""
    def norm(x, gain):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * gain

    def rope(x, d):
        x = x.clone()
        for t in range(len(x)):
            for j in range(0, d, 2):
                angle = t * 10000 ** (-j / d)
                a, b = x[t, j].item(), x[t, j + 1].item()
                x[t, j] = a * math.cos(angle) - b * math.sin(angle)
                x[t, j + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x
    x = w['wte.weight'][tokens]
    T, H = x.shape
    D = H // n_head
    for i in range(n_layer):
        block = {name.removeprefix(f'blocks.{i}.').removesuffix('.weight'): p for name, p in w.items()}
        qkv = norm(x, block['norm_1']) @ block['attn.qkv'].T
        out = torch.zeros_like(x)
        for head in range(n_head):
            q, k, v = (qkv[:, part * H + head * D:part * H + (head + 1) * D] for part in range(3))
            q, k = rope(norm(q, block['attn.norm_q']), D // 2), rope(norm(k, block['attn.norm_k']), D // 2)
            scores = (q @ k.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out[:, head * D:(head + 1) * D] = scores.softmax(-1) @ v
        x = x + out @ block['attn.proj'].T
        y = norm(x, block['norm_2'])
        gate = y @ block['mlp.gate'].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ block['mlp.up'].T)) @ block['mlp.down'].T
    return norm(x, w['norm_f.weight'])


def test_the_transformer_is_the_papers_and_causal():
    gpt = tiny_gpt(n_layer=2, n_embd=32, n_head=4)
    with torch.no_grad():
        for name, p in gpt.named_parameters():  # gains that are not one, an attention that is not flat
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)
    tokens = torch.randint(64, (2, 16))
    found = gpt.hidden(tokens)
    for i in range(2):
        expected = reference_hidden(gpt.state_dict(), tokens[i], 2, 4)
        close(found[i], expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32
    tokens[:, 9:] = (tokens[:, 9:] + 1) % 64
    assert ((gpt.hidden(tokens) - found).abs().amax(dim=(0, 2)) > 1e-12).tolist() == [False] * 9 + [True] * 7


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_products_are_in_the_dtype_and_weights_in_fp32(dtype):
    gpt = tiny_gpt(dtype=dtype, logits_dtype=dtype)
    seen = []
    attn, mlp = gpt.blocks[0].attn, gpt.blocks[0].mlp
    for module in (attn.qkv, attn.proj, mlp.gate, mlp.down):
        module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    gpt(*token_batch(0))[0].backward()
    assert seen == [getattr(torch, dtype)] * 4
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in gpt.parameters())


# --------------------------------------------------------------------------------------------------
# a run: defaults, schedule, data order, and all of it written out


def test_defaults_are_appendix_a():
    args = train.parser().parse_args([])
    train.fill_in(args, 'cuda', 4)
    expected = dict(
        beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, min_lr=1e-5, warmup=5000, steps=100_000,
        batch_size=64, block_size=2048, size='16M', n_layer=6, n_embd=224, n_head=4, rope_fraction=0.5,
        weight_tying=False, method='baseline', cap=30.0, dtype='bfloat16', logits_dtype='bfloat16',
        compile=True, seed=1, eval_tokens=1_048_576, test_tokens=10_485_760)
    assert {name: getattr(args, name) for name in expected} == expected
    # Baichuan 2's coefficient of max-z loss, and that of Gao et al.
    for method, lam in (('weight_decay', 1e-4), ('z_loss', 1e-4), ('mu_loss', 1e-4), ('max_z_loss', 2e-4),
                        ('cosine_reg', 1.0), ('max_z_loss+mu_centering', 2e-4)):
        args = train.parser().parse_args([f'--method={method}'])
        train.fill_in(args, 'cuda', 4)
        assert args.lam == lam


def test_learning_rate_schedule():
    args = train.parser().parse_args(['--lr=0.1', '--warmup=5000'])
    rates = [train.learning_rate(step, args) for step in range(100_000)]
    assert rates[0] == pytest.approx(0.1 / 5001) and rates[4999] == pytest.approx(0.1 * 5000 / 5001)
    assert rates[5000] == 0.1 and rates[-1] == pytest.approx(1e-5, rel=1e-4)
    assert train.learning_rate(100_000, args) == 1e-5  # the cosine divides by 95,000
    assert rates[52_500] == pytest.approx((0.1 + 1e-5) / 2, rel=1e-12)
    assert rates[5000:] == sorted(rates[5000:], reverse=True)


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


@pytest.mark.parametrize('method, clip', [('baseline', 0.0), ('mu_loss', 0.05), ('mu_centering', 0.5)])
def test_a_run_is_adamw_of_appendix_a_on_the_pinned_batches(method, clip, tmp_path):
    """train.main against a training written out: batches, loss, gradient clipping, Adam, schedule, method."""
    tokens = np.cumsum(np.random.RandomState(0).randint(0, 3, 2000)) % 60
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / f'x_{split}_000000.bin'), tokens)
    write_json(str(tmp_path / 'meta.json'), {'vocab_size': 60})
    flags = dict(data=tmp_path, out=tmp_path / 'run', dtype='float64', device='cpu', seed=5, grad_clip=clip,
                 n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16, lr=0.03, min_lr=1e-3, warmup=2,
                 steps=8, batch_size=4, micro_batch_size=2, eval_tokens=64, test_tokens=64)
    assert train.main([f'--method={method}', *(f'--{name}={value}' for name, value in flags.items()),
                       *(['--lam=0.3'] if method == 'mu_loss' else [])]) == 0

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


# --------------------------------------------------------------------------------------------------
# statistics and learning rate sensitivity


@pytest.mark.parametrize('method', ['baseline', 'soft_capping', 'norm_softmax'])
def test_statistics_are_their_definitions(method):
    """analyze.statistics, and those of the head, against the definitions written out position by position."""
    gpt = tiny_gpt(method, cap=3.0, dtype='float32', logits_dtype='float32')
    with torch.no_grad():
        gpt.E.add_(torch.randn(16))
        gpt.E.mul_(3)
    windows = torch.randint(64, (7, 17))
    found = analyze.statistics(analyze.positions(gpt, windows), gpt.E, gpt.config)
    with torch.no_grad():
        h_all, E = gpt.hidden(windows[:, :-1]).flatten(0, 1).double(), gpt.E.detach().double()
    for i, h in enumerate(h_all):
        r_emb, r_cos, r_log, _, _ = fact_3_terms(h, E)
        logits = 3 * torch.tanh(E @ h / 3) if method == 'soft_capping' else E @ h
        expected = {'logit_mean': logits.mean(), 'logit_std': logits.std(correction=0),
                    'logit_absmax': logits.abs().max(), 'r_cos': r_cos, 'r_log': r_log,
                    'cos_mu_h': F.cosine_similarity(E.mean(dim=0), h, dim=0)}
        for name, value in expected.items():
            assert found[name][i].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name
        assert found['fact_3'][i] == float(not ((r_emb < 1).all() and r_cos < 1) or r_log < 1)
    close(found['r_emb'].double(), r_emb, rtol=1e-5, atol=1e-6)
    # the head's own statistics are the same quantities, summed over positions
    _, stats = gpt(windows[:, :-1], windows[:, 1:])
    sums = {name: found[name].sum() for name in ('logit_mean', 'logit_std', 'logit_absmax')}
    sums.update(logit_mean_squared=found['logit_mean'].square().sum(), logit_max=found['logit_absmax'].max())
    for name, value in sums.items():
        assert stats[name].item() == pytest.approx(value.item(), rel=1e-4), name


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('logits_dtype', ['float32', 'bfloat16'])
def test_analysis_and_log_agree_where_the_logits_are_rounded_coarsely(method, logits_dtype):
    """At a mean logit of some hundreds bf16 rounds to whole numbers: unrounded, each would be another one."""
    gpt = tiny_gpt(method, dtype='float32', logits_dtype=logits_dtype)
    with torch.no_grad():
        gpt.E.add_(60 * torch.randn(16))
        windows = torch.randint(64, (40, 17))
        found = analyze.statistics(analyze.positions(gpt, windows), gpt.E, gpt.config)
    _, logged = gpt(windows[:, :-1], windows[:, 1:])
    for name in ('loss', 'logit_mean', 'logit_std', 'logit_absmax'):  # in fp32, a few units of its 2^-24
        scale = logged['logit_absmax'].item() if 'logit' in name else logged[name].item()
        assert found[name].double().sum().item() == pytest.approx(logged[name].item(), abs=1e-6 * scale), name
    # the sums of 64 numbers of magnitude up to 1, in fp32 in the log
    assert abs(found['gradient_sum'].sum() - logged['gradient_sum']) < 640 * 64 * 2**-24


@pytest.mark.parametrize('seed', range(5))
def test_rounding_costs_where_the_mean_embedding_is_far_out_and_centering_takes_that_away(seed):
    """rounding_loss is a difference of two losses; a shift of E changes only the rounded one (Fact 2)."""
    gpt = tiny_gpt(seed=seed, dtype='float32', logits_dtype='bfloat16')
    windows = torch.randint(64, (40, 17))

    def rounding_loss():
        found = analyze.statistics(analyze.positions(gpt, windows), gpt.E, gpt.config)
        return found['rounding_loss'].mean().item()

    with torch.no_grad():
        gpt.E.add_(60 * torch.randn(16))
        h, E, targets = gpt.hidden(windows[:, :-1]).flatten(0, 1), gpt.E.detach(), windows[:, 1:].flatten()
        rounded = (h.bfloat16().float() @ E.bfloat16().float().T).bfloat16()
        exact = F.cross_entropy(h.double() @ E.double().T, targets)
        cost = F.cross_entropy(rounded.double(), targets) - exact
        # analyze's side without rounding is in fp32: sums of logits of some 1000, 1000 2^-24 each
        assert cost > 0.05 and rounding_loss() == pytest.approx(cost.item(), abs=1e-4)
        gpt.E.sub_(gpt.E.mean(dim=0))
        assert abs(rounding_loss()) < 0.01
        gpt.config.logits_dtype = 'float32'
        assert rounding_loss() == 0


@pytest.mark.parametrize('losses, mean, n1', [
    ([3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065], 0.262, 0.306),   # baseline
    ([3.962, 3.881, 3.850, 3.842, 3.843, 3.844, 3.842], 0.024, 0.028)])  # mu-centering
def test_lrs_is_the_papers_in_both_normalisations(losses, mean, n1):
    """Published losses at 16M without weight tying; the paper's equation gives the mean, its table has n1."""
    assert tables.lrs(losses, [10.83] * 7) == pytest.approx((mean, n1), abs=6e-4)


def test_lrs_laws():
    rng = np.random.RandomState(0)
    for _ in range(200):
        n = int(rng.randint(2, 9))
        losses, L0 = list(rng.uniform(3, 12, n)), [10.83] * n
        mean, n1 = tables.lrs(losses, L0)
        assert mean >= 0 and n1 == pytest.approx(mean * n / (n - 1))
        assert tables.lrs(list(rng.permutation(losses)), L0)[0] == pytest.approx(mean)
        assert tables.lrs(losses + [min(losses)], L0 + [10.83])[0] == pytest.approx(mean * n / (n + 1))
        assert tables.lrs(losses + [math.nan], L0 + [10.83]) == tables.lrs(losses + [10.83], L0 + [10.83])
    assert tables.lrs([3.0], [10.0])[0] == tables.lrs([math.inf, math.nan], [10.0, 10.0])[0] == 0
    with pytest.raises(ValueError):
        tables.lrs([math.nan, 3.0], [None, None])
