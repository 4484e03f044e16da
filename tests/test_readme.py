"""README.md: its commands, its LRS tables, the method that it adds, how it loads a model."""
import re
import shutil

import pandas as pd
import pytest
import torch

import analyze
import prepare_fineweb
import train
from conftest import README, ROOT, execute
from small_runs import SMALL

PARSERS = {'train': train.parser, 'prepare_fineweb': prepare_fineweb.parser, 'analyze': analyze.parser}
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}


def test_flags_of_commands():
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', README)
    assert {name for name, _ in commands} == PARSERS.keys()
    for name, flags in commands:
        PARSERS[name].parse_args(flags.split())


@pytest.mark.parametrize('tying', ['untied', 'tied'])
def test_lrs_table(tying):
    """The paper's numbers, underlined where all runs converged; those of the authors' runs are the same."""
    table = re.search(rf'^{tying} \| 16M .*\n-.*\n((?:.+ \| .+\n)+)', README, re.M)[1]
    paper = pd.read_csv(f'{ROOT}/analysis/paper_lrs.csv').query('tying == @tying').dropna()
    cells = paper.lrs.map('{:.3f}'.format)
    cells = cells.where(paper.converged == 0, '<u>' + cells + '</u>').groupby(paper.variant, sort=False)
    assert table.splitlines() == [' | '.join([name, *row]) for name, row in cells]
    if tying == 'untied':
        both = paper.merge(pd.read_csv(f'{ROOT}/results/authors/lrs.csv'), on=['size', 'variant'])
        assert len(both) == 20  # of four methods
        assert [*both.lrs_n1.map('{:.3f}'.format)] == [*both.lrs_x.map('{:.3f}'.format)]


def test_adding_a_method(tmp_path):
    """In a copy of the project with README's diff the tests of the new method pass."""
    copy = tmp_path / 'copy'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'results'))
    for file, place, lines in re.findall(r'^--- (\S+\.py), in (\w+).*\n((?:\+.*\n)+)', README, re.M):
        before, after = (copy / file).read_text().split(ABOVE[place])
        (copy / file).write_text(before + lines.replace('\n+', '\n')[1:] + ABOVE[place] + after)
    done = execute('pytest', '-vv', 'test_facts.py', 'tests/test_head.py', '-k', 'l2_logits', cwd=copy)
    assert len(re.findall(r'\[l2_logits.*\] PASSED', done)) >= 4


def test_loading_a_model(corpus, tmp_path, monkeypatch):
    code = re.search(r'```python\n(from model import .*?)```', README, re.S)[1]
    out = re.search(r"'(.*)/model\.pt'", code)[1]
    assert f'--out={out}\n' in execute('bash', 'sweep.sh', 'demo', DRY_RUN='1')
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, f'--data={corpus}', f'--out={out}', '--steps=1'])
    names = {'tokens': torch.arange(24).view(2, 12)}
    exec(code, names)
    assert torch.equal(names['gpt'].E, names['saved']['model']['lm_head.weight'])
    assert names['logits'].shape == (2, 12, 320)
