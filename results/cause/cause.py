"""
Adam alone makes a mean logit grow; BF16 rounds the logits' gradient with a bias, which moves a planted mu.
`python -m results.cause.cause` writes csv files, README.md's numbers to the terminal, and figure.png. What
has a line in a csv is skipped.
"""
import json
import tempfile
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import model
import train

HERE = Path(__file__).parent
BF16, SEEDS = torch.bfloat16, (1, 2, 3)
CONSTANTS = ['1.00390625', '1', '1.0234375']  # times the loss: Adam does not see them, BF16 does
USUAL = ('--size=tiny --device=cpu --threads=1 --dtype=float32 --logits_dtype=bfloat16 --lr=1e-2 --steps=300 '
         '--batch_size=4 --block_size=128 --data=data/stdlib --log_every=10 --eval_every=0 --eval_tokens=512 '
         '--test_tokens=32768')
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


# -------- runs of train.py with a planted mu
@torch.no_grad()
def plant(norm, flags, path):
    """Saves a run's new model with one vector of this norm added to all e_i: a .pt for --init_from."""
    args = train.resolve_args(train.parser.parse_args(flags))
    gpt, _ = train.make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    vector = torch.randn(args.n_embd, generator=generator, dtype=torch.float64)
    gpt.E.add_((norm * vector / vector.norm()).float())
    config = {**vars(args), 'data_fingerprint': ''}
    train.save({'model': gpt.state_dict(), 'step': 0, 'config': config}, path)


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


def run(seed, flags, norm=331, rounding=None, c=1.0, of_bins=False):
    """
    A run with a planted vector, its loss times c, in a process of its own -> a line of runs.csv; of_bins:
    lines of bias.csv.
    """
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
    with tempfile.TemporaryDirectory() as folder:
        flags = f'{USUAL} {flags} --seed={seed}'.split()
        plant(norm, flags, f'{folder}/planted.pt')
        train.main([*flags, f'--init_from={folder}/planted.pt', f'--out={folder}/run'])
        log = pd.read_json(f'{folder}/run/log.jsonl', lines=True)
        config = json.loads(Path(f'{folder}/run/config.json').read_text())

    steps = log.dropna(subset='loss')
    if of_bins:
        return along(steps.loss, b)
    b = np.reshape(b, (config['steps'], -1)).sum(axis=1)  # of a step: its passes share N
    log_z = np.reshape(log_z, (config['steps'], -1)).mean(axis=1)
    return [{'test_loss': log.test_loss.iloc[-1], 'log_z': log_z[-1], 'b_first_30': b[:30].mean(),
             'b': b.mean(), **steps[['mu_norm', 'logit_mean_spread', 'logit_mean']].iloc[-1],
             'logit_mean_of_steps': ' '.join(f'{x:.4g}' for x in steps.logit_mean)}]


