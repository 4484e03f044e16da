"""
Tables, figures and a page of the runs and curves that analyze.py has read, named and compared: tables.md,
figures/*.png and report.html. Nothing is decided here but how it looks.
"""
import base64
import html
import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

TYING = {0: 'untied', 1: 'tied'}
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay", 'max_z_loss': 'max-z loss',
    'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.',
    'centered_head': 'centered head'}
COLORS = {  # the first six are the paper's; other variants get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945', 'adamw_decay': '#393B79', 'max_z_loss': '#17BECF',
    'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22', 'centered_head': '#4B0082'}
OTHERS = ['#000000', '#637939', '#7b4173', '#8c6d31', '#ff69b4', '#00ced1', '#843c39', '#6b6ecf']
for shade in range(4):  # then more, in case there are many: some 40 that all differ
    more = plt.get_cmap('tab20c').colors[shade::4] + plt.get_cmap('tab20b').colors[shade::4]
    OTHERS += [color for color in map(to_hex, more) if color not in OTHERS and color != '#393b79']
CURES = ['mu_loss', 'mu_centering', 'centered_head']

# -------- tables: dicts of title, message, rows and caption
MIN_RATES = 3  # with fewer learning rates there is no LRS table
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'mu_norm': '{:.4g}',
    'mean_share': '{:.3f}', 'logit_mean': '{:.4g}', 'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}',
    'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}', 'r_cos': '{:.3f}', 'r_log': '{:.3f}',
    'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}', 'r_log_below_1_too': '{:.1%}'}
EXPLAINED = {  # columns of the table of runs
    'behind': "1 if the variant's test loss, a mean over seeds, is not finite or over 1% above the lowest at "
              'its size, tying, setting and learning rate; empty: not compared',
    'model_step': 'of the model measured', 'mean_share': 'V‖μ‖² / ‖E‖², 1 if all embeddings are equal',
    'r_log_below_1_too': 'of the positions with r_cos < 1, the share with r_log < 1'}


def places(runs):
    """The runs of each size, tying and learning rate, and what that is called in titles and in files."""
    for (size, tying, lr), rows in runs.groupby(['size', 'weight_tying', 'lr'], sort=False):
        yield rows, f'{size}, {TYING[tying]}, η = {lr:g}', f'{size}_{TYING[tying]}_lr{lr:g}'


def grid(cells, *names):
    """Cells {(line, ..., column): text}, what their lines are called -> a table, with - where none is."""
    table = pd.Series(cells).unstack(sort=False).fillna('-').rename_axis(index=names, columns=None)
    return table.reset_index()


def lrs_table(lrs, column, title):
    """
    Table 2, 5 or 4, of rows of lrs.csv: a line for each size, a column for each value of `column`, or None.
    Bold is a size's lowest LRS, as three digits show it, unless a rival had a seed as low as its highest.
    """
    if not lrs.n_lrs.max() >= MIN_RATES:
        return None
    usual = lrs.rates[lrs.n_lrs == lrs.n_lrs.max()].mode()[0]
    cells, said = {}, []
    for size, rows in lrs.groupby('size', sort=False):
        shown = rows.lrs_n1.round(3).where(rows.rates == usual)
        best = rows[shown == shown.min()]
        rivals = rows[shown > shown.min()]
        overlap = (rivals.lrs_n1_lowest <= best.lrs_n1_highest.max()).any()
        winners = [] if overlap else [*best.variant]
        named = ', '.join(f'{name} {shown.min():.3f}' for name in winners)
        nothing = 'undecided, as ranges overlap' if overlap else 'nothing was learned'
        said.append(f'{size} {named or nothing}')
        for run in rows.itertuples():
            cell = f'{run.lrs_n1:.3f}'
            if run.rates != usual:
                cell += f' ({run.n_lrs} lr)'
            if run.behind == 0:
                cell = f'<u>{cell}</u>'
            if run.variant in winners:
                cell = f'<b>{cell}</b>'
            if run.seeds > 1:
                cell += f' [{run.lrs_n1_lowest:.3f}, {run.lrs_n1_highest:.3f}]'
            if not math.isnan(run.published):
                cell += f' <sub>{run.published:.3f}</sub>'
            cells[size, getattr(run, column)] = '-' if math.isnan(run.lrs_n1) else cell
    message = f'{title}: lowest, which is best: {"; ".join(said)}.'
    return dict(title=title, message=message, rows=grid(cells, 'N'), caption=(
        'Lower is better, in nats: how far the test losses at the n learning rates lie above the lowest of '
        'them, summed / (n - 1); means over seeds [lowest, highest]. Bold: the lowest of its size, unless '
        'ranges of others reach into its own. Underlined: within 1% of the best method at every learning '
        "rate; in a table of several λ, of the best pair of method and λ. Small: the paper's, of one seed. "
        '(n lr): over other learning rates than most. -: no runs, or nothing was learned at any of them.'))


