"""The machine that a run is on: its device, and the processes that torchrun started."""
import os
import re

import torch
import torch.distributed as dist

from oec.common import UserError, check

# Dense BF16 peak in TFLOP/s, from NVIDIA's data sheets; the first name here that is in the GPU's own name.
PEAK_TFLOPS = {'A100': 312, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H200 NVL': 835,
               'H200': 989, 'RTX 4090': 165}


def torchrun_env():
    """(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), or 0, 0, 1, 1. UserError if set only in part."""
    names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE']
    values = [os.environ.get(name) for name in names]
    if values == [None] * 4:
        return 0, 0, 1, 1
    ok = all(value and value.isdecimal() for value in values) and int(values[0]) < int(values[2])
    if not ok or not {'MASTER_ADDR', 'MASTER_PORT'} <= os.environ.keys():
        given = ', '.join(f'{name}={os.environ[name]}' for name in names if name in os.environ)
        raise UserError(f'the environment has {given}; should have {", ".join(names)}, MASTER_ADDR and '
                        'MASTER_PORT of one launch, as torchrun sets them, or none of these', alone=True)
    return tuple(map(int, values))


def rank():
    """The number of this process, 0 for the master process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def set_up(args, local_rank, world_size):
    """Joins the other processes and returns the device of this one. UserError if --compile does not work."""
    os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')  # huge pages, against page faults on a CPU
    if world_size > 1:  # gloo: for all_gather_object
        dist.init_process_group('cpu:gloo,cuda:nccl' if args.device == 'cuda' else 'gloo')
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == 'cuda':
        torch.cuda.set_device(local_rank)
    device = torch.device(args.device)
    if args.compile:  # is there a compiler?
        try:
            torch.compile(torch.sin)(torch.ones(1, device=device))
        except RuntimeError as error:  # torch's, of many lines
            reason = str(error).partition('\n')[0]
            raise UserError(f'--compile does not work here ({reason}); give --no-compile') from error
    return device


def refuse_different_processes(settings):
    """Ends all processes if these settings, a dict, differ between them: they would not train one model."""
    if world_size() == 1:
        return
    of_ranks = [None] * world_size()
    dist.all_gather_object(of_ranks, settings)
    for name in settings:
        values = {str(of_rank[name]) for of_rank in of_ranks}
        check(len(values) == 1, f'the processes differ in {name}: {", ".join(sorted(values))}')


def on_master(work):
    """Calls work() in the master process alone; a UserError of it is raised in all processes."""
    errors = [None]
    if rank() == 0:
        try:
            work()
        except UserError as error:
            errors = [error]
    if world_size() > 1:
        dist.broadcast_object_list(errors)
    if errors[0]:
        raise errors[0]


def cleanup_distributed():
    """Destroys the process group, at the same time in all processes, as NCCL wants it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def peak_flops(device):
    """The BF16 peak of a device in FLOP/s, whatever a run's dtype is, or None where PEAK_TFLOPS has none."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'
    return next((1e12 * peak for gpu, peak in PEAK_TFLOPS.items() if re.search(rf'\b{gpu}\b', name)), None)
