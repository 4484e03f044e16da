"""
Tables, figures and a page of the runs and curves that analyze.py has read, named and compared: tables.md,
figures/*.png and report.html. Nothing is decided here but how it looks.
"""
import base64
import html
import itertools
import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

TYING = {0: 'untied', 1: 'tied'}
NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay", 'max_z_loss': 'max-z loss',
    'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.'}
COLORS = {  # the first six are the paper's; other variants get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945', 'adamw_decay': '#393B79', 'max_z_loss': '#17BECF',
    'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22'}
OTHERS = ['black', '#637939', '#7B4173', '#8C6D31', '#FF69B4', '#00CED1', '#843C39', '#6B6ECF']

# -------- tables: dicts of title, message, rows and caption
MIN_RATES = 3  # with fewer learning rates there is no LRS table
FORMATS = {  # of columns of results.csv
    'variant': '{}', 'size': '{}', 'weight_tying': '{:g}', 'lr': '{:g}', 'seed': '{:.0f}',
    'test_loss': '{:.4f}', 'behind': '{:g}', 'model_step': '{:.0f}', 'mu_norm': '{:.4g}',
    'mean_share': '{:.3f}', 'logit_mean': '{:.4g}', 'logit_std': '{:.4g}', 'logit_absmax': '{:.4g}',
    'cos_mu_h': '{:.3f}', 'r_emb': '{:.3f}', 'r_cos': '{:.3f}', 'r_log': '{:.3f}',
    'r_emb_below_1': '{:.3%}', 'r_cos_below_1': '{:.1%}', 'r_log_below_1_too': '{:.1%}'}


def grid(cells):
    """Cells by (line, column) -> a table, with - where there is no cell."""
    return cells.unstack(sort=False).fillna('-').rename_axis(columns=None).reset_index()


def best_of_sizes(lrs, complete):
    """
    Rows of the lowest LRS of each size, as three digits show it: several if they tie, none if a method of
    other digits had a seed as low as the best one's highest, as then they cannot be told apart.
    """
    shown = lrs.lrs_n1.round(3).where(complete)
    best = shown == shown.groupby(lrs['size']).transform('min')
    highest = lrs.lrs_n1_highest.where(best).groupby(lrs['size']).transform('max')
    rival = lrs.lrs_n1_lowest.where(~best & complete).groupby(lrs['size']).transform('min')
    return best & ~(rival <= highest)


def lrs_table(lrs, columns, title):
    """Table 2, 5 or 4, of rows of lrs.csv: a line for each size, a column for each of `columns`, or None."""
    if not lrs.n_lrs.max() >= MIN_RATES:
        return None
    complete = lrs.rates == lrs.rates[lrs.n_lrs == lrs.n_lrs.max()].mode()[0]
    best = best_of_sizes(lrs, complete)
    cells = lrs.lrs_n1.map('{:.3f}'.format)
    named = lrs.variant + ' ' + cells
    won = '; '.join(f'{size} {", ".join(part[best[part.index]]) or "undecided, as ranges overlap"}'
                    for size, part in named.groupby(lrs['size'], sort=False))
    cells = cells.where(complete, cells + ' (' + lrs.n_lrs.astype(str) + ' lr)')
    cells = cells.mask(lrs.behind == 0, '<u>' + cells + '</u>')
    cells = cells.mask(best, '<b>' + cells + '</b>')
    ranges = lrs.lrs_n1_lowest.map(' [{:.3f}, '.format) + lrs.lrs_n1_highest.map('{:.3f}]'.format)
    cells += ranges.where(lrs.seeds > 1, '')
    cells += lrs.published.map(' <sub>{:.3f}</sub>'.format).where(lrs.published.notna(), '')
    cells = cells.where(lrs.lrs_n1.notna(), '-').set_axis(pd.MultiIndex.from_frame(lrs[['size', columns]]))
    return dict(title=title, message=f'{title}: lowest, which is best: {won}.',
                rows=grid(cells).rename(columns={'size': 'N'}), caption=(
        'How far the test losses at the n learning rates lie above the lowest of them, summed / (n - 1); '
        'means over seeds [lowest, highest]. Bold: the lowest of its size, unless the ranges of others reach '
        'into its own. Underlined: at every learning rate within 1% of the best method, of several λ: of the '
        "best method and λ. Small: the paper's, of one seed. (n lr): over other learning rates than most. "
        '-: no runs, or nothing was learned at any learning rate.'))


def with_cases(rows):
    """The rows of what ran with several cases, precisions of the logits and added vectors, all else alike."""
    logits = rows.logits_dtype.map({'bfloat16': 'BF16 logits', 'float32': 'fp32 logits'}).fillna('logits')
    vector = rows.mu_shift.map(', vector of norm {:g}'.format).where(rows.mu_shift > 0, '')
    rows = rows.assign(case=logits + vector)
    setting = ['but_for_rounding', 'size', 'weight_tying', 'lr']
    return rows[rows.groupby(setting).case.transform('nunique') > 1]


