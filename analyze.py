"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu, statistics of the
logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a sweep.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs

It writes results.csv, a row for each run; checkpoints.csv, a row for each checkpoint, also of runs that have
not ended; curves.csv, of the logs; distributions.csv, over positions or the vocabulary; lrs.csv; and what
tools/report.py draws. Symbols are model.py's; a star marks what is centered, e*_i = e_i - mu. Losses are in
nats per token. Where others share the CPUs, OMP_NUM_THREADS=1 may measure several times faster.
"""
import argparse
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import train
from model import GPT, METHODS, SIZES, gpt_config, summarize  # METHODS: {name: its default λ or None}
from tools import report

# check exits with one line, read_json returns {} if there is no file, save writes atomically
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v10.json'  # kept in a run's folder; a new name if what is measured changes
TOOLS = Path(__file__).parent / 'tools'
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


# -------- the quantities of Section 3
def norm_ratios(E):
    """E (V, H) -> r_emb = |e*_i| / |e_i| of each token, (V,); rows of zeros, such as padding, have none."""
    norms = E.norm(dim=1)
    norms_centered = (E - E.mean(dim=0)).norm(dim=1)
    return (norms_centered / norms)[norms > 0]


def largest_product(h, X):
    """h (N, H), X (V, H) -> max_i |x_i . h| of each position, (N,), without a copy of the products."""
    return torch.linalg.vector_norm(h @ X.T, ord=math.inf, dim=1).clamp_min(TINY)


def centering_ratios(h, E):
    """h (N, H), E (V, H) -> (N,) each: r_log = max |l*_i| / max |l_i| (Eq. 11, no cap), r_cos, cos(mu, h)."""
    mu = E.mean(dim=0)
    E_star = E - mu  # next to a large mean, the difference of the logits l_i - mu . h would lose its digits
    units = F.normalize(E, dim=1, eps=TINY)  # |h| cancels in r_cos
    units_star = F.normalize(E_star, dim=1, eps=TINY)
    return {
        'r_log': largest_product(h, E_star) / largest_product(h, E),
        'r_cos': largest_product(h, units_star) / largest_product(h, units),
        'cos_mu_h': F.cosine_similarity(h, mu[None], eps=TINY),
    }


def measure_embeddings(E):
    """What can be measured from E (V, H) alone: |mu|, the mean's share V |mu|^2 / |E|_F^2, and r_emb."""
    mu = E.mean(dim=0)
    share = len(E) * mu.square().sum() / E.square().sum()
    r_emb = norm_ratios(E).double().mean()
    return {'mu_norm': mu.norm().item(), 'mean_share': share.item(), 'r_emb': r_emb.item()}


def concatenate(parts):
    """A list of dicts of (n,) -> one dict of (N,), in float64 and on the CPU."""
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


def cross_entropy_with(gpt, tokens, targets, logits_dtype):
    """tokens, targets (B, T) -> the cross entropy of each position, (B T,), with logits in this dtype."""
    own_config = gpt.config
    gpt.config = replace(own_config, logits_dtype=logits_dtype)  # GPT.logits reads it there
    logits = gpt.logits(tokens).flatten(0, 1)
    gpt.config = own_config
    return F.cross_entropy(logits, targets.flatten(), reduction='none')


def estimate_bf16_cost(mean, spread):
    """
    What BF16 logits cost in nats, by the estimate of results/mean_logit, which holds up to means of 2,048.
    The positions' mean logits are taken to be normal, with this mean and standard deviation `spread`.

    BF16 keeps 8 significant bits, so the logits around a mean m are s = 2^(floor(log2 |m|) - 7) apart. Their
    rounding errors are uniform in +-s/2, and log Z grows by log of the mean of exp(error), which is
    log(sinh(s/2) / (s/2)).
    """
    quantiles = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    means = mean + spread * torch.special.ndtri(quantiles)
    half = 2 ** (means.abs().clamp(1e-3).log2().floor() - 8)  # s / 2
    return (half.sinh() / half).log().mean().item()


