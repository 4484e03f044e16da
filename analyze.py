"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu, statistics of the
logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a sweep.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --hf MODEL                        # the same quantities of a model that others trained

Symbols and shapes are model.py's: E output embeddings (V, H), mu their mean (H,), h final hidden states
(N, H) at N test positions; a star marks what is centered, e*_i = e_i - mu. Losses are in nats per token.
analysis/report.py makes tables and figures of the csv files that are written here.
"""
import argparse
import functools
import glob
import hashlib
import io
import json
import math
import os
from pathlib import Path

import pandas as pd
import torch

import train
from analysis import report
from model import GPT, gpt_config, head_loss, summarize
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v5.json'  # kept in a run's folder; a new name if what is measured changes
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0
VARIANT = ['size', 'weight_tying', 'variant', 'plain_name', 'method', 'lam', 'color']  # each has an LRS
MIN_LEARNED = 0.1  # a run whose test loss is less below its start, in nats, learned nothing
PAPER_LRS = '0.0003 0.001 0.003 0.01 0.03 0.1 0.3'  # its learning rates, Eq. 18


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
    """What E (V, H) says without a text: |mu|, the mean's share V |mu|^2 / |E|_F^2 from 0 to 1, r_emb."""
    mu = E.mean(dim=0)
    numbers = {'mu_norm': mu.norm(), 'mean_share': len(E) * mu.square().sum() / E.square().sum(),
               'r_emb': norm_ratios(E).double().mean()}
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
    positions, or of r_emb over the vocabulary. r_log, r_cos, cos_mu_h are there if the logits are of h and E.
    """
    gpt.eval()
    E, states, parts = gpt.E, [], []
    hook = gpt.norm_f.register_forward_hook(lambda module, inputs, h: states.append(h))
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        _, stats = gpt(tokens, targets)  # of the model's own logits: rounded, capped, with what a fork adds
        h = states.pop().flatten(0, 1)
        if not parts:
            _, plain_stats = head_loss(h, E, targets.flatten(), gpt.config)  # without a head bias, say
            plain_head = all(torch.allclose(stats[name], plain_stats[name], 1e-3, 1e-3, equal_nan=True)
                             for name in ('loss', 'logit_mean'))
        if plain_head:
            pieces = h.split(max(1, 2**25 // len(E)))  # so that no N x V tensor is over 128 MB
            stats |= concatenate([centering_ratios(piece.float(), E.float()) for piece in pieces])
        parts.append(stats)
    hook.remove()
    stats = concatenate(parts)
    del stats['reg']
    distributions = {name: distribution(x) for name, x in {**stats, 'r_emb': norm_ratios(E).cpu()}.items()}
    numbers = {**measure_embeddings(E), **summarize(stats, E),
               'r_emb_below_1': distributions['r_emb']['below_1']}
    if plain_head:
        # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token
        r_log = stats['r_log'][stats['r_cos'] < 1]
        numbers['r_cos_below_1'] = distributions['r_cos']['below_1']
        numbers['r_log_below_1_too'] = (r_log < 1).double().mean().item()  # NaN if no r_cos is below 1
    return {'numbers': numbers, 'distributions': distributions}


# -------- a finished run
@functools.cache  # the runs of a sweep have the same data
def val_windows(folder, block_size, vocab_size, data_fingerprint, data_checksum):
    """The val windows of the data that a run was trained on. Raises ValueError if the folder has others."""
    found = all(glob.glob(f'{glob.escape(folder)}/{train.SHARD.format(split)}') for split in ('train', 'val'))
    if found:
        trained_on, val = (train.Windows(folder, split, block_size, vocab_size) for split in ('train', 'val'))
        ends, tokens = train.fingerprints(trained_on.shards, val.shards)
        found = ends == data_fingerprint and data_checksum in (None, tokens)  # None: a run of 96e0adf
    if not found:
        raise ValueError(f'{folder} does not hold the shards of the training')
    return val


def measure_run(folder):
    """measure_model of a finished run, kept in its folder for as long as model.pt stays what it is."""
    path = folder / 'model.pt'
    model_hash = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    kept = read_json(folder / STATISTICS) or ({} if model_hash else read_json(folder / 'statistics_v4.json'))
    if kept and model_hash in (kept['model'], None):  # None: model.pt was too large to be kept, perhaps
        return kept

    saved, settings = train.read_checkpoint(str(path)), read_json(folder / 'config.json')
    config = saved['config']
    differ = [name for name in config.keys() - train.MAY_CHANGE if config[name] != settings.get(name)]
    if differ:
        raise ValueError(f'model.pt and config.json differ in {", ".join(sorted(differ))}')
    windows = val_windows(settings['data'], config['block_size'], config['vocab_size'],
                          config['data_fingerprint'], config.get('data_checksum'))
    gpt = GPT(gpt_config(config))
    gpt.load_state_dict(saved['model'])
    del saved  # or it would stay in memory
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    tokens = torch.from_numpy(windows[windows.evenly_spaced(min(POSITIONS, config['test_tokens']))])
    measured = {'model': model_hash, **measure_model(gpt, tokens)}
    if os.access(folder, os.W_OK):  # runs may be kept where nobody may write
        save(measured, f'{folder}/{STATISTICS}')
    return measured


def training_curve(folder, steps, n=1000):
    """
    The evaluations in the log of a run of `steps` steps, and at most n of its training lines, always with the
    last: columns CURVES. Until 96e0adf the log called all evaluations test losses.
    """
    lines = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    evaluations = [{'val_loss' if name == 'test_loss' and line['step'] < steps else name: value
                    for name, value in line.items()} for line in lines if 'loss' not in line]
    trained = [line for line in lines if 'loss' in line]
    every = max(1, math.ceil(len(trained) / n))
    curve = pd.DataFrame(evaluations + trained[(len(trained) - 1) % every::every])
    return curve.reindex(columns=report.CURVES).sort_values('step', kind='stable')


# -------- a sweep
def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


def collect(folders, out):
    """
    Measures the finished runs in or right below `folders` and writes three csv files -> two lists of lines:
    the data of the runs, and what is missing. A run that cannot be read or measured does not stop the others.
    """
    rows, curves, distributions, missing, read, settings = [], [], [], [], set(), {'n_params'}
    columns = dict.fromkeys(report.RESULTS)  # then come statistics that a fork adds
    names = ('config.json', '*/config.json')
    configs = {path for folder in folders for name in names for path in Path(folder).glob(name)}
    for i, config in enumerate(sorted(configs), 1):
        folder = config.parent
        if not (folder / 'result.json').exists():
            missing.append(f'not finished: {folder}')
            continue
        try:
            run = {**read_json(config), **read_json(folder / 'result.json'), 'run': str(folder)}
            run = {name: math.nan if value is None else value for name, value in run.items()}
            assert {*report.REQUIRED, 'init_loss'} <= run.keys(), 'its files are not whole'
            run['device'] = run['device_name']  # the name of the GPU, not the flag
            curve = training_curve(folder, run['steps'])
            read.add(f'{run["data"]}, in batches of {run["batch_size"]} x {run["block_size"]} tokens')
            settings |= read_json(config).keys()
        except Exception as error:  # of many kinds, where a file is damaged
            missing.append(f'left out: {folder}: {error} ({type(error).__name__})')
            continue

        print(f'[{i}/{len(configs)}] measuring {folder}', flush=True)
        numbers, of_quantities = {}, {}
        try:
            numbers, of_quantities = map(measure_run(folder).get, ('numbers', 'distributions'))
            if 'r_cos' not in numbers:
                missing.append(f'{folder} is without r_cos, r_log, cos_mu_h: its logits are not E h')
        except (Exception, SystemExit) as error:  # of many kinds, with another model or damaged data
            missing.append(f'{folder} is without statistics: {error} ({type(error).__name__})')
        columns.update((name, None) for name in numbers if name != 'loss')  # of which it has the test loss
        rows.append({**run, **numbers})
        curves.append(curve.assign(run=run['run']))
        distributions += [{'run': run['run'], 'quantity': name, **x} for name, x in of_quantities.items()]

    check(rows, '; '.join(missing) or f'{" ".join(folders)}: no run in there')
    rows = pd.DataFrame(rows)
    report.check_comparable(rows, settings)
    test_loss = rows.test_loss.astype(object).fillna('nan')  # an empty cell is an error
    rows = rows.assign(test_loss=test_loss).reindex(columns=[*columns])
    report.read_runs(io.StringIO(rows.to_csv(index=False)))  # refuse what is not one table before writing it
    write_csv(out / 'results.csv', rows)
    write_csv(out / 'curves.csv', pd.concat(curves), '%.7g')  # enough for a plot
    write_csv(out / 'distributions.csv', pd.DataFrame(distributions))
    return sorted(read), missing


# -------- learning rate sensitivity
def learning_rate_sensitivity(runs):
    """
    LRS (Eq. 21) of each size, tying, variant and seed: `lrs` is the mean over the learning rates of
    min(L, L0) - min L, `lrs_n1` the same sum / (n - 1), which is what the published tables have. A second
    list names seeds left out, which have one learning rate, or others than the seed with the most.
    A method with a seed that learned nothing at any learning rate has no LRS: it would be 0, the best.
    """
    by = [*VARIANT, 'seed']
    runs = runs[runs.in_paper_setting]
    lowest = runs.groupby(by, dropna=False).capped_loss.transform('min')
    runs = runs.assign(rise=runs.capped_loss - lowest, dead=lowest >= runs.init_loss - MIN_LEARNED)
    rows = runs.groupby(by, sort=False, dropna=False).agg(
        lrs=('rise', 'mean'), total=('rise', 'sum'), n_lrs=('rise', 'count'),
        rates=('lr', lambda rates: ' '.join(f'{lr:g}' for lr in rates)),
        n_params=('n_params', 'max'), dead=('dead', 'all'), behind=('behind', 'max'),
        behind_lam=('behind_lam', 'max')).reset_index()
    rows['lrs_n1'] = rows.pop('total') / (rows.n_lrs - 1).where(rows.n_lrs > 1)
    by_n_lrs = rows.sort_values('n_lrs', kind='stable').groupby(VARIANT, dropna=False)
    compared = (rows.n_lrs > 1) & (rows.rates == by_n_lrs.rates.transform('last').sort_index())
    left_out = [f'not in LRS: {row.variant} {row.size}, {report.TYING[row.weight_tying]}, seed {row.seed:g}, '
                f'with learning rates {row.rates}' for row in rows[~compared].itertuples() if any(compared)]
    rows = rows[compared]
    dead = rows.groupby(VARIANT, dropna=False).dead.transform('any')
    return rows.assign(lrs=rows.lrs.mask(dead), lrs_n1=rows.lrs_n1.mask(dead)), left_out


def mean_over_seeds(lrs_of_seeds):
    """The rows of lrs.csv; `published` is the paper's number, for its own learning rates."""
    rows = lrs_of_seeds.groupby(VARIANT, sort=False, dropna=False).agg(
        lrs=('lrs', 'mean'), lrs_n1=('lrs_n1', 'mean'), n_lrs=('n_lrs', 'max'), rates=('rates', 'first'),
        behind=('behind', 'max'), behind_lam=('behind_lam', 'max'), seeds=('seed', 'nunique'),
        lrs_n1_lowest=('lrs_n1', 'min'), lrs_n1_highest=('lrs_n1', 'max')).reset_index()
    names = zip(rows.weight_tying.map(report.TYING), rows['size'], rows.variant, strict=True)
    rows['published'] = pd.Series(map(report.PUBLISHED.lrs.get, names), dtype=float)
    rows['published'] = rows.published.where(rows.rates == PAPER_LRS)
    return rows


