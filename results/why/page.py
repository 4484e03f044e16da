"""The tables of README.md, its figure and its numbers, from the csv files: python -m results.why.page"""
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from results.mean_logit.mean_logit import cost, cost_of_spacing, read_runs, spacing
from results.tables import by_seed, write

HERE = Path(__file__).parent
ARMS = pd.read_csv(HERE / 'arms.csv')
FLOORS = pd.read_csv(HERE / 'floor.csv').pivot(index='s', columns='model', values='floor')
SMALL, AT_RANDOM, OF_AUTHORS = 'laptop-0.003', 'laptop-0.003*2', 'gpt2^3.6'


def compare(arm, twin):
    """The runs of an arm by seed, with their harm: the test loss above that of the twin of the same seed."""
    runs = ARMS[ARMS.arm == arm].merge(ARMS[ARMS.arm == twin], on='seed', suffixes=('', '_of_twin'))
    return runs.sort_values('seed').assign(harm=runs.test_loss - runs.test_loss_of_twin,
                                           at_evaluation=runs.test_loss - runs.test_loss_exact)


def without_drift(name):
    """{spacing: runs} of the arms "NAME MEAN"."""
    means = (100, 200, 400, 700, 1400, 2800)
    return {spacing(mean): compare(f'{name} {mean}', 'no drift') for mean in means}


def read_authors():
    """The authors' runs of results/mean_logit from 64 on, with the spacing at their mean logit as s."""
    runs = read_runs().dropna(subset='kind')
    runs = runs[runs.logit_mean.abs() >= 64]
    return runs.assign(s=spacing(runs.logit_mean))


NEAREST = without_drift('no drift, rounded at')
STOCHASTIC = without_drift('no drift, rounded at random at')


# -------- the tables
def harm_table():
    authors = read_authors().groupby('s').excess.agg(['median', 'size'])
    lines = {}
    for s, floors in FLOORS.iterrows():
        digits = 3 if s < 4 else 2
        cells = [f'{cost_of_spacing(s):#.2g}']
        for model, runs in ((SMALL, NEAREST[s]), (AT_RANDOM, STOCHASTIC[s])):
            cells.append(f'{floors[model]:#.2g}')
            cells.append(', '.join(f'{x:.{digits}f}' for x in runs.harm))
        cells.append(f'{floors[OF_AUTHORS]:#.2g}')
        cells.append(f'{authors["median"][s]:#.2g} ({authors["size"][s]})' if s in authors.index else '')
        lines[f'{s:g}'] = cells
    header = ['c', 'floor', 'harm', 'at random: floor', 'harm', 'GPT-2 tokens: floor', 'the authors']
    return pd.DataFrame.from_dict(lines, 'index', columns=header).rename_axis('s')


def bits_table():
    """Products of several bits, at a rate of 1."""
    bits = {'7 bits': 7, '8 bits': 8, '9 bits': 9, '11 bits': 11, 'inputs rounded alone': None,
            'BF16 logits': 8}
    rows = pd.concat([compare(arm, 'fp32 logits') for arm in bits])
    for arm, n in bits.items():
        if n:
            runs = rows[rows.arm == arm]
            rows.loc[rows.arm == arm, 'c'] = cost(runs.logit_mean, runs.logit_mean_spread, n)
    table = by_seed(rows, {'mean logit': ('logit_mean', 0), 'c': ('c', 2), 'harm': ('harm', 2)})
    return table.rename_axis('at a rate of 1')


def rates_table():
    """Which parameters have the large learning rate."""
    arms = ('E at 1, trunk at 0.003', 'E at 0.003, trunk at 1', 'bounded trunk')
    rows = [compare(f'{arm}, BF16', f'{arm}, fp32').assign(arm=arm) for arm in arms]
    table = by_seed(pd.concat(rows), {
        'mean logit': ('logit_mean', 0), 'with fp32 logits': ('logit_mean_of_twin', 0), 'harm': ('harm', 2)})
    return table.rename_axis('rate of')


PAGES = ['results/why/README.md']
TABLES = {'harm': harm_table, 'bits': bits_table, 'rates': rates_table}


# -------- the figure and other numbers
def draw():
    """Harm against the spacing of the logits."""
    figure, ax = plt.subplots(figsize=(7.5, 4.8), layout='constrained')
    s = np.geomspace(0.45, 18)
    ax.plot(s, cost_of_spacing(s), 'k--', linewidth=1, label='c')
    for model, color, name in ((SMALL, 'C0', 'small model at 0.003'), ('laptop-1', 'C1', 'small model at 1'),
                               (OF_AUTHORS, 'C3', 'GPT-2 tokens, 3.6 nats')):
        ax.plot(FLOORS.index, FLOORS[model], color, linewidth=1, label=f'floor: {name}')

    runs = pd.concat(runs.assign(s=s) for s, runs in NEAREST.items())
    ax.plot(runs.s, runs.harm, 'C0o', markersize=5, label='small model at 0.003, rounded without drift')
    # the others are drawn a little to the right and to the left of their s
    pairs = pd.read_csv(HERE.parent / 'natural/rule.csv')
    ax.plot(1.12 * spacing(pairs['mean']), pairs.harm.clip(0.003), 'C1^', markersize=5, alpha=0.6,
            label=f'small model, natural drift ({len(pairs)} pairs)')
    authors = read_authors()
    ax.plot(authors.s / 1.12, authors.excess, 'C3s', markersize=4, alpha=0.6,
            label=f"the authors' models ({len(authors)} runs)")

    ax.set(xscale='log', yscale='log', xlim=(0.4, 20), ylim=(0.0027, 9), ylabel='harm, nats',
           xlabel='s: logits are multiples of it')
    ax.set_xticks(FLOORS.index, [f'{s:g}' for s in FLOORS.index])
    ax.minorticks_off()
    ax.legend(fontsize=8)
    figure.savefig(HERE / 'figure.png', dpi=80)


def print_numbers():
    pd.set_option('display.width', 200, 'display.max_columns', 20, 'display.precision', 3)
    every = pd.read_csv(HERE / 'floor.csv')
    print(every.assign(floor_over_c=every.floor / every.c, of_estimate=every.floor / every.c / every.differ))
    runs = ARMS[ARMS.arm.str.contains('trunk')]
    columns = 'arm seed test_loss logit_mean logit_mean_spread row_norm mean_share x_norm'.split()
    print(runs[columns])
    for name, model, arms in (('nearest', SMALL, NEAREST), ('at random', AT_RANDOM, STOCHASTIC)):
        for s, runs in arms.items():
            over_floor = (runs.harm / FLOORS[model][s]).round(2).tolist()
            share = (runs.at_evaluation / runs.harm).round(2).tolist()
            print(f'{name}, s {s:g}: harm over floor {over_floor}, at evaluation {share}, '
                  f"logits' std {runs.logit_std.mean():.1f}")
    for dims in (96, 2):
        runs = compare(f'no drift, inputs rounded at 1400 in {dims} dims', 'no drift')
        print(f'inputs alone, {dims} dims: harm {runs.harm.round(4).tolist()}, at evaluation '
              f'{runs.at_evaluation.round(3).tolist()}')
    print(ARMS[ARMS.arm.str.startswith('SGD')][columns])
    authors = read_authors()
    ratio = authors.excess / authors.s.map(FLOORS[OF_AUTHORS])
    by_spacing = ratio.groupby(authors.s).agg(['median', 'min', 'max', 'size'])
    print('authors, loss over floor:', by_spacing, sep='\n')


if __name__ == '__main__':
    write(PAGES, TABLES)
    draw()
    print_numbers()
