"""What analyze.py says of a GPT."""
import math

import pytest
import torch
import torch.nn.functional as F

from analyze import distribution, measure_model
from model import GPT, head_loss, summarize
from test_facts import generator, tiny_gpt

WINDOWS = torch.randint(64, (40, 17), generator=generator(0))


def shifted_gpt(norm, **more):
    """A tiny GPT in fp32 whose output embeddings have a mean of about this norm."""
    gpt = tiny_gpt(dtype='float32', **more)
    shift = torch.randn(gpt.E.size(1), generator=generator(0))
    with torch.no_grad():
        gpt.E.mul_(3).add_(norm * shift / shift.norm())
    return gpt


def test_ratios_and_shares():
    """Of E with some rows of zeros, such as padding: they have no r_emb, but -mu once centered."""
    gpt = shifted_gpt(0.7, logits_dtype='float32')
    with torch.no_grad():
        gpt.E[-3:] = 0
        h, E = gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1).double(), gpt.E.double()
    numbers, distributions = map(measure_model(gpt, WINDOWS).get, ('numbers', 'distributions'))
    mu = E.mean(dim=0)
    cos, cos_star = (F.cosine_similarity(h[:, None], X, dim=-1).abs().amax(dim=1) for X in (E, E - mu))
    values = {'r_cos': cos_star / cos, 'cos_mu_h': F.cosine_similarity(h, mu[None]),
              'r_log': (h @ (E - mu).T).abs().amax(dim=1) / (h @ E.T).abs().amax(dim=1),
              'r_emb': (E[:-3] - mu).norm(dim=1) / E[:-3].norm(dim=1)}
    for name, x in values.items():
        expected = [x.mean(), *x.quantile(torch.arange(5.0).to(x) / 4, interpolation='nearest'),
                    (x < 1).double().mean(), (x > 0).double().mean()]
        assert [*distributions[name]] == ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
        assert [*distributions[name].values()] == pytest.approx([y.item() for y in expected], abs=2e-5), name
        assert numbers[name] == distributions[name]['mean']
    holds = values['r_log'][values['r_cos'] < 1] < 1
    expected = {'r_emb_below_1': (values['r_emb'] < 1).double().mean(), 'mu_norm': mu.norm(),
                'r_cos_below_1': (values['r_cos'] < 1).double().mean(), 'mean_share': (
                    64 * mu.square().sum() / E.square().sum()), 'r_log_below_1_too': holds.double().mean()}
    assert 0 < expected['r_emb_below_1'] < 1 and 0 < expected['r_cos_below_1'] < 1
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value.item(), rel=1e-6), name
    for values in ([1.0, math.nan], []):
        assert all(math.isnan(value) for value in distribution(torch.tensor(values)).values())


@pytest.mark.parametrize('method', ['baseline', 'soft_capping'])
def test_rounded_and_capped_logits(method):
    """Logits of some hundreds are rounded to whole numbers: unrounded, each statistic is another one."""
    gpt = shifted_gpt(300, method=method, logits_dtype='bfloat16')
    _, stats = gpt(WINDOWS[:, :-1], WINDOWS[:, 1:])
    del stats['reg']
    expected = summarize(stats, gpt.E)
    numbers = measure_model(gpt, WINDOWS)['numbers']
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-6)


class Forked(GPT):
    """Its head has other states and embeddings than h and E, and one more statistic."""
    head = None

    def forward(self, tokens, targets, with_stats=True):
        h, E = self.head(self.hidden(tokens).flatten(0, 1), self.E)
        objective, stats = head_loss(h, E, targets.flatten(), self.config, with_stats)
        return objective, {**stats, 'my_statistic': stats['logit_mean'] + 1}


def with_bias(bias):
    """As embeddings (e_i, b_i) and states (h, 1)."""
    return lambda h, E: (F.pad(h, (0, 1), value=1), torch.cat([E, bias[:, None]], dim=1))


HEADS = {
    'none': lambda h, E: (h, E),
    'bias': with_bias(torch.linspace(-3, 1, 64)),
    'bias of mean 0': with_bias(torch.linspace(-2, 2, 64)),
    'scale': lambda h, E: (h, 1.5 * E),
    'second norm': lambda h, E: (F.normalize(h, dim=-1), E)}


@pytest.mark.parametrize('head', HEADS)
def test_what_a_fork_adds_to_the_head(head):
    """It is in the statistics; the centering ratios are of h and E alone, and are left out."""
    gpt = shifted_gpt(0.7, logits_dtype='float32')
    plain = measure_model(gpt, WINDOWS)['numbers']
    gpt.__class__, gpt.head = Forked, HEADS[head]
    measured = measure_model(gpt, WINDOWS)
    with torch.no_grad():
        h, E = gpt.head(gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1), gpt.E)
        logits = h @ E.T
    numbers = measured['numbers']
    expected = {'loss': F.cross_entropy(logits, WINDOWS[:, 1:].flatten()), 'logit_mean': logits.mean(),
                'logit_absmax': logits.abs().amax(dim=1).mean(), 'my_statistic': logits.mean() + 1}
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    del numbers['my_statistic']
    if head == 'none':
        assert numbers == pytest.approx(plain)
    else:
        ratios = {'r_cos', 'r_log', 'cos_mu_h', 'r_cos_below_1', 'r_log_below_1_too'}
        assert not ratios & (numbers.keys() | measured['distributions'].keys())
        assert (numbers['r_emb'], numbers['mu_norm']) == (plain['r_emb'], plain['mu_norm'])
