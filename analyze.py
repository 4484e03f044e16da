"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu,
statistics of the logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a
sweep.

    python analyze.py out/demo                          # reads runs, writes results/demo/
    python analyze.py out/mine/model.pt                 # one checkpoint, of any run
    python analyze.py --results=results.csv --out=DIR   # tables and figures of such a csv alone

It writes results.csv, a row for each run; checkpoints.csv, a row for each checkpoint, also of runs
that have not ended; curves.csv, of the logs; distributions.csv, over positions or the vocabulary;
lrs.csv; and what tools/report.py draws. What is compared is compared over the learning rates and
seeds that the variants share. Symbols are model.py's; a star marks what is centered, e*_i = e_i -
mu. Losses are in nats per token. Where others share the CPUs, OMP_NUM_THREADS=1 may measure
several times faster.
"""
import argparse
import functools
import glob
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import train
from model import GPT, METHODS, SIZES, gpt_config, summarize  # METHODS: {name: default λ or None}
from tools import report
from tools.report import BEHIND, BESIDE_THEIRS, PLACE, TYING

# check exits with one line, read_json returns {} if there is no file, save writes atomically
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v11.json'  # in a run's folder; a new name if what is measured changes
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


def measure_embeddings(E):
    """E (V, H) -> what E alone tells: |mu|, the mean's share V |mu|^2 / |E|_F^2, and r_emb."""
    mu = E.mean(dim=0)
    share = len(E) * mu.square().sum() / E.square().sum()
    r_emb = norm_ratios(E).double().mean()
    return {'mu_norm': mu.norm().item(), 'mean_share': share.item(), 'r_emb': r_emb.item()}


def concatenate(parts):
    """A list of dicts of (n,) -> one dict of (N,), in float64 and on the CPU."""
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


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
        tokens, targets = batch[:, :-1], batch[:, 1:]
        losses = {}
        for dtype in (other_dtype, own_dtype):
            gpt.config.logits_dtype = dtype
            _, stats = gpt(tokens, targets)
            losses[dtype] = stats['loss']
        del stats['reg']  # of the training loss alone
        stats['bf16_cost'] = losses['bfloat16'] - losses['float32']

        h = gpt.hidden(tokens).flatten(0, 1).float()
        parts.append({**stats, **centering_ratios(h, E)})
    return concatenate(parts)


def describe_values(values):
    """Values (N,) -> a row of distributions.csv: mean, quartiles, extrema, two shares."""
    x = pd.Series(values.numpy())
    return {**x.describe(), 'below_1': (x < 1).mean(), 'above_0': (x > 0).mean()}


def measure_model(gpt, windows=None):
    """
    A GPT and test windows (n, T + 1) int64 -> `numbers`, a dict of floats, and `distributions`, a
    dict of describe_values, over the positions or, of r_emb, over the vocabulary. Without windows:
    of the weights alone. Whoever changes what is measured gives STATISTICS a new name, or runs
    that were measured before keep their old numbers.
    """
    E = gpt.E.detach()
    numbers = measure_embeddings(E)
    distributions = {'r_emb': describe_values(norm_ratios(E).double().cpu())}
    numbers['r_emb_below_1'] = distributions['r_emb']['below_1']
    if windows is None:
        return {'numbers': numbers, 'distributions': distributions}

    stats = measure_positions(gpt, windows)
    for name, values in stats.items():
        distributions[name] = describe_values(values)
    numbers |= summarize(stats, E)
    numbers['cross_entropy'] = numbers.pop('loss')  # on the test text, unlike the loss in a log
    numbers['r_cos_below_1'] = distributions['r_cos']['below_1']

    # Fact 3: r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token; NaN if there is none
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers['r_log_below_1_too'] = (r_log < 1).double().mean().item()
    return {'numbers': numbers, 'distributions': distributions}


# -------- a run's folder
@functools.cache  # most runs of a sweep have the same
def load_windows(data, block_size, test_tokens):
    """The test windows (n, T + 1) int64 of runs, None if --data has no val shards any more."""
    try:
        test = train.Windows(data, 'val', block_size)
    except SystemExit:  # its line says what is wrong
        return None
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


