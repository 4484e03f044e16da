"""
What analyze.py does not measure of the runs of a table:

    python -m tools.runner <results/natural/cause/runs.txt
    python analyze.py out/natural/cause          # writes results/cause
    python -m results.natural.measure cause      # writes results/natural/cause

results.csv gets four columns more. Of runs that kept checkpoints, last_norm.csv has what the last
LayerNorm does. curves.csv has fewer lines.
"""
import sys
from pathlib import Path

import pandas as pd
import torch

import train
from model import GPT, gpt_config
from results.natural.arms import token_frequencies

HERE = Path(__file__).parent


@torch.no_grad()
def load(path, n_tokens):
    """A .pt file -> its model and, of n_tokens test positions, x (N, H) and h (N, H), the input
    and the output of the last LayerNorm."""
    saved = train.read_checkpoint(path)
    config = saved['config']
    gpt = GPT(gpt_config(config))
    gpt.load_state_dict(saved['model'])
    windows = train.Windows(config['data'], 'val', config['block_size'])
    tokens = torch.from_numpy(windows[windows.evenly_spaced(n_tokens)])

    inputs = []
    gpt.norm_f.register_forward_pre_hook(lambda norm, args: inputs.append(args[0]))
    h = [gpt.hidden(part) for part in tokens[:, :-1].split(128)]
    return gpt, torch.cat(inputs).flatten(0, 1), torch.cat(h).flatten(0, 1)


@torch.no_grad()
def measure_embeddings(path):
    """The mean's share of E, V |mu|^2 / |E|^2, and the mean logit, weighted by frequency."""
    gpt, _, h = load(path, 131_072)
    config = train.read_checkpoint(path)['config']
    E = gpt.E
    share = len(E) * E.mean(dim=0).square().sum() / E.square().sum()

    if config['method'] == 'centered_head':
        E = E - E.mean(dim=0)
    mean_e = token_frequencies(config['data'], len(E)) @ E
    return {'mean_share': share.item(), 'logit_mean_f': (h.mean(dim=0) @ mean_e).item(),
            'h_norm': h.norm(dim=1).mean().item()}


@torch.no_grad()
def measure_last_norm(path):
    """
    Where the energy of the last LayerNorm's output lies before its gain, and what the gain makes
    of it. The four largest dimensions are numbered from 1 on. Gains are without sign, and their
    median is that of all but the three largest dimensions.
    """
    gpt, x, h = load(path, 8192)
    n = torch.nn.functional.layer_norm(x, x.shape[1:])
    gain = gpt.norm_f.weight.abs() if gpt.config.final_gain else torch.ones(n.size(1))

    energy = n.square().mean(dim=0)
    share, order = (energy / energy.sum()).sort(descending=True)
    mu = gpt.E.mean(dim=0)
    numbers = {
        'x_norm': x.norm(dim=1).mean(),
        'h_norm': h.norm(dim=1).mean(),
        'mu_norm': mu.norm(),
        'logit_mean': h.mean(dim=0) @ mu,
        'cos_mu_h': torch.cosine_similarity(h, mu[None]).mean(),
        'gain_median': gain[order[3:]].median()}
    for i in range(4):
        numbers |= {f'share_{i + 1}': share[i], f'gain_{i + 1}': gain[order[i]]}
    return {name: value.item() for name, value in numbers.items()}


def main(table):
    results = pd.read_csv(f'results/{table}/results.csv')
    curves = pd.read_csv(f'results/{table}/curves.csv')
    results['largest_loss'] = results.run.map(curves.groupby('run').loss.max())
    more = pd.DataFrame([measure_embeddings(f'{run}/model.pt') for run in results.run])
    results[list(more)] = more

    last_norm = []
    for run in results.run:
        for path in Path(run).glob('model_*.pt'):
            step = int(path.stem.removeprefix('model_'))
            last_norm.append({'run': run, 'step': step, **measure_last_norm(path)})

    # some 100 lines of a log, and all val losses
    every = max(1, len(curves) // len(results) // 100)
    thin = curves[(curves.index % every == 0) | curves.val_loss.notna()]
    tables = {'results': results, 'curves': thin[['step', 'val_loss', 'logit_mean', 'run']],
              'last_norm': pd.DataFrame(last_norm)}
    for name, rows in tables.items():
        if len(rows):
            rows['run'] = rows.run.map(lambda run: Path(run).name)
            rows.to_csv(HERE / table / f'{name}.csv', index=False, float_format='%.6g')


if __name__ == '__main__':
    main(sys.argv[1])
