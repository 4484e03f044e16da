"""
Run folders and csv files. All tables and figures are made from three tidy files, which `collect` writes and
`read` reads; a results.csv made elsewhere will do as well:

    results.csv        a line a run: its settings, its test loss and the statistics of its model
    curves.csv         a line a log entry: run, step, loss, ...
    distributions.csv  a line a run and quantity: its mean, quartiles, extrema and shares
"""
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measure, paper
from model import METHODS, SIZES
from oec.common import UserError, check, read_json, write_atomic

# -------- the columns, and how a csv file is read


WORDS, NUMBER, ABOVE_0 = 'plain words', 'a number', 'a number above 0'
FROM_0, FLAG = 'a number from 0', '0 or 1'
TESTS = {NUMBER: lambda x: x.notna(), ABOVE_0: lambda x: x > 0, FROM_0: lambda x: x >= 0,
         FLAG: lambda x: x.isin([0, 1])}
PLAIN = r'(?!_)[^<>|$"`*\\\x00-\x1f]+'  # a name that means nothing in HTML, in Markdown or in a formula

RESULTS = {  # column -> what a cell should be, if it is not empty
    'run': WORDS, 'method': WORDS, 'size': WORDS, 'n_params': ABOVE_0, 'weight_tying': FLAG, 'lam': FROM_0,
    'cap': ABOVE_0, 'lr': ABOVE_0, 'seed': FROM_0, 'steps': ABOVE_0, 'dtype': WORDS, 'logits_dtype': WORDS,
    'mu_shift': FROM_0, 'init_from': WORDS, 'init_loss': ABOVE_0, 'test_loss': NUMBER, 'diverged': FLAG,
    'diverged_step': FROM_0, 'mu_norm': FROM_0,
    'logit_mean': NUMBER, 'logit_mean_spread': FROM_0, 'logit_std': FROM_0, 'logit_absmax': FROM_0,
    'logit_max': FROM_0, 'cos_mu_h': NUMBER, 'r_emb': FROM_0, 'r_cos': FROM_0, 'r_log': FROM_0,
    'fact_3_premise': FROM_0, 'fact_3_holds': FROM_0,
    'lr_sum': FROM_0, 'train_seconds': FROM_0, 'tokens_per_second': FROM_0, 'device': WORDS}
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
LEARNED = 0.1  # nats: a run that ends less than that below its loss at initialisation has diverged
RISEN = 0.5    # nats: so has a run whose training loss rises by more than that
OF_A_RUN = 'run variant size weight_tying method lam lr seed mu_shift init_from diverged'.split()
CURVES = {'run': WORDS, **dict.fromkeys('step loss lr_step mu_norm logit_mean logit_absmax'.split(), NUMBER)}
DISTRIBUTIONS = {'run': WORDS, 'quantity': WORDS, **dict.fromkeys(measure.SUMMARY, NUMBER)}


def parse(cells, columns, required):
    """
    A DataFrame of words, whose index says where each line is from -> these columns as words and numbers, NaN
    for what is unknown or not finite. UserError names the first wrong cell.
    """
    cells = cells.reindex(columns=list(columns), fill_value='').apply(lambda column: column.str.strip())
    for column, kind in columns.items():
        words = cells[column].str.lower().replace({'true': '1', 'false': '0'})
        if kind == WORDS:
            right = words.map(lambda word: re.fullmatch(PLAIN, word) is not None).astype(bool)
        else:
            cells[column] = pd.to_numeric(words, errors='coerce').replace([math.inf, -math.inf], math.nan)
            right = TESTS[kind](cells[column])
        unknown = words.isin(['', 'nan', 'inf', '-inf'])
        if column in required:
            unknown &= (column == 'test_loss') & (words != '')  # that of a run that diverged is not a number
        wrong = ~(right | unknown)
        if wrong.any():
            raise UserError(f'{wrong.idxmax()}: {column} should be {kind}, is {words[wrong.idxmax()]!r}')
    return cells


def read_csv(path, columns, required):
    """These columns of a csv file, as `parse` returns them. UserError if it is not such a file."""
    try:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False, encoding='utf-8-sig').fillna('')
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise UserError(f'{path}: not readable as csv ({error})') from error
    missing = [column for column in required if column not in cells]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(required)}')
    check(isinstance(cells.index, pd.RangeIndex), f'{path}: a line has more cells than the first line')
    cells.index = [f'{path} line {i}' for i in range(2, len(cells) + 2)]
    return parse(cells, columns, required)


def write_csv(path, rows, float_format=None):
    rows = rows.convert_dtypes()  # whole numbers without a point
    write_atomic(path, lambda file: rows.to_csv(file, index=False, float_format=float_format), mode='w')


# -------- what follows from a row


def variant(run):
    """What tables and figures call the method of a run: its name, and what is not usual about it."""
    words = paper.NAMES.get(run.method, run.method)
    if run.lam >= 0 and run.lam != METHODS.get(run.method):
        words += f' λ={run.lam:g}'
    if run.mu_shift > 0:
        words += f', shift {run.mu_shift:g}'
    if run.mu_shift > 0 and run.logits_dtype == 'float32':
        words += ' in fp32'
    if run.init_from:
        words += f', from {run.init_from}'
    return words


