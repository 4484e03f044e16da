"""The tables, figures and numbers of these pages: python -m results.natural.page"""
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from results.mean_logit.mean_logit import cost, read_runs
from results.tables import by_seed, from_to, number, with_range, write

HERE = Path(__file__).parent
AUTHORS = pd.read_csv(HERE.parent / 'authors/results.csv')
PAGES = [f'results/natural/{name}.md' for name in ('README', 'cause', 'gain', 'more')]
METHODS = {  # of the grids, in the paper's order
    'baseline': 'baseline',
    'fp32 logits': 'baseline, fp32 logits',
    'weight_decay': 'weight decay',
    'z_loss': 'z-loss',
    'soft_capping': 'soft-capping',
    'mu_loss': 'μ-loss, λ = 0.1',
    'mu_centering': 'μ-centering',
}
GAINS = {'gain at 1e-3': 1e-3, 'gain at 10^-3.5': 10 ** -3.5, 'gain at 1e-4': 1e-4,
         'gain at 1e-4 fp32 logits': 1e-4}  # of slow_gain: the scale of its learning rate


def read(table, name='results'):
    """A csv file of a table. `arm` is what the name of a run begins with."""
    rows = pd.read_csv(HERE / table / f'{name}.csv')
    rows['arm'] = rows.run.str.replace('-lr.*', '', regex=True).str.replace('_', ' ')
    return rows


def read_grid(table):
    """The untied runs of a grid of sweep.sh, with METHODS' names as `arm`."""
    rows = read(table)
    rows['arm'] = rows.method.mask(rows.logits_dtype == 'float32', 'fp32 logits').map(METHODS)
    other_lam = (rows.method == 'mu_loss') & (rows.lam != 0.1)
    return rows[(rows.weight_tying == 0) & ~other_lam]


def read_gain(table):
    """The runs of a table with what the last LayerNorm does at their end."""
    columns = ['run', 'arm', 'lr', 'seed', 'steps', 'batch_size', 'final_gain', 'test_loss']
    runs = read(table)[columns]
    last = read(table, 'last_norm').sort_values('step').groupby('run').last()
    return runs.join(last.drop(columns='arm'), on='run')


# -------- the tables
def rule_table():
    """What BF16 logits cost by the size of the mean logit: c, these pairs, the authors' runs."""
    pairs = pd.read_csv(HERE / 'rule.csv')
    authors = read_runs().dropna(subset='kind')
    lines = {}
    for low in (64, 128, 256, 512, 1024, 2048):
        harm = pairs.harm[pairs['mean'].abs().between(low, 2 * low, inclusive='left')]
        theirs = authors.excess[authors.logit_mean.abs().between(low, 2 * low, inclusive='left')]
        lines[f'{low:,}'] = [f'{cost(low):.2g}', with_range(harm, 2, 'median'), str(len(harm)),
                             number(theirs.median(), 2) if len(theirs) else '']
    header = ['the rule, c', 'harm here: median [lowest, highest]', 'pairs',
              "the authors' runs lose: median"]
    return pd.DataFrame.from_dict(lines, 'index', columns=header).rename_axis('mean logit from')


def grid_table():
    """The test loss of each method at each rate: means over the seeds [lowest, highest]."""
    losses = read_grid('grid').groupby(['arm', 'lr']).test_loss
    table = losses.agg(with_range, digits=3).unstack().fillna('')
    table.columns = [f'{rate:g}' for rate in table]
    return table.reindex(METHODS.values()).rename_axis('learning rate')


def rounding_table():
    """The baseline and its twin at 0.3, each evaluated with logits in BF16 and in fp32."""
    rows = read_grid('grid')
    rows = rows[(rows.method == 'baseline') & (rows.lr == 0.3)].sort_values('arm')
    in_bf16 = rows.logits_dtype == 'bfloat16'
    rows['bf16'] = rows.test_loss + rows.bf16_cost.mask(in_bf16, 0)
    rows['fp32'] = rows.test_loss - rows.bf16_cost.where(in_bf16, 0)
    rows['arm'] = rows.logits_dtype.map({'bfloat16': 'BF16 logits', 'float32': 'fp32 logits'})
    table = by_seed(rows, {
        'evaluated with BF16 logits': ('bf16', 2), 'with fp32 logits': ('fp32', 2)})
    return table.rename_axis('trained with')


