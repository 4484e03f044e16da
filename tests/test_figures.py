"""The paper's figures and tables of runs, of a made-up sweep, and checkpoints of small runs, by hand."""
import base64
import itertools
import math
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import analyze
from conftest import refused
from model import GPT, gpt_config
from tools import report

RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = {'16M': 15_572_480, '221M': 220_800_000}
LAMS = {  # of each method
    'baseline': [None], 'weight_decay': [1e-4], 'z_loss': [1e-4, 0.1], 'soft_capping': [None],
    'mu_loss': [1e-4, 100.0], 'mu_centering': [None]}
SEEDS = [1, 2]
QUANTITIES = ['r_emb', 'cos_mu_h', 'r_cos', 'r_log']


# -------- a made-up sweep with all that the paper ran, but for two sizes and two values of λ
def loss_of(method, lam, size, lr, seed):
    """Rises with the learning rate, least for mu_centering, more in a second seed and for another λ."""
    steepness = 1 + 5 - list(LAMS).index(method)
    if lam in (0.1, 100.0):
        steepness *= 1.5
    return 4 - 0.1 * list(SIZES).index(size) + steepness * (1 + 0.2 * seed) * lr


def seconds_of(method, size, seed):
    return 1000 * (1 + list(SIZES).index(size)) * (1 + 0.02 * list(LAMS).index(method)) + seed


def made_up_runs():
    """Rows of results.csv."""
    rows = []
    for size, tied, method, lr, seed in itertools.product(SIZES, (0, 1), LAMS, RATES, SEEDS):
        for lam in LAMS[method]:
            rows.append(dict(
                run=str(len(rows)), method=method, size=size, n_params=SIZES[size], weight_tying=tied,
                lam=lam, lr=lr, seed=seed, steps=100_000, init_loss=10.83, device='a card',
                test_loss=loss_of(method, lam, size, lr, seed), train_seconds=seconds_of(method, size, seed),
                mu_norm=100 * lr, logit_mean=90 * lr, logit_std=2 + lr, logit_absmax=9 + lr,
                **{name: 0.5 + lr for name in QUANTITIES}))
    return rows


def some_runs():
    """Those of two methods."""
    return [row for row in made_up_runs() if row['method'] in ('baseline', 'mu_loss')]


def values_of(row, quantity):
    """The values that a distribution of a baseline is of."""
    return np.array([0.1, 0.4, 0.5, 0.7, 1.2]) + row['lr'] + 0.1 * row['seed'] * QUANTITIES.index(quantity)


def made_up_distributions(rows):
    """Rows of distributions.csv."""
    described = []
    for row, quantity in itertools.product(rows, QUANTITIES):
        if row['method'] == 'baseline':
            values = pd.Series(values_of(row, quantity))
            described.append({'run': row['run'], 'quantity': quantity, **values.describe(),
                              'below_1': (values < 1).mean(), 'above_0': 1 - row['seed'] / 3})
    return described


def made_up_curves(rows):
    """Rows of curves.csv of the seed 1 of the largest rate: a loss at each 10 steps, a val loss at 20."""
    curves = []
    for row in rows:
        if (row['lr'], row['seed']) == (0.3, 1):
            curves += [dict(run=row['run'], step=step, loss=5 - step / 100 + row['test_loss'],
                            mu_norm=step, logit_mean=step) for step in range(10, 101, 10)]
            curves.append(dict(run=row['run'], step=20, val_loss=4.5 + row['test_loss']))
    return curves


def write(folder, **tables):
    """Writes csv files into a folder, and takes away all others of an analysis."""
    for path in folder.glob('*.csv'):
        path.unlink()
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(folder / f'{name}.csv', index=False)


def figures_of(arguments, with_files=False):
    """The figures that analyze.py draws, by their names; without files it takes a fraction of the time."""
    figures = {}
    to_png = report.to_png

    def keep(name, place, figure, *more):
        item = to_png(name, place, figure, *more)
        figures[item['name']] = figure
        return item

    with pytest.MonkeyPatch.context() as patched, plt.rc_context({'figure.dpi': 40}):
        patched.setattr(report, 'to_png', keep)
        if not with_files:
            patched.setattr(plt.Figure, 'savefig', lambda *_, **more: None)
        analyze.main(arguments)
    return figures


@pytest.fixture
def drawn(tmp_path):
    """drawn(**tables): the figures of csv files with these rows."""
    def draw(**tables):
        write(tmp_path, **tables)
        return figures_of([f'--results={tmp_path}/results.csv', f'--out={tmp_path}/out'])
    return draw


