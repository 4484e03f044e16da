"""
Run folders and csv files. All tables and figures are made from three csv files, which `collect` writes and
`read` reads; a results.csv made elsewhere will do as well:

    results.csv        a row for each run: its settings, its test loss and the statistics of its model
    curves.csv         a row for each of at most 1,000 lines of a run's log: run, step, loss, ...
    distributions.csv  a row for each run and quantity: mean, quartiles, extrema and shares
"""
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measure
from model import METHODS, SIZES
from oec.common import UserError, check, read_json, write_atomic

PLAIN = r'(?!_)[^<>|$"`*\\\x00-\x1f]+'  # words that mean nothing special in HTML, Markdown or a formula
# What a cell should be, and a function that says which cells of a column are.
WORDS = 'plain words', lambda words: words.map(lambda word: bool(re.fullmatch(PLAIN, word))).astype(bool)
NUMBER = 'a number', lambda x: x.notna()
ABOVE_0 = 'a number above 0', lambda x: x > 0
FROM_0 = 'a number from 0', lambda x: x >= 0
FLAG = '0 or 1', lambda x: x.isin([0, 1])
RESULTS = {  # column -> what its cells should be, unless they are empty, which means unknown
    'run': WORDS, 'method': WORDS, 'size': WORDS, 'n_params': ABOVE_0, 'weight_tying': FLAG, 'lam': FROM_0,
    'cap': ABOVE_0, 'lr': ABOVE_0, 'seed': FROM_0, 'steps': ABOVE_0, 'dtype': WORDS, 'logits_dtype': WORDS,
    'mu_shift': FROM_0, 'init_from': WORDS,
    'init_loss': ABOVE_0, 'test_loss': NUMBER, 'diverged': FLAG, 'diverged_step': FROM_0,
    'mu_norm': FROM_0, 'mean_share': FROM_0, 'logit_mean': NUMBER, 'logit_mean_spread': FROM_0,
    'logit_std': FROM_0, 'logit_absmax': FROM_0, 'logit_max': FROM_0,
    'cos_mu_h': NUMBER, 'r_emb': FROM_0, 'r_cos': FROM_0, 'r_log': FROM_0,
    'r_emb_below_1': FROM_0, 'r_cos_below_1': FROM_0, 'r_log_below_1_too': FROM_0,
    'train_seconds': FROM_0, 'tokens_per_second': FROM_0, 'device': WORDS}
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
CURVES = {'run': WORDS, 'step': NUMBER, 'loss': NUMBER, 'lr_step': NUMBER, 'mu_norm': NUMBER,
          'logit_mean': NUMBER, 'logit_absmax': NUMBER}
DISTRIBUTIONS = {'run': WORDS, 'quantity': WORDS, **dict.fromkeys(measure.SUMMARY, NUMBER)}
# What the rows of curves.csv and distributions.csv get from results.csv when they are read.
OF_A_RUN = ['run', 'variant', 'usual', 'size', 'weight_tying', 'method', 'lam', 'lr', 'seed', 'diverged']


def parse(cells, columns, required):
    """
    A DataFrame of strings, whose index says where each row is from -> the same with these columns alone, as
    words and numbers, NaN for what is unknown or not finite. UserError names the first wrong cell.
    """
    cells = cells.reindex(columns=list(columns), fill_value='').apply(lambda column: column.str.strip())
    for column, (kind, test) in columns.items():
        words = cells[column].str.lower().replace({'true': '1', 'false': '0'})
        values = words
        if test != WORDS[1]:
            values = pd.to_numeric(words, errors='coerce').replace([math.inf, -math.inf], math.nan)
            cells[column] = values
        right = test(values)
        if column == 'test_loss':  # that of a run that diverged need not be finite
            right |= words.isin(['nan', 'inf', '-inf'])
        elif column not in required:
            right |= words.isin(['', 'nan', 'inf', '-inf'])
        if not right.all():
            where = right.idxmin()
            raise UserError(f'{where}: {column} should be {kind}, is {words[where]!r}')
    return cells


