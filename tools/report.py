"""
The tables, the figures and the page of the runs that analyze.py has read, named and marked. An item
of the page is a dict: a table has title, caption and rows, a figure title, caption, name and png.
"""
import base64
import html
import io
import itertools
import math
import re
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import AsinhLocator, LogLocator

from train import save  # writes atomically

NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping',
    'mu_loss': 'μ-loss', 'mu_centering': 'μ-centering', 'adamw_decay': "AdamW's decay",
    'max_z_loss': 'max-z loss', 'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam',
    'cosine_reg': 'cosine reg.', 'centered_head': 'centered head'}


# -------- tables
COLUMNS = {  # of the tables of runs, explained
    'test_loss': 'nats per token of held-out text',
    'logit_mean': 'the mean logit, over all tokens and positions',
    'bf16_cost': 'the test loss with BF16 logits minus that with fp32 logits, of the same weights',
    'mu_norm': '‖μ‖, the norm of the mean embedding',
    'model_step': 'the step of these weights, the last one that was finite',
    'logit_std': "the standard deviation of a position's logits",
    'logit_absmax': 'the largest |logit| of a position',
    'cos_mu_h': 'cos(μ, h); it is noise where μ is nearly 0, as with μ-centering',
    'r_emb': "‖e_i‖ after centering over before, a mean over tokens",
    'r_cos': 'the largest |cos(e_i, h)| of a position, after centering over before',
    'r_log': 'the largest |logit|, after centering over before'}
THEIRS = "of the authors' run with these settings, one seed"
DECIDING = 'test_loss logit_mean bf16_cost mu_norm model_step'.split()
STATISTICS = 'logit_std logit_absmax cos_mu_h r_emb r_cos r_log'.split()
BESIDE = '''test_loss test_loss_of_theirs mu_norm mu_norm_of_theirs logit_mean
    logit_mean_of_theirs'''.split()
PAPER_OVERHEAD = pd.read_csv(Path(__file__).with_name('paper_overhead.csv'))


def listed(values):
    """'0.1 0.3': the different numbers, in order."""
    return ' '.join(f'{value:.12g}' for value in sorted({*values}))


def table(title, lines, caption):
    """Lines, a list of {header: text} -> an item of the page, with - where a line has no text."""
    rows = pd.DataFrame(lines).fillna('-')
    return {'title': title, 'caption': ' '.join(caption.split()), 'rows': rows}


def as_cell(value):
    """A name, or five digits of a number; '' if it is unknown."""
    return value if isinstance(value, str) else f'{value:.5g}'.replace('nan', '')


def run_tables(title, runs, columns):
    """A line for each run, with those of the columns that are known of any, if there are some."""
    known = runs.reindex(columns=columns).dropna(axis='columns', how='all')
    if known.size:
        explained = [f'{name}: {COLUMNS.get(name, THEIRS)}.' for name in known]
        rows = runs[['variant', 'lr', *known, 'size', 'tying', 'seed']]
        yield table(title, rows.map(as_cell), ' '.join(explained))


def lines_of(rows, columns):
    """Groups rows by `columns` and by the seeds that a variant has there, sizes in their order."""
    seeds = rows.groupby([*columns, 'variant'], sort=False).seed.transform(listed)
    sizes = pd.Categorical(rows['size'], rows['size'].unique())
    return rows.assign(seeds=seeds, size=sizes).groupby([*columns, 'seeds'], observed=True)


def mean_and_range(values, text):
    """'3.12', or of several values '3.12 [3.10, 3.15]'; nan if one of them is unknown."""
    cell = text.format(values.mean(skipna=False))
    if len(values) > 1:
        cell += f' [{text.format(values.min())}, {text.format(values.max())}]'
    return cell


def cells(line, column, text):
    """Rows of a line -> {variant: its mean_and_range}, with * if no other mean is lower."""
    found = line.groupby('variant', sort=False)[column].apply(mean_and_range, text)
    means = found.str.split().str[0].astype(float)  # as printed
    if len(means) > 1:
        found = found.mask(means == means.min(), '*' + found + '*')
    return found.to_dict()


