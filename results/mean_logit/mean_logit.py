"""
The csv files of the folders beside this one -> mean_logit.csv, a line for each run with BF16 logits and no
cure: what it lost, and what rounding at its mean logit should cost; README.md's numbers, in the terminal;
and figure.png.
"""
import sys
from pathlib import Path
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
RESULTS = HERE.parent
sys.path.insert(0, str(RESULTS.parent))

from results.drift import drift  # noqa: E402

FLOOR = 0.003  # of the figure: smaller losses, and gains, are drawn here
NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 1000) for i in range(1000)])
COLUMNS = ('source method lam size weight_tying lr seed steps mu_shift mu_norm logit_mean logit_mean_spread '
           'test_loss partner').split()
LOOKS = {'ours, no shift': '.C7', 'ours, planted shift': 'sC0', 'authors, tied': '^C1',
         'authors, λ = 1e-7': 'DC2', 'authors, untied': 'oC3'}


def cost(mean, spread=0.0, bits=8):
    """What rounding logits costs, in nats: errors uniform and independent, mean logits N(mean, spread)."""
    m = np.abs(np.asarray(mean)[..., None] + np.asarray(spread)[..., None] * NORMAL)
    half = 2.0 ** (np.floor(np.log2(np.maximum(m, 1e-3))) - bits)  # of the distance of neighbouring numbers
    return np.log(np.sinh(half) / half).mean(axis=-1)


def beside(runs, source, by, partner='mu_centering', **more):
    """The runs with BF16 logits and no cure, each with the loss of the cured one that shares `by`."""
    columns = list(dict.fromkeys([*COLUMNS, *by, 'logits_dtype']))
    runs = runs.assign(source=source, **more).reindex(columns=columns).query('logits_dtype != "float32"')
    cured = runs[(runs.method == partner) & (runs.lam.isna() | (runs.lam == 1e-4))]
    runs = runs[(runs.method == 'baseline') | (runs.lam == 1e-7)]
    cured = cured.assign(partner=cured.test_loss)[[*by, 'partner']]
    return runs.drop(columns='partner').merge(cured, on=by, validate='many_to_one').dropna(axis=1, how='all')


def read_all():
    """The runs of each folder. Tied or capped, centering trains another model: of ours those are left out."""
    runs = pd.read_csv(RESULTS / 'authors/results.csv')
    yield beside(runs, 'authors', ['weight_tying', 'size', 'lr'], 'mu_loss')
    for size in ('tiny', '16M'):
        runs = pd.read_csv(RESULTS / f'rounding_study/{size}.csv')
        runs = runs.query('loss == "now" and head == "bfloat16"')
        yield beside(runs, 'rounding_study', ['mu_shift', 'seed', 'steps'], size=size, lr=1e-2)
    for name in ('tiny_grid', 'combined'):  # a shift of 331 in `combined` met the loss until 2102aab
        runs = pd.read_csv(RESULTS / name / 'results.csv')
        runs = runs.query('weight_tying == 0 and cap.isna() and mu_shift == 0')
        yield beside(runs, name, ['lr', 'seed', 'steps'], size=runs.get('size', '16M'))
    runs = drift.with_baselines(pd.read_csv(RESULTS / 'drift/runs.csv')).query('batch_size == 8')
    table = drift.at_equal_steps(runs, pd.read_csv(RESULTS / 'drift/curves.csv').query('run in @runs.run'))
    names = {'‖μ‖': 'mu_norm', 'mean logit': 'logit_mean', 'spread': 'logit_mean_spread'}
    table = table.rename(columns=names)
    yield beside(runs.join(table, on='run'), 'drift', ['card', 'seed'], test_loss=table.iloc[:, 0].to_numpy())


