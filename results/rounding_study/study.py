"""The csv files of this folder -> the tables of README.md, in the terminal, and figure.png"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from analysis import report  # noqa: E402

# with methods of older code
NAMES = {**report.NAMES, 'muon_head': 'Muon on the head', 'zipf_centering': 'Zipf-centering'}
COLORS = {**report.COLORS, 'muon_head': '#1B1464', 'zipf_centering': '#0B6623'}

LONG = 1000  # steps of the runs at a constant learning rate


def table(runs):
    """Test losses by method and norm: of one run, or mean [lowest, highest] over the seeds."""
    seeds = runs.groupby(['cpu', 'method', 'logits_dtype', 'mu_shift']).test_loss
    cells = seeds.mean().map('{:.2f}'.format)
    spread = seeds.min().map(' [{:.2f}, '.format) + seeds.max().map('{:.2f}]'.format)
    return cells.where(seeds.count() == 1, cells + spread).unstack().fillna('')


def gaps(curves, windows=((21, 60), (261, 300), (701, 1000))):
    """The baseline's training loss above mu_centering's, means over these steps, and its mean logit there."""
    rows = []
    for first, last in windows:
        means = curves[curves.step.between(first, last)].groupby(['seed', 'method']).mean()
        loss = means.loss.unstack()
        logit = means.logit_mean.unstack()
        rows += [{'steps': f'{first} to {last}', 'seed': seed, 'gap': gap, 'mean logit': logit.baseline[seed]}
                 for seed, gap in (loss.baseline - loss.mu_centering).items()]
    return pd.DataFrame(rows)


def excess(runs, by):
    """The runs and their test loss above mu_centering's mean over seeds, in the same setting."""
    centered = runs[runs.method == 'mu_centering'].groupby(by).test_loss.mean().rename('centered')
    runs = runs.merge(centered, on=by)
    return runs.assign(excess=runs.test_loss - runs.centered)


def draw(runs, authors):
    """Left: what runs lose, against where mu ends. Right: what rounding the logits costs the final models."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout='constrained')
    usual = runs[runs.logits_dtype == 'bfloat16']
    for method, rows in excess(usual, ['mu_shift', 'steps', 'cpu']).groupby('method', sort=False):
        left.plot(rows.mu_norm, rows.excess, 'o', color=COLORS[method], label=NAMES.get(method, method))
    published = excess(authors, ['size', 'lr'])
    for method, rows in (('baseline', published[published.method == 'baseline']),
                         ('z_loss', published[(published.method == 'z_loss') & (published.lam == 1e-4)])):
        left.plot(rows.mu_norm, rows.excess, 'x', color=COLORS[method],
                  label=f"{NAMES.get(method, method)}, the authors' five sizes")
    left.set(xlabel=r'$\|\mu\|$ at the end', ylabel='test loss above μ-centering, nats')
    left.set_xscale('symlog', linthresh=1)
    left.set_yscale('symlog', linthresh=0.1)
    left.legend(fontsize=7)

    for (method, dtype), rows in runs.groupby(['method', 'logits_dtype'], sort=False):
        marker, label = ('^', f'{method}, fp32 head') if dtype == 'float32' else ('o', None)
        right.plot(rows.logit_mean.abs(), rows.rounding_loss, marker, color=COLORS[method], label=label)
    mean = np.geomspace(8, 8192, 2000)
    half = 2.0 ** (np.floor(np.log2(mean)) - 8)  # half of the distance between neighbouring bf16 numbers
    right.plot(mean, np.log(np.sinh(half) / half), color='black', linewidth=0.8,
               label='independent, uniform errors')
    right.set(xlabel='|mean logit| at the end',
              ylabel='test loss, bf16 logits - fp32 logits, nats')
    right.set_xscale('symlog', linthresh=1)
    right.set_yscale('symlog', linthresh=1e-3)
    right.legend(fontsize=7)
    figure.suptitle(
        'Test loss against ‖μ‖, and what rounding final logits costs (dots: 16M after a shift)')
    figure.savefig(HERE / 'figure.png', dpi=160)


if __name__ == '__main__':
    runs = pd.read_csv(HERE / 'results.csv')
    draw(runs[runs.steps != LONG], pd.read_csv(HERE.parent / 'authors' / 'results.csv'))
    print(table(runs[runs.steps != LONG]).to_string())
    print(gaps(pd.read_csv(HERE / 'curves.csv')).to_string())