@pytest.fixture(scope='module')
def complete(tmp_path_factory):
    """The figures of the whole made-up sweep, and the folder of its analysis."""
    folder = tmp_path_factory.mktemp('complete')
    rows = made_up_runs()
    curves = made_up_curves([row for row in rows if row['size'] == '16M' and not row['weight_tying']])
    write(folder, results=rows, distributions=made_up_distributions(rows), curves=curves)
    figures = figures_of([f'--results={folder}/results.csv', f'--out={folder}'], with_files=True)
    return figures, folder


# -------- what is on an axis
def lines_on(ax):
    """{color: (x, y)} of the lines with several points, as lists, in the order in which they were drawn."""
    lines = []
    for line in ax.lines:
        if len(line.get_xdata()) > 1 and line.get_linestyle() not in (':', 'None'):
            lines.append((to_hex(line.get_color()), list(line.get_xdata()), list(line.get_ydata())))
    return lines


def points_on(ax):
    """{(x, y) of a point: its filling}, of coordinates rounded to 6 digits."""
    points = {}
    for collection in ax.collections:
        if not isinstance(collection, LineCollection):
            faces = np.resize(collection.get_facecolors(), (len(collection.get_offsets()), 4))
            for xy, color in zip(np.round(collection.get_offsets(), 6).tolist(), faces, strict=True):
                points[tuple(xy)] = to_hex(color)
    return points


def bars_on(ax):
    """The vertical bars on an axis, a set of (x, low, high), rounded to 6 digits."""
    bars = set()
    for collection in ax.collections:
        if isinstance(collection, LineCollection):
            bars |= {(round(x, 6), round(low, 6), round(high, 6))
                     for (x, low), (_, high) in collection.get_segments()}
    return bars


def looks(variant):
    """The color of one of the paper's variants."""
    names = {name: method for method, name in report.NAMES.items()}
    return to_hex(report.COLORS[names.get(variant, variant)])


# -------- by a second, naive way
DEFAULTS = {report.NAMES.get(method, method): (method, lams[0]) for method, lams in LAMS.items()}


def mean_loss(method, lam, size, lr):
    return np.mean([loss_of(method, lam, size, lr, seed) for seed in SEEDS])


def is_behind(method, lam, size, lr, others):
    """Over 1% above the lowest of `others`, pairs of a method and its λ."""
    lowest = min(mean_loss(*other, size, lr) for other in others)
    return mean_loss(method, lam, size, lr) > 1.01 * lowest


def lrs_of_seeds(method, lam, size):
    """Sums over the learning rates / (n - 1). The loss is lowest at the lowest rate."""
    sums = []
    for seed in SEEDS:
        losses = [loss_of(method, lam, size, lr, seed) for lr in RATES]
        sums.append(sum(loss - losses[0] for loss in losses) / (len(RATES) - 1))
    return sums


# -------- each figure and table of the paper
@pytest.mark.filterwarnings('error')
def test_a_complete_sweep(complete):
    """Every figure and table of the paper that is of runs, in its order, a file for each figure."""
    figures, folder = complete
    papers = ('loss', 'lrs', 'statistics', 'fact_3', 'ablation', 'r_emb', 'r_cos')
    names = [f'{name}_{word}' for name in papers for word in ('untied', 'tied')]
    assert {*figures} == {*names, 'summary_untied', 'summary_tied', 'training_16M_untied_lr0.3'}
    assert {path.stem for path in (folder / 'figures').glob('*.png')} == {*figures}

    page = (folder / 'report.html').read_text()
    shown = [*re.findall(r'<h2>(.*?)</h2>', page)]
    assert len(shown) == page.count('<table') + len(figures)
    images = [base64.b64decode(text) for text in re.findall('base64,(.*?)"', page)]
    assert sorted(images) == sorted(path.read_bytes() for path in (folder / 'figures').glob('*.png'))
    lrs = 'Learning rate sensitivity (LRS), {}, of {} by λ'
    in_order = ['Learning rate sensitivity (LRS), {}', 'Test loss and mean logit, {}',
                'Test loss against learning rate, {}', 'Learning rate sensitivity against size, {}',
                'Mean embedding and logits against learning rate, {}',
                'What centering would change in the baseline, {}',
                lrs.format('{}', 'z-loss'), lrs.format('{}', 'μ-loss'), 'Several values of λ, {}']
    expected = [title.format(word) for word in ('untied', 'tied') for title in in_order]
    for word, names in itertools.product(('untied', 'tied'), ('r_emb and cos(μ, h)', 'r_cos and r_log')):
        expected.append(f'Distributions of {names} in the baseline, {word}')
    expected += ['Additional training time ΔT, untied', 'Additional training time ΔT, tied',
                 'Test loss minus that of the baseline of that seed',
                 'Training curves, 16M, untied, η = 0.3', 'All runs']
    assert shown == expected