def loss_table(title, runs):
    """Test losses: a line for each size, learning rate and set of seeds, a column for a variant."""
    blank = dict.fromkeys(runs.variant, '-')
    lines = []
    for (size, lr, seeds), group in lines_of(runs, ['size', 'lr']):
        where = {'size': size, 'η': f'{lr:g}', 'seeds': seeds}
        lines.append({**where, **blank, **cells(group, 'test_loss', '{:.4f}')})
    return table(title, lines, '''In nats per token: means over the seeds [lowest, highest]; in bold
        the lowest mean of a line. A line has the variants with the same seeds.''')


def lrs_table(title, lrs):
    """Tables 2, 4 and 5: three lines for each size, set of learning rates and set of seeds."""
    blank = dict.fromkeys(lrs.variant, '-')
    lines = []
    for (size, rates, seeds), group in lines_of(lrs, ['size', 'rates']):
        where = {'size': size, 'η': rates, 'seeds': seeds}
        as_printed = cells(group, 'lrs_n1', '{:.3f}')
        for variant, marks in group[group.table == 'methods'].groupby('variant').diverged:
            if (marks == 0).all():  # Table 4, of several λ, has no such marks
                as_printed[variant] = f'_{as_printed[variant]}_'
        of_paper = group.dropna(subset='paper').set_index('variant').paper.map('{:.3f}'.format)
        lines.append({**where, 'LRS': 'sum / (n - 1)', **blank, **as_printed})
        if len(of_paper):
            lines.append({**where, 'LRS': "the paper's", **blank, **of_paper.to_dict()})
        lines.append({**where, 'LRS': 'mean (Eq. 21)', **blank, **cells(group, 'lrs', '{:.3f}')})
    return table(title, lines, '''How far the test losses of a variant lie above its lowest: means
        over the seeds [lowest, highest]; in bold the lowest mean of a line. Underlined: no run
        diverged, that is, has a test loss over 1% above the lowest with its learning rate and
        seed. A line has the variants with the same rates and seeds. (Tables 2, 4 and 5)''')


def overhead_tables(runs):
    """Table 6 of each tying, of the rows of analyze.overhead."""
    machine = ['size', 'device', 'processes']
    for tying, of_tying in runs.groupby('tying', sort=False):
        lines = []
        for key, group in of_tying.groupby(machine, sort=False, dropna=False):
            line = dict(zip(machine, map(as_cell, key), strict=True))
            for variant, added in group.groupby('variant', sort=False).added:
                line[variant] = mean_and_range(added, '{:.1%}')
            lines.append(line)
        of_paper = PAPER_OVERHEAD[PAPER_OVERHEAD['size'].isin(of_tying['size'])]
        for size, printed in of_paper[of_paper.tying == tying].groupby('size', sort=False):
            percent = printed.set_index('variant').percent.map('{:.1f}%'.format)
            lines.append({'size': size, 'device': "the paper's", **percent})
        yield table(f'Additional training time ΔT, {tying}', lines, '''Training time above
            the mean of the baseline's: means over runs [lowest, highest]. Only times of machines
            that nothing else ran on can be compared. (Table 6)''')


# -------- looks
COLORS = {  # the paper's, then others; variants that are not here get the next of OTHERS
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5',
    'soft_capping': '#9E9E9E', 'mu_loss': '#FF9500', 'mu_centering': '#00B945',
    'baseline, fp32 logits': 'black', 'adamw_decay': 'brown', 'max_z_loss': 'hotpink',
    'norm_softmax': 'olive', 'coupled_adam': 'cyan', 'cosine_reg': 'navy', 'centered_head': 'teal'}
