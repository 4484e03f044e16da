"""The tables of PAGES and the figures, from the csv files: python -m results.natural.page"""
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image

import analyze
from results.mean_logit.mean_logit import cost, read_runs
from results.natural.natural import SLOW_GAINS
from tools import report

HERE = Path(__file__).parent
PAGES = ['README.md', 'cause.md', 'gain.md', 'more.md']
METHODS = {  # of the grids, in the paper's order
    'baseline': 'baseline',
    'fp32 logits': 'baseline, fp32 logits',
    'weight_decay': 'weight decay',
    'z_loss': 'z-loss',
    'soft_capping': 'soft-capping',
    'mu_loss': 'μ-loss, λ = 0.1',
    'mu_centering': 'μ-centering',
}
SHOWN = {'baseline': '#FF2C00', 'baseline, fp32 logits': 'black', 'μ-loss, λ = 0.1': '#FF9500',
         'μ-centering': '#00B945'}


def read(table, name='results'):
    """A csv file of a table, with the seed of each run."""
    rows = pd.read_csv(HERE / table / f'{name}.csv')
    if 'arm' in rows:
        rows['arm'] = rows.arm.fillna('')
    rows['seed'] = rows.run.str.extract(r'-s(\d+)', expand=False).astype(int)
    return rows


def read_grid(table):
    """The untied runs of a grid of sweep.sh with its λ (of μ-loss 0.1), and the name of their method."""
    rows = read(table)
    rows['name'] = rows.method.map(METHODS)
    rows.loc[rows.arm == 'fp32 logits', 'name'] = METHODS['fp32 logits']
    default = (rows.method != 'mu_loss') | (rows.lam == 0.1)
    default &= (rows.method != 'z_loss') | (rows.lam == 1e-4)
    return rows[default & (rows.weight_tying == 0)]


def markdown(lines, header):
    """A table in Markdown, whose first column is text."""
    rule = '---' + '|---:' * (len(header) - 1)
    head = '|'.join(header)
    if not header[0]:
        head = f'|{head}'  # else the first column has no header, and there is no table
    return '\n'.join([head, rule, *('|'.join(line) for line in lines)])


def number(x, digits):
    """'-0.5', but never '-0'."""
    text = f'{x:.{digits}f}'
    return text.removeprefix('-') if float(text) == 0 else text


def mean_and_range(values, digits):
    """'2.10 [2.05, 2.20]' of several seeds, '2.10' of one, '' of none."""
    if len(values) == 0:
        return ''
    text = number(values.mean(), digits)
    if len(values) > 1:
        text += f' [{number(values.min(), digits)}, {number(values.max(), digits)}]'
    return text


def by_seed(rows, column, digits):
    """'4.23, 4.68, 4.75' of seeds 1, 2, 3."""
    return ', '.join(number(x, digits) for x in rows.sort_values('seed')[column])


# -------- the tables
def rule_table():
    """What BF16 logits cost, by the size of the mean logit: c, this model's pairs, the authors' runs."""
    pairs = pd.read_csv(HERE / 'rule.csv')
    authors = read_runs()
    authors = authors[authors.kind.notna()]
    lines = []
    for low in (64, 128, 256, 512, 1024, 2048):
        harm = pairs.harm[pairs['mean'].abs().between(low, 2 * low, inclusive='left')]
        theirs = authors.excess[authors.logit_mean.abs().between(low, 2 * low, inclusive='left')]
        text = number(harm.median(), 2)
        if len(harm) > 1:
            text += f' [{number(harm.min(), 2)}, {number(harm.max(), 2)}]'
        known = number(theirs.median(), 2) if len(theirs) else ''
        lines.append([f'{low:,}', f'{cost(low):.2g}', text, str(len(harm)), known])
    return markdown(lines, ['mean logit from', 'the rule, c', 'harm here: median [lowest, highest]', 'pairs',
                            "the authors' runs lose: median"])


def grid_table():
    """The test loss of each method at each rate: means over the seeds there are [lowest, highest]."""
    rows = read_grid('grid')
    rates = sorted(rows.lr.unique())
    lines = []
    for name in METHODS.values():
        cells = [rows[(rows.name == name) & (rows.lr == rate)].test_loss for rate in rates]
        lines.append([name, *(mean_and_range(cell, 3) for cell in cells)])
    return markdown(lines, ['learning rate', *(f'{rate:g}' for rate in rates)])


