"""The numbers of README, tools/adopt.md, results/natural and mean_logit are those of the csv files."""
import re
from pathlib import Path

import pandas as pd

from conftest import ROOT
from results.natural.page import grid_lrs, read, read_cause_at_paper_rate, read_grid, with_tables
from tools import report


def read_page(path):
    return Path(ROOT, path).read_text(encoding='utf-8')


def test_natural():
    page = read_page('results/natural/README.md')
    assert page == with_tables(page)


def assert_says(pattern, values, digits):
    """The groups of the pattern, in results/natural, are these values."""
    page = read_page('results/natural/README.md')
    found = re.search(pattern, ' '.join(page.split()))
    assert found, pattern
    assert [*found.groups()] == [f'{value:,.{digits}f}' for value in values]


def extrema(values):
    return [values.min(), values.max()]


def listed(values, digits):
    """'1, 2 and 3', as the groups of a pattern are compared."""
    texts = [f'{value:,.{digits}f}' for value in values]
    return f'{", ".join(texts[:-1])} and {texts[-1]}'


def assert_lists(words, values, digits):
    """The words, in results/natural, end with these values."""
    page = ' '.join(read_page('results/natural/README.md').split())
    text = f'{words} {listed(values, digits)}'
    assert re.search(re.escape(text) + r'(?!\S*\d)', page), text


def test_sentences_on_rounding_at_evaluation():
    rows = read('grid', 'evaluation')
    rows = rows[rows.run.str.contains('baseline-lr0.3')]
    rows['rounding'] = rows.test_loss_bfloat16 - rows.test_loss_float32
    own = rows[rows.arm == ''].pivot(index='step', columns='seed')
    twin = rows[rows.arm == 'fp32 logits'].pivot(index='step', columns='seed')
    gap = own.test_loss_bfloat16 - twin.test_loss_float32
    end = 100_000
    assert_lists('rounding at evaluation costs', own.rounding.loc[end], 2)
    assert_lists('of the gap of', gap.loc[end], 2)
    assert_lists('with BF16 logits at evaluation, lose', twin.rounding.loc[end], 2)
    assert_lists('The gap rises from', gap.loc[30_000], 2)
    assert_lists(f'{listed(gap.loc[30_000], 2)} at step 30,000 to', gap.loc[40_000], 2)
    assert (own.logit_mean.loc[end] > own.logit_mean.loc[40_000]).all()
    assert (gap.loc[end] < gap.loc[40_000]).all() and (twin.rounding.loc[end] > own.rounding.loc[end]).all()

    curves = read('grid', 'curves')
    curves = curves[curves.run.str.contains('baseline-lr0.3')].pivot_table(
        index=['seed', 'step'], columns='arm', values=['loss', 'logit_mean'])
    training_gap = curves.loss[''] - curves.loss['fp32 logits']
    for words, low in (('is', 800), ('900, and', 900)):
        within = training_gap[curves.logit_mean[''].between(low, low + 100)]
        assert_lists(words, within.groupby('seed').mean(), 2)
    assert own.logit_mean.loc[30_000].max() < 1024 < own.logit_mean.loc[40_000].min()
    too_high = (own.estimate / own.rounding).loc[40_000:].stack()
    assert_says(r'on the estimate is (\S+) to (\S+) times too high for', extrema(too_high), 1)
    assert_says(r'For the twin it is (\S+), and', twin.estimate.loc[40_000:].stack().unique().round(2)[:1], 2)
    assert twin.estimate.loc[40_000:].stack().nunique() == 1
    assert_says(r'rounding costs (\S+) to (\S+), at the end', extrema(twin.rounding.loc[40_000:].stack()), 2)


