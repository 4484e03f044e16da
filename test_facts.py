"""
The paper's Facts, every method's equation, and what the paper claims of its methods; in float64 unless
rounding is the point.

Whoever adds a method adds its equation to `equations`. The tests that run over HEAD_MODES then hold both
heads, their gradients and the evaluation to it. What else model, heads and training promise is in tests/.
"""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from analysis import tables
from model import GPT, METHODS, GPTConfig, embeddings_to_loss, gpt_config, logits_to_loss, plain_head
from oec.head import chunked_head

F64 = torch.float64
HEAD_MODES = [method for method in METHODS if gpt_config({'method': method}).head_mode == method]
close = torch.testing.assert_close
both_heads = pytest.mark.parametrize('head', [plain_head, chunked_head])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(g, *shape):
    return torch.randn(*shape, generator=g, dtype=F64)


def config_64(head_mode='baseline', **more):
    return GPTConfig(**{'head_mode': head_mode, 'dtype': 'float64', 'logits_dtype': 'float64', **more})


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


def chunks_of(n):
    """What to put in place of head.n_chunks, so that the chunked head takes n tokens at a time."""
    return lambda h, E, config: -(-len(h) // n)


def tiny_gpt(method='baseline', seed=0, head=plain_head, **more):
    """A GPT of one layer for training with `method`, in float64 unless `more` says otherwise."""
    torch.manual_seed(seed)
    settings = dict(method=method, lam=0.3, n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16,
                    dtype='float64', logits_dtype='float64')
    gpt = GPT(gpt_config({**settings, **more}))
    gpt.head = head
    return gpt.to(F64 if gpt.config.dtype == 'float64' else torch.float32)


def weights(gpt):
    return {name: p.detach().clone() for name, p in gpt.named_parameters()}


def token_batch(seed):
    """(tokens, targets), each (4, 16); half of the vocabulary never occurs."""
    tokens = torch.randint(64, (4, 17), generator=generator(seed)) // 2
    return tokens[:, :-1], tokens[:, 1:]


def adamw(gpt):
    return torch.optim.AdamW(gpt.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_steps(gpt, method, n, optimizer=None, lr=0.01, micro_batches=1, **more):
    """n optimizer steps of train.train_step; yields the statistics and the gradient norm of each."""
    args = {'method': method, 'lam': 0.3, 'grad_clip': 1.0, 'center_every': int(method == 'mu_centering')}
    args, updates = SimpleNamespace(**{**args, **more}), torch.tensor(0)
    optimizer = optimizer or adamw(gpt)
    for step in range(1, n + 1):
        batch = list(zip(*(x.chunk(micro_batches) for x in token_batch(step)), strict=True))
        yield train.train_step(gpt, optimizer, batch, step, lr, args, updates, False)


# -------- the Facts


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


@both_heads
@pytest.mark.parametrize('method', ['mu_centering', 'baseline', 'zero_sum', 'centered_head'])
def test_fact_2_iii_50_steps_differ_by_one_vector_common_to_all_output_embeddings(method, head):
    """And by nothing else: losses, all other weights and both moments, of E as well, are the baseline's."""
    results, shift = [], 0 if method == 'mu_centering' else 100
    for method_, norm in (('baseline', 0), (method, shift)):
        gpt = tiny_gpt(method_, head=head)
        train.shift_mean(gpt.E, norm, seed=1)
        start, optimizer = weights(gpt), adamw(gpt)
        losses = [stats['loss'] for stats, _ in train_steps(gpt, method_, 50, optimizer, grad_clip=0.5)]
        moments = [optimizer.state[p][name] for p in gpt.parameters() for name in ('exp_avg', 'exp_avg_sq')]
        results.append((start, weights(gpt), torch.stack(losses), moments))
    (start, base, losses, moments), (its_start, its, its_losses, its_moments) = results
    assert (base['wte.weight'] - start['wte.weight']).abs().max() > 1e-3  # it did train
    before, after = (b.pop('lm_head.weight') - a.pop('lm_head.weight')
                     for a, b in ((start, its_start), (base, its)))
    close((its_losses, its), (losses, base), rtol=0, atol=1e-9)
    assert before[0].norm().item() == pytest.approx(shift) and after.norm() > 1e-3
    close(after, before if shift else after[:1].expand_as(after), rtol=0, atol=1e-9)
    for ours, theirs in zip(its_moments, moments, strict=True):
        assert theirs.abs().max() > 0 and (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def fact_3_terms(h, E):
    """r_emb (V,), r_cos, r_log of one h (H,), Eq. 11, and the two maxima that the paper's proof cancels."""
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


@both_heads
def test_fact_4_a_rounded_gradient_of_the_logits_pushes_h_along_mu(head, monkeypatch):
    """
    Ours, not the paper's. The gradient of the logits g = p - y sums to 0, rounded to bf16 it is g + delta.
    So dL/dh is the exact one plus (sum_i delta_i) mu plus sum_i delta_i (e_i - mu). The middle term is 0
    where mu is, and zero_sum takes it away.
    """
    monkeypatch.setattr('oec.head.n_chunks', chunks_of(7))
    for h, E, targets in random_heads():
        g, mu = (h @ E.T).softmax(dim=1) - F.one_hot(targets, len(E)), E.mean(dim=0)
        delta = g.bfloat16().double() - g
        close(g.sum(dim=1), torch.zeros(len(h), dtype=F64), rtol=0, atol=1e-12)
        along_mu, rest = delta.sum(dim=1)[:, None] * mu, delta @ (E - mu)
        for method, embeddings, expected in (('baseline', E, g @ E + along_mu + rest),
                                             ('baseline', E - mu, g @ E + rest),
                                             ('zero_sum', E, g @ E + rest)):
            config = config_64(method, logits_dtype='bfloat16', rounded='gradient')
            h.requires_grad_()
            loss, stats = head(h, embeddings.clone().requires_grad_(), targets, config)
            found = torch.autograd.grad(loss, h)[0]
            close(found, expected.detach(), rtol=1e-9, atol=1e-11 * E.abs().max().item())
            if head is chunked_head:
                close(stats['gradient_sum'], delta.detach().sum(dim=1), rtol=1e-9, atol=1e-12)


def test_fact_4_below_2_to_the_minus_9_the_rounding_of_p_t_minus_1_is_minus_p_t():
    """For every p_t that bf16 has. Where most are that small, the rounded gradient sums to less than 0."""
    p = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    p = p[p <= 1].double()
    lost = (p - 1).bfloat16() == -1
    assert torch.equal(lost, p <= 2.0 ** -9) and lost.sum() > 10_000  # a tie goes to the even -1
    g = generator(0)
    p = normal(g, 4096, 1000).softmax(dim=1)  # most are below 2^-9
    targets = torch.multinomial(p, 1, generator=g)  # as often as the model predicts
    grad = p.scatter_add(1, targets, -torch.ones(4096, 1, dtype=F64))
    error = grad.bfloat16().double() - grad
    sums, others = error.sum(dim=1), error.sum(dim=1) - error.gather(1, targets).squeeze(1)
    assert sums.mean() < -5 * sums.std() / 64  # standard errors of 4096 positions
    assert others.mean().abs() < 5 * others.std() / 64


# -------- every method is its equation, in both heads


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


def head_loss(h, E, targets, config, head):
    """What training minimises, a mean over positions, with one of the heads; and its statistics."""
    loss, stats = head(h, E, targets, config)
    return loss / len(h) + embeddings_to_loss(E, config, STEP), stats


@both_heads
@pytest.mark.parametrize('method', HEAD_MODES)
def test_each_method_is_its_equation_in_training_and_evaluation(method, head, monkeypatch):
    """Chunks may be of one token, larger than the input, or not divide it."""
    tol = 1e-6 if method == 'spectrum_control' else 1e-10  # a Gram matrix squares a condition number of 1e4
    config = config_64(method, lam=0.3, cap=5.0)
    for i, (h, E, targets) in enumerate(random_heads(30)):
        monkeypatch.setattr('oec.head.n_chunks', chunks_of((1, 7, 64)[i % 3]))
        h, E = h.requires_grad_(), E.requires_grad_()
        loss, reg = equations(method, h, E, targets, 0.3, 5.0)
        ours, stats = head_loss(h, E, targets, config, head)
        close(ours, loss + reg, rtol=tol, atol=tol)
        for a, b in zip(*(torch.autograd.grad(x, (h, E)) for x in (ours, loss + reg)), strict=True):
            assert (a - b).norm() <= tol * b.norm() + 1e-11  # the scale of h or E cancels in norm_softmax
        with torch.no_grad():
            in_evaluation, its_stats = head_loss(h, E, targets, config, head)
        close(in_evaluation, ours.detach(), rtol=1e-10, atol=1e-10)
        for found in (stats, its_stats):
            close(found['loss'].mean(), loss.detach(), rtol=1e-10, atol=1e-10)  # without the regulariser
            close(found['reg'].mean() + embeddings_to_loss(E, config, STEP), reg, rtol=tol, atol=tol)


@both_heads
def test_the_centered_head_is_the_baseline_on_centered_embeddings(head, monkeypatch):
    """
    l_i = (e_i - mu) . h, ours: logits and gradients are those of the baseline with E - mu in place of E. In
    exact arithmetic only the mean logit shows that (Fact 2), with a rounded gradient dL/dh does as well.
    """
    monkeypatch.setattr('oec.head.n_chunks', chunks_of(7))
    for h, E, targets in random_heads(20):
        results = []
        for mode, embeddings in (('centered_head', E), ('baseline', E - E.mean(dim=0))):
            h_, E_ = h.clone().requires_grad_(), embeddings.clone().requires_grad_()
            loss, stats = head(h_, E_, targets, config_64(mode, logits_dtype='bfloat16', rounded='gradient'))
            results.append((loss, *torch.autograd.grad(loss, (h_, E_)), stats))
        close(*results, rtol=1e-9, atol=1e-10)
        assert (results[0][-1]['logit_mean'].abs() <= 1e-10 * (h @ E.T).abs().max()).all()


@both_heads
@pytest.mark.parametrize('method', HEAD_MODES)
def test_gradcheck(method, head, monkeypatch):
    monkeypatch.setattr('oec.head.n_chunks', chunks_of(2))
    g = generator(0)
    h, E = (normal(g, n, 4).requires_grad_() for n in (5, 9))
    targets, config = torch.randint(9, (5,), generator=g), config_64(method, lam=0.5, cap=2.0)
    assert torch.autograd.gradcheck(lambda h, E: head_loss(h, E, targets, config, head)[0], (h, E))


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('lr', [0.0, 1e-3, 0.1])
def test_weight_decay_is_its_equation(lr, tying):
    """E <- (1 - lam) E - lr u (Eq. 2): at any learning rate a step is the baseline's step and -lam E."""
    base, decayed = tiny_gpt(weight_tying=tying), tiny_gpt('weight_decay', weight_tying=tying)
    start = base.E.detach().clone()
    list(train_steps(base, 'baseline', 1, lr=lr))
    list(train_steps(decayed, 'weight_decay', 1, lr=lr))
    close(decayed.E, base.E - 0.3 * start, rtol=0, atol=1e-14)
    for p, q in zip(base.parameters(), decayed.parameters(), strict=True):
        assert p is base.E or torch.equal(p, q)


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('method, n', [('mu_centering', 1), ('mu_centering', 3), ('z_loss', 1)])
def test_centering_leaves_no_more_than_rounding_after_every_nth_step(method, n, tying):
    """|mu| <= 2^-23 |E|_F in fp32, alone and beside another method."""
    gpt = tiny_gpt(method, dtype='float32', logits_dtype='float32', weight_tying=tying)
    for step, (stats, _) in enumerate(train_steps(gpt, method, 30, lr=0.3, center_every=n), 1):
        E = gpt.E.detach().double()
        centered = E.mean(dim=0).norm() <= 2.0 ** -23 * E.norm()
        assert centered == (step % n == 0) and (stats['reg'] > 0).all() == (method == 'z_loss')


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


# -------- what the paper claims


def test_z_loss_treats_positive_and_negative_logits_differently():
    """A single logit that rises is held back; one that falls to minus infinity is not."""
    for seed in range(20):
        logits = normal(generator(seed), 6).repeat(4, 1)
        logits[:, 0] = torch.tensor([4.0 + seed / 4, -4.0 - seed / 4, 40.0, -40.0])
        logits.requires_grad_()
        targets = torch.ones(4, dtype=torch.int64)
        loss, stats = logits_to_loss(logits, targets, config_64('z_loss', lam=1.0))
        slope = torch.autograd.grad(loss, logits)[0][:, 0]
        assert stats['reg'][0] > stats['reg'][1] + 1e-3
        assert slope[2] > 79 and abs(slope[3]) < 1e-12  # 2 log Z, and the 1 of the cross entropy


@pytest.mark.parametrize('V', [2, 10, 50304])
def test_z_loss_is_minimised_by_the_uniform_and_the_one_hot_configuration(V):
    """
    Appendix B, Eq. 23 and 24: at l_j = -log V, and as l_i = 0 and all other l_j -> -infinity, z-loss and its
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


def test_it_is_the_second_moment_in_adam_that_causes_the_common_shift_of_the_embeddings():
    """
    The logit gradients sum to zero over the vocabulary, so SGD leaves mu where it is, and so does Adam with
    one second moment for all embeddings (Coupled Adam).
    """
    drift = {}
    for name, method in (('SGD', 'baseline'), ('Adam', 'baseline'), ('Coupled Adam', 'coupled_adam')):
        gpt = tiny_gpt(method, head=chunked_head)
        start = gpt.E.detach().clone()
        sgd = torch.optim.SGD(gpt.parameters(), lr=1, momentum=0.9, fused=True)
        steps = train_steps(gpt, method, 60, sgd if name == 'SGD' else None, lr=0.02)
        drift[name] = [(gpt.E.detach() - start).mean(dim=0).norm().item() for _ in steps]
        assert (gpt.E - start).norm() > 0.1  # the embeddings do move, each its own way
    assert max(drift['SGD'] + drift['Coupled Adam']) < 1e-13
    assert drift['Adam'][-1] > 0.05 and drift['Adam'][::10] == sorted(drift['Adam'][::10])


def centered_log_probabilities(logits, method):
    """log p_t minus its mean over t, for logits (V,): what the softmax sees of them."""
    V, config = len(logits), config_64(method, lam=0.0, cap=3.0)
    losses = logits_to_loss(logits.expand(V, V), torch.arange(V), config)[1]['loss']
    return losses.mean() - losses


def force(method, h, E):
    """What the method alone does to E (V, H): its change, or the negative gradient of its regulariser."""
    if method in ('weight_decay', 'mu_centering'):
        gpt = tiny_gpt(method)
        with torch.no_grad():
            gpt.E.copy_(E)
        list(train_steps(gpt, method, 1, lr=0.0))
        return gpt.E.detach() - E
    if method == 'soft_capping':  # is another model: nothing acts on E but its cross entropy
        return torch.zeros_like(E)
    targets, E = torch.zeros(len(h), dtype=torch.int64), E.clone().requires_grad_()
    total, bare = (head_loss(h, E, targets, config_64(mode, lam=1.0), plain_head)[0]
                   for mode in (method, 'baseline'))
    return -torch.autograd.grad(total - bare, E)[0]


@pytest.mark.parametrize('method, intervention, symmetry, suppression', [
    ('soft_capping', 'model', 'yes', 'no'),
    ('weight_decay', 'training', 'yes', 'no'),
    ('z_loss', 'training', 'no', 'no'),
    ('mu_loss', 'training', 'yes', 'yes'),
    ('mu_centering', 'training', 'yes', 'yes')])
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


@pytest.mark.parametrize('losses, mean, n1', [
    ([3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065], 0.262, 0.306),   # baseline
    ([3.962, 3.881, 3.850, 3.842, 3.843, 3.844, 3.842], 0.024, 0.028)])  # mu-centering
def test_lrs_is_the_papers_in_both_normalisations(losses, mean, n1):
    """Published losses at 16M, untied. The paper's equation gives the mean, its table shows n1."""
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
