"""The paper's figures and tables of runs, of a made-up sweep, and the figures of checkpoints."""
import base64
import math
import re
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import analyze
from model import GPT, gpt_config
from test_analysis import analysed, shown_of
from tools import report

# -------- a made-up sweep with all that the paper ran, but for some sizes and values of λ
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SIZES = {'16M': 15_572_480, '221M': 220_800_000}
SEEDS = [1, 2]
VARIANTS = {  # method, λ, how its loss rises with the learning rate: of the lowest it does not
    'baseline': ('baseline', None, 9), 'weight decay': ('weight_decay', 1e-4, 8),
    'z-loss': ('z_loss', 1e-4, 4), 'z-loss λ=0.1': ('z_loss', 0.1, 6),
    'soft-capping': ('soft_capping', None, 3), 'μ-loss': ('mu_loss', 1e-4, 0),
    'μ-loss λ=100': ('mu_loss', 100.0, 2), 'μ-centering': ('mu_centering', None, 1)}
OF_METHODS = [name for name in VARIANTS if 'λ' not in name]
STATISTICS = ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax', 'r_emb', 'cos_mu_h', 'r_cos', 'r_log']


def lowest_loss(size, tying):
    return {'16M': 4, '221M': 3.8}[size] + 0.3 * tying


def made_up_run(variant, size, tying, lr, seed):
    """A row of results.csv."""
    method, lam, steepness = VARIANTS[variant]
    run = dict(
        run=f'{variant} {size} {tying} {lr} {seed}', method=method, lam=lam, size=size,
        n_params=SIZES[size], weight_tying=tying, lr=lr, seed=seed, steps=100_000, init_loss=10.83,
        test_loss=lowest_loss(size, tying) + steepness * (1 + 0.2 * seed) * lr,
        train_seconds=SIZES[size] / 15_000 * (1 + steepness / 100), device='a card')
    for i, name in enumerate(STATISTICS, 1):
        run[name] = i * lr + 0.1 * seed + 0.01 * steepness
    return run


def made_up_runs(variants=tuple(VARIANTS), sizes=tuple(SIZES), tyings=(0, 1), rates=tuple(RATES)):
    return [made_up_run(*which) for which in product(variants, sizes, tyings, rates, SEEDS)]


def made_up_distributions(runs):
    """Rows of distributions.csv, of the baselines among these runs."""
    rows = []
    for run in runs:
        for i, quantity in enumerate(STATISTICS[4:]):
            low = run['lr'] + run['seed'] + 0.1 * i
            values = {'min': low, '25%': low + 1, '50%': low + 2, '75%': low + 4, 'max': low + 7,
                      'below_1': 0.3 * run['seed'], 'above_0': 0.2 * run['seed']}
            if run['method'] == 'baseline':
                rows.append({'run': run['run'], 'quantity': quantity, **values})
    return rows


@pytest.fixture(scope='module')
def complete(tmp_path_factory):
    """What is shown of the whole made-up sweep, and the folder of its analysis."""
    folder = tmp_path_factory.mktemp('complete')
    runs = made_up_runs()
    curves = []
    for variant in VARIANTS:
        run = made_up_run(variant, '16M', 0, 0.3, 1)
        curves.append(dict(run=run['run'], step=20, val_loss=4.5 + run['test_loss']))
        for step in range(10, 101, 10):
            loss = 5 - step / 100 + run['test_loss']
            curves.append(dict(run=run['run'], step=step, loss=loss, mu_norm=step))
    with plt.rc_context({'figure.dpi': 40}):
        shown = shown_of(folder, files=True, results=runs, curves=curves,
                         distributions=made_up_distributions(runs))
    shown.folder = folder
    return shown


@pytest.fixture
def drawn(tmp_path):
    """drawn(runs, more tables): the figures of csv files with these rows."""
    return lambda runs, **tables: shown_of(tmp_path, results=runs, **tables).figures


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


def is_behind(variant, size, tying, lr):
    losses = [made_up_run(variant, size, tying, lr, seed)['test_loss'] for seed in SEEDS]
    return np.mean(losses) > 1.01 * lowest_loss(size, tying)


