"""
Learning rate sensitivity and the paper's other tables, from the rows of results.csv; and any table as text,
Markdown, LaTeX or HTML.

Rows are DataFrames with the columns of the csv files and those of `derive`; an unknown number is NaN, an
unknown text ''. A table is a dict: title, where (its place in the paper), says (what it shows), header,
rows. A cell is a text or (text, marks, grey): marks may hold b (bold) and u (underlined), and grey is a
text that is set in grey beside it.
"""
import math
from itertools import combinations, pairwise

import numpy as np
import pandas as pd
from markupsafe import escape
from tabulate import tabulate

import paper
from model import METHODS, ROUNDED, SIZES, base_method

NAMES = {
    'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss',
    'mu_centering': 'μ-centering', 'max_z_loss': 'max-z loss', 'norm_softmax': 'NormSoftmax',
    'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.', 'laplace_reg': 'Laplace reg.',
    'spectrum_control': 'spectrum control', 'zero_sum': 'zero-sum', 'centered_head': 'centered head'}
SYMBOLS = {
    'test_loss': 'test loss', 'mu_norm': '‖μ‖', 'logit_mean': 'logit mean', 'offset': 'its rms',
    'logit_mean_spread': 'its spread', 'logit_std': 'logit std', 'logit_absmax': 'max |logit|',
    'mu_shift': 'added to μ', 'cos_mu_h': 'cos(μ, h)', 'rounding_loss': 'of rounding', 'lr_sum': 'Σ lr'}
LRS_COLUMNS = ('size weight_tying method lam lrs lrs_n1 n_lrs diverged seeds lrs_low lrs_high best_lr '
               'best_loss largest_lr largest_lr_loss excess excess_low excess_high').split()
BOOTSTRAP = 1000           # resamples behind an interval
CLEARLY = 1.25             # the ranking puts > between two methods if one LRS is this many times the other
YES = {0: 'no', 1: 'yes'}  # of a column of 0 and 1

SUBSETS = ['none', *(','.join(parts) for n in (1, 2, 3) for parts in combinations(ROUNDED, n))]
ALL = SUBSETS[-1]
DEFAULTS = {'mu_shift': 0, 'rounded': ALL}  # what an empty cell of a csv means
WITHOUT = 'baseline without any rounding'

# --------------------------------------------------------------------------------------------------
# variants: what has a colour and a column of its own


def default_lam(method):
    """The λ that needs no mention: the method's own default, or else the paper's 1e-4."""
    return METHODS.get(base_method(method)) or 1e-4


def variant(method, lam):
    """The method, and with a λ that is not its default: method, tab, λ. No name in a csv has a tab."""
    return method if pd.isna(lam) or lam == default_lam(method) else f'{method}\t{float(lam)!r}'


def method_and_lam(variant):
    """variant -> (method, λ or None for its default)."""
    method, _, lam = variant.partition('\t')
    return method, float(lam) if lam else None


def name(variant):
    """What tables and legends call a variant."""
    method, lam = method_and_lam(variant)
    return ' + '.join(NAMES.get(m, m) for m in method.split('+')) + ('' if lam is None else f' λ={lam:g}')


def in_paper_order(rows, by=('weight_tying', 'size', 'method', 'lam', 'lr', 'mu_shift', 'rounded', 'seed')):
    """The rows sorted by these columns: sizes and methods as in the paper, those that it lacks last."""
    rank = {known: f'{i:02} ' for i, known in enumerate((*SIZES, *METHODS))}

    def key(column):
        named = column.name in ('size', 'method')
        return column.map(lambda text: rank.get(base_method(text), '99 ') + text) if named else column
    return rows.sort_values(list(by), key=key, na_position='first', ignore_index=True)


def variants(rows, column='variant'):
    """The variants (or methods) in `rows`, in the paper's order."""
    return list(in_paper_order(rows, ('method', 'lam'))[column].unique())


def readable(rows):
    """All rows, or if there are more than eight variants those of the default λ alone."""
    return rows if rows.variant.nunique() <= 8 else rows[rows.variant == rows.method]


