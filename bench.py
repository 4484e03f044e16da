"""
Speed and memory, side by side in one process.

    python bench.py                                      # the training step, all methods, at a size that suits the machine
    python bench.py --sizes=16M,221M --methods=all       # the published sizes: 64 x 2048 tokens, bf16, compiled on a GPU
    python bench.py --head                               # the output head alone: plain, compiled, chunked, other libraries
    python bench.py --profile                            # the ten most expensive kernels of a step, and a trace

Contestants take turns (A B A B ...), so that a machine that drifts slows them all; a ratio is the median over the turns
of the ratio within a turn. Milliseconds are medians, after warm-up, with the device synchronised.
"""
import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F

import data
import train
from common import die, number, parse_args, run, write_atomic
from model import GPT, METHODS, SIZES, ChunkedHead, GPTConfig, compile_head, loss_and_grad, plain_head
from tables import aligned

torch._dynamo.config.recompile_limit = 64  # many methods and shapes in one process


# ----------------------------------------------------------------------------------------------------------------------
# measuring


def synchronize(device):
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()


def peak_memory(device, reset=False):
    """
    Largest memory in bytes since the last reset: what tensors take on CUDA, resident memory of this process on Linux;
    None elsewhere. With reset, forgets the past and returns what is held now.
    """
    if device.type == 'cuda':
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    try:
        if reset:
            with open('/proc/self/clear_refs', 'w') as file:
                file.write('5')  # resets VmHWM, see proc(5)
        with open('/proc/self/status') as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith('VmHWM'))
    except OSError:
        return None


def extra_memory(function, device):
    """Bytes that a call of `function` takes at its peak beyond what is held before it; None where that is not known."""
    synchronize(device)
    if device.type == 'cpu' and sys.platform == 'linux':
        ctypes.CDLL(None).malloc_trim(0)  # or what the heap keeps would hide what the call takes
    before = peak_memory(device, reset=True)
    function()
    synchronize(device)
    return None if before is None else peak_memory(device) - before


def take_turns(functions, seconds, device, most=200):
    """Times (turns, n_functions) in seconds of calls in turn, for about `seconds` in all and at least five turns."""
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < most):
        turn = []
        for function in functions:
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            turn.append(time.perf_counter() - start)
        times.append(turn)
    return np.array(times)


def mebibytes(n):
    return '-' if n is None else f'{n / 2**20:,.0f}'


# ----------------------------------------------------------------------------------------------------------------------
# the head alone


def other_heads(config):
    """Heads of other libraries, name -> function (h, E, targets) -> mean cross entropy, as far as they are installed."""
    heads = {}
    if hasattr(F, 'linear_cross_entropy'):
        heads['F.linear_cross_entropy'] = lambda h, E, t: F.linear_cross_entropy(h, E, t)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        heads['Liger-Kernel'] = lambda h, E, t: LigerFusedLinearCrossEntropyLoss()(E, h, t)
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy
        heads['cut-cross-entropy'] = lambda h, E, t: linear_cross_entropy(h, E, t)
    except ImportError:
        pass
    low = torch.bfloat16 if config.dtype == 'bfloat16' else torch.float32
    return {name: (lambda h, E, t, f=f: f(h.to(low), E.to(low), t)) for name, f in heads.items()}


