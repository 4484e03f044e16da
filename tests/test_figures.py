"""Figures: what is drawn where."""
import math

import numpy as np
import pandas as pd
import pytest

from analysis import account, paper, plots, theory


@pytest.mark.skipif(not account.PUBLISHED.exists(), reason='deleted by this fork')
def test_what_the_papers_16M_lost_is_in_its_authors_csv():
    """Against μ-centering at the same learning rate."""
    runs = pd.read_csv(account.PUBLISHED / 'authors_16M.csv').pivot(index='lr', columns='method')
    theirs = paper.DRIFT[paper.DRIFT['size'] == '16M'].astype({'lr': float}).set_index('lr')
    lost = runs.test_loss.baseline - runs.test_loss.mu_centering
    for name, values in (('excess', lost), ('mu_norm', runs.mu_norm.baseline),
                         ('logit_mean', runs.logit_mean.baseline)):
        assert theirs[name].to_dict() == pytest.approx(values.to_dict(), abs=6e-4)


@pytest.mark.parametrize('size', ['tiny', '16M'])
def test_the_figure_of_a_shift_has_the_papers_baselines_and_ours_on_one_plane(size):
    """Ours by the norm that was added, whatever is left of it in the end, and by the mean logit."""
    rows = pd.DataFrame({'method': 'baseline', 'label': ['baseline'] * 2 + ['baseline in fp32'],
                         'mu_shift': [300, 1000, 500], 'offset': [90, 800, 60], 'excess': [0.1, 2.0, 0.0]})
    rows = pd.concat([rows, rows[:2].assign(method='mu_centering', label='μ-centering', excess=0.01)])
    for ax, ours, theirs in zip(plots.rounding(rows.assign(size=size, mu_norm=7)).axes,
                                ('mu_shift', 'offset'), ('mu_norm', 'offset'), strict=True):
        drawn = {point for line in ax.lines for point in zip(*line.get_data(), strict=True)}
        assert drawn >= {*zip(rows[ours], rows.excess, strict=True)}
        assert drawn >= {*zip(paper.DRIFT[theirs], paper.DRIFT.excess, strict=True)}


def test_mu_points_along_the_first_axis_and_h_to_the_side_of_the_second():
    rng = np.random.RandomState(0)
    for _ in range(20):
        mu, h, X = rng.randn(8), rng.randn(8), rng.randn(5, 8)
        (length, *others), of_h = theory.projection(np.stack((mu, h)), mu, h)
        assert length == pytest.approx(np.linalg.norm(mu)) and others == pytest.approx([0, 0], abs=1e-7)
        assert of_h[0] == pytest.approx(mu @ h / length) and of_h[1] > 0 and of_h[2] < 1e-7
        lengths = np.linalg.norm(theory.projection(X, mu, h), axis=1)
        assert lengths == pytest.approx(np.linalg.norm(X, axis=1))


def test_z_loss_of_two_logits_is_log_squared_of_Z_and_0_where_Z_is_1():
    of_Z, of_loss = theory.zloss_2d().axes
    for ax, height, low, high in ((of_Z, 1, 2 * math.exp(-4), 2 * math.exp(2)),
                                  (of_loss, 0, 0, math.log(2 * math.exp(-4)) ** 2)):
        assert ax.get_zlim() == pytest.approx((low, high), abs=0.05 * high)  # and a margin
        l1, l2, z = ax.lines[0].get_data_3d()
        assert np.exp(l1) + np.exp(l2) == pytest.approx(1) and (np.array(z) == height).all()
