"""
One training run.

    python train.py --method=mu_loss --lr=1e-1
    torchrun --nproc_per_node=4 train.py --method=mu_loss --lr=1e-1
    python train.py --method=mu_centering --size=tiny --steps=1000 --batch_size=8 --block_size=128

The third is for a laptop. The defaults are the paper's Appendix A. The same command again resumes a run that
was stopped, or says that it is done. checkpoint.py describes what a run leaves in its folder, --out.
"""
import argparse
import ctypes
import gc
import math
import os
import re
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import data
from checkpoint import Run, Signals, load_checkpoint, provenance
from common import UserError, number, parse_args
from common import run as run_program
from model import (
    GPT,
    METHODS,
    ROUNDED,
    SIZES,
    base_method,
    check_compiler,
    embeddings_to_loss,
    gpt_config,
    merge_stats,
)

# Dense BF16 peak in TFLOP/s, from NVIDIA's data sheets (without sparsity); matched as words of a GPU's name.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200': 989, 'B200': 2250,
               'A40': 150, 'A10': 125, 'L40S': 362, 'L4': 121, 'RTX 4090': 165, 'RTX 3090': 71}


# --------------------------------------------------------------------------------------------------
# settings

WHOLE, COUNT, POSITIVE = number(least=0, integer=True), number(least=1, integer=True), number(above=0)
EXTENT, SEED = number(least=1, below=2**16 + 1, integer=True), number(least=0, below=2**32, integer=True)
COMBINED = [f'{method}+mu_centering' for method in METHODS if method not in ('baseline', 'mu_centering')]
DTYPES = ['bfloat16', 'float32', 'float64']


def rounded_parts(text):
    """An argparse type: some of ROUNDED, separated by commas, or none."""
    parts = [] if text == 'none' else text.split(',')
    if not set(parts) <= set(ROUNDED):
        raise argparse.ArgumentTypeError(f'should be none or some of {",".join(ROUNDED)}, is {text!r}')
    return ','.join(part for part in ROUNDED if part in parts) or 'none'


# name: (default or None for one that fill_in finds, type or choices, meaning)
FLAGS = {
    'method (Sections 1 and 2 of the paper)': {
        'method': ('baseline', [*METHODS, *COMBINED], 'how the output logits are tamed'),
        'lam': (None, number(least=0), 'λ of the methods that have one (default: METHODS in model.py)'),
        'cap': (30.0, POSITIVE, 'soft-cap c of soft_capping, Eq. 6'),
        'center_every': (1, COUNT, 'steps from one μ-centering to the next'),
        'init_from': (None, str, 'start with the weights, optimizer state and step of this run or .pt file'),
    },
    'model (Appendix A)': {
        'size': ('16M', [*SIZES], "one of the paper's sizes (Eq. 19), or tiny"),
        'weight_tying': (False, bool, 'one matrix for input and output embeddings'),
        'n_layer': (None, EXTENT, 'layers (default: of --size)'),
        'n_embd': (None, EXTENT, 'width H (default: of --size)'),
        'n_head': (None, EXTENT, 'attention heads (default: of --size)'),
        'vocab_size': (None, EXTENT, "rows V of the head (default 50304; tiny: as the data need)"),
        'block_size': (2048, COUNT, 'sequence length in tokens'),
        'rope_fraction': (0.5, number(least=0, below=1.001), 'share of each head that RoPE rotates'),
        'mu_shift': (0.0, number(least=0, below=1e30), 'norm of a random vector added to all e_i at first'),
    },
    'optimization (Appendix A)': {
        'lr': (3e-3, number(above=0, below=1e33), 'peak learning rate η, Eq. 18'),
        'min_lr': (1e-5, number(least=0), 'learning rate at which the cosine ends'),
        'warmup': (None, WHOLE, 'steps of linear warm-up (default: 5%% of --steps)'),
        'steps': (100_000, COUNT, 'optimizer steps'),
        'batch_size': (64, EXTENT, 'sequences per step, of all processes together'),
        'beta1': (0.9, number(least=0, below=1), 'AdamW β1'),
        'beta2': (0.95, number(least=0, below=1), 'AdamW β2'),
        'eps': (1e-8, POSITIVE, 'AdamW ε'),
        'grad_clip': (1.0, number(least=0), 'largest norm of the gradient, 0 for any'),
        'seed': (1, SEED, 'of the initial weights and the data order'),
    },
    'precision and machine': {
        'device': (None, ['cuda', 'cpu'], 'default: cuda if there is a GPU'),
        'dtype': (None, DTYPES, 'of the products (default: bfloat16, which is autocast; on a CPU float32)'),
        'logits_dtype': (None, DTYPES, 'what the logits are rounded to, on a CPU too (default: --dtype)'),
        'rounded': (','.join(ROUNDED), rounded_parts, 'which of these --logits_dtype rounds, or none'),
        'micro_batch_size': (None, COUNT, 'sequences per forward pass and process (default: what fits)'),
        'head': ('chunked', ['chunked', 'plain'], 'plain holds tokens x vocabulary logits'),
        'compile': (None, bool, 'torch.compile (default: on cuda)'),
        'threads': (None, number(least=1, below=1025, integer=True), "CPU threads (default: PyTorch's)"),
        'deterministic': (False, bool, 'deterministic kernels, for bit-exact resume on a GPU'),
    },
    'data, output, logging': {
        'data': (None, str, 'folder of token shards (default data/fineweb)'),
        'out': (None, str, "the run's own folder (default out/train/<a name made from the settings>)"),
        'log_every': (10, COUNT, 'steps between log lines'),
        'eval_every': (5000, WHOLE, 'steps between evaluations, 0 for none'),
        'eval_tokens': (None, COUNT, 'test tokens of those (default 1,048,576; on a CPU 16,384)'),
        'test_tokens': (None, COUNT, 'test tokens of the final loss (default 10,485,760; on a CPU 131,072)'),
        'ckpt_every': (1000, WHOLE, 'steps between checkpoints, 0 for none'),
        'keep_every': (0, WHOLE, 'steps between model_<step>.pt that are kept, 0 for none'),
        'wandb': (None, str, 'Weights & Biases project to log to as well'),
    },
}


