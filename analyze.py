"""
From run folders, or from a csv of runs, to statistics, tables, figures and a report that opens in a browser.

    python analyze.py out/demo                            # reads checkpoints, writes results/demo/
    python analyze.py --results=results.csv --out=DIR     # tables and figures of any such csv, no checkpoints needed
    python analyze.py --theory                            # the paper's figures that need no runs, into results/theory/

Tables and figures are made from the csv rows alone, so the first two give the same.
"""
import argparse
import base64
import csv
import functools
import io
import json
import math
import os
import re
import zipfile
from dataclasses import replace
from urllib.parse import quote

import jinja2
import torch

import data
import plots
import tables
from common import die, lock_folder, make_folder, parse_args, read_json, run, write_atomic, write_json
from model import GPT, LAM, METHODS, SIZES, GPTConfig, gpt_config, head_mode, head_stats, n_chunks

POSITIONS = 131_072  # test positions that the statistics are taken over

COLUMNS = ('method size n_params weight_tying lam cap lr seed steps logits_dtype init_loss test_loss diverged diverged_step mu_norm '
           'logit_mean logit_mean_spread logit_std logit_absmax logit_max cos_mu_h r_emb r_cos r_log rounding_loss lr_sum train_seconds '
           'tokens_per_second device').split()
REQUIRED = ('method', 'size', 'weight_tying', 'lr', 'test_loss')
TEXT = ('method', 'size', 'logits_dtype', 'device', 'quantity', 'part')
KEY = ('method', 'size', 'weight_tying', 'lam', 'lr', 'seed')
LRS_COLUMNS = ('size weight_tying method lam lrs lrs_n1 n_lrs diverged seeds lrs_low lrs_high best_lr best_loss largest_lr largest_lr_loss '
               'excess excess_low excess_high').split()
DISTRIBUTION = ('mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0')
LIMITS = {  # what a number in a csv should be
    'weight_tying': ('0 or 1', lambda x: x in (0, 1)), 'diverged': ('0 or 1', lambda x: x in (0, 1)),
    'lr': ('above 0', lambda x: 1e-40 < x < 1e40), 'lam': ('0 or above', lambda x: 0 <= x < 1e30),
    'seed': ('a whole number', lambda x: math.isfinite(x) and x == int(x)), 'steps': ('a number above 0', lambda x: 0 < x < 1e30),
    'n_params': ('a number above 0', lambda x: 0 < x < 1e30), 'init_loss': ('a number above 0', lambda x: 0 < x < math.inf)}
DISTRIBUTED = ('logit_mean', 'logit_std', 'logit_absmax', 'cos_mu_h', 'r_cos', 'r_log', 'r_emb', 'fact_3', 'fact_3_premise')
SCALARS = ('logit_mean_spread', 'logit_max', 'mu_norm', 'rounding_loss')
CURVE_POINTS = 1000  # log lines of a run that curves.csv keeps
PUBLISHED_INIT_LOSS = {'16M': 10.83, '29M': 10.83, '57M': 10.83, '109M': 10.83, '221M': 10.85}  # where a csv has none


# ----------------------------------------------------------------------------------------------------------------------
# checkpoints -> statistics