def cause_table():
    """The arms at 1, three seeds, and at 0.3, one seed, where the grid has the first two."""
    grid = read_grid('grid')
    grid = grid[(grid.method == 'baseline') & (grid.lr == 0.3) & (grid.seed == 1)]
    first = {'baseline': 'BF16 logits', 'baseline, fp32 logits': 'fp32 logits'}
    long = pd.concat([grid.assign(arm=grid.arm.map(first)), read('cause_0.3')])
    mean = ('logit_mean', 0)
    at_1 = by_seed(read('cause'), {'rate 1: test loss': ('test_loss', 2), 'mean logit': mean})
    at_03 = by_seed(long, {'0.3: test loss': ('test_loss', 2), 'mean logit': mean})
    return pd.concat([at_1, at_03], axis=1)


def methods_table():
    """All methods at 1: the paper's, then others."""
    rows = read_grid('quick').query('lr == 1')
    others = read('methods')
    table = by_seed(pd.concat([rows, others]), {
        'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0), '‖μ‖': ('mu_norm', 0),
        'largest logged training loss': ('largest_loss', 0)})
    return table.reindex([*METHODS.values(), *others.arm.unique()])


def rare_table():
    """257 bytes in 320 rows."""
    rows = read('rare')
    rows = rows[rows.arm.str.startswith('bytes ')]
    return by_seed(rows.assign(arm=rows.arm.str.removeprefix('bytes ')), {
        'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0),
        'weighted by frequency': ('logit_mean_f', 0)})


def decay_table():
    """Weight decay by Eq. 2, which the grid has at 0.3, and with the schedule, and the baseline."""
    grid = read_grid('grid').query('method == "weight_decay" and lr == 0.3')
    names = {'baseline': 'baseline', 'weight decay': 'weight decay, Eq. 2',
             'eq2': 'weight decay, Eq. 2', 'half': 'weight decay, Eq. 2, λ/2',
             'decay': 'weight decay, λ η_t / η'}
    rows = pd.concat([read('again').query('steps == 100_000'), grid, read('decay')])
    rows['arm'] = rows.arm.map(names)
    columns = {'test loss': ('test_loss', 3), 'std of the logits': ('logit_std', 1)}
    at_0003 = by_seed(rows[rows.lr == 0.003], columns).add_prefix('at 0.003: ')
    at_03 = by_seed(rows[rows.lr == 0.3], columns).add_prefix('at 0.3: ')
    table = pd.concat([at_0003, at_03], axis=1).reindex(dict.fromkeys(names.values()))
    return table.fillna('')


def gain_table():
    """With a gain and without one, by tokens a step."""
    rows = read_gain('gain')
    rows['share'] = rows.filter(regex='share_').sum(axis=1)
    rows.loc[~rows.final_gain, ['gain_1', 'gain_median']] = None
    return by_seed(rows, {
        'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0), '‖h‖': ('h_norm', 2),
        'cos(μ, h)': ('cos_mu_h', 2), 'energy in four dimensions': ('share', 4),
        'gain of the largest': ('gain_1', 4), 'median gain of the others': ('gain_median', 2)})


def slow_gain_table():
    """Gains whose learning rate is scaled. Reach: that of all steps, some η steps / 2, scaled."""
    rows = read_gain('slow_gain')
    rows['highest'] = rows.run.map(read('slow_gain', 'curves').groupby('run').logit_mean.max())
    rows['scale'] = rows.arm.map(GAINS)
    rows['reach'] = rows.scale * rows.lr * rows.steps / 2
    rows = rows.sort_values(['lr', 'scale', 'arm'], ascending=[False, False, True])
    rows['arm'] = rows.lr.map('{:g}, '.format) + rows.arm
    table = by_seed(rows, {
        'test loss': ('test_loss', 2), 'mean logit': ('logit_mean', 0),
        'its largest': ('highest', 0), '‖h‖': ('h_norm', 2),
        'gain of the largest dimension': ('gain_1', 3)})
    reach = rows.drop_duplicates('arm').reach.map('{:.1f}'.format)
    table.insert(0, 'reach', [*reach])
    return table.rename_axis('learning rate, scale')


def fact_3_table():
    """Fact 3's quantities of the grid's baselines."""
    rows = read_grid('grid').query('arm == "baseline" and lr in [0.003, 0.03, 0.1, 0.3]')
    rows = rows.assign(arm=rows.lr.map('{:g}'.format)).sort_values('lr')
    return by_seed(rows, {
        'mean logit': ('logit_mean', 0), 'cos(μ, h)': ('cos_mu_h', 2), 'r_emb': ('r_emb', 2),
        'r_cos': ('r_cos', 3), 'r_log': ('r_log', 3)}).rename_axis('learning rate')


