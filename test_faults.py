"""Nothing lost, nothing silent: kills, faults, any number of processes, input that cannot work, files that are not to be trusted."""
import ast
import csv
import functools
import gc
import glob
import hashlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import analyze
import bench
import common
import data
import prepare_fineweb
import train
from model import GPT, gpt_config

HERE = os.path.dirname(os.path.abspath(__file__))
ENV = {**os.environ, 'OMP_NUM_THREADS': '1', 'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']}
SMALL = ('--size=tiny', '--n_layer=1', '--n_embd=32', '--block_size=32', '--batch_size=4', '--test_tokens=256', '--eval_tokens=128',
         '--device=cpu', '--threads=1', '--divergence_margin=3')

# Processes of their own that start in a moment: forked from a server that has imported all this and done nothing with it.
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(['test_faults'])


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Shards of the standard library in bytes: a val shard and two train shards."""
    folder = str(tmp_path_factory.mktemp('data') / 'stdlib')
    prepare_fineweb.main(['--source=stdlib', '--tokenizer=bytes', f'--out={folder}', '--val_tokens=20000', '--tokens=90000', '--shard_tokens=50000',
                          '--workers=1'])
    return folder


def process(main, argv, stderr=os.devnull, env={}, file_limit=None, prepare=None):
    """
    Starts main(argv) in a process: `stderr` is the file for its errors, `file_limit` the bytes that a file may have (writing
    more fails as it does on a full disk, for root as well), `prepare` () is called in it first.
    """
    started = START.Process(target=in_process, args=(main, argv, str(stderr), env, file_limit, prepare))
    started.start()
    return started


def in_process(main, argv, stderr, env, file_limit, prepare):
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(env)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if prepare:
        prepare()
    sys.argv[1:] = argv
    common.run(main)


def finish(started, status, seconds=120):
    """Waits for a process and asserts its exit status."""
    started.join(seconds)
    assert started.exitcode == status, started.exitcode


def keep_checkpoint():
    """Has the end of a run leave ckpt.pt, so that the optimizer can be compared."""
    train.os.unlink = lambda path: None


def stamp(path):
    """What changes when a file is written; None where there is none."""
    try:
        return os.stat(path).st_mtime_ns, os.stat(path).st_ino
    except FileNotFoundError:
        return None


def wait_until(condition, pause=0.002, seconds=60):
    """Looks at the condition until it holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds
        time.sleep(pause) if pause else None


def without_times(entry):
    return {k: v for k, v in entry.items() if k not in ('elapsed', 'tokens_per_second', 'mfu', 'train_seconds', 'step_seconds')}


def state_of(folder):
    """All that a finished run has left, without times: log, result, weights, optimizer, counters."""
    with open(os.path.join(folder, 'log.jsonl')) as file:
        log = [without_times(json.loads(line)) for line in file]
    model, checkpoint = (torch.load(os.path.join(folder, name), weights_only=True) for name in ('model.pt', 'ckpt.pt'))
    return {'log': log, 'result': without_times(common.read_json(os.path.join(folder, 'result.json'))), 'model': model['model'],
            'step': (model['step'], checkpoint['step']), 'trained': checkpoint['model'], 'optimizer': checkpoint['optimizer'],
            'counters': without_times(checkpoint['counters'])}


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
        assert len(a) == len(b), path
        for i, pair in enumerate(zip(a, b)):
            assert_same(*pair, f'{path}/{i}')
    else:
        assert a == b or a != a and b != b, f'{path}: {a} and {b}'


def flags_of(corpus, *more):
    return ['--method=mu_centering', '--weight_tying', '--lr=3e-2', '--steps=120', *SMALL, f'--data={corpus}', '--log_every=1', '--ckpt_every=4',
            '--eval_every=40', '--keep_every=60', *more]


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """Uninterrupted runs that others are compared with, by dtype; and the folder of the one in fp32."""
    folder = tmp_path_factory.mktemp('whole')
    runs = {dtype: process(train.main, flags_of(corpus, f'--dtype={dtype}', f'--out={folder}/{dtype}'), prepare=keep_checkpoint)
            for dtype in ('float32', 'bfloat16')}
    for started in runs.values():
        finish(started, 0)
    return {dtype: f'{folder}/{dtype}' for dtype in runs}


# ----------------------------------------------------------------------------------------------------------- kills, signals


@pytest.mark.parametrize('dtype, kills, halves', [('float32', 14, 4), ('bfloat16', 6, 1)])
def test_killed_at_any_moment_and_started_again_ends_as_if_never_stopped(corpus, whole, tmp_path, dtype, kills, halves):
    """Kills as it starts, at random steps, and while the checkpoint is being written (`halves` of them must leave half a file)."""
    rng = np.random.RandomState(kills)
    flags, out = flags_of(corpus, f'--dtype={dtype}', f'--out={tmp_path}/run'), tmp_path / 'run'
    half_written = 0
    for kill in range(kills):
        moment = ('step', 'write', 'start', 'write', 'step')[kill % 5]
        resumed = torch.load(out / 'ckpt.pt', weights_only=True)['step'] if (out / 'ckpt.pt').exists() else 0
        config, half = stamp(out / 'config.json'), stamp(out / 'ckpt.pt.tmp')
        started = process(train.main, flags, prepare=keep_checkpoint)
        if moment == 'start':
            time.sleep(rng.uniform(0.1, 0.8))
        elif moment == 'write':
            wait_until(lambda: stamp(out / 'ckpt.pt.tmp') not in (None, half), pause=0)
        else:
            wait_until(lambda: stamp(out / 'config.json') not in (None, config))
            step = resumed + rng.randint(1, 9)
            wait_until(lambda: (out / 'log.jsonl').exists() and f'{{"step": {step}, "loss"' in (out / 'log.jsonl').read_text())
            time.sleep(rng.uniform(0, 0.01))
        started.kill()
        finish(started, -signal.SIGKILL)
        half_written += stamp(out / 'ckpt.pt.tmp') not in (None, half)
    assert half_written >= halves
    finish(process(train.main, flags, prepare=keep_checkpoint), 0)
    assert_same(state_of(out), state_of(whole[dtype]))
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole[dtype]))  # nothing half written is left


def signal_at_evaluation(number, which):
    """Sends this process a signal as its evaluation `which` (0 the first, -1 the final one) begins."""
    real, calls = train.evaluate, []

    def evaluate(model, shards, n_tokens, *more):
        calls.append(n_tokens)
        if which == len(calls) - 1 or which == -1 and n_tokens == 256:
            os.kill(os.getpid(), number)
        return real(model, shards, n_tokens, *more)
    train.evaluate = evaluate
    keep_checkpoint()


def test_signals_during_evaluations_lose_nothing(corpus, whole, tmp_path):
    """One run: stopped in the first evaluation, in one on the way, twice in the final one, and warned in each."""
    flags, out = flags_of(corpus, '--dtype=float32', f'--out={tmp_path}/run'), tmp_path / 'run'
    for number, which, status, step in ((signal.SIGTERM, 0, 143, 1), (signal.SIGINT, 0, 130, 41), (signal.SIGTERM, -1, 143, 120),
                                        (signal.SIGINT, -1, 130, 120), (signal.SIGUSR1, -1, 0, 120)):
        finish(process(train.main, flags, stderr=tmp_path / 'stderr', prepare=functools.partial(signal_at_evaluation, number, which)), status)
        assert torch.load(out / 'ckpt.pt', weights_only=True)['step'] == step and (tmp_path / 'stderr').read_text() == ''
    assert_same(state_of(out), state_of(whole['float32']))
