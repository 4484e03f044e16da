"""The paper's Facts, every method's mathematics, and the definitions that the numbers rest on; float64 unless rounding is the point."""
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import analyze
import data
import model as model_py
import tables
import settings as settings_py
import train
from common import write_json
from model import GPT, LAM, METHODS, SIZES, STATS, ChunkedHead, GPTConfig, embeddings_to_loss, logits_to_loss, plain_head

F64 = torch.float64
BF16_UNIT = 2.0 ** -9  # largest relative error of one rounding to bf16 (8 significant bits)


def random_heads(n=60):
    """(h (N, H), E (V, H), targets (N,), generator) of many shapes and scales, with and without a shifted mean."""
    for seed in range(n):
        g = torch.Generator().manual_seed(seed)
        N, V, H = (int(torch.randint(lo, hi, (), generator=g)) for lo, hi in ((1, 40), (2, 300), (1, 33)))
        shift = torch.randn(H, generator=g, dtype=F64) * 10 ** float(torch.empty(()).uniform_(-2, 2, generator=g))
        E = torch.randn(V, H, generator=g, dtype=F64) + shift
        yield torch.randn(N, H, generator=g, dtype=F64), E, torch.randint(V, (N,), generator=g), g


def config_64(method='baseline', **more):
    return GPTConfig(head_mode=method, dtype='float64', logits_dtype='float64', **more)


# ---------------------------------------------------------------------------------------------------------------- the Facts


def test_fact_1_the_mean_logit_is_mu_times_h():
    for h, E, _, _ in random_heads():
        torch.testing.assert_close((h @ E.T).mean(dim=1), h @ E.mean(dim=0), rtol=1e-10, atol=1e-10)


def test_fact_2_centering_sets_the_mean_to_zero_and_leaves_std_probabilities_loss_and_gradients():
    for h, E, targets, _ in random_heads():
        results = []
        for e in (E, E - E.mean(dim=0)):
            h_, e_ = h.clone().requires_grad_(), e.clone().requires_grad_()
            logits = h_ @ e_.T
            loss = F.cross_entropy(logits, targets)
            results.append((logits.detach(), logits.softmax(-1).detach(), loss.detach(), *torch.autograd.grad(loss, (h_, e_))))
        (l, *before), (l_star, *after) = results
        scale = l.abs().max().item()
        torch.testing.assert_close(l_star.mean(dim=1), torch.zeros(len(h), dtype=F64), rtol=0, atol=1e-13 * scale)              # (i)
        torch.testing.assert_close(l_star.std(dim=1), l.std(dim=1), rtol=1e-10, atol=1e-13 * scale)                            # (ii)
        for a, b in zip(before, after):                                                                                        # (iii)
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * max(1, scale))


def fact_3_terms(h, E):
    """r_emb (V,), r_cos, r_log, and the factors max_i(‖e_i‖ |cos(h, e*_i)|) and max_i(‖e_i‖ |cos(h, e_i)|), for one h (H,)."""
    E_star = E - E.mean(dim=0)
    norm, norm_star = E.norm(dim=1), E_star.norm(dim=1)
    cos, cos_star = (E @ h) / (norm * h.norm()), (E_star @ h) / (norm_star * h.norm())
    return (norm_star / norm, cos_star.abs().max() / cos.abs().max(), (E_star @ h).abs().max() / (E @ h).abs().max(),
            (norm * cos_star.abs()).max(), (norm * cos.abs()).max())


def test_fact_3_as_it_holds():
    for h, E, _, g in random_heads():
        if E.size(1) < 2:
            continue
        r_emb, _, r_log, top, bottom = fact_3_terms(h[0], E)
        assert r_log <= r_emb.max() * top / bottom * (1 + 1e-9)
        # with embeddings of one length the paper's own statement holds
        unit = E / E.norm(dim=1, keepdim=True)
        r_emb, r_cos, r_log, _, _ = fact_3_terms(h[0], unit)
        if bool((r_emb < 1).all()) and r_cos < 1:
            assert r_log < 1


def test_fact_3_does_not_hold_as_the_paper_states_it():
    E = torch.tensor([[-1.0, 3.0]] * 999 + [[10.0, 1000.0]], dtype=F64)
    r_emb, r_cos, r_log, _, _ = fact_3_terms(torch.tensor([1.0, 0.0], dtype=F64), E)
    assert r_emb.max() < 0.9961 and abs(r_cos - 0.035) < 5e-4  # the premise holds
    assert abs(r_log - 1.099) < 5e-4                           # the conclusion does not


def shards(folder, vocab_size=60, n=6000):
    """A folder with a train and a val shard of random tokens in which each token makes the next likely."""
    tokens = np.cumsum(np.random.RandomState(0).randint(0, 3, n)) % vocab_size
    for split in ('train', 'val'):
        data.write_shard(os.path.join(folder, f'x_{split}_000000.bin'), tokens)
    write_json(os.path.join(folder, 'meta.json'), {'vocab_size': vocab_size})
    return str(folder)


def run(out, *flags):
    """train.main at a size that takes seconds; the checkpoint of the last step is kept. Returns that checkpoint."""
    kept = pytest.MonkeyPatch()
    kept.setattr(train.os, 'unlink', lambda path: None)  # ckpt.pt, which the end of a run removes
    try:
        assert train.main([f'--out={out}', '--size=tiny', '--vocab_size=64', '--n_embd=16', '--block_size=16', '--batch_size=4', '--device=cpu',
                           '--test_tokens=64', '--eval_tokens=64', *flags]) == 0
    finally:
        kept.undo()
    return torch.load(os.path.join(out, 'ckpt.pt'), weights_only=True)


@pytest.mark.parametrize('lr', ['1e-3', '1e-2'])
def test_fact_2_iii_no_model_parameters_other_than_the_output_embeddings_are_affected_during_training_nor_optimizer_states(tmp_path, lr):
    flags = (f'--data={shards(tmp_path)}', f'--lr={lr}', '--steps=50', '--dtype=float64', '--grad_clip=0.5')
    base, centered = (run(tmp_path / m, f'--method={m}', *flags) for m in ('baseline', 'mu_centering'))
    names = list(base['model'])
    moved = base['model']['wte.weight'] - GPT(GPTConfig(**base_shape(base))).double().wte.weight.detach()
    assert moved.abs().max() > 1e-3  # it did train
    for name in names:
        if name != 'lm_head.weight':
            torch.testing.assert_close(base['model'][name], centered['model'][name], rtol=0, atol=1e-9)
    difference = base['model']['lm_head.weight'] - centered['model']['lm_head.weight']
    torch.testing.assert_close(difference, difference[:1].expand_as(difference), rtol=0, atol=1e-9)
    assert difference.norm() > 1e-3 and centered['model']['lm_head.weight'].mean(dim=0).norm() < 1e-12
    for i, state in base['optimizer']['state'].items():  # both moments of every parameter, of E as well: its gradients are the same
        for moment in ('exp_avg', 'exp_avg_sq'):
            scale = state[moment].abs().max().item()
            torch.testing.assert_close(state[moment], centered['optimizer']['state'][i][moment], rtol=0, atol=1e-9 * scale)
            assert scale > 0


