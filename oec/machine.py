"""The machine that a run is on: its device, and the processes that torchrun started."""
import ctypes
import os

import torch
import torch.distributed as dist

from oec.common import check

# Dense BF16 peak in TFLOP/s, from NVIDIA's data sheets; the first name that a GPU's name contains counts.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200': 989, 'RTX 4090': 165}


def set_up_machine(args, local_rank, world_size):
    """Joins the other processes and returns the device of this one."""
    if world_size > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if args.device == 'cuda' else 'gloo')
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    keep_freed_memory()
    if args.device == 'cpu':
        return torch.device('cpu')
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # long sums stay in fp32
    torch.backends.cuda.enable_cudnn_sdp(args.n_embd // args.n_head <= 128)  # untested on wider heads
    return torch.device('cuda', local_rank)


def keep_freed_memory():
    """Tells glibc to keep freed memory: zeroing new pages is half the time of a small step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: None)  # glibc alone has it
    mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
    mallopt(-1, -1)     # M_TRIM_THRESHOLD: never


def gather(value):
    """What each process has for `value`, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def refuse_different_processes(settings):
    """Ends all processes if they would not train the same: they need the same command, data and folder."""
    everyone = gather(settings)
    for name in settings:
        values = {str(other[name]) for other in everyone}
        check(len(values) == 1, f'the processes differ in {name}: {", ".join(sorted(values))}')


def peak_flops(device):
    """The BF16 peak of a device in FLOP/s; infinite, so that mfu is 0, where PEAK_TFLOPS knows none."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'
    known = (1e12 * peak for gpu, peak in PEAK_TFLOPS.items() if gpu in name)
    return next(known, float('inf'))
