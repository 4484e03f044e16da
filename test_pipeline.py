"""The programs as a user runs them: prepare, train, signals, sweep, analyze, bench. What goes wrong is in test_faults.py."""
import csv
import gc
import json
import os
import signal
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
import settings as settings_py
import train
from model import GPT, LAM, METHODS, gpt_config, head_mode
from test_faults import expect_one_line

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = ('--size=tiny', '--n_embd=32', '--block_size=32', '--batch_size=4', '--test_tokens=256', '--eval_tokens=128', '--device=cpu',
         '--divergence_margin=3', '--logits_dtype=bfloat16')
ENV = {**os.environ, 'OMP_NUM_THREADS': '1', 'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']}


def python(*args, check=0, cwd=HERE, **env):
    """Runs a program of this folder as a user would; asserts its exit status and returns the finished process."""
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env={**ENV, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == check, done.stdout + done.stderr
    return done


def torchrun(n, *args):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', 'train.py', *map(str, args)]
    return subprocess.run(command, cwd=HERE, env=ENV, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Shards of the standard library in bytes: a val shard and two train shards."""
    folder = tmp_path_factory.mktemp('data') / 'stdlib'
    python('prepare_fineweb.py', '--source=stdlib', '--tokenizer=bytes', f'--out={folder}', '--val_tokens=20000', '--tokens=90000',
           '--shard_tokens=50000')
    return folder


def log_of(folder):
    """The log without what may differ between runs: times."""
    with open(os.path.join(folder, 'log.jsonl')) as file:
        return [{k: v for k, v in json.loads(line).items() if k not in ('elapsed', 'tokens_per_second', 'mfu')} for line in file]


def weights(folder):
    return torch.load(os.path.join(folder, 'model.pt'), weights_only=True)['model']


def tokens_of(folder, split):
    return np.concatenate(data.load_shards(str(folder), split))


# ----------------------------------------------------------------------------------------------------------------- shards


def test_shards_are_the_format_of_llm_c(tmp_path):
    rng = np.random.RandomState(0)
    for i in range(50):
        tokens = rng.randint(0, 2**16, rng.randint(0, 5000))
        path = str(tmp_path / f'x_train_{i:06d}.bin')
        data.write_shard(path, tokens)
        raw = open(path, 'rb').read()
        header = np.frombuffer(raw[:1024], '<i4')
        assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
        assert np.array_equal(np.frombuffer(raw[1024:], '<u2'), tokens) and np.array_equal(data.read_shard(path), tokens)
    with pytest.raises(ValueError):
        data.write_shard(path, [2**16])


def test_windows_are_disjoint_and_within_a_shard(tmp_path):
    shards = [np.arange(100), np.arange(100, 135), np.arange(200, 203), np.arange(300, 333)]
    assert data.count_windows(shards, 16).tolist() == [6, 2, 0, 2]
    windows = data.read_windows(shards, 16, np.arange(10), 1000)
    starts = [0, 16, 32, 48, 64, 80, 100, 116, 300, 316]
    assert np.array_equal(windows, np.array(starts)[:, None] + np.arange(17))


# ---------------------------------------------------------------------------------------------------------------- prepare


def test_prepare_makes_shards_that_say_what_they_hold(corpus):
    meta = json.load(open(corpus / 'meta.json'))
    assert meta['vocab_size'] == 257 and meta['tokens'] == 90000 and meta['val_tokens'] == 20000 and meta['complete']
    assert [len(s) for s in data.load_shards(str(corpus), 'train')] == [50000, 40000]
    tokens = np.concatenate((tokens_of(corpus, 'val'), tokens_of(corpus, 'train')))
    assert tokens[0] == 256 and tokens.max() == 256  # every document starts with the end-of-text token
    starts = np.flatnonzero(tokens == 256)
    assert len(starts) - 1 <= meta['documents'] <= len(starts)
    text = bytes(tokens[starts[1] + 1:starts[2]].astype(np.uint8)).decode()
    compile(text, 'a file of the standard library', 'exec')
    assert 'is done' in python('prepare_fineweb.py', '--source=stdlib', '--tokenizer=bytes', f'--out={corpus}', '--val_tokens=20000',
                               '--tokens=90000', '--shard_tokens=50000').stdout


def test_prepare_goes_on_where_it_was_stopped(corpus, tmp_path, monkeypatch):
    """Killed after each of its steps (here: an exception from the write that follows), it ends with the same shards."""
    flags = ['--source=stdlib', '--tokenizer=bytes', f'--out={tmp_path}', '--val_tokens=20000', '--tokens=90000', '--shard_tokens=50000',
             '--workers=1']
    real, left = prepare_fineweb.write_json, 0

    def dying(path, value):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(path, value)
    monkeypatch.setattr(prepare_fineweb, 'write_json', dying)
    for left in (0, 1, 2, 2, 9):
        with pytest.raises(KeyboardInterrupt) if left < 9 else monkeypatch.context():
            prepare_fineweb.main(flags)
    for split in ('train', 'val'):
        assert np.array_equal(tokens_of(tmp_path, split), tokens_of(corpus, split))
    # more tokens later: the shards that stand stay as they are
    flags[4] = '--tokens=120000'
    left = 9
    prepare_fineweb.main(flags)
    assert np.array_equal(tokens_of(tmp_path, 'train')[:90000], tokens_of(corpus, 'train')) and len(tokens_of(tmp_path, 'train')) == 120000


@pytest.mark.parametrize('ending', ['txt', 'jsonl', 'parquet'])
def test_prepare_local_files(tmp_path, ending):
    texts = [f'document {i}: gr\u00fc\u00dfe, \u4f60\u597d ' + 'x' * i for i in range(40)]
    if ending == 'txt':
        for i, text in enumerate(texts):
            (tmp_path / f'{i:02d}.txt').write_text(text, encoding='utf-8')
    elif ending == 'jsonl':
        (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': t, 'id': 1}) + '\n' for t in texts))
    else:
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), tmp_path / 'a.parquet')
    out = tmp_path / 'out'
    python('prepare_fineweb.py', '--source=local', f'--files={tmp_path}/*.{ending}', '--tokenizer=bytes', f'--out={out}', '--val_tokens=100',
           '--workers=2')
    tokens = np.concatenate((tokens_of(out, 'val'), tokens_of(out, 'train')))
    expected = np.concatenate([[256, *t.encode()] for t in texts])
    assert np.array_equal(tokens, expected) and json.load(open(out / 'meta.json'))['documents'] == 40


def test_prepare_byte_pairs(tmp_path, monkeypatch):
    """Shards decode to the text, odd characters and an end-of-text written out included, and a stopped command goes on with its tokenizer."""
    from tokenizers import Tokenizer
    texts = [f'def f{i}(x):\n    return "gr\u00fc\u00dfe \u4f60 <|endoftext|> \x00" * x  # twice\n' for i in range(60)]
    for i, text in enumerate(texts):
        (tmp_path / f'{i:02d}.txt').write_text(text, encoding='utf-8')
    flags = ['--source=local', f'--files={tmp_path}/*.txt', '--tokenizer=bpe', '--vocab_size=300', '--val_tokens=100', '--shard_tokens=500']
    python('prepare_fineweb.py', *flags, f'--out={tmp_path}/whole', '--workers=2')
    tokens = np.concatenate((tokens_of(tmp_path / 'whole', 'val'), tokens_of(tmp_path / 'whole', 'train')))
    tokenizer = Tokenizer.from_file(str(tmp_path / 'whole' / 'tokenizer.json'))
    starts = np.flatnonzero(tokens == 0)
    assert [tokenizer.decode(part[1:].tolist(), skip_special_tokens=False) for part in np.split(tokens, starts[1:])] == texts
    assert 256 < tokens.max() < 300 == data.vocabulary(str(tmp_path / 'whole'))
    assert len(tokens) < 0.75 * sum(len(text.encode()) for text in texts)  # pairs: fewer tokens than bytes

    real = prepare_fineweb.write_shard

    def dying(path, part):
        if 'train_000001' in path:
            raise KeyboardInterrupt
        real(path, part)
    out = tmp_path / 'stopped'
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_fineweb, 'write_shard', dying)
        prepare_fineweb.main([*flags, f'--out={out}', '--workers=1'])
    (out / 'tokenizer.json').rename(tmp_path / 'away')
    assert 'tokenizer.json' in python('prepare_fineweb.py', *flags, f'--out={out}', check=2).stderr.splitlines()[-1]
    (tmp_path / 'away').rename(out / 'tokenizer.json')
    prepare_fineweb.main([*flags, f'--out={out}', '--workers=1'])
    assert np.array_equal(tokens_of(out, 'train'), tokens_of(tmp_path / 'whole', 'train'))
    assert 'vocab_size' in python('prepare_fineweb.py', *flags, '--vocab_size=400', f'--out={out}', check=2).stderr


def test_prepare_gpt2_tokens_or_one_line_that_says_what_to_do(tmp_path):
    (tmp_path / 'a.txt').write_text('Output embeddings drift. ' * 40)
    flags = ('--source=local', f'--files={tmp_path}/*.txt', f'--out={tmp_path}/out', '--val_tokens=50')
    try:
        tokenizer = prepare_fineweb.gpt2()
    except Exception:
        assert '--tokenizer=bytes' in python('prepare_fineweb.py', *flags, check=1).stderr.splitlines()[-1]
        return
    python('prepare_fineweb.py', *flags)
    tokens = np.concatenate((tokens_of(tmp_path / 'out', 'val'), tokens_of(tmp_path / 'out', 'train')))
    assert tokens[0] == 50256 and tokenizer.decode(tokens[1:].tolist()) == 'Output embeddings drift. ' * 40


def test_prepare_pretokenized_shards_that_others_published(corpus, tmp_path, monkeypatch):
    """The hub is a folder here: two train shards and no third, a network that fails once."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError
    hub, out, broken = tmp_path / 'hub', tmp_path / 'out', {'fineweb_train_000002.bin'}
    os.makedirs(hub)
    for name, split in (('fineweb_val_000000', 'val'), ('fineweb_train_000001', 'train'), ('fineweb_train_000002', 'train')):
        data.write_shard(str(hub / f'{name}.bin'), tokens_of(corpus, split))

    def download(repo, file, repo_type, local_dir):
        if file in broken:
            raise OSError('no route to host')
        if not (hub / file).exists():
            raise EntryNotFoundError('404')
        (out / file).write_bytes((hub / file).read_bytes())
        return str(out / file)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', download)
    with pytest.raises(SystemExit) as stopped:
        prepare_fineweb.main(['--source=pretokenized', f'--out={out}'])
    assert stopped.value.code == 1
    del stopped
    gc.collect()
    assert not json.load(open(out / 'meta.json'))['complete']
    broken.clear()
    prepare_fineweb.main(['--source=pretokenized', f'--out={out}'])
    meta = json.load(open(out / 'meta.json'))
    assert meta['complete'] and meta['tokens'] == 180000 and meta['val_tokens'] == 20000 and meta['vocab_size'] == 50257
    assert np.array_equal(tokens_of(out, 'train'), np.tile(tokens_of(corpus, 'train'), 2))


# ------------------------------------------------------------------------------------------------------------------ train


@pytest.fixture(scope='session')
def whole_run(corpus, tmp_path_factory):
    """An uninterrupted run that others are compared with."""
    out = tmp_path_factory.mktemp('runs') / 'whole'
    done = python('train.py', '--method=mu_loss', '--lr=3e-2', '--steps=60', *SMALL, f'--data={corpus}', f'--out={out}', '--log_every=5',
                  '--eval_every=20', '--ckpt_every=7', '--keep_every=30')
    assert 'step 60/60' in done.stdout and 'done: test loss' in done.stdout
    return out


def test_a_run_leaves_what_the_design_says(whole_run):
    assert sorted(os.listdir(whole_run)) == ['.lock', 'config.json', 'log.jsonl', 'model.pt', 'model_30.pt', 'model_60.pt', 'result.json']
    log, result = log_of(whole_run), json.load(open(whole_run / 'result.json'))
    assert [e['step'] for e in log if 'loss' in e] == [1, *range(5, 61, 5)] and [e['step'] for e in log if 'test_loss' in e] == [0, 20, 40, 60]
    first = json.loads(open(whole_run / 'log.jsonl').readlines()[1])
    assert list(first) == ('step loss reg lr grad_norm mu_norm logit_mean logit_mean_spread logit_std logit_absmax logit_max tokens_per_second '
                           'mfu elapsed').split()
    assert set(result) <= set(analyze.COLUMNS) and result['diverged'] == 0 and result['steps'] == 60 and result['lam'] == 1e-4
    assert result['init_loss'] == pytest.approx(np.log(320), abs=0.3) and result['test_loss'] < result['init_loss'] - 1
    config = json.load(open(whole_run / 'config.json'))
    assert result['lr_sum'] == pytest.approx(sum(train.learning_rate(i, config) for i in range(60)))
    model = torch.load(whole_run / 'model.pt', weights_only=True)
    assert set(model) == {'model', 'step', 'config'} and model['step'] == 60 and model['config'] == config
    assert result['mu_norm'] == pytest.approx(model['model']['lm_head.weight'].mean(dim=0).norm().item(), rel=1e-6)


def test_reported_loss_is_the_bare_cross_entropy(corpus, tmp_path):
    """With a huge λ the regulariser is large; the loss beside it is that of the same weights without it."""
    first = {}
    for method in ('baseline', 'mu_loss', 'z_loss'):
        python('train.py', f'--method={method}', '--lam=50', '--steps=1', *SMALL, f'--data={corpus}', f'--out={tmp_path / method}')
        first[method] = log_of(tmp_path / method)
    for method in ('mu_loss', 'z_loss'):
        assert first[method][:1] == first['baseline'][:1] and first[method][1]['loss'] == first['baseline'][1]['loss']
    assert first['baseline'][1]['reg'] == 0 and first['z_loss'][1]['reg'] > 1000 and first['mu_loss'][1]['reg'] > 0.01


def test_sigusr1_saves_and_goes_on(corpus, tmp_path):
    command = [sys.executable, 'train.py', '--steps=100000', *SMALL, f'--data={corpus}', f'--out={tmp_path}/run', '--ckpt_every=0']
    process = subprocess.Popen(command, cwd=HERE, env=ENV, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith('step') and ' 20/' in line:
            process.send_signal(signal.SIGUSR1)
        if (tmp_path / 'run' / 'ckpt.pt').exists():
            break
    saved = torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['step']
    assert saved >= 20 and process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() and process.wait() == 143
    assert torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['step'] > saved


def test_a_signal_between_log_lines_stops_all_processes_together(corpus, tmp_path):
    flags = ('--steps=400', '--log_every=40', *SMALL, f'--data={corpus}', f'--out={tmp_path}/run', '--ckpt_every=0')
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *flags]
    process = subprocess.Popen(command, cwd=HERE, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith('step  40/'):
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            break
    process.communicate(timeout=120)
    saved = torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['step']
    assert 40 < saved < 400 and saved % 40 == 0
    done = torchrun(2, *flags)
    assert done.returncode == 0 and f'going on at step {saved}' in done.stdout
    assert [e['step'] for e in log_of(tmp_path / 'run') if 'loss' in e] == [1, *range(40, 401, 40)]


@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_lock_keeps_others_out(corpus, tmp_path, number, status):
    command = [sys.executable, 'train.py', '--steps=100000', *SMALL, f'--data={corpus}', f'--out={tmp_path}/run', '--ckpt_every=0']
    process = subprocess.Popen(command, cwd=HERE, env=ENV, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith('step') and ' 20/' in line:
            break
    python(*command[1:], check=3)
    process.send_signal(number)
    assert 'stopped by a signal' in process.stdout.read() and process.wait() == status
    assert torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['step'] >= 20


def test_coupled_adam_keeps_mu_far_below_the_baselines_at_the_demo_size(corpus, tmp_path):
    """300 steps of the demo; the rounding of the logits' gradient is all that is left to move mu."""
    norms = {}
    for method in ('baseline', 'coupled_adam'):
        python('train.py', f'--method={method}', '--lr=0.3', '--size=tiny', '--steps=300', '--batch_size=8', '--block_size=128', '--logits_dtype=bfloat16',
               '--device=cpu', f'--data={corpus}', f'--out={tmp_path / method}', '--eval_tokens=128', '--test_tokens=128')
        norms[method] = json.load(open(tmp_path / method / 'result.json'))['mu_norm']
    assert norms['coupled_adam'] < 0.01 * norms['baseline']


def test_init_from_goes_on_from_another_run_with_another_method(corpus, whole_run, tmp_path):
    """With the method that the other run had it ends as if that had never stopped; killed, it ends the same too."""
    flags = ['--method=mu_loss', '--lr=3e-2', '--steps=60', *SMALL, f'--data={corpus}', '--log_every=5', '--eval_every=20', '--keep_every=30', f'--out={tmp_path}/a']
    process = subprocess.Popen([sys.executable, 'train.py', *flags, '--ckpt_every=14'], cwd=HERE, env=ENV, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:  # stopped on the way, so that it leaves a ckpt.pt
        if line.startswith('step 30/'):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    start = torch.load(tmp_path / 'a' / 'ckpt.pt', weights_only=True)['step']
    again = ('--method=mu_loss', f'--init_from={tmp_path}/a', '--ckpt_every=0', '--threads=1')
    python('train.py', *again, f'--out={tmp_path}/b', '--device=cpu')
    ours, theirs = ([e for e in log_of(f) if e['step'] > start] for f in (tmp_path / 'b', whole_run))
    assert ours == theirs and all(torch.equal(w, weights(whole_run)[name]) for name, w in weights(tmp_path / 'b').items())
    assert json.load(open(tmp_path / 'b' / 'config.json'))['init_from'] == f'{tmp_path}/a'
    # another method, stopped once, its source gone by then
    other = ('train.py', '--method=mu_centering', f'--init_from={tmp_path}/a/ckpt.pt', '--device=cpu', '--ckpt_every=0', '--threads=1')
    python(*other, f'--out={tmp_path}/c')
    command = [sys.executable, *other, f'--out={tmp_path}/d']
    process = subprocess.Popen(command, cwd=HERE, env=ENV, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / 'd' / 'ckpt.pt').exists():  # which is there from the beginning
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and torch.load(tmp_path / 'd' / 'ckpt.pt', weights_only=True)['step'] == start
    os.unlink(tmp_path / 'a' / 'ckpt.pt')
    assert 'going on at step' in python(*command[1:]).stdout
    assert log_of(tmp_path / 'c') == log_of(tmp_path / 'd')
    assert log_of(tmp_path / 'c')[0]['step'] == start and log_of(tmp_path / 'c')[-2]['mu_norm'] < 1e-6 < log_of(tmp_path / 'b')[-2]['mu_norm']


def test_init_from_a_kept_model_and_what_cannot_work(corpus, whole_run, tmp_path, capsys):
    python('train.py', '--method=coupled_adam', f'--init_from={whole_run}/model_30.pt', f'--out={tmp_path}/kept', '--device=cpu')
    log, config = log_of(tmp_path / 'kept'), json.load(open(tmp_path / 'kept' / 'config.json'))
    before = [e for e in log_of(whole_run) if e['step'] == 30 and 'mu_norm' in e][0]
    assert [e['step'] for e in log if 'loss' in e] == [35, 40, 45, 50, 55, 60] and config['lr'] == 3e-2 and config['lam'] == 1e-4
    assert log[1]['lr'] == [e for e in log_of(whole_run) if e['step'] == 35][0]['lr'] and abs(log[1]['loss'] - before['loss']) < 0.5
    (tmp_path / 'x.pt').write_bytes(b'not a checkpoint')
    for flags, named in (([f'--init_from={tmp_path}/x.pt'], 'x.pt'), (['--init_from=/nowhere'], '/nowhere'), ([f'--init_from={tmp_path}'], 'ckpt.pt'),
                         ([f'--init_from={whole_run}'], '--steps=60'), ([f'--init_from={whole_run}/model_30.pt', '--n_embd=64'], 'another shape')):
        expect_one_line(lambda: train.main(['--method=mu_centering', f'--out={tmp_path}/bad', '--device=cpu', *flags]), [named], capsys)
        assert not (tmp_path / 'bad').exists()


def test_compile_gives_the_same_losses(corpus, tmp_path):
    flags = ('--method=soft_capping', '--steps=3', '--log_every=1', *SMALL, f'--data={corpus}', '--lr=1e-3', '--deterministic')
    python('train.py', *flags, f'--out={tmp_path}/eager')
    python('train.py', *flags, f'--out={tmp_path}/compiled', '--compile')
    for a, b in zip(log_of(tmp_path / 'eager'), log_of(tmp_path / 'compiled'), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-3, abs=1e-3) for k, v in b.items()}


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    """Lines after it go, half a line goes, and so does the final test loss, which is measured again."""
    lines = ['{"step": 0, "test_loss": 6}', '{"step": 5, "loss": 5}', '{"step": 5, "test_loss": 5}', '{"step": 10, "loss": 4}', '{"step": 10, "test_loss": 4}']
    for step, steps, kept in ((-1, 10, 0), (5, 10, 3), (7, 10, 3), (10, 20, 5), (10, 10, 4)):
        (tmp_path / 'log.jsonl').write_text('\n'.join(lines) + '\n{"step": 1')
        train.cut_log(str(tmp_path / 'log.jsonl'), step, steps)
        assert (tmp_path / 'log.jsonl').read_text().splitlines() == lines[:kept]


@pytest.mark.parametrize('head', ['plain', 'chunked'])
def test_a_run_that_is_no_longer_finite_ends_with_its_last_finite_weights(corpus, tmp_path, head):
    python('train.py', '--lr=1e30', '--steps=40', '--warmup=0', '--log_every=10', f'--head={head}', *SMALL, f'--data={corpus}', f'--out={tmp_path}/sweep/run')
    result = json.load(open(tmp_path / 'sweep' / 'run' / 'result.json'))
    assert result['diverged'] == 1 and result['diverged_step'] == 2 and np.isnan(result['test_loss'])
    assert all(bool(torch.isfinite(w).all()) for w in weights(tmp_path / 'sweep' / 'run').values())
    assert log_of(tmp_path / 'sweep' / 'run')[-2]['step'] == 10
    # one update was made, then none
    assert result['lr_sum'] == train.learning_rate(0, json.load(open(tmp_path / 'sweep' / 'run' / 'config.json')))
    assert torch.load(tmp_path / 'sweep' / 'run' / 'model.pt', weights_only=True)['step'] == 1
    if head == 'chunked':  # and the analysis takes it: it counts as the loss at initialisation
        assert analyze.main([str(tmp_path / 'sweep'), f'--out={tmp_path}/results']) == 0
        assert analyze.main([f'--results={tmp_path}/results/results.csv', f'--out={tmp_path}/again']) == 0
        assert (tmp_path / 'results' / 'lrs.csv').read_text() == (tmp_path / 'again' / 'lrs.csv').read_text()


def test_weight_decay_stops_with_the_updates(corpus, tmp_path):
    python('train.py', '--method=weight_decay', '--lam=0.1', '--lr=1e30', '--steps=20', '--warmup=0', '--keep_every=1', *SMALL, f'--data={corpus}', f'--out={tmp_path}')
    after_one = torch.load(tmp_path / 'model_1.pt', weights_only=True)['model']
    assert all(torch.equal(after_one[name], w) for name, w in weights(tmp_path).items())


def test_stop_on_divergence(corpus, tmp_path):
    for name, flag in (('on', '--stop_on_divergence'), ('off', '--no-stop_on_divergence')):
        python('train.py', '--lr=1', '--steps=60', '--log_every=2', *SMALL, '--divergence_margin=0.01', f'--data={corpus}', f'--out={tmp_path / name}', flag)
    results = {name: json.load(open(tmp_path / name / 'result.json')) for name in ('on', 'off')}
    assert all(r['diverged'] == 1 and np.isfinite(r['test_loss']) for r in results.values())
    assert results['on']['diverged_step'] == results['off']['diverged_step'] == log_of(tmp_path / 'on')[-1]['step'] < 60
    assert log_of(tmp_path / 'off')[-1]['step'] == 60


def test_test_loss_is_over_exactly_the_tokens_asked_for(whole_run, corpus):
    checkpoint = torch.load(whole_run / 'model.pt', weights_only=True)
    gpt = GPT(gpt_config(checkpoint['config']))
    gpt.load_state_dict(checkpoint['model'])
    windows = torch.from_numpy(tokens_of(corpus, 'val')[:257].astype(np.int64)).unfold(0, 33, 32)
    assert windows.shape == (8, 33)  # 256 test tokens
    with torch.no_grad():
        logits = (gpt.hidden(windows[:, :-1]).bfloat16().float() @ gpt.E.bfloat16().float().T).bfloat16().float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert json.load(open(whole_run / 'result.json'))['test_loss'] == pytest.approx(loss.item(), rel=1e-5)


def test_logits_dtype_reaches_the_model(corpus, tmp_path):
    for dtype in ('bfloat16', 'float32'):
        python('train.py', '--steps=2', *SMALL[:-1], f'--logits_dtype={dtype}', f'--data={corpus}', f'--out={tmp_path / dtype}')
    assert log_of(tmp_path / 'bfloat16')[1]['loss'] != log_of(tmp_path / 'float32')[1]['loss']


def test_divergence_is_the_smoothed_loss_above_its_lowest_after_warm_up():
    s = {'steps': 1000, 'warmup': 50, 'divergence_margin': 0.5}
    def first(losses):
        counters = {'smooth_loss': None, 'smooth_step': 0, 'lowest_loss': float('inf')}
        return next((step for step, loss in losses if train.diverged(counters, step, loss, s)), None)
    steps = range(10, 1001, 10)
    assert first([(n, 10 - n / 200) for n in steps]) is None
    assert first([(n, 10.0 if n < 50 else 3.0) for n in steps]) is None                    # high in warm-up only
    assert first([(n, 3.0 if n != 500 else 3.9) for n in steps]) is None                   # one spike, halved by the average
    assert first([(n, 3.0 if n < 500 else 4.1) for n in steps]) == 500                     # half-life 10 steps: 0.55 at once
    assert first([(n, 3.0 if n < 500 else 3.8) for n in steps]) == 510                     # 0.4, then 0.6
    assert first([(n, 3.0 if n < 500 else float('nan')) for n in steps]) == 500
    assert first([(n, 2.0 if n < 50 else 3.0) for n in steps]) is None                     # low in warm-up only: does not count


def test_the_published_shape_runs_on_a_cpu(corpus, tmp_path):
    python('train.py', '--size=16M', '--steps=3', '--batch_size=2', '--block_size=256', f'--data={corpus}', f'--out={tmp_path}', '--test_tokens=512',
           '--eval_tokens=512', '--device=cpu')
    result = json.load(open(tmp_path / 'result.json'))
    assert result['n_params'] == 15572480 and result['init_loss'] == pytest.approx(10.83, abs=0.05)


# ---------------------------------------------------------------------------------------------------------- sweep, analyze


def sweep(grid, **env):
    return subprocess.run(['bash', os.path.join(HERE, 'sweep.sh'), grid], cwd=HERE, env={**ENV, **env}, capture_output=True, text=True, timeout=600)


def test_dry_run_prints_the_papers_grids():
    paper = sweep('paper', DRY_RUN='1', NPROC='4').stdout.splitlines()
    assert len(paper) == len(set(paper)) == 6 * 7 * 5 * 2 and all(line.startswith('torchrun --standalone --nproc_per_node=4 train.py') for line in paper)
    assert len(sweep('ablation', DRY_RUN='1').stdout.splitlines()) == 2 * 4 * 7 * 5
    names = [line.split('--out=out/paper/')[1].split()[0] for line in paper]
    for line, name in zip(paper[::37], names[::37]):  # the folder is the name that train.py would give
        flags = dict(f[2:].split('=') for f in line.split() if '=' in f and f.startswith('--'))
        settings = {'size': flags['size'], 'weight_tying': '--weight_tying' in line, 'method': flags['method'], 'lam': float(flags['lam']),
                    'lr': float(flags['lr']), 'seed': int(flags['seed'])}
        assert name == settings_py.run_name(settings)
    for line in sweep('demo', DRY_RUN='1', METHODS=' '.join((*METHODS, 'max_z_loss+mu_centering'))).stdout.splitlines():
        args = settings_py.parser().parse_args(line.split()[2:])  # every method, with its own λ where it has one
        assert args.out == 'out/demo/' + settings_py.run_name(vars(args)) and args.lam in (LAM.get(head_mode(args.method), 1e-4), 1e-1)
    for grid in 'demo', 'proxy':
        lines = sweep(grid, DRY_RUN='1', OMP_NUM_THREADS='1').stdout.splitlines()
        args = settings_py.parser().parse_args(lines[-1].split()[2:])
        assert args.device == 'cpu' and args.logits_dtype == 'bfloat16' and args.data == {'demo': 'data/stdlib', 'proxy': 'data/stdlib_bpe'}[grid]
    assert len(lines) == 4 * 4 * 3 and (args.n_embd, args.batch_size * args.block_size, args.steps) == (8, 64, 32000)
    plain = sweep('paper', DRY_RUN='1', LOGITS_DTYPE='float32', METHODS='baseline').stdout.splitlines()
    assert len(plain) == 7 * 5 * 2 and all('--logits_dtype=float32' in line for line in plain) and not any('--logits_dtype' in line for line in paper)
    odd = sweep('demo', DRY_RUN='1', OUT='a b$(touch x)', METHODS='baseline', LRS='1e-2').stdout
    assert odd.count('\n') == 1 and r'a\ b\$\(touch\ x\)' in odd and not os.path.exists(os.path.join(HERE, 'x'))


def test_sweep_skips_survives_a_failed_run_and_analyzes(corpus, tmp_path):
    grid = dict(OUT=str(tmp_path / 'mini'), DATA=str(corpus), METHODS='baseline mu_centering', LRS='1e-2 1e-1', STEPS='6', JOBS='2', RETRIES='0')
    # a run that cannot work: its folder holds another run's settings
    broken = tmp_path / 'mini' / 'tiny-untied-baseline-lr0.1-s1'
    os.makedirs(broken)
    common.write_json(str(broken / 'config.json'), {'seed': 7})
    done = sweep('demo', **grid)
    try:
        assert done.returncode == 1 and 'FAILED' in done.stderr and 'tiny-untied-baseline-lr0.1-s1' in done.stderr, done.stdout + done.stderr
        finished = sorted(os.path.dirname(p) for p in map(str, (tmp_path / 'mini').glob('*/result.json')))
        assert len(finished) == 3
        before = {f: os.stat(os.path.join(f, 'result.json')).st_mtime_ns for f in finished}
        os.unlink(broken / 'config.json')
        done = sweep('demo', **grid)
        assert done.returncode == 0, done.stdout + done.stderr
        assert before == {f: os.stat(os.path.join(f, 'result.json')).st_mtime_ns for f in finished}  # what was done is left alone
        results = os.path.join(HERE, 'results', 'mini')
        rows = list(csv.DictReader(open(os.path.join(results, 'results.csv'))))
        assert len(rows) == 4 and list(rows[0]) == analyze.COLUMNS
        assert {r['method']: float(r['mu_norm']) > 1e-3 for r in rows} == {'baseline': True, 'mu_centering': False}
        assert '### LRS' in done.stdout and '| μ-centering' in done.stdout
        assert {'loss_untied.png', 'loss_untied.pdf', 'statistics_untied.png', 'drift_untied.png'} <= set(os.listdir(os.path.join(results, 'figures')))
        quantities = {r['quantity'] for r in csv.DictReader(open(os.path.join(results, 'distributions.csv')))}
        assert quantities == {'logit_mean', 'logit_std', 'logit_absmax', 'cos_mu_h', 'r_cos', 'r_log', 'r_emb', 'fact_3', 'fact_3_premise'}
        # the csv alone gives the same tables
        assert analyze.main([f'--results={results}/results.csv', f'--out={tmp_path}/again']) == 0
        for name in ('lrs.csv', 'tables.md'):
            assert (tmp_path / 'again' / name).read_text() == open(os.path.join(results, name)).read()
    finally:
        subprocess.run(['rm', '-rf', os.path.join(HERE, 'results', 'mini')])


def test_sweep_tries_a_failed_run_again(corpus, tmp_path):
    """A python that fails once, as a machine does now and then."""
    fake = tmp_path / 'bin' / 'python'
    os.makedirs(fake.parent)
    fake.write_text(f'#!/bin/sh\nif [ "$1" = train.py ] && [ ! -e {tmp_path}/failed ]; then touch {tmp_path}/failed; echo oh no; exit 1; fi\nexec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    grid = dict(PATH=f'{fake.parent}{os.pathsep}{ENV["PATH"]}', OUT=str(tmp_path / 'retried'), DATA=str(corpus), METHODS='baseline', LRS='1e-2', STEPS='3',
                JOBS='1', TYING='tied')
    try:
        done = sweep('demo', **grid, RETRIES='0')
        assert done.returncode == 1 and 'FAILED with status 1: oh no' in done.stdout and 'tiny-tied-baseline-lr0.01-s1' in done.stderr
        os.unlink(tmp_path / 'failed')
        done = sweep('demo', **grid, RETRIES='1')
        assert done.returncode == 0 and (tmp_path / 'failed').exists(), done.stdout + done.stderr
    finally:
        subprocess.run(['rm', '-rf', os.path.join(HERE, 'results', 'retried')])


def test_sweep_gives_each_of_several_jobs_its_own_gpus(tmp_path):
    """With machines that are not there: nvidia-smi names four GPUs, python writes down which it was given, then fails."""
    for name, text in {'nvidia-smi': 'for i in 0 1 2 3; do echo "GPU $i: H200"; done', 'python': f'echo "$CUDA_VISIBLE_DEVICES" >> {tmp_path}/given; sleep 1; exit 1'}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / 'torchrun').symlink_to(tmp_path / 'python')
    env = {k: v for k, v in ENV.items() if k != 'CUDA_VISIBLE_DEVICES'}
    env.update(PATH=f'{tmp_path}{os.pathsep}{ENV["PATH"]}', OUT=str(tmp_path / 'out'), DATA=str(tmp_path), SIZES='16M', METHODS='baseline', TYING='untied', RETRIES='0')
    for more, given in ((dict(NPROC='2', JOBS='2', LRS='1 2'), {'0,1', '2,3'}), (dict(NPROC='1', JOBS='2', LRS='1 2', CUDA_VISIBLE_DEVICES='5,7'), {'5', '7'}),
                        (dict(LRS='1'), {''})):  # one run on all four: torchrun sees to it
        subprocess.run(['bash', os.path.join(HERE, 'sweep.sh')], env={**env, **more}, capture_output=True, timeout=60)
        lines = (tmp_path / 'given').read_text().splitlines()
        assert set(lines[:len(more['LRS'].split())]) == given, lines
        (tmp_path / 'given').unlink()


def test_several_seeds_and_a_run_trained_anew(corpus, tmp_path):
    flags = ('--steps=3', *SMALL, f'--data={corpus}', '--lr=1e-1')
    for seed in (1, 2):
        python('train.py', *flags, f'--seed={seed}', f'--out={tmp_path}/sweep/{seed}')
    assert analyze.main([str(tmp_path / 'sweep'), f'--out={tmp_path}/a']) == 0
    assert analyze.main([f'--results={tmp_path}/a/results.csv', f'--out={tmp_path}/b']) == 0
    assert (tmp_path / 'a' / 'tables.md').read_text() == (tmp_path / 'b' / 'tables.md').read_text()
    subprocess.run(['rm', '-rf', str(tmp_path / 'sweep' / '2' / 'result.json'), str(tmp_path / 'sweep' / '2' / 'config.json')])
    python('train.py', *flags[:-1], '--lr=1e-3', '--seed=2', f'--out={tmp_path}/sweep/2')
    assert analyze.main([str(tmp_path / 'sweep'), f'--out={tmp_path}/a']) == 0
    rows = {r['seed']: r for r in csv.DictReader(open(tmp_path / 'a' / 'results.csv'))}
    assert float(rows['2']['mu_norm']) == pytest.approx(weights(tmp_path / 'sweep' / '2')['lm_head.weight'].mean(dim=0).norm().item(), rel=1e-5)


def test_bench_compares_in_one_run(tmp_path, capsys):
    assert bench.main(['--methods=baseline,mu_loss', '--seconds=0.2', '--vocab_size=512', f'--json={tmp_path}/b.json', '--peak_tflops=1']) == 0
    found = json.load(open(tmp_path / 'b.json'))
    assert [r['method'] for r in found['steps']] == ['baseline', 'mu_loss'] and found['loader_tokens_per_second'] > 0
    for r in found['steps']:
        flops = 6 * (2 * (4 * 64 * 64 + 3 * 64 * 256) + 512 * 64) + 6 * 2 * 128 * 64  # products, and causal attention at half
        assert r['tokens_per_second'] == pytest.approx(1024 / (r['ms'] / 1000)) and r['mfu'] == pytest.approx(r['tokens_per_second'] * flops / 1e12)
    assert bench.main(['--head', '--tokens=256', '--vocab_size=4096', '--seconds=0.2', f'--json={tmp_path}/h.json']) == 0
    rows = {r['head']: r for r in json.load(open(tmp_path / 'h.json'))['head']}
    assert {'plain', 'plain, compiled', 'chunked', 'chunked, compiled'} <= set(rows)
    assert all(r['loss'] == pytest.approx(rows['plain']['loss'], rel=1e-5) for r in rows.values())
    assert '| mu_loss' in capsys.readouterr().out


def test_a_csv_with_the_required_columns_alone_is_enough(tmp_path, capsys):
    path = tmp_path / 'r.csv'
    path.write_text('\ufeffmethod,size,weight_tying,lr,test_loss\nbaseline,16M,0,0.1,4.0\nbaseline,16M,0,0.3,5.0\nmu_loss,16M,0,0.1,4.0\nmu_loss,16M,0,0.3,nan\n')
    assert analyze.main([f'--results={path}', f'--out={tmp_path}/out']) == 0
    assert 'no figure "Mean embedding' in capsys.readouterr().out
    rows = {r['method']: r for r in csv.DictReader(open(tmp_path / 'out' / 'lrs.csv'))}
    assert float(rows['baseline']['lrs']) == 0.5 and float(rows['baseline']['lrs_n1']) == 1.0 and rows['baseline']['diverged'] == ''
    assert float(rows['mu_loss']['lrs']) == pytest.approx((10.83 - 4) / 2)
