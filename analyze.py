"""
Loads checkpoints and computes the paper's quantities: the norm of the mean embedding mu, statistics of the
logits, r_emb, r_cos and r_log, and the learning rate sensitivity (LRS) of a sweep.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs

It writes results.csv, a row for each run; curves.csv, of the logs; distributions.csv, over positions or the
vocabulary; lrs.csv; and what tools/report.py draws. Symbols are model.py's; a star marks what is centered,
e*_i = e_i - mu. Losses are in nats per token.
"""
import argparse
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
from model import GPT, METHODS, SIZES, gpt_config, summarize  # METHODS: {name: its default λ or None}
from tools import report
from train import check, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
STATISTICS = 'statistics_v9.json'  # kept in a run's folder; a new name if what is measured changes
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


# -------- the quantities of Section 3
def norm_ratios(E):
    """r_emb = |e*_i| / |e_i| of each token, (V,), or fewer: rows of zeros, such as padding, have no ratio."""
    norms = E.norm(dim=1)
    return ((E - E.mean(dim=0)).norm(dim=1) / norms)[norms > 0]


def centering_ratios(h, E):
    """h, E -> (N,) each, uncapped: r_log = max |l*_i| / max |l_i| (Eq. 11); r_cos; and cos(mu, h)."""
    def largest(X):  # max |x_i . h|, without a copy of the logits
        return torch.linalg.vector_norm(h @ X.T, ord=math.inf, dim=1).clamp_min(TINY)

    mu = E.mean(dim=0)
    star = E - mu  # next to a large mean the difference of the logits, l_i - mu . h, would lose its digits
    unit, unit_star = (F.normalize(X, dim=1, eps=TINY) for X in (E, star))  # |h| cancels in r_cos
    return {'r_log': largest(star) / largest(E),
            'r_cos': largest(unit_star) / largest(unit),
            'cos_mu_h': F.cosine_similarity(h, mu[None], eps=TINY)}


def measure_embeddings(E):
    """What can be measured from E (V, H) alone: |mu|, the mean's share V |mu|^2 / |E|_F^2, and r_emb."""
    mu, r_emb = E.mean(dim=0), norm_ratios(E).double().mean()
    share = len(E) * mu.square().sum() / E.square().sum()
    return {'mu_norm': mu.norm().item(), 'mean_share': share.item(), 'r_emb': r_emb.item()}


def concatenate(parts):
    """A list of dicts of (n,) -> one dict of (N,), in float64 and on the CPU."""
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