def bench_head(args, device):
    """Rows of the head's table: forward and backward of N x V logits at width H, gradients of h and E."""
    config = GPTConfig(n_embd=args.width, vocab_size=args.vocab_size, head_mode=args.methods[0], dtype=args.dtype, logits_dtype=args.logits_dtype)
    g = torch.Generator().manual_seed(0)
    h = torch.randn(args.tokens, args.width, generator=g).to(device).requires_grad_()
    E = (0.1 * torch.randn(args.vocab_size, args.width, generator=g)).to(device).requires_grad_()
    targets = torch.randint(args.vocab_size, (args.tokens,), generator=g).to(device)
    compiled = compile_head(loss_and_grad)
    plain_compiled = compile_head(plain_head)
    heads = {
        'plain': lambda h, E, t: plain_head(h, E, t, config, False)[0] / len(h),
        'plain, compiled': lambda h, E, t: plain_compiled(h, E, t, config, False)[0] / len(h),
        'chunked': lambda h, E, t: ChunkedHead.apply(h, E, t, config, False)[0] / len(h),
        'chunked, compiled': lambda h, E, t: ChunkedHead.apply(h, E, t, config, False, compiled)[0] / len(h),
        'chunked, compiled, with statistics': lambda h, E, t: ChunkedHead.apply(h, E, t, config, True, compiled)[0] / len(h),
        **other_heads(config)}
    calls, memory, losses = {}, {}, {}
    for name, head in heads.items():
        def call(head=head):
            loss = head(h, E, targets)
            return loss.detach(), torch.autograd.grad(loss, (h, E))
        try:
            for _ in range(2):
                losses[name] = call()[0].item()
            memory[name] = extra_memory(call, device)
            calls[name] = call
        except Exception as error:  # out of memory, no compiler: the table says so and goes on
            print(f'left out: {name}: {type(error).__name__}: {" ".join(str(error).split())[:150]}')
            if device.type == 'cuda':
                torch.cuda.empty_cache()
    times = take_turns(list(calls.values()), args.seconds, device)
    names = list(calls)
    base = names.index('plain') if 'plain' in names else 0
    rows = []
    for i, name in enumerate(names):
        ratio = statistics.median(times[:, i] / times[:, base])
        rows.append({'head': name, 'ms': 1e3 * statistics.median(times[:, i]), 'time_ratio': ratio, 'extra_bytes': memory[name],
                     'memory_ratio': memory[name] / memory[names[base]] if memory[name] is not None and memory.get(names[base]) else None, 'loss': losses[name]})
    print(f'\nThe head alone, {args.methods[0]}: {args.tokens:,} tokens x {args.vocab_size:,} x {args.width}, forward and backward, {args.dtype}, '
          f'logits {args.logits_dtype}, {len(times)} turns\n')
    print(aligned(['head', 'ms', f'time / {names[base]}', 'extra MiB', f'memory / {names[base]}', 'loss'],
                   [[r['head'], f'{r["ms"]:.1f}', f'{r["time_ratio"]:.2f}', mebibytes(r['extra_bytes']),
                     '-' if r['memory_ratio'] is None else f'{r["memory_ratio"]:.3f}', f'{r["loss"]:.4f}'] for r in rows]))
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# the training step


def step_config(size, method, args):
    """The GPTConfig of a benched model."""
    return GPTConfig(**SIZES[size], vocab_size=args.vocab_size, block_size=args.block_size, head_mode=method, dtype=args.dtype,
                     logits_dtype=args.logits_dtype, head=args.head_kind)


def training_step(size, method, micro, args, device):
    """
    A function that trains one step of train.py, on the same batch each time, in micro-batches of `micro` sequences, and
    its model.
    """
    s = {'method': method, 'lam': 1e-4, 'grad_clip': 1.0, 'center_every': 1, 'center_input': False}
    config = step_config(size, method, args)
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if args.compile:
        model.compile_parts()
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1), generator=torch.Generator().manual_seed(0)).to(device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(micro)]
    finite = torch.ones((), device=device)

    def step(with_stats=False):
        train.train_step(model, model, optimizer, batch, 1, 1e-3, s, finite, with_stats)
    return step, model