def over_rates(variants, sizes, tying, column='test_loss', rates=RATES):
    lines = []
    for size, variant in product(sizes, variants):
        points = []
        for lr in rates:
            values = [made_up_run(variant, size, tying, lr, seed)[column] for seed in SEEDS]
            filled = is_behind(variant, size, tying, lr)
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
        for size, n_params in SIZES.items():
            lrs = lrs_of_seeds(variant, size, tying)
            filled = any(is_behind(variant, size, tying, lr) for lr in RATES)
            points.append([n_params, min(lrs), np.mean(lrs), max(lrs), filled])
        lines.append((variant, points))
    return lines


# -------- each figure and table of the paper
def test_page(complete):
    """All of them in their order, and each sentence."""
    names = []
    for word in ('untied', 'tied'):
        names += [f'{name}_{word}' for name in ('summary', 'loss', 'lrs', 'statistics', 'fact_3', 'ablation')]
    names += ['r_emb_untied', 'r_cos_untied', 'r_emb_tied', 'r_cos_tied', 'training_16M_untied_lr0.3']
    page = (complete.folder / 'report.html').read_text()
    images = [base64.b64decode(text) for text in re.findall('base64,(.*?)"', page)]
    assert images == [(complete.folder / f'figures/{name}.png').read_bytes() for name in names]
    assert [*complete.figures] == names

    titles = [*complete.tables]
    assert page.count('<table') == len(titles)
    assert re.findall('### (.*)', (complete.folder / 'tables.md').read_text()) == titles
    for title in titles:
        assert f'<h2>{title}</h2>' in page
    for line in complete.text.split('\n'):
        assert f'>{line}<' in page
    assert '<td><b><ins>0.000</ins></b> [0.000, 0.000]</td>' in page


def test_a_name_is_text(tmp_path, drawn, capsys):
    """One with < in it, on the page; marks are not printed."""
    runs = made_up_runs(['μ-loss', 'baseline'], ['16M'], [0])
    drawn([{**run, 'method': run['method'].replace('mu_loss', '<i>&')} for run in runs])
    page = (tmp_path / 'report.html').read_text()
    assert '<th>&lt;i&gt;&amp;</th>' in page and '<i>' not in page
    printed = capsys.readouterr().out
    assert '<ins>0.000</ins>' in page and '<ins>' not in printed
    assert 'Learning rate sensitivity (LRS), untied' in printed


@pytest.mark.parametrize('tying', [0, 1])
def test_loss_against_lr(tying, complete):
    """Figures 2 and 9: above all sizes and rates, below a panel for each size at the two largest rates."""
    figure = complete.figures[f'loss_{report.TYING[tying]}']
    whole, *zooms = figure.axes
    check_lines(whole, figure, over_rates(OF_METHODS, SIZES, tying))
    for ax, size in zip(zooms, SIZES, strict=True):
        check_lines(ax, figure, over_rates(OF_METHODS, [size], tying, rates=RATES[-2:]))
        assert ax.get_title() == size
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*OF_METHODS, *SIZES]


@pytest.mark.parametrize('tying', [0, 1])
def test_lrs_against_size(tying, complete):
    """Figures 3 and 10."""
    figure = complete.figures[f'lrs_{report.TYING[tying]}']
    (ax,) = figure.axes
    check_lines(ax, figure, over_sizes(OF_METHODS, tying))
    assert [label.get_text() for label in ax.get_xticklabels()] == [*SIZES]


def test_statistics(complete):
    """Figures 4 and 5, and the first size's losses beside mean logits."""
    for name, columns, variants, sizes in (
            ('statistics_tied', STATISTICS[:4], OF_METHODS, SIZES),
            ('fact_3_tied', STATISTICS[4:], ['baseline'], SIZES),
            ('summary_tied', ['test_loss', 'logit_mean'], ['baseline', 'μ-loss', 'μ-centering'], ['16M'])):
        figure = complete.figures[name]
        for ax, column in zip(figure.axes, columns, strict=True):
            check_lines(ax, figure, over_rates(variants, sizes, 1, column))
            assert ax.get_ylabel() == report.LABELS.get(column, 'test loss')