@torch.no_grad()
def measure_positions(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> a dict of statistics of each position, (n T,) each: those of
    head_loss and of centering_ratios, cross_entropy, and bf16_cost, which is the cross entropy with BF16
    logits minus the one with fp32 logits. The three of centering_ratios are of e_i . h alone, the others of
    the model's own logits.
    """
    gpt.eval()
    E = gpt.E
    own_dtype = gpt.config.logits_dtype
    # gpt(), cross_entropy_with and gpt.hidden each run the whole model: a fork may have changed forward,
    # logits or hidden, so none of these is computed from another.
    parts = []
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        _, stats = gpt(tokens, targets)
        del stats['reg']  # of the training loss alone

        # cross entropy anew: a fork may have put another loss into head_loss of model.py
        losses = {}
        for dtype in {own_dtype, 'bfloat16', 'float32'}:
            losses[dtype] = cross_entropy_with(gpt, tokens, targets, dtype)
        stats['cross_entropy'] = losses[own_dtype]
        stats['bf16_cost'] = losses['bfloat16'] - losses['float32']

        h = gpt.hidden(tokens).flatten(0, 1).float()
        parts.append({**stats, **centering_ratios(h, E.float())})
    return concatenate(parts)


def describe_values(values):
    """Values (N,) -> a row of distributions.csv: count, mean, std, quartiles, extrema and two shares."""
    x = pd.Series(values.numpy())
    return {**x.describe(), 'below_1': (x < 1).mean(), 'above_0': (x > 0).mean()}


def measure_model(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> `numbers`, a dict of floats for results.csv and
    checkpoints.csv (each leaves out some of the losses), and `distributions`, a dict of describe_values, over
    the positions or, of r_emb, over the vocabulary. Whoever changes what is measured gives STATISTICS a new
    name, or runs that were measured before keep their old numbers.
    """
    E = gpt.E.detach()
    stats = measure_positions(gpt, windows)
    # its mean only: its distribution is that of `loss`, unless a fork has changed head_loss
    cross_entropy = stats.pop('cross_entropy').mean().item()

    per_value = {**stats, 'r_emb': norm_ratios(E).double().cpu()}
    distributions = {name: describe_values(values) for name, values in per_value.items()}

    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token; NaN if no r_cos is below 1
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers = {
        **summarize(stats, E),
        **measure_embeddings(E),  # mu_norm is summarize's too: hf.py calls this without positions
        'r_emb_below_1': distributions['r_emb']['below_1'],
        'r_cos_below_1': distributions['r_cos']['below_1'],
        'r_log_below_1_too': (r_log < 1).double().mean().item(),
        'cross_entropy': cross_entropy,
    }
    # not with a cap or norm_softmax: they change the logits after they are rounded
    if not gpt.config.cap and gpt.config.head_mode != 'norm_softmax':
        spread = numbers['logit_mean_spread']
        numbers['bf16_estimate'] = estimate_bf16_cost(numbers['logit_mean'], spread)
    return {'numbers': numbers, 'distributions': distributions}


# -------- a run's folder
def checkpoints_in(folder):
    """The checkpoints in a run's folder: those kept on the way, by step, then ckpt.pt or model.pt."""
    steps = {}
    for path in folder.glob('model_*.pt'):
        step = path.stem.removeprefix('model_')
        if step.isdigit():
            steps[int(step)] = path
    last = [folder / name for name in ('ckpt.pt', 'model.pt') if (folder / name).exists()]
    return [steps[step] for step in sorted(steps)] + last


def load_windows(settings):
    """The test windows (n, T + 1) int64 of a run, by its config.json. Raises if the shards have changed."""
    data = train.open_data(argparse.Namespace(**settings))  # [train, test]
    if train.fingerprint(data) != settings['data_fingerprint']:
        raise ValueError(f'{settings["data"]} does not hold the shards of the training')
    test = data[1]
    ids = test.evenly_spaced(min(POSITIONS, settings['test_tokens']))
    return torch.from_numpy(test[ids])


def measure_checkpoint(path, run_id, windows):
    """
    A run's .pt file -> its step and measure_model of it, on a GPU if there is one. Raises if the file is of
    another run.
    """
    saved = train.read_checkpoint(str(path))
    if saved['config']['run_id'] != run_id:
        raise ValueError(f'{path.name} is of another run: its run_id differs from that of config.json')
    gpt = GPT(gpt_config(saved['config'])).to('cuda' if torch.cuda.is_available() else 'cpu')
    gpt.load_state_dict(saved['model'])
    step = saved['step']
    del saved  # or the optimizer's moments would stay in memory
    return {'step': step, **measure_model(gpt, windows)}


def measure_run(folder):
    """
    Measures each checkpoint of a run -> {file name: its sha256 and what measure_checkpoint returns}, and
    notes on those that cannot be measured. The numbers are kept in the run's folder: a file is measured again
    only if it has changed, and they stay when a model's file is gone, which may be too large to be copied.
    """
    settings = read_json(folder / 'config.json')
    kept = read_json(folder / STATISTICS)
    if kept.get('run_id') != settings['run_id']:
        kept = {'run_id': settings['run_id'], 'checkpoints': {}}
    measured = kept['checkpoints']
    if not (folder / 'ckpt.pt').exists():
        measured.pop('ckpt.pt', None)  # the run has ended, so it is gone for good

    notes = []
    windows = None  # read once, if there is something to measure
    for path in checkpoints_in(folder):
        try:
            sha256 = hashlib.sha256(np.memmap(path, mode='r')).hexdigest()
            if measured.get(path.name, {}).get('sha256') == sha256:
                continue
            measured.pop(path.name, None)

            print(f'measuring {path}', flush=True)
            if windows is None:
                windows = load_windows(settings)
            checkpoint = measure_checkpoint(path, settings['run_id'], windows)
            measured[path.name] = {'sha256': sha256, **checkpoint}
            if os.access(folder, os.W_OK):  # runs may be kept where nobody may write
                save(kept, f'{folder}/{STATISTICS}')
        except (Exception, SystemExit) as error:  # of many kinds, with another model or damaged data
            notes.append(f'{path} is without statistics: {error} ({type(error).__name__})')
    return measured, notes


# -------- what a run is: the columns of results.csv
RESULTS = '''
    run method size n_params weight_tying lam cap lr seed steps batch_size block_size vocab_size test_tokens
    data_fingerprint dtype logits_dtype final_gain init_from init_loss test_loss model_step largest_rise
    rise_step mu_norm mean_share logit_mean logit_mean_spread logit_std logit_absmax logit_max cos_mu_h r_emb
    r_cos r_log r_emb_below_1 r_cos_below_1 r_log_below_1_too bf16_cost bf16_estimate train_seconds
    tokens_per_second device processes commit'''.split()
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # other cells may be empty: unknown
TEXTS = ['run', 'method', 'size', 'data_fingerprint', 'dtype', 'logits_dtype', 'init_from', 'device',
         'commit']
FLAGS = vars(train.parser.parse_args([]))  # {flag of train.py, which a fork may add to: its default}
FLAGS |= {'dtype': 'bfloat16', 'logits_dtype': 'bfloat16'}  # the paper's; train.py's depend on the machine
KNOWN = {*RESULTS, *FLAGS, *train.MAY_CHANGE}  # any other column is a fork's own

# Runs of one size and tying share these, or their losses could not be compared.
COMPARABLE = ['data_fingerprint', 'steps', 'vocab_size', 'test_tokens']
# A run's name tells each flag in which runs differ, except these; so also a flag that a fork adds.
NOT_IN_NAMES = {
    *COMPARABLE, *train.MAY_CHANGE,
    'method', 'lam', 'size', 'weight_tying', 'lr', 'seed',  # have columns of their own
    'log_every', 'eval_every', 'eval_tokens'}  # change only what is logged
IN_NAMES = [flag for flag in FLAGS if flag not in NOT_IN_NAMES]
ADDED = ['variant', 'setting', 'rounding', 'capped_loss']  # the columns that `complete` adds


def as_text(value):
    """A setting as names have it; '' if it is unknown or None."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ''
    return f'{value:.12g}'


def defaults_of(run):
    """A run's dict -> {flag of IN_NAMES: what the run has if the flag was not given, as text}."""
    defaults = {**FLAGS, **SIZES.get(run['size'], {})}
    defaults['warmup'] = run['steps'] // 20
    defaults['cap'] = default_cap(run['method'])
    return {flag: as_text(defaults[flag]) for flag in IN_NAMES}


def default_lam(method):
    """λ, in six digits, of a method that is given none; NaN if it has no λ or is not in METHODS."""
    lam = METHODS.get(method)
    return math.nan if lam is None else float(f'{lam:g}')


def default_cap(method):
    """The cap of a method that is given none; NaN if it has none or is not in METHODS."""
    cap = gpt_config({'method': method}).cap if method in METHODS else None
    return math.nan if cap is None else cap


def fill_in(runs):
    """Rows of settings and results -> all columns of RESULTS, of the right types, with known defaults."""
    runs = runs.reindex(columns=list(dict.fromkeys([*RESULTS, *runs])))
    runs = runs.replace([math.inf, -math.inf], math.nan)  # no number that is not finite is compared or drawn
    runs[TEXTS] = runs[TEXTS].astype(object).fillna('')
    line_numbers = [f'line {i}' for i in range(2, len(runs) + 2)]  # of a csv file, after its header
    runs['run'] = runs.run.where(runs.run != '', line_numbers)
    runs['seed'] = runs.seed.fillna(0)
    runs['cap'] = runs.cap.fillna(runs.method.map(default_cap))

    # λ of a method without one is what a tracker logs of every run: nothing reads it
    lams = []
    for method, lam in zip(runs.method, runs.lam, strict=True):
        if method in METHODS and METHODS[method] is None:
            lam = math.nan
        elif pd.isna(lam):
            lam = default_lam(method)
        lams.append(lam)
    runs['lam'] = lams

    # six digits, so that 0.1 + 0.2 and 0.3 are one learning rate
    runs[['lr', 'lam']] = runs[['lr', 'lam']].map('{:g}'.format).astype(float)

    # min(L, L0) of Eq. 21. fmin skips NaN: a loss that is not finite counts as L0, and without L0 (unknown,
    # or with --init_from) no loss is capped.
    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)
    return runs


def refuse(wrong, message):
    """If there are runs `wrong`, ends the program: names the first of them and says what is wrong."""
    if len(wrong):
        check(False, f'{wrong.run.iloc[0]}: {message}')


