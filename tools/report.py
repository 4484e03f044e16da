"""
Tables, figures and a page of the runs that analyze.py has read, named and compared. How runs are
marked is decided there: rows come with the columns `behind` and `lowest`. An item of the page is a
dict: a table has title, rows and caption; a figure has title, caption, the name of its file, and
png.
"""
import base64
import html
import io
import itertools
import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from train import save  # writes atomically

TYING = {0: 'untied', 1: 'tied'}
PLACE = ['size', 'weight_tying', 'lr']  # runs are compared where these are the same
BEHIND = 0.01  # a test loss further than this above the lowest, relative to it, is marked
BESIDE_THEIRS = {'test_loss': 'test loss', 'mu_norm': '‖μ‖', 'logit_mean': 'mean logit'}

# -------- names and looks
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping',
    'mu_loss': 'μ-loss', 'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay",
    'max_z_loss': 'max-z loss', 'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam',
    'cosine_reg': 'cosine reg.', 'centered_head': 'centered head'}
COLORS = {  # the paper's; other variants get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5',
    'soft_capping': '#9E9E9E', 'mu_loss': '#FF9500', 'mu_centering': '#00B945'}
HUES = plt.get_cmap('tab20b').colors  # five, in four shades each
OTHERS = ['black', *HUES[::4], *HUES[2::4]]
STYLES = {  # marker and line of a size: the paper's; others have ('o', '-')
    '16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
    '221M': ('X', '-')}
LABELS = {
    'capped_loss': 'test loss', 'loss': 'training loss', 'lrs_n1': 'LRS',
    'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
    'logit_mean': r'mean logit $\bar{l}$', 'logit_mean_spread': 'spread of the mean logit',
    'logit_std': r'standard deviation $\sigma_l$',
    'logit_absmax': r'largest logit, $\max_i |l_i|$', 'bf16_cost': 'cost of BF16 logits, nats',
    'r_emb': r'$r_{\rm emb}$', 'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}


def with_looks(runs):
    """Runs with the color and width of their variant's line, and marker and dash of their size."""
    # the shortest name of a method has its color: that of the default λ, if it ran with it
    variants = runs[['variant', 'method']].drop_duplicates().values
    others = itertools.cycle(OTHERS)
    colors = {}
    for variant, method in sorted(variants, key=lambda pair: len(pair[0])):
        color = COLORS.get(method)
        if color is None or color in colors.values():
            color = next(others)
        colors[variant] = color

    # the first are drawn first, and are widest, so that they are seen under others
    names = runs.variant.unique()
    widths = dict(zip(names, np.linspace(2.2, 1.0, len(names)), strict=True))

    styles = [STYLES.get(size, ('o', '-')) for size in runs['size']]
    return runs.assign(
        color=runs.variant.map(colors),
        width=runs.variant.map(widths),
        marker=[marker for marker, _ in styles],
        dash=[dash for _, dash in styles])


# -------- tables
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}',
    'mu_norm': '{:.4g}', 'mean_share': '{:.3f}', 'logit_mean': '{:.4g}',
    'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}', 'logit_max': '{:.4g}',
    'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}', 'r_cos': '{:.3f}', 'r_log': '{:.3f}',
    'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}', 'r_log_below_1_too': '{:.1%}',
    'bf16_cost': '{:.4f}'}
SHORT = '''variant size weight_tying lr seed test_loss mu_norm logit_mean logit_std logit_absmax
           r_emb r_cos r_log'''.split()  # of these, what is printed
OF_RUNS = '''behind: 1 if not finite, or if the mean test loss is over 1% above the lowest of all
    variants of this table with the same size, tying and learning rate, over the seeds that all of
    them have; empty: alone there, or no seed is common to all. model_step: the step of the model
    that was measured. mean_share: V‖μ‖² / ‖E‖², 1 if all e_i are equal. logit_absmax: the largest
    |logit| of a position, a mean over positions; logit_max: the largest of all.
    r_log_below_1_too: of the positions with r_cos < 1, the share with r_log < 1. bf16_cost: test
    loss with BF16 logits minus that with fp32 logits of the same weights, in nats.'''