def read_csv(path, columns, required):
    """These columns of a csv file, as `parse` returns them. UserError if it is not such a file."""
    try:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False, encoding='utf-8-sig').fillna('')
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise UserError(f'{path}: not readable as csv ({error})') from error
    missing = [column for column in required if column not in cells]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(required)}')
    check(isinstance(cells.index, pd.RangeIndex), f'{path}: a row has more cells than the first row')
    cells.index = [f'{path} line {i}' for i in range(2, len(cells) + 2)]
    return parse(cells, columns, required)


def write_csv(path, rows, float_format=None):
    rows = rows.convert_dtypes()  # whole numbers without a point
    write_atomic(path, lambda file: rows.to_csv(file, index=False, float_format=float_format))


LEARNED = 0.1  # nats
RISEN = 0.5    # nats


def diverged(test_loss, init_loss, curve=None, lines=20, windows=20):
    """
    Whether a run diverged -> (1, 0, or NaN for unknown; the step where it shows, or NaN). The rule is ours,
    the paper gives none. `curve` is the training log, if there is one, with step, loss and lr_step.

    A run diverged if a loss or weight was not finite, so that it has no test loss; if it ends less than
    LEARNED below its loss at initialisation; or if the median training loss of a window after warm-up is more
    than RISEN above that of an earlier window or above the loss at initialisation. A window is 1 / `windows`
    of the log but at least `lines` lines, so that noise does not move its median by that much. A log of less
    than three windows cannot show that a run did not diverge.
    """
    has_log = curve is not None and len(curve) > 0
    if not math.isfinite(test_loss):
        return 1, curve.step.iloc[-1] if has_log else math.nan

    n = 0  # the number of windows
    if has_log:
        warmed_up = curve[curve.step > curve.step[curve.lr_step.idxmax()]]
        n = min(windows, len(warmed_up) // lines)
    if n > 0:
        window = np.arange(len(warmed_up)) * n // len(warmed_up)
        medians = warmed_up.groupby(window).agg(step=('step', 'first'), loss=('loss', 'median'))
        risen = medians.loss - medians.loss.cummin().clip(upper=init_loss) > RISEN
        if risen.any():
            return 1, medians.step[risen.idxmax()]

    if test_loss >= init_loss - LEARNED:
        return 1, math.nan
    return (0 if n >= 3 else math.nan), math.nan


NAMES = {  # a method that is not here is called what METHODS calls it
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'max_z_loss': 'max-z loss', 'norm_softmax': 'NormSoftmax',
    'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.', 'muon_head': 'Muon on the head'}


def variant(run):
    """What tables and figures call the method of a run: its name, and what is not usual about it."""
    words = NAMES.get(run.method, run.method)
    if run.lam >= 0 and run.lam != METHODS.get(run.method):
        words += f' λ={run.lam:g}'
    if run.mu_shift > 0:
        words += f', shift {run.mu_shift:g}'
    if run.fp32_head:
        words += ', fp32 head'
    if run.init_from:
        words += f', from {run.init_from}'
    return words


def complete(runs, path):
    """
    Fills in what an empty cell means; adds the columns variant, usual (from scratch, without a shift, as the
    paper's tables have it) and capped_loss (as LRS counts it); sorts as the paper does.
    """
    default_lam = runs.method.map(METHODS).astype(float)
    has_no_lam = runs.method.isin(METHODS) & default_lam.isna()  # whatever the csv says
    runs['lam'] = runs.lam.fillna(default_lam).mask(has_no_lam)
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})

    in_fp32 = runs.logits_dtype == 'float32'
    runs['fp32_head'] = in_fp32 & (runs.logits_dtype == 'bfloat16').any()  # unusual only beside BF16
    runs['variant'] = [variant(run) for run in runs.itertuples()]
    runs['usual'] = (runs.mu_shift == 0) & (runs.init_from == '') & ~runs.fp32_head

    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)
    lost = runs.capped_loss.isna() & (runs.init_from == '')
    check(not lost.any(), f'{lost.idxmax()}: a test_loss of nan needs an init_loss, which LRS counts for it')
    by_rule = [diverged(run.test_loss, run.init_loss)[0] for run in runs.itertuples()]
    runs['diverged'] = runs.diverged.fillna(pd.Series(by_rule, runs.index))

    twice = runs[runs.duplicated(['variant', 'size', 'weight_tying', 'lr', 'seed'])]
    if len(twice):
        run = twice.iloc[0]
        raise UserError(f'{path}: {run.variant} {run["size"]} with lr={run.lr:g} and seed={run.seed:g} is '
                        'there twice; runs that differ in anything else should be analysed apart')
    order = {name: i for i, name in enumerate([*SIZES, *METHODS])}
    by = ['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']
    return runs.sort_values(by, ignore_index=True,
                            key=lambda x: x.map(order).fillna(99) if x.name in ('size', 'method') else x)


