"""
The paper's figures of LRS against size (3, 10), of several λ (8) and of distributions (11, 12), the times
of whole runs (Table 6), of what there are data for: from a folder's results.csv and distributions.csv, which
analyze.py writes, into its appendix.md and figures/.

    python results/authors/appendix.py                  # all of results/authors, from its csv files
    python results/authors/appendix.py results/paper    # of a sweep of one's own
"""
import itertools
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import analyze  # noqa: E402
from tools import report  # noqa: E402

PAPER = pd.read_csv(HERE / 'paper_overhead.csv', index_col=['tying', 'size', 'variant'])  # its Table 6
SAME_SPEED = 1.1  # times of one method that differ by more: the machine was probably shared


def named(rows):
    """Names without λ."""
    return rows.method.replace(report.NAMES) + rows.setting


def draw_lrs(ax, lrs):
    """LRS against size, which takes the place of the learning rate, a line for each variant."""
    report.draw_lines(ax, lrs.assign(lr=lrs.n_params, size=''), 'lrs_n1')
    report.stretch(ax, lrs.lrs_n1)
    sizes = lrs.drop_duplicates('size')
    ax.set(xlabel='parameters $N$', ylabel='learning rate sensitivity')
    ax.set_xticks(sizes.n_params, sizes['size'])
    ax.minorticks_off()


def lrs_of_sizes(lrs):
    """LRS (n - 1) against size. (Figures 3 and 10)"""
    if lrs.n_params.nunique() < 2:
        return None
    figure, ax = plt.subplots(figsize=(7.5, 4))
    draw_lrs(ax, lrs)
    report.legend(figure, lrs.assign(lr=lrs.n_params, size=''))
    return figure


def sensitivity(runs, lrs):
    """Several λ. Top: test loss against learning rate. Bottom: LRS against size. (Figure 8)"""
    colors = {lam: f'C{i}' for i, lam in enumerate(sorted(runs.lam.dropna().unique()))}
    runs, lrs = (rows.assign(name=named(rows), variant=rows.lam.map('λ={:g}'.format),
                             color=rows.lam.map(colors)) for rows in (runs, lrs))
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
    """The baseline's quartiles and extrema; right: the share below 1 or above 0. (Figures 11 and 12)"""
    rows = rows[rows.variant == 'baseline'].dropna(subset=['median', 'test_loss'])
    if rows.empty:
        return None
    rows = rows[rows.seed == rows.seed.min()]
    numbers = {'q25': 'q1', 'median': 'med', 'q75': 'q3', 'min': 'whislo', 'max': 'whishi'}  # matplotlib's
    sizes, quantities = rows['size'].unique(), ['r_emb', 'cos_mu_h', 'r_cos', 'r_log']
    figure, axes = plt.subplots(len(sizes), 4, figsize=(12, 2.2 * len(sizes) + 0.5), squeeze=False)
    for ax, (size, quantity) in zip(axes.flat, itertools.product(sizes, quantities), strict=True):
        part = rows[(rows['size'] == size) & (rows.quantity == quantity)].rename(columns=numbers)
        ax.bxp(part.to_dict('records'), positions=part.lr, widths=0.35 * part.lr, showfliers=False,
               manage_ticks=False, medianprops={'color': 'black'})
        share, limit = ('above_0', 0) if quantity == 'cos_mu_h' else ('below_1', 1)
        ax.axhline(limit, color='black', linewidth=0.8, linestyle=':')
        report.stretch(ax, part[['whislo', 'whishi']].stack())
        right = ax.twinx()
        report.draw_lines(right, part.assign(percent=100 * part[share]), 'percent')
        ax.set(title=size, ylabel=report.LABELS[quantity], xlabel=report.LABELS['lr'])
        right.set(ylabel=f'% {share.replace("_", " ")}', ylim=(-5, 105))
        right.grid(False)
    return figure


def overhead_table(runs, tying):
    """Table 6. None if no method can be compared with the baseline."""
    timed = runs[(runs.train_seconds > 0) & runs.test_loss.notna()]
    timed = timed.assign(steps=timed.steps.map('{:,.0f}'.format), name=named(timed))
    where = ['size', 'device', 'steps']
    seconds = timed.groupby([*where, 'name'], sort=False).train_seconds
    times = seconds.agg(['mean', 'min', 'max', 'count']).reset_index()
    times = times[(times['count'] > 1) & (times['max'] < SAME_SPEED * times['min'])]
    is_baseline = times.name == 'baseline'
    rows = times[~is_baseline].merge(times[is_baseline], on=where, suffixes=('', '_of_baseline'))
    if rows.empty:
        return None
    rows['cell'] = (rows['mean'] / rows.mean_of_baseline - 1).map('{:.1%}'.format)
    paper = PAPER.percent.map(' <sub>{:.1f}%</sub>'.format)
    rows['cell'] += [paper.get((tying, *name), '') for name in zip(rows['size'], rows.name, strict=True)]
    table = report.grid(rows.set_index([*where, 'name']).cell, *where)
    return dict(title=f'Additional training time ΔT, {tying}', rows=table, caption=(
        "A method's mean over learning rates, seeds and λ against the baseline's of the same size, device "
        f"and steps. Left out: methods of one run, or times {SAME_SPEED - 1:.0%} apart. Small: the paper's, "
        'on four A100. `python -m tools.bench` compares methods side by side. (Table 6)'))


def main(folder=HERE):
    folder = Path(folder)
    csv = folder / 'results.csv'
    if folder == HERE:
        analyze.main([f'--results={csv}', f'--out={folder}'])
    all_runs, _ = analyze.read_runs(csv)
    all_runs = report.with_colors(all_runs, all_runs.variant)
    compared = []  # runs and LRS, of the default λ and of several
    for part in (analyze.of_default_lam(all_runs), analyze.of_several_lam(all_runs)):
        lrs, _ = analyze.learning_rate_sensitivity(part)
        lrs = lrs[lrs.n_lrs >= report.MIN_RATES].dropna(subset='n_params')
        lrs = report.with_colors(lrs, all_runs.variant)
        compared += [part.assign(behind=analyze.behind(part), setting=part.setting + part.rounding), lrs]
    csv = folder / 'distributions.csv'
    values = pd.read_csv(csv, dtype={'run': str}) if csv.exists() else pd.DataFrame(columns=['run', 'median'])
    tables, texts = [], []
    for tying, word in report.TYING.items():
        of_tying = [rows[rows.weight_tying == tying] for rows in (all_runs, *compared)]
        runs, methods, lrs, several, lrs_of_several = of_tying
        tables += filter(None, [overhead_table(runs, word)])
        for function, *data in ((lrs_of_sizes, lrs), (sensitivity, several, lrs_of_several),
                                (distributions, methods.merge(values, on='run'))):
            figure = function(*data)
            if figure:
                name = f'figures/{function.__name__}_{word}.png'
                (folder / 'figures').mkdir(exist_ok=True)
                figure.set_layout_engine('constrained')
                figure.savefig(folder / name, bbox_inches='tight')
                plt.close(figure)
                texts.append(f'\n![{word}]({name})\n\n{" ".join(function.__doc__.split())}\n')
    report.write_markdown(folder / 'appendix.md', tables)
    with open(folder / 'appendix.md', 'a', encoding='utf-8') as file:
        file.writelines(texts)


if __name__ == '__main__':
    main(*sys.argv[1:])