OF_THEIRS = '''The runs of this sweep that the paper's authors have too: size, tying, method, λ,
    learning rate and steps (100,000 of 64 x 2,048 tokens) are the same. Theirs are of one seed and
    of other samples of the test text (results/authors). Their weight decay may not be Eq. 2, and
    with soft-capping their mean logit is that before the cap, which is not compared.'''
OF_LRS = '''Lower is better. In nats: how far the test losses at n learning rates lie above the
    lowest of them, where a loss that is not finite, or above the one at initialisation, counts as
    that one; their sum / (n - 1), as in the paper's tables, or their mean, as in Eq. 21. Over
    several seeds: means [lowest, highest]. The cells of a line are over the same n learning rates
    and the same seeds. Bold: the lowest, if no other has a seed as low as its highest; of one seed
    it may be chance. Underlined: within 1% of the lowest test loss of the line's variants at every
    learning rate. -: no such runs, nothing learned, a loss that is not finite where the one at
    initialisation is unknown, or not in the paper, whose runs had one seed and 100,000 steps of
    64 x 2,048 tokens.'''
OF_OVERHEAD = '''A method's training time above the baseline's of the same size, device and
    processes: means over learning rates, seeds and λ, also of runs that differ in --threads,
    --compile or --micro_batch_size. Left out: runs of less than ten minutes, a method of one run,
    or whose times differ by 10% or more. The paper's: on four A100. `python -m tools.bench`
    compares methods side by side. (Table 6)'''
OF_SEEDS = '''In nats, means over the seeds that both have [lowest, highest]; -: fewer than two
    such seeds. Below 0, the method is better. A loss above the one at initialisation counts as
    that one.'''


def table(title, rows, caption):
    return dict(title=title, rows=rows, caption=' '.join(caption.split()))


def grid(cells, *names):
    """
    Cells {(row, ..., column): text}, and the headers of what tells the rows apart -> a table,
    whose rows and columns are in the order of the cells, with - where there is no cell.
    """
    columns = dict.fromkeys(key[-1] for key in cells)
    rows = []
    for row_key in dict.fromkeys(key[:-1] for key in cells):
        texts = [cells.get((*row_key, column), '-') for column in columns]
        rows.append([*row_key, *texts])
    return pd.DataFrame(rows, columns=[*names, *columns])


def lrs_cell(row):
    """A cell of an LRS table: LRS (n - 1), its marks, and the range over several seeds."""
    if math.isnan(row.lrs_n1):
        return '-'
    text = f'{row.lrs_n1:.3f}'
    if row.behind == 0:
        text = f'<ins>{text}</ins>'
    if row.lowest:
        text = f'<b>{text}</b>'
    if row.seeds > 1:
        text += f' [{row.lrs_n1_lowest:.3f}, {row.lrs_n1_highest:.3f}]'
    return text


def lrs_table(lrs, column, title):
    """Table 2, 5 or 4: lines for each size, a column for each value of `column` of lrs.csv."""
    cells = {}
    for line, of_size in lrs.groupby(['size', 'n_rates', 'seeds'], sort=False):
        for row in of_size.itertuples():
            cells[(*line, 'sum / (n - 1)', getattr(row, column))] = lrs_cell(row)
        for row in of_size.dropna(subset='paper').itertuples():
            cells[(*line, "the paper's", getattr(row, column))] = f'{row.paper:.3f}'
        for row in of_size.dropna(subset='lrs').itertuples():
            cells[(*line, 'mean (Eq. 21)', getattr(row, column))] = f'{row.lrs:.3f}'
    return table(title, grid(cells, 'size', 'n', 'seeds', 'LRS'), OF_LRS)


def overhead_tables(overheads):
    """Table 6 of each tying, of rows of analyze.overhead: a column for each method."""
    tables = []
    for tying, of_tying in overheads.groupby('weight_tying'):
        cells = {}
        for size, of_size in of_tying.groupby('size', sort=False):
            for row in of_size.itertuples():
                cells[size, row.device, row.processes, row.variant] = f'{row.added:.1%}'
            for row in of_size.dropna(subset='paper').itertuples():
                cells[size, "the paper's", '', row.variant] = f'{row.paper:.1%}'
        rows = grid(cells, 'size', 'device', 'processes')
        tables.append(table(f'Additional training time ΔT, {TYING[tying]}', rows, OF_OVERHEAD))
    return tables


