"""Shards, and prepare_fineweb.py: every source and tokenizer, kills, a full disk, two copies at once."""
import glob
import io
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

import common
import data
import prepare_fineweb
import train
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
    for n in (120_000, 1_000_000):  # tiktoken alone panics at the latter
        tokens = prepare_fineweb.encode_gpt2('x' + ' ' * n + 'word\n' + ' ' * 2000)
        assert len(tokens) == n + 2003 and tokenizer.decode(tokens[-2002:].tolist()) == ' word\n' + ' ' * 2000
        assert n > 120_000 or tokens[1:].tolist() == tokenizer.encode_ordinary(tokenizer.decode(tokens[1:]))
    tokens = tokens_of(tmp_path / 'out')
    assert tokens[0] == 50256 and tokenizer.decode(tokens[1:].tolist()) == '<|endoftext|>'.join(texts)


def test_a_file_that_is_not_text_is_named(tmp_path, texts):
    """One bad file among good ones, and a text that the tokenizer cannot take."""
    good = json.dumps({'text': 'x' * 5000}) + '\n'
    bad = {'null.jsonl': (good + '{"text": null}\n', 'row 1', 'text column', 'NoneType'),
           'empty.jsonl': ('', 'empty'), 'half.jsonl': (good + good[:50], 'row 1', 'JSON')}
    def fails(files, *named):
        refused(lambda: prepare_fineweb.main(['--source=local', f'--files={tmp_path}/{files}', '--workers=1',
                                              '--tokenizer=bytes', f'--out={tmp_path}/out']), *named)
    for name, (content, *named) in bad.items():
        folder = tmp_path / name.split('.')[0]
        folder.mkdir()
        (folder / 'a.jsonl').write_text(good)
        (folder / name).write_text(content)
        fails(f'{folder.name}/*.jsonl', name, *named)
    pyarrow.parquet.write_table(pyarrow.table({'text': ['x', None]}), tmp_path / 'null.parquet')
    fails('*.parquet', 'null.parquet, row 1', 'text column')
    (tmp_path / 'a.parquet').write_bytes((tmp_path / 'null.parquet').read_bytes()[:-9])
    fails('*.parquet', 'a.parquet')
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'half.jsonl').write_text('{"text": "the half pair \\ud800"}\n')
    fails('half.jsonl', "'the half pair", 'utf-8')


def test_a_text_that_ends_early_is_said(tmp_path, texts, capsys):
    flags = ['--source=local', f'--files={tmp_path}/*.txt', '--tokenizer=bytes', f'--out={tmp_path}/out',
             '--val_tokens=100', '--workers=1']
    prepare_fineweb.main(flags)
    assert 'the text has ended before --tokens=13,200,000,000\n' in capsys.readouterr().out
    prepare_fineweb.main(flags)
    assert 'is done' in (said := capsys.readouterr().out) and 'all that the text has' in said


