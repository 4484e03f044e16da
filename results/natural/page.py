"""README.md's tables and the figures, from the csv files: python -m results.natural.page"""
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import analyze
from tools import report

HERE = Path(__file__).parent
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
    rows['arm'] = rows.arm.astype(object).fillna('')
    rows['seed'] = rows.run.str.extract(r'-s(\d+)', expand=False).astype(int)
    return rows


def read_grid(table):
    """The runs of a grid of sweep.sh, with the name of their method; λ of μ-loss is 0.1."""
    rows = read(table)
    rows['name'] = rows.method.map(METHODS)
    rows.loc[rows.arm == 'fp32 logits', 'name'] = METHODS['fp32 logits']
    return rows


def markdown(lines, header):
    """A table in Markdown, whose first column is text."""
    rule = '---' + '|---:' * (len(header) - 1)
    return '\n'.join(['|'.join(header), rule, *('|'.join(line) for line in lines)])


def mean_and_range(values, digits):
    """'2.10 [2.05, 2.20]' of several seeds, '2.10' of one, '' of none."""
    if len(values) == 0:
        return ''
    text = f'{values.mean():.{digits}f}'
    if len(values) > 1:
        text += f' [{values.min():.{digits}f}, {values.max():.{digits}f}]'
    return text


def by_seed(rows, column, digits):
    """'4.23, 4.68, 4.75' of seeds 1, 2, 3."""
    values = rows.sort_values('seed')[column].round(digits) + 0.0  # never -0
    return ', '.join(f'{x:.{digits}f}' for x in values)


# -------- the tables
def grid_table(table, rates, tying=0):
    """The test loss of each method at each rate: means over the seeds there are [lowest, highest]."""
    rows = read_grid(table)
    default = (rows.method != 'mu_loss') | (rows.lam == 0.1)
    default &= (rows.method != 'z_loss') | (rows.lam == 1e-4)
    rows = rows[default & (rows.weight_tying == tying)]
    rates = [rate for rate in rates if rate in set(rows.lr)]
    lines = []
    for name in METHODS.values():
        cells = [rows[(rows.name == name) & (rows.lr == rate)].test_loss for rate in rates]
        if any(len(cell) for cell in cells):
            lines.append([name, *(mean_and_range(cell, 3) for cell in cells)])
    return markdown(lines, ['learning rate', *(f'{rate:g}' for rate in rates)])


def sign_table():
    """The mean logit of the baseline by rate, in both grids."""
    lines = []
    for table, label in (('quick', '8,000 steps'), ('grid', '100,000 steps')):
        rows = read_grid(table)
        rows = rows[(rows.name == 'baseline') & (rows.weight_tying == 0)]
        rates = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
        lines.append([label, *(by_seed(rows[rows.lr == rate], 'logit_mean', 0) for rate in rates)])
    return markdown(lines, ['mean logit at', *(f'{rate:g}' for rate in rates)])


def read_cause_at_paper_rate():
    """The runs at 0.3 with 100,000 steps, one seed; two of them are the grid's."""
    rows = read('grid')
    rows = rows[(rows.method == 'baseline') & (rows.lr == 0.3) & (rows.seed == 1)]
    rows = rows.assign(arm=rows.arm.replace('', 'BF16 logits'))
    return pd.concat([rows, read('cause_0.3')])


def arms_table(rows, columns):
    """A line for each arm, the columns for seeds 1, 2 and 3."""
    lines = []
    for arm, of_arm in rows.groupby('arm', sort=False):
        lines.append([arm, *(by_seed(of_arm, column, digits) for column, digits in columns.values())])
    return markdown(lines, ['', *columns])


def demo_table():
    """The test loss of the demo's four runs, by seed."""
    rows = read_grid('demo')
    seeds = sorted(rows.seed.unique())
    lines = []
    for name in SHOWN:
        losses = rows[rows.name == name].set_index('seed').test_loss
        lines.append([name, *(f'{losses[seed]:.2f}' for seed in seeds)])
    return markdown(lines, ['', *(f'seed {seed}' for seed in seeds)])


