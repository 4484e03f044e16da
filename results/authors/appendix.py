"""
appendix.md, with Table 6 and Figures 3, 8 and 10 to 12 of the paper, of what there are data for, in a folder
that analyze.py has written: python -m results.authors.appendix results/authors
"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import analyze
from tools import report

PAPER = pd.read_csv(Path(__file__).with_name('paper_overhead.csv'), index_col=['tying', 'size', 'variant'])
SAME_SPEED = 1.1  # times of one method that differ by more: the machine was probably shared


def overhead_table(runs, tying):
    """Table 6. None if no method can be compared with the baseline."""
    timed = runs[(runs.train_seconds > 0) & runs.test_loss.notna()]
    steps = timed.steps.map('{:,.0f}'.format)
    seconds = timed.groupby(['size', 'device', steps, 'name'], sort=False).train_seconds
    steady = (seconds.count() > 1) & (seconds.max() < SAME_SPEED * seconds.min())
    mean = seconds.mean()[steady].unstack(sort=False)
    if 'baseline' not in mean:
        return None
    added = mean.div(mean.baseline, axis='index').drop(columns='baseline') - 1
    printed = PAPER.percent.map(' <sub>{:.1f}%</sub>'.format)
    cells = {}
    for (size, *where, name), share in added.stack().dropna().items():
        cells[size, *where, name] = f'{share:.1%}' + printed.get((tying, size, name), '')
    return cells and dict(title=f'Additional training time ΔT, {tying}', caption=(
        "A method's mean over learning rates, seeds and λ against the baseline's of the same size, device "
        f"and steps. Left out: methods of one run, or times {SAME_SPEED - 1:.0%} apart. Small: the paper's, "
        'on four A100. `python -m tools.bench` compares methods side by side. (Table 6)'),
        rows=report.grid(cells, 'size', 'device', 'steps'))


def lrs_of(runs):
    """LRS of each size and variant, with the name and the color of its runs."""
    lrs, _ = analyze.learning_rate_sensitivity(runs)
    lrs = lrs[lrs.n_rates >= report.MIN_RATES].dropna(subset='n_params')
    return lrs.merge(runs[['variant', 'name', 'color']].drop_duplicates(), on='variant')


def draw_lrs(ax, lrs):
    """LRS against size, which takes the place of the learning rate, a line for each variant."""
    report.draw_lines(ax, lrs.assign(lr=lrs.n_params, size='', marker='o', dash='-'), 'lrs_n1')
    report.stretch(ax, lrs.lrs_n1)
    sizes = lrs.drop_duplicates('size')
    ax.set(xlabel='parameters $N$', ylabel='learning rate sensitivity')
    ax.set_xticks(sizes.n_params, sizes['size'])
    ax.minorticks_off()


def lrs_of_sizes(runs):
    """LRS (n - 1) against size. (Figures 3 and 10)"""
    lrs = lrs_of(runs)
    if lrs.n_params.nunique() < 2:
        return None
    figure, ax = plt.subplots(figsize=(7.5, 4))
    draw_lrs(ax, lrs)
    report.legend(figure, lrs.assign(size=''))
    return figure


def sensitivity(runs):
    """Several λ. Top: test loss against learning rate. Bottom: LRS against size. (Figure 8)"""
    colors = {lam: f'C{i}' for i, lam in enumerate(sorted(runs.lam.unique()))}
    runs, lrs = (rows.assign(variant=rows.lam.map('λ={:g}'.format), color=rows.lam.map(colors))
                 for rows in (runs.assign(behind=analyze.behind(runs)), lrs_of(runs)))
    names = lrs.name.unique()
    if len(names) == 0:
        return None
    figure, axes = plt.subplots(2, len(names), figsize=(4.4 * len(names), 7), squeeze=False, sharey='row')
    for (top, bottom), name in zip(axes.T, names, strict=True):
        report.draw_lines(top, runs[runs.name == name], 'capped_loss')
        top.set_title(name)
        draw_lrs(bottom, lrs[lrs.name == name])
    report.legend(figure, runs)
    return figure


def distributions(rows):
    """The baseline's quartiles, median and extrema; below, the share below 1 or above 0. (Figures 11, 12)"""
    rows = rows[(rows.variant == 'baseline') & rows.test_loss.notna()]
    if rows.empty:
        return None
    rows = rows[(rows.seed == rows.seed.min()) & rows.quantity.isin(['r_emb', 'cos_mu_h', 'r_cos', 'r_log'])]
    panels = rows.groupby(['size', 'quantity'], sort=False)
    figure, axes = plt.subplots(len(panels) // 4, 4, figsize=(12, len(panels) / 2 + 0.5), squeeze=False)
    for ax, ((size, quantity), part) in zip(axes.flat, panels, strict=True):
        ax.vlines(part.lr, part['25%'], part['75%'], color='lightgrey', linewidth=10)
        ax.plot(part.lr, part[['min', '50%', 'max']], 'k_', markersize=10)
        limit, share = (0, 'above_0') if quantity == 'cos_mu_h' else (1, 'below_1')
        ax.axhline(limit, color='black', linewidth=0.8, linestyle=':')
        report.stretch(ax, part[['min', 'max']].stack())
        ax.set(title=f'{size}, and % {share}', ylabel=report.LABELS[quantity], xscale='log')
        ax.set_xticks(part.lr, [f'{lr:g}\n{x:.1%}' for lr, x in zip(part.lr, part[share], strict=True)])
        ax.minorticks_off()
    return figure


def main(folder):
    runs, _ = analyze.read_runs(folder / 'results.csv')
    runs = report.with_looks(runs, runs)
    runs['name'] = runs.method.replace(report.NAMES) + runs.setting + runs.rounding
    path = folder / 'distributions.csv'
    values = pd.read_csv(path, dtype={'run': str}) if path.exists() else pd.DataFrame(columns=['run'])
    tables, texts = [], []
    for tying, rows in runs.groupby('weight_tying'):
        word = report.TYING[tying]
        tables.append(overhead_table(rows, word))
        methods, several = analyze.of_default_lam(rows), analyze.of_several_lam(rows)
        for draw, data in ((lrs_of_sizes, methods), (sensitivity, several),
                           (distributions, methods.merge(values, on='run'))):
            if figure := draw(data):
                name = f'figures/{draw.__name__}_{word}.png'
                figure.set_layout_engine('constrained')
                figure.savefig(folder / name, bbox_inches='tight')
                texts.append(f'\n![{word}]({name})\n\n{draw.__doc__}\n')
    text = report.markdown([table for table in tables if table])
    (folder / 'appendix.md').write_text(text + ''.join(texts), encoding='utf-8')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
