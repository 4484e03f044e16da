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
from analysis import paper, runs, shift
from conftest import ENV, ROOT
from model import ROUNDED, SUBSETS

PUBLISHED = os.path.join(ROOT, 'results', 'published_here')
NAMES = {name.split()[0]: method for method, name in paper.NAMES.items()} | {'baseline': 'baseline'}
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


def test_the_numbers_of_the_tables_of_16M_are_those_of_the_csv():
    found = pd.read_csv(f'{PUBLISHED}/shift_16M/results.csv')
    groups = {key: rows for key, rows in found.groupby(['method', 'rounded', 'mu_shift'])}

    def rows_of(label, norm):
        rounded = 'none' if 'without' in label else SUBSETS[-1]
        return groups.get((NAMES[label.split()[0]], rounded, float(norm)))

    def assert_losses(cell, rows):
        losses = [] if rows is None else rows.test_loss
        assert_shown(cell, *((losses.mean(), losses.min(), losses.max()) if len(losses) > 1 else losses))
    (_, *norms), *lines = table(read('README.md').split('## What we measured')[1])
    for label, *cells in lines:
        for norm, cell in zip(norms, cells, strict=True):
            assert_losses(cell, rows_of(label, norm))
    assert sum(cell != '' for _, *cells in lines for cell in cells) == len(groups)  # every run is in it
    text = read('results', 'published_here', 'README.md')
    for label, losses, *cells, _ in table(text[text.index('| 16M baseline |'):])[1:]:
        rows = rows_of('baseline ' + label, label.split()[1])
        assert_losses(losses, rows)
        assert_shown(' '.join(cells), *rows[['train_loss', 'rounding_loss', 'logit_mean']].mean())


def test_the_numbers_of_the_table_of_roundings_are_those_of_the_csv():
    text = read('results', 'published_here', 'README.md')
    _, *lines = table(text[text.index('| baseline, rounded to bf16 |'):])
    for rounded, (_, *cells) in zip(SUBSETS, lines, strict=True):
        rows = [shifted('baseline', rounded, norm) for norm in (300, 1000)]
        assert_shown(' '.join(cells), *(row[column].mean() for row in rows
                                        for column in ('test_loss', 'logit_mean')))


def test_what_z_loss_and_zero_sum_lose_by_which_rounding_is_that_of_the_csv():
    text = ' '.join(read('results', 'published_here', 'README.md').split())
    said = re.search(r'loses (\S+) nats at norm 1,000 without any rounding and (\S+) with all', text).groups()
    origin, *z_loss = (shifted('z_loss', rounded, norm).test_loss.mean()
                       for rounded, norm in ((SUBSETS[-1], 0), ('none', 1000), (SUBSETS[-1], 1000)))
    assert_shown(' '.join(said), *(loss - origin for loss in z_loss))
    said = re.search(r'ends at (\S+) with the gradient .* alone, at (\S+) .* alone, at (\S+) with all', text)
    assert_shown(' '.join(said.groups()), *(shifted('zero_sum', rounded, 1000).test_loss.mean()
                                            for rounded in ('gradient', 'logits', SUBSETS[-1])))


def test_the_numbers_of_the_table_of_the_push_are_those_of_the_csv():
    text, found = read('results', 'published_here', 'README.md'), pd.read_csv(f'{PUBLISHED}/push/curves.csv')
    header, *lines = table(text[text.index('| norm | | mean logit'):])
    windows = [[int(number) for number in re.findall(r'\d+', words)] for words in header[2:]]
    for norm, label, *cells in lines:
        part = next((part for part in ROUNDED if f'{part} alone' in label), SUBSETS[-1])
        rounded = 'none' if 'without' in label else part
        rows = found[(found.method == NAMES[label.split()[0]]) & (found.rounded == rounded)]
        rows = rows[rows.mu_shift == float(norm)]
        columns = 'logit_mean', 'logit_mean', 'loss', 'loss'
        for (first, last), column, cell in zip(windows, columns, cells, strict=True):
            means = rows[rows.step.between(first, last)].groupby('seed')[column].mean()
            shown = means.agg(['mean', 'min', 'max'] if '[' in cell else ['mean'])
            assert_shown(cell, *(shown if cell else ()))
    from_187 = found[(found.method == 'baseline') & (found.rounded == SUBSETS[-1]) & (found.mu_shift == 187)]
    assert from_187[from_187.step == 10].logit_mean.gt(1000).all() and from_187.seed.nunique() == 3
    assert pd.read_csv(f'{PUBLISHED}/push/results.csv').rounding_loss.max() < 0.001  # as the text has it