def check_values(runs):
    """Refuses runs whose method, size, learning rate, tying or losses cannot be."""
    for name in ('method', 'size'):
        refuse(runs[runs[name] == ''], f'its {name} is empty')
    refuse(runs[~(runs.lr > 0)], 'its lr is not a positive number')
    refuse(runs[~runs.weight_tying.isin([0, 1])], 'its weight_tying is neither 0 nor 1')
    refuse(runs[runs.capped_loss <= 0], 'its test_loss is not positive')
    unknown_loss = runs.capped_loss.isna() & (runs.init_from == '')
    refuse(runs[unknown_loss], 'a test_loss that is not finite needs an init_loss')


def named_flags(runs):
    """
    A column for each flag in which runs of one size and tying differ: its value as text, or '' where that is
    the usual one. The usual value is the default if any run has it, else the commonest. An unknown value
    counts as the default.
    """
    rows = []
    for run in runs.to_dict('records'):
        row = {}
        for flag, default in defaults_of(run).items():
            value = as_text(run.get(flag))
            row[flag] = '' if value == default else value  # '': the default, or unknown
        rows.append(row)

    named = pd.DataFrame(index=runs.index)
    for flag, values in pd.DataFrame(rows, runs.index).items():
        n_values = values.groupby([runs['size'], runs.weight_tying]).nunique()
        if n_values.max() == 1:
            continue  # no runs of one size and tying differ in it
        usual = '' if (values == '').any() else values.mode()[0]
        named[flag] = values.where(values != usual, '')
    return named


def name_runs(runs):
    """
    Adds each run's name, `variant`: its method, its λ if that is not the default, then `setting` and
    `rounding`. `rounding` is the text about logits_dtype, which changes only how the logits are rounded.
    `setting` is the text about all other flags.
    """
    runs = runs.assign(setting='', rounding='')
    for flag, values in named_flags(runs).items():
        texts = (f', {flag} ' + values).where(values != '', '')
        if flag == 'logits_dtype':
            runs['rounding'] = texts.str.replace('logits_dtype float32', 'fp32 logits')
        else:
            runs['setting'] += texts

    variants = []
    for run in runs.itertuples():
        name = report.NAMES.get(run.method, run.method)
        if not math.isnan(run.lam) and run.lam != default_lam(run.method):
            name += f' λ={run.lam:g}'
        variants.append(name + run.setting + run.rounding)
    return runs.assign(variant=variants)


def check_comparable(runs):
    """Refuses runs whose losses cannot be compared with those of their size and tying, and doubles."""
    for name in [*COMPARABLE, 'n_params']:
        known = runs[runs[name].notna() & (runs[name] != '')]
        by = ['size', 'weight_tying']
        if name == 'n_params':
            by.append('variant')  # flags in the name may change the model's size
        first = known.groupby(by)[name].transform('first')
        refuse(known[known[name] != first],
               f'its {name} differs from that of other runs of its size; analyse them apart')

    doubles = runs.duplicated(['variant', *report.PLACE, 'seed'])  # PLACE: size, weight_tying, lr
    refuse(runs[doubles], 'another run has the same name, size, weight_tying, lr and seed')


def positions_in(order, values):
    """Values -> their positions in `order`; others come after, in the order in which they appear."""
    names = dict.fromkeys([*order, *values])
    return values.map({name: i for i, name in enumerate(names)})


def sort_runs(runs):
    """Runs in the paper's order of tyings, sizes and methods, then others as they come."""
    keys = runs[['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']].copy()
    keys['size'] = positions_in(SIZES, runs['size'])
    keys['method'] = positions_in(METHODS, runs.method)
    order = keys.sort_values([*keys]).index
    return runs.loc[order].reset_index(drop=True)


def complete(runs):
    """Rows of settings and results -> named runs in order, with all of RESULTS, or a refusal."""
    runs = fill_in(runs)
    check_values(runs)
    runs['weight_tying'] = runs.weight_tying.astype(int)
    runs = name_runs(runs)
    check_comparable(runs)
    return sort_runs(runs)


# -------- csv files
def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


def differences(rows, columns):
    """The names of those of `columns` in which rows differ, unknown values aside."""
    differing = []
    for name in columns:
        if name in rows:
            values = {as_text(value) for value in rows[name]}
            if len(values - {''}) > 1:
                differing.append(name)
    return differing


def notes_on_differences(rows, columns):
    """[a note that names those of `columns` in which rows differ, though no run's name shows it], or []."""
    differing = differences(rows, columns)
    if not differing:
        return []
    return [f'Runs also differ in {", ".join(differing)}, which their names do not show.']


def column_names(header):
    """
    The first row of a csv file -> its columns' names, as train.py has them. Exports of W&B, MLflow and
    TensorBoard have them with a prefix. If several columns would have one name, one without a prefix keeps
    it, else a setting, else a result (the config's lr, not the last lr of the log). Without a column `run`,
    the tracker's own name of the run becomes it.
    """
    written = [text.strip().lower() for text in header]
    names = list(written)
    for prefixes in (('config', 'params', 'hparams'), ('summary', 'metrics', 'hparam')):  # settings first
        for i, text in enumerate(written):
            match = re.fullmatch(r'(\w+)[./](.*)', text)
            if match and match[1] in prefixes and match[2] not in names:
                names[i] = match[2]
    if 'run' not in names:
        names = ['run' if name in ('name', 'tags.mlflow.runname') else name for name in names]
    return names


def read_text(path):
    """A csv file -> its rows, all text, '' where a cell is empty. Refuses what is no table."""
    try:
        rows = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding='utf-8-sig')
    except (OSError, ValueError) as error:
        # no file, not UTF-8, or a row with more cells than the header, as with a decimal comma (3,55)
        check(False, f'{path}: {" ".join(str(error).split())}')
    names = column_names(rows.iloc[0].fillna(''))
    for name in names:
        check(names.count(name) == 1 or name == '', f'{path}: has two columns {name}; one should go')
    rows = rows.iloc[1:].set_axis(names, axis='columns').reset_index(drop=True)
    rows = rows.drop(columns='', errors='ignore')  # the index of a DataFrame
    rows = rows.fillna('').map(str.strip)
    return rows.replace(['None', 'none', 'null'], '')


def to_numbers(cells):
    """Cells of text -> floats, NaN where a cell is empty, and those cells that are no number."""
    texts = cells.str.lower().replace({'true': '1', 'false': '0', '': 'nan'})
    numbers = pd.to_numeric(texts, errors='coerce').astype(float)
    wrong = cells[numbers.isna() & (texts != 'nan')]
    return numbers, wrong


def read_runs(path):
    """
    A csv of runs, see `complete` -> the runs, and notes on what names do not show. A column that neither
    RESULTS nor train.py's flags have is a fork's statistic if it has only numbers and they differ; else it is
    not read.
    """
    rows = read_text(path)
    missing = [name for name in REQUIRED if name not in rows]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(REQUIRED)}')
    check(len(rows), f'{path}: has no runs')
    check(all(rows.test_loss), f'{path}: has an empty test_loss: of a run that was not finite it should be '
          'nan; a run that has not ended should go')

    statistics = []  # a fork's
    unknown_texts = []
    for name in rows.columns.difference(TEXTS):
        numbers, wrong = to_numbers(rows[name])
        if wrong.empty:
            rows[name] = numbers
            if name not in KNOWN:
                statistics.append(name)
        else:
            check(name not in RESULTS, f'{path}: {name} should be a number, not {wrong.iloc[0]}')
            if name not in KNOWN:
                unknown_texts.append(name)

    notes = notes_on_differences(rows, ['commit', *unknown_texts])
    differing = differences(rows, statistics)
    if differing:
        notes.append(f'Taken as statistics, as no flags of train.py: {", ".join(differing)}. The names of '
                     'runs do not show them.')
    constant = [name for name in statistics if name not in differing]  # which say nothing
    return complete(rows.drop(columns=unknown_texts + constant)), notes


