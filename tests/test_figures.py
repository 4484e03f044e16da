"""The paper's figures, of a made-up sweep, training curves and the page."""
import base64
import re
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import analyze
from test_analysis import analysed
from tools import report

# -------- a made-up sweep with all that the paper ran, but for some sizes and values of λ
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = ['16M', '57M', '221M']
SEEDS = [1, 2]
WORDS = ['untied', 'tied']
VARIANTS = {  # method, λ, how its loss rises with the learning rate: of the lowest it does not
    'baseline': ('baseline', None, 9), 'weight decay': ('weight_decay', 1e-4, 8),
    'z-loss': ('z_loss', 1e-4, 4), 'z-loss λ=0.1': ('z_loss', 0.1, 6),
    'soft-capping': ('soft_capping', None, 3), 'μ-loss': ('mu_loss', 1e-4, 0),
    'μ-loss λ=100': ('mu_loss', 100.0, 2), 'μ-centering': ('mu_centering', None, 1)}
OF_METHODS = [name for name in VARIANTS if 'λ' not in name]
STATISTICS = ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax', 'r_emb', 'cos_mu_h', 'r_cos', 'r_log']


def lowest_loss(size, tying):
    return {'16M': 4, '57M': 3.9, '221M': 3.8}[size] + 0.3 * tying


def made_up_run(variant, size, tying, lr, seed):
    """A row of results.csv."""
    method, lam, steepness = VARIANTS[variant]
    run = dict(
        run=f'{variant} {size} {tying} {lr} {seed}', method=method, lam=lam, size=size,
        weight_tying=tying, lr=lr, seed=seed, steps=100_000, init_loss=10.83,
        test_loss=lowest_loss(size, tying) + steepness * (1 + 0.2 * seed) * lr,
        train_seconds=5000 * (1 + steepness / 100), device='a card')
    for i, name in enumerate(STATISTICS, 1):
        run[name] = i * lr + 0.1 * seed + 0.01 * steepness
    return run


@pytest.fixture(scope='module')
def complete(tmp_path_factory):
    """What is shown of the whole made-up sweep, and the folder of its analysis."""
    folder = tmp_path_factory.mktemp('complete')
    runs = [made_up_run(*which) for which in product(VARIANTS, SIZES, (0, 1), RATES, SEEDS)]
    pd.DataFrame(runs).to_csv(folder / 'results.csv', index=False)
    shown = analysed(f'--results={folder}/results.csv')
    shown.folder = folder
    return shown


@pytest.fixture
def runs_of(complete):
    """The runs of the made-up sweep with a tying, as main has them."""
    runs = report.with_looks(analyze.read_runs(complete.folder / 'results.csv'))
    methods = analyze.with_marks(analyze.of_methods(runs))
    return lambda tying: methods[methods.weight_tying == tying]


# -------- what is on an axis, and what should be: [(a line's name in the legend, its points)], and of each
# point [x, lowest, mean and highest of the seeds, whether it is filled]
def ends_of(bars):
    """The low and the high end of each of some vertical bars."""
    return np.array(bars.get_segments())[:, :, 1]


def check_lines(ax, figure, expected):
    names = {}
    for handle, text in zip(figure.legends[0].get_lines(), figure.legends[0].get_texts(), strict=True):
        names.setdefault(to_hex(handle.get_color()), text.get_text())
    lines = [line for line in ax.lines if line.get_linestyle() != ':']
    bars = [drawn for drawn in ax.collections if isinstance(drawn, LineCollection)]
    markers = [drawn for drawn in ax.collections if not isinstance(drawn, LineCollection)]
    assert [names[to_hex(line.get_color())] for line in lines] == [name for name, _ in expected]

    for line, bar, marker, (_, points) in zip(lines, bars, markers, expected, strict=True):
        x, low, mean, high, filled = np.transpose(points)
        np.testing.assert_allclose(line.get_xydata(), np.transpose([x, mean]))
        np.testing.assert_allclose(marker.get_offsets(), line.get_xydata())
        np.testing.assert_allclose(ends_of(bar), np.transpose([low, high]))
        faces = [to_hex(face) != '#ffffff' for face in marker.get_facecolors()]
        assert faces == filled.astype(bool).tolist()


def is_filled(variant, size, tying, lr):
    losses = [made_up_run(variant, size, tying, lr, seed)['test_loss'] for seed in SEEDS]
    return max(losses) > 1.01 * lowest_loss(size, tying)


