"""
Rows of results.csv to tables: LRS and the paper's other tables, and any table as text, Markdown or LaTeX (as HTML: the
report's template).

A table is a dict: title, where (its place in the paper), says (what it shows, in a sentence), header, rows. A cell is text, or
(text, marks, grey): marks holds b (bold) and u (underlined), grey is what stands beside it in grey.
"""
import html
import math
from itertools import pairwise

import numpy as np

import paper
from model import LAM, METHODS, head_mode

NAMES = {'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': 'μ-loss', 'mu_centering': 'μ-centering',
         'max_z_loss': 'max-z loss', 'norm_softmax': 'NormSoftmax', 'coupled_adam': 'Coupled Adam', 'cosine_reg': 'cosine reg.',
         'laplace_reg': 'Laplace reg.', 'spectrum_control': 'spectrum control'}
BOOTSTRAP = 1000  # resamples behind an interval
CLEARLY = 1.25  # ranking: one method stands above another where its LRS is this many times larger


def default_lam(method):
    """The λ that needs no mention: the method's own default (the paper's 1e-4 for its methods)."""
    return LAM.get(head_mode(method), 1e-4)


def name(method, lam=None):
    """What tables and legends call a method, with its λ where that is not its default."""
    return ' + '.join(NAMES.get(part, part) for part in method.split('+')) + ('' if lam in (None, default_lam(method)) else f' λ={lam:g}')


def variant(row):
    """What has a colour and a column of its own: the method, and its λ where that is not its default."""
    return row['method'], row['lam'] if row['lam'] not in (None, default_lam(row['method'])) else None


def variants(rows):
    """The variants in `rows`, in the paper's order."""
    order = {m: i for i, m in enumerate(METHODS)}
    return sorted({variant(r) for r in rows}, key=lambda v: (order.get(head_mode(v[0]), len(order)), v[0], default_lam(v[0]) if v[1] is None else v[1]))


def readable(rows):
    """All rows, or those with the methods' default λ alone where there are more than eight variants."""
    return rows if len(variants(rows)) <= 8 else [r for r in rows if variant(r)[1] is None]


def sizes(rows):
    """The sizes in `rows`, in their order there."""
    return list(dict.fromkeys(r['size'] for r in rows))


def tyings(rows):
    """(0 or 1, 'untied' or 'tied', the rows of that tying), for each that `rows` have."""
    for tying in sorted({int(r['weight_tying']) for r in rows}):
        yield tying, ('untied', 'tied')[tying], [r for r in rows if r['weight_tying'] == tying]


# ----------------------------------------------------------------------------------------------------------------------
# learning rate sensitivity


def offset(row):
    """The root mean square over positions of their mean logit, what bf16 rounds; None where the row does not say."""
    mean, spread = row.get('logit_mean'), row.get('logit_mean_spread')
    return None if mean is None or spread is None else math.hypot(mean, spread)


def capped_loss(row):
    """What LRS counts: the test loss, but no more than the loss at initialisation, which stands for one that is not finite."""
    L, L0 = row['test_loss'], math.inf if row['init_loss'] is None else row['init_loss']
    return min(L, L0) if math.isfinite(L) else L0


def lrs(losses, init_losses):
    """
    Learning rate sensitivity (Eq. 21) of one model trained at n learning rates: test losses (n,) and losses at
    initialisation (n,) -> (the paper's mean, the published tables' sum / (n - 1)). A loss that is not finite counts as
    its L0. Raises ValueError where that L0 is not known.
    """
    capped = [capped_loss({'test_loss': L, 'init_loss': L0}) for L, L0 in zip(losses, init_losses)]
    if not all(map(math.isfinite, capped)):
        raise ValueError('a loss is not finite and the loss at initialisation is not known')
    total = sum(L - min(capped) for L in capped)
    return total / len(capped), total / (len(capped) - 1) if len(capped) > 1 else math.nan


def bootstrap(values):
    """A 95% interval of the mean of one value a seed: as many of them drawn with replacement, BOOTSTRAP times."""
    drawn = np.random.RandomState(0).choice(values, (BOOTSTRAP, len(values)))
    return np.percentile(drawn.mean(axis=1), (2.5, 97.5)).tolist()


