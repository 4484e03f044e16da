"""
Where prepare_fineweb.py gets its texts: FineWeb, local files, Python's standard library; and files of the
Hugging Face hub at one commit.

Whatever the network or the hub does, a request is repeated until it succeeds, each time with a line that says
so, for as long as the caller is willing to wait. What no repetition can cure ends at once.
"""
import contextlib
import difflib
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import sysconfig
import time
from urllib.parse import quote

from common import UserError, write_atomic

FINEWEB = 'HuggingFaceFW/fineweb'
PAUSE = 1.0  # seconds before a request is repeated for the first time; doubles each time, up to a minute
BLOCK = 2**23  # bytes that a file is read ahead, since every request takes a moment


def ask(url, what, minutes, headers=None, check=lambda response: None):
    """
    The response to a GET of `url`. Lost connections, timeouts, the statuses 408, 429 and 5xx, and responses
    on which `check` raises OSError are tried again until `minutes` have passed since the first of them.
    Raises UserError that names `what`.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
    begin, pause = time.monotonic(), PAUSE
    while True:
        try:
            response = get_session().get(url, headers={**build_hf_headers(), **(headers or {})},
                                         timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(response)
            check(response)
            return response
        except Exception as error:  # the kinds differ between versions of the client
            response, reason = getattr(error, 'response', None), first_line(error)
            code = None if response is None else response.status_code
            if code in (401, 404):
                raise UserError(f'{what}: not on the hub, or not open to you (HTTP {code})') from error
            lost = code is None and not isinstance(error, (ValueError, TypeError, OfflineModeIsEnabled))
            if not (lost or code in (408, 429) or (code or 0) >= 500):
                raise UserError(f'{what}: {reason}; later the same command resumes', status=1) from error
            reason = f'HTTP {code}' if code else f'{type(error).__name__}, {reason}'
            left = begin + 60 * minutes - time.monotonic()
            if left <= 0:
                raise UserError(f'{what}: {reason}; --retry_minutes={minutes:g} are over, later the same '
                                'command resumes', status=1) from error
            asked = '' if response is None else response.headers.get('Retry-After', '')
        wait = min(max(pause, float(asked) if asked.isdigit() else 0), left)
        print(f'{what}: {reason}; trying again in {wait:.0f} s', flush=True)
        time.sleep(wait)
        pause = min(2 * pause, 60)


def first_line(error):
    """What an exception says, on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def find_commit(repository, revision, minutes):
    """The commit (40 hexadecimal digits) of a branch such as main, or the commit itself if it is there."""
    from huggingface_hub import constants
    url = f'{constants.ENDPOINT}/api/datasets/{quote(repository)}/revision/{revision}'
    return ask(url, f'the dataset {repository} at {revision}', minutes).json()['sha']


def list_files(repository, commit, folder, minutes):
    """The files of a folder and those below it ('' for all): path -> bytes."""
    from huggingface_hub import constants
    url = f'{constants.ENDPOINT}/api/datasets/{quote(repository)}/tree/{commit}/{quote(folder)}'
    url, found = url.rstrip('/') + '?recursive=true', {}
    while url:  # the hub answers in pages
        response = ask(url, f'the files of {repository}', minutes)
        found.update({entry['path']: entry['size'] for entry in response.json() if entry['type'] == 'file'})
        url = response.links.get('next', {}).get('url')
    return found


def config_files(repository, commit, config, minutes):
    """The parquet files of the train split of a dataset's config, as its README names them: path -> bytes."""
    from huggingface_hub import DatasetCard, hf_hub_url
    url = hf_hub_url(repository, 'README.md', repo_type='dataset', revision=commit)
    card = DatasetCard(ask(url, f'the README of {repository}', minutes).text, ignore_metadata_errors=True)
    configs = card.data.to_dict().get('configs') or []
    configs = {entry['config_name']: entry['data_files'] for entry in configs}
    if config not in configs:
        names = ', '.join(difflib.get_close_matches(config, configs, 3) or sorted(configs)[-5:])
        raise UserError(f'--name={config}: {repository} has no such config; it has {names} and others')
    files, patterns = {}, configs[config]
    for entry in [patterns] if isinstance(patterns, str) else patterns:
        if isinstance(entry, dict):
            entry = entry['path'] if entry['split'] == 'train' else []
        for pattern in [entry] if isinstance(entry, str) else entry:
            folder = pattern.split('*')[0].rpartition('/')[0]
            found = list_files(repository, commit, folder, minutes)
            files.update({path: found[path] for path in fnmatch.filter(found, pattern)})
    files = {path: files[path] for path in sorted(files) if path.endswith('.parquet')}
    if not files:
        raise UserError(f'--name={config}: {repository} has no parquet files in this config')
    return files


def read_range(repository, commit, path, start, end, minutes):
    """The bytes from `start` up to `end` of a file."""
    from huggingface_hub import hf_hub_url
    url = hf_hub_url(repository, path, repo_type='dataset', revision=commit)

    def check(response):
        if len(response.content) != end - start:
            raise OSError(f'{len(response.content):,} bytes came instead of {end - start:,}')
    headers = {'Range': f'bytes={start}-{end - 1}', 'Accept-Encoding': 'identity'}
    return ask(url, f'{repository}/{path}', minutes, headers, check).content


