"""Nothing lost, nothing silent: kills, faults, any number of processes, input that cannot work, files that are not to be trusted."""
import ast
import csv
import functools
import gc
import glob
import hashlib
import itertools
import json
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
from model import GPT, embeddings_to_loss, gpt_config

HERE = os.path.dirname(os.path.abspath(__file__))
ENV = {**os.environ, 'OMP_NUM_THREADS': '1', 'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']}
SMALL = ('--size=tiny', '--n_layer=1', '--n_embd=32', '--block_size=32', '--batch_size=4', '--test_tokens=256', '--eval_tokens=128',
         '--device=cpu', '--threads=1', '--divergence_margin=3')

# Processes of their own that start in a moment: forked from a server that has imported all this and done nothing with it.
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(['test_faults'])
STARTED = []


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
    STARTED.append(started)
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
    if started.exitcode is None:
        for one in STARTED:  # or they would keep pytest from ending
            one.kill()
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
    return ['--method=mu_centering', '--weight_tying', '--lr=3e-2', '--steps=240', *SMALL, f'--data={corpus}', '--log_every=1', '--ckpt_every=4',
            '--eval_every=80', '--keep_every=120', *more]


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


@pytest.mark.parametrize('dtype, kills, halves', [('float32', 20, 5), ('bfloat16', 10, 2)])
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
            time.sleep(rng.uniform(0, 0.05))
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
    for number, which, status, step in ((signal.SIGTERM, 0, 143, 1), (signal.SIGINT, 0, 130, 81), (signal.SIGTERM, -1, 143, 240),
                                        (signal.SIGINT, -1, 130, 240), (signal.SIGUSR1, -1, 0, 240)):
        finish(process(train.main, flags, stderr=tmp_path / 'stderr', prepare=functools.partial(signal_at_evaluation, number, which)), status)
        assert torch.load(out / 'ckpt.pt', weights_only=True)['step'] == step and (tmp_path / 'stderr').read_text() == ''
    assert_same(state_of(out), state_of(whole['float32']))


# ------------------------------------------------------------------------------------------------ files, disks, two at once


def test_a_file_is_the_old_or_the_new_wherever_the_writer_dies(tmp_path):
    """A process that is gone half way through the content, before and after each fsync, and before and after the rename."""
    path = str(tmp_path / 'file')
    for death, left in (('half', b'old'), ('fsync 1', b'old'), ('replace', b'old'), ('fsync 2', b'new' * 1000), ('end', b'new' * 1000)):
        with open(path, 'wb') as file:
            file.write(b'old')
        pid = os.fork()
        if pid == 0:
            fsync, replace, calls = os.fsync, os.replace, []

            def die_at(name, real):
                def call(*args):
                    calls.append(name)
                    if death in (name, f'{name} {calls.count(name)}'):
                        os._exit(9)
                    real(*args)
                return call
            os.fsync, os.replace = die_at('fsync', fsync), die_at('replace', replace)

            def write(file):
                file.write(b'new' * 500)
                if death == 'half':
                    file.flush()
                    os._exit(9)
                file.write(b'new' * 500)
            common.write_atomic(path, write)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert open(path, 'rb').read() == left and set(os.listdir(tmp_path)) <= {'file', 'file.tmp'}, death


def test_what_is_renamed_is_on_disk(tmp_path, monkeypatch):
    """The power may go at any time: all of the new content has been synced when it takes its name, and then the name has."""
    synced, fsync, replace = {}, os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: (fsync(fd), synced.update({os.fstat(fd).st_ino: os.fstat(fd).st_size})))

    def checked(a, b):
        assert synced[os.stat(a).st_ino] == os.stat(a).st_size == 3000 and os.path.dirname(a) == os.path.dirname(b)
        synced.clear()
        replace(a, b)
    monkeypatch.setattr(os, 'replace', checked)
    common.write_atomic(str(tmp_path / 'file'), lambda file: file.write(b'new' * 1000))
    assert list(synced) == [os.stat(tmp_path).st_ino]


def one_line(path):
    """The one line in a file of errors."""
    text = open(path).read()
    assert text.startswith('error: ') and text.count('\n') == 1, text
    return text


def test_a_full_disk_is_one_line_and_the_old_checkpoint_goes_on(corpus, whole, tmp_path):
    """Full for the checkpoint, full half way through a line of the log, and each of the run's files in a folder that refuses it."""
    flags, out, errors = flags_of(corpus, '--dtype=float32', f'--out={tmp_path}/run'), tmp_path / 'run', tmp_path / 'stderr'
    finish(process(train.main, flags, stderr=errors, file_limit=100_000), 1)
    assert f'cannot write {out}/ckpt.pt: File too large' in one_line(errors) and not (out / 'ckpt.pt').exists()
    finish(process(train.main, flags, prepare=functools.partial(signal_at_evaluation, signal.SIGTERM, 1)), 143)
    before = (out / 'ckpt.pt').read_bytes()
    finish(process(train.main, flags, stderr=errors, file_limit=(out / 'log.jsonl').stat().st_size + 100), 1)
    assert f'cannot write {out}/log.jsonl' in one_line(errors) and (out / 'ckpt.pt').read_bytes() == before
    assert (out / 'log.jsonl').read_bytes()[-1:] != b'\n'  # half a line, which the next start takes away
    finish(process(train.main, flags, stderr=errors, file_limit=100_000), 1)
    assert f'cannot write {out}/ckpt.pt' in one_line(errors) and (out / 'ckpt.pt').read_bytes() == before
    for name in ('ckpt.pt', 'config.json', 'log.jsonl', 'model_120.pt', 'model.pt', 'result.json'):
        os.makedirs(out / f'{name}.tmp' / 'x')  # cannot be written, by root neither
        finish(process(train.main, flags, stderr=errors), 1)
        assert f'cannot write {out}/{name}' in one_line(errors)
        shutil.rmtree(out / f'{name}.tmp')
        torch.load(out / 'ckpt.pt', weights_only=True)
    finish(process(train.main, flags, prepare=keep_checkpoint), 0)
    assert_same(state_of(out), state_of(whole['float32']))


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc and /dev/full are Linux')
def test_folders_that_take_no_files_and_a_terminal_on_a_full_disk(corpus, tmp_path):
    for main, argv in ((train.main, flags_of(corpus, '--out=/proc/self')),
                       (prepare_fineweb.main, ['--source=stdlib', '--tokenizer=bytes', '--out=/proc/self'])):
        finish(process(main, argv, stderr=tmp_path / 'stderr'), 1)
        assert 'cannot write in the folder /proc/self' in one_line(tmp_path / 'stderr')
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, 'train.py', *flags_of(corpus, f'--out={tmp_path}/run')], cwd=HERE, env=ENV, stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == 'error: No space left on device: standard output\n'


def prepare_flags(out, *more):
    return ['--source=stdlib', '--tokenizer=bytes', f'--out={out}', '--val_tokens=50000', '--tokens=2e6', '--shard_tokens=70000', '--workers=1', *more]


def folder_hash(folder, but=('.lock',)):
    """What every file under a folder holds."""
    found = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(str(folder)), '**', '*'), recursive=True, include_hidden=True)):
        if os.path.isfile(path) and os.path.basename(path) not in but:
            with open(path, 'rb') as file:
                found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    return found


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """Shards made without a stop: their hashes."""
    folder = tmp_path_factory.mktemp('prepared')
    finish(process(prepare_fineweb.main, prepare_flags(folder)), 0)
    return folder_hash(folder)