@torch.no_grad()
def statistics(model, windows):
    """
    The paper's quantities (Section 3) over the positions of `windows` (n, T + 1), in fp32, never holding positions x V.

    Returns a dict name -> values: per position logit_mean, logit_std, logit_absmax (of the capped logits where the model
    caps them), cos_mu_h, r_cos, r_log (Eq. 11, of l_i = e_i . h); per token r_emb; fact_3, 1 for the positions at which
    the premise of Fact 3 does not hold or its conclusion does, and fact_3_premise.
    """
    c = model.config
    E = model.E.float()
    mu = E.mean(dim=0)
    tiny = torch.finfo(torch.float32).tiny
    norm, norm_star, norm_mu = E.norm(dim=1), (E - mu).norm(dim=1), mu.norm()
    r_emb = norm_star / norm.clamp_min(tiny)
    columns = []
    for window in windows.split(max(1, 16384 // c.block_size)):
        h_all = model.hidden(window[:, :-1].to(E.device)).flatten(0, 1).float()
        for h in h_all.chunk(4 * n_chunks(h_all, E)):  # a dozen tensors of n x V here, where the head has two
            l = h @ E.T
            l_mu = h @ mu
            norm_h = h.norm(dim=1).clamp_min(tiny)
            l_star = l - l_mu[:, None]
            largest, largest_star = l.abs().amax(dim=1).clamp_min(tiny), l_star.abs().amax(dim=1)
            r_cos = (l_star.abs() / norm_star.clamp_min(tiny)).amax(dim=1) / (l.abs() / norm.clamp_min(tiny)).amax(dim=1).clamp_min(tiny)
            if c.head_mode == 'soft_capping':
                l = c.cap * torch.tanh(l / c.cap)
            columns.append(torch.stack([l.mean(dim=1), l.std(dim=1, correction=0), l.abs().amax(dim=1),
                                        l_mu / (norm_h * norm_mu.clamp_min(tiny)), r_cos, largest_star / largest]))
    values = dict(zip(('logit_mean', 'logit_std', 'logit_absmax', 'cos_mu_h', 'r_cos', 'r_log'), torch.cat(columns, dim=1).cpu()))
    premise = (values['r_cos'] < 1) & bool((r_emb < 1).all())
    return {**values, 'r_emb': r_emb.cpu(), 'fact_3_premise': premise.float(), 'fact_3': (~premise | (values['r_log'] < 1)).float()}


@torch.no_grad()
def rounding_loss(model, windows):
    """
    What rounding h, E and the logits to logits_dtype costs: the loss in nats over `windows` (n, T + 1) with it, minus that of
    the same weights with logits in fp32.
    """
    total = torch.zeros((), dtype=torch.float64)
    for window in windows.split(max(1, 16384 // model.config.block_size)):
        window = window.to(model.E.device)
        h, targets = model.hidden(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        for sign, config in (1, model.config), (-1, replace(model.config, logits_dtype='float32')):
            total += sign * head_stats(h, model.E, targets, config, with_stats=False)[0].cpu().double()
    return total.item() / windows[:, 1:].numel()


def summary(values):
    """DISTRIBUTION of a tensor of values as a dict: mean, extrema, quartiles, the share below 1 and above 0."""
    v = values.double()
    if not bool(torch.isfinite(v).all()):
        return dict.fromkeys(DISTRIBUTION, math.nan)
    q = v.sort().values[((len(v) - 1) * torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])).round().long()]
    return {'mean': v.mean().item(), **dict(zip(('min', 'q25', 'median', 'q75', 'max'), q.tolist())),
            'below_1': (v < 1).double().mean().item(), 'above_0': (v > 0).double().mean().item()}


def analyze_run(folder):
    """
    One finished run -> (row of results.csv, its distributions as a dict name -> summary). The statistics are kept in the
    run's analysis.json, so that a growing sweep is not computed again.
    """
    row = {**dict.fromkeys(COLUMNS), **read_json(os.path.join(folder, 'result.json'))}
    for column in COLUMNS:
        cell(f'{folder}/result.json', column, '' if row[column] is None else str(row[column]), REQUIRED)
    kept, path = os.path.join(folder, 'analysis.json'), os.path.join(folder, 'model.pt')
    found = read_json(kept) if os.path.exists(kept) and not (os.path.exists(path) and os.path.getmtime(kept) < os.path.getmtime(path)) else {}
    if not all(isinstance(found.get(name), dict) and set(found[name]) == set(DISTRIBUTION) for name in DISTRIBUTED) or not all(
            isinstance(found.get(name), (int, float)) for name in SCALARS):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():  # torch does not look at the checksums
                    raise ValueError(f'{archive.testzip()} is damaged')
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
            s = checkpoint['config']
            model = GPT(gpt_config(s))
            model.load_state_dict(checkpoint['model'])
        except Exception as error:
            die(f'{path}: not a model of this project ({" ".join(str(error).split())[:150] or type(error).__name__})')
        if s['dtype'] == 'float64':
            model.double()
        shards = data.load_shards(s['data'], 'val')
        n = min(max(1, POSITIONS // s['block_size']), int(data.count_windows(shards, s['block_size']).sum()))
        windows = torch.from_numpy(data.read_windows(shards, s['block_size'], torch.arange(n).numpy(), s['vocab_size']))
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
        values = statistics(model.to(device), windows)
        found = {**{name: summary(v) for name, v in values.items()},
                 'logit_mean_spread': values['logit_mean'].double().std(correction=0).item(),
                 'logit_max': values['logit_absmax'].max().item(), 'mu_norm': model.E.detach().mean(dim=0).norm().item(),
                 'rounding_loss': rounding_loss(model, windows)}
        write_json(kept, found)
    distributions = {name: value for name, value in found.items() if isinstance(value, dict)}
    row.update({name: found[name] for name in SCALARS})
    row.update({name: distributions[name]['mean'] for name in distributions if name in COLUMNS})
    return row, distributions


def read_log(path):
    """The entries of a run's log.jsonl as dicts; lines that are none (a disk that was full), or of something else than numbers, are passed over."""
    entries = []
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    entry['step'] + sum(v for v in entry.values() if v is not None) + (entry['lr'] if 'loss' in entry else 0)
                    entries.append(entry)
                except (ValueError, TypeError, KeyError, AttributeError):
                    pass
    return entries


def training_curve(entries):
    """
    The log lines of a run's training, at most CURVE_POINTS of them, their lr as lr_step (lr is the run's), and with lr_sum,
    the sum of the learning rates so far, taken as linear between log lines.
    """
    lines, lr_sum, step, lr = [e for e in entries if 'loss' in e], 0.0, 0, None
    for e in lines:
        e['lr_step'] = e.pop('lr')
        lr_sum += (e['step'] - step) * (e['lr_step'] if lr is None else (e['lr_step'] + lr) / 2)
        e['lr_sum'], step, lr = lr_sum, e['step'], e['lr_step']
    every = -(-len(lines) // CURVE_POINTS) or 1
    return lines[::-1][::every][::-1]  # the last is always there


def find_runs(folders):
    """The run folders (those with a config.json) among `folders` and right below them -> (finished, unfinished)."""
    found = []
    for folder in folders:
        if not os.path.isdir(folder):
            die(f'{folder}: no such folder; give run folders or a sweep such as out/demo')
        candidates = [folder] + sorted(os.path.join(folder, name) for name in os.listdir(folder))
        found += [f for f in candidates if os.path.exists(os.path.join(f, 'config.json'))]
    done = [f for f in found if os.path.exists(os.path.join(f, 'result.json'))]
    return done, [f for f in found if f not in done]


# ----------------------------------------------------------------------------------------------------------------------
# csv files


def write_csv(path, columns, rows):
    """Writes rows (dicts) under `columns`, atomically; None and what a row lacks is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(columns)
    writer.writerows([['' if row.get(c) is None else row[c] for c in columns] for row in rows])
    write_atomic(path, lambda file: file.write(text.getvalue()), mode='w')


def cell(where, column, value, required=()):
    """The value of a csv's cell: text in the columns TEXT, a number elsewhere, None where it is empty. Exits with 2 where it is none of these."""
    if not value:
        if column in required:
            die(f'{where}: {column} is empty')
        return None
    if column in TEXT:
        if not value.isprintable():
            die(f'{where}: {column} has characters that cannot be printed')
        return value
    if column in ('weight_tying', 'diverged'):
        value = {'true': '1', 'false': '0'}.get(value.lower(), value)
    wanted, holds = LIMITS.get(column, ('', lambda x: True))
    try:
        number = float(value.replace('_', 'no number'))
    except ValueError:
        die(f'{where}: {column} should be a number, is {value!r}')
    if not holds(number):
        die(f'{where}: {column} should be {wanted}, is {value!r}')
    return number


def read_csv(path, columns=None, required=()):
    """
    The rows of a csv as dicts with `columns` (all that it has if None): text in the columns TEXT and numbers elsewhere,
    None where there is nothing. Exits with 2 where a required column or value is missing, or a number is none.
    """
    try:
        with open(path, encoding='utf-8-sig', newline='') as file:
            reader = csv.DictReader(file)
            lines, found = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        die(f'{path}: not readable as csv ({error})')
    missing = [c for c in required if c not in found]
    if missing:
        die(f'{path}: no column {", ".join(missing)}; the first line should name the columns, separated by commas')
    if not lines:
        die(f'{path}: it has no runs, only a first line')
    if len(set(found)) < len(found):
        die(f'{path}: a column stands there twice')
    columns = found if columns is None else columns
    rows = []
    for n, line in enumerate(lines, 2):
        row = dict.fromkeys(columns)
        if None in line:
            die(f'{path} line {n}: more cells than the first line has columns')
        for column in columns:
            row[column] = cell(f'{path} line {n}', column, (line.get(column) or '').strip(), required)
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# csv rows -> tables, figures, report


@functools.cache
def n_params(size):
    """N of one of the paper's sizes."""
    with torch.device('meta'):
        return GPT(GPTConfig(**SIZES[size])).n_params()


def paper_order(row):
    """Sorts rows as the paper does: by tying, size, method, λ, learning rate, seed."""
    order = {name: i for i, name in enumerate((*SIZES, *METHODS))}
    return (row['weight_tying'], order.get(row['size'], 99), row['size'], order.get(row['method'], 99), row['method'], row['lam'] or 0, row['lr'],
            row['seed'] or 0)


def complete(rows, source='the runs'):
    """Fills in what follows from the size and the schedule, orders the rows as the paper does, and refuses two rows of the same run."""
    for r in rows:
        if head_mode(r['method']) in METHODS:  # an empty λ is the method's default, and a method without one has none
            default = LAM.get(head_mode(r['method']))
            r['lam'] = None if default is None else default if r['lam'] is None else r['lam']
        if r['diverged'] is None and not math.isfinite(r['test_loss']):
            r['diverged'] = 1
        r['init_loss'] = PUBLISHED_INIT_LOSS.get(r['size']) if r['init_loss'] is None else r['init_loss']
        if r['n_params'] is None and r['size'] in PUBLISHED_INIT_LOSS:
            r['n_params'] = n_params(r['size'])
        if r['lr_sum'] is None and r['steps']:  # that of the default schedule: a warm-up over 5% of the steps, then a cosine to 1e-5
            r['lr_sum'] = r['steps'] * (0.05 * r['lr'] + 0.95 * (r['lr'] + 1e-5)) / 2
    rows.sort(key=paper_order)
    for a, b in zip(rows, rows[1:]):
        if all(a[k] == b[k] for k in KEY):
            die(f'{source}: the same run stands there twice: ' + ', '.join(f'{k}={a[k]}' for k in KEY)
                + '; several seeds need a seed column, other differences a file or folder of their own')
    return rows


def from_folders(done):
    """Finished run folders -> rows of results.csv, distributions.csv and curves.csv, and the runs' settings: name -> list of its values."""
    rows, distributions, curves, settings = [], [], [], {}
    for i, folder in enumerate(done, 1):
        print(f'[{i}/{len(done)}] {folder}', flush=True)
        row, of_run = analyze_run(folder)
        identity = {k: row[k] for k in (*KEY, 'diverged')}
        rows.append({**row, 'folder': folder})
        distributions += [{**identity, 'quantity': name, **of_run[name]} for name in of_run]
        config = read_json(os.path.join(folder, 'config.json'))
        rescued = config.get('init_from')
        log, before = read_log(os.path.join(folder, 'log.jsonl')), []
        start = log[0]['step'] if rescued and log else 0
        if start:  # what the other run went through before
            other = rescued if os.path.isdir(rescued) else os.path.dirname(rescued)
            before = [entry for entry in read_log(os.path.join(other, 'log.jsonl')) if entry['step'] <= start]
        curve = training_curve(before + log)
        if before and curve:
            rows[-1]['lr_sum'] = curve[-1]['lr_sum']  # the other run's learning rates were those that it had
        curves += [{**identity, 'part': 'before' if entry['step'] <= start else 'rescue' if start else None, **entry} for entry in curve]
        for key, value in config.items():
            value = ', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value
            if key != 'out' and value not in settings.setdefault(key, []):
                settings[key].append(value)
    return complete(rows), sorted(distributions, key=paper_order), sorted(curves, key=paper_order), settings


def from_csv(path):
    """A csv of runs -> the same; beside a results.csv of analyze.py's its distributions.csv, curves.csv and settings.json are read too."""
    def beside(name):
        other = os.path.join(os.path.dirname(path), name)
        return other if os.path.basename(path) == 'results.csv' and os.path.exists(other) else None
    rows = complete(read_csv(path, COLUMNS, REQUIRED), path)
    distributions, curves = (read_csv(beside(name), None, ('method', 'size', 'weight_tying', 'lr')) if beside(name) else []
                             for name in ('distributions.csv', 'curves.csv'))
    return rows, distributions, curves, read_json(beside('settings.json')) if beside('settings.json') else {}


def draw(rows, lrs_rows, distributions, curves, method, folder):
    """Draws into `folder` every figure that the data have -> (the figures as dicts for the report, a line for each that is missing)."""
    drawn, missing = [], []

    def figure(file, title, where, says, function, data, *more, lacks):
        if not data:
            missing.append(f'no figure "{title}": {lacks}')
            return
        file = re.sub(r'[^\w.-]', '_', file)
        print(f'drawing {file}', flush=True)
        function(data, *more, os.path.join(folder, file))
        drawn.append({'title': title, 'where': where, 'says': says, 'file': file})

    def having(part, *columns):
        return part if any(plots.drawable(r[c]) for r in part for c in columns) else []

    for tying, word, part in tables.tyings(rows):
        def paper(untied, tied=''):
            return tied if tying else untied
        finite = [r for r in part if plots.drawable(tables.capped_loss(r))]
        filled = 'Filled: the run diverged' + ('.' if all(r['diverged'] is not None for r in part) else '; of some runs the data do not say.')
        tuned = {m for m in {r['method'] for r in part} if len({r['lam'] for r in part if r['method'] == m}) > 1}
        of_method, title = [r for r in part if r['method'] == method], tables.name(method)
        of_tying = [r for r in curves if r['weight_tying'] == tying and r.get('part') != 'before']
        rescued = [r for r in curves if r['weight_tying'] == tying and r.get('part')]
        figure(f'loss_{word}', f'Loss against learning rate, {word}', paper('Figure 2', 'Appendix D, Figure 9'),
               'The test loss after training at each learning rate: flat is stable, a line that rises to the right is not. Left all sizes, then the two largest '
               'learning rates of one size a panel. Losses above the loss at initialisation are drawn there. ' + filled, plots.loss_against_lr,
               finite, lacks='no loss is finite, and no loss at initialisation is known')
        sized = [r for r in lrs_rows if r['weight_tying'] == tying and r['n_params'] and r['lrs'] > 0]
        figure(f'lrs_{word}', f'LRS against model size, {word}', paper('Figure 3', 'Appendix D, Figure 10'),
               'How far the loss rises above its best over the learning rates, against the number of parameters. Lower is more stable.',
               plots.lrs_against_n, sized if len({r['n_params'] for r in sized}) > 1 else [], lacks='it takes two sizes with n_params and an LRS above 0')
        figure(f'statistics_{word}', f'Mean embedding and logits, {word}', paper('Figure 4'),
               'The norm of the mean output embedding, and mean, standard deviation and largest magnitude of the logits: where the mean embedding moves '
               'away from the origin the mean logit follows.', plots.panels_against_lr, having(part, 'mu_norm', 'logit_mean', 'logit_std', 'logit_absmax'),
               (('mu_norm', 'symlog'), ('logit_mean', 'symlog'), ('logit_std', 'log'), ('logit_absmax', 'log')), lacks='the data have none of them')
        figure(f'fact3_{word}', f'Fact 3 for {title}, {word}', paper('Figure 5'),
               'What centering would do to these models: the ratios of embedding norms, of the largest cosines and of the largest logits after and before it '
               '(below 1: it makes them smaller), and how far the final hidden state points along the mean embedding.', plots.panels_against_lr,
               having(of_method, 'r_emb', 'cos_mu_h', 'r_cos', 'r_log'), (('r_emb', 'linear'), ('cos_mu_h', 'linear'), ('r_cos', 'linear'), ('r_log', 'linear')),
               lacks='the data have none of r_emb, cos_mu_h, r_cos, r_log')
        figure(f'distributions_{word}', f'Distributions behind Fact 3 for {title}, {word}', paper('Appendix F, Figures 11 and 12'),
               'The same quantities over the vocabulary (r_emb) and over test positions: quartiles, median and extrema; red: the share that is below 1, or for the '
               'cosine above 0. ' + filled, plots.distributions,
               [r for r in distributions if r['weight_tying'] == tying and tables.variant(r) == (method, None) and plots.drawable(r['median'])],
               lacks='there are no distributions (distributions.csv)')
        figure(f'sensitivity_{word}', f'Sensitivity to λ, {word}', paper('Appendix C, Figure 8'),
               'Loss against learning rate, and LRS against size, for several coefficients λ: how much tuning a method needs.', plots.sensitivity,
               [r for r in finite if r['method'] in tuned], sized, lacks='no method was run with several λ')
        figure(f'drift_{word}', f'Drift against the sum of learning rates, {word}', '',
               'The mean embedding drifts with the sum of the learning rates that a run has gone through. A point is the end of a run, a thin line its way there.',
               plots.drift, [r for r in having(part, 'mu_norm', 'logit_mean') if r['lr_sum']], of_tying,
               lacks='the data have no ‖μ‖ and logit mean, or neither lr_sum nor steps')
        for size in tables.sizes(of_tying) or ['all sizes']:
            figure(f'curves_{size}_{word}', f'Training curves of {size}, {word}', '',
                   'Loss, norm of the mean embedding, mean logit and largest |logit| during training, a line a learning rate: the drift as it grows.',
                   plots.training_curves, [r for r in of_tying if r['size'] == size], lacks='there are no logs (curves.csv)')
        if any(r['part'] == 'rescue' for r in rescued):
            figure(f'rescue_{word}', f'Rescue: going on with another method, {word}', '',
                   'Norm of the mean embedding and mean logit of one run (black), and of the runs that went on from its weights with the methods named. '
                   'Dotted: their first step.', plots.rescue, rescued, lacks='')
    return drawn, missing


def draw_theory(folder):
    """The paper's figures that follow from formulas -> the same dicts as `draw`."""
    drawn = []
    for function, file, title, where, says in (
            (plots.centering_in_three_dimensions, 'theory_centering', 'μ-centering in three dimensions', 'Figure 1',
             'Embeddings spread evenly around a mean μ that points along the hidden state h all have a cosine with h; centering takes that away.'),
            (plots.zloss_of_one_logit, 'theory_zloss_1d', 'z-loss of one logit', 'Appendix B, Figure 6',
             'z-loss punishes a large positive logit and lets a large negative one be; only without other logits (S = 0) is it even.'),
            (plots.root_cause, 'theory_root_cause', 'The root cause: how far the mean embedding moves', 'Section 1, Anisotropic Embeddings',
             'In a head trained by itself the mean embedding stays where it is with SGD, and moves with Adam, whose second moments differ between the '
             'embeddings; one second moment for all of them (Coupled Adam) keeps it where it was.'),
            (plots.zloss_of_two_logits, 'theory_zloss_2d', 'Z and z-loss of two logits', 'Appendix B, Figure 7',
             'Black: where z-loss is smallest. The curve runs off to large negative logits, so z-loss does not hold the mean logit at 0.')):
        print(f'drawing {file}', flush=True)
        function(os.path.join(folder, file))
        drawn.append({'title': title, 'where': where, 'says': says, 'file': file})
    return drawn


def write_report(out, rows, shown, missing, settings, unfinished):
    """report.html in `out`, one file that needs no other: `shown` (tables and figures) in order, what is missing, the settings, the runs."""
    def image(file):
        with open(os.path.join(out, 'figures', f'{file}.png'), 'rb') as png:
            return base64.b64encode(png.read()).decode()
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'report_template.html'), encoding='utf-8') as file:
        template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(file.read())
    logs = [quote(os.path.relpath(os.path.join(r['folder'], 'log.jsonl'), out)) if 'folder' in r else None for r in rows]
    html = template.render(title=os.path.basename(os.path.abspath(out)), rows=rows, shown=shown, image=image, missing=missing, unfinished=unfinished,
                           settings={k: ', '.join(map(str, v)) for k, v in settings.items()}, runs=tables.run_table(rows) if rows else None, logs=logs)
    write_atomic(os.path.join(out, 'report.html'), lambda file: file.write(html), mode='w')


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    p.add_argument('--results', help='a csv of runs instead; needs method, size, weight_tying, lr and test_loss, all else may be missing')
    p.add_argument('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    p.add_argument('--method', help='the method whose Fact 3 is drawn (default baseline, or the first there is)')
    p.add_argument('--theory', action='store_true', help="the paper's figures that need no runs (Fig. 1, 6 and 7), alone or with the others")
    args = parse_args(p, argv)
    if bool(args.runs) + bool(args.results) != 1 and not (args.theory and not args.runs and not args.results):
        die('give run folders, such as out/demo, or --results=FILE.csv, or --theory')

    # what there is
    unfinished, rows, methods = [], [], []
    if args.runs:
        source = os.path.normpath(args.runs[0])
        done, unfinished = find_runs(args.runs)
        for folder in unfinished:
            print(f'not finished, left out: {folder}')
        if not done:
            die(f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        methods = [read_json(os.path.join(folder, 'result.json')).get('method') for folder in done]
    elif args.results:
        source = os.path.splitext(args.results)[0]
        source = os.path.dirname(os.path.abspath(source)) if os.path.basename(source) == 'results' else source
        rows, distributions, curves, settings = from_csv(args.results)
        methods = [r['method'] for r in rows]
    else:
        source, distributions, curves, settings = 'theory', [], [], {}
    if args.method and args.method not in methods:
        die(f'--method={args.method}: the runs have {", ".join(dict.fromkeys(map(str, methods))) or "no method: there are none"}')
    method = args.method or ('baseline' if 'baseline' in methods or not methods else methods[0])
    out = args.out or os.path.join('results', os.path.basename(os.path.abspath(source)))
    make_folder(out)
    lock = lock_folder(out, wait=True)
    if args.runs:
        rows, distributions, curves, settings = from_folders(done)
        write_csv(os.path.join(out, 'results.csv'), COLUMNS, rows)
        write_csv(os.path.join(out, 'distributions.csv'), [*KEY, 'diverged', 'quantity', *DISTRIBUTION], distributions)
        write_csv(os.path.join(out, 'curves.csv'), list(dict.fromkeys(k for line in curves for k in line)), curves)
        write_json(os.path.join(out, 'settings.json'), settings)

    # tables, figures, report
    shown, missing = [], []
    if rows:
        lrs_rows, missing = tables.lrs_rows(rows)
        write_csv(os.path.join(out, 'lrs.csv'), LRS_COLUMNS, lrs_rows)
        of_lrs = [r for r in lrs_rows if r['n_lrs'] > 1]
        if not of_lrs:
            missing.append('no LRS tables: no method was run at two learning rates of one size')
        overhead, lines = tables.overhead_tables(rows)
        missing += lines
        if not settings:
            missing.append('no table of hyper-parameters: there are no settings of the runs (settings.json)')
        excess = [tables.excess_table(rows, of_lrs)] if of_lrs else []
        largest = {(r['size'], r['weight_tying']): r['lr'] for r in sorted(rows, key=lambda r: r['lr'])}
        at_largest = tables.run_table([r for r in rows if r['lr'] == largest[r['size'], r['weight_tying']]], 'At the largest learning rate')
        shown = [*tables.lrs_tables(of_lrs), *tables.ranking_tables(of_lrs), *tables.sensitivity_tables(of_lrs), *overhead, *excess, at_largest,
                 *([tables.hyperparameter_table(settings)] if settings else []), tables.methods_table()]
        everything = [*shown, tables.run_table(rows)]
        write_atomic(os.path.join(out, 'tables.md'), lambda file: file.write('\n\n'.join(tables.text(t, tables.MARKDOWN) for t in everything) + '\n'), mode='w')
        write_atomic(os.path.join(out, 'tables.tex'), lambda file: file.write(tables.latex_document(shown)), mode='w')
        print('\n' + '\n\n'.join(map(tables.text, shown)) + '\n')
        figures, lines = draw(rows, of_lrs, distributions, curves, method, os.path.join(out, 'figures'))
        shown, missing = figures + shown, missing + lines
    if args.theory:
        shown = shown + draw_theory(os.path.join(out, 'figures'))
    for line in missing:
        print(line)
    write_report(out, rows, shown, missing, settings, len(unfinished))
    lock.close()
    names = sorted(name for name in os.listdir(out) if not name.startswith('.'))
    print(f'wrote {out}: {", ".join(names)}; open {os.path.join(out, "report.html")} in a browser')
    return 0


if __name__ == '__main__':
    run(main)
