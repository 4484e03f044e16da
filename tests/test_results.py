"""The tables of README.md and of results/natural are those of the csv files."""
import re
from pathlib import Path

import pandas as pd

from conftest import ROOT
from results.natural.page import with_tables


def test_natural():
    page = Path(ROOT, 'results/natural/README.md').read_text(encoding='utf-8')
    assert page == with_tables(page)


def test_readme():
    """Tables 2 and 5: LRS as published, underlined where a method is never over 1% above the best."""
    readme = Path(ROOT, 'README.md').read_text(encoding='utf-8')
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