@torch.no_grad()
def measure_model(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> `numbers` for results.csv, `distributions` over positions or
    the vocabulary. r_log, r_cos, cos_mu_h are of e_i . h alone, all else of the model's own logits.
    """
    E, parts, bare = gpt.eval().E, [], 0.0
    for batch in windows.to(E.device).split(max(1, 2048 // gpt.config.block_size)):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        _, stats = gpt(tokens, targets)
        # cross entropy anew: a fork may have put another loss into head_loss of model.py
        bare += F.cross_entropy(gpt.logits(tokens).flatten(0, 1), targets.flatten(), reduction='sum').item()
        h = gpt.hidden(tokens).flatten(0, 1).float()
        parts.append({**stats, **centering_ratios(h, E.float())})
    stats = {**concatenate(parts), 'r_emb': norm_ratios(E).double().cpu()}
    del stats['reg']  # of the training loss alone
    distributions = {}  # of distributions.csv: count, mean, std, quartiles, extrema and two shares
    for name, values in stats.items():
        x = pd.Series(values.numpy())
        distributions[name] = {**x.describe(), 'below_1': (x < 1).mean(), 'above_0': (x > 0).mean()}
    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token; NaN if no r_cos is below 1
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers = {**summarize(stats, E), **measure_embeddings(E),
               **{f'{name}_below_1': distributions[name]['below_1'] for name in ('r_emb', 'r_cos')},
               'r_log_below_1_too': (r_log < 1).double().mean().item(),
               'cross_entropy': bare / windows[:, 1:].numel()}
    return {'numbers': numbers, 'distributions': distributions}


# -------- a run's folder
def measure_run(folder):
    """measure_model of a finished run, kept in its folder until model.pt changes. Raises for other data."""
    path = folder / 'model.pt'
    settings, kept = read_json(folder / 'config.json'), read_json(folder / STATISTICS)
    model_hash = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    if kept.get('run_id') == settings['run_id'] and (model_hash is None or model_hash == kept['model']):
        return kept
    saved = train.read_checkpoint(str(path))
    config = saved['config']  # of the training; `settings` knows where the data are now
    if config['run_id'] != settings['run_id']:
        raise ValueError('model.pt is of another run: its run_id differs from that of config.json')
    gpt = GPT(gpt_config(config)).to('cuda' if torch.cuda.is_available() else 'cpu')
    gpt.load_state_dict(saved['model'])
    data = train.open_data(argparse.Namespace(**{**config, 'data': settings['data']}))  # [train, test]
    if train.fingerprint(data) != config['data_fingerprint']:
        raise ValueError(f'{settings["data"]} does not hold the shards of the training')
    ids = data[1].evenly_spaced(min(POSITIONS, config['test_tokens']))  # of windows
    measured = {'model': model_hash, 'run_id': settings['run_id'],
                **measure_model(gpt, torch.from_numpy(data[1][ids]))}
    if os.access(folder, os.W_OK):  # runs may be kept where nobody may write
        save(measured, f'{folder}/{STATISTICS}')
    return measured


# -------- what a run is: the columns of results.csv
RESULTS = '''
    run method size n_params weight_tying lam cap lr seed steps batch_size block_size vocab_size test_tokens
    data_fingerprint dtype logits_dtype final_gain init_from init_loss test_loss model_step mu_norm mean_share
    logit_mean logit_mean_spread logit_std logit_absmax logit_max cos_mu_h r_emb r_cos r_log r_emb_below_1
    r_cos_below_1 r_log_below_1_too train_seconds tokens_per_second device commit'''.split()
REQUIRED = ['method', 'size', 'weight_tying', 'lr', 'test_loss']  # other cells may be empty: unknown
TEXTS = 'run method size data_fingerprint dtype logits_dtype init_from device commit'.split()
FLAGS = vars(train.parser.parse_args([]))  # {flag of train.py, which a fork may add to: its default}
FLAGS |= {'dtype': 'bfloat16', 'logits_dtype': 'bfloat16'}  # the paper's; train.py's depend on the machine

# Runs of one size and tying share these, or their losses could not be compared.
COMPARABLE = ['data_fingerprint', 'steps', 'vocab_size', 'test_tokens']
# Any other flag that changes results is part of a name where runs differ in it, a fork's too.
IN_NAMES = [flag for flag in FLAGS if flag not in {
    *COMPARABLE, *train.MAY_CHANGE, 'method', 'lam', 'size', 'weight_tying', 'lr', 'seed', 'log_every',
    'eval_every', 'eval_tokens'}]
ADDED = ['variant', 'setting', 'rounding', 'capped_loss']  # what `complete` adds; capped is min(L, L0)
ROUNDING = ['logits_dtype']  # alone they change results by rounding only (Fact 2)


def as_text(value):
    """A setting as names have it; '' if it is unknown or None."""
    if isinstance(value, str):
        return value
    return '' if pd.isna(value) else f'{value:.12g}'


def not_defaults(run):
    """A run's dict -> {flag of IN_NAMES: its value as text, or '' where that is such a run's default}."""
    defaults = {**FLAGS, **SIZES.get(run['size'], {}), 'warmup': run['steps'] // 20}
    defaults['cap'] = gpt_config({'method': run['method']}).cap if run['method'] in METHODS else None
    values = {flag: as_text(run.get(flag)) for flag in IN_NAMES}
    return {flag: '' if value == as_text(defaults[flag]) else value for flag, value in values.items()}


def name_runs(runs):
    """
    Adds each run's name, `variant`: its method, λ if not the default, and the flags in which runs of
    a size and tying differ, where not the usual value: `rounding` has those of ROUNDING, `setting` the rest.
    """
    flags = pd.DataFrame(map(not_defaults, runs.to_dict('records')), runs.index)
    runs = runs.assign(setting='', rounding='')
    for flag, values in flags.items():
        if values.groupby([runs['size'], runs.weight_tying]).nunique().max() == 1:
            continue  # nobody needs to be told
        usual = '' if (values == '').any() else values.mode()[0]  # the default, else the commonest
        column = 'rounding' if flag in ROUNDING else 'setting'
        runs[column] += (f', {flag} ' + values).where(values != usual, '')
    runs['rounding'] = runs.rounding.str.replace('logits_dtype float32', 'fp32 logits')
    lams = [f' λ={lam:g}' if lam >= 0 and lam != METHODS.get(method) else ''
            for method, lam in zip(runs.method, runs.lam, strict=True)]
    return runs.assign(variant=runs.method.replace(report.NAMES) + lams + runs.setting + runs.rounding)


def refuse(wrong, message):
    """If there are runs `wrong`, ends the program: names the first of them and says what is wrong."""
    check(wrong.empty, f'{"".join(wrong.run[:1])}: {message}')


def complete(runs):
    """Rows of settings and results -> named runs in order, with all of RESULTS, or a refusal."""
    runs = runs.reindex(columns=list(dict.fromkeys([*RESULTS, *runs])))
    runs[TEXTS] = runs[TEXTS].astype(object).fillna('')
    runs = runs.fillna({'seed': 0})
    runs['run'] = runs.run.where(runs.run != '', [f'line {i}' for i in range(2, len(runs) + 2)])
    runs['capped_loss'] = np.fmin(runs.test_loss, runs.init_loss)  # min(L, L0) of Eq. 21; no L0 if init_from
    refuse(runs[~(runs.lr > 0)], 'its lr is not a positive number')
    refuse(runs[~runs.weight_tying.isin([0, 1])], 'its weight_tying is neither 0 nor 1')
    refuse(runs[runs.capped_loss.isna() & (runs.init_from == '')], 'a test_loss of nan needs an init_loss')
    runs['weight_tying'] = runs.weight_tying.astype(int)
    runs[['lr', 'lam']] = runs[['lr', 'lam']].map('{:g}'.format).astype(float)  # 0.1 + 0.2 is 0.3
    runs['lam'] = runs.lam.fillna(runs.method.map(METHODS).astype(float))
    runs = name_runs(runs)
    for name in [*COMPARABLE, 'n_params']:
        columns = ['size', 'weight_tying'] + (['variant'] if name == 'n_params' else [])
        value = runs[name].where(runs[name] != '')  # an empty cell is unknown
        first = value.groupby([runs[column] for column in columns]).transform('first')
        refuse(runs[value.notna() & (value != first)],
               f'its {name} differs from that of other runs of its size; analyse them apart')
    refuse(runs[runs.duplicated(['variant', *report.PLACE, 'seed'])],  # PLACE: size, weight_tying, lr
           'a second run of its method, size, lr and seed')
    order = list(dict.fromkeys([*SIZES, *METHODS, *runs['size'], *runs.method]))  # then others
    by = ['weight_tying', 'size', 'method', 'lam', 'variant', 'lr', 'seed']  # the paper's order
    return runs.sort_values(by, ignore_index=True, key=lambda column: (
        column.map(order.index) if column.name in ('size', 'method') else column))


# -------- csv files
def write_csv(path, rows, float_format=None):
    """Writes a csv file atomically, with whole numbers without a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(rows.convert_dtypes().to_csv(index=False, float_format=float_format).encode(), str(path))