def children(pid):
    """The processes that `pid` has started (Linux)."""
    try:
        with open(f'/proc/{pid}/task/{pid}/children') as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def gone(pid):
    """Whether a process has ended, be it that nobody has asked after it."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rsplit(')', 1)[1].split()[0] in 'ZX'
    except OSError:
        return True


def test_prepare_killed_anywhere_leaves_whole_shards_and_goes_on(prepared, tmp_path):
    """Kills at random and while a shard is being written, with one process and with several, which end with it."""
    rng, out, half_written = np.random.RandomState(0), tmp_path / 'out', 0
    def halves():
        return {path: stamp(path) for path in glob.glob(f'{out}/*.bin.tmp')}
    for kill in range(10):
        before, shards = halves(), len(glob.glob(f'{out}/*.bin'))
        started = process(prepare_fineweb.main, prepare_flags(out, *(['--workers=2'] if kill == 5 else [])))
        if kill % 2:
            wait_until(lambda: len(glob.glob(f'{out}/*.bin')) > shards + rng.randint(0, 2))
            helpers = children(started.pid)
        else:
            wait_until(lambda: any(before.get(path) != found for path, found in halves().items()), pause=0)
        started.kill()
        finish(started, -signal.SIGKILL)
        half_written += any(before.get(path) != found for path, found in halves().items())
        assert kill != 5 or sys.platform != 'linux' or len(helpers) >= 2
        if kill == 5:
            wait_until(lambda: all(gone(helper) for helper in helpers))
        for path in glob.glob(f'{out}/*.bin'):
            data.read_shard(path)
    assert half_written >= 2
    finish(process(prepare_fineweb.main, prepare_flags(out)), 0)
    assert folder_hash(out) == prepared


def test_prepare_on_a_full_disk(prepared, tmp_path):
    finish(process(prepare_fineweb.main, prepare_flags(tmp_path / 'out'), stderr=tmp_path / 'stderr', file_limit=120_000), 1)
    assert 'cannot write' in one_line(tmp_path / 'stderr') and sorted(os.listdir(tmp_path / 'out')) == ['.lock', 'meta.json', 'stdlib_val_000000.bin']
    finish(process(prepare_fineweb.main, prepare_flags(tmp_path / 'out')), 0)
    assert folder_hash(tmp_path / 'out') == prepared


def test_two_copies_in_one_folder(corpus, whole, prepared, tmp_path):
    """At most one of them works, the others say so with 3 (or that it is done), and what comes out is the work of one."""
    for main, flags in ((prepare_fineweb.main, prepare_flags(tmp_path / 'shards')),
                        (train.main, flags_of(corpus, '--dtype=float32', f'--out={tmp_path}/run'))):
        copies = [process(main, flags, stderr=tmp_path / f'stderr{i}', prepare=keep_checkpoint) for i in range(4)]
        for copy in copies:
            copy.join(120)
        assert {0} <= {copy.exitcode for copy in copies} <= {0, 3}
        for i, copy in enumerate(copies):
            assert copy.exitcode == 0 or 'another process' in one_line(tmp_path / f'stderr{i}')
    assert folder_hash(tmp_path / 'shards') == prepared
    assert_same(state_of(tmp_path / 'run'), state_of(whole['float32']))
    # another process that has worked there between the look at meta.json and the lock
    flags = prepare_flags(tmp_path / 'shards', '--tokens=3e6')
    finish(process(prepare_fineweb.main, flags, stderr=tmp_path / 'stderr', prepare=shard_added_before_the_lock), 3)
    assert 'another process has just worked' in one_line(tmp_path / 'stderr')


def shard_added_before_the_lock():
    real = prepare_fineweb.make_folder

    def make_folder(path):
        real(path)
        meta = common.read_json(os.path.join(path, 'meta.json'))
        common.write_json(os.path.join(path, 'meta.json'), {**meta, 'documents': meta['documents'] + 1})
    prepare_fineweb.make_folder = make_folder


# -------------------------------------------------------------------------------------------------- any number of processes


MESH = ('--size=tiny', '--n_layer=1', '--n_embd=16', '--block_size=16', '--batch_size=8', '--steps=5', '--log_every=1', '--lr=1e-2',
        '--eval_tokens=720',
        '--test_tokens=720', '--eval_every=2', '--device=cpu', '--threads=1')
CENTERED = ('--method=mu_centering', '--weight_tying', '--dtype=float64')
REGULARISED = ('--method=mu_loss', '--lam=1000',
               '--dtype=float64')  # a lam that rules the gradient: counted once a micro-batch or a process it would show
SINGLE = ('--method=mu_loss', '--lam=1', '--dtype=float32')


CANDIDATES = itertools.count(20_000 + os.getpid() % 10_000)


def free_ports(n):
    """Ports for rendezvous, from below those that the system hands out: of those gloo takes some for itself at any time."""
    ports = []
    while len(ports) < n:
        with socket.socket() as s:
            port = next(CANDIDATES)
            if s.connect_ex(('127.0.0.1', port)):  # nobody listens there
                ports.append(port)
    return ports


def record(argv):
    """
    Runs of train.main one after another in this rank, which leaves of each what it saw, as rank<r>.pt in the run's folder:
    the tokens of each step by micro-batch, the first step's gradients before they are clipped, the weights at the end.
    """
    clip, train_step = torch.nn.utils.clip_grad_norm_, train.train_step
    for port, out, *flags in json.loads(argv[0]):
        os.environ['MASTER_PORT'] = str(port)
        seen = {'batches': []}

        def recorded_step(model, raw_model, optimizer, batch, *more):
            seen['batches'].append([tokens for tokens, _ in batch])
            seen['weights'] = raw_model.state_dict()

            def recorded_clip(parameters, *args):
                parameters = list(parameters)
                seen.setdefault('gradients', [p.grad.clone() for p in parameters])
                return clip(parameters, *args)
            torch.nn.utils.clip_grad_norm_ = recorded_clip
            return train_step(model, raw_model, optimizer, batch, *more)
        train.train_step = recorded_step
        train.main([*flags, f'--out={out}'])
        torch.save(seen, os.path.join(out, f'rank{os.environ["RANK"]}.pt'))


def ranks(world, argv, main=record, stderr=os.devnull):
    """Starts main(argv) in `world` processes that find each other, each with a stderr of its own; returns them."""
    port = free_ports(1)[0]
    return [process(main, argv, stderr=stderr if stderr == os.devnull else f'{stderr}{rank}',
                    env={'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)})
            for rank in range(world)]


@pytest.fixture(scope='module')
def meshes(corpus, tmp_path_factory):
    """The same runs by 1, 2 and 4 processes with two micro-batches each: (world, micro, name) -> its folder."""
    folder, groups, found = tmp_path_factory.mktemp('meshes'), [], {}
    for world, micros in ((1, (8, 2)), (2, (4, 1)), (4, (2, 1))):
        runs = []
        kinds = [(micro, name, flags) for micro in micros for name, flags in (('centered', CENTERED), ('regularised', REGULARISED), ('single', SINGLE))]
        for (micro, name, flags), port in zip(kinds, free_ports(len(kinds))):
            out = found[world, micro, name] = str(folder / f'{world}-{micro}-{name}')
            runs.append([port, out, *MESH, *flags, f'--micro_batch_size={micro}', f'--data={corpus}'])
        groups.append(ranks(world, [json.dumps(runs)], stderr=folder / f'stderr{world}-'))
    for group in groups:
        for rank in group:
            finish(rank, 0)
    return found


def seen_by(folder, world):
    return [torch.load(os.path.join(folder, f'rank{rank}.pt'), weights_only=True) for rank in range(world)]


def global_batch(corpus, step):
    """The 8 windows (8, 17) of a step, read in one piece."""
    shards = data.load_shards(corpus, 'train')
    n = int(data.count_windows(shards, 16).sum())
    return torch.from_numpy(data.read_windows(shards, 16, data.batch_windows(1, step, 8, n), 257))


def test_any_number_of_processes_reads_the_same_batches_in_the_same_order(meshes, corpus):
    expected = None
    for (world, micro, _), folder in meshes.items():
        seen = seen_by(folder, world)
        assert all(len(part) == micro for rank in seen for step in rank['batches'] for part in step)
        hashes = [[hashlib.sha256(row.numpy().tobytes()).hexdigest() for rank in seen for part in rank['batches'][step] for row in part]
                  for step in range(5)]
        assert all(len(set(step)) == 8 for step in hashes)
        expected = expected or hashes
        assert hashes == expected
    assert expected[3] == [hashlib.sha256(row[:-1].numpy().tobytes()).hexdigest() for row in global_batch(corpus, 3)]


@pytest.mark.parametrize('name', ['centered', 'regularised'])
def test_any_number_of_processes_has_the_same_losses_evaluations_and_weights(meshes, name):
    """Five float64 steps: every value of the log (losses, statistics, evaluations) and every weight to 1e-10."""
    def log(folder):
        with open(os.path.join(folder, 'log.jsonl')) as file:
            return [without_times(json.loads(line)) for line in file]
    one = log(meshes[1, 8, name])
    assert [e['step'] for e in one] == [0, 1, 2, 2, 3, 4, 4, 5, 5] and one[-1]['test_loss'] != one[0]['test_loss']
    weights = seen_by(meshes[1, 8, name], 1)[0]['weights']
    for (world, micro, other), folder in meshes.items():
        if other == name:
            for a, b in zip(one, log(folder), strict=True):
                assert a == {k: pytest.approx(v, rel=1e-10, abs=1e-10) for k, v in b.items()}, (world, micro)
            for key, value in seen_by(folder, world)[0]['weights'].items():
                torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-10)


def test_all_ranks_have_the_same_bits_and_centered_embeddings(meshes):
    for (world, micro, name), folder in meshes.items():
        first, *others = seen_by(folder, world)
        for rank in others:
            assert_same(rank['weights'], first['weights'])
            assert_same(rank['gradients'], first['gradients'])
        E = first['weights']['lm_head.weight']
        assert (E.mean(dim=0).norm() <= torch.finfo(E.dtype).eps * E.norm()) == (name == 'centered'), (world, micro, name)


def test_any_number_of_processes_has_the_same_gradients_to_fp32_summation(meshes, corpus):
    """
    However n terms x_i are summed, the sum is off by no more than (n - 1) u sum |x_i|, u = 2^-24 (Higham, Accuracy and
    Stability, 4.2). Terms: the 128 tokens of the batch; magnitudes: what each sequence adds to the gradient, in float64.
    """
    config = common.read_json(os.path.join(meshes[1, 8, 'single'], 'config.json'))
    torch.manual_seed(config['seed'])
    gpt = GPT(gpt_config({**config, 'dtype': 'float64', 'logits_dtype': 'float64'})).double()
    sums, magnitudes = ([torch.zeros_like(p) for p in gpt.parameters()] for _ in range(2))
    for row in global_batch(corpus, 0).split(1):
        gpt.zero_grad()
        (gpt(row[:, :-1], row[:, 1:])[0] / 8).backward()
        for p, total, magnitude in zip(gpt.parameters(), sums, magnitudes):
            total += p.grad
            magnitude += p.grad.abs()
    gpt.zero_grad()
    embeddings_to_loss(gpt.E, gpt.config).backward()  # of the embeddings, once a step
    for p, total, magnitude in zip(gpt.parameters(), sums, magnitudes):
        if p.grad is not None:
            total += p.grad
            magnitude += p.grad.abs()
    for (world, micro, name), folder in meshes.items():
        if name == 'single':
            for found, exact, magnitude in zip(seen_by(folder, world)[0]['gradients'], sums, magnitudes):
                assert found.dtype == torch.float32
                assert (found - exact).norm() <= 127 * 2.0 ** -24 * magnitude.norm(), (world, micro)


def test_ranks_together_read_the_global_batch_once_each():
    """For any seed, batch, number of processes, micro-batch and step: side by side the ranks' micro-batches are the global batch."""
    rng = np.random.RandomState(1)
    for _ in range(300):
        world, micro, accumulation, n, seed, step = (int(rng.randint(1, hi)) for hi in (9, 5, 5, 500, 2**31, 1000))
        B = world * micro * accumulation
        read = [torch.from_numpy(data.batch_windows(seed, step, B, n, rank, world)).split(micro) for rank in range(world)]
        assert all(len(part) == micro for rank in read for part in rank)
        expected = data.batch_windows(seed, step, B, n)
        assert torch.cat([part for rank in read for part in rank]).tolist() == expected.tolist() and len(expected) == B
        # epochs end to end: window by window as if each step read one
        assert expected.tolist() == [int(data.batch_windows(seed, step * B + i, 1, n)[0]) for i in range(B)]


