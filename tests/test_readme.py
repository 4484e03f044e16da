"""README.md and the account of our runs: links, commands, tables, and a method added as README explains."""
import os
import re
import shlex
import shutil
import subprocess
import sys

import pandas as pd
import pytest

import analyze
import prepare_fineweb
import train
from analysis import account
from conftest import ENV, ROOT, read, refused

PARSERS = {f'{program.__name__}.py': program.parser for program in (train, prepare_fineweb, analyze)}


@pytest.fixture(params=account.TABLES)
def readme(request):
    if not os.path.exists(os.path.join(ROOT, request.param)):
        pytest.skip('deleted by this fork')
    return request.param


def test_every_link_is_there(readme):
    folder = os.path.dirname(os.path.join(ROOT, readme))
    links = re.findall(r'\]\((?!http)([^)#]+)', read(readme))
    missing = [link for link in links if not os.path.exists(os.path.join(folder, link))]
    assert not missing, f'{readme} links to files that are not there: {missing}'


def test_the_commands_have_flags_that_there_are(readme):
    blocks = ''.join(re.findall(r'```sh\n(.*?)```', read(readme), re.S)).replace('\\\n', '')
    for command in re.split(r'\n|&&', blocks):
        words = shlex.split(command, comments=True)
        program = next((word for word in words if word in PARSERS), None)
        if program:
            PARSERS[program]().parse_args(words[words.index(program) + 1:])
        for script in re.findall(r'bash (\S+)', command):
            assert os.path.exists(os.path.join(ROOT, script)), script


@pytest.mark.skipif(not account.PUBLISHED.exists(), reason='deleted by this fork')
def test_the_tables_are_those_of_the_csv_files(readme):
    assert account.filled(readme) == read(readme), 'run: python -m analysis.account'


def test_a_table_shows_the_seeds_and_no_minus_zero_and_its_markers_are_missed(tmp_path, monkeypatch):
    rows = pd.DataFrame({'label': 'z-loss', 'seed': [1, 2, 3], 'loss': [-0.12, 0, 0.009], 'mu_norm': -0.2})
    columns = account.columns('.2f', 'loss') + account.columns(',.0f', 'mu_norm')
    monkeypatch.setattr(account, 'HERE', tmp_path)
    monkeypatch.setattr(account, 'read', lambda csv: rows)
    monkeypatch.setattr(account, 'TABLES', {'a.md': {'ours': (account.lines('x', 'z-loss'), columns)}})
    (tmp_path / 'a.md').write_text('Before\n<!-- table: ours -->\nold\n<!-- end -->\nafter')
    account.main([])
    assert (tmp_path / 'a.md').read_text().split('\n')[4] == '| z-loss | -0.04 [-0.12, 0.01] | 0 |'
    (tmp_path / 'a.md').write_text('<!-- table: ours -->\nits end is gone')
    refused(lambda: account.filled('a.md'), 'a.md', 'ours')


PLACES = {  # where README's diffs say that their lines go: below what ends a line, above other words
    'METHODS': r'METHODS = {\n', 'logits_to_loss': r'    stats = {.loss.', 'COLORS': r'COLORS = {\n',
    'ON_WEIGHTS': r'ON_WEIGHTS = \(', 'train_step': r'        if every\(args.center_every',
    'equations': r'    return loss, torch.zeros'}


def test_methods_can_be_added_as_the_readme_says(tmp_path):
    """Its diffs are applied to a copy of the project, in which the tests of the new methods then pass."""
    copy = tmp_path / 'copy'
    kept = shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'wandb', 'results')
    shutil.copytree(ROOT, copy, ignore=kept)
    diffs = ''.join(re.findall(r'```diff\n(.*?)```', read('README.md'), re.S))
    pieces = re.split(r'^--- (\S+\.py), in (\w+).*\n', diffs, flags=re.M)[1:]
    for file, place, added in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text, lines = (copy / file).read_text(), ''.join(line[1:] + '\n' for line in added.splitlines())
        [found] = re.finditer(PLACES[place], text)
        at = found.end() if place.isupper() else found.start()
        (copy / file).write_text(text[:at] + lines + text[at:])
    methods = re.findall(r"^\+    '(\w+)': (?:None|\d)", diffs, re.M)
    fast = ['test_facts.py', 'tests/test_head.py', 'tests/test_step.py', '-k', ' or '.join(methods)]
    command = [sys.executable, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', *fast]
    done = subprocess.run(command, cwd=copy, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in methods:
        assert len(re.findall(rf'\[.*{method}.*\] PASSED', done.stdout)) >= 2, method
