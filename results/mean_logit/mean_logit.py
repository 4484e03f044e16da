"""mean_logit.csv, figure.png and README.md's numbers: python -m results.mean_logit.mean_logit"""
from pathlib import Path
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
LOWEST = 0.003  # of the figure: smaller losses, and gains, are drawn here
NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 1000) for i in range(1000)])
LOOKS = {'tied baseline': '^C1', 'λ = 1e-7': 'DC2', 'untied baseline': 'oC3'}  # kinds of runs


def spacing(x, bits=8):
    """The distance s of neighbouring numbers of so many significant bits at x."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 1e-3))) + 1 - bits)


def cost_of_spacing(s):
    """What errors that are uniform in a range of width s, and independent, cost in nats."""
    return np.log(np.sinh(s / 2) / (s / 2))


def cost(mean, spread=0.0, bits=8):
    """c: what rounding logits to so many bits costs, for mean logits that are N(mean, spread)."""
    means = np.asarray(mean)[..., None] + np.asarray(spread)[..., None] * NORMAL
    return cost_of_spacing(spacing(means, bits)).mean(axis=-1)


def read_runs():
    """The authors' runs of the page, beside μ-loss of the same size, tying and learning rate."""
    runs = pd.read_csv(HERE.parent / 'authors/results.csv')
    default = runs.lam.isna() | (runs.lam == 1e-4)
    place = ['weight_tying', 'size', 'lr']
    mu_loss = runs[default & (runs.method == 'mu_loss')].set_index(place).test_loss
    runs = runs.join(mu_loss.rename('mu_loss'), on=place)
    runs['excess'] = runs.test_loss - runs.mu_loss

    # the spread of weight decay is not known: half of the mean logit, the median of the others
    size = runs.logit_mean.abs()
    runs['c'] = cost(runs.logit_mean, runs.logit_mean_spread.fillna(size / 2))
    runs['ratio'] = (runs.excess / runs.c).where(size >= 64)  # below, c is next to nothing

    # `kind` is that of the runs that the rule is held against; the page names others too
    tying = runs.weight_tying.map({0: 'untied baseline', 1: 'tied baseline'})
    runs['kind'] = tying.where(runs.method == 'baseline')
    runs.loc[runs.lam == 1e-7, 'kind'] = 'λ = 1e-7'  # of z-loss and μ-loss
    others = default & runs.method.isin(['weight_decay', 'z_loss', 'mu_centering'])
    runs = runs[runs.kind.notna() | others]
    runs = runs[['kind', 'method', 'lam', *place, 'mu_norm', 'logit_mean', 'logit_mean_spread',
                 'test_loss', 'mu_loss', 'excess', 'c', 'ratio']]
    return runs.round({'excess': 6, 'c': 6, 'ratio': 3})


def hits(loss, estimate, factor=2.0):
    """How many losses are within a factor of their estimates."""
    return int((loss / estimate).between(1 / factor, factor).sum())


def report(every):
    """README.md's numbers."""
    pd.set_option('display.width', 200, 'display.max_columns', 20, 'display.precision', 3)
    runs = every[every.kind.notna()]
    large = runs[runs.logit_mean.abs() >= 64]
    print(f'within a factor of 2: {hits(large.excess, large.c)} of {len(large)}, within 1.5: '
          f'{hits(large.excess, large.c, 1.5)}, median of loss over c {large.ratio.median():.2f}')
    largest = large[large.logit_mean.abs() >= 500].ratio
    print(f'loss over c from 500 on: {largest.min()} to {largest.max()}, {len(largest)} runs')

    for what, by in (('all runs', np.zeros(len(large))), ('runs of one rate', large.lr)):
        rng = np.random.RandomState(1)
        n_hits = []
        for _ in range(2000):
            shuffled = large.groupby(by).c.transform(rng.permutation)
            n_hits.append(hits(large.excess, shuffled))
        print(f'c shuffled among {what}: within a factor of 2 {np.mean(n_hits):.1f}')

    length = np.log(np.hypot(large.logit_mean, large.logit_mean_spread))
    power = np.polyfit(length, np.log(large.excess), 1)
    print('fitted power of the length:', hits(large.excess, np.exp(np.polyval(power, length))))

    untied = runs[(runs.weight_tying == 0) & (runs.lr == 0.3)]
    print('untied, at 0.3:', untied[['mu_norm', 'excess']].agg(['count', 'min', 'max']), sep='\n')
    print(np.log(untied[['excess', 'c', 'mu_norm']]).corr())
    decayed = every[(every.method == 'weight_decay') & (every.logit_mean.abs() >= 64)]
    print('runs with weight decay from 64 on:', len(decayed))
    z_loss = every[(every.method == 'z_loss') & (every.lam == 1e-4) & (every.lr == 0.3)]
    print('z-loss, at 0.3:', z_loss[['logit_mean', 'c', 'excess']].describe(), sep='\n')
    small = every[(every['size'] == '221M') & (every.lr == 0.03) & (every.weight_tying == 0)]
    print('221M, at 0.03:', small[['method', 'lam', 'logit_mean', 'c', 'excess']], sep='\n')
    missed = large[~large.ratio.between(0.5, 2)]
    print('beyond a factor of 2:', missed[['kind', 'size', 'lr', 'logit_mean', 'c', 'excess']])
    centered = every[every.method == 'mu_centering'].excess
    print('μ-centering and μ-loss differ by', centered.abs().max())


def draw(runs):
    """What runs lost. Left: against their mean logit. Right: against what rounding should cost."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout='constrained', sharey=True)
    x = np.geomspace(4, 4096, 4000)
    left.plot(x, cost(x), 'k', linewidth=0.6,
              label='c = log(sinh(s/2) / (s/2)), s: distance of BF16 numbers')
    left.plot(x, cost(x, x / 2), 'k', linewidth=2, label='c over a spread of half the mean logit')
    ends = np.array([LOWEST, 9])
    right.plot(ends, ends, 'k', linewidth=2, label='as estimated; grey: to a factor of two')
    right.fill_between(ends, ends / 2, 2 * ends, color='black', alpha=0.08)

    for kind, look in LOOKS.items():
        of_kind = runs[runs.kind == kind]
        loss = of_kind.excess.clip(LOWEST)
        right.plot(of_kind.c.clip(LOWEST), loss, look, markersize=5, alpha=0.8,
                   label=f'{kind} ({len(of_kind)})')
        left.plot(of_kind.logit_mean.abs().clip(4), loss, look, markersize=5, alpha=0.8)

    left.set(xlabel="|mean logit| at the run's end (4: or less)",
             ylabel="test loss above μ-loss's, nats")
    right.set(xlabel=f"c over the run's own spread of mean logits, nothing fitted ({LOWEST}: or less)")
    for ax in (left, right):
        ax.set(xscale='log', yscale='log', ylim=(LOWEST * 0.9, 9))
        ax.legend(loc='upper left', fontsize=8)
    figure.savefig(HERE / 'figure.png', dpi=75)


if __name__ == '__main__':
    runs = read_runs()
    runs.to_csv(HERE / 'mean_logit.csv', index=False)
    report(runs)
    draw(runs)
