"""The tables of README.md, tools/adopt.md and results/, from the csv files: python -m results.tables"""
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd

from results.mean_logit.mean_logit import cost, read_runs, spacing
from tools.report import NAMES

HERE = Path(__file__).parent
ROOT = HERE.parent
TYINGS = {'untied': 0, 'tied': 1}
SIZES = ['16M', '29M', '57M', '109M', '221M']
PAPER = ['baseline', 'weight_decay', 'z_loss', 'soft_capping', 'mu_loss', 'mu_centering']


def read(name):
    return pd.read_csv(HERE / name)


# -------- what the tables of all pages share
def number(x, digits):
    """'-0.5', but never '-0'."""
    text = f'{x:.{digits}f}'
    return text.removeprefix('-') if float(text) == 0 else text


def from_to(values, digits):
    """'1.00 to 1.03': the lowest and the highest."""
    return f'{number(values.min(), digits)} to {number(values.max(), digits)}'


def with_range(values, digits, middle='mean'):
    """'2.10 [2.05, 2.20]' of several values, '2.10' of one."""
    text = number(values.agg(middle), digits)
    if len(values) > 1:
        text += f' [{number(values.min(), digits)}, {number(values.max(), digits)}]'
    return text


def by_seed(rows, columns):
    """Runs and {header: (column, digits)} -> a line for each arm, as '4.23, 4.68, 4.75' of its seeds."""
    lines = {}
    for arm, of_arm in rows.sort_values('seed', kind='stable').groupby('arm', sort=False):
        cells = []
        for column, digits in columns.values():
            texts = [number(x, digits) for x in of_arm[column].dropna()]
            cells.append(', '.join(texts))
        lines[arm] = cells
    return pd.DataFrame.from_dict(lines, 'index', columns=[*columns])


def table(header, lines):
    """Lines of texts as a DataFrame, whose first column is the index."""
    return pd.DataFrame(lines, columns=header).set_index(header[0])


def markdown(table):
    """A DataFrame of texts as a table in Markdown."""
    header = '|'.join([table.index.name or '|', *table.columns])  # '|' stands for an empty one
    rule = '---' + '|---:' * len(table.columns)
    return '\n'.join([header, rule, *('|'.join(line) for line in table.itertuples(name=None))])


def with_tables(page, tables):
    """The text of a page with what stands between <!-- NAME --> and <!-- end --> made anew."""
    def made_anew(match):
        return f'<!-- {match[1]} -->\n{markdown(tables[match[1]]())}\n<!-- end -->'
    text = (ROOT / page).read_text(encoding='utf-8')
    return re.sub(r'<!-- ([\w ]+) -->\n.*?<!-- end -->', made_anew, text, flags=re.S)


def write(pages, tables):
    for page in pages:
        (ROOT / page).write_text(with_tables(page, tables), encoding='utf-8')


# -------- README.md and tools/adopt.md
def losses_of_authors():
    """Their test losses with the default λ: a row for each tying, rate and size, a column a method."""
    runs = read('authors/results.csv')
    runs = runs[runs.lam.isna() | (runs.lam == 1e-4)]
    return runs.pivot(index=['weight_tying', 'lr', 'size'], columns='method', values='test_loss')


def lrs(tying):
    """Tables 2 and 5. Underlined: never over 1% above the best. Tied weight decay is the paper's."""
    rows = read('authors/lrs.csv')
    rows = rows[(rows.table == 'methods') & (rows.weight_tying == TYINGS[tying])]
    rows = rows.set_index(['method', 'size'])
    printed = pd.read_csv(ROOT / 'tools/paper_lrs.csv', index_col=['tying', 'variant', 'size'])
    lines = []
    for method in PAPER:
        name = NAMES.get(method, method)
        cells = []
        for size in SIZES:
            if (method, size) in rows.index:
                row = rows.loc[(method, size)]
                value = row.lrs_n1
                converged = row.diverged == 0
            else:
                row = printed.loc[(tying, name, size)]
                value = row.lrs
                converged = row.converged == 1
            cells.append(f'<ins>{value:.3f}</ins>' if converged else f'{value:.3f}')
        lines.append([name, *cells])
    return table([tying, *SIZES], lines)


def gains():
    """The test loss of the authors' baseline minus that of each cure, over the sizes."""
    lines = []
    for tying in TYINGS:
        losses = losses_of_authors().loc[TYINGS[tying]]
        for method in ('mu_loss', 'mu_centering'):
            gain = losses.baseline - losses[method]
            parts = [gain.loc[:0.01], gain.loc[0.03], gain.loc[0.1], gain.loc[0.3]]
            lines.append([f'{NAMES[method]}, {tying}', *(from_to(part, 3) for part in parts)])
    return table(['gain in nats at', 'up to 0.01', '0.03', '0.1', '0.3'], lines)