OTHERS = plt.get_cmap('tab20b').colors[::3]
MARKERS = {'16M': 's', '29M': 'd', '57M': 'o', '109M': 'P', '221M': 'X'}  # the paper's
LABELS = {
    'capped_loss': 'test loss', 'loss': 'training loss', 'lrs_n1': 'LRS',
    'mu_norm': r'norm of the mean, $\|\mu\|$', 'cos_mu_h': r'$\cos(\mu, h)$',
    'logit_mean': r'mean logit $\bar{l}$', 'logit_std': r'standard deviation $\sigma_l$',
    'logit_absmax': r'largest logit, $\max_i |l_i|$', 'r_emb': r'$r_{\rm emb}$',
    'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}
FAR_VALUES = ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']
FILLED = 'Filled: diverged. Grey: no other run has that learning rate and seed.'

plt.switch_backend('agg')  # files alone, no windows
plt.rcParams.update({
    'font.size': 9, 'lines.linewidth': 1.3, 'axes.grid': True, 'grid.alpha': 0.25,
    'axes.spines.top': False, 'axes.spines.right': False, 'legend.frameon': False,
    'figure.dpi': 160})


def with_looks(runs):
    """Runs with the color of their variant and the marker of their size."""
    # the shortest name of a method has its color: that of the default λ, if it ran with it
    variants = runs[['variant', 'method']].drop_duplicates().values
    others = itertools.cycle(OTHERS)
    colors = {}
    for variant, method in sorted(variants, key=lambda pair: len(pair[0])):
        color = COLORS.get(variant, COLORS.get(method))
        if color is None or color in colors.values():
            color = next(others)
        colors[variant] = color
    markers = runs['size'].map(MARKERS).fillna('o')
    return runs.assign(color=runs.variant.map(colors), marker=markers)


def legend(figure, runs):
    """A legend below a figure: colors of variants, and markers of sizes if there are several."""
    handles = []
    for run in runs.drop_duplicates('variant').itertuples():
        handles.append(Line2D([], [], color=run.color, label=run.variant))
    sizes = runs.drop_duplicates('size')
    if len(sizes) > 1:
        for run in sizes.itertuples():
            handles.append(Line2D([], [], color='black', ls='', marker=run.marker, mfc='white',
                                  label=run.size))
    figure.legend(handles=handles, loc='outside lower center', handlelength=3.5, ncols=4)


def figure_item(title, caption, name, figure):
    """A figure -> an item of the page; closes it."""
    figure.set_layout_engine('constrained', w_pad=0.08, h_pad=0.06)
    png = io.BytesIO()
    figure.savefig(png, format='png', bbox_inches='tight')  # or a wide legend would be cut off
    plt.close(figure)
    return {'title': title, 'caption': ' '.join(caption.split()),
            'name': re.sub(r'[^\w.-]+', '_', name), 'png': png.getvalue()}


# -------- what is drawn on an axis
def faces(diverged, color):
    """The filling of markers: the color if diverged (1), white if not (0), else grey."""
    return diverged.map({1: color, 0: 'white'}).fillna('lightgrey')


def draw(ax, rows, x, y):
    """One line: the means of y over the seeds at each x, with bars from lowest to highest."""
    look = rows.iloc[0]
    by_x = rows.replace(math.inf, math.nan).groupby(x)
    mean = by_x[y].mean()
    ax.plot(mean.index, mean, color=look.color)
    ax.vlines(mean.index, by_x[y].min(), by_x[y].max(), color=look.color, linewidth=0.8)
    ax.scatter(mean.index, mean, 25, marker=look.marker, edgecolors=look.color,
               facecolors=faces(by_x.diverged.max(), look.color), linewidths=1, zorder=3)


def against_lr(ax, runs, y):
    """y over the learning rate, a line for each size and variant."""
    if y in FAR_VALUES:
        allow_far_values(ax)
    for _, part in runs.groupby(['size', 'variant'], sort=False):
        draw(ax, part, 'lr', y)
    label_rates(ax, runs)
    ax.set_ylabel(LABELS[y])
    if y == 'capped_loss':  # without runs that learned nothing, which would flatten all others
        learned = runs.capped_loss[runs.capped_loss < runs.init_loss - 0.1]
        if len(learned):
            margin = 0.05 * (learned.max() - learned.min()) + 1e-3
            ax.set_ylim(learned.min() - margin, learned.max() + margin)
    if y.startswith('r_'):
        ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about


def label_rates(ax, runs):
    """A logarithmic x axis with a tick at each learning rate."""
    rates = sorted(runs.lr.unique())
    ax.set_xscale('log')
    ax.set_xticks(rates, [f'{lr:g}' for lr in rates], rotation=90 if len(rates) > 8 else 0)
    ax.set_xticks([], minor=True)
    ax.set_xlabel(r'learning rate $\eta$')


def allow_far_values(ax):
    """Makes the y axis linear up to some 10 in size, and logarithmic beyond."""
    ax.set_yscale('asinh', linear_width=10)
    ax.yaxis.set_major_locator(AsinhLocator(10, numticks=6, base=0))  # with room for the labels
    ax.yaxis.set_major_formatter('{x:g}')


# -------- figures
def loss_figure(runs):
    """Figures 2 and 9: test losses, and below of each size at the two largest of many rates."""
    rates = sorted(runs.lr.unique())
    largest = runs[runs.lr >= rates[-2]]
    sizes = [*largest['size'].unique()]
    panels = 2 * [['all'] * len(sizes)]  # two rows high
    if len(rates) > 3 and len(sizes) > 1:
        panels.append(sizes)
    figure, axes = plt.subplot_mosaic(panels, figsize=(9, 2 * len(panels)))
    against_lr(axes.pop('all'), runs, 'capped_loss')
    for size, ax in axes.items():
        against_lr(ax, largest[largest['size'] == size], 'capped_loss')
        ax.set(title=size, ylabel='', xlim=(rates[-2] / 1.6, rates[-1] * 1.6))
    legend(figure, runs)
    return figure


def lrs_figure(lrs):
    """Figures 3 and 10: LRS against size, a panel for each set of learning rates."""
    sizes = [*lrs['size'].unique()]
    lrs = lrs.assign(x=lrs['size'].map(sizes.index), marker='o')
    panels = lrs.groupby('rates', sort=False)
    figure, axes = plt.subplots(1, len(panels), squeeze=False, sharey=True,
                                figsize=(2.5 + 5 * len(panels), 4))
    for ax, (rates, panel) in zip(axes.flat, panels, strict=True):
        for _, part in panel.groupby('variant', sort=False):
            draw(ax, part, 'x', 'lrs_n1')
        ax.set(title=f'η = {rates}', xlabel='size', yscale='log')
        ax.set_xticks(range(len(sizes)), sizes)
        ax.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}',
                     minor_locator=LogLocator(subs=[2, 5]))
    axes[0, 0].set_ylabel(LABELS['lrs_n1'])
    legend(figure, lrs.assign(size=''))
    return figure


