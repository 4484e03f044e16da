"""
Run folders, their logs, and the csv files that every table and figure is made from: results.csv has one line
per run, curves.csv the logs, distributions.csv the summaries of what has a distribution.
"""
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measure, paper
from model import ALL, METHODS, SIZES, SUBSETS
from oec.common import UserError, check, read_json, write_atomic, write_json

MARGIN = 0.5         # nats that the loss of a diverged run has risen by
LINES = 20           # log lines in a window, so that noise moves their median by less than that
WINDOWS = 20         # a run is cut into so many windows, or into fewer if its lines are few
CURVE_POINTS = 1000  # log lines of a run that curves.csv keeps

COLUMNS = ('method size n_params weight_tying lam cap lr seed steps dtype logits_dtype mu_shift rounded '
           'center_every init_from init_loss test_loss train_loss diverged diverged_step mu_norm logit_mean '
           'logit_mean_spread logit_std logit_absmax logit_max cos_mu_h r_emb r_cos r_log rounding_loss '
           'gradient_sum lr_sum train_seconds tokens_per_second device').split()
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
TEXT = {'method', 'size', 'dtype', 'logits_dtype', 'rounded', 'init_from', 'device', 'quantity'}
SETTINGS = ['method', 'size', 'weight_tying', 'lam', 'lr', 'seed', 'mu_shift', 'rounded', 'center_every',
            'init_from']
KEY = ['variant', 'size', 'weight_tying', 'lr', 'seed', 'mu_shift', 'rounded', 'init_from']  # of one run
DEFAULTS = {'mu_shift': 0.0, 'seed': 0.0, 'rounded': ALL}  # what an empty cell means
CURVE = 'step loss lr_step mu_norm logit_mean logit_mean_spread logit_absmax gradient_sum'.split()
SPREAD = ['quantity', *measure.SUMMARY]
PUBLISHED = {'16M': (10.83, 15572480), '29M': (10.83, 28638560), '57M': (10.83, 57338400),
             '109M': (10.83, 108404800), '221M': (10.85, 220810720)}  # loss at initialisation, parameters
SHOULD = {  # what else would be wrong science, or end in a traceback
    'a number above 0': (['lr', 'init_loss', 'n_params', 'steps'], lambda x: x > 1e-30),
    'a number from 0': (['lam', 'mu_shift', 'center_every'], lambda x: x >= 0),
    'a whole number': (['seed', 'step', 'center_every'], lambda x: x % 1 == 0),
    '0 or 1': (['weight_tying', 'diverged'], lambda x: x.isin([0, 1])),
    'one of ' + '; '.join(SUBSETS): (['rounded'], lambda x: x.isin(['', *SUBSETS])),
    'printable words': (['method', 'size', 'init_from', 'device'],
                        lambda x: x.map(str.isprintable).astype(bool))}


# -------- run folders


