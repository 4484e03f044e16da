"""
A model -> the paper's quantities (Section 3), from its output embeddings E (V, H), their mean mu (H,), the
final hidden states h (N, H) of N positions and the tokens (N,) that follow them.
"""
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from model import GPT, gpt_config, join_stats, logits_to_loss, operands, product_dtype, round_off
from oec.common import UserError, read_json, write_json
from oec.data import Windows
from oec.head import n_chunks
from oec.run_folder import load_checkpoint

VERSION = 1  # of the statistics that a run keeps. A change that makes older ones wrong raises it.
POSITIONS = 131_072  # the statistics are taken over that many of a run's test tokens, or all if fewer
SUMMARY = ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
TINY = torch.finfo(torch.float32).tiny  # so that nothing is divided by 0


def positions(model, windows):
    """Yields h (n, H) and targets (n,) of the positions of `windows` (N, T + 1), some of them at a time."""
    for window in windows.split(max(1, 16384 // model.config.block_size)):
        window = window.to(model.E.device)
        yield model.hidden(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()


def of_the_logits(h, E, targets, config):
    """
    Of the logits as config rounds and caps them, from what `operands` returns, each (n,): loss, logit_mean,
    logit_std, logit_absmax, and gradient_sum, the sum of their gradient as it is rounded.
    """
    logits = h.to(product_dtype(config)) @ E.to(product_dtype(config)).T
    logits = round_off(logits, 'logits', config)
    gradient, (_, found) = torch.func.grad_and_value(logits_to_loss, has_aux=True)(logits, targets, config)
    gradient = round_off(gradient, 'gradient', config).to(h.dtype)
    del found['reg']
    return {**found, 'gradient_sum': gradient.sum(dim=-1, dtype=torch.float64)}


def of_centering(h, E, mu, norm, norm_star):
    """
    Exact logits l_i = e_i . h (n, V), and what centering does, each (n,): cos_mu_h, r_log = max |l*| / max
    |l| (Eq. 11) and r_cos, the same of the cosines. `norm` and `norm_star` (V,) are those of e_i and e*_i.
    """
    logits, mu_h = h @ E.T, h @ mu
    star = logits - mu_h[:, None]
    largest_cos = (logits.abs() / norm.clamp_min(TINY)).amax(dim=1).clamp_min(TINY)  # times |h|
    largest_cos_star = (star.abs() / norm_star.clamp_min(TINY)).amax(dim=1)
    return logits, {
        'r_cos': largest_cos_star / largest_cos,
        'r_log': star.abs().amax(dim=1) / logits.abs().amax(dim=1).clamp_min(TINY),
        'cos_mu_h': mu_h / (h.norm(dim=1).clamp_min(TINY) * mu.norm().clamp_min(TINY))}


@torch.no_grad()
def statistics(batches, E, config, mu=None):
    """
    A dict name -> values of each position of `batches`, which yields h (n, H) and targets (n,), never holding
    positions x V: those of the two functions above, rounding_loss (the loss minus that of exact logits),
    fact_3_premise (the premise of Fact 3 holds) and fact_3 (it does not, or the conclusion holds as well).
    And of each token r_emb = |e*_i| / |e_i|.
    """
    exact, E_32 = replace(config, dtype='float32', logits_dtype='float32'), E.float()
    mu = E_32.mean(dim=0) if mu is None else mu
    norm = E_32.norm(dim=1)
    norm_star = torch.cat([(rows - mu).norm(dim=1) for rows in E_32.split(2**16)])
    r_emb = norm_star / norm.clamp_min(TINY)
    values = {}
    for h, targets in batches:
        h_op, E_op = operands(h, E, config)
        # smaller chunks than in training, since a dozen tensors of n x V are held here and two there
        n = min(4 * n_chunks(h, E, exact), -(-len(h) // 64))
        for h_c, h_op_c, targets_c in zip(h.float().chunk(n), h_op.chunk(n), targets.chunk(n), strict=True):
            found = of_the_logits(h_op_c, E_op, targets_c, config)
            logits, more = of_centering(h_c, E_32, mu, norm, norm_star)
            exact_loss = logits_to_loss(logits, targets_c, exact, with_stats=False)[1]['loss']
            found = {**found, **more, 'rounding_loss': found['loss'].double() - exact_loss.double()}
            values = join_stats([values, found])  # a list of them would split a CPU's heap, as in head.py
        del E_op, h_op  # before the next batch takes as much again
    values = {name: kept.cpu() for name, kept in values.items()}
    premise = (values['r_cos'] < 1) & bool((r_emb < 1).all())
    return {**values, 'r_emb': r_emb.cpu(), 'fact_3_premise': premise.float(),
            'fact_3': (~premise | (values['r_log'] < 1)).float()}


def summary(values):
    """A tensor's mean, extrema, quartiles and shares (the keys of SUMMARY), NaN if a value is not finite."""
    v = values.double()
    if not bool(torch.isfinite(v).all()):
        return dict.fromkeys(SUMMARY, math.nan)
    quartiles = v.sort().values[((len(v) - 1) * torch.linspace(0, 1, 5, dtype=torch.float64)).round().long()]
    shares = (v < 1).double().mean(), (v > 0).double().mean()
    return dict(zip(SUMMARY, [v.mean().item(), *quartiles.tolist(), *map(float, shares)], strict=True))


def of_model(gpt, windows):
    """What results.csv and distributions.csv keep of a model: a dict name -> number, or its summary."""
    with torch.no_grad():
        values = statistics(positions(gpt, windows), gpt.E, gpt.config)
    found = {name: summary(v) for name, v in values.items()}
    return {**found, 'rounding_loss': found['rounding_loss']['mean'],
            'gradient_sum': found['gradient_sum']['mean'],
            'logit_mean_spread': values['logit_mean'].double().std(correction=0).item(),
            'logit_max': values['logit_absmax'].max().item(),
            'mu_norm': gpt.E.detach().mean(dim=0).norm().item()}


def kept(folder):
    """What of_run has kept in a run's analysis.json, or None if it is of another VERSION or model.pt."""
    path = Path(folder, 'model.pt')
    try:
        found = read_json(Path(folder, 'analysis.json'))
        size = path.stat().st_size if path.exists() else found['bytes']
        return found['statistics'] if (found['version'], found['bytes']) == (VERSION, size) else None
    except (UserError, KeyError):
        return None


def of_run(folder):
    """What of_model says of a finished run's first POSITIONS, kept in analysis.json where that works."""
    path, found = Path(folder, 'model.pt'), kept(folder)
    if found:
        return found
    checkpoint = load_checkpoint(path)
    try:
        settings = checkpoint['config']
        gpt = GPT(gpt_config(settings)).to(getattr(torch, settings['dtype'].replace('bfloat16', 'float32')))
        gpt.load_state_dict(checkpoint['model'])
        where = settings['data'], 'val', settings['block_size'], settings['vocab_size']
    except Exception as error:  # of any kind, since the file may hold anything
        raise UserError(f'{path}: not a model of this project ({str(error)[:150]})') from error
    if not Path(where[0]).exists():  # its --data may have been relative to the repository
        where = Path(__file__).parents[1] / where[0], *where[1:]
    windows = Windows(*where)
    n = min(max(1, min(POSITIONS, settings['test_tokens']) // windows.block_size), len(windows))
    gpt.to('cuda' if torch.cuda.is_available() else 'cpu')
    found = of_model(gpt, torch.from_numpy(windows[np.arange(n)]))
    try:
        write_json(Path(folder, 'analysis.json'),
                   {'version': VERSION, 'bytes': path.stat().st_size, 'statistics': found})
    except UserError as error:  # the folder may be someone else's
        print(f'{error}; its statistics are not kept')
    return found