def test_sentences_on_the_grid():
    runs = read_grid('grid')
    losses = runs.pivot(index=['lr', 'seed'], columns='name', values='test_loss')
    mean_logits = runs.pivot(index=['lr', 'seed'], columns='name', values='logit_mean')
    means = losses.groupby('lr').mean()
    cures = ['μ-loss, λ = 0.1', 'μ-centering']
    near = [*cures, 'z-loss']

    # at 0.3
    mean = means.loc[0.3]
    assert_says(r'ends at a test loss of (\S+), and at (\S+) with fp32 logits\. The other',
                mean[['baseline', 'baseline, fp32 logits']], 2)
    assert_says(r'other methods end at (\S+) to (\S+) \(means',
                extrema(mean.drop(['baseline', 'baseline, fp32 logits'])), 2)
    gaps = mean.baseline - mean[cures]
    assert_says(r'At 0.3 the baseline ends (\S+) to (\S+) nats above μ-loss and', extrema(gaps), 1)
    assert_lists('with mean logits of', mean_logits.loc[0.3].baseline, 0)
    assert_lists('with fp32 logits it ends at', mean_logits.loc[0.3]['baseline, fp32 logits'], 0)
    lower = losses.loc[0.3].sub(losses.loc[0.3]['μ-loss, λ = 0.1'], axis=0)
    lower = lower[['baseline, fp32 logits', 'weight decay', 'soft-capping']].stack()
    assert_says(r'μ-loss ends (\S+) to (\S+) below fp32 logits, weight decay and', extrema(lower), 2)
    assert_lists('z-loss ends at', losses.loc[0.3]['z-loss'], 2)
    assert_lists('and μ-centering at', losses.loc[0.3]['μ-centering'], 2)
    gains = losses.loc[0.3][['z-loss', 'μ-centering']].lt(losses.loc[0.3]['baseline, fp32 logits'], axis=0)
    assert gains.loc[[1, 2]].all(axis=None) and not gains.loc[3].any()
    of_seed_3 = losses.loc[0.3, 3]
    assert of_seed_3['μ-centering'] > of_seed_3[['weight decay', 'soft-capping']].max()

    # up to 0.1: losses minus that of the baseline of the same seed
    above = losses.sub(losses.baseline, axis=0).loc[:0.1].drop(columns=['baseline', 'baseline, fp32 logits'])
    others = above.drop(columns='weight decay')
    best = (means.min(axis=1) - means.baseline).loc[:0.1]
    assert_says(r'Up to 0.1 the baseline ends at most (\S+) above the best method', [-best.min()], 2)
    assert_says(r'only weight decay ends more than (\S+) from the baseline', [others.abs().max().max()], 2)
    assert above['weight decay'].min() > others.abs().max().max()
    assert_says(r'Weight decay costs (\S+) to (\S+) up to 0.1\.', extrema(above['weight decay']), 2)
    assert_lists("At 0.1 the baseline's mean logit is", mean_logits.loc[0.1].baseline, 0)
    assert_says(r'At 0.1 the mean logit is (\S+) to (\S+) here', extrema(mean_logits.loc[0.1].baseline), 0)
    assert_lists('and with fp32 logits', mean_logits.loc[0.1]['baseline, fp32 logits'], 0)
    at = losses.loc[0.1]
    assert (at.idxmin(axis=1) == 'μ-loss, λ = 0.1').all()
    apart = at[['z-loss', 'μ-centering', 'baseline, fp32 logits']].sub(at.baseline, axis=0).abs()
    assert_says(r'fp32 logits end at most (\S+) from it', [apart.max().max()], 3)
    mean = means.loc[0.1]
    best = mean.min()
    assert mean[['baseline', 'z-loss']].min() > 1.01 * best > mean['μ-centering']
    assert mean['z-loss'] - mean['μ-centering'] < 0.001
    mu_norms = runs[runs.lr == 0.1].pivot(index='seed', columns='name', values='mu_norm')
    assert_lists('z-loss ends with ‖μ‖ of', mu_norms['z-loss'], 0)
    assert_lists('and the baseline with', mu_norms.baseline, 0)
    std = runs[runs.lr <= 0.1].pivot(index=['lr', 'seed'], columns='name', values='logit_std')
    assert_says(r"ends at (\S+) to (\S+), where the baseline's is (\S+) to ([\d.]+\d)\.",
                [*extrema(std['weight decay']), *extrema(std.baseline)], 1)
    for seed in (1, 2):
        assert_says(r'soft-capping has (\S+) in seeds 1 and 2 at 0.1', [std['soft-capping'][0.1][seed]], 1)
    cost = above['soft-capping'][0.1][[1, 2]].max()
    assert_says(r'ends at most (\S+) above the baseline there', [cost], 3)
    below = -above.loc[0.1]['μ-loss, λ = 0.1']
    assert_says(r'in each seed, (\S+) to (\S+) below the baseline', extrema(below), 3)
    assert_says(r'ends (\S+) and (\S+) above the baseline in seeds 1 and 2, and (\S+) in',
                above['soft-capping'][0.1], 3)
    capped = mean_logits['soft-capping']
    assert_says(r'beside its cap of 30: (\S+) at 0.01, (\S+) at 0.03,', [capped[0.01][1], capped[0.03][1]], 0)
    assert_lists('at 0.03,', capped[0.1], 0)
    assert_lists('at 0.1, and', capped[0.3], 0)
    pressed = runs[(runs.method == 'soft_capping') & (runs.lr >= 0.01)]
    assert pressed.logit_max.min() > 29.8

    # LRS
    lrs = pd.DataFrame({name: found.lrs_n1 for name, found in grid_lrs().items()})
    assert (lrs.idxmax() == 'baseline').all()
    assert_says(r"decay's LRS is (\S+) to (\S+), small", extrema(lrs.loc['weight decay']), 2)
    decay = means['weight decay']
    assert_says(r'own lowest loss, here (\S+) at (\S+), and not that (\S+) can',
                [decay.min(), decay.idxmin(), means.min(axis=None)], 2)
    assert (lrs.loc['soft-capping'] > lrs.loc[['z-loss', 'μ-loss λ=0.1', 'μ-centering']].max()).all()
    without = lrs['seed 1'].drop('baseline')
    assert lrs['seed 1'].baseline > 0.2 and without.max() < 0.12  # prediction 9
    assert {*without.nsmallest(3).index} == {'z-loss', 'μ-loss λ=0.1', 'μ-centering'}
    theirs = pd.read_csv(f'{ROOT}/results/authors/lrs.csv')
    theirs = theirs[theirs.weight_tying == 0]
    of_sizes = theirs[theirs.table == 'methods'].pivot(index='variant', columns='size', values='lrs_n1')
    assert of_sizes.shape == (6, 5) and (of_sizes.idxmax() == 'baseline').all()
    assert (of_sizes.loc['z-loss'] > of_sizes.loc[['μ-loss', 'μ-centering']].max()).all()
    theirs = theirs[theirs['size'] == '16M']
    theirs = theirs.drop_duplicates('variant').set_index('variant').lrs_n1
    larger = lrs.gt(theirs[lrs.index], axis=0)
    assert larger.drop('weight decay').all(axis=None) and not larger.loc['weight decay'].any()

    authors = pd.read_csv(f'{ROOT}/results/authors/results.csv')
    authors = authors[(authors['size'] == '16M') & (authors.weight_tying == 0)]
    authors = authors[authors.lam.isna() | (authors.lam == 1e-4)]
    (mean_logit,) = authors[(authors.method == 'baseline') & (authors.lr == 0.1)].logit_mean
    assert_says(r"and (\S+) in the authors' 16M, which", [mean_logit], 0)
    at_largest = authors[(authors.method == 'baseline') & (authors.lr == 0.3)]
    assert_says(r'\(at (\S+), with a mean logit of', at_largest.test_loss, 2)
    assert_says(r'\(at 5.07, with a mean logit of ([\d,]+\d)\)', at_largest.logit_mean, 0)
    authors = authors.pivot(index='lr', columns='method', values='test_loss')
    assert_says(r'16M, which loses (\S+) nats there', [authors.baseline[0.1] - authors.mu_loss[0.1]], 2)
    gain = authors.baseline[0.3] - authors[['weight_decay', 'mu_loss']].loc[0.3]
    assert_says(r'and gains (\S+) of (\S+) nats at 0.3', gain, 1)
    assert_says(r'ends (\S+) nats above theirs there', [gain.mu_loss], 1)
    own_above = (losses - losses.xs(1, level='seed').min())[[*near, 'soft-capping']]
    theirs_above = (authors - authors.min())[['z_loss', 'soft_capping', 'mu_loss', 'mu_centering']]
    of_both = []
    for lr in (0.1, 0.3):
        of_both.append([*extrema(own_above.loc[lr].stack()), *extrema(theirs_above.loc[lr])])
    assert_says(r'end (\S+) to (\S+) above their lowest losses at 0.1, and (\S+) to (\S+) at 0.3',
                [*of_both[0][:2], *of_both[1][:2]], 2)
    assert_says(r'16M it is (\S+) to (\S+), and (\S+) to ([\d.]+\d)\.', [*of_both[0][2:], *of_both[1][2:]], 2)