def test_ablation(complete):
    """Figure 8: a column for z-loss and one for μ-loss, each point compared with all points of its size."""
    figure = complete.figures['ablation_untied']
    lam_of = {'z-loss': 'λ = 0.0001', 'z-loss λ=0.1': 'λ = 0.1',
              'μ-loss': 'λ = 0.0001', 'μ-loss λ=100': 'λ = 100'}
    top_left, top_right, left, right = figure.axes
    for top, bottom, title in ((top_left, left, 'z-loss'), (top_right, right, 'μ-loss')):
        variants = [name for name in lam_of if name.startswith(title)]
        check_lines(top, figure, [(lam_of[name], points) for name, points in over_rates(variants, SIZES, 0)])
        check_lines(bottom, figure, [(lam_of[name], points) for name, points in over_sizes(variants, 0)])
        assert top.get_title() == title


@pytest.mark.parametrize('name, i, quantity, threshold, percent', [
    ('r_emb_tied', 0, 'r_emb', 1, 45), ('r_emb_tied', 1, 'cos_mu_h', 0, 70),  # 80% and 60% below 0
    ('r_cos_tied', 0, 'r_cos', 1, 45), ('r_cos_tied', 1, 'r_log', 1, 45)])
def test_distributions(name, i, quantity, threshold, percent, complete):
    """Figures 11 and 12: quartiles, median, extrema and a share of the baseline; a row for each size."""
    axes = complete.figures[name].axes  # those of the shares are the second half
    low = np.array(RATES) + 0.1 * STATISTICS[4:].index(quantity)  # see made_up_distributions
    for size, left, right in (('16M', axes[i], axes[4 + i]), ('221M', axes[2 + i], axes[6 + i])):
        boxes, ranges = left.collections
        np.testing.assert_allclose(ends_of(boxes), np.transpose([low + 2.5, low + 5.5]))
        np.testing.assert_allclose(ends_of(ranges), np.transpose([low + 1, low + 9]))
        lowest, median, highest, dotted = left.lines
        for line, values in ((lowest, low + 1), (median, low + 3.5), (highest, low + 9)):
            np.testing.assert_allclose(line.get_xydata(), np.transpose([RATES, values]))
        assert dotted.get_ydata()[0] == threshold
        assert left.get_title(loc='left') == size and left.get_ylabel() == report.LABELS[quantity]

        np.testing.assert_allclose(right.lines[0].get_xydata(), [[lr, percent] for lr in RATES])
        filled = [to_hex(face) != '#ffffff' for face in right.collections[0].get_facecolors()]
        assert filled == [is_behind('baseline', size, 1, lr) for lr in RATES]


def test_distributions_of_some_runs(drawn):
    """Of those at the default flags, with a finite loss."""
    runs = made_up_runs(['baseline'], ['16M'], [0])
    others = [{**run, 'run': f'other {run["run"]}', 'lr': run['lr'] / 2, 'beta2': 0.9} for run in runs]
    distributions = made_up_distributions(runs + others)
    for run in runs:
        if run['lr'] == 0.3:
            run['test_loss'] = ''
    ax = drawn(runs + others, distributions=distributions)['r_emb_untied'].axes[0]
    assert ax.lines[0].get_xdata().tolist() == RATES[:-1]


def test_training_curves(complete):
    """The val losses are points on the curves of the training loss."""
    figure = complete.figures['training_16M_untied_lr0.3']
    curves = figure.axes[0].lines[::2]
    points = figure.axes[0].lines[1::2]
    for curve, point, variant in zip(curves, points, VARIANTS, strict=True):
        loss = made_up_run(variant, '16M', 0, 0.3, 1)['test_loss']
        expected = [[step, 5 - step / 100 + loss] for step in range(10, 101, 10)]
        np.testing.assert_allclose(curve.get_xydata(), expected)
        known = np.isfinite(point.get_ydata())
        np.testing.assert_allclose(point.get_xydata()[known], [[20, 4.5 + loss]])
        assert point.get_color() == curve.get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*VARIANTS]


