"""
Speed and memory, side by side in one process.

    python bench.py                        # the training step with each method
    python bench.py --sizes=16M,221M       # at sizes of the paper, for a GPU: 64 x 2048 tokens, bf16
    python bench.py --head                 # the output head alone: plain, chunked, of other libraries
    python bench.py --profile              # the most expensive kernels of a step, and a trace

Contestants take turns (A B A B ...), so a machine that drifts slows all of them; a ratio is the median over
the turns of the ratio within a turn. Milliseconds are medians, after warm-up, with the device synchronised.
"""
import argparse
import ctypes
import math
import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from tabulate import tabulate

import train
from common import UserError, number, parse_args, run
from model import GPT, METHODS, SIZES, ChunkedHead, GPTConfig, compile_head, loss_and_grad, plain_head

torch._dynamo.config.recompile_limit = 64  # many methods and shapes in one process


# --------------------------------------------------------------------------------------------------
# measuring


def synchronize(device):
    if device.type == 'cuda':
        torch.cuda.synchronize()


def high_water():
    """The most memory in bytes that this process has held since its mark was reset (Linux)."""
    with open('/proc/self/status') as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith('VmHWM'))


def extra_memory(call, device):
    """
    Bytes that a call takes at its peak beyond what is held before it, in tensors on a GPU, of this process on
    a CPU; nan where the system does not say.
    """
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    if not os.path.exists('/proc/self/clear_refs'):  # not Linux
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the heap keeps would hide what the call takes
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # resets the mark, see proc(5)
    before = high_water()
    call()
    return high_water() - before


def take_turns(calls, seconds, device):
    """Times in seconds (turns, calls) of calls in turn: from 5 to 200 turns, for about `seconds` in all."""
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
        turn = []
        for call in calls:
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            turn.append(time.perf_counter() - start)
        times.append(turn)
    return np.array(times)


def compare(title, contestants, seconds, device, columns):
    """
    Prints a table of contestants: name -> function that returns the call to be measured. columns(name,
    seconds per call) returns further columns as a dict. What does not fit in memory is left out with a line.
    """
    calls, memory = {}, {}
    for name, prepare in contestants.items():
        try:
            call = prepare()
            call()  # compiles
            call()
            memory[name] = extra_memory(call, device)
            calls[name] = call
        except (RuntimeError, UserError) as error:  # no memory or no compiler: the others are worth a table
            print(f'left out: {name}: {type(error).__name__}: {" ".join(str(error).split())[:150]}')
    if not calls:
        raise UserError('nothing could be run, see above', status=1)

    times, first, rows = take_turns(calls.values(), seconds, device), next(iter(calls)), []
    for i, name in enumerate(calls):
        middle = np.median(times[:, i])
        rows.append({'': name, 'ms': f'{1e3 * middle:.2f}',
                     f'time / {first}': f'{np.median(times[:, i] / times[:, 0]):.3f}',
                     'extra MiB': f'{memory[name] / 2**20:,.0f}', **columns(name, middle)})
    align = ['left'] + ['right'] * (len(rows[0]) - 1)
    table = tabulate(rows, 'keys', 'github', disable_numparse=True, colalign=align)
    print(f'\n{title}, {len(times)} turns\n\n{table}', flush=True)


# --------------------------------------------------------------------------------------------------
# the head alone


def other_heads(dtype):
    """Heads of other libraries, where installed: name -> function (h, E, targets) -> mean cross entropy."""
    heads = {}
    if hasattr(F, 'linear_cross_entropy'):
        heads['F.linear_cross_entropy'] = F.linear_cross_entropy
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        heads['Liger-Kernel'] = lambda h, E, targets: LigerFusedLinearCrossEntropyLoss()(E, h, targets)
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy
        heads['cut-cross-entropy'] = linear_cross_entropy
    except ImportError:
        pass
    return {name: lambda h, E, targets, head=head: head(h.to(dtype), E.to(dtype), targets)
            for name, head in heads.items()}


