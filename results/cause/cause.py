"""
Why a mean logit grows: BF16 rounds the logits' gradient with a bias. `python -m results.cause.cause` writes
csv files, README.md's numbers to the terminal, and figure.png. What has a line in a csv is skipped.
"""
import tempfile
from multiprocessing import Pool
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import model
import train

HERE = Path(__file__).parent
BF16, SEEDS = torch.bfloat16, (1, 2, 3)
CONSTANTS = ['1.00390625', '1', '1.0234375']  # times the loss: Adam does not see them, BF16 does
ARMS = ['exact', *CONSTANTS]  # of creep and mlp: a gradient in fp32, or in BF16 with such a loss
USUAL = ('--size=tiny --device=cpu --threads=1 --dtype=float32 --logits_dtype=bfloat16 --lr=1e-2 --steps=300 '
         '--batch_size=4 --block_size=128 --mu_shift=331 --data=data/stdlib --log_every=10 --eval_every=0 '
         '--eval_tokens=512 --test_tokens=32768')
BINS = (0, 2.6, 3.5, 4.5, 5.5, 7, 9, 12)  # of the losses along a run
# BF16 has the same digits at every power of two: N = m 2^k is as N = m, the loss times c as N = 1 / c.
DIVISORS = {'2^k': 1, '3 x 2^k': 3, '5 x 2^k': 5, '7 x 2^k': 7, '13 x 2^k': 13, '15 x 2^k': 15,
            'loss x 1.00390625': 1 / 1.00390625, 'loss x 1.0234375': 1 / 1.0234375}


# -------- the bias b = E[sum_i round(g_i / N) N], g = p - y
def bias_of(g):
    """g (N, V) -> (divisors, 2, N): the error of the sum of the rounded g, and the target's part."""
    target = g.argmin(dim=1, keepdim=True)  # g < 0 there alone
    errors = [(g / n).to(BF16).float() * n - g for n in DIVISORS.values()]
    return torch.stack([torch.stack((e.sum(dim=1), e.gather(1, target)[:, 0])) for e in errors])


def along(losses, b):
    """The losses of steps, a list of their b -> lines of bias.csv: means over the steps of a bin."""
    losses, b, bins, lines = np.array(losses), torch.stack(b), np.digitize(losses, BINS), []
    for some in (bins == bin for bin in np.unique(bins)):
        for name, x in zip(DIVISORS, b[some].movedim(0, 2).flatten(2), strict=True):
            mean, error = x.mean(dim=1).tolist(), (x.std(dim=1) / x.size(1) ** 0.5).tolist()
            lines.append({'n': name, 'loss': losses[some].mean(), 'positions': x.size(1), 'b': mean[0],
                          'error': error[0], 'b_target': mean[1], 'error_target': error[1]})
    return lines


def of_random(seed, deviation, V=50304):
    """b of softmaxes of normal logits, with targets drawn from them."""
    torch.manual_seed(seed)
    b, losses = [], []
    for _ in range(20):
        g = (deviation * torch.randn(50, V)).softmax(dim=1)
        at = torch.arange(50), torch.multinomial(g, 1)[:, 0]
        losses.append(-g[at].log().mean().item())
        g[at] -= 1
        b.append(bias_of(g))
    return along([np.mean(losses)] * len(b), b)


# -------- runs of train.py that meet it
def rounded_head(h, E, values, gradient):
    """h E^T, whose values, and whose gradient on its way to h and E, are rounded as these say."""
    times = {'BF16, b taken out': 1, 'BF16, b turned round': 2}.get(gradient, 0)
    logits = h @ E.T - times * (h @ E.detach().mean(dim=0))[..., None]  # for the gradient's sake
    logits.data = (h.to(BF16) @ E.to(BF16).T).float() if values == 'BF16' else (h @ E.T).detach()

    def rounded(g):
        if gradient == 'at random':  # up or down, so that the mean is right
            bits = g.contiguous().view(torch.int32)
            return (bits + torch.randint_like(bits, 2 ** 16) & -2 ** 16).view(torch.float32)
        return g if gradient == 'fp32' else g.to(BF16).float()

    if logits.requires_grad:
        logits.register_hook(rounded)
    return logits.clone()  # its gradient is not rounded yet


def run(seed, flags, rounding=None, c=1.0, of_bins=False):
    """A run, its loss times c, in a process of its own -> a line of runs.csv; of_bins: lines of bias.csv."""
    head, forward, b, log_z = model.head_logits, model.GPT.forward, [], []

    def see(g):  # the logits' gradient (B, T, V) before it is rounded
        error = (g.to(BF16).float() - g).sum().item()
        b.append(bias_of(g.flatten(0, 1) * g[..., 0].numel()) if of_bins else error)

    def seen_head(h, E, config):
        logits = rounded_head(h, E, *rounding) if rounding else head(h, E, config)
        if logits.requires_grad:  # not in an evaluation
            logits.register_hook(see)
            log_z.append(logits.detach().logsumexp(dim=-1).mean().item())
        return logits

    def times_c(*inputs, **named):
        objective, stats = forward(*inputs, **named)
        return c * objective, stats

    model.head_logits, model.GPT.forward = seen_head, times_c
    with tempfile.TemporaryDirectory() as out:
        train.main(f'{USUAL} {flags} --seed={seed} --out={out}'.split())
        log = pd.read_json(f'{out}/log.jsonl', lines=True)
    steps = log.dropna(subset='loss')
    if of_bins:
        return along(steps.loss, b)
    return [{'test_loss': log.test_loss.iloc[-1], 'log_z': log_z[-1], 'b_first_30': np.mean(b[:30]),
             'b': np.mean(b), **steps[['mu_norm', 'logit_mean_spread', 'logit_mean']].iloc[-1],
             'logit_mean_of_steps': ' '.join(f'{x:.4g}' for x in steps.logit_mean)}]


