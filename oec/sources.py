"""
Where texts come from, always in the same order. `datasets` says which files a config of FineWeb has; pyarrow
reads them without threads, since those of `datasets` abort Python if a program ends in the middle of a file.
"""
import contextlib
import glob
import hashlib
import itertools
import json
import os
import sysconfig

import fsspec
import pyarrow.parquet
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError  # HTTPError: of httpx or httpx2

from oec.common import UserError, check


@contextlib.contextmanager
def naming(what, hub=False):
    """Any exception of a library becomes a UserError that names `what`, status 1 if the network failed."""
    try:
        yield
    # Exception, since tiktoken, transformers, datasets and the hub's client pass on what the libraries below
    # them raise. So only calls of these may stand inside: a bug of ours keeps its traceback.
    except Exception as error:
        line = f'{what}: {str(error) or type(error).__name__}'[:400]
        if not hub or isinstance(error, (ValueError, RepositoryNotFoundError)):
            raise UserError(line) from error
        line += '; the same command resumes; --source=stdlib --tokenizer=bytes needs no network'
        raise UserError(line, status=1) from error


def golden_order(items):
    """The items in an order whose first n lie evenly spread, for any n: by i / (golden ratio) modulo 1."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def fineweb_files(config, commit):
    """The hf:// paths of a FineWeb config at a commit (None: the newest), in golden order."""
    import datasets
    with naming(f'--name={config}', hub=True):
        builder = datasets.load_dataset_builder('HuggingFaceFW/fineweb', config, revision=commit)
    return golden_order(sorted(builder.config.data_files['train']))


def published_shards(dataset, commit):
    """(commit, names) of a dataset's shards, one val shard and then, in golden order, those to train on."""
    from huggingface_hub import HfApi
    with naming(f'--name={dataset}', hub=True):
        info = HfApi().dataset_info(dataset, revision=commit, timeout=30)
    names = sorted(file.rfilename for file in info.siblings)
    val = [name for name in names if '_val_' in name]
    train = [name for name in names if '_train_' in name]
    check(val and train, f'--name={dataset} has no shards such as fineweb_train_000001.bin')
    return info.sha, val[:1] + golden_order(train)


def local_files(pattern, flag='--files'):
    """The files that match the glob given by `flag`, sorted by name. UserError unless all are of one kind."""
    paths = sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
    kinds = sorted({os.path.splitext(path)[1] or path for path in paths})
    check(kinds in (['.txt'], ['.jsonl'], ['.parquet']), f'{flag}={pattern}: should match files of one kind, '
          f'.txt, .jsonl or .parquet; matches {", ".join(kinds[:5]) or "none"}')
    return paths


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = sysconfig.get_paths()['stdlib']
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    installed = {'site-packages', 'dist-packages'}
    return [f'{root}/{name}' for name in names
            if os.path.getsize(f'{root}/{name}') and not installed & set(name.split(os.sep))]


def parquet_rows(path, skip):
    """The text column of a local or hf:// file from row `skip` on. Row groups before that are not read."""
    with fsspec.open(path, block_size=2**23) as file:  # the hub's client retries each block of a hf:// file
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        check('text' in parquet.schema_arrow.names, f'{path}: has no text column')
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                continue
            for batch in parquet.iter_batches(256, [group], ['text'], use_threads=False):
                yield from batch['text'].to_pylist()[skip:]
                skip = max(0, skip - len(batch))


def file_rows(path, skip):
    """The text of each row of a file, from row `skip` on. A .txt or .py file is one row."""
    if path.endswith('.parquet'):
        yield from parquet_rows(path, skip)
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as file:
            for line in itertools.islice(filter(str.strip, file), skip, None):
                row = json.loads(line)
                yield row.get('text') if isinstance(row, dict) else None
    elif skip == 0:
        errors = 'replace' if path.endswith('.py') else 'strict'  # some of Python's own tests are not UTF-8
        with open(path, encoding='utf-8', errors=errors) as file:
            yield file.read()


def read_texts(paths, first_file=0, first_row=0):
    """Yields (file number, row, text) from row `first_row` of file number `first_file` on."""
    for file, path in enumerate(paths[first_file:], first_file):
        row = first_row if file == first_file else 0
        try:
            for text in file_rows(path, row):
                check(isinstance(text, str), f'{path}, row {row}: its text column should hold a string, '
                      f'holds {type(text).__name__}')
                yield file, row, text.encode('utf-8', 'replace').decode()  # half a surrogate pair becomes a ?
                row += 1
        except (OSError, ValueError, RecursionError, pyarrow.ArrowException, HTTPError):
            with naming(f'{path}, row {row}', hub=path.startswith('hf://')):
                raise  # as a line that names the row
