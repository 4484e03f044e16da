"""README.md: its commands, its LRS tables, the method that it adds, how it loads a model."""
import re
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import analyze
import prepare_fineweb
import train
from conftest import README, ROOT, execute
from small_runs import SMALL, shard

PARSERS = {'train': train.parser, 'prepare_fineweb': prepare_fineweb.parser, 'analyze': analyze.parser}
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}


def test_flags_of_commands():
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', README)
    assert {name for name, _ in commands} == PARSERS.keys()
    for name, flags in commands:
        PARSERS[name].parse_args(flags.split())


@pytest.mark.parametrize('tying', ['untied', 'tied'])
def test_lrs_table(tying):
    """The paper's numbers, underlined where all runs converged."""
    table = re.search(rf'^{tying} \| 16M .*\n-.*\n((?:.+ \| .+\n)+)', README, re.M)[1]
    paper = pd.read_csv(f'{ROOT}/analysis/paper_lrs.csv').query('tying == @tying').dropna()
    cells = paper.lrs.map('{:.3f}'.format)
    cells = cells.where(paper.converged == 0, '<u>' + cells + '</u>').groupby(paper.variant, sort=False)
    assert table.splitlines() == [' | '.join([name, *row]) for name, row in cells]


def test_adding_a_method(tmp_path, monkeypatch):
    """With README's diff the new method is its equation."""
    for file in ('model.py', 'test_facts.py'):
        shutil.copy(f'{ROOT}/{file}', tmp_path)
    for file, place, lines in re.findall(r'^--- (\S+\.py), in (\w+).*\n((?:\+.*\n)+)', README, re.M):
        before, after = (tmp_path / file).read_text().split(ABOVE[place])
        (tmp_path / file).write_text(before + lines.replace('\n+', '\n')[1:] + ABOVE[place] + after)
    monkeypatch.delitem(sys.modules, 'model')
    monkeypatch.syspath_prepend(tmp_path)  # where test_facts.py finds the changed model.py
    facts = {}
    exec((tmp_path / 'test_facts.py').read_text(), facts)
    facts['test_head_equation']('l2_logits')
    facts['test_model_equation']('l2_logits', False)


def test_loading_a_model(tmp_path, monkeypatch):
    code = re.search(r'```python\n(from model import .*?)```', README, re.S)[1]
    out = re.search(r"'(.*)/model\.pt'", code)[1]
    assert f'--out={out}\n' in execute('bash', 'sweep.sh', 'demo', DRY_RUN='1')
    monkeypatch.chdir(tmp_path)
    for split in ('train', 'val'):
        train.save(shard(np.arange(1000)), f'a_{split}_000000.bin')
    train.main([*SMALL, '--data=.', f'--out={out}', '--steps=1'])
    names = {'tokens': torch.arange(24).view(2, 12)}
    exec(code, names)
    assert torch.equal(names['gpt'].E, names['saved']['model']['lm_head.weight'])
    assert names['logits'].shape == (2, 12, 50304)
