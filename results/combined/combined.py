"""
The csv, the tables and the figure of this study (the commands of its runs are in README.md):

    python results/combined/combined.py out/combined    # finished runs -> results.csv, then all below
    python results/combined/combined.py                 # results.csv -> tables in the terminal, figure.png
"""
import functools
import math
import multiprocessing
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from analysis.plots import COLORS  # noqa: E402
from analysis.runs import NAMES  # noqa: E402
from model import GPT, gpt_config  # noqa: E402
from oec.common import read_json  # noqa: E402
from oec.data import Windows, evenly_spaced, unigram  # noqa: E402
from oec.run_folder import load_checkpoint  # noqa: E402

SETTINGS = ['method', 'weight_tying', 'cap', 'lr', 'seed', 'steps', 'n_layer', 'batch_size', 'block_size',
            'mu_shift', 'dtype', 'logits_dtype', 'commit']
OFTEN = 1000  # occurrences in the training text
POSITIONS = 16_384
STACK = ['n_layer', 'weight_tying', 'cap', 'lr', 'steps', 'mu_shift']


@functools.cache  # the runs share their data
def frequencies(folder, block_size, vocab_size):
    """How often each token occurs in the training text: shares (V,) and counts (V,)."""
    windows = Windows(folder, 'train', block_size, vocab_size)
    f = unigram(windows, torch.empty(0))
    return f, f * len(windows) * block_size


def of_rows(name, rows):
    """Some rows (n, H) of E: the norm of their mean, and |mean|^2 / mean |row|^2."""
    mean = rows.mean(dim=0)
    return {f'{name}_norm': mean.norm().item(),
            f'{name}_share': (mean.square().sum() / rows.square().sum(dim=1).mean()).item()}


@torch.no_grad()
def row_of(folder):
    """A finished run -> its row. logit_absmax and logit_max are the log's last, other logits uncapped."""
    run = {**read_json(folder / 'config.json'), **read_json(folder / 'result.json')}
    gpt = GPT(gpt_config(run))
    gpt.load_state_dict(load_checkpoint(folder / 'model.pt')['model'])
    E = gpt.E
    f, numbers = frequencies(run['data'], run['block_size'], run['vocab_size'])
    windows = Windows(run['data'], 'val', run['block_size'], run['vocab_size'])
    batch = torch.from_numpy(windows[evenly_spaced(POSITIONS // run['block_size'], len(windows))])
    gpt.config.dtype = 'float32'
    h = torch.cat([gpt.hidden(tokens[None, :-1]).flatten(0, 1) for tokens in batch])
    log = pd.read_json(folder / 'log.jsonl', lines=True).dropna(subset='loss')
    never, often = E[numbers < 0.5], E[numbers >= OFTEN - 0.5]
    return {**{name: run[name] for name in SETTINGS}, 'test_loss': run['test_loss'],
            'mu_norm': E.mean(dim=0).norm().item(), 'zipf_norm': (f @ E).norm().item(),
            'logit_mean': (h @ E.mean(dim=0)).mean().item(), 'zipf_logit_mean': (h @ (f @ E)).mean().item(),
            'logit_absmax': log.logit_absmax.iloc[-1], 'logit_max': log.logit_max.iloc[-1],
            'never': len(never), 'often': len(often), **of_rows('never', never), **of_rows('often', often),
            'cosine': torch.cosine_similarity(never.mean(dim=0), often.mean(dim=0), dim=0).item()}


def over_seeds(runs, column, digits=3):
    """A row for each stack, a column for each method: of one run, or mean [lowest, highest] over seeds."""
    runs = runs.assign(value=runs[column].fillna(math.inf))  # a run that diverged
    seeds = runs.groupby([*STACK, 'method'], dropna=False, sort=False).value
    number = f'{{:.{digits}f}}'.format
    spread = seeds.min().map(number).str.cat(seeds.max().map(number), ', ')
    cells = seeds.mean().map(number)
    return cells.where(seeds.count() == 1, cells + ' [' + spread + ']').unstack(sort=False).fillna('')


def draw(runs):
    """Test loss above the baseline of the same stack and seed, a dot for each run without a planted shift."""
    baseline = runs[runs.method == 'baseline'].set_index([*STACK, 'seed']).test_loss
    keys = pd.MultiIndex.from_frame(runs[[*STACK, 'seed']])
    runs = runs.assign(excess=runs.test_loss - baseline.reindex(keys).to_numpy(),
                       label=[stack_name(run) for run in runs.itertuples()])
    runs = runs[runs.mu_shift == 0]
    figure, ax = plt.subplots(figsize=(7, 4.2), layout='constrained')
    labels = list(runs.label.unique())
    methods = [method for method in NAMES if method in set(runs.method)]
    for i, method in enumerate(methods):
        rows = runs[runs.method == method]
        ax.plot(rows.excess, [labels.index(label) + 0.2 * (i - 1) for label in rows.label], 'o', markersize=5,
                color=COLORS[method], label=NAMES[method])
    ax.axvline(0, color=COLORS['baseline'], linewidth=1, label='baseline')
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel('test loss - baseline of the same seed, nats')
    ax.legend()
    figure.savefig(HERE / 'figure.png', dpi=160)


def stack_name(run):
    """What a stack is called on the axis."""
    name = 'tied' if run.weight_tying else 'untied'
    if run.cap > 0:
        name += f', cap {run.cap:g}'
    return f'{name}, η = {run.lr:g}, {run.steps:,} steps'


if __name__ == '__main__':
    if len(sys.argv) > 1:
        folders = sorted(path.parent for path in Path(sys.argv[1]).glob('**/result.json'))
        spawn = multiprocessing.get_context('spawn')
        with spawn.Pool(initializer=torch.set_num_threads, initargs=[1]) as pool:
            runs = pd.DataFrame(pool.map(row_of, folders))
        by = [*STACK, 'method', 'seed']
        order = {method: i for i, method in enumerate(['baseline', *NAMES])}
        runs = runs.sort_values(by, na_position='first',
                                key=lambda x: x.map(order) if x.name == 'method' else x)
        runs.to_csv(HERE / 'results.csv', index=False, float_format='%.6g')
    runs = pd.read_csv(HERE / 'results.csv')
    for column, digits in (('test_loss', 3), ('mu_norm', 2), ('zipf_norm', 2), ('logit_absmax', 1),
                           ('logit_max', 1), ('logit_mean', 2), ('zipf_logit_mean', 2), ('never_norm', 2),
                           ('often_norm', 2), ('often_share', 2), ('cosine', 2)):
        print(column, over_seeds(runs, column, digits).to_string(), '', sep='\n')
    draw(runs)