def test_loss_against_lr(complete, drawn):
    """Figures 2 and 9: above all sizes and rates, below a panel for each size at the two largest rates."""
    figures, _ = complete
    for word in ('untied', 'tied'):
        whole, *zooms = figures[f'loss_{word}'].axes
        assert [ax.get_title() for ax in zooms] == [*SIZES]
        panels = [(whole, SIZES, RATES)]
        panels += [(ax, [ax.get_title()], RATES[-2:]) for ax in zooms]
        for ax, sizes, rates in panels:
            lines, points, bars = [], {}, set()
            for size, (variant, run) in itertools.product(sizes, DEFAULTS.items()):
                means = [mean_loss(*run, size, lr) for lr in rates]
                lines.append((looks(variant), rates, pytest.approx(means)))
                for lr, mean in zip(rates, means, strict=True):
                    behind = is_behind(*run, size, lr, DEFAULTS.values())
                    points[lr, round(mean, 6)] = looks(variant) if behind else '#ffffff'
                    bars.add((lr, *(round(loss_of(*run, size, lr, seed), 6) for seed in SEEDS)))
            assert lines_on(ax) == lines and points_on(ax) == points and bars_on(ax) == bars
        legend = [text.get_text() for text in figures[f'loss_{word}'].legends[0].get_texts()]
        assert legend == [*DEFAULTS, *SIZES]
        low, high = zooms[0].get_xlim()
        assert RATES[-3] < low < RATES[-2] and RATES[-1] < high

    few = [row for row in made_up_runs() if row['size'] == '16M' and row['method'] == 'baseline']
    assert len(drawn(results=few)['loss_tied'].axes) == 2
    dead = drawn(results=[{**row, 'test_loss': 10.83} for row in few])['loss_tied'].axes[0]
    assert {*points_on(dead)} == {(lr, 10.83) for lr in RATES}
    two_rates = drawn(results=[row for row in few if row['lr'] > 0.05])
    assert len(two_rates['loss_tied'].axes) == 2
    assert 'loss_tied' not in drawn(results=[row for row in few if row['lr'] == 0.3])
    many = [{**row, 'size': f'{i}M', 'n_params': i + 1} for row in few for i in range(7)]
    assert [ax.get_title() for ax in drawn(results=many)['loss_tied'].axes[1:]] == [f'{i}M' for i in range(7)]


def test_lrs_against_size(complete, drawn):
    """Figures 3 and 10, with the labels of the log axis. Absent without several sizes, or their n_params."""
    figures, _ = complete
    for word in ('untied', 'tied'):
        (ax,) = figures[f'lrs_{word}'].axes
        lines, points, bars = [], {}, set()
        for variant, run in DEFAULTS.items():
            y = [np.mean(lrs_of_seeds(*run, size)) for size in SIZES]
            lines.append((looks(variant), [*SIZES.values()], pytest.approx(y)))
            for size, value in zip(SIZES, y, strict=True):
                behind = any(is_behind(*run, size, lr, DEFAULTS.values()) for lr in RATES)
                points[SIZES[size], round(value, 6)] = looks(variant) if behind else '#ffffff'
                bars.add((SIZES[size], *(round(x, 6) for x in lrs_of_seeds(*run, size))))
        assert lines_on(ax) == lines and points_on(ax) == points and bars_on(ax) == bars
        assert ax.get_xscale() == 'log'
        assert [label.get_text() for label in ax.get_xticklabels()] == [*SIZES]

    rows = [row for row in some_runs() if row['weight_tying']]
    half_done = [row for row in rows if row['size'] == '16M' or row['lr'] < 0.05]
    for without in ([row for row in rows if row['size'] == '16M'], [{**row, 'n_params': ''} for row in rows],
                    [row for row in rows if row['lr'] > 0.05], half_done):
        assert not [name for name in drawn(results=without) if name.startswith('lrs_')]
    other_rate = [{**row, 'lr': 0.2} if (row['size'], row['lr']) == ('16M', 0.1) else row for row in rows]
    (ax,) = drawn(results=other_rate)['lrs_tied'].axes
    assert [x for _, x, _ in lines_on(ax)] == 2 * [[*SIZES.values()]]