CAUSE = {'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0), '‖μ‖': ('mu_norm', 0)}
RARE_ARMS = ['baseline', 'fp32 logits', 'weight decay', 'z-loss', 'soft-capping', 'μ-loss', 'μ-centering',
             'centered by frequency', 'centered by rows in use', 'centered head']
UNUSED = ['baseline', 'μ-centering', 'centered by frequency']
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


def unused_table():
    """64 characters in more rows: what share of the drift μ-centering leaves. One seed."""
    rows = read('rare')
    rows = rows[~rows.run.str.startswith('bytes')]
    lines = []
    for n_rows, part in rows.groupby('vocab_size'):
        part = part.set_index('arm')
        left = part.logit_mean_f['μ-centering'] / part.logit_mean_f['baseline']
        losses = [f'{part.test_loss[arm]:.2f}' for arm in UNUSED]
        lines.append([f'{n_rows}', f'{1 - 64 / n_rows:.2f}', f'{left:.2f}', *losses])
    return markdown(lines, ['rows of E', 'share of unused rows', 'share of the drift left', *UNUSED])


def takes_table():
    """Test losses of the baseline with BF16 and with fp32 logits, one seed."""
    rows = read('takes')
    rows['changed'] = rows.arm.str.removesuffix('; fp32 logits')
    lines = []
    for changed, pair in rows.groupby('changed', sort=False):
        is_fp32 = pair.arm.str.endswith('; fp32 logits')
        if is_fp32.sum() == 1 and len(pair) == 2:
            bf16 = pair[~is_fp32].iloc[0]
            fp32 = pair[is_fp32].iloc[0]
            gap = bf16.test_loss - fp32.test_loss
            lines.append([changed, f'{bf16.test_loss:.2f}', f'{fp32.test_loss:.2f}', f'{gap:+.2f}',
                          f'{bf16.logit_mean:.0f}', f'{fp32.logit_mean:.0f}'])
    header = ['changed', 'BF16 logits', 'fp32 logits', 'difference', 'mean logit, BF16', 'fp32']
    return markdown(lines, header)


def untied_runs(table):
    """The untied runs of a grid with the λ of sweep.sh, as analyze.py reads and names them."""
    runs = analyze.read_runs(HERE / f'{table}/results.csv')
    runs = runs[runs.weight_tying == 0]
    runs['variant'] = runs.variant.str.replace('logits_dtype float32', 'fp32 logits')
    own_lam = (runs.method != 'mu_loss') | (runs.lam == 0.1)
    own_lam &= (runs.method != 'z_loss') | (runs.lam == 1e-4)
    return runs[own_lam]


def quick_lrs_table():
    """LRS in 8,000 steps, three seeds, by analyze.py's function."""
    lrs, _ = analyze.learning_rate_sensitivity(untied_runs('quick'))
    lines = [[row.variant, report.lrs_cell(row)] for row in lrs.itertuples()]
    return markdown(lines, ['', 'LRS'])


def lrs_of(runs):
    """LRS by analyze.py's function, a row for each variant that it compares."""
    lrs, _ = analyze.learning_rate_sensitivity(runs)
    return lrs.set_index('variant')


def grid_lrs():
    """
    LRS of the grid: {'seed 1': of that seed, which alone has all learning rates, and so on: with the runs of
    another seed at the two largest in place of its own}.
    """
    runs = untied_runs('grid')
    first = lrs_of(runs)
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
        cells = [report.lrs_cell(lrs.loc[variant]) for lrs in found.values()]
        lines.append([variant, *cells, f'{authors.lrs_n1[variant]:.3f}'])
    return markdown(lines, ['', *found, "the authors' 16M"])


def lam_table():
    """The test loss with each λ of Table 4, at the rates that `quick` has them at. One seed."""
    rows = read('quick')
    rows = rows[(rows.seed == 1) & (rows.weight_tying == 0)]
    rates = [0.1, 0.3, 1]
    lines = []
    for method, name in (('z_loss', 'z-loss'), ('mu_loss', 'μ-loss')):
        for lam in (1e-7, 1e-4, 0.1, 100):
            own = rows[(rows.method == method) & (rows.lam == lam)]
            cells = [by_seed(own[own.lr == rate], 'test_loss', 2) for rate in rates]
            lines.append([f'{name}, λ = {lam:g}', *cells])
    return markdown(lines, ['learning rate', *(f'{rate:g}' for rate in rates)])


def authors_table():
    """The standard deviation of the logits in the authors' untied runs, at 0.1 and 0.3."""
    runs = pd.read_csv(HERE.parent / 'authors/results.csv')
    runs = runs[(runs.weight_tying == 0) & runs.lr.isin([0.1, 0.3])]
    arms = {'baseline': runs[runs.method == 'baseline']}
    for lam in (1e-7, 1e-4, 0.1, 100):
        arms[f'μ-loss, λ = {lam:g}'] = runs[(runs.method == 'mu_loss') & (runs.lam == lam)]
    arms['μ-centering'] = runs[runs.method == 'mu_centering']
    sizes = list(dict.fromkeys(runs['size']))
    lines = []
    for name, own in arms.items():
        cells = []
        for size in sizes:
            stds = own[own['size'] == size].sort_values('lr').logit_std
            cells.append(', '.join(f'{std:.1f}' for std in stds))
        lines.append([name, *cells])
    return markdown(lines, ['', *sizes])


def evaluation_table():
    """Seed 1 of the baseline at 0.3: its checkpoints with their logits in BF16 and in fp32, and the twin."""
    rows = read('grid', 'evaluation')
    rows = rows[(rows.seed == 1) & rows.run.str.contains('baseline-lr0.3')]
    twin = rows[rows.arm == 'fp32 logits'].set_index('step')
    lines = []
    for _, row in rows[rows.arm == ''].sort_values('step').iterrows():
        bf16, fp32 = row.test_loss_bfloat16, row.test_loss_float32
        lines.append([f'{row.step:,}', f'{row.logit_mean:.0f} ± {row.logit_mean_spread:.0f}', f'{bf16:.2f}',
                      f'{fp32:.2f}', f'{twin.test_loss_float32[row.step]:.2f}', f'{bf16 - fp32:.2f}',
                      f'{row.estimate:.2f}'])
    return markdown(lines, ['step', 'mean logit ± spread', 'loss with BF16 logits', 'with fp32 logits',
                            'a twin trained with fp32 logits', 'rounding at evaluation', 'estimate'])


TABLES = {
    'grid': lambda: grid_table('grid', [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3]),
    'quick': lambda: grid_table('quick', [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]),
    'tied': lambda: grid_table('quick', [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1], tying=1),
    'sign': sign_table,
    'demo': demo_table,
    'cause': lambda: arms_table(read('cause'), CAUSE),
    'cause_0.3': lambda: arms_table(read_cause_at_paper_rate(), CAUSE),
    'evaluation': evaluation_table,
    'rare': rare_table,
    'unused': unused_table,
    'takes': takes_table,
    'quick_lrs': quick_lrs_table,
    'grid_lrs': grid_lrs_table,
    'lam': lam_table,
    'authors': authors_table,
}


def with_tables(text):
    """The page with what stands between <!-- NAME --> and <!-- end --> replaced by the table of that name."""
    def table(match):
        name = match[1]
        return f'<!-- {name} -->\n{TABLES[name]()}\n<!-- end -->'
    return re.sub(r'<!-- ([\w.]+) -->\n.*?<!-- end -->', table, text, flags=re.S)


# -------- the figures
CAUSE_COLORS = {'BF16 logits': '#FF2C00', 'exact gradient': '#FF9500',
                'gradient at a random scale': '#845B97', 'fp32 logits': 'black',
                'fp32 logits, BF16 gradient': 'grey', 'Coupled Adam': '#00B945', 'SGD on E': '#0C5DA5',
                'centered head': '#00B0C0', 'with a gain': '#B07030'}


def draw_curve(ax, curves, run, column, **style):
    """One column of a run's log against the step."""
    curve = curves[(curves.run == run.run) & (curves.arm == run.arm) & (curves.step > 0)]
    curve = curve.dropna(subset=column)
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
                draw_curve(ax, curves, run, column, color=color, label=label if run.seed == 1 else None)
        axes[0].plot(runs.steps, runs.test_loss, 'o', color=color, markersize=4, clip_on=False)
    axes[0].set(xlabel='step', ylabel='held-out loss, nats per token', xlim=(0, 100_000), ylim=(1.4, 4.6))
    axes[1].set(xlabel='step', ylabel='mean logit', xlim=(0, 100_000))
    for ax in axes:
        ax.xaxis.set_major_formatter('{x:,.0f}')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False)
    figure.savefig(HERE / 'figure.png', dpi=120)


