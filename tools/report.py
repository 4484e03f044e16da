"""Tables, figures and a page of what analyze.py has read, named and compared. Nothing is decided here."""
import base64
import html
import math
import re

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

TYING = {0: 'untied', 1: 'tied'}
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
OTHERS = ['#000000', *(to_hex(color) for shade in range(4) for color in HUES[shade::4])]
PLACE = ['size', 'weight_tying', 'lr']  # of the runs that are compared
SAME = [*PLACE, 'setting', 'rounding', 'seed']  # of runs of several methods that differ in nothing else

# -------- tables: dicts of title, message, rows and caption
MIN_RATES = 3  # with fewer learning rates there is no LRS table
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'mu_norm': '{:.4g}',
    'mean_share': '{:.3f}', 'logit_mean': '{:.4g}', 'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}',
    'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}', 'r_cos': '{:.3f}', 'r_log': '{:.3f}',
    'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}', 'r_log_below_1_too': '{:.1%}'}
EXPLAINED = {  # columns of the table of runs
    'behind': '1 if the mean over seeds is over 1% above the lowest there, or not finite; empty: alone',
    'model_step': 'of the model measured', 'mean_share': 'V‖μ‖² / ‖E‖², 1 if all e_i are equal',
    'r_log_below_1_too': 'of the positions with r_cos < 1, the share with r_log < 1'}


def grid(cells, *names):
    """Cells {(line, ..., column): text}, what their lines are called -> a table, with - where none is."""
    table = pd.Series(cells).unstack(sort=False).fillna('-').rename_axis(index=names, columns=None)
    return table.reset_index()


def lrs_table(lrs, column, title):
    """
    Table 2, 5 or 4, of rows of lrs.csv: a line for each size, a column for each value of `column`, or None.
    Bold is a size's lowest LRS, as three digits show it, unless a rival had a seed as low as its highest.
    """
    if not lrs.n_rates.max() >= MIN_RATES:
        return None
    usual = lrs.rates[lrs.n_rates == lrs.n_rates.max()].mode()[0]
    cells, said = {}, []
    for size, rows in lrs.groupby('size', sort=False):
        shown = rows.lrs_n1.round(3).where(rows.rates == usual)
        best, rivals = rows[shown == shown.min()], rows[shown > shown.min()]
        overlap = (rivals.lrs_n1_lowest <= best.lrs_n1_highest.max()).any()
        winners = [] if overlap else [*best.variant]
        nothing = 'a tie, as ranges overlap' if overlap else 'nothing was learned, or at other rates'
        said.append(f'{size}, {", ".join(f"{name} {shown.min():.3f}" for name in winners) or nothing}')
        for run in rows.itertuples():
            cell = f'{run.lrs_n1:.3f}' + f' ({run.n_rates} lr)' * (run.rates != usual)
            if run.behind == 0:
                cell = f'<u>{cell}</u>'
            if run.variant in winners:
                cell = f'<b>{cell}</b>'
            if run.seeds > 1:
                cell += f' [{run.lrs_n1_lowest:.3f}, {run.lrs_n1_highest:.3f}]'
            cells[size, getattr(run, column)] = '-' if math.isnan(run.lrs_n1) else cell
    message = f'{title}, the lowest is best: {"; ".join(said)}.'
    return dict(title=title, message=message, rows=grid(cells, 'size'), caption=(
        'Lower is better, in nats: how far the test losses at the n learning rates lie above the lowest of '
        'them, summed / (n - 1); means over seeds [lowest, highest]. Bold: lowest, and no range of others '
        'reaches into its own. Underlined: within 1% of the best method (and λ) at every learning rate. '
        '(n lr): over other learning rates than most. -: no runs, or nothing was learned.'))


