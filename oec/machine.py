"""The machine that a run is on: its processes and devices, what they can do, and what the time goes into."""
import contextlib
import os
import re
import time
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import ALL, join_stats
from oec.common import UserError, check, keep_freed_memory

# Dense BF16 peak in TFLOP/s, from NVIDIA's data sheets (without sparsity); matched as words of a GPU's name.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200': 989, 'RTX 4090': 165}


def processes():
    """Returns this process's rank, among all and on its machine, and how many processes torchrun started."""
    found = [os.environ.get(*name) for name in (('RANK', '0'), ('LOCAL_RANK', '0'), ('WORLD_SIZE', '1'))]
    rank, local_rank, world_size = (int(text) if text.isdecimal() else -1 for text in found)
    check(local_rank >= 0 and 0 <= rank < world_size and (world_size == 1 or 'MASTER_ADDR' in os.environ),
          f'RANK, LOCAL_RANK, WORLD_SIZE = {", ".join(found)}: not as torchrun sets them', status=1)
    return rank, local_rank, world_size


@contextlib.contextmanager
def together(world_size):
    """
    Joins the other processes. A UserError in the block becomes one of all processes, and so does a difference
    between the dicts that the block fills: else one would stop, or train something else, and the rest wait.
    """
    mine, own = {}, None
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group('cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo')
    try:
        yield mine
    except UserError as error:
        own = error
    everyone = gather((own and (str(own), own.status), mine), world_size)
    if own:
        raise own
    for other, _ in everyone:
        if other:
            raise UserError(*other)
    for name in mine:
        values = list(dict.fromkeys(str(other[name]) for _, other in everyone))
        check(len(values) == 1, f'the processes differ in {name}: {", ".join(values)}; all of them need the '
              'same command, and see the same --data and --out')


def gather(mine, world_size):
    """Returns what each process has for `mine`, in the order of their ranks."""
    everyone = [mine] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def set_up_machine(device, local_rank, threads, deterministic):
    """Sets up the machine and returns the device of this process. Raises UserError if GPUs are lacking."""
    if threads:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    keep_freed_memory()
    if device == 'cpu':
        return torch.device('cpu')
    gpus = torch.cuda.device_count()
    check(gpus >= int(os.environ.get('LOCAL_WORLD_SIZE', '1')), f'--device=cuda: too few GPUs here ({gpus})')
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # long sums stay in fp32
    return torch.device('cuda', local_rank)


def wrap_in_ddp(gpt):
    """Returns the model in DDP, which averages the gradients over all processes."""
    warnings.simplefilter('ignore', FutureWarning)  # torch 2.13 has a new name for broadcast_buffers
    return DDP(gpt, gradient_as_bucket_view=True, broadcast_buffers=False)


def default_dtype(device, rounded=ALL):
    """Returns bfloat16 where the machine has units for it, unless --rounded asks for fp32 products."""
    units = getattr(torch.cpu, 'get_capabilities', dict)()  # older versions of torch lack it
    has_units = device == 'cuda' or units.get('amx_bf16') or units.get('avx512_bf16')
    return 'bfloat16' if has_units and rounded == ALL else 'float32'


def peak_flops(device_name):
    """Returns the BF16 peak of a device in FLOP/s, or None if PEAK_TFLOPS does not know it."""
    known = (1e12 * peak for name, peak in PEAK_TFLOPS.items() if re.search(rf'\b{name}\b', device_name))
    return next(known, None)


def of_all_processes(stats, stop, world_size):
    """Gathers the statistics of all processes, and the signal, or 0, that asked one of them to stop."""
    if world_size == 1:
        return stats, stop
    everyone = gather(({name: values.cpu() for name, values in stats.items()}, stop), world_size)
    return join_stats([stats for stats, _ in everyone]), max(stop for _, stop in everyone)


class Clock:
    """Counts the seconds of a run in so_far, which checkpoints keep: `elapsed`, and `step_seconds` of it."""

    def __init__(self, so_far, step, device):
        self.so_far, self.device, self.last = so_far, device, time.perf_counter()
        self.logged = step, so_far['step_seconds']

    def count(self, steps):
        """Counts the seconds since the last call. `steps` says whether the run made steps in them."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize()  # steps that the device still works on are no part of an evaluation
        before, self.last = self.last, time.perf_counter()
        self.so_far['elapsed'] += self.last - before
        self.so_far['step_seconds'] += self.last - before if steps else 0

    @contextlib.contextmanager
    def paused(self):
        """Keeps the seconds of what is done in here, such as an evaluation, out of `step_seconds`."""
        self.count(steps=True)
        yield
        self.count(steps=False)

    def seconds_per_step(self, step):
        """Returns the mean since the last call, or since the loop began."""
        self.count(steps=True)
        (first, seconds), self.logged = self.logged, (step, self.so_far['step_seconds'])
        return (self.so_far['step_seconds'] - seconds) / (step - first)