def bench_steps(args, device):
    """Rows of the step's table: every method of one size takes turns with the others."""
    rows = []
    tokens = args.batch_size * args.block_size
    peak = 1e12 * args.peak_tflops if args.peak_tflops else train.peak_flops(torch.cuda.get_device_name() if device.type == 'cuda' else '')
    for size in args.sizes:
        steps, memory = [], []
        # chosen once, before the first model takes its memory, so that all methods have the same
        micro = args.micro_batch_size or train.fitting_micro_batch(args.batch_size, step_config(size, args.methods[0], args), device)
        for method in args.methods:
            held = peak_memory(device, reset=True)
            step, model = training_step(size, method, micro, args, device)
            step(with_stats=True)
            step()
            synchronize(device)
            if device.type == 'cuda':  # its weights and optimizer state count, compiling does not
                static = torch.cuda.memory_allocated() - held
            extra = extra_memory(step, device)
            memory.append(extra if extra is None or device.type != 'cuda' else extra + static)
            steps.append(step)
        times = take_turns(steps, args.seconds / len(args.sizes), device)
        print(f'\nThe training step, {size}: {args.batch_size} x {args.block_size} tokens in micro-batches of {micro}, V = {args.vocab_size:,}, {args.dtype}, '
              f'logits {args.logits_dtype}, head {args.head_kind}, {"compiled" if args.compile else "eager"}, {len(times)} turns\n')
        table = []
        for i, method in enumerate(args.methods):
            seconds = statistics.median(times[:, i])
            overhead = statistics.median(times[:, i] / times[:, 0]) - 1
            row = {'size': size, 'method': method, 'ms': 1e3 * seconds, 'tokens_per_second': tokens / seconds,
                   'mfu': peak and tokens * model.flops_per_token() / seconds / peak, 'peak_bytes': memory[i], 'overhead': overhead, 'micro_batch_size': micro}
            rows.append(row)
            table.append([method, f'{row["ms"]:.2f}', f'{row["tokens_per_second"]:,.0f}', '-' if peak is None else f'{row["mfu"]:.1%}',
                          mebibytes(memory[i]), '-' if i == 0 else f'{overhead:+.1%}'])
        print(aligned(['method', 'ms a step', 'tokens/s', 'MFU', 'peak MiB' if device.type == 'cuda' else 'extra MiB', f'over {args.methods[0]}'], table))
    return rows


