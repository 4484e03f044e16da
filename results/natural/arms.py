"""
A run of train.py with one thing changed for which it has no flag:

    python -m results.natural.arms exact_gradient train.py --lr=1 --out=out/exact ...

The lists of runs, TABLE/runs.txt, name the arms.
"""
import sys

import numpy as np
import torch

import model
import train


# -------- heads, in place of model.head_logits
def with_bf16_values(logits, h, E):
    """fp32 logits, with the values that a head in BF16 gives them. Their gradient stays exact."""
    logits.data = (h.bfloat16() @ E.bfloat16().T).float()
    return logits.clone()


def exact_gradient(h, E, config):
    """BF16 logits, as in training, whose gradient is not rounded on its way to h and E."""
    return with_bf16_values(h @ E.T, h, E)


def bf16_gradient(h, E, config):
    """fp32 logits, whose gradient is rounded to BF16."""
    logits = h @ E.T
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient.bfloat16().float())
    return logits


def random_scale(h, E, config):
    """BF16 logits, whose gradient is rounded as if the loss were 2^u times as large, 0 < u < 1."""
    logits = h @ E.T
    if logits.requires_grad:
        scale = 2 ** torch.rand(())
        logits.register_hook(lambda gradient: (gradient * scale).bfloat16().float() / scale)
    return with_bf16_values(logits, h, E)


# -------- optimizers
def momentum_step(E, optimizer, times=1):
    """AdamW's step for all parameters but E, which SGD with momentum moves, at `times` the rate."""
    before = E.clone()
    optimizer.step()

    group = optimizer.param_groups[0]
    state = optimizer.state[E]
    momentum = state['exp_avg'] / (1 - group['betas'][0] ** state['step'])
    E.copy_(before - times * group['lr'] * momentum)


def token_frequencies(data, vocab_size):
    """How often each token occurs in the train shards, (V,), as shares."""
    counts = np.zeros(vocab_size)
    for path in train.Windows(data, 'train', 1).paths:
        tokens = np.fromfile(path, '<u2', offset=1024)
        counts += np.bincount(tokens, minlength=vocab_size)
    return torch.from_numpy(counts / counts.sum()).float()


def center(gpt, optimizer, weights):
    """After each step takes the mean of E, weighted by `weights` (V,), off E."""
    optimizer.register_step_post_hook(lambda *_: gpt.E.sub_(weights @ gpt.E))


def slow_down_gain(gpt, optimizer, scale):
    """Gives the gain of the last LayerNorm `scale` times the learning rate of all else."""
    gain = gpt.norm_f.weight
    (group,) = optimizer.param_groups
    group['params'] = [p for p in group['params'] if p is not gain]
    optimizer.add_param_group({'params': [gain], 'lr_scale': scale})


HEADS = {'exact_gradient': exact_gradient, 'bf16_gradient': bf16_gradient,
         'random_scale': random_scale}
GAINS = {'gain_at_1e-3': 1e-3, 'gain_at_10^-3.5': 10 ** -3.5, 'gain_at_1e-4': 1e-4}


plain_model = train.make_model


def make_model(args, arm):
    """train.make_model, with what an arm changes."""
    gpt, optimizer = plain_model(args)
    if arm in GAINS:
        slow_down_gain(gpt, optimizer, GAINS[arm])
    if arm == 'centered_by_frequency':
        center(gpt, optimizer, token_frequencies(args.data, args.vocab_size))
    if arm == 'centered_by_rows_in_use':
        in_use = token_frequencies(args.data, args.vocab_size) > 0
        center(gpt, optimizer, in_use / in_use.sum())
    return gpt, optimizer


if __name__ == '__main__':
    arm, _, *flags = sys.argv[1:]
    assert arm in {*HEADS, *GAINS, 'sgd_on_e', 'centered_by_frequency', 'centered_by_rows_in_use'}, arm
    model.head_logits = HEADS.get(arm, model.head_logits)
    train.make_model = lambda args: make_model(args, arm)
    if arm == 'sgd_on_e':
        train.coupled_adam_step = momentum_step  # of --method=coupled_adam
    train.main(flags)
