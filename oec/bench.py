"""
Speed and memory of the training step with each method, or of the output head, side by side in one process.

    python -m oec.bench --sizes=16M,221M --methods=baseline,mu_loss
    python -m oec.bench --head                    the heads: plain, chunked, and those of other libraries

Contestants take turns (A B A B ...), so a machine that drifts slows all of them; a ratio is the median over
the turns of the ratio within a turn. Milliseconds are medians, after warm-up, with the device synchronised.
TFLOP/s count matrix products alone; the share is the time they would take at a large product's best rate.
"""
import argparse
import contextlib
import ctypes
import itertools
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
from model import GPT, METHODS, SIZES, gpt_config, plain_head
from oec.common import UserError, check, number, parse_args, program
from oec.head import chunked_head, compiled_head
from oec.machine import default_dtype, set_up_machine

DTYPES = ['bfloat16', 'float32']
torch._dynamo.config.recompile_limit = 64  # many methods and shapes in one process


def extra_memory(call, device):
    """Bytes that a call takes at its peak, in tensors on a GPU, of the process on a CPU; nan if not known."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    if not os.path.exists('/proc/self/clear_refs'):  # not Linux
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the heap keeps would hide what the call takes
    peaks = []
    for work in (lambda: None, call):
        with open('/proc/self/clear_refs', 'w') as file:
            file.write('5')  # resets VmHWM, the most that the process has held, see proc(5)
        work()
        with open('/proc/self/status') as file:
            peaks += [1024 * int(line.split()[1]) for line in file if line.startswith('VmHWM')]
    return peaks[1] - peaks[0]


def take_turns(calls, seconds, device):
    """Times in seconds (turns, calls) of calls in turn: from 5 to 200 turns, for about `seconds` in all."""
    synchronize = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
        turn = []
        for call in calls:
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            turn.append(time.perf_counter() - start)
        times.append(turn)
    return np.array(times)


def best_rate(dtype, device):
    """FLOP/s of a large product of square matrices in this dtype."""
    n = 8192 if device.type == 'cuda' else 2048
    a = torch.randn(n, n, device=device).to(dtype)
    return 2 * n ** 3 / take_turns([lambda: a @ a], 1, device).min()


def compare(contestants, n_tokens, flop, best, seconds, device):
    """
    Prints a table of contestants: name -> function that returns the call to be measured, which works on
    n_tokens, takes `flop` in matrix products and returns the loss. What does not fit in memory is left out
    with a line. `best` is the machine's rate in FLOP/s.
    """
    found = {}
    for name, prepare in contestants.items():
        try:
            call = prepare()
            call()  # compiles
            found[name] = call, call().item(), extra_memory(call, device)
        except (RuntimeError, UserError) as error:  # no memory or no compiler: the others are worth a table
            print(f'left out: {name}: {type(error).__name__}: {" ".join(str(error).split())[:150]}')
    check(found, 'nothing could be measured, see above', status=1)

    times, rows = take_turns([call for call, *_ in found.values()], seconds, device), []
    for i, (name, (_, loss, memory)) in enumerate(found.items()):
        middle = np.median(times[:, i])
        rows.append({'': name, 'ms': f'{1e3 * middle:.2f}', 'tokens/s': f'{n_tokens / middle:,.0f}',
                     f'time / {next(iter(found))}': f'{np.median(times[:, i] / times[:, 0]):.3f}',
                     'TFLOP/s': f'{flop / middle / 1e12:.3g}', 'share': f'{flop / middle / best:.0%}',
                     'extra MiB': f'{memory / 2**20:,.0f}', 'loss': f'{loss:.4f}'})
    table = tabulate(rows, 'keys', 'github', disable_numparse=True, colalign=['left'] + ['right'] * 7)
    print(f'\n{table}\n\n{len(times)} turns', flush=True)


def training_step(config, method, args, device):
    """A function that makes the next optimizer step of train.py, on the same batch each time."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(config.n_embd // config.n_head <= 128)  # as in train.py
    gpt = GPT(config).to(device)
    gpt.head = compiled_head(config, device) if args.compile else chunked_head
    if args.compile:
        gpt.hidden = torch.compile(gpt.hidden, dynamic=False)
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tokens = torch.randint(config.vocab_size, (args.batch_size, config.block_size + 1)).to(device)
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(args.micro_batch_size)]
    how = SimpleNamespace(method=method, lam=config.lam, grad_clip=1.0,
                          center_every=int(method == 'mu_centering'))
    steps, updates = itertools.count(1), torch.tensor(0, device=device)
    return lambda: train.train_step(gpt, optimizer, batch, next(steps), 1e-3, how, updates,
                                    with_stats=False)[0]['loss'].mean()


def head_pass(head, config, args, device):
    """A function that runs head(h, E, targets) -> mean loss, forward and backward, on one micro-batch."""
    n, g = args.micro_batch_size * args.block_size, torch.Generator().manual_seed(0)
    h = torch.randn(n, config.n_embd, generator=g).to(device).requires_grad_()
    E = (0.1 * torch.randn(config.vocab_size, config.n_embd, generator=g)).to(device).requires_grad_()
    targets = torch.randint(config.vocab_size, (n,), generator=g).to(device)

    def call():
        loss = head(h, E, targets)
        torch.autograd.grad(loss, (h, E))
        return loss.detach()
    return call


