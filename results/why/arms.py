"""
Runs of the small model in which one thing about the rounding or the learning rates is changed: arms.csv.

    OMP_NUM_THREADS=1 python -m results.why.arms

It trains what has no row yet, one run at a time, in a minute or two each. A run is "train.py FLAGS" with
other logits, another trunk or other learning rates, as ARMS says.
"""
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

import model
import train
from results.natural.arms import momentum_step

HERE = Path(__file__).parent
CSV = HERE / 'arms.csv'
FLAGS = ('--size=laptop --no-final_gain --batch_size=4 --block_size=32 --steps=8000 --data=data/chars '
         '--device=cpu --dtype=float32 --log_every=100 --eval_every=0 --eval_tokens=16384 '
         '--test_tokens=131072')  # of sweep.sh's demo, but for the log
plain_head = model.head_logits
plain_model = train.make_model


def straight_through(logits, rounded):
    """The values of `rounded` with the gradient of `logits`."""
    return logits + (rounded - logits).detach()


# -------- the logits
def nearest(bits, mean=0.0):
    """Logits that are rounded to `bits` significant bits where their mean is larger by `mean`."""
    def head(h, E, config):
        logits = plain_head(h, E, config)
        x = logits.detach() + mean
        spacing = torch.exp2(x.abs().clamp_min(1e-30).log2().floor() + 1 - bits)
        return straight_through(logits, (x / spacing).round() * spacing - mean)
    return head


def stochastic(mean):
    """As nearest(8, mean), but up or down at random, so that a rounded logit is right on average."""
    def head(h, E, config):
        logits = plain_head(h, E, config)
        x = logits.detach() + mean
        spacing = torch.exp2(x.abs().clamp_min(1e-30).log2().floor() - 7)
        return straight_through(logits, (x / spacing + torch.rand_like(x)).floor() * spacing - mean)
    return head


def inputs_alone(h, E, config):
    """The product of BF16 h and E, which is not rounded itself, nor is its gradient."""
    rounded = h.detach().bfloat16().float() @ E.detach().bfloat16().float().T
    return straight_through(plain_head(h, E, config), rounded)


def planted(mean, dims):
    """
    Logits with the errors of a product whose inputs alone are rounded, if constants in `dims` dimensions
    of h and E made the mean logit larger by `mean`.
    """
    def head(h, E, config):
        constant = torch.zeros(h.shape[-1])
        constant[:dims] = (h.shape[-1] / dims) ** 0.5  # with the norm of h
        h_large = h.detach() + constant
        E_large = E.detach() + constant * mean / h.shape[-1]
        error = inputs_alone(h_large, E_large, config) - h_large @ E_large.T
        return plain_head(h, E, config) + error
    return head


# -------- learning rates and trunk
def scaled(of_E, of_trunk):
    """The learning rate times `of_E` for E and times `of_trunk` for all else."""
    def make_model(args):
        gpt, _ = plain_model(args)
        rest = [p for p in gpt.parameters() if p is not gpt.E]
        groups = [{'params': [gpt.E], 'lr_scale': of_E}, {'params': rest, 'lr_scale': of_trunk}]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                                      weight_decay=0.0, fused=True)
        return gpt, optimizer
    return make_model


def bounded_trunk(args):
    """Of one layer: the last norm's input is the sum of a normalised embedding, attention and MLP."""
    gpt, optimizer = plain_model(args)

    def normalise(module, inputs, output):
        return F.layer_norm(output, output.shape[-1:])
    gpt.wte.register_forward_hook(normalise)
    for block in gpt.blocks:
        block.attn.register_forward_hook(normalise)
        block.mlp.register_forward_hook(normalise)
    return gpt, optimizer


def sgd_on_E(times):
    """E by SGD with Adam's momentum, at `times` the learning rate; all else by AdamW."""
    def make_model(args):
        train.coupled_adam_step = partial(momentum_step, times=times)
        return plain_model(args)
    return make_model


