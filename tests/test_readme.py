"""README.md: the flags of its commands, its LRS table, and the method that it adds."""
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd

import analyze
import prepare_fineweb
import train
from conftest import README, ROOT, execute

PARSERS = {'train.py': train.make_parser, 'prepare_fineweb.py': prepare_fineweb.parser,
           'analyze.py': analyze.parser}


def test_the_commands_have_flags_that_there_are():
    blocks = ''.join(re.findall(r'```sh\n(.*?)```', README, re.S)).replace('\\\n', '')
    for command in re.split(r'\n|&&', blocks):
        words = shlex.split(command, comments=True)
        for program in PARSERS.keys() & {*words}:
            PARSERS[program]().parse_args(words[words.index(program) + 1:])


def test_the_lrs_table_is_that_of_the_csv_files():
    """Of the paper, underlined where all runs converged; ours from the authors' runs are the same."""
    paper = pd.read_csv(Path(ROOT, 'analysis/paper_lrs.csv')).query('tying == "untied"').groupby('variant')
    ours = dict([*pd.read_csv(Path(ROOT, 'results/authors/lrs.csv')).groupby('variant').lrs_n1])
    rows = re.findall(r'^\| ([\w -]+) \| ((?:<u>)?0\.\d{3}.*) \|$', README, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        group = paper.get_group(name)
        assert re.findall(r'0\.\d{3}', cells) == [f'{value:.3f}' for value in ours.get(name, group.lrs)]
        assert ['<u>' in cell for cell in cells.split('|')] == [*group.converged]


PLACES = {  # where README's diffs say that lines go: above these words
    'METHODS': "    'baseline'", 'head_loss': "    stats = {'loss'", 'equations': '    return loss, torch.'}


def test_methods_can_be_added_as_the_readme_says(tmp_path):
    """Its diffs are applied to a copy of the project, in which the tests of the new methods then pass."""
    copy = tmp_path / 'copy'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'results'))
    diffs = ''.join(re.findall(r'```diff\n(.*?)```', README, re.S))
    pieces = re.split(r'^--- (\S+\.py), in (\w+).*\n', diffs, flags=re.M)[1:]
    for file, place, added in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text = (copy / file).read_text()
        lines = ''.join(line[1:] + '\n' for line in added.splitlines())
        assert text.count(PLACES[place]) == 1
        (copy / file).write_text(text.replace(PLACES[place], lines + PLACES[place]))
    methods = re.findall(r"^\+    '(\w+)': (?:None|\d)", diffs, re.M)
    fast = ['test_facts.py', 'tests/test_head.py', 'tests/test_step.py', '-k', ' or '.join(methods)]
    done = execute('python', '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', *fast, cwd=copy)
    for method in methods:
        assert len(re.findall(rf'\[.*{method}.*\] PASSED', done)) >= 2, method