def test_scale():
    """Logarithmic beyond ten times the median; zeros and values below zero are shown too."""
    figure, ax = plt.subplots()
    for values, expected in (([2, 3, 29], 'linear'), ([0, 0.1, 9], 'linear'), ([2, 3, 31], 1),
                             ([0, 3, 31], 1), ([-3, 3, 2000], 100)):
        ax.set_yscale('linear')
        report.scale(ax, pd.Series(values))
        assert expected in (ax.get_yscale(), getattr(ax.yaxis.get_transform(), 'linthresh', None))
    plt.close(figure)


def test_ablation(complete, drawn):
    """Figure 8: a column for z-loss and one for μ-loss, each point compared with all points of its size."""
    figures, _ = complete
    pairs = [(method, lam) for method in ('mu_loss', 'z_loss') for lam in LAMS[method]]
    colors = dict(zip(sorted({lam for _, lam in pairs}), ('#1f77b4', '#ff7f0e', '#2ca02c'), strict=True))
    for word in ('untied', 'tied'):
        axes = np.reshape(figures[f'ablation_{word}'].axes, (2, 2))
        assert [ax.get_title() for ax in axes[0]] == ['z-loss', 'μ-loss']
        for (top, bottom), method in zip(axes.T, ('z_loss', 'mu_loss'), strict=True):
            losses, sensitivities, points, lrs_points = [], [], {}, {}
            for size, lam in itertools.product(SIZES, LAMS[method]):
                means = [mean_loss(method, lam, size, lr) for lr in RATES]
                losses.append((colors[lam], RATES, pytest.approx(means)))
                behind = [is_behind(method, lam, size, lr, pairs) for lr in RATES]
                for lr, mean, filled in zip(RATES, means, behind, strict=True):
                    points[lr, round(mean, 6)] = colors[lam] if filled else '#ffffff'
                lrs = round(np.mean(lrs_of_seeds(method, lam, size)), 6)
                lrs_points[SIZES[size], lrs] = colors[lam] if any(behind) else '#ffffff'
            for lam in LAMS[method]:
                y = [np.mean(lrs_of_seeds(method, lam, size)) for size in SIZES]
                sensitivities.append((colors[lam], [*SIZES.values()], pytest.approx(y)))
            assert lines_on(top) == losses and points_on(top) == points
            assert lines_on(bottom) == sensitivities and points_on(bottom) == lrs_points
        handles = dict(zip([text.get_text() for text in figures[f'ablation_{word}'].legends[0].get_texts()],
                           figures[f'ablation_{word}'].legends[0].get_lines(), strict=True))
        for lam, color in colors.items():
            assert to_hex(handles[f'λ = {lam:g}'].get_color()) == color

    rows = [row for row in some_runs() if row['size'] == '16M']
    assert len(drawn(results=rows)['ablation_tied'].axes) == 2
    others = [{**row, 'method': 'z_loss', 'init_loss': 20, 'test_loss': 4} for row in rows if row['lam']]
    for row in others:
        if row['lr'] == 0.3:
            row['test_loss'] = 15  # which the axis shows, as they learned something
    left, right, *_ = drawn(results=others + rows)['ablation_tied'].axes
    assert left.get_ylim() == right.get_ylim() and 15 < left.get_ylim()[1] < 16
    for without in ([{**row, 'n_params': ''} for row in rows], [row for row in rows if row['lr'] > 0.05]):
        assert not lines_on(drawn(results=without)['ablation_tied'].axes[1])  # there is no LRS
    assert 'ablation_tied' not in drawn(results=[row for row in rows if row['lam'] in (None, 1e-4)])


