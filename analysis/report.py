"""
The csv files of a sweep -> the paper's tables and figures, tables.md and report.html. It needs no run and no
checkpoint: a results.csv made elsewhere will do as well.

    results.csv        a row for each run: its settings, its test loss and the statistics of its model
    curves.csv         a row for each evaluation of a run and of at most 1,000 lines of its log
"""
import base64
import html
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from model import METHODS, SIZES
from train import MAY_CHANGE, check

# -------- the csv files
RESULTS = [
    'run', 'method', 'size', 'n_params', 'weight_tying', 'lam', 'cap', 'lr', 'seed', 'steps', 'dtype',
    'logits_dtype', 'mu_shift', 'init_from', 'init_loss', 'test_loss', 'model_step', 'mu_norm',
    'mean_share', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax', 'logit_max',
    'cos_mu_h', 'r_emb', 'r_cos', 'r_log', 'r_emb_below_1', 'r_cos_below_1',
    'r_log_below_1_too', 'train_seconds', 'tokens_per_second', 'device']
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # other cells may be empty: unknown
CURVES = ['run', 'step', 'loss', 'val_loss', 'test_loss', 'lr', 'mu_norm', 'logit_mean', 'logit_mean_spread',
          'logit_absmax']
# Settings that name a run or change no loss. The runs of one size share all others, also a fork's flags.
MAY_DIFFER = MAY_CHANGE | {'method', 'size', 'weight_tying', 'lam', 'cap', 'lr', 'seed', 'mu_shift',
                           'logits_dtype', 'init_from', 'log_every', 'eval_every', 'eval_tokens'}
TEXT_COLUMNS = {'run', 'method', 'size', 'dtype', 'logits_dtype', 'init_from', 'device'}

TYING = {0: 'untied', 1: 'tied'}
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay", 'max_z_loss': 'max-z loss',
    'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.'}
COLORS = {  # the first six are the paper's; other methods and λ get the next of matplotlib's
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945', 'adamw_decay': '#393B79', 'max_z_loss': '#17BECF',
    'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22'}


def read_csv(path, columns, required=('run',)):
    """These columns of a csv file, NaN for a number that is not known or finite."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).fillna('')
    except ValueError as error:  # it is no csv
        check(False, f'{path}: {error}')
    missing = [name for name in required if name not in rows]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(required)}')
    rows = rows.reindex(columns=columns, fill_value='').replace({'True': '1', 'False': '0'})
    numbers = [name for name in columns if name not in TEXT_COLUMNS]
    optional = [name for name in numbers if name not in required]
    rows[optional] = rows[optional].replace('', 'nan')  # a test_loss must say so: nan if not finite
    return rows.astype(dict.fromkeys(numbers, float)).replace([math.inf, -math.inf], math.nan)


def check_runs(ok, runs, message):
    """Unless all runs are `ok`, ends the program with the name of the first that is not, and why."""
    check(ok.all(), f'{runs.run[ok.idxmin()]}: {message}')


def check_comparable(runs, settings):
    """Refuses runs of one size whose losses are not to be compared: they differ in one of these settings."""
    for name in sorted(settings - MAY_DIFFER):
        expected = runs.groupby(['size', 'weight_tying'])[name].transform('first')
        check_runs(runs[name].isna() | (runs[name] == expected), runs,
                   f'another {name} than other runs of its size; they should be analysed apart')


def name_variants(runs):
    """Adds each run's name, which is its method and where it leaves the paper's setting, and its color."""
    beside_bf16 = (runs.logits_dtype == 'bfloat16').any()  # else fp32 is nothing unusual
    runs['fp32_head'] = beside_bf16 & (runs.logits_dtype == 'float32')
    other_lam = (runs.lam >= 0) & (runs.lam != runs.method.map(METHODS))
    other_cap = (runs.cap > 0) & ~((runs.method == 'soft_capping') & (runs.cap == 30))
    name = runs.method.map(NAMES).fillna(runs.method)
    lam = runs.lam.map(' λ={:g}'.format).where(other_lam, '')
    cap = runs.cap.map(', cap {:g}'.format).where(other_cap, '')
    planted = runs.mu_shift.map(', shift {:g}'.format).where(runs.mu_shift > 0, '')
    head = runs.fp32_head.map({True: ', fp32 head', False: ''})
    source = (', from ' + runs.init_from).where(runs.init_from != '', '')
    setting = cap + planted + head + source
    runs['variant'] = name + lam + setting
    runs['plain_name'] = name + setting
    runs['but_for_rounding'] = name + lam + cap + source  # runs that differ by rounding at most share it
    runs['in_paper_setting'] = setting == ''
    colors = {NAMES.get(method, method): color for method, color in COLORS.items()}
    others = [x for x in (name + lam).unique() if x not in colors]
    colors |= {x: f'C{(len(colors) + i) % 10}' for i, x in enumerate(others)}  # matplotlib's
    runs['color'] = (name + lam).map(colors)


def sort_runs(runs):
    """In the paper's order: untied first, sizes and methods as in model.py, others after them."""
    order = {name: i for i, name in enumerate([*SIZES, *METHODS])}
    by = ['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']
    return runs.sort_values(by, ignore_index=True, key=lambda column: (
        column.map(order).fillna(99) if column.name in ('size', 'method') else column))