def rounding_table(runs):
    """What an added vector or the precision of the logits does, or None."""
    runs = with_cases(runs)
    if runs.empty:
        return None
    runs = runs.assign(method=runs.but_for_rounding, tying=runs.weight_tying.map(TYING), η=runs.lr.map(str))
    setting = ['method', 'size', 'tying', 'η']
    means = runs.groupby([*setting, 'case'], sort=False).test_loss.agg(lambda x: x.mean(skipna=False))
    *worst, _ = means.fillna(math.inf).idxmax()  # nan, where a run was not finite
    cases = '; '.join(f'{x:.2f} with {case.replace(", ", " and a ")}' for case, x in means[*worst].items())
    said = f'By rounding alone, {worst[0]} at η = {worst[-1]} ends at a test loss of {cases}.'
    return dict(title='What rounding does', rows=grid(means.map('{:.2f}'.format)), message=said, caption=(
        'The mean of the output embeddings adds one number to all logits of a position, which changes no '
        'probability or gradient but by rounding: between 512 and 1,024 BF16 has only the multiples of 4. '
        'A vector was added to all output embeddings at the start. Test losses are means over seeds, at a '
        f'learning rate η; all began at {runs.init_loss.min():.2f} to {runs.init_loss.max():.2f}. nan: a run '
        'was not finite. -: no run.'))


def run_table(runs, own_statistics):
    """A line for each run, a column for each of FORMATS that is known of a run, and for a fork's own."""
    formats = FORMATS | dict.fromkeys(own_statistics, '{:.4g}')
    known = runs[[*formats]].dropna(axis='columns', how='all')
    cells = known.apply(lambda column: column.map(formats[column.name].format)).replace(['nan', 'nan%'], '')
    best = runs.loc[runs.groupby(['size', 'weight_tying'], sort=False).test_loss.idxmin(skipna=True).dropna()]
    said = '; '.join(f'{run.variant} of {run.N}, {TYING[run.weight_tying]}, at η = {run.lr:g}: '
                     f'{run.test_loss:.4f}' for run in best.rename(columns={'size': 'N'}).itertuples())
    said = f'Lowest test loss: {said or "none was finite"}.'
    return dict(title='All runs', rows=cells, message=said, caption=(
        "behind: 1 if its method's test loss, a mean over seeds, is not finite or more than 1% above the "
        'lowest of the methods at its size, tying, setting and learning rate; empty: not compared. '
        'model_step: of the model measured. mean_share: V‖μ‖² / ‖E‖², 1 if all embeddings are equal. '
        'r_log_below_1_too: of the positions with r_cos < 1, the share with r_log < 1.'))


def make_tables(runs, lrs, own_statistics=()):
    """All tables that there are data for: what rounding does, LRS and λ of each tying, and all runs."""
    tables = [rounding_table(runs)]
    for tying, part in lrs.groupby('weight_tying'):
        title = f'Learning rate sensitivity (LRS), {TYING[tying]}'
        tables.append(lrs_table(part[part.at_default_lam], 'variant', title))
        for name, rows in part[part.of_several_lam].groupby('plain_name', sort=False):
            rows = rows.sort_values('lam', kind='stable').assign(
                lam=rows.lam.map('{:g}'.format), behind=rows.behind_lam)
            tables.append(lrs_table(rows, 'lam', f'{title}, of {name} for several λ'))
    return [table for table in (*tables, run_table(runs, own_statistics)) if table]


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
    """Rows with the color of their variant, of all these variants."""
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


def smooth(values):
    return values.rolling(10, min_periods=1, center=True).mean()


def training(rows):
    """A panel for each quantity, a line for each run of one size, tying and learning rate."""
    rows = rows[rows.step > 0]
    loss = 'val_loss' if rows.groupby('run').val_loss.count().median() > 1 else 'loss'
    if rows[loss].isna().all():
        return None  # not finite from the first step on
    columns = [loss, 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax']
    rows = rows.reindex(columns=[*rows, *(name for name in columns if name not in rows)])
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), sharex=True)
    for ax, column in zip(axes.flat, columns, strict=True):
        for _, run in rows.dropna(subset=column).groupby('run', sort=False):
            y = run[column] if column == 'val_loss' else smooth(run[column])
            first = run.iloc[0]
            ax.plot(run.step, y, '-' if first.setting == '' else '--', color=first.color, label=first.variant,
                    linewidth=1)
        stretch(ax, rows[column])
        ax.set(title=LABELS[column], xlabel='step')
    handles = {line.get_label(): line for ax in axes.flat for line in ax.lines}
    figure.legend(handles=handles.values(), loc='outside lower center', ncols=4)
    return figure


