"""
One training run.

    python train.py --method=mu_loss --lr=1e-1
    torchrun --nproc_per_node=4 train.py --method=mu_loss --lr=1e-1
    python train.py --method=mu_centering --size=tiny --steps=1000 --batch_size=8 --block_size=128     # on a laptop
    python train.py --init_from=out/paper/RUN --method=mu_centering              # go on from another run with another method

The defaults are the paper's Appendix A. The run's folder holds config.json, log.jsonl, ckpt.pt while it runs, and at the
end model.pt and result.json. The same command again goes on where the run was stopped, or says that it is done.
"""
import ctypes
import gc
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import data
from common import die, lock_folder, make_folder, read_json, run, write_atomic, write_json
from model import GPT, LAM, STATS, embeddings_to_loss, gpt_config, merge_stats, no_stats, swiglu_width
from settings import check_settings, fill_in, load_checkpoint, load_data, parse_run

# Dense BF16 peak of one device in TFLOP/s, from NVIDIA's data sheets (without sparsity); matched as words of its name.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200': 989, 'A40': 150, 'A10': 125, 'L40S': 362,
               'L4': 121, 'RTX 4090': 165, 'RTX 3090': 71, 'B200': 2250}


# ----------------------------------------------------------------------------------------------------------------------
# small functions


def learning_rate(step, s):
    """η of step 0, 1, ...: lr (step + 1) / (warmup + 1), then a cosine that reaches min_lr at the last step (Appendix A)."""
    if step < s['warmup']:
        return s['lr'] * (step + 1) / (s['warmup'] + 1)
    progress = (step - s['warmup']) / max(1, s['steps'] - 1 - s['warmup'])
    return s['min_lr'] + 0.5 * (1 + math.cos(math.pi * progress)) * (s['lr'] - s['min_lr'])


def find_device(args, local_rank):
    """The torch device of this process; sets args.device and, on a CPU, the number of threads."""
    if args.device is None:
        args.device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if args.device not in ('cpu', 'cuda', 'mps') or args.device != 'cpu' and not getattr(torch, args.device).is_available():
        die(f'--device={args.device}: not on this machine; should be cuda, mps or cpu')
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device != 'cuda':
        return torch.device(args.device)
    if local_rank >= torch.cuda.device_count():
        die(f'{local_rank + 1} processes on this machine, but it has {torch.cuda.device_count()} GPUs; lower --nproc_per_node')
    torch.cuda.set_device(local_rank)
    return torch.device('cuda', local_rank)


def keep_freed_memory():
    """
    Has glibc keep freed memory for the next tensor of that size: given back, it returns as fresh pages that the kernel must
    zero first, half the time of a small CPU step. What stays between the tensors of a loop keeps them from being reused.
    """
    if sys.platform == 'linux':
        mallopt = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: None)  # musl has none
        mallopt(-3, 2**30)      # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def fitting_micro_batch(per_process, config, device):
    """
    The most sequences in a forward pass, a divisor of per_process, whose activations are estimated to fit the device:
    about 40 H + 8 F bytes a token and layer (F the SwiGLU width) of what is free, on a CPU 16,384 tokens.
    """
    budget = 16384
    if device.type == 'cuda':
        H, F = config.n_embd, swiglu_width(config.n_embd)
        budget = 0.7 * torch.cuda.mem_get_info(device)[0] / (config.n_layer * (40 * H + 8 * F))
    fitting = [m for m in range(1, per_process + 1) if per_process % m == 0 and m * config.block_size <= budget]
    return max(fitting, default=1)


def peak_flops(device_name):
    """BF16 peak of the device in FLOP/s, None where PEAK_TFLOPS does not know it."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if re.search(rf'\b{name}\b', device_name)), None)


def processor():
    """The model of this machine's CPU, or its architecture where the system does not say."""
    try:
        with open('/proc/cpuinfo') as file:
            return next(line.split(':')[1].strip() for line in file if line.startswith('model name'))
    except (OSError, StopIteration, IndexError):
        return platform.machine()


