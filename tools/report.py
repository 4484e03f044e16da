"""
Tables, figures and a page of the runs that analyze.py has read, named and compared. Which runs are compared,
and how they are marked, is decided there; rows come with the columns `behind`, `lowest` and `note`.
"""
import base64
import html
import io
import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

TYING = {0: 'untied', 1: 'tied'}
PLACE = ['size', 'weight_tying', 'lr']  # of the runs that are compared
SAME = [*PLACE, 'setting', 'rounding', 'seed']  # of runs of several methods that differ in nothing else
MIN_RATES = 3  # with fewer learning rates there is no LRS table

# -------- names and looks
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay", 'max_z_loss': 'max-z loss',
    'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.',
    'centered_head': 'centered head'}
SUMMARY = ['baseline', 'μ-loss', 'μ-centering']  # the variants of the summary figure
COLORS = {  # the first six are the paper's; other variants get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945', 'adamw_decay': '#1B4F72', 'max_z_loss': '#17BECF',
    'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22', 'centered_head': '#4B0082'}
HUES = plt.get_cmap('tab20b').colors + plt.get_cmap('tab20c').colors  # ten hues in four shades each
OTHERS = ['#000000', *(to_hex(color) for shade in range(4) for color in HUES[shade::4])]
STYLES = {  # marker and line of a size: the paper's, then others, which get the next of OTHER_STYLES
    '16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
    '221M': ('X', '-')}
OTHER_STYLES = [('o', '-'), ('D', '--'), ('p', '-.'), ('h', (0, (5, 1, 1, 1))), ('*', (0, (3, 3)))]
LABELS = {
    'lr': r'learning rate $\eta$', 'capped_loss': 'test loss', 'loss': 'training loss',
    'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
    'logit_mean': r'mean logit $\bar{l}$', 'logit_mean_spread': r'spread of the mean logit',
    'logit_std': r'standard deviation $\sigma_l$', 'logit_absmax': r'largest logit, $\max_i |l_i|$',
    'r_emb': r'$r_{\rm emb}$', 'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}


def with_looks(rows, everything):
    """Rows with the color of their variant and the marker and dash of their size, of all in `everything`."""
    colors = {NAMES.get(method, method): color for method, color in COLORS.items()}
    others = [variant for variant in everything.variant.unique() if variant not in colors]
    for i, variant in enumerate(others):
        colors[variant] = OTHERS[i % len(OTHERS)]

    styles = dict(STYLES)
    others = [size for size in everything['size'].unique() if size not in styles]
    for i, size in enumerate(others):
        styles[size] = OTHER_STYLES[i % len(OTHER_STYLES)]

    return rows.assign(
        color=rows.variant.map(colors),
        marker=[styles[size][0] for size in rows['size']],
        dash=[styles[size][1] for size in rows['size']])


# -------- tables: dicts of title, rows and caption
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'largest_rise': '{:.2f}',
    'rise_step': '{:.0f}', 'mu_norm': '{:.4g}', 'mean_share': '{:.3f}', 'logit_mean': '{:.4g}',
    'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}', 'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}',
    'r_cos': '{:.3f}', 'r_log': '{:.3f}', 'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}',
    'r_log_below_1_too': '{:.1%}'}
EXPLAINED = {  # columns of the table of runs
    'behind': '1 if not finite, or if the mean over the seeds that most variants have is over 1% above the '
              'lowest of this table at the same size, tying and learning rate; empty: not compared',
    'model_step': 'of the model measured',
    'largest_rise': 'of the training loss above its earlier minimum, in nats, at rise_step',
    'mean_share': 'V‖μ‖² / ‖E‖², 1 if all e_i are equal',
    'r_log_below_1_too': 'of the positions with r_cos < 1, the share with r_log < 1'}


def grid(cells, *names):
    """Cells {(line, ..., column): text}, what their lines are called -> a table, with - where none is."""
    table = pd.Series(cells).unstack(sort=False).fillna('-').rename_axis(index=names, columns=None)
    return table.reset_index()


def lrs_cell(run):
    """A cell of an LRS table: LRS (n - 1), its marks or its note, and the range over several seeds."""
    if math.isnan(run.lrs_n1):
        return '-'
    text = f'{run.lrs_n1:.3f}'
    if run.behind == 0:
        text = f'<u>{text}</u>'
    if run.lowest:
        text = f'<b>{text}</b>'
    text += run.note
    if run.seeds > 1:
        text += f' [{run.lrs_n1_lowest:.3f}, {run.lrs_n1_highest:.3f}]'
    return text