def test_sentences_on_seven_rates():
    """Losses minus those of the baseline of the same seed, or at 1 of the one with fp32 logits."""
    runs = read_grid('quick')
    runs = runs[(runs.weight_tying == 0) & ((runs.method != 'mu_loss') | (runs.lam == 0.1))]
    runs = runs[(runs.method != 'z_loss') | (runs.lam == 1e-4)]
    losses = runs.pivot(index=['lr', 'seed'], columns='name', values='test_loss')

    above = losses.sub(losses.baseline, axis=0).drop(1, level='lr')
    decay = above['weight decay'].loc[[0.001, 0.003]]
    assert_says(r'Weight decay costs (\S+) at 0.001 and (\S+) at 0.003', decay.groupby('lr').mean(), 2)
    assert decay.groupby('lr').std().max() < 0.001
    above.loc[[0.001, 0.003], 'weight decay'] = 0
    assert_says(r'no run of this table is more than (\S+) from', [above.abs().max().max()], 2)

    curves = read('quick', 'curves')
    curves = curves[curves.run.isin(runs.run[runs.lr == 1]) & (curves.step > 0)]
    highest = curves.groupby('run').loss.max()
    assert_says(r'training loss rises to (\S+) to (\S+) with', extrema(highest), 0)
    above = losses.loc[1].sub(losses.loc[1]['baseline, fp32 logits'], axis=0)
    assert above[['z-loss', 'μ-loss, λ = 0.1', 'μ-centering']].abs().max().max() < 0.2
    worse = above[['baseline', 'weight decay', 'soft-capping']].stack()
    assert_says(r'soft-capping end (\S+) to (\S+) above', extrema(worse), 1)
    capped = runs[(runs.method == 'soft_capping') & (runs.lr == 1)]
    assert capped.logit_absmax.min() > 29.99