def read_runs(path):
    """A csv of runs, with what its empty cells mean. Refuses runs that do not belong in one table."""
    runs = read_csv(path, RESULTS, REQUIRED)
    check(len(runs), f'{path}: has no runs')
    runs['run'] = runs.run.where(runs.run != '', [f'line {i}' for i in range(2, len(runs) + 2)])
    check_runs(~runs.run.duplicated(), runs, 'a second row of this run')
    check_comparable(runs, {'steps', 'n_params', 'dtype'})
    for name in ('lr', 'lam'):  # they are one if they are written alike: 0.3 and 0.30000000000000004
        runs[name] = runs[name].map('{:g}'.format).astype(float)
    runs['lam'] = runs.lam.fillna(runs.method.map(METHODS).astype(float))
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})
    name_variants(runs)
    check_runs(~runs.duplicated(['variant', 'size', 'weight_tying', 'lr', 'seed']), runs,
               'a second run of its method, size, lr and seed; what else differs should be analysed apart')

    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)  # min(L, L0) of Eq. 21, L0 if L is nan
    check_runs(runs.capped_loss.notna() | (runs.init_from != ''), runs,
               'a test_loss of nan needs an init_loss, which LRS counts for it')
    in_paper_setting = runs[runs.in_paper_setting]
    runs['behind'] = behind(at_default_lam(in_paper_setting))  # NaN where it is not compared
    runs['behind_lam'] = behind(of_several_lam(in_paper_setting))
    return sort_runs(runs)


def read_curves(path, runs):
    """The rows of the curves.csv beside a results.csv, if it is there, with columns of their runs."""
    curves = path.with_name('curves.csv')
    there = path.name == 'results.csv' and curves.exists()
    rows = read_csv(curves, CURVES) if there else pd.DataFrame(columns=CURVES)
    rows = rows.drop(columns='lr')  # of the step; lr is the run's here
    return runs.merge(rows, on='run', suffixes=('_at_the_end', ''))


def at_default_lam(rows):
    """Where a method has its default λ, without its rows of other λ, which have a table of their own."""
    is_default = rows.variant == rows.plain_name
    place = [rows.method, rows['size'], rows.weight_tying]
    return rows[is_default | ~is_default.groupby(place).transform('any')]


def of_several_lam(rows):
    """The rows of methods with several λ."""
    return rows[rows.groupby(['weight_tying', 'plain_name']).lam.transform('nunique') > 1]