def measure_run(run):
    """
    Measures the checkpoints of a run, a dict of its settings whose `run` is its folder, or a .pt
    file -> {file name: its sha256 and what measure_checkpoint returns}, and notes on what cannot
    be measured. The numbers are kept in the folder: a file is measured again only if it has
    changed, and they stay when a file is gone or too large to copy, but for the ckpt.pt of a run
    that has ended.
    """
    path = Path(run['run'])
    files = sorted([*path.glob('model*.pt'), *path.glob('ckpt.pt')])
    if path.suffix == '.pt':
        files = [path]
    measured = read_json(path / STATISTICS)
    if not run['status'] and path / 'ckpt.pt' not in files:
        measured.pop('ckpt.pt', None)
    windows = load_windows(run['data'], run['block_size'], run['test_tokens'])

    notes = []
    for file in files:
        try:
            sha256 = hashlib.sha256(np.memmap(file, mode='r')).hexdigest()
            if measured.get(file.name, {}).get('sha256') == sha256:
                continue
            measured.pop(file.name, None)

            print(f'measuring {file}', flush=True)
            measured[file.name] = {'sha256': sha256, **measure_checkpoint(file, windows)}
            # Results of the weights alone are not kept, as the data may come back. The folder may
            # be read-only.
            if windows is not None and path.is_dir() and os.access(path, os.W_OK):
                save(measured, f'{path}/{STATISTICS}')
        except Exception as error:  # of many kinds: another model, a damaged file
            notes.append(f'{file} is not measured: {error} ({type(error).__name__})')
    return measured, notes


# -------- what a run is: the columns of results.csv
RESULTS = '''
    run method size n_params weight_tying lam cap lr seed steps batch_size block_size vocab_size
    test_tokens data_fingerprint dtype logits_dtype final_gain init_from init_loss test_loss
    model_step mu_norm mean_share logit_mean logit_mean_spread logit_std
    logit_absmax logit_max cos_mu_h r_emb r_cos r_log r_emb_below_1 r_cos_below_1 r_log_below_1_too
    bf16_cost train_seconds tokens_per_second device processes commit'''.split()
# Of a csv. Other columns may be absent: a seed, a λ and a flag of IN_NAMES then count as the
# default, and all else as unknown.
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
ADDED = ['status', 'setting', 'variant', 'capped_loss']  # not in results.csv
FLAGS = vars(train.parser.parse_args([]))  # {flag, which a fork may add: its default}
FLAGS |= {'dtype': 'bfloat16', 'logits_dtype': 'bfloat16'}  # the paper's, not the machine's

# Of one size and tying, only runs equal in these are compared.
COMPARABLE = ['data_fingerprint', 'steps', 'vocab_size', 'test_tokens']
# Flags that never appear in a run's name: they have a column of their own, or change no number.
NOT_IN_NAMES = {*COMPARABLE, 'method', 'lam', 'size', 'weight_tying', 'lr', 'seed',
                *train.MAY_CHANGE}
IN_NAMES = [flag for flag in FLAGS if flag not in NOT_IN_NAMES]
KNOWN = {*RESULTS, *FLAGS, *ADDED}  # any other column is a fork's own, for the table of runs


def as_text(value):
    """A setting as names have it; '' if it is unknown or None."""
    if value is None or value != value:  # NaN
        return ''
    if isinstance(value, str | list):
        return str(value)
    return f'{value:.12g}'


def flags_of(runs):
    """A column for each flag of IN_NAMES: its value as text, '' if default or unknown."""
    rows = []
    for run in runs.to_dict('records'):
        defaults = {**FLAGS, **SIZES.get(run['size'], {})}
        defaults['warmup'] = run['steps'] // 20
        if run['method'] in METHODS:
            defaults['cap'] = gpt_config({'method': run['method']}).cap
        row = {}
        for flag in IN_NAMES:
            value = as_text(run.get(flag))
            row[flag] = '' if value == as_text(defaults[flag]) else value
        rows.append(row)
    return pd.DataFrame(rows, runs.index)


def name_runs(runs):
    """
    Adds each run's name, `variant`: the method, λ if it is not the default, `setting` (the flags
    in which runs differ and that are not at their defaults), then the status.
    """
    setting = pd.Series('', runs.index, dtype=str)
    for flag, values in flags_of(runs).items():
        if values.nunique() > 1:
            texts = f', {flag} ' + values
            setting += texts.where(values != '', '')

    names = []
    for run in runs.itertuples():
        name = report.NAMES.get(run.method, run.method)
        if not math.isnan(run.lam) and run.lam != METHODS.get(run.method):
            name += f' λ={run.lam:g}'
        names.append(name)
    status = (', ' + runs.status).where(runs.status != '', '')
    variant = pd.Series(names, runs.index, dtype=str) + setting + status
    return runs.assign(setting=setting, variant=variant)


