"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu, statistics of the
logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a sweep.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs

It writes results.csv, a row for each run: settings, test loss, statistics of its model; curves.csv, of the
logs; distributions.csv, quartiles over positions or the vocabulary; lrs.csv; what tools/report.py draws.

Symbols and shapes are model.py's: E output embeddings (V, H), mu their mean (H,), h final hidden states
(N, H) at N test positions; a star marks what is centered, e*_i = e_i - mu. Losses are in nats per token.
"""
import argparse
import functools
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import train
from model import GPT, METHODS, SIZES, gpt_config, summarize
from tools import report
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v6.json'  # kept in a run's folder; a new name if what is measured changes
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


# -------- the quantities of Section 3
def norm_ratios(E):
    """r_emb = |e*_i| / |e_i| of each token, (V,), or fewer: rows of zeros, such as padding, have no ratio."""
    norms = E.norm(dim=1)
    return ((E - E.mean(dim=0)).norm(dim=1) / norms)[norms > 0]


def centering_ratios(h, E):
    """(N,) each, of exact, uncapped logits: r_log = max |l*_i| / max |l_i| (Eq. 11), r_cos, cos(mu, h)."""
    largest = functools.partial(torch.linalg.vector_norm, ord=math.inf, dim=1)  # max |x_i|, without a copy
    mu = E.mean(dim=0)
    logits, mu_h = h @ E.T, h @ mu
    star = h @ (E - mu).T  # l*_i = (e_i - mu) . h: next to a large mean, l_i - mu . h would lose its digits
    cos = logits / E.norm(dim=1).clamp_min(TINY)  # |h| cos(e_i, h); |h| cancels in the ratio
    cos_star = star / (E - mu).norm(dim=1).clamp_min(TINY)
    return {'r_log': largest(star) / largest(logits).clamp_min(TINY),
            'r_cos': largest(cos_star) / largest(cos).clamp_min(TINY),
            'cos_mu_h': mu_h / (h.norm(dim=1) * mu.norm()).clamp_min(TINY)}


def measure_embeddings(E):
    """What can be measured from E (V, H) alone: |mu|, the mean's share V |mu|^2 / |E|_F^2, and r_emb."""
    mu = E.mean(dim=0)
    share = len(E) * mu.square().sum() / E.square().sum()
    numbers = {'mu_norm': mu.norm(), 'mean_share': share, 'r_emb': norm_ratios(E).double().mean()}
    return {name: number.item() for name, number in numbers.items()}


def concatenate(parts):
    """A list of dicts of (n,) -> one dict of (N,), in float64 and on the CPU."""
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


def distribution(values):
    """Values (n,) -> their numbers in distributions.csv, NaN without values or if one is not finite."""
    x = values.double()
    names = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
    if len(x) == 0 or not x.isfinite().all():
        return dict.fromkeys(names, math.nan)
    quartiles = x.quantile(x.new_tensor([0, 0.25, 0.5, 0.75, 1]), interpolation='nearest')
    numbers = [x.mean(), *quartiles, (x < 1).double().mean(), (x > 0).double().mean()]
    return {name: number.item() for name, number in zip(names, numbers, strict=True)}


