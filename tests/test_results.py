"""The tables of README.md and of results/natural are those of the csv files."""
import re
from pathlib import Path

import pandas as pd

from conftest import ROOT
from results.natural.page import read_grid, with_tables


def read_page(path):
    return Path(ROOT, path).read_text(encoding='utf-8')


def test_natural():
    page = read_page('results/natural/README.md')
    assert page == with_tables(page)


def test_natural_in_readme():
    """The losses of the small model at 0.3, where README tells what is reproduced."""
    runs = read_grid('grid')
    losses = runs[runs.lr == 0.3].groupby('name').test_loss.mean()
    (item,) = re.findall(r'\n- (\*\*[^-]*?small model\.\*\*.*?)(?=\n- )', read_page('README.md'), re.S)
    found = re.findall(r'\b\d\.\d\d\b', item)
    names = ['baseline', 'baseline, fp32 logits', 'μ-loss, λ = 0.1', 'μ-centering', 'z-loss']
    assert found == [f'{losses[name]:.2f}' for name in names]


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
                assert float(re.sub('</?u>', '', cell)) == round(row.lrs_n1, 3)
                assert ('<u>' in cell) == (row.behind == 0)
                checked += 1
    assert checked == 55