# -------- a sweep's folders
OF_CHECKPOINT = ['run', 'method', 'variant', 'size', 'weight_tying', 'lr', 'seed']  # whose it is
SIDE_TABLES = {  # the csv files beside results.csv, and columns that they have even without rows
    'curves': ['run', 'step'],
    'distributions': ['run', 'quantity'],
    'checkpoints': [*OF_CHECKPOINT, 'file', 'step']}


def find_runs(folders):
    """The folders with a config.json anywhere in `folders`, sorted, each once, through links too."""
    found = []
    seen = set()
    for top in folders:
        for folder, dirs, files in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                dirs.clear()  # a link back to a folder above it, or a folder that was given twice
                continue
            seen.add(real)
            dirs.sort()  # so that of two links to a run always the same one is read
            if 'config.json' in files:
                found.append(Path(folder))
    return sorted(found)


def read_run(folder):
    """A run's folder -> its row, a dict of settings and results, and its log, a list of records."""
    settings = read_json(folder / 'config.json')
    results = read_json(folder / 'result.json')
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    row = {**settings, **results, 'run': str(folder), 'device': settings['device_name'],
           'finished': bool(results)}
    return row, log


def thinned(log):
    """At most some 1,000 records of a log, which are enough for a plot, and all of evaluations."""
    stride = math.ceil(len(log) / 1000)
    return [record for i, record in enumerate(log) if i % stride == 0 or 'loss' not in record]


def read_folders(folders):
    """The runs anywhere in `folders`, a row each; their curves; notes on what is missing."""
    runs = []
    curves = []
    notes = []
    for folder in find_runs(folders):
        try:
            run, log = read_run(folder)
        except Exception as error:  # of many kinds, where a file is damaged, or a run has just begun
            notes.append(f'left out: {folder}: {error} ({type(error).__name__})')
            continue
        if not run['finished']:
            notes.append(f'not finished: {folder}')
        runs.append(run)
        curves.append(pd.DataFrame(thinned(log)).assign(run=str(folder)))

    check(runs, '; '.join([f'{folders[0]}: no run', *notes[:3]]))
    # None -> NaN, so that columns of numbers are floats
    return pd.DataFrame(runs).fillna(math.nan).infer_objects(), pd.concat(curves), notes


def measure_runs(runs):
    """Measures each run's checkpoints -> {run: measure_run's dict}, and notes on what cannot be measured."""
    measured = {}
    notes = []
    for i, run in enumerate(runs.run, 1):
        print(f'[{i}/{len(runs)}] {run}', flush=True)
        measured[run], failures = measure_run(Path(run))
        notes += failures
    return measured, notes


def statistics_of(runs, measured):
    """
    The finished runs, and measure_runs's dict -> the statistics of their model.pt, a row for each; rows of
    distributions.csv; notes on losses that are not what training reported.
    """
    statistics = []
    distributions = []
    notes = []
    for run in runs.itertuples():
        model = measured[run.run].get('model.pt')
        if model is None:
            statistics.append({})
            continue

        numbers = dict(model['numbers'])
        own_loss = numbers.pop('loss')
        cross_entropy = numbers.pop('cross_entropy')
        # The cross entropy that is measured here should be the test loss of training, if that is over the
        # same positions; else at least what head_loss of model.py gives for these positions.
        if run.test_tokens <= POSITIONS:
            expected = run.test_loss
            source = 'training reported'
        else:
            expected = own_loss
            source = 'head_loss gives'
        if abs(cross_entropy / expected - 1) > 1e-3:  # rounding differs by less
            notes.append(f'{run.run}: the cross entropy of model.pt is {cross_entropy:.4f}, but {source} '
                         f'{expected:.4f}')

        statistics.append(numbers)
        for name, values in model['distributions'].items():
            distributions.append({'run': run.run, 'quantity': name, **values})
    return pd.DataFrame(statistics, runs.index), pd.DataFrame(distributions), notes


def checkpoint_table(runs, measured):
    """All runs, and measure_runs's dict -> rows of checkpoints.csv, those of a run by their steps."""
    rows = []
    for run in runs.itertuples():
        of_run = {name: getattr(run, name) for name in OF_CHECKPOINT}
        checkpoints = sorted(measured[run.run].items(), key=lambda item: item[1]['step'])
        for file, checkpoint in checkpoints:
            numbers = dict(checkpoint['numbers'])
            del numbers['loss']  # a fork's may be another than the cross entropy
            rows.append({**of_run, 'file': file, 'step': checkpoint['step'], **numbers})
    return pd.DataFrame(rows)


def read_sweep(folders):
    """Folders -> the finished runs, named; the others; the curves of all; notes on what is missing."""
    all_runs, curves, notes = read_folders(folders)
    finished = all_runs[all_runs.finished]
    others = all_runs[~all_runs.finished]
    columns = [name for name in finished if name in {*RESULTS, *IN_NAMES}]
    runs = complete(finished[columns])
    others = fill_in(others)
    others['variant'] = [f'{Path(run).name}, not finished' for run in others.run]

    unknown = finished.columns.difference(list(KNOWN))
    notes += notes_on_differences(finished, ['commit', *unknown])
    return runs, others, curves, notes


def measure_sweep(finished, others, curves):
    """
    Measures runs -> the finished ones with their statistics, the side tables (see SIDE_TABLES), and notes on
    what cannot be measured or differs from training.
    """
    all_runs = pd.concat([finished, others])
    measured, failures = measure_runs(all_runs)
    checkpoints = checkpoint_table(all_runs, measured)
    statistics, distributions, differing = statistics_of(finished, measured)
    runs = finished.assign(**statistics)
    side_tables = {'curves': curves, 'distributions': distributions, 'checkpoints': checkpoints}
    for name, columns in SIDE_TABLES.items():
        if side_tables[name].empty:
            side_tables[name] = pd.DataFrame(columns=columns)
    return runs, side_tables, failures + differing


def write_sweep(runs, side_tables, out):
    """Writes finished runs and side tables into `out`, as --results reads them."""
    rows = runs.drop(columns=ADDED)
    rows['test_loss'] = rows.test_loss.astype(object).fillna('nan')  # empty would mean unknown
    write_csv(out / 'results.csv', rows)

    # results.csv has no row for other runs, so --results could not draw them; 7 digits are enough for a plot
    curves = side_tables['curves']
    write_csv(out / 'curves.csv', curves[curves.run.isin(runs.run)], '%.7g')
    write_csv(out / 'distributions.csv', side_tables['distributions'])
    write_csv(out / 'checkpoints.csv', side_tables['checkpoints'])


def read_side_tables(results, runs):
    """The rows of these runs in the csv files beside results.csv, which an earlier analysis wrote."""
    tables = {}
    for name, columns in SIDE_TABLES.items():
        path = Path(results).with_name(f'{name}.csv')
        tables[name] = pd.DataFrame(columns=columns)
        if path.exists():
            rows = pd.read_csv(path, dtype={'run': str})
            tables[name] = rows[rows.run.isin(runs.run)]
    return tables