def tyings(rows):
    """(0 or 1, 'untied' or 'tied', the rows of that tying), for each that `rows` have."""
    for tying, part in rows.groupby('weight_tying'):
        yield int(tying), ('untied', 'tied')[int(tying)], part


def usual(rows):
    """The rows without a shifted mean and with every rounding, which most tables and figures are of."""
    return rows[(rows.mu_shift == 0) & (rows.rounded == ALL)]


def derive(rows):
    """
    Adds the columns variant, capped_loss, and offset, the root mean square over positions of their mean
    logit, which is what bf16 has to round.
    """
    rows = rows.assign(variant=[variant(*row) for row in zip(rows.method, rows.lam, strict=True)])
    if 'test_loss' in rows:
        rows['capped_loss'] = capped_loss(rows.test_loss, rows.init_loss)
    if 'logit_mean_spread' in rows:
        rows['offset'] = np.hypot(rows.logit_mean, rows.logit_mean_spread)
    return rows


# --------------------------------------------------------------------------------------------------
# learning rate sensitivity


def capped_loss(losses, init_losses):
    """
    What LRS counts, elementwise: the test loss, but no more than the loss at initialisation, which also
    stands for a loss that is not finite. Infinite if that is needed and unknown (NaN).
    """
    L, L0 = np.array(losses, float), np.array(init_losses, float)
    L0 = np.where(np.isnan(L0), np.inf, L0)
    return np.where(np.isfinite(L), np.minimum(L, L0), L0)


def lrs(losses, init_losses=np.inf):
    """
    Learning rate sensitivity (Eq. 21) of a model trained at n learning rates: test losses (..., n) and
    losses at initialisation -> (the paper's mean, the published tables' sum / (n - 1)), each (...,).
    Raises ValueError if a loss is not finite and its loss at initialisation is not known.
    """
    capped = capped_loss(losses, init_losses)
    if not np.isfinite(capped).all():
        raise ValueError('a loss is not finite and the loss at initialisation is not known')
    n, total = capped.shape[-1], (capped - capped.min(axis=-1, keepdims=True)).sum(axis=-1)
    return total / n, total / (n - 1) if n > 1 else total * math.nan


def bootstrap(values):
    """A 95% interval of the mean of one value per seed, from BOOTSTRAP draws with replacement."""
    drawn = np.random.RandomState(0).choice(values, (BOOTSTRAP, len(values)))
    return np.percentile(drawn.mean(axis=1), (2.5, 97.5)).tolist()


def lrs_table(runs):
    """
    runs -> (rows of lrs.csv, lines on what is missing). One row per size, tying, method and λ: the mean over
    its seeds, an interval if there are several, and `excess`, the loss at the largest learning rate minus
    the lowest of the same seed.
    """
    rows, missing = [], []
    for _, group in runs.groupby(['size', 'weight_tying', 'method', 'lam'], sort=False, dropna=False):
        first = group.iloc[0]
        label = f'{name(first.variant)} {first["size"]}'
        losses = group.pivot(index='seed', columns='lr', values='capped_loss')  # seeds x learning rates
        n_lrs = losses.shape[1]
        missing += [f'seed {seed:g} of {label} ({n} of {n_lrs} learning rates) is left out of its LRS'
                    for seed, n in losses.count(axis=1).items() if n < n_lrs]
        losses = losses.dropna()
        if losses.empty:
            continue
        try:
            lrs_of_seeds, n1_of_seeds = lrs(losses)
        except ValueError as error:
            missing.append(f'no LRS of {label}: {error}')
            continue
        marks = group[group.seed.isin(losses.index)].diverged
        low, high = bootstrap(lrs_of_seeds) if len(losses) > 1 else (math.nan, math.nan)
        mean, excess = losses.mean(), losses.iloc[:, -1] - losses.min(axis=1)
        rows.append({
            **first[['size', 'weight_tying', 'method', 'lam', 'n_params', 'variant']],
            'lrs': lrs_of_seeds.mean(), 'lrs_n1': n1_of_seeds.mean(), 'lrs_low': low, 'lrs_high': high,
            'n_lrs': n_lrs, 'seeds': len(losses),
            'diverged': 1 if (marks == 1).any() else math.nan if marks.isna().any() else 0,
            'best_lr': mean.idxmin(), 'best_loss': mean.min(),
            'largest_lr': mean.index[-1], 'largest_lr_loss': mean.iloc[-1],
            'excess': excess.mean(), 'excess_low': excess.min(), 'excess_high': excess.max()})
    return pd.DataFrame(rows, columns=[*LRS_COLUMNS, 'n_params', 'variant']), missing