def test_the_numbers_of_the_table_of_numerics_are_those_of_the_csv():
    text, found = read('results', 'published_here', 'README.md'), pd.read_csv(f'{PUBLISHED}/real_bf16.csv')
    (_, *norms), *lines = table(text[text.index('| numerics |'):])
    for method in ('baseline', 'mu_centering'):
        for dtype in ('bfloat16', 'float32'):
            rows = found[(found.method == method) & (found.dtype == dtype)]
            for norm, cell in zip(norms, lines.pop(0)[1:], strict=True):
                losses = rows.test_loss[rows.mu_shift == float(norm.split()[1])]
                assert_shown(cell, losses.mean(), losses.min(), losses.max())


def test_what_the_other_methods_lose_in_16M_is_that_of_the_csv():
    text = ' '.join(read('results', 'published_here', 'README.md').split())
    found, curves = (pd.read_csv(f'{PUBLISHED}/shift_16M/{name}.csv') for name in ('results', 'curves'))
    end = found[found.rounded == SUBSETS[-1]].groupby(['method', 'mu_shift'])[['test_loss', 'mu_norm']].mean()
    lost = {key: loss - end.test_loss[key[0], 0] for key, loss in end.test_loss.items()}
    said = re.search(r'loses (\S+) nats at norm 331 and (\S+) at 1,000 all the same.* from 331 to (\S+)\. .* '
                     r'`zero_sum` loses (\S+) nats at 331,.* and (\S+) at 1,000;', text).groups()
    assert_shown(' '.join(said), lost['z_loss', 331], lost['z_loss', 1000], end.mu_norm['mu_loss', 331],
                 lost['zero_sum', 331], lost['zero_sum', 1000])
    rises = re.search(r'it ends (\S+ to \S+) above .* no more than (\S+) at any norm', text).groups()
    centering = [loss for (method, norm), loss in lost.items() if method == 'mu_centering' and norm]
    head = max(loss for (method, _), loss in lost.items() if method == 'centered_head')
    assert_shown(' '.join(rises), min(centering), max(centering), head)
    capped = curves[(curves.method == 'soft_capping') & (curves.mu_shift >= 187) & (curves.step >= 40)]
    assert (capped.logit_mean.abs() == 30).all() and capped.mu_shift.nunique() == 3


def test_the_multiples_of_the_rounding_noise_are_those_of_the_csv():
    text = ' '.join(read('results', 'published_here', 'README.md').split())
    said = re.search(r'(\S+ to \S+) times as much, ours of 16M (.*) times and tiny (.*) times\.', text)
    for words, folder in zip(said.groups(), (None, 'shift_16M', 'shift'), strict=True):
        rows = paper.DRIFT
        if folder:
            rows = shift.shifted(runs.read(f'{PUBLISHED}/{folder}/results.csv')[0])
            rows = rows[rows.label == 'baseline']
        rows = rows[rows.offset >= 256]
        multiples = rows.excess / shift.rounding_noise(rows.offset)
        assert_shown(words, multiples.min(), multiples.max())


def test_the_first_screen_says_what_16M_lost():
    text, found = ' '.join(read('README.md').split()), pd.read_csv(f'{PUBLISHED}/shift_16M/results.csv')
    mean = found[found.rounded == SUBSETS[-1]].groupby(['method', 'mu_shift']).test_loss.mean()
    lost = mean - mean['baseline', 0]
    said = re.search(r'the 16M baseline loses (.*) nats of .* the paper.s loses (.*) after .* steps; '
                     r'μ-centering loses (.*) at 331\.', text).groups()
    published = paper.DRIFT[paper.DRIFT['size'] == '16M'].set_index('lr').excess
    assert_shown(' '.join(said).rstrip('.'), lost['baseline', 187], lost['baseline', 331],
                 published['0.1'], published['0.3'], lost['mu_centering', 331])
    push = pd.read_csv(f'{PUBLISHED}/push/results.csv')
    push = push[(push.rounded == SUBSETS[-1]) & (push.mu_shift == 187)].pivot(index='seed', columns='method')
    lost = push.test_loss.baseline - push.test_loss.mu_centering
    said = re.search(r'ends (\S+) nats above a centered one \((\S+) to (\S+) in three seeds', text).groups()
    assert_shown(' '.join(said), lost.mean(), lost.min(), lost.max())
    excess = pd.read_csv(f'{PUBLISHED}/proxy/lrs.csv').set_index('method').excess
    natural = re.search(r': (\S+ nats lost against \S+)\.', text)[1]
    assert_shown(natural, excess['mu_centering'], excess['baseline'])
    assert f'{len(found)} are done' in text