def test_sentences_on_tied_runs():
    runs = read_grid('quick')
    losses = runs[runs.weight_tying == 1].pivot(index='lr', columns='name', values='test_loss')
    above = losses.sub(losses.baseline, axis=0)
    small = above['μ-centering'].loc[0.001:0.01]
    assert_says(r'0.01 μ-centering ends (\S+) to (\S+) above', extrema(small), 2)
    below = -above.loc[1, ['z-loss', 'μ-loss, λ = 0.1', 'μ-centering']]
    assert_says(r'and both cures end (\S+) to (\S+) below', extrema(below), 1)


def test_sentences_on_lam_and_the_cap():
    runs = read('quick')
    runs = runs[(runs.seed == 1) & (runs.weight_tying == 0)]
    z_loss = runs[runs.method == 'z_loss'].pivot(index='lr', columns='lam', values='test_loss').dropna()
    assert_says(r'with 100 it ends (\S+) to (\S+) nats above', extrema(z_loss[100] - z_loss[1e-4]), 1)
    weak = runs[(runs.method == 'mu_loss') & (runs.lam == 1e-4) & (runs.lr == 1)]
    assert_says(r'the mean logit at 1 is ([\d,]+\d),', weak.logit_mean, 0)

    tied = read_grid('quick')
    tied = tied[(tied.weight_tying == 1)].pivot(index='lr', columns='name', values='test_loss')
    above = tied.sub(tied.baseline, axis=0)
    small = above['weight decay'].loc[0.001:0.01]
    assert_says(r'and weight decay (\S+) to ([\d.]+\d)\. That', extrema(small), 2)
    assert_says(r'soft-capping (\S+) below it, and weight decay (\S+) above',
                [-above.loc[1, 'soft-capping'], above.loc[1, 'weight decay']], 1)

    capped = read('quick')
    capped = capped[(capped.method == 'soft_capping') & (capped.lr == 1) & (capped.weight_tying == 0)]
    capped = capped.set_index('seed')
    assert_says(r'they have a mean of (\S+) and (\S+) and a standard deviation of (\S+) and (\S+): most',
                [*capped.logit_mean[[1, 3]], *capped.logit_std[[1, 3]]], 0)


