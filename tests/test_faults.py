"""Nothing lost, nothing silent: kills, signals, full disks, several processes, files not to be trusted."""
import ast
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import common
import data
import runs
import train
from conftest import ENV, ROOT, refused
from model import GPT, embeddings_to_loss, gpt_config
from processes import finish, folder_hash, one_line, process, stamp, wait_until
from runs import SMALL, assert_same, keep_checkpoint, load, log_of, ranks, signal_at_evaluation, state_of

FLAGS = ('--method=mu_centering', '--weight_tying', '--lr=3e-2', '--steps=120', *SMALL, '--log_every=1',
         '--ckpt_every=4', '--eval_every=40', '--keep_every=60')


def flags_of(corpus, out, *more):
    return [*FLAGS, f'--data={corpus}', f'--out={out}', *more]


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """Uninterrupted runs of FLAGS that others are compared with: dtype -> folder."""
    folder = tmp_path_factory.mktemp('whole')
    folders = {dtype: str(folder / dtype) for dtype in ('float32', 'bfloat16')}
    started = [process(train.main, flags_of(corpus, out, f'--dtype={dtype}'), prepare=keep_checkpoint)
               for dtype, out in folders.items()]
    for run in started:
        finish(run, 0)
    return folders


# --------------------------------------------------------------------------------------------------
# kills and signals


@pytest.mark.parametrize('dtype, kills, halves', [('float32', 8, 2), ('bfloat16', 4, 1)])
def test_a_run_killed_at_any_moment_ends_as_if_never_stopped(corpus, whole, tmp_path, dtype, kills, halves):
    """Kills in the start, between steps, and while a checkpoint is written; some must leave half a file."""
    rng, out = np.random.RandomState(kills), tmp_path / 'run'
    flags = flags_of(corpus, out, f'--dtype={dtype}')
    whole_file, half_file = out / 'ckpt.pt', out / 'ckpt.pt.tmp'
    half_written = 0
    for kill in range(kills):
        before, half = stamp(whole_file), stamp(half_file)
        started = process(train.main, flags, prepare=keep_checkpoint)
        moment = ('step', 'write', 'write', 'start')[kill % 4]
        if moment != 'start':  # each of these makes a checkpoint from which the next one resumes
            wait_until(lambda before=before: stamp(whole_file) not in (None, before))
        if moment == 'write':
            wait_until(lambda half=half: stamp(half_file) not in (None, half), pause=0)
        else:
            time.sleep(rng.uniform(0, 0.05))
        started.kill()
        finish(started, -signal.SIGKILL)
        half_written += stamp(half_file) not in (None, half)
    assert half_written >= halves and 4 * (kills - kills // 4) <= load(out, 'ckpt.pt')['step'] < 120
    finish(process(train.main, flags, prepare=keep_checkpoint), 0)
    assert_same(state_of(out), state_of(whole[dtype]))
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole[dtype]))  # nothing half written is left


def test_signals_during_evaluations_lose_nothing(corpus, whole, tmp_path):
    """One run: stopped in its first evaluation, in a later one, twice in the final one, and warned there."""
    out, errors = tmp_path / 'run', tmp_path / 'stderr'
    flags = flags_of(corpus, out, '--dtype=float32')
    for number, which, status, step in ((signal.SIGTERM, 0, 143, 1), (signal.SIGINT, 0, 130, 41),
                                        (signal.SIGTERM, -1, 143, 120), (signal.SIGINT, -1, 130, 120),
                                        (signal.SIGUSR1, -1, 0, 120)):
        hook = functools.partial(signal_at_evaluation, number, which)
        finish(process(train.main, flags, stderr=errors, prepare=hook), status)
        assert load(out, 'ckpt.pt')['step'] == step and errors.read_text() == ''
    assert_same(state_of(out), state_of(whole['float32']))


# --------------------------------------------------------------------------------------------------
# files, disks, two at once


