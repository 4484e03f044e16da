"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu,
statistics of the logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a
sweep.

    python analyze.py out/demo                 # all runs in a folder; writes results/demo/
    python analyze.py --results=results.csv    # tables and figures of such a csv alone

It prints tables, and writes them with all figures into report.html. results.csv has a row for each
run that has ended, checkpoints.csv for each checkpoint, curves.csv for each line of the logs,
distributions.csv for each run and quantity, and lrs.csv for each LRS.

Symbols are model.py's; a star marks what is centered, e*_i = e_i - mu. Losses are in nats per
token. Where others share the CPUs, OMP_NUM_THREADS=1 may measure several times faster.
"""
import argparse
import functools
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import train
from model import GPT, METHODS, SIZES, gpt_config, head_loss, summarize
from tools import report
from tools.report import NAMES, TYING, listed

# check exits with one line, read_json returns {} if there is no file, save writes atomically
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v12.json'  # in a run's folder; a new name if what is measured changes
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


# -------- the quantities of Section 3
def norm_ratios(E):
    """E (V, H) -> r_emb = |e*_i| / |e_i| of each token, (V,), except for rows of zeros."""
    norms = E.norm(dim=1)
    norms_centered = (E - E.mean(dim=0)).norm(dim=1)
    return (norms_centered / norms)[norms > 0]


def largest_product(h, X):
    """h (N, H), X (V, H) -> max_i |x_i . h| of each h, (N,), without a second (N, V) tensor."""
    return torch.linalg.vector_norm(h @ X.T, ord=math.inf, dim=1).clamp_min(TINY)


def centering_ratios(h, E):
    """h (N, H), E (V, H) -> r_log = max |l*_i| / max |l_i| (Eq. 11), r_cos, cos(mu, h): (N,)."""
    mu = E.mean(dim=0)
    E_star = E - mu  # next to a large mean, logits l_i - mu . h would lose their digits
    units = F.normalize(E, dim=1, eps=TINY)  # |h| cancels in r_cos
    units_star = F.normalize(E_star, dim=1, eps=TINY)
    r_log = largest_product(h, E_star) / largest_product(h, E)
    r_cos = largest_product(h, units_star) / largest_product(h, units)
    cos_mu_h = F.cosine_similarity(h, mu[None], eps=TINY)
    return {'r_log': r_log, 'r_cos': r_cos, 'cos_mu_h': cos_mu_h}


@torch.no_grad()
def measure_positions(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> a dict of statistics of each position, (n T,) each:
    head_loss's statistics except reg; bf16_cost, the loss with BF16 logits minus the one with fp32
    logits of the same weights; and centering_ratios, which are of e_i . h alone.
    """
    gpt.eval()
    E = gpt.E.float()
    own_dtype = gpt.config.logits_dtype
    other_dtype = 'float32' if own_dtype == 'bfloat16' else 'bfloat16'
    parts = []
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        tokens, targets = batch[:, :-1], batch[:, 1:].flatten()
        h = gpt.hidden(tokens).flatten(0, 1)
        losses = {}
        for dtype in (other_dtype, own_dtype):
            gpt.config.logits_dtype = dtype
            _, stats = head_loss(gpt.head(h), targets, gpt.config)
            losses[dtype] = stats['loss']
        del stats['reg']  # of the training loss alone
        stats['bf16_cost'] = losses['bfloat16'] - losses['float32']
        parts.append({**stats, **centering_ratios(h.float(), E)})
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


def describe_values(values):
    """Values (N,) -> a row of distributions.csv: mean, quartiles, extrema, two shares."""
    x = pd.Series(values.numpy())
    return {**x.describe(), 'below_1': (x < 1).mean(), 'above_0': (x > 0).mean()}


