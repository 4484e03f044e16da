"""results.csv -> the tables of README.md, in the terminal, and figure.png"""
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tools import report  # noqa: E402

NAMES = {**report.NAMES, 'zipf_centering': 'Zipf-centering'}  # of older code
COLORS = {**report.COLORS, 'zipf_centering': '#0B6623'}

STACK = ['n_layer', 'weight_tying', 'cap', 'lr', 'steps', 'mu_shift']
TABLES = {'test_loss': 3, 'excess': 3, 'mu_norm': 2, 'zipf_norm': 2, 'logit_absmax': 1, 'logit_max': 1,
          'logit_mean': 2, 'zipf_logit_mean': 2, 'never_norm': 2, 'never_share': 2, 'often_norm': 2,
          'often_share': 2, 'cosine': 2}  # their digits


def with_excess(runs):
    """The runs with `excess`, the test loss above the baseline's of the same stack and seed."""
    baseline = runs[runs.method == 'baseline'].set_index([*STACK, 'seed']).test_loss
    keys = pd.MultiIndex.from_frame(runs[[*STACK, 'seed']])
    return runs.assign(excess=runs.test_loss - baseline.reindex(keys).to_numpy())


def over_seeds(runs, column, digits):
    """A row for each stack, a column for each method: of one run, or mean [lowest, highest] over seeds."""
    runs = runs.assign(value=runs[column].fillna(math.inf))  # a run that diverged
    seeds = runs.groupby([*STACK, 'method'], dropna=False, sort=False).value
    number = f'{{:.{digits}f}}'.format
    spread = seeds.min().map(number).str.cat(seeds.max().map(number), ', ')
    cells = seeds.mean().map(number)
    return cells.where(seeds.count() == 1, cells + ' [' + spread + ']').unstack(sort=False).fillna('')


def draw(runs):
    """`excess`, a dot for each run without a planted shift."""
    runs = runs.assign(label=[stack_name(run) for run in runs.itertuples()])
    runs = runs[runs.mu_shift == 0]
    figure, ax = plt.subplots(figsize=(7, 4.2), layout='constrained')
    labels = list(runs.label.unique())
    methods = [method for method in NAMES if method in set(runs.method)]
    for i, method in enumerate(methods):
        rows = runs[runs.method == method]
        ax.plot(rows.excess, [labels.index(label) + 0.2 * (i - 1) for label in rows.label], 'o', markersize=5,
                color=COLORS[method], label=NAMES[method])
    ax.axvline(0, color=COLORS['baseline'], linewidth=1, label='baseline')
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel('test loss - baseline of the same seed, nats')
    ax.legend()
    figure.savefig(HERE / 'figure.png', dpi=160)


def stack_name(run):
    """What a stack is called on the axis."""
    name = 'tied' if run.weight_tying else 'untied'
    if run.cap > 0:
        name += f', cap {run.cap:g}'
    return f'{name}, η = {run.lr:g}, {run.steps:,} steps'


if __name__ == '__main__':
    runs = with_excess(pd.read_csv(HERE / 'results.csv'))
    for column, digits in TABLES.items():
        print(column, over_seeds(runs, column, digits).to_string(), '', sep='\n')
    draw(runs)
