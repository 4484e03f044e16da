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
import contextlib
import copy
import dataclasses
import functools
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import train
from model import GPT, METHODS, SIZES, gpt_config, summarize
from tools import report
from tools.report import NAMES, listed

# check exits with one line, read_json returns {} if there is no file, save writes atomically
from train import check, read_json, save

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

    # the runs, a row for each, with names
    if args.results:
        out = Path(args.out or Path(args.results).parent)
        runs = read_runs(args.results)
        curves = distributions = pd.DataFrame(columns=['run', 'quantity'])
        problems = []
    else:
        names = [Path(path).resolve().name for path in args.runs]
        out = Path(args.out or f'results/{"+".join(names)}')
        check(args.out or not (out / 'README.md').exists(), f'{out} has a README.md; give --out')
        tables, problems = read_folders(args.runs)
        runs = name_runs(complete(tables['results']))
        curves = tables['curves']
        distributions = tables['distributions']
        tables['results'] = tables['results'].query('ended').drop(columns='ended')
        for name, rows in tables.items():
            write_csv(out / f'{name}.csv', rows)

    # two comparisons: of methods with their default λ, and of all λ where a method has several
    runs = report.with_looks(runs)
    ended = runs[runs.ended]
    is_copy = ended.duplicated(['variant', *PLACE])
    for run in ended.run[is_copy]:
        problems.append(f'{run}: not compared, as another run has the same name, rate and seed')
    ended = ended[~is_copy]
    methods = with_marks(of_methods(ended))
    lams = with_marks(of_several_lam(ended))
    lrs = learning_rate_sensitivity(methods).assign(table='methods')
    lrs_lam = learning_rate_sensitivity(lams).assign(table='λ')
    write_csv(out / 'lrs.csv', pd.concat([lrs, lrs_lam]).reindex(columns=LRS_COLUMNS))

    # the page
    items = [*report.run_tables('Runs', runs, report.DECIDING)]
    items += report.run_tables("Beside the authors' runs", beside_the_authors(ended), report.BESIDE)
    for tying in ended.tying.unique():
        parts = [rows[rows.tying == tying] for rows in (methods, lrs, lams, lrs_lam)]
        items += report.items_of_tying(tying, *parts)
    items += report.overhead_tables(overhead(ended))
    items += report.distribution_figures(methods, distributions)
    items += report.curve_figures(runs, curves)
    items += report.run_tables('Statistics', runs, report.STATISTICS)
    report.write(out, runs, items, problems)


# -------- from folders to rows
def read_folders(paths):
    """
    Reads and measures all runs in these folders -> the rows of the csv files, {name: DataFrame},
    and a list of what could not be read. `results` has a row for each run, with the statistics of
    its last checkpoint.
    """
    folders = set()
    for path in paths:
        found = {file.parent for file in Path(path).rglob('config.json')}
        check(found, f'{path}: no run is there')
        folders |= found

    rows = {'results': [], 'checkpoints': [], 'curves': [], 'distributions': []}
    problems = []
    for folder in sorted(folders):
        try:
            run = read_run(folder)
            log = read_log(folder)
            measured = measure_run(run, problems)
        except Exception as error:  # of many kinds: a file is damaged, or a run has just begun
            problems.append(f'{folder}: {type(error).__name__}: {error}')
            continue
        rows['curves'] += log
        if not measured:
            problems.append(f'{folder}: no checkpoint was measured')

        # a run's own settings and results win over a statistic of the same name
        own = {name: run[name] for name in ('run', 'method', 'lam', 'size', 'lr', 'seed')}
        for checkpoint in measured:
            own |= {'file': checkpoint['file'], 'step': checkpoint['step']}
            rows['checkpoints'].append({**own, **checkpoint['numbers'], **own})
        if measured:
            last = max(measured, key=lambda checkpoint: checkpoint['step'])
            run = {**run, **last['numbers'], **run, 'model_step': last['step']}
            for quantity, values in last['distributions'].items():
                rows['distributions'].append({'run': run['run'], 'quantity': quantity, **values})
        rows['results'].append(run)
    check(rows['results'], f'no run could be read: {"; ".join(problems[:3])}')

    tables = {}
    for name in rows:  # None becomes NaN, so that columns of numbers are floats
        tables[name] = pd.DataFrame(rows[name]).fillna(math.nan).infer_objects()
    return tables, problems