def lrs(rows):
    """LRS of each arm. Bold: the lowest. Underlined: no loss is over 1% above the lowest."""
    losses = rows.pivot(index='lr', columns='arm', values='test_loss').dropna(axis=1)
    value = (losses - losses.min()).sum() / (len(losses) - 1)
    is_good = losses.le(1.01 * losses.min(axis=1), axis=0).all()
    texts = value.map('{:.3f}'.format)
    texts = texts.mask(is_good, '<ins>' + texts + '</ins>')
    return texts.mask(value == value.min(), '<b>' + texts + '</b>')


def grid_lrs_table():
    """LRS of the grid, at the two largest rates of each seed, beside that of the authors' 16M."""
    rows = read_grid('grid')
    below = rows[rows.lr < 0.1]  # of seed 1
    columns = {}
    for seed, of_seed in rows[rows.lr >= 0.1].groupby('seed'):
        name = 'seed 1' if seed == 1 else f'seed {seed} from 0.1 on'
        columns[name] = lrs(pd.concat([below, of_seed]))
    theirs = pd.read_csv(HERE.parent / 'authors/lrs.csv')
    theirs = theirs.query('table == "methods" and size == "16M" and weight_tying == 0')
    theirs = theirs.set_index(theirs.method.map(METHODS)).lrs_n1
    columns["the authors' 16M"] = theirs.map('{:.3f}'.format)
    return pd.DataFrame(columns).reindex([name for name in METHODS.values() if name in theirs])


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


# -------- the figures
RED, BLACK, ORANGE, GREEN = '#FF2C00', 'black', '#FF9500', '#00B945'
OF_GRID = {'baseline': RED, 'baseline, fp32 logits': BLACK, 'μ-loss, λ = 0.1': ORANGE,
           'μ-centering': GREEN}
OF_CAUSE = {'BF16 logits': RED, 'exact gradient': ORANGE, 'gradient at a random scale': '#845B97',
            'fp32 logits': BLACK, 'fp32 logits BF16 gradient': 'grey', 'Coupled Adam': GREEN,
            'SGD on E': '#0C5DA5', 'centered head': '#00B0C0', 'with a gain': '#B07030'}
OF_GAINS = {'gain at 1e-3': GREEN, 'gain at 10^-3.5': ORANGE, 'gain at 1e-4': RED,
            'gain at 1e-4 fp32 logits': BLACK}


def draw(ax, runs, curves, column, colors, **style):
    """A column of the runs' logs, or of their checkpoints, against the step: a line a run."""
    for arm, color in colors.items():
        for run in runs[runs.arm == arm].itertuples():
            curve = curves[(curves.run == run.run) & (curves.step > 0)].dropna(subset=column)
            curve = curve.sort_values('step')
            label = arm if run.seed == 1 else None
            ax.plot(curve.step, curve[column], linewidth=1.2, color=color, label=label, **style)
    ax.xaxis.set_major_formatter('{x:,.0f}')
    ax.set(xlabel='step')


def save_figure(name, figure, ax, place='outside lower center', n_columns=4):
    """Writes a figure with the legend of `ax`."""
    figure.legend(*ax.get_legend_handles_labels(), loc=place, ncols=n_columns, frameon=False)
    figure.savefig(HERE / f'{name}.png', dpi=85)
    plt.close(figure)


def draw_grid():
    """Held-out loss and mean logit at 0.3. Points: test losses; the legend has their means."""
    runs = read_grid('grid').query('lr == 0.3')
    curves = read('grid', 'curves')
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout='constrained')
    labels = {}
    for arm, color in OF_GRID.items():
        losses = runs[runs.arm == arm].test_loss
        name = 'baseline, BF16 logits' if arm == 'baseline' else arm
        labels[arm] = f'{name}: {losses.mean():.2f}'
        axes[0].plot([100_000] * len(losses), losses, 'o', color=color, markersize=4, clip_on=False)
    colors = {labels[arm]: color for arm, color in OF_GRID.items()}
    runs = runs.assign(arm=runs.arm.map(labels))
    for ax, column in zip(axes, ('val_loss', 'logit_mean'), strict=True):
        draw(ax, runs, curves, column, colors)
    axes[0].set(ylabel='held-out loss, nats per token', xlim=(0, 100_000), ylim=(1.4, 4.6))
    axes[1].set(ylabel='mean logit', xlim=(0, 100_000))
    save_figure('figure', figure, axes[0])


