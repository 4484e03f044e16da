"""results.csv, curves.csv -> the tables of README.md, in the terminal, and figure.png"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from analysis import report  # noqa: E402

NAMES = {**report.NAMES, 'zipf_centering': 'Zipf-centering'}  # of older code
COLORS = {**report.COLORS, 'zipf_centering': '#0B6623'}

RUNS = ['baseline-s1', 'baseline-s2', 'baseline-fp32head-s1', 'mu_loss-s1', 'mu_centering-s1',
        'mu_centering-s2', 'zipf_centering-s1']
PAIRS = [('baseline-s1', 'baseline-fp32head-s1'), ('baseline-s1', 'mu_loss-s1'),
         ('baseline-s1', 'mu_centering-s1'), ('baseline-s2', 'mu_centering-s2')]
CUT_OFF = 11_904  # the last line of baseline-fp32head-s1
EVALUATED = 11_250  # the last evaluation before it
PUBLISHED = 331  # ‖μ‖ of the authors' 16M baseline after 100,000 steps at this learning rate


def label(run):
    """'mu_loss-s1' -> 'μ-loss, seed 1'"""
    method, *fp32, seed = run.split('-')
    return ', '.join([NAMES.get(method, method), *['fp32 logits' for _ in fp32], f'seed {seed[1:]}'])


def at_equal_steps(results, curves):
    """Test losses, and means of the log lines of the 1,000 steps before the first run ended."""
    tests = curves.pivot_table(index='run', columns='step', values='test_loss')
    lines = curves[curves.step.between(CUT_OFF - 999, CUT_OFF)].groupby('run')
    rows = lines[['mu_norm', 'logit_mean', 'logit_mean_spread']].mean().round(1) + 0.0  # + 0: no '-0.0'
    rows.insert(0, f'test loss at {EVALUATED}', tests[EVALUATED].round(3))
    rows.insert(1, 'at the end', results.set_index('run').test_loss.round(3))
    return rows.loc[RUNS].rename(label)


def gaps(curves):
    """Training loss of the baseline minus that of a run of its seed, which read the same batches."""
    lines = curves.dropna(subset='loss').pivot(index='step', columns='run')
    columns = {f'‖μ‖, {label(run)}': lines.mu_norm[run] for run in ('baseline-s1', 'baseline-s2')}
    columns |= {f'minus {label(run)}': lines.loss[baseline] - lines.loss[run] for baseline, run in PAIRS}
    columns = pd.DataFrame(columns)
    return pd.DataFrame({f'{first} to {last}': columns.loc[first:last].mean() for first, last in
                         ((1, 1000), (1001, 4000), (4001, 8000), (8001, CUT_OFF))}).round(2)


def draw(curves):
    """Three panels against the step, a line for each run."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout='constrained')
    panels = {'test_loss': 'test loss', 'mu_norm': '‖μ‖',
              'logit_mean_spread': 'spread of the mean logit'}
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        for run in RUNS:
            rows = curves[(curves.run == run) & (curves.step > 0)].dropna(subset=column)
            y = rows[column].rolling(10).mean() if column == 'logit_mean_spread' else rows[column]
            line = ':' if 'fp32' in run else '--' if run.endswith('s2') else '-'
            ax.plot(rows.step, y, line, color=COLORS[run.split('-')[0]], linewidth=1.4, label=label(run))
        ax.set(title=title, xlabel='step', xlim=(0, 12_600))
    axes[1].axhline(PUBLISHED, color='black', linewidth=0.8)
    axes[1].text(12_400, PUBLISHED - 6, "the authors' run at its end", ha='right', va='top', fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
    figure.savefig(HERE / 'figure.png', dpi=140)


if __name__ == '__main__':
    results, curves = pd.read_csv(HERE / 'results.csv'), pd.read_csv(HERE / 'curves.csv')
    print(at_equal_steps(results, curves).to_string(), gaps(curves).to_string(), sep='\n\n')
    passed = curves[(curves.mu_norm > PUBLISHED) & curves.run.isin(RUNS[:3])]
    first_lines = passed.groupby('run').step.min()
    print('', f'first line with ‖μ‖ > {PUBLISHED}:', first_lines.to_string(), sep='\n')
    draw(curves)