def read_run(folder):
    """A run's folder -> its settings and results, a dict."""
    config = read_json(folder / 'config.json')
    result = read_json(folder / 'result.json')
    return {'run': str(folder), 'ended': bool(result), **config, **result,
            'device': config['device_name']}


def read_log(folder):
    """A run's folder -> lines of its log: some 1,000, enough for a plot, and all val losses."""
    lines = (folder / 'log.jsonl').read_text().splitlines()
    every = math.ceil(len(lines) / 1000)
    log = []
    for i, line in enumerate(lines):
        record = json.loads(line)
        if i % every == 0 or 'loss' not in record:
            log.append({'run': str(folder), **record})
    return log


def write_csv(path, rows):
    """Writes a csv file, in which whole numbers have no point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False).encode(), str(path))


# -------- from checkpoints to numbers
POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
CPU_LOGITS = 2**29   # on a CPU at most as many as have so many logits: 10,672 with 50,304 tokens


def measure_run(run, problems):
    """
    A run's settings -> what is known of its checkpoints, a list of dicts. The numbers of model.pt
    are in model.json beside it, and are measured if that is missing or older. They stay if the .pt
    is deleted. ckpt.pt counts only until its run has ended: then model.pt has the same weights.
    """
    folder = Path(run['run'])
    files = [*folder.glob('model*.pt'), *folder.glob('model*.json')]
    if not run['ended']:
        files += [*folder.glob('ckpt.pt'), *folder.glob('ckpt.json')]
    measured = []
    for name in sorted({file.stem for file in files}):
        checkpoint = folder / f'{name}.pt'
        numbers = folder / f'{name}.json'
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                if modified(checkpoint) > modified(numbers):
                    save(measure_checkpoint(checkpoint, run), str(numbers))
        except SystemExit:  # by train.check: no data, a damaged file
            problems.append(said.getvalue().split('error: ', 1)[-1].strip())
        except Exception as error:  # of many kinds: another model, for example
            problems.append(f'{checkpoint}: {type(error).__name__}: {error}')
        if numbers.exists():
            measured.append({'file': checkpoint.name, **read_json(numbers)})
    return measured


def modified(path):
    """When a file was written, 0 if there is none."""
    return path.stat().st_mtime if path.exists() else 0


def measure_checkpoint(path, run):
    """A .pt file and the settings of its run -> its step and measure_model of it."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    n = min(POSITIONS, run['test_tokens'])
    if device == 'cpu':
        n = min(n, CPU_LOGITS // run['vocab_size'])
    windows = load_windows(run['data'], run['val_tokens'], run['block_size'], n)
    print(f'measuring {path} at {windows[:, 1:].numel():,} positions', flush=True)

    saved = train.read_checkpoint(str(path))
    gpt = GPT(gpt_config(saved['config'])).to(device)
    gpt.load_state_dict(saved['model'])
    step = saved['step']
    del saved  # or the optimizer's moments would stay in memory
    return {'step': step, **measure_model(gpt, windows)}


@functools.cache  # most runs of a sweep have the same
def load_windows(data, val_tokens, block_size, n_positions):
    """The test windows (n, T + 1) int64 of a run, if its --data still has its val tokens."""
    test = train.Windows(data, 'val', block_size)
    check(test.n_tokens == val_tokens, f'--data={data} no longer has the val tokens of its runs')
    return torch.from_numpy(test[test.evenly_spaced(n_positions)])


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
    numbers['r_emb'] = distributions['r_emb']['mean']
    numbers['positions'] = len(stats['loss'])
    return {'numbers': numbers, 'distributions': distributions}


@torch.no_grad()
def measure_positions(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> a dict of statistics of each position, (n T,) each:
    those of GPT.loss; bf16_cost, the loss with BF16 logits minus the one with fp32 logits of the
    same weights; and centering_ratios.
    """
    gpt.eval()
    E = gpt.E.float()
    is_bf16 = gpt.config.logits_dtype == 'bfloat16'
    twin = copy.copy(gpt)  # the same weights with logits of the other dtype
    twin.config = dataclasses.replace(
        gpt.config, logits_dtype='float32' if is_bf16 else 'bfloat16')

    parts = []
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        targets = batch[:, 1:].flatten()
        h = gpt.hidden(batch[:, :-1]).flatten(0, 1)
        _, stats = gpt.loss(h, targets)
        _, of_twin = twin.loss(h, targets, with_stats=False)
        cost = stats['loss'] - of_twin['loss']
        stats['bf16_cost'] = cost if is_bf16 else -cost
        del stats['reg']  # of the training loss alone
        parts.append({**stats, **centering_ratios(h.float(), E)})
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


def describe_values(values):
    """Values (N,) -> a row of distributions.csv: mean, quartiles, extrema, two shares."""
    x = pd.Series(values.numpy())
    return {**x.describe(), 'below_1': (x < 1).mean(), 'above_0': (x > 0).mean()}


# -------- the quantities of Section 3
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


def norm_ratios(E):
    """E (V, H) -> r_emb = |e*_i| / |e_i| of each token, (V,), except for rows of zeros."""
    norms = E.norm(dim=1)
    norms_centered = (E - E.mean(dim=0)).norm(dim=1)
    return (norms_centered / norms)[norms > 0]


def centering_ratios(h, E):
    """h (N, H), E (V, H) -> r_log = max |l*_i| / max |l_i| (Eq. 11), r_cos, cos(mu, h): (N,)."""
    mu = E.mean(dim=0)
    E_star = E - mu  # next to a large mean, logits l_i - mu . h would lose their digits
    logit, cosine = largest_products(h, E)
    logit_star, cosine_star = largest_products(h, E_star)
    return {'r_log': logit_star / logit, 'r_cos': cosine_star / cosine,
            'cos_mu_h': F.cosine_similarity(h, mu[None], eps=TINY)}


def largest_products(h, E):
    """h (N, H), E (V, H) -> max_i |e_i . h| and, |h| left out, max_i |cos(e_i, h)|, (N,) each."""
    sizes = (h @ E.T).abs_()
    logit = sizes.amax(dim=1)
    sizes /= E.norm(dim=1).clamp_min(TINY)
    cosine = sizes.amax(dim=1)
    return logit.clamp_min(TINY), cosine.clamp_min(TINY)


# -------- what a run is called
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # the columns that a csv needs
OPTIONAL = '''run ended given n_params init_loss model_step mu_norm logit_mean logit_std cos_mu_h
logit_absmax r_emb r_cos r_log bf16_cost train_seconds device processes commit data torch'''.split()
OWN_COLUMNS = ['method', 'lam', 'size', 'weight_tying', 'lr', 'seed']
DEFAULT_LAM = {method: defaults.get('lam') for method, defaults in METHODS.items()}

# Runs that differ in one of TASK learn another task, or another amount of it
DATA = ['train_tokens', 'val_tokens']
TASK = [*DATA, 'steps', 'batch_size', 'block_size', 'vocab_size', 'test_tokens']
PAPER = {name: train.parser.get_default(name) for name in train.SETTINGS}
PAPER |= {'vocab_size': 50304, 'dtype': 'bfloat16', 'logits_dtype': 'bfloat16'}


def read_runs(path):
    """A csv file with REQUIRED columns -> named runs. Without a test_loss, a run was not finite."""
    runs = pd.read_csv(path, dtype={'run': str, 'method': str, 'size': str, 'given': str})
    for name in REQUIRED:
        check(name in runs, f'{path}: has no column {name}; it needs {", ".join(REQUIRED)}')
        check(name == 'test_loss' or runs[name].notna().all(), f'{path}: a {name} is empty')
    check(len(runs), f'{path}: has no runs')
    if 'run' not in runs:
        runs['run'] = [f'line {i}' for i in range(2, len(runs) + 2)]
    runs['size'] = runs['size'].str.strip()
    return name_runs(complete(runs.assign(ended=True)))


def complete(runs):
    """Rows of results.csv, in which all but REQUIRED may lack -> runs in the paper's order."""
    columns = [*REQUIRED, *OPTIONAL, *train.SETTINGS, *runs]
    runs = runs.reindex(columns=[*dict.fromkeys(columns)])  # each once
    runs['weight_tying'] = runs.weight_tying.astype(int)
    runs['tying'] = runs.weight_tying.map({0: 'untied', 1: 'tied'})
    runs['seed'] = runs.seed.fillna(train.parser.get_default('seed'))
    runs['given'] = runs.given.astype(object).fillna('')
    default_lam = runs.method.map(DEFAULT_LAM)
    runs['lam'] = runs.lam.fillna(default_lam).astype(float)
    runs['is_default_lam'] = runs.lam.isna() | (runs.lam == default_lam)

    # min(L, L0) of Eq. 21. A loss that is not finite counts as L0; nothing does if L0 is unknown
    runs['test_loss'] = runs.test_loss.mask(runs.test_loss.isna() & runs.ended, math.inf)
    runs['capped_loss'] = np.minimum(runs.test_loss, runs.init_loss.fillna(math.inf))

    rank = {name: i for i, name in enumerate([*SIZES, *METHODS])}  # other names come last
    return runs.sort_values(
        ['weight_tying', 'size', 'method', 'lam', 'lr', 'seed'], ignore_index=True,
        key=lambda column: column.map(rank) if column.name in ('size', 'method') else column)


def name_runs(runs):
    """
    Adds to `size` the settings of TASK that are not the paper's, as in "tiny, steps 1000", and a
    column `variant`: the method, λ if it is not the default, and the other settings that are not
    the paper's, as in "μ-loss λ=0.1, beta2 0.9". What all runs share is left out. `as_the_paper`:
    all that is known of a run is the paper's.
    """
    lams = runs.lam.map(' λ={:g}'.format).mask(runs.is_default_lam, '')
    runs = runs.assign(variant=runs.method.replace(NAMES) + lams, as_the_paper=True)
    for name in train.SETTINGS:
        if name in OWN_COLUMNS:
            continue
        if name in TASK or PAPER[name] is not None:
            is_shown = runs[name] != PAPER[name]
        else:  # its default follows from other settings: by whether it was given
            is_shown = runs.given.str.contains(rf'\b{name}\b')
        is_shown &= runs[name].notna()
        values = runs[name].convert_dtypes().astype(str)
        texts = (f', {name} ' + values).where(is_shown, '')
        if texts.nunique() > 1:
            runs['size' if name in TASK else 'variant'] += texts
        if name not in DATA:
            runs['as_the_paper'] &= ~is_shown

    runs['variant'] = runs.variant.str.replace('logits_dtype float32', 'fp32 logits')
    runs.loc[~runs.ended, 'variant'] += ', not finished'
    return runs


# -------- how runs are compared
PLACE = ['weight_tying', 'size', 'lr', 'seed']  # runs are compared where all of these agree


def of_methods(runs):
    """By which methods are compared: runs with the default λ, or all of a method without it."""
    has_default = runs.groupby(['weight_tying', 'size', 'method']).is_default_lam.transform('any')
    return runs[runs.is_default_lam | ~has_default]


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


def learning_rate_sensitivity(runs):
    """Runs -> rows of lrs.csv: LRS of each variant and seed that has two learning rates or more."""
    rows = []
    same = ['weight_tying', 'size', 'variant', 'seed']
    for _, part in with_marks(runs).groupby(same, sort=False):
        if len(part) > 1:
            rows.append(lrs_of_seed(part))
    return pd.DataFrame(rows, columns=[*dict.fromkeys([*runs, *LRS_COLUMNS])])


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
        paper = PAPER_LRS.lrs.get((first.tying, first['size'], first.variant), paper)
    return {**first, 'lrs': above_lowest / n, 'lrs_n1': above_lowest / (n - 1), 'paper': paper,
            'n_rates': n, 'rates': rates, 'diverged': runs.diverged.max(skipna=False)}


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
    timed = timed.assign(variant=timed.variant.str.replace(' λ=[^,]*', '', regex=True))
    is_baseline = timed.variant == 'baseline'
    timed['of_baseline'] = timed.train_seconds.where(is_baseline)
    of_baseline = timed.groupby(MACHINE, dropna=False).of_baseline.transform('mean')
    timed['added'] = timed.train_seconds / of_baseline - 1
    return timed[timed.added.notna() & ~is_baseline]


def beside_the_authors(runs):
    """The runs that the authors have too, with their numbers as `test_loss_of_theirs` and so on."""
    if not AUTHORS.exists():  # a fork may have deleted results/
        return runs.head(0)
    theirs = read_runs(AUTHORS).assign(**OF_THEIRS)
    # with soft-capping theirs are of the logits before the cap, ours of those after it
    theirs.loc[theirs.method == 'soft_capping', 'logit_mean'] = math.nan
    theirs = theirs[[*SAME_RUN, 'test_loss', 'mu_norm', 'logit_mean']]
    return runs[runs.as_the_paper].merge(theirs, on=SAME_RUN, suffixes=('', '_of_theirs'))


if __name__ == '__main__':
    main()