def test_sentences_on_the_cause():
    runs = read('cause').set_index(['arm', 'seed'])
    loss = runs.test_loss
    assert_says(r'mean logit rises to (\S+) to (\S+) as well', extrema(runs.logit_mean['fp32 logits']), 0)
    gaps = loss['BF16 logits'] - loss['fp32 logits']
    assert_says(r'but the test loss is (\S+) to (\S+) nats lower', extrema(gaps), 1)
    other = loss[['exact gradient', 'gradient at a random scale']]
    assert_says(r'in each step, end at (\S+) to ([\d.]+\d)', extrema(other), 1)
    with_gain = runs.loc['with a gain']
    assert_says(r'shrinks the mean ‖h‖ from 9.8 to (\S+) to (\S+),', extrema(with_gain.h_norm), 2)
    assert_says(r'‖μ‖ grows to (\S+) to (\S+);', extrema(with_gain.mu_norm), 0)
    curves = read('cause', 'curves')
    largest = curves[curves.arm == 'with a gain'].groupby('seed').logit_mean.max()
    assert_says(r'it reached (\S+) and (\S+) in seeds 1 and 3', largest[[1, 3]], 1)


def test_sentences_on_the_cause_at_the_papers_rate():
    runs = read_cause_at_paper_rate().set_index('arm')
    loss = runs.test_loss
    of_gradient = ['exact gradient', 'gradient at a random scale']
    assert_lists('and with one at a random scale end at', loss[of_gradient], 2)
    assert_lists(f'{listed(loss[of_gradient], 2)}, with mean logits of', runs.logit_mean[of_gradient], 0)
    assert_says(r'whose gradient is rounded end (\S+) below fp32 logits',
                [loss['fp32 logits'] - loss['fp32 logits, BF16 gradient']], 2)
    rest = runs.loc[['Coupled Adam', 'SGD on E', 'centered head', 'with a gain']]
    assert_says(r'the model with a gain end at (\S+) to (\S+), and', extrema(rest.test_loss), 2)
    assert_says(r'their mean logit is at most (\d+) in size', [rest.logit_mean.abs().max()], 0)
    grid = read_grid('grid')
    of_seeds = grid[grid.lr == 0.3].groupby('name').test_loss
    ranges = of_seeds.max() - of_seeds.min()
    assert_says(r'seeds differ by up to (\S+) \(μ-centering', [ranges['μ-centering']], 2)
    assert ranges.idxmax() == 'μ-centering'
    high = loss[['BF16 logits', *of_gradient]]  # prediction 4
    assert_says(r'which of those at (\S+) to (\S+) is better', extrema(loss.drop(high.index)), 2)
    assert high.min() > 2.5 and loss.drop(high.index).max() < 1.9