def dying_write(path, death):
    """write_atomic(path, b'new' * 1000) in a child that dies at `death`: 'half', 'fsync 1', 'replace', ..."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        return
    calls = []

    def die_at(name, real):
        def call(*args):
            calls.append(name)
            if calls == ['fsync'] and os.fstat(args[0]).st_size != 3000:
                os._exit(8)  # synced before all of it was written
            if death in (name, f'{name} {calls.count(name)}'):
                os._exit(9)
            return real(*args)
        return call
    os.fsync, os.replace = die_at('fsync', os.fsync), die_at('replace', os.replace)

    def write(file):
        file.write(b'new' * 500)
        if death == 'half':
            file.flush()
            os._exit(9)
        file.write(b'new' * 500)
    common.write_atomic(path, write)
    os._exit(9)


def test_a_file_is_the_old_or_the_new_wherever_the_writer_dies(tmp_path):
    file, old, new = tmp_path / 'file', b'old', b'new' * 1000
    for death, left in (('half', old), ('fsync 1', old), ('replace', old), ('fsync 2', new), ('end', new)):
        file.write_bytes(old)
        dying_write(str(file), death)
        assert file.read_bytes() == left and set(os.listdir(tmp_path)) <= {'file', 'file.tmp'}, death


def test_a_full_disk_is_one_line_and_the_old_checkpoint_resumes(corpus, whole, tmp_path):
    """Full for the checkpoint, full half way through a line of the log; a folder that refuses each file."""
    out, errors = tmp_path / 'run', tmp_path / 'stderr'
    flags = flags_of(corpus, out, '--dtype=float32')
    finish(process(train.main, flags, stderr=errors, file_limit=100_000), 1)
    assert f'cannot write {out}/ckpt.pt: File too large' in one_line(errors)
    assert not (out / 'ckpt.pt').exists()
    stop = functools.partial(signal_at_evaluation, signal.SIGTERM, 1)
    finish(process(train.main, flags, prepare=stop), 143)
    before, limit = (out / 'ckpt.pt').read_bytes(), (out / 'log.jsonl').stat().st_size + 100
    finish(process(train.main, flags, stderr=errors, file_limit=limit), 1)
    assert f'cannot write {out}/log.jsonl' in one_line(errors)
    assert (out / 'ckpt.pt').read_bytes() == before
    assert (out / 'log.jsonl').read_bytes()[-1:] != b'\n'  # half a line, which the next start takes away
    for name in ('ckpt.pt', 'config.json', 'log.jsonl', 'model_60.pt', 'model.pt', 'result.json'):
        os.makedirs(out / f'{name}.tmp' / 'x')  # root cannot write there either
        finish(process(train.main, flags, stderr=errors), 1)
        assert f'cannot write {out}/{name}' in one_line(errors)
        shutil.rmtree(out / f'{name}.tmp')
        load(out, 'ckpt.pt')
    finish(process(train.main, flags, prepare=keep_checkpoint), 0)
    assert_same(state_of(out), state_of(whole['float32']))


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc and /dev/full are Linux')
def test_a_folder_that_takes_no_files_and_a_terminal_on_a_full_disk(corpus, tmp_path):
    finish(process(train.main, flags_of(corpus, '/proc/self'), stderr=tmp_path / 'stderr'), 1)
    assert 'cannot write in the folder /proc/self' in one_line(tmp_path / 'stderr')
    command = [sys.executable, 'train.py', *flags_of(corpus, tmp_path / 'run')]
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command, cwd=ROOT, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == 'error: No space left on device: standard output\n'


def test_copies_in_one_folder(corpus, whole, tmp_path):
    """One of them works; the others end with 3, or find it done."""
    flags = flags_of(corpus, tmp_path / 'run', '--dtype=float32')
    copies = [process(train.main, flags, stderr=tmp_path / f'stderr{i}', prepare=keep_checkpoint)
              for i in range(3)]
    for copy in copies:
        copy.join(120)
    assert {0} <= {copy.exitcode for copy in copies} <= {0, 3}
    for i, copy in enumerate(copies):
        assert copy.exitcode == 0 or 'another process' in one_line(tmp_path / f'stderr{i}')
    assert_same(state_of(tmp_path / 'run'), state_of(whole['float32']))


# --------------------------------------------------------------------------------------------------
# any number of processes


# 45 windows of test tokens, which 2 or 4 processes cannot share evenly; one window of evaluation tokens, so
# that some of them have none. lam is so large that a penalty shows if it is counted once per micro-batch or
# process.
MESH = ('--size=tiny', '--n_layer=1', '--n_embd=16', '--block_size=16', '--batch_size=8', '--steps=5',
        '--log_every=1', '--lr=1e-2', '--test_tokens=720', '--eval_tokens=16', '--eval_every=2',
        '--device=cpu', '--threads=1')
KINDS = {'centered': ('--method=mu_centering', '--weight_tying', '--dtype=float64'),
         'regularised': ('--method=mu_loss', '--lam=1000', '--dtype=float64'),
         'single': ('--method=mu_loss', '--lam=1', '--dtype=float32')}


@pytest.fixture(scope='module')
def meshes(corpus, tmp_path_factory):
    """The same runs by 1, 2 and 4 processes: (processes, micro-batch, kind) -> folder."""
    folder, groups, found = tmp_path_factory.mktemp('meshes'), [], {}
    for world, micros in ((1, (8, 2)), (2, (4, 1)), (4, (2, 1))):
        commands = []
        cases = [(micro, kind) for micro in micros for kind in KINDS]
        for (micro, kind), port in zip(cases, runs.free_ports(len(cases)), strict=True):
            out = found[world, micro, kind] = str(folder / f'{world}-{micro}-{kind}')
            flags = [*MESH, *KINDS[kind], f'--micro_batch_size={micro}', f'--data={corpus}']
            commands.append([port, out, *flags])
        groups += ranks(world, [json.dumps(commands)], folder / f'stderr{world}-', main=runs.record)
    for rank in groups:
        finish(rank, 0)
    return found


def seen_by(folder, world):
    return [load(folder, f'rank{rank}.pt') for rank in range(world)]


def global_batch(corpus, step):
    """The 8 windows (8, 17) of a step of MESH."""
    shards = data.load_shards(corpus, 'train')
    windows = data.batch_windows(1, step, 8, int(data.count_windows(shards, 16).sum()))
    return torch.from_numpy(data.read_windows(shards, 16, windows, 257))


def test_any_number_of_processes_reads_the_same_batches_in_the_same_order(meshes, corpus):
    for (world, micro, _), folder in meshes.items():
        seen = seen_by(folder, world)
        assert all(len(part) == micro for rank in seen for step in rank['batches'] for part in step)
        for step in range(5):
            read = torch.cat([part for rank in seen for part in rank['batches'][step]])
            assert torch.equal(read, global_batch(corpus, step)[:, :-1]), (world, micro, step)


@pytest.mark.parametrize('kind', ['centered', 'regularised'])
def test_any_number_of_processes_has_the_same_losses_evaluations_and_weights(meshes, kind):
    """Five float64 steps: every value of the log and every weight to 1e-10."""
    one, weights = log_of(meshes[1, 8, kind]), seen_by(meshes[1, 8, kind], 1)[0]['weights']
    assert [e['step'] for e in one] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert one[-1]['test_loss'] != one[0]['test_loss']
    for (world, micro, other), folder in meshes.items():
        if other == kind:
            for a, b in zip(one, log_of(folder), strict=True):
                assert a == {k: pytest.approx(v, rel=1e-10, abs=1e-10) for k, v in b.items()}, (world, micro)
            for name, value in seen_by(folder, world)[0]['weights'].items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)


def test_all_ranks_have_the_same_bits_and_centered_embeddings(meshes):
    for (world, micro, kind), folder in meshes.items():
        first, *others = seen_by(folder, world)
        for rank in others:
            assert_same((rank['weights'], rank['gradients']), (first['weights'], first['gradients']))
        E = first['weights']['lm_head.weight']
        centered = E.mean(dim=0).norm() <= torch.finfo(E.dtype).eps * E.norm()
        assert centered == (kind == 'centered'), (world, micro, kind)


def test_any_number_of_processes_has_the_same_gradients_to_fp32_summation(meshes, corpus):
    """
    However n terms x_i are summed, the sum is off by no more than (n - 1) u sum |x_i|, u = 2^-24 (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2). The terms are those of the 128 tokens of the batch,
    their magnitudes what each sequence adds to the gradient, in float64.
    """
    config = common.read_json(os.path.join(meshes[1, 8, 'single'], 'config.json'))
    torch.manual_seed(config['seed'])
    gpt = GPT(gpt_config({**config, 'dtype': 'float64', 'logits_dtype': 'float64'})).double()
    losses = [gpt(row[:, :-1], row[:, 1:])[0] / 8 for row in global_batch(corpus, 0).split(1)]
    losses.append(embeddings_to_loss(gpt.E, gpt.config))  # once per step
    terms = [torch.autograd.grad(loss, list(gpt.parameters()), allow_unused=True) for loss in losses]
    terms = [[g for g in of_parameter if g is not None] for of_parameter in zip(*terms, strict=True)]
    for (world, micro, kind), folder in meshes.items():
        if kind == 'single':
            for found, exact in zip(seen_by(folder, world)[0]['gradients'], terms, strict=True):
                bound = 127 * 2.0 ** -24 * sum(g.abs() for g in exact).norm()
                assert found.dtype == torch.float32
                assert (found - sum(exact)).norm() <= bound, (world, micro)


def test_a_rank_that_dies_ends_the_others_with_one_line(corpus, tmp_path):
    for victim in (0, 1):
        out = tmp_path / f'run{victim}'
        group = ranks(2, flags_of(corpus, out, '--steps=100000'), tmp_path / 'stderr')
        wait_until((out / 'ckpt.pt').exists)
        group[victim].kill()
        finish(group[1 - victim], 1, seconds=20)
        assert f'rank {1 - victim}: lost another process' in one_line(tmp_path / f'stderr{1 - victim}')
        load(out, 'ckpt.pt')


def test_what_goes_wrong_in_one_rank_alone_is_said_by_it(tmp_path):
    """A token beyond the head, in a window that rank 1 alone reads and nobody checks before the start."""
    tokens = np.arange(2**20 + 2**18) % 250
    n = (len(tokens) - 1) // 32
    window = next(w for step in range(100) for w in data.batch_windows(1, step, 4, n, rank=1, world_size=2)
                  if w * 32 > 2**20)
    tokens[window * 32 + 16] = 60000
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / f'x_{split}_000000.bin'), tokens)
    common.write_json(str(tmp_path / 'meta.json'), {'vocab_size': 257})
    group = ranks(2, flags_of(tmp_path, tmp_path / 'run'), tmp_path / 'stderr')
    finish(group[1], 2)
    finish(group[0], 1, seconds=20)
    assert 'x_train_000000.bin: it has the token 60000' in one_line(tmp_path / 'stderr1')
    assert 'lost another process' in one_line(tmp_path / 'stderr0')


def test_what_all_ranks_see_is_said_by_rank_0(corpus, tmp_path):
    flags, errors = flags_of(corpus, tmp_path / 'run', '--batch_size=3'), tmp_path / 'stderr'
    for rank in ranks(2, flags, errors):
        finish(rank, 2)
    assert '--batch_size=3' in one_line(f'{errors}0') and os.path.getsize(f'{errors}1') == 0
    for env in ({'RANK': 'one'}, {'RANK': '2', 'WORLD_SIZE': '2'}, {'RANK': '0', 'WORLD_SIZE': '2'}):
        finish(process(train.main, flags, stderr=errors, env=env), 2)
        assert 'torchrun' in one_line(errors)
    assert not (tmp_path / 'run').exists()


# --------------------------------------------------------------------------------------------------
# files that are not to be trusted


class Evil:
    """Unpickled, it runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


