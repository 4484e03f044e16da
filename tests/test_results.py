"""The numbers of README, tools/adopt.md, results/natural and mean_logit are those of the csv files."""
import re
from pathlib import Path

import pandas as pd

from conftest import ROOT
from results.natural.page import read, read_grid, with_tables
from tools import report


def read_page(path):
    return Path(ROOT, path).read_text(encoding='utf-8')


def test_natural():
    """The page's tables are those of the csv files."""
    page = read_page('results/natural/README.md')
    assert page == with_tables(page)


def extrema(values):
    return [values.min(), values.max()]


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
    found = re.search(words, readme)
    assert [*found.groups()] == expected


def test_demo_in_readme():
    """The ends of the demo's runs."""
    rows = read('demo')
    rows = rows[rows.seed == 1].set_index('run')
    found = re.findall(r'\] (laptop-\S+): done: test loss (\S+), mean logit (\S+)\n', read_page('README.md'))
    assert len(found) == len(rows) == 4
    for run, test_loss, mean_logit in found:
        assert abs(float(test_loss) - rows.test_loss[run]) < 6e-5  # the csv files have six digits
        assert mean_logit == f'{rows.last_logit_mean[run]:.1f}'


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