def with_rounding(rows):
    """Whether some runs of one place are alike, seed and all, but for the logits' precision or a vector."""
    return rows.groupby(['method', 'lam', 'setting', 'seed'], dropna=False).rounding.nunique().max() > 1


def said_of_rounding(runs):
    """Of the runs whose losses lie farthest apart by rounding: these, and runs of a cure beside them."""
    farthest, said = -1, ''
    alike = ['size', 'weight_tying', 'lr', 'method', 'lam', 'setting', 'seed']
    for _, twins in runs.groupby(alike, dropna=False, sort=False):
        loss = twins.test_loss.fillna(math.inf)
        worst = twins.loc[loss.idxmax()]
        if len(twins) == 1 or loss.max() - loss.min() <= farthest:
            continue
        farthest = loss.max() - loss.min()
        ends = []
        for run in twins.itertuples():
            vector = f' and a vector of norm {run.mu_shift:g}' if twins.mu_shift.nunique() > 1 else ''
            mean = '' if math.isnan(run.logit_mean) else f' (mean logit {run.logit_mean:,.0f})'
            ends.append(f'{run.test_loss:.2f} with {run.logits} logits{vector}{mean}')
        name = NAMES.get(worst.method, worst.method) + worst.setting
        said = f'By rounding alone, {name} at η = {worst.lr:g} ends at a test loss of {", ".join(ends)}.'
        beside = ['size', 'weight_tying', 'lr', 'seed', 'setting', 'mu_shift', 'logits']
        cures = runs[runs.method.isin(CURES) & (runs[beside] == worst[beside]).all(axis=1)]
        cures = [f'{run.variant.removesuffix(run.rounding)} {run.test_loss:.2f}' for run in cures.itertuples()
                 if run.test_loss < loss.max()]
        said += f' With {" or ".join(cures)}, in {worst.logits} too.' if cures else ''
    return said


def rounding_table(runs):
    """What rounding does: all runs of the places where some differ by it alone, a line each, or None."""
    runs = pd.concat([rows for rows, *_ in places(runs) if with_rounding(rows)] or [runs[:0]])
    if runs.empty:
        return None
    runs = runs.assign(logits=runs.logits_dtype.map({'float32': 'fp32'}).fillna('BF16'))
    columns = {'run': runs.variant, 'size': runs['size'], 'tying': runs.weight_tying.map(TYING),
               'η': runs.lr.map('{:g}'.format), 'seed': runs.seed.map('{:.0f}'.format), 'logits': runs.logits,
               'vector': runs.mu_shift.map('{:g}'.format), 'test loss': runs.test_loss.map('{:.2f}'.format),
               'mean logit': runs.logit_mean.map('{:,.1f}'.format)}
    caption = ('All runs at a learning rate at which some differ only in the precision of the logits, or in '
               'a vector of this norm that was added to all output embeddings at the start. The mean of the '
               'embeddings adds one number to all logits of a position, which changes no probability or '
               'gradient but by rounding: between 512 and 1,024 BF16 has only the multiples of 4. All began '
               f'at {runs.init_loss.min():.2f} to {runs.init_loss.max():.2f}. nan: not finite, or unknown.')
    return dict(title='What rounding does', rows=pd.DataFrame(columns), message=said_of_rounding(runs),
                caption=caption)