def lrs_grid(rows, value, published):
    """
    A table's rows from those of lrs.csv: one line per size, one cell per variant; bold the best of the line,
    underlined if no run diverged, and in grey `published`, a dict (size, variant) -> the paper's number.
    """
    lines, most = [], rows.n_lrs.max()
    for size, group in rows.groupby('size', sort=False):
        cells = dict.fromkeys(variants(rows), '-')
        comparable = group.n_lrs == group.n_lrs.max()  # over fewer learning rates it is another quantity
        best = comparable & (group[value] == group[value][comparable].min()) & (len(group) > 1)
        for i, r in group.iterrows():
            words = f'{r[value]:.3f}' + ('' if r.n_lrs == most else f' ({r.n_lrs} of {most} lr)')
            if value == 'lrs' and r.seeds > 1:
                words += f' [{r.lrs_low:.3f}, {r.lrs_high:.3f}]'
            theirs = published.get((size, r.variant))
            grey = '' if theirs is None else f'{theirs:.3f} {r[value] - theirs:+.3f}'
            cells[r.variant] = words, ('b' if best[i] else '') + ('u' if r.diverged == 0 else ''), grey
        lines.append([size, *cells.values()])
    return lines


def lrs_tables(rows):
    """From rows of lrs.csv, for each tying: LRS as the paper's tables have it, and as its equation does."""
    tables = []
    for tying, word, part in tyings(readable(rows)):
        where, header = ('Table 2', 'Appendix D, Table 5')[tying], ['N', *map(name, variants(part))]
        interval = ' In brackets a bootstrap 95% interval over the seeds.' if (part.seeds > 1).any() else ''
        tables.append(dict(
            title=f'LRS (n-1), {word}', where=where, header=header,
            rows=lrs_grid(part, 'lrs_n1', paper.LRS[tying]),
            says="Learning rate sensitivity, the smaller the better, normalised as the paper's tables are: "
                 'the sum over the learning rates divided by their number minus one. Bold: the best of its '
                 'row. Underlined: no learning rate diverged. Grey: the paper, and our difference to it.'))
        tables.append(dict(
            title=f'LRS, {word}', where=f'Eq. 21; for the numbers of {where} see LRS (n-1)', header=header,
            rows=lrs_grid(part, 'lrs', {}),
            says='The same as the equation has it, the mean over the learning rates.' + interval))
    return tables


def sensitivity_tables(rows):
    """LRS for each λ of the methods that were run with several, from rows of lrs.csv."""
    tables = []
    for tying, word, part in tyings(rows[rows.lam.notna()]):
        for method, group in part.groupby('method', sort=False):
            published = {} if tying else paper.LRS_OF_LAM.get(method, {})
            published = {(size, variant(method, float(lam))): v for (size, lam), v in published.items()}
            if group.lam.nunique() > 1:
                tables.append(dict(
                    title=f'{name(method)} for several λ: LRS (n-1), {word}',
                    where='Appendix C, Table 4' if published else '',
                    header=['N', *(f'{lam:g}' for lam in sorted(group.lam.unique()))],
                    rows=lrs_grid(group, 'lrs_n1', published),
                    says=f'How much the LRS of {name(method)} depends on its λ, which heads the columns.'))
    return tables


