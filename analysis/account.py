"""
Writes the tables of README.md and of results/published_here/README.md, from the csv files beside the latter:

    python -m analysis.account

A table stands between <!-- table: NAME --> and <!-- end -->; TABLES says what is in it. All else is prose.
"""
import functools
import itertools
import re
from pathlib import Path

from analysis import csv_files, shift
from analysis.tables import SYMBOLS, lrs_rows
from oec.common import check, program, write_atomic

HERE = Path(__file__).resolve().parent.parent
PUBLISHED = HERE / 'results' / 'published_here'
WORDS = {'lr': 'lr {}', 'size': '{}', 'mu_shift': 'norm {:,}', 'step': 'steps {0[0]:,} to {0[1]:,}'}
HEADERS = SYMBOLS | {'excess': 'loss lost', 'rounding_loss': 'rounding loss'}
WHOLE = ',.0f'  # the format of numbers that are shown without their seeds


def each(values):
    """(words, {name: value, ...}) for each combination of the values that a dict gives to names of WORDS."""
    for some in itertools.product(*values.values()):
        where = dict(zip(values, some, strict=True))
        yield ''.join(f', {WORDS[name].format(value)}' for name, value in where.items()), where


def lines(csv, *labels, whose='', **values):
    """Lines (words, which rows) of a table: of a csv file those of each label and of each of the values."""
    return [(whose + label + words, {**where, 'csv': csv, 'label': label})
            for words, where in each(values) for label in labels]


def columns(form, *names, **values):
    """Columns (words, column of the csv file, format, which rows of a line): those of each of the values."""
    return [(HEADERS.get(name, name) + words, name, form, where)
            for name in names for words, where in each(values)]


BOTH, OURS = ('baseline', 'μ-centering'), ('zero-sum', 'centered head')
ROUNDINGS = [f'baseline{words}' for words in shift.ROUNDED.values()]  # in fp32 first, all of them last
PARTS = ROUNDINGS[:4]
LRS, NORMS = (0.01, 0.03, 0.1, 0.3), (0, 57, 187, 331, 1000)
TEST_LOSS = 'test loss', 'test_loss', '.2f', {'file': 'results'}  # beside the curves.csv of a line
LATER = (21, 60), (261, 300), (561, 600), (961, 1000)
TABLES = {
    'README.md': {
        'authors_lrs': (lines('../authors/lrs', 'baseline', 'z-loss', 'μ-loss', 'μ-centering'),
                        [(size, 'lrs_n1', '.3f', {'size': size}) for size in csv_files.PUBLISHED]),
        'shift_16M': (lines('shift_16M/results', *BOTH), columns('.2f', 'loss', mu_shift=(0, 187, 331)))},
    'results/published_here/README.md': {
        'methods_16M': (lines('shift_16M/results', 'baseline', 'baseline in fp32', 'z-loss', 'soft-capping',
                              'μ-loss', 'μ-centering', *OURS), columns('.2f', 'loss', mu_shift=NORMS)),
        'roundings_16M': (
            lines('shift_16M/results', *ROUNDINGS, mu_shift=[331]) +
            lines('shift_16M/results', 'baseline in fp32', 'baseline', mu_shift=(187, 1000)),
            columns('.2f', 'loss', 'excess', 'rounding_loss') + columns(WHOLE, 'offset')),
        'roundings': (
            lines('shift/results', *PARTS, 'baseline', *OURS),
            columns('.3f', 'loss', mu_shift=(300, 1000)) + columns(WHOLE, 'offset', mu_shift=(300, 1000))),
        'push': (
            lines('push/curves', *PARTS, *OURS, *BOTH, mu_shift=[187]),
            columns(WHOLE, 'logit_mean', step=[(1, 50)]) +
            columns('.2f', 'loss', step=[(901, 1000), (1901, 2000)]) + [TEST_LOSS]),
        'comes_back': (lines('natural_bf16/curves', PARTS[0], *BOTH, OURS[0], mu_shift=[57]),
                       columns('.1f', 'logit_mean', 'mu_norm', step=[(1, 50), (401, 500), (7901, 8000)]) +
                       columns('.3f', 'loss', step=[(201, 250), (401, 500)])),
        'drift': (
            lines('../authors/results', 'baseline', whose="the paper's ", size=['16M'], lr=LRS[:3]) +
            lines('proxy/results', 'baseline', whose='ours: ', lr=LRS) +
            lines('proxy/results', 'μ-centering', whose='ours: ', lr=(LRS[0], LRS[-1])) +
            lines('proxy_fp32/results', *BOTH, whose='ours in fp32: ', lr=LRS[-1:]),
            columns(WHOLE, 'lr_sum', 'mu_norm', 'logit_mean', 'offset') + columns('.3f', 'test_loss')),
        'lasts': (lines('shift_16M/curves', *BOTH, whose='cosine: ', mu_shift=[187]) +
                  lines('cosine/curves', *BOTH, whose='cosine over 600: ', mu_shift=[187]) +
                  lines('constant_lr/curves', *BOTH, whose='constant: ', mu_shift=[187]),
                  columns(WHOLE, 'logit_mean', step=LATER) +
                  columns('.2f', 'loss', step=LATER) + [TEST_LOSS]),
        'batches': (
            [line for n in (8192, 65536, 262144)
             for line in lines(f'batch/{n}/curves', BOTH[0], whose=f'{n:,} tokens a step: ', mu_shift=[187])],
            columns(WHOLE, 'logit_mean', step=[(91, 110), (171, 190), (231, 250)]) +
            columns('.2f', 'loss', step=[(251, 300)]))}}