def seed_table(runs):
    """Test losses minus the baseline's of the same seed, where a variant shares two with it, or None."""
    alike = ['size', 'weight_tying', 'lr', 'setting', 'rounding', 'seed']
    baseline = runs[runs.method == 'baseline'][[*alike, 'test_loss']]
    pairs = runs[runs.method != 'baseline'].merge(baseline, on=alike, suffixes=('', '_of_baseline'))
    cells = {}
    place = ['size', 'weight_tying', 'lr', 'variant']
    for (size, tying, lr, variant), rows in pairs.groupby(place, sort=False):
        gaps = (rows.test_loss - rows.test_loss_of_baseline).dropna()
        if len(gaps) > 1:
            mean, low, high = (round(x, 3) + 0.0 for x in (gaps.mean(), gaps.min(), gaps.max()))  # no -0.0
            cells[size, TYING[tying], f'{lr:g}', variant] = f'{mean:+.3f} [{low:+.3f}, {high:+.3f}]'
    if not cells:
        return None
    table = grid(cells, 'N', 'tying', 'η')
    return dict(title='Test loss minus that of the baseline of the same seed', rows=table, caption=(
        'In nats, means over the seeds that both have [lowest, highest]; such runs have the same data in the '
        'same order. Below 0, the method is better. -: fewer than two such seeds.'))


def run_table(runs, own_statistics):
    """A line for each run, a column for each of FORMATS that is known of a run, and for a fork's own."""
    formats = FORMATS | dict.fromkeys(own_statistics, '{:.4g}')
    known = runs[[*formats]].dropna(axis='columns', how='all')
    cells = known.apply(lambda column: column.map(formats[column.name].format))
    cells = cells.replace({'nan': '', 'nan%': '', '-0.000': '0.000'})
    said = []
    for (size, tying), rows in runs.dropna(subset='test_loss').groupby(['size', 'weight_tying'], sort=False):
        best = rows.loc[rows.test_loss.idxmin()]
        said.append(f'{best.variant} of {size}, {TYING[tying]}, at η = {best.lr:g}: {best.test_loss:.4f}')
    message = f'Lowest test loss: {"; ".join(said) or "none was finite"}.'
    caption = ' '.join(f'{name}: {text}.' for name, text in EXPLAINED.items() if name in cells)
    return dict(title='All runs', rows=cells, message=message, caption=caption)


def make_tables(runs, methods, several, own_statistics=()):
    """
    All tables that there are data for, of runs and of lrs.csv's rows of methods and of several λ: what
    rounding does, LRS of each tying, differences between runs of one seed, and, always, all runs.
    """
    tables = [rounding_table(runs)]
    for tying, word in TYING.items():
        title = f'Learning rate sensitivity (LRS), {word}'
        tables.append(lrs_table(methods[methods.weight_tying == tying], 'variant', title))
        for (method, setting), rows in several[several.weight_tying == tying].groupby(
                ['method', 'setting'], sort=False):
            rows = rows.sort_values('lam', kind='stable').assign(lam=rows.lam.map('{:g}'.format))
            name = f'{NAMES.get(method, method)}{setting}'
            tables.append(lrs_table(rows, 'lam', f'{title}, of {name} for several λ'))
    tables += [seed_table(runs), run_table(runs, own_statistics)]
    return [table for table in tables if table]


# -------- figures: each function draws one, or returns None without data
STYLES = {  # marker and line of a size; of others like those of tiny
    '16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
    '221M': ('X', '-')}