@pytest.fixture(scope='module')
def checkpoints(corpus, tmp_path_factory):
    """A folder of runs stopped in their first step, `this` and others unlike it; and the flags of `this`."""
    folder = tmp_path_factory.mktemp('checkpoints')
    flags = [*FLAGS, f'--data={corpus}', '--eval_every=0', '--keep_every=0']
    others = {'this': [], 'method': ['--method=mu_loss'], 'seed': ['--seed=2'], 'size': ['--n_embd=16']}
    hook = functools.partial(signal_at_evaluation, signal.SIGTERM, 0)
    started = [process(train.main, [*flags, *more, f'--out={folder}/{name}'], prepare=hook)
               for name, more in others.items()]
    for run in started:
        finish(run, 143)
    return folder, flags


def damaged_checkpoints(folder, tmp_path):
    """Yields (content of ckpt.pt, what the line must name)."""
    for name, named in (('method', 'method='), ('seed', 'seed='), ('size', 'n_embd=')):
        yield (folder / name / 'ckpt.pt').read_bytes(), named
    this, evil = (folder / 'this' / 'ckpt.pt').read_bytes(), Evil(tmp_path / 'pwned')
    middle = len(this) // 2
    flipped = this[:middle] + bytes([this[middle] ^ 16]) + this[middle + 1:]
    for content in (b'', b'no checkpoint', this[:middle], this[:-1], flipped, b'PK\x05\x06' + bytes(18),
                    pickle.dumps(evil)):
        yield content, 'not a whole checkpoint'
    parts = load(folder / 'this', 'ckpt.pt')
    for value, named in (
            (evil, 'not a whole checkpoint'),
            ([1, 2], 'not a whole checkpoint'),
            ({**parts, 'counters': evil}, 'not a whole checkpoint'),
            ({k: parts[k] for k in ('model', 'step', 'config')}, 'optimizer'),
            ({**parts, 'step': 'one'}, 'not what train.py writes'),
            ({**parts, 'step': 121}, 'step 121'),
            ({**parts, 'counters': {'elapsed': 0.0}}, 'counters elapsed'),
            ({**parts, 'model': {'x': torch.ones(3)}}, 'does not fit this command'),
            ({**parts, 'optimizer': {'state': 'x', 'param_groups': 7}}, 'does not fit this command'),
            ({**parts, 'config': {}}, 'method=None')):
        torch.save(value, tmp_path / 'made.pt')
        yield (tmp_path / 'made.pt').read_bytes(), named


