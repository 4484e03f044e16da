"""The tables of README.md, tools/adopt.md and results/ are those of their csv files."""
import re
from pathlib import Path

import pandas as pd
import pytest

from conftest import ROOT
from results import tables
from results.mean_logit.mean_logit import read_runs
from results.natural import page as natural
from results.why import page as why


@pytest.mark.parametrize('of', [tables, natural, why])
def test_tables(of):
    found = []
    for page in of.PAGES:
        text = Path(ROOT, page).read_text(encoding='utf-8')
        assert tables.with_tables(page, of.TABLES) == text, page
        found += re.findall(r'<!-- (?!end)([\w ]+) -->', text)
    assert sorted(found) == sorted(of.TABLES)


def test_mean_logit():
    """The runs that results/mean_logit speaks of, from the authors' runs."""
    saved = pd.read_csv(f'{ROOT}/results/mean_logit/mean_logit.csv')
    pd.testing.assert_frame_equal(read_runs().reset_index(drop=True), saved, check_dtype=False)