def test_a_rank_that_dies_ends_the_others_with_one_line(corpus, tmp_path):
    for victim in (0, 1):
        out = tmp_path / f'run{victim}'
        group = ranks(2, [*flags_of(corpus), '--steps=100000', f'--out={out}'], main=train.one_process, stderr=tmp_path / 'stderr')
        wait_until(lambda: (out / 'ckpt.pt').exists())
        group[victim].kill()
        finish(group[1 - victim], 1, seconds=20)
        assert f'rank {1 - victim}: lost another process' in one_line(tmp_path / f'stderr{1 - victim}')
        torch.load(out / 'ckpt.pt', weights_only=True)


def test_what_goes_wrong_in_one_rank_alone_is_said_by_it(tmp_path):
    """A token beyond the head in a window that rank 1 alone reads, past what is looked at before the start."""
    tokens = np.arange(2**20 + 2**18) % 250
    n = (len(tokens) - 1) // 32
    step, window = next((step, w) for step in range(100) for w in data.batch_windows(1, step, 4, n, rank=1, world_size=2) if w * 32 > 2**20)
    tokens[window * 32 + 16] = 60000
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / f'x_{split}_000000.bin'), tokens)
    common.write_json(str(tmp_path / 'meta.json'), {'vocab_size': 257})
    group = ranks(2, [*flags_of(tmp_path), '--steps=200', f'--out={tmp_path}/run'], main=train.one_process, stderr=tmp_path / 'stderr')
    finish(group[1], 2)
    finish(group[0], 1, seconds=20)
    assert 'x_train_000000.bin: it has the token 60000' in one_line(tmp_path / 'stderr1') and 'lost another process' in one_line(tmp_path / 'stderr0')


# --------------------------------------------------------------------------------------------------------------- bad input


def expect_one_line(call, named, capsys):
    """`call` ends with 2 and one line on stderr that names each of `named`."""
    with pytest.raises(SystemExit) as stopped:
        call()
    error = capsys.readouterr().err
    code = stopped.value.code
    del stopped
    gc.collect()  # the traceback holds main's frame, and that the folder lock
    assert code == 2 and error.count('\n') == 1 and error.startswith('error: ') and all(name in error for name in named), error


@pytest.fixture(scope='module')
def bad(corpus, tmp_path_factory):
    """A folder of folders and files that cannot be read, each named for what is wrong with it."""
    root = tmp_path_factory.mktemp('bad')
    shard, val = (open(f'{corpus}/stdlib_{split}_000000.bin', 'rb').read() for split in ('train', 'val'))
    def header(*values, order='<i4'):
        return np.array([*values] + [0] * (256 - len(values)), order).tobytes()
    def folder(name, train=shard, val=val, meta=b'{"vocab_size": 257}'):
        os.makedirs(root / name)
        for file, content in (('x_train_000000.bin', train), ('x_val_000000.bin', val), ('meta.json', meta)):
            if content == 'folder':
                os.makedirs(root / name / file)
            elif content == 'link':
                os.symlink('/nowhere', root / name / file)
            elif content is not None:
                (root / name / file).write_bytes(content)
    folder('empty', None, None, None)
    folder('no_val', val=None)
    folder('short', shard[:500])
    folder('cut', shard[:-2])
    folder('val_cut', val=val[:-1000])
    folder('half_a_token', shard + b'x')
    folder('magic', header(1, 1, 50000) + shard[1024:])
    folder('big_endian', header(20240520, 1, 50000, order='>i4') + shard[1024:])
    folder('version', header(20240520, 2, 50000) + shard[1024:])
    folder('longer', header(20240520, 1, 60000) + shard[1024:])
    folder('negative', header(20240520, 1, -5))
    folder('beyond', shard[:-2] + b'\xff\x7f')
    folder('few', header(20240520, 1, 3) + shard[1024:1030])
    folder('none', header(20240520, 1, 0))
    folder('shard_is_folder', 'folder')
    folder('shard_is_link', 'link')
    for name, meta in {'text': b'oops', 'size': b'{"vocab_size": "many"}', 'bool': b'{"vocab_size": true}', 'nan': b'{"vocab_size": NaN}',
                       'below': b'{"vocab_size": -1}',
                       'above': b'{"vocab_size": 60000}', 'list': b'[257]', 'latin': b'{"vocab_size": 257, "name": "\xe9"}',
                       'deep': b'[' * 100_000, 'half': b'{"vocab_size": 2',
                       'folder': 'folder'}.items():
        folder(f'meta_{name}', meta=meta)
    for name, content in {'a.doc': b'x', 'cut.jsonl': b'{"text": "a"}\n{"text":\n', 'words.jsonl': b'{"words": "x"}\n',
                          'number.jsonl': b'{"text": 5}\n', 'empty.jsonl': b'',
                          'cut.parquet': b'PAR1', 'latin.txt': b'gr\xfc\xdfe'}.items():
        (root / name).write_bytes(content)
    done = {'source': 'stdlib', 'name': None, 'files': None, 'tokenizer': 'bytes', 'requested_val_tokens': 20000, 'shard_tokens': 50000,
            'vocab_size': 257,
            'documents': 1, 'within_document': 0, 'val_tokens': 20000, 'tokens': 50000, 'shards': 2, 'complete': True}
    for name, meta in {'other': {**done, 'tokenizer': 'gpt2'}, 'less': {k: v for k, v in done.items() if k != 'tokens'},
                       'typed': {**done, 'tokens': 'many'},
                       'counted': {**done, 'shards': 5, 'tokens': 200000}, 'sign': {**done, 'documents': -1}}.items():
        folder(f'prepared_{name}', meta=json.dumps(meta).encode())
    folder('prepared_cut', shard[:-2], meta=json.dumps(done).encode())
    folder('prepared_bare', meta=None)
    os.makedirs(root / 'other_run')
    common.write_json(str(root / 'other_run' / 'config.json'), {'lr': 7})
    for name, text in CSV_BAD.items():
        (root / f'{name}.csv').write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