def parser():
    """The argparse parser of FLAGS."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    for title, flags in FLAGS.items():
        group = p.add_argument_group(title)
        for name, (default, kind, text) in flags.items():
            how = {'choices': kind} if isinstance(kind, list) else {'type': kind}
            if kind is bool:
                how = {'action': argparse.BooleanOptionalAction}
            shown = '' if default is None else f' (default {default})'
            group.add_argument(f'--{name}', default=default, help=text + shown, **how)
    return p


def run_name(args):
    """
    <size>-<tied|untied>-<method>[-lam<λ>]-lr<lr>[-shift<X>][-rounded_<a+b>]-s<seed>, numbers as %g: a run's
    folder in a sweep.
    """
    lam, tying = METHODS[base_method(args.method)], 'tied' if args.weight_tying else 'untied'
    lam = '' if lam is None else f'-lam{lam if args.lam is None else args.lam:g}'
    shift = f'-shift{args.mu_shift:g}' if args.mu_shift else ''
    rounded = '' if args.rounded == ','.join(ROUNDED) else f'-rounded_{args.rounded.replace(",", "+")}'
    return f'{args.size}-{tying}-{args.method}{lam}-lr{args.lr:g}{shift}{rounded}-s{args.seed}'


def fill_in(args, device_type, world_size):
    """Fills in the settings that follow from others. Raises UserError if a combination cannot work."""
    on_gpu = device_type == 'cuda'
    args.dtype = args.dtype or ('bfloat16' if on_gpu else 'float32')
    for name, value in {
            **SIZES[args.size], 'logits_dtype': args.dtype, 'compile': on_gpu, 'warmup': args.steps // 20,
            'lam': METHODS[base_method(args.method)] or 1e-4,
            'eval_tokens': 2**20 if on_gpu else 2**14, 'test_tokens': 10 * 2**20 if on_gpu else 2**17,
            'out': f'out/train/{run_name(args)}'}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    def refuse(wrong, message):
        if wrong:
            raise UserError(message)
    refuse(args.data == '', '--data= is empty; should be a folder')
    refuse(args.out == '', '--out= is empty; should be a folder')
    refuse(args.n_embd % args.n_head or args.n_embd // args.n_head % 2,
           f'--n_embd={args.n_embd} should be an even multiple of --n_head={args.n_head}')
    refuse(args.rope_fraction > 1, f'--rope_fraction={args.rope_fraction:g} should be from 0 to 1')
    refuse(base_method(args.method) == 'weight_decay' and args.lam > 1,
           f'--lam={args.lam:g} should be at most 1 with --method={args.method}: E <- (1 - lam) E')
    refuse(args.center_every > 1 and not centers(args.method),
           f'--center_every needs --method=mu_centering, not {args.method}')
    refuse(args.mu_shift and (args.weight_tying or args.init_from),
           '--mu_shift needs a new, untied model, without --weight_tying (which would move the input '
           'embeddings too) and --init_from')
    refuse(args.rounded != ','.join(ROUNDED) and args.dtype == 'bfloat16',
           f'--rounded={args.rounded} needs --dtype=float32: products in bfloat16 round all of it')
    refuse(args.min_lr > args.lr, f'--min_lr={args.min_lr:g} should not be above --lr={args.lr:g}')
    refuse(args.warmup >= args.steps, f'--warmup={args.warmup} should be below --steps={args.steps}')
    share, rest = divmod(args.batch_size, world_size)
    refuse(rest, f'--batch_size={args.batch_size} should be a multiple of the {world_size} processes')
    refuse(args.micro_batch_size and share % args.micro_batch_size,
           f'--micro_batch_size={args.micro_batch_size} should divide the {share} sequences of each process')
    for name in ('eval_tokens', 'test_tokens'):
        refuse(getattr(args, name) < args.block_size,
               f'--{name}={getattr(args, name)} should be at least --block_size={args.block_size}')
    refuse('float64' in (args.dtype, args.logits_dtype) and args.dtype != args.logits_dtype,
           f'--dtype={args.dtype} with --logits_dtype={args.logits_dtype}: float64 goes with float64 only')
    if args.compile:
        check_compiler(gpt_config(vars(args)))


def default_data(on_gpu):
    """The shards if --data is not given: FineWeb; where there are none and no GPU, the standard library's."""
    if os.path.isdir('data/fineweb'):
        return 'data/fineweb'
    if on_gpu:
        raise UserError('--data: there is no data/fineweb; make it with prepare_fineweb.py, or name a folder')
    if not os.path.exists('data/stdlib/meta.json') and 'RANK' not in os.environ:
        print('no data/fineweb here: making data/stdlib from the Python standard library instead', flush=True)
        prepare = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'prepare_fineweb.py')
        flags = ['--source=stdlib', '--tokenizer=bytes', '--out=data/stdlib']
        if subprocess.run([sys.executable, prepare, *flags]).returncode:
            raise UserError('data/stdlib could not be made, see above; name another folder with --data', 1)
    return 'data/stdlib'


