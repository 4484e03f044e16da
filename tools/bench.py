"""
Time and memory of the training step with each method, side by side in one process.

    python -m tools.bench --methods=baseline,mu_loss --size=16M --batch_size=8 --block_size=512

Takes the flags of train.py, but for --method. The methods take turns (A B A B ...), so a machine that drifts
slows all of them; a ratio is the median over the turns of the ratio to the first method within the turn.
"""
import argparse
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


def timed(step, device):
    """The seconds that a step takes."""
    start = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def main(argv=None):
    add = train.parser.add_argument
    add('--methods', default=','.join(METHODS), help='separated by commas')
    add('--seconds', type=float, default=20.0, help='how long to time')
    train.parser.set_defaults(vocab_size=50304)  # whatever the data
    args = train.parser.parse_args(argv)
    methods = args.methods.split(',')
    settings = [train.resolve_args(argparse.Namespace(**{**vars(args), 'method': name})) for name in methods]
    args = settings[0]
    train.set_up_machine(args)
    steps = [training_step(args) for args in settings]
    for step in steps:
        timed(step, args.device)  # compiles
    times = []
    while len(times) < 5 or np.sum(times) < args.seconds:
        times.append([timed(step, args.device) for step in steps])

    print(f'{args.size}, {args.batch_size * args.block_size} tokens, {args.dtype} on {args.device}')
    for method, step, seconds in zip(methods, steps, np.array(times).T, strict=True):
        ratio = np.median(seconds / np.array(times)[:, 0])
        line = f'{method:15}{1e3 * np.median(seconds):10.2f} ms{ratio:8.3f}'
        if args.device == 'cuda':  # the peak of a step, beside what is held before it
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            step()
            line += f'{(torch.cuda.max_memory_allocated() - held) / 2**20:10,.0f} MiB'
        print(line)


if __name__ == '__main__':
    main()
