"""What README.md says: its links, the numbers of its tables, and a method added as it explains."""
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

import model
import train
from conftest import ENV, ROOT

PUBLISHED = os.path.join(ROOT, 'results', 'published_here')
EVERY = 'operands,logits,gradient'
SHIFT = pd.read_csv(os.path.join(PUBLISHED, 'shift', 'results.csv'))


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as file:
        return file.read()


def cells_of(line):
    return [cell.strip().replace(',', '') for cell in line.strip().strip('|').split('|')]


def assert_shown(text, value):
    """The number in `text` is `value`, to the digits that it shows."""
    digits = len(text.partition('e')[0].partition('.')[2]) - int(text.partition('e')[2] or 0)
    assert float(text) == pytest.approx(value, abs=0.5001 * 10.0 ** -digits)


def test_every_link_is_there():
    for readme, folder in (('README.md', ROOT), ('results/published_here/README.md', PUBLISHED)):
        for file in re.findall(r'\]\((?!http)([^)#]+)\)', read(readme)):
            assert os.path.exists(os.path.join(folder, file)), file


def test_each_method_of_the_table_is_in_the_function_that_it_names():
    rows = re.findall(r'^\| `(\w+)` \|.*\| `(\w+)` \|$', read('README.md'), re.M)
    assert len(rows) == 14
    for method, function in rows:
        module = train if hasattr(train, function) and not hasattr(model, function) else model
        code = getattr(module, function).__code__
        name = {'baseline': 'logsumexp', 'mu_centering': 'center_every'}.get(method, method)
        assert method in model.METHODS and name in (*code.co_consts, *code.co_names), method


def test_the_numbers_of_the_shift_table_are_those_of_the_csv():
    header, _, *lines = re.findall(r'^\|.*$', read('README.md').split('## What we measured')[1], re.M)
    names = {'baseline': 'baseline', 'z-loss': 'z_loss', 'μ-centering': 'mu_centering',
             'zero-sum': 'zero_sum', 'centered': 'centered_head'}
    assert len(lines) == 6
    for line in lines:
        label, *shown = cells_of(line)
        rows = SHIFT[(SHIFT.method == names[label.split()[0]])
                     & (SHIFT.rounded == ('none' if 'without' in label else EVERY))]
        for norm, cell in zip(cells_of(header)[1:], shown, strict=True):
            losses = rows[rows.mu_shift == float(norm)].test_loss
            found = [losses.mean(), losses.min(), losses.max()] if len(losses) else []
            for text, value in zip(re.findall(r'[\d.]+', cell), found, strict=True):
                assert_shown(text, value)
    at_300 = SHIFT[(SHIFT.method == 'baseline') & (SHIFT.mu_shift == 300)]
    for rounded, low, high in ((EVERY, 534.5, 1842.5), ('none', -200, 200)):
        assert at_300[at_300.rounded == rounded].logit_mean.between(low, high).all()


def test_the_numbers_of_the_table_of_roundings_are_those_of_the_csv():
    text = read('results', 'published_here', 'README.md').split('| baseline, rounded to bf16 |')[1]
    parts = ['none', 'operands', 'logits', 'gradient', 'operands,logits', 'operands,gradient',
             'logits,gradient', EVERY]
    lines = re.findall(r'^\|.*$', text.split('**Proved**')[0], re.M)[1:]
    for rounded, line in zip(parts, lines, strict=True):
        rows = SHIFT[(SHIFT.method == 'baseline') & (SHIFT.rounded == rounded)]
        found = [rows[rows.mu_shift == norm][column].mean() for norm in (300, 1000)
                 for column in ('test_loss', 'logit_mean')]
        for text, value in zip(cells_of(line)[1:], found, strict=True):
            assert_shown(text, value)


def test_a_method_can_be_added_as_the_readme_says(tmp_path):
    """The diff, applied to a copy of the project, in which the fast tests then pass, the method's own too."""
    copy, places = tmp_path / 'copy', {
        'METHODS': r'METHODS = {\n', 'logits_to_loss': r'    stats = {.loss.',
        'equations': r'    return loss, torch.zeros', 'COLORS': r'COLORS = {\n'}
    kept = shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'wandb', 'results')
    shutil.copytree(ROOT, copy, ignore=kept)
    os.symlink(os.path.join(ROOT, 'results'), copy / 'results')
    block = re.search(r'```diff\n(.*?)```', read('README.md'), re.S).group(1)
    pieces = re.split(r'^--- (\S+\.py), in (\w+).*\n', block, flags=re.M)[1:]
    for file, place, added in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text, lines = (copy / file).read_text(), ''.join(line[1:] + '\n' for line in added.splitlines())
        [found] = re.finditer(places[place], text)
        at = found.end() if place.isupper() else found.start()
        (copy / file).write_text(text[:at] + lines + text[at:])
    fast = ['test_facts.py', 'tests/test_head.py', 'tests/test_readme.py', '-k', 'not compil and not can_be']
    command = [sys.executable, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', *fast]
    done = subprocess.run(command, cwd=copy, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r'\[.*l2_logits.*\] PASSED', done.stdout)) >= 4