def base_shape(checkpoint):
    torch.manual_seed(checkpoint['config']['seed'])
    return {k: checkpoint['config'][k] for k in ('n_layer', 'n_embd', 'n_head', 'vocab_size', 'block_size')}


# ------------------------------------------------------------------------------------------------------------- the methods


def equations(method, h, E, targets, lam, cap):
    """Mean cross entropy and regulariser straight from the papers' equations, written out pair by pair and value by value."""
    l = raw = h @ E.T
    if method == 'soft_capping':
        l = cap * torch.tanh(l / cap)
    if method == 'norm_softmax':
        l = l / l.std(dim=1, correction=0, keepdim=True)
    shift = l.max(dim=1).values
    Z = (l - shift[:, None]).exp().sum(dim=1)
    log_Z = Z.log() + shift
    loss = -(l[torch.arange(len(l)), targets] - log_Z).mean()
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
        rows = [(3 * 256 + i) % V for i in range(256)] if V > 256 else range(V)  # of step 3
        return loss, lam * sum(torch.exp(-(unit[i] - unit).square().sum(dim=1)).sum() for i in rows) / (len(rows) * V)
    if method == 'spectrum_control':
        prior = [math.sqrt(2 * V / (V + H)) * math.exp(-k / H) for k in range(1, min(V, H) + 1)]
        return loss, lam * sum((sigma - p) ** 2 for sigma, p in zip(torch.linalg.svdvals(E), prior))
    return loss, torch.zeros((), dtype=F64)


