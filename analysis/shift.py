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
FP32 = ' in fp32'  # added to the name of a method: nothing is rounded to bf16


def shifted(runs):
    """
    The runs of each size, tying, learning rate and variant that has one with a shifted mean, and the columns
    loss (that at initialisation if the test loss is not finite), excess (the loss minus the mean loss without
    a shift, of the same variant or else of the baseline) and full_name (the variant, with FP32 if nothing is
    rounded; '' if only some parts are).
    """
    rows = runs[runs.init_from == '']
    rows = rows[rows.groupby([*SETTING, 'variant']).mu_shift.transform('max') > 0].copy()
    rows['loss'] = rows.test_loss.fillna(rows.init_loss)
    rows['own'] = usual(rows).loss
    rows['baseline'] = rows.own[rows.variant == 'baseline']
    origin = rows.groupby([*SETTING, 'variant']).own.transform('mean')
    rows['excess'] = rows.loss - origin.fillna(rows.groupby(SETTING).baseline.transform('mean'))
    full_name = rows.variant.mask(rows.rounded == 'none', rows.variant + FP32)
    return rows.assign(full_name=full_name.where(rows.rounded.isin([ALL, 'none']), ''))


def published_baselines():
    """
    The baselines that the paper's authors published: mu_norm, logit_mean, offset and excess, the test loss
    minus that of μ-centering at the same size and learning rate. No rows where a fork has deleted them.
    """
    path = Path(__file__).parents[1] / 'results' / 'authors' / 'results.csv'
    if not path.exists():
        return pd.DataFrame(columns=['size', 'lr', 'mu_norm', 'logit_mean', 'offset', 'excess'])
    runs, key = csv_files.read(path)[0], ['size', 'weight_tying', 'lr', 'seed']
    baseline, centered = (runs[runs.method == name].set_index(key) for name in ('baseline', 'mu_centering'))
    rows = baseline.assign(excess=baseline.test_loss - centered.test_loss, offset=baseline.logit_mean.abs())
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


def cost_tables(rows, where):
    """The test loss and, where there are logs, the training loss of each method at each norm."""
    training = 'Training loss, of the last tenth of the steps,'
    for column, name in (('loss', 'Test loss'), ('train_loss', training)):
        known = rows[(rows.full_name != '') & rows[column].notna()]
        if not len(known):
            continue
        cells = known.groupby(['mu_shift', 'full_name'])[column].agg(over_seeds, '.3f').unstack(0)
        cells = cells.loc[known.full_name.unique()].fillna('-')
        cells.columns = [f'norm {norm:g}' for norm in cells]
        yield dict(
            title=f'The {name.split(",")[0].lower()} after a shift of the mean, {where}', where='',
            rows=cells.rename_axis('method').reset_index(),
            says=f'{name} if a vector of this norm is added to every output embedding before training, which '
                 'changes no cross entropy in exact arithmetic (Fact 2). Mean over the seeds [lowest, '
                 'highest]; a test loss that is not finite counts as that at initialisation.')


def rounding_table(rows, variant, where):
    """Test loss and mean logit of the runs of a variant by which roundings are on."""
    rows = rows[rows.mu_shift.isin(rows.mu_shift[rows.rounded != ALL])]
    lines = []
    for subset in SUBSETS:
        line = {'rounded to bf16': subset.replace(',', ', ')}
        for norm, part in rows[rows.rounded == subset].groupby('mu_shift'):
            line[f'loss at norm {norm:g}'] = over_seeds(part.loss, '.3f')
            line[f'mean logit at norm {norm:g}'] = over_seeds(part.logit_mean, '+.0f')
        lines += [line] if len(line) > 1 else []
    return dict(
        title=f'Which rounding costs what, {variant}, {where}', where='',
        rows=pd.DataFrame(lines).fillna('-'),
        says='By what is rounded: the operands h and E of the logits, the logits, and their gradient. Test '
             'loss and final mean logit, each the mean over the seeds [lowest, highest].')


def shift_tables(runs):
    """For each size, tying and learning rate with a shifted mean: what it costs, and by what rounding."""
    for (size, tying, lr), rows in shifted(runs).groupby(SETTING, sort=False):
        where = f'{size} {("untied", "tied")[int(tying)]}, lr {lr:g}'
        yield from cost_tables(rows, where)
        for variant, part in rows.groupby('variant', sort=False):
            if (part.rounded != ALL).any():
                yield rounding_table(part, variant, where)


def sentence(runs):
    """The test loss of each method at the largest norm that was added, or '' without such runs."""
    lines = []
    for (size, _, lr), rows in shifted(runs).groupby(SETTING, sort=False):
        rows = rows[(rows.full_name != '') & (rows.mu_shift == rows.mu_shift.max())]
        losses = rows.groupby('full_name', sort=False).loss.agg(over_seeds, '.2f')
        if len(losses):
            lines.append(f'Test loss of {size}, lr {lr:g}, if a vector of norm {rows.mu_shift.max():g} was '
                         f'added to all output embeddings: {", ".join(map(" ".join, losses.items()))}.')
    return ' '.join(lines)