def over_rates(variants, sizes, tying, column='test_loss', rates=RATES):
    lines = []
    for size, variant in product(sizes, variants):
        points = []
        for lr in rates:
            values = [made_up_run(variant, size, tying, lr, seed)[column] for seed in SEEDS]
            filled = is_filled(variant, size, tying, lr)
            points.append([lr, min(values), np.mean(values), max(values), filled])
        lines.append((variant, points))
    return lines


def lrs_of_seeds(variant, size, tying):
    """Sums over the learning rates / (n - 1). The loss is lowest at the lowest rate."""
    found = []
    for seed in SEEDS:
        losses = [made_up_run(variant, size, tying, lr, seed)['test_loss'] for lr in RATES]
        found.append(sum(loss - losses[0] for loss in losses) / 6)
    return found


def over_sizes(variants, tying):
    lines = []
    for variant in variants:
        points = []
        for i, size in enumerate(SIZES):
            lrs = lrs_of_seeds(variant, size, tying)
            filled = any(is_filled(variant, size, tying, lr) for lr in RATES)
            points.append([i, min(lrs), np.mean(lrs), max(lrs), filled])
        lines.append((variant, points))
    return lines


# -------- each figure of the paper
def test_page(complete):
    """All tables and figures, in their order, and no other file is needed."""
    names = []
    for word in ('untied', 'tied'):
        names += [f'{name}_{word}' for name in ('loss', 'lrs', 'statistics', 'fact_3')]
        names += [f'{name}_{method}_{word}' for method in ('z_loss', 'mu_loss') for name in ('loss', 'lrs')]
    assert [*complete.figures] == names
    page = (complete.folder / 'report.html').read_text()
    assert page.count('<table') == len(complete.tables) == 16
    for title in complete.tables:
        assert f'<h2>{title}</h2>' in page
    assert '<td><u><b>0.000 [0.000, 0.000]</b></u></td>' in page


def test_figures_are_embedded(tmp_path, capsys):
    """In report.html, and written beside it. A name with < in it is text."""
    runs = [made_up_run(*which) for which in product(('μ-loss', 'baseline'), ['16M'], [0], RATES, [1])]
    runs = pd.DataFrame(runs).replace('mu_loss', '<i>&')
    runs.to_csv(tmp_path / 'results.csv', index=False)
    analyze.main([f'--results={tmp_path}/results.csv'])
    page = (tmp_path / 'report.html').read_text()
    images = [base64.b64decode(text) for text in re.findall('base64,(.*?)"', page)]
    assert {*images} == {path.read_bytes() for path in (tmp_path / 'figures').iterdir()}
    assert len(images) == 3
    assert '<th>&lt;i&gt;&amp;</th>' in page and '<i>' not in page
    assert '<b>0.000</b>' in page and '*0.000*' in capsys.readouterr().out


@pytest.mark.parametrize('tying', [0, 1])
def test_loss_against_lr(tying, complete):
    """Figures 2 and 9: above all sizes and rates, below a panel for each size at the two largest rates."""
    figure = complete.figures[f'loss_{WORDS[tying]}']
    whole, *zooms = figure.axes
    check_lines(whole, figure, over_rates(OF_METHODS, SIZES, tying))
    for ax, size in zip(zooms, SIZES, strict=True):
        check_lines(ax, figure, over_rates(OF_METHODS, [size], tying, rates=RATES[-2:]))
        assert ax.get_title() == size
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*OF_METHODS, *SIZES]


@pytest.mark.parametrize('tying', [0, 1])
def test_lrs_against_size(tying, complete):
    """Figures 3 and 10."""
    figure = complete.figures[f'lrs_{WORDS[tying]}']
    (ax,) = figure.axes
    check_lines(ax, figure, over_sizes(OF_METHODS, tying))
    assert [label.get_text() for label in ax.get_xticklabels()] == [*SIZES]


def test_statistics(complete):
    """Figures 4 and 5."""
    for name, columns, variants in (('statistics_tied', STATISTICS[:4], OF_METHODS),
                                    ('fact_3_tied', STATISTICS[4:], ['baseline'])):
        figure = complete.figures[name]
        for ax, column in zip(figure.axes, columns, strict=True):
            check_lines(ax, figure, over_rates(variants, SIZES, 1, column))
            assert ax.get_ylabel() == report.LABELS[column]