# -------- E alone, h given
def alone(seed, gradient, lr=0.3, steps=8000, cosine=False, V=512, H=32, shift=20.0, dtype=torch.float32):
    """
    Adam trains E (V, H) on targets that do not depend on h; target i has Zipf's frequency, 1 / (i + shift).
    h is random around a fixed mean, which has 0.3 of its mean square. gradient: exact, or a constant that
    multiplies the loss before the logits' gradient is rounded to BF16. Returns lines of alone.csv, at 1/8,
    1/4, 1/2 and all of the steps.
    """
    N, share = 1024, 0.3
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(H, generator=generator), dim=0) * (H * share) ** 0.5
    f = F.normalize(1 / (torch.arange(V) + shift), p=1, dim=0)
    E = (torch.randn(V, H, generator=generator) * (2 / (V + H)) ** 0.5).to(dtype)
    optimizer = torch.optim.Adam([E], betas=(0.9, 0.95), fused=True)
    c = 1.0 if gradient == 'exact' else float(gradient)

    b, lines = 0.0, []
    for step in range(1, steps + 1):
        h = (mean + (1 - share) ** 0.5 * torch.randn(N, H, generator=generator)).to(dtype)
        logits = h @ E.T
        g = logits.softmax(dim=1)
        g[torch.arange(N), torch.multinomial(f, N, replacement=True, generator=generator)] -= 1
        g *= c / N
        if gradient != 'exact':
            rounded = g.to(BF16).to(dtype)
            b += (rounded - g).sum().item() / c
            g = rounded

        E.grad = g.T @ h
        optimizer.param_groups[0]['lr'] = lr * 0.5 * (1 + np.cos(np.pi * step / steps)) if cosine else lr
        optimizer.step()
        if step in (steps // 8, steps // 4, steps // 2, steps):
            lines.append({'step': step, 'logit_mean': logits.mean().item(), 'b': b / step})
    return lines


# -------- all of it
THREE = ['BF16 | BF16', 'BF16 | BF16, b taken out', 'BF16 | BF16, b turned round']  # logits | their gradient
PLANTED = ['57', '187', '1000', '1000 --logits_dtype=float32', '57 --method=soft_capping',
           '187 --method=soft_capping', '331 --method=mu_centering', '331 --method=centered_head',
           *[f'331 --method=z_loss --lam={lam}' for lam in ('1e-7', '1e-6', '1e-5', '1e-4')],
           '331 --steps=1500 --min_lr=1e-2 --warmup=15 --log_every=20']  # at a constant rate
ALONE = {  # setting -> what differs from the defaults of alone
    'lr 0.01': {'lr': 0.01, 'steps': 4000},
    'lr 0.03': {'lr': 0.03, 'steps': 4000},
    'lr 0.1': {'lr': 0.1, 'steps': 4000},
    'lr 0.3': {},
    'lr 1': {'lr': 1.0, 'steps': 4000},
    'lr 0.3, cosine': {'steps': 2000, 'cosine': True},
    'lr 0.3, H = 128': {'steps': 2000, 'H': 128},
    'lr 0.3, V = 2,048, Zipf 2.7': {'steps': 2000, 'V': 2048, 'shift': 2.7},
    'lr 0.3, float64': {'steps': 4000, 'dtype': torch.float64}}
GRADIENTS = [*[(setting, 'exact') for setting in ALONE],
             ('lr 0.3', '1'), ('lr 0.03', '1'), *[('lr 0.3, cosine', c) for c in CONSTANTS]]
CASES = [  # csv file, table, case, function of the seed
    *[('alone', setting, gradient, partial(alone, gradient=gradient, **ALONE[setting]))
      for setting, gradient in GRADIENTS],
    *[('runs', 'rounding', case, partial(run, flags='', rounding=case.split(' | '))) for case in [
        *THREE, 'BF16 | at random', 'BF16 | fp32', 'fp32 | BF16', 'fp32 | BF16, b taken out', 'fp32 | fp32']],
    *[('runs', 'loss times', c, partial(run, flags='--grad_clip=0', c=float(c))) for c in CONSTANTS],
    *[('runs', 'tokens', f'{n}, lr {lr}', partial(run, flags=f'--block_size={n // 4} --lr={lr}'))
      for lr in (0.01, 0.003) for n in (416, 448, 480, 512, 640, 768)],
    ('runs', 'passes', '13 x 32', partial(run, flags='--batch_size=13 --block_size=32 --micro_batch_size=1')),
    ('bias', 'bias', 'bytes, planted | BF16 | fp32', partial(
        run, flags='--log_every=1 --warmup=50', rounding=('BF16', 'fp32'), of_bins=True)),
    *[('runs', 'V = 50,304', f'{n}', partial(run, flags=f'--block_size={n // 4} --data=data/stdlib_gpt2 '
       '--steps=200 --test_tokens=16384')) for n in (384, 448, 512)],
    *[('runs', 'planted', case, partial(run, norm=float(case.split()[0]), flags=' '.join(case.split()[1:])))
      for case in PLANTED],
    *[('bias', 'random', f'{deviation}', partial(of_random, deviation=deviation)) for deviation in (2, 3, 4)]]


def run_all():
    """All that has no line yet, in two processes of one thread, five digits each."""
    lines = [pd.read_csv(HERE / f'{name}.csv', dtype=str) for name in ('alone', 'runs', 'bias')
             if (HERE / f'{name}.csv').exists()]
    done = {key for x in lines for key in zip(x.table, x.case, x.seed, strict=True)}
    jobs = [(*case, seed) for case in CASES for seed in SEEDS if (*case[1:3], str(seed)) not in done]
    with Pool(2, torch.set_num_threads, [1], maxtasksperchild=1) as pool:
        results = [pool.apply_async(function, (seed,)) for *_, function, seed in jobs]
        for (name, table, case, _, seed), result in zip(jobs, results, strict=True):
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

    of_E, runs, bias = (pd.read_csv(HERE / f'{name}.csv') for name in ('alone', 'runs', 'bias'))
    bias['loss'] = pd.cut(bias.loss, BINS)
    print(of_E.pivot(index=['table', 'step'], columns=['case', 'seed'], values='logit_mean'))
    print(runs.pivot(index=['table', 'case'], columns='seed', values=['logit_mean', 'test_loss', 'log_z']))
    print(bias.pivot_table(['b', 'error', 'b_target'], ['case', 'n'], 'loss', observed=True))

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
