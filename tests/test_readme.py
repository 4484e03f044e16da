"""What README.md says: its links, the numbers of its tables, and a method added as it explains."""
import os
import re
import shutil
import subprocess
import sys
from itertools import accumulate

import pandas as pd
import pytest

import model
import train
from analysis import csv_files, paper, shift
from conftest import ENV, ROOT
from model import ALL, ROUNDED

PUBLISHED = os.path.join(ROOT, 'results', 'published_here')
NAMES = {name.split()[0]: method for method, name in paper.NAMES.items()} | {'baseline': 'baseline'}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as file:
        return file.read()


def table(text):
    """The cells of the first table in a text, without the line below its header."""
    header, _, *rows = re.search(r'(^\|.*\n)+', text, re.M)[0].replace(',', '').splitlines()
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in (header, *rows)]


def numbers(text):
    return re.findall(r'-?\d+(?:\.\d+)?', text.replace(',', ''))


def assert_shown(text, *values):
    """The numbers in `text` are these values, to the digits that it shows."""
    for number, value in zip(numbers(text), values, strict=True):
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


def account(marker=None):
    """The account as one line or, with a marker, the table of it whose header begins so."""
    text = read('results', 'published_here', 'README.md')
    return table(text[text.index(marker):]) if marker else ' '.join(text.split())


def said(pattern, text):
    """What the groups of the pattern match, as one text."""
    return ' '.join(re.search(pattern, text).groups())


def csv_of(folder, name='results'):
    return pd.read_csv(f'{PUBLISHED}/{folder}/{name}.csv')


def rows_of(rows, label, **also):
    """Those of a table's line that is labelled with a method and what is rounded."""
    part = next((part for part in ROUNDED if f'{part} alone' in label), ALL)
    wanted = {'method': NAMES[label.split()[0]], 'rounded': 'none' if 'in fp32' in label else part, **also}
    return rows[(rows[list(wanted)] == pd.Series(wanted)).all(axis=1)]


def assert_seeds(cell, values):
    """A cell is the mean of values and, if several are shown, [the lowest, the highest]; empty: of none."""
    shown = values.agg(['mean', 'min', 'max'] if '[' in cell else ['mean'])
    assert_shown(cell, *(shown if len(values) else ()))


def lost_in_16M():
    """(method, norm) -> the test loss lost."""
    found = csv_of('shift_16M')
    mean = found[found.rounded == ALL].groupby(['method', 'mu_shift']).test_loss.mean()
    return {key: loss - mean[key[0], 0] for key, loss in mean.items()}


def windows(header):
    """The steps (first, last) that the cells of a header name: those of one that names none are as before."""
    found = [[int(number) for number in re.findall(r'\d+', words)] for words in header]
    return [steps[-2:] for steps in accumulate(found, lambda before, steps: steps or before)]


def test_the_tables_of_16M():
    found, cells_seen = csv_of('shift_16M'), 0
    (_, *norms), *lines = table(read('README.md').split('## What we measured')[1])
    for label, *cells in lines:
        for norm, cell in zip(norms, cells, strict=True):
            losses = rows_of(found, label, mu_shift=float(norm)).test_loss
            assert_seeds(cell, losses)
            assert ('[' in cell) == (len(losses) > 1)
            cells_seen += len(losses)
    assert cells_seen == len(found) == 68  # every run is in it
    found['rms'] = (found.logit_mean ** 2 + found.logit_mean_spread ** 2) ** 0.5
    for label, losses, *cells, _ in account('| 16M baseline |')[1:]:
        rows = rows_of(found, 'baseline ' + label, mu_shift=float(label.split()[1]))
        assert_seeds(losses, rows.test_loss)
        assert_shown(' '.join(cells), *rows[['train_loss', 'rounding_loss', 'rms']].mean())