def differences(rows, columns):
    """[a line that names those of `columns` in which rows differ, though no run's name shows it], or []."""
    differ = [name for name in columns if len({*map(as_text, rows.get(name, []))} - {''}) > 1]
    return [f'runs differ in {", ".join(differ)}, which names do not show'] if differ else []


def read_runs(path):
    """
    A csv of runs, see `complete` -> the runs, and lines on what names do not show. A column that neither
    RESULTS nor train.py's flags have is a fork's statistic if it has only numbers, else it is not read.
    """
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)  # text alone, '' where a cell is empty
    check(isinstance(rows.index, pd.RangeIndex), f'{path}: rows are longer than the header: a decimal 3,55?')
    rows = rows.fillna('').map(str.strip).rename(columns=lambda name: name.strip().lower())
    missing = [name for name in REQUIRED if name not in rows]
    check(not missing, f'{path}: has no column {", ".join(missing)}; it needs {", ".join(REQUIRED)}')
    check(len(rows) and all(rows.test_loss), f'{path}: has no runs, or an empty test_loss (nan: not finite)')
    texts = []
    for name in rows.columns.difference(TEXTS):
        cells = rows[name].str.lower().replace({'true': '1', 'false': '0', '': 'nan'})
        values = pd.to_numeric(cells, errors='coerce').astype(float)
        wrong = rows[name][values.isna() & (cells != 'nan')]
        check(wrong.empty or name not in RESULTS, f'{path}: {name} should be a number, not {[*wrong[:1]]}')
        if wrong.empty:
            rows[name] = values.replace([math.inf, -math.inf], math.nan)
        elif name not in FLAGS:
            texts.append(name)
    return complete(rows.drop(columns=texts)), differences(rows, ['commit', *texts])


