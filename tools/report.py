"""
Tables, figures and a page of the runs that analyze.py has read, named and compared. Which runs are compared,
and how they are marked, is decided there; rows come with the columns `behind`, `lowest` and `suffix`. Only
the constants that both files need are here.
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
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

TYING = {0: 'untied', 1: 'tied'}
PLACE = ['size', 'weight_tying', 'lr']  # runs are compared where these are the same
BEHIND = 0.01  # a test loss further than this above the lowest, relative to it, is marked
MIN_RATES = 3  # with fewer learning rates there is no LRS table
AT_DEFAULT = 'Methods are compared at their default λ, where they ran with it.'
MIN_LEARNED = 0.1  # nats: a run whose test loss is not this far below its initial loss learned nothing

# -------- names and looks
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay", 'max_z_loss': 'max-z loss',
    'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.',
    'centered_head': 'centered head'}
COLORS = {  # the first six are the paper's; other variants get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945', 'adamw_decay': '#1B4F72', 'max_z_loss': '#17BECF',
    'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22', 'centered_head': '#4B0082'}
HUES = plt.get_cmap('tab20b').colors + plt.get_cmap('tab20c').colors  # ten hues in four shades each
OTHERS = ['#000000']  # black, then the first shade of all ten hues, then the next
for shade in range(4):
    OTHERS += [to_hex(color) for color in HUES[shade::4]]
STYLES = {  # marker and line of a size: the paper's, then others, which get the next of OTHER_STYLES
    '16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
    '221M': ('X', '-')}
OTHER_STYLES = [('o', '-'), ('D', '--'), ('p', '-.'), ('h', (0, (5, 1, 1, 1))), ('*', (0, (3, 3)))]
LABELS = {
    'lr': r'learning rate $\eta$', 'capped_loss': 'test loss', 'loss': 'training loss',
    'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
    'logit_mean': r'mean logit $\bar{l}$', 'logit_mean_spread': r'spread of the mean logit',
    'logit_std': r'standard deviation $\sigma_l$', 'logit_absmax': r'largest logit, $\max_i |l_i|$',
    'lrs_n1': 'LRS', 'bf16_cost': 'cost of BF16 logits, nats',
    'r_emb': r'$r_{\rm emb}$', 'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}


def with_looks(rows, named):
    """Rows with the color of their variant and the marker and dash of their size, of all in `named`."""
    colors = {NAMES.get(method, method): color for method, color in COLORS.items()}
    variants = named.variant.unique()
    n_others = 0
    for variant, method in named.drop_duplicates('variant')[['variant', 'method']].values:
        name = NAMES.get(method, method)
        if name in colors and name not in variants:
            colors[variant] = colors.pop(name)  # of a method that ran with another λ alone, say
        elif variant not in colors:
            colors[variant] = OTHERS[n_others % len(OTHERS)]
            n_others += 1

    styles = dict(STYLES)
    other_sizes = [size for size in named['size'].unique() if size not in styles]
    for i, size in enumerate(other_sizes):
        styles[size] = OTHER_STYLES[i % len(OTHER_STYLES)]

    return rows.assign(
        color=rows.variant.map(colors),
        marker=[styles[size][0] for size in rows['size']],
        dash=[styles[size][1] for size in rows['size']])


# -------- tables: dicts of title, rows, caption and section
SECTIONS = [  # of the page: those of the paper in its order, then what it does not have
    'methods, untied',  # Table 2, Figures 2 to 5
    'λ, untied',        # Table 4, Figure 8
    'methods, tied',    # Table 5, Figures 9 and 10
    'λ, tied',
    'distributions',    # Figures 11 and 12
    'overhead',         # Table 6
    'others',
    'all runs']
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'largest_rise': '{:.2f}',
    'rise_step': '{:.0f}', 'mu_norm': '{:.4g}', 'mean_share': '{:.3f}', 'logit_mean': '{:.4g}',
    'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}', 'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}',
    'r_cos': '{:.3f}', 'r_log': '{:.3f}', 'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}',
    'r_log_below_1_too': '{:.1%}', 'bf16_cost': '{:.4f}', 'bf16_estimate': '{:.4f}'}
EXPLAINED = {  # columns of the table of runs
    'behind': '1 if a seed of the variant is not finite here, or if the mean over the seeds that most '
              f'variants have is over {BEHIND:.0%} above the lowest of this table at the same size, tying '
              f'and learning rate; 0 if it is within {BEHIND:.0%}; empty: not compared',
    'model_step': 'the step of the model that was measured',
    'largest_rise': 'the largest rise of the training loss above its minimum so far, in nats, at rise_step',
    'mean_share': 'V‖μ‖² / ‖E‖², 1 if all e_i are equal',
    'r_log_below_1_too': 'of the positions with r_cos < 1, the share with r_log < 1',
    'bf16_cost': 'test loss with BF16 logits minus that with fp32 logits of the same weights, in nats',
    'bf16_estimate': 'an estimate of bf16_cost from the mean logit and its spread (results/mean_logit)'}


def grid(cells, *names):
    """
    Cells {(row, ..., column): text}, and the headers of what tells the rows apart -> a table, whose rows and
    columns are in the order of the cells, with - where there is no cell.
    """
    row_keys = dict.fromkeys(key[:-1] for key in cells)
    columns = dict.fromkeys(key[-1] for key in cells)
    rows = []
    for row_key in row_keys:
        rows.append([*row_key, *(cells.get((*row_key, column), '-') for column in columns)])
    return pd.DataFrame(rows, columns=[*names, *columns])


def has_lrs(lrs):
    """Whether any of these rows of lrs.csv has enough learning rates to be shown."""
    return bool((lrs.n_rates >= MIN_RATES).any())


def lrs_cell(row):
    """A cell of an LRS table: LRS (n - 1), its marks or its suffix, and the range over several seeds."""
    if math.isnan(row.lrs_n1):
        return '-'
    text = f'{row.lrs_n1:.3f}'
    if row.behind == 0:
        text = f'<ins>{text}</ins>'
    if row.lowest:
        text = f'<b>{text}</b>'
    text += row.suffix
    if row.seeds > 1:
        text += f' [{row.lrs_n1_lowest:.3f}, {row.lrs_n1_highest:.3f}]'
    return text


def lrs_caption(lrs):
    """What the cells of an LRS table are, and which of them are compared."""
    caption = (
        'Lower is better. In nats: how far the test losses at n learning rates lie above the lowest of them, '
        'where a loss that is not finite, or above the one at initialisation, counts as that one; their sum '
        "/ (n - 1), as in the paper's tables, or their mean, as in Eq. 21.")
    if lrs.paper.notna().any():
        caption += " The paper's: one seed, 100,000 steps of 64 x 2,048 tokens."
    if lrs.seeds.max() > 1:
        caption += ' Means over seeds [lowest, highest].'
    compared = lrs[lrs.suffix == '']
    if len(compared):
        of_sizes = []
        for rates, rows in compared.groupby('rates', sort=False):
            of_sizes.append(f'{", ".join(rows["size"].unique())}: {rates}')
        caption += (
            ' The cells of a line are compared, over the same seeds and learning rates '
            f'({"; ".join(of_sizes)}). Bold: the lowest, if no other has a seed as low as its highest. '
            f'Underlined: within {BEHIND:.0%} of the lowest test loss of these cells at every learning rate.')
    if len(compared) < len(lrs):
        caption += (' A cell with (n lr) or (seed ...) is not compared: it is computed from that many '
                    'learning rates, or from those seeds only.')
    return caption


def lrs_table(lrs, column, title, section):
    """Table 2, 5 or 4, of rows of lrs.csv: some rows for each size, a column for each value of `column`."""
    if not has_lrs(lrs):
        return None
    cells = {}
    for size, of_size in lrs.groupby('size', sort=False):
        for row in of_size.itertuples(index=False):
            cells[size, 'sum / (n - 1)', getattr(row, column)] = lrs_cell(row)
        for row in of_size.dropna(subset='paper').itertuples(index=False):
            cells[size, "the paper's", getattr(row, column)] = f'{row.paper:.3f}'
        for row in of_size.dropna(subset='lrs').itertuples(index=False):
            cells[size, 'mean (Eq. 21)', getattr(row, column)] = f'{row.lrs:.3f}{row.suffix}'
    rows = grid(cells, 'size', 'LRS')
    caption = lrs_caption(lrs)
    if rows.isin(['-']).any(axis=None):
        caption += ' -: no such runs, nothing learned, a loss that cannot be capped, or not in the paper.'
    return dict(title=title, rows=rows, caption=caption, section=section)


def overhead_table(overheads, tying):
    """
    Table 6, of rows of analyze.overhead: a row for each size and each set of runs that agree in TIMED, then
    one for the paper's numbers; a column for each method.
    """
    overheads = overheads[overheads.weight_tying == tying]
    if overheads.empty:
        return None
    cells = {}
    for size, of_size in overheads.groupby('size', sort=False):
        for row in of_size.itertuples(index=False):
            where = 'unknown steps' if math.isnan(row.steps) else f'{row.steps:,.0f} steps'
            if row.device:
                where += f', {row.device}'
            if math.isnan(row.processes):
                where += ', unknown processes'
            elif row.processes > 1:
                where += f' x {row.processes:.0f}'
            where += row.setting + row.rounding
            method = NAMES.get(row.method, row.method)
            cells[size, where, method] = f'{round(row.added, 3) + 0.0:.1%}'  # never -0.0%
        for row in of_size.dropna(subset='paper').itertuples(index=False):
            cells[size, "the paper's", NAMES[row.method]] = f'{row.paper:.1%}'
    caption = (
        "A method's training time above the baseline's of the same size, device, processes and steps: means "
        'over learning rates, seeds and λ. Left out: a method of one run, or whose times differ by 10% or '
        "more. The paper's: on four A100. `python -m tools.bench` compares methods side by side. (Table 6)")
    rows = grid(cells, 'size', 'runs')
    title = f'Additional training time ΔT, {TYING[tying]}'
    return dict(title=title, rows=rows, caption=caption, section='overhead')


SAME = [*PLACE, 'setting', 'rounding', 'seed']  # runs that agree in these differ only in method and λ


def seed_table(runs):
    """Test losses minus the baseline's of the same seed, where a variant shares two with it, or None."""
    baseline = runs[runs.method == 'baseline'][[*SAME, 'capped_loss']]
    others = runs[runs.method != 'baseline']
    pairs = others.merge(baseline, on=SAME, suffixes=('', '_of_baseline'))
    pairs['gap'] = pairs.capped_loss - pairs.capped_loss_of_baseline
    cells = {}
    for (size, tying, lr, variant), gaps in pairs.groupby([*PLACE, 'variant'], sort=False).gap:
        if len(gaps) > 1 and gaps.isna().any():  # not finite, without an initial loss that it counts as
            cells[size, TYING[tying], f'{lr:g}', variant] = 'nan'
        elif len(gaps) > 1:
            numbers = [round(x, 3) + 0.0 for x in (gaps.mean(), gaps.min(), gaps.max())]  # never -0.000
            cells[size, TYING[tying], f'{lr:g}', variant] = '{:+.3f} [{:+.3f}, {:+.3f}]'.format(*numbers)
    if not cells:
        return None

    caption = (
        'In nats, means over the seeds that both have [lowest, highest]; nan: a loss that is not finite and '
        'has no initial loss to count as; -: fewer than two such seeds. Below 0, the method is better. '
        'A loss above the one at initialisation counts as that one.')
    shown = {variant for *_, variant in cells}
    absent = [variant for variant in others.variant.unique() if variant not in shown]
    if absent:
        caption += (f' {"; ".join(absent)}: fewer than two seeds in common with a baseline of the same '
                    'settings.')
    title = 'Test loss minus that of the baseline of that seed'
    return dict(title=title, rows=grid(cells, 'size', 'tying', 'η'), caption=caption, section='others')