@torch.no_grad()
def measure_model(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> a dict: `numbers` for results.csv, and `distributions` over the
    positions, or of r_emb over the vocabulary. r_log, r_cos, cos_mu_h are of e_i . h alone, whatever a fork
    adds to its logits; all else is of the model's own logits: rounded and capped.
    """
    gpt.eval()
    E, parts = gpt.E, []
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        _, stats = gpt(tokens, targets)
        h = gpt.hidden(tokens).flatten(0, 1).float()
        pieces = h.split(max(1, 2**25 // len(E)))  # so that no N x V tensor is over 128 MB
        parts.append({**stats, **concatenate([centering_ratios(piece, E.float()) for piece in pieces])})
    stats = concatenate(parts)
    del stats['reg']
    distributions = {name: distribution(x) for name, x in {**stats, 'r_emb': norm_ratios(E).cpu()}.items()}
    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token; NaN if no r_cos is below 1
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers = {**measure_embeddings(E), **summarize(stats, E),
               'r_emb_below_1': distributions['r_emb']['below_1'],
               'r_cos_below_1': distributions['r_cos']['below_1'],
               'r_log_below_1_too': (r_log < 1).double().mean().item()}
    return {'numbers': numbers, 'distributions': distributions}


# -------- a run's folder
@functools.cache  # the runs of a sweep have the same data
def val_windows(folder, block_size, vocab_size, data_fingerprint):
    """The val windows of the data that a run was trained on. Raises ValueError if the folder has others."""
    if os.path.isdir(folder):
        trained_on, val = (train.Windows(folder, split, block_size, vocab_size) for split in ('train', 'val'))
        if train.fingerprint([trained_on, val]) == data_fingerprint:
            return val
    raise ValueError(f'{folder} does not hold the shards of the training')


def measure_run(folder):
    """measure_model of a finished run, kept in its folder until model.pt changes."""
    path = folder / 'model.pt'
    settings, kept = read_json(folder / 'config.json'), read_json(folder / STATISTICS)
    model_hash = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    if kept.get('run_id') == settings['run_id'] and model_hash in (kept['model'], None):  # None: not kept
        return kept

    saved = train.read_checkpoint(str(path))
    config = saved['config']
    if config['run_id'] != settings['run_id']:
        raise ValueError('model.pt is of another run: its run_id differs from that of config.json')
    windows = val_windows(settings['data'], config['block_size'], config['vocab_size'],
                          config['data_fingerprint'])
    gpt = GPT(gpt_config(config))
    gpt.load_state_dict(saved['model'])
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    tokens = torch.from_numpy(windows[windows.evenly_spaced(min(POSITIONS, config['test_tokens']))])
    measured = {'model': model_hash, 'run_id': settings['run_id'], **measure_model(gpt, tokens)}
    if os.access(folder, os.W_OK):  # runs may be kept where nobody may write
        save(measured, f'{folder}/{STATISTICS}')
    return measured


def read_run(folder):
    """A run's settings, with its results if it is finished, and its curve. Raises if a file is damaged."""
    settings, results = (read_json(folder / name) for name in ('config.json', 'result.json'))
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    if 'val_loss' not in log[0] or 'data_checksum' in settings:
        raise ValueError('a run of an older version of train.py')
    run = {**settings, **results, 'run': str(folder), 'device': settings['device_name'],
           'finished': 'test_loss' in results}
    run = {name: math.nan if value is None else value for name, value in run.items()}
    trained = [line for line in log if 'loss' in line]
    evaluations = [line for line in log if 'loss' not in line]
    every = math.ceil(len(trained) / 1000) or 1  # at most 1,000 of them are enough for a plot
    curve = pd.DataFrame(evaluations + trained[::-every])  # with the last line
    return run, curve.sort_values('step', kind='stable').assign(run=run['run'])


# -------- what a run is: the columns of results.csv
RESULTS = [
    'run', 'method', 'size', 'n_params', 'weight_tying', 'lam', 'cap', 'lr', 'seed', 'steps', 'batch_size',
    'block_size', 'vocab_size', 'test_tokens', 'data_fingerprint', 'dtype', 'logits_dtype', 'mu_shift',
    'init_from', 'init_loss', 'test_loss', 'model_step', 'mu_norm', 'mean_share', 'logit_mean',
    'logit_mean_spread', 'logit_std', 'logit_absmax', 'logit_max', 'cos_mu_h', 'r_emb', 'r_cos', 'r_log',
    'r_emb_below_1', 'r_cos_below_1', 'r_log_below_1_too', 'train_seconds', 'tokens_per_second', 'device']
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # other cells may be empty: unknown
TEXTS = ['run', 'method', 'size', 'data_fingerprint', 'dtype', 'logits_dtype', 'init_from', 'device']
FLAGS = vars(train.parser.parse_args([]))  # of train.py, with a fork's, and their defaults
FLAGS |= {'dtype': 'bfloat16', 'logits_dtype': 'bfloat16'}  # the paper's; train.py's depend on the machine

# Runs of one size and tying share these, or their losses could not be compared. Any other flag in which they
# differ is part of a run's name, but for those that are there anyway and those that change no loss.
COMPARABLE = ['data_fingerprint', 'steps', 'batch_size', 'vocab_size', 'test_tokens']
IN_NAMES = [flag for flag in FLAGS if flag not in {
    *COMPARABLE, *train.MAY_CHANGE, 'method', 'size', 'weight_tying', 'lam', 'lr', 'seed', 'cap', 'mu_shift',
    'init_from', 'log_every', 'eval_every', 'eval_tokens'}]

VARIANT = ['size', 'weight_tying', 'variant']  # what has an LRS
OF_VARIANT = ['plain_name', 'method', 'lam', 'at_default_lam', 'of_several_lam']  # what else is known of it
ADDED = [*VARIANT, *OF_VARIANT, 'setting', 'but_for_rounding', 'capped_loss', 'behind', 'behind_lam', 'loss']


def own_statistics(runs):
    """The columns of statistics that a fork has added."""
    return [name for name in runs if name not in {*RESULTS, *FLAGS, *ADDED}]


def as_text(flag, value):
    """A flag's value as names have it: alike for 0.2, and '0.20' in a csv; its default if it is empty."""
    value = str(FLAGS[flag] if value == '' or pd.isna(value) else value)
    try:
        return f'{float(value):.12g}'
    except ValueError:
        return value


def flags_in_names(runs):
    """The values, as text, of each flag in which runs of a size and tying differ."""
    flags = {flag: runs[flag].map(functools.partial(as_text, flag)) for flag in IN_NAMES if flag in runs}
    place = [runs['size'], runs.weight_tying]
    return {flag: values for flag, values in flags.items() if values.groupby(place).nunique().max() > 1}


def name_variants(runs):
    """
    Adds each run's name, `variant`: its method, λ if not the default, and `setting`, '' in the paper's own.
    `plain_name` is without λ; runs that share `but_for_rounding` differ by rounding at most (Fact 2).
    """
    default_cap = (runs.method == 'soft_capping') & (runs.cap == 30)
    setting = runs.cap.map(', cap {:g}'.format).where((runs.cap > 0) & ~default_cap, '')
    setting += (', from ' + runs.init_from).where(runs.init_from != '', '')
    rounding = runs.mu_shift.map(', shift {:g}'.format).where(runs.mu_shift > 0, '')
    for flag, value in flags_in_names(runs).items():
        if flag == 'logits_dtype':
            rounding += value.map({'float32': ', fp32 logits'}).fillna('')
        else:
            setting += (f', {flag} ' + value).where(value != as_text(flag, ''), '')
    name = runs.method.map(report.NAMES).fillna(runs.method)
    lam = runs.lam.map(' λ={:g}'.format).where((runs.lam >= 0) & (runs.lam != runs.method.map(METHODS)), '')
    return runs.assign(variant=name + lam + setting + rounding, plain_name=name + setting + rounding,
                       but_for_rounding=name + lam + setting, setting=setting + rounding)


def behind(runs):
    """
    1 where the test loss of a run's method, a mean over seeds, is not finite or more than 1% above the lowest
    of all methods at its size, tying, setting and learning rate; else 0, or NaN if there is no other method.
    By this rule the authors mark what "diverged": `_div` in results/Analyze_All_Models_Performance.ipynb at
    a1b753c of github.com/flxst/output-embedding-centering.
    """
    place = [runs[name] for name in ('size', 'weight_tying', 'setting', 'lr')]
    loss = runs.groupby([*place, 'variant']).test_loss.transform(lambda x: x.mean(skipna=False))
    lowest = loss.groupby(place).transform('min')
    alone = runs.variant.groupby(place).transform('nunique') == 1
    return (1.0 - ((loss - lowest) / lowest <= 0.01)).mask(alone & loss.notna())  # 1 - False: of NaN too


def check_runs(ok, runs, message):
    """Unless all runs are `ok`, ends the program with the name of the first that is not, and why."""
    check(ok.all(), f'{runs.run[ok.idxmin()]}: {message}')


def check_comparable(runs, names=COMPARABLE, by=('size', 'weight_tying')):
    """Refuses runs of one size and tying whose losses cannot be compared. An empty cell is unknown."""
    for name in names:
        value = runs[name].where(runs[name] != '')
        expected = value.groupby([runs[column] for column in by]).transform('first')
        check_runs(value.isna() | (value == expected), runs,
                   f'its {name} differs from that of other runs of its size; analyse them apart')


def complete(runs):
    """Rows of settings and results -> the runs, in the paper's order and named, or a refusal."""
    runs = runs.reindex(columns=list(dict.fromkeys([*RESULTS, *runs])))
    runs[TEXTS] = runs[TEXTS].astype(object).fillna('')
    runs = runs.fillna({'seed': 0, 'mu_shift': 0})
    runs['run'] = runs.run.where(runs.run != '', [f'line {i}' for i in range(2, len(runs) + 2)])
    check_runs(~runs.run.duplicated(), runs, 'a second row of this run')
    check_runs((runs.lr > 0) & np.isfinite(runs.lr), runs, 'its lr is not a positive number')
    check_runs(runs.weight_tying.isin([0, 1]), runs, 'its weight_tying is neither 0 nor 1')
    runs['weight_tying'] = runs.weight_tying.astype(int)
    check_comparable(runs)
    for name in ('lr', 'lam'):  # rates that print the same are the same: 0.3 and 0.30000000000000004
        runs[name] = runs[name].map('{:g}'.format).astype(float)
    runs['lam'] = runs.lam.fillna(runs.method.map(METHODS).astype(float))
    runs = name_variants(runs)
    check_comparable(runs, ['n_params'], ('variant', 'size', 'weight_tying'))
    check_runs(~runs.duplicated(['variant', 'size', 'weight_tying', 'lr', 'seed']), runs,
               'a second run of its method, size, lr and seed')

    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)  # min(L, L0) of Eq. 21, L0 if L is nan
    check_runs(runs.capped_loss.notna() | (runs.init_from != ''), runs,
               'a test_loss of nan needs an init_loss, which LRS counts for it')
    # A method's runs of another λ have a table of their own where there are some of its default.
    is_default = runs.variant == runs.plain_name
    has_default = is_default.groupby([runs.plain_name, runs['size'], runs.weight_tying]).transform('any')
    runs['at_default_lam'] = is_default | ~has_default
    runs['of_several_lam'] = runs.groupby(['weight_tying', 'plain_name']).lam.transform('nunique') > 1
    runs['behind'] = behind(runs[runs.at_default_lam])  # NaN where it is not compared
    runs['behind_lam'] = behind(runs[runs.of_several_lam])

    order = {name: i for i, name in enumerate([*SIZES, *METHODS])}  # then others
    by = ['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']
    return runs.sort_values(by, ignore_index=True, key=lambda column: (
        column.map(order).fillna(99) if column.name in ('size', 'method') else column))


