"""
Run folders and csv files. All tables and figures are made from three csv files, which `collect` writes and
`read` reads; a results.csv made elsewhere will do as well:

    results.csv        a row for each run: its settings, its test loss and the statistics of its model
    curves.csv         a row for each evaluation of a run and of at most 1,000 lines of its log
    distributions.csv  a row for each run and quantity: mean, quartiles, extrema and shares
"""
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measure
from model import METHODS, SIZES
from train import check, read_json, save

RESULTS = [
    'run', 'method', 'size', 'n_params', 'weight_tying', 'lam', 'cap', 'lr', 'seed', 'steps', 'dtype',
    'logits_dtype', 'mu_shift', 'init_from', 'init_loss', 'test_loss', 'diverged', 'diverged_step',
    'model_step', 'mu_norm', 'mean_share', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax',
    'logit_max', 'cos_mu_h', 'r_emb', 'r_cos', 'r_log', 'r_emb_below_1', 'r_cos_below_1',
    'r_log_below_1_too', 'train_seconds', 'tokens_per_second', 'device']
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
CURVES = ['run', 'step', 'loss', 'test_loss', 'lr', 'mu_norm', 'logit_mean', 'logit_mean_spread',
          'logit_absmax']
DISTRIBUTIONS = ['run', 'quantity', *measure.SUMMARY]
WORDS = ['run', 'method', 'size', 'dtype', 'logits_dtype', 'init_from', 'device', 'quantity']  # else numbers
# Runs of one size that differ in these should be analysed apart: their losses are not to be compared.
ALIKE = ['n_params', 'steps', 'batch_size', 'block_size', 'test_tokens', 'data_fingerprint']
TYING = {0: 'untied', 1: 'tied'}


def read_csv(path, columns, required):
    """These columns of a csv file, NaN for a number that is not known or finite."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).fillna('')
    missing = [name for name in required if name not in rows]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(required)}')
    check(isinstance(rows.index, pd.RangeIndex), f'{path}: its rows have more cells than its first line')
    rows = rows.reindex(columns=columns, fill_value='')
    numbers = [name for name in columns if name not in WORDS]
    for name in numbers:
        # a required cell must not be empty: a run that diverged has nan as its test_loss
        unknown = {} if name in required else {'': 'nan'}
        rows[name] = rows[name].replace({'True': '1', 'False': '0', **unknown})
    return rows.astype(dict.fromkeys(numbers, float)).replace([math.inf, -math.inf], math.nan)


def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


NO_CURVE = pd.DataFrame(columns=CURVES, dtype=float)
LEARNED = 0.1  # nats
RISEN = 0.5    # nats


def diverged(test_loss, init_loss, curve=NO_CURVE, lines=20, windows=20):
    """
    Whether a run diverged -> (1, 0, or NaN for unknown; the step where it shows, or NaN), by our rule, as the
    paper gives none: a loss or weight was not finite, so that it has no test loss; or it ends less than
    LEARNED below its loss at initialisation; or the median training loss of a window of its `curve` after
    warm-up is more than RISEN above that of an earlier window or above the loss at initialisation. A window,
    1 / `windows` of the log, has at least `lines` lines, against noise; less than three cannot say no.
    """
    if not math.isfinite(test_loss):
        return 1, curve.step.max()

    end_of_warmup = curve.step[curve.lr == curve.lr.max()].min()
    warmed_up = curve[(curve.step > end_of_warmup) & curve.lr.notna()]  # evaluations have no lr
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


def at_default_lam(rows):
    """Where a method has its default λ, without its rows of other λ: Table 4 and Figure 8 are for these."""
    is_default = rows.variant == rows.plain_name
    has_default = is_default.groupby([rows.method, rows['size']]).transform('any')
    return rows[is_default | ~has_default]


def worst(diverged):
    """Of several runs: 1 if one diverged, 0 if none did, NaN if that is unknown."""
    return 1 if (diverged == 1).any() else diverged.max(skipna=False)


def check_each(ok, runs, words):
    """Unless `ok` (n,) of all n runs, ends the program with the name of the first that is not, and why."""
    check(ok.all(), f'{runs.run[ok.idxmin()]}: {words}')


def complete(runs):
    """Fills in what empty cells mean, adds what tables and figures need, and sorts as the paper does."""
    check_each(~runs.run.duplicated(), runs, 'a second row of this run')
    for name in runs.columns.intersection(ALIKE):
        of_size = runs.groupby(['size', 'weight_tying'])[name].transform('first')
        check_each(runs[name].isna() | (runs[name] == of_size), runs,
                   f'another {name} than other runs of its size; they should be analysed apart')
    runs['method'] = runs.method.replace({name: method for method, name in NAMES.items()})
    for name in ('lr', 'lam'):  # they are one if they are written alike: 0.3 and 0.30000000000000004
        runs[name] = runs[name].map('{:g}'.format).astype(float)
    runs['lam'] = runs.lam.fillna(runs.method.map(METHODS).astype(float))
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})

    runs['own_cap'] = (runs.cap > 0) & ~((runs.method == 'soft_capping') & (runs.cap == 30))
    beside_bf16 = (runs.logits_dtype == 'bfloat16').any()  # else fp32 is nothing unusual
    runs['fp32_head'] = beside_bf16 & (runs.logits_dtype == 'float32')
    runs['variant'] = [variant(run) for run in runs.itertuples()]
    runs['plain_name'] = runs.variant.str.replace(r' λ=\S+', '', regex=True)
    runs['in_paper_setting'] = (
        (runs.mu_shift == 0) & (runs.init_from == '') & ~runs.own_cap & ~runs.fp32_head)

    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)
    check_each(runs.capped_loss.notna() | (runs.init_from != ''), runs,
               'a test_loss of nan needs an init_loss, which LRS counts for it')
    by_rule = [diverged(run.test_loss, run.init_loss)[0] for run in runs.itertuples()]
    runs['diverged'] = runs.diverged.fillna(pd.Series(by_rule, runs.index))

    for run in runs[runs.duplicated(['variant', 'size', 'weight_tying', 'lr', 'seed'])].itertuples():
        check(False, f'{run.run}: a second {run.variant} {run.size} with lr={run.lr:g} and seed='
              f'{run.seed:.0f}; runs that differ in anything else should be analysed apart')
    order = {name: i for i, name in enumerate([*SIZES, *METHODS])}
    by = ['weight_tying', 'size', 'in_paper_setting', 'method', 'lam', 'variant', 'lr', 'seed']
    return runs.sort_values(by, ignore_index=True, ascending=[name != 'in_paper_setting' for name in by],
                            key=lambda x: x.map(order).fillna(99) if x.name in ('size', 'method') else x)


def read(path):
    """A csv of runs -> (runs, curves, distributions); the latter are empty if not beside a results.csv."""
    path = Path(path)
    runs = read_csv(path, RESULTS, REQUIRED)
    check(len(runs), f'{path}: has no runs')
    lines = pd.Series([f'{path.name} line {i}' for i in range(2, len(runs) + 2)])
    runs['run'] = runs.run.where(runs.run != '', lines)
    runs = complete(runs)

    def beside(name, columns):
        file = path.with_name(name)
        there = path.name == 'results.csv' and file.exists()
        rows = read_csv(file, columns, ['run']) if there else pd.DataFrame(columns=columns)
        shared = runs.drop(columns=rows.columns.difference(['run', 'lr']), errors='ignore')
        return shared.merge(rows.drop(columns='lr', errors='ignore'), on='run')
    return runs, beside('curves.csv', CURVES), beside('distributions.csv', DISTRIBUTIONS)


def training_curve(folder, n=1000):
    """Of a run's log the evaluations and at most n training lines, the last for sure: columns CURVES."""
    lines = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    evaluations = [line for line in lines if 'loss' not in line]
    trained = [line for line in lines if 'loss' in line]
    every = max(1, math.ceil(len(trained) / n))
    curve = pd.DataFrame(evaluations + trained[(len(trained) - 1) % every::every])
    return curve.reindex(columns=CURVES).sort_values('step', kind='stable')