def draw_cause():
    """The mean logit of each arm at 1."""
    figure, ax = plt.subplots(figsize=(9, 3.4), layout='constrained')
    draw(ax, read('cause'), read('cause', 'curves'), 'logit_mean', OF_CAUSE)
    ax.set(ylabel='mean logit')
    save_figure('cause', figure, ax, 'outside right center', 1)


def draw_gain():
    """What the last LayerNorm does, with a gain and without."""
    runs = read('gain')
    colors = {arm: RED if arm.endswith('without') else '#B07030' for arm in runs.arm}
    rows = read('gain', 'last_norm')
    rows['share'] = rows.filter(regex='share_').sum(axis=1)
    rows.loc[rows.arm.str.endswith('without'), ['gain_1', 'gain_median']] = None
    panels = {'share': 'energy in four dimensions', 'gain_1': 'gain of the largest dimension',
              'gain_median': 'median gain of the others', 'h_norm': '‖h‖',
              'cos_mu_h': 'cos(μ, h)', 'logit_mean': 'mean logit'}
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.4), layout='constrained', sharex=True)
    for ax, (column, title) in zip(axes.flat, panels.items(), strict=True):
        for line, sequences in (('-', 4), ('--', 16), (':', 64)):
            part = runs[runs.batch_size == sequences]
            draw(ax, part, rows, column, colors, linestyle=line)
        ax.set(title=title)
    save_figure('gain', figure, axes[1, 0], n_columns=3)


def draw_slow_gain():
    """Mean logit and gains with slow gains, at 1 and at 0.3."""
    runs = read('slow_gain')
    curves = read('slow_gain', 'curves')
    norms = read('slow_gain', 'last_norm')
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.8), layout='constrained')
    for (left, right), rate in zip(axes, (1, 0.3), strict=True):
        part = runs[runs.lr == rate]
        draw(left, part, curves, 'logit_mean', OF_GAINS)
        draw(right, part, norms, 'gain_1', OF_GAINS)
        draw(right, part, norms, 'gain_median', OF_GAINS, linestyle='--')
        left.set(title=f'learning rate {rate}', ylabel='mean logit')
        right.set(title='gain of the largest dimension; dashed: others', ylim=(-0.1, 1.1))
    save_figure('slow_gain', figure, axes[0, 0])


# -------- the numbers of the texts
def above(arm, rows, index='seed'):
    """Test losses minus those of `arm`, a column for each arm."""
    losses = rows.pivot(index=index, columns='arm', values='test_loss')
    return losses.sub(losses[arm], axis=0).round(3)


def of_readme():
    grid, cause = read_grid('grid'), read('cause')
    norms = pd.concat([read_gain('gain').x_norm, read_gain('slow_gain').x_norm])
    print(f'{len(norms)} norms before the last norm: {min(norms):.0e} to {max(norms):.0e}')

    at_03 = grid[(grid.arm == 'baseline') & (grid.lr == 0.3)]
    runs = pd.concat([at_03, cause[cause.arm == 'BF16 logits']])
    print('spread of the mean logit over it:', from_to(runs.logit_mean_spread / runs.logit_mean, 4))
    theirs = AUTHORS[(AUTHORS.method == 'baseline') & (AUTHORS.logit_mean.abs() >= 64)]
    spread = theirs.logit_mean_spread / theirs.logit_mean.abs()
    print(f"of the authors' {len(spread)} baselines: median {spread.median():.2f}")

    weak = pd.concat([read('quick'), read('grid')]).query('method == "mu_loss" and lam == 1e-4')
    print('μ-loss with λ = 1e-4:', weak[['lr', 'seed', 'test_loss', 'logit_mean']], sep='\n')
    print('test loss above the baseline:', above('baseline', grid, ['lr', 'seed']), sep='\n')
    grid = grid[grid.lr == 0.3]
    print('at 0.3, above fp32 logits:', above('baseline, fp32 logits', grid), sep='\n')