def load_data(args, on_gpu):
    """The train and val shards; fills in args.data and args.vocab_size. UserError if they do not fit."""
    args.data = default_data(on_gpu) if args.data is None else args.data
    vocabulary = data.vocabulary(args.data)
    if args.vocab_size is None:
        args.vocab_size = 64 * math.ceil(vocabulary / 64) if args.size == 'tiny' else 50304
    if vocabulary > args.vocab_size:
        raise UserError(f'--data={args.data}: its vocabulary has {vocabulary} tokens, more than the head '
                        f'(--vocab_size={args.vocab_size})')
    splits = []
    for split in ('train', 'val'):
        shards = data.load_shards(args.data, split)
        if data.count_windows(shards, args.block_size).sum() == 0:
            raise UserError(f'--data={args.data}: no {split} shard has a whole window of '
                            f'--block_size={args.block_size} tokens')
        for shard in shards:  # the start of each here, the rest as it is read
            data.check_tokens(shard, 0, 2**20, args.vocab_size)
        splits.append(shards)
    unfinished = data.unfinished(args.data)
    if unfinished and os.environ.get('RANK', '0') == '0':
        print(unfinished, flush=True)
    return splits


# --------------------------------------------------------------------------------------------------
# the machine


def torchrun_ranks():
    """(rank, local rank, number of processes) as torchrun sets them; (0, 0, 1) without it."""
    try:
        rank, local_rank = (int(os.environ.get(name, 0)) for name in ('RANK', 'LOCAL_RANK'))
        world_size = int(os.environ.get('WORLD_SIZE', 1))
        if not 0 <= rank < world_size or (world_size > 1 and 'MASTER_ADDR' not in os.environ):
            raise ValueError
    except ValueError as error:
        raise UserError('RANK, LOCAL_RANK and WORLD_SIZE are not as torchrun sets them; start several '
                        'processes with torchrun', any_rank=True) from error
    return rank, local_rank, world_size


