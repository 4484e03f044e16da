"""
Run folders and csv files. All tables and figures are made from three csv files, which `collect` writes and
`read` reads; a results.csv made elsewhere will do as well:

    results.csv        a row for each run: its settings, its test loss and the statistics of its model
    curves.csv         a row for each of at most 1,000 lines of a run's log: run, step, loss, ...
    distributions.csv  a row for each run and quantity: mean, quartiles, extrema and shares
"""
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measure
from model import METHODS, SIZES
from oec.common import UserError, check, read_json, write_atomic

RESULTS = [
    'run', 'method', 'size', 'n_params', 'weight_tying', 'lam', 'cap', 'lr', 'seed', 'steps', 'dtype',
    'logits_dtype', 'mu_shift', 'init_from', 'init_loss', 'test_loss', 'diverged', 'diverged_step', 'mu_norm',
    'mean_share', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax', 'logit_max', 'cos_mu_h',
    'r_emb', 'r_cos', 'r_log', 'r_emb_below_1', 'r_cos_below_1', 'r_log_below_1_too', 'train_seconds',
    'tokens_per_second', 'device']
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
CURVES = ['run', 'step', 'loss', 'lr', 'mu_norm', 'logit_mean', 'logit_absmax']
DISTRIBUTIONS = ['run', 'quantity', *measure.SUMMARY]
WORDS = {'run', 'method', 'size', 'dtype', 'logits_dtype', 'init_from', 'device', 'quantity'}  # else numbers
# What the rows of curves.csv and distributions.csv get from results.csv when they are read.
RUN_COLUMNS = ['run', 'variant', 'in_paper_setting', 'size', 'weight_tying', 'method', 'lam', 'lr', 'seed',
               'diverged']
# Runs of one size that differ in these should be analysed apart: their losses are not to be compared.
ALIKE = ['n_params', 'steps', 'batch_size', 'block_size', 'test_tokens', 'data_fingerprint']
TYING = {0: 'untied', 1: 'tied'}


def check_cells(ok, column, wanted):
    """UserError that names the first cell of a column (n,) where `ok` (n,) is false, by its row's index."""
    if not ok.all():
        raise UserError(f'{ok.idxmin()}: {column.name} should be {wanted}, is {column[ok.idxmin()]!r}')


def read_csv(path, columns, required):
    """These columns of a csv file, NaN for a number that is not known or finite; the index says the line."""
    try:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False, encoding='utf-8-sig',
                            skip_blank_lines=False).fillna('').rename(columns=str.strip)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise UserError(f'{path}: not readable as csv ({error})') from error
    missing = [name for name in required if name not in cells]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(required)}')
    check(isinstance(cells.index, pd.RangeIndex), f'{path}: a row has more cells than the first row')
    cells.index = [f'{path} line {i}' for i in range(2, len(cells) + 2)]
    unread = [name for name in cells if name not in columns]
    if unread:
        print(f'{path}: columns that are not read: {", ".join(unread)}')
    cells = cells[(cells != '').any(axis=1)].reindex(columns=columns, fill_value='')
    cells = cells.apply(lambda column: column.str.strip())
    for name in columns:
        column = cells[name]
        if name not in WORDS:
            unknown = column.str.lower().isin(['', 'nan', 'inf', '-inf'])
            values = pd.to_numeric(column.str.lower().replace({'true': '1', 'false': '0'}), errors='coerce')
            check_cells(values.notna() | unknown, column, 'a number')
            cells[name] = values.replace([math.inf, -math.inf], math.nan)
        if name in required:  # test_loss, which is nan if the run diverged, must not be empty either
            check_cells(column != '', column, 'given')
    return cells


def write_csv(path, rows, float_format=None):
    rows = rows.convert_dtypes()  # whole numbers without a point
    write_atomic(path, lambda file: rows.to_csv(file, index=False, float_format=float_format))


NO_CURVE = pd.DataFrame(columns=CURVES, dtype=float)
LEARNED = 0.1  # nats
RISEN = 0.5    # nats