HEAD = 'method,size,weight_tying,lr,test_loss'
CSV_BAD = {
    'empty': '', 'mark': '\ufeff', 'semicolons': HEAD.replace(',', ';') + '\nbaseline;16M;0;0,1;3\n',
    'tabs': HEAD.replace(',', '\t') + '\nbaseline\t16M\t0\t0.1\t3\n',
    'headless': 'baseline,16M,0,0.1,3\n', 'no_loss': 'method,size,weight_tying,lr\nbaseline,16M,0,0.1\n', 'no_runs': HEAD + '\n',
    'lr_text': HEAD + '\nbaseline,16M,0,fast,3\n', 'lr_comma': HEAD + '\nbaseline,16M,0,"0,1",3\n', 'lr_nan': HEAD + '\nbaseline,16M,0,nan,3\n',
    'lr_inf': HEAD + '\nbaseline,16M,0,inf,3\n', 'lr_zero': HEAD + '\nbaseline,16M,0,0,3\n', 'lr_below': HEAD + '\nbaseline,16M,0,-1,3\n',
    'loss_empty': HEAD + '\nbaseline,16M,0,0.1,\n', 'loss_text': HEAD + '\nbaseline,16M,0,0.1,low\n', 'row_short': HEAD + '\nbaseline,16M,0\n',
    'tying_2': HEAD + '\nbaseline,16M,2,0.1,3\n', 'tying_text': HEAD + '\nbaseline,16M,maybe,0.1,3\n',
    'diverged_7': HEAD + ',diverged\nbaseline,16M,0,0.1,3,7\n',
    'seed_text': HEAD + ',seed\nbaseline,16M,0,0.1,3,one\n', 'twice': HEAD + '\nbaseline,16M,0,0.1,3\nbaseline,16M,0,0.1,4\n',
    'cells': HEAD + '\nbaseline,16M,0,0.1,3,4\n', 'column_twice': HEAD + ',lr\nbaseline,16M,0,0.1,3,0.1\n',
    'underscore': HEAD + '\nbaseline,16M,0,0.1,1_0\n', 'control': HEAD + '\nbase\x00line,16M,0,0.1,3\n', 'newline': HEAD + '\n"base\nline",16M,0,0.1,3\n',
    **{f'{column}_{value}': f'{HEAD},{column}\nbaseline,16M,0,0.1,3,{value}\n' for column, value in (
        ('lam', '-1'), ('lam', 'inf'), ('seed', '1.5'), ('seed', 'nan'), ('init_loss', '-1'), ('init_loss', 'nan'), ('n_params', 'nan'), ('n_params', '0'),
        ('n_params', '-5'), ('steps', '0'))},
    **{f'lr_{value}': f'{HEAD}\nbaseline,16M,0,{value},3\n' for value in ('1e-320', '1e300')},
    'open_quote': HEAD + '\n"baseline,16M,0,0.1,3\n',
    'huge_cell': HEAD + '\n' + 'x' * 200_000 + ',16M,0,0.1,3\n',
    'utf16': (HEAD + '\nbaseline,16M,0,0.1,3\n').encode('utf-16'), 'latin': (HEAD + '\nb\xe9,16M,0,0.1,3\n').encode('latin-1'),
    'binary': bytes(range(256)) * 4}
CSV_NAMES = {'lr_text': 'lr', 'lr_comma': 'lr', 'lr_nan': 'lr', 'lr_below': 'lr', 'no_loss': 'test_loss', 'loss_text': 'test_loss',
             'underscore': 'test_loss', 'lam_-1': 'lam', 'lam_inf': 'lam', 'seed_1.5': 'whole number', 'n_params_nan': 'n_params', 'init_loss_nan': 'init_loss',
             'lr_1e300': 'lr', 'column_twice': 'twice', 'cells': 'line 2', 'loss_empty': 'test_loss', 'tying_2': 'weight_tying', 'tying_text': 'weight_tying', 'diverged_7': 'diverged', 'seed_text': 'seed'}