# -------- the program
parser = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
user_path = os.path.expanduser  # bash does not expand the ~ in --out=~/results
add = parser.add_argument
add('runs', nargs='*', type=user_path, help='run folders, or folders of them: out/demo')
add('--results', type=user_path, metavar='FILE.csv', help='a csv of runs instead: see analysis/report.py')
add('--out', type=user_path, help='folder to write to (default: results/NAME, of several inputs NAME+NAME)')
add('--hf', nargs='+', metavar='MODEL', help="others' models: folders, NAME or NAME@REVISION")
add('--text', type=user_path, help='with --hf: like --files of prepare_fineweb.py, or stdlib')
add('--positions', type=train.nonnegative_int, default=16384, help='with --hf: how many (16384); 0: E alone')


def main(argv=None):
    args = parser.parse_args(argv)
    check(sum(map(bool, (args.runs, args.results, args.hf))) == 1, 'give run folders, or --results or --hf')
    check(args.results is None or os.path.isfile(args.results), f'--results={args.results} is not a file')
    inputs = [Path(name).resolve() for name in args.runs or args.hf or [args.results]]
    names = [path.parent.name if path.name == 'results.csv' else path.name.removesuffix('.csv')
             for path in inputs]
    out = Path(args.out or Path('results', '+'.join(names)))

    rounding, figures, lines, missing = [], [], [], []
    if args.hf:
        from analysis import hf  # it alone needs transformers
        tables = hf.measure_models(args, out)
    else:
        read, missing = collect(args.runs, out) if args.runs else ([], [])
        csv = Path(args.results or out / 'results.csv')
        runs = report.read_runs(csv)
        lrs_of_seeds, not_in_lrs = learning_rate_sensitivity(runs)
        lrs = mean_over_seeds(lrs_of_seeds)
        write_csv(out / 'lrs.csv', lrs.drop(columns=['plain_name', 'color']))
        lines, missing = report.describe(runs, read), missing + not_in_lrs
        rounding, tables = report.rounding_tables(runs), report.make_tables(runs, lrs)
        report.write_markdown(out / 'tables.md', rounding + tables)
        figures = report.draw_figures(csv, runs, out / 'figures', bool(rounding))
    report.write_page(out / 'report.html', rounding + figures + tables, [*lines, *missing])

    for table in rounding + tables:
        if table['title'] != 'All runs':
            rows = table['rows'].replace({'</?[bu]>': '', '<sub>': '(', '</sub>': ')'}, regex=True)
            print('', table['title'], rows.to_string(index=False), sep='\n')
    print('', *missing, f'wrote {out}; open {out / "report.html"} in a browser', sep='\n')


if __name__ == '__main__':
    main()