# -------- which runs are compared: a mark rests upon the runs of the figure or table that shows it, no others
def of_default_lam(runs):
    """The runs that methods are compared by: of the default λ, or of every λ where none has the default."""
    is_default = runs.lam.isna() | (runs.lam == runs.method.map(default_lam))
    groups = runs.assign(is_default=is_default).groupby(
        ['size', 'weight_tying', 'method', 'setting', 'rounding'])
    has_default = groups.is_default.transform('any')
    return runs[is_default | ~has_default]


def of_several_lam(runs):
    """The runs that values of λ are compared by: of the methods that ran with several, at any size."""
    groups = runs.groupby(['weight_tying', 'method', 'setting', 'rounding'])
    return runs[(groups.lam.transform('nunique') > 1) & runs.lam.notna()]


def in_most(sets):
    """What is in more than half of these sets, sorted."""
    counts = Counter()
    for members in sets:
        counts.update(members)
    return sorted(member for member, n in counts.items() if n > len(sets) / 2)


def means_over_same_seeds(runs, by):
    """
    Groups runs by the columns `by`. Returns the seeds that more than half of the groups have, and {group:
    mean test loss over these seeds} for each group that has all of these seeds. A mean is NaN if one of its
    losses is not finite.
    """
    losses = {}
    for name, rows in runs.groupby(by, sort=False):
        losses[name] = dict(zip(rows.seed, rows.test_loss, strict=True))
    seeds = in_most([set(of_seeds) for of_seeds in losses.values()])

    means = {}
    for name, of_seeds in losses.items():
        if seeds and set(seeds) <= set(of_seeds):
            means[name] = float(np.mean([of_seeds[seed] for seed in seeds]))
    return seeds, means


def marks_behind(runs):
    """
    Marks runs, those of one figure or of one row of a table, against each other. Variants of one size, tying
    and learning rate are compared by their mean test losses over the seeds that most of them have.

    1: a seed of the variant is not finite, even if it is alone there or of another seed. The paper calls this
    diverged, and also a mean over 1% above the lowest, as does `_div` in
    results/Analyze_All_Models_Performance.ipynb of its code. So else: 1 if the mean is over 1% above the
    lowest; 0 if it is not; NaN, not compared, if the variant is alone there, lacks one of these seeds, or if
    the run is of another seed.
    """
    marks = pd.Series(math.nan, runs.index)
    for _, rows in runs.groupby(report.PLACE):
        seeds, means = means_over_same_seeds(rows, 'variant')
        finite = [mean for mean in means.values() if not math.isnan(mean)]
        for variant, own in rows.groupby('variant'):
            if own.test_loss.isna().any():
                marks[own.index] = 1
            elif variant in means and len(means) > 1:
                above = (means[variant] - min(finite)) / min(finite)
                marks[own.index[own.seed.isin(seeds)]] = float(above > report.BEHIND)
    return marks


def lowest_losses(runs):
    """
    A row for each size and tying: its lowest mean test loss over the seeds that more than half of its
    variants at their learning rates have, with the `variant` and the `lr`. `left_out` are texts on the
    variants that lack one of these seeds at a learning rate, `n_compared` is the number of the other means.
    `variant` is '' if none of these is finite, or if there are none.
    """
    rows = []
    for (tying, size), part in runs.groupby(['weight_tying', 'size'], sort=False):
        seeds, means = means_over_same_seeds(part, ['variant', 'lr'])
        finite = {name: mean for name, mean in means.items() if not math.isnan(mean)}
        variant, lr, lowest = '', math.nan, math.nan
        if finite:
            variant, lr = min(finite, key=finite.get)
            lowest = finite[variant, lr]

        rates_left_out = {}
        for other, rate in part.groupby(['variant', 'lr'], sort=False).groups:
            if (other, rate) not in means:
                rates_left_out.setdefault(other, []).append(f'{rate:g}')
        left_out = [f'{other} at η = {" ".join(rates)}' for other, rates in rates_left_out.items()]
        rows.append({'size': size, 'weight_tying': tying, 'variant': variant, 'lr': lr,
                     'test_loss': lowest, 'seeds': len(seeds), 'n_compared': len(means),
                     'left_out': left_out})
    return pd.DataFrame(rows)


# -------- learning rate sensitivity, of the rows of a table
ROW_OF_METHODS = ['weight_tying', 'size']  # what a row of Tables 2 and 5 is of: its cells are variants
ROW_OF_LAM = ['weight_tying', 'size', 'method', 'setting', 'rounding']  # and of Table 4: its cells are λ
LRS_COLUMNS = '''size weight_tying variant method lam n_params lrs lrs_n1 paper n_rates rates behind
                 seeds lrs_n1_lowest lrs_n1_highest suffix'''.split()  # of lrs.csv
PAPER_RATES = '0.0003 0.001 0.003 0.01 0.03 0.1 0.3'  # Eq. 18
PAPER_LRS = pd.read_csv(TOOLS / 'paper_lrs.csv', index_col=['tying', 'size', 'variant'])  # Tables 2, 4, 5
NOT_IN_CSV = ['setting', 'rounding', 'lowest']
COMMON = ['size', 'weight_tying', 'variant', 'method', 'lam', 'n_params', 'setting', 'rounding',
          'suffix']  # what the runs of a cell have in common


def published_lrs(row):
    """The number of the paper's Tables 2, 4 and 5 for a row of lrs.csv; NaN if they have none."""
    cell = (report.TYING[row['weight_tying']], row['size'], row['variant'])
    if row['rates'] != PAPER_RATES:
        return math.nan
    return PAPER_LRS.lrs.get(cell, math.nan)


def rates_of_fullest_seed(runs):
    """The learning rates of that seed of a variant that has the most. Of several, the lowest seed counts."""
    fullest = runs.groupby('seed').lr.nunique().idxmax()
    return sorted(runs.lr[runs.seed == fullest].unique())


def seeds_with(runs, rates):
    """The seeds of a variant's runs that have all of these learning rates; none if there are no rates."""
    return [seed for seed, of_seed in runs.groupby('seed') if rates and set(rates) <= set(of_seed.lr)]


def select_for_lrs(runs):
    """
    The runs of a row of a table -> those from which LRS is computed, with a `suffix` for the cell. It is ''
    for variants that are compared: they have the learning rates and the seeds that most variants have, and no
    others are used. For the rest it says from which seeds, or from how many rates, they are computed.
    """
    runs = runs[runs.groupby('variant').lr.transform('nunique') > 1]
    rates = in_most([set(own.lr) for _, own in runs.groupby('variant')])
    if len(rates) < report.MIN_RATES:
        rates = []  # too few to compare by
    seeds_with_all_rates = {}
    for variant, own in runs.groupby('variant'):
        seeds_with_all_rates[variant] = seeds_with(own, rates)
    sets = [set(own_seeds) for own_seeds in seeds_with_all_rates.values() if own_seeds]
    seeds = in_most(sets)

    selected = [runs[:0].assign(suffix='')]  # so that there is something to concatenate
    for variant, own in runs.groupby('variant', sort=False):
        if seeds and set(seeds) <= set(seeds_with_all_rates[variant]):  # compared
            own_rates = rates
            own_seeds = seeds
            suffix = ''
        elif seeds_with_all_rates[variant]:  # all the rates, but other seeds, or no seed is common to most
            own_rates = rates
            own_seeds = seeds_with_all_rates[variant]
            suffix = f' (seed {" ".join(map(as_text, own_seeds))})'
        else:  # no seed has all the rates, or most variants have too few in common
            own_rates = rates_of_fullest_seed(own)
            own_seeds = seeds_with(own, own_rates)
            suffix = f' ({len(own_rates)} lr)'
        if len(own_rates) > 1:
            used = own.lr.isin(own_rates) & own.seed.isin(own_seeds)
            selected.append(own[used].assign(suffix=suffix))
    return pd.concat(selected)