BAD = [  # program, its flags, what the line must name
    *(('train', flag.split(), names) for flag, *names in (
        ('--method=mu_los', '--method', 'mu_loss'), ('--size=17M', '--size', '16M'), ('--lr=fast', '--lr', 'a number > 0'),
        ('--lr=-1', '--lr', '> 0'), ('--lr -1', '--lr'), ('--lr', '--lr'),
        ('--lr=nan', '--lr'), ('--lr=0', '--lr'), ('--lr=inf', '--lr'), ('--lr=', '--lr'), ('--lr=1e38', '--lr', '< 1e+33'), ('--lr=0x1', '--lr'),
        ('--lam=-1', '--lam', '>= 0'), ('--center_every=0', '--center_every'), ('--center_every=2', '--method=mu_centering'),
        ('--center_input --method=z_loss', '--center_input'), ('--method=baseline+mu_centering', '--method'), ('--method=mu_centering+z_loss', '--method'),
        ('--init_from=/nowhere', '/nowhere'), ('--init_from={bad}/magic/x_val_000000.bin', 'x_val_000000.bin', '--init_from'),
        ('--lam=nan', '--lam'), ('--method=weight_decay --lam=2', '--lam=2', 'at most 1'), ('--cap=0', '--cap'), ('--steps=0', '--steps', '>= 1'),
        ('--steps=1.5', '--steps', 'whole number'),
        ('--steps=1e400', '--steps'), ('--seed=-1', '--seed'), ('--seed=4294967296', '--seed'), ('--beta1=-0.1', '--beta1'),
        ('--beta2=1', '--beta2', '< 1'), ('--eps=0', '--eps'),
        ('--grad_clip=-1', '--grad_clip'), ('--batch_size=0', '--batch_size'), ('--batch_size=1e15', '--batch_size'), ('--n_layer=1e9', '--n_layer'),
        ('--n_embd=1e9', '--n_embd'),
        ('--n_embd=30 --n_head=4', '--n_embd', '--n_head'), ('--block_size=1e9', '--block_size'), ('--rope_fraction=2', '--rope_fraction'),
        ('--rope_fraction=1.0005', '--rope_fraction'),
        ('--vocab_size=0', '--vocab_size'), ('--vocab_size=100', '257', '--vocab_size'), ('--vocab_size=1e9', '--vocab_size'),
        ('--warmup=100 --steps=100', '--warmup', '--steps'),
        ('--warmup=-1', '--warmup'), ('--min_lr=1 --lr=0.1', '--min_lr', '--lr'), ('--micro_batch_size=3', '--micro_batch_size', '4 sequences'),
        ('--eval_tokens=5', '--eval_tokens', '--block_size'),
        ('--test_tokens=-1', '--test_tokens'), ('--log_every=0', '--log_every'), ('--keep_every=-1', '--keep_every'),
        ('--divergence_margin=0', '--divergence_margin'),
        ('--threads=0', '--threads'), ('--threads=1e9', '--threads'), ('--device=tpu', '--device', 'cpu'), ('--device=cuda:0', '--device', 'cuda'),
        ('--dtype=float16', '--dtype', 'bfloat16'),
        ('--dtype=float64 --logits_dtype=bfloat16', '--logits_dtype'), ('--head=fused', '--head', 'chunked'), ('--compile=yes', '--no-compile'),
        ('--weight_tying=true', '--weight_tying'),
        ('--no-lr', 'did you mean --lr'), ('--stepz=5', 'did you mean --steps'), ('--learning_rate=1', 'unknown argument --learning_rate'),
        ('foo', 'unknown argument foo'), ('--wandb', '--wandb'),
        ('--data=', '--data'), ('--out=', '--out'), ('--out=/dev/null/x', '/dev/null/x'), ('--out={bad}/a.doc', 'a.doc'),
        ('--out={bad}/other_run', 'method=None', '--out'),
        ('--data=/nowhere', '/nowhere', 'prepare_fineweb.py'), ('--data={bad}/a.doc', 'a.doc'))),
    *(('train', ['--data={bad}/' + name], [f'{name}', *names]) for name, *names in (
        ('empty', '*_train_*.bin'), ('no_val', '*_val_*.bin'), ('short', 'too short'), ('cut', 'cut short'),
        ('val_cut', 'x_val_000000.bin', 'cut short'), ('half_a_token', '50000'),
        ('magic', '20240520'), ('big_endian', '20240520'), ('version', 'version 2', 'version 1'), ('longer', '60000'), ('negative', '-5'),
        ('beyond', 'token 32767', '--vocab_size'),
        ('few', 'whole window', '--block_size'), ('none', 'whole window'), ('shard_is_folder', 'x_train_000000.bin'),
        ('shard_is_link', 'x_train_000000.bin'), ('meta_text', 'meta.json'),
        ('meta_size', 'vocab_size', "'many'"), ('meta_bool', 'vocab_size', 'True'), ('meta_nan', 'vocab_size'), ('meta_below', 'vocab_size'),
        ('meta_list', 'meta.json', 'object'),
        ('meta_latin', 'meta.json'), ('meta_deep', 'meta.json'), ('meta_half', 'meta.json'), ('meta_folder', 'meta.json'))),
    ('train', ['--data={bad}/meta_above', '--vocab_size=50304'], ['60000']),
    *(('prepare', flag.split(), names) for flag, *names in (
        ('--source=web', '--source', 'stdlib'), ('--sorce=stdlib', 'did you mean --source'), ('--source=local', '--files'),
        ('--source=local --files=', '--files'), ('--source=stdlib --files=x', '--files'),
        ('--source=stdlib --name=x', '--name'), ('--source=pretokenized --tokenizer=bytes', '--tokenizer'), ('--tokenizer=gpt3', '--tokenizer'),
        ('--source=stdlib --vocab_size=1024', '--tokenizer=bpe'), ('--tokenizer=bpe --vocab_size=256', '--vocab_size'),
        ('--tokens=0', '--tokens'), ('--tokens=many', '--tokens'),
        ('--val_tokens=3e9', '--val_tokens'), ('--shard_tokens=3e9', '--shard_tokens'), ('--shard_tokens=-1', '--shard_tokens'),
        ('--workers=0', '--workers'), ('--workers=1e9', '--workers'))),
    *(('prepare', ['--source=local', '--tokenizer=bytes', '--files=' + files], [files, *names]) for files, *names in (
        ('/nowhere/*', 'no such files'), ('{bad}/a.doc', '.parquet'), ('{bad}/*.*', '.doc'), ('{bad}/words.jsonl', 'text column'),
        ('{bad}/number.jsonl', 'text column'), ('{bad}/cut.jsonl',),
        ('{bad}/empty.jsonl',), ('{bad}/cut.parquet',), ('{bad}/latin.txt',))),
    *(('prepare', ['--source=stdlib', '--tokenizer=bytes', '--val_tokens=20000', '--shard_tokens=50000', '--tokens=1e6', '--out=' + out],
       names) for out, *names in (
        ('/dev/null/x', '/dev/null/x'), ('{bad}/a.doc', 'a.doc'), ('{bad}/meta_text', 'meta.json'), ('{bad}/meta_list', 'meta.json'),
        ('{bad}/prepared_other', "tokenizer='gpt2'"),
        ('{bad}/prepared_less', 'tokens', 'meta.json'), ('{bad}/prepared_typed', "'many'"), ('{bad}/prepared_counted', '4 train shards'),
        ('{bad}/prepared_sign', 'documents'),
        ('{bad}/prepared_cut', 'x_train_000000.bin'), ('{bad}/prepared_bare', 'no meta.json'))),
    *(('analyze', flag.split(), names) for flag, *names in (
        ('', '--results'), ('/nowhere', '/nowhere'), ('{bad}/empty', '{bad}/empty'), ('{bad}/other_run', '{bad}/other_run'),
        ('--results=/nowhere.csv', '/nowhere.csv'),
        ('--results={bad}', '{bad}'), ('{bad} --results={bad}/twice.csv', '--results'), ('--result=x.csv', 'did you mean --results'))),
    *(('analyze', ['--results={bad}/' + name + '.csv'], [f'{name}.csv', CSV_NAMES.get(name, '')]) for name in CSV_BAD),
    *(('bench', flag.split(), names) for flag, *names in (
        ('--sizes=17M', '17M', '16M'), ('--sizes=', '--sizes'), ('--methods=', '--methods'), ('--methods=baseline,mu', "'mu'", 'mu_loss'),
        ('--json=/nowhere/x.json', '--json'), ('--jsn=x', 'did you mean --json'),
        ('--profile --trace=/nowhere/x', '--trace'), ('--profile --head', '--head'), ('--seconds=0', '--seconds'), ('--tokens=0', '--tokens'),
        ('--width=-1', '--width'), ('--device=tpu', '--device'),
        ('--batch_size=4 --micro_batch_size=3', '--micro_batch_size'), ('--vocab_size=1e9', '--vocab_size'), ('--dtype=float64', '--dtype'),
        ('--peak_tflops=nan', '--peak_tflops'), ('x', 'x'))),
]
PROGRAMS = {'train': train.main, 'prepare': prepare_fineweb.main, 'analyze': analyze.main, 'bench': bench.main}
FILES = {'train': 'train.py', 'prepare': 'prepare_fineweb.py', 'analyze': 'analyze.py', 'bench': 'bench.py'}


def bad_command(program, flags, names, bad, corpus, out):
    """The flags of a case in full, and what its line names."""
    flags = [flag.replace('{bad}', str(bad)) for flag in flags]
    if program == 'train':
        flags = ['--steps=2', *SMALL, f'--data={corpus}', f'--out={out}', *flags]
    elif program == 'prepare':
        flags = [f'--out={out}', '--workers=1', *flags]
    elif program == 'analyze':
        flags = [f'--out={out}', *flags]
    return flags, [name.replace('{bad}', str(bad)) for name in names]


def test_there_are_enough_cases_and_no_two_are_the_same():
    commands = [(program, *flags) for program, flags, _ in BAD]
    assert len(set(commands)) == len(commands) >= 100 and {program for program, *_ in commands} == set(PROGRAMS)


def snapshot(folder):
    """When everything in a folder was last written."""
    return {path: os.lstat(path).st_mtime_ns for path in glob.glob(os.path.join(glob.escape(str(folder)), '**'), recursive=True, include_hidden=True)}


@pytest.fixture(scope='module')
def untouched(bad):
    return snapshot(bad)


@pytest.mark.parametrize('program, flags, names', BAD, ids=[f'{program} {" ".join(flags)}' for program, flags, _ in BAD])
def test_bad_input_is_one_line(program, flags, names, bad, untouched, corpus, tmp_path, capsys):
    flags, names = bad_command(program, flags, names, bad, corpus, tmp_path / 'out')
    expect_one_line(lambda: PROGRAMS[program](flags), names, capsys)
    assert os.listdir(tmp_path) == [] and snapshot(bad) == untouched