def seed_tables(runs):
    """Test losses minus the baseline's of the same seed, if a variant shares two seeds with it."""
    same = [*PLACE, 'setting', 'seed']
    baseline = runs[runs.method == 'baseline'].set_index(same).capped_loss.rename('of_baseline')
    pairs = runs[runs.method != 'baseline'].join(baseline, on=same).dropna(subset='of_baseline')
    pairs['gap'] = pairs.capped_loss - pairs.of_baseline
    cells = {}
    for (size, tying, lr, variant), gaps in pairs.groupby([*PLACE, 'variant'], sort=False).gap:
        if len(gaps) > 1:
            text = f'{gaps.mean():+.3f} [{gaps.min():+.3f}, {gaps.max():+.3f}]'
            cells[size, TYING[tying], f'{lr:g}', variant] = text
    if not cells:
        return []
    title = 'Test loss minus that of the baseline of that seed'
    return [table(title, grid(cells, 'size', 'tying', 'η'), OF_SEEDS)]


def authors_tables(runs):
    """Rows of analyze.beside_the_authors -> a table with three lines for each run."""
    lines = []
    for run in runs.to_dict('records'):
        where = {'size': run['size'], 'tying': TYING[run['weight_tying']],
                 'variant': run['variant'], 'η': f'{run["lr"]:g}', 'seed': f'{run["seed"]:.0f}'}
        for name, word in BESIDE_THEIRS.items():
            theirs = run[f'{name}_of_theirs']
            if math.isnan(theirs):
                continue
            # a run that was not finite has statistics of its last checkpoint, even of step 0
            ours = math.nan if math.isnan(run['test_loss']) else run[name]
            text = FORMATS[name]
            signed = text.replace(':', ':+')
            lines.append({**where, 'quantity': word, 'here': text.format(ours),
                          "the authors'": text.format(theirs),
                          'difference': signed.format(ours - theirs)})
    if not lines:
        return []
    rows = pd.DataFrame(lines).replace({'nan': '-', '+nan': '-'})
    return [table("Beside the authors' runs", rows, OF_THEIRS)]


def run_table(runs, own_columns):
    """A row for each run, a column for each of FORMATS that is known, and a fork's own."""
    cells = {}
    for name, text in {**FORMATS, **dict.fromkeys(own_columns, '{}')}.items():
        if runs[name].notna().any():
            cells[name] = runs[name].map(text.format)
    rows = pd.DataFrame(cells).replace({'nan': '', 'nan%': ''})
    return table('All runs', rows, OF_RUNS)


# -------- figures
FILLED = '''Points: means over seeds; bars: lowest to highest. A loss above the one at
    initialisation is drawn as that one; a line that leaves the panel goes to a run that learned
    nothing. Filled: diverged in the paper's sense, that is, over 1% above the lowest of the
    variants here with the same size and learning rate, over the seeds that all of them have; or
    not finite. Grey: alone there, or no seed is common to all.'''
BOXES = '''A row for each size. r_emb is over the vocabulary, the others are over test positions.
    Grey: quartiles; black: median and extrema. Over several seeds, quartiles and median are means,
    extrema the outermost. Red: the share that fulfils the condition on the right. Filled: as in
    the figure of the test loss.'''
TITLES = {
    'summary': 'Test loss and mean logit',
    'loss': 'Test loss against learning rate',
    'lrs': 'Learning rate sensitivity against size',
    'statistics': 'Mean embedding and logits against learning rate',
    'fact_3': 'What centering would change in the baseline',
    'ablation': 'Several values of λ',
    'r_emb': 'Distributions of r_emb and cos(μ, h) in the baseline',
    'r_cos': 'Distributions of r_cos and r_log in the baseline',
    'training': 'Training curves',
    'checkpoints': 'Checkpoints'}
