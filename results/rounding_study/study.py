"""tiny.csv, 16M.csv and curves.csv -> the tables of README.md, in the terminal, and figure.png"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tools import report  # noqa: E402

COLORS = {**report.COLORS, 'fp32 logits': 'black'}
NAMES = {**report.NAMES, 'fp32 logits': 'baseline, fp32 logits'}


def table(runs, rows, columns, digits=2):
    """Test losses: mean [lowest, highest] over the seeds, or that of the only one."""
    seeds = runs.groupby([*rows, columns], sort=False).test_loss
    number = f'{{:.{digits}f}}'.format
    cells = seeds.mean().map(number)
    spread = ' [' + seeds.min().map(number) + ', ' + seeds.max().map(number) + ']'
    return cells.where(seeds.count() == 1, cells + spread).unstack().fillna('').to_string()


def draw(runs, curves):
    """Left: test loss against the planted norm. Right: training loss at a constant learning rate."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
    runs = runs[(runs.steps == 300) & (runs.loss == 'now') & runs['head'].isin(['bfloat16', 'float32'])]
    for name, rows in runs[runs.mu_shift <= 1000].groupby('label', sort=False):
        line = rows.groupby('mu_shift').test_loss
        left.plot(rows.mu_shift, rows.test_loss, '.', color=COLORS[name])
        left.plot(line.mean(), color=COLORS[name], label=NAMES.get(name, name))
    left.set(xlabel='norm of the planted vector', ylabel='test loss, nats', yscale='log')
    left.set_yticks([2, 3, 4, 6, 10, 20], [2, 3, 4, 6, 10, 20])
    left.minorticks_off()
    left.legend(fontsize=8)
    for (name, seed), rows in curves.groupby(['label', 'seed'], sort=False):
        loss = rows.set_index('step').loss_of_step.rolling(10).mean()
        right.plot(loss, color=COLORS[name], linewidth=1, label=NAMES.get(name, name) if seed == 1 else None)
    right.set(xlabel='step, norm 331, three seeds', ylabel='training loss, over 200 steps')
    right.legend(fontsize=8)
    figure.savefig(HERE / 'figure.png', dpi=140)


if __name__ == '__main__':
    pd.set_option('display.width', 200, 'display.max_columns', 30, 'display.precision', 3)
    tiny, large, curves = (pd.read_csv(HERE / f'{name}.csv') for name in ('tiny', '16M', 'curves'))
    for runs in (tiny, large, curves):
        runs['label'] = runs.method.where(runs['head'] != 'float32', 'fp32 logits')
    short = tiny[tiny.steps == 300]
    usual = short['head'].isin(['bfloat16', 'float32'])
    print('tiny', table(short[usual & (short.loss == 'now')], ['label'], 'mu_shift'), sep='\n')
    print('16M', table(large[large.loss == 'now'], ['label'], 'mu_shift'), sep='\n')
    for name, runs in (('tiny', short[usual]), ('16M', large)):
        both = runs.groupby(['label', 'mu_shift']).loss.transform('nunique') == 2
        print(f'{name}, before and now', table(runs[both], ['label', 'mu_shift'], 'loss'), sep='\n')
    parts = short[(short.method == 'baseline') & (short.loss == 'now') & (short.mu_shift == 331)]
    print('parts', table(parts, ['head'], 'mu_shift'), sep='\n')
    final = pd.concat([short[usual].assign(size='tiny'), large.assign(size='16M')]).query('loss == "now"')
    final['rounding'] = final.loss_bfloat16 - final.loss_float32
    final = final.groupby(['size', 'label', 'mu_shift'], sort=False)
    print(final[['mu_norm', 'logit_mean', 'logit_mean_spread', 'rounding']].agg(['min', 'max']).to_string())
    usual = short[usual & (short.loss == 'now')].set_index(['label', 'mu_shift', 'seed']).test_loss
    gap = usual - usual.loc['mu_centering'].reindex(usual.index.droplevel('label')).to_numpy()
    print('tiny, above mu_centering', gap.groupby(['label', 'mu_shift']).agg(['min', 'max']).T, sep='\n')
    windows = pd.cut(curves.step, [0, 100, 300, 600, 1000, 1500])
    means = curves.groupby([windows, 'label', 'seed'], observed=True)[['loss_of_step', 'logit_mean']].mean()
    loss = means.loss_of_step.unstack('label')
    print('above mu_centering, by steps', loss.sub(loss.mu_centering, axis=0).unstack().round(2), sep='\n')
    print(means.logit_mean.unstack(['label', 'seed']).round(1))
    draw(tiny, curves)
