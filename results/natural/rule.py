"""
rule.csv and its numbers: what BF16 logits cost the small model, against results/mean_logit's rule.

    python -m results.natural.rule
"""
from pathlib import Path

import numpy as np
import pandas as pd

from results.mean_logit.mean_logit import cost, hits

HERE = Path(__file__).parent
SETTINGS = ['table', 'lr', 'seed', 'steps', 'n_layer', 'n_embd', 'batch_size', 'block_size',
            'vocab_size', 'warmup', 'beta2', 'grad_clip', 'final_gain']


def read_baselines():
    """The untied baselines of this folder, but for arms that have no twin or are not one."""
    tables = []
    for path in sorted(HERE.glob('*/results.csv')):
        tables.append(pd.read_csv(path).assign(table=path.parent.name))
    runs = pd.concat(tables)
    runs = runs[~runs.run.str.contains('BF16_gradient|centered_by')]
    return runs[(runs.method == 'baseline') & (runs.weight_tying == 0)]


def find_pairs():
    """
    A row for each run whose mean logit is 100 or more and its twin, the same with fp32 logits. With
    rare rows the mean is weighted by frequency.
    """
    runs = read_baselines()
    runs['mean'] = runs.logit_mean.mask(runs.table == 'rare', runs.logit_mean_f)
    runs['table'] = runs.table.replace('cause_0.3', 'grid')  # which has its twins
    in_bf16 = runs.logits_dtype == 'bfloat16'
    pairs = runs[in_bf16].merge(runs[~in_bf16], on=SETTINGS, suffixes=('', '_twin'))

    pairs['harm'] = pairs.test_loss - pairs.test_loss_twin
    pairs['c'] = cost(pairs['mean'], pairs.logit_mean_spread)
    pairs = pairs[pairs['mean'].abs() >= 100]
    pairs = pairs.drop_duplicates(['test_loss', 'test_loss_twin'])  # some runs are in two tables
    names = ['table', 'run', 'lr', 'seed', 'test_loss', 'test_loss_twin', 'harm', 'bf16_cost',
             'mean', 'mean_twin', 'c', 'logit_std', 'logit_std_twin']
    return pairs[names].round(5)


def report(pairs):
    """The page's numbers."""
    harm, c, mean = pairs.harm, pairs.c, pairs['mean']
    print(f'{len(pairs)} pairs; within 2: {hits(harm, c)}, within 1.5: {hits(harm, c, 1.5)}')
    rng = np.random.RandomState(1)
    shuffled = [hits(harm, rng.permutation(c)) for _ in range(2000)]
    print(f'c shuffled: within 2: {np.mean(shuffled):.1f}')
    some = pairs[harm > 0]
    power = np.polyfit(np.log(some['mean']), np.log(some.harm), 1)
    fitted = np.exp(np.polyval(power, np.log(some['mean'])))
    print(f'a fitted power of the mean logit: {hits(some.harm, fitted)}')

    print(f'evaluation alone: within 2: {hits(pairs.bf16_cost, c)}, over c a median of '
          f'{(pairs.bf16_cost / c).median():.2f}')
    share = (pairs.bf16_cost / harm)[mean >= 256]
    print(f'evaluation over harm, from 256 on: {share.min():.2f} to {share.max():.2f}, median '
          f'{share.median():.2f}')
    drift = mean / pairs.mean_twin
    print(f"mean logit over the twin's: above 1 in {(drift > 1).sum()}, median "
          f'{drift.median():.2f}, at 0.3 {drift[pairs.lr == 0.3].median():.2f}')
    at_1 = pairs[pairs.table == 'cause']
    print(f'std of the logits at 1: {at_1.logit_std.median():.1f}, '
          f"the twin's {at_1.logit_std_twin.median():.1f}")


if __name__ == '__main__':
    pairs = find_pairs()
    pairs.to_csv(HERE / 'rule.csv', index=False)
    report(pairs)