def sum_above_lowest(of_seed):
    """
    The runs of a seed at n learning rates -> the sum over them of min(L, L0) - min L, in nats: n times that
    of Eq. 21. NaN if the seed learned something at none of the rates: its losses hardly vary, and it would
    score about 0, the best. NaN too if a loss that is not finite has no L0 to count as.
    """
    losses = of_seed.capped_loss
    if losses.min() >= of_seed.init_loss.min() - report.MIN_LEARNED:
        return math.nan
    return (losses - losses.min()).sum(skipna=False)


def as_printed(lrs):
    """LRS with the digits that the tables have."""
    return float(f'{lrs:.3f}')


def lowest_lrs(values):
    """
    {variant: LRS of each of the same seeds} -> the variants to print bold: those of the lowest mean. An empty
    list if there are not two variants, or if any other has a seed as low as the highest of theirs; a NaN is
    never lower. All are compared as the table prints them.
    """
    means, lowest, highest = {}, {}, {}
    for variant, lrs in values.items():
        if not np.isnan(lrs).any():
            means[variant] = as_printed(lrs.mean())
            lowest[variant] = as_printed(lrs.min())
            highest[variant] = as_printed(lrs.max())
    if not means or len(values) < 2:
        return []

    best = [variant for variant in means if means[variant] == min(means.values())]
    highest_of_best = max(highest[variant] for variant in best)
    for variant in means:
        if variant not in best and lowest[variant] <= highest_of_best:
            return []
    return best


def notes_on_left_out(runs):
    """[a note that names these runs, of a size and tying, which LRS is not computed of], or []."""
    if runs.empty:
        return []
    seeds_of = {}  # of a variant, and learning rates that it leaves out
    for (variant, seed), of_seed in runs.groupby(['variant', 'seed'], sort=False):
        rates = ' '.join(map('{:g}'.format, of_seed.lr))
        seeds_of.setdefault((variant, rates), []).append(as_text(seed))
    names = []
    for (variant, rates), seeds in seeds_of.items():
        names.append(f'{variant} at η = {rates} (seed {" ".join(seeds)})')
    where = f'{runs["size"].iloc[0]}, {report.TYING[runs.weight_tying.iloc[0]]}'
    return [f'Left out of the LRS of {where}, because the seed lacks a rate, or because most others lack the '
            f'rate or seed: {"; ".join(names)}.']


def lrs_of_row(runs):
    """The runs of a row of a table -> a dict for each cell (a row of lrs.csv), and notes_on_left_out."""
    selected = select_for_lrs(runs)
    marks = marks_behind(selected[selected.suffix == ''])

    cells = []
    compared = {}  # {variant: LRS (n - 1) of each of the same seeds}
    for variant, own in selected.groupby('variant', sort=False):
        rates = own.lr.unique()
        n = len(rates)
        sums = np.array([sum_above_lowest(of_seed) for _, of_seed in own.groupby('seed')])
        lrs_n1 = sums / (n - 1)
        if own.suffix.iloc[0] == '':
            compared[variant] = lrs_n1
        cells.append({
            **own[COMMON].iloc[0],
            'n_rates': n,
            'rates': ' '.join(map('{:g}'.format, rates)),
            'behind': marks.reindex(own.index).max(),
            'seeds': len(sums),
            'lrs': sums.mean() / n,
            'lrs_n1': lrs_n1.mean(),
            'lrs_n1_lowest': lrs_n1.min(),
            'lrs_n1_highest': lrs_n1.max()})
    best = lowest_lrs(compared)
    for cell in cells:
        cell['lowest'] = cell['variant'] in best
        cell['paper'] = published_lrs(cell)
    return cells, notes_on_left_out(runs.drop(selected.index))


def learning_rate_sensitivity(runs, by=ROW_OF_METHODS):
    """
    Computes LRS, in nats, of each variant in each row of a table; the runs of a row agree in the columns
    `by`. LRS are means over seeds: `lrs` is the mean over n learning rates of min(L, L0) - min L (Eq. 21),
    `lrs_n1` their sum / (n - 1), as in the published tables; `paper` is what those have. `behind` is 1 if
    marks_behind marks the variant at one or more of the rates. `lowest` says whether its LRS is the lowest of
    the row. A variant with a `suffix` has neither: it is not compared (see select_for_lrs). Returns the rows
    of lrs.csv, and notes that name the runs left out.
    """
    cells = []
    notes = []
    for _, part in runs.groupby(by, sort=False, dropna=False):
        cells_of_row, left_out = lrs_of_row(part)
        cells += cells_of_row
        notes += left_out
    return pd.DataFrame(cells, columns=[*LRS_COLUMNS, *NOT_IN_CSV]), notes


# -------- what a method costs in time
PAPER_OVERHEAD = pd.read_csv(TOOLS / 'paper_overhead.csv', index_col=['tying', 'size', 'variant'])  # Table 6
# times are compared only where these are the same
TIMED = ['size', 'weight_tying', 'setting', 'rounding', 'steps', 'device', 'processes']
SAME_SPEED = 1.1  # times of one method that differ by more: the machine was probably shared


def overhead(runs):
    """
    How much longer a method trains than the baseline where all of TIMED is the same (Table 6), a row each:
    `added` and the paper's, NaN if it has none, are 0.01 for 1% more. Times are means over learning rates,
    seeds and λ. Left out are methods of one run, and those whose times differ by more than SAME_SPEED.
    """
    timed = runs[(runs.train_seconds > 0) & runs.test_loss.notna()]
    rows = []
    for values, part in timed.groupby(TIMED, sort=False, dropna=False):
        row = dict(zip(TIMED, values, strict=True))
        seconds = {}
        for method, times in part.groupby('method', sort=False).train_seconds:
            if len(times) > 1 and times.max() < SAME_SPEED * times.min():
                seconds[method] = times.mean()

        for method in seconds:
            if method != 'baseline' and 'baseline' in seconds:
                added = seconds[method] / seconds['baseline'] - 1
                cell = (report.TYING[row['weight_tying']], row['size'], report.NAMES.get(method))
                paper = PAPER_OVERHEAD.percent.get(cell, math.nan) / 100
                rows.append({**row, 'method': method, 'added': added, 'paper': paper})
    return pd.DataFrame(rows, columns=[*TIMED, 'method', 'added', 'paper'])


