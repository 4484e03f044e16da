"""
Where prepare_fineweb.py gets its texts: FineWeb, local files, or Python's standard library. Each yields them
in an order that is always the same, the Hugging Face hub's as they were at one commit.

`datasets` says of which files a config consists, and the hub's own client opens them. Their rows are read
here, by pyarrow without threads: those with which `datasets` streams them abort Python at its exit.
"""
import contextlib
import difflib
import fnmatch
import functools
import glob
import hashlib
import itertools
import json
import os
import sysconfig
import time

from oec.common import UserError, check, write_atomic

FINEWEB = 'HuggingFaceFW/fineweb'
PAUSE = 1.0  # seconds before a request is repeated for the first time; doubles each time, up to a minute
BLOCK = 2**23  # bytes of a file that are asked for at once, since every request takes a moment


def first_line(error):
    """What an exception says, on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextlib.contextmanager
def naming(what):
    """Raises whatever the libraries that read and download raise as a UserError that names `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        name = what() if callable(what) else what  # a name that changes on the way
        status = getattr(getattr(error, 'response', None), 'status_code', None)  # where the hub has answered
        check(status not in (401, 404), f'{name}: not on the hub, or not open to you (HTTP {status})')
        check(status is None, f'{name}: {first_line(error)}; later the same command resumes', status=1)
        raise UserError(f'{name}: {first_line(error)}') from error


def check_answer(request, response):
    """Raises ValueError where a proxy answers with a page of its own, or with other bytes of a file."""
    if '/api/' in str(request.url):
        response.json()
    elif part := request.headers.get('Range'):
        first, last = map(int, part.removeprefix('bytes=').split('-'))
        given, size = response.headers.get('Content-Range', 'bytes'), len(response.content)
        if not given.startswith(f'bytes {first}-{last}/') or size != last + 1 - first:
            raise ValueError(f'{size} bytes, as {given}, instead of {first}-{last}')


def patient_hub(minutes):
    """
    The hub's HfApi, whose client repeats a request for a dataset, with a line that says so, after any lost
    connection, timeout, status 408, 429 or 5xx, or wrong answer. UserError once it has tried for `minutes`.
    """
    with naming('HF_... of the environment'):
        from huggingface_hub import constants
    from huggingface_hub import HfApi, errors, get_session
    client, hub = get_session(), constants.ENDPOINT
    send = type(client).send  # of the class: a second call must not repeat the repetitions
    timeout = dict.fromkeys(('connect', 'read', 'write', 'pool'), constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def send_patiently(request, **options):
        request.extensions['timeout'] = timeout  # the client sends some without any, which may wait for ever
        if not str(request.url).startswith((f'{hub}/datasets/', f'{hub}/api/datasets/')):
            return send(client, request, **options)  # user statistics and the like: nothing depends on them
        url, begin, pause = str(request.url).partition('?')[0], time.monotonic(), PAUSE
        while True:
            try:
                response = send(client, request, **options)
                status, asked = response.status_code, response.headers.get('Retry-After', '')
                if status < 300:
                    check_answer(request, response)
                if status < 500 and status not in (408, 429):
                    return response
                reason = f'HTTP {status}'
            except errors.OfflineModeIsEnabled:
                raise
            except Exception as error:  # the client's versions differ in what they raise
                reason, asked = f'{type(error).__name__}, {first_line(error)}', ''
            left = begin + 60 * minutes - time.monotonic()
            check(left > 0, f'{url}: {reason}; gave up after --retry_minutes={minutes:g}; the same command '
                  'resumes', status=1)
            wait = min(max(pause, float(asked) if asked.isdecimal() else 0), left)
            print(f'{url}: {reason}; trying again in {wait:.0f} s', flush=True)
            time.sleep(wait)
            pause = min(2 * pause, 60)

    client.send = send_patiently
    return HfApi()


def open_file(repository, commit, path):
    """A file of a dataset, open to read and seek in."""
    from huggingface_hub import HfFileSystem
    return HfFileSystem().open(f'datasets/{repository}@{commit}/{path}', block_size=BLOCK)


def config_files(repository, commit, config):
    """The files of the train split of a dataset's config, sorted. UserError where there is no such config."""
    from datasets.data_files import resolve_pattern, sanitize_patterns
    from huggingface_hub import DatasetCard
    with open_file(repository, commit, 'README.md') as file:
        configs = DatasetCard(file.read(file.size).decode()).data.configs or []
    patterns = {entry['config_name']: splits['train'] for entry in configs
                if 'train' in (splits := sanitize_patterns(entry.get('data_files') or {}))}
    close = ', '.join(difflib.get_close_matches(config, patterns, 3) or sorted(patterns)[-3:])
    check(config in patterns, f'--name={config}: {repository} has no such config to train on; try {close}')
    root = f'hf://datasets/{repository}@{commit}/'
    return sorted({file.removeprefix(root) for pattern in patterns[config]
                   for file in resolve_pattern(pattern, root)})


def published_shards(api, repository, commit):
    """The val shard and the train shards of a dataset, these spread. UserError where it has none."""
    with naming(repository):
        files = sorted(api.list_repo_files(repository, repo_type='dataset', revision=commit))
    val, train = (fnmatch.filter(files, f'*_{split}_*.bin') for split in ('val', 'train'))
    check(val and train, f'--name={repository}: this dataset has no shards such as fineweb_train_000001.bin')
    return val[:1] + spread(train)


def download(repository, commit, path, target):
    """Writes a file of a dataset to `target`, whole or not at all."""
    def blocks():
        with naming(path), open_file(repository, commit, path) as file:
            yield from iter(functools.partial(file.read, BLOCK), b'')
    write_atomic(target, lambda file: file.writelines(blocks()))


def spread(items):
    """
    All items in an order in which those that are taken lie evenly spread, however many are taken: by the part
    after the point of multiples of the golden ratio. The first item stays the first.
    """
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def stdlib_texts():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = sysconfig.get_paths()['stdlib']
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in ('site-packages', 'dist-packages', '__pycache__')]
        paths += [os.path.relpath(os.path.join(folder, f), root) for f in files if f.endswith('.py')]
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        with open(os.path.join(root, path), encoding='utf-8', errors='replace') as file:
            if text := file.read():
                yield text


def parquet_rows(file, skip=0):
    """The text column of a parquet file from row `skip` on. Row groups before that are not read."""
    import pyarrow.parquet
    parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    columns = parquet.schema_arrow.names
    if 'text' not in columns:
        raise ValueError(f'there is no text column among {", ".join(columns)}')
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if skip < rows:
            for batch in parquet.iter_batches(256, row_groups=[group], columns=['text'], use_threads=False):
                yield from batch.column(0).to_pylist()[skip:]
                skip = max(0, skip - len(batch))
        else:
            skip -= rows


def file_rows(path):
    """What the rows of a local file have as text, None where they have none; a .txt file is one row."""
    if path.endswith('.parquet'):
        yield from parquet_rows(path)
    elif path.endswith('.jsonl'):
        check(os.path.getsize(path), f'{path}: the file is empty')
        with open(path, encoding='utf-8-sig') as file:
            for line in filter(str.strip, file):
                row = json.loads(line)
                yield row.get('text') if isinstance(row, dict) else None
    else:
        with open(path, encoding='utf-8') as file:
            yield file.read()


def check_rows(rows, path, row=0):
    """Yields `rows` of a file, the first of them number `row`. UserError names the one that is no text."""
    with naming(lambda: f'{path}, row {row}'):
        for text in rows:
            if not isinstance(text, str):
                raise ValueError(f'its text column should hold a string, holds {type(text).__name__}')
            yield text
            row += 1


def local_texts(pattern, flag='--files'):
    """The texts of the files that match the glob that a flag has, sorted by their names."""
    paths = sorted(glob.glob(pattern))
    endings = ' '.join(sorted({os.path.splitext(path)[1] or path for path in paths}))
    check(endings in ('.txt', '.jsonl', '.parquet'), f'{flag}={pattern}: should match files of one kind, '
          f'.txt, .jsonl or .parquet, matches {endings or "none; it may hold *, ? and [], no braces"}')
    for path in paths:
        yield from check_rows(file_rows(path), path)


def fineweb_texts(args, meta, taken):
    """
    The texts of a config of FineWeb at the commit of meta.json from number meta['documents'] on, its files
    spread. Fills in taken: the files that have been opened, each with the number of its first document.
    """
    commit, document = meta['revision'], meta['documents']
    with naming(f'--name={meta["name"]}'):
        files = config_files(FINEWEB, commit, meta['name'])
    taken.update(meta['taken'])
    first = taken.popitem()[1] if taken else 0  # of the file in which the text goes on
    for path in spread(files)[len(taken):]:
        taken[path] = first
        with naming(path), open_file(FINEWEB, commit, path) as file:
            for text in check_rows(parquet_rows(file, document - first), path, document - first):
                yield text
                document += 1
        first = document


def read_texts(args, meta, taken):
    """The texts of --source from number meta['documents'] on, one by one; `taken` as in fineweb_texts."""
    if args.source == 'fineweb':
        return fineweb_texts(args, meta, taken)
    texts = stdlib_texts() if args.source == 'stdlib' else local_texts(args.files)
    return itertools.islice(texts, meta['documents'], None)