def lrs_rows(rows):
    """
    Rows of lrs.csv, one a (size, tying, method, λ): the mean over its seeds, and with several an interval; and what has none.
    `excess` is the loss at the largest learning rate minus the lowest of the same seed: its mean, lowest and highest over the seeds.
    """
    groups, table, missing = {}, [], []
    for r in rows:
        groups.setdefault((r['size'], int(r['weight_tying']), r['method'], r['lam']), {}).setdefault(r['seed'], []).append(r)
    for (size, tying, method, lam), seeds in groups.items():
        learning_rates = {r['lr'] for seed in seeds.values() for r in seed}
        for seed in [seed for seed, part in seeds.items() if len(part) < len(learning_rates)]:
            missing.append(f'seed {seed or 0:g} of {name(method, lam)} {size} ({len(seeds[seed])} of {len(learning_rates)} learning rates) '
                           'is left out of its LRS')
            del seeds[seed]
        if not seeds:
            continue
        runs = [r for seed in seeds.values() for r in seed]
        try:
            values = np.array([lrs([r['test_loss'] for r in seed], [r['init_loss'] for r in seed]) for seed in seeds.values()])
        except ValueError as error:
            missing.append(f'no LRS of {name(method, lam)} {size}: {error}')
            continue
        low, high = bootstrap(values[:, 0]) if len(seeds) > 1 else (None, None)
        by_lr = {lr: [capped_loss(r) for seed in seeds.values() for r in seed if r['lr'] == lr] for lr in sorted(learning_rates)}
        best, largest = min(by_lr, key=lambda lr: sum(by_lr[lr])), max(by_lr)
        excess = [max(seed, key=lambda r: r['lr']) for seed in seeds.values()]
        excess = [capped_loss(r) - min(map(capped_loss, seed)) for r, seed in zip(excess, seeds.values())]
        marks = {r['diverged'] for r in runs}
        table.append({'size': size, 'weight_tying': tying, 'method': method, 'lam': lam, 'lrs': values[:, 0].mean(), 'lrs_n1': values[:, 1].mean(),
                      'n_lrs': len(learning_rates), 'diverged': 1 if 1 in marks else None if None in marks else 0, 'seeds': len(seeds), 'lrs_low': low,
                      'lrs_high': high, 'best_lr': best, 'best_loss': sum(by_lr[best]) / len(seeds), 'largest_lr': largest,
                      'largest_lr_loss': sum(by_lr[largest]) / len(seeds), 'excess': sum(excess) / len(seeds), 'excess_low': min(excess),
                      'excess_high': max(excess), 'n_params': runs[0]['n_params']})
    return table, missing


def beside(value, published):
    """The grey part of a cell: the paper's value and how far ours is from it."""
    return '' if published is None else f'{published:.3f} {value - published:+.3f}'


def lrs_grid(part, columns, column, header, published):
    """Rows of a table: a line a size, a cell a variant; bold the best of its line, underlined where no run diverged."""
    lines, most = [], max((r['n_lrs'] for r in part), default=0)
    for size in sizes(part):
        cells = {variant(r): r for r in part if r['size'] == size}
        comparable = max(r['n_lrs'] for r in cells.values())  # an LRS over fewer learning rates is another thing
        best = min(r[column] for r in cells.values() if r['n_lrs'] == comparable)
        line = [size]
        for v in columns:
            if v not in cells or math.isnan(cells[v][column]):
                line.append('-')
                continue
            r = cells[v]
            text = f'{r[column]:.3f}' + ('' if r['n_lrs'] == most else f' ({r["n_lrs"]} of {most} lr)')
            if column == 'lrs' and r['lrs_low'] is not None:
                text += f' [{r["lrs_low"]:.3f}, {r["lrs_high"]:.3f}]'
            marks = ('b' if r[column] == best and r['n_lrs'] == comparable and len(cells) > 1 else '') + ('u' if r['diverged'] == 0 else '')
            line.append((text, marks, beside(r[column], published(size, v))))
        lines.append(line)
    return {'header': header, 'rows': lines}


def lrs_tables(table):
    """The LRS tables, from rows of lrs.csv, for each tying in the paper's normalisation and as its equation has it."""
    tables = []
    for tying, word, part in tyings(readable(table)):
        columns = variants(part)
        header = ['N', *(name(*v) for v in columns)]
        where = 'Table 2' if tying == 0 else 'Appendix D, Table 5'
        tables.append({
            'title': f'LRS (n-1), {word}', 'where': where,
            'says': "Learning rate sensitivity, the smaller the better, normalised as the paper's tables are: the sum over the learning rates divided by "
                    'their number minus one. Bold: the best of its row. Underlined: no learning rate diverged. Grey: the paper, and our difference to it.',
            **lrs_grid(part, columns, 'lrs_n1', header, lambda size, v: paper.LRS[tying].get((size, v[0])) if v[1] is None else None)})
        tables.append({
            'title': f'LRS, {word}', 'where': f'Eq. 21; for the numbers of {where} see LRS (n-1)',
            'says': 'Learning rate sensitivity as the equation has it, the mean over the learning rates.'
                    + (' In brackets a bootstrap 95% interval over the seeds.' if any(r['seeds'] > 1 for r in part) else ''),
            **lrs_grid(part, columns, 'lrs', header, lambda size, v: None)})
    return tables


