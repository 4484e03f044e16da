"""
runs.csv and curves.csv -> the tables of README.md, in the terminal, and figure.png. The same for runs of your
own, finished or not: python results/drift/drift.py out/drift_16M, with the figure out/drift_16M/drift.png.
"""
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from analyze import check_comparable, flags_in_names  # noqa: E402
from tools import report  # noqa: E402

# with a method of older code and the forks of the head with fp32 logits
COLORS = {**report.COLORS, 'zipf_centering': '#0B6623', 'inputs rounded': '#0C5DA5',
          'logits and gradient rounded': '#845B97', 'rounded without mu': '#9E9E9E'}
STATISTICS = ['mu_norm', 'logit_mean', 'logit_mean_spread']
COLUMNS = ['run', 'step', 'loss', 'val_loss', 'test_loss', *STATISTICS, 'logit_max', 'tokens_per_second']

# Runs that share these are compared at equal steps; those that share card and seed too read the same batches.
SETTINGS = ['size', 'weight_tying', 'lr', 'steps', 'batch_size', 'block_size']
PUBLISHED = 331  # ‖μ‖ of the authors' 16M baseline after 100,000 steps at a learning rate of 0.3


def read_folder(folder):
    """The settings of the runs in a folder that sweep.sh wrote, a row each, and all lines of their logs."""
    runs, curves = [], []
    for path in sorted(Path(folder).glob('*/config.json')):
        config = json.loads(path.read_text())
        log = pd.DataFrame([json.loads(line) for line in path.with_name('log.jsonl').open()])
        runs.append({**config, 'run': path.parent.name, 'card': config['device_name']})
        curves.append(log.assign(run=path.parent.name))
    if not runs:
        sys.exit(f'error: no runs in {folder}')
    runs = pd.DataFrame(runs)
    check_comparable(runs)  # or "read the same batches" would not be true
    differ = {*flags_in_names(runs)} - {'logits_dtype'}
    if differ:
        sys.exit(f'error: the runs in {folder} differ in {", ".join(sorted(differ))}')
    return runs, pd.concat(curves).reindex(columns=COLUMNS)


def with_baselines(runs):
    """The runs, and as `baseline` the name of the run with bf16 logits that read the same batches, or NaN."""
    batches = ['card', *SETTINGS, 'seed']
    baselines = runs[(runs.method == 'baseline') & (runs.logits_dtype == 'bfloat16')]
    baselines = baselines[[*batches, 'run']].rename(columns={'run': 'baseline'})
    return runs.merge(baselines, how='left', on=batches, validate='many_to_one')


def pivot(curves, column):
    """A row for each step, a column for each run."""
    return curves.dropna(subset=column).pivot(index='step', columns='run', values=column)


def gaps(runs, values):
    """For each run the baseline's `values` minus its own: above 0 where the baseline is worse."""
    baselines = values.reindex(columns=runs.baseline).set_axis(runs.run, axis=1)
    return baselines - values.reindex(columns=runs.run)


def at_equal_steps(runs, curves):
    """Val losses at the last step where all have one, means over the last quarter of their common steps."""
    lines = curves.dropna(subset='loss')
    last = lines.groupby('run').step.max()
    quarter = lines[lines.step.between(last.min() * 3 / 4, last.min(), inclusive='right')]
    val_loss = pivot(curves, 'val_loss').dropna()
    step = val_loss.index[-1]
    means = quarter.groupby('run')[STATISTICS].mean()
    return pd.DataFrame({
        f'val loss at {step}': val_loss.loc[step].round(3),
        'baseline minus run': gaps(runs, val_loss).loc[step].round(3),
        'in training loss': gaps(runs, pivot(quarter, 'loss')).mean().round(3),
        '‖μ‖': means.mu_norm.round(1),
        'mean logit': means.logit_mean.round(1) + 0.0,  # + 0: no '-0.0'
        'spread': means.logit_mean_spread.round(1),
        f'first above {PUBLISHED}': lines[lines.mu_norm > PUBLISHED].groupby('run').step.min(),
        'last step': last,
        '‖μ‖ then': lines.groupby('run').mu_norm.last().round(1),
        'largest |logit|': lines.groupby('run').logit_max.last().round(1),
        'test loss': curves.groupby('run').test_loss.max().round(3),
        'tokens/s': lines.groupby('run').tokens_per_second.median().round(),
    }).reindex(runs.run)


def draw(runs, curves, path):
    """A row of panels for each card and batch size, a line for each run, thin with fp32 logits."""
    panels = {'val_loss': 'val loss', 'mu_norm': '‖μ‖', 'logit_mean': 'mean logit, over ten lines'}
    groups = runs.groupby(['card', 'batch_size', 'block_size'], sort=False)
    size = (14, 3.2 * len(groups))
    figure, axes = plt.subplots(len(groups), 3, figsize=size, layout='constrained', squeeze=False)
    for row, ((card, batch, block), group) in zip(axes, groups, strict=True):
        for ax, (column, title) in zip(row, panels.items(), strict=True):
            for run in group.itertuples():
                part = curves[(curves.run == run.run) & (curves.step > 0)].dropna(subset=column)
                y = part[column].rolling(10).mean() if column == 'logit_mean' else part[column]
                ax.plot(part.step, y, color=COLORS.get(run.method, 'black'), label=run.run,
                        linestyle=['-', '--', ':', '-.'][(run.seed - 1) % 4],
                        linewidth=0.7 if run.logits_dtype == 'float32' else 1.5)
            ax.set(title=f'{title}: {card}, {batch} x {block} tokens', xlabel='step')
        row[1].axhline(PUBLISHED, color='black', linewidth=0.8)
        row[1].text(0, PUBLISHED, "authors' run, end", va='bottom', fontsize=8)
        row[2].legend(loc='center left', bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == '__main__':
    if len(sys.argv) > 1:
        runs, curves = read_folder(sys.argv[1])
        figure = Path(sys.argv[1], 'drift.png')
    else:
        runs, curves = pd.read_csv(HERE / 'runs.csv'), pd.read_csv(HERE / 'curves.csv')
        figure = HERE / 'figure.png'
    runs = with_baselines(runs)
    for _, group in runs.groupby(SETTINGS, sort=False):
        lines = curves[curves.run.isin(group.run)]
        print(at_equal_steps(group, lines).to_string(), '', 'val loss, baseline minus run, by step', sep='\n')
        print(gaps(group, pivot(lines, 'val_loss')).T.round(3).to_string(), end='\n\n')
    draw(runs, curves, figure)
    print(figure)
