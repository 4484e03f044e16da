"""The scripts that make tables and figures of results/ run on the csv files beside them."""
import os
import shutil

import pytest

from conftest import ROOT, finish, process, program


@pytest.mark.parametrize('folder, script', [
    ('combined', 'combined.py'), ('rounding_study', 'study.py'), ('drift', 'drift.py')])
def test_scripts(folder, script, tmp_path):
    """In a copy, so that the committed figures stay."""
    for name in {folder, 'authors'}:  # whose losses rounding_study compares with
        shutil.copytree(os.path.join(ROOT, 'results', name), tmp_path / 'results' / name)
    for name in ('analysis', 'model.py', 'train.py'):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    figure = tmp_path / 'results' / folder / 'figure.png'
    figure.unlink()
    finish(process(program, [str(tmp_path / 'results' / folder / script)], stderr=tmp_path / 'stderr'), 0)
    assert figure.stat().st_size > 10_000
