"""
From run folders, or from a csv of runs, to statistics, tables and figures.

    python analyze.py out/demo                            # reads checkpoints, writes results/demo/
    python analyze.py --results=results.csv --out=DIR     # tables and figures of any such csv, no checkpoints needed

Tables and figures are made from the csv rows alone, so both ways give the same.
"""
import argparse
import csv
import io
import json
import math
import os
import sys

import torch

import data
import plots
from common import die, make_folder, parse_args, read_json, write_atomic, write_json
from model import GPT, METHODS, SIZES, USES_LAM, GPTConfig, gpt_config, n_chunks

POSITIONS = 131_072  # test positions that the statistics are taken over

COLUMNS = ('method size n_params weight_tying lam cap lr seed steps logits_dtype init_loss test_loss diverged diverged_step mu_norm '
           'logit_mean logit_mean_spread logit_std logit_absmax logit_max cos_mu_h r_emb r_cos r_log lr_sum train_seconds '
           'tokens_per_second device').split()
REQUIRED = ('method', 'size', 'weight_tying', 'lr', 'test_loss')
TEXT = ('method', 'size', 'logits_dtype', 'device')
KEY = ('method', 'size', 'weight_tying', 'lam', 'lr', 'seed')
DISTRIBUTION = ('mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1')
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


def summary(values):
    """DISTRIBUTION of a tensor of values as a dict: mean, extrema, quartiles, share below 1."""
    v = values.double()
    if not bool(torch.isfinite(v).all()):
        return dict.fromkeys(DISTRIBUTION, math.nan)
    q = v.sort().values[((len(v) - 1) * torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])).round().long()]
    return {'mean': v.mean().item(), **dict(zip(('min', 'q25', 'median', 'q75', 'max'), q.tolist())), 'below_1': (v < 1).double().mean().item()}


def analyze_run(folder):
    """
    One finished run -> (row of results.csv, its distributions as a dict name -> summary). The statistics are kept in the
    run's analysis.json, so that a growing sweep is not computed again.
    """
    row = {**dict.fromkeys(COLUMNS), **read_json(os.path.join(folder, 'result.json'))}
    missing = [c for c in REQUIRED if row[c] is None]
    if missing:
        die(f'{folder}/result.json: no {", ".join(missing)}')
    kept, path = os.path.join(folder, 'analysis.json'), os.path.join(folder, 'model.pt')
    if not os.path.exists(kept) or os.path.exists(path) and os.path.getmtime(kept) < os.path.getmtime(path):
        try:
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
        write_json(kept, {**{name: summary(v) for name, v in values.items()},
                          'logit_mean_spread': values['logit_mean'].double().std(correction=0).item(),
                          'logit_max': values['logit_absmax'].max().item(),
                          'mu_norm': model.E.detach().mean(dim=0).norm().item()})
    found = read_json(kept)
    distributions = {name: value for name, value in found.items() if isinstance(value, dict)}
    row.update({name: found[name] for name in ('logit_mean_spread', 'logit_max', 'mu_norm')})
    row.update({name: distributions[name]['mean'] for name in distributions if name in COLUMNS})
    return row, distributions


def read_log(path):
    """The entries of a run's log.jsonl as dicts; lines that are no JSON (a disk that was full) are passed over."""
    entries = []
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as file:
            for line in file:
                try:
                    entries.append(json.loads(line))
                except ValueError:
                    pass
    return entries


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


def read_results(path):
    """
    The runs in a csv as dicts with all COLUMNS, None where the csv has nothing. Exits with 2 where a required column is
    missing, a number is none, or two rows are the same run.
    """
    try:
        with open(path, encoding='utf-8-sig', newline='') as file:
            reader = csv.DictReader(file)
            lines, columns = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        die(f'--results={path}: not readable as csv ({error})')
    missing = [c for c in REQUIRED if c not in columns]
    if missing:
        die(f'--results={path}: no column {", ".join(missing)}; the first line should name the columns, separated by commas')
    rows = []
    for n, line in enumerate(lines, 2):
        row = dict.fromkeys(COLUMNS)
        for column in COLUMNS:
            text = (line.get(column) or '').strip()
            if not text:
                if column in REQUIRED:
                    die(f'--results={path} line {n}: {column} is empty')
                continue
            if column in ('weight_tying', 'diverged'):
                text = {'true': '1', 'false': '0'}.get(text.lower(), text)
            try:
                row[column] = text if column in TEXT else float(text)
            except ValueError:
                die(f'--results={path} line {n}: {column} should be a number, is {text!r}')
            if column in ('weight_tying', 'diverged') and row[column] not in (0, 1):
                die(f'--results={path} line {n}: {column} should be 0 or 1, is {text!r}')
        if not 0 < row['lr'] < math.inf:
            die(f'--results={path} line {n}: lr should be above 0, is {row["lr"]:g}')
        rows.append(row)
    if not rows:
        die(f'--results={path}: it has no runs')
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# results -> LRS and tables