def untied_runs(table):
    """The untied runs of a grid with the λ of sweep.sh, as analyze.py reads and names them."""
    runs = analyze.read_runs(HERE / f'{table}/results.csv')
    own = read_grid(table)
    runs['variant'] = runs.variant.str.replace('logits_dtype float32', 'fp32 logits')
    return runs[runs.run.isin(own.run)]


def lrs_of(runs):
    """LRS by analyze.py's function, a row for each variant that has all learning rates."""
    lrs = analyze.learning_rate_sensitivity(runs)
    return lrs[lrs.n_rates == lrs.n_rates.max()].set_index('variant')


def lrs_cells(lrs):
    """A text for each variant: the lowest in bold, and underlined if no run diverged, as the paper's."""
    cells = lrs.lrs_n1.map('{:.3f}'.format)
    is_lowest = cells == cells.min()
    cells = cells.where(lrs.diverged != 0, '<ins>' + cells + '</ins>')
    return cells.where(~is_lowest, '<b>' + cells + '</b>')


def grid_lrs():
    """
    LRS of the grid: {'seed 1': of that seed, which alone has all learning rates, and so on: with the runs of
    another seed at the two largest in place of its own}.
    """
    runs = untied_runs('grid')
    first = lrs_of(runs[runs.seed == 1])
    found = {'seed 1': first}
    for seed in sorted({*runs.seed.astype(int)} - {1}):
        at_largest = runs[(runs.seed == seed) & (runs.lr >= 0.1)].assign(seed=1)
        others = runs[(runs.seed == 1) & (runs.lr < 0.1)]
        found[f'seed {seed} from 0.1 on'] = lrs_of(pd.concat([others, at_largest])).loc[first.index]
    return found


def grid_lrs_table():
    """LRS of the grid beside that of the authors' untied 16M."""
    found = grid_lrs()
    authors = analyze.read_runs(HERE.parent / 'authors/results.csv')
    authors = lrs_of(authors[(authors['size'] == '16M') & (authors.weight_tying == 0)])
    lines = []
    for variant in found['seed 1'].index:
        cells = [lrs_cells(lrs)[variant] for lrs in found.values()]
        lines.append([variant, *cells, f'{authors.lrs_n1[variant]:.3f}'])
    return markdown(lines, ['', *found, "the authors' 16M"])


def rounding_table():
    """The models of the baseline and of its twin at 0.3, with logits in BF16 and in fp32."""
    rows = read('grid')
    rows = rows[(rows.method == 'baseline') & (rows.lr == 0.3)]
    lines = []
    for arm, name in (('', 'BF16 logits'), ('fp32 logits', 'fp32 logits')):
        of_arm = rows[rows.arm == arm]
        losses = [by_seed(of_arm, f'test_loss_{dtype}', 2) for dtype in ('bfloat16', 'float32')]
        lines.append([name, *losses])
    return markdown(lines, ['trained with', 'evaluated with BF16 logits', 'with fp32 logits'])


RATIOS = {'mean logit': ('logit_mean', 0), 'cos(μ, h)': ('cos_mu_h', 2), 'r_emb': ('r_emb', 2),
          'r_cos': ('r_cos', 3), 'r_log': ('r_log', 3)}


def fact_3_table():
    """Fact 3's quantities of the grid's baselines."""
    rows = read_grid('grid')
    rows = rows[rows.name == 'baseline']
    lines = []
    for rate in (0.003, 0.03, 0.1, 0.3):
        at_rate = rows[rows.lr == rate]
        lines.append([f'{rate:g}', *(by_seed(at_rate, column, digits) for column, digits in RATIOS.values())])
    return markdown(lines, ['learning rate', *RATIOS])


CAUSES = ['BF16 logits', 'fp32 logits', 'exact gradient', 'fp32 logits, BF16 gradient',
          'gradient at a random scale', 'Coupled Adam', 'SGD on E', 'centered head', 'with a gain']


def cause_table():
    """The arms at rate 1, three seeds, and at 0.3, one seed; two of these are the grid's."""
    quick = read('cause')
    grid = read('grid')
    grid = grid[(grid.method == 'baseline') & (grid.lr == 0.3) & (grid.seed == 1)]
    grid = grid.assign(arm=grid.arm.replace('', 'BF16 logits'))
    long = pd.concat([grid, read('cause_0.3')])
    lines = []
    for arm in CAUSES:
        cells = []
        for rows in (quick, long):
            of_arm = rows[rows.arm == arm]
            cells += [by_seed(of_arm, 'test_loss', 2), by_seed(of_arm, 'logit_mean', 0)]
        lines.append([arm, *cells])
    return markdown(lines, ['', 'rate 1: test loss', 'mean logit', '0.3: test loss', 'mean logit'])