def diverged(test_loss, init_loss, curve=NO_CURVE, lines=20, windows=20):
    """
    Whether a run diverged -> (1, 0, or NaN for unknown; the step where it shows, or NaN), by our rule, as the
    paper gives none. `curve` is the training log with step, loss and lr.

    A run diverged if a loss or weight was not finite, so that it has no test loss; if it ends less than
    LEARNED below its loss at initialisation; or if the median training loss of a window after warm-up is more
    than RISEN above that of an earlier window or above the loss at initialisation. A window, 1 / `windows` of
    the log, has at least `lines` lines, against noise. Less than three cannot show that none diverged.
    """
    if not math.isfinite(test_loss):
        return 1, curve.step.max()

    end_of_warmup = curve.step[curve.lr == curve.lr.max()].min()
    warmed_up = curve[curve.step > end_of_warmup]
    n = min(windows, len(warmed_up) // lines)  # windows
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
    'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.', 'muon_head': 'Muon on the head',
    'zipf_centering': 'Zipf-centering'}


def variant(run):
    """What tables and figures call the method of a run: its name, and where it leaves the paper's setting."""
    name = NAMES.get(run.method, run.method)
    if run.lam >= 0 and run.lam != METHODS.get(run.method):
        name += f' λ={run.lam:g}'
    if run.own_cap:
        name += f', cap {run.cap:g}'
    if run.mu_shift > 0:
        name += f', shift {run.mu_shift:g}'
    if run.fp32_head:
        name += ', fp32 head'
    return name + f', from {run.init_from}' if run.init_from else name


def plain_name(rows):
    """The variants of the rows without their λ."""
    return rows.variant.str.replace(r' λ=\S+', '', regex=True)


def at_default_lam(rows):
    """Where a method has its default λ, without its rows of other λ: Table 4 and Figure 8 are for these."""
    is_default = ~rows.variant.str.contains('λ=')
    has_default = is_default.groupby([rows.method, rows['size']]).transform('any')
    return rows[is_default | ~has_default]


def worst(diverged):
    """Of several runs: 1 if one diverged, 0 if none did, NaN if that is unknown."""
    return 1 if (diverged == 1).any() else diverged.max(skipna=False)


def complete(runs):
    """Fills in what empty cells mean, adds what RUN_COLUMNS and LRS need, and sorts as the paper does."""
    check_cells((runs.run == '') | ~runs.run.duplicated(), runs.run, 'of one run')
    check_cells(runs.lr > 0, runs.lr, 'above 0')
    check_cells(runs.weight_tying.isin([0, 1]), runs.weight_tying, '0 or 1')
    check_cells(runs.diverged.isin([0, 1]) | runs.diverged.isna(), runs.diverged, '0 or 1')
    check_cells(~(runs.lam < 0), runs.lam, 'at least 0')
    check_cells(runs.logits_dtype.isin(['', 'bfloat16', 'float32']), runs.logits_dtype, 'bfloat16 or float32')
    for name in runs.columns.intersection(ALIKE):
        of_size = runs.groupby(['size', 'weight_tying'])[name].transform('first')
        check_cells(runs[name].isna() | (runs[name] == of_size), runs[name], 'that of the runs of its size')
    runs['method'] = runs.method.replace({name: method for method, name in NAMES.items()})
    for name in ('lr', 'lam'):  # they are one if they are written alike: 0.3 and 0.30000000000000004
        runs[name] = runs[name].map('{:g}'.format).astype(float)
    default_lam = runs.method.map(METHODS).astype(float)
    # a method without λ has none, whatever the csv says
    runs['lam'] = runs.lam.fillna(default_lam).mask(runs.method.isin(METHODS) & default_lam.isna())
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})

    runs['own_cap'] = (runs.cap > 0) & ~((runs.method == 'soft_capping') & (runs.cap == 30))
    beside_bf16 = (runs.logits_dtype == 'bfloat16').any()  # else fp32 is nothing unusual
    runs['fp32_head'] = beside_bf16 & (runs.logits_dtype == 'float32')
    runs['variant'] = [variant(run) for run in runs.itertuples()]
    runs['in_paper_setting'] = (
        (runs.mu_shift == 0) & (runs.init_from == '') & ~runs.own_cap & ~runs.fp32_head)

    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)
    lost = runs.capped_loss.isna() & (runs.init_from == '')
    check(not lost.any(), f'{lost.idxmax()}: a test_loss of nan needs an init_loss, which LRS counts for it')
    by_rule = [diverged(run.test_loss, run.init_loss)[0] for run in runs.itertuples()]
    runs['diverged'] = runs.diverged.fillna(pd.Series(by_rule, runs.index))

    for run in runs[runs.duplicated(['variant', 'size', 'weight_tying', 'lr', 'seed'])].itertuples():
        raise UserError(f'{run.Index}: a second {run.variant} {run.size} with lr={run.lr:g} and '
                        f'seed={run.seed:.0f}; runs that differ in anything else should be analysed apart')
    order = {name: i for i, name in enumerate([*SIZES, *METHODS])}
    by = ['weight_tying', 'size', 'in_paper_setting', 'method', 'lam', 'variant', 'lr', 'seed']
    return runs.sort_values(by, ignore_index=True, ascending=[name != 'in_paper_setting' for name in by],
                            key=lambda x: x.map(order).fillna(99) if x.name in ('size', 'method') else x)