def of_cause():
    cause, grid, takes = read('cause'), read_grid('grid'), read('takes')
    print('above fp32 logits:', above('fp32 logits', cause), sep='\n')
    norms = cause.mu_norm / cause.mean_share ** 0.5  # roots of the mean square of the rows' norms
    cause = cause.assign(row_norm=norms)
    print(cause[cause.seed == 1][['arm', 'row_norm', 'mean_share']])

    grid = grid[(grid.lr == 0.1) & grid.arm.isin(['z-loss', 'baseline'])]
    print('at 0.1:', grid[['arm', 'seed', 'mu_norm', 'test_loss']], sep='\n')
    print('at 0.3:', read('cause_0.3')[['arm', 'mu_norm', 'test_loss']], sep='\n')

    takes['twin'] = takes.arm.str.endswith(' fp32')
    takes['what'] = takes.arm.str.removesuffix(' fp32')
    losses = takes.pivot(index=['what', 'lr', 'seed'], columns='twin', values='test_loss')
    print('harm, by what is changed:', losses[False] - losses[True], sep='\n')
    print(takes[takes.what.str.startswith('β2')][['arm', 'lr', 'seed', 'test_loss', 'logit_mean']])


def of_gain():
    gain, grid = read_gain('gain'), read_grid('grid')
    with_gain = gain[gain.final_gain]
    shares = with_gain.filter(regex='share_').cumsum(axis=1)
    gains = with_gain.filter(regex='gain_[1-4]')
    carry = shares.shift(axis=1, fill_value=0) < 0.99  # dimensions up to 99% of the energy
    print('dimensions:', carry.sum(axis=1).value_counts().to_dict(),
          'their gains:', from_to(gains.where(carry.to_numpy()).stack(), 4))
    few = with_gain[with_gain.batch_size == 4]
    print('128 tokens, with a gain, ‖μ‖:', from_to(few.mu_norm, 0))

    gain['arm'] = gain.final_gain.map({True: 'with a gain', False: 'without'})
    print(above('with a gain', gain, ['batch_size', 'seed']))
    twin = grid[(grid.arm == 'baseline, fp32 logits') & (grid.lr == 0.3) & (grid.seed == 1)]
    slow = pd.concat([read('slow_gain'), twin])
    print(above('gain at 1e-4 fp32 logits', slow[slow.lr == 1]))
    print(above('baseline, fp32 logits', slow[slow.lr == 0.3]))


def of_more():
    rare, quick = read('rare'), read_grid('quick')
    in_bytes = rare[rare.arm.str.startswith('bytes')]
    print('rare rows, above the baseline:', above('bytes baseline', in_bytes).T, sep='\n')
    print('above fp32 logits:', above('bytes fp32 logits', in_bytes).T, sep='\n')
    print('μ-centering, rounding:', from_to(rare[rare.arm == 'bytes μ-centering'].bf16_cost, 2))
    weighted = rare[rare.seed == 1].set_index('arm').logit_mean_f
    for rows in (96, 128, 256, 640):
        left = weighted[f'{rows} rows μ-centering'] / weighted[f'{rows} rows baseline']
        print(f'{rows} rows: {left:.2f} of the drift is left')

    demo = read('demo').groupby(['method', 'logits_dtype'])
    print('the demo:', demo.test_loss.agg(['min', 'max']), sep='\n')
    differ = above('baseline', quick[quick.lr < 1], ['lr', 'seed']).abs()
    print('8,000 steps, up to 0.3, from the baseline:', differ.max(), sep='\n')
    tied = read('quick').query('weight_tying and lr == 1')
    print('tied, at 1:', tied[['method', 'test_loss']], sep='\n')

    decay = pd.concat([read('again'), read('decay')])
    print('decay, at 0.003:', above('baseline', decay[decay.lr == 0.003]), sep='\n')
    print('at 0.3:', decay[decay.arm == 'decay'][['lr', 'seed', 'logit_mean']], sep='\n')
    theirs = AUTHORS[(AUTHORS.lr == 0.003) & (AUTHORS.weight_tying == 0)]
    theirs = theirs.pivot_table(index='size', columns='method', values='test_loss')
    print("the authors' weight decay:", from_to(theirs.weight_decay - theirs.baseline, 3))


def print_numbers():
    pd.set_option('display.width', 250, 'display.max_columns', 20)
    for page, print_those in zip(PAGES, (of_readme, of_cause, of_gain, of_more), strict=True):
        print(f'\n{page}')
        print_those()


if __name__ == '__main__':
    write(PAGES, TABLES)
    draw_grid()
    draw_cause()
    draw_gain()
    draw_slow_gain()
    print_numbers()