def methods_table():
    """All methods at rate 1, three seeds."""
    rows = read_grid('quick')
    rows = rows[rows.lr == 1]
    others = read('methods')
    others['name'] = others.arm
    lines = []
    for name, of_method in pd.concat([rows, others]).groupby('name', sort=False):
        columns = ('test_loss', 2), ('logit_mean', 0), ('mu_norm', 0), ('largest_loss', 0)
        lines.append([name, *(by_seed(of_method, column, digits) for column, digits in columns)])
    order = [*METHODS.values(), *others.name.unique()]
    lines.sort(key=lambda line: order.index(line[0]))
    return markdown(lines, ['', 'test loss', 'mean logit', '‖μ‖', 'largest logged training loss'])


def last_of(rows):
    """The last checkpoint of each run, of rows of last_norm.csv."""
    return rows.sort_values('step').groupby('run', as_index=False).tail(1)


SHARES = ['share_1', 'share_2', 'share_3', 'share_4']
GAIN = {'mean logit': ('logit_mean', 0), '‖h‖': ('h_norm', 2), 'cos(μ, h)': ('cos_mu_h', 2),
        'energy in four dimensions': ('share', 4), 'gain of the largest': ('gain_1', 4),
        'median gain of the others': ('gain_median', 2)}


def gain_table():
    """With a gain and without one, by tokens a step: each seed."""
    runs = read('gain')
    runs['tokens'] = runs.batch_size * runs.block_size
    last = last_of(read('gain', 'last_norm')).drop(columns='seed')
    last['share'] = last[SHARES].sum(axis=1)
    rows = runs[['run', 'seed', 'arm', 'tokens', 'test_loss']].merge(last, on='run')
    lines = []
    for (tokens, arm), part in rows.groupby(['tokens', 'arm']):
        cells = [by_seed(part, column, digits) for column, digits in GAIN.values()]
        if arm == 'without':
            cells[-2:] = ['', '']
        lines.append([f'{tokens:,} tokens, {arm}', by_seed(part, 'test_loss', 2), *cells])
    return markdown(lines, ['', 'test loss', *GAIN])


def slow_gain_table():
    """Gains whose learning rate is scaled. Reach: the scale times the sum of the rates, lr steps / 2."""
    runs = read('slow_gain')
    curves = read('slow_gain', 'curves')
    runs['highest'] = runs.run.map(curves.groupby('run').logit_mean.max())
    last = last_of(read('slow_gain', 'last_norm')).set_index('run')
    runs['gain'] = runs.run.map(last.gain_1)
    runs['scale'] = runs.arm.map(SLOW_GAINS)
    runs = runs.sort_values(['lr', 'scale', 'arm'], ascending=[False, False, True])
    columns = ('test_loss', 2), ('logit_mean', 0), ('highest', 0), ('h_norm', 2), ('gain', 3)
    lines = []
    for (rate, arm), part in runs.groupby(['lr', 'arm'], sort=False):
        reach = SLOW_GAINS[arm] * rate * part.steps.iloc[0] / 2
        cells = [by_seed(part, column, digits) for column, digits in columns]
        lines.append([f'{rate:g}, {arm}', f'{reach:.1f}', *cells])
    header = ['learning rate, scale', 'reach', 'test loss', 'mean logit', 'its largest', '‖h‖',
              'gain of the largest dimension']
    return markdown(lines, header)


RARE_ARMS = ['baseline', 'fp32 logits', 'weight decay', 'z-loss', 'soft-capping', 'μ-loss', 'μ-centering',
             'centered by frequency', 'centered by rows in use', 'centered head']
RARE = {'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0),
        'weighted by frequency': ('logit_mean_f', 0)}


def rare_table():
    """257 bytes in 320 rows: three seeds."""
    rows = read('rare')
    rows = rows[rows.run.str.startswith('bytes')]
    lines = []
    for arm in RARE_ARMS:
        of_arm = rows[rows.arm == arm]
        lines.append([arm, *(by_seed(of_arm, column, digits) for column, digits in RARE.values())])
    return markdown(lines, ['', *RARE])