def test_bad_input_as_a_user_sees_it(bad, untouched, corpus, tmp_path):
    """A case of each kind as a real process."""
    chosen = ('train --stepz=5', 'train --data={bad}/cut', 'train --out={bad}/other_run', 'train --data={bad}/meta_deep', 'prepare --val_tokens=3e9',
              'prepare --source=local --files=',
              'prepare --source=local --tokenizer=bytes --files={bad}/cut.parquet', 'analyze --results={bad}/semicolons.csv', 'analyze /nowhere',
              'bench --sizes=17M')
    cases = [case for case in BAD if ' '.join((case[0], *case[1])) in chosen]
    assert len(cases) == len(chosen) == 10
    running = []
    for i, (program, flags, names) in enumerate(cases):
        flags, names = bad_command(program, flags, names, bad, corpus, tmp_path / 'out')
        running.append((names,
                        subprocess.Popen([sys.executable, FILES[program], *flags], cwd=HERE, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         text=True)))
        if i % 2:  # two at a time
            for names, done in running[-2:]:
                error = done.communicate(timeout=120)[1]
                assert done.returncode == 2 and error.startswith('error: ') and error.count('\n') == 1 and all(name in error for name in names), error
    group = ranks(2, [*flags_of(corpus), '--batch_size=3', f'--out={tmp_path}/out'], main=train.main, stderr=tmp_path / 'stderr')
    for rank in group:
        finish(rank, 2)
    assert '--batch_size=3' in one_line(tmp_path / 'stderr0') and (tmp_path / 'stderr1').read_text() == ''  # rank 0 speaks for all
    for rank in (0, 1):
        os.unlink(tmp_path / f'stderr{rank}')
    for env in ({'RANK': 'one'}, {'RANK': '2', 'WORLD_SIZE': '2'}, {'RANK': '0', 'WORLD_SIZE': '2'}):
        finish(process(train.main, flags_of(corpus, f'--out={tmp_path}/out'), stderr=tmp_path / 'stderr', env=env), 2)
        assert 'torchrun' in one_line(tmp_path / 'stderr')
        os.unlink(tmp_path / 'stderr')
    assert os.listdir(tmp_path) == [] and snapshot(bad) == untouched


def test_too_little_text_leaves_no_shard(tmp_path, capsys):
    (tmp_path / 'a.txt').write_text('x' * 100)
    for tokens, named in ((102, 'only 101 tokens'), (101, 'none are left to train on')):
        expect_one_line(lambda: prepare_fineweb.main(['--source=local', f'--files={tmp_path}/a.txt', '--tokenizer=bytes', '--workers=1',
                                                      f'--val_tokens={tokens}', f'--out={tmp_path}/{tokens}']),
                        [named, '--val_tokens'], capsys)
        assert not glob.glob(f'{tmp_path}/{tokens}/*_train_*.bin')


@pytest.fixture(scope='module')
def checkpoints(corpus, tmp_path_factory):
    """Folders of runs that were stopped in their first step: one that is gone on with below, and others like it."""
    folder = tmp_path_factory.mktemp('checkpoints')
    flags = [*flags_of(corpus), '--eval_every=0', '--keep_every=0']
    runs = {'this': [], 'method': ['--method=mu_loss'], 'tying': ['--no-weight_tying'], 'size': ['--n_embd=16'], 'seed': ['--seed=2']}
    started = [process(train.main, [*flags, *more, f'--out={folder}/{name}'],
                       prepare=functools.partial(signal_at_evaluation, signal.SIGTERM, 0)) for name, more in runs.items()]
    for run in started:
        finish(run, 143)
    return folder, flags


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


def damaged_checkpoints(folder, tmp_path):
    """(name, content of ckpt.pt, what the line must name)"""
    this = (folder / 'this' / 'ckpt.pt').read_bytes()
    for name, named in (('method', 'method='), ('tying', 'weight_tying='), ('size', 'n_embd='), ('seed', 'seed=')):
        yield name, (folder / name / 'ckpt.pt').read_bytes(), named
    for name, content in {'empty': b'', 'text': b'not a checkpoint', 'cut': this[:len(this) // 2], 'zip': b'PK\x05\x06' + bytes(18),
                          'one byte less': this[:-1]}.items():
        yield name, content, 'not a whole checkpoint'
    middle = len(this) // 2
    yield 'one bit', this[:middle] + bytes([this[middle] ^ 16]) + this[middle + 1:], 'not a whole checkpoint'
    path = str(tmp_path / 'made.pt')
    parts = torch.load(folder / 'this' / 'ckpt.pt', weights_only=True)
    for name, value, named in (('code', Evil(tmp_path / 'pwned'), 'not a whole checkpoint'),
                               ('code inside', {**parts, 'counters': Evil(tmp_path / 'pwned')}, 'not a whole checkpoint'),
                               ('list', [1, 2], 'not a whole checkpoint'),
                               ('model only', {k: parts[k] for k in ('model', 'step', 'config')}, 'optimizer'),
                               ('step text', {**parts, 'step': 'one'}, 'not what train.py writes'),
                               ('step beyond', {**parts, 'step': 241}, 'step 241'),
                               ('step below', {**parts, 'step': -3}, 'step -3'),
                               ('counters', {**parts, 'counters': {'elapsed': 0.0}}, 'counters elapsed'),
                               ('weights', {**parts, 'model': {'x': torch.ones(3)}}, 'not a checkpoint of this run'),
                               ('optimizer', {**parts, 'optimizer': {'state': {}, 'param_groups': []}}, 'not a checkpoint of this run'),
                               ('optimizer text', {**parts, 'optimizer': {'state': 'x', 'param_groups': 7}}, 'not a checkpoint of this run'),
                               ('config', {**parts, 'config': {}}, 'method=None')):
        torch.save(value, path)
        yield name, open(path, 'rb').read(), named
    import pickle
    yield 'bare pickle', pickle.dumps(Evil(tmp_path / 'pwned')), 'not a whole checkpoint'


def test_checkpoints_of_other_runs_damaged_ones_and_ones_that_would_run_code(checkpoints, tmp_path, capsys):
    folder, flags = checkpoints
    out = tmp_path / 'run'
    shutil.copytree(folder / 'this', out)
    cases = list(damaged_checkpoints(folder, tmp_path))
    assert len(cases) >= 20
    for name, content, named in cases:
        (out / 'ckpt.pt').write_bytes(content)
        before = snapshot(out), folder_hash(out)
        expect_one_line(lambda: train.main([*flags, f'--out={out}']), ['ckpt.pt', named], capsys)
        assert (snapshot(out), folder_hash(out)) == before and not (tmp_path / 'pwned').exists(), name
    shutil.copy(folder / 'this' / 'ckpt.pt', out / 'ckpt.pt')
    before = snapshot(out)
    os.makedirs(tmp_path / 'other_data')
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / 'other_data' / f'x_{split}_000000.bin'), np.arange(5000) % 250)
    common.write_json(str(tmp_path / 'other_data' / 'meta.json'), {'vocab_size': 257})
    for change, named in ((f'--data={tmp_path}/other_data', 'data_fingerprint'), ('--vocab_size=384', 'vocab_size'), ('--lr=1e-2', 'lr'),
                          ('--method=z_loss', 'method'), ('--seed=2', 'seed'),
                          ('--no-weight_tying', 'weight_tying'), ('--steps=241', 'steps'), ('--batch_size=8', 'batch_size'),
                          ('--dtype=bfloat16', 'dtype'), ('--head=plain', 'head')):
        expect_one_line(lambda: train.main([*flags, f'--out={out}', change]), [f'{out} holds a run with {named}='], capsys)
        assert snapshot(out) == before
    for name, content in {'config.json': b'{', 'result.json': b'[]'}.items():
        whole = (out / name).read_bytes() if (out / name).exists() else None
        (out / name).write_bytes(content)
        expect_one_line(lambda: train.main([*flags, f'--out={out}']), [name], capsys)
        os.unlink(out / name) if whole is None else (out / name).write_bytes(whole)
    # a log in which all sorts of things stand does not stop the run
    lines = (out / 'log.jsonl').read_bytes()
    (out / 'log.jsonl').write_bytes(lines + b'5\n[]\n{"loss": 1}\n\xff\xfe\n{"step": "x"}\n{"step": 2, "lo')
    assert train.main([*flags, f'--out={out}']) == 0
    assert (out / 'log.jsonl').read_bytes().startswith(lines) and (out / 'log.jsonl').read_bytes().count(b'\n') == 242