def complete(rows):
    """Fills in what follows from the size, orders the rows as the paper does, and refuses two rows of the same run."""
    for r in rows:
        if r['method'] in METHODS:  # an empty λ is the paper's, and a method without one has none
            r['lam'] = (1e-4 if r['lam'] is None else r['lam']) if r['method'] in USES_LAM else None
        r['init_loss'] = PUBLISHED_INIT_LOSS.get(r['size']) if r['init_loss'] is None else r['init_loss']
        if r['n_params'] is None and r['size'] in PUBLISHED_INIT_LOSS:
            with torch.device('meta'):
                r['n_params'] = GPT(GPTConfig(**SIZES[r['size']])).n_params()
    order = {name: i for i, name in enumerate((*SIZES, *METHODS))}
    rows.sort(key=lambda r: (r['weight_tying'], order.get(r['size'], 99), r['size'], order.get(r['method'], 99), r['method'],
                             r['lam'] or 0, r['lr'], r['seed'] or 0))
    for a, b in zip(rows, rows[1:]):
        if all(a[k] == b[k] for k in KEY):
            die('the same run stands there twice: ' + ', '.join(f'{k}={a[k]}' for k in KEY) + '; several seeds need a seed column')
    return rows


def lrs(losses, init_losses):
    """
    Learning rate sensitivity (Eq. 21) of one model trained at n learning rates: test losses (n,) and losses at
    initialisation (n,) -> (the paper's mean, the published tables' sum / (n - 1)). A loss that is not finite counts as
    its L0. Raises ValueError where that L0 is not known.
    """
    if any(L0 is None and not math.isfinite(L) for L, L0 in zip(losses, init_losses)):
        raise ValueError('a loss is not finite and the loss at initialisation is not known')
    capped = [min(L if math.isfinite(L) else math.inf, math.inf if L0 is None else L0) for L, L0 in zip(losses, init_losses)]
    total = sum(L - min(capped) for L in capped)
    return total / len(capped), total / (len(capped) - 1) if len(capped) > 1 else math.nan


def lrs_table(rows):
    """Rows of lrs.csv (and n_params): one a (size, tying, method, λ), the mean over its seeds."""
    groups = {}
    for r in rows:
        groups.setdefault((r['size'], r['weight_tying'], r['method'], r['lam']), {}).setdefault(r['seed'], []).append(r)
    table = []
    for (size, tying, method, lam), seeds in groups.items():
        runs = [r for seed in seeds.values() for r in seed]
        try:
            values = [lrs([r['test_loss'] for r in seed], [r['init_loss'] for r in seed]) for seed in seeds.values()]
        except ValueError:
            print(f'no LRS for {method} {size}: a loss is not finite and the csv has no init_loss')
            continue
        marks = {r['diverged'] for r in runs}
        table.append({'size': size, 'weight_tying': int(tying), 'method': method, 'lam': lam,
                      'lrs': sum(v[0] for v in values) / len(values), 'lrs_n1': sum(v[1] for v in values) / len(values),
                      'n_lrs': len({r['lr'] for r in runs}), 'diverged': 1 if 1 in marks else None if None in marks else 0,
                      'n_params': runs[0]['n_params']})
    return table


def markdown(header, rows):
    """A Markdown table, padded so that it reads on a terminal too."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ['| ' + ' | '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) + ' |' for row in cells]
    return '\n'.join([lines[0], '|' + '|'.join('-' * (w + 2) for w in widths) + '|', *lines[1:]])


def variant_name(method, lam):
    """The method, with its λ where that is not the paper's 1e-4."""
    return method if lam is None or lam == 1e-4 else f'{method} λ={lam:g}'


def lrs_tables(table):
    """Markdown: LRS by size and method in both normalisations; bold: the best; *: a run diverged."""
    parts = []
    for tying in sorted({r['weight_tying'] for r in table}):
        part = [r for r in table if r['weight_tying'] == tying]
        variants = list(dict.fromkeys((r['method'], r['lam']) for r in part))
        for column, name in (('lrs', 'LRS, the mean over the learning rates (Eq. 21)'),
                             ('lrs_n1', "LRS (n-1), normalised as the paper's tables are")):
            lines = []
            for size in dict.fromkeys(r['size'] for r in part):
                cells = {(r['method'], r['lam']): r for r in part if r['size'] == size}
                best = min((r[column] for r in cells.values()), default=None)
                lines.append([size] + [
                    '-' if v not in cells else ('**{}**' if cells[v][column] == best and len(cells) > 1 else '{}').format(
                        f'{cells[v][column]:.3f}') + ('*' if cells[v]['diverged'] else '') for v in variants])
            parts.append(f'### {name}, weight tying {"on" if tying else "off"}\n\n'
                         + markdown(['N', *(variant_name(*v) for v in variants)], lines))
    return '\n\n'.join(parts) + '\n\nBold: the best of its row. *: at least one of the runs diverged.'