def test_the_numbers_of_the_tables_without_a_shift_are_those_of_the_csv():
    text = read('results', 'published_here', 'README.md')
    published = pd.read_csv(f'{PUBLISHED}/authors_16M.csv')
    ours = pd.read_csv(f'{PUBLISHED}/proxy/results.csv')
    ours['rms'] = (ours.logit_mean ** 2 + ours.logit_mean_spread ** 2) ** 0.5
    _, *lines = table(text[text.index("| lr | the paper's Σ lr |"):])
    for lr, *cells in lines:
        [theirs] = published[(published.method == 'baseline') & (published.lr == float(lr))].itertuples()
        rows = ours[(ours.method == 'baseline') & (ours.lr == float(lr))]
        assert_shown(' '.join(cells[1:4]), theirs.mu_norm, theirs.logit_mean, theirs.test_loss)
        assert_shown(' '.join(cells[4:]), *rows[['lr_sum', 'mu_norm', 'rms', 'test_loss',
                                                 'rounding_loss']].mean())
    curves = pd.read_csv(f'{PUBLISHED}/natural/curves.csv')
    _, *lines = table(text[text.index('| lr 0.1 | up to step |'):])
    for label, step, *cells in lines:
        rows = curves[(curves.method == NAMES[label.split()[0]]) & (curves.lr == 0.1) &
                      (curves.rounded == ('none' if 'without' in label else SUBSETS[-1])) &
                      curves.step.between(int(step) - 999, int(step))]
        means = rows[['mu_norm', 'logit_mean', 'logit_mean_spread', 'loss']].mean()
        assert_shown(' '.join(cells[:3] + cells[4:]), *means)
        assert float(cells[3]) == pytest.approx(rows.gradient_sum.mean(), rel=0.05)


def test_the_numbers_of_the_return_of_a_mean_logit_are_those_of_the_csv():
    text, folder = read('results', 'published_here', 'README.md'), f'{PUBLISHED}/natural_bf16'
    curves, natural = pd.read_csv(f'{folder}/curves.csv'), pd.read_csv(f'{folder}/results.csv')
    header, *lines = table(text[text.index('| 16M from norm 57 |'):])
    for label, *cells in lines:
        rows = curves[curves.rounded == ('none' if 'no rounding' in label else SUBSETS[-1])]
        column = {'mean': 'logit_mean', '‖μ‖': 'mu_norm', 'training': 'loss'}[label.split()[0]]
        for words, cell in zip(header[1:], cells, strict=True):
            steps = rows.step.between(*map(int, re.findall(r'\d+', words)))
            assert_shown(cell, *([rows[steps & (rows['size'] == '16M')][column].mean()] if cell else []))
    push = pd.read_csv(f'{PUBLISHED}/push/results.csv')
    small = natural[(natural['size'] == 'tiny') & (natural.mu_shift == 0)]
    large = natural[(natural['size'] == '16M') & (natural.rounded == SUBSETS[-1])]
    unshifted = push[(push.method == 'baseline') & (push.mu_shift == 0) & (push.seed == 1)]
    ends = pd.concat([small, unshifted, large])
    said = r'\(to ‖μ‖ = (\S+) in .* stays at (\S+)\. .* is (\S+) to (\S+) \(65.* it is (\S+) at the end,'
    said = re.search(said, ' '.join(text.split())).groups()
    assert_shown(' '.join(said[:2]), small.mu_norm.item(), small.logit_mean.item())
    ratios = [float(number.replace(',', '')) for number in said[2:]]
    assert ratios == pytest.approx(list(ends.mu_norm ** 2 / ends.mu_curvature), rel=0.05)


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