def seed_table(runs):
    """Test losses minus the baseline's of the same seed, where a variant shares two with it, or None."""
    baseline = runs[runs.method == 'baseline'][[*SAME, 'capped_loss']]
    pairs = runs[runs.method != 'baseline'].merge(baseline, on=SAME, suffixes=('', '_of_baseline'))
    pairs = pairs.assign(gap=pairs.capped_loss - pairs.capped_loss_of_baseline)
    gaps = pairs.groupby([*PLACE, 'variant'], sort=False).gap.agg(['mean', 'min', 'max', 'count'])
    gaps = gaps[gaps['count'] > 1].round(3) + 0.0  # never -0.000
    cells = {(size, TYING[tying], f'{lr:g}', variant): f'{mean:+.3f} [{lowest:+.3f}, {highest:+.3f}]'
             for (size, tying, lr, variant), mean, lowest, highest, _ in gaps.itertuples()}
    return cells and dict(
        title='Test loss minus that of the baseline of that seed', rows=grid(cells, 'size', 'tying', 'η'),
        caption='In nats, means over the seeds that both have [lowest, highest]. Below 0, the method is '
                'better. A loss above the one at initialisation counts as that one.')


def run_table(runs, own_statistics):
    """A line for each run, a column for each of FORMATS that is known of a run, and for a fork's own."""
    formats = FORMATS | dict.fromkeys(own_statistics, '{:.4g}')
    known = runs[[*formats]].dropna(axis='columns', how='all')
    cells = known.apply(lambda column: column.map(formats[column.name].format))
    cells = cells.replace({'nan': '', 'nan%': '', '-0.000': '0.000'})
    seeds = runs.groupby([*PLACE, 'variant'], sort=False).test_loss
    means = seeds.agg(lambda losses: losses.mean(skipna=False)).dropna()
    best = means[means.groupby(['size', 'weight_tying'], sort=False).idxmin()]
    said = [f'{variant} of {size}, {TYING[tying]}, at η = {lr:g}: {loss:.4f}'
            for (size, tying, lr, variant), loss in best.items()]
    message = f'Lowest test loss, a mean over seeds: {"; ".join(said) or "none was finite"}.'
    caption = ' '.join(f'{name}: {text}.' for name, text in EXPLAINED.items() if name in cells)
    return dict(title='All runs', rows=cells, message=message, caption=caption)


def make_tables(runs, methods, several, own_statistics):
    """All tables that there are data for, of runs and lrs.csv. The last, of all runs, is always there."""
    tables = []
    for tying, word in TYING.items():
        title = f'Learning rate sensitivity (LRS), {word}'
        tables.append(lrs_table(methods[methods.weight_tying == tying], 'variant', title))
        of_tying = several[several.weight_tying == tying].sort_values('lam', kind='stable')
        for (method, *flags), rows in of_tying.groupby(['method', 'setting', 'rounding'], sort=False):
            name = f'{title}, of {NAMES.get(method, method)}{"".join(flags)} for several λ'
            tables.append(lrs_table(rows.assign(lam=rows.lam.map('{:g}'.format)), 'lam', name))
    tables += [seed_table(runs), run_table(runs, own_statistics)]
    return [table for table in tables if table]


# -------- figures
STYLES = {  # marker and line of a size; of others like those of tiny
    '16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
    '221M': ('X', '-')}
LABELS = {
    'lr': r'learning rate $\eta$', 'capped_loss': 'test loss', 'loss': 'training loss',
    'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
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
        seeds, color = part.groupby('lr'), part.color.iloc[0]
        mean = seeds[y].mean()
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


def legend(figure, rows):
    """Below the figure, of what there are several: the colors of variants, markers of sizes, fillings."""
    handles = [Line2D([], [], color=run.color, label=run.variant)
               for run in rows.drop_duplicates('variant').itertuples()]
    sizes = rows['size'].unique()
    for size in sizes if len(sizes) > 1 else ():
        marker, dash = STYLES.get(size, ('o', '-'))
        handles.append(Line2D([], [], color='black', marker=marker, mfc='white', ls=dash, label=size))
    if (rows.behind == 1).any():
        for label, face in (('over 1% above the best method', 'black'), ('within 1% of it', 'white')):
            handles.append(Line2D([], [], color='black', marker='o', mfc=face, ls='', label=label))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4)


def against_lr(rows, columns):
    """A figure with a panel for each column, against the learning rate, or None without data."""
    rows = rows.dropna(subset=columns, how='all')
    if rows.lr.nunique() < 2:
        return None
    figure, axes = plt.subplots(math.ceil(len(columns) / 2), min(len(columns), 2), squeeze=False)
    figure.set_size_inches(7.5, 1.2 + 2.7 * len(axes))
    for ax, column in zip(axes.flat, columns, strict=True):
        # the model of a run that was not finite is of its last checkpoint, of step 0 even
        shown = rows if column == 'capped_loss' else rows[rows.test_loss.notna()]
        draw_lines(ax, shown.dropna(subset=column), column)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
        elif column != 'capped_loss':
            stretch(ax, shown[column])
    legend(figure, rows)
    return figure


