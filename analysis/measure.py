"""
A model -> the quantities of Section 3 of the paper, from its output embeddings E (V, H), their mean mu (H,),
and the final hidden states h (N, H) at N test positions, whose next tokens are the targets (N,).
"""
import math
from pathlib import Path

import numpy as np
import torch

from model import GPT, gpt_config, head_loss, join_stats
from oec.common import read_json, write_json
from oec.data import Windows, evenly_spaced
from oec.run_folder import load_checkpoint

POSITIONS = 131_072           # how many test positions of a run are measured, or all if it has fewer
KEPT = 'statistics_v2.json'   # what a run's folder keeps; a new name if what is measured changes
SUMMARY = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


def norm_ratios(E):
    """r_emb = |e*_i| / |e_i| of each token, (V,)."""
    return (E - E.mean(dim=0)).norm(dim=1) / E.norm(dim=1).clamp_min(TINY)


def mean_share(E):
    """V |mu|^2 / |E|_F^2, the mean's share of the squared norm of E (V, H): a scalar from 0 to 1."""
    return len(E) * E.mean(dim=0).square().sum() / E.square().sum()


def centering_ratios(h, E):
    """
    What centering would do to the exact logits l_i = e_i . h, each (N,): r_log = max |l*_i| / max |l_i| (Eq.
    11), r_cos, the same of the cosines with h, and cos(mu, h).
    """
    mu = E.mean(dim=0)
    logits, mu_h = h @ E.T, h @ mu
    star = logits - mu_h[:, None]  # l*_i = (e_i - mu) . h
    cos = logits.abs() / E.norm(dim=1).clamp_min(TINY)  # times |h|, which cancels
    cos_star = star.abs() / (E - mu).norm(dim=1).clamp_min(TINY)
    return {'r_log': star.abs().amax(dim=1) / logits.abs().amax(dim=1).clamp_min(TINY),
            'r_cos': cos_star.amax(dim=1) / cos.amax(dim=1).clamp_min(TINY),
            'cos_mu_h': mu_h / (h.norm(dim=1) * mu.norm()).clamp_min(TINY)}


@torch.no_grad()
def statistics(h, E, targets, config):
    """
    A dict name -> values of each position (N,): the loss and the statistics of the logits as the model rounds
    and caps them, and the ratios of the exact logits. N x V logits are never held.
    """
    n = max(1, 2**24 // len(E))
    parts = []
    for h_n, targets_n in zip(h.split(n), targets.split(n), strict=True):
        _, found = head_loss(h_n, E, targets_n, config)
        del found['reg']
        parts.append({**found, **centering_ratios(h_n.float(), E.float())})
    return {name: values.cpu() for name, values in join_stats(parts).items()}


def summary(values):
    """Values (n,) -> a dict of SUMMARY, all of it NaN if a value is not finite."""
    x = values.double().numpy()
    if not np.isfinite(x).all():
        return dict.fromkeys(SUMMARY, math.nan)
    quartiles = np.quantile(x, [0, 0.25, 0.5, 0.75, 1], method='nearest')
    numbers = [x.mean(), *quartiles, (x < 1).mean(), (x > 0).mean()]
    return dict(zip(SUMMARY, map(float, numbers), strict=True))


@torch.no_grad()
def of_model(gpt, windows):
    """
    A GPT and test windows (n, T + 1) int64 -> {'numbers': a dict of what results.csv keeps,
    'distributions': a dict quantity -> summary of what distributions.csv keeps}.
    """
    parts = []
    for batch in windows.to(gpt.E.device).split(max(1, 16384 // gpt.config.block_size)):
        h = gpt.hidden(batch[:, :-1]).flatten(0, 1)
        parts.append(statistics(h, gpt.E, batch[:, 1:].flatten(), gpt.config))
    values = join_stats(parts)
    values['r_emb'] = norm_ratios(gpt.E).cpu()
    distributions = {name: summary(x) for name, x in values.items()}

    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token.
    r_log = values['r_log'][values['r_cos'] < 1]
    return {'distributions': distributions, 'numbers': {
        **{name: found['mean'] for name, found in distributions.items()},
        'logit_mean_spread': values['logit_mean'].double().std(correction=0).item(),
        'logit_max': values['logit_absmax'].max().item(),
        'mu_norm': gpt.E.mean(dim=0).norm().item(),
        'mean_share': mean_share(gpt.E).item(),
        'r_emb_below_1': distributions['r_emb']['below_1'],
        'r_cos_below_1': distributions['r_cos']['below_1'],
        'r_log_below_1_too': (r_log < 1).double().mean().item()}}  # NaN if no r_cos is below 1


def of_run(folder):
    """
    `of_model` of a finished run over some of its test windows. It is kept in the run's folder, and not taken
    again unless the model there is newer.
    """
    kept = Path(folder, KEPT)
    model = Path(folder, 'model.pt')
    if kept.exists() and not (model.exists() and model.stat().st_mtime > kept.stat().st_mtime):
        return read_json(kept)
    checkpoint = load_checkpoint(model)
    settings = checkpoint['config']
    gpt = GPT(gpt_config(settings))
    gpt.load_state_dict(checkpoint['model'])
    windows = Windows(settings['data'], 'val', settings['block_size'], settings['vocab_size'])
    n = min(min(POSITIONS, settings['test_tokens']) // settings['block_size'], len(windows))
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    found = of_model(gpt, torch.from_numpy(windows[evenly_spaced(n, len(windows))]))
    write_json(kept, found)
    return found
