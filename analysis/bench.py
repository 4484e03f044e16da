"""
Speed and memory of the training step with each method, side by side in one process.

    python -m analysis.bench --methods=baseline,mu_loss --size=16M --batch_size=8 --block_size=512

Takes the flags of train.py, but for --method. The methods take turns (A B A B ...), so a machine that drifts
slows all of them; a ratio is the median over the turns of the ratio within a turn, milliseconds are medians.
"""
import argparse
import copy
import itertools
import time

import numpy as np
import torch

import train
from model import METHODS

torch._dynamo.config.recompile_limit = 64  # many methods in one process


def training_step(args):
    """A function that makes the next optimizer step of train.py, on the same batch each time."""
    model, optimizer = train.make_model(args)
    model = torch.compile(model, dynamic=False) if args.compile else model
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1)).to(args.device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]
    steps = itertools.count(1)
    return lambda: train.train_step(model, optimizer, batch, next(steps), args, with_stats=False)


def timed(call, device):
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def main(argv=None):
    parser = copy.deepcopy(train.parser)
    parser.add_argument('--methods', default=','.join(METHODS), help='separated by commas')
    parser.add_argument('--seconds', type=float, default=20.0, help='how long to time')
    parser.set_defaults(vocab_size=50304)  # whatever the data
    args = parser.parse_args(argv)
    methods = args.methods.split(',')
    settings = [train.settle(argparse.Namespace(**{**vars(args), 'method': name})) for name in methods]
    args = settings[0]
    torch.set_num_threads(args.threads or torch.get_num_threads())

    steps = [training_step(args) for args in settings]
    memory = [0] * len(steps)  # bytes that a step holds at its peak beside what was there before, on a GPU
    for i, step in enumerate(steps):
        timed(step, args.device)  # compiles
        if args.device == 'cuda':
            torch.cuda.reset_peak_memory_stats()
            memory[i] -= torch.cuda.memory_allocated()
            step()
            memory[i] += torch.cuda.max_memory_allocated()
    times = []
    while len(times) < 5 or (np.sum(times) < args.seconds and len(times) < 200):
        times.append([timed(step, args.device) for step in steps])

    n_tokens = args.batch_size * args.block_size
    print(f'{args.size}, {n_tokens} tokens, {args.dtype} on {args.device_name}, torch {args.torch}\n')
    print(f'| method | ms | tokens/s | time / {methods[0]} | extra MiB |\n|:---|---:|---:|---:|---:|')
    for method, seconds, extra in zip(methods, np.array(times).T, memory, strict=True):
        median, ratio = np.median(seconds), np.median(seconds / np.array(times)[:, 0])
        cells = f'{1e3 * median:.2f} | {n_tokens / median:,.0f} | {ratio:.3f} | {extra / 2**20:,.0f}'
        print(f'| {method} | {cells} |')


if __name__ == '__main__':
    main()