def run_table(runs, own_statistics):
    """A row for each run, a column for each of FORMATS that is known of a run, and for a fork's own."""
    formats = FORMATS | dict.fromkeys(own_statistics, '{:.4g}')
    cells = pd.DataFrame({
        name: runs[name].map(text.format) for name, text in formats.items() if runs[name].notna().any()})
    cells = cells.replace({'nan': '', 'nan%': '', '-0.000': '0.000', '-0.0000': '0.0000'})
    caption = ' '.join(f'{name}: {text}.' for name, text in EXPLAINED.items() if name in cells)
    return dict(title='All runs', rows=cells, caption=caption, section='all runs')


def in_order_of_ablation(rows):
    """Rows by their λ, those of μ-loss first, as in Table 4 and Figure 8."""
    rows = rows.sort_values('lam', kind='stable')
    is_mu_loss = rows.method == 'mu_loss'
    return pd.concat([rows[is_mu_loss], rows[~is_mu_loss]])


def make_tables(runs, lrs_methods, lrs_lam, overheads):
    """
    All tables that there are data for, but run_table. See analyze.compare for `lrs_methods` and `lrs_lam`.
    """
    tables = []
    for tying, word in TYING.items():
        title = f'Learning rate sensitivity (LRS), {word}'
        lam_rows = in_order_of_ablation(lrs_lam[lrs_lam.weight_tying == tying])
        methods_rows = lrs_methods[lrs_methods.weight_tying == tying]
        methods_table = lrs_table(methods_rows, 'variant', title, f'methods, {word}')
        if methods_table and len(lam_rows):
            methods_table['caption'] += f' {AT_DEFAULT}'
        tables.append(methods_table)

        by_method = lam_rows.groupby(['method', 'setting', 'rounding'], sort=False)
        for (method, setting, rounding), rows in by_method:
            name = f'{title}, of {NAMES.get(method, method)}{setting}{rounding} for several λ'
            rows = rows.assign(lam=rows.lam.map('{:g}'.format))
            tables.append(lrs_table(rows, 'lam', name, f'λ, {word}'))
    tables += [overhead_table(overheads, tying) for tying in TYING]
    tables.append(seed_table(runs))
    return [table for table in tables if table]


