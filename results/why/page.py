"""The tables of README.md, its figure and its numbers, from the csv files: python -m results.why.page"""
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from results.mean_logit.mean_logit import cost, read_runs
from results.natural.page import markdown

HERE = Path(__file__).parent
ARMS = pd.read_csv(HERE / 'arms.csv')
FLOORS = pd.read_csv(HERE / 'floor.csv').pivot(index='s', columns='model', values='floor')
SMALL, OF_AUTHORS = 'laptop-0.003', 'gpt2^3.6'  # whose p


def spacing(mean, bits=8):
    """The distance of neighbouring numbers of `bits` significant bits around a mean logit."""
    return 2.0 ** (np.floor(np.log2(np.abs(mean))) + 1 - bits)


def compare(arm, twin):
    """The runs of an arm by seed, with their harm: the test loss above that of the twin of the same seed."""
    runs = ARMS[ARMS.arm == arm].set_index('seed').sort_index()
    loss_of_twin = ARMS[ARMS.arm == twin].set_index('seed').test_loss
    at_evaluation = runs.test_loss - runs.test_loss_exact
    return runs.assign(harm=runs.test_loss - loss_of_twin, at_evaluation=at_evaluation)


def without_drift(name):
    """{spacing: runs} of the arms "NAME MEAN"."""
    found = {}
    for arm in ARMS.arm.unique():
        match = re.fullmatch(f'{name} (\\d+)', arm)
        if match:
            found[spacing(int(match[1]))] = compare(arm, 'no drift')
    return dict(sorted(found.items()))


def read_authors():
    """The authors' runs of results/mean_logit from 64 on, with the spacing at their mean logit as s."""
    runs = read_runs().dropna(subset='kind')
    runs = runs[runs.logit_mean.abs() >= 64]
    return runs.assign(s=spacing(runs.logit_mean))


NEAREST = without_drift('no drift, rounded at')
STOCHASTIC = without_drift('no drift, rounded at random at')


# -------- the tables
def by_seed(values, digits):
    return ', '.join(f'{x:.{digits}f}' for x in values)


def harm_table():
    authors = read_authors().groupby('s').excess.agg(['median', 'size'])
    lines = []
    for s, floors in FLOORS.iterrows():
        line = {'s': f'{s:g}', 'c': f'{cost(s * 128):#.2g}', 'floor': f'{floors[SMALL]:#.2g}', 'harm': '',
                'at random': '', 'GPT-2 tokens: floor': f'{floors[OF_AUTHORS]:#.2g}', 'the authors': ''}
        if s in NEAREST:
            line['harm'] = by_seed(NEAREST[s].harm, 3 if s < 4 else 2)
        if s in STOCHASTIC:
            line['at random'] = by_seed(STOCHASTIC[s].harm, 3 if s < 4 else 2)
        if s in authors.index:
            line['the authors'] = f'{authors["median"][s]:#.2g} ({authors["size"][s]})'
        lines.append(line)
    return pd.DataFrame(lines).set_index('s')


def bits_table():
    lines = []
    for arm in ('7 bits', '8 bits', '9 bits', '11 bits', 'inputs rounded alone', 'BF16 logits'):
        runs = compare(arm, 'fp32 logits')
        line = {'at a rate of 1': arm, 'mean logit': by_seed(runs.logit_mean, 0), 'c': '',
                'harm': by_seed(runs.harm, 2)}
        if 'inputs' not in arm:
            bits = int(arm.split()[0]) if 'bits' in arm else 8
            line['c'] = by_seed(cost(runs.logit_mean, runs.logit_mean_spread, bits), 2)
        lines.append(line)
    return pd.DataFrame(lines).set_index('at a rate of 1')


def rates_table():
    lines = []
    for arm in ('E at 1, trunk at 0.003', 'E at 0.003, trunk at 1', 'bounded trunk'):
        twin = f'{arm}, fp32'
        runs = compare(f'{arm}, BF16', twin)
        lines.append({'rate of': arm, 'mean logit': by_seed(runs.logit_mean, 0),
                      'with fp32 logits': by_seed(compare(twin, twin).logit_mean, 0),
                      'harm': by_seed(runs.harm, 2)})
    return pd.DataFrame(lines).set_index('rate of')


TABLES = {'harm': harm_table, 'bits': bits_table, 'rates': rates_table}


def with_tables(text):
    """A page with what stands between <!-- NAME --> and <!-- end --> replaced by that table."""
    def table(match):
        return f'<!-- {match[1]} -->\n{markdown(TABLES[match[1]]())}\n<!-- end -->'
    return re.sub(r'<!-- (\w+) -->\n.*?<!-- end -->', table, text, flags=re.S)


# -------- the figure and other numbers
def draw():
    """Harm against the spacing of the logits."""
    figure, ax = plt.subplots(figsize=(7.5, 4.8), layout='constrained')
    s = np.geomspace(0.45, 18)
    ax.plot(s, np.log(np.sinh(s / 2) / (s / 2)), 'k--', linewidth=1, label='c')
    for model, color, name in ((SMALL, 'C0', 'small model at 0.003'), ('laptop-1', 'C1', 'small model at 1'),
                               (OF_AUTHORS, 'C3', 'GPT-2 tokens, 3.6 nats')):
        ax.plot(FLOORS.index, FLOORS[model], color, linewidth=1, label=f'floor: {name}')

    for i, (s, runs) in enumerate(NEAREST.items()):
        ax.plot([s] * len(runs), runs.harm, 'C0o', markersize=5,
                label='small model at 0.003, rounded without drift' if i == 0 else None)
    pairs = pd.read_csv(HERE.parent / 'natural/rule.csv')
    ax.plot(1.12 * spacing(pairs['mean']), pairs.harm.clip(0.003), 'C1^', markersize=5, alpha=0.6,
            label='small model, natural drift (35 pairs)')
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
    for name, runs_by_spacing in (('nearest', NEAREST), ('stochastic', STOCHASTIC)):
        for s, runs in runs_by_spacing.items():
            over_floor = (runs.harm / FLOORS[SMALL].get(s)).round(2).tolist()
            share = (runs.at_evaluation / runs.harm).round(2).tolist()
            print(f'{name}, s {s:g}: harm over floor {over_floor}, at evaluation {share}, '
                  f"logits' std {runs.logit_std.mean():.1f}")
    authors = read_authors()
    ratio = authors.excess / authors.s.map(FLOORS[OF_AUTHORS])
    by_spacing = ratio.groupby(authors.s).agg(['median', 'min', 'max', 'size'])
    print('authors, loss over floor:', by_spacing, sep='\n')


if __name__ == '__main__':
    page = HERE / 'README.md'
    page.write_text(with_tables(page.read_text(encoding='utf-8')), encoding='utf-8')
    draw()
    print_numbers()
