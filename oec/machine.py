"""The machine that a run is on: its device, and the processes that torchrun started."""
import ctypes
import os

import torch
import torch.distributed as dist

from oec.common import check

# Dense BF16 peak in TFLOP/s, from NVIDIA's data sheets; the first name here that is in the GPU's own name.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200': 989, 'RTX 4090': 165}


def default_dtype(device):
    """'bfloat16' on a GPU and on a CPU with instructions for it (AMX, AVX512-BF16), else 'float32'."""
    units = torch.cpu.get_capabilities()
    fast = device == 'cuda' or units.get('amx_bf16') or units.get('avx512_bf16')
    return 'bfloat16' if fast else 'float32'


def set_up_machine(args, local_rank, world_size):
    """Joins the other processes and returns the device of this one."""
    if world_size > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if args.device == 'cuda' else 'gloo')  # gloo: settings
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)

    if args.device == 'cpu':
        # Fresh memory costs a fifth of a small step: glibc keeps what is freed, torch asks for huge pages.
        os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')  # torch reads it when it first allocates
        mallopt = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: None)  # glibc alone has it
        mallopt(-3, 2**30) or mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; an old glibc allows 32 MiB at most
        mallopt(-1, -1)                           # M_TRIM_THRESHOLD: never
        # These rule a CPU too: plain bf16 products, which round the scores, beat flash on short sequences.
        short = args.dtype == 'bfloat16' and args.block_size <= 1024
        torch.backends.cuda.enable_flash_sdp(not short)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(short)
        return torch.device('cpu')

    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # long sums stay in fp32
    torch.backends.cuda.enable_cudnn_sdp(args.n_embd // args.n_head <= 128)  # wider: not on all GPUs
    return torch.device('cuda', local_rank)


def refuse_different_processes(settings):
    """Ends all processes if these settings, a dict, differ between them: they would not train one model."""
    if not dist.is_initialized():
        return
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, settings)
    for name in settings:
        values = {str(other[name]) for other in everyone}
        check(len(values) == 1, f'the processes differ in {name}: {", ".join(sorted(values))}')


def gather_positions(values):
    """(..., N) of each process, N alike -> (..., N of all processes), in the order of their ranks."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts, dim=-1)


def synchronize(device):
    """Waits until the device has done all that it was given."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def leave_processes():
    """Ends the process group, at the same time in all processes, as NCCL wants it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def peak_flops(device):
    """The BF16 peak of a device in FLOP/s, whatever a run's dtype is, or None where PEAK_TFLOPS has none."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'
    return next((1e12 * peak for gpu, peak in PEAK_TFLOPS.items() if gpu in name), None)