# -------- figures: dicts of name, title, caption, section and png
FILLED = (
    'Points: means over the seeds that are compared, or over all seeds of a variant that is not compared or '
    'has one that is not finite. Bars: lowest to highest of '
    'all seeds, cut off at the edge of the axis. A loss above the one at initialisation is drawn as that '
    'one. Filled: what the paper calls diverged, that is, not finite or, before it is capped, over '
    f'{BEHIND:.0%} above the lowest of the variants compared here at the same size and learning rate. Grey: '
    'not compared, as no other variant is there, or it lacks the seeds of the others. Triangle: the mean '
    'lies above the axis, or a loss that is not finite has no initial loss to count as.')
BOXES = (
    'A row for each size. r_emb is over the vocabulary, the others are over test positions. Grey: quartiles; '
    'black: median and extrema. Over several seeds, quartiles and median are means, extrema the outermost. '
    'Red: the share that fulfils the condition on the right; bars: lowest to highest seed. Filled: as in the '
    'figure of the test loss.')
FIGURES = {  # title, caption
    'summary': ('Test loss and mean logit', (
        f'The first size, of the baseline, μ-loss and μ-centering those that ran. {FILLED}')),
    'loss': ('Test loss against learning rate', (
        f'Below, with three learning rates or more: each size at the two largest. {FILLED} '
        "(The paper's Figures 2 and 9)")),
    'lrs': ('Learning rate sensitivity against size', (
        'LRS is the sum / (n - 1) of the table. Points: means over seeds; bars: lowest to highest. Filled: '
        f'over {BEHIND:.0%} above the lowest test loss of the cells that the table compares, at one '
        'learning rate or more. Sizes with other learning rates (see the table) cannot be compared. '
        '(Figures 3 and 10)')),
    'statistics': ('Mean embedding and logits against learning rate', (
        'Means over positions and seeds, without runs whose test loss is not finite. Filled: as in the '
        'figure of the test loss. Triangles lie below the axis. (Figure 4)')),
    'fact_3': ('What centering would change in the baseline', (
        'r_emb: the norm of an embedding minus μ, divided by that without. r_cos, r_log: likewise the '
        'largest |cosine| with h, and |logit|. Below 1, the dotted line, centering lowers it. Means over '
        f'positions and seeds. Filled: over {BEHIND:.0%} above the best method, as in the figure of the test '
        'loss. (Figure 5)')),
    'ablation': ('Several values of λ', (
        'Top: test loss against learning rate. Bottom: LRS, the sum / (n - 1), against size. All panels are '
        f'compared with each other. {FILLED} (Figure 8)')),
    'r_emb': ('Distributions of r_emb and cos(μ, h) in the baseline', f'{BOXES} (Figure 11)'),
    'r_cos': ('Distributions of r_cos and r_log in the baseline', f'{BOXES} (Figure 12)'),
    'checkpoints': ('Checkpoints', (
        'On the test text: checkpoints that --keep_every kept, the last of a run that has not ended, and the '
        'model of a run that has. r_emb, r_cos, r_log: below 1, the dotted line, centering lowers norms, '
        'largest cosines and largest logits. The cost of BF16 logits is the test loss with them minus the '
        'one with fp32 logits of the same weights. A line at the edge of a panel lies beyond it.')),
    'rounding': ('What rounding does', (
        'Runs that differ in the dtype of the logits alone, and the others of their learning rate.')),
    'training': ('Training curves', (
        'As logged, at most 1,000 lines of a log. Points: val losses. The first lines are widest, so that '
        'they are seen under others. A line at the edge of a panel lies beyond it.'))}

