"""Shards, and prepare_fineweb.py: every source and tokenizer, kills, a full disk, two copies at once."""
import glob
import io
import json
import os
import signal
import sys

import numpy as np
import pyarrow.parquet
import pytest

import common
import data
import prepare_fineweb
from conftest import python, refused
from hub import Hub
from processes import children, finish, folder_hash, gone, one_line, process, stamp, wait_until


def tokens_of(folder):
    """All tokens in a folder, those of the val shard first, as they were in the text."""
    shards = data.load_shards(str(folder), 'val') + data.load_shards(str(folder), 'train')
    return np.concatenate(shards)


def flags_of(out, *more):
    """A command that makes 30 shards of the standard library in a second."""
    return ['--source=stdlib', '--tokenizer=bytes', f'--out={out}', '--val_tokens=50000', '--tokens=2e6',
            '--shard_tokens=70000', '--workers=1', *more]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """The folder that this command makes if nothing stops it."""
    folder = tmp_path_factory.mktemp('prepared')
    finish(process(prepare_fineweb.main, flags_of(folder)), 0)
    return folder


@pytest.fixture
def texts(tmp_path):
    """40 documents, as .txt files in tmp_path."""
    line = '# gr\u00fc\u00dfe, \u4f60\u597d <|endoftext|> \x00\n'
    texts = [f'def f{i}(x):  {line}    return x * {i}\n' * (1 + i % 5) for i in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / f'{i:02d}.txt').write_text(text, encoding='utf-8')
    return texts


# -----------------------------------------------------------------------------
# shards


def test_shards_are_the_format_of_llm_c(tmp_path):
    rng = np.random.RandomState(0)
    path = str(tmp_path / 'x_train_000000.bin')
    for n in (0, 1, *rng.randint(2, 5000, 20)):
        tokens = rng.randint(0, 2**16, n)
        data.write_shard(path, tokens)
        with open(path, 'rb') as file:
            raw = file.read()
        header = np.frombuffer(raw[:1024], '<i4')
        assert header[:3].tolist() == [20240520, 1, n] and not header[3:].any()
        assert np.array_equal(np.frombuffer(raw[1024:], '<u2'), tokens)
        assert np.array_equal(data.read_shard(path), tokens)
    with pytest.raises(ValueError):
        data.write_shard(path, [2**16])


def test_windows_are_disjoint_and_within_a_shard():
    shards = [np.arange(100), np.arange(100, 135), np.arange(200, 203), np.arange(300, 333)]
    assert data.count_windows(shards, 16).tolist() == [6, 2, 0, 2]
    windows = data.read_windows(shards, 16, np.arange(10), 1000)
    starts = [0, 16, 32, 48, 64, 80, 100, 116, 300, 316]
    assert np.array_equal(windows, np.array(starts)[:, None] + np.arange(17))


# -----------------------------------------------------------------------------
# sources and tokenizers


def test_the_standard_library_in_bytes(corpus):
    meta = common.read_json(os.path.join(corpus, 'meta.json'))
    assert meta['complete'] and meta['vocab_size'] == 257 and meta['val_tokens'] == 20000
    assert [len(shard) for shard in data.load_shards(corpus, 'train')] == [50000, 40000]
    tokens = tokens_of(corpus)
    starts = np.flatnonzero(tokens == 256)  # every document starts with the end-of-text token
    assert starts[0] == 0 and tokens.max() == 256 and len(starts) - 1 <= meta['documents'] <= len(starts)
    text = bytes(tokens[1:starts[1]].astype(np.uint8)).decode()
    compile(text, 'a file of the standard library', 'exec')