def lrs_table(lrs, column, title):
    """Table 2, 5 or 4, of rows of lrs.csv: a line for each size, a column for each value of `column`."""
    if not lrs.n_rates.max() >= MIN_RATES:
        return None
    cells = {(run.size, getattr(run, column)): lrs_cell(run) for run in lrs.itertuples(index=False)}
    caption = (
        'Lower is better. In nats: how far the test losses at n learning rates lie above the lowest of them, '
        'summed / (n - 1), where a loss that is not finite, or above the one at initialisation, counts as '
        'that one.')
    if lrs.seeds.max() > 1:
        caption += ' Means over seeds [lowest, highest].'
    compared = lrs[lrs.note == '']
    if len(compared):
        of_sizes = []
        for rates, rows in compared.groupby('rates', sort=False):
            of_sizes.append(f'{", ".join(rows["size"].unique())}: {rates}')
        caption += (
            ' The cells of a line are compared, over the same seeds and learning rates '
            f'({"; ".join(of_sizes)}). Bold: the lowest, if no other has a seed as low as its highest. '
            'Underlined: within 1% of the lowest test loss at every learning rate.')
    if len(compared) < len(lrs):
        caption += ' (n lr), (seed ...): not compared, as it is of these learning rates or seeds alone.'
    if '-' in cells.values() or len(cells) < lrs['size'].nunique() * lrs[column].nunique():
        caption += ' -: no runs, or nothing was learned.'
    return dict(title=title, rows=grid(cells, 'size'), caption=caption)


def seed_table(runs):
    """Test losses minus the baseline's of the same seed, where a variant shares two with it, or None."""
    baseline = runs[runs.method == 'baseline'][[*SAME, 'capped_loss']]
    others = runs[runs.method != 'baseline']
    pairs = others.merge(baseline, on=SAME, suffixes=('', '_of_baseline'))
    pairs['gap'] = pairs.capped_loss - pairs.capped_loss_of_baseline
    cells = {}
    for (size, tying, lr, variant), gaps in pairs.groupby([*PLACE, 'variant'], sort=False).gap:
        if gaps.count() > 1:
            numbers = [round(x, 3) + 0.0 for x in (gaps.mean(), gaps.min(), gaps.max())]  # never -0.000
            cells[size, TYING[tying], f'{lr:g}', variant] = '{:+.3f} [{:+.3f}, {:+.3f}]'.format(*numbers)
    if not cells:
        return None

    caption = (
        'In nats, means over the seeds that both have [lowest, highest]. Below 0, the method is better. '
        'A loss above the one at initialisation counts as that one.')
    shown = {variant for *_, variant in cells}
    absent = [variant for variant in others.variant.unique() if variant not in shown]
    if absent:
        caption += f' Without two seeds of a baseline of the same settings: {"; ".join(absent)}.'
    title = 'Test loss minus that of the baseline of that seed'
    return dict(title=title, rows=grid(cells, 'size', 'tying', 'η'), caption=caption)


def run_table(runs, own_statistics):
    """A line for each run, a column for each of FORMATS that is known of a run, and for a fork's own."""
    formats = FORMATS | dict.fromkeys(own_statistics, '{:.4g}')
    known = runs[[*formats]].dropna(axis='columns', how='all')
    cells = known.apply(lambda column: column.map(formats[column.name].format))
    cells = cells.replace({'nan': '', 'nan%': '', '-0.000': '0.000'})
    caption = ' '.join(f'{name}: {text}.' for name, text in EXPLAINED.items() if name in cells)
    return dict(title='All runs', rows=cells, caption=caption)


AT_DEFAULT = 'Methods are compared at their default λ, where they ran with it.'


def make_tables(runs, methods, several, own_statistics):
    """All tables that there are data for, of runs and lrs.csv. The last, of all runs, is always there."""
    tables = []
    for tying, word in TYING.items():
        title = f'Learning rate sensitivity (LRS), {word}'
        of_tying = several[several.weight_tying == tying].sort_values('lam', kind='stable')
        of_methods = lrs_table(methods[methods.weight_tying == tying], 'variant', title)
        if of_methods and len(of_tying):
            of_methods['caption'] += f' {AT_DEFAULT}'
        tables.append(of_methods)
        for (method, *flags), rows in of_tying.groupby(['method', 'setting', 'rounding'], sort=False):
            name = f'{title}, of {NAMES.get(method, method)}{"".join(flags)} for several λ'
            tables.append(lrs_table(rows.assign(lam=rows.lam.map('{:g}'.format)), 'lam', name))
    tables += [seed_table(runs), run_table(runs, own_statistics)]
    return [table for table in tables if table]