LABELS = {
    'lr': r'learning rate $\eta$', 'capped_loss': 'test loss', 'val_loss': 'val loss',
    'loss': 'training loss', 'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
    'logit_mean': r'mean logit $\bar{l}$', 'logit_mean_spread': r'spread of the mean logit',
    'logit_std': r'standard deviation $\sigma_l$', 'logit_absmax': r'largest logit, $\max_i |l_i|$',
    'r_emb': r'$r_{\rm emb}$', 'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}

plt.switch_backend('agg')  # files alone, no windows
plt.rcParams.update({
    'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
    'axes.spines.top': False, 'axes.spines.right': False, 'figure.dpi': 160})


def with_colors(rows, variants):
    """Rows with the color of their variant, of all these variants: each has its own, of some 40."""
    colors = {NAMES.get(method, method): color for method, color in COLORS.items()}
    others = [variant for variant in dict.fromkeys(variants) if variant not in colors]
    colors |= {variant: OTHERS[i % len(OTHERS)] for i, variant in enumerate(others)}
    return rows.assign(color=rows.variant.map(colors))


def draw_lines(ax, rows, y):
    """y over lr, a line for each size and variant: means over the seeds, bars to the lowest and highest."""
    for (size, _), part in rows.groupby(['size', 'variant'], sort=False):
        seeds = part.groupby('lr')
        mean = seeds[y].mean()
        color = part.color.iloc[0]
        marker, dash = STYLES.get(size, ('o', '-'))
        faces = [color if filled == 1 else 'white' for filled in seeds.behind.max()]
        ax.plot(mean.index, mean, linestyle=dash, color=color, linewidth=1.2)
        ax.vlines(mean.index, seeds[y].min(), seeds[y].max(), color=color, linewidth=0.8)
        ax.scatter(mean.index, mean, 25, marker=marker, edgecolors=[color], linewidths=1, zorder=3,
                   facecolors=faces, clip_on=False)
    ax.set(xscale='log', xlabel=LABELS['lr'], ylabel=LABELS.get(y))
    rates = sorted(rows.lr.unique())
    ax.set_xticks(rates, [f'{lr:g}' for lr in rates])
    ax.xaxis.set_minor_formatter(NullFormatter())


def draw_curves(ax, rows, curves, y):
    """y over the steps as logged, a line for each run that has it."""
    for run in rows.itertuples():
        curve = curves[run.run].dropna(subset=y) if y in curves[run.run] else curves[run.run][:0]
        if len(curve):
            ax.plot(curve.step, curve[y], color=run.color, label=run.variant, linewidth=1)
    if ax.lines:
        stretch(ax, np.concatenate([line.get_ydata() for line in ax.lines]))
    ax.set(title=LABELS[y], xlabel='step')


def stretch(ax, values):
    """A log y axis for positive values over a factor of ten or more; linear up to 1 for others beyond 100."""
    low, high = values.min(), values.max()
    if low > 1e-3 and high > 10 * low:
        ax.set_yscale('log')
        ax.yaxis.set(major_formatter='{x:g}', minor_locator=LogLocator(subs=(2, 5)), minor_formatter='{x:g}')
    elif low < 1e-3 and max(-low, high) > 100:
        ax.set_yscale('symlog', linthresh=1)
        ax.autoscale(axis='y')  # or its margins would be those of a linear axis


def legend(figure, rows):
    """Below the figure, if there are several: the colors of variants, markers of sizes, fillings; seeds."""
    handles = [Line2D([], [], color=run.color, label=run.variant)
               for run in rows.drop_duplicates('variant').itertuples()]
    sizes = rows['size'].unique()
    for size in sizes if len(sizes) > 1 else ():
        marker, dash = STYLES.get(size, ('o', '-'))
        handles.append(Line2D([], [], color='black', marker=marker, mfc='white', ls=dash, label=size))
    if (rows.behind == 1).any():
        for label, face in (('over 1% above the best method', 'black'), ('within 1% of it', 'white')):
            handles.append(Line2D([], [], color='black', marker='o', mfc=face, ls='', label=label))
    several = rows.duplicated(['size', 'variant', 'lr']).any()
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4,
                  title='points: means over seeds; bars: from the lowest to the highest' if several else None)


def legend_of_lines(figure, ax):
    """Below the figure: the color of each variant that has a line on ax."""
    handles = {line.get_label(): line for line in ax.lines}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


def four_panels(rows, columns):
    """A panel for each of four columns, against the learning rate."""
    rows = rows[rows.test_loss.notna()]  # the model of others is of their last checkpoint, of step 0 even
    if rows.lr.nunique() < 2 or rows[columns].isna().all(axis=None):
        return None
    figure, axes = plt.subplots(2, 2, figsize=(7.5, 6.2))
    for ax, column in zip(axes.flat, columns, strict=True):
        draw_lines(ax, rows.dropna(subset=column), column)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        else:
            stretch(ax, rows[column])
    legend(figure, rows)
    return figure


def summary(rows):
    rows = rows[rows['size'] == rows['size'].iloc[0]]
    rows = rows[rows.variant.isin(['baseline', NAMES['mu_loss'], NAMES['mu_centering']])]
    if rows.variant.nunique() < 2 or rows.lr.nunique() < 2 or rows.logit_mean.isna().all():
        return None
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
    for ax, column in zip(axes, ['capped_loss', 'logit_mean'], strict=True):
        draw_lines(ax, rows.assign(size='').dropna(subset=column), column)
    legend(figure, rows)
    return figure