def sort_runs(runs):
    """Runs in the paper's order of tyings, sizes and methods, then others as they come."""
    keys = runs[['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']].copy()
    for name, order in (('size', SIZES), ('method', METHODS)):
        order = list(dict.fromkeys([*order, *runs[name]]))
        keys[name] = runs[name].map(order.index)
    keys = keys.sort_values([*keys])
    return runs.loc[keys.index].reset_index(drop=True)


def complete(runs):
    """Rows of settings and results -> named runs in order, with all of RESULTS."""
    own_columns = [name for name in runs if name not in RESULTS]
    runs = runs.reindex(columns=RESULTS + own_columns)
    runs = runs.replace([math.inf, -math.inf], math.nan)
    runs['weight_tying'] = runs.weight_tying.astype(int)
    runs['seed'] = runs.seed.fillna(FLAGS['seed'])
    runs['lam'] = runs.lam.fillna(runs.method.map(METHODS)).astype(float)

    # min(L, L0) of Eq. 21: a loss that is not finite counts as L0. Without L0 (unknown, or with
    # --init_from) no loss is capped.
    test_loss = runs.test_loss.fillna(math.inf)
    runs['capped_loss'] = np.minimum(test_loss, runs.init_loss.fillna(math.inf))

    return sort_runs(name_runs(runs))


# -------- csv files
def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


def read_csv(path):
    """A csv file -> its rows; what is a name stays text, even of digits."""
    return pd.read_csv(path, dtype=dict.fromkeys(['run', 'data_fingerprint', 'commit'], str))


def read_runs(path):
    """A csv with columns of RESULTS -> runs, see `complete`. An empty test_loss is not finite."""
    try:
        runs = read_csv(path)
    except (OSError, ValueError) as error:
        check(False, f'{path}: {error}')
    for name in REQUIRED:
        check(name in runs, f'{path}: has no column {name}; it needs {", ".join(REQUIRED)}')
    check(len(runs), f'{path}: has no runs')
    for name in ('weight_tying', 'lr', 'test_loss'):
        check(runs[name].dtype.kind in 'bif', f'{path}: {name} should have numbers only')
    for name in ('method', 'size', 'weight_tying', 'lr'):
        check(runs[name].notna().all(), f'{path}: a {name} is empty')
    if 'run' not in runs:
        runs['run'] = [f'line {i}' for i in range(2, len(runs) + 2)]
    return complete(runs.assign(status=''))


def read_side_table(results, name, runs):
    """The rows of these runs in a csv file beside results.csv, which an earlier analysis wrote."""
    path = Path(results).with_name(f'{name}.csv')
    if not path.exists() or path.stat().st_size < 2:  # of runs without models it is empty
        return pd.DataFrame()
    rows = read_csv(path)
    return rows[rows.run.isin(runs.run)]


# -------- a sweep's folders
def find_runs(paths):
    """Paths -> the .pt files among them, and the folders in them with a config.json, each once."""
    found = {}
    for top in paths:
        if top.endswith('.pt'):
            found[Path(top).resolve()] = Path(top)
        configs = glob.glob(f'{glob.escape(top)}/**/config.json', recursive=True)
        check(configs or top.endswith('.pt'), f'{top}: no run is there')
        for config in sorted(configs, key=len):  # of several links to a run, the shortest path
            folder = Path(config).parent
            found.setdefault(folder.resolve(), folder)
    return sorted(found.values())


def read_run(path):
    """
    A run's folder, or a .pt file -> its settings and results, a dict, and its log, a list of
    records. Its `status` is '' if the run has ended.
    """
    if path.suffix == '.pt':
        settings = train.read_checkpoint(str(path))['config']
        return {**settings, 'run': str(path), 'status': path.name}, []

    settings = read_json(path / 'config.json')
    results = read_json(path / 'result.json')
    status = '' if results else 'not finished'

    # at most some 1,000 records of the log, which are enough for a plot, and all of evaluations
    lines = (path / 'log.jsonl').read_text().splitlines()
    stride = math.ceil(len(lines) / 1000)
    log = []
    for i, line in enumerate(lines):
        record = json.loads(line)
        if i % stride == 0 or 'loss' not in record:
            log.append(record)
    return {**settings, **results, 'run': str(path), 'status': status}, log