# -------- figures: dicts of name, title, caption and png
FILLED = (
    'Points: means over seeds; bars: lowest to highest. A loss above the one at initialisation is drawn as '
    'that one. Filled: what the paper calls diverged, which is over 1% above the lowest point of its size '
    'and learning rate here, or not finite. Grey: alone there, or without the seeds of the others. '
    'Triangles lie above the axis.')
FIGURES = {  # title, caption
    'summary': ('Test loss and mean logit', f'Baseline, μ-loss and μ-centering, of the first size. {FILLED}'),
    'loss': ('Test loss against learning rate', f"{FILLED} (The paper's Figures 2 and 9)"),
    'statistics': ('Mean embedding and logits against learning rate', (
        'Means over positions and seeds, without runs whose test loss is not finite. Filled: as in the '
        'figure of the test loss. Triangles lie below the axis. (Figure 4)')),
    'fact_3': ('What centering would change in the baseline', (
        'r_emb: the norm of an embedding minus μ, divided by that without. r_cos, r_log: likewise the '
        'largest |cosine| with h, and |logit|. Below 1, the dotted line, centering lowers it. Means over '
        'positions and seeds. Filled: over 1% above the best method, as in the figure of the test loss. '
        '(Figure 5)')),
    'rounding': ('What rounding does', (
        'Runs that differ in the dtype of the logits alone, and the others of their learning rate.')),
    'training': ('Training curves', (
        'As logged, at most 1,000 lines of a log. The first lines are the widest, so that they are seen '
        'under others. A line at the edge of a panel lies beyond it.'))}
SOFTWARE = 'analyze.py'  # what the figures say of themselves

plt.switch_backend('agg')  # files alone, no windows
plt.rcParams.update({
    'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
    'axes.spines.top': False, 'axes.spines.right': False, 'figure.dpi': 160})


def limits_of(rows, column):
    """
    The lowest and the highest value of a column that an axis shows, so that a few do not flatten the others.
    Of test losses it shows the medians over seeds, and a tenth more, but for runs that learned nothing; of
    training losses four times the range of nine in ten; of what is never negative, as |mu|, all above 0.001.
    """
    values = rows[column]
    if column == 'capped_loss':
        medians = rows.groupby(['size', 'variant', 'lr'])[['capped_loss', 'init_loss']].median()
        learned = medians[~(medians.capped_loss >= medians.init_loss - 0.1)]
        highest = learned.capped_loss.max() if len(learned) else values.max()
        return values.min(), values.min() + 1.1 * (highest - values.min())
    if column == 'loss':
        usual = values.quantile(0.9) - values.min()
        return values.min(), values.min() + max(4 * usual, 0.1 * values.min())
    if values.min() >= 0 and values.max() > 1e-3:
        return values[values > 1e-3].min() / 2, math.inf
    return -math.inf, math.inf


def stretch(ax, values):
    """A log y axis for positive values over a factor of ten; linear up to 100 for others beyond it."""
    low, high = values.min(), values.max()
    if low > 1e-3 and high > 10 * low:
        ax.set_yscale('log')
        ax.yaxis.set(major_formatter='{x:g}', minor_locator=LogLocator(subs=(2, 5)), minor_formatter='{x:g}')
    elif low < 1e-3 and max(-low, high) > 100:
        ax.set_yscale('symlog', linthresh=100)
        ticks = FixedLocator([-10_000, -1000, -300, -100, -50, 0, 50, 100, 300, 1000, 10_000])
        ax.yaxis.set(major_locator=ticks, major_formatter='{x:g}')
        ax.autoscale(axis='y')  # or its margins would be those of a linear axis


def label_rates(ax, rates):
    """A tick at each learning rate of a log axis, with a label unless it would run into the one before."""
    ax.set_xscale('log')
    apart = (math.log(max(rates)) - math.log(min(rates))) / 9
    labels = []
    last = -math.inf
    for lr in rates:
        if math.log(lr) - last >= apart:
            labels.append(f'{lr:g}')
            last = math.log(lr)
        else:
            labels.append('')
    ax.set_xticks(rates, labels)
    ax.xaxis.set_minor_formatter(NullFormatter())


