"""mean_logit.csv, README.md's numbers and figure.png: python -m results.mean_logit.mean_logit"""
from pathlib import Path
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
FLOOR = 0.003  # of the figure: smaller losses, and gains, are drawn here
NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 1000) for i in range(1000)])
LOOKS = {'tied baseline': '^C1', 'λ = 1e-7': 'DC2', 'untied baseline': 'oC3'}  # kinds of runs without cure


def cost(mean, spread=0.0, bits=8):
    """What rounding logits costs, in nats: errors uniform and independent, mean logits N(mean, spread)."""
    m = np.abs(np.asarray(mean)[..., None] + np.asarray(spread)[..., None] * NORMAL)
    half = 2.0 ** (np.floor(np.log2(np.maximum(m, 1e-3))) - bits)  # of the distance of neighbouring numbers
    return np.log(np.sinh(half) / half).mean(axis=-1)


def read_runs():
    """The authors' runs that the page speaks of, beside μ-loss of the same size, tying and learning rate."""
    runs = pd.read_csv(HERE.parent / 'authors/results.csv')
    default = runs.lam.isna() | (runs.lam == 1e-4)
    tying = runs.weight_tying.map({0: 'untied baseline', 1: 'tied baseline'})
    runs['kind'] = tying.where(runs.method == 'baseline')
    runs.loc[runs.lam == 1e-7, 'kind'] = 'λ = 1e-7'  # of z-loss and μ-loss
    shown = runs.kind.notna() | default & runs.method.isin(['weight_decay', 'z_loss', 'mu_centering'])
    where = ['weight_tying', 'size', 'lr']
    cured = runs[default & (runs.method == 'mu_loss')].set_index(where).test_loss.rename('mu_loss')
    runs = runs[shown].join(cured, on=where, validate='many_to_one')
    runs['excess'] = runs.test_loss - runs.mu_loss
    runs['c_at_mean'] = cost(runs.logit_mean)
    # the spread of weight decay is not known: half of the mean logit, the median of the others
    runs['c'] = cost(runs.logit_mean, runs.logit_mean_spread.fillna(runs.logit_mean.abs() / 2))
    runs['ratio'] = (runs.excess / runs.c).where(runs.logit_mean.abs() >= 64)  # below, c is next to nothing
    runs = runs[['kind', 'method', 'lam', *where, 'mu_norm', 'logit_mean', 'logit_mean_spread', 'test_loss',
                 'mu_loss', 'excess', 'c_at_mean', 'c', 'ratio']]
    return runs.round({'excess': 6, 'c_at_mean': 6, 'c': 6, 'ratio': 3})


def hits(loss, estimate, factor=2.0):
    """How many losses are within a factor of their estimates."""
    return int((loss / estimate).between(1 / factor, factor).sum())


def report(every):
    """README.md's numbers."""
    pd.set_option('display.width', 200, 'display.max_columns', 20, 'display.precision', 3)
    runs = every[every.kind.notna()]
    size = runs.logit_mean.abs()
    print(runs.groupby(2 ** np.log2(size.clip(32)).astype(int)).excess.agg(['count', 'median', 'min', 'max']))
    for least in (32, 64, 100):
        some = runs[size >= least]
        print(f'within a factor of 2, from {least} on: {hits(some.excess, some.c)} of {len(some)}')

    large = runs[size >= 64].assign(length=lambda x: np.hypot(x.logit_mean, x.logit_mean_spread))
    print('within a factor of 2, by the mean logit alone:', hits(large.excess, large.c_at_mean))
    others = large[~large.ratio.between(1 / 1.5, 1.5)]
    print('within a factor of 1.5:', hits(large.excess, large.c, 1.5), 'others:', others, sep='\n')
    print('loss / c from 500 on:', large.ratio[size >= 500].agg(['count', 'min', 'max']).to_dict())
    for bits in (7, 8, 9):
        c = cost(large.logit_mean, large.logit_mean_spread, bits)
        print(f'{bits} bits: median of loss / c {(large.excess / c).median():.2f}')
    for what, by in (('all runs', large.index * 0), ('runs of one rate', large.lr)):
        rng = np.random.RandomState(1)
        n = [hits(large.excess, large.groupby(by).c.transform(rng.permutation)) for _ in range(2000)]
        print(f'c shuffled among {what}: within a factor of 2 {np.mean(n):.1f}, at most {max(n)}')
    for name in ('lr', 'mu_norm', 'logit_mean', 'length'):
        x, y = np.log(large[name]), np.log(large.excess)
        print(f'fitted power of {name}:', hits(large.excess, np.exp(np.polyval(np.polyfit(x, y, 1), x))))
    for rows in ('method == "weight_decay" and logit_mean >= 64', 'lr == 0.03 and size == "221M"',
                 'method == "z_loss" and lam == 1e-4 and lr == 0.3'):
        print(rows, every.query(rows), sep='\n')
    untied = runs[(runs.weight_tying == 0) & (runs.lr == 0.3)]
    print('untied, at 0.3', untied, np.log(untied[['excess', 'c', 'mu_norm']]).corr(), sep='\n')
    norms = untied.set_index(['method', 'size'])[['mu_norm', 'logit_mean']].sort_index()
    print(norms.div(norms.loc['baseline'], level='size').groupby('method').agg(['min', 'max']))
    print('μ-centering and μ-loss differ by', every.excess[every.method == 'mu_centering'].abs().max())


def draw(runs):
    """Left: what runs lost, against their mean logit. Right: against what rounding there should cost."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout='constrained', sharey=True)
    x = np.geomspace(4, 4096, 4000)
    left.plot(x, cost(x), 'k', linewidth=0.6, label='c = log(sinh(s/2) / (s/2)), s: distance of BF16 numbers')
    left.plot(x, cost(x, x / 2), 'k', linewidth=2, label='c over a spread of half the mean logit')
    right.plot([FLOOR, 9], [FLOOR, 9], 'k', linewidth=2, label='as estimated; grey: to a factor of two')
    right.fill_between([FLOOR, 9], [FLOOR / 2, 4.5], [2 * FLOOR, 18], color='black', alpha=0.08)
    for kind, look in LOOKS.items():
        x, c, loss = runs.loc[runs.kind == kind, ['logit_mean', 'c', 'excess']].T.to_numpy()
        left.plot(np.abs(x).clip(4), loss.clip(FLOOR), look, markersize=5, alpha=0.8)
        right.plot(c.clip(FLOOR), loss.clip(FLOOR), look, markersize=5, alpha=0.8, label=f'{kind} ({len(x)})')
    left.set(xlabel="|mean logit| at the run's end (4: or less)", ylabel="test loss above μ-loss's, nats")
    right.set(xlabel=f"c over the run's own spread of mean logits, nothing fitted ({FLOOR}: or less)")
    for ax in (left, right):
        ax.set(xscale='log', yscale='log', ylim=(FLOOR * 0.9, 9))
        ax.legend(loc='upper left', fontsize=8)
    figure.savefig(HERE / 'figure.png', dpi=75)


if __name__ == '__main__':
    runs = read_runs()
    runs.to_csv(HERE / 'mean_logit.csv', index=False)
    report(runs)
    draw(runs)
