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
from model import SUBSETS

PUBLISHED = os.path.join(ROOT, 'results', 'published_here')
SHIFT = pd.read_csv(os.path.join(PUBLISHED, 'shift', 'results.csv'))


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as file:
        return file.read()


def table(text):
    """The cells of the first table in a text, without the line below its header."""
    header, _, *rows = re.search(r'(^\|.*\n)+', text, re.M)[0].replace(',', '').splitlines()
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in (header, *rows)]


def shifted(method, rounded, norm):
    return SHIFT[(SHIFT.method == method) & (SHIFT.rounded == rounded) & (SHIFT.mu_shift == float(norm))]


def assert_shown(text, *values):
    """The numbers in `text` are these values, to the digits that it shows."""
    for number, value in zip(re.findall(r'-?[\d.]+', text), values, strict=True):
        assert float(number) == pytest.approx(value, abs=0.5001 * 10.0 ** -len(number.partition('.')[2]))


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
    (_, *norms), *lines = table(read('README.md').split('## What we measured')[1])
    names = {'baseline': 'baseline', 'z-loss': 'z_loss', 'μ-centering': 'mu_centering',
             'zero-sum': 'zero_sum', 'centered': 'centered_head'}
    assert len(lines) == 6
    for label, *cells in lines:
        for norm, cell in zip(norms, cells, strict=True):
            rounded = 'none' if 'without' in label else SUBSETS[-1]
            losses = shifted(names[label.split()[0]], rounded, norm).test_loss
            assert_shown(cell, *((losses.mean(), losses.min(), losses.max()) if len(losses) else ()))
    for rounded, low, high in ((SUBSETS[-1], 534.5, 1842.5), ('none', -200, 200)):
        assert shifted('baseline', rounded, 300).logit_mean.between(low, high).all()


def test_the_numbers_of_the_table_of_roundings_are_those_of_the_csv():
    text = read('results', 'published_here', 'README.md')
    _, *lines = table(text[text.index('| baseline, rounded to bf16 |'):])
    for rounded, (_, *cells) in zip(SUBSETS, lines, strict=True):
        rows = [shifted('baseline', rounded, norm) for norm in (300, 1000)]
        assert_shown(' '.join(cells), *(row[column].mean() for row in rows
                                        for column in ('test_loss', 'logit_mean')))


def test_the_numbers_of_the_table_of_numerics_are_those_of_the_csv():
    text, runs = read('results', 'published_here', 'README.md'), pd.read_csv(f'{PUBLISHED}/real_bf16.csv')
    (_, *norms), *lines = table(text[text.index('| numerics |'):])
    for method in ('baseline', 'mu_centering'):
        for dtype in ('bfloat16', 'float32'):
            rows = runs[(runs.method == method) & (runs.dtype == dtype)]
            for norm, cell in zip(norms, lines.pop(0)[1:], strict=True):
                losses = rows.test_loss[rows.mu_shift == float(norm.split()[1])]
                assert_shown(cell, losses.mean(), losses.min(), losses.max())


def test_the_numbers_of_the_table_of_16M_are_those_of_the_csv():
    text = read('results', 'published_here', 'README.md')
    runs = pd.read_csv(f'{PUBLISHED}/shift_16M/results.csv')
    _, *lines = table(text[text.index('| 16M | norm'):])
    for row, (_, norm, *cells, _) in zip(runs.itertuples(), lines, strict=True):
        assert row.mu_shift == float(norm)
        assert_shown(' '.join(cells), row.test_loss, row.train_loss, row.logit_mean)


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