def download(fetch, size, path, report):
    """Writes the `size` bytes that fetch(start, end) gets to `path`, whole or not at all."""
    def write(file):
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            file.write(fetch(start, end))
            report((end - start) // 2)
    write_atomic(path, write)


class HubFile(io.RawIOBase):
    """A file of `size` bytes to read and seek in, of which fetch(start, end) gets any part."""

    def __init__(self, fetch, size):
        self.fetch, self.size, self.position = fetch, size, 0
        self.block, self.start = b'', 0  # the part that was fetched last, and where it starts

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def read(self, n=-1):
        end = self.size if n < 0 else min(self.position + n, self.size)
        within = self.position - self.start
        if end <= self.position:
            return b''
        if not 0 <= within <= end - self.start <= len(self.block):
            kept = self.block[within:] if within >= 0 else b''
            start, self.block = self.position + len(kept), b''
            self.block = kept + self.fetch(start, min(self.size, max(end, start + BLOCK)))
            self.start, within = self.position, 0
        self.position = end
        return self.block[within:end - self.start]


# --------------------------------------------------------------------------------------------------
# documents: each source yields texts, in an order that is always the same


def stdlib_texts():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = sysconfig.get_paths()['stdlib']
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in ('site-packages', 'dist-packages', '__pycache__')]
        paths += [os.path.relpath(os.path.join(folder, f), root) for f in files if f.endswith('.py')]
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        with open(os.path.join(root, path), encoding='utf-8', errors='replace') as file:
            text = file.read()
        if text:
            yield text


def local_files(pattern):
    """The files that match the glob `pattern`, sorted, and the one ending that they have."""
    paths = sorted(glob.glob(pattern))
    endings = ' '.join(sorted({os.path.splitext(path)[1] for path in paths}))
    if not paths:
        raise UserError(f'--files={pattern}: no such files; give a quoted glob such as --files="texts/*.txt"')
    if endings not in ('.txt', '.jsonl', '.parquet'):
        raise UserError(f'--files={pattern}: should match one kind of .txt, .jsonl, .parquet, '
                        f'matches {endings}')
    return paths, endings


@contextlib.contextmanager
def naming(what):
    """Raises whatever the libraries that read and download raise as a UserError that names `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f'{what}: {first_line(error)}') from error


def check_text(text, row, path, columns):
    """`text`, if it is one. UserError names the row, counted from 0, and the columns that it has."""
    if not isinstance(text, str):
        raise UserError(f'{path}, row {row}: each row needs a text column that holds a string, '
                        f'found {type(text).__name__} among {", ".join(columns)}')
    return text


def jsonl_texts(path):
    """The texts of a file of one JSON object per line."""
    row = -1
    with open(path, encoding='utf-8-sig') as file:
        for row, line in enumerate(line for line in file if line.strip()):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(f'{path}, row {row}: not JSON ({error})') from error
            value = value if isinstance(value, dict) else {}
            yield check_text(value.get('text'), row, path, value)
    if row < 0:
        raise UserError(f'{path}: it is empty')


def parquet_texts(file, path, skip=0):
    """
    The texts of an open parquet file from row `skip` on. The row groups before that are not read, nor are
    other columns, and no thread of Arrow's reads ahead: one that is left can abort Python at its exit.
    """
    import pyarrow.parquet
    parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    columns, row = parquet.schema_arrow.names, 0
    if 'text' not in columns:
        check_text(None, 0, path, columns)
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        for batch in parquet.iter_batches(256, row_groups=[group], columns=['text'], use_threads=False):
            for text in batch.column(0).to_pylist():
                if row >= skip:
                    yield check_text(text, row, path, columns)
                row += 1


def local_texts(pattern):
    """The texts of the files that match `pattern`; a .txt file is one."""
    paths, ending = local_files(pattern)
    for path in paths:
        with naming(path):
            if ending == '.jsonl':
                yield from jsonl_texts(path)
                continue
            with open(path, **({'mode': 'rb'} if ending == '.parquet' else {'encoding': 'utf-8'})) as file:
                yield from parquet_texts(file, path) if ending == '.parquet' else [file.read()]


def spread(items):
    """
    All items in an order in which those that are taken lie evenly spread, however many are taken: by the part
    after the point of multiples of the golden ratio. The first item stays the first.
    """
    golden = (5**0.5 - 1) / 2
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * golden % 1)]


def fineweb_texts(args, meta, taken):
    """
    The texts of a config of FineWeb at the commit of meta.json from number meta['documents'] on, its files
    spread. Fills in taken: the files that have been opened, each with the number of its first document.
    """
    commit, minutes = meta['revision'], args.retry_minutes
    with naming(FINEWEB):
        files = config_files(FINEWEB, commit, meta['name'], minutes)
    taken.update(meta['taken'])
    document = meta['documents']
    first = taken.popitem()[1] if taken else 0  # of the file in which the text goes on
    for path in spread(list(files))[len(taken):]:
        taken[path] = first
        fetch = functools.partial(read_range, FINEWEB, commit, path, minutes=minutes)
        with naming(f'{FINEWEB}/{path}'):
            for text in parquet_texts(HubFile(fetch, files[path]), path, document - first):
                yield text
                document += 1
        first = document


def read_texts(args, meta, taken):
    """The texts of --source from number meta['documents'] on, one by one; `taken` as in fineweb_texts."""
    if args.source == 'fineweb':
        return fineweb_texts(args, meta, taken)
    texts = stdlib_texts() if args.source == 'stdlib' else local_texts(args.files)
    return itertools.islice(texts, meta['documents'], None)