# -------- what is said of the runs
def make_headlines(lrs_methods, lrs_lam, lowest):
    """
    The LRS of methods and of λ, see compare, and rows of lowest_losses -> a line for each size and tying:
    where the test loss is lowest, and which method depends least on the learning rate.
    """
    lines = []
    for best in lowest.itertuples(index=False):
        line = f'{best.size}, {report.TYING[best.weight_tying]}: {lowest_loss_in_words(best)}'
        in_row = (lrs_methods['size'] == best.size) & (lrs_methods.weight_tying == best.weight_tying)
        rows = lrs_methods[in_row]
        if report.has_lrs(rows):
            line += f'; {lrs_in_words(rows)}'
        lines.append(line + '.')
    if report.has_lrs(lrs_methods):
        explained = ('LRS, the learning rate sensitivity, says how much the test loss depends on the '
                     'learning rate, and not how low it is.')
        if len(lrs_lam):
            explained += f' {report.AT_DEFAULT}'
        lines.append(explained)
    return lines


def lowest_loss_in_words(best):
    """A row of lowest_losses -> the loss, of which variant, and what is not compared with it."""
    if best.n_compared == 0:
        return 'test losses are not compared, as no runs have all the seeds that most have'
    if best.variant == '':
        return 'no test loss that is compared is finite'

    text = f'the lowest test loss is {best.test_loss:.4f}'
    if best.seeds > 1:
        text += f', a mean over {best.seeds} seeds'
    text += f', of {best.variant} at η = {best.lr:g}'
    if best.left_out:
        text += f' (not compared, as they lack a seed: {", ".join(best.left_out)})'
    return text


def lrs_in_words(rows):
    """The cells of a row of the LRS table of methods -> which is the lowest, and which are not compared."""
    compared = rows[(rows.suffix == '') & rows.lrs_n1.notna()]
    best = compared[compared.lowest]
    if len(best):
        text = f'the lowest LRS is {best.lrs_n1.iloc[0]:.3f}, of {" and ".join(best.variant)}'
    elif len(compared) > 1:
        text = 'no LRS is clearly the lowest, as ranges over seeds overlap'
    elif len(compared) == 1:
        text = f'LRS is {compared.lrs_n1.iloc[0]:.3f}, of {compared.variant.iloc[0]}'
    else:
        text = 'no LRS is compared with another'
    others = [row.variant + row.suffix for row in rows.itertuples() if row.suffix]
    if others:
        text += f'; not compared: {", ".join(others)}'
    return text


DESCRIBED = ['size', 'n_params', 'weight_tying', 'method', 'lr', 'seed', 'steps', 'batch_size', 'block_size',
             'cap', 'dtype', 'logits_dtype', 'device', 'final_gain']


def what_was_run(runs):
    """A paragraph on the settings of runs."""
    parts = [f'Runs: {len(runs)}.']
    for column in DESCRIBED:
        values = [as_text(value) for value in runs[column].unique() if as_text(value) != '']
        maybe_unknown = column == 'seed' and values == ['0']  # fill_in writes 0 for an unknown seed
        if values and not maybe_unknown:
            parts.append(f'{column}: {", ".join(values)}.')

    parts += other_flags(runs)
    if (runs.final_gain == 0).any():
        parts.append('With final_gain 0 the last LayerNorm has no gain, on purpose: the small model of the '
                     'demo then blows up by itself, and with a gain it does not (results/natural).')
    return ' '.join(parts)


def other_flags(runs):
    """Texts on flags that are not at their defaults, such as a fork's, and that no run's name tells."""
    described = {*DESCRIBED, *named_flags(runs)}
    texts = []
    for flag in IN_NAMES:
        if flag in described or flag not in runs:
            continue
        values = []
        all_default = True
        for run in runs.to_dict('records'):
            default = defaults_of(run)[flag]
            value = as_text(run[flag]) or default  # unknown counts as the default
            if value not in values:
                values.append(value)
            if value != default:
                all_default = False
        if not all_default:
            texts.append(f'{flag}: {", ".join(values)}.')
    return texts


def notes_on_too_few(runs):
    """Notes on what too few rates, steps or seeds cannot tell."""
    notes = []
    fewest = runs.steps.min()
    if fewest < 10_000:
        notes.append(f'{fewest:,g} steps are too few to rank methods; the paper has 100,000.')
    seeds = runs.groupby([*report.PLACE, 'variant'], sort=False).seed.nunique()
    few = []
    for variant, counts in seeds.groupby('variant', sort=False):
        if counts.min() < 3:
            few.append(variant if counts.max() < 3 else f'{variant} in a part of its runs')
    if few:
        notes.append(f'With fewer than three seeds a difference may be chance: {"; ".join(few)}.')
    return notes


def notes_on_largest_mean(runs):
    """
    [a note on the run of the largest mean logit, and what BF16 logits cost there], or []. Not of runs with
    fp32 logits, a cap or norm_softmax, which change the logits after they are rounded.
    """
    logits_dtype = runs.logits_dtype.where(runs.logits_dtype != '', runs.dtype)  # as in train.py
    rounded = runs[logits_dtype.isin(['', 'bfloat16'])]
    rounded = rounded[~(rounded.cap > 0) & (rounded.method != 'norm_softmax')]
    rounded = rounded.dropna(subset='logit_mean')
    if rounded.empty:
        return []
    run = rounded.sort_values('logit_mean', key=abs).iloc[-1]
    cost = run.bf16_cost
    costs = 'cost'
    if math.isnan(cost):
        spread = 0.0 if math.isnan(run.logit_mean_spread) else run.logit_mean_spread
        cost = estimate_bf16_cost(run.logit_mean, spread)
        costs = 'should cost, by an estimate,'
    note = f'Largest mean logit: {run.logit_mean:.1f}, of {run.variant}, {run["size"]}, '
    note += f'{report.TYING[run.weight_tying]}, at η = {run.lr:g}. '
    note += f'BF16 logits {costs} {cost:.2f} nats there'
    if cost >= 0.01 and run.method != 'mu_loss':
        note += '; center the head, or use mu_loss'
    return [f'{note}.']


def notes_on_rounding(runs):
    """
    Returns [a note on the two runs that differ only in logits_dtype and whose capped losses are farthest
    apart, with every other run of their size, tying, setting, learning rate and seed, the highest loss
    first], or [] if no two runs differ so.
    """
    farthest = -1.0  # so that a gap of 0 is shown too
    shown = []
    known = runs.dropna(subset='capped_loss')
    for _, same_place in known.groupby([*report.PLACE, 'setting', 'seed'], sort=False):
        for _, alike in same_place.groupby(['method', 'lam'], dropna=False):
            gap = alike.capped_loss.max() - alike.capped_loss.min()
            if alike.rounding.nunique() > 1 and gap > farthest:
                farthest = gap
                shown = list(same_place.sort_values('capped_loss', ascending=False).to_dict('records'))
    if not shown:
        return []

    ends = []
    for run in shown:
        if math.isnan(run['test_loss']):
            end = f'{run["variant"]} does not end at a finite loss'
        else:
            end = f'{run["variant"]} ends at {run["test_loss"]:.2f}'
        if not math.isnan(run['logit_mean']):
            end += f' (mean logit {round(run["logit_mean"]):,})'
        ends.append(end)
    first = shown[0]
    where = f'{first["size"]}, {report.TYING[first["weight_tying"]]}, η = {first["lr"]:g}'
    return [f'The largest effect of rounding the logits, at {where}, seed {first["seed"]:g}: '
            f'{"; ".join(ends)}.']


