"""
Speed and memory of the training step with each method, or of the output head, side by side in one process.

    python -m oec.bench --size=16M --methods=baseline,mu_loss
    python -m oec.bench --head                    head_loss as it stands, by chunks, and both compiled

Contestants take turns (A B A B ...), so a machine that drifts slows all of them; a ratio is the median over
the turns of the ratio within a turn. Milliseconds are medians, after warm-up, with the device synchronised.
"""
import argparse
import ctypes
import itertools
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tabulate import tabulate

import train
from model import GPT, METHODS, SIZES, gpt_config, head_loss
from oec import machine
from oec.common import check, number, parse_args, program
from oec.head import chunked

torch._dynamo.config.recompile_limit = 64  # many methods in one process


def peak_memory(call, device):
    """MiB that a call takes at its peak: of tensors on a GPU, of the process on a CPU; nan if not known."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    process = Path('/proc/self')
    if not process.exists():  # not Linux
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process keeps would hide what the call takes
    peaks = []
    for work in (lambda: None, call):
        (process / 'clear_refs').write_text('5')  # sets VmHWM, the peak, to what is held now: proc(5)
        work()
        peaks.append(int(re.search(r'VmHWM:\s*(\d+)', (process / 'status').read_text())[1]))
    return (peaks[1] - peaks[0]) / 1024


def timed(call, device):
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    machine.synchronize(device)
    return time.perf_counter() - start


def compare(contestants, n_tokens, flop, seconds, device):
    """Prints a table of contestants: name -> the call to be measured, which has n_tokens and so many FLOP."""
    memory = {}
    for name, call in contestants.items():
        timed(call, device)  # compiles
        memory[name] = peak_memory(call, device)
    times = []
    while len(times) < 5 or (np.sum(times) < seconds and len(times) < 200):
        times.append([timed(call, device) for call in contestants.values()])
    times = np.array(times)
    rows = []
    for i, name in enumerate(contestants):
        middle = np.median(times[:, i])
        rows.append({'': name, 'ms': f'{1e3 * middle:.2f}', 'tokens/s': f'{n_tokens / middle:,.0f}',
                     f'time / {next(iter(contestants))}': f'{np.median(times[:, i] / times[:, 0]):.3f}',
                     'TFLOP/s': f'{flop / middle / 1e12:.3g}', 'extra MiB': f'{memory[name]:,.0f}'})
    print(tabulate(rows, 'keys', 'github', disable_numparse=True), f'\n\n{len(times)} turns', flush=True)


def training_step(config, args, device):
    """A function that makes the next optimizer step of train.py, on the same batch each time."""
    settings = SimpleNamespace(**vars(config), method=config.head_mode, seed=0, mu_shift=0.0, grad_clip=1.0,
                               compile=args.compile, lr=1e-3, min_lr=1e-3, warmup=0, steps=10**9,
                               beta1=0.9, beta2=0.95, eps=1e-8)
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
    p = argparse.ArgumentParser(description='Speed and memory of training steps or of the output head.',
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = p.add_argument
    extent = number(1, most=2**16, whole=True)
    gpu = torch.cuda.is_available()
    add('--size', default='16M' if gpu else 'tiny', choices=SIZES, help="width and layers, of train.py's")
    add('--methods', default=','.join(METHODS), help='separated by commas; the first is the reference')
    add('--head', action='store_true', help='the output head alone, of the first method')
    add('--seconds', type=number(above=0), default=20.0, help='how long to time')
    add('--device', choices=['cuda', 'cpu'], default='cuda' if gpu else 'cpu', help='a GPU or the CPU')
    add('--dtype', choices=['bfloat16', 'float32'], default='bfloat16' if gpu else 'float32',
        help='of all products and the logits')
    add('--compile', action=argparse.BooleanOptionalAction, default=gpu, help='compile the step')
    add('--threads', type=number(1, most=1024, whole=True), help='CPU threads')
    add('--batch_size', type=extent, default=64 if gpu else 8, help='sequences in a step')
    add('--block_size', type=extent, default=2048 if gpu else 128, help='sequence length')
    add('--micro_batch_size', type=extent, default=16 if gpu else 8, help='sequences in a forward pass')
    add('--vocab_size', type=extent, default=50304, help='rows of the head')
    args = parse_args(p, argv)
    methods = args.methods.split(',')
    check(METHODS.keys() >= {*methods}, f'--methods={args.methods} should be some of {", ".join(METHODS)}')
    vars(args).update(SIZES[args.size], deterministic=False)
    device = machine.set_up_machine(args, local_rank=0, world_size=1)

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
    compare(contestants, n, n * flop, args.seconds, device)


if __name__ == '__main__':
    program(main)