def test_distributions(complete, drawn):
    """Figures 11 and 12: boxes, median, extrema and share of the baseline, over seeds; a row for a size."""
    figures, _ = complete
    for word, (name, quantities) in itertools.product(
            ('untied', 'tied'), {'r_emb': QUANTITIES[:2], 'r_cos': QUANTITIES[2:]}.items()):
        axes = figures[f'{name}_{word}'].axes
        n = len(axes) // 2
        left, right = np.reshape(axes[:n], (2, 2)), np.reshape(axes[n:], (2, 2))
        for (i, size), (j, quantity) in itertools.product(enumerate(SIZES), enumerate(quantities)):
            boxes, ranges, levels, shares = set(), set(), [], {}
            for lr in RATES:
                seeds = [values_of({'lr': lr, 'seed': seed}, quantity) for seed in SEEDS]
                boxes.add((lr, *np.mean([np.quantile(x, (0.25, 0.75)) for x in seeds], axis=0).round(6)))
                ranges.add((lr, np.min(seeds).round(6), np.max(seeds).round(6)))
                levels.append((np.min(seeds), np.mean([np.median(x) for x in seeds]), np.max(seeds)))
                share = [100 * np.mean(x < 1) for x in seeds]
                if quantity == 'cos_mu_h':
                    share = [200 / 3, 200 / 3]  # above 0 and below 0
                behind = is_behind('baseline', None, size, lr, DEFAULTS.values())
                shares[lr, round(np.mean(share), 6)] = '#ff0000' if behind else '#ffffff'
            ax = left[i, j]
            assert bars_on(ax) == boxes | ranges
            marks = [line.get_ydata() for line in ax.lines if line.get_marker() == '_']
            np.testing.assert_allclose(np.transpose(marks), levels)
            threshold = [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == ':']
            assert threshold == [0 if quantity == 'cos_mu_h' else 1]
            assert ax.get_title(loc='left') == size and ax.get_ylabel() == report.LABELS[quantity]
            assert points_on(right[i, j]) == shares
            assert ('one sign' if quantity == 'cos_mu_h' else '< 1') in right[i, j].get_ylabel()

    rows = [row for row in some_runs() if row['size'] == '16M']
    others = [row for row in rows if row['method'] != 'baseline']
    assert 'r_emb_tied' in drawn(results=rows, distributions=made_up_distributions(rows))
    broken = [{**row, 'test_loss': 'nan'} if row['lr'] == 0.3 else row for row in rows]
    second = [{**row, 'run': f'{row["run"]}b', 'beta2': 0.9, 'lr': row['lr'] / 2} for row in rows
              if row['method'] == 'baseline']
    both = drawn(results=broken + second, distributions=made_up_distributions(rows + second))
    assert {lr for lr, *_ in bars_on(both['r_emb_tied'].axes[0])} == {*RATES[:-1]}  # finite, at the defaults
    third = [{**row, 'run': f'{row["run"]}c', 'beta2': 0.99} for row in second]
    tables = dict(results=second + third, distributions=made_up_distributions(second + third))
    assert {'r_emb_tied_beta2_0.9', 'r_cos_tied_beta2_0.9'} < {*drawn(**tables)}
    for without in ({'results': rows}, {'results': others, 'distributions': made_up_distributions(rows)}):
        assert not {'r_emb_tied', 'r_cos_tied'} & {*drawn(**without)}


def tables_in(path):
    """{title: rows, each {column: text}} of a tables.md."""
    found = {}
    for part in path.read_text().split('### ')[1:]:
        title, *lines = part.split('\n')
        cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line[:1] == '|']
        found[title] = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    return found


def tables_of(rows, folder):
    """The tables of these runs, without figures, which take a while."""
    write(folder, results=rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plt.Figure, 'savefig', lambda *_, **more: None)
        analyze.main([f'--results={folder}/results.csv', f'--out={folder}/out'])
    return tables_in(folder / 'out/tables.md')