def read(path):
    """A csv of runs -> (runs, curves, distributions); the latter are empty if not beside a results.csv."""
    path = Path(path)
    runs = read_csv(path, RESULTS, REQUIRED)
    check(len(runs), f'{path}: it has no runs, only a first line')
    runs = complete(runs)

    def beside(name, columns):
        file = path.with_name(name)
        there = path.name == 'results.csv' and file.exists()
        rows = read_csv(file, columns, ['run']) if there else pd.DataFrame(columns=columns)
        return runs[RUN_COLUMNS].merge(rows.drop(columns='lr', errors='ignore'), on='run')  # lr: the run's
    return runs, beside('curves.csv', CURVES), beside('distributions.csv', DISTRIBUTIONS)


def find(folders):
    """The finished runs in or right below `folders`: folder -> a row, a dict; lines that name the others."""
    files = []
    for folder in map(Path, folders):
        check(folder.is_dir(), f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        files += [*folder.glob('config.json'), *folder.glob('*/config.json')]

    runs, left_out = {}, []
    for folder in sorted({file.parent for file in files}):
        if not (folder / 'result.json').exists():
            left_out.append(f'not finished: {folder}')
            continue
        run = {**read_json(folder / 'config.json'), **read_json(folder / 'result.json')}
        missing = [name for name in [*REQUIRED, 'init_loss'] if name not in run]
        check(not missing, f'{folder}: neither config.json nor result.json has {", ".join(missing)}')
        run['run'] = os.fsencode(folder).decode(errors='backslashreplace')
        run['device'] = run.get('device_name')  # the name of the GPU, not the flag
        runs[folder] = {name: math.nan if value is None else value for name, value in run.items()}
    check(runs, '; '.join(left_out) or f'{" ".join(folders)}: no run in there')
    rows = pd.DataFrame([*runs.values()], index=[*runs]).reindex(columns=[*dict.fromkeys(RESULTS + ALIKE)])
    words = [name for name in RESULTS if name in WORDS]
    rows[words] = rows[words].astype(object).fillna('')
    complete(rows)  # refuses what will not go into one table
    return runs, left_out


def training_curve(folder, n=1000):
    """The training lines of a run's log, at most n of them, the last for sure: columns CURVES."""
    path = folder / 'log.jsonl'
    try:
        lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
        log = pd.DataFrame([line for line in map(json.loads, lines) if 'loss' in line])
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: not readable as lines of JSON ({error})') from error
    every = max(1, math.ceil(len(log) / n))
    return log.iloc[(len(log) - 1) % every::every].reindex(columns=CURVES)


def collect(runs, out):
    """Measures the runs that `find` found and writes the csv files -> lines that say what is missing."""
    rows, curves, distributions, missing = [], [], [], {}
    for i, (folder, run) in enumerate(runs.items(), 1):
        print(f'{i} of {len(runs)}: {folder}', flush=True)
        curve = training_curve(folder)
        measured, no_statistics = measure.of_run(folder)
        run['diverged'], run['diverged_step'] = diverged(run['test_loss'], run['init_loss'], curve)
        rows.append({**run, **measured['numbers']})
        curves.append(curve.assign(run=run['run']))
        for quantity, numbers in measured['distributions'].items():
            distributions.append({'run': run['run'], 'quantity': quantity, **numbers})
        for reason in (no_statistics, '' if len(curve) else 'no training curve: no log.jsonl'):
            if reason:
                missing.setdefault(reason, []).append(run['run'])
    rows = pd.DataFrame(rows).reindex(columns=RESULTS)
    rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')  # an empty cell would be an error
    write_csv(Path(out, 'results.csv'), rows)
    write_csv(Path(out, 'curves.csv'), pd.concat(curves), '%.7g')  # enough for a plot
    write_csv(Path(out, 'distributions.csv'), pd.DataFrame(distributions, columns=DISTRIBUTIONS))
    return [f'{reason}: {", ".join(names)}' for reason, names in missing.items()]