# -------- E alone with h given, and a small model with nothing planted
def gradient(logits, targets, arm):
    """The logits' gradient, (p - y) / N times the arm's constant, and b: what rounding adds to its sum."""
    c = 1.0 if arm == 'exact' else float(arm)
    g = logits.softmax(dim=1)
    g[torch.arange(len(g)), targets] -= 1
    g *= c / len(g)
    rounded = g if arm == 'exact' else g.to(BF16).float()
    return rounded, (rounded - g).sum().item() / c


def creep(seed, arm, V=512, H=32, N=1024, share=0.3, lr=0.3, steps=2000):
    """E learns Zipf's frequencies from h that say nothing -> its mean logit, and what b should add to it."""
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(H, generator=generator), dim=0) * (H * share) ** 0.5
    f = F.normalize(1 / (torch.arange(V) + 20.0), p=1, dim=0)
    E, b = torch.randn(V, H, generator=generator) * (2 / (V + H)) ** 0.5, 0.0
    optimizer = torch.optim.Adam([E], betas=(0.9, 0.95), fused=True)
    for step in range(1, steps + 1):
        h = mean + (1 - share) ** 0.5 * torch.randn(N, H, generator=generator)
        logits = h @ E.T
        g, b_step = gradient(logits, torch.multinomial(f, N, replacement=True, generator=generator), arm)
        b += b_step / steps
        E.grad = g.T @ h
        optimizer.param_groups[0]['lr'] = lr / 2 * (1 + np.cos(np.pi * step / steps))
        optimizer.step()
    predicted = -lr / 2 * steps * b * N ** 0.5 / f.sqrt().sum().item() * H * share
    return [{'logit_mean': logits.mean().item(), 'b': b, 'predicted': predicted}]


def mlp(seed, arm, gain, V=256, H=32, N=16384, lr=0.3, steps=250):
    """An MLP on two tokens, all V classes alive, a constant rate -> lines of natural.csv, as it goes."""
    tokens = np.fromfile('data/stdlib_gpt2/stdlib_train_000000.bin', '<u2', offset=1024)
    tokens = tokens[tokens != 220]  # the space before a space: indentation, a third of all
    rank = (-np.bincount(tokens, minlength=2 ** 16)).argsort(kind='stable').argsort()
    x = torch.from_numpy(rank[tokens] % V)  # a token's class: its rank by frequency, modulo V
    f = torch.bincount(x, minlength=V) / len(x)
    torch.manual_seed(seed)
    wte = nn.Embedding(V, H)
    nn.init.normal_(wte.weight, std=H ** -0.5)
    trunk = nn.Sequential(wte, nn.Flatten(), nn.Linear(2 * H, 2 * H, bias=False), nn.SiLU(),
                          nn.Linear(2 * H, H, bias=False), nn.LayerNorm(H, 1e-5, gain, bias=False))
    E = nn.Parameter(torch.randn(V, H) * (2 / (V + H)) ** 0.5)
    optimizer = torch.optim.Adam([*trunk.parameters(), E], betas=(0.9, 0.95), fused=True)
    b, lines = [], []
    for step in range(1, steps + 1):
        i = torch.randint(2, len(x), (N,), generator=torch.Generator().manual_seed(1000003 * seed + step))
        h = trunk(torch.stack((x[i - 2], x[i - 1]), dim=1))
        logits = h @ E.T  # in fp32: only their gradient is rounded
        g, b_step = gradient(logits.detach(), x[i], arm)
        b.append(b_step)
        optimizer.zero_grad()
        logits.backward(g)
        if step % 50 == 0:
            norms = h.square().sum(dim=1)
            h_norm, share = norms.sqrt().mean(), h.mean(dim=0).square().sum() / norms.mean()
            predicted = -lr * sum(b) * N ** 0.5 / f.sqrt().sum() * h_norm * H ** 0.5 * share  # as creep
            numbers = {'log_z': logits.logsumexp(dim=1).mean(), 'logit_mean_f': logits.mean(dim=0) @ f,
                       'h_norm': h_norm, 'predicted': predicted}
            lines.append({'step': step, 'b': np.mean(b[-50:]), **{k: x.item() for k, x in numbers.items()}})
        optimizer.param_groups[0]['lr'] = lr * min(1, step / 50)
        optimizer.step()
    return lines