def test_a_model_that_would_run_code_is_not_analyzed(checkpoints, tmp_path, capsys):
    folder, _ = checkpoints
    run = tmp_path / 'sweep' / 'run'
    shutil.copytree(folder / 'this', run)
    common.write_json(str(run / 'result.json'), {'method': 'baseline', 'size': 'tiny', 'weight_tying': 0, 'lr': 0.1, 'test_loss': 3.0})
    for content in (Evil(tmp_path / 'pwned'), {'model': Evil(tmp_path / 'pwned')}):
        torch.save(content, run / 'model.pt')
        expect_one_line(lambda: analyze.main([str(tmp_path / 'sweep'), f'--out={tmp_path}/out']), ['model.pt'], capsys)
        assert not (tmp_path / 'pwned').exists()


def test_nothing_here_can_run_what_a_file_says():
    """No eval, exec, os.system, shell=True or pickle in the programs, and every torch.load is told weights_only=True."""
    loads = 0
    for path in glob.glob(os.path.join(HERE, '*.py')):
        if os.path.basename(path).startswith('test_'):
            continue
        for node in ast.walk(ast.parse(open(path, encoding='utf-8').read())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, 'module', None)]
                assert not {'pickle', 'marshal', 'shelve', 'dill', 'yaml'} & set(names), path
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert name not in ('eval', 'exec', 'os.system', 'os.popen',
                                    'compile') and 'shell' not in keywords and keywords.get('allow_pickle') != 'True', (path, name)
                if name.endswith('torch.load'):
                    loads += 1
                    assert keywords.get('weights_only') == 'True', path
    assert loads >= 2
    assert not any(word in open(os.path.join(HERE, 'sweep.sh')).read().split() for word in ('eval', 'source'))


def test_names_in_a_csv_are_no_paths_and_no_html(tmp_path):
    """Runs named <script> and ../../x are data: nothing is written but in the output folder, and no HTML has a tag of theirs."""
    rows = [(method, size, lr, 3 + i / 10) for method in ('<script>alert(1)</script>', '../../x', '"><img src=x onerror=alert(1)>', '$(touch pwned)')
            for size in ('../../y', '<b>16M') for i, lr in enumerate((0.1, 0.3))]
    os.makedirs(tmp_path / 'a' / 'b')
    with open(tmp_path / 'a' / 'r.csv', 'w', newline='') as file:
        csv.writer(file).writerows([HEAD.split(','), *((method, size, 0, lr, loss) for method, size, lr, loss in rows)])
    before = set(glob.glob(f'{tmp_path}/**', recursive=True)) | set(os.listdir(HERE))
    try:
        assert analyze.main([f'--results={tmp_path}/a/r.csv', f'--out={tmp_path}/a/b/out']) == 0
    except SystemExit as refused:  # such names may be refused, too
        assert refused.code == 2
    new = (set(glob.glob(f'{tmp_path}/**', recursive=True)) | set(os.listdir(HERE))) - before
    assert all(path.startswith(f'{tmp_path}/a/b/out') for path in new)
    for path in new:
        if path.endswith(('.html', '.svg')):
            text = open(path, encoding='utf-8').read()
            assert '<script>alert' not in text and '<img src=x' not in text and '<b>16M' not in text


def test_a_learning_rate_without_sense_keeps_finite_weights(corpus, tmp_path):
    """As far as --lr goes, in fp32 and with bf16 logits: the run ends with `diverged` and the step, without a word on stderr."""
    for lr, method, dtype in (('9e32', 'mu_centering', 'float32'), ('1e30', 'weight_decay', 'bfloat16'), ('1e10', 'soft_capping', 'float32'),
                              ('9e32', 'z_loss', 'float64')):
        out = tmp_path / f'{method}{lr}'
        flags = [*flags_of(corpus)[2:], f'--method={method}', f'--lr={lr}', '--lam=1', '--warmup=0', '--steps=30', f'--dtype={dtype}', f'--out={out}']
        finish(process(train.main, flags, stderr=tmp_path / 'stderr'), 0)
        result = common.read_json(str(out / 'result.json'))
        model = torch.load(out / 'model.pt', weights_only=True)
        assert (tmp_path / 'stderr').read_text() == '' and all(bool(torch.isfinite(w).all()) for w in model['model'].values()), method
        assert result['diverged'] == 1 and 0 < result['diverged_step'] <= 30 and not (out / 'ckpt.pt').exists()


# ------------------------------------------------------------------------------------------------------------------ sweeps


FAKE_TRAIN = '''
import json, os, signal, sys, time
sys.path.insert(0, {here!r})
import common
flags = dict(flag[2:].split('=', 1) for flag in sys.argv[1:] if '=' in flag)
out = flags['out']
common.make_folder(out)
lock = common.lock_folder(out)
if not os.path.exists(out + '/result.json'):
    log = out + '/log.jsonl'
    step = len(open(log).readlines()) if os.path.exists(log) else 0
    with open({folder!r} + '/started', 'a') as file:
        file.write(os.path.basename(out) + ' ' + str(step) + '\\n')
    if os.path.exists({folder!r} + '/broken') and os.path.basename(out) in open({folder!r} + '/broken').read():
        sys.exit('oh no')
    common.write_json(out + '/config.json', {{**flags, 'steps': 10}})
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    while step < 10:
        time.sleep(0.05)
        step += 1
        with open(log, 'a') as file:
            file.write(json.dumps({{'step': step, 'loss': 1.0, 'elapsed': 100.0 * step}}) + '\\n')
        if stop:
            time.sleep(0.3)  # saving takes its time
            sys.exit(143)
    common.write_json(out + '/result.json', {{'steps': 10}})
'''


@pytest.fixture
def sweep(tmp_path):
    """
    start(**environment) starts sweep.sh on 10 runs of half a second each: a training that locks, logs, resumes and saves as
    train.py does, without torch; an analysis that does nothing. Every start of a run is a line in tmp_path/started.
    """
    os.makedirs(tmp_path / 'bin')
    (tmp_path / 'train.py').write_text(FAKE_TRAIN.format(here=HERE, folder=str(tmp_path)))
    (tmp_path / 'bin' / 'python').write_text(f'#!/bin/sh\ncase $1 in train.py) shift; exec {sys.executable} {tmp_path}/train.py "$@" ;; '
                                             f'analyze.py) exit 0 ;; *) exec {sys.executable} "$@" ;; esac\n')
    (tmp_path / 'bin' / 'python').chmod(0o755)
    env = {**ENV, 'PATH': f'{tmp_path}/bin{os.pathsep}{ENV["PATH"]}', 'OUT': f'{tmp_path}/out', 'DATA': str(tmp_path),
           'METHODS': 'baseline mu_centering', 'TYING': 'untied',
           'LRS': '1e-3 3e-3 1e-2 3e-2 1e-1', 'JOBS': '2', 'RETRIES': '0', 'NPROC': '1'}

    def start(grid='demo', **more):
        return subprocess.Popen(['bash', os.path.join(HERE, 'sweep.sh'), *grid.split()], env={**env, **more}, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True,
                                start_new_session=True)
    return start


def end(started, status):
    out, error = started.communicate(timeout=120)
    assert started.returncode == status, out + error
    return out, error


def results(out):
    return {path: os.stat(path).st_mtime_ns for path in glob.glob(f'{glob.escape(str(out))}/*/result.json')}


def assert_each_ran_once(tmp_path, out, after=0):
    """All ten runs are done, each of their steps was made once, and none was started twice (after so many starts)."""
    assert len(results(out)) == 10
    for path in results(out):
        with open(os.path.join(os.path.dirname(path), 'log.jsonl')) as log:
            assert [json.loads(line)['step'] for line in log] == list(range(1, 11)), path
    begun = [line.split()[0] for line in open(tmp_path / 'started')][after:]
    assert len(begun) == len(set(begun))