def ranking_tables(rows):
    """The methods, at the default λ, by mean LRS over the sizes that all have, from rows of lrs.csv."""
    tables = []
    for _, word, part in tyings(rows[rows.variant == rows.method]):
        part = part[part.n_lrs == part.n_lrs.max()]
        cells = part.pivot(index='method', columns='size', values='lrs_n1')
        cells = cells.reindex(index=variants(part), columns=part['size'].unique()).dropna(axis=1)
        if len(cells) < 2 or cells.empty:
            continue
        mean = cells.mean(axis=1).sort_values(kind='stable')
        lines = [[name(mean.index[0]), f'{mean.iloc[0]:.3f}', '', '', '']]
        for a, b in pairwise(mean.index):
            sign = '>' if mean[b] > mean[a] and mean[b] >= CLEARLY * mean[a] else '≈'
            lines.append([f'{sign} {name(b)}', f'{mean[b]:.3f}', f'{mean[b] - mean[a]:+.3f}',
                          f'{mean[b] / mean[a]:.2f}' if mean[a] else '-',
                          f'{(cells.loc[a] < cells.loc[b]).sum()} of {cells.shape[1]}'])
        tables.append(dict(
            title=f'Ranking, {word}', where=f'Eq. 22, which has: {paper.RANKING}', rows=lines,
            header=['method', 'mean LRS (n-1)', 'over the one before', 'times it', 'worse at sizes'],
            says=f'From best to worst by mean LRS over {", ".join(cells.columns)}; ">" if the mean is at '
                 f'least {CLEARLY:g} times that of the one before, "≈" if it is less.'))
    return tables


# --------------------------------------------------------------------------------------------------
# the other tables


def overhead_tables(runs):
    """ΔT over the baseline, all λ of a method together -> (tables, lines on what cannot be compared)."""
    tables, missing = [], []
    for tying, word, part in tyings(runs[(runs.train_seconds > 0) & np.isfinite(runs.test_loss)]):
        methods = [method for method in variants(part, 'method') if method != 'baseline']
        lines, devices = [], []
        for size, group in part.groupby('size', sort=False):
            seconds = group.groupby('method').train_seconds.mean()
            if len(group[['device', 'steps']].drop_duplicates()) > 1:
                missing.append(f'no ΔT of {size} {word}: its runs were made on different machines or with '
                               'different steps')
            elif 'baseline' in seconds and len(seconds) > 1:
                cells = dict.fromkeys(methods, '-')
                for method, percent in (100 * (seconds / seconds['baseline'] - 1)).drop('baseline').items():
                    theirs = paper.OVERHEAD[tying].get((size, method))
                    grey = '' if theirs is None else f'{theirs:.1f}% {percent - theirs:+.2f}'
                    cells[method] = f'{percent:.1f}%', '', grey
                lines.append([size, *cells.values()])
                devices.append(group.device.iloc[0] or 'unknown, assumed to be the same for all runs')
        if lines:
            tables.append(dict(
                title=f'Additional training time ΔT, {word}', where='Appendix E, Table 6', rows=lines,
                header=['N', *map(name, methods)],
                says="Training time beyond the baseline's, all λ of a method averaged. Grey: the paper (4 "
                     'A100), and our difference in percentage points. Machine: '
                     f'{", ".join(dict.fromkeys(devices))}.'))
    if not tables and not missing:
        missing = ['no table of ΔT: there are no times of a baseline and of another method at one size']
    return tables, missing


def shown(number, form):
    return '' if pd.isna(number) else format(number, form)


def excess_table(runs, rows):
    """Where each method ends at its largest learning rate: runs, rows of lrs.csv; means over the seeds."""
    columns = ['mu_norm', 'logit_mean', 'offset', 'logit_absmax', 'rounding_loss', 'lr_sum']
    key = ['size', 'weight_tying', 'variant', 'lr']
    means = runs.groupby(key)[columns].agg(lambda of_seeds: of_seeds.mean(skipna=False))
    lines = []
    for _, r in in_paper_order(rows, ('weight_tying', 'size', 'method', 'lam')).iterrows():
        spread = f' [{r.excess_low:.3f}, {r.excess_high:.3f}]' if r.seeds > 1 else ''
        mean = means.loc[r['size'], r.weight_tying, r.variant, r.largest_lr]
        lines.append([name(r.variant), r['size'], YES[r.weight_tying], f'{r.best_loss:.3f} ({r.best_lr:g})',
                      f'{r.largest_lr_loss:.3f} ({r.largest_lr:g})', f'{r.excess:.3f}{spread}',
                      *(shown(number, '.3g') for number in mean)])
    return dict(
        title='From the best to the largest learning rate', where='Section 4, Figures 2 and 4', rows=lines,
        header=['method', 'size', 'tied', 'best loss (lr)', 'at the largest lr', 'excess',
                *(SYMBOLS[column] for column in columns)],
        says='How much worse the test loss is at the largest learning rate than at the best one (of several '
             'seeds the mean, lowest and highest), and mean embedding and logits at the largest. The rms is '
             'that of the mean logit of a position: large if mean logits of either sign average out. Of '
             'rounding: what rounding to bf16 adds to the loss of the same weights.')


