"""The tables of README.md, tools/adopt.md and results/ are those of their csv files."""
from pathlib import Path

import pandas as pd
import pytest

from conftest import ROOT
from results import tables
from results.mean_logit.mean_logit import read_runs
from results.natural import page as natural
from results.why import page as why


@pytest.mark.parametrize('page', tables.TABLES)
def test_tables(page):
    text = Path(ROOT, page).read_text(encoding='utf-8')
    assert text == tables.with_tables(page)


@pytest.mark.parametrize('page', natural.PAGES)
def test_natural(page):
    text = Path(ROOT, 'results/natural', page).read_text(encoding='utf-8')
    assert text == natural.with_tables(text)


def test_why():
    text = Path(ROOT, 'results/why/README.md').read_text(encoding='utf-8')
    assert text == why.with_tables(text)


def test_mean_logit():
    """The runs that results/mean_logit speaks of, from the authors' runs."""
    saved = pd.read_csv(f'{ROOT}/results/mean_logit/mean_logit.csv')
    pd.testing.assert_frame_equal(read_runs().reset_index(drop=True), saved, check_dtype=False)