def decay_table():
    """Weight decay by Eq. 2, which the grid has at 0.3, and with the schedule, beside the baseline."""
    grid = read_grid('grid')
    again = read('again')
    decay = read('decay')
    eq_2 = [decay[decay.arm == 'Eq. 2'], grid[(grid.name == 'weight decay') & (grid.lr == 0.3)]]
    arms = {'baseline': again[again.arm == 'baseline'],
            'weight decay, Eq. 2': pd.concat(eq_2),
            'weight decay, λ η_t / η': decay[decay.arm == 'with the schedule']}
    lines = []
    for name, rows in arms.items():
        cells = []
        for rate in (0.003, 0.3):
            at_rate = rows[rows.lr == rate]
            cells += [by_seed(at_rate, 'test_loss', 3), by_seed(at_rate, 'logit_std', 1)]
        lines.append([name, *cells])
    return markdown(lines, ['', 'at 0.003: test loss', 'std of the logits', 'at 0.3: test loss',
                            'std of the logits'])


TABLES = {
    'rule': rule_table,
    'grid': grid_table,
    'grid_lrs': grid_lrs_table,
    'rounding': rounding_table,
    'fact_3': fact_3_table,
    'cause': cause_table,
    'methods': methods_table,
    'gain': gain_table,
    'slow_gain': slow_gain_table,
    'rare': rare_table,
    'decay': decay_table,
}


def with_tables(text):
    """The page with what stands between <!-- NAME --> and <!-- end --> replaced by the table of that name."""
    def table(match):
        name = match[1]
        return f'<!-- {name} -->\n{TABLES[name]()}\n<!-- end -->'
    return re.sub(r'<!-- ([\w.]+) -->\n.*?<!-- end -->', table, text, flags=re.S)


# -------- the figures
def write_png(name, png):
    """Writes a figure's bytes with 64 colors, which halves them."""
    Image.open(io.BytesIO(png)).convert('RGB').quantize(64).save(HERE / f'{name}.png', optimize=True)


def save_figure(name, figure):
    """Draws a figure of this file."""
    png = io.BytesIO()
    figure.savefig(png, format='png', dpi=100)
    plt.close(figure)
    write_png(name, png.getvalue())


CAUSE_COLORS = {'BF16 logits': '#FF2C00', 'exact gradient': '#FF9500',
                'gradient at a random scale': '#845B97', 'fp32 logits': 'black',
                'fp32 logits, BF16 gradient': 'grey', 'Coupled Adam': '#00B945', 'SGD on E': '#0C5DA5',
                'centered head': '#00B0C0', 'with a gain': '#B07030'}


def draw_curve(ax, curves, run, column, **style):
    """One column of a run's log, or of its checkpoints, against the step."""
    curve = curves[(curves.run == run) & (curves.step > 0)].dropna(subset=column).sort_values('step')
    ax.plot(curve.step, curve[column], linewidth=1.2, **style)


def draw_grid():
    """
    Held-out loss and mean logit against the step, at 0.3, a line for each seed. The points are test losses,
    and the legend has their means.
    """
    rows = read_grid('grid')
    rows = rows[rows.lr == 0.3]
    curves = read('grid', 'curves')
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout='constrained')
    for name, color in SHOWN.items():
        runs = rows[rows.name == name]
        rounding = ', BF16 logits' if name == 'baseline' else ''
        label = f'{name}{rounding}: {runs.test_loss.mean():.2f}'
        for run in runs.itertuples():
            for ax, column in zip(axes, ('val_loss', 'logit_mean'), strict=True):
                draw_curve(ax, curves, run.run, column, color=color, label=label if run.seed == 1 else None)
        axes[0].plot(runs.steps, runs.test_loss, 'o', color=color, markersize=4, clip_on=False)
    axes[0].set(xlabel='step', ylabel='held-out loss, nats per token', xlim=(0, 100_000), ylim=(1.4, 4.6))
    axes[1].set(xlabel='step', ylabel='mean logit', xlim=(0, 100_000))
    for ax in axes:
        ax.xaxis.set_major_formatter('{x:,.0f}')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False)
    save_figure('figure', figure)