def widths(n, widest=2.4):
    """Widths of n lines that may lie on each other: from the widest, which is drawn first, to 1."""
    if n == 1:
        return [1.2]
    return np.linspace(widest, 1.0, n)


def mean_of_compared(runs, y):
    """The mean of y over the runs that the comparison rests upon, or over all if they are not compared."""
    compared = runs[runs.behind.notna()]
    return compared[y].mean() if len(compared) else runs[y].mean()


def face(behind, color):
    """The filling of a marker: the color if diverged, white if not, grey if it is not known."""
    if behind == 1:
        return color
    if behind == 0:
        return 'white'
    return 'lightgrey'


def draw_lines(ax, rows, y):
    """y over lr, a line for each size and variant: means over the seeds, bars to the lowest and highest."""
    low, high = limits_of(rows, y)
    variants = rows.variant.unique()
    width = dict(zip(variants, widths(len(variants)), strict=True))
    for (_, variant), part in rows.groupby(['size', 'variant'], sort=False):
        look = part.iloc[0]
        seeds = [runs for _, runs in part.groupby('lr')]
        rates = np.array([runs.lr.iloc[0] for runs in seeds])
        means = np.array([mean_of_compared(runs, y) for runs in seeds])
        faces = np.array([face(runs.behind.max(), look.color) for runs in seeds])
        lowest = np.clip([runs[y].min() for runs in seeds], low, high)
        highest = np.clip([runs[y].max() for runs in seeds], low, high)

        shown = means.clip(low, high)
        ax.plot(rates, shown, linestyle=look.dash, color=look.color, linewidth=width[variant])
        ax.vlines(rates, lowest, highest, color=look.color, linewidth=0.8)
        inside = shown == means
        for marker, some in ((look.marker, inside), ('^', means > high), ('v', means < low)):
            ax.scatter(rates[some], shown[some], 25, marker=marker, edgecolors=[look.color], linewidths=1,
                       zorder=3, facecolors=faces[some], clip_on=False)
    ax.set(xlabel=LABELS['lr'], ylabel=LABELS.get(y))
    label_rates(ax, sorted(rows.lr.unique()))


def legend(figure, rows):
    """Below the figure, of what there are several: the colors of variants, markers of sizes, fillings."""
    handles = []
    for run in rows.drop_duplicates('variant').itertuples():
        handles.append(Line2D([], [], color=run.color, label=run.variant))
    sizes = rows.drop_duplicates('size')
    if len(sizes) > 1:
        for run in sizes.itertuples(index=False):
            handles.append(Line2D([], [], color='black', ls=run.dash, marker=run.marker, mfc='white',
                                  label=run.size))
    marks = {'over 1% above the lowest': 1, 'within 1% of it': 0, 'not compared': math.nan}
    if rows.behind.nunique(dropna=False) > 1:
        for label, mark in marks.items():
            if rows.behind.isin([mark]).any():
                handles.append(Line2D([], [], color='black', ls='', marker='o', mfc=face(mark, 'black'),
                                      label=label))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4)


def finished(name, place, figure):
    """A figure -> a dict of its name, title, caption and the bytes of a png file; closes it."""
    figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
    png = io.BytesIO()
    figure.savefig(png, format='png', bbox_inches='tight',  # or a wide legend would be cut off
                   metadata={'Software': SOFTWARE})
    plt.close(figure)
    title, caption = FIGURES[name]
    file_name = f'{name}_{place.replace(", ", "_").replace("η = ", "lr")}'
    return dict(name=file_name, title=f'{title}, {place}', caption=caption, png=png.getvalue())


# -------- figures against the learning rate
def against_lr(rows, columns):
    """A figure with a panel for each column that has values, against the learning rate, or None without."""
    # the model of a run that was not finite is of its last checkpoint, of step 0 even
    shown = {column: rows[rows[column].notna() & rows.test_loss.notna()] for column in columns}
    if 'capped_loss' in columns:
        shown['capped_loss'] = rows[rows.capped_loss.notna()]
    columns = [column for column in columns if shown[column].lr.nunique() > 1]
    if not columns:
        return None

    figure, axes = plt.subplots(math.ceil(len(columns) / 2), min(len(columns), 2), squeeze=False)
    figure.set_size_inches(7.5, 1.2 + 2.7 * len(axes))
    for ax in axes.flat[len(columns):]:
        ax.set_visible(False)
    for ax, column in zip(axes.flat, columns, strict=False):
        draw_lines(ax, shown[column], column)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        elif column != 'capped_loss':
            stretch(ax, shown[column][column].clip(*limits_of(shown[column], column)))
    legend(figure, pd.concat(shown.values()))
    return figure


