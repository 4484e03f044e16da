"""
What a shifted mean costs: tables of runs with --mu_shift, which adds one vector to every output embedding
before training. In exact arithmetic that changes no cross entropy (Fact 2), so what the baseline loses is
lost to rounding; z-loss and μ-loss see the shift in their penalties.
"""
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import csv_files
from analysis.tables import usual
from model import ALL, SUBSETS

SETTING = ['size', 'weight_tying', 'lr']
ROUNDED = {some: f', {some.replace(",", " and ")} alone' for some in SUBSETS} | {'none': ' in fp32', ALL: ''}
SHOWN = {'loss': ('Test loss', '.3f'), 'train_loss': ('Training loss', '.3f'),
         'logit_mean': ('Mean logit', '+.0f')}


def labels(rows):
    """The variants of the rows and, unless all is rounded to bf16, what is: 'baseline, logits alone'."""
    return rows.variant + rows.rounded.map(ROUNDED)


def shifted(runs):
    """
    The runs of each size, tying, learning rate and variant that has one with a shifted mean, and the columns
    label, loss (that at initialisation if the test loss is not finite) and excess (the loss minus the mean
    loss without a shift, of the same variant or else of the baseline).
    """
    rows = runs[runs.init_from == '']
    rows = rows[rows.groupby([*SETTING, 'variant']).mu_shift.transform('max') > 0].copy()
    rows['loss'] = rows.test_loss.fillna(rows.init_loss)
    rows['own'] = usual(rows).loss
    rows['baseline'] = rows.own[rows.variant == 'baseline']
    origin = rows.groupby([*SETTING, 'variant']).own.transform('mean')
    rows['excess'] = rows.loss - origin.fillna(rows.groupby(SETTING).baseline.transform('mean'))
    return rows.assign(label=labels(rows))


def published_baselines():
    """The authors' baselines: mu_norm, offset, excess over μ-centering. No rows where a fork deleted them."""
    path = Path(__file__).parents[1] / 'results' / 'authors' / 'results.csv'
    if not path.exists():
        return pd.DataFrame(columns=['size', 'lr', 'mu_norm', 'offset', 'excess'])
    runs, key = csv_files.read(path)[0], ['size', 'weight_tying', 'lr', 'seed']
    baseline, centered = (runs[runs.method == name].set_index(key) for name in ('baseline', 'mu_centering'))
    rows = baseline.assign(excess=baseline.test_loss - centered.test_loss)
    return rows.dropna(subset='excess').reset_index()


def rounding_noise(logit):
    """
    What the rounding to bf16 adds to the loss, in nats, if the logits are about `logit` (an array): at most
    log(sinh(a) / a). There the numbers of bf16 are 2a apart, so that the rounding errors of many logits are
    spread evenly over [-a, a]; the mean of exp(error), by which Z grows, is sinh(a) / a, while l_t keeps its
    mean. By Jensen's inequality the mean of log Z grows by no more.
    """
    a = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(logit), 1))) - 8)
    return np.log(np.sinh(a) / a)


def over_seeds(values, form):
    """The mean over the seeds and, if there are several, [the lowest, the highest]."""
    mean, low, high = (format(x, form) for x in (values.mean(), values.min(), values.max()))
    return mean + (f' [{low}, {high}]' if len(values) > 1 else '')


def shift_tables(runs):
    """For each size, tying and learning rate with a shifted mean: where each method ends at each norm."""
    for (size, tying, lr), rows in shifted(runs).groupby(SETTING, sort=False):
        for column, (name, form) in SHOWN.items():
            known = rows[rows[column].notna()]
            if known.empty:
                continue
            cells = known.groupby(['mu_shift', 'label'])[column].agg(over_seeds, form).unstack(0)
            cells = cells.loc[known.label.unique()].fillna('-')
            cells.columns = [f'norm {norm:g}' for norm in cells]
            yield dict(
                title=f'{name} after a shift of the mean, {size} {("untied", "tied")[int(tying)]}, lr {lr:g}',
                where='', rows=cells.rename_axis('method').reset_index(),
                says='A vector of this norm was added to every output embedding before training, which in '
                     'exact arithmetic changes no cross entropy (Fact 2). Mean over the seeds [lowest, '
                     'highest]; a test loss that is not finite counts as that at initialisation.')