def find_device(args, local_rank):
    """The torch device of this process; fills in args.device and sets the number of CPU threads."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    args.device = args.device or ('cuda' if n_gpus else 'cpu')
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == 'cpu':
        return torch.device('cpu')
    if local_rank >= n_gpus:
        raise UserError(f'--device=cuda: {local_rank + 1} processes here, but {n_gpus} GPUs; should be cpu, '
                        'or fewer processes')
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # long sums stay in fp32
    return torch.device('cuda', local_rank)


def keep_freed_memory():
    """
    Tells glibc to keep freed memory for the next tensor of that size. Memory that it returns to the system
    comes back as pages which the kernel has to zero first: half the time of a small step on a CPU.
    """
    if sys.platform == 'linux':
        mallopt = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: None)  # musl has none
        mallopt(-3, 2**30)      # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def fitting_micro_batch(per_process, config, device, compiled):
    """
    The most sequences, a divisor of per_process, whose activations should fit the device: about 40 H + 8 F
    bytes per token and layer (F the width of the SwiGLU) in its free memory, compiled 31 H + 4.7 F, and 20 V
    with the plain head; on a CPU 16,384 tokens.
    """
    tokens = 16384
    if device.type == 'cuda':
        of_H, of_F = (31, 4.7) if compiled else (40, 8)
        per_token = config.n_layer * (of_H * config.n_embd + of_F * config.n_hidden)
        per_token += 20 * config.vocab_size if config.head == 'plain' else 0
        tokens = 0.7 * torch.cuda.mem_get_info(device)[0] / per_token
    divisors = (m for m in range(1, per_process + 1) if per_process % m == 0)
    return max((m for m in divisors if m * config.block_size <= tokens), default=1)


def peak_flops(device_name):
    """BF16 peak of a device in FLOP/s, None if PEAK_TFLOPS does not know it."""
    known = (1e12 * peak for name, peak in PEAK_TFLOPS.items() if re.search(rf'\b{name}\b', device_name))
    return next(known, None)


# --------------------------------------------------------------------------------------------------
# the step


def learning_rate(step, args):
    """η of step 0, 1, ...: lr (step + 1) / (warmup + 1), then a cosine that would reach min_lr at `steps`."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    progress = (step - args.warmup) / (args.steps - args.warmup)
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (args.lr - args.min_lr)


def centers(method):
    """Whether a method centers the output embeddings: mu_centering, or another one with +mu_centering."""
    return method.split('+')[-1] == 'mu_centering'


def coupled_update(optimizer, E):
    """
    The update (V, H) of E by Coupled Adam (Stollenwerk and Stollenwerk 2025) from the moments that Adam has
    just updated: m_hat / (sqrt(nu_hat) + eps), nu = 1/V sum_i v_i. Both averages are linear, so the state
    may keep v_i instead of nu.
    """
    group, state = optimizer.param_groups[0], optimizer.state[E]
    (beta1, beta2), t = group['betas'], state['step'].to(E.dtype)
    m_hat = state['exp_avg'] / (1 - beta1 ** t)
    nu_hat = state['exp_avg_sq'].mean(dim=0) / (1 - beta2 ** t)
    return m_hat / (nu_hat.sqrt() + group['eps'])


