"""Programs in processes of their own, to be killed and started twice."""
import hashlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import train
from oec import common

# Processes are forked from a server that has imported all this, which takes seconds.
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(['train', 'prepare_fineweb', 'test_prepare', 'runs', 'torch._dynamo'])
SERVER_ENV = {'PYTHONPATH': os.pathsep.join(sys.path), 'OMP_NUM_THREADS': '1'}  # where it finds the above


def process(main, argv, stderr=os.devnull, env=None, prepare=()):
    """
    Starts main(argv) as a program in a process: errors go to the file `stderr`, `env` joins its environment,
    prepare = (function, *its arguments) is called first.
    """
    started = START.Process(target=in_process, args=(main, argv, str(stderr), env or {}, prepare))
    with mock.patch.dict(os.environ, SERVER_ENV):  # the first call starts the server
        started.start()
    return started


def in_process(main, argv, stderr, env, prepare):
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & switches off
    importlib.reload(train)  # which reads torchrun's variables when it is imported
    main = getattr(sys.modules[main.__module__], main.__name__)
    if prepare:
        prepare[0](*prepare[1:])
    sys.argv[1:] = argv
    common.program(main)


def finish(started, status, seconds=120):
    """Waits for a process and asserts its exit status."""
    started.join(seconds)
    if started.exitcode is None:
        for one in multiprocessing.active_children():  # or they would keep pytest from ending
            one.kill()
    assert started.exitcode == status, started.exitcode


def wait_until(condition, seconds=60):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds
        time.sleep(0.002)


def folder_hash(folder):
    """The hash of every file under a folder, but for locks, by its path in there."""
    files = [path for path in Path(folder).rglob('*') if path.is_file() and path.name != '.lock']
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def times(folder):
    """When everything in a folder was last written."""
    return {path: path.lstat().st_mtime_ns for path in Path(folder).rglob('*')}


def one_line(path):
    text = Path(path).read_text()
    assert text.startswith('error: ') and text.count('\n') == 1, text
    return text