def head_loss(h, E, targets, config, chunked):
    loss, stats = (ChunkedHead.apply(h, E, targets, config) if chunked else plain_head(h, E, targets, config))
    return loss / len(h) + embeddings_to_loss(E, config, step=3), stats


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('chunked', [False, True])
def test_each_method_is_its_equation_in_both_heads(method, chunked, monkeypatch):
    monkeypatch.setattr(model_py, 'n_chunks', lambda h, E: -(-len(h) // 7))
    tol = 1e-6 if method == 'spectrum_control' else 1e-10  # a Gram matrix squares the condition number, here up to 1e4
    for h, E, targets, _ in random_heads(25):
        config = config_64(method, lam=0.3, cap=5.0)
        h, E = h.requires_grad_(), E.requires_grad_()
        loss, reg = equations(method, h, E, targets, 0.3, 5.0)
        ours, stats = head_loss(h, E, targets, config, chunked)
        torch.testing.assert_close(ours, loss + reg, rtol=tol, atol=tol)
        torch.testing.assert_close(stats[0] / len(h), loss.detach(), rtol=1e-10, atol=1e-10)  # reported bare
        for a, b in zip(torch.autograd.grad(ours, (h, E)), torch.autograd.grad(loss + reg, (h, E))):
            assert (a - b).norm() <= tol * b.norm() + 1e-11  # 0 where one scale for h or E cancels in norm_softmax, up to its eps


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('chunked', [False, True])
def test_gradcheck(method, chunked, monkeypatch):
    monkeypatch.setattr(model_py, 'n_chunks', lambda h, E: 3)
    g = torch.Generator().manual_seed(0)
    h, E = (torch.randn(n, 4, generator=g, dtype=F64, requires_grad=True) for n in (5, 9))
    targets = torch.randint(9, (5,), generator=g)
    config = config_64(method, lam=0.5, cap=2.0)
    assert torch.autograd.gradcheck(lambda h, E: head_loss(h, E, targets, config, chunked)[0], (h, E))


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_heads_agree_within_bf16_rounding(method, dtype, monkeypatch):
    """Both ways to bf16 logits. Each head rounds the logit gradient D and its products to bf16 once: |error| <= 2 u |D| |E| a head."""
    monkeypatch.setattr(model_py, 'n_chunks', lambda h, E: 3)
    g = torch.Generator().manual_seed(1)
    h = torch.randn(128, 32, generator=g).bfloat16().float().requires_grad_()
    E = (torch.randn(500, 32, generator=g) + 0.5).bfloat16().float().requires_grad_()
    targets = torch.randint(500, (128,), generator=g)
    config = GPTConfig(head_mode=method, lam=0.01, cap=10.0, dtype=dtype, logits_dtype='bfloat16')
    (a, stats_a), (b, stats_b) = (head_loss(h, E, targets, config, chunked) for chunked in (False, True))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    torch.testing.assert_close(stats_a, stats_b, rtol=1e-5, atol=1e-3)
    logits = (h @ E.T).bfloat16().detach().requires_grad_()
    D = torch.autograd.grad(logits_to_loss(logits, targets, config)[0], logits)[0].float().abs() / len(h)
    for x, y, bound in zip(torch.autograd.grad(a, (h, E)), torch.autograd.grad(b, (h, E)), (D @ E.abs(), D.T @ h.abs())):
        assert bool(((x - y).abs() <= 4 * BF16_UNIT * bound + 1e-7).all())
        assert x.norm() > 1e-4


def test_the_chunked_head_takes_whatever_comes(monkeypatch):
    """
    Random shapes with logits up to 1e4, all targets equal, one token, one class, chunks that do not divide the input or are
    larger than it: loss, statistics and gradients are those of autograd over all logits, to the rounding of float64.
    """
    rng = np.random.RandomState(0)
    real = model_py.n_chunks
    for i in range(120):
        g = torch.Generator().manual_seed(i)
        N, V, H = 1 if i % 6 == 0 else int(rng.randint(1, 200)), int(rng.randint(1, 300)), int(rng.randint(1, 33))
        method = METHODS[i % len(METHODS)]
        h, E = torch.randn(N, H, generator=g, dtype=F64), torch.randn(V, H, generator=g, dtype=F64)
        largest = (h @ E.T).abs().max()
        h = (h * 10 ** rng.uniform(-2, 4) / largest).requires_grad_()
        E.requires_grad_()
        targets = torch.full((N,), int(rng.randint(V))) if i % 3 == 0 else torch.randint(V, (N,), generator=g)
        chunk = int(rng.randint(1, 300))
        monkeypatch.setattr(model_py, 'n_chunks', real if i % 4 == 0 else lambda h, E: -(-len(h) // chunk))
        config = config_64(method, lam=1e-3)
        (a, stats_a), (b, stats_b) = (head_loss(h, E, targets, config, chunked) for chunked in (True, False))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stats_a, stats_b, rtol=1e-11, atol=1e-8)
        for x, y in zip(torch.autograd.grad(a, (h, E)), torch.autograd.grad(b, (h, E))):
            assert bool(torch.isfinite(x).all()) and (x - y).norm() <= 1e-11 * y.norm() + 1e-12, (i, N, V, H)


def test_logits_are_rounded_to_bf16_and_the_example_of_the_introduction():
    """128.5 becomes 128: the probability 0.142 becomes 0.091."""
    h, E = torch.tensor([[128.0, 1.0]]), torch.tensor([[1.0, 0.5]] + [[1.0, 0.0]] * 10)
    for dtype, logits_dtype, p in (('float32', 'float32', 0.142), ('float32', 'bfloat16', 0.091), ('bfloat16', 'bfloat16', 0.091),
                                   ('bfloat16', 'float32', 0.142)):
        for chunked in (False, True):
            loss, _ = head_loss(h.requires_grad_(), E, torch.tensor([0]), GPTConfig(dtype=dtype, logits_dtype=logits_dtype), chunked)
            assert abs(math.exp(-loss.item()) - p) < 5e-4


def test_compiling_keeps_every_rounding():
    """A compiler that fuses a cast down with the cast up again would undo what the paper studies."""
    compiled = model_py.compile_head(model_py.loss_and_grad)
    config = GPTConfig(logits_dtype='bfloat16')
    _, loss, _ = compiled(torch.tensor([[128.5] + [128.0] * 10]), torch.tensor([0]), config, False)
    assert abs(math.exp(-loss.item()) - 0.091) < 5e-4
    g = torch.Generator().manual_seed(0)
    products, targets = 30 * torch.randn(16, 200, generator=g), torch.randint(200, (16,), generator=g)
    for method in ('soft_capping', 'z_loss', 'norm_softmax'):
        config = GPTConfig(logits_dtype='bfloat16', head_mode=method)
        (a, eager, _), (b, loss, _) = (f(products.clone(), targets, config, False) for f in (model_py.loss_and_grad, compiled))
        torch.testing.assert_close(loss, eager, rtol=1e-6, atol=0)
        # fp32 rounding may tip a value over to the next bf16 number here and there; a missing rounding would change most
        assert (a != b).float().mean() < 0.01 and torch.equal(a, a.bfloat16().float())


def test_the_spread_of_the_logit_mean_survives_its_squares():
    """At the published 16M baseline's mean logit of 1152, fp32 squares would lose a spread of 0.6 altogether."""
    mean = 1152 + 0.6 * torch.randn(4096, 1, generator=torch.Generator().manual_seed(0))
    stats = logits_to_loss(mean + torch.linspace(-1, 1, 64), torch.zeros(4096, dtype=torch.int64), GPTConfig())[1] / 4096
    spread = math.sqrt(stats[STATS.index('logit_mean_squared')] - stats[STATS.index('logit_mean')] ** 2)
    assert spread == pytest.approx(mean.double().std(correction=0).item(), rel=1e-3)


def test_z_loss_treats_positive_and_negative_logits_differently():
    """L_z(l_i) != L_z(-l_i); a single logit that falls to minus infinity is not held back, one that rises is."""
    config, target = config_64('z_loss', lam=1.0), torch.tensor([1])

    def L_z(l_i, others):
        logits = torch.cat((l_i[None], others))[None]
        return logits_to_loss(logits, target, config)[1][STATS.index('reg')], logits_to_loss(logits, target, config)[0]
    for seed in range(20):
        others = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=F64)
        l = torch.tensor(4.0 + seed / 4, dtype=F64)
        assert L_z(l, others)[0] > L_z(-l, others)[0] + 1e-3
        far = torch.tensor(-40.0, dtype=F64, requires_grad=True)
        assert abs(torch.autograd.grad(L_z(far, others)[1], far)[0]) < 1e-12
        high = torch.tensor(40.0, dtype=F64, requires_grad=True)
        assert torch.autograd.grad(L_z(high, others)[1], high)[0] > 79  # d log^2 Z / d l = 2 log Z, plus the cross entropy's 1


@pytest.mark.parametrize('tying', ['--weight_tying', '--no-weight_tying'])
def test_weight_decay_shrinks_the_output_embeddings_alone_and_whatever_the_learning_rate(tmp_path, tying):
    """E <- (1 - lam) E - lr u: after one step it differs from the baseline by -lam E_0."""
    for lr in ('1e-3', '1e-1'):
        flags = (f'--data={shards(tmp_path)}', f'--lr={lr}', '--steps=1', '--dtype=float64', tying, '--min_lr=0')
        base = run(tmp_path / f'b{lr}{tying}', *flags)
        decayed = run(tmp_path / f'w{lr}{tying}', '--method=weight_decay', '--lam=0.03', *flags)
        initial = GPT(GPTConfig(**base_shape(base), weight_tying=tying == '--weight_tying')).double().E.detach()
        torch.testing.assert_close(decayed['model']['lm_head.weight'], base['model']['lm_head.weight'] - 0.03 * initial, rtol=0, atol=1e-14)
        for name in base['model']:
            if name != 'lm_head.weight' and not (name == 'wte.weight' and tying == '--weight_tying'):
                assert torch.equal(base['model'][name], decayed['model'][name])


@pytest.mark.parametrize('tying', ['--weight_tying', '--no-weight_tying'])
def test_centering_leaves_no_more_than_rounding_after_every_step(tmp_path, tying):
    """‖μ‖ <= 2^-23 ‖E‖_F in fp32, tied or not, where the baseline drifts."""
    flags = (f'--data={shards(tmp_path)}', '--lr=0.3', '--steps=30', '--keep_every=1', '--log_every=1', tying)
    run(tmp_path / 'c', '--method=mu_centering', *flags)
    for step in range(1, 31):
        E = torch.load(tmp_path / 'c' / f'model_{step}.pt', weights_only=True)['model']['lm_head.weight']
        assert E.double().mean(dim=0).norm() <= 2.0 ** -23 * E.norm()
    assert run(tmp_path / 'b', *flags)['model']['lm_head.weight'].mean(dim=0).norm() > 0.1


# ------------------------------------------------------------------------------------ what the methods of other papers claim


def reg_of(method, E, step=0, **more):
    """A regulariser of the embeddings E (V, H) alone, lambda = 1."""
    return embeddings_to_loss(E, config_64(method, lam=1.0, **more), step)


def test_max_z_loss_pulls_at_the_largest_logit_alone():
    for h, E, targets, _ in random_heads(20):
        logits = (h @ E.T).requires_grad_()
        (with_reg, _), (bare, _) = (logits_to_loss(logits, targets, config_64(m, lam=0.1)) for m in ('max_z_loss', 'baseline'))
        pull = torch.autograd.grad(with_reg - bare, logits)[0]
        top, index = logits.detach().max(dim=1)
        expected = torch.zeros_like(pull).scatter_(1, index[:, None], 0.2 * top[:, None])
        torch.testing.assert_close(pull, expected, rtol=1e-9, atol=1e-9)


def test_norm_softmax_has_unit_variance_whatever_the_scale_in_training_and_evaluation():
    for h, E, targets, _ in random_heads(20):
        if E.size(1) < 2:
            continue
        config, n = config_64('norm_softmax'), len(h)
        losses = [plain_head(c * h, E, targets, config)[1][0] / n for c in (1, 10, 1e3)]
        losses.append(model_py.head_stats(3 * h, E, targets, config)[0] / n)
        l = h @ E.T
        scores = l / l.std(dim=1, correction=0, keepdim=True)
        torch.testing.assert_close(torch.stack(losses), F.cross_entropy(scores, targets).expand(4), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(plain_head(h, E, targets, config)[1][2:], model_py.logit_stats(l))  # statistics: of the logits themselves


def test_cosine_reg_is_the_mean_cosine_and_falls_as_a_common_shift_is_taken_away():
    for _, E, _, _ in random_heads(20):
        if len(E) < 20 or E.size(1) < 4:
            continue
        centered = E - E.mean(dim=0)
        values = [reg_of('cosine_reg', centered + c * torch.ones(E.size(1), dtype=F64)).item() for c in (0.0, 0.5, 1.0, 10.0)]
        assert values == sorted(values) and abs(values[0]) < 2 / len(E) + 0.05 and values[-1] > 0.8
        assert reg_of('cosine_reg', 7 * E) == pytest.approx(reg_of('cosine_reg', E).item(), abs=1e-12)  # of directions alone


def test_laplace_reg_is_descended_along_the_graph_laplacian_and_samples_every_pair_in_turn():
    g = torch.Generator().manual_seed(0)
    unit = F.normalize(torch.randn(200, 6, generator=g, dtype=F64) + 1).requires_grad_()
    gradient = torch.autograd.grad(reg_of('laplace_reg', unit), unit)[0]
    unit = unit.detach()
    W = torch.exp(-torch.cdist(unit, unit).square())
    flow = -4 * (torch.diag(W.sum(dim=1)) - W) @ unit / 200 ** 2                      # L = D - W
    flow -= (flow * unit).sum(dim=1, keepdim=True) * unit                             # along the sphere
    torch.testing.assert_close(gradient, flow, rtol=1e-9, atol=1e-12)
    # more than 256 embeddings: the steps together are the mean over all pairs, and each step is always the same sample
    E = torch.randn(640, 6, generator=g, dtype=F64)
    steps = [reg_of('laplace_reg', E, step).item() for step in range(5)]              # 5 x 256 = 2 x 640
    unit = F.normalize(E)
    assert np.mean(steps) == pytest.approx(torch.exp(-torch.cdist(unit, unit).square()).mean().item(), rel=1e-9)
    assert steps[0] != steps[1] and steps[0] == reg_of('laplace_reg', E, 5).item()


def test_spectrum_control_is_zero_at_its_prior_alone_and_sees_no_rotation():
    g = torch.Generator().manual_seed(0)
    V, H = 90, 8
    U, Q = (torch.linalg.qr(torch.randn(n, H, generator=g, dtype=F64))[0] for n in (V, H))
    prior = math.sqrt(2 * V / (V + H)) * torch.exp(-torch.arange(1, H + 1, dtype=F64) / H)
    E = U @ torch.diag(prior) @ Q.T
    assert reg_of('spectrum_control', E) < 1e-24
    for shift in (0.1, 1.0, 100.0):  # of all embeddings together: it shows in the largest singular value
        shifted = E + shift
        assert reg_of('spectrum_control', shifted) > 0.5 * V * H * shift ** 2 - 5
        assert reg_of('spectrum_control', shifted @ Q) == pytest.approx(reg_of('spectrum_control', shifted).item(), rel=1e-9)
    huge = torch.full((V, H), 1e30, requires_grad=True)  # a diverged E gives no exception, and a number that ends the run
    assert not torch.isfinite(torch.autograd.grad(embeddings_to_loss(huge, GPTConfig(head_mode='spectrum_control')), huge)[0]).all()


def tiny_gpt(method='baseline', tying=False):
    torch.manual_seed(0)
    return GPT(config_64(method, n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16, weight_tying=tying, lam=0.3)).double()


def token_batch(seed, n=4):
    tokens = torch.randint(64, (n, 17), generator=torch.Generator().manual_seed(seed)) // 2  # half of the vocabulary never occurs
    return tokens[:, :-1], tokens[:, 1:]


STEP = {'lam': 0.3, 'grad_clip': 1.0, 'center_every': 1, 'center_input': False}


def train_steps(gpt, method, n, optimizer=None, lr=0.01, micro_batches=1, **more):
    """n steps of train.train_step; yields the gradient norm of each."""
    optimizer = optimizer or torch.optim.AdamW(gpt.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    finite = torch.ones(())
    for step in range(1, n + 1):
        batch = list(zip(*(x.chunk(micro_batches) for x in token_batch(step))))
        yield train.train_step(gpt, gpt, optimizer, batch, step, lr, {**STEP, 'method': method, **more}, finite, False)


@pytest.mark.parametrize('method', ['baseline', 'weight_decay', 'coupled_adam', 'mu_centering', 'z_loss+mu_centering'])
def test_nothing_changes_once_a_gradient_is_not_finite(method):
    """Not by centering either: between two centerings (center_every) E has a mean that it would take away."""
    gpt = tiny_gpt(method.removesuffix('+mu_centering'))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    s = {**STEP, 'method': method, 'center_every': 2, 'center_input': 'mu_centering' in method}
    finite = torch.ones(())
    train.train_step(gpt, gpt, optimizer, [token_batch(1)], 1, 0.1, s, finite, False)
    finite.zero_()
    before = [p.detach().clone() for p in gpt.parameters()]
    assert gpt.E.mean(dim=0).norm() > 1e-3 or method == 'coupled_adam'
    train.train_step(gpt, gpt, optimizer, [token_batch(2)], 2, 0.1, s, finite, False)
    assert all(torch.equal(a, b) for a, b in zip(before, gpt.parameters()))


@pytest.mark.parametrize('tying', [False, True])
def test_coupled_adam_is_its_equation_and_leaves_all_else_to_adam(tying):
    """theta <- theta - lr m_hat / (sqrt(nu_hat) + eps), nu_hat the mean of v_hat over the vocabulary, against the same gradients."""
    gpt = tiny_gpt('coupled_adam', tying)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in gpt.parameters()}
    expected = {p: p.detach().clone() for p in gpt.parameters()}
    for step in range(1, 9):
        found = {}
        inner = optimizer.step
        optimizer.step = lambda: (found.update({p: p.grad.clone() for p in gpt.parameters()}), inner())
        train.train_step(gpt, gpt, optimizer, [token_batch(step)], step, 0.01, {**STEP, 'method': 'coupled_adam'}, torch.ones(()), False)
        optimizer.step = inner
        for p, gradient in found.items():
            m, v = moments[p] = 0.9 * moments[p][0] + 0.1 * gradient, 0.95 * moments[p][1] + 0.05 * gradient ** 2
            v_hat = v / (1 - 0.95 ** step)
            nu_hat = v_hat.mean(dim=0) if p is gpt.E else v_hat
            expected[p] -= 0.01 * m / (1 - 0.9 ** step) / (nu_hat.sqrt() + 1e-8)
            torch.testing.assert_close(p.detach(), expected[p], rtol=1e-10, atol=1e-12)
    assert found[gpt.E].norm() > 1e-3


def test_coupled_adam_makes_no_update_once_a_gradient_is_not_finite():
    gpt = tiny_gpt('coupled_adam')
    before = gpt.E.detach().clone()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1, fused=True)
    train.train_step(gpt, gpt, optimizer, [token_batch(1)], 1, 0.1, {**STEP, 'method': 'coupled_adam'}, torch.zeros(()), False)
    assert torch.equal(gpt.E, before)


@pytest.mark.parametrize('method', ['mu_loss', 'cosine_reg', 'laplace_reg', 'spectrum_control', 'z_loss+mu_centering'])
def test_a_regulariser_counts_once_a_step_however_the_batch_is_cut(method):
    results = []
    for micro_batches in (1, 4):
        gpt = tiny_gpt(model_py.head_mode(method))
        results.append([(stats[:2] / 64, norm) for stats, norm in train_steps(gpt, method, 3, micro_batches=micro_batches)] + [gpt.E.detach()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    assert results[0][0][0][1] != 0  # there is a regulariser


def test_centering_goes_with_other_methods_now_and_then_and_for_the_input():
    for every, center_input in ((1, False), (3, False), (2, True)):
        gpt = tiny_gpt('z_loss')
        for step, (stats, _) in enumerate(train_steps(gpt, 'z_loss+mu_centering', 6, center_every=every, center_input=center_input), 1):
            assert stats[1] > 0
            for W, centered in ((gpt.E, True), (gpt.wte.weight, center_input)):
                assert (W.detach().mean(dim=0).norm() < 1e-14) == (centered and step % every == 0)


# -------------------------------------------------------------------------------------------- the paper's claims, one by one


def test_z_loss_is_minimised_by_the_uniform_and_the_one_hot_configuration_and_does_not_enforce_a_mean_logit_of_0():
    """Appendix B, Eq. 25 and 24: at l_j = -log V, and as l_i = 0, l_j -> -infinity, loss and gradient vanish; the mean is far from 0."""
    for V in (2, 10, 50304):
        one_hot = torch.full((1, V), -1e3, dtype=F64)
        one_hot[0, 0] = 0
        for logits in (torch.full((1, V), -math.log(V), dtype=F64), one_hot):
            logits.requires_grad_()
            (total, stats), (bare, _) = (logits_to_loss(logits, torch.tensor([0]), config_64(m, lam=1.0)) for m in ('z_loss', 'baseline'))
            assert stats[1] < 1e-20 and torch.autograd.grad(total - bare, logits)[0].abs().max() < 1e-10
            assert logits.mean() <= -math.log(2) + 1e-12


def test_soft_capping_uses_an_odd_function_and_mu_loss_is_invariant_under_mu_to_minus_mu():
    for h, E, targets, _ in random_heads():
        caps = [logits_to_loss(sign * h @ E.T, targets, config_64('soft_capping', cap=3.0))[1] for sign in (1, -1)]
        torch.testing.assert_close(caps[0][2], -caps[1][2], rtol=1e-10, atol=1e-10)       # the mean changes its sign,
        torch.testing.assert_close(caps[0][3:], caps[1][3:], rtol=1e-10, atol=1e-10)      # squares, deviation and maximum nothing
        assert caps[0][-1] <= 3
        mirrored = E - 2 * E.mean(dim=0)                                                  # mu -> -mu, e_i - mu as they are
        torch.testing.assert_close((h @ mirrored.T).mean(dim=1), -(h @ E.T).mean(dim=1), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(reg_of('mu_loss', mirrored), reg_of('mu_loss', E), rtol=1e-9, atol=0)


def test_weight_decay_scales_mu_and_every_deviation_alike_and_makes_the_embeddings_no_more_isotropic():
    """Through train_step, at learning rate 0: what the decay alone does."""
    gpt = tiny_gpt('weight_decay')
    with torch.no_grad():
        gpt.E.add_(1)
    before = gpt.E.detach().clone()
    list(train_steps(gpt, 'weight_decay', 5, lr=0.0, lam=0.1))
    after = gpt.E.detach()
    mu = before.mean(dim=0)
    torch.testing.assert_close(after.mean(dim=0), 0.9 ** 5 * mu, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after - after.mean(dim=0), 0.9 ** 5 * (before - mu), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(F.normalize(after) @ F.normalize(after).T, F.normalize(before) @ F.normalize(before).T)


def centered_log_probabilities(l, method):
    """log p_t minus its mean over t, for logits l (V,): what the softmax sees of them, through logits_to_loss."""
    config = config_64(method, lam=0.0, cap=3.0)
    log_p = torch.stack([-logits_to_loss(l[None], torch.tensor([t]), config)[0] for t in range(len(l))])
    return log_p - log_p.mean()


def force(method, h, E):
    """What one application of the method alone does to E (V, H): minus the gradient of its regulariser, or its change of the weights."""
    targets = torch.zeros(len(h), dtype=torch.int64)
    E = E.clone().requires_grad_()
    bare = sum(head_loss(h, E, targets, config_64(m, lam=sign * 1.0), False)[0] * sign for m, sign in ((method, 1), ('baseline', -1)))
    if method in ('weight_decay', 'mu_centering'):  # at learning rate 0
        gpt = tiny_gpt(method)
        with torch.no_grad():
            gpt.lm_head.weight = torch.nn.Parameter(E.detach().clone())
        list(train_steps(gpt, method, 1, lr=0.0))
        return gpt.E.detach() - E.detach()
    if method in ('soft_capping', 'norm_softmax', 'baseline'):
        return torch.zeros_like(E)  # no more than another model: nothing acts on E but its cross entropy
    return -torch.autograd.grad(bare, E)[0]


def table_of_methods(methods=('soft_capping', 'weight_decay', 'z_loss', 'mu_loss', 'mu_centering', 'max_z_loss', 'norm_softmax', 'cosine_reg',
                              'laplace_reg', 'spectrum_control')):
    """
    Rows (method, intervention, symmetry, anisotropy suppression) of the paper's Table 1, each entry computed. model: the same
    logits give other probabilities. symmetry: l -> -l turns the sign of what the softmax sees and of the force on E.
    anisotropy suppression: the force shrinks mu, in absolute terms and against the spread around it, even where h is orthogonal
    to mu and the logits show nothing.
    """
    g = torch.Generator().manual_seed(0)
    h = torch.randn(5, 16, generator=g, dtype=F64)
    E = torch.randn(64, 16, generator=g, dtype=F64) + torch.randn(16, generator=g, dtype=F64)
    mu = E.mean(dim=0)
    hidden = h - (h @ mu / (mu @ mu))[:, None] * mu
    rows = []
    for method in methods:
        l = 2 * torch.randn(9, generator=g, dtype=F64) + 1
        seen, mirrored = centered_log_probabilities(l, method), centered_log_probabilities(-l, method)
        model = not torch.allclose(seen, l - l.mean(), atol=1e-9)
        odd = torch.allclose(seen, -mirrored, atol=1e-9) and torch.allclose(force(method, h, E), -force(method, h, -E), atol=1e-9)
        f = force(method, hidden, E)
        spread, toward = E - mu, f.mean(dim=0) @ mu / (mu @ mu)      # relative rates of change of |mu| and of the spread
        outward = (f * spread).sum() / spread.square().sum()
        suppresses = toward < -1e-9 and toward - outward < -1e-9
        rows.append((method, 'model' if model else 'training', 'yes' if odd else 'no', 'yes' if suppresses else 'no'))
    return rows


def test_table_1_overview_of_methods(capsys):
    rows = table_of_methods()
    assert rows[:5] == [('soft_capping', 'model', 'yes', 'no'), ('weight_decay', 'training', 'yes', 'no'), ('z_loss', 'training', 'no', 'no'),
                        ('mu_loss', 'training', 'yes', 'yes'), ('mu_centering', 'training', 'yes', 'yes')]
    assert rows[5:] == [('max_z_loss', 'training', 'no', 'no'), ('norm_softmax', 'model', 'yes', 'no'), ('cosine_reg', 'training', 'yes', 'yes'),
                        ('laplace_reg', 'training', 'yes', 'yes'), ('spectrum_control', 'training', 'yes', 'yes')]


def root_cause(steps=60):
    """How far mu has moved from its beginning after each step, untied, without decay: name of the optimizer -> [‖mu_t - mu_0‖], in float64."""
    moved = {}
    for name, method in (('SGD', 'baseline'), ('Adam', 'baseline'), ('Coupled Adam', 'coupled_adam')):
        gpt = tiny_gpt(method)
        start = gpt.E.detach().mean(dim=0)
        optimizer = torch.optim.SGD(gpt.parameters(), lr=1, momentum=0.9, fused=True) if name == 'SGD' else None
        moved[name] = [(gpt.E.detach().mean(dim=0) - start).norm().item() for _ in train_steps(gpt, method, steps, optimizer, lr=0.1 if name == 'SGD' else 0.01)]
    return moved


def test_it_is_the_second_moment_in_adam_that_causes_the_common_shift_of_the_embeddings():
    """The logit gradients sum to zero over the vocabulary: SGD leaves mu where it is, and so does Adam with one second moment for all."""
    for h, E, targets, _ in random_heads(20):
        E.requires_grad_()
        gradient = torch.autograd.grad(head_loss(h, E, targets, config_64(), True)[0], E)[0]
        assert gradient.sum(dim=0).norm() <= 1e-12 * gradient.norm() * len(E)
    gpt = tiny_gpt()
    start = gpt.E.detach().clone()
    list(train_steps(gpt, 'baseline', 60, torch.optim.SGD(gpt.parameters(), lr=1, momentum=0.9, fused=True), lr=0.1))
    assert (gpt.E - start).norm() > 0.1  # the embeddings do move, each its own way
    moved = root_cause()
    assert max(moved['SGD']) < 1e-13 and max(moved['Coupled Adam']) < 1e-13 and moved['Adam'][-1] > 0.05
    assert all(b > a for a, b in zip(moved['Adam'][::10], moved['Adam'][10::10]))


def count_collectives(rank, folder):
    """Process `rank` of two: Appendix E with DTensor, counted by PyTorch's communication debug mode."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2)
    mesh = init_device_mesh('cpu', (2,))
    full = torch.randn(60, 16, generator=torch.Generator().manual_seed(0), dtype=F64) + 1
    mu = full.mean(dim=0)

    def counted(function):
        with CommDebugMode() as mode:
            result = function()
        return result, {str(op).split('.')[-1]: n for op, n in mode.get_comm_counts().items() if n}

    for name, placement in (('hidden', Shard(1)), ('vocabulary', Shard(0))):
        E = distribute_tensor(full, mesh, [placement]).requires_grad_()
        # mu-centering; over the vocabulary mu is first made whole on every process
        with torch.no_grad():
            centered, counts = counted(lambda: E - (E.mean(dim=0) if name == 'hidden' else E.mean(dim=0).redistribute(mesh, [Replicate()])))
        torch.testing.assert_close(centered.full_tensor(), full - mu)
        assert counts == ({} if name == 'hidden' else {'all_reduce': 1}), (name, 'mu-centering', counts)
        assert name == 'hidden' or E.mean(dim=0).to_local().numel() == 16  # H numbers
        if name == 'vocabulary':
            continue
        # mu-loss: its gradient, then its value as a number
        penalty, counts = counted(lambda: embeddings_to_loss(E, config_64('mu_loss', lam=0.3)))
        gradient, more = counted(lambda: torch.autograd.grad(penalty, E)[0])
        torch.testing.assert_close(gradient.full_tensor(), (0.6 * mu / 60).expand(60, 16))
        assert counts == {} and more == {}, (name, 'mu-loss', counts, more)
        value, counts = counted(lambda: penalty.full_tensor())
        torch.testing.assert_close(value.detach(), 0.3 * mu @ mu)
        assert counts == {'all_reduce': 1} and penalty.to_local().numel() == 1
    dist.destroy_process_group()


def test_appendix_e_split_across_the_hidden_dimension_mu_centering_and_mu_loss_require_no_collective_communication(tmp_path):
    torch.multiprocessing.spawn(count_collectives, (str(tmp_path),), nprocs=2)


# --------------------------------------------------------------------------------------------------------------- the model


def test_sizes_are_the_published_ones():
    for size, n in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
        for tying in (False, True):
            with torch.device('meta'):
                assert round(GPT(GPTConfig(**SIZES[size], weight_tying=tying)).n_params() / 1e6, 1) == n
    with torch.device('meta'):
        assert GPT(GPTConfig(**SIZES['16M'])).flops_per_token() * 64 * 2048 == pytest.approx(1.44e13, rel=2e-3)


@pytest.mark.parametrize('tying', [False, True])
def test_initialisation(tying):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**SIZES['16M'], weight_tying=tying))
    H, V = 224, 50304
    expected = {'qkv': math.sqrt(2 / (4 * H)), 'attn.proj': 0.02 / math.sqrt(12), 'gate': math.sqrt(2 / (H + 768)), 'up': math.sqrt(2 / (H + 768)),
                'down': math.sqrt(2 / (H + 768)), 'lm_head': math.sqrt(2 / (H + V)), 'wte': math.sqrt(2 / (H + V)) if tying else H ** -0.5}
    for name, parameter in gpt.named_parameters():
        kind = next((k for k in expected if f'{k}.weight' in name), None)
        if kind is None:
            assert bool((parameter == 1).all()), name  # gains
        else:
            assert parameter.std().item() == pytest.approx(expected[kind], rel=5 / math.sqrt(parameter.numel())), name
    tokens = torch.randint(V, (2, 129), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = gpt(tokens[:, :-1], tokens[:, 1:])[1][0].item() / 256
    assert abs(loss - math.log(V)) < 0.1


def test_rope_depends_on_distance_alone_and_turns_the_first_half():
    config = GPTConfig(n_embd=64, n_head=2, block_size=32)
    cos, sin = (t.double() for t in model_py.rope_tables(config))
    q, k = (torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(s), dtype=F64).expand(1, 1, 32, 32) for s in (0, 1))
    scores = model_py.rotate(q, cos, sin) @ model_py.rotate(k, cos, sin).transpose(-1, -2)
    for distance in range(-31, 32):
        values = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=0, atol=1e-5)  # the tables are fp32
    assert torch.equal(model_py.rotate(q, cos, sin)[..., 16:], q[..., 16:]) and cos.shape == (32, 8)
    # frequencies from the rotated half: theta_j = 10000^(-2j/16)
    torch.testing.assert_close(cos[1], torch.cos(10000.0 ** (-torch.arange(8, dtype=F64) / 8)), rtol=0, atol=1e-7)


def reference_hidden(w, tokens, n_layer, n_head):
    """Final hidden states (T, H) of one sequence, in float64, written out from the paper's table and DESIGN: no code shared with model.py."""
    def norm(x, gain):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * gain
    x = w['wte.weight'][tokens]
    T, H = x.shape
    D = H // n_head
    half = D // 2
    for i in range(n_layer):
        b = f'blocks.{i}.'
        qkv = norm(x, w[b + 'norm_1.weight']) @ w[b + 'attn.qkv.weight'].T
        out = torch.zeros_like(x)
        for head in range(n_head):
            q, k, v = (qkv[:, part * H + head * D:part * H + (head + 1) * D] for part in range(3))
            q, k = norm(q, w[b + 'attn.norm_q.weight']), norm(k, w[b + 'attn.norm_k.weight'])
            turned = []
            for y in (q, k):
                y = y.clone()
                for t in range(T):
                    for j in range(half // 2):
                        angle = t * 10000 ** (-2 * j / half)
                        a, c = y[t, 2 * j].item(), y[t, 2 * j + 1].item()
                        y[t, 2 * j], y[t, 2 * j + 1] = a * math.cos(angle) - c * math.sin(angle), a * math.sin(angle) + c * math.cos(angle)
                turned.append(y)
            scores = turned[0] @ turned[1].T / math.sqrt(D)
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out[:, head * D:(head + 1) * D] = scores.softmax(-1) @ v
        x = x + out @ w[b + 'attn.proj.weight'].T
        y = norm(x, w[b + 'norm_2.weight'])
        gate = y @ w[b + 'mlp.gate.weight'].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ w[b + 'mlp.up.weight'].T)) @ w[b + 'mlp.down.weight'].T
    return norm(x, w['norm_f.weight'])


def test_the_transformer_is_the_papers():
    torch.manual_seed(0)
    gpt = GPT(config_64(n_layer=2, n_embd=32, n_head=4, vocab_size=64, block_size=16)).double()
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)  # gains that are not one, an attention that is not flat
    tokens = torch.randint(64, (2, 16))
    for i in range(2):
        expected = reference_hidden({k: v.double() for k, v in gpt.state_dict().items()}, tokens[i], 2, 4)
        torch.testing.assert_close(gpt.hidden(tokens)[i], expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32


@pytest.mark.parametrize('dtype, inside', [('bfloat16', torch.bfloat16), ('float32', torch.float32)])
def test_products_are_in_the_dtype_and_weights_in_fp32(dtype, inside):
    gpt = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=4, vocab_size=64, block_size=16, dtype=dtype, logits_dtype=dtype))
    seen = []
    for module in (gpt.blocks[0].attn.qkv, gpt.blocks[0].attn.proj, gpt.blocks[0].mlp.gate, gpt.blocks[0].mlp.down):
        module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    gpt(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))[0].backward()
    assert seen == [inside] * 4 and all(p.dtype == p.grad.dtype == torch.float32 for p in gpt.parameters())


def test_defaults_are_appendix_a():
    args = settings_py.parser().parse_args([])
    appendix_a = dict(beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, weight_tying=False, min_lr=1e-5, block_size=2048, batch_size=64,
                      steps=100_000, cap=30.0, size='16M', method='baseline', rope_fraction=0.5, seed=1, divergence_margin=0.5)
    assert {k: getattr(args, k) for k in appendix_a} == appendix_a
    args.data = 'x'
    settings_py.fill_in(args, 'cuda', 4)
    assert (args.warmup, args.dtype, args.logits_dtype, args.compile) == (5000, 'bfloat16', 'bfloat16', True)
    for method in ('weight_decay', 'z_loss', 'mu_loss'):
        args.method, args.lam = method, None
        settings_py.fill_in(args, 'cuda', 4)
        assert args.lam == 1e-4
    assert LAM['max_z_loss'] == 2e-4 and LAM['cosine_reg'] == 1  # those of Baichuan 2 and of Gao et al.
    assert (args.n_layer, args.n_embd, args.n_head, args.eval_tokens, args.test_tokens) == (6, 224, 4, 1_048_576, 10_485_760)


def test_the_gradient_is_clipped():
    """One step of plain gradient descent at learning rate 1 moves the weights by no more than grad_clip."""
    for clip in (1e-3, 0.1, 0.0):
        torch.manual_seed(0)
        gpt = GPT(config_64(n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16)).double()
        before = [p.detach().clone() for p in gpt.parameters()]
        tokens = torch.randint(64, (2, 17))
        _, norm = train.train_step(gpt, gpt, torch.optim.SGD(gpt.parameters(), fused=True), [(tokens[:, :-1], tokens[:, 1:])], 1, 1.0,
                                   {'method': 'baseline', 'grad_clip': clip}, torch.ones(()), False)
        moved = sum((a - b).square().sum() for a, b in zip(gpt.parameters(), before)).sqrt().item()
        assert norm > 0.5 and moved == pytest.approx(min(clip or math.inf, norm.item()), rel=1e-4)


def test_attention_is_causal():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=64, block_size=16))
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 64
    a, b = gpt.hidden(tokens), gpt.hidden(changed)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