def sensitivity_tables(table):
    """LRS for each λ of the methods that were run with several, from rows of lrs.csv."""
    tables = []
    for tying, word, part in tyings(table):
        for method in dict.fromkeys(r['method'] for r in part):
            of_method = [r for r in part if r['method'] == method]
            lams = sorted({r['lam'] for r in of_method if r['lam'] is not None})
            if len(lams) < 2:
                continue
            published = paper.LRS_OF_LAM.get(method, {}) if tying == 0 else {}
            tables.append({
                'title': f'{name(method)} for several λ: LRS (n-1), {word}', 'where': 'Appendix C, Table 4' if published else '',
                'says': f'How much the learning rate sensitivity of {name(method)} depends on its coefficient λ, which heads the columns.',
                **lrs_grid(of_method, [(method, None if lam == default_lam(method) else lam) for lam in lams], 'lrs_n1', ['N', *(f'{lam:g}' for lam in lams)],
                           lambda size, v: published.get((size, f'{default_lam(method) if v[1] is None else v[1]:g}')))})
    return tables


# ----------------------------------------------------------------------------------------------------------------------
# the other tables


def overhead_tables(rows):
    """ΔT over the baseline from the runs' own times, all λ of a method together -> (tables, what cannot be compared)."""
    tables, missing = [], []
    for tying, word, part in tyings([r for r in rows if r['train_seconds'] and math.isfinite(r['test_loss'])]):
        lines, unknown, columns = [], False, [m for m in dict.fromkeys(v[0] for v in variants(part)) if m != 'baseline']
        for size in sizes(part):
            of_size = [r for r in part if r['size'] == size]
            if len({(r['device'], r['steps']) for r in of_size}) > 1:
                missing.append(f'no ΔT of {size} {word}: its runs were made on different machines or with different steps')
                continue
            seconds = {}
            for r in of_size:
                seconds.setdefault(r['method'], []).append(r['train_seconds'])
                unknown |= r['device'] is None
            mean = {method: sum(s) / len(s) for method, s in seconds.items()}
            if 'baseline' not in mean or len(mean) < 2:
                continue
            line = [size]
            for method in columns:
                if method not in mean:
                    line.append('-')
                    continue
                value, published = 100 * (mean[method] / mean['baseline'] - 1), paper.OVERHEAD[tying].get((size, method))
                line.append((f'{value:.1f}%', '', '' if published is None else f'{published:.1f}% {value - published:+.2f}'))
            lines.append(line)
        if lines:
            tables.append({'title': f'Additional training time ΔT, {word}', 'where': 'Appendix E, Table 6', 'header': ['N', *map(name, columns)],
                           'says': "Training time beyond the baseline's, all λ of a method averaged. Grey: the paper (4 A100), and our difference in percentage "
                                   'points.' + (' The data do not name the machine; that it is the same for all runs is assumed.' if unknown else
                                                f' Machine: {", ".join(dict.fromkeys(r["device"] for r in part))}; runs that shared it disturb each other.'),
                           'rows': lines})
    return tables, missing or ([] if tables else ['no table of ΔT: there are no times of a baseline and of another method at one size'])


