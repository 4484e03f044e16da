"""
A model -> the quantities of Section 3 of the paper, from its output embeddings E (V, H), their mean mu (H,),
and the final hidden states h (N, H) at N test positions, whose next tokens are the targets (N,).
"""
import functools
import hashlib
import math
import os
from pathlib import Path

import torch

from model import GPT, chunked_head_loss, gpt_config, head_loss, join_stats, summarize
from oec import data
from oec.common import UserError, read_json, write_json
from oec.run_folder import load_checkpoint

POSITIONS = 131_072               # how many test positions of a run are measured, or all if it has fewer
CACHE_FILE = 'statistics_v3.json'  # kept in a run's folder; a new name if what is measured changes
SUMMARY = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
NOTHING = {'numbers': {}, 'distributions': {}}
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


def norm_ratios(E):
    """r_emb = |e*_i| / |e_i| of each token, (V,)."""
    return (E - E.mean(dim=0)).norm(dim=1) / E.norm(dim=1).clamp_min(TINY)


def of_embeddings(E):
    """What E (V, H) says without a text: |mu|, the mean's share V |mu|^2 / |E|_F^2 from 0 to 1, r_emb."""
    mu = E.mean(dim=0)
    numbers = {'mu_norm': mu.norm(), 'mean_share': len(E) * mu.square().sum() / E.square().sum(),
               'r_emb': norm_ratios(E).double().mean()}
    return {name: value.item() for name, value in numbers.items()}


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


@torch.no_grad()
def statistics(h, E, targets, config):
    """Name -> (N,), on the CPU: the statistics of head_loss, plus centering_ratios."""
    def head(h, E_rounded, targets, config, with_stats):
        total, stats = head_loss(h, E_rounded, targets, config, with_stats)
        return total, {**stats, **centering_ratios(h.float(), E.float())}

    _, stats = chunked_head_loss(h, E, targets, config, functions=(head, None))
    del stats['reg']
    return {name: values.cpu() for name, values in stats.items()}


def summary(values):
    """Values (n,) -> a dict of SUMMARY, all of it NaN if a value is not finite."""
    x = values.double()
    if not x.isfinite().all():
        return dict.fromkeys(SUMMARY, math.nan)
    quartiles = x.quantile(x.new_tensor([0, 0.25, 0.5, 0.75, 1]), interpolation='nearest')
    numbers = [x.mean(), *quartiles, (x < 1).double().mean(), (x > 0).double().mean()]
    return {name: number.item() for name, number in zip(SUMMARY, numbers, strict=True)}


@torch.no_grad()
def of_model(gpt, windows=None):
    """
    A GPT and test windows (n, T + 1) int64 -> {'numbers': a dict of what results.csv keeps, 'distributions':
    a dict quantity -> summary of what distributions.csv keeps}. Without windows, what E alone says.
    """
    E, config = gpt.E, gpt.config
    distributions = {'r_emb': summary(norm_ratios(E).cpu())}
    numbers = {**of_embeddings(E), 'r_emb_below_1': distributions['r_emb']['below_1']}
    measured = {'numbers': numbers, 'distributions': distributions}
    if windows is None:
        return measured

    parts = []
    for batch in windows.to(E.device).split(max(1, 16384 // config.block_size)):
        h = gpt.hidden(batch[:, :-1]).flatten(0, 1)
        parts.append(statistics(h, E, batch[:, 1:].flatten(), config))
    stats = {name: x.double() for name, x in join_stats(parts).items()}
    distributions |= {name: summary(x) for name, x in stats.items()}
    # Fact 3 says that r_log < 1 wherever r_cos < 1, if r_emb < 1 for every token
    r_log = stats['r_log'][stats['r_cos'] < 1]
    numbers |= {**summarize(stats, E), 'r_cos_below_1': distributions['r_cos']['below_1'],
                'r_log_below_1_too': (r_log < 1).double().mean().item()}  # NaN if no r_cos is below 1
    return measured


@functools.cache  # the runs of a sweep have the same data
def val_windows(folder, block_size, vocab_size, fingerprint):
    """The val windows of the data with this fingerprint, None if the folder does not hold them."""
    try:
        train, val = (data.Windows(folder, split, block_size, vocab_size) for split in ('train', 'val'))
    except UserError:
        return None
    return val if data.fingerprint(train.shards + val.shards) == fingerprint else None


def of_run(folder):
    """
    `of_model` of a finished run over some of its test windows -> that, and a line that says what of it is
    missing and why, or ''. Cached in the run's folder with the hash of model.pt.
    """
    cache, path = Path(folder, CACHE_FILE), Path(folder, 'model.pt')
    kept = read_json(cache, NOTHING)
    if kept['numbers'] and not path.exists():  # too large to be kept, perhaps
        return kept, ''
    try:
        model_hash = hashlib.sha256(path.read_bytes()).hexdigest()
        if kept.get('model') == model_hash:
            return kept, ''
        checkpoint = load_checkpoint(path)
    except (OSError, UserError):
        return NOTHING, 'no statistics: no model.pt that can be read'

    settings = read_json(Path(folder, 'config.json'))
    of_model_pt = {**checkpoint['config'], 'data': settings['data'], 'out': settings['out']}  # may be moved
    if {**settings, **of_model_pt} != settings:
        return NOTHING, 'no statistics: model.pt has other settings than config.json'
    gpt = GPT(gpt_config(settings))
    gpt.load_state_dict(checkpoint['model'])
    folder_of_data = os.path.abspath(settings['data'])
    windows = val_windows(folder_of_data, gpt.config.block_size, gpt.config.vocab_size,
                          settings.get('data_fingerprint'))
    if windows is None:
        return of_model(gpt), ('no statistics of hidden states and logits: '
                               f'{folder_of_data} does not hold the shards of the training')
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    n = min(min(POSITIONS, settings['test_tokens']) // settings['block_size'], len(windows))
    tokens = torch.from_numpy(windows[data.evenly_spaced(n, len(windows))])
    measured = {'model': model_hash, **of_model(gpt, tokens)}
    try:
        write_json(cache, measured)
    except UserError:
        return measured, 'statistics are not kept: the folder of the run cannot be written'
    return measured, ''