def test_sentences_on_rare_rows():
    runs = read('rare')
    of_bytes = runs[runs.run.str.startswith('bytes')].set_index(['arm', 'seed'])
    mean = of_bytes.logit_mean_f
    assert_says(r'by frequency is (\S+) to (\S+), where the baseline has (\S+) to ([\d,]+\d)',
                [*extrema(mean['μ-centering']), *extrema(mean['baseline'])], 0)
    below = of_bytes.test_loss['fp32 logits'] - of_bytes.test_loss
    frequency = below['centered by frequency']
    assert_says(r'ends (\S+) below to (\S+) above fp32 logits, and z-loss (\S+) to (\S+) below',
                [frequency.max(), -frequency.min(), *extrema(below['z-loss'])], 2)

    rounding = of_bytes.test_loss_bfloat16 - of_bytes.test_loss_float32
    assert_says(r'rounding at evaluation costs (\S+) to (\S+) nats', extrema(rounding['μ-centering']), 2)
    assert of_bytes.logit_mean['μ-centering'].abs().max() < 0.5
    assert_says(r'it is -(\S+) to -(\S+), and rounding costs nothing',
                extrema(-of_bytes.logit_mean['centered by frequency']), 0)
    assert rounding['centered by frequency'].max() < 0.001

    rest = runs[~runs.run.str.startswith('bytes')]
    mean = rest.pivot(index='vocab_size', columns='arm', values='logit_mean_f')
    unused = 1 - 64 / mean.index
    less = unused - mean['μ-centering'] / mean.baseline
    assert_says(r'It leaves (\S+) to (\S+) less', extrema(less[unused < 0.8]), 2)

    authors = pd.read_csv(f'{ROOT}/results/authors/results.csv')
    authors = authors[(authors.weight_tying == 0) & (authors.lr >= 0.1)]
    baseline = authors[authors.method == 'baseline'].logit_std
    weak = authors[(authors.method == 'mu_loss') & (authors.lam == 1e-7)]
    weak = weak[weak.logit_std > baseline.max()]
    assert weak['size'].nunique() == 4
    assert_says(r'μ-loss has (\S+) to (\S+) in four .*? where the baseline has (\S+) to ([\d.]+\d)',
                [*extrema(weak.logit_std), *extrema(baseline)], 1)


def test_natural_in_readme():
    """The losses of the small model at 0.3, where README tells what was run, and in its other sections."""
    runs = read_grid('grid')
    at_largest = runs[runs.lr == 0.3]
    losses = at_largest.groupby('name').test_loss.mean()
    readme = ' '.join(read_page('README.md').split())
    item = re.search(r'(\*\*Run here.*?)\*\*Recomputed', readme)[1]
    names = ['baseline', 'baseline, fp32 logits', 'μ-loss, λ = 0.1', 'μ-centering', 'z-loss']
    names += ['weight decay', 'soft-capping']
    means = runs[runs.lr <= 0.1].pivot_table('test_loss', 'lr', 'name')
    behind = (means.baseline - means.min(axis=1)).max()
    found = re.findall(r'\b\d\.\d\d\b', item)
    assert found == [*(f'{losses[name]:.2f}' for name in names), f'{behind:.2f}']

    decay = means['weight decay'] - means.baseline
    found = re.search(r'In the small model it costs (\S+) to (\S+) nats at', readme)
    assert [*found.groups()] == [f'{x:.1f}' for x in extrema(decay)]

    baselines = at_largest[at_largest.name == 'baseline']
    ratios = {'cos_mu_h': 2, 'r_emb': 2, 'r_cos': 3, 'r_log': 3}
    words = (r'cos\(μ, h\) is (\S+) to (\S+), r_emb (\S+) to (\S+), r_cos (\S+) to (\S+) '
             r'and r_log (\S+) to (\d\.\d+)')
    expected = [f'{x:.{digits}f}' for column, digits in ratios.items() for x in extrema(baselines[column])]
    for page in ('README.md', 'results/natural/README.md'):
        found = re.search(words, ' '.join(read_page(page).split()))
        assert [*found.groups()] == expected, page


