"""
The paper's Facts, which optimizers move mu, every method's equation, and what the paper claims of its
methods. In float64 unless rounding is the point.

Whoever adds a method adds its equation to `equations`, against which the tests over METHODS check the head
and its gradients; or, if it acts on the weights, to `equations_step`. All else is in tests/.
"""
import functools
import math

import pytest
import torch

import train
from analyze import centering_ratios, learning_rate_sensitivity, norm_ratios, read_runs
from model import GPT, METHODS, GPTConfig, embedding_penalty, gpt_config, head_logits, head_loss

F64 = torch.float64
close = torch.testing.assert_close


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(g, *shape):
    return torch.randn(*shape, generator=g, dtype=F64)


def config_64(method='baseline', **more):
    return GPTConfig(head_mode=method, dtype='float64', logits_dtype='float64', **more)


def head(h, E, targets, config):
    """The head of model.py: h (N, H), E (V, H), targets (N,) -> the objective without penalty, statistics."""
    return head_loss(head_logits(h, E, config), targets, config)


def random_heads(n=60):
    """
    (h (N, H), E (V, H), targets (N,)) of many shapes, the mean of E near 0 or far out; every other time the
    largest logit is 1e4 or more, every third time all targets are equal, every fifth time N is 1.
    """
    for seed in range(n):
        g = generator(seed)
        N, V, H = (int(torch.randint(2, high, (), generator=g)) for high in (40, 300, 33))
        h = normal(g, 1 if seed % 5 == 0 else N, H)
        E = normal(g, V, H) + normal(g, H) * 10 ** float(torch.empty(()).uniform_(-2, 2, generator=g))
        if seed % 2 == 0:
            h *= max(1, 1e4 / (h @ E.T).abs().max())
        targets = torch.randint(V, (len(h),), generator=g)
        yield h, E, targets[:1].expand(len(h)) if seed % 3 == 0 else targets


def tiny_gpt(method='baseline', seed=0, **more):
    """A GPT of one layer for training with `method`, in float64 unless `more` says otherwise."""
    torch.manual_seed(seed)
    settings = dict(method=method, lam=0.3, n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=16,
                    dtype='float64', logits_dtype='float64')
    gpt = GPT(gpt_config({**settings, **more}))
    return gpt.to(F64 if gpt.config.dtype == 'float64' else torch.float32)


def token_batch(seed):
    """(tokens, targets), each (4, 16); half of the vocabulary never occurs."""
    tokens = torch.randint(64, (4, 17), generator=generator(seed)) // 2
    return tokens[:, :-1], tokens[:, 1:]


def train_steps(gpt, method, n, lr=0.01, grad_clip=1.0, before_update=lambda: None):
    """
    n steps of train.train_step at one learning rate; yields the statistics and gradient norm of each. The
    optimizer is not train.make_model's, which tests/test_step.py covers.
    """
    flags = f'--method={method} --lam=0.3 --lr={lr} --min_lr={lr} --warmup=0 --grad_clip={grad_clip}'
    args = train.parser.parse_args(flags.split())
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizer.register_step_pre_hook(lambda *_: before_update())
    for step in range(1, n + 1):
        yield train.train_step(gpt, optimizer, [token_batch(step)], step, args)


# -------- the introduction's example


@pytest.mark.parametrize('dtype, centered, p_1', [
    ('float32', False, 0.142), ('bfloat16', False, 0.091), ('bfloat16', True, 0.142)])
def test_roundoff_example_of_the_introduction(dtype, centered, p_1):
    """bf16 has no 128.5, though h and E are exact in it. With centered embeddings the logits are small."""
    h = torch.tensor([[128.0, 0.5]])
    E = torch.tensor([[1.0, 1.0]] + [[1.0, 0.0]] * 10)
    if centered:
        E -= E.mean(dim=0)
    loss, stats = head(h, E, torch.tensor([0]), GPTConfig(logits_dtype=dtype))
    assert math.exp(-loss) == pytest.approx(p_1, abs=6e-4)
    assert centered or stats['logit_absmax'].item() == (128.5 if dtype == 'float32' else 128)