def loss(rows):
    """Figures 2 and 9: on the left at all learning rates; on the right, of each size, at the largest two."""
    rates = sorted(rows.lr.unique())
    if len(rates) < 2:
        return None
    sizes = rows['size'].unique() if len(rates) > 2 else ()
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(5.1 + 1.5 * len(sizes), 3.8), sharey=True,
                                width_ratios=[3] + [1] * len(sizes), squeeze=False)
    draw_lines(axes[0, 0], rows, 'capped_loss')
    for ax, size in zip(axes[0, 1:], sizes, strict=True):
        draw_lines(ax, rows[(rows['size'] == size) & rows.lr.isin(rates[-2:])], 'capped_loss')
        ax.set(title=size, ylabel='', xlabel=r'$\eta$')
        ax.minorticks_off()
    legend(figure, rows)
    return figure


def statistics(rows):
    return four_panels(rows, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax'])


def fact_3(rows):
    return four_panels(rows[rows.method == 'baseline'], ['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])


def rounding(rows, curves):
    if not with_rounding(rows):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.5))
    for ax, column in zip(axes, ['loss', 'logit_mean'], strict=True):
        draw_curves(ax, rows, curves, column)
    return legend_of_lines(figure, axes[0])


def training(rows, curves):
    evaluations = [curves[run].val_loss.count() for run in rows.run if 'val_loss' in curves[run]]
    columns = ['val_loss' if evaluations and np.median(evaluations) > 1 else 'loss', 'mu_norm', 'logit_mean',
               'logit_mean_spread', 'logit_std', 'logit_absmax']
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), sharex=True)
    for ax, column in zip(axes.flat, columns, strict=True):
        draw_curves(ax, rows, curves, column)
    return legend_of_lines(figure, axes[0, 0])  # of the loss


FIGURES = [  # function, title, caption
    (rounding, 'What rounding does',
     'Training loss and mean logit as logged, a line for each run. Equal lines hide each other.'),
    (summary, 'Test loss and mean logit against learning rate',
     'Of the first size. A loss above the one at initialisation is drawn as that one. Filled: what the paper '
     'calls diverged: another method was over 1% better there.'),
    (loss, 'Test loss against learning rate',
     'A loss above the one at initialisation is drawn as that one. Small panels: the two largest learning '
     'rates. Filled: what the paper calls diverged: another method was over 1% better there. (Figures 2, 9)'),
    (statistics, 'Mean embedding and logits against learning rate',
     'The norm of the mean μ of the output embeddings; of the logits of a position their mean, standard '
     'deviation and largest |logit|, means over the test positions of runs that were finite. (Figure 4)'),
    (fact_3, 'What centering would change in the baseline',
     'r_emb: the norm of an output embedding minus μ, divided by that without. r_cos, r_log: likewise for '
     'the largest |cosine| with a hidden state h and the largest |logit| of a position. Below 1, the dotted '
     'line, centering lowers it. cos(μ, h): the cosine of the mean embedding and h. Means over the '
     'vocabulary or test positions, of runs that were finite. (Figure 5)'),
    (training, 'Training curves',
     'A line for each run, as logged: its loss; the norm of the mean μ of the output embeddings; of the '
     'logits of a position their mean, how that varies, their standard deviation and the largest |logit|. '
     'Of a log of more than 1,000 lines every second, third, ... is drawn. Equal lines hide each other.')]


def draw_figures(compared, everything, curves, folder):
    """
    Draws what there are data for, as PNG files in `folder` -> their titles, captions and files: of the runs
    that are `compared` by learning rate, and of `everything` that has a curve. What an earlier analysis drew
    there goes.
    """
    curves = dict(iter(curves[curves.step > 0].groupby('run'))) if len(curves) else {}
    logged = everything[everything.run.isin(curves)]
    variants = [*everything.variant]
    compared, logged = with_colors(compared, variants), with_colors(logged, variants)
    figures = []
    for function, title, caption in FIGURES:
        for old in folder.glob(f'{function.__name__}_*.png'):
            old.unlink()
        if function in (rounding, training):
            drawn = [(what, name, function(rows, curves)) for rows, what, name in places(logged)]
        else:
            drawn = [(word, word, function(rows)) for tying, word in TYING.items()
                     if len(rows := compared[compared.weight_tying == tying])]
        for what, name, figure in drawn:
            if figure:
                path = folder / f'{function.__name__}_{name}.png'
                path.parent.mkdir(exist_ok=True)
                figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
                figure.savefig(path, bbox_inches='tight')  # or a wide legend would be cut off
                plt.close(figure)
                figures.append(dict(title=f'{title}, {what}', caption=caption, file=path))
    return figures