def test_learning_rate_schedule():
    s = {'lr': 0.1, 'min_lr': 1e-5, 'warmup': 5000, 'steps': 100_000}
    assert train.learning_rate(0, s) == pytest.approx(0.1 / 5001)
    assert train.learning_rate(4999, s) == pytest.approx(0.1 * 5000 / 5001)
    assert train.learning_rate(5000, s) == 0.1
    assert train.learning_rate(99_999, s) == pytest.approx(1e-5)
    assert train.learning_rate((5000 + 99_999) // 2, s) == pytest.approx(0.05, rel=1e-3)
    rates = [train.learning_rate(i, s) for i in range(5000, 100_000)]
    assert all(a > b for a, b in zip(rates, rates[1:]))


# -------------------------------------------------------------------------------------------------- data order, statistics


PINNED = ([775, 813, 549, 55, 416], [897, 578, 641, 935, 253], [1, 7, 8, 0, 3])


def test_batch_order_is_pinned():
    """Values of the frozen RandomState stream: were they to change, old runs could not be resumed."""
    assert data.batch_windows(1, 0, 5, 1000).tolist() == PINNED[0]
    assert data.batch_windows(1, 300, 5, 1000).tolist() == PINNED[1]
    assert data.batch_windows(2**32 - 1, 7, 5, 10).tolist() == PINNED[2]



def test_every_epoch_visits_every_window_once():
    rng = np.random.RandomState(0)
    for _ in range(200):
        seed, n, B = int(rng.randint(2**31)), int(rng.randint(1, 60)), int(rng.randint(1, 20))
        order = np.concatenate([data.batch_windows(seed, step, B, n) for step in range(3 * n)])
        for epoch in range(3 * B):
            assert sorted(order[epoch * n:(epoch + 1) * n]) == list(range(n))


@pytest.mark.parametrize('method', ['baseline', 'soft_capping'])
def test_statistics_are_their_definitions(method):
    """analyze.statistics against the definitions written out position by position in float64."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=96, block_size=8, head_mode=method, cap=3.0)
    gpt = GPT(config)
    with torch.no_grad():
        gpt.E.add_(torch.randn(16))
        gpt.E.mul_(3)
    windows = torch.randint(96, (7, 9))
    found = analyze.statistics(gpt, windows)
    with torch.no_grad():
        h_all, E = gpt.hidden(windows[:, :-1]).flatten(0, 1).double(), gpt.E.detach().double()
    mu = E.mean(dim=0)
    for i, h in enumerate(h_all):
        r_emb, r_cos, r_log, _, _ = fact_3_terms(h, E)
        l = E @ h
        if method == 'soft_capping':
            l = 3 * torch.tanh(l / 3)
        expected = {'logit_mean': l.mean(), 'logit_std': l.std(correction=0), 'logit_absmax': l.abs().max(),
                    'cos_mu_h': F.cosine_similarity(mu, h, dim=0), 'r_cos': r_cos, 'r_log': r_log}
        for name, value in expected.items():
            assert found[name][i].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name
        assert found['fact_3'][i] == float(not ((r_emb < 1).all() and r_cos < 1) or r_log < 1)
    torch.testing.assert_close(found['r_emb'].double(), r_emb, rtol=1e-5, atol=1e-6)
    # the head's own statistics of a batch are the same quantities, averaged
    stats = dict(zip(STATS, gpt(windows[:, :-1], windows[:, 1:])[1].tolist()))
    n = len(h_all)
    for name in ('logit_mean', 'logit_std', 'logit_absmax'):
        assert stats[name] / n == pytest.approx(found[name].mean().item(), rel=1e-4)
    assert stats['logit_max'] == pytest.approx(found['logit_absmax'].max().item(), rel=1e-5)
    assert stats['logit_mean_squared'] / n == pytest.approx(found['logit_mean'].square().mean().item(), rel=1e-4)


def test_rounding_costs_where_the_mean_embedding_is_far_out_and_centering_takes_that_away():
    """rounding_loss is the difference of two cross entropies of the same weights; a shift of all e_i changes only the rounded one (Fact 2)."""
    for seed in range(10):
        torch.manual_seed(seed)
        gpt = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=96, block_size=8, dtype='float32', logits_dtype='bfloat16'))
        windows = torch.randint(96, (40, 9))
        with torch.no_grad():
            gpt.E.add_(60 * torch.randn(16))
            h, E, targets = gpt.hidden(windows[:, :-1]).flatten(0, 1), gpt.E.detach().clone(), windows[:, 1:].flatten()
            rounded = (h.bfloat16().float() @ E.bfloat16().float().T).bfloat16()
            expected = F.cross_entropy(rounded.double(), targets) - F.cross_entropy(h.double() @ E.double().T, targets)
            shifted = analyze.rounding_loss(gpt, windows)
            # fp32 sums of logits of some 1000 on the one side: 1000 2^-24 each
            assert shifted == pytest.approx(expected.item(), abs=1e-4)
            gpt.E.sub_(gpt.E.mean(dim=0))
            centered = analyze.rounding_loss(gpt, windows)
            assert shifted > 0.05 and abs(centered) < 0.01
            gpt.config.logits_dtype = 'float32'
            assert analyze.rounding_loss(gpt, windows) == 0


def test_lrs_is_the_papers_in_both_normalisations():
    """Published losses of baseline and mu-centering at 16M, without weight tying, and the paper's table."""
    for losses, mean, n1 in (([3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065], 0.262, 0.306),
                             ([3.962, 3.881, 3.850, 3.842, 3.843, 3.844, 3.842], 0.024, 0.028)):
        found = tables.lrs(losses, [10.83] * 7)
        assert found[0] == pytest.approx(mean, abs=6e-4) and found[1] == pytest.approx(n1, abs=6e-4)


def test_lrs_laws():
    rng = np.random.RandomState(0)
    for _ in range(200):
        n = int(rng.randint(2, 9))
        losses = list(rng.uniform(3, 12, n))
        L0 = [10.83] * n
        mean, n1 = tables.lrs(losses, L0)
        assert mean >= 0 and n1 == pytest.approx(mean * n / (n - 1))
        assert tables.lrs(list(rng.permutation(losses)), L0)[0] == pytest.approx(mean)
        assert tables.lrs(losses + [min(losses)], L0 + [10.83])[0] == pytest.approx(mean * n / (n + 1))
        assert tables.lrs(losses + [math.nan], L0 + [10.83]) == tables.lrs(losses + [10.83], L0 + [10.83])
    assert tables.lrs([3.0], [10.0])[0] == 0
    assert tables.lrs([math.inf, math.nan], [10.0, 10.0])[0] == 0
    with pytest.raises(ValueError):
        tables.lrs([math.nan, 3.0], [None, None])


if __name__ == '__main__':
    print(tables.aligned(['name', 'intervention', 'symmetry', 'anisotropy suppression'], table_of_methods()))
    moved = root_cause()
    print('\n' + tables.aligned(['step', *moved], [[step + 1, *(f'{moved[name][step]:.2e}' for name in moved)] for step in (0, 9, 19, 29, 39, 49, 59)]))