def test_progress_is_a_line_per_minute(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(prepare_fineweb.time, 'monotonic', lambda: now)
    report = prepare_fineweb.progress(1000, 10_000)
    for now in (30.0, 59.0, 100.0, 130.0, 159.0, 200.0):  # noqa: B007
        report(500)
    assert capsys.readouterr().out == ('2,500 of 10,000 tokens, 15 a second, 0:08:20 left\n'
                                       '4,000 of 10,000 tokens, 15 a second, 0:06:40 left\n')


def test_training_on_half_a_folder_says_so(corpus, tmp_path, capsys):
    for path in glob.glob(f'{corpus}/*'):
        os.symlink(path, tmp_path / os.path.basename(path))
    meta = common.read_json(os.path.join(corpus, 'meta.json'))
    for complete in (True, False):
        common.write_json(str(tmp_path / 'meta.json'), {**meta, 'complete': complete, 'tokens': 70000})
        args = SimpleNamespace(data=str(tmp_path), vocab_size=None, size='tiny', block_size=16)
        train.load_data(args, on_gpu=False)
        line = f'{tmp_path} is not complete: it has 70000 of 90000 training tokens\n'
        assert capsys.readouterr().out == ('' if complete else line)


# -----------------------------------------------------------------------------
# the hub

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
SPREAD = [0, 5, 2, 4, 1, 6, 3]  # the order in which seven files are taken
IMPATIENT = ('import common, prepare_fineweb, sources; sources.PAUSE = 0.01; sources.BLOCK = 20_000; '
             'common.run(prepare_fineweb.main)')


def fineweb(seed):
    """FineWeb in seven files of 30 texts each, in row groups of 7: path -> texts, path -> bytes."""
    rng, texts, files = np.random.RandomState(seed), {}, {'README.md': README}
    for i in range(7):
        path = f'sample/100BT/00{i}_00000.parquet'
        texts[path] = [f'{i} {j} {seed} ' + 'w\u00f6rd ' * rng.randint(200) for j in range(30)]
        table = pyarrow.table({'id': [str(j) for j in range(30)], 'text': texts[path]})
        with io.BytesIO() as file:
            pyarrow.parquet.write_table(table, file, row_group_size=7)
            files[path] = file.getvalue()
    return texts, files


@pytest.fixture
def hub(tmp_path):
    """A hub with FineWeb; hub.texts: its documents by file, hub.env: how programs find it."""
    hub = Hub()
    hub.env = {'HF_ENDPOINT': hub.url, 'HF_HOME': str(tmp_path / 'hf_home'), 'HF_HUB_OFFLINE': '0',
               'HF_HUB_DOWNLOAD_TIMEOUT': '1', 'HF_TOKEN': ''}
    hub.texts, files = fineweb(seed=0)
    hub.sha = hub.commit('HuggingFaceFW/fineweb', files)
    yield hub
    hub.close()


def fineweb_flags(out, *more):
    """A command that takes half of the hub's FineWeb and ends in the midst of a file."""
    return ['--tokenizer=bytes', f'--out={out}', '--val_tokens=3000', '--shard_tokens=9000', '--tokens=56000',
            '--workers=1', *more]


def fineweb_tokens(hub):
    """The tokens that this command should make."""
    files = [f'sample/100BT/00{i}_00000.parquet' for i in SPREAD]
    return np.concatenate([[256, *text.encode()] for path in files for text in hub.texts[path]])[:59000]


def test_fineweb(hub, tmp_path, capsys):
    """The files of one commit, spread, their texts in order; nothing of a later commit is mixed in."""
    out = tmp_path / 'out'
    finish(process(prepare_fineweb.main, fineweb_flags(out, '--workers=2'), env=hub.env), 0)
    assert np.array_equal(tokens_of(out), fineweb_tokens(hub))
    meta = common.read_json(str(out / 'meta.json'))
    taken = [f'sample/100BT/00{i}_00000.parquet' for i in SPREAD[:len(meta['taken'])]]
    assert meta['complete'] and meta['revision'] == hub.sha and 2 < len(taken) < 7
    assert meta['taken'] == {path: 30 * i for i, path in enumerate(taken)}
    prepare_fineweb.main(fineweb_flags(out, '--name=sample-100BT'))  # the default by its name
    assert 'is done: 56,000' in capsys.readouterr().out

    # killed, then the repository changes
    stopped, hub.rate = tmp_path / 'stopped', 60_000
    started = process(prepare_fineweb.main, fineweb_flags(stopped), env=hub.env)
    wait_until(lambda: len(glob.glob(f'{stopped}/*.bin')) >= 4)
    started.kill()
    finish(started, -signal.SIGKILL)
    hub.commit('HuggingFaceFW/fineweb', fineweb(seed=1)[1])
    hub.rate, hub.asked = None, []
    finish(process(prepare_fineweb.main, fineweb_flags(stopped), env=hub.env), 0)
    assert folder_hash(stopped) == folder_hash(out)
    assert not any('000_00000.parquet' in path for path in hub.asked)  # what it had all of


def test_a_hub_with_faults(hub, tmp_path):
    """Each is said in a line and overcome: statuses, half a response, none, one that does not end."""
    hub.faults = [('revision', 500), ('README', 'refuse'), ('tree', 429), ('resolve', 502),
                  ('/stored/', 'drop'), ('/stored/', 'stall'), ('/stored/', 503), ('/stored/', 'refuse'),
                  (f'stored/{hub.sha}/sample/100BT/004', 'drop')]
    n = len(hub.faults)
    done = python('-c', IMPATIENT, *fineweb_flags(tmp_path / 'out'), **hub.env)
    assert np.array_equal(tokens_of(tmp_path / 'out'), fineweb_tokens(hub))
    assert not hub.faults and done.stdout.count('; trying again in') == n and done.stderr == ''
    for named in ('at main: HTTP 500', 'README of HuggingFaceFW', 'HTTP 429', '000_00000.parquet: HTTP 503'):
        assert named in done.stdout


def test_what_no_retry_helps_ends_at_once(hub, tmp_path):
    def fails(status, *named, faults=(), flags=()):
        hub.faults = list(faults)
        flags = fineweb_flags(tmp_path / 'out', *flags)
        finish(process(prepare_fineweb.main, flags, stderr=tmp_path / 'stderr', env=hub.env), status)
        line = one_line(tmp_path / 'stderr')
        assert all(name in line for name in named) and not (tmp_path / 'out').exists(), line
    published = '--source=pretokenized', '--tokenizer=gpt2'
    fails(2, '--name=sample-10BT', 'sample-100BT', flags=['--name=sample-10BT'])
    fails(2, 'no/such', flags=[*published, '--name=no/such'])
    fails(2, '--name=HuggingFaceFW/fineweb', 'shards', flags=[*published, '--name=HuggingFaceFW/fineweb'])
    fails(2, '000_00000.parquet', '404', faults=[('/stored/', 404)])
    fails(1, '000_00000.parquet', '403', 'same command resumes', faults=[('/stored/', 403)])
    fails(1, 'HTTP 500', '--retry_minutes=0', 'same command resumes', faults=[('/stored/', 500)] * 9,
          flags=['--retry_minutes=0'])


def test_twenty_runs_end_with_status_0(hub, tmp_path):
    """Each in a Python of its own, which ends while most of the text is unread."""
    commands = [['prepare_fineweb.py', *fineweb_flags(tmp_path / str(i))] for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda command: python(*command, **hub.env), commands))