def read(path):
    """A csv of runs -> (runs, curves, distributions); the latter are empty if not beside a results.csv."""
    path = Path(path)
    runs = read_csv(path, RESULTS, REQUIRED)
    check(len(runs), f'{path}: it has no runs, only a first line')
    runs = complete(runs, path)

    def beside(name, columns):
        file = path.with_name(name)
        there = path.name == 'results.csv' and file.exists()
        rows = read_csv(file, columns, ['run']) if there else pd.DataFrame(columns=list(columns))
        return runs[OF_A_RUN].merge(rows, on='run')
    return runs, beside('curves.csv', CURVES), beside('distributions.csv', DISTRIBUTIONS)


def find(folders):
    """
    The finished runs in or right below `folders` -> (their settings and results as `parse` returns them, with
    the folders as index; lines that name those not finished). UserError if none is finished.
    """
    files = []
    for folder in map(Path, folders):
        check(folder.is_dir(), f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        files += [*folder.glob('config.json'), *folder.glob('*/config.json')]

    runs, left_out = {}, []
    for folder in sorted(file.parent for file in files):
        if not (folder / 'result.json').exists():
            left_out.append(f'not finished: {folder}')
            continue
        run = {**read_json(folder / 'config.json'), **read_json(folder / 'result.json')}
        run['device'] = run.get('device_name')  # the name of the GPU, not the flag
        runs[folder] = {name: '' if value is None else str(value) for name, value in run.items()}
    check(runs, '; '.join(left_out) or f'{" ".join(folders)}: no run in there')

    rows = parse(pd.DataFrame.from_dict(runs, 'index').fillna(''), RESULTS, REQUIRED)
    rows['run'] = [folder.name for folder in rows.index]
    twice = rows.run[rows.run.duplicated()]
    check(twice.empty, f'there are two runs of the name {", ".join(twice)}')
    return rows, left_out


def training_curve(folder, most=1000):
    """The training lines of a run's log, at most so many of them, the last for sure: columns CURVES."""
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    log = pd.DataFrame([line for line in log if 'lr' in line])
    every = max(1, math.ceil(len(log) / most))
    log = log.iloc[(len(log) - 1) % every::every]
    return log.rename(columns={'lr': 'lr_step'}).assign(run=folder.name).reindex(columns=list(CURVES))


def collect(runs, out):
    """Measures the models of the runs that `find` found and writes the csv files."""
    rows, curves, distributions = [], [], []
    for i, (folder, row) in enumerate(runs.iterrows(), 1):
        print(f'{i} of {len(runs)}: {folder}', flush=True)
        curve = training_curve(folder)
        found = measure.of_run(folder)
        row['diverged'], row['diverged_step'] = diverged(row.test_loss, row.init_loss, curve)
        rows.append({**row, **found['numbers']})
        curves.append(curve)
        for quantity, numbers in found['distributions'].items():
            distributions.append({'run': folder.name, 'quantity': quantity, **numbers})
    rows = pd.DataFrame(rows).reindex(columns=list(RESULTS))
    rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')  # an empty cell would be an error
    write_csv(Path(out, 'results.csv'), rows)
    write_csv(Path(out, 'curves.csv'), pd.concat(curves), '%.7g')  # enough for a plot
    write_csv(Path(out, 'distributions.csv'), pd.DataFrame(distributions))