def behind(runs):
    """
    1 for runs whose method's test loss, a mean over seeds in nats per token, is not finite or more
    than 1% above the lowest of all methods in `runs` at that size, tying and learning rate; else 0.
    So the authors mark what "diverged": `_div` in results/Analyze_All_Models_Performance.ipynb at
    a1b753c of github.com/flxst/output-embedding-centering.
    """
    place = ['size', 'weight_tying', 'lr']
    loss = runs.groupby([*place, 'variant']).test_loss.transform(lambda x: x.mean(skipna=False))
    lowest = loss.groupby([runs[name] for name in place]).transform('min')
    return 1.0 - ((loss - lowest) / lowest <= 0.01)  # of NaN: 1


# -------- tables
MIN_RATES = 3  # with fewer learning rates there is no LRS table
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'mu_norm': '{:.4g}',
    'mean_share': '{:.3f}', 'logit_mean': '{:.4g}', 'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}',
    'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}', 'r_cos': '{:.3f}', 'r_log': '{:.3f}',
    'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}', 'r_log_below_1_too': '{:.1%}'}
# the LRS of the paper's tables, and what they underline, by (tying, size, variant)
PUBLISHED = pd.read_csv(Path(__file__).with_name('paper_lrs.csv'), index_col=['tying', 'size', 'variant'])


def grid(cells):
    """Cells by (line, column) -> a table, with - where there is no cell."""
    return cells.unstack(sort=False).fillna('-').rename_axis(columns=None).reset_index()


def lrs_table(lrs, columns, title):
    """Table 2, 5 or 4, of rows of lrs.csv: a line for each size, a column for each of `columns`, or None."""
    if lrs.n_lrs.max() < MIN_RATES:
        return None
    complete = lrs.rates == lrs.rates[lrs.n_lrs == lrs.n_lrs.max()].mode()[0]
    best = lrs.lrs_n1 == lrs.lrs_n1.where(complete).groupby(lrs['size']).transform('min')
    cells, lowest, highest = (
        lrs[column].map('{:.3f}'.format) for column in ('lrs_n1', 'lrs_n1_lowest', 'lrs_n1_highest'))
    cells = cells.where(complete, cells + ' (' + lrs.n_lrs.astype(str) + ' lr)')
    cells = cells.mask(lrs.behind == 0, '<u>' + cells + '</u>')
    cells = cells.mask(best, '<b>' + cells + '</b>')
    cells = cells.mask(lrs.seeds > 1, cells + ' [' + lowest + ', ' + highest + ']')
    cells = cells.mask(lrs.published.notna(), cells + lrs.published.map(' <sub>{:.3f}</sub>'.format))
    cells = cells.where(lrs.lrs_n1.notna(), '-').set_axis(pd.MultiIndex.from_frame(lrs[['size', columns]]))
    return dict(title=title, rows=grid(cells).rename(columns={'size': 'N'}), caption=(
        'How far the test losses at the n learning rates lie above the lowest of them, summed / (n - 1); '
        'means over seeds [lowest, highest]. Bold: the lowest of its size, which is best. Underlined: '
        'at every learning rate within 1% of the best method, of several λ: of the best method and λ. '
        "Small: the paper's, of one seed. (n lr): over other learning rates than most. "
        '-: no runs, or nothing was learned at any learning rate.'))