def test_figures_of_less(drawn):
    """What is absent, and what is left out, where runs, columns or finite losses are."""
    two = ['baseline', 'μ-loss']
    runs = made_up_runs(two, tyings=[0])
    one_size = made_up_runs(two, ['16M'], [0])
    assert drawn(made_up_runs(two, ['16M'], [0], [0.3])) == {}  # one learning rate
    for without in (one_size, [{**run, 'n_params': ''} for run in runs]):
        figures = drawn(without)
        assert 'loss_untied' in figures and 'lrs_untied' not in figures

    half_done = [run for run in runs if run['size'] == '16M' or run['lr'] < 0.05]
    assert 'lrs_untied' not in drawn(half_done)  # a size has fewer rates
    figures = drawn([{**run, 'test_loss': 10.83} for run in one_size])  # nothing learned
    assert figures['loss_untied'].axes[0].lines[0].get_ydata().tolist() == 7 * [10.83]

    for run in one_size:
        if run['lr'] == 0.3:
            run['test_loss'] = ''
    figures = drawn(one_size)
    loss, logit_mean = figures['summary_untied'].axes
    assert loss.lines[0].get_ydata()[-1] == 10.83 > loss.get_ylim()[1]  # a line that leaves the panel
    assert logit_mean.lines[0].get_xdata().tolist() == RATES[:-1]

    curve = [dict(run=one_size[0]['run'], step=step, loss=math.nan, mu_norm=1) for step in (1, 2)]
    mu_norm = drawn(one_size, curves=curve)['training_16M_untied_lr0.0003'].axes[1]
    assert mu_norm.lines[0].get_xdata().tolist() == [1, 2]


def test_lrs_beside_the_papers(complete):
    """LRS as the tables have it, the mean of Eq. 21, and the paper's where sizes and rates are the same."""
    for tying, word in report.TYING.items():
        table = complete.tables[f'Learning rate sensitivity (LRS), {word}'].set_index(['size', 'LRS'])
        for variant, size in product(OF_METHODS, SIZES):
            lrs = lrs_of_seeds(variant, size, tying)
            text = re.sub('<.*?>', '', table.loc[(size, 'sum / (n - 1)'), variant])
            assert text == f'{np.mean(lrs):.3f} [{min(lrs):.3f}, {max(lrs):.3f}]'
            assert table.loc[(size, 'mean (Eq. 21)'), variant] == f'{np.mean(lrs) * 6 / 7:.3f}'
        printed = table.loc[('16M', "the paper's"), ['baseline', 'weight decay']].tolist()
        assert printed == {'untied': ['0.306', '0.211'], 'tied': ['0.050', '0.114']}[word]
        by_lam = complete.tables[f'Learning rate sensitivity (LRS), {word}, of μ-loss by λ']
        printed = by_lam['100'][by_lam.LRS == "the paper's"].tolist()
        assert printed == {'untied': ['0.054', '0.055'], 'tied': ['-', '-']}[word]  # Table 4 is untied

    runs = analyze.read_runs(complete.folder / 'results.csv')
    runs = runs[runs['size'] == '16M']
    for others in (runs[runs.lr < 0.3], runs.assign(size='1B'), runs.assign(steps=1000)):
        lrs, _ = analyze.learning_rate_sensitivity(others)
        assert len(lrs) and lrs.paper.isna().all()


def test_overhead(complete):
    """Table 6: times above the baseline's of the same size and machine, beside the paper's."""
    table = complete.tables['Additional training time ΔT, untied']
    assert table['size'].tolist() == ['16M', '16M', '221M', '221M']
    assert table.device.tolist() == 2 * ['a card', "the paper's"]
    assert table['z-loss'].tolist() == [f'{1.05 / 1.09 - 1:.1%}', '6.4%', f'{1.05 / 1.09 - 1:.1%}', '0.8%']

    runs = analyze.read_runs(complete.folder / 'results.csv')
    runs = runs[(runs['size'] == '16M') & runs.variant.isin(['baseline', 'μ-loss'])]

    def added(**changes):
        """What is added if runs of μ-loss with seed 2 have these settings."""
        changed = runs.copy()
        for name, value in changes.items():
            changed.loc[(runs.method == 'mu_loss') & (runs.seed == 2), name] = value
        return analyze.overhead(changed).added.tolist()

    both_tyings = pytest.approx(2 * [1 / 1.09 - 1])
    assert added() == both_tyings
    assert added(train_seconds=2000) == []  # the times are too far apart
    for name, another in (('device', 'another'), ('processes', 4), ('setting', ', beta2 0.9'),
                          ('test_loss', math.nan)):
        assert added(train_seconds=2000, **{name: another}) == both_tyings  # of seed 1

    assert analyze.overhead(runs.assign(train_seconds=runs.train_seconds / 2)).empty  # too short
    few = runs[(runs.method == 'baseline') | ((runs.lr == 0.3) & (runs.seed == 1))]
    assert analyze.overhead(few).empty  # one run of μ-loss