def train_step(model, raw_model, optimizer, batch, step, lr, args, finite, with_stats):
    """
    Optimizer step 1, 2, ... at learning rate lr on a list of micro-batches (tokens, targets). `model` is
    raw_model or its DDP wrapper. `finite` () is 1 until a gradient is not finite, and 0 from then on, when
    nothing is updated any more. Returns the statistics, summed over positions, and the gradient norm ().
    """
    E, method = raw_model.E, raw_model.config.method
    for group in optimizer.param_groups:
        group['lr'] = lr

    stats = {}
    for i, (tokens, targets) in enumerate(batch):
        last = i == len(batch) - 1
        with nullcontext() if model is raw_model or last else model.no_sync():  # DDP reduces in the last one
            loss, micro_stats = model(tokens, targets, with_stats)
            (loss / len(batch)).backward()
        stats = merge_stats(stats, micro_stats)
    penalty = embeddings_to_loss(E, raw_model.config, step)  # once per step, not per micro-batch or process
    if penalty.requires_grad:
        E.grad += torch.autograd.grad(penalty, E)[0]
        stats['reg'] = stats['reg'] + sum(targets.numel() for _, targets in batch) * penalty.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), args.grad_clip or math.inf)

    # The fused optimizer skips its update where found_inf is 1, so the host need not wait to look at it.
    finite *= torch.isfinite(grad_norm)
    optimizer.found_inf = 1 - finite
    with torch.no_grad():
        if method == 'weight_decay':  # E <- (1 - lam) E - lr u, whatever the learning rate (Eq. 2)
            E *= 1 - args.lam * finite.to(E.dtype)
        before = E.clone() if method == 'coupled_adam' else None
        optimizer.step()
        if method == 'coupled_adam':  # E <- E - lr u, with one second moment for all embeddings
            E.copy_(torch.where(finite > 0, before - lr * coupled_update(optimizer, E), before))
        if centers(args.method) and step % args.center_every == 0:  # e*_i = e_i - mu, on every rank (Eq. 9)
            E -= finite * E.mean(dim=0)
    optimizer.zero_grad(set_to_none=True)
    return stats, grad_norm


def reduce_over_ranks(stats, stop, save):
    """Statistics and signals of all processes: sums are summed, the largest logit and signals maximised."""
    names = [name for name in stats if name != 'logit_max']
    sums = torch.stack([stats[name] for name in names])
    maxima = torch.stack((stats['logit_max'], *sums.new_tensor([stop, save])))
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    logit_max, stop, save = maxima.unbind()
    return {**dict(zip(names, sums.unbind(), strict=True)), 'logit_max': logit_max}, int(stop), int(save)


def log_entry(step, lr, stats, grad_norm, E, n_tokens):
    """A line of the log as a dict, from sums over n_tokens. The host waits for the device here."""
    mean = {name: value.item() / n_tokens for name, value in stats.items()}
    variance = mean['logit_mean_squared'] - mean['logit_mean'] ** 2
    spread = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else math.nan
    return {'step': step, 'loss': mean['loss'], 'reg': mean['reg'], 'lr': lr, 'grad_norm': grad_norm.item(),
            'mu_norm': E.detach().mean(dim=0).norm().item(), 'logit_mean': mean['logit_mean'],
            'logit_mean_spread': spread, 'logit_std': mean['logit_std'], 'logit_absmax': mean['logit_absmax'],
            'logit_max': stats['logit_max'].item(), 'gradient_sum': mean.get('gradient_sum')}


def log_line(entry, steps, seconds_left):
    """A log entry as one line for the terminal."""
    left, mfu = int(seconds_left), '-' if entry['mfu'] is None else f'{entry["mfu"]:.1%}'
    return (f'step {entry["step"]:>{len(str(steps))}}/{steps} | loss {entry["loss"]:.4f} | '
            f'reg {entry["reg"]:.2e} | lr {entry["lr"]:.2e} | |grad| {entry["grad_norm"]:.2f} | '
            f'|mu| {entry["mu_norm"]:.3g} | logit mean {entry["logit_mean"]:+.2f} '
            f'max {entry["logit_max"]:.1f} | {entry["tokens_per_second"] / 1000:.1f}k tok/s | mfu {mfu} | '
            f'{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left')