def test_what_16M_lost():
    lost, readme, found = lost_in_16M(), ' '.join(read('README.md').split()), csv_of('shift_16M')
    theirs = shift.published_baselines().set_index(['size', 'lr']).excess['16M']
    words = r'baseline loses (\S+ and \S+) nats .* loses (\S+ and \S+) after .* loses (\S+) at 331'
    assert_shown(said(words, readme), lost['baseline', 187], lost['baseline', 331],
                 theirs[0.1], theirs[0.3], lost['mu_centering', 331])
    text, full = account(), found[found.rounded == ALL]
    centering = [loss for (method, norm), loss in lost.items() if method == 'mu_centering' and norm]
    seeds = full[full.method == 'mu_centering'].groupby('mu_shift').test_loss
    assert_shown(said(r'loss ends (\S+) to (\S+) above that .* up to (\S+) apart', text),
                 min(centering), max(centering), (seeds.max() - seeds.min()).max())
    mu_norm = full[(full.method == 'mu_loss') & (full.mu_shift == 331)].mu_norm
    words = r'z-loss loses (\S+) nats at .* μ-loss loses (\S+) nats at .* and (\S+) at .* only to (\S+)\. '
    assert_shown(said(words, text), lost['z_loss', 1000], lost['mu_loss', 187], lost['mu_loss', 331],
                 mu_norm.item())
    zero_sum = [lost['zero_sum', norm] for norm in (57, 80, 187, 331)]
    assert_shown(said(r'gradient, loses (\S+) to (\S+) nats up to norm 331, and (\S+) at', readme),
                 min(zero_sum), max(zero_sum), lost['zero_sum', 1000])
    curves = csv_of('shift_16M', 'curves')
    capped = curves[(curves.method == 'soft_capping') & (curves.mu_shift > 0) & (curves.step >= 60)]
    assert (capped.logit_mean.abs() == 30).all() and capped.mu_shift.nunique() == 5
    rounding = full[full.method == 'baseline'].groupby('mu_shift').rounding_loss.mean()
    assert_shown(said(r'would still lose (\S+)%, (\S+)% and (\S+)% as much', text),
                 *(100 - 100 * rounding[norm] / lost['baseline', norm] for norm in (187, 331, 1000)))


def test_the_multiples_of_the_rounding_noise():
    words = r'(\S+ to \S+) times the noise, ours of 16M (.*) times and `tiny` (.*) times\.'
    shown = re.search(words, account()).groups()
    for multiples, folder in zip(shown, (None, 'shift_16M', 'shift'), strict=True):
        rows = shift.published_baselines()
        if folder:
            rows = shift.shifted(csv_files.read(f'{PUBLISHED}/{folder}/results.csv')[0])
            rows = rows[rows.full_name == 'baseline']
        rows = rows[rows.offset >= 256]
        found = rows.excess / shift.rounding_noise(rows.offset)
        assert_shown(multiples, found.min(), found.max())


def test_the_table_of_roundings_and_what_it_leaves_out():
    found = csv_of('shift')
    found['rms'] = (found.logit_mean ** 2 + found.logit_mean_spread ** 2) ** 0.5
    parts = ('in fp32', 'operands alone', 'logits alone', 'gradient alone', '')
    for part, (_, *cells) in zip(parts, account('| rounded to bf16 |')[1:], strict=True):
        rows = [rows_of(found, f'baseline {part}', mu_shift=norm) for norm in (300, 1000)]
        assert_shown(' '.join(cells), *(of[name].mean() for of in rows for name in ('test_loss', 'rms')))
    mean = found.groupby(['method', 'rounded', 'mu_shift']).test_loss.mean()
    lost = mean - mean['baseline', 'none', 1000]
    assert (lost['baseline', :, 1000].drop(['logits,gradient', ALL]) < 0.3).all()
    origin = mean['z_loss', ALL, 0]
    assert_shown(said(r'`tiny` loses (\S+) there and (\S+) in fp32', account()),
                 *(mean['z_loss', rounded, 1000] - origin for rounded in (ALL, 'none')))
    assert_shown(said(r'a loss of (\S+) at norm 1,000; ', account()), mean['zero_sum', ALL, 1000])


def test_the_table_of_the_push():
    found, (header, *lines) = csv_of('push', 'curves'), account('| norm | | mean logit')
    for norm, label, *cells in lines:
        rows = rows_of(found, label, mu_shift=float(norm))
        columns = 'logit_mean', 'loss', 'loss'
        for (first, last), column, cell in zip(windows(header[2:]), columns, cells, strict=True):
            assert_seeds(cell, rows[rows.step.between(first, last)].groupby('seed')[column].mean())
    from_187 = rows_of(found, 'baseline', mu_shift=187)
    assert from_187[from_187.step == 10].logit_mean.gt(1000).all() and from_187.seed.nunique() == 3
    ends = csv_of('push')
    assert ends.rounding_loss.max() < 0.001
    ends = ends[(ends.mu_shift == 187) & (ends.rounded == ALL)]
    ends = ends.pivot(index='seed', columns='method', values='test_loss')
    assert list((ends.baseline - ends.mu_centering).round(2)) == [0.92, 0.89, 0.08]
    third = ends.loc[3, ['mu_centering', 'centered_head']]
    assert_shown(said(r'μ-centering ends at (\S+), perhaps .* head ends at (\S+)\. That', account()), *third)


