"""What README.md says: links to lines, numbers of csv files, a method added as it explains."""
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from conftest import ENV, ROOT
from model import METHODS

PUBLISHED = os.path.join(ROOT, 'results', 'published_here')


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as file:
        return file.read()


def test_every_link_is_there_and_links_to_lines_name_what_they_are_about():
    for readme, folder in (('README.md', ROOT), ('results/published_here/README.md', PUBLISHED)):
        for file, line in re.findall(r'\]\((?!http)([^)#]+)(?:#L(\d+))?\)', read(readme)):
            assert os.path.exists(os.path.join(folder, file)), file
            assert line == '' or readme == 'README.md'
    for name, file, line in re.findall(r'\[`(\w+)`\]\((\w+\.py)#L(\d+)\)', read('README.md')):
        assert read(file).splitlines()[int(line) - 1].startswith(f'def {name}('), (name, line)
    table = re.findall(r'^\| `(\w+)` \|.*\((\w+\.py)#L(\d+)\) \|$', read('README.md'), re.M)
    assert [method for method, _, _ in table] == list(METHODS)
    for method, file, line in table:
        code = {'baseline': 'loss = log_z', 'mu_centering': 'if centers(args.method)'}
        pattern = f"^ +(if |if config\\.)?{re.escape(code.get(method, f'method == {method!r}'))}"
        assert re.search(pattern, read(file).splitlines()[int(line) - 1]), method


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip('|').split('|')]


def half_a_unit(text):
    """Half a unit of the last digit that a number in a table shows."""
    mantissa, _, exponent = text.partition('e')
    return 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition('.')[2]))


def rows_of(file):
    rows = pd.read_csv(os.path.join(PUBLISHED, file))
    for column in ('logit_mean_spread', 'rounding_loss', 'lr_sum'):
        if column not in rows:
            rows[column] = float('nan')
    schedule = rows.steps * (0.05 * rows.lr + 0.95 * (rows.lr + 1e-5) / 2 - 0.05 * rows.lr / 2)
    rows['lr_sum'] = rows.lr_sum.fillna(schedule)  # a linear warm-up over 5% of the steps, then a cosine
    return rows.assign(rms=(rows.logit_mean ** 2 + rows.logit_mean_spread ** 2) ** 0.5)


def assert_row(rows, method, lr, shown, columns):
    """Each number of a table is the mean over the seeds of the csv's rows, to the digits that it shows."""
    part = rows[(rows.method == method) & (rows.lr == float(lr))]
    assert len(part)
    for text, column in zip(shown, columns, strict=True):
        number = text.replace(',', '')
        assert abs(float(number) - part[column].mean()) <= 1.001 * half_a_unit(number), (method, lr, column)


def test_every_number_of_the_measured_tables_is_that_of_the_csv():
    names = {'baseline': 'baseline', 'z-loss': 'z_loss', 'μ-loss': 'mu_loss', 'μ-centering': 'mu_centering'}
    ours = rows_of('proxy/results.csv')
    columns = ['lr_sum', 'mu_norm', 'rms', 'test_loss', 'rounding_loss']
    table = re.findall(r'^\|[^|]+, lr .*$', read('results', 'published_here', 'README.md'), re.M)
    assert len(table) == 7
    for line in table:
        cells = cells_of(line)
        theirs, mine = cells[:5], cells[6:]
        for rows, (label, *shown), which in (
                (rows_of('authors_16M.csv'), theirs, ['lr_sum', 'mu_norm', 'logit_mean', 'test_loss']),
                (ours, mine, columns)):
            method, lr = label.split(', lr ')
            assert_row(rows, names[method], lr, shown, which)


def test_every_number_of_the_shift_table_is_that_of_the_csv():
    rows = pd.read_csv(os.path.join(PUBLISHED, 'shift', 'results.csv'))
    section = read('README.md').split('## What we measured')[1]
    header, _, *lines = re.findall(r'^\|.*$', section, re.M)
    names = {'baseline': 'baseline', 'z-loss': 'z_loss', 'μ-centering': 'mu_centering',
             'zero-sum': 'zero_sum', 'centered': 'centered_head'}
    assert len(lines) == 6
    for line in lines:
        label, *shown = cells_of(line)
        rounded = 'none' if 'without' in label else 'operands,logits,gradient'
        part = rows[(rows.method == names[label.split()[0]]) & (rows.rounded == rounded)]
        for norm, cell in zip(cells_of(header)[1:], shown, strict=True):
            losses = part[part.mu_shift == float(norm.replace(',', ''))].test_loss
            numbers = [float(number) for number in re.findall(r'[\d.]+', cell)]
            found = [losses.mean(), losses.min(), losses.max()] if len(losses) else []
            assert numbers == [pytest.approx(value, abs=0.0005001) for value in found], (line, norm)
    at_300 = rows[(rows.method == 'baseline') & (rows.mu_shift == 300)]
    for rounded, low, high in (('operands,logits,gradient', 534.5, 1842.5), ('none', -200, 200)):
        assert at_300[at_300.rounded == rounded].logit_mean.between(low, high).all()