def run_states(folders):
    """The runs in or right below `folders`, and those a sweep has planned there: a dict path -> state."""
    states = {}
    for folder in map(Path, folders):
        check(folder.is_dir(), f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        plan = folder / 'logs' / 'plan'
        paths = [folder / name for name in plan.read_text().split()] if plan.exists() else []
        for name in ('config.json', 'result.json'):
            paths += sorted(file.parent for file in (*folder.glob(name), *folder.glob(f'*/{name}')))
        states |= {path: run_state(path) for path in paths}
    return states


def run_state(path):
    """'done', 'failed' (its sweep says so) or 'unfinished'."""
    if (path / 'result.json').exists():
        return 'done'
    return 'failed' if (path.parent / 'logs' / f'{path.name}.failed').exists() else 'unfinished'


def print_states(states):
    """How many runs are in which state, and which ones have failed."""
    found = list(states.values())
    counts = [f'{found.count(state)} {state}' for state in ('done', 'failed', 'unfinished')]
    print(f'{len(states)} runs: {", ".join(counts)}', flush=True)
    for path in (path for path, state in states.items() if state == 'failed'):
        print(f'  failed: {path}, see {path.parent / "logs" / path.name}.log')


def read_log(path):
    """The whole lines of a run's log as dicts; a damaged one is left out, and named."""
    log, entries = path / 'log.jsonl', []
    whole = log.read_text(errors='replace').rpartition('\n')[0] if log.exists() else ''
    for i, line in enumerate(whole.splitlines(), 1):
        try:
            entry = json.loads(line)
            entry['step'] + entry.get('loss', 0) + entry.get('lr', 0)  # these three have to be numbers
            entries.append(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            print(f'{log} line {i} is damaged, and left out', flush=True)
    return entries


def training_curve(path):
    """The training lines of a run's log, at most CURVE_POINTS: columns CURVE; lr_step is their rate."""
    log = pd.DataFrame([entry for entry in read_log(path) if 'lr' in entry]).rename(columns={'lr': 'lr_step'})
    every = max(1, math.ceil(len(log) / CURVE_POINTS))
    return log.reindex(columns=CURVE)[::-1][::every][::-1]  # the last line is always there


def diverged(curve, test_loss, init_loss):
    """
    Whether a run diverged, from its log (columns step, loss, lr_step) -> (1, 0, or NaN for unknown; since
    which step, or NaN). It did if a loss is not finite, if it ends no better than it began, or if the median
    training loss of a window after warm-up is more than MARGIN above that of an earlier one or the loss at
    initialisation. A window is 1 / WINDOWS of the log, but at least LINES lines; it takes three to say no.
    """
    if not math.isfinite(test_loss):
        return 1, math.nan
    after = curve[curve.step > curve.step[curve.lr_step.fillna(0).idxmax()]] if len(curve) else curve
    n = min(WINDOWS, len(after) // LINES)
    if n:
        window = np.arange(len(after)) * n // len(after)
        medians = after.groupby(window).agg({'step': 'first', 'loss': 'median'})
        risen = medians.loss - medians.loss.cummin().clip(upper=init_loss) > MARGIN
        if risen.any():
            return 1, medians.step[risen.idxmax()]
    return 1 if test_loss >= init_loss else 0 if n >= 3 else math.nan, math.nan


# -------- csv files


def results(folders):
    """
    Finished runs -> (a row each of what result.json says, indexed by its path; a line on each that is left
    out, since a file is damaged or gone). UserError if none is left, a cell is wrong or a run is there twice.
    """
    rows, bad = {}, []
    for folder in folders:
        try:
            read_json(folder / 'config.json')
            found = read_json(folder / 'result.json')
            check(measure.kept(folder) or (folder / 'model.pt').exists(), f'{folder}: has no model.pt')
            rows[folder / 'result.json'] = ['' if found.get(c) is None else str(found[c]) for c in COLUMNS]
        except UserError as error:
            bad.append(f'left out: {error}')
            print(bad[-1], flush=True)
    check(rows, '; '.join(bad))
    rows = identify(parse(pd.DataFrame(rows.values(), list(rows), COLUMNS, dtype=str), REQUIRED))
    check_once(rows, 'these folders')
    return rows, bad


def check_once(rows, where):
    """Raises UserError if two of the runs are the same."""
    for _, run in rows[rows.duplicated(KEY)].iterrows():
        raise UserError(f'{where}: the same run is there twice: ' + ', '.join(f'{k}={run[k]}' for k in KEY) +
                        '; runs that differ in anything else should be analysed apart')


def write_csv(path, rows, float_format=None):
    """Whole numbers without a point, unknown ones empty; but a test loss that is not finite is nan."""
    rows = rows.convert_dtypes()
    if 'test_loss' in rows:
        rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')
    write_atomic(path, lambda file: rows.to_csv(file, index=False, float_format=float_format), mode='w')


def read_csv(path, required, columns):
    """These columns of a csv, as `parse` returns them. UserError if it is not such a csv."""
    try:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False).fillna('')
    except Exception as error:  # of any kind, since the file may hold anything
        raise UserError(f'{path}: not readable as csv ({error})') from error
    missing = ', '.join(column for column in required if column not in cells)
    check(not missing, f'{path}: no column {missing}; the first line should name the columns')
    check(isinstance(cells.index, pd.RangeIndex),  # of a cell too many pandas makes an index
          f'{path}: a line has more cells than the first line, which should name the columns')
    twice = ', '.join(column for column in columns if f'{column}.1' in cells)  # pandas' name for the second
    check(not twice, f'{path}: column {twice} is there twice')
    cells.index = [f'{path} line {i}' for i, _ in enumerate(cells.index, 2)]
    return parse(cells.reindex(columns=columns, fill_value=''), required)


def parse(cells, required):
    """
    A DataFrame of words, whose index says where they are from -> words in the columns of TEXT, numbers in the
    others, NaN for an empty cell and what is not finite or beyond 1e30. UserError for the first wrong cell.
    """
    def refuse(column, right, should):
        if not right.all():
            raise UserError(f'{right.idxmin()}: {column} should {should}')
    cells = cells.apply(lambda column: column.str.strip())
    unknown = cells.isin(['', 'nan'])
    for column in cells:
        words = cells[column]
        refuse(column, (words != '') | (column not in required), 'not be empty')
        if column not in TEXT:
            words = words.str.lower().replace({'': 'nan', 'true': '1', 'false': '0'})
            refuse(column, pd.to_numeric(words, errors='coerce').notna() | (words == 'nan'), 'be a number')
            numbers = words.map(float).astype(float)  # with all bits, unlike to_numeric
            cells[column] = numbers.where(numbers.abs() < 1e30)
    for should, (names, is_right) in SHOULD.items():
        for column in cells.columns.intersection(names):
            optional = unknown[column] & (column not in required)
            refuse(column, is_right(cells[column]) | optional, f'be {should}')
    return cells


def variant(method, lam=math.nan, center_every=math.nan):
    """What tables and figures call a method with these settings, of which the usual need no mention."""
    words = paper.NAMES.get(method, method)
    if not math.isnan(center_every):
        words += '' if method == 'mu_centering' else ' + centering'
        words += '' if center_every == 1 else f' every {center_every:g}'
    return words + ('' if math.isnan(lam) or lam == (METHODS.get(method) or 1e-4) else f' λ={lam:g}')


def identify(rows):
    """Fills in what an empty cell of SETTINGS means, adds the column variant, and sorts as the paper does."""
    rows = rows.replace({'rounded': {'': ALL}}).fillna(DEFAULTS)
    default = rows.method.map(METHODS).astype(float)
    no_lam = default.isna() & rows.method.isin(METHODS)  # whatever the csv says
    rows['lam'] = rows.lam.fillna(default).mask(no_lam)
    rows['center_every'] = rows.center_every.mask(rows.center_every == (rows.method == 'mu_centering'))
    words = [variant(*row) for row in zip(rows.method, rows.lam, rows.center_every, strict=True)]
    rows['variant'] = pd.Series(words, rows.index, dtype=str)
    rank = {known: f'{i:02}' for i, known in enumerate((*SIZES, *METHODS))}
    order = rows.assign(**{name: rows[name].map(lambda word: rank.get(word, '99') + word)
                           for name in ('size', 'method')})
    by = ['weight_tying', 'size', 'method', 'lam', 'center_every', 'lr', 'mu_shift', 'rounded', 'seed']
    return rows.loc[order.sort_values(by, na_position='first').index]


def complete(runs, curves, spread):
    """
    Fills in what follows from a run's size, schedule and log: train_loss is the mean over the last tenth of
    the steps. Adds capped_loss, the test loss, or that at initialisation if it is lower or the test loss is
    not finite, offset, the root mean square over positions of their mean logit, which bf16 has to round, and
    to `spread` whether the run diverged.
    """
    runs = runs.reset_index(drop=True)
    known = pd.DataFrame.from_dict(PUBLISHED, 'index', columns=['init_loss', 'n_params'])
    runs = runs.fillna(known.reindex(runs['size']).set_index(runs.index))
    # by default a warm-up over 5% of the steps, then a cosine to 1e-5
    runs['lr_sum'] = runs.lr_sum.fillna(runs.steps * (0.05 * runs.lr + 0.95 * (runs.lr + 1e-5)) / 2)
    logs = dict(list(curves.groupby(KEY)))
    logs = [logs.get(key, curves[:0]) for key in runs[KEY].itertuples(index=False, name=None)]
    ends = [log.loss[log.step > 0.9 * log.step.max()].mean() for log in logs]
    runs['train_loss'] = runs.train_loss.fillna(pd.Series(ends))
    unknown = runs.diverged.isna()
    marks = np.array([*map(diverged, logs, runs.test_loss, runs.init_loss)], float)
    runs.loc[unknown, ['diverged', 'diverged_step']] = marks[unknown]
    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)
    for rows in (runs, curves):
        rows['offset'] = np.hypot(rows.logit_mean.astype(float), rows.logit_mean_spread.astype(float))
    return runs, curves, spread.merge(runs[[*KEY, 'diverged']])


def read(path):
    """
    A csv of runs -> (runs, curves, distributions, settings). The others are empty, unless it is a results.csv
    that has them beside it; settings are a dict name -> the values that the runs have.
    """
    path = Path(path)

    def beside(name, columns):
        file, columns = path.parent / name, [*SETTINGS, *columns]
        there = path.name == 'results.csv' and file.exists()
        return identify(read_csv(file, REQUIRED[:4], columns) if there else
                        parse(pd.DataFrame(columns=columns, dtype=str), []))
    runs = identify(read_csv(path, REQUIRED, COLUMNS))
    check(len(runs), f'{path}: it has no runs, only a first line')
    check_once(runs, path)
    file = path.parent / 'settings.json'
    settings = read_json(file) if path.name == 'results.csv' and file.exists() else {}
    check(all(isinstance(values, list) for values in settings.values()),
          f'{file}: each setting should have a list of values')
    return *complete(runs, beside('curves.csv', CURVE), beside('distributions.csv', SPREAD)), settings


def write(out, runs, curves, spread, settings):
    """Writes what `read` reads into the folder `out`."""
    write_csv(Path(out, 'curves.csv'), curves[[*CURVE, *SETTINGS]], '%.7g')  # enough for a plot
    write_csv(Path(out, 'distributions.csv'), spread[[*SETTINGS, *SPREAD]])
    write_csv(Path(out, 'results.csv'), runs[COLUMNS])
    write_json(Path(out, 'settings.json'), settings)