def bench_loader(args):
    """Tokens a second that data.py alone delivers: random windows from a shard that is not in the page cache (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'x_train_000000.bin')
        data.write_shard(path, np.random.RandomState(0).randint(0, 2**15, 2**25))
        if hasattr(os, 'posix_fadvise'):
            with open(path, 'rb') as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        shards = [data.read_shard(path)]
        n = int(data.count_windows(shards, args.block_size)[0])
        begin, batches = time.perf_counter(), max(1, min(50, n // args.batch_size))
        for step in range(batches):
            data.read_windows(shards, args.block_size, data.batch_windows(0, step, args.batch_size, n), 2**16)
        rate = batches * args.batch_size * args.block_size / (time.perf_counter() - begin)
    print(f'\nThe loader alone, from cold memory maps: {rate:,.0f} tokens/s')
    return {'loader_tokens_per_second': rate}


def profile_step(args, device):
    """Prints the ten most expensive kernels of a step and writes a trace for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile
    step, _ = training_step(args.sizes[0], args.methods[0], args.micro_batch_size or args.batch_size, args, device)
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == 'cuda' else [])
    with profile(activities=activities) as found:
        for _ in range(3):
            step()
        synchronize(device)
    found.export_chrome_trace(args.trace)
    key = 'self_cuda_time_total' if device.type == 'cuda' else 'self_cpu_time_total'
    print(found.key_averages().table(sort_by=key, row_limit=10, max_name_column_width=60))
    print(f'three steps of {args.methods[0]} {args.sizes[0]}; trace in {args.trace}')


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    count, extent = number(1, integer=True), number(1, below=2**16 + 1, integer=True)
    p.add_argument('--sizes', help='sizes, separated by commas (default 16M on a GPU, tiny on a CPU)')
    p.add_argument('--methods', default='all', help='methods, separated by commas, the first is what others are compared with (default all)')
    p.add_argument('--head', action='store_true', help='the output head alone')
    p.add_argument('--profile', action='store_true', help='the most expensive kernels of a step instead of timings')
    p.add_argument('--json', help='write the rows to this file as well')
    p.add_argument('--seconds', type=number(above=0), default=20.0, help='of timing in all, compiling comes on top (default 20)')
    p.add_argument('--trace', default='trace.json', help='where --profile leaves its trace (default trace.json)')
    p.add_argument('--device', help='cuda, mps or cpu (default: the best there is)')
    p.add_argument('--dtype', choices=['bfloat16', 'float32'], help='as in train.py')
    p.add_argument('--logits_dtype', choices=['bfloat16', 'float32'], help='as in train.py')
    p.add_argument('--compile', action=argparse.BooleanOptionalAction, help='compile the step (default on cuda)')
    p.add_argument('--head_kind', choices=['chunked', 'plain'], default='chunked', help='head of the step (default chunked)')
    p.add_argument('--threads', type=number(1, below=1025, integer=True), help='CPU threads')
    p.add_argument('--keep_freed_memory', action=argparse.BooleanOptionalAction, default=True,
                   help='on a CPU as train.py does it (default); without, plain heads lose half their time to page faults')
    p.add_argument('--batch_size', type=extent, help='sequences in a step (default 64 on a GPU, 8 on a CPU)')
    p.add_argument('--block_size', type=count, help='sequence length (default 2048 on a GPU, 128 on a CPU)')
    p.add_argument('--micro_batch_size', type=count, help='sequences in a forward pass (default: as train.py chooses)')
    p.add_argument('--vocab_size', type=extent, help='rows of the head (default 50304; the step of tiny on a CPU: 2048)')
    p.add_argument('--tokens', type=count, help='tokens of --head (default 131072 on a GPU, 1024 on a CPU)')
    p.add_argument('--width', type=extent, help='width H of --head (default 224 on a GPU, 64 on a CPU)')
    p.add_argument('--peak_tflops', type=number(above=0), help='peak of the device for MFU (default: the table in train.py)')
    args = parse_args(p, argv)
    if args.profile and (args.head or args.json):
        die('--profile profiles the step and leaves a trace: without --head and --json')
    for flag, path in (('--json', args.json), ('--trace', args.trace if args.profile else None)):  # not after minutes of timing
        if path is not None and not os.path.isdir(os.path.dirname(path) or '.'):
            die(f'{flag}={path}: no such folder')
    device = train.find_device(args, 0)
    if device.type == 'cpu' and args.keep_freed_memory:
        train.keep_freed_memory()
    on_gpu = device.type == 'cuda'
    args.sizes = (('16M' if on_gpu else 'tiny') if args.sizes is None else args.sizes).split(',')
    args.methods = list(METHODS) if args.methods == 'all' else args.methods.split(',')
    for flag, given, known in (('--sizes', args.sizes, SIZES), ('--methods', args.methods, METHODS)):
        for name in given:
            if name not in known:
                die(f'{flag}: {name!r} is none of {", ".join(known)}')
    args.dtype = args.dtype or ('bfloat16' if on_gpu else 'float32')
    args.logits_dtype = args.logits_dtype or args.dtype
    args.compile = on_gpu if args.compile is None else args.compile
    args.batch_size, args.block_size = args.batch_size or (64 if on_gpu else 8), args.block_size or (2048 if on_gpu else 128)
    if args.micro_batch_size and args.batch_size % args.micro_batch_size:
        die(f'--micro_batch_size={args.micro_batch_size} does not divide --batch_size={args.batch_size}')
    args.tokens, args.width = args.tokens or (131072 if on_gpu else 1024), args.width or (224 if on_gpu else 64)
    args.vocab_size = args.vocab_size or (2048 if args.sizes == ['tiny'] and not args.head else 50304)
    machine = torch.cuda.get_device_name() if on_gpu else f'{device.type}, {torch.get_num_threads()} threads, {platform.machine()}'
    print(f'{machine}; torch {torch.__version__}; {time.strftime("%Y-%m-%d")}')

    if args.profile:
        profile_step(args, device)
        return 0
    found = {'machine': machine, 'torch': str(torch.__version__), 'command': ' '.join(['python bench.py', *(argv or [])])}
    if args.head:
        found['head'] = bench_head(args, device)
    else:
        try:
            found['steps'] = bench_steps(args, device)
        except torch.OutOfMemoryError:
            die('out of memory: the models of all methods are held at once; name fewer --methods or a smaller --micro_batch_size', 1)
        found.update(bench_loader(args))
    if args.json:
        write_atomic(args.json, lambda file: file.write(json.dumps(found, indent=2) + '\n'), mode='w')
    return 0


if __name__ == '__main__':
    run(main)