def test_every_number_of_the_table_of_roundings_is_that_of_the_csv():
    rows = pd.read_csv(os.path.join(PUBLISHED, 'shift', 'results.csv'))
    text = read('results', 'published_here', 'README.md').split('| baseline, rounded to bf16 |')[1]
    parts = ['none', 'operands', 'logits', 'gradient', 'operands,logits', 'operands,gradient',
             'logits,gradient', 'operands,logits,gradient']
    lines = re.findall(r'^\|.*$', text.split('**Proved**')[0], re.M)[1:]
    for rounded, line in zip(parts, lines, strict=True):
        part = rows[(rows.method == 'baseline') & (rows.rounded == rounded)]
        shown = [float(cell.replace(',', '')) for cell in cells_of(line)[1:]]
        found = [part[part.mu_shift == norm][column].mean() for norm in (300, 1000)
                 for column in ('test_loss', 'logit_mean')]
        for value, number, digits in zip(found, shown, (0.0005, 0.5, 0.0005, 0.5), strict=True):
            assert abs(value - number) <= 1.001 * digits, (line, value)


def test_the_account_of_the_shift_has_the_numbers_of_the_csv():
    rows = pd.read_csv(os.path.join(PUBLISHED, 'shift', 'results.csv'))
    text = ' '.join(read('results', 'published_here', 'README.md').split())

    def losses(method, *norms, rounded='operands,logits,gradient'):
        part = rows[(rows.method == method) & (rows.rounded == rounded)]
        *first, last = [f'{part[part.mu_shift == norm].test_loss.mean():.3f}' for norm in norms]
        return f'{", ".join(first)} and {last}'
    none = losses('baseline', 300, 1000, rounded='none').split(' and ')
    seeds = rows[(rows.method == 'baseline') & (rows.mu_shift == 1000) & (rows.rounded.str.len() > 20)]
    *first, last = seeds.sort_values('seed').test_loss.map('{:.3f}'.format)
    down = ' and '.join(seeds[seeds.logit_mean < 0].sort_values('seed').logit_mean.map('{:,.0f}'.format))
    for phrase in (f"The baseline's test loss is {losses('baseline', 0, 30, 100, 300, 1000)} at norm 0, 30",
                   f'three seeds at {", ".join(first)} and {last};', f'ended at mean logits of {down},',
                   f'without any rounding it is {none[0]} at 300 and {none[1]} at 1,000',
                   f'with μ-centering {losses("mu_centering", 300, 1000)}',
                   f'with z-loss {losses("z_loss", 300, 1000)}',
                   f'with `zero_sum` {losses("zero_sum", 300, 1000)}',
                   f'with `centered_head` {losses("centered_head", 300, 1000)}.'):
        assert phrase in text, phrase


def test_every_number_of_the_table_without_a_shift_is_that_of_the_csv():
    curves = pd.read_csv(os.path.join(PUBLISHED, 'natural', 'curves.csv'))
    text = read('results', 'published_here', 'README.md').split('## Without a shift')[1].split('\n## ')[0]
    every = 'operands,logits,gradient'
    runs = {'baseline': ('baseline', every), 'zero_sum': ('zero_sum', every),
            'baseline without any rounding': ('baseline', 'none')}
    lines = re.findall(r'^\|.*$', text, re.M)[2:]
    assert len(lines) == 9
    for line in lines:
        label, last, *shown = cells_of(line)
        method, rounded = runs[label]
        part = curves[(curves.method == method) & (curves.rounded == rounded) & (curves.lr == 0.1)]
        part = part[part.step.between(int(last.replace(',', '')) - 999, int(last.replace(',', '')))]
        columns = ['mu_norm', 'logit_mean', 'logit_mean_spread', 'gradient_sum', 'loss']
        for number, column in zip(shown, columns, strict=True):
            assert float(number) == pytest.approx(part[column].mean(), abs=1.001 * half_a_unit(number)), line


def test_a_method_can_be_added_as_the_readme_says(tmp_path):
    """The lines of the diff, put where it says, in a copy: the method trains, and holds to its equation."""
    block = re.search(r'```diff\n(.*?)```', read('README.md'), re.S).group(1)
    pieces = re.split(r'^--- (\w+\.py).*\n', block, flags=re.M)[1:]
    added = {file: [line[1:] for line in text.splitlines()]
             for file, text in zip(pieces[::2], pieces[1::2], strict=True)}
    for name in os.listdir(ROOT):
        if name.endswith('.py'):
            shutil.copy(os.path.join(ROOT, name), tmp_path)

    def insert(file, before, lines):
        path = tmp_path / file
        text = path.read_text(encoding='utf-8')
        assert text.count(before) == 1, (file, before)
        path.write_text(text.replace(before, '\n'.join(lines) + '\n' + before), encoding='utf-8')
    insert('model.py', "    'max_z_loss': 2e-4", added['model.py'][:1])
    insert('model.py', "    if config.method == 'max_z_loss'", added['model.py'][1:])
    insert('test_facts.py', "    if method == 'max_z_loss'", added['test_facts.py'])
    insert('plots.py', 'STYLES = ', ['COLORS |= {', *added['plots.py'], '}'])
    tests = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'test_facts.py', '-k',
             'l2_logits and (equation or gradcheck)']
    done = subprocess.run(tests, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0 and '4 passed' in done.stdout, done.stdout + done.stderr
