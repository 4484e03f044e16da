"""Small runs for the tests: their flags, what they leave, signals in them, runs of several processes."""
import itertools
import json
import os
import signal
import socket

import torch

import common
import train
from processes import process

SMALL = ('--size=tiny', '--n_layer=1', '--n_embd=32', '--block_size=32', '--batch_size=4',
         '--test_tokens=256', '--eval_tokens=128', '--device=cpu', '--threads=1')
TIMES = ('elapsed', 'tokens_per_second', 'mfu', 'train_seconds', 'step_seconds')
CANDIDATES = itertools.count(20_000 + os.getpid() % 10_000)


def without_times(entry):
    return {k: v for k, v in entry.items() if k not in TIMES}


def log_of(folder):
    """The log of a run without times."""
    with open(os.path.join(folder, 'log.jsonl')) as file:
        return [without_times(json.loads(line)) for line in file]


def load(folder, name='model.pt'):
    return torch.load(os.path.join(folder, name), weights_only=True)


def result_of(folder):
    return common.read_json(os.path.join(folder, 'result.json'))


def state_of(folder):
    """All that a run has left that kept its checkpoint, without times."""
    model, checkpoint = load(folder), load(folder, 'ckpt.pt')
    return {'log': log_of(folder), 'result': without_times(result_of(folder)), 'model': model['model'],
            'step': (model['step'], checkpoint['step']), 'trained': checkpoint['model'],
            'optimizer': checkpoint['optimizer'], 'counters': without_times(checkpoint['counters'])}


def assert_same(a, b, path=''):
    """Bit for bit, through dicts, lists and tensors."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f'{path}/{key}')
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f'{path}/{i}')
    else:
        assert a == b or (a != a and b != b), f'{path}: {a} and {b}'


# --------------------------------------------------------------------------------------------------
# what a process does before its run


def keep_checkpoint():
    """Makes the end of a run leave ckpt.pt, so that the optimizer can be compared."""
    unlink = os.unlink
    os.unlink = lambda path: None if path.endswith('ckpt.pt') else unlink(path)


def signal_at_evaluation(number, which):
    """Sends this process a signal as its evaluation `which` (0 the first, -1 the final one) begins."""
    real, seen = train.evaluate, itertools.count()
    final_tokens = 256  # as in SMALL

    def evaluate(model, shards, n_tokens, *more):
        if which == next(seen) or (which == -1 and n_tokens == final_tokens):
            os.kill(os.getpid(), number)
        return real(model, shards, n_tokens, *more)
    train.evaluate = evaluate
    keep_checkpoint()


def fitting(micro_batch_size, then=lambda: None):
    """Has fitting_micro_batch find that so many sequences fit."""
    train.fitting_micro_batch = lambda *_: micro_batch_size
    then()


def signal_at_step(number, at):
    """Sends this process a signal during optimizer step `at`."""
    real = train.train_step

    def train_step(model, raw_model, optimizer, batch, step, *more):
        if step == at:
            os.kill(os.getpid(), number)
        return real(model, raw_model, optimizer, batch, step, *more)
    train.train_step = train_step


def sigterm_to_rank_1(at):
    if os.environ['RANK'] == '1':
        signal_at_step(signal.SIGTERM, at)


# --------------------------------------------------------------------------------------------------
# several processes


def free_ports(n):
    """Ports for rendezvous, below those that the system hands out, of which gloo takes some at any time."""
    ports = []
    while len(ports) < n:
        with socket.socket() as s:
            port = next(CANDIDATES)
            if s.connect_ex(('127.0.0.1', port)):  # nobody listens there
                ports.append(port)
    return ports


def ranks(world, argv, stderr, main=train.main_of_rank, prepare=None):
    """Starts main(argv) in `world` processes that find each other; their errors go to <stderr><rank>."""
    shared = {'WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_ports(1)[0])}
    return [process(main, argv, stderr=f'{stderr}{rank}', prepare=prepare,
                    env={**shared, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}) for rank in range(world)]


def record(argv):
    """
    Runs train.main several times in this rank, which leaves what it saw as rank<r>.pt in each run's folder:
    the tokens of each step by micro-batch, the first step's gradients before they are clipped, the weights
    at the end. argv[0] is a JSON list of [port, folder, *flags].
    """
    clip, train_step = torch.nn.utils.clip_grad_norm_, train.train_step
    for port, out, *flags in json.loads(argv[0]):
        os.environ['MASTER_PORT'] = str(port)
        seen = {'batches': []}

        def recorded_clip(parameters, *args, seen=seen):
            parameters = list(parameters)
            seen.setdefault('gradients', [p.grad.clone() for p in parameters])
            return clip(parameters, *args)

        def recorded_step(model, raw_model, optimizer, batch, *more, seen=seen):
            seen['batches'].append([tokens for tokens, _ in batch])
            seen['weights'] = raw_model.state_dict()
            return train_step(model, raw_model, optimizer, batch, *more)
        torch.nn.utils.clip_grad_norm_, train.train_step = recorded_clip, recorded_step
        train.main([*flags, f'--out={out}'])
        torch.save(seen, os.path.join(out, f'rank{os.environ["RANK"]}.pt'))