def test_lrs_beside_the_papers(complete, tmp_path):
    """LRS as the tables have it, the mean of Eq. 21, and the paper's where sizes and rates are the same."""
    _, folder = complete
    tables = tables_in(folder / 'tables.md')
    printed = {'untied': {'baseline': '0.306', 'μ-loss': '0.031'}, 'tied': {'weight decay': '0.114'}}
    for word in ('untied', 'tied'):
        table = tables[f'Learning rate sensitivity (LRS), {word}']
        lines = {(line['size'], line['LRS']): line for line in table}
        assert [*lines] == [(size, which) for size in SIZES
                            for which in ('sum / (n - 1)', "the paper's", 'mean (Eq. 21)')]
        for (variant, run), size in itertools.product(DEFAULTS.items(), SIZES):
            n1 = np.mean(lrs_of_seeds(*run, size))
            assert re.sub('<.*?>', '', lines[size, 'sum / (n - 1)'][variant]).startswith(f'{n1:.3f} [')
            assert lines[size, 'mean (Eq. 21)'][variant] == f'{n1 * 6 / 7:.3f}'
        for variant, text in printed[word].items():
            assert lines['16M', "the paper's"][variant] == text
    ablation = tables['Learning rate sensitivity (LRS), untied, of μ-loss by λ']
    assert [line['100'] for line in ablation if line['LRS'] == "the paper's"] == ['0.054', '0.055']
    assert '0.031' in {line['0.0001'] for line in ablation}
    tied = tables['Learning rate sensitivity (LRS), tied, of μ-loss by λ']
    assert {line['100'] for line in tied if line['LRS'] == "the paper's"} == {'-'}  # Table 4 is untied
    lrs = pd.read_csv(folder / 'lrs.csv').set_index(['table', 'size', 'weight_tying', 'variant'])
    assert lrs.paper['methods', '221M', 1, 'μ-centering'] == 0.066

    one_size = [row for row in some_runs() if row['size'] == '16M']
    other_rates = [row for row in one_size if row['lr'] < 0.3]
    other_size = [{**row, 'size': '1B', 'n_params': 10**9} for row in one_size]
    shorter = [{**row, 'steps': 1000} for row in one_size]
    unknown = [{**row, 'steps': ''} for row in one_size]
    for rows, known in ((one_size, True), (other_rates, False), (other_size, False), (shorter, False),
                        (unknown, False)):
        lines = [line for table in tables_of(rows, tmp_path).values() for line in table]
        assert ("the paper's" in [line.get('LRS') for line in lines]) == known


def test_overhead(complete, tmp_path):
    """Table 6: times above the baseline's of the same size and machine, beside the paper's."""
    _, folder = complete
    for word, weight_decay in (('untied', '-1.0%'), ('tied', '0.4%')):
        table = tables_in(folder / 'tables.md')[f'Additional training time ΔT, {word}']
        assert [(line['size'], line['device']) for line in table] == [
            (size, which) for size in SIZES for which in ('a card', "the paper's")]
        for method, line in itertools.product(LAMS, table[::2]):
            if method != 'baseline':
                mean = np.mean([seconds_of(method, line['size'], seed) for seed in SEEDS])
                baseline = np.mean([seconds_of('baseline', line['size'], seed) for seed in SEEDS])
                assert line[report.NAMES[method]] == f'{mean / baseline - 1:.1%}'
        assert table[1]['weight decay'] == weight_decay

    def cells(change):
        """Of a sweep in which `change` has changed each run of μ-loss with seed 2."""
        rows = [row for row in some_runs() if row['lam'] != 100 and row['size'] == '16M']
        of_mu_loss = [row for row in rows if row['method'] == 'mu_loss' and row['seed'] == 2]
        tables = tables_of([{**row, **change} if row in of_mu_loss else row for row in rows], tmp_path)
        table = tables.get('Additional training time ΔT, untied', [])
        return [line['μ-loss'] for line in table]

    assert cells({}) == ['8.0%', '0.4%']
    assert cells({'train_seconds': 2000}) == []  # the times are too far apart
    assert cells({'train_seconds': ''}) == ['7.9%', '0.4%']  # of the other seed
    assert cells({'train_seconds': 2000, 'test_loss': 'nan'}) == ['7.9%', '0.4%']
    for another in ({'device': 'another'}, {'processes': 4}, {'beta2': 0.9}):
        assert cells({'train_seconds': 2000, **another}) == ['7.9%', '0.4%']

    rows = [row for row in some_runs() if row['lam'] != 100 and row['size'] == '16M']
    for change, expected in (({'processes': 4}, ['', '4', '']), ({'beta2': 0.9}, ['', ''])):
        changed = [{**row, **change} if row['seed'] == 2 else row for row in rows]
        table = tables_of(changed, tmp_path)['Additional training time ΔT, untied']
        assert [line['processes'] for line in table] == expected
    short = [{**row, 'train_seconds': row['train_seconds'] / 2} for row in rows]
    assert 'Additional training time ΔT, untied' not in tables_of(short, tmp_path)
    alone = [row for row in rows if row['method'] == 'baseline' or (row['lr'], row['seed']) == (0.3, 1)]
    assert 'Additional training time ΔT, untied' not in tables_of(alone, tmp_path)  # one run of μ-loss