def test_the_table_of_numerics():
    found, ((_, *norms), *lines) = pd.read_csv(f'{PUBLISHED}/real_bf16.csv'), account('| numerics |')
    for label, *cells in lines:
        dtype = 'bfloat16' if 'products in bf16' in label else 'float32'
        for norm, cell in zip(norms, cells, strict=True):
            rows = found[(found.method == NAMES[label.split()[0]]) & (found.dtype == dtype)]
            assert_seeds(cell, rows.test_loss[rows.mu_shift == float(norm.split()[1])])


def test_the_tables_of_natural_drift():
    published, ours = pd.read_csv(f'{ROOT}/results/authors/results.csv'), csv_of('proxy')
    published = published[published['size'] == '16M']
    ours['rms'] = (ours.logit_mean ** 2 + ours.logit_mean_spread ** 2) ** 0.5
    for lr, _, *cells in account("| lr | the paper's Σ lr |")[1:]:
        [theirs] = published[(published.method == 'baseline') & (published.lr == float(lr))].itertuples()
        rows = ours[(ours.method == 'baseline') & (ours.lr == float(lr))]
        assert_shown(' '.join(cells), theirs.mu_norm, theirs.logit_mean, theirs.test_loss,
                     *rows[['lr_sum', 'mu_norm', 'logit_mean', 'rms', 'test_loss', 'rounding_loss']].mean())
    lrs, text = csv_of('proxy', 'lrs').set_index('method'), ' '.join(read('README.md').split())
    assert_shown(said(r'save loss: it lost (\S+) nats, the baseline (\S+)\. ', text),
                 lrs.excess['mu_centering'], lrs.excess['baseline'])
    words = said(r'loses (\S+) nats \((\S+) to (\S+) over .* 1.22\), μ-centering (\S+) \((\S+) to (\S+)\)',
                   account())
    assert_shown(words, *lrs.loc['baseline', ['excess', 'excess_low', 'excess_high']],
                 *lrs.loc['mu_centering', ['excess', 'excess_low', 'excess_high']])
    fp32 = csv_of('proxy_fp32').groupby('method').test_loss.mean()
    assert_shown(said(r'baseline ends at (\S+) and μ-centering at (\S+), so', account()), fp32['baseline'],
                 fp32['mu_centering'])
    by_seed = ours[ours.method == 'baseline'].pivot(index='seed', columns='lr', values='test_loss')
    best, exact = by_seed.min(axis=1), csv_of('proxy_fp32').query('method == "baseline"').set_index('seed')
    left = 100 * (exact.test_loss - best) / (by_seed[0.3] - best)
    assert_shown(said(r'remains \((\S+)% to (\S+)%, by seed', account()), left.min(), left.max())


def test_the_tables_of_a_mean_logit_that_comes_back():
    curves = csv_of('natural_bf16', 'curves')
    columns = {'mean': 'logit_mean', '‖μ‖': 'mu_norm', 'training': 'loss', 'loss': 'loss'}
    small, large = curves[curves['size'] == 'tiny'].query('mu_shift == 0'), curves[curves['size'] == '16M']
    header, *lines = account('| 16M from norm 57 |')
    for label, *cells in lines:
        quantity, who = label.split(' ', 1)
        rows = rows_of(large, who.removeprefix('logit ').removeprefix('loss '))
        for (first, last), cell in zip(windows(header[1:]), cells, strict=True):
            assert_seeds(cell, rows[rows.step.between(first, last)][columns[quantity]])
    end = rows_of(large, 'baseline').query('step > 4000')
    assert_shown(said(r'stays near (\S+) while ‖μ‖ drifts on to (\d+)', account()),
                 end.logit_mean.mean(), end.mu_norm.iloc[-1])
    header, *lines = account('| 65,536 tokens a step |')
    for label, *cells in lines:
        rows = rows_of(small, label)
        for (first, last), words, cell in zip(windows(header[1:]), header[1:], cells, strict=True):
            column = columns[words.split(': ')[-1].split()[0]]
            assert_seeds(cell, rows[rows.step.between(first, last)][column])


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