def rounding_tables(runs):
    """A table of runs that differ in an added vector or in the precision of the logits alone, or none."""
    logits = runs.logits_dtype.map({'bfloat16': 'BF16 logits', 'float32': 'fp32 logits'}).fillna('logits')
    vector = runs.mu_shift.map(', vector of norm {:g}'.format).where(runs.mu_shift > 0, '')
    runs = runs.assign(case=logits + vector, tying=runs.weight_tying.map(TYING), η=runs.lr.astype(str))
    setting = ['but_for_rounding', 'size', 'tying', 'η']
    runs = runs[runs.groupby(setting).case.transform('nunique') > 1]
    if runs.empty:
        return []
    means = runs.groupby([*setting, 'case'], sort=False).test_loss.agg(lambda x: x.mean(skipna=False))
    table = grid(means.map('{:.2f}'.format)).rename(columns={'but_for_rounding': 'method'})
    worst = means.fillna(math.inf).idxmax()  # the worst is nan, where a run was not finite
    others = means.drop(worst)
    return [dict(title='What rounding does', rows=table, caption=(
        'The mean of the output embeddings adds one number to all logits of a position, which changes no '
        'probability or gradient but by rounding: between 512 and 1,024 BF16 has only the multiples of 4. '
        f'<b>{worst[0]} with {worst[-1]} ends at a test loss of {means[worst]:.2f}, the others at '
        f'{others.min():.2f} to {others.max():.2f}</b>; all began at {runs.init_loss.min():.2f} to '
        f'{runs.init_loss.max():.2f}. Test losses are means over seeds, at a learning rate η; nan: a run '
        'was not finite. A vector was added to all output embeddings at the start. -: no run.'))]


def run_table(runs):
    """A line for each run, a column for each of FORMATS that is known of a run."""
    known = runs[[*FORMATS]].dropna(axis='columns', how='all')
    cells = known.apply(lambda column: column.map(FORMATS[column.name].format)).replace(['nan', 'nan%'], '')
    return dict(title='All runs', rows=cells, caption=(
        "Also those outside the paper's setting, which LRS leaves out. behind: 1 if its method's test "
        'loss, a mean over seeds, is not finite or more than 1% above the lowest of the methods at its '
        'size, tying and learning rate; empty: not compared. model_step: of the model measured. '
        'mean_share: V‖μ‖² / ‖E‖², 1 if all embeddings are equal. r_log_below_1_too: of the '
        'positions with r_cos < 1, the share with r_log < 1.'))


def make_tables(runs, lrs):
    """All tables that there are data for: LRS and λ of each tying, and all runs."""
    tables = []
    for tying, part in lrs.groupby('weight_tying'):
        title = f'Learning rate sensitivity (LRS), {TYING[tying]}'
        tables.append(lrs_table(at_default_lam(part), 'variant', title))
        for name, rows in of_several_lam(part).groupby('plain_name', sort=False):
            rows = rows.sort_values('lam', kind='stable').assign(
                lam=rows.lam.map('{:g}'.format), behind=rows.behind_lam)
            tables.append(lrs_table(rows, 'lam', f'{title}, of {name} for several λ'))
    return [table for table in (*tables, run_table(runs)) if table]


# -------- figures
# A function for each: its name is the file's, its docstring the title and the caption. None without data.
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


def draw_lines(ax, rows, y):
    """y over lr, a line for each size and variant: means over the seeds, bars to the lowest and highest."""
    for (size, _), part in rows.groupby(['size', 'variant'], sort=False):
        seeds = part.groupby('lr')
        mean = seeds[y].mean()
        color = part.color.iloc[0]
        marker, dash = STYLES.get(size, ('o', '-'))
        faces = seeds.behind.max().map({1: color}).fillna('white')
        ax.plot(mean.index, mean, linestyle=dash, color=color, linewidth=1.2)
        ax.vlines(mean.index, seeds[y].min(), seeds[y].max(), color=color, linewidth=0.8)
        ax.scatter(mean.index, mean, 25, marker=marker, edgecolors=color, linewidths=1, zorder=3,
                   facecolors=list(faces), clip_on=False)
    ax.set(xscale='log', xlabel=LABELS['lr'], ylabel=LABELS.get(y))


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
    """Below the figure: the color of each variant, the marker of each size, what the fillings mean."""
    handles = [Line2D([], [], color=run.color, label=run.variant)
               for run in rows.drop_duplicates('variant').itertuples()]
    for size in rows['size'].unique():
        marker, dash = STYLES.get(size, ('o', '-'))
        handles.append(Line2D([], [], color='black', marker=marker, mfc='white', ls=dash, label=size))
    for label, face in (('over 1% above the best method', 'black'), ('within 1% of it', 'white')):
        handles.append(Line2D([], [], color='black', marker='o', mfc=face, ls='', label=label))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4,
                  title='points: means over seeds; bars: from the lowest to the highest')