# -------- a sweep
def read_folders(folders):
    """The runs anywhere in `folders`, a row each; their curves; lines on what is missing."""
    runs, curves, lines = [], [], []
    for folder in sorted({path.parent for name in folders for path in Path(name).rglob('config.json')}):
        try:
            settings, results = (read_json(folder / name) for name in ('config.json', 'result.json'))
            log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
            run = {**settings, **results, 'run': str(folder), 'device': settings['device_name']}
        except Exception as error:  # of many kinds, where a file is damaged, or a run has just begun
            lines.append(f'left out: {folder}: {error} ({type(error).__name__})')
            continue
        lines += [] if results else [f'not finished: {folder}']
        runs.append({**run, 'finished': bool(results)})
        every = math.ceil(len(log) / 1000)  # 1000 are enough for a plot; all lines of an evaluation are kept
        kept = [entry for i, entry in enumerate(log) if i % every == 0 or 'loss' not in entry]
        curves.append(pd.DataFrame(kept).assign(run=str(folder)))
    check(any(run['finished'] for run in runs), '; '.join([f'{folders[0]}: no finished run', *lines[:3]]))
    # None -> NaN, so that columns of numbers are floats
    return pd.DataFrame(runs).fillna(math.nan).infer_objects(), pd.concat(curves), lines


def collect(folders, out):
    """Reads and measures runs, writes three csv files -> the finished; all; their curves; lines."""
    everything, curves, lines = read_folders(folders)
    finished, others = everything[everything.finished], everything[~everything.finished]
    runs = complete(finished[[name for name in finished if name in {*RESULTS, *IN_NAMES}]])  # or refuses
    unknown = finished.columns.difference([*RESULTS, *FLAGS, *train.MAY_CHANGE])
    lines += differences(finished, ['commit', *unknown])
    statistics, distributions = [], []
    for i, run in enumerate(runs.itertuples(), 1):
        print(f'[{i}/{len(runs)}] measuring {run.run}', flush=True)
        try:
            measured = measure_run(Path(run.run))
        except (Exception, SystemExit) as error:  # of many kinds, with another model or damaged data
            lines.append(f'{run.run} is without statistics: {error} ({type(error).__name__})')
            measured = {'numbers': {}, 'distributions': {}}
        own, bare = (measured['numbers'].pop(name, math.nan) for name in ('loss', 'cross_entropy'))
        loss = run.test_loss if run.test_tokens <= POSITIONS else own  # of the positions that are measured
        if abs(bare / loss - 1) > 1e-3:  # rounding differs by less
            lines.append(f'{run.run}: by model.pt the cross entropy is {bare:.4f}, not {loss:.4f}')
        statistics.append(measured['numbers'])
        distributions += [{'run': run.run, 'quantity': x, **y} for x, y in measured['distributions'].items()]
    runs = runs.assign(**pd.DataFrame(statistics, index=runs.index))

    rows = runs.drop(columns=ADDED)
    write_csv(out / 'results.csv', rows.assign(test_loss=rows.test_loss.astype(object).fillna('nan')))
    write_csv(out / 'curves.csv', curves[curves.run.isin(runs.run)], '%.7g')  # enough for a plot
    write_csv(out / 'distributions.csv', pd.DataFrame(distributions))
    others = others.assign(variant=[f'{Path(run).name}, not finished' for run in others.run])
    return runs, pd.concat([runs, others]), curves, lines