def measure_model(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> `numbers`, a dict of floats, and `distributions`, a
    dict of describe_values, over the positions or, of r_emb, over the vocabulary.
    """
    E = gpt.E.detach()
    stats = measure_positions(gpt, windows)
    distributions = {'r_emb': describe_values(norm_ratios(E).double().cpu())}
    for name, values in stats.items():
        distributions[name] = describe_values(values)

    numbers = summarize(stats, E)
    numbers['cross_entropy'] = numbers.pop('loss')  # on the test text, unlike the loss in a log
    share = len(E) * E.mean(dim=0).square().sum() / E.square().sum()  # V |mu|^2 / |E|_F^2
    numbers['mean_share'] = share.item()
    numbers['r_emb'] = distributions['r_emb']['mean']
    numbers['r_emb_below_1'] = distributions['r_emb']['below_1']
    numbers['r_cos_below_1'] = distributions['r_cos']['below_1']

    # Fact 3: r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token; NaN if there is none
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers['r_log_below_1_too'] = (r_log < 1).double().mean().item()
    return {'numbers': numbers, 'distributions': distributions}


# -------- from folders to rows
@functools.cache  # most runs of a sweep have the same
def load_windows(data, val_tokens, block_size, test_tokens):
    """The test windows (n, T + 1) int64 of a run, if its --data still has its val tokens."""
    test = train.Windows(data, 'val', block_size)
    if test.n_tokens != val_tokens:
        raise ValueError(f'--data={data} no longer has the val tokens of this run')
    ids = test.evenly_spaced(min(POSITIONS, test_tokens))
    return torch.from_numpy(test[ids])


def measure_checkpoint(path, windows):
    """A run's .pt file -> its step and measure_model of it, on a GPU if there is one."""
    saved = train.read_checkpoint(str(path))
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    if torch.cuda.is_available():
        gpt.to('cuda')
    step = saved['step']
    del saved  # or the optimizer's moments would stay in memory
    return {'step': step, **measure_model(gpt, windows)}


def measure_run(run, problems):
    """
    A run's settings -> {name of a .pt file in its folder: what measure_checkpoint returns}. The
    folder keeps this, and a file is measured again if its time has changed.
    """
    folder = Path(run['run'])
    measured = read_json(folder / STATISTICS)
    for file in sorted(folder.glob('*.pt')):
        try:
            time = file.stat().st_mtime
            if measured.get(file.name, {}).get('time') == time:
                continue
            measured.pop(file.name, None)
            print(f'measuring {file}', flush=True)
            windows = load_windows(run['data'], run['val_tokens'], run['block_size'],
                                   run['test_tokens'])
            measured[file.name] = {'time': time, **measure_checkpoint(file, windows)}
            save(measured, f'{folder}/{STATISTICS}')
        except SystemExit:  # train.Windows has printed why
            problems.append(f'{file}: not measured, as --data={run["data"]} cannot be read')
        except Exception as error:  # of many kinds: a damaged file, another model
            problems.append(f'{file}: {type(error).__name__}: {error}')
    return measured


def read_run(folder):
    """A run's folder -> its settings and results, a dict, and its log, a list of dicts."""
    config = read_json(folder / 'config.json')
    result = read_json(folder / 'result.json')
    run = {'run': str(folder), 'ended': bool(result), **config, **result}
    run['device'] = config['device_name']

    # some 1,000 lines are enough for a plot, and all val losses
    lines = (folder / 'log.jsonl').read_text().splitlines()
    every = math.ceil(len(lines) / 1000)
    log = []
    for i, line in enumerate(lines):
        record = json.loads(line)
        if i % every == 0 or 'loss' not in record:
            log.append({'run': str(folder), **record})
    return run, log


def read_folders(paths):
    """
    Reads and measures all runs in these folders -> the rows of the csv files, {name: DataFrame},
    and a list of what could not be read. `results` has a row for each run, with the statistics of
    its model.pt or, before it has one, of its last checkpoint. Files that were deleted after they
    were measured keep their numbers, but for the ckpt.pt of a run that has ended.
    """
    folders = set()
    for path in paths:
        found = {file.parent for file in Path(path).rglob('config.json')}
        check(found, f'{path}: no run is there')
        folders |= found

    rows = {'results': [], 'curves': [], 'checkpoints': [], 'distributions': []}
    problems = []
    for folder in sorted(folders):
        try:
            run, log = read_run(folder)
            measured = measure_run(run, problems)
        except Exception as error:  # of many kinds: a file is damaged, or a run has just begun
            problems.append(f'{folder}: {type(error).__name__}: {error}')
            continue
        rows['curves'] += log
        if run['ended']:
            measured.pop('ckpt.pt', None)

        own = {name: run[name] for name in ('run', 'method', 'lam', 'size', 'lr', 'seed')}
        for file, found in measured.items():
            checkpoint = {**own, 'file': file, 'step': found['step'], **found['numbers']}
            rows['checkpoints'].append(checkpoint)

        last = measured.get('model.pt')
        if measured and not run['ended']:
            last = max(measured.values(), key=lambda found: found['step'])
        if last:
            run = run | {'model_step': last['step'], **last['numbers']} | run  # settings win
            for quantity, values in last['distributions'].items():
                rows['distributions'].append({'run': run['run'], 'quantity': quantity, **values})
        elif not (folder / 'model.pt').exists():
            problems.append(f'{folder}: no model.pt: not measured')
        rows['results'].append(run)
    check(rows['results'], f'no run could be read: {"; ".join(problems[:3])}')

    tables = {}
    for name in rows:  # None becomes NaN, so that columns of numbers are floats
        tables[name] = pd.DataFrame(rows[name]).fillna(math.nan).infer_objects()
    return tables, problems


def write_csv(path, rows):
    """Writes a csv file, in which whole numbers have no point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False).encode(), str(path))


# -------- what a run is called
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # the columns that a csv needs
OPTIONAL = '''run ended lam seed n_params init_loss mu_norm logit_mean logit_std logit_absmax
    cos_mu_h r_emb r_cos r_log bf16_cost train_seconds device processes'''.split()

# The paper's settings are the defaults of train.py. A fork's flags are among them, and those whose
# default is None, because it follows from others, need a value in `usual` of unusual_settings.
PAPER = vars(train.parser.parse_args([])) | {
    'dtype': 'bfloat16', 'logits_dtype': 'bfloat16', 'vocab_size': 50304}
DATA = ['train_tokens', 'val_tokens']
# Runs that differ in a setting of TASK get another `size`, and in one of IN_NAMES another `variant`
DEFAULT_LAM = {method: defaults.get('lam') for method, defaults in METHODS.items()}
TASK = [*DATA, 'steps', 'batch_size', 'block_size', 'vocab_size', 'test_tokens']
OWN_COLUMN = {'method', 'lam', 'size', 'weight_tying', 'lr', 'seed'}
IN_NAMES = [name for name in train.SETTINGS if name not in {*TASK, *OWN_COLUMN}]


def as_text(value):
    """A setting as names have it; '' if it is unknown or None."""
    if value is None or value != value:  # NaN
        return ''
    return f'{value:.12g}' if isinstance(value, int | float) else str(value)


def unusual_settings(run):
    """A run -> {setting: ', steps 1000', or '' if it is unknown or the paper's}."""
    usual = {**PAPER, **SIZES.get(run['size'], {}), 'warmup': run['steps'] // 20}
    if run['method'] == 'soft_capping':
        usual['cap'] = 30.0
    texts = {}
    for name in [*TASK, *IN_NAMES]:
        text = as_text(run.get(name))
        is_usual = text in ('', as_text(usual.get(name)))
        texts[name] = '' if is_usual else f', {name} {text}'
    return texts


def name_runs(runs):
    """
    Adds to `size` the settings of TASK in which the runs differ, unless they are the paper's, as
    in "tiny, steps 1000"; and a column `variant`: the method, λ if it is not the default, and
    likewise all other flags. `as_the_paper`: all that is known of the settings is the paper's.
    """
    names = []
    for run in runs.itertuples():
        name = NAMES.get(run.method, run.method)
        if run.lam == run.lam and run.lam != DEFAULT_LAM.get(run.method):
            name += f' λ={run.lam:g}'
        names.append(name)

    settings = pd.DataFrame([unusual_settings(run) for run in runs.to_dict('records')], runs.index)
    as_the_paper = (settings.drop(columns=DATA) == '').all(axis=1)
    runs = runs.assign(variant=names, as_the_paper=as_the_paper)
    for name in settings:
        if settings[name].nunique() > 1:
            runs['size' if name in TASK else 'variant'] += settings[name]
    runs.loc[~runs.ended, 'variant'] += ', not finished'
    return runs


def complete(runs):
    """Rows of results.csv, perhaps without OPTIONAL columns -> named runs in the paper's order."""
    runs = runs.reindex(columns=[*dict.fromkeys([*REQUIRED, *OPTIONAL, *TASK, *runs])])
    runs['weight_tying'] = runs.weight_tying.astype(int)
    runs['seed'] = runs.seed.fillna(PAPER['seed'])
    runs['lam'] = runs.lam.fillna(runs.method.map(DEFAULT_LAM)).astype(float)

    # min(L, L0) of Eq. 21. A loss that is not finite counts as L0; nothing does if L0 is unknown
    runs['test_loss'] = runs.test_loss.mask(runs.test_loss.isna() & runs.ended, math.inf)
    runs['capped_loss'] = np.minimum(runs.test_loss, runs.init_loss.fillna(math.inf))

    rank = {name: i for i, name in enumerate([*SIZES, *METHODS])}  # other names come last
    runs = runs.sort_values(
        ['weight_tying', 'size', 'method', 'lam', 'lr', 'seed'], ignore_index=True,
        key=lambda column: column.map(rank) if column.name in ('size', 'method') else column)
    return name_runs(runs)


def read_runs(path):
    """A csv file with REQUIRED columns -> named runs. Without a test_loss, a run was not finite."""
    runs = pd.read_csv(path, dtype={'run': str, 'method': str, 'size': str})
    for name in REQUIRED:
        check(name in runs, f'{path}: has no column {name}; it needs {", ".join(REQUIRED)}')
        check(name == 'test_loss' or runs[name].notna().all(), f'{path}: a {name} is empty')
    check(len(runs), f'{path}: has no runs')
    if 'run' not in runs:
        runs['run'] = [f'line {i}' for i in range(2, len(runs) + 2)]
    runs['size'] = runs['size'].str.strip()
    return complete(runs.assign(ended=True))


# -------- how runs are compared
PLACE = ['weight_tying', 'size', 'lr', 'seed']  # runs are compared where all of these agree


def of_methods(runs):
    """The runs by which methods are compared: of the default λ, or all where a size lacks it."""
    runs = runs.assign(is_default=runs.lam.isna() | (runs.lam == runs.method.map(DEFAULT_LAM)))
    has_default = runs.groupby(['weight_tying', 'size', 'method']).is_default.transform('any')
    return runs[runs.is_default | ~has_default]


def of_several_lam(runs):
    """The runs by which λ are compared: all of those methods that ran with several at a size."""
    n_lam = runs.groupby(['weight_tying', 'size', 'method']).lam.transform('nunique')
    return runs[n_lam > 1]


def with_marks(runs):
    """
    Adds `diverged`, as the paper's notebook has it: 1 if a test loss is not finite, or over 1%
    above the lowest of these runs in its PLACE; 0 if not; NaN if it is the only run there.
    """
    losses = runs.groupby(PLACE).test_loss
    lowest = losses.transform('min')
    diverged = ((runs.test_loss - lowest) / lowest > 0.01).astype(float)
    diverged = diverged.where(losses.transform('size') > 1)
    return runs.assign(diverged=diverged.mask(runs.test_loss == math.inf, 1.0))


LRS_COLUMNS = '''table size weight_tying variant method lam n_params seed rates n_rates lrs lrs_n1
                 paper diverged'''.split()  # of lrs.csv
PAPER_RATES = '0.0003 0.001 0.003 0.01 0.03 0.1 0.3'  # Eq. 18
PAPER_LRS = pd.read_csv(Path(__file__).parent / 'tools/paper_lrs.csv',
                        index_col=['tying', 'size', 'variant'])


def lrs_of_seed(runs):
    """
    The runs of a variant with one seed -> its LRS: the mean over the n learning rates of
    min(L, L0) - min L (Eq. 21), and their sum / (n - 1), as the paper's tables have it.
    """
    losses = runs.capped_loss
    n = len(runs)
    above_lowest = (losses - losses.min()).sum()
    learned = runs.init_loss.min() - losses.min()
    if learned <= 0.1 or above_lowest == math.inf:
        above_lowest = math.nan  # who learns nothing has losses that hardly vary, and the best LRS

    first = runs.iloc[0]
    rates = listed(runs.lr)
    paper = math.nan
    if rates == PAPER_RATES and runs.as_the_paper.all():
        paper = PAPER_LRS.lrs.get((TYING[first.weight_tying], first['size'], first.variant), paper)
    return {**first, 'lrs': above_lowest / n, 'lrs_n1': above_lowest / (n - 1), 'paper': paper,
            'n_rates': n, 'rates': rates, 'diverged': runs.diverged.max(skipna=False)}


def learning_rate_sensitivity(runs):
    """Runs -> rows of lrs.csv: LRS of each variant and seed that has two learning rates or more."""
    rows = []
    same = ['weight_tying', 'size', 'variant', 'seed']
    for _, part in with_marks(runs).groupby(same, sort=False):
        if len(part) > 1:
            rows.append(lrs_of_seed(part))
    return pd.DataFrame(rows, columns=[*dict.fromkeys([*runs, *LRS_COLUMNS])])


# -------- beside the paper
MIN_SECONDS = 600  # shorter runs differ in time by more than the methods do
MACHINE = ['weight_tying', 'size', 'device', 'processes']  # times are compared where these agree
AUTHORS = Path(__file__).parent / 'results/authors/results.csv'
OF_THEIRS = {'batch_size': 64, 'block_size': 2048, 'vocab_size': 50304}  # not in their csv
SAME_RUN = ['size', 'weight_tying', 'method', 'lam', 'lr', 'steps', *OF_THEIRS]


def overhead(runs):
    """
    The runs that took over MIN_SECONDS, but for the baseline's, with `added`: 0.01 if a run took 1%
    longer than the baseline's mean. Their variants are without λ, which changes no time.
    """
    timed = runs[(runs.train_seconds > MIN_SECONDS) & (runs.test_loss < math.inf)]
    timed = timed.assign(
        variant=timed.variant.str.replace(' λ=[^,]*', '', regex=True),
        device=timed.device.map(as_text), processes=timed.processes.map(as_text))
    of_baseline = timed[timed.variant == 'baseline'].groupby(MACHINE).train_seconds.mean()
    timed = timed.join(of_baseline.rename('of_baseline'), on=MACHINE)
    timed['added'] = timed.train_seconds / timed.of_baseline - 1
    return timed[timed.added.notna() & (timed.variant != 'baseline')]


def beside_the_authors(runs):
    """The runs that the authors have too, with their numbers as `test_loss_of_theirs` and so on."""
    if not AUTHORS.exists():  # a fork may have deleted results/
        return runs.head(0)
    theirs = read_runs(AUTHORS).assign(**OF_THEIRS)
    # with soft-capping theirs are of the logits before the cap, ours of those after it
    theirs.loc[theirs.method == 'soft_capping', 'logit_mean'] = math.nan
    theirs = theirs[[*SAME_RUN, *report.BESIDE_THEIRS]]
    return runs[runs.as_the_paper].merge(theirs, on=SAME_RUN, suffixes=('', '_of_theirs'))


# -------- the program
parser = argparse.ArgumentParser(
    usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__, allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('runs', nargs='*', type=os.path.expanduser, help='folders of runs or sweeps, as out/demo')
add('--results', type=os.path.expanduser, metavar='FILE.csv', help='a csv of runs instead')
add('--out', type=os.path.expanduser,
    help="folder to write to (default: results/ and the folders' names, or the csv's own folder)")


def main(argv=None):
    """Reads and measures runs, compares them, and writes csv files, tables and figures."""
    args = parser.parse_args(argv)
    check(bool(args.runs) != bool(args.results), 'give run folders, or --results')

    if args.results:
        out = Path(args.out or Path(args.results).parent)
        runs = read_runs(args.results)
        curves = distributions = pd.DataFrame()
        problems = []
    else:
        names = [Path(path).resolve().name for path in args.runs]
        out = Path(args.out or f'results/{"+".join(names)}')
        check(args.out or not (out / 'README.md').exists(), f'{out} has a README.md; give --out')
        tables, problems = read_folders(args.runs)
        runs = complete(tables['results'])
        curves = tables['curves']
        distributions = tables['distributions']
        tables['results'] = tables['results'].query('ended').drop(columns='ended')
        for name, rows in tables.items():
            write_csv(out / f'{name}.csv', rows)

    # what is compared: methods with their default λ, and all λ of the methods that have several
    runs = report.with_looks(runs)
    ended = runs[runs.ended]
    is_copy = ended.duplicated(['variant', *PLACE])
    for run in ended.run[is_copy]:
        problems.append(f'{run}: not compared, as another run has the same settings')
    ended = ended[~is_copy]
    methods = with_marks(of_methods(ended))
    lams = with_marks(of_several_lam(ended))
    lrs = learning_rate_sensitivity(methods).assign(table='methods')
    lrs_lam = learning_rate_sensitivity(lams).assign(table='λ')
    write_csv(out / 'lrs.csv', pd.concat([lrs, lrs_lam]).reindex(columns=LRS_COLUMNS))

    # the page
    items = [report.run_table(runs), *report.authors_tables(beside_the_authors(ended))]
    for tying in sorted({*ended.weight_tying}):
        parts = [rows[rows.weight_tying == tying] for rows in (methods, lrs, lams, lrs_lam)]
        items += report.items_of_tying(TYING[tying], *parts)
    items += report.overhead_tables(overhead(ended))
    items += report.distribution_figures(methods, distributions)
    items += report.curve_figures(runs, curves)
    report.write(out, runs, items, problems)


if __name__ == '__main__':
    main()