def all_heads(config, device):
    """Ours, and those of other libraries where they are installed: name -> (h, E, targets) -> mean loss."""
    compiled = torch.compile(plain_head, dynamic=False, options={'emulate_precision_casts': True})
    ours = {'plain': plain_head, 'plain, compiled': compiled, 'chunked': chunked_head,
            'chunked, compiled': compiled_head(config, device)}
    others, dtype = {}, getattr(torch, config.dtype)
    if hasattr(F, 'linear_cross_entropy'):
        others['F.linear_cross_entropy'] = F.linear_cross_entropy
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        others['Liger-Kernel'] = lambda h, E, targets: LigerFusedLinearCrossEntropyLoss()(E, h, targets)
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy
        others['cut-cross-entropy'] = linear_cross_entropy
    return ({name: lambda *x, f=f: f(*x, config, False)[0] / len(x[0]) for name, f in ours.items()} |
            {name: lambda h, E, y, f=f: f(h.to(dtype), E.to(dtype), y) for name, f in others.items()})


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, extent = p.add_argument, number(1, most=2**16, whole=True)
    add('--sizes', help='separated by commas; default 16M on a GPU, tiny on a CPU')
    add('--methods', default=','.join(METHODS), help='by commas, the first is the reference; default: all')
    add('--head', action='store_true', help='the output head alone, of the first method')
    add('--seconds', type=number(above=0), default=20.0, help='how long to time each size; default 20')
    add('--device', choices=['cuda', 'cpu'], help='default: cuda if there is a GPU')
    add('--dtype', help='bfloat16, float32 or, separated by a comma, both; default: as in train.py')
    add('--logits_dtype', choices=DTYPES, help='as in train.py')
    add('--compile', action=argparse.BooleanOptionalAction, help='compile the step; default: on a GPU')
    add('--threads', type=number(1, most=1024, whole=True), help='CPU threads')
    add('--batch_size', type=extent, help='sequences in a step; default 64 on a GPU, 8 on a CPU')
    add('--block_size', type=extent, help='sequence length; default 2048 on a GPU, 128 on a CPU')
    add('--micro_batch_size', type=extent, help='sequences in a forward pass; default at most 16')
    add('--vocab_size', type=extent, help='rows of the head; default 50304, for tiny 2048')
    args = parse_args(p, argv)
    args.device = args.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    for name, gpu, cpu in (('sizes', '16M', 'tiny'), ('batch_size', 64, 8), ('block_size', 2048, 128),
                           ('compile', True, False)):
        if getattr(args, name) is None:
            setattr(args, name, gpu if args.device == 'cuda' else cpu)
    args.micro_batch_size = args.micro_batch_size or min(16, args.batch_size)
    sizes, methods = args.sizes.split(','), args.methods.split(',')
    dtypes = (args.dtype or default_dtype(args.device)).split(',')
    check({*DTYPES} >= {*dtypes}, f'--dtype={args.dtype} should be some of {", ".join(DTYPES)}')
    check(SIZES.keys() >= {*sizes}, f'--sizes={args.sizes} should be some of {", ".join(SIZES)}')
    check(METHODS.keys() >= {*methods}, f'--methods={args.methods} should be some of {", ".join(METHODS)}')
    device = set_up_machine(args.device, 0, args.threads, deterministic=False)

    cpu = f'cpu, {torch.get_num_threads()} threads'
    machine = torch.cuda.get_device_name() if args.device == 'cuda' else cpu
    best = best_rate(getattr(torch, dtypes[0]), device)
    print(f'{machine}; torch {torch.__version__}; {time.strftime("%Y-%m-%d")}; at best {best / 1e12:.3g} '
          f'TFLOP/s in {dtypes[0]}')
    for size in sizes:
        V = args.vocab_size or (2048 if size == 'tiny' else 50304)
        contestants = {}
        for dtype, method in itertools.product(dtypes, methods[:1] if args.head else methods):
            config = gpt_config({**vars(args), **SIZES[size], 'vocab_size': V, 'method': method,
                                 'lam': METHODS[method], 'dtype': dtype,
                                 'logits_dtype': args.logits_dtype or dtype})
            calls = ({name: partial(head_pass, head, config, args, device)
                      for name, head in all_heads(config, device).items()} if args.head else
                     {method: partial(training_step, config, method, args, device)})
            contestants |= {name + f', {dtype}' * (len(dtypes) > 1): call for name, call in calls.items()}
        what, sequences, flop = f'the head of {methods[0]}', args.micro_batch_size, 6 * V * config.n_embd
        if not args.head:
            what, sequences = 'the training step' + ', compiled' * args.compile, args.batch_size
            with torch.device('meta'):
                flop = GPT(config).flops_per_token()
        print(f'\n{size}, {what}: {sequences} x {args.block_size} tokens, V = {V:,}, {" and ".join(dtypes)}, '
              f'logits {args.logits_dtype or "alike"}')
        n = sequences * args.block_size
        compare(contestants, n, n * flop, best, args.seconds, device)


if __name__ == '__main__':
    program(main)