# -------- csv files
def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


def read_runs(path):
    """A csv of runs, see `complete`. A column beyond RESULTS is a flag of train.py or a fork's statistic."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)  # text alone, '' where a cell is empty
    check(isinstance(rows.index, pd.RangeIndex), f'{path}: its rows are longer than its header')  # 3,55
    rows = rows.fillna('').rename(columns=lambda name: name.strip().lower())
    missing = [name for name in REQUIRED if name not in rows]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(REQUIRED)}')
    check(len(rows), f'{path}: has no runs')
    check((rows.test_loss != '').all(), f'{path}: a test_loss is empty; nan means that it was not finite')
    rows = rows.drop(columns=['diverged', 'diverged_step'], errors='ignore')  # of older versions
    for name in rows.columns.difference([*TEXTS, *IN_NAMES]):
        cells = rows[name].replace({'True': '1', 'False': '0', '': 'nan'})
        values = pd.to_numeric(cells, errors='coerce')
        wrong = cells[values.isna() & (cells.str.lower() != 'nan')]
        if name not in RESULTS and (name in FLAGS or values.isna().all()):
            del rows[name]
            continue
        check(wrong.empty, f'{path}: {name} should be a number, not {[*wrong[:1]]}')
        rows[name] = values.astype(float).replace([math.inf, -math.inf], math.nan)
    return complete(rows)


def of_runs(curves, runs):
    """Curves with the settings of their runs. lr is the run's, not that of the step."""
    names = ['run', 'size', 'weight_tying', 'lr', 'variant', 'setting', 'but_for_rounding', 'logits_dtype',
             'mu_shift']
    return runs[names].merge(curves.drop(columns='lr', errors='ignore'), on='run')


