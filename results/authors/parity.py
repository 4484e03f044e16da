"""
Compares this code with the authors': the first weights of a seed and, in float64, from the same
weights and tokens, the loss, the gradients and the weights after five steps.

    git clone https://github.com/flxst/output-embedding-centering AUTHORS
    pip install rotary-embedding-torch    # for their model.py
    python -m results.authors.parity AUTHORS

It prints parity.csv, and writes it beside this file. Their model.py is imported. Their train.py
cannot be, so the text of its step is cut out and run.
"""
import argparse
import runpy
import textwrap
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pandas as pd
import torch

import train
from model import SIZES

METHODS_OF_BOTH = ['baseline', 'z_loss', 'mu_loss', 'mu_centering']
BATCH, T, V = 4, 64, 1024
STEPS = 5
LR = 3e-3


def cut(text, start, end):
    """The lines of a text from the one that begins with `start` to the one before `end`."""
    after = text.split(f'\n{start}')[1]
    return textwrap.dedent(start + after.split(f'\n{end}')[0])


def make_theirs(their_code, args):
    """Their model with the weights of args.seed, and its parameters in the order of ours."""
    torch.manual_seed(args.seed)
    config = their_code['GPTConfig'](
        n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head, vocab_size=V, block_size=T,
        bias=False, qk_layernorm=True, weight_tying=args.weight_tying,
        z_loss=args.method == 'z_loss', muloss=args.method == 'mu_loss', gamma=args.lam)
    model = their_code['GPT'](config)
    return model, [p for p in model.parameters() if p.requires_grad]  # RoPE's frequencies do not


def difference(ours, theirs):
    """Of two lists of tensors: the largest difference, as a share of the tensor's largest entry."""
    return max(((a - b).abs().max() / b.abs().max()).item()
               for a, b in zip(ours, theirs, strict=True))


def compare(their_code, their_step, method, tied, rope):
    """One method -> a row of the table."""
    args = train.parser.parse_args([f'--method={method}', '--device=cpu', f'--lr={LR}', '--warmup=2'])
    vars(args).update(SIZES['16M'], vocab_size=V, block_size=T, weight_tying=tied, lam=1.0,
                      dtype='float64', logits_dtype='float64')
    ours, optimizer = train.make_model(args)
    theirs, their_parameters = make_theirs(their_code, args)
    row = {'method': method, 'weight_tying': tied, 'rope': rope,
           'first weights': difference(ours.parameters(), their_parameters)}

    # in float64, and with a mean that matters
    ours.double()
    theirs.double()
    with torch.no_grad():
        ours.E.add_(0.1)
        theirs.lm_head.embedding.weight.add_(0.1)
    if rope == 'theirs':
        frequencies = theirs.transformer.h[0].attn.rotary.freqs
        angles = torch.arange(T)[:, None, None] * frequencies
        ours.cos = angles.cos()
        ours.sin = angles.sin()

    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(V, (STEPS, BATCH, T + 1), generator=generator)
    batches = [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]

    objective, stats = ours(*batches[0])
    _, loss, _, their_objective = theirs(*batches[0])
    row['loss'] = abs(stats['loss'].mean() - loss).item()
    row['objective'] = abs(objective - their_objective).item()
    row['gradients'] = difference(torch.autograd.grad(objective, list(ours.parameters())),
                                  torch.autograd.grad(their_objective, their_parameters))

    names = {  # what their step reads
        'torch': torch, 'model': theirs, 'raw_model': theirs, 'ddp': False, 'ctx': nullcontext(),
        'gradient_accumulation_steps': 1, 'grad_clip': args.grad_clip,
        'mucentering': method == 'mu_centering', 'get_batch': lambda split: (None, None),
        'scaler': torch.amp.GradScaler('cpu', enabled=False),
        'optimizer': theirs.configure_optimizers(0.0, LR, (args.beta1, args.beta2), 'cpu')}
    for step, batch in enumerate(batches, 1):
        train.train_step(ours, optimizer, [batch], step, args)
        for group in names['optimizer'].param_groups:
            group['lr'] = train.learning_rate(step, args)
        names['X'], names['Y'] = batch
        exec(their_step, names)
    row[f'after {STEPS} steps'] = difference([p.data for p in ours.parameters()],
                                             [p.data for p in their_parameters])
    return row


def main():
    parser = argparse.ArgumentParser('python -m results.authors.parity')
    parser.add_argument('authors', type=Path, help='a clone of their repository')
    nanogpt = parser.parse_args().authors / 'nanoGPT'
    their_code = runpy.run_path(nanogpt / 'model.py')
    their_step = cut((nanogpt / 'train.py').read_text(encoding='utf-8'),
                     '    # forward backward update', '    # timing and logging')

    rows = [compare(their_code, their_step, *case)
            for case in product(METHODS_OF_BOTH, [False, True], ['each its own', 'theirs'])]
    table = pd.DataFrame(rows)
    table.to_csv(Path(__file__).parent / 'parity.csv', index=False, float_format='%.3g')
    print(table.to_string(index=False, float_format='%.2g'.__mod__))


if __name__ == '__main__':
    main()