CAPTIONS = {
    'summary': '''The first size, and whichever of the baseline, μ-loss and μ-centering ran.
        Filled: as in the figure of the test loss.''',
    'loss': f"Below: each size at the two largest rates. {FILLED} (The paper's Figures 2 and 9)",
    'lrs': '''LRS is the sum / (n - 1) of the table, whose underlined cells are not filled here.
        Points: means over seeds; bars: lowest to highest. Without sizes of fewer learning rates.
        (Figures 3 and 10)''',
    'statistics': '''Means over positions and seeds, without runs whose test loss is not finite.
        Filled: as in the figure of the test loss. (Figure 4)''',
    'fact_3': '''r_emb: the norm of an embedding minus μ, divided by that without. r_cos, r_log:
        likewise the largest |cosine| with h, and |logit|. Below 1, the dotted line, centering
        lowers it. Means over positions and seeds. Filled: as in the figure of the test loss.
        (Figure 5)''',
    'ablation': f'''Top: test loss against learning rate. Bottom: LRS, the sum / (n - 1), against
        size, without sizes of fewer learning rates. All panels are compared with each other.
        {FILLED} (Figure 8)''',
    'r_emb': f'''{BOXES} The paper's condition is cos(μ, h) ≠ 0, which any number fulfils. Here it
        is to have the commoner sign: about 50% of the positions do if h ignores μ, and 100% if all
        h lean to one side. (Figure 11)''',
    'r_cos': f'{BOXES} (Figure 12)',
    'training': 'As logged, at most 1,000 lines of a log. Points: val losses.',
    'checkpoints': '''On the test text: checkpoints that --keep_every kept, the last of a run that
        has not ended, and the model of a run that has. r_emb, r_cos, r_log: below 1, the dotted
        line, centering lowers norms, largest cosines and largest logits. The cost of BF16 logits
        is the test loss with them minus the one with fp32 logits of the same weights.'''}

plt.switch_backend('agg')  # files alone, no windows
plt.rcParams.update({
    'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False,
    'lines.markersize': 5, 'axes.spines.top': False, 'axes.spines.right': False,
    'figure.dpi': 160})


def face(behind, color):
    """The filling of a marker: its color if behind (1), white if not (0), grey if not compared."""
    if behind == 1:
        return color
    if behind == 0:
        return 'white'
    return 'lightgrey'


def draw_line(ax, points, look):
    """Points by their x: a line through their `mean`, bars from `low` to `high`, markers."""
    points = points.replace(math.inf, math.nan)  # a loss that is not finite and cannot be capped
    faces = [face(behind, look.color) for behind in points.behind]
    ax.plot(points.index, points['mean'], linestyle=look.dash, color=look.color,
            linewidth=look.width)
    ax.vlines(points.index, points.low, points.high, color=look.color, linewidth=0.8)
    ax.scatter(points.index, points['mean'], 25, marker=look.marker, edgecolors=look.color,
               facecolors=faces, linewidths=1, zorder=3)


def draw_lines(ax, runs, y):
    """y over the learning rate, a line for each size and variant."""
    scale(ax, runs[y])
    for _, part in runs.groupby(['size', 'variant'], sort=False):
        points = part.groupby('lr').agg(
            mean=(y, 'mean'), low=(y, 'min'), high=(y, 'max'), behind=('behind', 'max'))
        draw_line(ax, points, part.iloc[0])
    label_rates(ax, runs)
    ax.set_ylabel(LABELS[y])
    if y == 'capped_loss':
        limit_losses(ax, runs)
    if y.startswith('r_'):
        ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about


def label_rates(ax, runs):
    """A logarithmic x axis with a tick at each learning rate."""
    rates = sorted(runs.lr.unique())
    ax.set_xscale('log')
    rotation = 90 if len(rates) > 8 else 0  # or labels would run into each other
    ax.set_xticks(rates, [f'{lr:g}' for lr in rates], rotation=rotation)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(r'learning rate $\eta$')


