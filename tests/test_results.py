"""The scripts that make tables and figures of results/ run on the csv files beside them."""
import runpy
import shutil
import sys

import matplotlib.pyplot as plt
import pytest

from conftest import ROOT


@pytest.mark.parametrize('name', ['combined/combined.py', 'rounding_study/study.py', 'drift/drift.py'])
def test_scripts(name, tmp_path, monkeypatch, capsys):
    """In a copy, so that the committed figures stay."""
    script = shutil.copytree(f'{ROOT}/results', tmp_path / 'results') / name
    figure = script.with_name('figure.png')
    figure.unlink()
    monkeypatch.setattr(sys, 'path', [*sys.path])  # to which the script adds
    runpy.run_path(str(script), run_name='__main__')
    plt.close('all')
    assert figure.stat().st_size > 10_000 and 'baseline' in capsys.readouterr().out