# -------- a sweep
def read_folders(folders):
    """All runs in or right below `folders`, a row each; their curves; lines on what cannot be read."""
    configs = {path for folder in folders for name in ('config.json', '*/config.json')
               for path in Path(folder).glob(name)}
    runs, curves, missing = [], [], []
    for folder in sorted(path.parent for path in configs):
        try:
            run, curve = read_run(folder)
        except Exception as error:  # of many kinds, where a file is damaged, or a run has just begun
            missing.append(f'left out: {folder}: {error} ({type(error).__name__})')
            continue
        runs.append(run)
        curves.append(curve)
        if not run['finished']:
            missing.append(f'not finished: {folder}')
    check(any(run['finished'] for run in runs),
          f'{" ".join(folders)}: no finished run in there; {"; ".join(missing[:2])}')
    return pd.DataFrame(runs), pd.concat(curves), missing


def collect(folders, out):
    """Reads and measures runs, writes three csv files -> the finished ones; all curves; what is missing."""
    everything, curves, missing = read_folders(folders)
    settings = everything.loc[everything.finished, [x for x in everything if x in {*RESULTS, *FLAGS}]]
    complete(settings)  # refuses, before anything is measured
    statistics, distributions = [], []
    for i, folder in enumerate(settings.run, 1):
        print(f'[{i}/{len(settings)}] measuring {folder}', flush=True)
        measured = {'numbers': {}, 'distributions': {}}
        try:
            measured = measure_run(Path(folder))
        except (Exception, SystemExit) as error:  # of many kinds, with another model or damaged data
            missing.append(f'{folder} is without statistics: {error} ({type(error).__name__})')
        statistics.append({**measured['numbers'], 'run': folder})
        distributions += [{'run': folder, 'quantity': name, **x}
                          for name, x in measured['distributions'].items()]
    runs = complete(settings.merge(pd.DataFrame(statistics), on='run'))

    rows = runs[list(dict.fromkeys([*RESULTS, *flags_in_names(runs), *own_statistics(runs)]))]
    write_csv(out / 'results.csv', rows.assign(test_loss=rows.test_loss.astype(object).fillna('nan')))
    write_csv(out / 'curves.csv', curves[curves.run.isin(runs.run)], '%.7g')  # enough for a plot
    write_csv(out / 'distributions.csv', pd.DataFrame(distributions))
    others = everything[~everything.finished]
    others = others.assign(variant=[f'{Path(run).name}, not finished' for run in others.run])
    return runs, of_runs(curves, pd.concat([runs, others])), missing