# --------------------------------------------------------------------------------------------------
# the effect of a shifted mean: runs with --mu_shift and --rounded

SETTING = ['size', 'weight_tying', 'lr']


def shifted(runs):
    """
    The runs of each size, tying, learning rate and variant that has one with a shifted mean, and the columns
    loss (that at initialisation if the test loss is not finite), excess (the loss minus the mean loss without
    a shift, of the same variant or else of the baseline) and label (the variant's name, or WITHOUT; '' if
    only some roundings are on).
    """
    rows = runs[runs.groupby([*SETTING, 'variant']).mu_shift.transform('max') > 0]
    loss = rows.test_loss.where(np.isfinite(rows.test_loss), rows.capped_loss)
    setting = [rows[column] for column in SETTING]
    origin = loss[usual(rows).index].reindex(rows.index)
    baseline = origin.where(rows.method == 'baseline').groupby(setting).transform('mean')
    origin = origin.groupby([*setting, rows.variant]).transform('mean').fillna(baseline)
    without = (rows.method == 'baseline') & (rows.rounded == 'none')
    label = rows.variant.map(name).where(rows.rounded == ALL, '').mask(without, WITHOUT)
    return rows.assign(loss=loss, excess=loss - origin, label=label)


def over_seeds(values, form):
    """The mean over the seeds and, if there are several, [the lowest, the highest]."""
    values = values.dropna()
    words = [format(x, form) for x in (values.mean(), values.min(), values.max())]
    return '-' if values.empty else words[0] + (f' [{words[1]}, {words[2]}]' if len(values) > 1 else '')


def cost_table(rows, where):
    """The test loss of each method at each norm that was added, from rows of `shifted`."""
    norms = sorted(rows.mu_shift.unique())
    lines = [[label, *(over_seeds(part.loss[part.mu_shift == norm], '.3f') for norm in norms)]
             for label, part in rows[rows.label != ''].groupby('label', sort=False)]
    return dict(
        title=f'The cost of a shifted mean, {where}', where='', rows=lines,
        header=['method', *(f'norm {norm:g}' for norm in norms)],
        says='Test loss if a vector of this norm is added to every output embedding before training, which '
             'changes nothing in exact arithmetic (Fact 2). Mean over the seeds [lowest, highest]; a loss '
             'that is not finite counts as that at initialisation.')


def rounding_table(rows, where):
    """The baseline's test loss and mean logit by which roundings are on, from rows of `shifted`."""
    rows = rows[rows.method == 'baseline']
    norms = sorted(rows.mu_shift[rows.rounded != ALL].unique())
    header, lines = ['rounded to bf16'], {subset: [subset.replace(',', ', ')] for subset in SUBSETS}
    for norm in norms:
        header += [f'loss at norm {norm:g}', f'logit mean at {norm:g}']
        for subset, line in lines.items():
            part = rows[(rows.mu_shift == norm) & (rows.rounded == subset)]
            line += [over_seeds(part.loss, '.3f'), over_seeds(part.logit_mean, '+.0f')]
    return dict(
        title=f'Which rounding costs what, {where}', where='', header=header,
        rows=[line for subset, line in lines.items() if set(line[1:]) != {'-'}],
        says='The baseline by what is rounded: the operands h and E of the logits, the logits, and their '
             'gradient. Test loss and final mean logit, each the mean over the seeds [lowest, highest].')


def shift_tables(runs):
    """For each size, tying and learning rate with a shifted mean: what it costs, and by which rounding."""
    tables = []
    for (size, tying, lr), rows in shifted(runs).groupby(SETTING, sort=False):
        where = f'{size} {("untied", "tied")[int(tying)]}, lr {lr:g}'
        if (rows.label != '').any():
            tables.append(cost_table(rows, where))
        if (rows.rounded[rows.method == 'baseline'] != ALL).any():
            tables.append(rounding_table(rows, where))
    return tables