plt.switch_backend('agg')  # files alone, no windows
plt.rcParams.update({
    'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
    'axes.spines.top': False, 'axes.spines.right': False, 'figure.dpi': 160})


def limits_of(rows, column):
    """
    The range (low, high) of `column` that an axis shows. What lies beyond it is drawn at its edge, so that a
    few outliers do not flatten the rest. The two losses have their own rules, and all other columns the last.
    """
    values = rows[column]
    lowest = values.min()

    if column == 'capped_loss':
        # up to the largest median over seeds of what learned something, and a tenth more
        medians = rows.groupby(['size', 'variant', 'lr'])[['capped_loss', 'init_loss']].median()
        # False where init_loss is unknown
        nothing_learned = medians.capped_loss >= medians.init_loss - MIN_LEARNED
        highest = medians.capped_loss[~nothing_learned].max()
        if nothing_learned.all():
            highest = values.max()
        return lowest, lowest + 1.1 * (highest - lowest)

    if column == 'loss':
        # four times the range of nine in ten training losses
        usual = values.quantile(0.9) - lowest
        return lowest, lowest + max(4 * usual, 0.1 * lowest)

    if lowest >= 0 and values.max() > 1e-3:
        # of what is never negative, such as |mu|, all above 0.001: mu-centering has 0, or rounding errors
        return values[values > 1e-3].min() / 2, math.inf

    return -math.inf, math.inf


