"""
A model -> the quantities of Section 3 of the paper, from its output embeddings E (V, H), their mean mu (H,),
and the final hidden states h (N, H) at N test positions, whose next tokens are the targets (N,).
"""
import functools
import glob
import hashlib
import math
import os

import torch

from model import GPT, gpt_config, head_loss, summarize
from train import MAY_CHANGE, SHARD, Windows, fingerprint, read_json, save

POSITIONS = 131_072  # how many test positions of a run are measured, or all if it has fewer
KEPT = 'statistics_v4.json'  # in a run's folder; a new name if what is measured changes
SUMMARY = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
NOTHING = {'numbers': {}, 'distributions': {}}
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


def norm_ratios(E):
    """r_emb = |e*_i| / |e_i| of each token, (V,)."""
    return (E - E.mean(dim=0)).norm(dim=1) / E.norm(dim=1).clamp_min(TINY)


def of_embeddings(E):
    """What E (V, H) says without a text: |mu|, the mean's share V |mu|^2 / |E|_F^2 from 0 to 1, r_emb."""
    mu = E.mean(dim=0)
    share = len(E) * mu.square().sum() / E.square().sum()
    r_emb = norm_ratios(E).double().mean()
    return {'mu_norm': mu.norm().item(), 'mean_share': share.item(), 'r_emb': r_emb.item()}


def centering_ratios(h, E):
    """(N,) each, of exact, uncapped logits: r_log = max |l*_i| / max |l_i| (Eq. 11), r_cos, cos(mu, h)."""
    largest = functools.partial(torch.linalg.vector_norm, ord=math.inf, dim=1)  # max |x_i|, without a copy
    mu = E.mean(dim=0)
    logits, mu_h = h @ E.T, h @ mu
    star = logits - mu_h[:, None]  # l*_i = (e_i - mu) . h
    cos = logits / E.norm(dim=1).clamp_min(TINY)  # |h| cos(e_i, h); |h| cancels in the ratio
    cos_star = star / (E - mu).norm(dim=1).clamp_min(TINY)
    return {'r_log': largest(star) / largest(logits).clamp_min(TINY),
            'r_cos': largest(cos_star) / largest(cos).clamp_min(TINY),
            'cos_mu_h': mu_h / (h.norm(dim=1) * mu.norm()).clamp_min(TINY)}


def join(parts):
    """Concatenates the statistics (N,) of several pieces or windows, dicts, in float64 and on the CPU."""
    return {name: torch.cat([part[name].double().cpu() for part in parts]) for name in parts[0]}


@torch.no_grad()
def statistics(h, E, targets, config, ratios=True):
    """Name -> (N,): the statistics of head_loss and, unless without `ratios`, the centering_ratios."""
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB
    parts = []
    for h_n, targets_n in zip(h.split(n), targets.split(n), strict=True):
        _, stats = head_loss(h_n, E, targets_n, config)
        del stats['reg']
        parts.append({**stats, **(centering_ratios(h_n.float(), E.float()) if ratios else {})})
    return join(parts)


def summary(values):
    """Values (n,) -> a dict of SUMMARY, all of it NaN if a value is not finite."""
    x = values.double()
    if not x.isfinite().all():
        return dict.fromkeys(SUMMARY, math.nan)
    quartiles = x.quantile(x.new_tensor([0, 0.25, 0.5, 0.75, 1]), interpolation='nearest')
    numbers = [x.mean(), *quartiles, (x < 1).double().mean(), (x > 0).double().mean()]
    return {name: number.item() for name, number in zip(SUMMARY, numbers, strict=True)}


@torch.no_grad()
def of_model(gpt, windows):
    """A GPT and test windows (n, T + 1) int64 -> numbers for results.csv, and for distributions.csv."""
    E, config = gpt.E, gpt.config
    parts = []
    for batch in windows.to(E.device).split(max(1, 16384 // config.block_size)):
        h = gpt.hidden(batch[:, :-1]).flatten(0, 1)
        parts.append(statistics(h, E, batch[:, 1:].flatten(), config))
    stats = join(parts)
    distributions = {name: summary(x) for name, x in stats.items()} | {'r_emb': summary(norm_ratios(E).cpu())}
    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers = {**of_embeddings(E), **summarize(stats, E),
               'r_emb_below_1': distributions['r_emb']['below_1'],
               'r_cos_below_1': distributions['r_cos']['below_1'],
               'r_log_below_1_too': (r_log < 1).double().mean().item()}  # NaN if no r_cos is below 1
    return {'numbers': numbers, 'distributions': distributions}


@functools.cache  # the runs of a sweep have the same data
def val_windows(folder, block_size, vocab_size, data_fingerprint):
    """The val windows of the data with this fingerprint, None if the folder does not hold them."""
    if not all(glob.glob(f'{glob.escape(folder)}/{SHARD.format(split)}') for split in ('train', 'val')):
        return None
    train, val = (Windows(folder, split, block_size, vocab_size) for split in ('train', 'val'))
    return val if fingerprint(train.shards + val.shards) == data_fingerprint else None


def of_run(folder):
    """of_model of a finished run, kept in its folder for its model.pt -> that, and why there is none."""
    path = folder / 'model.pt'
    kept = read_json(folder / KEPT)
    if kept and not path.exists():  # too large to be kept, perhaps
        return kept, ''
    try:
        model_hash = hashlib.sha256(path.read_bytes()).hexdigest()
        if kept.get('model') == model_hash:
            return kept, ''
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        config = checkpoint['config']
        gpt = GPT(gpt_config(config))
        gpt.load_state_dict(checkpoint['model'])
    except Exception as error:  # of many kinds, for a file that is damaged
        return NOTHING, f'model.pt cannot be read ({type(error).__name__})'

    settings = read_json(folder / 'config.json')
    differ = [name for name in config.keys() - MAY_CHANGE if config[name] != settings.get(name)]
    if differ:
        return NOTHING, f'model.pt and config.json differ in {", ".join(sorted(differ))}'
    windows = val_windows(settings['data'], config['block_size'], config['vocab_size'],
                          config['data_fingerprint'])
    if windows is None:
        return NOTHING, f'{settings["data"]} does not hold the shards of the training'
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    tokens = torch.from_numpy(windows[windows.spread(min(POSITIONS, config['test_tokens']))])
    measured = {'model': model_hash, **of_model(gpt, tokens)}
    if os.access(folder, os.W_OK):  # runs may be kept where nobody may write
        save(measured, f'{folder}/{KEPT}')
    return measured, ''