def test_training_curves(complete):
    """The val losses are points on the curves of the training loss."""
    figures, _ = complete
    ax = figures['training_16M_untied_lr0.3'].axes[0]
    points = [line for line in ax.lines if line.get_marker() == 'o']
    curves = [line for line in ax.lines if line.get_marker() != 'o']
    losses = [loss_of(method, lam, '16M', 0.3, 1) for method in LAMS for lam in LAMS[method]]
    steps = [*range(10, 101, 10)]
    for point, curve, loss in zip(points, curves, losses, strict=True):
        known = np.isfinite(point.get_ydata())
        assert point.get_xdata()[known].tolist() == [20]
        assert point.get_ydata()[known] == pytest.approx([4.5 + loss])
        assert point.get_color() == curve.get_color()
        assert curve.get_xdata().tolist() == steps
        assert curve.get_ydata() == pytest.approx([5 - step / 100 + loss for step in steps])
    shown = [text.get_text() for text in figures['training_16M_untied_lr0.3'].legends[0].get_texts()]
    assert len(shown) == 8


def test_curves_without_finite_losses(drawn):
    """Of a run that is lost at once."""
    row = some_runs()[0]
    curves = [dict(run=row['run'], step=step, loss=math.nan, mu_norm=1) for step in (1, 2)]
    figures = drawn(results=[{**row, 'test_loss': ''}], curves=curves)
    assert lines_on(figures['training_16M_untied_lr0.0003'].axes[1])[0][1] == [1, 2]


# -------- any checkpoint
def stop_at(monkeypatch, number):
    """A training ends with an error at step `number`, as if it were killed."""
    import train

    def train_step(model, optimizer, batch, step, *more, real=train.train_step, **named):
        if step == number:
            raise KeyboardInterrupt
        return real(model, optimizer, batch, step, *more, **named)

    monkeypatch.setattr(train, 'train_step', train_step)


def by_hand(path, corpus):
    """The quantities of a checkpoint on all test windows, in float64 but for the rounding."""
    saved = torch.load(path)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    (shard,) = Path(corpus).glob('*_val_*.bin')
    tokens = torch.from_numpy(np.fromfile(shard, '<u2', offset=1024).astype(np.int64))
    n = (len(tokens) - 1) // 32
    inputs, targets = tokens[:32 * n].view(n, 32), tokens[1:32 * n + 1]
    with torch.no_grad():
        h = gpt.hidden(inputs).flatten(0, 1)
        E = gpt.lm_head.weight.detach()
        rounded = (h.bfloat16() @ E.bfloat16().T).double()
        exact = (h @ E.T).double()
    h, E = h.double(), E.double()
    star = E - E.mean(dim=0)
    cos, cos_star = (F.normalize(h, dim=1) @ F.normalize(X, dim=1).T for X in (E, star))
    return {
        'step': saved['step'], 'mu_norm': E.mean(dim=0).norm(), 'logit_mean': rounded.mean(),
        'r_emb': (star.norm(dim=1) / E.norm(dim=1)).mean(),
        'r_cos': (cos_star.abs().amax(dim=1) / cos.abs().amax(dim=1)).mean(),
        'r_log': ((h @ star.T).abs().amax(dim=1) / (h @ E.T).abs().amax(dim=1)).mean(),
        'cross_entropy': F.cross_entropy(rounded, targets),
        'bf16_cost': F.cross_entropy(rounded, targets) - F.cross_entropy(exact, targets)}


