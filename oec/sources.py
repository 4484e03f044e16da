"""Where texts and published shards come from, always in the same order."""
import contextlib
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig

import fsspec
import pyarrow.parquet
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError  # HTTPError: of httpx or httpx2

from oec.common import UserError, check
from oec.data import SHARD


def user_error(error, what, hub=False):
    """A library's exception as a UserError that names `what`, status 1 if the network failed."""
    line = f'{what}: {str(error) or type(error).__name__}'[:400]
    if not hub or isinstance(error, (ValueError, RepositoryNotFoundError)):
        return UserError(line)
    return UserError(f'{line}; try again, or without a network --source=stdlib --tokenizer=bytes', status=1)


@contextlib.contextmanager
def naming(what, hub=False):
    """For library calls alone: they may raise anything, so every Exception becomes its user_error."""
    try:
        yield
    except Exception as error:
        raise user_error(error, what, hub) from error


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
    """(commit, paths) of a dataset's shards, one val shard and then, in golden order, those to train on."""
    from huggingface_hub import HfApi
    with naming(f'--name={dataset}', hub=True):
        info = HfApi().dataset_info(dataset, revision=commit, timeout=30)
    paths = sorted(file.rfilename for file in info.siblings)
    val, train = (fnmatch.filter(paths, SHARD.format(split)) for split in ('val', 'train'))
    folders = sorted({os.path.dirname(path) or '.' for path in val + train})
    check(val and train and len(folders) == 1, f'--name={dataset} should hold NAME_train_%06d.bin and '
          f'NAME_val_%06d.bin in one folder; has {len(train)} and {len(val)}, in {folders[:5]}')
    return info.sha, val[:1] + golden_order(train)


def local_files(pattern, flag='--files'):
    """The files that match the glob given by `flag`, sorted by name. UserError unless all are of one kind."""
    paths = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    # a file with several names, by links or a second **, is read once, under the first of them
    paths = sorted({os.path.realpath(path): path for path in sorted(paths, reverse=True)}.values())
    endings = [os.path.splitext(path)[1] if os.path.isfile(path) else '' for path in paths]
    kinds = sorted({ending or path for ending, path in zip(endings, paths, strict=True)})
    check(kinds in (['.txt'], ['.jsonl'], ['.parquet']), f'{flag}={pattern}: should match files of one kind, '
          f'.txt, .jsonl or .parquet; matches {", ".join(kinds[:5]) or "none"}')
    return paths


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = sysconfig.get_paths()['stdlib']
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    paths = [f'{root}/{name}' for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    return [path for path in paths if os.path.getsize(path)]


def parquet_rows(path, skip):
    """The text column of a local or hf:// file from row `skip` on. Row groups before that are not read."""
    # Threads, as `datasets` has them, abort Python if a program ends in the middle of a file.
    with fsspec.open(path, block_size=2**23) as file:  # the hub's client retries each block of a hf:// file
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        check('text' in parquet.schema_arrow.names, f'{path}: has no text column')
        group = 0  # the first that is read
        while group < parquet.num_row_groups and skip >= parquet.metadata.row_group(group).num_rows:
            skip -= parquet.metadata.row_group(group).num_rows
            group += 1
        groups = range(group, parquet.num_row_groups)
        for batch in parquet.iter_batches(256, groups, ['text'], use_threads=False):
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
        # Some of Python's own tests are not UTF-8, or begin with a byte order mark, on purpose.
        encoding, errors = ('utf-8', 'replace') if path.endswith('.py') else ('utf-8-sig', 'strict')
        with open(path, encoding=encoding, errors=errors) as file:
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
        except (OSError, ValueError, RecursionError, pyarrow.ArrowException, HTTPError) as error:
            raise user_error(error, f'{path}, row {row}', hub=path.startswith('hf://')) from error