# -------- who is behind, and learning rate sensitivity
LRS_COLUMNS = '''size weight_tying variant method lam setting rounding n_params lrs lrs_n1 n_rates rates
                 behind seeds lrs_n1_lowest lrs_n1_highest'''.split()
MIN_LEARNED = 0.1  # nats: a run whose test loss is not this far below its initial loss learned nothing


def of_default_lam(runs):
    """The runs that methods are compared by: of the default λ, or of every λ where none has the default."""
    is_default = runs.lam.isna() | (runs.lam == runs.method.map(METHODS))
    groups = runs.assign(is_default=is_default).groupby(
        ['size', 'weight_tying', 'method', 'setting', 'rounding'])
    return runs[is_default | ~groups.is_default.transform('any')]


def of_several_lam(runs):
    """The runs that values of λ are compared by: of the methods that ran with several."""
    groups = runs.groupby(['weight_tying', 'method', 'setting', 'rounding'])
    return runs[groups.lam.transform('nunique') > 1]


def behind(runs):
    """
    0 for a run whose variant's test loss, a mean over seeds, is within 1% of the lowest at its size, tying,
    learning rate, setting and rounding (NaN instead of 0 if there is no other variant); 1 if it is further
    or not finite: "diverged", as `_div` in results/Analyze_All_Models_Performance.ipynb of the authors' code.
    """
    place = [*report.PLACE, 'setting', 'rounding']
    mean = runs.groupby([*place, 'variant']).test_loss.transform(lambda losses: losses.mean(skipna=False))
    groups = runs.assign(mean_loss=mean).groupby(place)
    lowest, n_variants = groups.mean_loss.transform('min'), groups.variant.transform('nunique')
    within = (mean - lowest) / lowest <= 0.01  # False if the mean is not finite
    return (~within).astype(float).mask(within & (n_variants == 1))


def learning_rate_sensitivity(runs):
    """
    LRS (Eq. 21), in nats, of each size, tying and variant, means over its seeds: `lrs` is the mean over n
    learning rates of min(L, L0) - min L, `lrs_n1` their sum / (n - 1), as in the published tables. NaN if a
    seed learned nothing at any learning rate: its losses do not vary, so it would score 0, the best. And
    lines that name the seeds left out: with one rate alone, or without a rate that another seed has.
    """
    rows, lines = [], []
    runs = runs.assign(behind=behind(runs))
    for (tying, size, variant), part in runs.groupby(['weight_tying', 'size', 'variant'], sort=False):
        n, sums = part.lr.nunique(), []
        for seed, of_seed in part.groupby('seed'):
            loss, rates = of_seed.capped_loss, ' '.join(map('{:g}'.format, of_seed.lr))
            if n == 1 or len(of_seed) < n:
                lines.append(f'not in LRS: {variant} {size}, {report.TYING[tying]}, seed {seed:.0f}, '
                             f'with learning rates {rates}')
            elif loss.min() >= of_seed.init_loss.min() - MIN_LEARNED:
                sums.append(math.nan)  # it learned nothing
            else:
                sums.append((loss - loss.min()).sum(skipna=False))
        if not sums:
            continue
        n1 = np.array(sums) / (n - 1)
        rows.append({**part.iloc[0], 'n_rates': n, 'rates': ' '.join(map('{:g}'.format, part.lr.unique())),
                     'behind': part.behind.max(), 'seeds': len(sums), 'lrs': np.mean(sums) / n,
                     'lrs_n1': n1.mean(), 'lrs_n1_lowest': n1.min(), 'lrs_n1_highest': n1.max()})
    return pd.DataFrame(rows, columns=LRS_COLUMNS), lines