def choose_scale(ax, values):
    """
    Sets the y axis: logarithmic if all values are above 0.001 and span more than a factor of ten; if some
    are below 0.001 and one is larger than 100 in size, linear from -100 to 100 and logarithmic beyond; else
    linear.
    """
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
    """
    The mean of y over the runs that the comparison rests upon, or over all if they are not compared. NaN if
    one of them has none.
    """
    compared = runs[runs.behind.notna()]
    if compared.empty:
        compared = runs
    return compared[y].mean(skipna=False)


def face(behind, color):
    """
    The filling of a marker: the color of its line if behind (1), white if not (0), grey if not compared
    (NaN).
    """
    if behind == 1:
        return color
    if behind == 0:
        return 'white'
    return 'lightgrey'


def draw_line(ax, x, means, lowest, highest, faces, look, width, limits=(-math.inf, math.inf)):
    """Points (n,) that a line joins, bars from lowest to highest. Triangles lie beyond the axis's limits."""
    shown = means.clip(*limits)
    ax.plot(x, shown, linestyle=look.dash, color=look.color, linewidth=width)
    ax.vlines(x, np.clip(lowest, *limits), np.clip(highest, *limits), color=look.color, linewidth=0.8)
    low, high = limits
    inside = shown == means
    for marker, where in ((look.marker, inside), ('^', means > high), ('v', means < low)):
        ax.scatter(x[where], shown[where], 25, marker=marker, edgecolors=[look.color], linewidths=1, zorder=3,
                   facecolors=faces[where], clip_on=False)


def draw_lines(ax, rows, y, limits=None):
    """
    y over lr, a line for each size and variant: means over the seeds, bars to the lowest and highest. The
    axis has the limits of its own rows, unless it shares those of others.
    """
    if limits is None:
        limits = limits_of(rows, y)
    variants = rows.variant.unique()
    width = dict(zip(variants, widths(len(variants)), strict=True))
    for (_, variant), part in rows.groupby(['size', 'variant'], sort=False):
        look = part.iloc[0]
        by_rate = [(lr, runs) for lr, runs in part.groupby('lr')]
        rates = np.array([lr for lr, _ in by_rate])
        means = np.array([mean_of_compared(runs, y) for _, runs in by_rate])
        means = np.nan_to_num(means, nan=math.inf)  # a loss that is not finite and cannot be capped
        faces = np.array([face(runs.behind.max(), look.color) for _, runs in by_rate])
        lowest = [runs[y].min() for _, runs in by_rate]
        highest = [runs[y].max() for _, runs in by_rate]
        draw_line(ax, rates, means, lowest, highest, faces, look, width[variant], limits)
    ax.set(xlabel=LABELS['lr'], ylabel=LABELS.get(y, y))
    label_rates(ax, sorted(rows.lr.unique()))


def legend(figure, rows, marks):
    """
    Draws the legend below a figure. It has the colors of the variants, the markers of sizes if there are
    several, and the fillings of the figure's points if `marks`, their `behind`, differ.
    """
    handles = []
    for run in rows.drop_duplicates('variant').itertuples():
        handles.append(Line2D([], [], color=run.color, label=run.variant))
    sizes = rows.drop_duplicates('size')
    if len(sizes) > 1:
        for run in sizes.itertuples(index=False):
            handles.append(Line2D([], [], color='black', ls=run.dash, marker=run.marker, mfc='white',
                                  label=run.size))
    not_compared = -1  # instead of NaN, which equals nothing
    marks = marks.fillna(not_compared)
    labels = {1: f'over {BEHIND:.0%} above the lowest', 0: f'within {BEHIND:.0%} of it',
              not_compared: 'not compared'}
    if marks.nunique() > 1:
        for mark, label in labels.items():
            if (marks == mark).any():
                handles.append(Line2D([], [], color='black', ls='', marker='o', mfc=face(mark, 'black'),
                                      label=label))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4)


def marks_of_points(rows):
    """Runs -> the mark of each point that draw_lines draws of them."""
    return rows.groupby(['size', 'variant', 'lr']).behind.max()


def panels(n, n_columns, **more):
    """n panels, in rows of n_columns at most -> the figure, the panels, and the number of rows."""
    n_rows = math.ceil(n / n_columns)
    figure, axes = plt.subplots(n_rows, min(n, n_columns), squeeze=False, **more)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, axes.flat[:n], n_rows


def signature(file_name):
    """What a figure's file says of itself: a copy that a user has renamed is not signed."""
    return f'analyze.py {ascii(file_name)}'


def to_png(name, subtitle, figure, section='others'):
    """A figure -> a dict of its name, title, caption, section and the bytes of a png file; closes it."""
    title, caption = FIGURES[name]
    # a variant may have what no file name should, as in init_from a/model.pt
    file_name = name + '_' + re.sub(r'[^\w.-]+', '_', subtitle.replace('η = ', 'lr'))
    figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
    png = io.BytesIO()
    figure.savefig(png, format='png', bbox_inches='tight',  # or a wide legend would be cut off
                   metadata={'Software': signature(file_name)})
    plt.close(figure)
    return dict(name=file_name, title=f'{title}, {subtitle}', caption=caption, section=section,
                png=png.getvalue())