def collect(folders, out):
    """Measures the finished runs in or right below `folders` and writes csv files -> what is missing."""
    rows, curves, distributions, missing = [], [], [], []
    configs = [[*Path(folder).glob('config.json'), *Path(folder).glob('*/config.json')] for folder in folders]
    for config in sorted({*sum(configs, [])}):
        folder = config.parent
        if not (folder / 'result.json').exists():
            missing.append(f'not finished: {folder}')
            continue
        try:
            run = {**read_json(config), **read_json(folder / 'result.json'), 'run': str(folder)}
            curve = training_curve(folder)
        except (OSError, ValueError) as error:
            missing.append(f'left out: {folder} cannot be read ({error})')
            continue

        print(f'measuring {folder}', flush=True)
        measured, why_not = measure.of_run(folder)
        if why_not:
            missing.append(f'no statistics of {folder}: {why_not}')
        run = {name: math.nan if value is None else value for name, value in run.items()}
        run['device'] = run['device_name']  # the name of the GPU, not the flag
        run['diverged'], run['diverged_step'] = diverged(run['test_loss'], run['init_loss'], curve)
        rows.append({**run, **measured['numbers']})
        curves.append(curve.assign(run=run['run']))
        for quantity, numbers in measured['distributions'].items():
            distributions.append({'run': run['run'], 'quantity': quantity, **numbers})

    check(rows, '; '.join(missing) or f'{" ".join(folders)}: no run in there')
    rows = pd.DataFrame(rows).reindex(columns=[*dict.fromkeys(RESULTS + ALIKE)])
    words = rows.columns.intersection(WORDS)
    rows[words] = rows[words].astype(object).fillna('')
    complete(rows.copy())  # refuses what will not go into one table
    rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')  # an empty cell is an error
    write_csv(out / 'results.csv', rows[RESULTS])
    write_csv(out / 'curves.csv', pd.concat(curves), '%.7g')  # enough for a plot
    write_csv(out / 'distributions.csv', pd.DataFrame(distributions, columns=DISTRIBUTIONS))
    return missing