def rounding(rows):
    """A panel for each method and case of one size, tying and learning rate: no line hides another."""
    rows = with_cases(rows[rows.step > 0].dropna(subset='loss'))
    if rows.empty:
        return None
    methods, cases = rows.but_for_rounding.unique(), rows.case.unique()
    figure, axes = plt.subplots(len(methods), len(cases), figsize=(1 + 3 * len(cases), 1 + 2 * len(methods)),
                                sharex=True, sharey=True, squeeze=False)
    for ax, (method, case) in zip(axes.flat, itertools.product(methods, cases), strict=True):
        part = rows[(rows.but_for_rounding == method) & (rows.case == case)]
        for _, run in part.groupby('run', sort=False):
            ax.plot(run.step, smooth(run.loss))
        ax.set_title(f'{method}\n{case}', fontsize=9)
    figure.supxlabel('step', fontsize=9)
    figure.supylabel(LABELS['loss'], fontsize=9)
    return figure


FIGURES = [  # function, title, caption
    (rounding, 'Training loss with and without rounding',
     'A line for each seed; the same axes in all panels. Means of ten log lines.'),
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
     'A line for each run: its loss; the norm of the mean μ of the output embeddings; of the logits of a '
     'position their mean, how that varies, their standard deviation and the largest |logit|. All but a val '
     'loss are means of ten log lines. Dashed: another setting. Equal lines hide each other.')]


def draw_figures(runs, curves, folder):
    """Draws what there are data for, as PNG files in `folder` -> their titles, captions and files."""
    runs, curves = (with_colors(rows, [*runs.variant, *curves.variant]) for rows in (runs, curves))
    of_rates = [(word, word, runs[(runs.weight_tying == tying) & runs.at_default_lam])
                for tying, word in TYING.items()]
    of_steps = [(f'{size}, {TYING[tying]}, η = {lr:g}', f'{size}_{TYING[tying]}_lr{lr:g}', rows)
                for (tying, size, lr), rows in curves.groupby(['weight_tying', 'size', 'lr'], sort=False)]
    figures = []
    for function, title, caption in FIGURES:
        for what, name, rows in of_steps if function in (rounding, training) else of_rates:
            figure = function(rows)
            if figure:
                path = folder / f'{function.__name__}_{name}.png'
                path.parent.mkdir(exist_ok=True)
                figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
                figure.savefig(path, bbox_inches='tight')  # or a wide legend would be cut off
                plt.close(figure)
                figures.append(dict(title=f'{title}, {what}', caption=caption, file=path))
    return figures


# -------- the pages
DESCRIBED = ['size', 'weight_tying', 'method', 'lr', 'mu_shift', 'seed', 'steps', 'batch_size', 'block_size',
             'dtype', 'logits_dtype', 'device', 'data']
STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 68rem; font-family: sans-serif; } img { max-width: 100%; }
  div { overflow-x: auto; } td, th { padding: .1rem .4rem; text-align: right; font-size: .8rem; }
  td:first-child { white-space: nowrap; text-align: left; }
</style>'''


def describe(runs):
    """Lines that say what was run, and what too few rates, steps or seeds cannot say."""
    named = runs.assign(weight_tying=runs.weight_tying.map(TYING),
                        method=runs.method.map(NAMES).fillna(runs.method))
    facts = []
    for column in named.columns.intersection(DESCRIBED, sort=False):
        values = [x if isinstance(x, str) else f'{x:.12g}' for x in named[column].dropna().unique()]
        if any(value not in ('', '0') for value in values):  # a seed of 0 alone is an unknown one
            facts.append(f'{column}: {", ".join(values)}')
    lines = [f'{len(runs)} run{"s" * (len(runs) > 1)}. {"; ".join(facts)}.']
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
    """
    Writes report.html, which needs no other file, of tables and figures. `lines` say what was run and what is
    missing: they come first, but after the first table if that has a message.
    """
    parts = []
    for item in items:
        part = f'<h2>{item["title"]}</h2>\n'
        if 'message' in item:
            part = f'<p><b>{html.escape(item["message"])}</b></p>\n' + part
        if 'rows' in item:
            rows = item['rows'].rename(columns=lambda name: name.replace('_', '_<wbr>'))  # may break there
            part += f'<div>{rows.to_html(index=False, escape=False, border=0)}</div>\n'
        else:
            image = base64.b64encode(item['file'].read_bytes()).decode()
            part += f'<img src="data:image/png;base64,{image}">\n'
        parts.append(f'{part}<p>{item["caption"]}</p>\n')
    paragraphs = ''.join(f'<p>{html.escape(line)}</p>\n' for line in lines)
    parts.insert(1 if 'message' in items[0] else 0, paragraphs)
    page = f'{STYLE}<h1>{path.resolve().parent.name}</h1>\n{"".join(parts)}'
    path.write_text(page, encoding='utf-8')