def against_step(rows, curves, columns):
    """A figure with a panel for each column, against the step as logged, a line for each run."""
    figure, axes = plt.subplots(math.ceil(len(columns) / 3), min(len(columns), 3), sharex=True, squeeze=False)
    figure.set_size_inches(10, 3.2 * len(axes))
    for ax, column in zip(axes.flat, columns, strict=True):
        for run in rows.itertuples():
            curve = curves[run.run].dropna(subset=column)
            ax.plot(curve.step, curve[column], color=run.color, label=run.variant, linewidth=1)
        stretch(ax, pd.concat([curves[run][column] for run in rows.run]))
        ax.set(title=LABELS[column], xlabel='step')
    handles = {line.get_label(): line for line in axes[0, 0].lines}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


FILLED = ('Points: means over seeds; bars: lowest to highest. A loss above the one at initialisation is '
          'drawn as that one. Filled: what the paper calls diverged, over 1% above the best method there.')
FIGURES = {  # title, caption
    'summary': ('Test loss and mean logit, three methods', f'Of the first size. {FILLED}'),
    'loss': ('Test loss against learning rate', f"{FILLED} (The paper's Figures 2 and 9)"),
    'statistics': ('Mean embedding and logits against learning rate', 'Means over positions. (Figure 4)'),
    'fact_3': ('What centering would change in the baseline', (
        'r_emb: the norm of an embedding minus μ, divided by that without. r_cos, r_log: likewise the '
        'largest |cosine| with h, and |logit|. Below 1, the dotted line, centering lowers it. (Figure 5)')),
    'rounding': ('What rounding does', 'Equal lines hide each other.'),
    'training': ('Training curves', 'As logged, at most 1,000 lines of a log. Equal lines hide each other.')}