# -------- learning rate sensitivity
MIN_LEARNED = 0.1  # a run whose test loss is less below its start, in nats, learned nothing
PAPER_LRS = '0.0003 0.001 0.003 0.01 0.03 0.1 0.3'  # its learning rates, Eq. 18
# the LRS of the paper's tables, and what they underline, by (tying, size, variant)
PUBLISHED = pd.read_csv(Path(__file__).parent / 'tools/paper_lrs.csv',
                        index_col=['tying', 'size', 'variant'])


def learning_rate_sensitivity(runs):
    """
    LRS (Eq. 21) of each size, tying, variant and seed: `lrs` is the mean over the learning rates of
    min(L, L0) - min L, `lrs_n1` the same sum / (n - 1), as in the published tables; NaN for a variant with a
    seed that learned nothing at any learning rate, or it would be 0, the best. Left out are seeds with one
    learning rate, or with others than the seed with the most; a second list names them.
    """
    by = [*VARIANT, 'seed']
    lowest = runs.groupby(by).capped_loss.transform('min')
    runs = runs.assign(rise=runs.capped_loss - lowest, dead=lowest >= runs.init_loss - MIN_LEARNED)
    rows = runs.groupby(by, sort=False).agg(
        **{name: (name, 'first') for name in [*OF_VARIANT, 'n_params', 'dead']},
        lrs=('rise', 'mean'), n_lrs=('rise', 'count'),
        rates=('lr', lambda rates: ' '.join(f'{lr:g}' for lr in rates)),
        behind=('behind', 'max'), behind_lam=('behind_lam', 'max')).reset_index()
    rows['lrs_n1'] = rows.lrs * rows.n_lrs / (rows.n_lrs - 1).where(rows.n_lrs > 1)
    most = rows.loc[rows.groupby(VARIANT).n_lrs.transform('idxmax'), 'rates'].to_numpy()
    compared = (rows.n_lrs > 1) & (rows.rates == most)
    left_out = [f'not in LRS: {row.variant} {row.size}, {report.TYING[row.weight_tying]}, seed '
                f'{row.seed:.0f}, with learning rates {row.rates}'
                for row in rows[~compared].itertuples() if rows.n_lrs.max() >= report.MIN_RATES]
    rows = rows[compared]
    dead = rows.groupby(VARIANT).dead.transform('any')
    return rows.assign(lrs=rows.lrs.mask(dead), lrs_n1=rows.lrs_n1.mask(dead)), left_out


