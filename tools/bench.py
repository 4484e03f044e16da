"""
Time and memory of the training step with each method, side by side in one process.

    python -m tools.bench --methods=baseline,mu_loss --size=16M --batch_size=8 --block_size=512

It takes the flags of train.py, but for --method. The methods take turns (A B A B ...), so a machine that
becomes slower slows all of them. It prints a line for each method: the median time of a step; the median of
its ratio to the first method's step in the same turn; on a GPU, the memory of a step at its peak, beside what
is held before it.
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
    if args.compile:
        model = torch.compile(model, dynamic=False)
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1)).to(args.device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]
    numbers = itertools.count(1)

    def step():
        train.train_step(model, optimizer, batch, next(numbers), args, with_stats=False)
    return step


def timed(step, device):
    """The seconds that a step takes."""
    start = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def peak_memory(step):
    """The bytes that a step on the GPU takes at its peak, beside what is held before it."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def parse_methods(argv):
    """The settings of train.py for each method, in the order of --methods, and --seconds."""
    add = train.parser.add_argument
    add('--methods', default=','.join(METHODS), help='separated by commas')
    add('--seconds', type=float, default=20.0, help='how long to time')
    train.parser.set_defaults(vocab_size=50304)  # whatever the data
    args = train.parser.parse_args(argv)

    settings = []
    for method in args.methods.split(','):
        train.check(method in METHODS, f'--methods={args.methods}: should be of {", ".join(METHODS)}')
        own = argparse.Namespace(**{**vars(args), 'method': method})
        settings.append(train.resolve_args(own))
    return settings, args.seconds


def main(argv=None):
    settings, seconds = parse_methods(argv)
    args = settings[0]  # which differ in the method alone
    train.set_up_machine(args)
    steps = [training_step(own) for own in settings]
    for step in steps:
        timed(step, args.device)  # compiles

    turns = []  # of the time of each method
    while len(turns) < 5 or np.sum(turns) < seconds:
        turns.append([timed(step, args.device) for step in steps])
    times = np.array(turns)
    ratios = times / times[:, :1]  # to the first method in the same turn

    print(f'{args.size}, {args.batch_size * args.block_size} tokens, {args.dtype} on {args.device}')
    for i, own in enumerate(settings):
        milliseconds = 1e3 * np.median(times[:, i])
        line = f'{own.method:15}{milliseconds:10.2f} ms{np.median(ratios[:, i]):8.3f}'
        if args.device == 'cuda':
            line += f'{peak_memory(steps[i]) / 2**20:10,.0f} MiB'
        print(line)


if __name__ == '__main__':
    main()
