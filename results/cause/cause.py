"""
Why a mean logit grows: BF16 rounds the logits' gradient with a bias. Small models on a CPU -> the csv files
beside this one, README.md's numbers in the terminal, and figure.png. What has a line in a csv is skipped.

    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib
    python prepare_fineweb.py --source=stdlib --val_tokens=1e6 --out=data/stdlib_gpt2
    python results/cause/cause.py          # all but natural.csv
    python results/cause/cause.py natural  # natural.csv alone: hours, until it is stopped
"""
import sys
import tempfile
from itertools import pairwise, product
from multiprocessing import Pool
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import model  # noqa: E402
import train  # noqa: E402

BF16, SEEDS = torch.bfloat16, (1, 2, 3)
CONSTANTS = ['1.00390625', '1', '1.0234375']  # that a loss is multiplied by: Adam does not see it, BF16 does
ARMS = ['exact', *CONSTANTS]  # of creep and natural: a gradient in fp32, or in BF16 with the loss times this
USUAL = ('--size=tiny --device=cpu --threads=1 --dtype=float32 --logits_dtype=bfloat16 --lr=1e-2 --steps=300 '
         '--batch_size=4 --block_size=128 --mu_shift=331 --data=data/stdlib --log_every=10 --eval_every=0 '
         '--eval_tokens=512 --test_tokens=32768')
GPT2 = '--data=data/stdlib_gpt2 --steps=200 --test_tokens=16384'
THREE = ['BF16 | BF16', 'BF16 | BF16, b taken out', 'BF16 | BF16, b turned round']  # logits | their gradient
PLANTED = ['57', '187', '1000', '1000 --logits_dtype=float32',
           '57 --method=soft_capping', '187 --method=soft_capping', '331 --method=mu_centering',
           '331 --method=centered_head', '331 --method=z_loss --lam=1e-7', '331 --method=z_loss --lam=1e-6',
           '331 --method=z_loss --lam=1e-5', '331 --method=z_loss --lam=1e-4',
           '331 --steps=1500 --min_lr=1e-2 --warmup=15 --log_every=20']  # at a constant rate
CASES = [  # table, case, flags
    *[('rounding', case, '') for case in [*THREE, 'BF16 | at random', 'BF16 | fp32', 'fp32 | BF16',
                                          'fp32 | BF16, b taken out', 'fp32 | fp32']],
    *[('loss times', c, '--grad_clip=0') for c in CONSTANTS],
    *[('tokens', f'{n}, lr {lr}', f'--block_size={n // 4} --lr={lr}')
      for lr in (0.01, 0.003) for n in (416, 448, 480, 512, 640, 768)],
    ('bias', 'bytes | fp32 | fp32', '--mu_shift=0'), ('bias', 'bytes, planted | BF16 | fp32', ''),
    *[('V = 50,304', f'{n}', f'--block_size={n // 4} {GPT2}') for n in (384, 448, 512)],
    *[('planted', flags, f'--mu_shift={flags}') for flags in PLANTED], *[('creep', arm, '') for arm in ARMS],
    *[('random', scale, '') for scale in ('2', '3', '4')]]
BINS = (0, 2.6, 3.5, 4.5, 5.5, 7, 9, 12)  # of the losses along a run
# BF16 has the same digits at every power of two: N = m 2^k is as N = m, and the loss times c as N = 1 / c.
DIVISORS = {'2^k': 1, **{f'{m} x 2^k': m for m in (3, 5, 7, 13, 15)},
            **{f'loss x {c}': 1 / float(c) for c in CONSTANTS[::2]}}


# -------- the bias b = E[sum_i round(g_i / N) N], g = p - y, and runs of train.py that meet it
def bias_of(g):
    """For each divisor and position: the error of the sum of the rounded g (N, V), and the target's part."""
    target = g.argmin(dim=1, keepdim=True)  # g < 0 there alone
    for n in DIVISORS.values():
        error = (g / n).to(BF16).float() * n - g
        yield torch.stack((error.sum(dim=1), error.gather(1, target)[:, 0]))