def test_demo_in_readme():
    """The ends of the demo's runs."""
    rows = read('demo')
    rows = rows[rows.seed == 1].set_index('run')
    found = re.findall(r'\] (laptop-\S+): done: test loss (\S+), mean logit (\S+)\n', read_page('README.md'))
    assert len(found) == len(rows) == 4
    curves = read('demo', 'curves')
    for run, test_loss, mean_logit in found:
        last = curves[(curves.run == run) & (curves.step == 8000)].iloc[0]
        assert abs(float(test_loss) - rows.test_loss[run]) < 6e-5  # the csv files have six digits
        assert mean_logit == f'{last.logit_mean:.1f}'


def test_limits_of_the_estimate():
    """In results/mean_logit: what BF16 costs at evaluation, of the estimate."""
    page = ' '.join(read_page('results/mean_logit/README.md').split())
    ratios = []
    for table in ('cause', 'demo', 'grid', 'quick', 'takes'):
        runs = read(table)
        runs = runs[runs.logit_mean.abs() >= 64]
        ratios += [*(runs.estimate / (runs.test_loss_bfloat16 - runs.test_loss_float32))]
    found = re.search(r'it is from (\d+) times too high to (\d+) times too low', page)
    assert [*found.groups()] == [f'{max(ratios):.0f}', f'{1 / min(ratios):.0f}']
    rare = read('rare')
    rare = rare[rare.run.str.startswith('bytes') & (rare.arm == 'baseline')]
    times = (rare.test_loss_bfloat16 - rare.test_loss_float32) / rare.estimate
    found = re.search(r'it fails \((\d) to (\d) times too low for the baseline\)', page)
    assert [*found.groups()] == [f'{times.min():.0f}', f'{times.max():.0f}']


def test_what_rule_2_misses():
    """In adopt.md: losses that the mean logit does not tell."""
    page = ' '.join(read_page('tools/adopt.md').split())
    runs = pd.read_csv(f'{ROOT}/results/authors/results.csv')
    runs = runs[runs.lam.isna() | (runs.lam == 1e-4)]
    index = ['weight_tying', 'size', 'lr']
    losses = runs.pivot(index=index, columns='method', values='test_loss')
    baselines = runs[runs.method == 'baseline'].set_index(index)
    found = re.search(r'221M baseline at 0.03 lost (\S+) nats at a mean logit of (\d+)', page)
    run = (0, '221M', 0.03)
    lost = losses.baseline[run] - losses.mu_loss[run]
    assert [*found.groups()] == [f'{lost:.3f}', f'{baselines.logit_mean[run]:.0f}']

    of_z_loss = runs[(runs.method == 'z_loss') & (runs.lr == 0.3)].set_index(index)
    lost = (losses.z_loss - losses.mu_loss)[of_z_loss.index]
    assert len(of_z_loss) == 10
    found = re.search(r'the mean logit is (\S+) to (\S+), yet they lose (\S+) to (\S+) nats', page)
    means = of_z_loss.logit_mean
    assert [*found.groups()] == [
        f'{means.max():.0f}', f'{means.min():.0f}', f'{lost.min():.3f}', f'{lost.max():.2f}']
    worst = (0, '57M', 0.3)
    assert lost.idxmax() == worst
    found = re.search(r'57M, at a mean logit of (\S+)\. The mean of its largest .logit. is (\d+)', page)
    assert [*found.groups()] == [f'{means[worst]:.0f}', f'{of_z_loss.logit_absmax[worst]:.0f}']
    found = re.search(r'the untied 16M loses (\S+) nats at (\d+)', page)
    other = (0, '16M', 0.3)
    assert [*found.groups()] == [f'{lost[other]:.2f}', f'{of_z_loss.logit_absmax[other]:.0f}']