# -------- figures against the learning rate
def against_lr(rows, columns):
    """A figure with a panel for each column that has values, against the learning rate, or None without."""
    # A run that was not finite has statistics of its last checkpoint, even of step 0: only its loss is drawn.
    shown = {column: rows[rows[column].notna() & rows.test_loss.notna()] for column in columns}
    if 'capped_loss' in columns:
        shown['capped_loss'] = rows
    columns = [column for column in columns if shown[column].lr.nunique() > 1]
    if not columns:
        return None

    figure, axes, n_rows = panels(len(columns), 2)
    figure.set_size_inches(7.5, 1.2 + 2.7 * n_rows)
    for ax, column in zip(axes, columns, strict=True):
        draw_lines(ax, shown[column], column)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        elif column != 'capped_loss':
            values = shown[column][column]
            limits = limits_of(shown[column], column)
            choose_scale(ax, values.clip(*limits))
    all_shown = pd.concat([shown[column] for column in columns])
    legend(figure, all_shown, marks_of_points(all_shown))
    return figure


def draw_summary(rows, tying):
    """Figures of three methods of one size."""
    figure = against_lr(rows.assign(marker='o', dash='-'), ['capped_loss', 'logit_mean'])
    return [to_png('summary', TYING[tying], figure)] if figure else []