def test_checkpoints(trained, corpus, tmp_path, monkeypatch, capsys):
    """Kept checkpoints, and the last of a run that has not ended, are measured and drawn by their steps."""
    flags = ('--lr=0.3', '--steps=12', '--keep_every=4', '--test_tokens=1e6', '--logits_dtype=bfloat16')
    trained('runs/done', '--method=baseline', *flags)
    stop_at(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        trained('runs/stopped', '--method=mu_loss', '--ckpt_every=3', *flags)
    folders = [tmp_path / 'runs/done', tmp_path / 'runs/stopped']
    figures = figures_of([str(tmp_path / 'runs'), f'--out={tmp_path}/out'])

    found = pd.read_csv(tmp_path / 'out/checkpoints.csv', dtype={'run': str}).set_index(['run', 'file'])
    files = [['model_4.pt', 'model_8.pt', 'model.pt', 'model_12.pt'], ['model_4.pt', 'ckpt.pt']]
    assert [*found.index] == [(str(folder), name) for folder, names in zip(folders, files, strict=True)
                              for name in names]
    assert found.step.tolist() == [4, 8, 12, 12, 4, 6]
    for (run, file), row in found.iterrows():
        expected = by_hand(Path(run, file), corpus)
        assert row[[*expected]].tolist() == pytest.approx([float(x) for x in expected.values()], abs=2e-5)
        assert (row['size'], row.weight_tying, row.lr, row.seed) == ('tiny', 0, 0.3, 1)
    results = pd.read_csv(tmp_path / 'out/results.csv').set_index('run')  # has the run that has ended alone
    assert results.bf16_cost.to_dict() == {str(folders[0]): found.bf16_cost[str(folders[0]), 'model.pt']}

    # a run's statistics are those of model.pt or, before it has one, of its last checkpoint
    shown = {line['variant']: line for line in tables_in(tmp_path / 'out/tables.md')['All runs']}
    for variant, last in (('baseline', (str(folders[0]), 'model.pt')),
                          ('μ-loss, not finished', (str(folders[1]), 'ckpt.pt'))):
        assert shown[variant]['model_step'] == str(found.step[last])
        assert shown[variant]['mu_norm'] == f'{found.mu_norm[last]:.4g}'

    name = 'checkpoints_tiny_untied_lr0.3'
    panels = {ax.get_title(): ax for ax in figures[name].axes}
    for column in ('mu_norm', 'logit_mean', 'bf16_cost', 'r_emb', 'r_cos', 'r_log'):
        lines = [line for line in panels[report.LABELS[column]].lines if line.get_linestyle() != ':']
        for line, folder in zip(lines, folders, strict=True):
            rows = found.loc[str(folder)]
            assert line.get_xdata().tolist() == rows.step.tolist() and line.get_marker() == 'o'
            assert line.get_ydata() == pytest.approx(rows[column])
    for drawn_of in (name, 'training_tiny_untied_lr0.3'):
        shown = [text.get_text() for text in figures[drawn_of].legends[0].get_texts()]
        assert shown == ['baseline', 'μ-loss, not finished']
    again = figures_of([f'--results={tmp_path}/out/results.csv', f'--out={tmp_path}/again'])
    assert name in again and len(again[name].axes) == 6

    # a run's folder; nothing is measured twice, but what has changed is
    capsys.readouterr()
    assert name in figures_of([str(folders[1]), f'--out={tmp_path}/one'])
    assert 'measuring' not in capsys.readouterr().out
    shutil.copy(folders[1] / 'model_4.pt', folders[1] / 'ckpt.pt')
    (folders[0] / 'model_8.pt').unlink()
    figures_of([str(tmp_path / 'runs'), f'--out={tmp_path}/out'])
    assert re.findall('measuring (.*)', capsys.readouterr().out) == [str(folders[1] / 'ckpt.pt')]
    changed = pd.read_csv(tmp_path / 'out/checkpoints.csv', dtype={'run': str}).set_index(['run', 'file'])
    assert changed.step[str(folders[1])].tolist() == [4, 4] and len(changed) == len(found)

    for folder in folders:  # only models that have ended: no figure
        for path in [*folder.glob('model_*.pt'), *folder.glob('statistics*')]:
            path.unlink()
    (folders[1] / 'ckpt.pt').unlink()
    assert name not in figures_of([str(tmp_path / 'runs'), f'--out={tmp_path}/out'])
    refused(lambda: analyze.main([str(tmp_path / 'data')]), 'no run')


def test_bf16_cost():
    """At a mean logit of 400, of the same weights with logits of either dtype."""
    from test_facts import tiny_gpt
    tokens = torch.randint(64, (200, 17), generator=torch.Generator().manual_seed(0))
    for dtype in ('float32', 'bfloat16'):
        gpt = tiny_gpt(dtype='float32', logits_dtype=dtype)
        hidden = gpt.hidden
        with torch.no_grad():
            gpt.E[:, 0] = 400
        gpt.hidden = lambda tokens, hidden=hidden: F.pad(hidden(tokens)[..., 1:], (1, 0), value=1.0)
        numbers = analyze.measure_model(gpt, tokens)['numbers']
        with torch.no_grad():
            h = gpt.hidden(tokens[:, :-1]).flatten(0, 1)
        logits = [(h.bfloat16() @ gpt.E.bfloat16().T).float(), h @ gpt.E.T]
        bf16, fp32 = (F.cross_entropy(x, tokens[:, 1:].flatten()).item() for x in logits)
        assert numbers['bf16_cost'] == pytest.approx(bf16 - fp32, abs=1e-5) and bf16 - fp32 > 0.02
        assert numbers['cross_entropy'] == pytest.approx(bf16 if dtype == 'bfloat16' else fp32, abs=1e-5)
