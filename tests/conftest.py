"""What the tests share: programs started as a user starts them, a small corpus, one real sweep."""
import os
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch is imported: the workers share the cores

import prepare_fineweb
import train
from oec.common import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {**os.environ, 'OMP_NUM_THREADS': '1',
       'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as file:
        return file.read()


def execute(*command, cwd=ROOT, **env):
    """Starts a program as a user would and asserts that its exit status is 0."""
    done = subprocess.run(command, cwd=cwd, env={**ENV, **env}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def refused(call, *named, status=2):
    """Asserts that call() raises a UserError with this status whose one line names each of `named`."""
    with pytest.raises(UserError) as caught:
        call()
    line, found = str(caught.value), caught.value.status
    traceback.clear_frames(caught.tb)  # which hold main's variables, and with them the folder's lock
    assert found == status and '\n' not in line and all(str(name) in line for name in named), line


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Shards of the standard library's source in bytes: one val shard and two train shards."""
    folder = str(tmp_path_factory.mktemp('data') / 'stdlib')
    prepare_fineweb.main(['--source=stdlib', '--tokenizer=bytes', f'--out={folder}', '--val_tokens=20000',
                          '--tokens=90000', '--shard_tokens=50000', '--workers=1'])
    return folder


@pytest.fixture(scope='session')
def swept(corpus, tmp_path_factory):
    """
    Two methods at two learning rates: .folder, .out (the runs), .results. The last run is that of a real
    sweep; the others, which would take Python seconds to start, are there before it.
    """
    folder = str(tmp_path_factory.mktemp('checkout'))  # whose out/ and results/ are not the user's
    for name in os.listdir(ROOT):
        if name.endswith(('.py', '.sh')) or name in ('analysis', 'oec'):
            os.symlink(os.path.join(ROOT, name), os.path.join(folder, name))
    out = os.path.join(folder, 'out', 'demo')
    for method, lr in (('baseline', '0.01'), ('baseline', '0.1'), ('mu_centering', '0.01')):
        train.main(['--size=tiny', '--steps=60', '--batch_size=8', '--block_size=128', '--log_every=2',
                    '--eval_every=0', '--test_tokens=8192', '--device=cpu', '--threads=1',
                    '--logits_dtype=bfloat16', f'--method={method}', f'--lr={lr}', f'--data={corpus}',
                    f'--out={out}/tiny-untied-{method}-lr{lr}-s1'])
    execute('bash', 'sweep.sh', 'demo', cwd=folder, METHODS='mu_centering', LRS='1e-1', STEPS='60',
            DATA=corpus, FLAGS='--test_tokens=8192')
    return SimpleNamespace(folder=folder, out=out, results=os.path.join(folder, 'results', 'demo'))