def evaluate(model, shards, n_tokens, micro_batch_size, rank, world_size):
    """
    The bare cross entropy, in nats, of the model (not its DDP wrapper) over the first n_tokens of the
    shards: the same windows for every run, dealt out to the processes in turn.
    """
    block_size, device = model.config.block_size, model.E.device
    n_windows = min(n_tokens // block_size, int(data.count_windows(shards, block_size).sum()))
    total = torch.zeros((), dtype=torch.float64)
    mine = np.arange(n_windows)[rank::world_size]
    for first in range(0, len(mine), micro_batch_size):
        windows = mine[first:first + micro_batch_size]
        batch = torch.from_numpy(data.read_windows(shards, block_size, windows, model.config.vocab_size))
        batch = batch.to(device)
        with torch.no_grad():
            _, stats = model(batch[:, :-1], batch[:, 1:], with_stats=False)
        total += stats['loss'].cpu()
    if world_size > 1:
        total = total.to(device)
        dist.all_reduce(total)
    return total.item() / (n_windows * block_size)


# --------------------------------------------------------------------------------------------------
# the run


def find_init_from(path):
    """The .pt file that --init_from names: the file itself, or a run folder's ckpt.pt or model.pt."""
    if not os.path.isdir(path):
        return path
    checkpoint, model = os.path.join(path, 'ckpt.pt'), os.path.join(path, 'model.pt')
    return model if os.path.exists(model) else checkpoint


def restore(path, state, model, optimizer, args):
    """
    Loads the weights of a checkpoint, and its optimizer state if it has one; returns its step. Raises
    UserError if they do not fit this command.
    """
    try:
        model.load_state_dict(state['model'])
        if 'optimizer' in state:
            optimizer.load_state_dict(state['optimizer'])
            optimizer.param_groups[0].update(betas=(args.beta1, args.beta2), eps=args.eps)
        if not 0 < state['step'] <= args.steps:
            raise ValueError(f'it is at step {state["step"]}, --steps={args.steps}')
        return state['step']
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = ' '.join(str(error).split())[:150]
        raise UserError(f'{path} does not fit this command ({reason})') from error


def result_of(args, model, counters, step, loss, broken):
    """result.json: the columns of results.csv that training knows."""
    method, made, seconds = model.config.method, step - counters['skipped'], counters['step_seconds']
    tokens = (made - counters['first_step']) * args.batch_size * args.block_size
    return {
        'method': args.method, 'size': args.size, 'n_params': model.n_params(),
        'weight_tying': int(args.weight_tying), 'lam': None if METHODS[method] is None else args.lam,
        'cap': args.cap if method == 'soft_capping' else None, 'lr': args.lr, 'seed': args.seed,
        'steps': args.steps, 'logits_dtype': args.logits_dtype, 'mu_shift': args.mu_shift,
        'rounded': args.rounded, 'init_loss': counters['init_loss'],
        'test_loss': loss, 'diverged': 1 if broken else None,
        'diverged_step': min(step, made + 1) if broken else None,
        'mu_norm': model.E.detach().mean(dim=0).norm().item(),
        'lr_sum': sum(learning_rate(i, args) for i in range(made)), 'train_seconds': counters['elapsed'],
        'tokens_per_second': tokens / seconds if seconds else None,
        'device': args.device_name + (f' x {args.processes}' if args.processes > 1 else '')}


def shift_mean(E, norm, seed):
    """Adds a random vector of this norm to every e_i. By Fact 2 only rounding can tell the difference."""
    direction = torch.randn(E.size(1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        E += (norm * direction / direction.norm()).to(E)


def wrap_in_ddp(model, device):
    with warnings.catch_warnings():  # torch 2.13 has a new name for broadcast_buffers
        warnings.simplefilter('ignore', FutureWarning)
        return DDP(model, device_ids=[device.index] if device.type == 'cuda' else None,
                   gradient_as_bucket_view=True, broadcast_buffers=False)


def leave(run, parallel):
    """Lets go of the run's folder and of the other processes."""
    run.close()
    if parallel:
        dist.barrier()  # torchrun would end a process that is still writing when another one leaves
        gc.collect()
        dist.destroy_process_group()


def main(argv=None):
    # settings
    args = parse_args(parser(), argv)
    rank, local_rank, world_size = torchrun_ranks()
    device = find_device(args, local_rank)
    on_gpu, parallel = device.type == 'cuda', world_size > 1
    fill_in(args, device.type, world_size)
    keep_freed_memory()
    if args.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)

    def say(text):
        if rank == 0:
            print(text, flush=True)

    # data
    train_shards, val_shards = load_data(args, on_gpu)
    n_windows = int(data.count_windows(train_shards, args.block_size).sum())
    tokens_per_step = args.batch_size * args.block_size

    def load_batch(step):
        """This process's share of the batch of `step`, on the device: micro-batches (tokens, targets)."""
        windows = data.batch_windows(args.seed, step, args.batch_size, n_windows, rank, world_size)
        batch = torch.from_numpy(data.read_windows(train_shards, args.block_size, windows, args.vocab_size))
        batch = batch.pin_memory().to(device, non_blocking=True) if on_gpu else batch
        return [(part[:, :-1], part[:, 1:]) for part in batch.split(args.micro_batch_size)]

    # model and optimizer; initialised on the CPU, so that every device starts from the same weights
    config = gpt_config(vars(args))
    torch.manual_seed(args.seed)
    raw_model = GPT(config).to(device, torch.float64 if args.dtype == 'float64' else torch.float32)
    shift_mean(raw_model.E, args.mu_shift, args.seed)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=args.lr, betas=(args.beta1, args.beta2),
                                  eps=args.eps, weight_decay=0.0, fused=True)
    vars(args).update(provenance(device), processes=world_size,
                      data_fingerprint=data.fingerprint(train_shards + val_shards))

    # the run's folder: that of another run, done, stopped on the way, or new
    run = Run(args.out, vars(args), master=rank == 0)
    per_process = args.batch_size // world_size
    earlier = run.before.get('micro_batch_size') if args.deterministic else None
    if earlier in range(1, per_process + 1) and per_process % earlier == 0:  # a resume sums in the same order
        args.micro_batch_size = args.micro_batch_size or earlier
    if not args.micro_batch_size:
        args.micro_batch_size = fitting_micro_batch(per_process, config, device, args.compile)
    counters = {'elapsed': 0.0, 'step_seconds': 0.0, 'init_loss': None, 'skipped': 0, 'first_step': 0}
    step = 0
    if args.init_from and not run.has('ckpt.pt') and not run.has('result.json'):
        path = find_init_from(args.init_from)
        source = load_checkpoint(path, ('model', 'config'), '--init_from should be a run folder or .pt file')
        step = counters['first_step'] = restore(path, source, raw_model, optimizer, args)
        counters['init_loss'] = source.get('counters', {}).get('init_loss')
        if step == args.steps:
            raise UserError(f'--init_from={path} is at step {step}, so --steps={args.steps} should be more')
    if parallel:
        dist.init_process_group('nccl' if on_gpu else 'gloo', device_id=device if on_gpu else None)
    run.take()
    if parallel:
        dist.barrier()  # nobody looks into the folder before it is ours
    result = run.result()
    if result:
        say(f'{args.out} is done: test loss {result.get("test_loss")}')
        leave(run, parallel)
        return 0
    checkpoint = run.checkpoint(counters)
    if checkpoint:
        step = restore(run.path('ckpt.pt'), checkpoint, raw_model, optimizer, args)
        counters = checkpoint['counters']
    resumed, checkpoint, source = checkpoint is not None, None, None  # their tensors can go
    run.begin(step if resumed else None)

    # torch.compile and DDP
    if args.compile:
        raw_model.compile_parts()
    model = wrap_in_ddp(raw_model, device) if parallel else raw_model
    say(f'{args.out}\n{args.method}, {args.size}, {raw_model.n_params() / 1e6:.1f}M parameters, '
        f'{args.device_name}, {args.dtype}, logits {args.logits_dtype}; {args.batch_size} x '
        f'{args.block_size} tokens per step: {world_size} processes x '
        f'{per_process // args.micro_batch_size} x {args.micro_batch_size}; {n_windows:,} windows in '
        + args.data + (f'; resuming at step {step}' if step else ''))

    def test_loss(n_tokens):
        return evaluate(raw_model, val_shards, n_tokens, args.micro_batch_size, rank, world_size)

    def save_checkpoint():
        counters.update(elapsed=time.perf_counter() - began, skipped=int(skipped))
        run.save('ckpt.pt', raw_model, step, optimizer=optimizer.state_dict(), counters=counters)

    # the loop
    signals = Signals()
    began = time.perf_counter() - counters['elapsed']
    skipped = torch.tensor(float(counters['skipped']), device=device)  # steps since a gradient was not finite
    finite = (skipped == 0).float()  # the host reads these two on log steps only
    if not resumed:
        loss = test_loss(args.eval_tokens)
        run.log({'step': step, 'test_loss': loss})
        if step == 0:
            counters['init_loss'] = loss
        else:  # --init_from: from now on this run does not need the other one
            save_checkpoint()
    peak = peak_flops(args.device_name) if args.dtype == 'bfloat16' else None
    stop, broken = 0, False
    batch = load_batch(step) if step < args.steps else None
    interval, interval_steps = time.perf_counter(), 0
    while step < args.steps:
        lr = learning_rate(step, args)
        step += 1
        interval_steps += 1
        last = step == args.steps
        log_now = last or step == 1 or step % args.log_every == 0
        stats, grad_norm = train_step(model, raw_model, optimizer, batch, step, lr, args, finite, log_now)
        skipped += 1 - finite
        batch = None if last else load_batch(step)  # while the device still works on this step

        # The processes communicate on log steps, so only there they can agree on a signal.
        stop, save = signals.take() if log_now or not parallel else (0, 0)
        if log_now:
            if parallel:
                stats, stop, save = reduce_over_ranks(stats, stop, save)
            entry = log_entry(step, lr, stats, grad_norm, raw_model.E, tokens_per_step)
            now = time.perf_counter()
            rate = interval_steps * tokens_per_step / (now - interval)
            counters['step_seconds'] += now - interval
            interval, interval_steps = now, 0
            mfu = rate * raw_model.flops_per_token() / (world_size * peak) if peak else None
            entry.update(tokens_per_second=rate, mfu=mfu, elapsed=now - began)
            run.log(entry)
            say(log_line(entry, args.steps, (args.steps - step) * tokens_per_step / rate))
            broken = int(skipped) > 0 or not math.isfinite(entry['loss'])
            if broken:
                break  # the weights are still the last finite ones

        paused = time.perf_counter()
        if args.eval_every and step % args.eval_every == 0 and not last:
            loss = test_loss(args.eval_tokens)
            run.log({'step': step, 'test_loss': loss})
            say(f'step {step}: test loss {loss:.4f} on {args.eval_tokens:,} tokens')
        if args.keep_every and step % args.keep_every == 0:
            run.save(f'model_{step}.pt', raw_model, step)
        if last or save or stop or (args.ckpt_every and step % args.ckpt_every == 0):
            save_checkpoint()
        if stop:
            break
        interval += time.perf_counter() - paused  # tokens per second are those of the steps alone

    # the end: test loss, model.pt, result.json
    signals.exit_at_once()
    if stop:
        say(f'stopped by a signal at step {step}; the same command resumes there')
    else:
        loss = math.nan if broken else test_loss(args.test_tokens)
        run.log({'step': step, 'test_loss': loss})
        counters.update(elapsed=time.perf_counter() - began, skipped=int(skipped))
        made = step - counters['skipped']  # updates
        run.save('model.pt', raw_model, made)
        run.finish(result_of(args, raw_model, counters, step, loss, broken))
        say(f'done: test loss {loss:.4f} after {made} steps, {counters["elapsed"]:.0f} s, in {args.out}')
    signals.restore()
    del model  # if DDP were the last to let go of the process group, the two could wait for each other
    leave(run, parallel)
    return 128 + stop if stop else 0


def main_of_rank(argv):
    """main, in which the loss of another process of the run is one line."""
    try:
        return main(argv)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and 'gloo' not in str(error):
            raise
        reason = str(error)[:150]
        raise UserError(f'rank {os.environ.get("RANK")}: lost another process of this run ({reason}); the '
                        'same command resumes from the last checkpoint', 1, any_rank=True) from error


if __name__ == '__main__':
    run_program(main_of_rank)