@pytest.mark.parametrize('ending', ['txt', 'jsonl', 'parquet'])
def test_local_files(tmp_path, texts, ending):
    if ending == 'jsonl':
        (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': t, 'id': 1}) + '\n' for t in texts))
    if ending == 'parquet':
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), tmp_path / 'a.parquet')
    out = tmp_path / 'out'
    prepare_fineweb.main(['--source=local', f'--files={tmp_path}/*.{ending}', '--tokenizer=bytes',
                          f'--out={out}', '--val_tokens=100', '--workers=1'])
    assert np.array_equal(tokens_of(out), np.concatenate([[256, *text.encode()] for text in texts]))
    assert common.read_json(str(out / 'meta.json'))['documents'] == 40


def test_byte_pairs(tmp_path, texts, monkeypatch):
    """Shards decode to the text, and a stopped command resumes with the tokenizer that it learned."""
    from tokenizers import Tokenizer
    flags = ['--source=local', f'--files={tmp_path}/*.txt', '--tokenizer=bpe', '--vocab_size=300',
             '--val_tokens=100', '--shard_tokens=500']
    whole, out = tmp_path / 'whole', tmp_path / 'stopped'
    python('prepare_fineweb.py', *flags, f'--out={whole}', '--workers=2')
    tokens = tokens_of(whole)
    tokenizer = Tokenizer.from_file(str(whole / 'tokenizer.json'))
    documents = np.split(tokens, np.flatnonzero(tokens == 0)[1:])
    assert [tokenizer.decode(part[1:].tolist(), skip_special_tokens=False) for part in documents] == texts
    assert 256 < tokens.max() < 300 == data.vocabulary(str(whole))
    assert len(tokens) < 0.75 * sum(len(text.encode()) for text in texts)  # fewer pairs than bytes

    def dying(path, part):
        if 'train_000001' in path:
            raise KeyboardInterrupt
        data.write_shard(path, part)
    flags += [f'--out={out}', '--workers=1']
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_fineweb, 'write_shard', dying)
        prepare_fineweb.main(flags)
    prepare_fineweb.bpe.cache_clear()
    (out / 'tokenizer.json').rename(tmp_path / 'away')
    refused(lambda: prepare_fineweb.main(flags), f'{out}/tokenizer.json', '--out')
    (tmp_path / 'away').rename(out / 'tokenizer.json')
    prepare_fineweb.main(flags)
    assert folder_hash(out) == folder_hash(whole)
    refused(lambda: prepare_fineweb.main([*flags, '--vocab_size=400']), 'vocab_size=300', '400')


def test_gpt2_tokens_or_what_to_do_without_them(tmp_path, texts):
    flags = ['--source=local', f'--files={tmp_path}/*.txt', f'--out={tmp_path}/out', '--val_tokens=50',
             '--workers=1']
    try:
        tokenizer = prepare_fineweb.gpt2()
    except common.UserError:
        refused(lambda: prepare_fineweb.main(flags), '--tokenizer=bytes', status=1)
        return
    prepare_fineweb.main(flags)
    tokens = tokens_of(tmp_path / 'out')
    assert tokens[0] == 50256 and tokenizer.decode(tokens[1:].tolist()) == '<|endoftext|>'.join(texts)


@pytest.fixture
def hub(tmp_path):
    """A hub with FineWeb in seven parquet files of 30 texts each, in row groups of 7; hub.texts: theirs."""
    hub = Hub()
    rng = np.random.RandomState(0)
    hub.texts = {f'sample/100BT/00{i}_00000.parquet': [f'{i} {j} ' + 'word ' * rng.randint(200)
                                                       for j in range(30)] for i in range(7)}
    hub.env = {'HF_ENDPOINT': hub.url, 'HF_HOME': str(tmp_path / 'hf_home'), 'HF_HUB_OFFLINE': '0',
               'HF_HUB_DOWNLOAD_TIMEOUT': '1'}
    hub.sha = hub.commit('HuggingFaceFW/fineweb', {'README.md': README, **parquet_files(hub.texts)})
    yield hub
    hub.close()


README = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-100BT
  data_files:
  - split: train
    path: sample/100BT/*
---
"""


def parquet_files(texts):
    """path -> texts as path -> bytes of a parquet file."""
    files = {}
    for path, column in texts.items():
        table = pyarrow.table({'id': [str(i) for i in range(len(column))], 'text': column})
        with io.BytesIO() as file:
            pyarrow.parquet.write_table(table, file, row_group_size=7)
            files[path] = file.getvalue()
    return files


def test_fineweb(hub, tmp_path):
    """Its files spread, in bytes, up to --tokens: in the midst of a file."""
    out = tmp_path / 'out'
    flags = ['--tokenizer=bytes', f'--out={out}', '--val_tokens=3000', '--shard_tokens=9000',
             '--tokens=45000', '--workers=2']
    finish(process(prepare_fineweb.main, flags, env=hub.env), 0)
    taken = [f'sample/100BT/00{i}_00000.parquet' for i in (0, 4, 1, 5)]
    expected = np.concatenate([[256, *text.encode()] for path in taken for text in hub.texts[path]])
    assert np.array_equal(tokens_of(out), expected[:48000]) and len(expected) > 48000
    meta = common.read_json(str(out / 'meta.json'))
    assert meta['complete'] and meta['revision'] == hub.sha
    assert meta['taken'] == {path: 30 * i for i, path in enumerate(taken)}


def test_shards_that_others_published(hub, corpus, tmp_path):
    """Every n-th of them: of seven train shards the first and the fifth."""
    out, shard = tmp_path / 'out', open(f'{corpus}/stdlib_train_000000.bin', 'rb').read()
    names = ['val_000000', *(f'train_{i:06d}' for i in range(1, 8))]
    sha = hub.commit('a/b', {f'fineweb_{name}.bin': shard for name in names})
    flags = ['--source=pretokenized', '--name=a/b', f'--out={out}', '--tokens=1e5']
    finish(process(prepare_fineweb.main, flags, env=hub.env), 0)
    meta = common.read_json(str(out / 'meta.json'))
    assert meta['complete'] and meta['tokens'] == 100000 and meta['vocab_size'] == 50257
    assert meta['revision'] == sha and sorted(meta['taken']) == sorted(glob.glob('*.bin', root_dir=out)) == [
        'fineweb_train_000001.bin', 'fineweb_train_000005.bin', 'fineweb_val_000000.bin']


# -----------------------------------------------------------------------------
# stopped, killed, started twice, without room


def test_killed_anywhere_it_ends_with_the_same_shards(prepared, tmp_path):
    """Kills at random and while a shard is being written; workers, where there are any, end with it."""
    rng, out, half_written = np.random.RandomState(0), tmp_path / 'out', 0

    def shards():
        return len(glob.glob(f'{out}/*.bin'))

    def halves():
        return {(path, stamp(path)) for path in glob.glob(f'{out}/*.bin.tmp')}
    for kill in range(10):
        before, finished, several = halves(), shards(), kill == 5
        started = process(prepare_fineweb.main, flags_of(out, *(['--workers=2'] if several else [])))
        if kill % 2:
            wanted = finished + rng.randint(1, 3)
            wait_until(lambda wanted=wanted: shards() >= wanted)
            workers = children(started.pid)
        else:
            wait_until(lambda before=before: halves() - before, pause=0)
        started.kill()
        finish(started, -signal.SIGKILL)
        half_written += bool(halves() - before)
        if several and sys.platform == 'linux':
            assert len(workers) >= 2
            wait_until(lambda workers=workers: all(map(gone, workers)))
        for path in glob.glob(f'{out}/*.bin'):
            data.read_shard(path)
    assert half_written >= 2
    finish(process(prepare_fineweb.main, flags_of(out)), 0)
    assert folder_hash(out) == folder_hash(prepared)


def test_ctrl_c_ends_the_workers_too(tmp_path):
    flags = flags_of(tmp_path / 'out', '--workers=2')
    started = process(prepare_fineweb.main, flags, stderr=tmp_path / 'stderr', prepare=os.setpgrp)
    wait_until(lambda: len(glob.glob(f'{tmp_path}/out/*.bin')) >= 2)
    workers = children(started.pid)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    finish(started, 130)
    assert one_line(tmp_path / 'stderr') == 'error: interrupted\n'
    wait_until(lambda: all(map(gone, workers)))


def test_more_tokens_later_leave_the_shards_as_they_are(prepared, tmp_path, capsys):
    prepare_fineweb.main(flags_of(tmp_path, '--tokens=1e6'))
    first = {name: found for name, found in folder_hash(tmp_path).items() if name != 'meta.json'}
    prepare_fineweb.main(flags_of(tmp_path))
    assert np.array_equal(tokens_of(tmp_path), tokens_of(prepared)) and len(tokens_of(tmp_path)) == 2_050_000
    assert first.items() < folder_hash(tmp_path).items()
    for tokens in ('2e6', '1e5'):  # the same command again, or one for less
        prepare_fineweb.main(flags_of(tmp_path, f'--tokens={tokens}'))
        assert 'is done: 2,000,000 training tokens' in capsys.readouterr().out
    before, meta = folder_hash(tmp_path), str(tmp_path / 'meta.json')
    common.write_json(meta, {**common.read_json(meta), 'complete': False})  # as if stopped at the very end
    prepare_fineweb.main(flags_of(tmp_path, '--tokens=1e5'))
    assert folder_hash(tmp_path) == before


def test_on_a_full_disk(prepared, tmp_path):
    out, errors = tmp_path / 'out', tmp_path / 'stderr'
    finish(process(prepare_fineweb.main, flags_of(out), stderr=errors, file_limit=120_000), 1)
    assert f'cannot write {out}/stdlib_train_000000.bin: File too large' in one_line(errors)
    assert sorted(os.listdir(out)) == ['.lock', 'meta.json', 'stdlib_val_000000.bin']
    finish(process(prepare_fineweb.main, flags_of(out)), 0)
    assert folder_hash(out) == folder_hash(prepared)


def change_meta_before_the_lock():
    """Has another process work in the folder between the look at meta.json and the lock."""
    real = prepare_fineweb.make_folder

    def make_folder(path):
        real(path)
        meta = common.read_json(os.path.join(path, 'meta.json'))
        common.write_json(os.path.join(path, 'meta.json'), {**meta, 'documents': meta['documents'] + 1})
    prepare_fineweb.make_folder = make_folder


def test_two_copies_in_one_folder(prepared, tmp_path):
    """At most one of them works, the others say so or that it is done, and the shards are the work of one."""
    copies = [process(prepare_fineweb.main, flags_of(tmp_path / 'out'), stderr=tmp_path / f'stderr{i}')
              for i in range(4)]
    for copy in copies:
        copy.join(120)
    assert {0} <= {copy.exitcode for copy in copies} <= {0, 3}
    for i, copy in enumerate(copies):
        assert copy.exitcode == 0 or 'another process' in one_line(tmp_path / f'stderr{i}')
    assert folder_hash(tmp_path / 'out') == folder_hash(prepared)
    flags = flags_of(tmp_path / 'out', '--tokens=3e6')
    errors = tmp_path / 'stderr'
    finish(process(prepare_fineweb.main, flags, stderr=errors, prepare=change_meta_before_the_lock), 3)
    assert 'another process has just worked' in one_line(errors)


def test_too_little_text_leaves_no_train_shard(tmp_path):
    (tmp_path / 'a.txt').write_text('x' * 100)
    for val_tokens, named in ((102, 'only 101 tokens'), (101, 'none are left to train on')):
        out = tmp_path / str(val_tokens)
        flags = ['--source=local', f'--files={tmp_path}/a.txt', '--tokenizer=bytes', '--workers=1',
                 f'--val_tokens={val_tokens}', f'--out={out}']
        refused(lambda flags=flags: prepare_fineweb.main(flags), named, '--val_tokens')
        assert not glob.glob(f'{out}/*_train_*.bin')