def scale(ax, values):
    """
    A y axis that is logarithmic, if the largest value is over 10, and over ten times the median:
    beyond 1 in size or, where there are negative values, beyond 100.
    """
    sizes = values.abs().dropna()
    if sizes.max() > 10 * max(1, sizes.median()):
        linear_up_to = 1 if values.min() >= 0 else 100
        # before lines are drawn, or the margins would be too large
        ax.set_yscale('symlog', linthresh=linear_up_to, subs=[2, 5])
        ax.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}')


def limit_losses(ax, runs):
    """Cuts off, at the top, runs that learned nothing, which would flatten all others."""
    learned = runs.capped_loss[runs.capped_loss < runs.init_loss - 0.1]
    if len(learned):
        margin = 0.05 * (learned.max() - learned.min()) + 1e-3
        ax.set_ylim(learned.min() - margin, learned.max() + margin)


def legend(figure, runs):
    """A legend below a figure: colors of variants, and markers of sizes if there are several."""
    handles = []
    for run in runs.drop_duplicates('variant').itertuples():
        handles.append(Line2D([], [], color=run.color, linewidth=run.width, label=run.variant))
    sizes = runs.drop_duplicates('size')
    if len(sizes) > 1:
        for run in sizes.itertuples():
            handles.append(Line2D([], [], color='black', ls=run.dash, marker=run.marker,
                                  mfc='white', label=run.size))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4)


def to_png(name, where, figure):
    """A figure -> its item of the page; closes it."""
    file_name = name + '_' + re.sub(r'[^\w.-]+', '_', where.replace('η = ', 'lr'))
    figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
    png = io.BytesIO()
    figure.savefig(png, format='png', bbox_inches='tight')  # or a wide legend would be cut off
    plt.close(figure)
    title = f'{TITLES[name]}, {where}'
    caption = ' '.join(CAPTIONS[name].split())
    return dict(title=title, caption=caption, name=file_name, png=png.getvalue())


# -------- figures against the learning rate
def against_lr(runs, columns):
    """A panel for each column, against the learning rate, or None if there is nothing to draw."""
    # a run that was not finite has statistics of its last checkpoint, even of step 0
    finite = runs[runs.test_loss.notna()]
    if runs.lr.nunique() < 2 or finite[columns].isna().all(axis=None):
        return None
    n_rows = len(columns) // 2
    figure, axes = plt.subplots(n_rows, 2, figsize=(7.5, 1.2 + 2.7 * n_rows))
    for ax, column in zip(axes.flat, columns, strict=True):
        draw_lines(ax, runs if column == 'capped_loss' else finite, column)
    legend(figure, runs)
    return figure


def loss_against_lr(runs):
    """Figures 2 and 9: test losses, and below of each size at the two largest rates."""
    rates = sorted(runs.lr.unique())
    if len(rates) < 2:
        return None
    largest = runs[runs.lr >= rates[-2]]
    sizes = largest['size'].unique()
    figure = plt.figure(figsize=(9, 6.2))
    cells = figure.add_gridspec(2, len(sizes), height_ratios=[1.6, 1])
    draw_lines(figure.add_subplot(cells[0, :]), runs, 'capped_loss')
    for i, size in enumerate(sizes):
        ax = figure.add_subplot(cells[1, i])
        draw_lines(ax, largest[largest['size'] == size], 'capped_loss')
        ax.set(title=size, ylabel='', xlim=(rates[-2] / 1.6, rates[-1] * 1.6))
    legend(figure, runs)
    return figure


def draw_lrs(ax, lrs):
    """Rows of lrs.csv: LRS against the number of parameters, a line for each variant."""
    if lrs.empty:
        return
    points = lrs.assign(mean=lrs.lrs_n1, low=lrs.lrs_n1_lowest, high=lrs.lrs_n1_highest,
                        marker='o', dash='-')  # the x axis tells the size
    for _, part in points.groupby('variant', sort=False):
        draw_line(ax, part.set_index('n_params'), part.iloc[0])
    sizes = lrs.drop_duplicates('size')
    ax.set(xlabel='parameters $N$', ylabel=LABELS['lrs_n1'], xscale='log', yscale='log')
    ax.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}',
                 minor_locator=LogLocator(subs=[2, 5]))
    ax.set_xlim(lrs.n_params.min() / 1.3, lrs.n_params.max() * 1.3)
    ax.set_xticks(sizes.n_params, sizes['size'])
    ax.xaxis.set_minor_locator(NullLocator())


