"""What the tests share: programs to be started, refused and killed, a small corpus."""
import contextlib
import hashlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

# Before torch and the hub's client are imported: the workers share the cores, and have a cache of their own.
CACHE = tempfile.TemporaryDirectory()
os.environ.update(OMP_NUM_THREADS='1', HF_HOME=CACHE.name, HF_HUB_OFFLINE='1',
                  TORCHINDUCTOR_VEC_ISA_OK='1')  # spares torch.compile its trial programs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {**os.environ, 'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']}

# Processes are forked from a server that has imported all this, which takes seconds.
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(['small_runs', 'test_prepare', 'torch._dynamo'])


def refused(call, *named):
    """Asserts that call() exits with status 2 and one line, after a usage, that names each of `named`."""
    printed, status = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(printed):
            call()
    except SystemExit as end:
        status = end.code
    *usage, line = printed.getvalue().splitlines() or ['']
    assert status == 2 and ': error: ' in line and len(usage) <= 1, line
    for name in named:
        assert str(name) in line


def process(main, argv, stderr=os.devnull, env=None, prepare=(), daemon=True):
    """Starts main(argv) as a program, after a call of prepare = (f, *arguments). A daemon may start none."""
    given = (main, argv, str(stderr), env or {}, prepare)
    started = START.Process(target=in_process, args=given, daemon=daemon)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # where the server finds all
        started.start()
    return started


def in_process(main, argv, stderr, env, prepare):
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(env)
    import train  # not in pytest's own process, which runs no test
    train.RANK, train.WORLD_SIZE = int(env.get('RANK', 0)), int(env.get('WORLD_SIZE', 1))
    train.master_process = train.RANK == 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & switches off
    if prepare:
        prepare[0](*prepare[1:])
    main(argv)


def finish(started, status, seconds=120):
    """Waits for a process, kills one that does not end, and asserts its exit status."""
    started.join(seconds)
    started.kill()
    assert started.exitcode == status, started.exitcode


def folder_hash(folder):
    """The hash of every file under a folder, but for locks, by its path in there."""
    files = [path for path in Path(folder).rglob('*') if path.is_file() and path.name != '.lock']
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(autouse=True)
def signals():
    """A run leaves its handlers of signals behind: its process ends with it. Here they are put back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Shards of the standard library's source in bytes: one val shard and two train shards."""
    folder = str(tmp_path_factory.mktemp('data') / 'stdlib')
    import prepare_fineweb
    prepare_fineweb.main(['--source=stdlib', '--tokenizer=bytes', f'--out={folder}', '--val_tokens=20000',
                          '--tokens=90000', '--shard_tokens=50000'])
    return folder


@pytest.fixture
def trained(corpus, tmp_path):
    """trained(name, *flags) trains tmp_path/name in this process, and returns its folder."""
    def train_one(name, *flags):
        import train
        from small_runs import SMALL
        train.main([*SMALL, f'--data={corpus}', f'--out={tmp_path}/{name}', *flags])
        return str(tmp_path / name)
    return train_one