OF_CHECKPOINT = ['run', 'method', 'variant', 'size', 'weight_tying', 'lr', 'seed']  # whose it is


def read_sweep(paths):
    """
    Reads and measures the runs in folders, and .pt files -> runs, with the statistics of their
    model.pt or, before there is one, of their last checkpoint; rows of curves.csv,
    distributions.csv and checkpoints.csv; notes on what is missing.
    """
    rows = []
    curves = []
    distributions = []
    measured = {}
    without_data = []
    notes = []
    found = find_runs(paths)
    for i, path in enumerate(found, 1):
        print(f'[{i}/{len(found)}] {path}', flush=True)
        try:
            run, log = read_run(path)
        except Exception as error:  # of many kinds: a file is damaged, or a run has just begun
            notes.append(f'{path} is left out: {error} ({type(error).__name__})')
            continue
        curves.append(pd.DataFrame(log).assign(run=run['run']))
        files, failures = measure_run(run)
        measured[run['run']] = files
        notes += failures

        last = files.get('model.pt')
        if run['status'] and files:
            last = max(files.values(), key=lambda file: file['step'])
        numbers = {}
        if last:
            numbers = {'model_step': last['step'], **last['numbers']}
            if 'r_cos' not in numbers:
                without_data.append(run['run'])
        if last and not run['status']:
            for name, values in last['distributions'].items():
                distributions.append({'run': run['run'], 'quantity': name, **values})

        # sampling alone shifts the loss by less than 5%
        loss = numbers.pop('cross_entropy', math.nan)
        if abs(loss / (run.get('test_loss') or math.nan) - 1) > 0.05:
            notes.append(f'{path}: measured on its --data, its loss is {loss:.4f}, which is not '
                         f'the test loss of the training, {run["test_loss"]:.4f}')
        settings = {name: run.get(name) for name in [*RESULTS, *IN_NAMES, 'status']}
        rows.append({**settings, 'device': run['device_name'], **numbers})
    check(rows, f'{paths[0]}: no run {"; ".join(notes[:3])}')
    if without_data:
        notes.append('Measured by their weights alone, as the val shards of their --data are not '
                     f'there: {", ".join(without_data)}')

    # None -> NaN, so that columns of numbers are floats
    runs = pd.DataFrame(rows)
    runs = complete(runs.where(runs.notna(), math.nan).infer_objects())
    checkpoints = []
    for run in runs[OF_CHECKPOINT].to_dict('records'):
        files = measured[run['run']]
        for file in sorted(files, key=lambda file: files[file]['step']):
            step, numbers = files[file]['step'], files[file]['numbers']
            checkpoints.append({**run, 'file': file, 'step': step, **numbers})
    return runs, pd.concat(curves), pd.DataFrame(distributions), pd.DataFrame(checkpoints), notes


# -------- which runs are compared, and how they are marked
def comparable(runs):
    """
    The runs that are compared: of those that have ended, for each size and tying, the largest
    group of runs with equal COMPARABLE columns, without duplicates. And [a note on the others].
    """
    ended = runs[runs.status == '']
    alike = []
    for _, rows in ended.groupby(['size', 'weight_tying']):
        sets = [part.index for _, part in rows.groupby(COMPARABLE, dropna=False, sort=False)]
        alike += [*max(sets, key=len)]  # of several, the first
    compared = ended.loc[sorted(alike)]
    compared = compared[~compared.duplicated(['variant', *PLACE, 'seed'])]
    others = ended.drop(compared.index).run
    if others.empty:
        return compared, []
    names = ', '.join(COMPARABLE)
    return compared, [f'Not compared, as their {names} are not those of most runs of their size '
                      'and tying, or another run has their name, size, tying, learning rate and '
                      f'seed: {", ".join(others)}']


def of_default_lam(runs):
    """The runs that methods are compared by: of the default λ, or of all if none has it."""
    is_default = runs.lam.isna() | (runs.lam == runs.method.map(METHODS))
    same_but_lam = [runs['size'], runs.weight_tying, runs.method, runs.setting]
    has_default = is_default.groupby(same_but_lam).transform('any')
    return runs[is_default | ~has_default]


def of_several_lam(runs):
    """The runs that λ are compared by: of the methods that ran with several, at any size."""
    n_lam = runs.groupby(['weight_tying', 'method', 'setting']).lam.transform('nunique')
    return runs[(n_lam > 1) & runs.lam.notna()]