def bench_head(args, device):
    """Heads, forward and backward: --tokens x --vocab_size logits at width H = --width."""
    config = GPTConfig(method=args.methods[0], dtype=args.dtype, logits_dtype=args.logits_dtype)
    g = torch.Generator().manual_seed(0)
    h = torch.randn(args.tokens, args.width, generator=g).to(device).requires_grad_()
    E = (0.1 * torch.randn(args.vocab_size, args.width, generator=g)).to(device).requires_grad_()
    targets = torch.randint(args.vocab_size, (args.tokens,), generator=g).to(device)
    plain, chunked = plain_head, ChunkedHead.apply
    compiled_plain, compiled = (compile_head(function, config) for function in (plain_head, loss_and_grad))
    heads = {
        'plain': lambda *x: plain(*x, config, False)[0] / len(h),
        'plain, compiled': lambda *x: compiled_plain(*x, config, False)[0] / len(h),
        'chunked': lambda *x: chunked(*x, config, False)[0] / len(h),
        'chunked, compiled': lambda *x: chunked(*x, config, False, compiled)[0] / len(h),
        'chunked, compiled, statistics': lambda *x: chunked(*x, config, True, compiled)[0] / len(h),
        **other_heads(getattr(torch, args.dtype))}
    losses = {}

    def prepare(name):
        def call():
            loss = heads[name](h, E, targets)
            losses[name] = loss.detach()
            return torch.autograd.grad(loss, (h, E))
        return call
    title = (f'The head alone, {args.methods[0]}, forward and backward: {args.tokens:,} tokens x '
             f'{args.vocab_size:,} x {args.width}, {args.dtype}, logits {args.logits_dtype}')
    compare(title, {name: partial(prepare, name) for name in heads}, args.seconds, device,
            lambda name, seconds: {'loss': f'{losses[name].item():.4f}'})


# --------------------------------------------------------------------------------------------------
# the training step


def training_step(config, micro_batch_size, args, device):
    """A function that makes a step of train.py, on the same batch each time."""
    settings = SimpleNamespace(method=config.method, lam=config.lam, grad_clip=1.0, center_every=1)
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if args.compile:
        model.compile_parts()
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1)).to(device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(micro_batch_size)]
    finite = torch.ones((), device=device)
    return lambda: train.train_step(model, model, optimizer, batch, 1, 1e-3, settings, finite, False)


def bench_steps(args, device):
    """The training step of each size with each method; with --profile the kernels of the first one."""
    for size in args.sizes:
        configs = {method: GPTConfig(**SIZES[size], vocab_size=args.vocab_size, block_size=args.block_size,
                                     method=method, dtype=args.dtype, logits_dtype=args.logits_dtype)
                   for method in args.methods}
        config = configs[args.methods[0]]
        # chosen before the first model takes its memory, so that it is the same for all
        micro = args.micro_batch_size
        micro = micro or train.fitting_micro_batch(args.batch_size, config, device, args.compile)
        if args.profile:
            profile(training_step(config, micro, args, device), device)
            return
        with torch.device('meta'):
            flops = GPT(config).flops_per_token()
        peak = train.peak_flops(args.machine) if args.dtype == 'bfloat16' else None

        def columns(method, seconds, flops=flops, peak=peak):
            rate = args.batch_size * args.block_size / seconds
            return {'tokens/s': f'{rate:,.0f}', 'MFU': f'{rate * flops / peak:.1%}' if peak else '-'}
        title = (f'The training step, {size}: {args.batch_size} x {args.block_size} tokens in micro-batches '
                 f'of {micro}, V = {args.vocab_size:,}, {args.dtype}, logits {args.logits_dtype}, '
                 f'{"compiled" if args.compile else "eager"}')
        steps = {method: partial(training_step, config, micro, args, device)
                 for method, config in configs.items()}
        compare(title, steps, args.seconds / len(args.sizes), device, columns)