def test_shards_that_others_published(hub, tmp_path, capsys):
    """Of seven train shards the two that are taken first, at one commit; half a download leaves no shard."""
    out, names = tmp_path / 'out', ['val_000000', *(f'train_{i:06d}' for i in range(1, 8))]

    def shards(content):
        header = np.array([20240520, 1, 50000] + [0] * 253, '<i4').tobytes()
        return {f'fineweb_{name}.bin': header + bytes([content, i]) * 50000 for i, name in enumerate(names)}
    sha = hub.commit('a/b', shards(1))
    hub.faults = [(f'stored/{sha}/fineweb_train_000006', fault) for fault in ('drop', 503, 'stall', 403)]
    flags = ['--source=pretokenized', '--name=a/b', f'--out={out}', '--tokens=1e5']
    done = python('-c', IMPATIENT, *flags, check=1, **hub.env)
    assert 'fineweb_train_000006.bin: ' in done.stderr and done.stderr.count('\n') == 1
    assert 'is not complete: it has 50000 of 100000' in data.unfinished(str(out))
    hub.commit('a/b', shards(2))
    python('-c', IMPATIENT, *flags, **hub.env)
    meta = common.read_json(str(out / 'meta.json'))
    assert meta['complete'] and meta['tokens'] == 100000 and meta['vocab_size'] == 50257
    taken = [f'fineweb_{name}.bin' for name in ('val_000000', 'train_000001', 'train_000006')]
    assert meta['revision'] == sha and list(meta['taken']) == taken and data.unfinished(str(out)) is None
    for name in taken:
        assert (out / name).read_bytes() == shards(1)[name]
    assert sorted(os.listdir(out)) == sorted([*taken, '.lock', 'meta.json'])
    python('-c', IMPATIENT, *flags, '--tokens=1e9', **hub.env)
    prepare_fineweb.main([*flags, '--tokens=1e9'])
    assert 'is done: 350,000 training tokens in 8 shards, all that' in capsys.readouterr().out


def test_a_folder_of_an_older_version(tmp_path, capsys):
    """It took the files one after the other: what is done is done, the rest would be another text."""
    meta = {'source': 'fineweb', 'name': None, 'files': None, 'tokenizer': 'bytes', 'vocab_size': 257,
            'requested_val_tokens': 3000, 'shard_tokens': 9000, 'documents': 9, 'within_document': 1,
            'val_tokens': 3000, 'tokens': 9000, 'shards': 2, 'complete': True}
    data.write_shard(str(tmp_path / 'fineweb_val_000000.bin'), np.zeros(3000))
    data.write_shard(str(tmp_path / 'fineweb_train_000000.bin'), np.zeros(9000))
    common.write_json(str(tmp_path / 'meta.json'), meta)
    prepare_fineweb.main(fineweb_flags(tmp_path, '--tokens=9000'))
    assert 'is done: 9,000' in capsys.readouterr().out
    refused(lambda: prepare_fineweb.main(fineweb_flags(tmp_path)), 'meta.json', 'older version', '--out')


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
    """They leave Ctrl-C to the program: a worker that gets it alone goes on."""
    flags = flags_of(tmp_path / 'out', '--workers=2', '--tokens=3e7')
    started = process(prepare_fineweb.main, flags, stderr=tmp_path / 'stderr', prepare=os.setpgrp)
    wait_until(lambda: len(glob.glob(f'{tmp_path}/out/*.bin')) >= 2)
    workers = children(started.pid)
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    wait_until(lambda: len(glob.glob(f'{tmp_path}/out/*.bin')) >= 60)  # beyond what was under way
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    finish(started, 130)
    assert one_line(tmp_path / 'stderr') == 'error: interrupted\n'
    wait_until(lambda: all(map(gone, workers)))


def test_a_worker_that_dies_ends_the_program(tmp_path):
    flags = flags_of(tmp_path / 'out', '--workers=2', '--tokens=3e7')
    started = process(prepare_fineweb.main, flags, stderr=tmp_path / 'stderr')
    wait_until(lambda: len(glob.glob(f'{tmp_path}/out/*.bin')) >= 2)
    os.kill(children(started.pid)[-1], signal.SIGKILL)
    finish(started, 1)
    assert 'a tokenizing process was lost' in one_line(tmp_path / 'stderr')


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