def losses_by_seed(runs, columns):
    """Test losses: a row for each seed that all of `columns` have, inf if one is not finite."""
    losses = runs.assign(loss=runs.test_loss.fillna(math.inf))
    return losses.pivot(index='seed', columns=columns, values='loss').dropna()


def with_marks(runs):
    """
    Adds `behind`: 1 if a seed of the variant is not finite, or if its mean test loss is over 1%
    above the lowest of the variants with the same size, tying and learning rate; 0 if not; NaN if
    it is alone there, or they have no seed in common. Means are over the seeds that all of them
    have. The paper calls 1 diverged, as does `_div` in
    results/Analyze_All_Models_Performance.ipynb of its code.
    """
    behind = pd.Series(math.nan, runs.index)
    for _, rows in runs.groupby(PLACE):
        means = losses_by_seed(rows, 'variant').mean()
        if len(means) > 1 and means.notna().all():
            above = (means - means.min()) / means.min()
            behind[rows.index] = rows.variant.map(above > BEHIND).astype(float)

    losses = runs.groupby([*PLACE, 'variant']).test_loss
    is_finite = losses.transform('count') == losses.transform('size')
    return runs.assign(behind=behind.where(is_finite, 1.0))


# -------- learning rate sensitivity, of the lines of a table
LINE_OF_METHODS = ['weight_tying', 'size']  # of Tables 2 and 5: the cells are variants
LINE_OF_LAM = ['weight_tying', 'size', 'method', 'setting']  # of Table 4: the cells are λ
MIN_RATES = 3  # with fewer learning rates a variant has no LRS
MIN_LEARNED = 0.1  # nats below its initial loss, or a run learned nothing
LRS_COLUMNS = '''size weight_tying variant method lam n_params lrs lrs_n1 paper n_rates rates
                 behind seeds lrs_n1_lowest lrs_n1_highest'''.split()  # of lrs.csv
TOOLS = Path(__file__).parent / 'tools'
PAPER_RATES = '0.0003 0.001 0.003 0.01 0.03 0.1 0.3'  # Eq. 18
PAPER_LRS = pd.read_csv(TOOLS / 'paper_lrs.csv', index_col=['tying', 'size', 'variant'])


def in_common(runs):
    """
    The runs of a line that LRS is computed from: at the learning rates that all of its variants
    have, and of the seeds that all of them have at these rates. Without variants of fewer than
    three rates, or at most half as many as another, which would take away most of the others'
    runs.
    """
    n_rates = runs.groupby('variant').lr.transform('nunique')
    runs = runs[(n_rates >= MIN_RATES) & (2 * n_rates > n_rates.max())]
    n_variants = runs.variant.nunique()
    runs = runs[runs.groupby('lr').variant.transform('nunique') == n_variants]
    n_rates = runs.lr.nunique()
    runs = runs[runs.groupby('seed').seed.transform('size') == n_variants * n_rates]
    return runs if n_rates >= MIN_RATES else runs[:0]


def listed(values):
    return ' '.join(as_text(value) for value in sorted({*values}))


def notes_on_left_out(runs, common):
    """The runs of a line, and in_common of them -> [a note if any is left out]."""
    first = runs.iloc[0]
    where = f'{first["size"]}, {TYING[first.weight_tying]}'
    if common.empty:
        return [f'No LRS of {where} ({"; ".join(runs.variant.unique())}): it needs at '
                f'least {MIN_RATES} learning rates, with one seed, that all variants share.']
    left_out = []
    for variant, part in runs.drop(common.index).groupby('variant', sort=False):
        left_out.append(f'{variant} ({len(part)})')
    if not left_out:
        return []
    compared = ', '.join(common.variant.unique())
    over = f'η = {listed(common.lr)} and seed {listed(common.seed)}'
    return [f'The LRS of {where} ({compared}) is over {over}, which all of them have. Runs left '
            f'out: {", ".join(left_out)}.']


def sums_above_lowest(runs):
    """
    The runs of a line -> sums over the learning rates of min(L, L0) - min L, in nats, Eq. 21
    without dividing by n: a row for each seed, a column for each variant. NaN if a seed learned
    something at none of the rates: its losses hardly vary, and it would score about 0, the best;
    or if a loss is not finite and L0 is unknown.
    """
    losses = runs.pivot(index='lr', columns=['variant', 'seed'], values='capped_loss')
    sums = (losses - losses.min()).sum(skipna=False).replace(math.inf, math.nan)
    initial = runs.groupby(['variant', 'seed']).init_loss.min()
    nothing_learned = losses.min() - initial >= -MIN_LEARNED
    return sums.mask(nothing_learned).unstack('variant')


