"""Programs in processes of their own, to be killed, starved of disk and started twice."""
import glob
import hashlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from unittest import mock

import train
from oec import common

# Processes start in a moment: they are forked from a server that has imported all this and done nothing with
# it. An optimizer imports torch._dynamo, and that takes seconds.
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(['train', 'prepare_fineweb', 'test_prepare', 'runs', 'torch._dynamo'])
SERVER_ENV = {'PYTHONPATH': os.pathsep.join(sys.path), 'OMP_NUM_THREADS': '1'}  # where it finds the above


def process(main, argv, stderr=os.devnull, env=None, file_limit=None, prepare=()):
    """
    Starts main(argv) as a program in a process: errors go to the file `stderr`, `env` joins its environment,
    a file takes `file_limit` bytes at most, as on a full disk; prepare = (function, *its arguments) is first.
    """
    started = START.Process(target=in_process, args=(main, argv, str(stderr), env or {}, file_limit, prepare))
    with mock.patch.dict(os.environ, SERVER_ENV):  # the first call starts the server
        started.start()
    return started


def in_process(main, argv, stderr, env, file_limit, prepare):
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & switches off
    importlib.reload(train)  # which reads torchrun's variables when it is imported
    main = getattr(sys.modules[main.__module__], main.__name__)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
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


def folder_hash(folder, but=('.lock',)):
    """The hash of every file under a folder by its path in there, but for files of the names in `but`."""
    found = {path: os.path.join(folder, path)
             for path in glob.glob('**', root_dir=folder, recursive=True, include_hidden=True)}
    return {path: hashlib.sha256(open(full, 'rb').read()).hexdigest() for path, full in found.items()
            if os.path.isfile(full) and os.path.basename(path) not in but}


def times(folder):
    """When everything in a folder was last written."""
    paths = glob.glob('**', root_dir=folder, recursive=True, include_hidden=True)
    return {path: os.lstat(os.path.join(folder, path)).st_mtime_ns for path in paths}


def one_line(path):
    with open(path) as file:
        text = file.read()
    assert text.startswith('error: ') and text.count('\n') == 1, text
    return text