def profile(step, device):
    """Prints the most expensive kernels of three steps; writes a trace for chrome://tracing or Perfetto."""
    for _ in range(3):
        step()
    with torch.profiler.profile() as found:
        for _ in range(3):
            step()
        synchronize(device)
    found.export_chrome_trace('trace.json')
    key = f'self_{"device" if device.type == "cuda" else "cpu"}_time_total'
    print(found.key_averages().table(key, row_limit=10, max_name_column_width=60))
    print('three steps; their trace is in trace.json')


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, dtypes, flag = p.add_argument, ['bfloat16', 'float32'], argparse.BooleanOptionalAction
    count, extent = number(1, whole=True), number(1, most=2**16, whole=True)
    add('--sizes', help='separated by commas (default 16M on a GPU, tiny on a CPU)')
    add('--methods', default='all', help='separated by commas, compared with the first of them (default all)')
    what = p.add_mutually_exclusive_group()
    what.add_argument('--head', action='store_true', help='the output head alone')
    what.add_argument('--profile', action='store_true', help='the most expensive kernels instead of timings')
    add('--seconds', type=number(above=0), default=20.0, help='of timing, not of compiling (default 20)')
    add('--device', choices=['cuda', 'cpu'], help='default: cuda if there is a GPU')
    add('--dtype', choices=dtypes, help='as in train.py')
    add('--logits_dtype', choices=dtypes, help='as in train.py')
    add('--compile', action=flag, help='compile the step (default on a GPU)')
    add('--threads', type=number(1, most=1024, whole=True), help='CPU threads')
    add('--keep_freed_memory', action=flag, default=True,
        help='on a CPU, as train.py does (default); without it plain heads lose half their time')
    add('--batch_size', type=extent, help='sequences in a step (default 64 on a GPU, 8 on a CPU)')
    add('--block_size', type=count, help='sequence length (default 2048 on a GPU, 128 on a CPU)')
    add('--micro_batch_size', type=count, help='sequences in a forward pass (default: as train.py chooses)')
    add('--vocab_size', type=extent, help='rows of the head (default 50304; 2048 for the step of tiny)')
    add('--tokens', type=count,
        help='tokens of --head (default 32768 on a GPU, so that the plain head fits; 1024 on a CPU)')
    add('--width', type=extent, help='width H of --head (default 224 on a GPU, 64 on a CPU)')
    args = parse_args(p, argv)

    device = train.find_device(args, 0)
    on_gpu = device.type == 'cuda'
    args.machine = torch.cuda.get_device_name() if on_gpu else f'cpu, {torch.get_num_threads()} threads'
    if not on_gpu and args.keep_freed_memory:
        train.keep_freed_memory()
    args.sizes = (('16M' if on_gpu else 'tiny') if args.sizes is None else args.sizes).split(',')
    args.methods = list(METHODS) if args.methods == 'all' else args.methods.split(',')
    for name, given, known in (('--sizes', args.sizes, SIZES), ('--methods', args.methods, METHODS)):
        wrong = [one for one in given if one not in known]
        if wrong:
            raise UserError(f'{name}: {wrong[0]!r} is not one of {", ".join(known)}')
    for name, gpu, cpu in (('dtype', 'bfloat16', 'float32'), ('compile', True, False), ('batch_size', 64, 8),
                           ('block_size', 2048, 128), ('tokens', 32768, 1024), ('width', 224, 64)):
        if getattr(args, name) is None:
            setattr(args, name, gpu if on_gpu else cpu)
    args.logits_dtype = args.logits_dtype or args.dtype
    args.vocab_size = args.vocab_size or (2048 if args.sizes == ['tiny'] and not args.head else 50304)
    if args.micro_batch_size and args.batch_size % args.micro_batch_size:
        raise UserError(f'--micro_batch_size={args.micro_batch_size} should divide --batch_size')

    print(f'{args.machine}; torch {torch.__version__}; {time.strftime("%Y-%m-%d")}')
    try:
        (bench_head if args.head else bench_steps)(args, device)
    except torch.OutOfMemoryError as error:
        raise UserError('out of memory; lower --micro_batch_size, with --head --tokens', status=1) from error


if __name__ == '__main__':
    run(main)