def lowest_lrs(lrs):
    """
    LRS, a row for each seed and a column for each variant -> the variants to print bold: those of
    the lowest mean, if no other has a seed as low as the highest of theirs. All as the table
    prints them.
    """
    if lrs.shape[1] < 2:
        return []
    lrs = lrs.dropna(axis='columns')
    means = lrs.mean().map('{:.3f}'.format).astype(float)
    printed = lrs.map('{:.3f}'.format).astype(float)
    is_best = means == means.min()
    highest = printed.loc[:, is_best].max().max()
    if (printed.loc[:, ~is_best] <= highest).any(axis=None):
        return []
    return [*means.index[is_best]]


def published_lrs(row):
    """The number of the paper's Tables 2, 4 and 5 for a row of lrs.csv; NaN if they have none."""
    if row.rates != PAPER_RATES or row.steps != 100_000:
        return math.nan
    return PAPER_LRS.lrs.get((TYING[row.weight_tying], row.size, row.variant), math.nan)


def lrs_of_line(runs):
    """Runs of the same learning rates and seeds -> a row of lrs.csv for each variant."""
    n = runs.lr.nunique()
    sums = sums_above_lowest(runs)
    lrs_n1 = sums / (n - 1)

    by_variant = with_marks(runs).groupby('variant', sort=False)
    table = by_variant.first()
    table['behind'] = by_variant.behind.max()
    table['lrs'] = sums.mean(skipna=False) / n
    table['lrs_n1'] = lrs_n1.mean(skipna=False)
    table['lrs_n1_lowest'] = lrs_n1.min()
    table['lrs_n1_highest'] = lrs_n1.max()
    table['seeds'] = len(lrs_n1)
    table['n_rates'] = n
    table['rates'] = listed(runs.lr)
    table['lowest'] = table.index.isin(lowest_lrs(lrs_n1))
    table = table.reset_index()
    table['paper'] = [published_lrs(row) for row in table.itertuples()]
    return table


def learning_rate_sensitivity(runs, by=LINE_OF_METHODS):
    """
    Computes LRS, in nats, of each variant in each line of a table; the runs of a line agree in the
    columns `by`. What is in a line is compared, see in_common. LRS are means over seeds: `lrs` is
    the mean over n learning rates of min(L, L0) - min L (Eq. 21), `lrs_n1` their sum / (n - 1), as
    in the published tables; `paper` is what those have. `behind` is 1 if with_marks marks the
    variant at one or more of the rates, `lowest` is for bold. Returns the rows of lrs.csv with the
    other columns of the variants' first runs, and notes on what is left out.
    """
    columns = runs.columns.union([*LRS_COLUMNS, 'lowest'])
    tables = []
    notes = []
    for _, part in runs.groupby(by, sort=False, dropna=False):
        common = in_common(part)
        notes += notes_on_left_out(part, common)
        if len(common):
            tables.append(lrs_of_line(common))
    if not tables:
        return pd.DataFrame(columns=columns), notes
    return pd.concat(tables, ignore_index=True), notes


# -------- what a method costs in time
PAPER_OVERHEAD = pd.read_csv(TOOLS / 'paper_overhead.csv', index_col=['tying', 'size', 'variant'])
TIMED = ['size', 'weight_tying', 'device', 'processes']  # where times are compared
MIN_SECONDS = 600  # shorter runs differ by more than the methods do
SAME_SPEED = 1.1  # times of one method that differ by more: the machine was probably shared