def test_readme():
    """Tables 2 and 5: LRS as published, underlined where a method is never over 1% above the best."""
    readme = read_page('README.md')
    lrs = pd.read_csv(f'{ROOT}/results/authors/lrs.csv')
    lrs = lrs[lrs.table == 'methods'].set_index(['weight_tying', 'variant', 'size'])
    checked = 0
    for tying, word in ((0, 'untied'), (1, 'tied')):
        table = re.search(rf'\n{word}\|(16M.*)\n[-:|]+\n((?:.+\n)+)', readme)
        sizes = table[1].split('|')
        for line in table[2].splitlines():
            variant, *cells = line.split('|')
            for size, cell in zip(sizes, cells, strict=True):
                if (tying, variant, size) not in lrs.index:
                    continue  # the losses of tied weight decay are not published
                row = lrs.loc[(tying, variant, size)]
                assert float(re.sub('</?ins>', '', cell)) == round(row.lrs_n1, 3)
                assert ('<ins>' in cell) == (row.behind == 0)
                checked += 1
    assert checked == 55


def test_gains():
    """In adopt.md: the test loss of the baseline minus that of each method, over the sizes."""
    page = read_page('tools/adopt.md')
    runs = pd.read_csv(f'{ROOT}/results/authors/results.csv')
    runs = runs[runs.lam.isna() | (runs.lam == 1e-4)]  # the default λ
    losses = runs.pivot(index=['weight_tying', 'lr', 'size'], columns='method', values='test_loss')
    for tying, word in ((0, 'untied'), (1, 'tied')):
        table = re.search(rf'\n{word}, gain at\|.*\n[-|]+\n((?:.+\n)+)', page)
        lines = dict(line.split('|', 1) for line in table[1].splitlines())
        names = {name: method for method, name in report.NAMES.items() if name in lines}
        assert names.keys() == lines.keys() and len(lines) == 5 - tying
        for name, line in lines.items():
            gains = (losses.baseline - losses[names[name]])[tying]
            parts = [gains.loc[:0.01], gains[0.03], gains[0.1], gains[0.3]]
            assert line.split('|') == [f'{part.min() + 0:.3f} to {part.max():.3f}' for part in parts]


def test_should_i_use_centering():
    """README's numbers for those who pretrain."""
    readme = ' '.join(read_page('README.md').split())
    runs = pd.read_csv(f'{ROOT}/results/authors/results.csv')
    runs = runs[runs.lam.isna() | (runs.lam == 1e-4)]
    index = ['weight_tying', 'size', 'lr']
    losses = runs.pivot(index=index, columns='method', values='test_loss')
    gains = losses.rsub(losses.baseline, axis=0)
    largest = gains[gains.index.get_level_values('lr') <= 0.01].max().max()
    means = runs[runs.method == 'baseline'].set_index(index).logit_mean
    lost = (losses.baseline - losses.mu_loss)[means.abs() >= 64]
    z_loss = runs[(runs.method == 'z_loss')].set_index(index).loc[(0, '57M', 0.3)]
    worst = z_loss.test_loss - losses.mu_loss[(0, '57M', 0.3)]
    found = re.search(r'no method gains more than (\S+) nats .*? baselines lose (\S+) to (\S+) nats.*? '
                      r'57M with z-loss lost (\S+) nats at a mean logit of (\S+)\. ', readme)
    assert [*found.groups()] == [f'{largest:.3f}', f'{lost.min():.2f}', f'{lost.max():.1f}', f'{worst:.2f}',
                                 f'{z_loss.logit_mean:.0f}']