def excess_table(rows, table):
    """Where each method ends at its largest learning rate, from the runs and rows of lrs.csv; statistics are means over the seeds."""
    shown = {'mu_norm': '‖μ‖', 'logit_mean': 'logit mean', 'offset': 'its rms', 'logit_absmax': 'max |logit|',
             'rounding_loss': 'of rounding', 'lr_sum': 'Σ lr'}
    lines = []
    for r in sorted(table, key=lambda r: (r['weight_tying'], sizes(table).index(r['size']), variants(table).index(variant(r)))):
        runs = [{**run, 'offset': offset(run)} for run in rows
                if run['lr'] == r['largest_lr'] and all(run[k] == r[k] for k in ('size', 'weight_tying', 'method', 'lam'))]
        means = {c: sum(run[c] for run in runs) / len(runs) if all(run.get(c) is not None for run in runs) else None for c in shown}
        spread = f' [{r["excess_low"]:.3f}, {r["excess_high"]:.3f}]' if r['seeds'] > 1 else ''
        lines.append([name(r['method'], r['lam']), r['size'], 'yes' if r['weight_tying'] else 'no', f'{r["best_loss"]:.3f} ({r["best_lr"]:g})',
                      f'{r["largest_lr_loss"]:.3f} ({r["largest_lr"]:g})', f'{r["excess"]:.3f}{spread}',
                      *('' if v is None else f'{v:.3g}' for v in means.values())])
    return {'title': 'From the best to the largest learning rate', 'where': 'Section 4, Figures 2 and 4',
            'header': ['method', 'size', 'tied', 'best loss (lr)', 'at the largest lr', 'excess', *shown.values()], 'rows': lines,
            'says': 'How much worse the test loss is at the largest learning rate than at the best one'
                    + (' (mean, lowest and highest over the seeds)' if any(r['seeds'] > 1 for r in table) else '')
                    + ', and mean embedding and logits at the largest. The rms is that of the mean logit of a position: large where mean logits of '
                      'either sign average out. Of rounding: what rounding to bf16 adds to the loss of the same weights.'}


def ranking_tables(table):
    """The methods by mean LRS over the sizes that all of them have, the default λ, and what separates each from the next."""
    tables = []
    for tying, word, part in tyings([r for r in table if variant(r)[1] is None]):
        cells, most = {}, max(r['n_lrs'] for r in part)
        for r in (r for r in part if r['n_lrs'] == most):
            cells.setdefault(r['method'], {})[r['size']] = r['lrs_n1']
        common = [s for s in sizes(part) if all(math.isfinite(c.get(s, math.nan)) for c in cells.values())]
        if len(cells) < 2 or not common:
            continue
        mean = {m: sum(c[s] for s in common) / len(common) for m, c in cells.items()}
        order = sorted(mean, key=mean.get)
        lines = [[name(order[0]), f'{mean[order[0]]:.3f}', '', '', '']]
        for a, b in pairwise(order):
            sign = '>' if mean[b] > mean[a] and mean[b] >= CLEARLY * mean[a] else '≈'
            wins = sum(cells[a][s] < cells[b][s] for s in common)
            lines.append([f'{sign} {name(b)}', f'{mean[b]:.3f}', f'{mean[b] - mean[a]:+.3f}', f'{mean[b] / mean[a]:.2f}' if mean[a] else '-',
                          f'{wins} of {len(common)}'])
        tables.append({'title': f'Ranking, {word}', 'where': f'Eq. 22, which has: {paper.RANKING}',
                       'header': ['method', 'mean LRS (n-1)', 'over the one before', 'times it', 'sizes at which it is worse'],
                       'says': f'The methods from best to worst by mean LRS over {", ".join(common)}; ">" where the mean is at least {CLEARLY:g} times that '
                               'of the one before, "≈" where it is less.', 'rows': lines})
    return tables


def hyperparameter_table(settings):
    """Appendix A beside the runs' own settings: a dict name -> list of the values that the runs have."""
    rows = []
    for title, published, key in paper.HYPERPARAMETERS:
        if key is None:
            rows.append([title, ('', '', str(published)), str(published)])
            continue
        if key == 'weight_tying':
            ours = ' & '.join(sorted(str(v).lower() for v in settings.get(key, ['?'])))
        elif key == 'batch_size * block_size':
            ours = ', '.join(f'{a * b}' for a in settings.get('batch_size', []) for b in settings.get('block_size', [])) or '?'
        else:
            ours = ', '.join(f'{v}' for v in settings.get(key, ['?']))
        rows.append([title, (ours, '' if ours == str(published) else 'b', ''), str(published)])
    return {'title': 'Hyper-parameters', 'where': 'Appendix A, Table 3', 'header': ['', 'these runs', 'the paper'], 'rows': rows,
            'says': "Architecture and hyper-parameters of these runs beside the paper's. Bold: other than the paper's. Grey: fixed in the code."}


def methods_table():
    """The paper's overview of the methods."""
    return {'title': 'Methods', 'where': 'Section 2.4, Table 1', 'header': ['name', 'intervention', 'means', 'symmetry', 'anisotropy suppression'],
            'rows': [[name(m), *cells] for m, cells in paper.METHODS.items()],
            'says': 'By which means each method suppresses diverging logits; symmetry: whether positive and negative logits are treated alike.'}