def overhead(runs):
    """
    How much longer a method trains than the baseline where all of TIMED is the same (Table 6), a
    row each: `added` and the paper's, NaN if it has none, are 0.01 for 1% more. Times are means
    over learning rates, seeds and λ, of runs without a `setting`. Left out are short runs, methods
    of one run, and of unsteady times.
    """
    is_timed = (runs.train_seconds > MIN_SECONDS) & runs.test_loss.notna() & (runs.setting == '')
    timed = runs[is_timed]
    timed = timed.assign(device=timed.device.map(as_text), processes=timed.processes.map(as_text))
    seconds = timed.groupby([*TIMED, 'method'], sort=False).train_seconds
    is_steady = (seconds.count() > 1) & (seconds.max() < SAME_SPEED * seconds.min())
    means = seconds.mean()[is_steady].reset_index()

    baseline = means[means.method == 'baseline'].drop(columns='method')
    others = means[means.method != 'baseline']
    rows = others.merge(baseline, on=TIMED, suffixes=('', '_of_baseline'))
    rows['added'] = rows.train_seconds / rows.train_seconds_of_baseline - 1
    rows['variant'] = rows.method.replace(report.NAMES)
    cells = zip(rows.weight_tying.map(TYING), rows['size'], rows.variant, strict=True)
    rows['paper'] = [PAPER_OVERHEAD.percent.get(cell, math.nan) / 100 for cell in cells]
    return rows


# -------- the authors' runs
AUTHORS = Path(__file__).parent / 'results/authors/results.csv'
OF_THEIRS = {'batch_size': 64, 'block_size': 2048, 'vocab_size': 50304}  # not in their csv
SAME_RUN = ['size', 'weight_tying', 'method', 'lam', 'lr', 'steps', *OF_THEIRS]


def beside_the_authors(runs):
    """
    Those of the runs that the paper's authors have too, where all other flags are at their
    defaults. Theirs are `test_loss_of_theirs` and so on, for each of BESIDE_THEIRS.
    """
    if not AUTHORS.exists():
        return runs[:0]
    theirs = read_runs(AUTHORS).assign(**OF_THEIRS)
    # with soft-capping theirs are of the logits before the cap, ours of those after it
    theirs.loc[theirs.method == 'soft_capping', 'logit_mean'] = math.nan
    is_default = (flags_of(runs) == '').all(axis=1)
    return runs[is_default].merge(theirs[[*SAME_RUN, *BESIDE_THEIRS]], on=SAME_RUN,
                                  suffixes=('', '_of_theirs'))


# -------- what is said of the runs
def what_was_run(runs):
    """A paragraph on the settings of runs."""
    not_finite = (runs.status == '') & runs.test_loss.isna()
    parts = [f'Runs: {len(runs)}, {not_finite.sum()} of which ended without a finite test loss.']
    for name in ('size', 'weight_tying', 'method', 'lr', 'seed', 'steps', 'device'):
        values = runs[name].dropna().unique()
        if len(values):
            parts.append(f'{name}: {", ".join(map(as_text, values))}.')
    for flag, values in flags_of(runs).items():
        # those in which runs differ are in their names
        if values.nunique() == 1 and values.iloc[0]:
            parts.append(f'{flag}: {values.iloc[0]}.')
    return ' '.join(parts)


def make_headlines(runs, lrs):
    """A line for each size and tying: its lowest test loss, and the variants of the lowest LRS."""
    lines = []
    for (tying, size), rows in runs.groupby(['weight_tying', 'size'], sort=False):
        losses = losses_by_seed(rows, ['variant', 'lr'])
        means = losses.mean()
        if losses.empty:
            line = 'test losses are not compared, as no seed has all runs'
        elif means.min() == math.inf:
            line = 'no test loss is finite'
        else:
            variant, lr = means.idxmin()
            line = f'the lowest test loss is {means.min():.4f}, of {variant} at η = {lr:g}'
            line += f' (seed {listed(losses.index)})'

        best = lrs[lrs.lowest.astype(bool)]
        best = best[(best['size'] == size) & (best.weight_tying == tying)]
        if len(best):
            names = ' and '.join(best.variant)
            line += f'; the lowest LRS is {best.lrs_n1.min():.3f}, of {names}'
            if best.seeds.max() == 1:
                line += ' (one seed)'
        lines.append(f'{size}, {TYING[tying]}: {line}.')
    return lines


def notes_on_largest_mean(runs):
    """[a note on the run of the largest mean logit, and on what BF16 logits cost there], or []."""
    # a run that was not finite has statistics of its last checkpoint, even of step 0
    not_finite = (runs.status == '') & runs.test_loss.isna()
    means = runs.logit_mean[~not_finite].dropna()
    if means.empty:
        return []
    run = runs.loc[means.abs().idxmax()]
    note = (f'The largest mean logit is {run.logit_mean:.1f}, of {run.variant}, {run["size"]}, '
            f'{TYING[run.weight_tying]}, at η = {run.lr:g}.')
    if not math.isnan(run.bf16_cost):
        cost = round(run.bf16_cost, 2) + 0.0  # never -0.00
        note += f' With BF16 logits its loss differs by {cost:+.2f} nats from that with fp32.'
    return [note]