def run_table(rows):
    """Markdown: the runs, one a line."""
    def show(r, column, form):
        return '' if r[column] is None else format(r[column], form)
    columns = [('lr', 'g'), ('test_loss', '.4f'), ('mu_norm', '.3g'), ('logit_mean', '.3g'), ('logit_mean_spread', '.3g'),
               ('logit_std', '.3g'), ('logit_absmax', '.3g'), ('cos_mu_h', '.3f'), ('r_cos', '.3f'), ('r_log', '.3f')]
    columns = [c for c in columns if any(r[c[0]] is not None for r in rows)]
    seeds = len({r['seed'] for r in rows}) > 1
    return markdown(['method', 'size', 'tied', *(['seed'] if seeds else []), *(c for c, _ in columns), 'diverged'],
                    [[variant_name(r['method'], r['lam']), r['size'], 'yes' if r['weight_tying'] else 'no', *([f'{r["seed"] or 0:g}'] if seeds else []),
                      *(show(r, *c) for c in columns), {None: '', 1: 'yes', 0: 'no'}[r['diverged']]] for r in rows])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    p.add_argument('--results', help='a csv of runs instead; needs method, size, weight_tying, lr and test_loss, all else may be missing')
    p.add_argument('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    args = parse_args(p, argv)
    if bool(args.runs) == bool(args.results):
        die('give either run folders, such as out/demo, or --results=FILE.csv')
    name = os.path.splitext(os.path.basename(args.results))[0] if args.results else os.path.basename(os.path.normpath(args.runs[0]))
    out = args.out or os.path.join('results', name)

    if args.results:
        rows = complete(read_results(args.results))
        make_folder(out)
    else:
        done, unfinished = find_runs(args.runs)
        for folder in unfinished:
            print(f'not finished, left out: {folder}')
        if not done:
            die(f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        make_folder(out)
        rows, distributions, curves = [], [], []
        for i, folder in enumerate(done, 1):
            print(f'[{i}/{len(done)}] {folder}', flush=True)
            row, of_run = analyze_run(folder)
            identity = {k: row[k] for k in (*KEY, 'diverged')}
            rows.append(row)
            distributions += [{**identity, 'quantity': name, **of_run[name]} for name in of_run]
            curves += [{**identity, **entry} for entry in read_log(os.path.join(folder, 'log.jsonl'))]
        rows = complete(rows)
        write_csv(os.path.join(out, 'results.csv'), COLUMNS, rows)
        write_csv(os.path.join(out, 'distributions.csv'), [*KEY, 'diverged', 'quantity', *DISTRIBUTION], distributions)
        write_csv(os.path.join(out, 'curves.csv'), list(dict.fromkeys(k for line in curves for k in line)), curves)

    table = lrs_table(rows)
    write_csv(os.path.join(out, 'lrs.csv'), 'size weight_tying method lam lrs lrs_n1 n_lrs diverged'.split(), table)
    largest = [r for r in rows if r['lr'] == max(x['lr'] for x in rows if (x['size'], x['weight_tying']) == (r['size'], r['weight_tying']))]
    at_largest = f'### At the largest learning rate\n\n{run_table(largest)}'
    tables = f'{lrs_tables(table)}\n\n{at_largest}\n'
    write_atomic(os.path.join(out, 'tables.md'), lambda file: file.write(f'{tables}\n### All runs\n\n{run_table(rows)}\n'), mode='w')
    print('\n' + tables)

    for tying in sorted({r['weight_tying'] for r in rows}):
        part = [r for r in rows if r['weight_tying'] == tying]
        name = 'tied' if tying else 'untied'
        plots.loss_against_lr(part, os.path.join(out, 'figures', f'loss_{name}'))
        if any(r[c] is not None for r in part for c in ('mu_norm', 'logit_mean', 'logit_std', 'logit_absmax')):
            plots.statistics_against_lr(part, os.path.join(out, 'figures', f'statistics_{name}'))
        else:
            print(f'no figure of ‖μ‖ and the logits ({name}): the csv has no such columns')
        sized = [r for r in table if r['weight_tying'] == tying and r['n_params'] and r['lrs'] > 0]
        if sized:
            plots.lrs_against_n(sized, os.path.join(out, 'figures', f'lrs_{name}'))
        else:
            print(f'no figure of LRS against N ({name}): no size has both n_params and an LRS above 0')
    print(f'wrote {out}: {", ".join(sorted(os.listdir(out)))}')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
