"""
What analyze.py does not measure of the runs of a table:

    python -m tools.runner <results/natural/cause/runs.txt
    python analyze.py out/natural/cause          # writes results/cause
    python -m results.natural.measure cause      # writes results/natural/cause

results.csv gets three columns more, and curves.csv fewer lines. Of runs that kept checkpoints,
last_norm.csv has what the last LayerNorm does.
"""
import sys
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

import train
from model import GPT, gpt_config
from results.natural.arms import token_frequencies

HERE = Path(__file__).parent


def load(path, n_tokens):
    """
    A .pt file -> its settings, its model and, of n_tokens test positions, the input and the output
    of the last LayerNorm, x (N, H) and h (N, H).
    """
    saved = train.read_checkpoint(path)
    settings = saved['config']
    gpt = GPT(gpt_config(settings))
    gpt.load_state_dict(saved['model'])
    windows = train.Windows(settings['data'], 'val', settings['block_size'])
    tokens = torch.from_numpy(windows[windows.evenly_spaced(n_tokens)])

    x = []
    gpt.norm_f.register_forward_pre_hook(lambda norm, inputs: x.append(inputs[0]))
    h = [gpt.hidden(part) for part in tokens[:, :-1].split(128)]
    return settings, gpt, torch.cat(x).flatten(0, 1), torch.cat(h).flatten(0, 1)


@torch.no_grad()
def measure_embeddings(path):
    """The mean's share of E, V |mu|^2 / |E|^2, and the mean logit, weighted by frequency."""
    settings, gpt, _, h = load(path, 131_072)
    E = gpt.E
    share = len(E) * E.mean(dim=0).square().sum() / E.square().sum()

    if settings['method'] == 'centered_head':
        E = E - E.mean(dim=0)
    frequencies = token_frequencies(settings['data'], len(E))
    logit_mean_f = h.mean(dim=0) @ (frequencies @ E)
    return {'mean_share': share.item(), 'logit_mean_f': logit_mean_f.item()}


@torch.no_grad()
def measure_last_norm(path):
    """
    Where the energy of the last LayerNorm's output lies before its gain, and what the gain makes
    of it. The four largest dimensions are numbered from 1 on. Gains are without sign, and their
    median is that of all but the three largest dimensions.
    """
    _, gpt, x, h = load(path, 8192)
    n = F.layer_norm(x, x.shape[1:])
    gain = gpt.norm_f.weight.abs() if gpt.config.final_gain else torch.ones(n.size(1))

    energy = n.square().mean(dim=0)
    share, order = (energy / energy.sum()).sort(descending=True)
    mu = gpt.E.mean(dim=0)
    numbers = {
        'x_norm': x.norm(dim=1).mean(),
        'h_norm': h.norm(dim=1).mean(),
        'mu_norm': mu.norm(),
        'logit_mean': h.mean(dim=0) @ mu,
        'cos_mu_h': F.cosine_similarity(h, mu[None]).mean(),
        'constant_share': n.mean(dim=0).square().sum() / energy.sum(),  # 1 if n is constant
        'gain_median': gain[order[3:]].median()}
    for i in range(4):
        numbers |= {f'share_{i + 1}': share[i], f'gain_{i + 1}': gain[order[i]]}
    return {name: value.item() for name, value in numbers.items()}


def main(table):
    results = pd.read_csv(f'results/{table}/results.csv')
    curves = pd.read_csv(f'results/{table}/curves.csv')
    results['largest_loss'] = results.run.map(curves.groupby('run').loss.max())
    measured = pd.DataFrame([measure_embeddings(f'{run}/model.pt') for run in results.run])
    results[['mean_share', 'logit_mean_f']] = measured

    last_norm = []
    for run in results.run:
        for path in Path(run).glob('model_*.pt'):
            step = int(path.stem.removeprefix('model_'))
            last_norm.append({'run': run, 'step': step, **measure_last_norm(path)})

    # some 100 lines of each log, and all val losses
    every = max(1, len(curves) // len(results) // 100)
    curves = curves[(curves.index % every == 0) | curves.val_loss.notna()]
    curves = curves[['step', 'val_loss', 'logit_mean', 'run']]

    tables = {'results': results, 'curves': curves, 'last_norm': pd.DataFrame(last_norm)}
    for name, rows in tables.items():
        if len(rows):
            rows = rows.assign(run=rows.run.str.split('/').str[-1])
            rows.to_csv(HERE / table / f'{name}.csv', index=False, float_format='%.6g')


if __name__ == '__main__':
    main(sys.argv[1])
