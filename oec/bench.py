"""
Speed and memory of the training step with each method, or of the output head, side by side in one process.

    python -m oec.bench --size=16M --methods=baseline,mu_loss
    python -m oec.bench --head                    head_loss as it stands, by chunks, and compiled

Contestants take turns (A B A B ...), so a machine that drifts slows all of them; a ratio is the median over
the turns of the ratio within a turn. Milliseconds are medians, after warm-up, with the device synchronised.
"""
import argparse
import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import torch
from tabulate import tabulate

import train
from model import GPT, METHODS, SIZES, gpt_config, head_loss
from oec.common import check, number, parse_args, program
from oec.head import chunked
from oec.machine import set_up_machine

torch._dynamo.config.recompile_limit = 64  # many methods in one process


def timed(call, device):
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    if device.type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(call, device):
    """MiB of tensors that a call holds at its peak beside what was there before; nan on a CPU."""
    if device.type == 'cpu':
        return math.nan
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(contestants, n_tokens, flop, args, device):
    """Prints a table of contestants: name -> the call to be measured, which works on n_tokens."""
    memory = {}
    for name, call in contestants.items():
        call()  # compiles
        memory[name] = peak_memory(call, device)
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < args.seconds and len(times) < 200):
        times.append([timed(call, device) for call in contestants.values()])
    times = np.array(times)
    rows = []
    for i, name in enumerate(contestants):
        seconds = np.median(times[:, i])
        rows.append({'': name, 'ms': f'{1e3 * seconds:.2f}', 'tokens/s': f'{n_tokens / seconds:,.0f}',
                     f'time / {next(iter(contestants))}': f'{np.median(times[:, i] / times[:, 0]):.3f}',
                     'TFLOP/s': f'{flop / seconds / 1e12:.3g}', 'extra MiB': f'{memory[name]:,.0f}'})
    print(tabulate(rows, 'keys', 'github', disable_numparse=True), f'\n\n{len(times)} turns', flush=True)


def training_step(config, args, device):
    """A function that makes the next optimizer step of train.py, on the same batch each time."""
    settings = SimpleNamespace(seed=0, mu_shift=0.0, compile=args.compile, lr=1e-3, min_lr=1e-3, warmup=0,
                               steps=10**9, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0,
                               method=config.head_mode, **vars(config))
    model, optimizer = train.make_model(settings, device)
    tokens = torch.randint(config.vocab_size, (args.batch_size, config.block_size + 1)).to(device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]
    steps = itertools.count(1)
    return lambda: train.train_step(model, optimizer, batch, next(steps), settings, with_stats=False)


def head_pass(head, config, args, device):
    """A function that runs a head forward and backward on one micro-batch."""
    n = args.micro_batch_size * args.block_size
    h = torch.randn(n, config.n_embd, device=device).requires_grad_()
    E = (0.1 * torch.randn(config.vocab_size, config.n_embd, device=device)).requires_grad_()
    targets = torch.randint(config.vocab_size, (n,), device=device)
    return lambda: torch.autograd.grad(head(h, E, targets, config, with_stats=False)[0], (h, E))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add = p.add_argument
    extent = number(1, most=2**16, whole=True)
    gpu = torch.cuda.is_available()
    add('--size', default='16M' if gpu else 'tiny', choices=SIZES)
    add('--methods', default=','.join(METHODS), help='by commas, the first is the reference; default: all')
    add('--head', action='store_true', help='the output head alone, of the first method')
    add('--seconds', type=number(above=0), default=20.0, help='how long to time; default 20')
    add('--device', choices=['cuda', 'cpu'], default='cuda' if gpu else 'cpu')
    add('--dtype', choices=['bfloat16', 'float32'], default='bfloat16' if gpu else 'float32')
    add('--compile', action=argparse.BooleanOptionalAction, default=gpu)
    add('--threads', type=number(1, most=1024, whole=True), help='CPU threads')
    add('--batch_size', type=extent, default=64 if gpu else 8, help='sequences in a step')
    add('--block_size', type=extent, default=2048 if gpu else 128, help='sequence length')
    add('--micro_batch_size', type=extent, default=16 if gpu else 8, help='sequences in a forward pass')
    add('--vocab_size', type=extent, default=50304, help='rows of the head')
    args = parse_args(p, argv)
    methods = args.methods.split(',')
    check(METHODS.keys() >= {*methods}, f'--methods={args.methods} should be some of {", ".join(METHODS)}')
    vars(args).update(SIZES[args.size], deterministic=False)
    device = set_up_machine(args, local_rank=0, world_size=1)

    configs = {method: gpt_config({**vars(args), 'method': method, 'lam': METHODS[method],
                                   'logits_dtype': args.dtype}) for method in methods}
    config = configs[methods[0]]
    if args.head:
        heads = {'head_loss': head_loss, 'compiled': torch.compile(head_loss, dynamic=False),
                 'by chunks': chunked(head_loss), 'by chunks, compiled': chunked(head_loss, compile=True)}
        contestants = {name: head_pass(head, config, args, device) for name, head in heads.items()}
        n = args.micro_batch_size * args.block_size
        flop = 6 * args.vocab_size * config.n_embd
    else:
        contestants = {method: training_step(configs[method], args, device) for method in methods}
        n = args.batch_size * args.block_size
        with torch.device('meta'):
            flop = GPT(config).flops_per_token()
    print(f'{args.size}, {n} tokens, V = {args.vocab_size:,}, {args.dtype} on {args.device}, torch '
          f'{torch.__version__}, {time.strftime("%Y-%m-%d")}')
    compare(contestants, n, n * flop, args, device)


if __name__ == '__main__':
    program(main)
