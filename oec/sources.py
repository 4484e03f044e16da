"""
The texts of prepare_fineweb.py and analyze.py --hf, always in one order. `datasets` says of which files a
config of FineWeb consists. pyarrow reads them without threads: those of `datasets` abort Python at its exit.
"""
import contextlib
import glob
import hashlib
import itertools
import json
import os
import sysconfig

from oec.common import UserError, check

FINEWEB = 'HuggingFaceFW/fineweb'


@contextlib.contextmanager
def naming(what, hub=False):
    """Raises whatever the libraries that read and download raise as a UserError that names `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        network = hub and not isinstance(error, ValueError)
        line = f'{what() if callable(what) else what}: {str(error) or type(error).__name__}'[:400]
        line += '; later the same command resumes; --source=stdlib --tokenizer=bytes is offline' * network
        raise UserError(line, status=1 if network else 2) from error


def spread(items):
    """All items so that those taken first lie evenly: by the multiples of the golden ratio, modulo 1."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def fineweb_files(config, commit):
    """The files of the train split of a config, spread, so that a prefix of them is like the whole."""
    import datasets
    with naming(f'--name={config}', hub=True):
        builder = datasets.load_dataset_builder(FINEWEB, config, revision=commit)
        return spread(sorted(builder.config.data_files['train']))


def local_files(pattern, flag='--files'):
    """The files that match the glob that a flag has, sorted by their names."""
    paths = sorted(filter(os.path.isfile, glob.glob(pattern)))
    endings = ' '.join({os.path.splitext(path)[1] for path in paths})
    check(endings in ('.txt', '.jsonl', '.parquet'),
          f'{flag}={pattern}: should match .txt, .jsonl or .parquet files, matches {endings or "none"}')
    return paths


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = sysconfig.get_paths()['stdlib']
    paths = glob.glob('**/*.py', root_dir=root, recursive=True)
    paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    return [f'{root}/{path}' for path in paths if os.path.getsize(f'{root}/{path}')
            and not {'site-packages', 'dist-packages'} & set(path.split(os.sep))]


def parquet_rows(path, skip):
    """The text column of a parquet file from row `skip` on. Row groups before that are not read."""
    import fsspec
    import pyarrow.parquet
    with fsspec.open(path, block_size=2**23) as file:  # hf:// by the hub's client, which repeats what fails
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if skip < rows:
                for batch in parquet.iter_batches(256, [group], ['text'], use_threads=False):
                    yield from batch['text'].to_pylist()[skip:]
                    skip = max(0, skip - len(batch))
            else:
                skip -= rows


def file_rows(path, skip):
    """What the rows of a file have as text, from row `skip` on. A .txt or .py file is one row."""
    if path.endswith('.parquet'):
        yield from parquet_rows(path, skip)
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as file:
            for line in itertools.islice(filter(str.strip, file), skip, None):
                row = json.loads(line)
                yield row.get('text') if isinstance(row, dict) else None
    elif not skip:
        with open(path, encoding='utf-8', errors='replace' if path.endswith('.py') else 'strict') as file:
            yield file.read()


def read_texts(paths, first=0, row=0):
    """Yields (file, row, text) of all texts from this row of file number `first` on."""
    for file, path in enumerate(paths[first:], first):
        with naming(lambda: f'{path}, row {row}', hub=path.startswith('hf://')):  # noqa: B023
            for text in file_rows(path, row):
                if not isinstance(text, str):
                    raise ValueError(f'its text column should hold a string, holds {type(text).__name__}')
                yield file, row, text.encode('utf-8', 'replace').decode()  # half a surrogate pair becomes a ?
                row += 1
        row = 0