# -------- checkpoints
def measured_by_hand(path, corpus):
    """Step and numbers of a checkpoint, on all test windows."""
    saved = torch.load(path)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    (shard,) = Path(corpus).glob('*_val_*.bin')
    tokens = torch.from_numpy(np.fromfile(shard, '<u2', offset=1024).astype(np.int64))
    return {'step': saved['step'], **analyze.measure_model(gpt, tokens.unfold(0, 33, 32))['numbers']}


def test_checkpoints(trained, corpus, tmp_path, capsys):
    """Kept checkpoints, and the last of a run that has not ended, are measured and drawn by their steps."""
    done = tmp_path / 'runs/done'
    stopped = tmp_path / 'runs/stopped'
    for folder, method in ((done, 'baseline'), (stopped, 'mu_loss')):
        trained(f'runs/{folder.name}', f'--method={method}', '--lr=0.3', '--steps=12', '--keep_every=4',
                '--test_tokens=1e6', '--logits_dtype=bfloat16')
    for name in ('result.json', 'model.pt', 'model_12.pt'):
        (stopped / name).unlink()
    (stopped / 'model_8.pt').rename(stopped / 'ckpt.pt')
    page = analysed(done.parent, f'--out={tmp_path}/out')

    found = pd.read_csv(tmp_path / 'out/checkpoints.csv').set_index(['run', 'file'])
    files = {done: ['model_4.pt', 'model_8.pt', 'model.pt', 'model_12.pt'],
             stopped: ['model_4.pt', 'ckpt.pt']}
    assert [*found.index] == [(str(folder), name) for folder in files for name in files[folder]]
    for (run, file), row in found.iterrows():
        for name, value in measured_by_hand(Path(run, file), corpus).items():
            assert row[name] == pytest.approx(value, abs=2e-5, nan_ok=True), name
        assert (row['size'], row.weight_tying, row.lr, row.seed) == ('tiny', 0, 0.3, 1)

    # a run's statistics are those of model.pt or, before it has one, of its last checkpoint
    results = pd.read_csv(tmp_path / 'out/results.csv')
    assert results.run.tolist() == [str(done)]  # which has ended
    runs = page.tables['All runs'].set_index('variant')
    for variant, step, last in (('baseline', '12', (str(done), 'model.pt')),
                                ('μ-loss, not finished', '8', (str(stopped), 'ckpt.pt'))):
        assert runs.model_step[variant] == step
        assert runs.mu_norm[variant] == f'{found.mu_norm[last]:.4g}'

    name = 'checkpoints_tiny_untied_lr0.3'
    figure = page.figures[name]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ['baseline', 'μ-loss, not finished']
    for ax, column in zip(figure.axes, ('mu_norm', 'logit_mean', 'bf16_cost', 'r_emb', 'r_cos', 'r_log'),
                          strict=True):
        assert ax.get_title() == report.LABELS[column]
        for line, folder in zip(ax.lines, files, strict=False):
            expected = found.loc[str(folder), ['step', column]]
            np.testing.assert_allclose(line.get_xydata(), expected)
    assert name in analysed(f'--results={tmp_path}/out/results.csv', f'--out={tmp_path}/again').figures

    # nothing is measured twice, but what has changed is
    capsys.readouterr()
    (stopped / 'model_4.pt').rename(stopped / 'ckpt.pt')
    (done / 'model_8.pt').unlink()
    analysed(done.parent, f'--out={tmp_path}/out')
    assert re.findall('measuring (.*)', capsys.readouterr().out) == [str(stopped / 'ckpt.pt')]
    changed = pd.read_csv(tmp_path / 'out/checkpoints.csv').set_index(['run', 'file'])
    assert changed.step[str(stopped)].tolist() == [4, 4] and len(changed) == len(found)


def test_no_figure_of_models_that_have_ended(trained, tmp_path):
    trained('run', '--steps=2')
    assert [*analysed(tmp_path / 'run', f'--out={tmp_path}/out').figures] == ['training_tiny_untied_lr0.003']