class Head(torch.autograd.Function):
    """The baseline's head_logits; `logits` says how they are rounded, `gradient` how their gradient is."""

    @staticmethod
    def forward(ctx, h, E, logits, gradient):
        ctx.save_for_backward(h, E)
        ctx.gradient = gradient
        return h @ E.T if logits == 'fp32' else (h.to(BF16) @ E.to(BF16).T).float()

    @staticmethod
    def backward(ctx, g):
        h, E = ctx.saved_tensors
        if ctx.gradient == 'at random':  # up or down, so that the mean is right
            bits = g.contiguous().view(torch.int32)
            g = (bits + torch.randint_like(bits, 2 ** 16) & -2 ** 16).view(torch.float32)
        elif ctx.gradient != 'fp32':
            g = g.to(BF16).float()
        times = {'BF16, b taken out': 1, 'BF16, b turned round': 2}.get(ctx.gradient, 0)
        dh = g @ E - times * g.sum(dim=-1, keepdim=True) * E.mean(dim=0)
        return dh, g.flatten(0, 1).T @ h.flatten(0, 1), None, None


def run(table, case, flags, seed):
    """A run of train.py, in a process of its own -> its line of runs.csv, or lines of bias.csv."""
    head, forward, b, log_z = model.head_logits, model.GPT.forward, [], []

    def see(g):  # the logits' gradient (B, T, V) before it is rounded
        if table == 'bias':
            b.append(torch.stack([*bias_of(g.flatten(0, 1) * g[..., 0].numel())]))
        else:
            b.append((g.to(BF16).float() - g).sum().item())

    def seen_head(h, E, config):
        changed = table in ('rounding', 'bias')
        logits = Head.apply(h, E, *case.split(' | ')[-2:]) if changed else head(h, E, config)
        if logits.requires_grad:
            logits.register_hook(see)
            log_z.append(logits.detach().logsumexp(dim=-1).mean().item())
        return logits

    def times_c(*inputs, **named):
        objective, stats = forward(*inputs, **named)
        return float(case) * objective, stats

    model.head_logits, model.GPT.forward = seen_head, times_c if table == 'loss times' else forward
    flags += ' --log_every=1 --warmup=50' if table == 'bias' else ''
    with tempfile.TemporaryDirectory() as out:
        train.main(f'{USUAL} {flags} --seed={seed} --out={out}'.split())
        log = pd.read_json(f'{out}/log.jsonl', lines=True)
    steps = log.dropna(subset='loss')
    if table == 'bias':
        return list(along(steps.loss.to_numpy(), torch.stack(b)))
    return [{'test_loss': log.test_loss.iloc[-1], 'log_z': log_z[-1], 'b_first_30': np.mean(b[:30]),
             'b': np.mean(b), **steps[['mu_norm', 'logit_mean_spread', 'logit_mean']].iloc[-1].to_dict(),
             'logit_mean_of_steps': ' '.join(f'{x:.4g}' for x in steps.logit_mean)}]