@functools.cache
def read(csv):
    """The rows of a csv file, with a label such as "z-loss" or "baseline, logits alone"."""
    runs, curves, *_ = csv_files.read(PUBLISHED / f'{re.sub("(curves|lrs)$", "results", csv)}.csv')
    if csv.endswith('lrs'):
        return lrs_rows(runs)[0].assign(seed=1).rename(columns={'variant': 'label'})
    rows = curves if csv.endswith('curves') else shift.shifted(runs) if runs.mu_shift.any() else runs
    return rows.assign(label=shift.labels(rows))


def cell(column, form, csv, file='', **where):
    """The mean over the seeds and, of several, [the lowest, the highest]; '' without runs, and never -0."""
    rows = read(str(Path(csv).with_name(file)) if file else csv)
    for name, value in where.items():
        rows = rows[rows[name].between(*value) if name == 'step' else rows[name] == value]
    values = rows.groupby('seed')[column].mean().dropna()
    words = format(values.mean(), form) if form == WHOLE else shift.over_seeds(values, form)
    return re.sub(r'-(?=0(\.0+)?(?![.\d]))', '', words) if len(values) else ''


def table(lines, columns):
    """The table in Markdown. UserError if a line of it has no runs."""
    cells = [['', *(words for words, *_ in columns)], ['---'] + ['---:'] * len(columns)]
    for words, rows in lines:
        cells.append([words, *(cell(name, form, **{**rows, **some}) for _, name, form, some in columns)])
        check(any(cells[-1][1:]), f'there is no run of "{words}"')
    return ''.join(f'| {" | ".join(line)} |\n' for line in cells)


def filled(readme):
    """The text of one of the two files with its tables made anew. UserError if they are not all there."""
    text, mine = (HERE / readme).read_text(encoding='utf-8'), TABLES[readme]
    block = r'<!-- table: (\w+) -->\n[^<]*<!-- end -->'
    check(sorted(re.findall(block, text)) == sorted(mine), f'{readme} should have each table of TABLES in '
          f'analysis/account.py once between <!-- table: NAME --> and <!-- end -->: {", ".join(mine)}')
    return re.sub(block, lambda name: f'<!-- table: {name[1]} -->\n{table(*mine[name[1]])}<!-- end -->', text)


def main(argv):
    for readme, text in [(readme, filled(readme)) for readme in TABLES]:
        write_atomic(HERE / readme, lambda file, text=text: file.write(text), mode='w')


if __name__ == '__main__':
    program(main)