# -------- all of it
THREE = ['BF16 | BF16', 'BF16 | BF16, b taken out', 'BF16 | BF16, b turned round']  # logits | their gradient
PLANTED = ['57', '187', '1000', '1000 --logits_dtype=float32', '57 --method=soft_capping',
           '187 --method=soft_capping', '331 --method=mu_centering', '331 --method=centered_head',
           *[f'331 --method=z_loss --lam={lam}' for lam in ('1e-7', '1e-6', '1e-5', '1e-4')],
           '331 --steps=1500 --min_lr=1e-2 --warmup=15 --log_every=20']  # at a constant rate
CASES = [  # csv file, table, case, function, its arguments after the seed
    *[('runs', 'rounding', case, run, '', case.split(' | ')) for case in [
        *THREE, 'BF16 | at random', 'BF16 | fp32', 'fp32 | BF16', 'fp32 | BF16, b taken out', 'fp32 | fp32']],
    *[('runs', 'loss times', c, run, '--grad_clip=0', None, float(c)) for c in CONSTANTS],
    *[('runs', 'tokens', f'{n}, lr {lr}', run, f'--block_size={n // 4} --lr={lr}')
      for lr in (0.01, 0.003) for n in (416, 448, 480, 512, 640, 768)],
    *[('bias', 'bias', case, run, f'{flags} --log_every=1 --warmup=50', case.split(' | ')[1:], 1.0, True)
      for case, flags in (('bytes | fp32 | fp32', '--mu_shift=0'), ('bytes, planted | BF16 | fp32', ''))],
    *[('runs', 'V = 50,304', f'{n}', run, f'--block_size={n // 4} --data=data/stdlib_gpt2 --steps=200 '
       '--test_tokens=16384') for n in (384, 448, 512)],
    *[('runs', 'planted', flags, run, f'--mu_shift={flags}') for flags in PLANTED],
    *[('creep', 'creep', arm, creep, arm) for arm in ARMS],
    *[('bias', 'random', f'{deviation}', of_random, deviation) for deviation in (2, 3, 4)],
    *[('natural', table, arm, mlp, arm, gain) for arm in ARMS
      for table, gain in (('without a gain', False), ('with a gain', True))]]


def run_all():
    """All that has no line yet, in two processes of one thread, five digits each."""
    lines = [pd.read_csv(path, dtype=str) for path in HERE.glob('[bcnr]*.csv')]  # those that CASES names
    done = {key for x in lines for key in zip(x.table, x.case, x.seed, strict=True)}
    jobs = [(*case, seed) for case in CASES for seed in SEEDS if (*case[1:3], str(seed)) not in done]
    with Pool(2, torch.set_num_threads, [1], maxtasksperchild=1) as pool:
        results = [pool.apply_async(function, (seed, *given)) for _, _, _, function, *given, seed in jobs]
        for (name, table, case, *_, seed), result in zip(jobs, results, strict=True):
            path = HERE / f'{name}.csv'
            lines = pd.DataFrame([{'table': table, 'case': case, 'seed': seed, **x} for x in result.get()])
            lines.to_csv(path, mode='a', header=not path.exists(), index=False, float_format='%.5g')


def report():
    """README.md's numbers in the terminal, format.csv and figure.png."""
    pd.set_option('display.width', 250, 'display.max_rows', 999, 'display.max_columns', 99)
    p = 2.0 ** (torch.arange(-14, 0)[:, None] + (torch.arange(100000).double() + 0.5) / 100000)
    b = bias_of(p.view(-1, 1) - 1)[:, 0].view(len(DIVISORS), *p.shape).mean(dim=2)  # by octaves of p_t
    by_format = pd.DataFrame(b.T, range(-14, 0), [*DIVISORS])
    by_format.to_csv(HERE / 'format.csv', index_label='log2 p_t', float_format='%.3g')

    runs, bias, creeps, mlps = (pd.read_csv(HERE / f'{x}.csv') for x in ('runs', 'bias', 'creep', 'natural'))
    bias['loss'] = pd.cut(bias.loss, BINS)
    print(runs.pivot(index=['table', 'case'], columns='seed', values=['logit_mean', 'test_loss', 'log_z']))
    print(bias.pivot_table(['b', 'error', 'b_target'], ['case', 'n'], 'loss', observed=True))
    print(creeps.pivot(index='seed', columns='case', values=['logit_mean', 'predicted', 'b']))
    numbers = ['log_z', 'logit_mean_f', 'predicted', 'b']
    print(mlps.pivot(index=['table', 'seed', 'step'], columns='case', values=numbers))

    figure, ax = plt.subplots(figsize=(7, 3.8), layout='constrained')
    for i, case in enumerate(THREE):
        lines = runs[runs.case == case].logit_mean_of_steps.str.split(expand=True).astype(float).T
        name = case.removeprefix('BF16 | ').removeprefix('BF16, ')
        ax.plot([1, *range(10, 301, 10)], lines, f'C{i}', label=[name, None, None])
    ax.set(xlabel='step', ylabel='mean logit', title='a planted vector of norm 331, three seeds each')
    ax.legend(loc='center right')
    figure.savefig(HERE / 'figure.png', dpi=110)


if __name__ == '__main__':
    run_all()
    report()