def verdict(logit_mean):
    """What BF16 logits cost a run with this mean logit, by results/mean_logit."""
    size = abs(logit_mean)
    if size < 64:
        cost = 'nothing'
    elif size < 256:
        cost = 'hundredths of a nat; center the head, or use mu_loss'
    else:
        cost = 'a tenth of a nat and more; center the head, or use mu_loss'
    return f'mean logit {logit_mean:.1f}, where BF16 costs {cost}'


# -------- the program
parser = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('runs', nargs='*', type=os.path.expanduser, help='folders with runs: out/demo')
parser.add_argument('--results', type=os.path.expanduser, metavar='FILE.csv', help='a csv of runs instead')
parser.add_argument('--out', type=os.path.expanduser, help='folder to write to (default: results/NAME)')


def main(argv=None):
    """Reads, compares and draws what the command line names."""
    args = parser.parse_args(argv)
    check(bool(args.runs) != bool(args.results), 'give run folders, or --results')
    inputs = args.runs or [args.results.removesuffix('.csv').removesuffix('/results')]  # DIR/results.csv: DIR
    out = Path(args.out or f'results/{"+".join(Path(name).resolve().name for name in inputs[:3])}')
    if args.runs:
        runs, everything, curves, lines = collect(args.runs, out)
    else:
        runs, lines = read_runs(args.results)
        everything = runs
        path = Path(args.results).with_name('curves.csv')
        curves = pd.read_csv(path, dtype={'run': str}) if path.exists() else pd.DataFrame(columns=['run'])
    runs['behind'] = behind(of_default_lam(runs))  # NaN for the rest; LRS does not read it but has its own
    compared = of_default_lam(runs)
    methods, left_out = learning_rate_sensitivity(compared)
    several, also_left_out = learning_rate_sensitivity(of_several_lam(runs))
    lrs = pd.concat([methods.assign(table='methods'), several.assign(table='λ')])
    if lrs.n_rates.max() >= report.MIN_RATES:  # with fewer no LRS is shown
        lines += dict.fromkeys(left_out + also_left_out)  # each once
        if compared.init_loss.isna().any():
            lines.append('Where init_loss is empty, LRS caps no loss and cannot see if nothing was learned.')
    write_csv(out / 'lrs.csv', lrs.drop(columns=['setting', 'rounding']))  # which `variant` has
    of_a_fork = [name for name in runs if name not in {*RESULTS, *FLAGS, *ADDED, 'behind'}]
    tables = report.make_tables(runs, methods, several, of_a_fork)
    report.write_markdown(out / 'tables.md', tables)
    figures = report.draw_figures(compared, everything, curves, out / 'figures')
    messages = [table['message'] for table in tables if 'message' in table]
    rounded = runs[runs.logits_dtype.isin(['', 'bfloat16']) & ~(runs.cap > 0)].dropna(subset='logit_mean')
    largest = [f'Largest: {run.variant} of {run.size} at η = {run.lr:g}: {verdict(run.logit_mean)}'
               for run in rounded.sort_values('logit_mean', key=abs)[-1:].itertuples()]
    lines = [*report.said_of_rounding(runs), *messages, *largest, *report.describe(runs), *lines]
    report.write_page(out / 'report.html', [*tables[:-1], *figures, tables[-1]], lines)  # last: all runs

    for table in tables[:-1]:
        rows = table['rows'].replace('</?[bu]>', '', regex=True)
        print(table['title'], rows.to_string(index=False), '', sep='\n')
    print(*lines, f'wrote {out}; open {out / "report.html"} in a browser', sep='\n')


if __name__ == '__main__':
    main()