def draw_paper():
    """The paper's Figures 2, 4, 5, 11 and 12, of the grid and of the runs that repeat it."""
    runs = untied_runs('grid')
    rows = report.with_looks(analyze.with_marks(runs))
    baselines = rows[rows.variant == 'baseline']
    ratios = ['r_emb', 'cos_mu_h', 'r_cos', 'r_log']
    items = [report.figure_item('', '', 'loss', report.loss_figure(rows)),
             report.figure_item('', '', 'statistics', report.four_panels(rows, report.FAR_VALUES)),
             report.figure_item('', '', 'fact_3', report.four_panels(baselines, ratios))]
    again = untied_runs('again')
    again = again[again.steps == 100_000]  # without the demo's
    marks = baselines.groupby('lr').diverged.max()  # the grid has the other methods
    again = again.assign(variant='baseline', diverged=again.lr.map(marks))
    items += report.distribution_figures(again, pd.read_csv(HERE / 'again/distributions.csv'))
    for item in items:
        write_png(item['name'].removesuffix('_baseline_untied'), item['png'])


def draw_cause():
    """The mean logit against the step for each arm of `cause`, a line for each seed."""
    rows = read('cause')
    curves = read('cause', 'curves')
    figure, ax = plt.subplots(figsize=(9, 3.4), layout='constrained')
    for arm, color in CAUSE_COLORS.items():
        for run in rows[rows.arm == arm].itertuples():
            label = arm if run.seed == 1 else None
            draw_curve(ax, curves, run.run, 'logit_mean', color=color, label=label)
    ax.set(xlabel='step', ylabel='mean logit')
    figure.legend(loc='outside right center', frameon=False)
    save_figure('cause', figure)


DASHES = {128: '-', 512: '--', 2048: ':'}


def draw_gain():
    """What the last LayerNorm does, with a gain and without, against the step: a line for each seed."""
    runs = read('gain')
    runs['tokens'] = runs.batch_size * runs.block_size
    runs = runs.sort_values(['tokens', 'arm'])
    rows = read('gain', 'last_norm')
    rows['share'] = rows[SHARES].sum(axis=1)
    panels = {'share': 'energy in four dimensions', 'gain_1': 'gain of the largest dimension',
              'gain_median': 'median gain of the others', 'h_norm': '‖h‖', 'cos_mu_h': 'cos(μ, h)',
              'logit_mean': 'mean logit'}
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.4), layout='constrained', sharex=True)
    for ax, (column, label) in zip(axes.flat, panels.items(), strict=True):
        for run in runs.itertuples():
            if column.startswith('gain') and run.arm == 'without':
                continue
            label_of = f'{run.tokens:,} tokens, {run.arm}' if run.seed == 1 else None
            color = '#B07030' if run.arm == 'with a gain' else '#FF2C00'
            draw_curve(ax, rows, run.run, column, color=color, linestyle=DASHES[run.tokens], label=label_of)
        ax.set(title=label)
        ax.xaxis.set_major_formatter('{x:,.0f}')
    for ax in axes[1]:
        ax.set_xlabel('step')
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False)
    save_figure('gain', figure)


SLOW_COLORS = {'gain at 1e-3': '#00B945', 'gain at 10^-3.5': '#FF9500', 'gain at 1e-4': '#FF2C00',
               'gain at 1e-4, fp32 logits': 'black'}


def draw_slow_gain():
    """Mean logit and gains of slow gains against the step, at rate 1 and at 0.3."""
    runs = read('slow_gain')
    curves = read('slow_gain', 'curves')
    norms = read('slow_gain', 'last_norm')
    rates = sorted(runs.lr.unique(), reverse=True)
    figure, axes = plt.subplots(len(rates), 2, figsize=(9, 0.6 + 2.6 * len(rates)), layout='constrained',
                                squeeze=False)
    for (left, right), rate in zip(axes, rates, strict=True):
        for run in runs[runs.lr == rate].itertuples():
            color = SLOW_COLORS[run.arm]
            draw_curve(left, curves, run.run, 'logit_mean', color=color,
                       label=run.arm if run.seed == 1 else None)
            draw_curve(right, norms, run.run, 'gain_1', color=color)
            draw_curve(right, norms, run.run, 'gain_median', color=color, linestyle='--')
        left.set(title=f'learning rate {rate:g}', ylabel='mean logit')
        right.set(title='gain of the largest dimension; dashed: others', ylim=(-0.1, 1.1))
        for ax in (left, right):
            ax.xaxis.set_major_formatter('{x:,.0f}')
    for ax in axes[-1]:
        ax.set_xlabel('step')
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False)
    save_figure('slow_gain', figure)


if __name__ == '__main__':
    for page in (HERE / name for name in PAGES):
        page.write_text(with_tables(page.read_text(encoding='utf-8')), encoding='utf-8')
    draw_grid()
    draw_paper()
    draw_cause()
    draw_gain()
    draw_slow_gain()