def test_a_sweep_that_is_killed_goes_on_and_two_share_its_runs(sweep, tmp_path):
    out = tmp_path / 'out'
    first = sweep()
    wait_until(lambda: len(results(out)) >= 2)
    time.sleep(0.2)
    if sys.platform == 'linux':  # all of it at once, as a machine that goes away; elsewhere its runs live on and share the work
        for child in children(first.pid):
            os.killpg(os.getpgid(child), signal.SIGKILL)
    first.kill()
    first.communicate()
    before, starts = results(out), len(open(tmp_path / 'started').readlines())
    assert 2 <= len(before) < 10
    both = [sweep(), sweep()]
    for one in both:
        end(one, 0)
    assert before.items() <= results(out).items()
    assert_each_ran_once(tmp_path, out, after=starts)
    begun = open(tmp_path / 'started').read()
    assert '10 of them done' in end(sweep(), 0)[0] and open(tmp_path / 'started').read() == begun


def test_a_sweep_whose_script_alone_is_killed_shares_with_what_it_left(sweep, tmp_path):
    first = sweep()
    wait_until(lambda: len(results(tmp_path / 'out')) >= 1)
    first.kill()  # its runs go on
    end(sweep(), 0)
    wait_until(lambda: len(results(tmp_path / 'out')) == 10)
    assert_each_ran_once(tmp_path, tmp_path / 'out')
    first.communicate()


def test_a_signal_to_a_sweep_saves_all_its_runs(sweep, tmp_path):
    first = sweep()
    wait_until(lambda: len(results(tmp_path / 'out')) >= 2)
    time.sleep(0.2)
    first.terminate()
    assert 'goes on' in end(first, 143)[1]
    done, logs = len(results(tmp_path / 'out')), folder_hash(tmp_path / 'out')
    assert done < 10 and f'{done} done, 0 running, {10 - done} waiting, 0 failed' in end(sweep('status'), 0)[0]
    time.sleep(0.3)
    assert folder_hash(tmp_path / 'out') == logs  # nobody is left at work
    starts = len(open(tmp_path / 'started').readlines())
    end(sweep(), 0)
    assert_each_ran_once(tmp_path, tmp_path / 'out', after=starts)


def test_a_sweep_of_torchruns_that_is_told_to_stop_tries_none_again(sweep, tmp_path):
    """torchrun ends with 1 however its processes ended; that is no failure of the run where the sweep was told to stop."""
    (tmp_path / 'bin' / 'torchrun').write_text('#!/bin/sh\ntrap : TERM INT\nshift 2\npython "$@" || exit 1\n')
    (tmp_path / 'bin' / 'torchrun').chmod(0o755)
    first = sweep(NPROC='2', RETRIES='2')
    wait_until(lambda: len(results(tmp_path / 'out')) >= 2)
    time.sleep(0.2)
    first.terminate()
    assert 'goes on' in end(first, 143)[1]
    starts = open(tmp_path / 'started').read()
    done = len(results(tmp_path / 'out'))
    assert done < 10 and f'{done} done, 0 running, {10 - done} waiting, 0 failed' in end(sweep('status'), 0)[0]
    time.sleep(0.5)
    assert open(tmp_path / 'started').read() == starts  # none was started anew
    assert len({line.split()[0] for line in starts.splitlines()}) == len(starts.splitlines())


def test_status_and_retries(sweep, tmp_path):
    broken = 'tiny-untied-mu_centering-lr0.001-s1'
    (tmp_path / 'broken').write_text(broken)
    first = sweep(RETRIES='2')
    wait_until(lambda: results(tmp_path / 'out'))
    states, states_error = end(sweep('status'), 0)
    found = dict(zip(('done', 'running', 'waiting', 'failed'), map(int, states.split(': ', 1)[1].split('about')[0].replace(',', '').split()[2::2])))
    assert states.startswith(f'{tmp_path}/out: 10 runs, ') and sum(found.values()) == 10, states
    assert found['done'] >= 1 and found['running'] >= 1 and found['waiting'] >= 1, states
    assert states.count('\n  running tiny-untied-') == found['running'] and ' of 10' in states and states_error == ''
    left = int(states.split('about ')[1].split()[0])  # a run says that it takes 1,000 s
    assert 1000 * found['waiting'] / found['running'] <= left <= 1000 * (found['waiting'] / found['running'] + 1)
    out, error = end(first, 1)
    assert open(tmp_path / 'started').read().count(broken) == 3  # once, and two tries more
    assert f'{broken}: FAILED with status 1: oh no' in out and error.splitlines()[1:] == [broken]
    assert '9 done, 0 running, 0 waiting, 1 failed' in end(sweep('status'), 0)[0] and f'failed {broken}' in end(sweep('status'), 0)[0]
    (tmp_path / 'broken').unlink()
    end(sweep(), 0)
    assert '10 runs, 10 done, 0 running, 0 waiting, 0 failed, about 0 s left' in end(sweep('status'), 0)[0]


def test_what_is_in_a_sweeps_variables_is_data(sweep, tmp_path):
    odd = 'a  b\'c"d$(touch pwned)`touch pwned`;touch pwned&*\\'
    os.makedirs(tmp_path / odd)
    end(sweep(OUT=f'{tmp_path}/{odd}/out', DATA=f'{tmp_path}/{odd}', LRS='1e-3'), 0)
    found = results(tmp_path / odd / 'out')
    assert len(found) == 2
    for path in found:
        assert common.read_json(os.path.join(os.path.dirname(path), 'config.json'))['data'] == f'{tmp_path}/{odd}'
    assert '2 runs, 2 done' in end(sweep('status', OUT=f'{tmp_path}/{odd}/out'), 0)[0]
    line = end(sweep(DRY_RUN='1', OUT=f'{tmp_path}/{odd}/dry', DATA=f'{tmp_path}/{odd}', LRS='1e-3', METHODS='baseline'), 0)[0]
    subprocess.run(['bash', '-c', line], env={**ENV, 'PATH': f'{tmp_path}/bin{os.pathsep}{ENV["PATH"]}'}, check=True)
    assert len(results(tmp_path / odd / 'dry')) == 1
    assert not os.path.exists(os.path.join(HERE, 'pwned')) and not list(tmp_path.glob('**/pwned'))


SWEEP_BAD = [  # a variable and what it has, what the line must name
    ('METHODS', 'basline', 'mu_centering'), ('METHODS', '../../x', '../../x'), ('METHODS', '*', "'*'"), ('METHODS', '$(touch pwned)', '$(touch'),
    ('METHODS', ' ', 'empty'),
    ('METHODS', 'baseline|z_loss', '|'), ('SIZES', '17M', '16M'), ('SIZES', '16M;id', 'SIZES'), ('TYING', 'Tied', 'untied tied'),
    ('LRS', 'fast', 'numbers above 0'), ('LRS', '0', 'above 0'),
    ('LRS', '-1', 'above 0'), ('LRS', 'nan', 'numbers'), ('LRS', '1e-3 0.0e5', '0.0e5'), ('LRS', '1e-3,1e-2', '1e-3,1e-2'),
    ('LRS', '`touch pwned`', 'LRS'), ('LAMS', '-1', 'numbers'), ('LAMS', 'x', 'LAMS'),
    ('SEEDS', '../x', 'whole'), ('SEEDS', '1.5', 'whole'), ('STEPS', 'many', 'whole number'), ('STEPS', '0', 'at least 1'),
    ('STEPS', '1e5', 'whole number'), ('JOBS', '0', 'at least 1'), ('JOBS', '08', 'JOBS'),
    ('JOBS', 'a[$(touch pwned)]', 'JOBS'), ('JOBS', '99999999999999999999', 'JOBS'), ('NPROC', '-1', 'NPROC'), ('RETRIES', 'often', 'RETRIES'),
    ('LOGITS_DTYPE', 'float8', 'bfloat16 float32'), ('DATA', '/nowhere', '/nowhere')]


def test_bad_variables_of_a_sweep_are_one_line(sweep, tmp_path):
    for name, value, named in SWEEP_BAD:
        _, error = end(sweep(**{name: value}), 2)
        assert error.startswith('error: ' + name) and named in error and error.count('\n') == 1, error
    for grid, named in (('grid', 'paper, ablation, demo, proxy or status'), ('demo demo', 'one grid'), ('status', 'no sweep')):
        _, error = end(sweep(grid), 2)
        assert error.startswith('error: ') and named in error and error.count('\n') == 1, error
    assert not (tmp_path / 'out').exists() and not (tmp_path / 'started').exists() and not os.path.exists(os.path.join(HERE, 'pwned'))
