"""
Speed and memory of the training step with each method, or of the output head, side by side in one process.

    python -m analysis.bench --methods=baseline,mu_loss --size=16M --batch_size=8 --block_size=512
    python -m analysis.bench --head --size=16M --batch_size=8 --block_size=512   by chunks and compiled

Takes the flags of train.py, but for --method. Contestants take turns (A B A B ...), so a machine that drifts
slows all of them; a ratio is the median over the turns of the ratio within a turn, milliseconds are medians.
"""
import argparse
import functools
import itertools
import math
import time

import numpy as np
import torch
from tabulate import tabulate

import train
from model import METHODS, chunked_head_loss, head_grads, head_loss
from oec import machine
from oec.common import check, number, parse_args, program

torch._dynamo.config.recompile_limit = 64  # many methods in one process


def peak_memory(call, device):
    """MiB of tensors that a call holds at its peak beside what was there before; nan on a CPU."""
    if device.type == 'cpu':
        return math.nan
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def timed(call, device):
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def compare(contestants, n_tokens, flop, seconds, device):
    """Prints a table of contestants: name -> the call to be measured, which has n_tokens and so many FLOP."""
    for call in contestants.values():
        timed(call, device)  # compiles
    memory = [peak_memory(call, device) for call in contestants.values()]
    times = []
    while len(times) < 5 or (np.sum(times) < seconds and len(times) < 200):
        times.append([timed(call, device) for call in contestants.values()])
    times = np.array(times)
    rows = []
    for i, name in enumerate(contestants):
        median = np.median(times[:, i])
        rows.append({'': name, 'ms': f'{1e3 * median:.2f}', 'tokens/s': f'{n_tokens / median:,.0f}',
                     f'time / {next(iter(contestants))}': f'{np.median(times[:, i] / times[:, 0]):.3f}',
                     'TFLOP/s': f'{flop / median / 1e12:.3g}', 'extra MiB': f'{memory[i]:,.0f}'})
    print(tabulate(rows, 'keys', 'github', disable_numparse=True), f'\n\n{len(times)} turns', flush=True)


def training_step(args, device):
    """A function that makes the next optimizer step of train.py, on the same batch each time."""
    model, optimizers = train.make_model(args, device)
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1)).to(device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]
    unigram = torch.full((args.vocab_size,), 1 / args.vocab_size, device=device)  # for zipf_centering
    steps = itertools.count(1)
    return lambda: train.train_step(model, optimizers, batch, next(steps), args, unigram, with_stats=False)


def head_pass(head, config, n, device):
    """A function that runs a head forward and backward on n positions."""
    h = torch.randn(n, config.n_embd, device=device).requires_grad_()
    E = (0.1 * torch.randn(config.vocab_size, config.n_embd, device=device)).requires_grad_()
    targets = torch.randint(config.vocab_size, (n,), device=device)
    return lambda: torch.autograd.grad(head(h, E, targets, config, with_stats=False)[0], (h, E))


def main(argv=None):
    p = train.parser()
    p.description = __doc__
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    add = p.add_argument_group('the benchmark').add_argument
    add('--methods', default=','.join(METHODS), help='separated by commas, the first is the reference: all')
    add('--head', action='store_true', help='the output head alone, of the first method')
    add('--seconds', type=number(above=0), default=20.0, help='how long to time: 20')
    p.set_defaults(vocab_size=50304)  # whatever the data
    args = parse_args(p, argv)
    check(args.method == 'baseline', '--method should be --methods, which has several')
    methods = args.methods.split(',')
    check(METHODS.keys() >= {*methods}, f'--methods={args.methods} should be some of {", ".join(METHODS)}')
    settings = {method: argparse.Namespace(**{**vars(args), 'method': method}) for method in methods}
    for args in settings.values():
        train.resolve_defaults(args)
    args = settings[methods[0]]
    device = machine.set_up(args, local_rank=0, world_size=1)
    model, _ = train.make_model(args, device)

    n = args.batch_size * args.block_size
    if args.head:
        n = args.micro_batch_size * args.block_size
        flop = 6 * model.E.numel()
        compiled = [torch.compile(function, dynamic=False) for function in (head_loss, head_grads)]
        heads = {'head_loss': head_loss, 'compiled': compiled[0], 'by chunks': chunked_head_loss,
                 'by chunks, compiled': functools.partial(chunked_head_loss, functions=compiled)}
        contestants = {name: head_pass(head, model.config, n, device) for name, head in heads.items()}
    else:
        flop = model.flops_per_token()
        contestants = {method: training_step(settings[method], device) for method in methods}
    print(f'{args.size}, {n} tokens, V = {args.vocab_size:,}, {args.dtype} on {args.device}, torch '
          f'{torch.__version__}, {time.strftime("%Y-%m-%d")}')
    compare(contestants, n, n * flop, args.seconds, device)


if __name__ == '__main__':
    program(main)