def run_table(rows, title='All runs'):
    """The runs, one a line."""
    shown = [('lr', 'g'), ('test_loss', '.4f'), ('mu_norm', '.3g'), ('logit_mean', '.3g'), ('logit_mean_spread', '.3g'), ('logit_std', '.3g'),
             ('logit_absmax', '.3g'), ('cos_mu_h', '.3f'), ('r_cos', '.3f'), ('r_log', '.3f')]
    shown = [c for c in shown if any(r[c[0]] is not None for r in rows)]
    seeds = ['seed'] if len({r['seed'] for r in rows}) > 1 else []
    symbols = {'test_loss': 'test loss', 'mu_norm': '‖μ‖', 'logit_mean': 'logit mean', 'logit_mean_spread': 'its spread', 'logit_std': 'logit std',
               'logit_absmax': 'max |logit|', 'cos_mu_h': 'cos(μ, h)'}
    return {'title': title, 'where': 'Figures 2, 4 and 5', 'header': ['method', 'size', 'tied', *seeds, *(symbols.get(c, c) for c, _ in shown), 'diverged'],
            'says': 'Test loss, mean embedding and logit statistics of each run.',
            'rows': [[name(r['method'], r['lam']), r['size'], 'yes' if r['weight_tying'] else 'no', *('' if r[s] is None else f'{r[s]:g}' for s in seeds),
                      *('' if r[c] is None else format(r[c], form) for c, form in shown), {None: '', 1: 'yes', 0: 'no'}[r['diverged']]] for r in rows]}


# ----------------------------------------------------------------------------------------------------------------------
# a table as text

def aligned(header, rows):
    """A Markdown table of cells without marks, padded so that it reads on a terminal too."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ['| ' + ' | '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) + ' |' for row in cells]
    return '\n'.join([lines[0], '|' + '|'.join('-' * (w + 2) for w in widths) + '|', *lines[1:]])


TERMINAL, MARKDOWN = {'b': '**{}**', 'u': '_{}_', 'grey': '{} ({})'}, {'b': '**{}**', 'u': '<u>{}</u>', 'grey': '{} <sub>{}</sub>'}


def text(table, style=TERMINAL):
    """The table with its title, as aligned text for a terminal or, with style=MARKDOWN, as Markdown."""
    def escape(words):  # what comes from a csv is no HTML and no column
        return html.escape(words).replace('|', '\\|') if style is MARKDOWN else words

    def show(cell):
        words, marks, grey = (cell, '', '') if isinstance(cell, str) else cell
        words = escape(words)
        for mark in 'ub':
            words = style[mark].format(words) if mark in marks else words
        return style['grey'].format(words, grey).strip() if grey else words
    return '\n\n'.join([f'### {escape(table["title"])}', aligned(map(show, table['header']), [[show(c) for c in row] for row in table['rows']]),
                        escape(table['says']) + (f' ({table["where"]})' if table['where'] else '')])


LATEX = {**{c: rf'\{c}' for c in '&%$#_{}'}, '\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}', '<': '$<$', '>': '$>$',
         '|': r'$|$', 'μ': r'$\mu$', 'λ': r'$\lambda$', 'Δ': r'$\Delta$', 'β': r'$\beta$', 'ε': r'$\epsilon$', '≈': r'$\approx$', '‖': r'$\|$', '√': r'$\surd$'}


def latex(table):
    """The table as a LaTeX float with booktabs; needs the packages booktabs, graphicx, xcolor."""
    def escape(words):
        return ''.join(LATEX.get(c, c if c.isascii() else '?') for c in words)

    def show(cell):
        if isinstance(cell, str):
            return escape(cell)
        words, marks, grey = escape(cell[0]), cell[1], escape(cell[2])
        words = rf'\underline{{{words}}}' if 'u' in marks else words
        words = rf'\textbf{{{words}}}' if 'b' in marks else words
        return words + (rf' \textcolor{{gray}}{{\scriptsize {grey}}}' if grey else '')
    lines = [' & '.join(map(show, row)) + r' \\' for row in (table['header'], *table['rows'])]
    return '\n'.join([r'\begin{table}[ht]', r'\centering', rf'\caption{{{escape(table["title"])}. {escape(table["says"])}}}',
                      r'\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%', r'\begin{tabular}{l' + 'r' * (len(table['header']) - 1) + '}',
                      r'\toprule', lines[0], r'\midrule', *lines[1:], r'\bottomrule', r'\end{tabular}}', r'\end{table}'])


def latex_document(tables):
    """The tables as a document that compiles as it is."""
    return '\n\n'.join([r'\documentclass{article}', r'\usepackage{booktabs,graphicx,xcolor}', r'\begin{document}', *(latex(t) + '\n' + r'\clearpage'
                       for t in tables), r'\end{document}', ''])
