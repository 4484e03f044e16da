"""The statistics of a model against their definitions and the log. What rounding costs is in test_hf.py."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import train
from analysis import measure
from oec import bench
from oec.head import chunked_head
from test_facts import HEAD_MODES, close, fact_3_terms, tiny_gpt

WINDOWS = torch.randint(64, (40, 17), generator=torch.Generator().manual_seed(0))


def tiny_gpt_32(method='baseline', shift=60.0, logits_dtype='float32', **more):
    """A tiny GPT in fp32 whose embeddings are shifted: with 60 the mean logits are some hundreds."""
    gpt = tiny_gpt(method, dtype='float32', logits_dtype=logits_dtype, head=chunked_head, **more)
    train.shift_mean(gpt.E, 4 * shift, seed=1)  # the norm of 16 numbers of that size
    return gpt


def statistics_of(gpt):
    with torch.no_grad():
        return measure.statistics(measure.positions(gpt, WINDOWS), gpt.E, gpt.config)


def test_what_centering_would_do_to_each_position():
    """Written out for each. What is taken from the rounded logits is held to the log below."""
    gpt = tiny_gpt_32(shift=1.0)
    with torch.no_grad():
        gpt.E.mul_(3)
        h_all, E = gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1).double(), gpt.E.detach().double()
    found = statistics_of(gpt)
    for i, h in enumerate(h_all):
        r_emb, r_cos, r_log, _, _ = fact_3_terms(h, E)
        expected = torch.stack([r_cos, r_log, F.cosine_similarity(E.mean(dim=0), h, dim=0)])
        close(torch.stack([found[name][i] for name in ('r_cos', 'r_log', 'cos_mu_h')]).double(), expected,
              rtol=1e-4, atol=1e-5)
        assert found['fact_3_premise'][i] == ((r_emb < 1).all() and r_cos < 1)
        assert found['fact_3'][i] == (not found['fact_3_premise'][i] or r_log < 1)
    close(found['r_emb'].double(), r_emb, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('method', HEAD_MODES)
@pytest.mark.parametrize('logits_dtype', ['float32', 'bfloat16'])
def test_analysis_and_log_agree_where_the_logits_are_rounded_coarsely(method, logits_dtype):
    """At a mean logit of some hundreds bf16 rounds to whole numbers: unrounded, each would be another one."""
    gpt = tiny_gpt_32(method, logits_dtype=logits_dtype)
    found = {name: values.double() for name, values in statistics_of(gpt).items()}
    _, stats = gpt(WINDOWS[:, :-1], WINDOWS[:, 1:])
    logged = train.log_entry(1, 0.1, stats, torch.tensor(0.0), gpt.E)
    values = {**{name: found[name].mean() for name in ('loss', 'logit_mean', 'logit_std', 'logit_absmax')},
              'logit_mean_spread': found['logit_mean'].std(correction=0),
              'logit_max': found['logit_absmax'].max()}
    for name, value in values.items():
        assert value.item() == pytest.approx(logged[name], abs=1e-6 * logged['logit_max']), name
    # sums of 64 numbers of magnitude up to 1, in fp32 in the log
    assert found['gradient_sum'].mean().item() == pytest.approx(logged['gradient_sum'], abs=64 * 2.0 ** -24)
    assert logged['mu_norm'] == pytest.approx(gpt.E.detach().double().mean(dim=0).norm().item(), rel=1e-5)


def test_more_positions_take_no_more_memory():
    """What is kept of a position is a dozen numbers: its logits would fill the memory of a CPU."""
    E, config = torch.randn(50304, 8), tiny_gpt(dtype='float32', logits_dtype='bfloat16').config
    taken = []
    for n in (1, 1, 8):  # the first time is to load what stays
        batches = [(torch.randn(512, 8), torch.randint(len(E), (512,))) for _ in range(n)]
        with torch.no_grad():
            taken += [bench.extra_memory(partial(measure.statistics, batches, E, config), E.device)]
    logits_of_the_others = 7 * 512 * len(E) * 4
    assert not taken[2] - taken[1] > logits_of_the_others / 2  # nan where the system does not say