def mean_over_seeds(lrs_of_seeds):
    """The rows of lrs.csv; `published` is the paper's number, for its own learning rates."""
    rows = lrs_of_seeds.groupby(VARIANT, sort=False).agg(
        **{name: (name, 'first') for name in OF_VARIANT}, lrs=('lrs', 'mean'), lrs_n1=('lrs_n1', 'mean'),
        n_lrs=('n_lrs', 'max'), rates=('rates', 'first'), behind=('behind', 'max'),
        behind_lam=('behind_lam', 'max'), seeds=('seed', 'nunique'), lrs_n1_lowest=('lrs_n1', 'min'),
        lrs_n1_highest=('lrs_n1', 'max')).reset_index()
    names = pd.MultiIndex.from_arrays([rows.weight_tying.map(report.TYING), rows['size'], rows.variant])
    published = PUBLISHED.lrs.reindex(names).to_numpy()
    return rows.assign(published=np.where(rows.rates == PAPER_LRS, published, math.nan))


# -------- the program
parser = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
user_path = os.path.expanduser  # bash does not expand the ~ in --out=~/results
add = parser.add_argument
add('runs', nargs='*', type=user_path, help='run folders, or folders of them: out/demo')
add('--results', type=user_path, metavar='FILE.csv', help='a csv of runs instead')
add('--out', type=user_path, help='folder to write to (default: results/NAME, of several inputs NAME+NAME)')


def main(argv=None):
    args = parser.parse_args(argv)
    check(bool(args.runs) != bool(args.results), 'give run folders, or --results')
    inputs = args.runs or [args.results.removesuffix('results.csv').removesuffix('.csv')]
    out = Path(args.out or Path('results', '+'.join(Path(name).resolve().name for name in inputs)))

    if args.runs:
        runs, curves, missing = collect(args.runs, out)
    else:
        runs, missing = read_runs(args.results), []
        path = Path(args.results).with_name('curves.csv')
        curves = pd.read_csv(path, dtype={'run': str}) if path.exists() else pd.DataFrame(columns=['run'])
        curves = of_runs(curves, runs)
    own = own_statistics(runs)
    if own:
        missing.append(f'columns that only the table of runs shows: {", ".join(own)}')
    lrs_of_seeds, not_in_lrs = learning_rate_sensitivity(runs)
    lrs = mean_over_seeds(lrs_of_seeds)
    missing += not_in_lrs
    write_csv(out / 'lrs.csv', lrs.drop(columns=['plain_name', 'at_default_lam', 'of_several_lam']))

    tables = report.make_tables(runs, lrs, own)
    figures = report.draw_figures(runs, curves, out / 'figures')
    report.write_markdown(out / 'tables.md', tables)
    first, *others = tables  # the last is of all runs
    report.write_page(out / 'report.html', [first, *others[:-1], *figures, *others[-1:]],
                      [*report.describe(runs), *missing])

    print('', *missing, sep='\n')
    for table in tables[:-1]:
        rows = table['rows'].replace({'</?[bu]>': '', '<sub>': '(', '</sub>': ')'}, regex=True)
        print(table['title'], rows.to_string(index=False), '', sep='\n')
    print(first['message'], f'wrote {out}; open {out / "report.html"} in a browser', sep='\n')


if __name__ == '__main__':
    main()