# -------- results/authors
def norms_with_decay():
    """‖μ‖ of untied runs with weight decay over the baseline's, and what AdamW's decay would leave."""
    runs = read('authors/results.csv')
    runs = runs[runs.weight_tying == 0]
    norms = runs[runs.method.isin(['baseline', 'weight_decay'])].pivot(
        index=['lr', 'size'], columns='method', values='mu_norm')
    ratios = (norms.weight_decay / norms.baseline).groupby('lr')
    theirs = [from_to(part, 2) for _, part in ratios]
    rates = np.array([*ratios.groups])
    decay = 1e-4 * 50_000 * rates  # λ times the sum of η over 100,000 steps, half of them at the peak
    left = (1 - np.exp(-decay)) / decay
    return table(['η', *(f'{rate:g}' for rate in rates)],
                 [['theirs', *theirs], ["AdamW's would leave", *(f'{x:.2f}' for x in left)]])


def decays():
    """This project's runs with Eq. 2 and with AdamW's decay: means over three seeds."""
    lines = []
    for (lr, method), rows in read('authors/decays.csv').groupby(['lr', 'method']):
        cells = [with_range(rows[name], 2) for name in ('mu_norm', 'test_loss')]
        lines.append([f'{lr:g}', f'`{method}`', *cells])
    return table(['η', 'method', '‖μ‖', 'test loss'], lines)


def parity():
    """The largest differences between the authors' code and this one, over the methods and tyings."""
    rows = read('authors/parity.csv')
    columns = ['first weights', 'loss', 'objective', 'gradients', 'after 5 steps']
    largest = rows.groupby('rope')[columns].max()
    lines = [[rope, *(f'{x:.1g}' for x in row)] for rope, *row in largest.itertuples()]
    return table(["RoPE's angles", 'first weights', 'loss', 'with regulariser', 'gradients',
                  'after 5 steps'], lines)


# -------- results/mean_logit and results/speed
def mean_logit():
    """What the authors' runs lose, by the size of their mean logit, and c in that range."""
    runs = read_runs()
    runs = runs[runs.kind.notna()]
    size = runs.logit_mean.abs()
    lines = []
    for low, high in ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)):
        lost = runs.excess[(size >= low) & (size < high)]
        label = str(low) if low else 'below 64'
        step = f'{spacing(low or 63):g}' + ('' if low else ' or less')
        c = cost(low or 63)
        lines.append([label, step, f'{c:.2g}', with_range(lost, 3, 'median'), str(len(lost))])
    return table(['mean logit from', 'logits are multiples of', 'c, nats',
                  "the authors' runs lose: median [lowest, highest]", 'runs'], lines)


def or_empty(value, text):
    """A number as text has it, '' if it is not known."""
    return '' if pd.isna(value) else text.format(value)


def speed():
    """Time and memory of a step on a card: beside the published code, and each method."""
    lines = []
    for row in read('speed/published.csv').itertuples():
        what, commit, ratio = 'baseline', row.code, ''
        if row.code == 'published':
            what, commit = 'the published code', ''
            ratio = f'{row.ratio:.3f} [{row.ratio_from:.3f}, {row.ratio_to:.3f}]'
        lines.append([f'{row.size}, {what}', row.card, commit, f'{row.ms:g}', ratio, '',
                      or_empty(row.tflops, '{:.0f}'), or_empty(row.mib, '{:,.0f}')])

    printed = pd.read_csv(ROOT / 'tools/paper_overhead.csv', index_col=['tying', 'size', 'variant'])
    percent = printed.percent['untied']
    rows = read('speed/methods.csv')
    for row in rows[rows.machine == 'one H200'].itertuples():
        name = NAMES.get(row.method, row.method)
        theirs = or_empty(1 + percent.get((row.size, name), math.nan) / 100, '{:.3f}')
        lines.append([f'{row.size}, {name}', 'H200', row.commit, f'{row.ms:g}',
                      f'{row.time_over_baseline:.3f}', theirs, f'{row.tflops:.0f}', f'{row.mib:,.0f}'])
    header = ['size, code', 'card', 'commit', 'ms', '/ baseline', "the authors'", 'TFLOP/s', 'MiB']
    return table(header, lines)


PAGES = ['README.md', 'tools/adopt.md', 'results/authors/README.md', 'results/mean_logit/README.md',
         'results/speed/README.md']
TABLES = {
    'lrs untied': lambda: lrs('untied'),
    'lrs tied': lambda: lrs('tied'),
    'gains': gains,
    'norms': norms_with_decay,
    'decays': decays,
    'parity': parity,
    'mean_logit': mean_logit,
    'speed': speed,
}


if __name__ == '__main__':
    write(PAGES, TABLES)