def notes_on_names(runs):
    """[a note that says, for each flag that some names show, what the other runs have], or []."""
    meant = []
    for flag, values in named_flags(runs).drop(columns='logits_dtype', errors='ignore').items():
        usual = set()
        for run in runs[values == ''].to_dict('records'):
            usual.add(as_text(run[flag]) or defaults_of(run)[flag] or 'none')
        meant.append(f'{flag} {" or ".join(sorted(usual))}')
    if not meant:
        return []
    return [f'Runs whose name does not say otherwise have {"; ".join(meant)}.']


# -------- the program
parser = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('runs', nargs='*', type=os.path.expanduser, help='folders of runs or sweeps: out/demo')
parser.add_argument('--results', type=os.path.expanduser, metavar='FILE.csv', help='a csv of runs instead')
parser.add_argument('--out', type=os.path.expanduser, help='folder to write to (default: results/NAME)')


def default_out(args):
    """results/NAME, with NAME of the folders or of the csv file; of DIR/results.csv it is DIR."""
    inputs = args.runs or [args.results.removesuffix('.csv').removesuffix('/results')]
    names = [Path(name).resolve().name for name in inputs]
    return f'results/{"+".join(names)}'


def compare(runs):
    """
    Runs -> `lrs_methods`, the LRS of methods (Tables 2 and 5), and `lrs_lam`, that of several λ of a method
    (Table 4), both rows of lrs.csv; and notes on what they leave out.
    """
    lrs_methods, left_out = learning_rate_sensitivity(of_default_lam(runs))
    lrs_lam, also_left_out = learning_rate_sensitivity(of_several_lam(runs), ROW_OF_LAM)
    lrs = pd.concat([lrs_methods, lrs_lam])
    notes = []
    if report.has_lrs(lrs):
        notes = list(dict.fromkeys(left_out + also_left_out))  # each once
    for tying in sorted(runs.weight_tying.unique()):
        if not report.has_lrs(lrs[lrs.weight_tying == tying]):
            notes.append(f'No learning rate sensitivity (LRS) of {report.TYING[tying]} runs: no method and '
                         f'setting has {report.MIN_RATES} learning rates with one seed.')
    if report.has_lrs(lrs) and runs.init_loss.isna().any():
        notes.append('Where init_loss is empty, LRS cannot cap a loss, or tell if anything was learned.')
    return lrs_methods, lrs_lam, notes


IN_SUMMARY = ['baseline', 'mu_loss', 'mu_centering']  # the methods of the summary figure


def draw(runs, all_runs, lrs_methods, side_tables):
    """
    Draws every figure that has data. `runs` have ended; `all_runs` also has those that have not.
    `lrs_methods` is the LRS of methods, `side_tables` are those of read_side_tables. The marks in a figure
    rest upon the runs it shows.
    """
    checkpoints = side_tables['checkpoints']
    names = ['method', 'variant', 'size']
    named = pd.concat([all_runs[names], checkpoints[names]])
    runs_default = report.with_looks(of_default_lam(runs), named)
    runs_several_lam = report.with_looks(of_several_lam(runs), named)
    lrs_methods = report.with_looks(lrs_methods, named)

    figures = []
    for tying in sorted(runs.weight_tying.unique()):
        method_runs = runs_default[runs_default.weight_tying == tying]
        method_runs = method_runs.assign(behind=marks_behind(method_runs))
        lrs = lrs_methods[lrs_methods.weight_tying == tying]
        figures += report.draw_methods(method_runs, lrs, tying)
        # a fork's statistic may be called min
        values = method_runs.merge(side_tables['distributions'], on='run', suffixes=('_of_run', ''))
        figures += report.draw_distributions(values, tying)

        first_size = method_runs[method_runs['size'] == method_runs['size'].iloc[0]]
        usual = first_size[(first_size.setting == '') & (first_size.rounding == '')]
        summary = usual[usual.method.isin(IN_SUMMARY)]
        figures += report.draw_summary(summary.assign(behind=marks_behind(summary)), tying)

        # Table 4 compares the λ of one method, but Figure 8 all methods at once: so LRS and marks anew
        lam_runs = runs_several_lam[runs_several_lam.weight_tying == tying]
        lam_runs = lam_runs.assign(behind=marks_behind(lam_runs))
        lrs_figure, _ = learning_rate_sensitivity(lam_runs)
        figures += report.draw_ablation(lam_runs, report.with_looks(lrs_figure, named), tying)

    figures += report.draw_curves(report.with_looks(all_runs, named), side_tables['curves'])
    return figures + report.draw_checkpoints(report.with_looks(checkpoints, named))


def write_figures(figures, folder):
    """Writes figures into a folder, and takes away there what an earlier analysis drew."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob('*.png'):
        signed = f'Software\0{report.signature(path.stem)}'  # PNG metadata: key, zero byte, value
        if signed.encode() in path.read_bytes():
            path.unlink()
    for figure in figures:
        save(figure['png'], f'{folder}/{figure["name"]}.png')


def write_analysis(runs, others, side_tables, notes, out):
    """
    Compares and draws runs and side tables, writes lrs.csv, tables, figures and the page into `out`, and
    prints the tables and all sentences.
    """
    lrs_methods, lrs_lam, left_out = compare(runs)
    lrs = pd.concat([lrs_methods.assign(table='methods'), lrs_lam.assign(table='λ')])
    write_csv(out / 'lrs.csv', lrs.drop(columns=NOT_IN_CSV))

    tables = report.make_tables(runs, lrs_methods, lrs_lam, overhead(runs))
    own_statistics = [name for name in runs if name not in {*KNOWN, *ADDED}]
    run_table = report.run_table(runs.assign(behind=marks_behind(runs)), own_statistics)
    save(report.markdown([*tables, run_table]).encode(), f'{out}/tables.md')

    figures = draw(runs, pd.concat([runs, others]), lrs_methods, side_tables)
    write_figures(figures, out / 'figures')

    summary = what_was_run(runs)
    headlines = make_headlines(lrs_methods, lrs_lam, lowest_losses(runs))
    notes = [*notes_on_rounding(runs), *notes_on_largest_mean(runs), *notes_on_too_few(runs),
             *notes_on_names(runs), *left_out, *notes]
    items = report.in_order([*tables, run_table, *figures])
    html = report.page(out.resolve().name, summary, headlines, notes, items)
    save(html.encode(), f'{out}/report.html')

    print(report.plain(tables))
    print(summary, *headlines, *notes, f'wrote {out}; open {out / "report.html"} in a browser', sep='\n')


def main(argv=None):
    """Reads runs, or the results of runs, and writes what was measured of them and how they compare."""
    args = parser.parse_args(argv)
    check(bool(args.runs) != bool(args.results), 'give run folders, or --results')
    check(args.out or len(args.runs) <= 3, 'more than three folders need --out')
    out = Path(args.out or default_out(args))

    # Reads and refuses first, before anything is written; what is measured is written under the lock.
    if args.runs:
        finished, others, curves, notes = read_sweep(args.runs)
    else:
        runs, notes = read_runs(args.results)
        others = runs[:0]  # an analysis has no runs that have not ended
        side_tables = read_side_tables(args.results, runs)

    out.mkdir(parents=True, exist_ok=True)
    with open(out / '.lock', 'a') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tasks of an array may end at once: each waits for the one before
        if args.runs:
            runs, side_tables, more_notes = measure_sweep(finished, others, curves)
            notes += more_notes
            write_sweep(runs, side_tables, out)
        write_analysis(runs, others, side_tables, notes, out)


if __name__ == '__main__':
    main()