def drawable(lrs):
    """Rows of lrs.csv with a known number of parameters, over the most rates that any has."""
    lrs = lrs.dropna(subset='n_params')
    return lrs[lrs.n_rates == lrs.n_rates.max()]


def lrs_against_size(lrs):
    """Figures 3 and 10, or None without several sizes."""
    lrs = drawable(lrs)
    if lrs.n_params.nunique() < 2:
        return None
    figure, ax = plt.subplots(figsize=(7.5, 4))
    draw_lrs(ax, lrs)
    legend(figure, lrs.assign(size=''))
    return figure


def methods_items(runs, lrs, tying):
    """
    Table 2 and Figures 2 to 5, or of tied runs Table 5, Figures 9 and 10 and the like of 4 and 5:
    of the runs that methods are compared by, and their LRS.
    """
    runs = runs[runs.weight_tying == tying]
    lrs = lrs[lrs.weight_tying == tying]
    items = []
    if len(lrs):
        title = f'Learning rate sensitivity (LRS), {TYING[tying]}'
        items.append(lrs_table(lrs, 'variant', title))

    first = runs[(runs['size'] == runs['size'].iloc[0]) & (runs.setting == '')]
    three = first[first.method.isin(['baseline', 'mu_loss', 'mu_centering'])]
    three = three.assign(marker='o', dash='-')
    baseline = runs[runs.method == 'baseline']
    figures = {
        'summary': against_lr(three, ['capped_loss', 'logit_mean']),
        'loss': loss_against_lr(runs),
        'lrs': lrs_against_size(lrs),
        'statistics': against_lr(runs, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']),
        'fact_3': against_lr(baseline, ['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])}
    for name, figure in figures.items():
        if figure:
            items.append(to_png(name, TYING[tying], figure))
    return items


def lam_items(runs, lrs, lrs_figure, tying):
    """
    Table 4 and Figure 8, of the runs of methods with several λ: a table, and a column of panels,
    for each method. `lrs` compares the λ of each method, `lrs_figure` those of all.
    """
    runs = runs[runs.weight_tying == tying]
    lrs = lrs[lrs.weight_tying == tying]
    lrs_figure = drawable(lrs_figure[lrs_figure.weight_tying == tying])
    items = []
    for (method, setting), part in lrs.groupby(['method', 'setting'], sort=False):
        name = NAMES.get(method, method) + setting
        title = f'Learning rate sensitivity (LRS), {TYING[tying]}, of {name} by λ'
        items.append(lrs_table(part.assign(lam=part.lam.map('{:g}'.format)), 'lam', title))
    if runs.lr.nunique() < 2:
        return items

    colors = {lam: f'C{i}' for i, lam in enumerate(sorted(runs.lam.unique()))}
    runs = runs.assign(color=runs.lam.map(colors))
    lrs_figure = lrs_figure.assign(color=lrs_figure.lam.map(colors))
    columns = list(runs.groupby(['method', 'setting'], sort=False))
    figure, axes = plt.subplots(2, len(columns), squeeze=False, sharey='row')
    figure.set_size_inches(max(7.5, 4.4 * len(columns)), 7)
    for i, ((method, setting), part) in enumerate(columns):
        draw_lines(axes[0, i], part, 'capped_loss')
        axes[0, i].set_title(NAMES.get(method, method) + setting)
        draw_lrs(axes[1, i], lrs_figure[lrs_figure.variant.isin(part.variant)])
    limit_losses(axes[0, 0], runs)  # the panels of a row share their axis
    legend(figure, runs.assign(variant=runs.lam.map('λ = {:g}'.format)))
    return [*items, to_png('ablation', TYING[tying], figure)]


# -------- figures of distributions
CONDITIONS = {  # of a quantity: the threshold, the column with the share, its label
    'r_emb': (1, 'below_1', r'% $r_{\rm emb} < 1$'),
    'cos_mu_h': (0, 'of_one_sign', '% of one sign'),
    'r_cos': (1, 'below_1', r'% $r_{\rm cos} < 1$'),
    'r_log': (1, 'below_1', r'% $r_{\rm log} < 1$')}


def draw_boxes(ax, rows, quantity):
    """Rows of distributions.csv with their runs: boxes, and a share in red, on the right."""
    threshold, share, label = CONDITIONS[quantity]
    by_rate = rows.groupby('lr')
    means = by_rate[['25%', '50%', '75%', share]].mean()
    lowest = by_rate['min'].min()
    highest = by_rate['max'].max()
    rates = means.index
    ax.vlines(rates, means['25%'], means['75%'], color='lightgrey', linewidth=12)
    ax.vlines(rates, lowest, highest, color='grey', linewidth=0.6)
    for values in (lowest, means['50%'], highest):
        ax.plot(rates, values, 'k_', markersize=10)
    ax.axhline(threshold, color='black', linewidth=0.8, linestyle=':')
    ax.set_ylabel(LABELS[quantity])
    label_rates(ax, rows)

    right = ax.twinx()
    percent = 100 * means[share]
    faces = [face(behind, 'red') for behind in by_rate.behind.max()]
    right.plot(rates, percent, color='red', linewidth=0.6)
    right.scatter(rates, percent, 16, edgecolors='red', facecolors=faces, zorder=3, clip_on=False)
    right.set_ylim(0, 100)
    right.set_ylabel(label, color='red')
    right.tick_params(axis='y', colors='red')
    right.spines.right.set(visible=True, color='red')
    right.grid(False)


def distribution_figures(runs, distributions, tying):
    """Figures 11 and 12, of rows of distributions.csv of the baseline."""
    baseline = runs[(runs.weight_tying == tying) & (runs.method == 'baseline')]
    baseline = baseline[baseline.test_loss.notna()]
    setting = baseline.setting.min()  # '' if it ran at the defaults
    baseline = baseline[baseline.setting == setting]
    if distributions.empty or baseline.lr.nunique() < 2:
        return []
    rows = baseline[['run', 'size', 'lr', 'behind']].merge(distributions, on='run')
    rows['of_one_sign'] = rows.above_0.where(rows.above_0 > 0.5, 1 - rows.above_0)
    sizes = rows['size'].unique()
    figures = []
    for name, quantities in (('r_emb', ['r_emb', 'cos_mu_h']), ('r_cos', ['r_cos', 'r_log'])):
        n_rows = max(1, len(sizes))
        figure, axes = plt.subplots(n_rows, 2, figsize=(9, 1 + 1.6 * n_rows), squeeze=False)
        for i, size in enumerate(sizes):
            of_size = rows[rows['size'] == size]
            for ax, quantity in zip(axes[i], quantities, strict=True):
                draw_boxes(ax, of_size[of_size.quantity == quantity], quantity)
                ax.set_title(size, loc='left')
        figures.append(to_png(name, TYING[tying] + setting, figure))
    return figures


# -------- figures against the step
def against_step(runs, curves, columns, marker='-'):
    """A panel for each of six columns of the curves, against the step, a line for each run."""
    figure, axes = plt.subplots(2, 3, sharex=True, figsize=(10, 6.4))
    for ax, column in zip(axes.flat, columns, strict=True):
        scale(ax, curves[column])
        for run in runs.itertuples():
            curve = curves[curves.run == run.run]
            known = curve.dropna(subset=column)
            ax.plot(known.step, known[column], marker, color=run.color, linewidth=run.width)
            if column == 'loss':
                ax.plot(curve.step, curve.val_loss, 'o', color=run.color, markersize=3)
        ax.set(title=LABELS[column], xlabel='step')
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        if column == 'loss':
            # without the first steps, which would flatten all others
            finite = curves.loss[np.isfinite(curves.loss)]
            if len(finite) > 1:
                ax.set_ylim(0.95 * finite.min(), finite.quantile(0.98))
    legend(figure, runs.assign(size=''))
    return figure


def curve_figures(runs, curves):
    """Training curves of each size, tying and learning rate, of those runs that have curves."""
    columns = ['loss', 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax']
    curves = curves.reindex(columns=['run', 'step', 'val_loss', *columns])
    curves = curves[curves.step > 0]
    figures = []
    for (size, tying, lr), part in runs[runs.run.isin(curves.run)].groupby(PLACE, sort=False):
        figure = against_step(part, curves[curves.run.isin(part.run)], columns)
        figures.append(to_png('training', f'{size}, {TYING[tying]}, η = {lr:g}', figure))
    return figures


def checkpoint_figures(runs, checkpoints):
    """
    Rows of checkpoints.csv against the step, for each size, tying and learning rate, of those runs
    that have others than the model.pt that a run ends with.
    """
    columns = ['mu_norm', 'logit_mean', 'bf16_cost', 'r_emb', 'r_cos', 'r_log']
    checkpoints = checkpoints.reindex(columns=['run', 'file', 'step', *columns])
    on_the_way = checkpoints.run[checkpoints.file != 'model.pt']
    figures = []
    for (size, tying, lr), part in runs[runs.run.isin(on_the_way)].groupby(PLACE, sort=False):
        figure = against_step(part, checkpoints[checkpoints.run.isin(part.run)], columns, 'o-')
        figures.append(to_png('checkpoints', f'{size}, {TYING[tying]}, η = {lr:g}', figure))
    return figures


# -------- the page
HEAD = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 76rem; padding: 0 1rem; font-family: sans-serif; }
  .headline { font-weight: bold; } img { max-width: 100%; }
  div { overflow: auto; max-height: 80vh; }  /* a table scrolls in itself: both bars in sight */
  td, th { padding: .1rem .3rem; text-align: right; font-size: .75rem; white-space: nowrap; }
  th { position: sticky; top: 0; background: white; }
  td:first-child { position: sticky; left: 0; background: white; text-align: left; }
</style>'''


def write(out, summary, headlines, notes, items):
    """
    Writes figures, tables.md and report.html, which needs no other file, and prints the tables and
    the sentences. The last of the items is the table of runs, which is printed first, in short.
    """
    (out / 'figures').mkdir(parents=True, exist_ok=True)
    page = [HEAD, f'<h1>{html.escape(out.resolve().name)}</h1>', f'<p>{html.escape(summary)}</p>']
    page += [f'<p class="headline">{html.escape(line)}</p>' for line in headlines]
    page += [f'<p>{html.escape(line)}</p>' for line in notes]
    tables = []
    for item in items:
        page.append(f'<h2>{html.escape(item["title"])}</h2>')
        if 'png' in item:
            save(item['png'], f'{out}/figures/{item["name"]}.png')
            image = base64.b64encode(item['png']).decode()
            page.append(f'<img src="data:image/png;base64,{image}">')
        else:
            rows = item['rows']
            text = rows.to_html(index=False, border=0)  # a name with < in it is text
            page += ['<div>', re.sub('&lt;(/?(b|ins))&gt;', r'<\1>', text), '</div>']
            align = ['left'] + ['right'] * (rows.shape[1] - 1)
            text = rows.to_markdown(index=False, disable_numparse=True, colalign=align)
            tables.append(f'### {item["title"]}\n\n{text}\n\n{item["caption"]}\n')
        page.append(f'<p>{html.escape(item["caption"])}</p>')
    save('\n'.join(tables).encode(), f'{out}/tables.md')
    save('\n'.join(page).encode(), f'{out}/report.html')

    *others, of_runs = items
    short = [name for name in SHORT if name in of_runs['rows']]
    print(of_runs['rows'][short].to_string(index=False))
    for item in others:
        if 'rows' in item:
            plain = item['rows'].replace('</?(b|ins)>', '', regex=True)
            print(f'\n{item["title"]}\n{plain.to_string(index=False)}')
    print('', summary, *headlines, *notes, sep='\n')
    print(f'wrote {out}; open {out / "report.html"} in a browser')