def test_ablation(complete):
    """Figure 8: each point is compared with all points of its size, of both methods."""
    for method, variants in (('z_loss', ['z-loss', 'z-loss λ=0.1']), ('mu_loss', ['μ-loss', 'μ-loss λ=100'])):
        figure = complete.figures[f'loss_{method}_untied']
        check_lines(figure.axes[0], figure, over_rates(variants, SIZES, 0))
        figure = complete.figures[f'lrs_{method}_untied']
        check_lines(figure.axes[0], figure, over_sizes(variants, 0))


def test_other_rates_have_a_panel_of_their_own(runs_of):
    """No line of Figure 3 joins LRS of other learning rates."""
    runs = runs_of(0)
    fewer = runs[(runs['size'] == '16M') | (runs.lr < 0.05)]
    left, right = report.lrs_figure(analyze.learning_rate_sensitivity(fewer)).axes
    assert left.get_title() == 'η = 0.0003 0.001 0.003 0.01 0.03 0.1 0.3'
    assert right.get_title() == 'η = 0.0003 0.001 0.003 0.01 0.03'
    assert {*left.lines[0].get_xdata()} == {0} and {*right.lines[0].get_xdata()} == {1, 2}


def test_distributions(runs_of):
    """Figures 11 and 12: quartiles, median, extrema and a share of the baseline; a row for each size."""
    baseline = runs_of(1).query('method == "baseline"')
    rows = baseline[['run', 'size', 'lr', 'seed', 'diverged']].assign(quantity='r_cos')
    low = rows.lr + rows.seed
    rows = rows.assign(**{'min': low, '25%': low + 1, '50%': low + 2, '75%': low + 4, 'max': low + 7,
                          'below_1': 0.3 * rows.seed, 'above_0': 1})
    axes = report.box_figure(rows, ['r_cos', 'r_log']).axes
    low = np.array(RATES)
    for size, left, right in (('16M', axes[0], axes[6]), ('221M', axes[4], axes[10])):
        boxes, ranges = left.collections
        np.testing.assert_allclose(ends_of(boxes), np.transpose([low + 2.5, low + 5.5]))
        np.testing.assert_allclose(ends_of(ranges), np.transpose([low + 1, low + 9]))
        for line, values in zip(left.lines, (low + 1, low + 3.5, low + 9), strict=True):
            np.testing.assert_allclose(line.get_xydata(), np.transpose([RATES, values]))
        assert left.get_title(loc='left') == size and left.get_ylabel() == report.LABELS['r_cos']
        np.testing.assert_allclose(right.lines[0].get_xydata(), [[lr, 45] for lr in RATES])
        filled = [to_hex(face) != '#ffffff' for face in right.collections[0].get_facecolors()]
        assert filled == [is_filled('baseline', size, 1, lr) for lr in RATES]


def test_figures_of_run_folders(trained, tmp_path):
    """Figures 11 and 12 and the training curves, whose points are val losses, come from run folders."""
    for lr in ('0.01', '0.1', '0.3'):
        trained(f'runs/{lr}', f'--lr={lr}', '--steps=4', '--eval_every=2')
    page = analysed(tmp_path / 'runs', f'--out={tmp_path}/out')
    training = [f'training_tiny_untied_lr{lr}' for lr in ('0.01', '0.1', '0.3')]
    assert [*page.figures] == ['loss_untied', 'statistics_untied', 'fact_3_untied', 'r_emb_baseline_untied',
                               'r_cos_baseline_untied', *training]
    assert len(page.figures['loss_untied'].axes) == 1  # three rates need no zoom
    about = re.search('<p>(.*?)</p>', (tmp_path / 'out/report.html').read_text())[1]
    assert about.startswith('3 training runs') and about.endswith(f'Device: cpu. Torch: {torch.__version__}.')
    log = pd.read_json(tmp_path / 'runs/0.3/log.jsonl', lines=True)
    initial = log.val_loss[0]
    assert log.val_loss.max() > initial  # a spike, which is drawn at the initial loss
    log[['loss', 'val_loss']] = log[['loss', 'val_loss']].clip(upper=initial)
    axes = page.figures['training_tiny_untied_lr0.3'].axes
    for ax, column in zip(axes, ('loss', 'logit_mean', 'mu_norm'), strict=True):
        known = log.dropna(subset=column)
        np.testing.assert_allclose(ax.lines[0].get_xydata(), known[['step', column]])
    points = axes[0].lines[1].get_xydata()
    np.testing.assert_allclose(points, log.dropna(subset='val_loss')[['step', 'val_loss']])