def report(runs):
    """README.md's numbers."""
    pd.set_option('display.width', 200, 'display.max_columns', 20, 'display.precision', 3)
    shown = ['method', 'lam', 'size', 'weight_tying', 'lr', 'mu_norm', 'logit_mean', 'logit_mean_spread',
             'excess', 'predicted', 'ratio']
    published = runs[runs.source == 'authors']
    large = published[published.logit_mean.abs() >= 64]
    logs = np.log(large[['excess', 'predicted']])
    print(f"{len(large)} of the authors' runs have |mean logit| >= 64; within a factor of 1.5 and 2 of c are",
          [int(large.ratio.between(1 / factor, factor).sum()) for factor in (1.5, 2)])
    print('excess over c: median', large.ratio.median(), 'r of logs', logs.corr().excess.predicted,
          'mean difference in nats', (large.excess - large.predicted).abs().mean())
    for bits in range(6, 11):
        other = large.excess / cost(large.logit_mean, large.logit_mean_spread, bits)
        print(f'with numbers of {bits} significant bits, median {other.median():.2f}')
    print(large.groupby('label')[['excess', 'ratio']].agg(['count', 'min', 'median', 'max']))
    print('from 500', large[large.logit_mean.abs() >= 500].ratio.describe(), sep='\n')
    print('beyond a factor of 1.5', large[~large.ratio.between(1 / 1.5, 1.5)][shown], sep='\n')
    same = published.query('lr == 0.3 and weight_tying == 0')[shown]
    logs = np.log(same[['excess', 'predicted', 'mu_norm']])
    print('untied, at 0.3', same.describe(), 'r of logs', logs.corr(), sep='\n')
    print(same[same['size'] == '29M'])
    small = published[published.logit_mean.abs() < 64]
    print('below 64', small[['excess', 'predicted']].describe(percentiles=[0.05, 0.95]), sep='\n')
    print(small.nlargest(1, 'excess')[shown])
    every = pd.read_csv(RESULTS / 'authors/results.csv').set_index(['weight_tying', 'size', 'lr'])
    usual = every.lam.isna() | (every.lam == 1e-4)
    mu_loss = every[usual & (every.method == 'mu_loss')].test_loss
    every['excess'] = every.test_loss - mu_loss.reindex(every.index)
    # of weight decay the spread is not known: half of the mean logit, the median of the others
    every['predicted'] = cost(every.logit_mean, every.logit_mean_spread.fillna(every.logit_mean.abs() / 2))
    every['ratio'] = every.excess / every.predicted
    decay = every[(every.method == 'weight_decay') & (every.logit_mean.abs() >= 64)]
    z_loss = every[usual & (every.method == 'z_loss')].query('lr == 0.3')
    for rows in (decay, z_loss):
        print(rows[['method', 'logit_mean', 'excess', 'predicted', 'ratio']])
    for name, rows in (('all', published), ('baselines', published[published.method == 'baseline']),
                       ('ours', runs[runs.source != 'authors'])):
        octaves = rows.groupby(2 ** np.log2(rows.logit_mean.abs().clip(32)).astype(int))[['excess', 'ratio']]
        print(name, octaves.agg(['count', 'median', 'min', 'max']), sep='\n')
    ours = runs[runs.source != 'authors'].groupby(['source', 'size', 'lr', 'mu_shift', 'steps'])
    print(ours[['logit_mean', 'excess', 'predicted']].agg(['count', 'min', 'max']))


def draw(runs):
    """Left: what runs lost, against their mean logit. Right: against what rounding there should cost."""
    published = (runs.source == 'authors') & (runs.logit_mean.abs() >= 64)
    share = (runs.logit_mean_spread / runs.logit_mean.abs())[published].median()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout='constrained', sharey=True)
    x = np.geomspace(4, 16384, 4000)
    left.plot(x, cost(x), 'k', linewidth=0.6, label='c = log(sinh(s/2) / (s/2)), s: distance of BF16 numbers')
    left.plot(x, cost(x, share * x), 'k', linewidth=2, label=f'c over a spread of {share:.2f} |mean logit|')
    right.plot([FLOOR, 30], [FLOOR, 30], 'k', linewidth=2, label='as predicted; grey: to a factor of two')
    right.fill_between([FLOOR, 30], [FLOOR / 2, 15], [2 * FLOOR, 60], color='black', alpha=0.08)
    for label, look in LOOKS.items():
        x, *xy = runs[runs.label == label][['logit_mean', 'predicted', 'excess']].T.to_numpy()
        left.plot(np.abs(x).clip(4), xy[1].clip(FLOOR), look, markersize=5, alpha=0.8)
        right.plot(*np.clip(xy, FLOOR, 30), look, markersize=5, alpha=0.8, label=f'{label} ({len(x)})')
    left.set(xlabel="|mean logit| at the run's end (4: or less)", ylabel='test loss above a cured run, nats')
    right.set(xlabel=f"c over the run's own spread of mean logits, nothing fitted ({FLOOR}: or less)")
    for ax in (left, right):
        ax.set(xscale='log', yscale='log', ylim=(FLOOR * 0.9, 30))
        ax.legend(loc='upper left', fontsize=8)
    figure.savefig(HERE / 'figure.png', dpi=140)


if __name__ == '__main__':
    runs = pd.concat(read_all(), ignore_index=True).reindex(columns=COLUMNS)
    runs = runs.fillna({'mu_shift': 0, 'weight_tying': 0}).astype({'weight_tying': int})
    runs['excess'] = runs.test_loss - runs.partner
    runs['predicted'] = cost(runs.logit_mean, runs.logit_mean_spread.fillna(0))  # where it was not recorded
    runs.round({'excess': 6, 'predicted': 6}).to_csv(HERE / 'mean_logit.csv', index=False)
    published = runs.source == 'authors'
    kinds = [runs.lam == 1e-7, published & (runs.weight_tying == 1), published, runs.mu_shift > 0]
    runs['label'] = np.select(kinds, [list(LOOKS)[i] for i in (3, 2, 4, 1)], 'ours, no shift')
    runs['ratio'] = runs.excess / runs.predicted
    report(runs)
    draw(runs)
