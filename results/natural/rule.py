"""rule.csv and its numbers: what BF16 logits cost the small model, against the rule of results/mean_logit.

    python -m results.natural.rule
"""
from pathlib import Path

import numpy as np
import pandas as pd

from results.mean_logit.mean_logit import cost, hits

HERE = Path(__file__).parent
LEAST = 100  # |mean logit| of a pair


def read(table):
    rows = pd.read_csv(HERE / table / 'results.csv')
    rows['arm'] = rows.arm.fillna('')
    rows['seed'] = rows.run.str.extract(r'-s(\d+)', expand=False).astype(int)
    return rows[(rows.method == 'baseline') & (rows.weight_tying == 0)]


def find_pairs():
    """Each run with BF16 logits beside its twin, the same run with fp32 logits: [(table, arm, run, twin)]."""
    names = 'cause', 'grid', 'cause_0.3', 'demo', 'again', 'takes', 'slow_gain', 'rare'
    tables = {name: read(name) for name in names}
    grid = tables['grid']
    twins = grid[(grid.lr == 0.3) & (grid.arm == 'fp32 logits')]
    tables['cause_0.3'] = pd.concat([tables['cause_0.3'], twins])
    rare = tables['rare']
    tables['rare'] = rare[rare.run.str.startswith('bytes')]
    rounded = ['exact gradient', 'gradient at a random scale']
    arms = {  # of a table: (with BF16 logits, with fp32 logits)
        'cause': [(arm, 'fp32 logits') for arm in ('BF16 logits', *rounded)],
        'grid': [('', 'fp32 logits')],
        'cause_0.3': [(arm, 'fp32 logits') for arm in rounded],
        'demo': [('', 'fp32 logits')],
        'again': [('', 'fp32 logits')],
        'takes': [(arm, f'{arm}; fp32 logits') for arm in tables['takes'].arm if ';' not in arm],
        'slow_gain': [('gain at 1e-4', 'gain at 1e-4, fp32 logits')],
        'rare': [('baseline', 'fp32 logits')],
    }
    pairs = []
    for table, rows in tables.items():
        for arm, twin in arms[table]:
            both = rows[rows.arm == arm].merge(rows[rows.arm == twin], on=['lr', 'seed'],
                                               suffixes=('', '_twin'))
            pairs.append(both.assign(table=table, arm=arm or 'BF16 logits'))
    return pd.concat(pairs)


def rule():
    """A row a pair. The mean logit of rare rows is that weighted by frequency."""
    pairs = find_pairs()
    for end in ('', '_twin'):
        weighted = pairs[f'logit_mean_f{end}']
        pairs[f'mean{end}'] = pairs[f'logit_mean{end}'].where(pairs.table != 'rare', weighted)
    pairs['harm'] = pairs.test_loss - pairs.test_loss_twin
    pairs['at_evaluation'] = pairs.test_loss_bfloat16 - pairs.test_loss_float32
    pairs['c'] = cost(pairs['mean'], pairs.logit_mean_spread)
    pairs = pairs[pairs['mean'].abs() >= LEAST].drop_duplicates(['test_loss', 'test_loss_twin'])
    names = ['table', 'arm', 'lr', 'seed', 'test_loss', 'test_loss_twin', 'harm', 'at_evaluation', 'mean',
             'mean_twin', 'c', 'logit_std', 'logit_std_twin']
    return pairs[names].round(5)


def report(pairs):
    """The page's numbers."""
    n = len(pairs)
    print(f'{n} pairs; within 2: {hits(pairs.harm, pairs.c)}, within 1.5: {hits(pairs.harm, pairs.c, 1.5)}')
    rng = np.random.RandomState(1)
    shuffled = [hits(pairs.harm, rng.permutation(pairs.c)) for _ in range(2000)]
    print(f'c shuffled: {np.mean(shuffled):.1f}, at most {max(shuffled)}')
    large = pairs[pairs.harm > 0]
    x, y = np.log(large['mean']), np.log(large.harm)
    print('fitted power of the mean logit:', hits(large.harm, np.exp(np.polyval(np.polyfit(x, y, 1), x))))
    print(f'evaluation alone: {hits(pairs.at_evaluation, pairs.c)}, median of it over c '
          f'{(pairs.at_evaluation / pairs.c).median():.2f}')
    drift = pairs['mean'] / pairs.mean_twin
    print(f'mean logit above the twin\'s: {(drift > 1).sum()}, median {drift.median():.2f}, '
          f'at 0.3 {drift[pairs.lr == 0.3].median():.2f}')
    large = pairs[pairs['mean'] >= 128]
    share = large.at_evaluation / large.harm
    print(f'share of the harm at evaluation, from 128 on ({len(large)}): {share.min():.2f} to '
          f'{share.max():.2f}, median {share.median():.2f}')
    usual = pairs[pairs.table == 'cause']
    print('std of the logits at rate 1:', usual.logit_std.median(), usual.logit_std_twin.median())


if __name__ == '__main__':
    pairs = rule()
    pairs.to_csv(HERE / 'rule.csv', index=False)
    report(pairs)
