"""
The study's csv files, figure and tables, from finished runs (their commands are in README.md):

    python results/rounding_study/study.py OUT CPU   # OUT, the runs of this CPU -> csv files, then all below
    python results/rounding_study/study.py           # csv files -> figure.png, and tables in the terminal
"""
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from analysis.plots import COLORS  # noqa: E402
from analysis.runs import NAMES  # noqa: E402
from model import GPT, chunked_head_loss, gpt_config  # noqa: E402
from oec.common import read_json  # noqa: E402
from oec.data import Windows, evenly_spaced  # noqa: E402
from oec.run_folder import load_checkpoint  # noqa: E402

LONG = 1000  # steps of the runs at a constant learning rate
SETTINGS = ['method', 'mu_shift', 'seed', 'lr', 'steps', 'dtype', 'logits_dtype', 'commit', 'torch']


@torch.no_grad()
def rounding_loss(folder, n_tokens=16_384):
    """The test loss with logits rounded to bf16 minus that without, of the same bf16 h and E."""
    saved = load_checkpoint(folder / 'model.pt')
    config = gpt_config(saved['config'])
    gpt = GPT(config)
    gpt.load_state_dict(saved['model'])
    windows = Windows(saved['config']['data'], 'val', config.block_size, config.vocab_size)
    batch = torch.from_numpy(windows[evenly_spaced(n_tokens // config.block_size, len(windows))])
    h = torch.cat([gpt.hidden(tokens[None, :-1]).flatten(0, 1) for tokens in batch]).bfloat16().float()
    E = gpt.E.bfloat16().float()
    targets = batch[:, 1:].flatten()
    losses = {dtype: chunked_head_loss(h, E, targets, replace(config, logits_dtype=dtype))[1]['loss']
              for dtype in ('bfloat16', 'float32')}
    return (losses['bfloat16'] - losses['float32']).mean().item()


def training_log(folder):
    """The log lines of training steps, a DataFrame."""
    log = pd.read_json(folder / 'log.jsonl', lines=True)
    return log[log.lr.notna()]


def row_of(folder, cpu):
    """A finished run -> its row. train_loss and logit_mean are means over the last tenth of the steps."""
    run = {**read_json(folder / 'config.json'), **read_json(folder / 'result.json')}
    log = training_log(folder)
    end = log[log.step > 0.9 * run['steps']]
    return {**{name: run[name] for name in SETTINGS}, 'cpu': cpu, 'test_loss': run['test_loss'],
            'train_loss': end.loss.mean(), 'mu_norm': run['mu_norm'],
            'logit_mean': end.logit_mean.mean(), 'rounding_loss': rounding_loss(folder)}


def table(runs):
    """Test losses by method and norm: of one run, or mean [lowest, highest] over the seeds."""
    seeds = runs.groupby(['cpu', 'method', 'logits_dtype', 'mu_shift']).test_loss
    cells = seeds.mean().map('{:.2f}'.format)
    spread = seeds.min().map(' [{:.2f}, '.format) + seeds.max().map('{:.2f}]'.format)
    return cells.where(seeds.count() == 1, cells + spread).unstack().fillna('')


def gaps(curves, windows=((21, 60), (261, 300), (701, 1000))):
    """The baseline's training loss above mu_centering's, means over these steps, and its mean logit there."""
    rows = []
    for first, last in windows:
        means = curves[curves.step.between(first, last)].groupby(['seed', 'method']).mean()
        loss = means.loss.unstack()
        logit = means.logit_mean.unstack()
        rows += [{'steps': f'{first} to {last}', 'seed': seed, 'gap': gap, 'mean logit': logit.baseline[seed]}
                 for seed, gap in (loss.baseline - loss.mu_centering).items()]
    return pd.DataFrame(rows)


def excess(runs, by):
    """The runs and their test loss above mu_centering's mean over seeds, in the same setting."""
    centered = runs[runs.method == 'mu_centering'].groupby(by).test_loss.mean().rename('centered')
    runs = runs.merge(centered, on=by)
    return runs.assign(excess=runs.test_loss - runs.centered)


def draw(runs, authors):
    """Left: what runs lose, against where mu ends. Right: what rounding the logits costs the final models."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout='constrained')
    usual = runs[runs.logits_dtype == 'bfloat16']
    for method, rows in excess(usual, ['mu_shift', 'steps', 'cpu']).groupby('method', sort=False):
        left.plot(rows.mu_norm, rows.excess, 'o', color=COLORS[method], label=NAMES.get(method, method))
    published = excess(authors, ['size', 'lr'])
    for method, rows in (('baseline', published[published.method == 'baseline']),
                         ('z_loss', published[(published.method == 'z_loss') & (published.lam == 1e-4)])):
        left.plot(rows.mu_norm, rows.excess, 'x', color=COLORS[method],
                  label=f"{NAMES.get(method, method)}, the authors' five sizes")
    left.set(xlabel=r'$\|\mu\|$ at the end', ylabel='test loss above μ-centering, nats')
    left.set_xscale('symlog', linthresh=1)
    left.set_yscale('symlog', linthresh=0.1)
    left.legend(fontsize=7)

    for (method, dtype), rows in runs.groupby(['method', 'logits_dtype'], sort=False):
        marker, label = ('^', f'{method}, fp32 head') if dtype == 'float32' else ('o', None)
        right.plot(rows.logit_mean.abs(), rows.rounding_loss, marker, color=COLORS[method], label=label)
    mean = np.geomspace(8, 8192, 2000)
    half = 2.0 ** (np.floor(np.log2(mean)) - 8)  # half of the distance between neighbouring bf16 numbers
    right.plot(mean, np.log(np.sinh(half) / half), color='black', linewidth=0.8,
               label='independent, uniform errors')
    right.set(xlabel='|mean logit| at the end',
              ylabel='test loss, bf16 logits - fp32 logits, nats')
    right.set_xscale('symlog', linthresh=1)
    right.set_yscale('symlog', linthresh=1e-3)
    right.legend(fontsize=7)
    figure.suptitle('Test loss against ‖μ‖, and what rounding final logits costs (dots: 16M after a shift)')
    figure.savefig(HERE / 'figure.png', dpi=160)


if __name__ == '__main__':
    runs = pd.read_csv(HERE / 'results.csv')
    if len(sys.argv) > 1:
        out, cpu = sys.argv[1:]
        folders = sorted(path.parent for path in Path(out).glob('*/result.json'))
        new = pd.DataFrame([row_of(folder, cpu) for folder in folders])
        runs = pd.concat([runs[runs.cpu != cpu], new])
        runs.to_csv(HERE / 'results.csv', index=False)
        curves = [training_log(folder)[['step', 'loss', 'logit_mean', 'mu_norm']]
                  .assign(method=run.method, seed=run.seed)
                  for folder, run in zip(folders, new.itertuples(), strict=True) if run.steps == LONG]
        if curves:
            pd.concat(curves).to_csv(HERE / 'curves.csv', index=False, float_format='%.7g')
    draw(runs[runs.steps != LONG], pd.read_csv(HERE.parent / 'authors' / 'results.csv'))
    print(table(runs[runs.steps != LONG]).to_string())
    print(gaps(pd.read_csv(HERE / 'curves.csv')).to_string())
