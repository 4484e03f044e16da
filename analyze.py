"""
From run folders, or from a csv of runs, to statistics, tables, figures and a report for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --theory                          # the paper's figures that need no runs
    python analyze.py --hf FOLDER                       # the same quantities of a model that others trained

It says first which runs are done, running, failed and waiting. Tables and figures are made from the csv files
alone, so the first two give the same.
"""
import argparse
import base64
import fcntl
import functools
import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd
import torch
from markupsafe import Markup

import data
import plots
import tables
from checkpoint import load_checkpoint
from common import (
    UserError,
    lock_folder,
    make_folder,
    number,
    parse_args,
    read_json,
    run,
    write_atomic,
    write_json,
)
from model import (
    GPT,
    METHODS,
    SIZES,
    GPTConfig,
    base_method,
    gpt_config,
    head_operands,
    logits_to_loss,
    n_chunks,
    products,
    to_logits_dtype,
)

POSITIONS = 131_072  # test positions that the statistics are taken over
WINDOWS = 20         # a run is cut into so many windows to see whether it diverged,
WINDOW_POINTS = 20   # each with at least so many log lines
MARGIN = 0.5         # nats that a window's median loss may be above that of an earlier one
CURVE_POINTS = 1000  # log lines of a run that curves.csv keeps
PUBLISHED_INIT_LOSS = {'16M': 10.83, '29M': 10.83, '57M': 10.83, '109M': 10.83, '221M': 10.85}

COLUMNS = ('method size n_params weight_tying lam cap lr seed steps logits_dtype mu_shift rounded '
           'init_loss test_loss diverged diverged_step mu_norm logit_mean logit_mean_spread logit_std '
           'logit_absmax logit_max cos_mu_h r_emb r_cos r_log rounding_loss gradient_sum lr_sum '
           'train_seconds tokens_per_second device').split()
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']
KEY = ['method', 'size', 'weight_tying', 'lam', 'lr', 'seed', 'mu_shift', 'rounded']
SUMMARY = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
# what an analysis.json was made with
ANALYSIS = {'columns': [*SUMMARY, *COLUMNS], 'positions': POSITIONS, 'logits': 'as rounded'}
DISTRIBUTIONS = [*KEY, 'diverged', 'quantity', *SUMMARY]
CURVES = [*KEY, *('diverged part step loss reg grad_norm mu_norm logit_mean logit_mean_spread logit_std '
                  'logit_absmax logit_max gradient_sum tokens_per_second mfu elapsed lr_step lr_sum').split()]
TEXT = ['method', 'size', 'logits_dtype', 'rounded', 'device', 'quantity', 'part']
SHOULD = {  # what a column should be: in words, and as a test
    'rounded': (f'one of {"; ".join(tables.SUBSETS)}', lambda x: x.isin(tables.SUBSETS)),
    **dict.fromkeys(('weight_tying', 'diverged'), ('0 or 1', lambda x: x.isin([0, 1]))),
    **dict.fromkeys(('n_params', 'steps'), ('a number above 0', lambda x: (x > 0) & (x < 1e30))),
    'init_loss': ('a number above 0', lambda x: (x > 0) & (x < math.inf)),
    'lr': ('a number above 0', lambda x: (x > 1e-40) & (x < 1e40)),
    **dict.fromkeys(('lam', 'mu_shift'), ('a number from 0', lambda x: (x >= 0) & (x < 1e30))),
    'step': ('a whole number from 0', lambda x: (x % 1 == 0) & (x >= 0) & (x < 1e15)),
    'seed': ('a whole number', lambda x: x % 1 == 0)}
PRINTABLE = ('at most 200 printable characters',
             lambda x: x.map(str.isprintable).astype(bool) & (x.str.len() <= 200))

# --------------------------------------------------------------------------------------------------
# a model -> statistics