def git_commit():
    """The commit of this folder, None where it is no git checkout."""
    try:
        return subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True,
                              text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cut_log(path, step, steps):
    """
    Keeps the log up to the checkpoint's `step`: what a stopped run wrote after it is trained and written again, and so is
    the final test loss (that of `steps`).
    """
    kept = []
    if os.path.exists(path):
        for line in open(path, encoding='utf-8', errors='replace'):
            try:
                entry = json.loads(line)
                kept += [line] if entry['step'] <= step and ('test_loss' not in entry or entry['step'] < steps) else []
            except (ValueError, TypeError, KeyError):  # half a line, written as the power went or the disk was full
                pass
        write_atomic(path, lambda file: file.write(''.join(kept)), mode='w')


def log_line(entry, steps, seconds_left):
    """One line for the terminal from a log entry."""
    left = int(seconds_left)
    mfu = '-' if entry['mfu'] is None else f"{entry['mfu']:.1%}"
    return (f"step {entry['step']:>{len(str(steps))}}/{steps} | loss {entry['loss']:.4f} | reg {entry['reg']:.2e} | lr {entry['lr']:.2e} | "
            f"|grad| {entry['grad_norm']:.2f} | |mu| {entry['mu_norm']:.3g} | logit mean {entry['logit_mean']:+.2f} "
            f"max {entry['logit_max']:.1f} | {entry['tokens_per_second'] / 1000:.1f}k tok/s | mfu {mfu} | "
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")


def diverged(counters, step, loss, s):
    """
    Our rule (the paper gives none): the loss is not finite, or its exponential average over log points, half-life 1% of
    the steps, stands more than divergence_margin above its own lowest value after warm-up. Updates `counters`.
    """
    if not math.isfinite(loss):
        return True
    if counters['smooth_loss'] is None:
        counters['smooth_loss'] = loss
    keep = 0.5 ** ((step - counters['smooth_step']) / (0.01 * s['steps']))
    counters['smooth_loss'] = keep * counters['smooth_loss'] + (1 - keep) * loss
    counters['smooth_step'] = step
    if step > s['warmup']:
        counters['lowest_loss'] = min(counters['lowest_loss'], counters['smooth_loss'])
    return counters['smooth_loss'] > counters['lowest_loss'] + s['divergence_margin']


def evaluate(model, shards, n_tokens, micro_batch_size, rank, world_size):
    """
    The bare cross entropy, in nats, of the model (not its DDP wrapper) over the first n_tokens of the shards: the same
    windows for every run, dealt out to the processes in turn.
    """
    block_size, device = model.config.block_size, model.E.device
    n_windows = min(n_tokens // block_size, int(data.count_windows(shards, block_size).sum()))
    windows = torch.arange(rank, n_windows, world_size).split(micro_batch_size)
    total = torch.zeros((), dtype=torch.float64)
    for part in windows:
        batch = torch.from_numpy(data.read_windows(shards, block_size, part.numpy(), model.config.vocab_size)).to(device)
        with torch.no_grad():
            total += model(batch[:, :-1], batch[:, 1:], with_stats=False)[1][0].cpu().double()
    if world_size > 1:
        total = total.to(device)
        dist.all_reduce(total)
    return total.item() / (n_windows * block_size)


# ----------------------------------------------------------------------------------------------------------------------
# the step and the run


def coupled_update(optimizer, E):
    """
    The update (V, H) of E that Coupled Adam (Stollenwerk and Stollenwerk 2025) takes from the moments that Adam has just
    brought up to date: m_hat / (sqrt(nu_hat) + eps) with nu = 1/V sum_i v_i. Averaging is linear, so whether the state keeps
    v_i, as here, or nu makes no difference to any nu that follows.
    """
    group, state = optimizer.param_groups[0], optimizer.state[E]
    (beta1, beta2), t = group['betas'], state['step'].to(E.dtype)
    m_hat = state['exp_avg'] / (1 - beta1 ** t)
    nu_hat = state['exp_avg_sq'].mean(dim=0) / (1 - beta2 ** t)
    return m_hat / (nu_hat.sqrt() + group['eps'])


def train_step(model, raw_model, optimizer, batch, step, lr, s, finite, with_stats):
    """
    Optimizer step 1, 2, ... at learning rate lr on a list of micro-batches (tokens, targets), with the settings s. `model` is
    the DDP wrapper or raw_model itself. `finite` () is 1, and set to 0 once a gradient is not finite: from then on there
    are no updates. Returns STATS (7,), of the logits too with with_stats, and the gradient norm ().
    """
    for group in optimizer.param_groups:
        group['lr'] = lr
    stats = no_stats(raw_model.E)
    for i, (tokens, targets) in enumerate(batch):
        # DDP reduces the gradients in the last micro-batch only
        with nullcontext() if model is raw_model or i == len(batch) - 1 else model.no_sync():
            loss, micro_stats = model(tokens, targets, with_stats)
            (loss / len(batch)).backward()
        stats = merge_stats(stats, micro_stats)
    E = raw_model.E
    penalty = embeddings_to_loss(E, raw_model.config, step)  # once a step, after the micro-batches and the processes were averaged
    if penalty.requires_grad:
        E.grad += torch.autograd.grad(penalty, E)[0]
        stats[1] += sum(targets.numel() for _, targets in batch) * penalty.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), s['grad_clip'] or math.inf)

    # the fused optimizer skips its update where found_inf is 1: no step waits for the host to look
    finite *= torch.isfinite(grad_norm)
    optimizer.found_inf = 1 - finite
    with torch.no_grad():
        if raw_model.config.head_mode == 'weight_decay':  # E <- (1 - lam) E - lr u, whatever the learning rate (Eq. 2)
            E.mul_(1 - s['lam'] * finite.to(E.dtype))
        before = E.clone() if raw_model.config.head_mode == 'coupled_adam' else None
        if E.device.type != 'mps' or finite:  # the kernel for MPS does not look at found_inf
            optimizer.step()
            if before is not None:  # the update of E once more, with the second moment averaged over the vocabulary
                E.copy_(torch.where(finite > 0, before - lr * coupled_update(optimizer, E), before))
        if 'mu_centering' in s['method'] and step % s['center_every'] == 0:  # e*_i = e_i - mu, on every rank, on the raw weight (Eq. 9)
            for W in (E, raw_model.wte.weight) if s['center_input'] else (E,):
                W.sub_(finite.to(W.dtype) * W.mean(dim=0))
    optimizer.zero_grad(set_to_none=True)
    return stats, grad_norm