def of_random(table, scale, flags, seed, V=50304, n=1000):
    """b of softmaxes of normal logits of a standard deviation, the targets drawn from them -> as run."""
    torch.manual_seed(seed)
    b, losses = [], []
    for _ in range(n // 50):
        g = (float(scale) * torch.randn(50, V)).softmax(dim=1)
        at = torch.arange(50), torch.multinomial(g, 1)[:, 0]
        losses.append(-g[at].log().mean().item())
        g[at] -= 1
        b.append(torch.stack([*bias_of(g)]))
    return list(along(np.full(len(b), np.mean(losses)), torch.stack(b)))


def along(losses, b):
    """The losses of steps and b (steps, divisors, 2, N) -> means over the steps between two losses."""
    for low, high in pairwise(BINS):
        some = (losses >= low) & (losses < high)
        for name, x in zip(DIVISORS, b[some].movedim(0, 2).flatten(2), strict=True) if some.any() else ():
            mean, error = x.mean(dim=1).tolist(), (x.std(dim=1) / x.size(1) ** 0.5).tolist()
            yield {'n': name, 'loss': losses[some].mean(), 'positions': x.size(1), 'b': mean[0],
                   'error': error[0], 'b_target': mean[1], 'error_target': error[1]}


# -------- E alone with h given, and a small model with nothing planted
def gradient(logits, targets, arm):
    """The logits' gradient, (p - y) / N times the arm's constant, and b: what rounding adds to its sum."""
    c = 1.0 if arm == 'exact' else float(arm)
    g = logits.softmax(dim=1)
    g[torch.arange(len(g)), targets] -= 1
    g *= c / len(g)
    rounded = g if arm == 'exact' else g.to(BF16).float()
    return rounded, (rounded - g).sum().item() / c


def creep(table, arm, flags, seed, V=512, H=32, N=1024, share=0.3, lr=0.3, steps=2000):
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
    return [{'logit_mean': logits.mean().item(), 'b': b,
             'predicted': -lr / 2 * steps * b * N ** 0.5 / f.sqrt().sum().item() * H * share}]


def natural(gain, V=256, H=32, N=16384, lr=0.3, every=50):
    """An MLP on two tokens, all classes alive, a constant rate: all arms of all seeds advance together."""
    tokens = np.fromfile('data/stdlib_gpt2/stdlib_train_000000.bin', '<u2', offset=1024)
    tokens = tokens[tokens != 220]  # the space before a space: indentation, a third of all
    rank = (-np.bincount(tokens, minlength=2 ** 16)).argsort(kind='stable').argsort()
    x = torch.from_numpy(rank[tokens] % V)  # a token's class: its rank by frequency, modulo V
    f, models = torch.bincount(x, minlength=V) / len(x), []
    for seed, arm in product(SEEDS, ARMS):
        torch.manual_seed(seed)
        wte = nn.Embedding(V, H)
        nn.init.normal_(wte.weight, std=H ** -0.5)
        trunk = nn.Sequential(wte, nn.Flatten(), nn.Linear(2 * H, 2 * H, bias=False), nn.SiLU(),
                              nn.Linear(2 * H, H, bias=False), nn.LayerNorm(H, 1e-5, gain, bias=False))
        E = torch.randn(V, H) * (2 / (V + H)) ** 0.5
        optimizer = torch.optim.Adam([*trunk.parameters(), E], betas=(0.9, 0.95), fused=True)
        models.append((seed, arm, trunk, E, optimizer, []))
    for step in range(1, 10 ** 6):
        rows = []
        for seed, arm, trunk, E, optimizer, b in models:
            i = torch.randint(2, len(x), (N,), generator=torch.Generator().manual_seed(1000003 * seed + step))
            out = trunk(torch.stack((x[i - 2], x[i - 1]), dim=1))
            h = out.detach()
            logits = h @ E.T  # in fp32: only their gradient is rounded
            g, b_step = gradient(logits, x[i], arm)
            b.append(b_step)
            optimizer.zero_grad()
            E.grad = g.T @ h
            out.backward(g @ E)
            if step % every == 0:
                norms, mean = h.square().sum(dim=1), logits.mean(dim=0)
                h_norm, share = norms.sqrt().mean(), h.mean(dim=0).square().sum() / norms.mean()
                predicted = -lr * sum(b) * N ** 0.5 / f.sqrt().sum() * h_norm * H ** 0.5 * share  # as creep
                numbers = F.cross_entropy(logits, x[i]), logits.logsumexp(dim=1).mean(), mean.mean(), mean @ f
                rows.append([gain, seed, arm, step, np.mean(b[-every:]),
                             *(x.item() for x in (*numbers, h_norm, share, predicted))])
            optimizer.param_groups[0]['lr'] = lr * min(1, step / 50)
            optimizer.step()
        names = 'gain seed arm step b loss log_z logit_mean logit_mean_f h_norm share predicted'
        append(pd.DataFrame(rows, columns=names.split()), 'natural')


# -------- all of it
def append(rows, name):
    """Adds rows to a csv file, five digits each."""
    path = HERE / f'{name}.csv'
    pd.DataFrame(rows).to_csv(path, mode='a', header=not path.exists(), index=False, float_format='%.5g')


def run_all():
    """All that has no line yet, in two processes of one thread."""
    lines = [pd.read_csv(path, dtype=str) for path in HERE.glob('[bcr]*.csv')]  # bias, creep, runs
    done = {key for x in lines for key in zip(x.table, x.case, x.seed, strict=True)}
    jobs = [(*case, seed) for case in CASES for seed in SEEDS if (*case[:2], str(seed)) not in done]
    work = {'creep': (creep, 'creep'), 'random': (of_random, 'bias'), 'bias': (run, 'bias')}
    with Pool(2, torch.set_num_threads, [1], maxtasksperchild=1) as pool:
        results = [pool.apply_async(work.get(job[0], (run, 'runs'))[0], job) for job in jobs]
        for (table, case, _, seed), rows in zip(jobs, results, strict=True):
            rows = [{'table': table, 'case': case, 'seed': seed, **row} for row in rows.get()]
            append(rows, work.get(table, (run, 'runs'))[1])


def report():
    """README.md's numbers in the terminal, format.csv and figure.png."""
    pd.set_option('display.width', 250, 'display.max_rows', 999, 'display.max_columns', 99)
    p = 2.0 ** (torch.arange(-14, 0)[:, None] + (torch.arange(100000, dtype=torch.float64) + 0.5) / 100000)
    parts = [x[0].view(p.shape).mean(dim=1).tolist() for x in bias_of(p.view(-1, 1) - 1)]  # by octaves of p_t
    by_format = pd.DataFrame(dict(zip(DIVISORS, parts, strict=True)), range(-14, 0))
    by_format.to_csv(HERE / 'format.csv', index_label='log2 p_t', float_format='%.3g')
    runs, bias, creeps = (pd.read_csv(HERE / f'{name}.csv') for name in ('runs', 'bias', 'creep'))
    bias['loss'] = pd.cut(bias.loss, BINS)
    print(runs.pivot(index=['table', 'case'], columns='seed', values=['logit_mean', 'test_loss', 'log_z']))
    print(bias.pivot_table(['b', 'error', 'b_target'], ['case', 'n'], 'loss', observed=True))
    print(creeps.pivot(index='seed', columns='case', values=['logit_mean', 'predicted', 'b']))
    if (HERE / 'natural.csv').exists():
        free = pd.read_csv(HERE / 'natural.csv').set_index(['gain', 'seed', 'step', 'arm'])
        print(free[['log_z', 'logit_mean_f', 'predicted', 'b']].unstack())

    figure, ax = plt.subplots(figsize=(7, 3.8), layout='constrained')
    for i, (case, name) in enumerate(zip(THREE, ('BF16', 'b taken out', 'b turned round'), strict=True)):
        lines = runs[runs.case == case].logit_mean_of_steps.str.split(expand=True).astype(float).T
        ax.plot([1, *range(10, 301, 10)], lines, f'C{i}', label=[name, None, None])
    ax.set(xlabel='step', ylabel='mean logit', title='a planted vector of norm 331, three seeds each')
    ax.legend(loc='center right')
    figure.savefig(HERE / 'figure.png', dpi=110)


if __name__ == '__main__':
    if sys.argv[1:] == ['natural'] and not (HERE / 'natural.csv').exists():
        with Pool(2, torch.set_num_threads, [1]) as pool:
            pool.map(natural, [True, False])
    run_all()
    report()
