"""results/: the numbers that its pages stand on, from the csv files beside them."""
import math
import runpy
from pathlib import Path

import pandas as pd
import pytest

from conftest import ROOT

RESULTS = Path(ROOT, 'results')
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason='no results/')


def bf16_cost(mean, spread, n=2001):
    """log(sinh(s/2) / (s/2)) averaged over mean logits N(mean, spread); s: the distance of BF16 numbers."""
    total = weights = 0.0
    for z in (6 * (2 * i / (n - 1) - 1) for i in range(n)):
        weight = math.exp(-z * z / 2)
        half = math.ldexp(1, math.frexp(mean + spread * z)[1] - 1 - 7) / 2  # 8 significant bits
        total += weight * math.log(math.sinh(half) / half)
        weights += weight
    return total / weights


def test_mean_logit():
    """44 of 45 within a factor of two, 29 without the spread; and the csv is what the script makes."""
    runs = pd.read_csv(RESULTS / 'authors/results.csv')
    cured = runs[(runs.method == 'mu_loss') & (runs.lam == 1e-4)].set_index(['weight_tying', 'size', 'lr'])
    hits, hits_at_mean, n = 0, 0, 0
    for run in runs[(runs.method == 'baseline') | (runs.lam == 1e-7)].itertuples():
        if abs(run.logit_mean) >= 64:
            loss = run.test_loss - cured.test_loss[run.weight_tying, run.size, run.lr]
            hits += 0.5 < loss / bf16_cost(run.logit_mean, run.logit_mean_spread) < 2
            hits_at_mean += 0.5 < loss / bf16_cost(run.logit_mean, 0) < 2
            n += 1
    assert (hits, hits_at_mean, n) == (44, 29, 45)
    made = runpy.run_path(RESULTS / 'mean_logit/mean_logit.py')['read_runs']().reset_index(drop=True)
    pd.testing.assert_frame_equal(pd.read_csv(RESULTS / 'mean_logit/mean_logit.csv'), made, rtol=1e-6)