def draw_summary(rows, tying):
    """Figures of three methods of one size."""
    figure = against_lr(rows.assign(marker='o', dash='-'), ['capped_loss', 'logit_mean'])
    return [finished('summary', TYING[tying], figure)] if figure else []


def draw_against_lr(rows, tying):
    """Figures 2 or 9, 4 and 5, of the runs of a tying."""
    baseline = rows[rows.method == 'baseline']
    panels = {
        'loss': (rows, ['capped_loss']),
        'statistics': (rows, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']),
        'fact_3': (baseline, ['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])}
    figures = []
    for name, (shown, columns) in panels.items():
        figure = against_lr(shown, columns)
        if figure:
            figures.append(finished(name, TYING[tying], figure))
    return figures


# -------- figures against the step
def against_step(rows, curves, columns):
    """A figure with a panel for each column, against the step as logged, a line for each run."""
    figure, axes = plt.subplots(math.ceil(len(columns) / 3), min(len(columns), 3), sharex=True, squeeze=False)
    figure.set_size_inches(10, 3.2 * len(axes))
    for ax, column in zip(axes.flat, columns, strict=True):
        everything = pd.concat([curves[run] for run in rows.run])
        limits = limits_of(everything, column)
        for run, width in zip(rows.itertuples(), widths(len(rows), 3.0), strict=True):
            curve = curves[run.run].dropna(subset=column)
            ax.plot(curve.step, curve[column].clip(*limits), color=run.color, linewidth=width,
                    label=run.variant)
        stretch(ax, everything[column].clip(*limits))
        ax.set(title=LABELS[column], xlabel='step')
    handles = {line.get_label(): line for line in axes[0, 0].lines}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


def draw_curves(rows, curves):
    """Figures of training curves, for each size, tying and learning rate, of those runs that have curves."""
    columns = ['loss', 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax']
    curves = curves.reindex(columns=['run', 'step', *columns])
    curves = {run: curve for run, curve in curves[curves.step > 0].groupby('run')}
    figures = []
    for (size, tying, lr), logged in rows[rows.run.isin(curves)].groupby(PLACE, sort=False):
        place = f'{size}, {TYING[tying]}, η = {lr:g}'
        alike = logged.groupby(['method', 'lam', 'setting', 'seed'], dropna=False)
        if alike.rounding.nunique().max() > 1:
            figures.append(finished('rounding', place, against_step(logged, curves, ['loss', 'logit_mean'])))
        figures.append(finished('training', place, against_step(logged, curves, columns)))
    return figures


# -------- what is said of the runs
DESCRIBED = ['size', 'weight_tying', 'method', 'lr', 'seed', 'steps', 'batch_size', 'block_size',
             'final_gain', 'cap', 'dtype', 'logits_dtype', 'device']


def headlines(lrs, several, lowest):
    """
    Rows of learning_rate_sensitivity for methods and for several λ, and of lowest_losses -> a line for each
    size and tying: where the test loss is lowest, and which method depends least on the learning rate.
    """
    lines = []
    for best in lowest.itertuples(index=False):
        place = f'{best.size}, {TYING[best.weight_tying]}'
        over = f', a mean over {best.seeds} seeds' if best.seeds > 1 else ''
        line = f'{place}: the lowest test loss is {best.test_loss:.4f}{over}'
        line += f', of {best.variant} at η = {best.lr:g}'
        rows = lrs[(lrs['size'] == best.size) & (lrs.weight_tying == best.weight_tying)]
        if rows.n_rates.max() >= MIN_RATES:
            line += f'; {lrs_in_words(rows)}'
        lines.append(line + '.')
    if lrs.n_rates.max() >= MIN_RATES:
        explained = ('LRS, the learning rate sensitivity, says how much the test loss depends on the '
                     'learning rate, and not how low it is.')
        if len(several):
            explained += f' {AT_DEFAULT}'
        lines.append(explained)
    return lines


def lrs_in_words(rows):
    """The rows of a line of the LRS table of methods -> which is the lowest, and which are not compared."""
    compared = rows[(rows.note == '') & rows.lrs_n1.notna()]
    best = compared[compared.lowest]
    if len(best):
        text = f'the lowest LRS is {best.lrs_n1.iloc[0]:.3f}, of {" and ".join(best.variant)}'
    elif len(compared) > 1:
        text = 'no LRS is clearly the lowest, as ranges over seeds overlap'
    elif len(compared) == 1:
        text = f'LRS is {compared.lrs_n1.iloc[0]:.3f}, of {compared.variant.iloc[0]}'
    else:
        text = 'no LRS is compared'
    others = [run.variant + run.note for run in rows.itertuples() if run.note]
    if others:
        text += f'; not compared: {", ".join(others)}'
    return text


def describe(runs):
    """Lines that say what was run, and what too few rates, steps or seeds cannot tell."""
    parts = [f'Runs: {len(runs)}.']
    for column in runs.columns.intersection(DESCRIBED, sort=False):
        values = [x if isinstance(x, str) else f'{x:.12g}' for x in runs[column].dropna().unique() if x != '']
        unknown = column == 'seed' and values == ['0']  # analyze.py calls it 0
        if values and not unknown:
            parts.append(f'{column}: {", ".join(values)}.')
    lines = [' '.join(parts)]

    of_variant = runs.groupby(['size', 'weight_tying', 'variant'], sort=False)
    if of_variant.lr.nunique().max() < MIN_RATES:
        lines.append(f'No learning rate sensitivity (LRS): it needs {MIN_RATES} learning rates of one name.')
    if runs.steps.max() < 10_000:
        lines.append(f'{runs.steps.max():,g} steps are too few to rank methods; the paper has 100,000.')
    seeds = runs.groupby([*PLACE, 'variant'], sort=False).seed.nunique()
    few = []
    for variant, counts in seeds.groupby('variant', sort=False):
        if counts.min() < 3:
            few.append(variant if counts.max() < 3 else f'{variant} at some learning rates')
    if few:
        lines.append(f'With fewer than three seeds a difference may be chance: {"; ".join(few)}.')
    return lines


# -------- the pages
STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 76rem; padding: 0 1rem; font-family: sans-serif; }
  .headline { font-weight: bold; } img { max-width: 100%; }
  div { overflow: auto; max-height: 80vh; }  /* a table scrolls in itself: both its bars are in sight */
  td, th { padding: .1rem .3rem; text-align: right; font-size: .75rem; white-space: nowrap; }
  th { position: sticky; top: 0; background: white; }
  td:first-child, th:first-child { position: sticky; left: 0; background: white; text-align: left; }
  th:first-child { z-index: 1; }
</style>'''


def markdown(tables):
    """Tables -> the text of tables.md."""
    texts = []
    for table in tables:
        align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
        rows = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
        texts.append(f'### {table["title"]}\n\n{rows}\n\n{table["caption"]}\n')
    return '\n'.join(texts)


def plain(tables):
    """Tables -> the text of the console, without marks."""
    texts = []
    for table in tables:
        rows = table['rows'].replace('</?[bu]>', '', regex=True)
        texts.append(f'{table["title"]}\n{rows.to_string(index=False)}\n')
    return '\n'.join(texts)


def marked(text):
    """Text -> HTML, with the marks of tables alone: <b> and <u>."""
    return re.sub('&lt;(/?[bu])&gt;', r'<\1>', html.escape(str(text)))


def page(name, first_lines, lines, items):
    """The text of report.html, which needs no other file: lines, the first bold, then tables and figures."""
    parts = [STYLE, f'<h1>{html.escape(name)}</h1>']
    parts += [f'<p class="headline">{html.escape(line)}</p>' for line in first_lines]
    parts += [f'<p>{html.escape(line)}</p>' for line in lines]
    for item in items:
        parts.append(f'<h2>{html.escape(item["title"])}</h2>')
        if 'rows' in item:
            rows = item['rows'].map(marked)
            rows.columns = [marked(name).replace('_', '_<br>') for name in rows]
            parts.append(f'<div>{rows.to_html(index=False, escape=False, border=0)}</div>')
        else:
            image = base64.b64encode(item['png']).decode()
            parts.append(f'<img src="data:image/png;base64,{image}">')
        parts.append(f'<p>{html.escape(item["caption"])}</p>')
    return '\n'.join(parts)