def main(argv=None):
    args, source = parse_run(argv, __doc__)
    try:
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    except ValueError:
        die('RANK, LOCAL_RANK and WORLD_SIZE should be whole numbers, as torchrun sets them', any_rank=True)
    if not 0 <= rank < world_size or world_size > 1 and 'MASTER_ADDR' not in os.environ:
        die(f'RANK={rank} with WORLD_SIZE={world_size}: several processes are started with torchrun', any_rank=True)
    master = rank == 0
    device = find_device(args, local_rank)
    if device.type == 'cpu':
        keep_freed_memory()
    on_gpu = device.type == 'cuda'
    fill_in(args, device.type, world_size)
    if source and source['step'] >= args.steps:
        die(f'--init_from={args.init_from} is at step {source["step"]}: --steps={args.steps} should be more')
    train_shards, val_shards = load_data(args)
    n_windows = int(data.count_windows(train_shards, args.block_size).sum())
    config = gpt_config(vars(args))
    if source:
        with torch.device('meta'):
            wanted = {name: w.shape for name, w in GPT(config).state_dict().items()}
        if wanted != {name: w.shape for name, w in source['model'].items()}:
            die(f'--init_from={args.init_from} holds a model of another shape than the one that this command describes')
    per_process = args.batch_size // world_size
    micro = args.micro_batch_size = args.micro_batch_size or fitting_micro_batch(per_process, config, device)
    accumulation = per_process // micro
    device_name = torch.cuda.get_device_name(device) if on_gpu else f'{device.type} ({processor()})'
    settings = {**vars(args), 'data_fingerprint': data.fingerprint(train_shards + val_shards), 'processes': world_size,
                'threads': torch.get_num_threads(), 'device_name': device_name, 'commit': git_commit(),
                'versions': {'python': platform.python_version(), 'torch': str(torch.__version__)}}
    if args.wandb:
        try:
            import wandb
        except ImportError:
            die('--wandb needs the wandb package: pip install wandb')

    # the run's folder: another run's, done, half done, or new
    config_path, log_path, ckpt_path, model_path, result_path = (
        os.path.join(args.out, name) for name in ('config.json', 'log.jsonl', 'ckpt.pt', 'model.pt', 'result.json'))
    if os.path.exists(config_path):
        check_settings(args.out, read_json(config_path), settings)
    if world_size > 1:
        dist.init_process_group('nccl' if on_gpu else 'gloo')
    lock = None
    if master:
        make_folder(args.out)
        lock = lock_folder(args.out)
    if world_size > 1:
        dist.barrier()  # nobody looks before the folder is ours
    if os.path.exists(result_path):
        if master:
            print(f'{args.out} is done: test loss {read_json(result_path).get("test_loss")}')
            if os.path.exists(ckpt_path):  # killed between the two
                os.unlink(ckpt_path)
            lock.close()
        if world_size > 1:
            dist.destroy_process_group()
        return 0
    checkpoint = load_checkpoint(ckpt_path) if os.path.exists(ckpt_path) else None
    if checkpoint:
        check_settings(ckpt_path, checkpoint['config'], settings)
    if args.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)

    # model and optimizer; initialised on the CPU, so every device and every method starts from the same weights
    torch.manual_seed(args.seed)
    raw_model = GPT(config)
    if args.dtype == 'float64':
        raw_model.double()
    counters = {'elapsed': 0.0, 'step_seconds': 0.0, 'init_loss': None, 'diverged_step': None,
                'skipped': 0, 'smooth_loss': None, 'smooth_step': 0, 'lowest_loss': math.inf, 'first_step': 0}
    step = 0
    raw_model.to(device)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                                  weight_decay=0.0, fused=True)
    if checkpoint or source:
        state = checkpoint or source
        try:
            raw_model.load_state_dict(state['model'])
            if 'optimizer' in state:
                optimizer.load_state_dict(state['optimizer'])
                optimizer.param_groups[0].update(betas=(args.beta1, args.beta2), eps=args.eps)  # which --init_from may change
            if not 0 < state['step'] <= args.steps or checkpoint and set(checkpoint['counters']) != set(counters):
                raise ValueError(f'step {state["step"]} with counters {", ".join(state.get("counters", ()))}')
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            path = ckpt_path if checkpoint else args.init_from
            die(f'{path}: not a checkpoint of this run ({" ".join(str(error).split())[:150]}); move it away to start from the beginning')
        step = state['step']
        counters = checkpoint['counters'] if checkpoint else {
            **counters, 'first_step': step, 'smooth_step': step, 'init_loss': state.get('counters', {}).get('init_loss')}
    if master:
        write_json(config_path, settings)
        cut_log(log_path, step if checkpoint else -1, args.steps)
    new, state, checkpoint, source = checkpoint is None, None, None, None
    if args.compile:
        raw_model.compile_parts()
    model = raw_model
    if world_size > 1:
        with warnings.catch_warnings():  # torch 2.13 has a new name for broadcast_buffers
            warnings.simplefilter('ignore', FutureWarning)
            model = DDP(raw_model, device_ids=[local_rank] if on_gpu else None, gradient_as_bucket_view=True, broadcast_buffers=False)
    E = raw_model.E

    if master:
        print(f'{args.out}\n{args.method}, {args.size}, {raw_model.n_params() / 1e6:.1f}M parameters, {device_name}, {args.dtype}, '
              f'logits {args.logits_dtype}; {args.batch_size} x {args.block_size} tokens a step: {world_size} process'
              f'{"es" if world_size > 1 else ""} x {accumulation} x {micro}; {n_windows:,} windows in {args.data}'
              + (f'; going on at step {step}' if step else ''), flush=True)
        if args.wandb:
            wandb.init(project=args.wandb, name=args.out, id=args.out.strip('/').replace('/', '-'), resume='allow', config=settings)

    def write_log(entry):
        if master:
            try:
                with open(log_path, 'a', encoding='utf-8') as file:
                    file.write(json.dumps(entry) + '\n')
            except OSError as error:
                die(f'cannot write {log_path}: {error.strerror}; the same command goes on from the last checkpoint', 1)
            if args.wandb:
                wandb.log(entry, step=entry['step'])

    def save(path, **more):
        if master:
            with open(log_path, 'a', encoding='utf-8') as file:
                os.fsync(file.fileno())  # the log is on disk before what counts on it
            state = {'model': raw_model.state_dict(), 'step': step, 'config': settings, **more}
            write_atomic(path, lambda file: torch.save(state, file))

    def load_batch(step):
        """This process's share of the global batch of `step`, on the device: a list of (tokens, targets), micro-batches."""
        windows = data.batch_windows(args.seed, step, args.batch_size, n_windows, rank, world_size)
        batch = torch.from_numpy(data.read_windows(train_shards, args.block_size, windows, args.vocab_size))
        batch = batch.pin_memory().to(device, non_blocking=True) if on_gpu else batch.to(device)
        return [(part[:, :-1], part[:, 1:]) for part in batch.split(micro)]

    # SIGTERM and SIGINT save and exit, SIGUSR1 (SLURM's warning) saves and goes on
    received = set()
    old_handlers = {s: signal.signal(s, lambda number, _: received.add(int(number))) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    clock = time.perf_counter()
    if new:
        first_loss = evaluate(raw_model, val_shards, args.eval_tokens, micro, rank, world_size)
        write_log({'step': step, 'test_loss': first_loss})
        if step == 0:
            counters['init_loss'] = first_loss
        else:  # with --init_from: from here on the run stands on its own, whatever becomes of the other
            save(ckpt_path, optimizer=optimizer.state_dict(), counters=counters)
    skipped = torch.tensor(float(counters['skipped']), device=device)  # steps since a gradient was not finite
    finite = (skipped == 0).float()                                    # 1 until then; the host reads both at log steps only
    peak = peak_flops(device_name) if args.dtype == 'bfloat16' else None
    exit_status, broken = 0, False
    batch = load_batch(step) if step < args.steps else None
    counters['elapsed'] += time.perf_counter() - clock
    clock = interval = time.perf_counter()
    interval_steps = 0

    while step < args.steps:
        lr = learning_rate(step, settings)
        step += 1
        interval_steps += 1
        last = step == args.steps
        log_now = last or step == 1 or step % args.log_every == 0
        stats, grad_norm = train_step(model, raw_model, optimizer, batch, step, lr, settings, finite, log_now)
        skipped += 1 - finite
        if not last:
            batch = load_batch(step)  # while the device still works on the step

        eval_now = not last and args.eval_every and step % args.eval_every == 0
        save_now = last or args.ckpt_every and step % args.ckpt_every == 0
        keep_now = args.keep_every and step % args.keep_every == 0
        stop_signal, save_signal = max(received - {signal.SIGUSR1}, default=0), signal.SIGUSR1 in received

        if world_size > 1 and not log_now:  # the processes must agree, and they speak at log lines only
            stop_signal = save_signal = 0
        if log_now:
            if world_size > 1:  # sums are summed; the maximum, and any process's signals, maximised
                maxima = torch.stack((stats[-1], *stats.new_tensor([stop_signal, save_signal])))
                dist.all_reduce(stats)
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
                stats[-1], stop_signal, save_signal = maxima[0], int(maxima[1]), bool(maxima[2])
            tokens_in_step = args.batch_size * args.block_size
            means = dict(zip(STATS, (stats / tokens_in_step).tolist()))
            bad_steps, grad_norm = int(skipped), grad_norm.item()  # the host waits for the device here
            now = time.perf_counter()
            rate = interval_steps * tokens_in_step / (now - interval)
            counters['elapsed'] += now - clock
            counters['step_seconds'] += now - interval
            clock = interval = now
            entry = {
                'step': step, 'loss': means['loss'], 'reg': means['reg'], 'lr': lr, 'grad_norm': grad_norm,
                'mu_norm': E.detach().mean(dim=0).norm().item(), 'logit_mean': means['logit_mean'],
                'logit_mean_spread': math.sqrt(max(0.0, means['logit_mean_squared'] - means['logit_mean'] ** 2))
                if math.isfinite(means['logit_mean_squared']) else math.nan,
                'logit_std': means['logit_std'], 'logit_absmax': means['logit_absmax'], 'logit_max': stats[-1].item(),
                'tokens_per_second': rate, 'mfu': peak and rate * raw_model.flops_per_token() / (world_size * peak),
                'elapsed': counters['elapsed']}
            interval_steps = 0
            write_log(entry)
            if master:
                print(log_line(entry, args.steps, (args.steps - step) * tokens_in_step / rate), flush=True)

            broken = bad_steps > 0 or not math.isfinite(means['loss'])  # the weights are the last finite ones
            if (diverged(counters, step, means['loss'], settings) or broken) and counters['diverged_step'] is None:
                counters['diverged_step'] = step - max(0, bad_steps - 1)
                if master:
                    print(f'diverged at step {counters["diverged_step"]}', flush=True)
            ended = broken or args.stop_on_divergence and counters['diverged_step'] is not None
            if ended:
                break

        paused = time.perf_counter()
        if eval_now:
            loss = evaluate(raw_model, val_shards, args.eval_tokens, micro, rank, world_size)
            write_log({'step': step, 'test_loss': loss})
            if master:
                print(f'step {step}: test loss {loss:.4f} on {args.eval_tokens:,} tokens', flush=True)
        if keep_now:
            save(os.path.join(args.out, f'model_{step}.pt'))
        if save_now or save_signal or stop_signal:
            received.discard(signal.SIGUSR1)
            counters['elapsed'] += time.perf_counter() - clock
            clock = time.perf_counter()
            counters['skipped'] = int(skipped)
            save(ckpt_path, optimizer=optimizer.state_dict(), counters=counters)
        interval += time.perf_counter() - paused  # tokens/s counts the steps alone
        if stop_signal:
            exit_status = 128 + stop_signal
            break

    def stop(number, _):
        print('stopped by a signal after the last step; the same command goes on from there', flush=True)
        os._exit(128 + number)

    for s in (signal.SIGTERM, signal.SIGINT):  # from here on they end us at once: the last step is saved. SIGUSR1 asks for no more
        signal.signal(s, stop)
    if exit_status == 0:
        # the end: test loss, model.pt, result.json, and the checkpoint goes
        test_loss = math.nan if broken else evaluate(raw_model, val_shards, args.test_tokens, micro, rank, world_size)
        counters['elapsed'] += time.perf_counter() - clock
        write_log({'step': step, 'test_loss': test_loss})
        step -= int(skipped)  # the updates that were made
        save(model_path)
        if master:
            seconds = counters['step_seconds']
            write_json(result_path, {
                'method': args.method, 'size': args.size, 'n_params': raw_model.n_params(), 'weight_tying': int(args.weight_tying),
                'lam': args.lam if config.head_mode in LAM else None, 'cap': args.cap if config.head_mode == 'soft_capping' else None,
                'lr': args.lr, 'seed': args.seed, 'steps': args.steps, 'logits_dtype': args.logits_dtype,
                'init_loss': counters['init_loss'], 'test_loss': test_loss, 'diverged': int(counters['diverged_step'] is not None),
                'diverged_step': counters['diverged_step'], 'mu_norm': E.detach().mean(dim=0).norm().item(),
                'lr_sum': sum(learning_rate(i, settings) for i in range(step)), 'train_seconds': counters['elapsed'],
                'tokens_per_second': (step - counters['first_step']) * args.batch_size * args.block_size / seconds if seconds else None,
                'device': device_name + (f' x {world_size}' if world_size > 1 else '')})
            if os.path.exists(ckpt_path):
                os.unlink(ckpt_path)
            print(f'done: test loss {test_loss:.4f} after {step} steps, {counters["elapsed"]:.0f} s, in {args.out}', flush=True)
    elif master:
        print(f'stopped by a signal at step {step}; the same command goes on from there', flush=True)

    for s, handler in old_handlers.items():
        signal.signal(s, handler)
    if lock:
        lock.close()
    if world_size > 1:
        dist.barrier()  # a process that leaves while another still writes would have torchrun end both
        model = None  # were DDP the last to let go of the process group, the two could wait for each other for ever
        gc.collect()
        dist.destroy_process_group()
    return exit_status


def one_process(argv):
    """main, in which the loss of the other processes of the run is one line."""
    try:
        return main(argv)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and 'gloo' not in str(error):
            raise
        die(f'rank {os.environ.get("RANK")}: lost another process of this run ({str(error)[:150]}); the same command goes on from the last '
            'checkpoint', 1, any_rank=True)


if __name__ == '__main__':
    run(one_process)