def complete(runs, path):
    """Fills in what an empty cell means, adds `variant` and `capped_loss`, and sorts as the paper does."""
    default = runs.method.map(METHODS).astype(float)
    has_no_lam = runs.method.isin(METHODS) & default.isna()  # whatever the csv says
    runs['lam'] = runs.lam.fillna(default).mask(has_no_lam)
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})
    runs['variant'] = [variant(run) for run in runs.itertuples()]
    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)  # as LRS counts it
    lost = runs.capped_loss.isna() & (runs.init_from == '')
    check(not lost.any(), f'{lost.idxmax()}: a test_loss of nan needs an init_loss, which LRS counts for it')
    no_better = runs.test_loss.isna() | (runs.test_loss >= runs.init_loss - LEARNED)  # needs no log
    runs['diverged'] = runs.diverged.mask(runs.diverged.isna() & no_better, 1)

    key = ['variant', 'size', 'weight_tying', 'lr', 'seed']
    for run in runs[runs.duplicated(key)].itertuples():
        raise UserError(f'{path}: {run.variant} {run.size} with lr={run.lr:g} and seed={run.seed:g} is there '
                        'twice; runs that differ in anything else should be analysed apart')
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

    def others(name, columns):
        file = path.with_name(name)
        if path.name != 'results.csv' or not file.exists():
            return pd.DataFrame(columns=[*columns, *OF_A_RUN[1:]])
        return runs[OF_A_RUN].merge(read_csv(file, columns, ['run']))
    return runs, others('curves.csv', CURVES), others('distributions.csv', DISTRIBUTIONS)


# -------- run folders


def find(folders):
    """The runs in or right below `folders` -> (paths of those that are finished, of those that are not)."""
    found = []
    for folder in map(Path, folders):
        check(folder.is_dir(), f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        files = (file for pattern in ('*.json', '*/*.json') for file in folder.glob(pattern))
        found += sorted({file.parent for file in files if file.name in ('config.json', 'result.json')})
    done = [path for path in found if (path / 'result.json').exists()]
    return done, [path for path in found if path not in done]


def training_curve(folder, most=1000):
    """The training lines of a run's log, at most so many of them, the last for sure: columns CURVES."""
    try:
        log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
        log = pd.DataFrame([line for line in log if 'lr' in line]).rename(columns={'lr': 'lr_step'})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f'{folder / "log.jsonl"}: not readable ({error})') from error
    every = math.ceil(len(log) / most) or 1
    return log[::-1][::every][::-1].assign(run=folder.name).reindex(columns=list(CURVES))


def diverged(curve, test_loss, init_loss, lines=20, windows=20):
    """
    Whether a run diverged -> (1, 0, or NaN for unknown; since which step, or NaN). It did if a loss is not
    finite, if it ends less than LEARNED below its loss at initialisation, or if the median training loss of a
    window after warm-up is more than RISEN above that of an earlier one or above the loss at initialisation.
    A window is 1 / `windows` of the log, but at least so many `lines`, so that noise moves no median by that
    much; it takes three windows to say no.
    """
    if not math.isfinite(test_loss):
        return 1, math.nan
    after = curve[curve.step > curve.step[curve.lr_step.idxmax()]] if len(curve) else curve
    n = min(windows, len(after) // lines)
    if n:
        window = np.arange(len(after)) * n // len(after)
        medians = after.groupby(window).agg(step=('step', 'first'), loss=('loss', 'median'))
        risen = medians.loss - medians.loss.cummin().clip(upper=init_loss) > RISEN
        if risen.any():
            return 1, medians.step[risen.idxmax()]
    if test_loss >= init_loss - LEARNED:
        return 1, math.nan
    if n < 3:
        return math.nan, math.nan  # too short a log to say no
    return 0, math.nan


def results(folders, notes):
    """The settings and the result of each folder, as `parse` returns them; `notes` gets what is damaged."""
    found = {}
    for folder in folders:
        try:
            run = {**read_json(folder / 'config.json'), **read_json(folder / 'result.json')}
            run['device'] = run.get('device_name')  # the GPU, and not the flag
            found[folder] = {name: '' if value is None else str(value) for name, value in run.items()}
        except UserError as error:
            notes.append(f'left out: {error}')
    check(found, '; '.join(notes))
    rows = parse(pd.DataFrame.from_dict(found, 'index').fillna(''), RESULTS, REQUIRED)
    rows['run'] = [folder.name for folder in rows.index]
    twice = rows.run[rows.run.duplicated()]
    check(twice.empty, f'there are two runs of the name {", ".join(twice)}')
    return rows


def collect(folders, out):
    """Measures the models of finished runs, writes the csv files into `out` -> what is left out, as lines."""
    notes = []
    rows, curves, spread = [], [], []
    for folder, row in results(folders, notes).iterrows():  # all of them are checked before one is measured
        print(f'{len(rows) + 1} of {len(folders)}: {folder}', flush=True)
        try:
            curve, found = training_curve(folder), measure.of_run(folder)
        except UserError as error:
            notes.append(f'left out: {error}')
            continue
        for name, value in found.items():
            row[name] = value['mean'] if isinstance(value, dict) else value
            if isinstance(value, dict):
                spread.append({'run': folder.name, 'quantity': name, **value})
        if math.isnan(row.diverged):
            row['diverged'], row['diverged_step'] = diverged(curve, row.test_loss, row.init_loss)
        rows.append(row)
        curves.append(curve)
    check(rows, '; '.join(notes))
    rows = pd.DataFrame(rows).reindex(columns=list(RESULTS))
    rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')  # an empty cell would be an error
    write_csv(Path(out, 'results.csv'), rows)
    write_csv(Path(out, 'curves.csv'), pd.concat(curves), '%.7g')  # enough for a plot
    write_csv(Path(out, 'distributions.csv'), pd.DataFrame(spread))
    return notes