def positions(model, windows):
    """Yields h (n, H) and targets (n,) of the positions of `windows` (N, T + 1), some of them at a time."""
    for window in windows.split(max(1, 16384 // model.config.block_size)):
        window = window.to(model.E.device)
        yield model.hidden(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()


@torch.no_grad()
def statistics(batches, E, config, mu=None):
    """
    The paper's quantities (Section 3) over the positions of `batches`, which yields h (n, H) and targets
    (n,), for output embeddings E (V, H) and their mean, never holding positions x V: a dict name -> values.

    Per position, of the logits as config rounds and caps them: logit_mean, logit_std, logit_absmax, loss,
    gradient_sum (the sum of their gradient as rounded) and rounding_loss (the loss minus that of fp32
    logits). Per position, of l_i = e_i . h in fp32: cos_mu_h, r_cos, r_log (Eq. 11), fact_3_premise (the
    premise of Fact 3 holds) and fact_3 (it does not, or the conclusion holds as well). Per token r_emb.
    """
    loss_and_gradient = torch.func.grad_and_value(logits_to_loss, has_aux=True)
    unrounded, tiny = replace(config, logits_dtype='float32'), torch.finfo(torch.float32).tiny
    E_32 = E.float()
    mu = E_32.mean(dim=0) if mu is None else mu
    norm, norm_mu = E_32.norm(dim=1), mu.norm()
    norm_star = torch.cat([(rows - mu).norm(dim=1) for rows in E_32.split(2**16)])
    r_emb = norm_star / norm.clamp_min(tiny)
    chunks = []
    for h_all, targets_all in batches:
        h_op_all, E_op = head_operands(h_all, E, config)
        # smaller chunks than in training, since a dozen tensors of n x V are held here and two there
        n = min(4 * n_chunks(h_all, E), -(-len(h_all) // 64))
        parts = h_all.float().chunk(n), h_op_all.chunk(n), targets_all.chunk(n)
        for h, h_op, targets in zip(*parts, strict=True):
            logits = to_logits_dtype(products(h_op, E_op, config), 'logits', config)
            gradient, (_, found) = loss_and_gradient(logits, targets, config)
            gradient = to_logits_dtype(gradient, 'gradient', config).to(h_op.dtype)
            found['gradient_sum'] = gradient.sum(dim=-1, dtype=torch.float64)
            del found['reg'], found['logit_mean_squared']

            exact, mu_h = h @ E_32.T, h @ mu
            exact_loss = logits_to_loss(exact, targets, unrounded, with_stats=False)[1]['loss']
            found['rounding_loss'] = found['loss'].double() - exact_loss.double()
            star = exact - mu_h[:, None]  # e*_i . h
            largest_cos = (exact.abs() / norm.clamp_min(tiny)).amax(dim=1).clamp_min(tiny)
            found['r_cos'] = (star.abs() / norm_star.clamp_min(tiny)).amax(dim=1) / largest_cos
            found['r_log'] = star.abs().amax(dim=1) / exact.abs().amax(dim=1).clamp_min(tiny)
            found['cos_mu_h'] = mu_h / (h.norm(dim=1).clamp_min(tiny) * norm_mu.clamp_min(tiny))
            chunks.append(found)
        del E_op, h_op_all  # before the next batch takes as much again
    values = {name: torch.cat([chunk[name] for chunk in chunks]).cpu() for name in chunks[0]}
    premise = (values['r_cos'] < 1) & bool((r_emb < 1).all())
    return {**values, 'r_emb': r_emb.cpu(), 'fact_3_premise': premise.float(),
            'fact_3': (~premise | (values['r_log'] < 1)).float()}


def summary(values):
    """A tensor's mean, extrema, quartiles and shares (the keys of SUMMARY), NaN if a value is not finite."""
    v = values.double()
    if not bool(torch.isfinite(v).all()):
        return dict.fromkeys(SUMMARY, math.nan)
    quartiles = v.sort().values[((len(v) - 1) * torch.linspace(0, 1, 5, dtype=torch.float64)).round().long()]
    shares = (v < 1).double().mean(), (v > 0).double().mean()
    return dict(zip(SUMMARY, [v.mean().item(), *quartiles.tolist(), *map(float, shares)], strict=True))


def analyze_run(folder):
    """
    The statistics of a finished run's model, a dict name -> number or summary. They are kept in its
    analysis.json, so that a growing sweep is not computed again.
    """
    kept, path = os.path.join(folder, 'analysis.json'), os.path.join(folder, 'model.pt')
    changed = os.path.getmtime(path) if os.path.exists(path) else 0
    if os.path.exists(kept) and os.path.getmtime(kept) >= changed:
        found = read_json(kept)
        if {**found, 'statistics': {}} == {**ANALYSIS, 'statistics': {}}:  # else an older version wrote it
            return found['statistics']
    checkpoint = load_checkpoint(path, ('model', 'config'), 'train this run again')
    try:
        settings = checkpoint['config']
        model = GPT(gpt_config(settings)).to(getattr(torch, settings['dtype'].replace('bfloat16', 'float32')))
        model.load_state_dict(checkpoint['model'])
        where, block_size, vocab_size = settings['data'], settings['block_size'], settings['vocab_size']
    except Exception as error:  # of any kind, since the file may hold anything
        raise UserError(f'{path}: not a model of this project ({str(error)[:150]})') from error
    shards = data.load_shards(where, 'val')
    n = min(max(1, POSITIONS // block_size), int(data.count_windows(shards, block_size).sum()))
    windows = torch.from_numpy(data.read_windows(shards, block_size, np.arange(n), vocab_size))
    model.to('cuda' if torch.cuda.is_available() else 'cpu')
    with torch.no_grad():
        values = statistics(positions(model, windows), model.E, model.config)
    found = {name: summary(v) for name, v in values.items()}
    for name in ('rounding_loss', 'gradient_sum'):  # means over positions
        found[name] = found[name]['mean']
    found['logit_mean_spread'] = values['logit_mean'].double().std(correction=0).item()
    found['logit_max'] = values['logit_absmax'].max().item()
    found['mu_norm'] = model.E.detach().mean(dim=0).norm().item()
    write_json(kept, {**ANALYSIS, 'statistics': found})
    return found


# --------------------------------------------------------------------------------------------------
# run folders: their states and logs


def run_states(folders):
    """The runs in or right below `folders`, and those a sweep has planned there -> a dict folder -> state."""
    states = {}
    for folder in map(os.path.normpath, folders):
        if not os.path.isdir(folder):
            raise UserError(f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        planned = [os.path.join(folder, name) for name in read_lines(os.path.join(folder, 'logs', 'plan'))]
        below = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
        begun = [path for path in (folder, *below) if os.path.exists(os.path.join(path, 'config.json'))]
        states.update((path, run_state(path)) for path in (*planned, *begun))
    return states


def run_state(path):
    """'done', 'running' (a process holds its lock), 'failed' (its sweep says so) or 'waiting'."""
    if os.path.exists(os.path.join(path, 'result.json')):
        return 'done'
    if os.path.exists(os.path.join(path, '.lock')):
        with open(os.path.join(path, '.lock')) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return 'running'
    return 'failed' if os.path.exists(sweep_log(path, '.failed')) else 'waiting'


def sweep_log(path, ending):
    return os.path.join(os.path.dirname(path), 'logs', os.path.basename(path) + ending)


def print_states(states):
    """How many runs are in which state, how far each running one is, and which have failed."""
    count = Counter(states.values())
    order = ('done', 'running', 'failed', 'waiting')
    print(f'{len(states)} runs: ' + ', '.join(f'{count[state]} {state}' for state in order), flush=True)
    for path, state in states.items():
        if state == 'running':
            config = os.path.join(path, 'config.json')
            steps = read_json(config).get('steps') if os.path.exists(config) else '?'
            print(f'  running: {path}, step {max([e["step"] for e in read_log(path)], default=0)} of {steps}')
        elif state == 'failed':
            print(f'  failed: {path}, see {sweep_log(path, ".log")}')


def read_lines(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8', errors='replace') as file:
        return file.read().splitlines()


def read_log(folder):
    """The lines of a run's log as dicts of numbers; a line that is none, such as half a line, is left out."""
    entries = []
    for line in read_lines(os.path.join(folder, 'log.jsonl')):
        try:
            entry = json.loads(line)
            needed = entry['step'], entry['lr'] if 'loss' in entry else 0
            sum(needed) + sum(value for value in entry.values() if value is not None)
            entries.append(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
    return entries


def training_curve(entries):
    """
    The training lines of a log, at most CURVE_POINTS of them, as a DataFrame: the learning rate as lr_step,
    and lr_sum, the sum of the learning rates so far, taken as linear between log lines.
    """
    curve = pd.DataFrame([e for e in entries if 'loss' in e]).rename(columns={'lr': 'lr_step'})
    if curve.empty:
        return curve
    mean_lr = (curve.lr_step + curve.lr_step.shift(fill_value=curve.lr_step[0])) / 2
    curve['lr_sum'] = (curve.step.diff().fillna(curve.step[0]) * mean_lr).cumsum()
    return curve[::-1][::math.ceil(len(curve) / CURVE_POINTS)][::-1]  # the last line is always there


def diverged(steps, losses, n_steps, warmup):
    """
    Whether a run of n_steps diverged, from the steps (n,) and training losses (n,) in its log: a loss is not
    finite, or the median loss of a window of 5% of the steps is more than MARGIN above the lowest such median
    before it, counting the windows that begin after warm-up.

    Returns (1, the step of that loss or the first step of that window), (0, None), or (None, None) if a
    window has fewer than WINDOW_POINTS log lines.
    """
    steps, losses = np.array(steps, int), np.array(losses, float)
    if not np.isfinite(losses).all():
        return 1, int(steps[~np.isfinite(losses)].min())
    window = (steps - 1) * WINDOWS // n_steps
    if np.bincount(window, minlength=WINDOWS).min() < WINDOW_POINTS:
        return None, None
    lowest = math.inf
    for i in range(WINDOWS):
        first_step, median = math.ceil(i * n_steps / WINDOWS) + 1, np.median(losses[window == i])
        if first_step > warmup:
            if median > lowest + MARGIN:
                return 1, first_step
            lowest = min(lowest, median)
    return 0, None


# --------------------------------------------------------------------------------------------------
# csv files


def write_csv(path, rows):
    """Writes a DataFrame: whole numbers without a point, unknown ones empty, but a test loss as nan."""
    def show(x, column):
        if pd.isna(x):
            return 'nan' if column == 'test_loss' else ''
        return int(x) if isinstance(x, float) and x.is_integer() and abs(x) < 2**53 else x
    cells = pd.DataFrame({column: [show(x, column) for x in rows[column]] for column in rows}, dtype=object)
    write_atomic(path, lambda file: cells.to_csv(file, index=False, lineterminator='\n'), mode='w')


def parse(cells, required):
    """
    A DataFrame of texts, whose index says where they are from -> texts in the columns TEXT, numbers in the
    others; an empty cell is what tables.DEFAULTS says, or '' or NaN. Raises UserError with the place and
    column of the first cell that is not right.
    """
    parsed = {}
    for column, words in cells.items():
        words = words.str.strip().replace('', str(tables.DEFAULTS.get(column, '')))
        if column in TEXT:
            wanted, holds = SHOULD.get(column, PRINTABLE)
            values, good = words, holds(words)
        else:
            words = words.str.lower().replace({'true': '1', 'false': '0'})
            values = pd.to_numeric(words, errors='coerce')
            values = words.where(values.notna(), 'nan').astype(float)  # all bits, unlike to_numeric's
            wanted, holds = SHOULD.get(column, ('a number', lambda x: x.notna()))
            good = holds(values) | (words == '') | (words == 'nan') & (column not in SHOULD)
        if column in required:
            good &= words != ''
        if not good.all():
            where = good.idxmin()
            raise UserError(f'{where}: {column} should be {wanted}, is {words[where][:80]!r}')
        parsed[column] = values
    return pd.DataFrame(parsed)


def read_csv(path, columns, required):
    """These columns of a csv, parsed; one that it lacks is empty. Raises UserError if it is no such csv."""
    try:
        with open(path, encoding='utf-8-sig', newline='') as file:
            # with header=None no line may have more cells than the first; the C engine ends a cell at a NUL
            cells = pd.read_csv(file, header=None, dtype=str, keep_default_na=False, engine='python')
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: not readable as csv ({error})') from error
    names, *lines = cells.fillna('').values.tolist()
    names = [name.strip() for name in names]
    missing = [column for column in required if column not in names]
    if missing:
        raise UserError(f'{path}: no column {", ".join(missing)}; the first line should name the columns, '
                        'separated by commas')
    if len(set(names)) < len(names):
        raise UserError(f'{path}: a column is there twice')
    cells = pd.DataFrame(lines, [f'{path} line {n}' for n, _ in enumerate(lines, 2)], names, dtype=str)
    return parse(cells.reindex(columns=columns, fill_value=''), required)


def complete(runs, source):
    """
    Fills in what follows from method, size and schedule, and orders the rows as the paper does. Raises
    UserError, naming the source, if two are of the same run.
    """
    base, published = runs.method.map(base_method), runs['size'].map(PUBLISHED_INIT_LOSS)
    default_lam = base.map(METHODS).astype(float)
    runs['lam'] = runs.lam.fillna(default_lam).where(default_lam.notna() | ~base.isin(METHODS))
    runs['init_loss'] = runs.init_loss.fillna(published)
    runs['n_params'] = runs.n_params.fillna(runs['size'][published.notna()].map(n_params))
    # by default a warm-up over 5% of the steps, then a cosine to 1e-5
    runs['lr_sum'] = runs.lr_sum.fillna(runs.steps * (0.05 * runs.lr + 0.95 * (runs.lr + 1e-5)) / 2)
    runs.loc[runs.diverged.isna() & ~np.isfinite(runs.test_loss), 'diverged'] = 1
    for _, twice in runs[runs.duplicated(KEY)].iterrows():
        raise UserError(f'{source}: the same run is there twice: ' + ', '.join(f'{k}={twice[k]}' for k in KEY)
                        + '; several seeds need a seed column, other differences another file or folder')
    return tables.in_paper_order(tables.derive(runs))


@functools.cache
def n_params(size):
    """N of one of the paper's sizes."""
    with torch.device('meta'):
        return GPT(GPTConfig(**SIZES[size])).n_params()


def read_results(folders):
    """The result.json of finished runs as rows of results.csv, and their folders in a column `folder`."""
    cells, where = [], [os.path.join(folder, 'result.json') for folder in folders]
    for path in where:
        result = read_json(path)
        cells.append(['' if result.get(column) is None else str(result[column]) for column in COLUMNS])
    runs = parse(pd.DataFrame(cells, where, COLUMNS, dtype=str), REQUIRED)
    return complete(runs.assign(folder=folders), 'the runs')


def write_csvs(runs, out):
    """The runs of read_results -> results.csv, distributions.csv, curves.csv and settings.json in `out`."""
    rows, distributions, curves, settings = runs.to_dict('records'), [], [], {}
    for i, row in enumerate(rows, 1):
        folder = row['folder']
        print(f'[{i}/{len(runs)}] {folder}', flush=True)
        found, log = analyze_run(folder), read_log(folder)
        config = read_json(os.path.join(folder, 'config.json'))
        for name, value in found.items():
            if name in COLUMNS:
                row[name] = value['mean'] if isinstance(value, dict) else value
        if math.isfinite(row['test_loss']):  # else a loss or gradient was not finite, and training says when
            train = [e for e in log if 'loss' in e]
            row['diverged'], row['diverged_step'] = diverged(
                [e['step'] for e in train], [e['loss'] for e in train], config['steps'], config['warmup'])

        # with --init_from the curve begins with what the other run went through before
        start = log[0]['step'] if config.get('init_from') and log else 0
        other = config['init_from'] if start else ''
        other = other if os.path.isdir(other) else os.path.dirname(other)
        before = [e for e in read_log(other) if e['step'] <= start] if start else []
        curve = training_curve(before + log)
        own = {column: row[column] for column in (*KEY, 'diverged')}
        if len(curve):
            part = np.where(curve.step <= start, 'before', 'rescue') if start else ''
            curves.append(curve.assign(**own, part=part))
        if before:
            row['lr_sum'] = curve.lr_sum.iloc[-1]

        distributions += [{**own, 'quantity': name, **v} for name, v in found.items() if isinstance(v, dict)]
        for key, value in config.items():
            value = ', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value
            if key != 'out' and value not in settings.setdefault(key, []):
                settings[key].append(value)
    curves = pd.concat(curves) if curves else pd.DataFrame()
    curves = curves.reindex(columns=list(dict.fromkeys([*CURVES, *curves])))
    files = {'results': pd.DataFrame(rows)[COLUMNS], 'curves': curves,
             'distributions': pd.DataFrame(distributions, columns=DISTRIBUTIONS)}
    for name, part in files.items():
        write_csv(os.path.join(out, f'{name}.csv'), part)
    write_json(os.path.join(out, 'settings.json'), settings)


def from_csv(path):
    """
    A csv of runs -> (runs, distributions, curves, settings): DataFrames, and a dict name -> list of values.
    All but the first are empty unless the csv is called results.csv and has the other files beside it.
    """
    def beside(name):
        other = os.path.join(os.path.dirname(path), name)
        return other if os.path.basename(path) == 'results.csv' and os.path.exists(other) else None
    runs = read_csv(path, COLUMNS, REQUIRED)
    if runs.empty:
        raise UserError(f'{path}: it has no runs, only a first line')
    found = [complete(runs, path)]
    for name, columns in {'distributions.csv': DISTRIBUTIONS, 'curves.csv': CURVES}.items():
        none = parse(pd.DataFrame(columns=columns, dtype=str), ())
        part = read_csv(beside(name), columns, REQUIRED[:4]) if beside(name) else none
        found.append(tables.in_paper_order(tables.derive(part)))
    settings = read_json(beside('settings.json')) if beside('settings.json') else {}
    if not all(isinstance(values, list) for values in settings.values()):
        raise UserError(f'{beside("settings.json")}: each setting should have a list of values')
    for name in ('batch_size', 'block_size'):
        if not all(isinstance(value, int) for value in settings.get(name, [])):
            raise UserError(f'{beside("settings.json")}: {name} should be a list of whole numbers')
    return *found, settings


# --------------------------------------------------------------------------------------------------
# tables, figures, report


def make_tables(runs, settings, out):
    """
    Writes lrs.csv, tables.md and tables.tex -> (rows of lrs.csv, the tables, lines on what is missing). Runs
    with a shifted mean, or without a rounding, are in tables of their own.
    """
    every_run, runs = runs, tables.usual(runs)
    lrs, missing = tables.lrs_table(runs)
    write_csv(os.path.join(out, 'lrs.csv'), lrs[tables.LRS_COLUMNS])
    lrs = lrs[lrs.n_lrs > 1]
    overhead, lines = tables.overhead_tables(runs)
    missing += lines
    if lrs.empty:
        missing.append('no LRS tables: no method was run at two learning rates of one size')
    largest = runs.lr == runs.groupby(['size', 'weight_tying']).lr.transform('max')
    shown = [*tables.lrs_tables(lrs), *tables.ranking_tables(lrs), *tables.sensitivity_tables(lrs), *overhead,
             *([] if lrs.empty else [tables.excess_table(runs, lrs)]), *tables.shift_tables(every_run),
             *([] if runs.empty else [tables.run_table(runs[largest], 'At the largest learning rate')]),
             *([tables.hyperparameter_table(settings)] if settings else []), tables.methods_table()]
    markdown = [tables.text(table, 'markdown') for table in (*shown, tables.run_table(every_run))]
    files = {'tables.md': '\n\n'.join(markdown) + '\n', 'tables.tex': tables.latex_document(shown)}
    for name, text in files.items():
        write_atomic(os.path.join(out, name), lambda file, text=text: file.write(text), mode='w')
    print('\n' + '\n\n'.join(map(tables.text, shown)) + '\n')
    return lrs, shown, [] if runs.empty else missing  # then draw says so in one line


def draw(runs, lrs, distributions, curves, method, folder):
    """Draws every figure that the data have -> (the figures for the report, lines on those they lack)."""
    def having(rows, *columns):
        return rows if any(plots.drawable(rows[column]).any() for column in columns) else rows[:0]

    drawn, missing = [], []
    for tying, word, every_run in tables.tyings(runs):
        part, every_log = tables.usual(every_run), curves[curves.weight_tying == tying]
        finite = part[plots.drawable(part.capped_loss)]
        tuned = finite[finite.groupby('method').lam.transform('nunique') > 1]
        sized = lrs[(lrs.weight_tying == tying) & lrs.n_params.notna() & (lrs.lrs > 0)]
        spread = tables.usual(distributions)
        spread = spread[(spread.weight_tying == tying) & (spread.variant == method)]
        logs = tables.usual(every_log)
        rescued, logs = logs[logs.part != ''], logs[logs.part != 'before']
        plan = [  # a figure, what it is of, and what it draws: none if the first of these is empty
            ('loss', '', finite),
            ('lrs', '', sized if sized.n_params.nunique() > 1 else sized[:0]),
            ('statistics', '', having(part, *plots.STATISTICS)),
            ('fact3', method, having(part[part.method == method], *plots.FACT_3)),
            ('distributions', method, having(spread, 'median')),
            ('sensitivity', '', tuned, sized),
            ('drift', '', having(part[part.lr_sum > 0], 'mu_norm', 'logit_mean'), logs),
            *(('curves', size, logs[logs['size'] == size]) for size in part['size'].unique()),
            *([('rescue', '', rescued)] if (rescued.part == 'rescue').any() else [])]
        if part.empty:
            plan = []
            missing.append(f'the {word} models have only the tables and figures of a shifted mean: each run '
                           'has --mu_shift or leaves out a rounding')
        shift = tables.shifted(every_run)
        if len(shift):
            shift = shift[shift.label != '']
            climbs = every_log[(every_log.method == 'baseline') & (every_log.mu_shift > 0)]
            plan = [('shift', '', having(shift, 'excess')),
                    ('mean_logit', '', having(climbs, 'logit_mean')), *plan]
        for key, of, *rows in plan:
            function, title, where = plots.FIGURES[key]
            title = title.format(tables.name(of)) + f', {word}'
            if rows[0].empty:
                missing.append(f'no figure "{title}": there are no data for it')
                continue
            file = re.sub(r'[^\w.-]', '_', f'{key}_{of}_{word}' if key == 'curves' else f'{key}_{word}')
            print(f'drawing {file}', flush=True)
            function(*rows, os.path.join(folder, file))
            drawn.append({'title': title, 'where': where[tying], 'says': function.__doc__, 'file': file})
    return drawn, missing


def draw_theory(folder):
    """Draws the paper's figures that follow from formulas -> the same dicts as `draw`."""
    for file, (function, _, _) in plots.THEORY.items():
        function(os.path.join(folder, file))
    return [{'title': title, 'where': where, 'says': function.__doc__, 'file': file}
            for file, (function, title, where) in plots.THEORY.items()]


def write_report(out, runs, shown, missing, settings, unfinished, sentence):
    """report.html in `out`, one file that needs no other: a sentence, and the tables and figures `shown`."""
    def image(file):
        with open(os.path.join(out, 'figures', f'{file}.png'), 'rb') as png:
            return base64.b64encode(png.read()).decode()

    def grid(table):
        return Markup(tables.grid(table, 'html'))

    all_runs = tables.run_table(runs) if len(runs) else None
    if 'folder' in runs:
        all_runs['header'].append('log')
        for line, folder in zip(all_runs['rows'], runs.folder, strict=True):
            log = quote(os.path.relpath(os.path.join(folder, 'log.jsonl'), out))
            line.append(Markup('<a href="{}">log</a>').format(log))
    values = [[key, ', '.join(map(str, values))] for key, values in settings.items()]
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, 'report_template.html'), encoding='utf-8') as file:
        template = jinja2.Template(file.read(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = template.render(
        title=os.path.basename(os.path.abspath(out)), runs=runs, unfinished=unfinished, shown=shown,
        missing=missing, all_runs=all_runs, settings={'header': ['setting', 'values'], 'rows': values},
        sentence=sentence, image=image, grid=grid)
    write_atomic(os.path.join(out, 'report.html'), lambda file: file.write(html), mode='w')


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    p.add_argument('--results', metavar='FILE.csv',
                   help=f'a csv of runs instead; it needs {", ".join(REQUIRED)}, all else may be missing')
    p.add_argument('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    p.add_argument('--method', help='the method whose Fact 3 is drawn (default baseline, or the first one)')
    p.add_argument('--hf', nargs='+', metavar='FOLDER',
                   help='models in Hugging Face format instead, in folders or on the hub, see hf.py')
    p.add_argument('--text', metavar='FILES',
                   help='with --hf: a quoted glob of .txt, .jsonl or .parquet files (column: text); default: '
                        "the source of Python's standard library")
    p.add_argument('--positions', type=number(least=0, whole=True), default=POSITIONS,
                   help=f'with --hf: how many tokens of it, 0 for none (default {POSITIONS:,})')
    p.add_argument('--drop_odd_rows', action='store_true',
                   help='with --hf: leave rows out of the mean that are padding, equal or of one norm')
    p.add_argument('--center_to', metavar='NEW',
                   help='with --hf: write the model with centered output embeddings there')
    p.add_argument('--theory', action='store_true',
                   help="the paper's figures that need no runs (Fig. 1, 6 and 7), alone or with the others")
    args = parse_args(p, argv)
    if args.hf:
        if args.runs or args.results or args.theory or args.method:
            raise UserError('--hf goes with --text, --positions, --drop_odd_rows, --center_to and --out')
        import hf
        return hf.main(args)
    if args.text or args.drop_odd_rows or args.center_to:
        raise UserError('--text, --drop_odd_rows and --center_to need --hf=FOLDER')
    if args.runs and args.results or not (args.runs or args.results or args.theory):
        raise UserError('give run folders, such as out/demo, or --results=FILE.csv, --theory or --hf=FOLDER')

    # what there is
    runs, settings, unfinished, source = pd.DataFrame({'method': []}), {}, 0, 'theory'
    if args.runs:
        source = args.runs[0]
        states = run_states(args.runs)
        print_states(states)
        done = [path for path, state in states.items() if state == 'done']
        unfinished = len(states) - len(done)
        if not done:
            raise UserError(f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        runs = read_results(done)
    elif args.results:
        source = os.path.splitext(os.path.abspath(args.results))[0]
        source = os.path.dirname(source) if os.path.basename(source) == 'results' else source
        runs, distributions, curves, settings = from_csv(args.results)
    methods = list(runs.method.unique())
    if args.method and args.method not in methods:
        raise UserError(f'--method={args.method}: should be one of those of the runs ({", ".join(methods)})')
    method = args.method or ('baseline' if 'baseline' in methods else methods[0] if methods else None)
    out = args.out or os.path.join('results', os.path.basename(os.path.abspath(source)))

    # what is made of it
    make_folder(out)
    with lock_folder(out, wait=True):
        shown, missing, figures = [], [], os.path.join(out, 'figures')
        if args.runs:
            write_csvs(runs, out)
            folders = runs.folder
            runs, distributions, curves, settings = from_csv(os.path.join(out, 'results.csv'))
            runs['folder'] = folders
        if len(runs):
            lrs, made, missing = make_tables(runs, settings, out)
            shown, lines = draw(runs, lrs, distributions, curves, method, figures)
            shown, missing = shown + made, missing + lines
        if args.theory:
            shown += draw_theory(figures)
        for line in missing:
            print(line)
        sentence = tables.shift_sentence(runs) if len(runs) else ''
        write_report(out, runs, shown, missing, settings, unfinished, sentence)
    names = ', '.join(sorted(name for name in os.listdir(out) if not name.startswith('.')))
    print(f'wrote {out}: {names}; open {os.path.join(out, "report.html")} in a browser')
    if sentence:
        print(sentence)
    return 0


if __name__ == '__main__':
    run(main)