def shift_sentence(runs):
    """
    What bf16 costs the baseline at the largest norm added, and what of it the other methods leave, over the
    seeds that have the runs it takes: one sentence, or '' if there are none.
    """
    rows = shifted(runs).assign(seed=lambda rows: rows.seed.fillna(0))
    rows = rows[rows.logits_dtype.isin(['', 'bfloat16']) & np.isfinite(rows.loss) & (rows.label != '')]
    norms = rows.mu_shift[(rows.label == 'baseline') & (rows.mu_shift > 0)]
    if norms.empty:
        return ''
    norm, setting = norms.max(), rows.loc[norms.idxmax(), SETTING]
    rows = rows[(rows[SETTING] == setting).all(axis=1)]
    losses = rows[rows.mu_shift == norm].pivot_table(index='seed', columns='label', values='loss')
    exact, instead = losses.get(WITHOUT), 'without rounding'
    if exact is None:
        start = rows[(rows.label == 'baseline') & (rows.mu_shift == 0)]
        exact, instead = start.set_index('seed').loss.reindex(losses.index), 'at norm 0'
    losses = losses[losses.baseline.notna() & exact.notna()].dropna(axis=1)
    if losses.empty:
        return ''
    seeds = f'; means of {len(losses)} seeds' if len(losses) > 1 else ''
    loss, exact = losses.mean(), exact[losses.index].mean()
    cost = loss.baseline - exact
    numbers = f'({loss.baseline:.2f} instead of {exact:.2f} {instead}{seeds})'
    if cost < 0.005:
        return f'At a mean embedding of norm {norm:g} BF16 costs the baseline nothing {numbers}.'
    left = []
    for label in rows.label.unique():
        if label in loss and label not in ('baseline', WITHOUT):
            rest = loss[label] - exact
            amount = 'nothing' if rest < 0.005 else 'all' if rest >= cost else f'{rest:.2f}'
            left.append(f'{label} {amount}' if left else f'; {label} leaves {amount} of it')
    return (f'At a mean embedding of norm {norm:g} BF16 costs the baseline {cost:.2f} nats {numbers}'
            f'{", ".join(left)}.')


# --------------------------------------------------------------------------------------------------
# tables of runs and settings


def run_table(runs, title='All runs'):
    """The runs, one per line; a column of which nothing is known is left out."""
    forms = {'seed': 'g', 'lr': 'g', 'mu_shift': 'g', 'rounded': 's', 'test_loss': '.4f',
             'mu_norm': '.3g', 'logit_mean': '.3g', 'logit_mean_spread': '.3g', 'logit_std': '.3g',
             'logit_absmax': '.3g', 'cos_mu_h': '.3f', 'r_cos': '.3f', 'r_log': '.3f'}
    unsaid = {**DEFAULTS, 'seed': runs.seed.iloc[0]}  # if all runs have this, it needs no column
    columns = [c for c in forms if runs[c].notna().any() and not (runs[c] == unsaid.get(c)).all()]
    rows = [[name(r.variant), r['size'], YES[r.weight_tying],
             *('nan' if c == 'test_loss' and pd.isna(r[c]) else shown(r[c], forms[c]) for c in columns),
             YES.get(r.diverged, '')] for _, r in runs.iterrows()]
    return dict(title=title, where='Figures 2, 4 and 5', rows=rows,
                header=['method', 'size', 'tied', *(SYMBOLS.get(c, c) for c in columns), 'diverged'],
                says='Test loss, mean embedding and logit statistics of each run.')


def hyperparameter_table(settings):
    """Appendix A beside the runs' own settings: a dict name -> list of the values that the runs have."""
    tokens = [a * b for a in settings.get('batch_size', []) for b in settings.get('block_size', [])]
    settings, rows = {**settings, 'batch_size * block_size': tokens}, []
    for title, published, key in paper.HYPERPARAMETERS:
        ours = ', '.join(sorted(str(value).lower() for value in settings.get(key, []))) or '?'
        fixed = ('', '', str(published))  # in the code
        rows.append([title, (ours, 'b' * (ours != str(published)), '') if key else fixed, str(published)])
    return dict(
        title='Hyper-parameters', where='Appendix A, Table 3', header=['', 'these runs', 'the paper'],
        rows=rows, says="Bold: other than the paper's. Grey: fixed in the code.")