def four_panels(rows, columns):
    """A panel for each of four columns, against the learning rate."""
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


def loss(rows):
    """
    Test loss against learning rate. A loss above the one at initialisation is drawn as that one. Small
    panels: the two largest learning rates. Filled: what the paper calls diverged, which says no more than
    that another method was better at that learning rate. (Figures 2 and 9 of the paper)
    """
    largest = sorted(rows.lr.unique())[-2:]
    if len(largest) < 2:
        return None
    sizes = rows['size'].unique()
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(5.1 + 1.5 * len(sizes), 3.8), sharey=True,
                                width_ratios=[3] + [1] * len(sizes))
    draw_lines(axes[0], rows, 'capped_loss')
    for ax, size in zip(axes[1:], sizes, strict=True):
        draw_lines(ax, rows[(rows['size'] == size) & rows.lr.isin(largest)], 'capped_loss')
        ax.set(title=size, ylabel='', xlabel=r'$\eta$')
        ax.set_xticks(largest, [f'{lr:g}' for lr in largest])
        ax.minorticks_off()
    legend(figure, rows)
    return figure


def statistics(rows):
    """
    Mean embedding and logits against learning rate. The norm of the mean μ of the output embeddings; of the
    logits of a position their mean, standard deviation and largest |logit|, as means over the test positions.
    (Figure 4 of the paper)
    """
    return four_panels(rows, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax'])


def fact_3(rows):
    """
    What centering would change in the baseline. r_emb: the norm of an output embedding minus μ, divided by
    that without. r_cos, r_log: likewise for the largest |cosine| with a hidden state h and the largest
    |logit| of a position. Below 1, the dotted line, centering lowers it; above, it raises it. cos(μ, h): the
    cosine of the mean embedding and h. Means over the vocabulary or test positions. (Figure 5 of the paper)
    """
    return four_panels(rows[rows.method == 'baseline'], ['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])


def training(curves):
    """
    Training curves. A row for each learning rate η, a line for each run: its loss; the norm of the mean μ
    of the output embeddings; of the logits their mean, how it varies over the positions, and the largest
    |logit| of a position, on average. All but a val loss are means of ten log lines. Dotted: fp32 logits.
    Dashed: a vector added at the start (shift), another start or cap. Equal lines hide each other.
    """
    curves = curves[curves.step > 0]
    loss = 'val_loss' if curves.groupby('run').val_loss.count().median() > 1 else 'loss'
    if curves[loss].isna().all():
        return None  # not finite from the first step on
    columns = [loss, 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_absmax']
    rates = curves.groupby('lr')
    figure, axes = plt.subplots(len(rates), len(columns), squeeze=False, sharex=True,
                                figsize=(13.5, 1 + 2 * len(rates)))
    for axes_of_rate, (lr, rows) in zip(axes, rates, strict=True):
        for ax, column in zip(axes_of_rate, columns, strict=True):
            for _, run in rows.dropna(subset=column).groupby('run', sort=False):
                smooth = run[column].rolling(10, min_periods=1, center=True).mean()
                first = run.iloc[0]
                dash = ':' if first.fp32_head else '-' if first.in_paper_setting else '--'
                ax.plot(run.step, run[column] if column == 'val_loss' else smooth, dash, color=first.color,
                        label=first.variant, linewidth=0.9)
            stretch(ax, rows[column])
            ax.set(xlabel='step', ylabel=LABELS[column])
        top = max(rows.groupby('run')[loss].quantile(0.97).max(), rows[loss].min() + 1)
        axes_of_rate[0].set(title=rf'$\eta$ = {lr:g}', ylim=(None, top))  # spikes may lie above it
    handles = {line.get_label(): line for ax in axes.flat for line in ax.lines}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


def draw_figures(csv, all_runs, folder, curves_first=False):
    """
    Draws what there are data for, as PNG files in `folder` -> their titles, captions and files. Training
    curves have all runs, the others those in the paper's setting, at the default λ if there are several.
    """
    all_curves = read_curves(csv, all_runs)
    figures = []
    for tying, word in TYING.items():
        runs, curves = (rows[rows.weight_tying == tying] for rows in (all_runs, all_curves))
        runs = at_default_lam(runs[runs.in_paper_setting])
        to_draw = [(loss, '', runs), (statistics, '', runs), (fact_3, '', runs)]
        of_sizes = [(training, size, rows) for size, rows in curves.groupby('size', sort=False)]
        for function, size, rows in of_sizes + to_draw if curves_first else to_draw + of_sizes:
            figure = function(rows)
            if figure:
                title, _, caption = ' '.join(function.__doc__.split()).partition('. ')
                title = ', '.join(filter(None, (title, size, word)))
                path = folder / ('_'.join(filter(None, (function.__name__, size, word))) + '.png')
                path.parent.mkdir(exist_ok=True)
                figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
                figure.savefig(path, bbox_inches='tight')  # or a wide legend would be cut off
                plt.close(figure)
                figures.append(dict(title=title, caption=caption, file=path))
    return figures


# -------- the pages
STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 68rem; font-family: sans-serif; } img { max-width: 100%; }
  div { max-height: 32rem; overflow: auto; } td, th { padding: .2rem .5rem; text-align: right; }
</style>'''


def describe(runs, data=()):
    """Lines that say what was run, on what data, and what too few rates, steps or seeds cannot say."""
    named = runs.assign(weight_tying=runs.weight_tying.map(TYING), data=', '.join(data),
                        method=runs.method.map(NAMES).fillna(runs.method))
    words = {'size': 'size', 'weight_tying': 'weight tying', 'method': 'method', 'lr': 'learning rate',
             'mu_shift': 'norm of an added vector', 'seed': 'seed', 'steps': 'steps', 'dtype': 'matmuls in',
             'logits_dtype': 'logits in', 'device': 'device', 'data': 'data'}
    facts = []
    for column, word in words.items():
        values = [f'{x:,g}' if isinstance(x, float) else x for x in named[column].dropna().unique() if x]
        facts += [f'{word}: {", ".join(values)}'] if values else []
    lines = [f'{len(runs)} runs. {"; ".join(facts)}.']
    setting = runs.groupby(['size', 'weight_tying', 'variant'])
    if setting.lr.nunique().max() < MIN_RATES:
        lines.append(f'No learning rate sensitivity (LRS): it needs {MIN_RATES} learning rates of a method.')
    if runs.steps.max() < 10_000:
        lines.append(f'{runs.steps.max():,g} steps are too few to rank methods; the paper has 100,000.')
    if setting.seed.nunique().max() < 3:
        lines.append('With fewer than three seeds, a difference between methods may be chance.')
    return lines


def write_markdown(path, tables):
    texts = []
    for table in tables:
        align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
        rows = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
        texts.append(f'### {table["title"]}\n\n{rows}\n\n{table["caption"]}\n')
    path.write_text('\n'.join(texts), encoding='utf-8')


def write_page(path, items, lines):
    """Writes report.html, which needs no other file. It opens with `lines`: what was run, what is missing."""
    page = f'{STYLE}<h1>{path.resolve().parent.name}</h1>\n'
    page += ''.join(f'<p>{html.escape(line)}</p>\n' for line in lines)
    for item in items:
        page += f'<h2>{item["title"]}</h2>\n<p>{item["caption"]}</p>\n'
        if 'rows' in item:
            page += f'<div>{item["rows"].to_html(index=False, escape=False, border=0)}</div>\n'
        else:
            image = base64.b64encode(item['file'].read_bytes()).decode()
            page += f'<img src="data:image/png;base64,{image}">\n'
    path.write_text(page, encoding='utf-8')
