"""README.md: the flags of its commands, its LRS table, and the method that it adds."""
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd

import analyze
import prepare_fineweb
import train
from conftest import ROOT, execute

README = Path(ROOT, 'README.md').read_text(encoding='utf-8')
PARSERS = {f'{program.__name__}.py': program.parser for program in (train, prepare_fineweb, analyze)}


def test_the_commands_have_flags_that_there_are():
    blocks = ''.join(re.findall(r'```sh\n(.*?)```', README, re.S)).replace('\\\n', '')
    for command in re.split(r'\n|&&', blocks):
        words = shlex.split(command, comments=True)
        for program in PARSERS.keys() & {*words}:
            PARSERS[program]().parse_args(words[words.index(program) + 1:])


def test_the_lrs_table_is_that_of_the_csv():
    lrs = pd.read_csv(Path(ROOT, 'results/authors/lrs.csv')).groupby('variant').lrs_n1
    shown = re.findall(r'^\| ([\w-]+) \| (0\.\d{3}(?: \| 0\.\d{3})*) \|$', README, re.M)
    assert len(shown) == 4
    for name, cells in shown:
        assert cells.split(' | ') == [f'{value:.3f}' for value in lrs.get_group(name)]


PLACES = {  # where README's diffs say that their lines go: below what ends a line, or above other words
    'METHODS': r'METHODS = {\n', 'head_loss': r'    stats = {.loss.',
    'equations': r'    return loss, torch.zeros'}


def test_methods_can_be_added_as_the_readme_says(tmp_path):
    """Its diffs are applied to a copy of the project, in which the tests of the new methods then pass."""
    copy = tmp_path / 'copy'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'results'))
    diffs = ''.join(re.findall(r'```diff\n(.*?)```', README, re.S))
    pieces = re.split(r'^--- (\S+\.py), in (\w+).*\n', diffs, flags=re.M)[1:]
    for file, place, added in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text = (copy / file).read_text()
        lines = ''.join(line[1:] + '\n' for line in added.splitlines())
        [found] = re.finditer(PLACES[place], text)
        at = found.end() if place.isupper() else found.start()
        (copy / file).write_text(text[:at] + lines + text[at:])
    methods = re.findall(r"^\+    '(\w+)': (?:None|\d)", diffs, re.M)
    fast = ['test_facts.py', 'tests/test_head.py', 'tests/test_step.py', '-k', ' or '.join(methods)]
    done = execute('python', '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', *fast, cwd=copy)
    for method in methods:
        assert len(re.findall(rf'\[.*{method}.*\] PASSED', done)) >= 2, method