def methods_table():
    """The paper's overview of the methods."""
    return dict(title='Methods', where='Section 2.4, Table 1',
                header=['name', 'intervention', 'means', 'symmetry', 'anisotropy suppression'],
                rows=[[name(method), *cells] for method, cells in paper.METHODS.items()],
                says='By which means each method suppresses diverging logits; symmetry: whether positive and '
                     'negative logits are treated alike.')


# --------------------------------------------------------------------------------------------------
# a table as text, Markdown, HTML or LaTeX; the words of a csv are escaped in each

LATEX = {**{c: rf'\{c}' for c in '&%$#_{}'}, '\\': r'\textbackslash{}', '~': r'\textasciitilde{}',
         '^': r'\textasciicircum{}', '<': '$<$', '>': '$>$', '|': '$|$', 'μ': r'$\mu$', 'λ': r'$\lambda$',
         'Δ': r'$\Delta$', 'β': r'$\beta$', 'ε': r'$\epsilon$', 'Σ': r'$\Sigma$', '≈': r'$\approx$',
         '‖': r'$\|$', '√': r'$\surd$'}
FORMS = {  # tabulate's format, how to escape, bold, underlined, grey
    'terminal': ('github', str, '**{}**', '_{}_', '{} ({})'),
    'markdown': ('pipe', lambda words: str(escape(words)).replace('|', r'\|'),
                 '**{}**', '<u>{}</u>', '{} <sub>{}</sub>'),
    'html': ('unsafehtml', lambda words: str(escape(words)),
             '<b>{}</b>', '<u>{}</u>', '{} <span class="grey">{}</span>'),
    'latex': ('latex_raw', lambda words: ''.join(LATEX.get(c, c if c.isascii() else '?') for c in words),
              r'\textbf{{{}}}', r'\underline{{{}}}', r'{} \textcolor{{gray}}{{\scriptsize {}}}')}


def grid(table, form):
    """Header and rows of a table in one of FORMS."""
    tablefmt, escaped, bold, underlined, beside = FORMS[form]

    def show(cell):
        words, marks, grey = (cell, '', '') if isinstance(cell, str) else cell
        words = escaped(words)
        words = underlined.format(words) if 'u' in marks else words
        words = bold.format(words) if 'b' in marks else words
        return beside.format(words, escaped(grey)).strip() if grey else words
    header, *rows = [list(map(show, row)) for row in (table['header'], *table['rows'])]
    align = ['left'] + ['right'] * (len(header) - 1)
    return tabulate(rows, header, tablefmt, disable_numparse=True, colalign=align if rows else None)


def text(table, form='terminal'):
    """The table with its title and what it shows, for a terminal or as Markdown."""
    escaped, where = FORMS[form][1], f' ({table["where"]})' if table['where'] else ''
    return f'### {escaped(table["title"])}\n\n{grid(table, form)}\n\n{escaped(table["says"] + where)}'


def latex(table):
    """The table as a LaTeX float, which needs the packages booktabs, graphicx and xcolor."""
    escaped, tabular = FORMS['latex'][1], grid(table, 'latex')
    for rule in (r'\toprule', r'\midrule', r'\bottomrule'):
        tabular = tabular.replace(r'\hline', rule, 1)
    caption = rf'\caption{{{escaped(table["title"])}. {escaped(table["says"])}}}'
    fit = r'\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%'
    return '\n'.join([r'\begin{table}[ht]', r'\centering', caption, fit, tabular + '}', r'\end{table}'])


def latex_document(tables):
    """The tables as a document that compiles as it is."""
    floats = [latex(table) + '\n\\clearpage' for table in tables]
    return '\n\n'.join([r'\documentclass{article}', r'\usepackage{booktabs,graphicx,xcolor}',
                        r'\begin{document}', *floats, '\\end{document}\n'])
