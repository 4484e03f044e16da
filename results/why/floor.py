"""
The floor: the least loss of logits whose rounding errors are uniform and independent, into floor.csv.

    python -m results.why.floor laptop-1=MODEL.pt
    python -m results.why.floor gpt2^3.6=MODEL.pt     # with p^b / sum p^b of a mean entropy of 3.6 nats
    python -m results.why.floor laptop-0.003*2=MODEL.pt     # errors of rounding at random

The truth is p, the conditional distribution of a model with exact logits, at 256 test positions. If each
logit l_i gets an error n_i, uniform in a range of width s, no l has a lower loss than

    floor = min over l of  E[log sum_i exp(l_i + n_i)] - sum_i p_i l_i - H(p),

which gradient descent finds for each position. Rounding at random has errors like the sum of two such.
`own` is what the logits log p themselves lose in this way, and `differ` is 1 - sum_i p_i^2, the probability
that two tokens drawn from p differ. All are means over the positions.

In floor.csv laptop-0.003 is out/why/no_drift-s1, laptop-1 is out/why/fp32_logits-s1, both of arms.py, and
gpt2 is the model_300.pt of

    python train.py --size=tiny --steps=1000 --batch_size=4 --block_size=128 --device=cpu --data=data/gpt2 \
        --keep_every=300
"""
import math
import sys
from pathlib import Path

import pandas as pd
import torch

import train
from model import GPT, gpt_config
from results.mean_logit.mean_logit import cost_of_spacing

HERE = Path(__file__).parent
SPACINGS = (0.5, 1, 2, 4, 8, 16)
POSITIONS = 256
SINGLE = 128  # tokens of a position, its likeliest, whose errors are drawn; those of the rest average out
GROUP = 1024  # tokens of the rest, neighbours in probability, that share one logit


@torch.no_grad()
def distributions(path):
    """A .pt file of a run -> log p (POSITIONS, V) of one position of each of so many test windows, sorted."""
    saved = train.read_checkpoint(path)
    config = {**saved['config'], 'logits_dtype': 'float32'}
    gpt = GPT(gpt_config(config))
    gpt.load_state_dict(saved['model'])

    windows = train.Windows(config['data'], 'val', config['block_size'])
    ids = windows.evenly_spaced(POSITIONS * config['block_size'])
    tokens = torch.from_numpy(windows[ids])[:, :-1]
    torch.manual_seed(1)
    position = torch.randint(config['block_size'], (len(ids),))
    h = gpt.hidden(tokens)[torch.arange(len(ids)), position]
    return gpt.head(h).log_softmax(dim=1).sort(dim=1, descending=True).values


def group(log_p):
    """Sorted log p (N, V) -> log p (N, K) of one token of each group, and the groups' sizes (K,)."""
    single = log_p[:, :SINGLE]
    rest = [log_p[:, i:i + GROUP] for i in range(SINGLE, log_p.size(1), GROUP)]
    sizes = [1] * single.size(1) + [part.size(1) for part in rest]
    means = [part.logsumexp(dim=1, keepdim=True) - math.log(part.size(1)) for part in rest]
    return torch.cat([single, *means], dim=1), torch.tensor(sizes)


def entropy(log_p, sizes):
    return -(sizes * log_p.exp() * log_p).sum(dim=1)


def rescale(log_p, sizes, target):
    """p^b / sum p^b with the one b that gives the target as the mean entropy."""
    low, high = 0.1, 10.0
    for _ in range(30):
        b = (low + high) / 2
        scaled = b * log_p - (b * log_p + sizes.log()).logsumexp(dim=1, keepdim=True)
        if entropy(scaled, sizes).mean() > target:
            low = b
        else:
            high = b
    return scaled


def floor(log_p, sizes, s, n_uniform, steps=150):
    """
    log p (N, K), sizes (K,) -> the floor and the own cost of each position, (N,) each, of errors that are
    a sum of n_uniform uniform ones.
    """
    generator = torch.Generator().manual_seed(2)
    p = sizes * log_p.exp()
    H = entropy(log_p, sizes)

    def loss(logits, draws):
        uniform = torch.rand((n_uniform, draws, *logits.shape), generator=generator) - 0.5
        n = s * uniform.sum(dim=0)
        drawn = sizes == 1
        of_groups = n_uniform * cost_of_spacing(s)
        log_z = (logits + sizes.log() + torch.where(drawn, n, of_groups)).logsumexp(dim=2)
        target = (p * (logits + torch.where(drawn, n, 0.0))).sum(dim=2)  # its mean is that of sum_i p_i l_i
        return (log_z - target).mean(dim=0) - H

    logits = log_p.clamp_min(-30).clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = 0.1 * (1 - step / steps) + 1e-3
        optimizer.zero_grad()
        loss(logits, 4).sum().backward()
        optimizer.step()

    with torch.no_grad():
        return loss(logits, 32), loss(log_p, 32)


def main(words):
    for word in words:
        name, path = word.split('=')
        log_p, sizes = group(distributions(path))
        if '^' in name:
            log_p = rescale(log_p, sizes, float(name.split('^')[1]))
        H = entropy(log_p, sizes)
        differ = 1 - (sizes * (2 * log_p).exp()).sum(dim=1)
        n_uniform = 2 if name.endswith('*2') else 1
        for s in SPACINGS:
            floors, own = floor(log_p, sizes, s, n_uniform)
            row = {'model': name, 'entropy': H.mean().item(), 'entropy_std': H.std().item(),
                   'differ': differ.mean().item(), 's': s, 'c': n_uniform * cost_of_spacing(s),
                   'floor': min(floors.mean(), own.mean()).item(), 'own': own.mean().item(),
                   'floor_error': floors.std().item() / len(floors) ** 0.5}
            rows = pd.DataFrame([row])
            if (HERE / 'floor.csv').exists():
                rows = pd.concat([pd.read_csv(HERE / 'floor.csv'), rows])
                rows = rows.drop_duplicates(['model', 's'], keep='last')
            rows.to_csv(HERE / 'floor.csv', index=False, float_format='%.5g')
            print(row, flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