# -------- the Facts


def test_fact_1():
    """The mean logit is mu . h."""
    for h, E, targets in random_heads():
        _, stats = head(h, E, targets, config_64())
        close(stats['logit_mean'], h @ E.mean(dim=0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('weighted', [False, True])
def test_fact_2(weighted):
    """
    Centering sets the mean logit to zero and changes nothing else. Weighted: with sum_j f_j e_j instead of
    mu, it is the mean sum_i f_i l_i that becomes zero.
    """
    for i, (h, E, targets) in enumerate(random_heads()):
        f = normal(generator(i), len(E)) ** 8 if weighted else torch.ones(len(E), dtype=F64)
        f /= f.sum()
        mean = f @ E if weighted else E.mean(dim=0)
        results = []
        for embeddings in (E, E - mean):
            h_, E_ = h.clone().requires_grad_(), embeddings.clone().requires_grad_()
            loss, stats = head(h_, E_, targets, config_64())
            results.append((stats, [loss, *torch.autograd.grad(loss, (h_, E_))]))
        (stats, before), (star_stats, after) = results  # before, after: the loss and its gradients
        scale = max(1, stats['logit_absmax'].max().item())
        close(h @ E.T @ f, h @ mean, rtol=1e-10, atol=1e-10)                                # Fact 1
        assert (h @ (E - mean).T @ f).abs().max() <= 1e-13 * scale                          # (i)
        assert weighted or star_stats['logit_mean'].abs().max() <= 1e-13 * scale
        close(star_stats['logit_std'], stats['logit_std'], rtol=1e-10, atol=1e-13 * scale)  # (ii)
        close(star_stats['loss'], stats['loss'], rtol=1e-9, atol=1e-12 * scale)             # (iii)
        close(after, before, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize('method, shift', [('mu_centering', 0), ('baseline', 100)])
def test_fact_2_iii_over_50_steps(method, shift):
    """The output embeddings differ from the baseline's by one vector common to all, and nothing else does."""
    results = []
    for run_method, run_shift in (('baseline', 0), (method, shift)):
        gpt = tiny_gpt(run_method)
        vector = normal(generator(1), gpt.E.size(1))
        with torch.no_grad():
            gpt.E.add_(run_shift * vector / vector.norm())
        losses = [stats['loss'] for stats, _ in train_steps(gpt, run_method, 50, grad_clip=0.5)]
        results.append((torch.stack(losses), {name: p.detach() for name, p in gpt.named_parameters()}))
    (losses, base), (other_losses, other) = results
    assert losses[0].mean() - losses[-1].mean() > 0.3  # it did train
    difference = other.pop('lm_head.weight') - base.pop('lm_head.weight')
    close((other_losses, other), (losses, base), rtol=0, atol=1e-9)
    close(difference, difference[:1].expand_as(difference), rtol=0, atol=1e-9)
    if shift:
        assert abs(difference[0].norm() - shift) < 1e-9
    else:
        assert difference[0].norm() > 1e-3


def test_fact_3_counterexample():
    """Its proof cancels |e_i| inside two different maxima."""
    h = torch.tensor([[1.0, 0.0]], dtype=F64)
    E = torch.tensor([[-1.0, 3.0]] * 999 + [[10.0, 1000.0]], dtype=F64)
    ratios = centering_ratios(h, E)
    assert norm_ratios(E).max() < 0.9961 and abs(ratios['r_cos'] - 0.035) < 5e-4  # the premise holds
    assert abs(ratios['r_log'] - 1.099) < 5e-4                                    # the conclusion does not
    h, E = torch.tensor([[0.3, 0.7]]), torch.tensor([[1027.0, 1025], [1021, 1023]])  # in fp32, far from 0
    close(centering_ratios(h, E)['r_log'], torch.tensor([1.6 / 1025.6]), rtol=1e-6, atol=0)


def test_fact_3_corrected():
    """With both maxima kept, always; and as the paper states it if all embeddings have one length."""
    premises = 0
    for h, E, _ in random_heads(200):
        star = E - E.mean(dim=0)
        cos, cos_star = (((h @ X.T) / h.norm(dim=1)[:, None] / X.norm(dim=1)).abs() for X in (E, star))
        maxima = (E.norm(dim=1) * cos_star).amax(dim=1) / (E.norm(dim=1) * cos).amax(dim=1)
        ratios = centering_ratios(h, E)
        close(ratios['r_cos'], cos_star.amax(dim=1) / cos.amax(dim=1), rtol=1e-9, atol=0)
        assert (ratios['r_log'] <= norm_ratios(E).max() * maxima * (1 + 1e-9)).all()
        unit = E / E.norm(dim=1, keepdim=True)
        ratios = centering_ratios(h, unit)
        premise = (norm_ratios(unit) < 1).all() & (ratios['r_cos'] < 1)
        assert (ratios['r_log'][premise] < 1).all()
        premises += premise.sum()
    assert premises > 100


OPTIMIZERS = {  # name -> a function of E, which returns the function that makes a step
    'SGD with momentum': lambda E: torch.optim.SGD([E], lr=0.3, momentum=0.9).step,
    'Coupled Adam': lambda E: functools.partial(
        train.coupled_adam_step, E, torch.optim.AdamW([E], lr=0.02, weight_decay=0.0)),
    'Muon': lambda E: torch.optim.Muon([E], lr=0.02, weight_decay=0.0).step,
    'AdamW': lambda E: torch.optim.AdamW([E], lr=0.02, weight_decay=0.0).step,
    'Adafactor': lambda E: torch.optim.Adafactor([E], lr=0.02).step}


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_which_optimizers_move_mu(name, tying, monkeypatch):
    """
    Ours; that Adam's second moment moves mu is Stollenwerk and Stollenwerk's (2025). In exact arithmetic an
    update U of E moves mu by 1^T U / V, with 1 the vector of ones.

    The logits' gradients g = softmax(l) - onehot(t) sum to 0 over the vocabulary. So does, without weight
    tying, the gradient of E, G = sum_n g_n h_n^T: 1^T G = 0. SGD with momentum and Coupled Adam are linear in
    past G, with one factor per column, so 1^T U = 0. Muon's U is q(M M^T) M, q a polynomial and M linear in
    past G, and as 1^T M = 0, 1^T U = q(0) 1^T M = 0. AdamW weighs the terms of 1^T M with a factor per entry,
    Adafactor with one per row as well, so the sum is no longer 0. With weight tying it is not 0 either, as
    the gradient of the input embeddings joins G.
    """
    if name == 'Muon' and not hasattr(torch.optim, 'Muon'):
        pytest.skip('PyTorch has Muon from 2.9 on')
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.clone)  # Muon iterates in bf16, which rounds
    gpt = tiny_gpt(weight_tying=tying)
    start = gpt.E.detach().clone()
    make_step = OPTIMIZERS[name](gpt.E)
    for step in range(30):
        gpt(*token_batch(step))[0].backward()
        with torch.no_grad():
            make_step()
        gpt.zero_grad()
    moved = gpt.E.detach() - start
    common = moved.mean(dim=0).norm() / moved.norm(dim=1).mean()
    keeps_mu = name in ('SGD with momentum', 'Coupled Adam', 'Muon') and not tying
    if keeps_mu:
        assert common < 30 * 2.0 ** -53  # one rounding error a step
    else:
        assert common > 0.1


# -------- every method is its equation


def equations_logits(method, h, E, cap):
    """The logits (N, V) that enter the softmax, as in the paper of the method, without code of model.py."""
    logits = h @ E.T
    if method == 'centered_head':
        logits = logits - logits.mean(dim=1, keepdim=True)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if method == 'norm_softmax':
        logits = logits / logits.std(dim=1, correction=0, keepdim=True)
    return logits


def equations(method, h, E, targets, lam, cap):
    """(mean cross entropy, regulariser) of a method, likewise: a new one is added here, or above."""
    logits = equations_logits(method, h, E, cap)
    shift = logits.max(dim=1).values  # so that no exponential overflows
    log_Z = (logits - shift[:, None]).exp().sum(dim=1).log() + shift
    loss = -(logits[torch.arange(len(h)), targets] - log_Z).mean()
    V = len(E)
    mu = E.sum(dim=0) / V
    unit = E / E.norm(dim=1, keepdim=True)
    if method == 'z_loss':
        return loss, lam * (log_Z ** 2).mean()
    if method == 'max_z_loss':
        return loss, lam * (logits.max(dim=1).values ** 2).mean()
    if method == 'mu_loss':
        return loss, lam * (mu @ mu)
    if method == 'cosine_reg':
        return loss, lam * (unit @ unit.T * (1 - torch.eye(V))).sum() / V ** 2
    return loss, torch.zeros((), dtype=F64)


def objective(h, E, targets, config):
    """What training minimises, a mean over positions; and the head's statistics."""
    loss, stats = head(h, E, targets, config)
    return loss + embedding_penalty(E, config), stats


@pytest.mark.parametrize('method', METHODS)
def test_head_equation(method):
    """The objective, its gradients, the loss and the regulariser."""
    for i, (h, E, targets) in enumerate(random_heads(30)):
        largest = (h @ E.T).abs().max().item()
        cap = 5.0 if method == 'soft_capping' else largest if i % 2 else None  # any method may have one
        config = config_64(method, lam=0.3, cap=cap)
        h.requires_grad_()
        E.requires_grad_()
        loss, reg = equations(method, h, E, targets, 0.3, cap)
        ours, stats = objective(h, E, targets, config)
        close(ours, loss + reg, rtol=1e-10, atol=1e-10)
        gradients, expected = (torch.autograd.grad(x, (h, E)) for x in (ours, loss + reg))
        for a, b in zip(gradients, expected, strict=True):
            assert (a - b).norm() <= 1e-10 * b.norm() + 1e-11  # the scale of h or E cancels in norm_softmax
        close(stats['loss'].mean(), loss, rtol=1e-10, atol=1e-10)  # without the regulariser
        close(stats['reg'].mean() + embedding_penalty(E, config), reg, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('method', METHODS)
def test_model_equation(method, tying):
    """With the defaults of the method, in which soft_capping has its cap and each penalty its lambda."""
    gpt = tiny_gpt(method, weight_tying=tying, lam=None)
    with torch.no_grad():
        gpt.E.mul_(30)
    tokens, targets = token_batch(0)
    h = gpt.hidden(tokens).flatten(0, 1)
    cap = 30.0 if method == 'soft_capping' else None
    close(gpt.head(h), equations_logits(method, h, gpt.E, cap), rtol=1e-12, atol=1e-12)
    loss, reg = equations(method, h, gpt.E, targets.flatten(), METHODS[method].get('lam'), cap)
    parameters = list(gpt.parameters())
    expected = torch.autograd.grad(loss + reg, parameters)
    ours, stats = gpt(tokens, targets)
    close(ours, loss + reg, rtol=1e-12, atol=0)
    close((stats['loss'].mean(), stats['reg'].mean()), (loss, reg), rtol=1e-12, atol=1e-18, check_dtype=False)
    close(torch.autograd.grad(ours, parameters), expected, rtol=1e-9, atol=1e-12)


def equations_step(method, E, m_hat, v_hat, lr, lam, eps=1e-8):
    """E (V, H) after a step with Adam's corrected moments; other parameters take the baseline's step."""
    if method == 'coupled_adam':
        v_hat = v_hat.mean(dim=0)  # over the vocabulary
    if method == 'weight_decay':
        E = (1 - lam) * E  # whatever the learning rate is, Eq. 2
    if method == 'adamw_decay':
        E = (1 - lr * lam) * E
    E = E - lr * m_hat / (v_hat.sqrt() + eps)
    if method == 'mu_centering':
        E = E - E.mean(dim=0)  # e*_i = e_i - mu, Eq. 9
    return E


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('method', METHODS)
def test_step_equation(method, tying):
    gpt = tiny_gpt(method, weight_tying=tying)
    expected = {p: p.detach().clone() for p in gpt.parameters()}
    moments = {p: (0, 0) for p in expected}
    gradients = {}
    steps = train_steps(gpt, method, 8, before_update=lambda: gradients.update({p: p.grad for p in expected}))
    for t, _ in enumerate(steps, 1):
        for p, gradient in gradients.items():
            m, v = moments[p]
            m = 0.9 * m + 0.1 * gradient
            v = 0.95 * v + 0.05 * gradient ** 2
            moments[p] = (m, v)
            m_hat = m / (1 - 0.9 ** t)
            v_hat = v / (1 - 0.95 ** t)
            own_method = method if p is gpt.E else 'baseline'
            expected[p] = equations_step(own_method, expected[p], m_hat, v_hat, lr=0.01, lam=0.3)
            close(p.detach(), expected[p], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('method', [method for method in METHODS if method != 'baseline'])
def test_is_not_the_baseline(method):
    """Not even its last bits are: a name in METHODS that no code reads would train the baseline."""
    ends = []
    for name in ('baseline', method):
        gpt = tiny_gpt(name)
        list(train_steps(gpt, name, 2))
        ends.append(gpt.E)
    assert not torch.equal(*ends)


# -------- what the paper claims


def of_logits(logits, targets, config):
    """head_loss of given logits (N, V), and the gradient of its sum with respect to them."""
    logits = logits.clone().requires_grad_()
    loss, stats = head_loss(logits, targets, config)
    return loss, stats, torch.autograd.grad(loss * len(logits), logits)[0]


def test_z_loss_is_not_symmetric():
    """Eq. 16 and 17: a single logit that rises is held back; one that falls to minus infinity is not."""
    logits = normal(generator(0), 6).repeat(4, 1)
    logits[:, 0] = torch.tensor([4.0, -4.0, 40.0, -40.0])
    _, stats, slope = of_logits(logits, torch.ones(4).long(), config_64('z_loss', lam=1.0))
    assert stats['reg'][0] > stats['reg'][1] + 1e-3
    assert slope[2, 0] > 79 and abs(slope[3, 0]) < 1e-12  # 2 log Z, and the 1 of the cross entropy


@pytest.mark.parametrize('V', [2, 10, 50304])
def test_minima_of_z_loss(V):
    """
    Appendix B, Eq. 23 and 24: at l_j = -log V, and as l_i = 0 and all other l_j -> -infinity, z-loss and its
    gradient vanish although the mean logit is far from 0.
    """
    one_hot = torch.full((1, V), -1e3, dtype=F64)
    one_hot[0, 0] = 0
    for logits in (torch.full((1, V), -math.log(V), dtype=F64), one_hot):
        _, stats, slope = of_logits(logits, torch.tensor([0]), config_64('z_loss', lam=1.0))
        _, _, bare_slope = of_logits(logits, torch.tensor([0]), config_64())
        assert stats['reg'] < 1e-20 and (slope - bare_slope).abs().max() < 1e-10
        assert stats['logit_mean'] <= -math.log(2) + 1e-12


def force(method, h, E, without):
    """
    What `method` does to E (V, H): its own step, or minus the gradient of what it adds to the objective of
    config `without`.
    """
    if method in ('weight_decay', 'mu_centering'):
        gpt = tiny_gpt(method)
        gpt.E.data = E.clone()
        list(train_steps(gpt, method, 1, lr=0.0))
        return gpt.E.detach() - E
    E = E.clone().requires_grad_()
    targets = torch.zeros(len(h), dtype=torch.int64)
    cap = 3.0 if method == 'soft_capping' else None
    with_method, _ = objective(h, E, targets, config_64(method, lam=1.0, cap=cap))
    without_method, _ = objective(h, E, targets, without)
    return -torch.autograd.grad(with_method - without_method, E)[0]


@pytest.mark.parametrize('method, intervention, symmetry, suppression', [
    ('soft_capping', 'model', 'yes', 'no'),
    ('weight_decay', 'training', 'yes', 'no'),
    ('z_loss', 'training', 'no', 'no'),
    ('mu_loss', 'training', 'yes', 'yes'),
    ('mu_centering', 'training', 'yes', 'yes')])
def test_table_1(method, intervention, symmetry, suppression):
    """
    intervention: in the model, if the softmax sees other logits (here of one token each, so that their mean
    is the logit). symmetry: l -> -l reverses what it sees, E -> -E the force of a penalty or shift on E.
    suppression of anisotropy: the method shrinks mu, in absolute terms and against the spread around it, even
    where h is orthogonal to mu and the logits show nothing.
    """
    g = generator(0)
    h, E, logits = normal(g, 5, 16), normal(g, 64, 16) + normal(g, 16), 2 * normal(g, 9, 1)
    no_lam = config_64(method, lam=0.0, cap=3.0 if method == 'soft_capping' else None)
    seen, mirrored = (head_logits(x, torch.eye(1), no_lam) for x in (logits, -logits))
    assert torch.allclose(seen, logits, atol=1e-9) == (intervention == 'training')

    odd = torch.allclose(force(method, h, E, no_lam), -force(method, h, -E, no_lam), atol=1e-9)
    assert (odd and torch.allclose(seen, -mirrored, atol=1e-9)) == (symmetry == 'yes')

    mu = E.mean(dim=0)
    spread = E - mu
    orthogonal = h - (h @ mu / (mu @ mu))[:, None] * mu
    f = force(method, orthogonal, E, config_64())
    growth_of_mu = f.mean(dim=0) @ mu / (mu @ mu)  # relative rates
    growth_of_spread = (f * spread).sum() / spread.square().sum()
    assert f.norm() > 1e-3
    assert bool(growth_of_mu < min(0, growth_of_spread) - 1e-9) == (suppression == 'yes')


@pytest.fixture
def lrs(tmp_path):
    """A function of test losses -> (LRS by Eq. 21, by the published normalisation) of such a results.csv."""
    def of(losses):
        lines = ['method,size,weight_tying,init_loss,lr,test_loss']
        lines += [f'baseline,16M,0,10.83,{i},{loss}' for i, loss in enumerate(losses, 1)]
        (tmp_path / 'losses.csv').write_text('\n'.join(lines))
        runs = read_runs(tmp_path / 'losses.csv')
        row, = learning_rate_sensitivity(runs).itertuples()
        return row.lrs, row.lrs_n1
    return of


@pytest.mark.parametrize('losses, mean, n1', [
    ([3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065], 0.262, 0.306),   # baseline
    ([3.962, 3.881, 3.850, 3.842, 3.843, 3.844, 3.842], 0.024, 0.028)])  # mu-centering
def test_lrs_in_both_normalisations(losses, mean, n1, lrs):
    """Published losses at 16M, untied. The paper's equation gives the mean, its table shows n1."""
    assert lrs(losses) == pytest.approx((mean, n1), abs=6e-4)


def test_lrs_of_losses_above_the_initial_one(lrs):
    losses = [4.0, 3.5, 12.0]
    assert lrs(losses)[0] == pytest.approx((0.5 + 10.83 - 3.5) / 3)
    assert lrs(losses + [math.nan]) == lrs(losses + [10.83]) == lrs(losses + [99.0])
    assert math.isnan(lrs([math.inf, math.nan, 99.0])[0])  # nothing was learned
