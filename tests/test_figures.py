"""Figures: what is drawn where."""
import math

import numpy as np
import pandas as pd
import pytest

from analysis import plots, shift, theory


@pytest.mark.parametrize('size', ['tiny', '16M'])
def test_the_figure_of_a_shift_has_the_papers_baselines_and_ours_on_one_plane(size):
    """Ours by the norm that was added, whatever is left of it in the end, and by the mean logit."""
    published = shift.published_baselines()
    rows = pd.DataFrame({'method': 'baseline', 'label': ['baseline'] * 2 + ['baseline in fp32'],
                         'mu_shift': [300, 1000, 500], 'offset': [90, 800, 60], 'excess': [0.1, 2.0, 0.0]})
    rows = pd.concat([rows, rows[:2].assign(method='mu_centering', label='μ-centering', excess=0.01)])
    rows = rows.assign(size=size, mu_norm=7, lam=math.nan, center_every=math.nan)
    columns = ('mu_shift', 'mu_norm'), ('offset', 'offset')
    for ax, (ours, theirs) in zip(plots.rounding(rows).axes, columns, strict=True):
        drawn = {point for line in ax.lines for point in zip(*line.get_data(), strict=True)}
        assert drawn >= {*zip(rows[ours], rows.excess, strict=True)}
        assert drawn >= {*zip(published[theirs], published.excess, strict=True)}


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