def four_panels(runs, columns):
    """Figures 4 and 5: a panel for each of four columns."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 7))
    for ax, column in zip(axes.flat, columns, strict=True):
        against_lr(ax, runs, column)
    legend(figure, runs)
    return figure


def compare(runs, lrs, title, name):
    """The tables and figures of test losses and of LRS."""
    yield loss_table(f'Test loss, {title}', runs)
    if runs.lr.nunique() > 2:
        yield figure_item(f'Test loss against learning rate, {title}', f'''Means over seeds, with
            bars from lowest to highest; below, of many learning rates the two largest. {FILLED}
            (Figures 2, 8 and 9)''', f'loss_{name}', loss_figure(runs))
    if len(lrs):
        yield lrs_table(f'Learning rate sensitivity (LRS), {title}', lrs)
    if lrs['size'].nunique() > 2:
        yield figure_item(f'LRS against size, {title}', '''Filled: a run diverged. Grey: no other
            run has one of its rates and seeds. (Figures 3, 8 and 10)''',
            f'lrs_{name}', lrs_figure(lrs))


def items_of_tying(word, methods, lrs, lams, lrs_lam):
    """Figures 2 to 5 and Table 2, or 9 and 10 and Table 5; of several λ Table 4 and Figure 8."""
    yield from compare(methods, lrs, word, word)
    measured = methods[methods.mu_norm.notna() & (methods.test_loss < math.inf)]
    if measured.lr.nunique() > 2:
        yield figure_item(f'Mean embedding and logits, {word}', f'''Means over positions and seeds.
            {FILLED} (Figure 4)''', f'statistics_{word}', four_panels(measured, FAR_VALUES))
    baseline = measured[(measured.method == 'baseline') & measured.r_cos.notna()]
    if baseline.lr.nunique() > 2:
        ratios = ['r_emb', 'cos_mu_h', 'r_cos', 'r_log']
        yield figure_item(f'What centering would change in the baseline, {word}', f'''Below 1, the
            dotted line, it would lower ‖e_i‖ (r_emb), the largest |cos(e_i, h)| (r_cos) and |logit|
            (r_log). {FILLED} (Figure 5)''', f'fact_3_{word}', four_panels(baseline, ratios))

    for method, part in lams.groupby('method', sort=False):
        title = f'{NAMES.get(method, method)} by λ, {word}'
        yield from compare(part, lrs_lam[lrs_lam.method == method], title, f'{method}_{word}')


# -------- figures of distributions
def draw_boxes(ax, rows, quantity):
    """Rows of distributions.csv with their runs: boxes, and a share in red, on the right."""
    by_rate = rows[rows.quantity == quantity].groupby('lr')
    means = by_rate[['25%', '50%', '75%', 'below_1', 'above_0']].mean()
    lowest = by_rate['min'].min()
    highest = by_rate['max'].max()
    rates = means.index
    ax.vlines(rates, means['25%'], means['75%'], color='lightgrey', linewidth=12)
    ax.vlines(rates, lowest, highest, color='grey', linewidth=0.6)
    for values in (lowest, means['50%'], highest):
        ax.plot(rates, values, 'k_', markersize=10)
    ax.set_ylabel(LABELS[quantity])
    label_rates(ax, rows)

    right = ax.twinx()
    share = 'above_0' if quantity == 'cos_mu_h' else 'below_1'
    right.plot(rates, 100 * means[share], color='red', linewidth=0.6)
    right.scatter(rates, 100 * means[share], 16, edgecolors='red', zorder=3, clip_on=False,
                  facecolors=faces(by_rate.diverged.max(), 'red'))
    right.set_ylim(0, 100)
    right.set_ylabel('% above 0' if share == 'above_0' else '% below 1', color='red')
    right.grid(False)


def box_figure(rows, quantities):
    """Figures 11 and 12: a row for each size, a column for each of two quantities."""
    sizes = rows['size'].unique()
    figure, axes = plt.subplots(len(sizes), 2, figsize=(9, 1 + 1.8 * len(sizes)), squeeze=False)
    for row, size in zip(axes, sizes, strict=True):
        for ax, quantity in zip(row, quantities, strict=True):
            draw_boxes(ax, rows[rows['size'] == size], quantity)
            ax.set_title(size, loc='left')
    return figure


def distribution_figures(runs, distributions):
    """Figures 11 and 12 of each baseline that ran at several rates, from distributions.csv."""
    baseline = runs[(runs.method == 'baseline') & (runs.test_loss < math.inf)]
    rows = baseline.merge(distributions, on='run')
    for (tying, variant), part in rows.groupby(['tying', 'variant'], sort=False):
        if part.lr.nunique() > 1:
            where = f'{variant}, {tying}'
            for pair in (['r_emb', 'cos_mu_h'], ['r_cos', 'r_log']):
                yield figure_item(f'Distributions of {" and ".join(pair)}, {where}', '''Grey:
                    quartiles; black: median and extrema; red: a share. Over seeds, all but the
                    extrema are means. (Figures 11 and 12)''',
                    f'{pair[0]}_{where}', box_figure(part, pair))


# -------- training curves
def curve_figures(runs, curves):
    """A figure for each size, tying and learning rate, from curves.csv."""
    columns = 'run step loss val_loss logit_mean mu_norm'.split()
    curves = curves.reindex(columns=columns)  # the log of a run that has just begun lacks some
    initial = curves.groupby('run').val_loss.transform('first')
    for column in ('loss', 'val_loss'):  # or a spike would flatten all else
        curves[column] = curves[column].clip(upper=initial)
    runs = runs[runs.run.isin(curves.run)]
    for (tying, size, lr), part in runs.groupby(['tying', 'size', 'lr'], sort=False):
        figure, axes = plt.subplots(1, 3, figsize=(10, 3.6))
        for ax, column in zip(axes, ('loss', 'logit_mean', 'mu_norm'), strict=True):
            ax.set(title=LABELS[column], xlabel='step')
        allow_far_values(axes[1])
        allow_far_values(axes[2])
        for run in part.itertuples():
            curve = curves[curves.run == run.run]
            logged = curve[curve.loss.notna()]
            evaluated = curve[curve.val_loss.notna()]
            axes[0].plot(logged.step, logged.loss, color=run.color, alpha=0.4)  # it is noisy
            axes[0].plot(evaluated.step, evaluated.val_loss, 'o-', color=run.color, markersize=3)
            axes[1].plot(logged.step, logged.logit_mean, color=run.color)
            axes[2].plot(logged.step, logged.mu_norm, color=run.color)
        legend(figure, part)
        yield figure_item(f'Training curves, {size}, {tying}, η = {lr:g}', '''A line for each run,
            as logged; points are losses on held-out text. What is above the initial loss is drawn
            at it.''', f'training_{size}_{tying}_lr{lr:g}', figure)


# -------- the page
HEAD = '''<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
  body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222;
         font: 16px/1.5 system-ui, sans-serif; }
  h2 { margin: 3rem 0 .7rem; font-size: 1.2rem; }
  p { max-width: 50rem; color: #555; white-space: pre-line; }
  div { overflow: auto; }  /* what is wide scrolls in itself */
  div.table { max-height: 36rem; }
  img { width: 100%; min-width: 40rem; max-width: 60rem; }
  table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
  th { position: sticky; top: 0; background: white; box-shadow: 0 1px #222; }
  th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
  td { border-bottom: 1px solid #eee; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
</style>'''


def in_html(cell):
    """A cell of text: *3.12* is in bold, and _3.12_ underlined."""
    text = html.escape(cell.strip('*_'))
    if cell.strip('_').startswith('*'):
        text = f'<b>{text}</b>'
    if cell.startswith('_'):
        text = f'<u>{text}</u>'
    return text


def write(out, runs, items, problems):
    """Writes figures and report.html, which needs no other file, and prints the tables."""
    (out / 'figures').mkdir(parents=True, exist_ok=True)
    about = f'{len(runs)} training runs of small GPTs, compared by analyze.py on {date.today()}.'
    for name in ('commit', 'data', 'device', 'torch'):
        known = [str(value) for value in runs[name].dropna().unique() if value]
        if len(known) > 3:
            known = [f'{len(known)} different']
        about += f' {name.capitalize()}: {", ".join(known) or "unknown"}.'
    page = [HEAD, f'<h1>{html.escape(out.resolve().name)}</h1><p>{html.escape(about)}</p>']
    if problems:
        items.append({'title': 'Problems', 'caption': '\n'.join(dict.fromkeys(problems))})
    for item in items:
        page.append(f'<h2>{html.escape(item["title"])}</h2>')
        if 'png' in item:
            save(item['png'], f'{out}/figures/{item["name"]}.png')
            image = base64.b64encode(item['png']).decode()
            page.append(f'<div><img src="data:image/png;base64,{image}"></div>')
        elif 'rows' in item:
            rows = item['rows'].rename(columns=html.escape).map(in_html)
            in_text = rows.to_html(index=False, border=0, escape=False)
            page.append(f'<div class="table">{in_text}</div>')
            print(f'\n{item["title"]}\n{item["rows"].to_string(index=False)}')
        else:
            print(f'\n{item["title"]}\n{item["caption"]}')
        page.append(f'<p>{html.escape(item["caption"])}</p>')
    save('\n'.join(page).encode(), f'{out}/report.html')
    print(f'\nwrote {out}; open {out / "report.html"} in a browser')