# -------- the pages
DESCRIBED = ['size', 'weight_tying', 'method', 'lr', 'seed', 'steps', 'batch_size', 'block_size', 'mu_shift',
             'cap', 'dtype', 'logits_dtype', 'device', 'data']
STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 76rem; padding: 0 1rem; font-family: sans-serif; }
  img { max-width: 100%; } div { overflow-x: auto; }
  td, th { padding: .1rem .3rem; text-align: right; font-size: .75rem; white-space: nowrap; }
  td:first-child, th:first-child { position: sticky; left: 0; background: white; text-align: left; }
</style>'''


def describe(runs):
    """Lines that say what was run, and what too few rates, steps or seeds cannot say."""
    named = runs.assign(weight_tying=runs.weight_tying.map(TYING),
                        method=runs.method.map(NAMES).fillna(runs.method))
    facts = []
    for column in named.columns.intersection(DESCRIBED, sort=False):
        values = named[column].dropna().unique()
        values = [x if isinstance(x, str) else f'{x:.12g}' for x in values if x != '']
        if any(value != '0' for value in values):  # a seed of 0 alone is an unknown one
            facts.append(f'{column}: {", ".join(values)}')
    lines = [f'{len(runs)} run{"s" * (len(runs) > 1)}. {"; ".join(facts)}.']
    of_variant = runs.groupby(['size', 'weight_tying', 'variant'], sort=False)
    if of_variant.lr.nunique().max() < MIN_RATES:
        line = f'No learning rate sensitivity (LRS): it needs {MIN_RATES} learning rates of one setting'
        settings = [x.strip(', ') for x in dict.fromkeys(runs.setting + runs.rounding) if x]
        split = runs.lr.nunique() >= MIN_RATES and settings  # as by --min_lr = lr / 10
        lines.append(f'{line}; here settings differ: {"; ".join(settings[:4])}.' if split else f'{line}.')
    if runs.steps.max() < 10_000:
        lines.append(f'{runs.steps.max():,g} steps are too few to rank methods; the paper has 100,000.')
    seeds = of_variant.seed.nunique()
    few = dict.fromkeys(name for *_, name in seeds.index[seeds < 3])
    if few:
        which = '' if (seeds < 3).all() else f' ({"; ".join([*few][:6])}{"; ..." * (len(few) > 6)})'
        lines.append(f'With fewer than three seeds{which}, a difference between methods may be chance.')
    return lines


def write_markdown(path, tables):
    texts = []
    for table in tables:
        align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
        rows = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
        texts.append(f'### {table["title"]}\n\n{rows}\n\n{table["caption"]}\n')
    path.write_text('\n'.join(texts), encoding='utf-8')


def marked(text):
    """Text -> HTML, with the marks of tables alone: <b>, <u> and <sub>."""
    return re.sub(r'&lt;(/?(b|u|sub))&gt;', r'<\1>', html.escape(str(text)))


def write_page(path, items, lines):
    """
    Writes report.html, which needs no other file, of tables and figures. `lines` say what was run and what is
    missing: they come first, but after the first table if that has a message.
    """
    parts = []
    for item in items:
        part = f'<h2>{html.escape(item["title"])}</h2>\n'
        if 'message' in item:
            part = f'<p><b>{html.escape(item["message"])}</b></p>\n' + part
        if 'rows' in item:
            rows = item['rows'].map(marked).rename(columns=lambda name: marked(name).replace('_', '_<br>'))
            part += f'<div>{rows.to_html(index=False, escape=False, border=0)}</div>\n'
        else:
            image = base64.b64encode(item['file'].read_bytes()).decode()
            part += f'<img src="data:image/png;base64,{image}">\n'
        parts.append(f'{part}<p>{html.escape(item["caption"])}</p>\n')
    paragraphs = ''.join(f'<p>{html.escape(line)}</p>\n' for line in lines)
    parts.insert(1 if 'message' in items[0] else 0, paragraphs)
    page = f'{STYLE}<h1>{html.escape(path.resolve().parent.name)}</h1>\n{"".join(parts)}'
    path.write_text(page, encoding='utf-8')