def loss_against_lr(rows):
    """Figures 2 and 9: the test loss of all sizes, and below a panel for each at the two largest rates."""
    rates = sorted(rows.lr.unique())
    if len(rates) < 2:
        return None
    largest = rows[rows.lr >= rates[-2]]
    sizes = largest['size'].unique()
    if len(rates) == 2:
        sizes = []  # the upper panel shows all
    n_columns = max(1, min(len(sizes), 5))
    n_rows = math.ceil(len(sizes) / n_columns)

    figure = plt.figure(figsize=(9, 4 + 2.2 * n_rows))
    cells = figure.add_gridspec(1 + n_rows, n_columns, height_ratios=[1.6] + [1] * n_rows)
    draw_lines(figure.add_subplot(cells[0, :]), rows, 'capped_loss')
    for i, size in enumerate(sizes):
        ax = figure.add_subplot(cells[1 + i // n_columns, i % n_columns])
        draw_lines(ax, largest[largest['size'] == size], 'capped_loss')
        ax.set(title=size, ylabel='', xlim=(rates[-2] / 1.6, rates[-1] * 1.6))
        ax.xaxis.set_minor_locator(NullLocator())
    legend(figure, rows, marks_of_points(rows))
    return figure


# -------- figures of the learning rate sensitivity
def draw_lrs(ax, lrs):
    """Rows of lrs.csv: LRS against the number of parameters, a line for each variant."""
    variants = lrs.variant.unique()
    for variant, width in zip(variants, widths(len(variants)), strict=True):
        part = lrs[lrs.variant == variant].sort_values('n_params')
        look = part.iloc[0]
        x, means = part.n_params.to_numpy(), part.lrs_n1.to_numpy()
        faces = np.array([face(behind, look.color) for behind in part.behind])
        draw_line(ax, x, means, part.lrs_n1_lowest, part.lrs_n1_highest, faces, look, width)
    sizes = lrs.drop_duplicates('size')
    ax.set(xscale='log', xlabel='parameters $N$', ylabel=LABELS['lrs_n1'])
    ax.set_xticks(sizes.n_params, sizes['size'])
    ax.xaxis.set_minor_locator(NullLocator())
    choose_scale(ax, lrs.lrs_n1)


def drawable(lrs):
    """The rows of lrs.csv that a figure shows, all with one look, as the x axis tells the size."""
    lrs = lrs[lrs.n_rates >= MIN_RATES].dropna(subset=['n_params', 'lrs_n1'])
    return lrs.assign(marker='o', dash='-')


def lrs_against_size(lrs):
    """A figure of rows of lrs.csv, or None without several sizes whose number of parameters is known."""
    lrs = drawable(lrs)
    if lrs.n_params.nunique() < 2:
        return None
    figure, ax = plt.subplots(figsize=(7.5, 4))
    draw_lrs(ax, lrs)
    legend(figure, lrs.assign(size=''), lrs.behind)  # of one size, so that it shows no markers of sizes
    return figure


def draw_methods(rows, lrs, tying):
    """Figures 2 to 5, or of tied runs 9 and 10 and the like of 4 and 5: of runs of a tying, and their LRS."""
    baseline = rows[rows.method == 'baseline']
    drawn = {
        'loss': loss_against_lr(rows),
        'lrs': lrs_against_size(lrs),
        'statistics': against_lr(rows, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']),
        'fact_3': against_lr(baseline, ['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])}
    section = f'methods, {TYING[tying]}'
    return [to_png(name, TYING[tying], figure, section) for name, figure in drawn.items() if figure]


def draw_ablation(rows, lrs, tying):
    """Figure 8, of the runs of methods with several λ, and their LRS: a column of panels for each method."""
    if rows.lr.nunique() < 2:
        return []
    rows = in_order_of_ablation(rows)
    lrs = in_order_of_ablation(drawable(lrs))
    colors = {lam: f'C{i}' for i, lam in enumerate(sorted(rows.lam.unique()))}
    rows = rows.assign(color=rows.lam.map(colors))
    lrs = lrs.assign(color=lrs.lam.map(colors))

    columns = list(rows.groupby(['method', 'setting', 'rounding'], sort=False))
    n_rows = 2 if len(lrs) else 1
    limits = limits_of(rows, 'capped_loss')
    figure, axes = plt.subplots(n_rows, len(columns), squeeze=False, sharey='row')
    figure.set_size_inches(max(7.5, 4.4 * len(columns)), 1 + 3 * n_rows)
    for i, ((method, setting, rounding), part) in enumerate(columns):
        draw_lines(axes[0, i], part, 'capped_loss', limits)
        axes[0, i].set_title(NAMES.get(method, method) + setting + rounding)
        if n_rows == 2:
            draw_lrs(axes[1, i], lrs[lrs.variant.isin(part.variant)])
    of_lam = rows.assign(variant=[f'λ = {lam:g}' for lam in rows.lam])
    legend(figure, of_lam, marks_of_points(rows))
    return [to_png('ablation', TYING[tying], figure, f'λ, {TYING[tying]}')]


# -------- figures of distributions
CONDITIONS = {  # of a quantity: the threshold, the column with the share that fulfils it, the label of that
    'r_emb': (1, 'below_1', r'% $r_{\rm emb} < 1$'),
    'cos_mu_h': (0, 'above_0', r'% $\cos(\mu, h) > 0$'),
    'r_cos': (1, 'below_1', r'% $r_{\rm cos} < 1$'),
    'r_log': (1, 'below_1', r'% $r_{\rm log} < 1$')}


def draw_boxes(ax, rows, quantity):
    """Rows of distributions.csv with their runs' lr and `behind`: boxes, and a share in red, on the right."""
    threshold, share, label = CONDITIONS[quantity]
    at_rates = rows.groupby('lr')
    means = at_rates[['25%', '50%', '75%', share]].mean()
    rates = means.index
    lowest, highest = at_rates['min'].min(), at_rates['max'].max()
    ax.vlines(rates, means['25%'], means['75%'], color='lightgrey', linewidth=12)
    ax.vlines(rates, lowest, highest, color='grey', linewidth=0.6)
    for values in (lowest, means['50%'], highest):
        ax.plot(rates, values, 'k_', markersize=10)
    ax.axhline(threshold, color='black', linewidth=0.8, linestyle=':')
    ax.set_ylabel(LABELS[quantity])
    label_rates(ax, list(rates))
    ax.xaxis.set_minor_locator(NullLocator())

    right = ax.twinx()
    right.plot(rates, 100 * means[share], color='red', linewidth=0.6)
    right.vlines(rates, 100 * at_rates[share].min(), 100 * at_rates[share].max(), color='red', linewidth=0.8)
    faces = [face(behind, 'red') for behind in at_rates.behind.max()]
    right.scatter(rates, 100 * means[share], 16, edgecolors='red', facecolors=faces, zorder=3, clip_on=False)
    right.set_ylim(0, 100)
    right.set_ylabel(label, color='red')
    right.tick_params(axis='y', colors='red')
    right.spines.right.set(visible=True, color='red')
    right.grid(False)


def draw_distributions(rows, tying):
    """Figures 11 and 12, of rows of distributions.csv and their runs: the first variant of the baseline."""
    rows = rows[(rows.method == 'baseline') & rows.quantity.isin(CONDITIONS.keys())]
    # A run that was not finite has distributions of its last checkpoint, even of step 0.
    rows = rows[rows.test_loss.notna()]
    if rows.empty:
        return []
    rows = rows[rows.variant == rows.variant.iloc[0]]
    if rows.lr.nunique() < 2:
        return []
    sizes = rows['size'].unique()
    figures = []
    for name, quantities in (('r_emb', ['r_emb', 'cos_mu_h']), ('r_cos', ['r_cos', 'r_log'])):
        if not rows.quantity.isin(quantities).any():
            continue
        figure, axes = plt.subplots(len(sizes), 2, figsize=(9, 1 + 1.6 * len(sizes)), squeeze=False)
        for i, size in enumerate(sizes):
            for ax, quantity in zip(axes[i], quantities, strict=True):
                draw_boxes(ax, rows[(rows['size'] == size) & (rows.quantity == quantity)], quantity)
                ax.set_title(size, loc='left')
                if i == len(sizes) - 1:
                    ax.set_xlabel(LABELS['lr'])
        subtitle = f'{rows.variant.iloc[0]}, {TYING[tying]}'.removeprefix('baseline, ')
        figures.append(to_png(name, subtitle, figure, 'distributions'))
    return figures


# -------- figures against the step
def against_step(rows, curves, columns, marker='-'):
    """A figure with a panel for each column of {run: its curve}, against the step, a line for each run."""
    figure, axes, n_rows = panels(len(columns), 3, sharex=True)
    figure.set_size_inches(10, 3.2 * n_rows)
    for ax, column in zip(axes, columns, strict=True):
        all_curves = pd.concat([curves[run] for run in rows.run])
        limits = limits_of(all_curves, column)
        for row, width in zip(rows.itertuples(), widths(len(rows), 3.0), strict=True):
            logged = curves[row.run]
            curve = logged.dropna(subset=column)
            ax.plot(curve.step, curve[column].clip(*limits), marker, color=row.color, label=row.variant,
                    linewidth=width)
            if column == 'loss' and logged.val_loss.notna().any():
                ax.plot(logged.step, logged.val_loss.clip(*limits), 'o', color=row.color, markersize=3)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        choose_scale(ax, all_curves[column].clip(*limits))
        ax.set(title=LABELS.get(column, column), xlabel='step')
    handles = {line.get_label(): line for line in axes[0].lines if line.get_label() in set(rows.variant)}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


def draw_curves(rows, curves):
    """Figures of training curves, for each size, tying and learning rate, of those runs that have curves."""
    columns = ['loss', 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax']
    curves = curves.reindex(columns=['run', 'step', 'val_loss', *columns])
    curves = {run: curve for run, curve in curves[curves.step > 0].groupby('run')}
    figures = []
    for (size, tying, lr), logged in rows[rows.run.isin(curves)].groupby(PLACE, sort=False):
        place = f'{size}, {TYING[tying]}, η = {lr:g}'
        alike = logged.groupby(['method', 'lam', 'setting', 'seed'], dropna=False)
        if alike.rounding.nunique().max() > 1:
            figures.append(to_png('rounding', place, against_step(logged, curves, ['loss', 'logit_mean'])))
        figures.append(to_png('training', place, against_step(logged, curves, columns)))
    return figures


def draw_checkpoints(checkpoints):
    """
    Figures of rows of checkpoints.csv against the step, for each size, tying and learning rate where there is
    any other than the model.pt that a run ends with.
    """
    columns = ['mu_norm', 'logit_mean', 'bf16_cost', 'r_emb', 'r_cos', 'r_log']
    figures = []
    for (size, tying, lr), rows in checkpoints.groupby(PLACE, sort=False):
        if (rows.file == 'model.pt').all():
            continue
        curves = {run: curve for run, curve in rows.groupby('run')}
        figure = against_step(rows.drop_duplicates('run'), curves, columns, 'o-')
        figures.append(to_png('checkpoints', f'{size}, {TYING[tying]}, η = {lr:g}', figure))
    return figures


# -------- the pages
HEAD = '''<!doctype html><meta charset="utf-8"><style>
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
        rows = table['rows'].replace('</?(b|ins)>', '', regex=True)
        texts.append(f'{table["title"]}\n{rows.to_string(index=False)}\n')
    return '\n'.join(texts)


def to_html(text):
    """Text -> HTML, in which only the tags of tables are tags: <b> and <ins>."""
    return re.sub('&lt;(/?(?:b|ins))&gt;', r'<\1>', html.escape(str(text)))


def in_order(items):
    """Tables, then figures, as they were made -> the same in the order of their sections."""
    return sorted(items, key=lambda item: SECTIONS.index(item['section']))


def page(name, summary, headlines, notes, items):
    """The text of report.html, which needs no other file: sentences, bold headlines, tables and figures."""
    parts = [HEAD, f'<h1>{html.escape(name)}</h1>', f'<p>{html.escape(summary)}</p>']
    parts += [f'<p class="headline">{html.escape(line)}</p>' for line in headlines]
    parts += [f'<p>{html.escape(line)}</p>' for line in notes]
    for item in items:
        parts.append(f'<h2>{html.escape(item["title"])}</h2>')
        if 'rows' in item:
            rows = item['rows'].map(to_html)
            rows.columns = [to_html(name).replace('_', '_<br>') for name in rows]
            parts.append(f'<div>{rows.to_html(index=False, escape=False, border=0)}</div>')
        else:
            image = base64.b64encode(item['png']).decode()
            parts.append(f'<img src="data:image/png;base64,{image}">')
        parts.append(f'<p>{html.escape(item["caption"])}</p>')
    return '\n'.join(parts)