def draw_figures(compared, everything, curves, folder):
    """Draws runs `compared` by learning rate, and of `everything` curves -> titles, captions, files."""
    folder.mkdir(exist_ok=True)
    for old in [path for name in FIGURES for path in folder.glob(f'{name}_*tied*.png')]:
        old.unlink()  # of an earlier analysis
    figures = []

    def keep(name, place, figure):
        if figure:
            path = folder / f'{name}_{place.replace(", ", "_").replace("η = ", "lr")}.png'
            figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
            figure.savefig(path, bbox_inches='tight')  # or a wide legend would be cut off
            plt.close(figure)
            title, caption = FIGURES[name]
            figures.append(dict(title=f'{title}, {place}', caption=caption, file=path))

    compared = with_colors(compared, everything.variant)
    for tying, rows in compared.groupby('weight_tying'):
        word, first = TYING[tying], rows[rows['size'] == rows['size'].iloc[0]].assign(size='')
        three = first[first.variant.isin(['baseline', NAMES['mu_loss'], NAMES['mu_centering']])]
        keep('summary', word, against_lr(three, ['capped_loss', 'logit_mean']))
        keep('loss', word, against_lr(rows, ['capped_loss']))
        keep('statistics', word, against_lr(rows, ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']))
        baseline = rows[rows.method == 'baseline']
        keep('fact_3', word, against_lr(baseline, ['r_emb', 'cos_mu_h', 'r_cos', 'r_log']))

    columns = ['loss', 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax']
    curves = curves.reindex(columns=['run', 'step', *columns])
    curves = dict(iter(curves[curves.step > 0].groupby('run')))
    logged = with_colors(everything, everything.variant)[everything.run.isin(curves)]
    for (size, tying, lr), rows in logged.groupby(PLACE, sort=False):
        place = f'{size}, {TYING[tying]}, η = {lr:g}'
        alike = rows.groupby(['method', 'lam', 'setting', 'seed'], dropna=False)
        if alike.rounding.nunique().max() > 1:
            keep('rounding', place, against_step(rows, curves, ['loss', 'logit_mean']))
        keep('training', place, against_step(rows, curves, columns))
    return figures


# -------- the pages
DESCRIBED = '''size weight_tying method lr seed steps batch_size block_size final_gain cap dtype logits_dtype
               device'''.split()
STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 76rem; padding: 0 1rem; font-family: sans-serif; }
  h1 + p { font-weight: bold; } img { max-width: 100%; } div { overflow-x: auto; }
  td, th { padding: .1rem .3rem; text-align: right; font-size: .75rem; white-space: nowrap; }
  td:first-child, th:first-child { position: sticky; left: 0; background: white; text-align: left; }
</style>'''


def said_of_rounding(runs):
    """A line on the runs farthest apart by rounding alone, and runs of a cure beside the worse one."""
    runs = runs.assign(loss=runs.test_loss.fillna(1e9))
    alike = runs.groupby([*PLACE, 'method', 'lam', 'setting', 'seed'], dropna=False, sort=False)
    pairs = [rows.sort_values('loss').iloc[[-1, 0]] for _, rows in alike if len(rows) > 1]
    if not pairs:
        return []
    pair = max(pairs, key=lambda rows: rows.loss.iloc[0] - rows.loss.iloc[1])
    beside = runs[(runs[SAME] == pair[SAME].iloc[0]).all(axis=1) & (runs.loss < pair.loss.max())]
    cures = beside[beside.method.isin(['mu_loss', 'mu_centering', 'centered_head'])]
    ends = ', '.join(f'{run.variant} ends at {run.test_loss:.2f} (mean logit {run.logit_mean:,.0f})'
                     for run in pd.concat([pair, cures]).itertuples()).replace(' (mean logit nan)', '')
    return [f'What rounding does at η = {pair.lr.iloc[0]:g}: {ends.replace("logit -0)", "logit 0)")}.']


def describe(runs):
    """Lines that say what was run, and what too few rates, steps or seeds cannot tell."""
    lines = [f'Runs: {len(runs)}.']
    for column in runs.columns.intersection(DESCRIBED, sort=False):
        values = [x if isinstance(x, str) else f'{x:.12g}' for x in runs[column].dropna().unique() if x != '']
        lines[0] += f' {column}: {", ".join(values)}.' * (values not in ([], ['0']))  # 0: perhaps unknown
    of_variant = runs.groupby(['size', 'weight_tying', 'variant'], sort=False)
    if of_variant.lr.nunique().max() < MIN_RATES:
        lines.append(f'No learning rate sensitivity (LRS): it needs {MIN_RATES} learning rates of one name.')
    if runs.steps.max() < 10_000:
        lines.append(f'{runs.steps.max():,g} steps are too few to rank methods; the paper has 100,000.')
    seeds = of_variant.seed.nunique()
    few = '; '.join(dict.fromkeys(name for *_, name in seeds.index[seeds < 3]))
    return lines + [f'With fewer than three seeds a difference may be chance: {few}.'] * bool(few)


def write_markdown(path, tables):
    texts = []
    for table in tables:
        align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
        rows = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
        texts.append(f'### {table["title"]}\n\n{rows}\n\n{table["caption"]}\n')
    path.write_text('\n'.join(texts), encoding='utf-8')


def marked(text):
    """Text -> HTML, with the marks of tables alone: <b> and <u>."""
    return re.sub('&lt;(/?[bu])&gt;', r'<\1>', html.escape(str(text)))


def write_page(path, items, lines):
    """Writes report.html, which needs no other file: lines, the first bold, then tables and figures."""
    parts = [STYLE, f'<h1>{html.escape(path.resolve().parent.name)}</h1>']
    parts += [f'<p>{html.escape(line)}</p>' for line in lines]
    for item in items:
        parts.append(f'<h2>{html.escape(item["title"])}</h2>')
        if 'rows' in item:
            rows = item['rows'].map(marked).rename(columns=lambda name: marked(name).replace('_', '_<br>'))
            parts.append(f'<div>{rows.to_html(index=False, escape=False, border=0)}</div>')
        else:
            image = base64.b64encode(item['file'].read_bytes()).decode()
            parts.append(f'<img src="data:image/png;base64,{image}">')
        parts.append(f'<p>{html.escape(item["caption"])}</p>')
    path.write_text('\n'.join(parts), encoding='utf-8')
