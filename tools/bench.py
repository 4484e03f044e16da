"""
Time and memory of the training step with each method, side by side in one process.

    python -m tools.bench --methods=baseline,mu_loss --size=16M --batch_size=8 --block_size=512

It takes the flags of train.py, but for --method. The methods take turns (A B A B ...), so that a
machine that becomes slower slows all of them. It prints a line for each method: the median time of
a step, its ratio to that of the first method and, on a GPU, the memory of a step at its peak,
beside what is held before it. A ratio of few turns says little.
"""
import copy
import statistics
import time

import torch

import train
from model import METHODS

torch._dynamo.config.recompile_limit = 64  # many methods in one process


def make_step(args):
    """A function that makes an optimizer step of train.py, on the same batch each time."""
    model, optimizer = train.make_model(args)
    if args.compile:
        model.compile(dynamic=False)
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1)).to(args.device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]

    def step():
        train.train_step(model, optimizer, batch, 1, args, with_stats=False)
        torch.get_device_module(args.device).synchronize()
    return step


def main(argv=None):
    add = train.parser.add_argument
    add('--methods', default=','.join(METHODS), help='separated by commas')
    add('--seconds', type=float, default=20.0, help='how long to time')
    train.parser.set_defaults(vocab_size=50304)  # whatever the data
    args = train.parser.parse_args(argv)

    steps = {}
    for method in args.methods.split(','):
        args.method = method
        own = train.resolve_args(copy.copy(args))
        train.set_up_machine(own)
        steps[method] = make_step(own)
        steps[method]()  # compiles

    times = {method: [] for method in steps}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - start)

    medians = {method: statistics.median(times[method]) for method in steps}
    first = list(medians)[0]
    n_tokens = own.batch_size * own.block_size
    print(f'{own.size}, {n_tokens} tokens, {own.dtype} on {own.device}, {len(times[first])} turns')
    for method, step in steps.items():
        ratio = medians[method] / medians[first]
        line = f'{method:15}{1e3 * medians[method]:10.2f} ms{ratio:8.3f}'
        if own.device == 'cuda':
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            step()
            peak = torch.cuda.max_memory_allocated() - held
            line += f'{peak / 2**20:10,.0f} MiB'
        print(line)


if __name__ == '__main__':
    main()
