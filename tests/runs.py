"""Small runs for the tests: their flags, what they leave, what happens in them, runs of several processes."""
import itertools
import json
import os
import socket

import torch

import train
from oec import common
from processes import process

SMALL = ('--size=tiny', '--n_layer=1', '--n_embd=32', '--block_size=32', '--batch_size=4',
         '--test_tokens=256', '--eval_tokens=128', '--device=cpu', '--threads=1')
TIMES = ('tokens_per_second', 'mfu', 'train_seconds', 'timed_steps', 'log_bytes')  # whose digits vary
PORTS = itertools.count(20_000 + os.getpid() % 10_000)  # below those that gloo takes from the system


def without_times(entry):
    return {k: v for k, v in entry.items() if k not in TIMES}


def log_of(folder):
    with open(os.path.join(folder, 'log.jsonl')) as file:
        return [without_times(json.loads(line)) for line in file]


def load(folder, name='model.pt'):
    return torch.load(os.path.join(folder, name), weights_only=True)


def result_of(folder):
    return common.read_json(os.path.join(folder, 'result.json'))


def state_of(folder, last='model_12.pt'):
    """All that a run has left, without times; `last` is what --keep_every kept of its last step."""
    model = load(folder)
    kept = load(folder, last)
    return {'log': log_of(folder), 'result': without_times(result_of(folder)), 'model': model['model'],
            'step': (model['step'], kept['step']), 'trained': kept['model'],
            'optimizer': [state['state'] for state in kept['optimizer']],
            'progress': without_times(kept['progress'])}


def assert_same(a, b, path=''):
    """Bit for bit, through dicts, lists and tensors."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f'{path}/{key}')
    elif isinstance(a, (list, tuple)):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), path)
    else:
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)
        assert same, f'{path}: {a} and {b}'


def at_call(name, number, act, *args):
    """Has train.<name> call act(*args) first as this process calls it for the time `number`, 1, 2, ..."""
    real, calls = getattr(train, name), itertools.count(1)

    def call(*given, **named):
        if next(calls) == number:
            act(*args)
        return real(*given, **named)
    setattr(train, name, call)


def signal_at_step(number, at):
    """Sends this process a signal as its optimizer step `at` begins."""
    at_call('train_step', at, os.kill, os.getpid(), number)


def ranks(world, argv, stderr, main=train.main, prepare=(), nodes=None):
    """
    Starts main(argv) in `world` processes that find each other; their errors go to <stderr><rank>. With
    `nodes`, the flags that each one adds, they are as on machines of their own.
    """
    with socket.socket() as s:
        port = next(port for port in PORTS if s.connect_ex(('127.0.0.1', port)))  # nobody listens there
    shared = {'WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    return [process(main, [*argv, *(nodes[rank] if nodes else [])], stderr=f'{stderr}{rank}', prepare=prepare,
                    env={**shared, 'RANK': str(rank), 'LOCAL_RANK': '0' if nodes else str(rank)})
            for rank in range(world)]


def record(argv):
    """
    train.main in a rank, which leaves what it saw as rank<r>.pt in the run's folder, argv[-1]: the tokens of
    each step by micro-batch, the first step's gradients before they are clipped, the weights at the end.
    """
    seen = {'batches': []}
    clip = torch.nn.utils.clip_grad_norm_
    train_step = train.train_step

    def recorded_clip(parameters, *args):
        parameters = list(parameters)
        seen.setdefault('gradients', [p.grad.clone() for p in parameters])
        return clip(parameters, *args)

    def recorded_step(model, optimizers, batch, *more, **named):
        seen['batches'].append([tokens for tokens, _ in batch])
        seen['weights'] = getattr(model, 'module', model).state_dict()
        return train_step(model, optimizers, batch, *more, **named)
    torch.nn.utils.clip_grad_norm_, train.train_step = recorded_clip, recorded_step
    train.main(argv)
    torch.save(seen, os.path.join(argv[-1].removeprefix('--out='), f'rank{os.environ["RANK"]}.pt'))