def draw_methods():
    """The paper's Figures 2 and 4 of the grid, as analyze.py draws them."""
    runs = untied_runs('grid')
    rows = report.with_looks(analyze.with_marks(runs))
    statistics = ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax']
    figures = {'loss': report.loss_against_lr(rows), 'statistics': report.against_lr(rows, statistics)}
    for name, figure in figures.items():
        png = report.to_png(name, 'untied', figure)['png']
        (HERE / f'{name}.png').write_bytes(png)


def draw_cause():
    """The mean logit against the step for each arm of `cause`, a line for each seed."""
    rows = read('cause')
    curves = read('cause', 'curves')
    figure, ax = plt.subplots(figsize=(9, 3.4), layout='constrained')
    for arm, color in CAUSE_COLORS.items():
        for run in rows[rows.arm == arm].itertuples():
            label = arm if run.seed == 1 else None
            draw_curve(ax, curves, run, 'logit_mean', color=color, label=label)
    ax.set(xlabel='step', ylabel='mean logit')
    figure.legend(loc='outside right center', frameon=False)
    figure.savefig(HERE / 'cause.png', dpi=120)


def draw_unused():
    """The share of the drift that μ-centering leaves against the share of unused rows, and a prediction."""
    rows = read('rare')
    rows = rows[~rows.run.str.startswith('bytes')]
    means = rows.pivot(index='vocab_size', columns='arm', values='logit_mean_f')
    figure, ax = plt.subplots(figsize=(4.5, 3.4), layout='constrained')
    ax.plot([0, 1], [0, 1], color='grey', label='predicted')
    ax.plot(1 - 64 / means.index, means['μ-centering'] / means['baseline'], 'o', label='measured')
    ax.set(xlabel='share of rows that never occur', ylabel='share of the drift left')
    ax.set(xlim=(0, 1), ylim=(0, 1.1))
    ax.legend(frameon=False)
    figure.savefig(HERE / 'unused.png', dpi=120)


if __name__ == '__main__':
    page = HERE / 'README.md'
    page.write_text(with_tables(page.read_text(encoding='utf-8')), encoding='utf-8')
    draw_grid()
    draw_methods()
    draw_cause()
    draw_unused()