def test_checkpoints_that_are_foreign_or_damaged_or_would_run_code(checkpoints, tmp_path):
    folder, flags = checkpoints
    out = shutil.copytree(folder / 'this', tmp_path / 'run')
    for content, named in damaged_checkpoints(folder, tmp_path):
        (out / 'ckpt.pt').write_bytes(content)
        before = folder_hash(out)
        refused(lambda: train.main([*flags, f'--out={out}']), 'ckpt.pt', named)
        assert folder_hash(out) == before and not (tmp_path / 'pwned').exists()


def test_a_command_with_other_settings_or_other_data_is_not_this_run(checkpoints, tmp_path):
    folder, flags = checkpoints
    out = shutil.copytree(folder / 'this', tmp_path / 'run')
    os.makedirs(tmp_path / 'data')
    for split in ('train', 'val'):
        data.write_shard(str(tmp_path / 'data' / f'x_{split}_000000.bin'), np.arange(5000) % 250)
    common.write_json(str(tmp_path / 'data' / 'meta.json'), {'vocab_size': 257})
    before = folder_hash(out)
    for name, change in (('data_fingerprint', f'--data={tmp_path}/data'), ('lr', '--lr=1e-2'),
                         ('steps', '--steps=121'), ('method', '--method=z_loss'), ('head', '--head=plain'),
                         ('weight_tying', '--no-weight_tying'), ('dtype', '--dtype=bfloat16'),
                         ('batch_size', '--batch_size=8')):
        command = [*flags, f'--out={out}', change]
        refused(lambda command=command: train.main(command), f'{out} holds a run with {name}=')
        assert folder_hash(out) == before
    (out / 'result.json').write_text('[]')
    refused(lambda: train.main([*flags, f'--out={out}']), 'result.json')
    (out / 'result.json').unlink()
    # a log with anything in it does not stop the run
    lines = (out / 'log.jsonl').read_bytes()
    (out / 'log.jsonl').write_bytes(lines + b'5\n[]\n{"loss": 1}\n\xff\xfe\n{"step": "x"}\n{"step": 2, "lo')
    assert train.main([*flags, f'--out={out}', '--ckpt_every=0']) == 0
    log = (out / 'log.jsonl').read_bytes()
    assert log.startswith(lines) and log.count(b'\n') == 1 + 120 + 1  # the first and the final test loss


def test_nothing_here_can_run_what_a_file_says():
    """No eval, exec, os.system, shell=True or pickle in the programs; torch.load loads weights only."""
    loads = 0
    programs = [name for name in os.listdir(ROOT) if name.endswith('.py') and not name.startswith('test_')]
    for name in programs:
        path = os.path.join(ROOT, name)
        with open(path, encoding='utf-8') as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, 'module', None)}
                assert not names & {'pickle', 'marshal', 'shelve', 'dill', 'yaml'}, path
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert name not in ('eval', 'exec', 'compile', 'os.system', 'os.popen'), (path, name)
                assert 'shell' not in keywords and keywords.get('allow_pickle') != 'True', (path, name)
                if name.endswith('torch.load'):
                    loads += 1
                    assert keywords.get('weights_only') == 'True', path
    assert loads >= 1
    with open(os.path.join(ROOT, 'sweep.sh')) as file:
        assert not {'eval', 'source'} & set(file.read().split())
