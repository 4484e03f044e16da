"""Small runs for the tests: their flags and data, what they leave, what happens in them, their ranks."""
import functools
import itertools
import json
import os
import signal
import socket
from pathlib import Path

import numpy as np
import torch

import train
from conftest import process

SMALL = ('--size=tiny', '--n_layer=1', '--n_embd=32', '--block_size=32', '--batch_size=4', '--dtype=float32',
         '--test_tokens=256', '--eval_tokens=128', '--device=cpu', '--log_every=1')
assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)  # bit for bit
PORTS = itertools.count(20_000 + os.getpid() % 100 * 100)  # its own of each of pytest's workers


# -------- data, and what a run leaves
def shard(tokens):
    """The bytes of a shard, as modded-nanogpt has them."""
    header = [20240520, 1, len(tokens)] + [0] * 253
    return np.array(header, '<i4').tobytes() + np.array(tokens, '<u2').tobytes()


def read_shard(path):
    return np.fromfile(path, '<u2', offset=1024)


def without_times(entry):
    return {k: v for k, v in entry.items() if k not in ('tokens_per_second', 'train_seconds')}


def log_of(folder, times=False):
    lines = [json.loads(line) for line in Path(folder, 'log.jsonl').read_text().splitlines()]
    return lines if times else [without_times(line) for line in lines]


def load(folder, name='model.pt'):
    return torch.load(Path(folder, name), weights_only=True)


def result_of(folder):
    return train.read_json(f'{folder}/result.json')


def state_of(folder):
    """All that a run has left, without times. It has kept its last step, with --keep_every."""
    result = without_times(result_of(folder))
    last = load(folder, f'model_{result["model_step"]}.pt')
    return {'log': log_of(folder), 'result': result, 'model': load(folder)['model'],
            'last': last['model'], 'optimizer': last['optimizer']}


def float64_model(*given, make_model=train.make_model):
    """make_model, but in float64, where sums differ by 1e-16."""
    model, optimizer = make_model(*given)
    model.double().config.logits_dtype = 'float64'
    return model, optimizer


# -------- what happens in a run
def at_step(number, act):
    """This process calls act(model) as it begins step `number`."""
    def train_step(model, optimizer, batch, step, *more, real=train.train_step, **named):
        if step == number:
            act(model)
        return real(model, optimizer, batch, step, *more, **named)
    train.train_step = train_step


def send(numbers, model):
    """This process gets these signals."""
    for number in numbers:
        signal.raise_signal(number)


def kill(model):
    signal.raise_signal(signal.SIGKILL)


# -------- ranks
def free_port():
    with socket.socket() as s:
        return next(port for port in PORTS if s.connect_ex(('127.0.0.1', port)))  # nobody listens there


def ranks(world, argv, stderr, main=train.main, prepare=()):
    """Starts main(argv) in `world` processes, whose errors go to <stderr><rank>."""
    shared = {'WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    started = []
    for rank in range(world):
        env = {**shared, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}
        started.append(process(main, argv, f'{stderr}{rank}', env, prepare))
    return started