# -------- the arms: flags, head and make_model
FP32 = '--lr=1 --logits_dtype=float32'
BF16 = '--lr=1 --logits_dtype=bfloat16'
STILL = '--lr=3e-3 --logits_dtype=float32 --method=mu_centering'  # nothing drifts
ARMS = {
    'no drift': (STILL, plain_head, plain_model),
    'fp32 logits': (FP32, plain_head, plain_model),
    'BF16 logits': (BF16, plain_head, plain_model),
    'inputs rounded alone': (FP32, inputs_alone, plain_model),
}
for mean in (100, 200, 400, 700, 1400, 2800):
    ARMS[f'no drift, rounded at {mean}'] = (STILL, nearest(8, mean), plain_model)
    ARMS[f'no drift, rounded at random at {mean}'] = (STILL, stochastic(mean), plain_model)
for dims in (96, 2):
    ARMS[f'no drift, inputs rounded at 1400 in {dims} dims'] = (STILL, planted(1400, dims), plain_model)
for bits in (7, 8, 9, 11):
    ARMS[f'{bits} bits'] = (FP32, nearest(bits), plain_model)
for dtype, flags in (('BF16', BF16), ('fp32', FP32)):
    ARMS[f'E at 1, trunk at 0.003, {dtype}'] = (flags, plain_head, scaled(1, 0.003))
    ARMS[f'E at 0.003, trunk at 1, {dtype}'] = (flags, plain_head, scaled(0.003, 1))
    ARMS[f'bounded trunk, {dtype}'] = (flags, plain_head, bounded_trunk)
for times in (10, 100, 1000):
    flags = f'{BF16} --method=coupled_adam'
    ARMS[f'SGD on E, {times} times the rate'] = (flags, plain_head, sgd_on_E(times))


@torch.no_grad()
def measure(out, args):
    """A finished run's test loss by its own head and by exact logits, and statistics."""
    gpt, _ = train.make_model(args)
    saved = train.read_checkpoint(f'{out}/model.pt')
    assert saved['step'] == args.steps, 'it ended early: its loss was not finite'
    gpt.load_state_dict(saved['model'])
    seen = []  # the inputs of the last norm
    gpt.norm_f.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    windows = train.Windows(args.data, 'val', args.block_size)
    batch = torch.from_numpy(windows[windows.evenly_spaced(args.test_tokens)])
    h = torch.cat([gpt.hidden(part[:, :-1]) for part in batch.split(128)]).flatten(0, 1)
    x = torch.cat(seen).flatten(0, 1)
    targets = batch[:, 1:].flatten()
    logits = gpt.head(h)
    means = logits.mean(dim=1)
    mu = gpt.E.mean(dim=0)
    numbers = {'test_loss': F.cross_entropy(logits, targets),
               'test_loss_exact': F.cross_entropy(h @ gpt.E.T, targets),
               'logit_mean': means.mean(), 'logit_mean_spread': means.std(correction=0),
               'logit_std': logits.std(dim=1, correction=0).mean(),
               'row_norm': gpt.E.norm(dim=1).mean(),
               'mean_share': len(gpt.E) * mu.square().sum() / gpt.E.square().sum(),
               'x_norm': x.norm(dim=1).mean()}
    return {name: value.item() for name, value in numbers.items()}


def main():
    done = set()
    if CSV.exists():
        done = set(pd.read_csv(CSV)[['arm', 'seed']].itertuples(index=False, name=None))
    for arm, (flags, head, make_model) in ARMS.items():
        for seed in (1, 2, 3):
            if (arm, seed) in done:
                continue
            out = f'out/why/{arm.replace(" ", "_").replace(",", "")}-s{seed}'
            model.head_logits = head
            train.make_model = make_model
            command = [*FLAGS.split(), *flags.split(), f'--seed={seed}', f'--out={out}']
            train.main(command)
            args = train.read_command(command)[0]
            rows = pd.DataFrame([{'arm': arm, 'seed': seed, **measure(out, args)}])
            if CSV.exists():
                rows = pd.concat([pd.read_csv(CSV), rows])
            rows.to_csv(CSV, index=False, float_format='%.6g')


if __name__ == '__main__':
    main()