# -------- the program
parser = argparse.ArgumentParser(
    usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__, allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('runs', nargs='*', type=os.path.expanduser,
    help='folders of runs or sweeps, as out/demo, or .pt files of runs')
add('--results', type=os.path.expanduser, metavar='FILE.csv', help='a csv of runs instead')
add('--out', type=os.path.expanduser, help='folder to write to (default: results/NAME)')


def default_out(args):
    """results/NAME, with NAME of the folders or of the csv file; of DIR/results.csv it is DIR."""
    inputs = args.runs or [args.results.removesuffix('.csv').removesuffix('/results')]
    names = []
    for name in inputs:
        path = Path(name).resolve()
        names.append(f'{path.parent.name}-{path.stem}' if path.suffix == '.pt' else path.name)
    return f'results/{"+".join(names)}'


def main(argv=None):
    """Reads runs, or the results of runs, and writes what was measured and how they compare."""
    args = parser.parse_args(argv)
    check(bool(args.runs) != bool(args.results), 'give run folders, or --results')
    out = Path(args.out or default_out(args))

    if args.runs:
        runs, curves, distributions, checkpoints, notes = read_sweep(args.runs)
        ended = runs[runs.status == '']
        write_csv(out / 'results.csv', ended.drop(columns=ADDED))
        # without runs that have no row there; 7 digits are enough for a plot
        write_csv(out / 'curves.csv', curves[curves.run.isin(ended.run)], '%.7g')
        write_csv(out / 'distributions.csv', distributions)
        write_csv(out / 'checkpoints.csv', checkpoints)
    else:
        runs = read_runs(args.results)
        notes = []
        curves = read_side_table(args.results, 'curves', runs)
        distributions = read_side_table(args.results, 'distributions', runs)
        checkpoints = read_side_table(args.results, 'checkpoints', runs)

    own_columns = [name for name in runs if name not in KNOWN]
    compared, not_compared = comparable(runs)
    is_left = (runs.status == '') & ~runs.index.isin(compared.index)
    runs.loc[is_left, 'variant'] += ', not compared'
    runs = report.with_looks(runs)
    compared = runs.loc[compared.index]

    # each with the marks among its own runs; a note that several have is given once
    of_methods = with_marks(of_default_lam(compared))
    lrs_methods, left_out = learning_rate_sensitivity(of_methods)
    where = dict.fromkeys(left_out, 'Table of methods')

    of_lam = with_marks(of_several_lam(compared))
    lrs_lam, left_out = learning_rate_sensitivity(of_lam, LINE_OF_LAM)
    for note in left_out:
        where.setdefault(note, 'Tables of λ')

    # Figure 8 compares all λ of all methods
    lrs_figure, left_out = learning_rate_sensitivity(of_lam)
    for note in left_out:
        where.setdefault(note, 'Figure of λ')

    rows = lrs_methods.assign(table='methods').to_dict('records')
    rows += lrs_lam.assign(table='λ').to_dict('records')
    write_csv(out / 'lrs.csv', pd.DataFrame(rows, columns=[*LRS_COLUMNS, 'table']))

    # in the order of the page
    items = report.authors_tables(beside_the_authors(runs[runs.status == '']))
    for tying in sorted({*compared.weight_tying}):
        items += report.methods_items(of_methods, lrs_methods, tying)
        items += report.lam_items(of_lam, lrs_lam, lrs_figure, tying)
    for tying in sorted({*compared.weight_tying}):
        items += report.distribution_figures(of_methods, distributions, tying)
    items += report.overhead_tables(overhead(compared))
    items += report.seed_tables(compared)
    items += report.curve_figures(runs, curves)
    items += report.checkpoint_figures(runs, checkpoints)
    runs = runs.assign(behind=with_marks(compared).behind)
    items.append(report.run_table(runs, own_columns))

    headlines = make_headlines(compared, lrs_methods)
    left_out = [f'{place}: {note}' for note, place in where.items()]
    notes = [*notes_on_largest_mean(runs), *left_out, *not_compared, *notes]
    unfinished = runs[runs.status == 'not finished'].run
    if len(unfinished):
        notes.append(f'Not finished: {", ".join(unfinished)}')
    report.write(out, what_was_run(runs), headlines, notes, items)


if __name__ == '__main__':
    main()
