"""The statistics of a model against their definitions, written out in float64."""
import math

import pytest
import torch
import torch.nn.functional as F

from analysis import measure
from model import GPT, GPTConfig

V, T = 64, 16
WINDOWS = torch.randint(V, (40, T + 1), generator=torch.Generator().manual_seed(0))


def shifted_gpt(shift, logits_dtype='float32'):
    """A tiny GPT whose output embeddings have a mean of this norm."""
    torch.manual_seed(0)
    shape = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=V, block_size=T)
    gpt = GPT(GPTConfig(**shape, logits_dtype=logits_dtype))
    direction = torch.randn(16)
    with torch.no_grad():
        gpt.E.mul_(3).add_(shift * direction / direction.norm())
    return gpt


def test_ratios_and_shares_are_those_of_the_paper():
    gpt = shifted_gpt(shift=0.7)
    found = measure.of_model(gpt, WINDOWS)
    numbers, distributions = found['numbers'], found['distributions']
    with torch.no_grad():
        h, E = gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1).double(), gpt.E.double()
    mu = E.mean(dim=0)
    cos, cos_star = (F.cosine_similarity(h[:, None], X, dim=-1).abs().amax(dim=1) for X in (E, E - mu))
    values = {'r_cos': cos_star / cos, 'cos_mu_h': F.cosine_similarity(h, mu[None]),
              'r_log': (h @ (E - mu).T).abs().amax(dim=1) / (h @ E.T).abs().amax(dim=1),
              'r_emb': (E - mu).norm(dim=1) / E.norm(dim=1)}
    for name, x in values.items():
        expected = {'mean': x.mean(), 'min': x.min(), 'q25': x.quantile(0.25, interpolation='nearest'),
                    'max': x.max(), 'below_1': (x < 1).double().mean(), 'above_0': (x > 0).double().mean()}
        for key, value in expected.items():
            assert distributions[name][key] == pytest.approx(value.item(), abs=2e-5), (name, key)
        assert numbers[name] == distributions[name]['mean']
    assert 0 < numbers['r_emb_below_1'] == (values['r_emb'] < 1).double().mean() < 1
    assert 0 < numbers['r_cos_below_1'] == (values['r_cos'] < 1).double().mean() < 1
    holds = values['r_log'][values['r_cos'] < 1] < 1
    assert numbers['r_log_below_1_too'] == pytest.approx(holds.double().mean().item())
    assert numbers['mu_norm'] == pytest.approx(mu.norm().item(), rel=1e-6)
    assert numbers['mean_share'] == pytest.approx((V * mu.square().sum() / E.square().sum()).item(), rel=1e-6)


@pytest.mark.parametrize('logits_dtype', ['float32', 'bfloat16'])
def test_logits_are_taken_as_the_model_rounds_them(logits_dtype):
    """Logits of some hundreds are rounded to whole numbers: unrounded, each statistic is another one."""
    gpt = shifted_gpt(300.0, logits_dtype)
    dtype = getattr(torch, logits_dtype)
    with torch.no_grad():
        logits = gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1).to(dtype) @ gpt.E.to(dtype).T
    logits = logits.double()
    means = logits.mean(dim=1)
    expected = {'loss': F.cross_entropy(logits, WINDOWS[:, 1:].flatten()), 'logit_mean': means.mean(),
                'logit_mean_spread': means.std(correction=0), 'logit_max': logits.abs().max(),
                'logit_std': logits.std(dim=1, correction=0).mean(),
                'logit_absmax': logits.abs().amax(dim=1).mean()}
    numbers = measure.of_model(gpt, WINDOWS)['numbers']
    for name, value in expected.items():  # of logits of up to 1,000, in fp32
        assert numbers[name] == pytest.approx(value.item(), abs=2e-4), name


def test_a_quantity_that_is_not_finite_somewhere_has_no_summary():
    assert all(math.isnan(value) for value in measure.summary(torch.tensor([1.0, math.nan])).values())
