"""
Turns text into token shards for train.py. Run the same command again to resume.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # what the authors trained on: kjj0/fineweb100B-gpt2
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib   # needs no network

It writes <source>_val_000000.bin, which is held out, then <source>_train_000000.bin and so on, in the format
of train.py. meta.json says how the shards were made, where the next one begins in the texts, and whether all
that the command asks for is there ("done").
"""
import argparse
import fcntl
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pyarrow.parquet
import tiktoken

from train import SHARD, check, integer, read_json, read_shard, save, shard_length

# Of local files the first HELD_OUT tokens of every STRETCH tokens are for val.
HELD_OUT = 5_000
STRETCH = 50_000

DATASETS = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}  # the defaults of --name


# -------- settings
def count(text):
    """An argparse type: an integer of at least 1, which may be written 13.2e9."""
    value = integer(text)
    if value < 1:
        raise ValueError
    return value


parser = argparse.ArgumentParser(usage='%(prog)s [--flag=value ...]', allow_abbrev=False,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'], help='which text')
add('--name', help="config of FineWeb, or dataset of shards (%(default)s: sample-100BT, or the authors')")
add('--files', type=os.path.expanduser, help='quoted glob: .txt, .md, .rst; .jsonl, .parquet (field: text)')
add('--out', type=os.path.expanduser, help='folder of the shards (%(default)s: data/fineweb or data/stdlib)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'chars'],
    help='bytes and chars need no download')
add('--tokens', type=count, default=13_200_000_000, help='tokens to train on, at most')
add('--val_tokens', type=count, default=10_500_000, help='tokens held out: the first ones; of local '
    'files the first 5,000 of every 50,000, up to this many')
add('--shard_tokens', type=count, default=100_000_000, help='tokens in a train shard, 2 bytes each')
add('--workers', type=count, default=os.cpu_count(), help='threads that tokenize')


def resolve_args(args):
    """Refuses settings that cannot work, fills in the defaults that depend on others, and returns args."""
    if args.source == 'local':
        check(args.files and args.out, '--source=local needs --files and --out')
    else:
        check(not args.files, '--files needs --source=local')
    if args.source == 'pretokenized':
        check(args.tokenizer == 'gpt2', f'--source=pretokenized has GPT-2 tokens, not {args.tokenizer}')
    check(max(args.val_tokens, args.shard_tokens) < 2**31,
          '--val_tokens and --shard_tokens should be below 2^31')  # the header has int32

    if args.name is None:
        args.name = DATASETS.get(args.source)
    if not args.out:
        args.out = 'data/stdlib' if args.source == 'stdlib' else 'data/fineweb'
    return args


# -------- files
def golden_order(items):
    """
    The items in another order: the first n of them, for any n, are spread evenly over all. A command reads
    only as many files as --tokens needs, and neighbours in a list of files are often alike.

    Item i is sorted by the fractional part of i / 1.618..., the golden ratio. The items whose fractional
    parts are small, and which therefore come first, lie at nearly equal distances: seven items have the order
    0, 5, 2, 4, 1, 6, 3.
    """
    def fractional_part(i):
        return i * (5**0.5 - 1) / 2 % 1  # (sqrt(5) - 1) / 2 is 1 / 1.618...

    order = sorted(range(len(items)), key=fractional_part)
    return [items[i] for i in order]


def local_files(pattern):
    """The files that match a glob, sorted by name. A file that has several names is there once."""
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    check(found, f'no file matches {pattern}')
    endings = ('.txt', '.md', '.rst', '.jsonl', '.parquet')
    others = [path for path in found if not path.endswith(endings)]
    check(not others, f'{pattern} should match {", ".join(endings)} files, not {others[:3]}')

    paths = {}  # by the file itself, under the first of its names; a second ** finds all files again
    for path in sorted(found):
        paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash of their names, so that val is like train."""
    root = os.path.dirname(os.__file__)
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    paths = [f'{root}/{name}' for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    paths = [path for path in paths if os.path.getsize(path) > 0]
    check(paths, f'{root} has no .py files')
    return paths


def describe(paths):
    """The number of files and a hash of their sizes and times, which changes if a file does."""
    stamps = [(os.path.getsize(path), os.path.getmtime(path)) for path in paths]
    return f'{len(paths)} files ({hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]})'


def fineweb_files(name, revision):
    """The parquet files of a config of FineWeb at a commit, or the newest; and the commit."""
    from datasets import load_dataset_builder  # takes a second
    try:
        builder = load_dataset_builder('HuggingFaceFW/fineweb', name, revision=revision)
    except Exception as error:  # of many kinds
        refuse_offline('FineWeb', error)

    paths = golden_order(sorted(builder.config.data_files['train']))
    revision = re.search('@(.*?)/', paths[0])[1]  # hf://datasets/HuggingFaceFW/fineweb@<commit>/...
    return paths, revision


def published_shards(name, revision):
    """A dataset's shards at a commit, or the newest: one for val, then those to train on; and the commit."""
    from huggingface_hub import HfApi
    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=30)
    except Exception as error:  # of many kinds
        refuse_offline(name, error)

    files = [file.rfilename for file in info.siblings]
    val = sorted(fnmatch.filter(files, SHARD.format('val')))
    train = sorted(fnmatch.filter(files, SHARD.format('train')))
    names = {os.path.basename(path) for path in val + train}
    check(val and train and len(names) == len(val + train),
          f'--name={name} should have *_val_*.bin and *_train_*.bin (six digits last), each name once')
    return val[:1] + golden_order(train), info.sha


def refuse_offline(what, error):
    """Ends the program in a line that says what needs no network."""
    check(False, f'{what} cannot be downloaded. Without a network, use --source=stdlib or --source=local '
                 f'with --tokenizer=bytes or chars. {error!r}')


# -------- documents: tuples (file, row, text), where `file` is the number of the file in a list of paths, and
# `row` that of the document in the file
def file_rows(path):
    """The documents of a local or hf:// file: rows, lines, or what <|endoftext|> separates in a text."""
    if path.endswith('.parquet'):
        with fsspec.open(path, block_size=2**23) as f:  # the hub's client retries each block
            parquet = pyarrow.parquet.ParquetFile(f, pre_buffer=False, buffer_size=2**20)
            # Threads, as `datasets` has them, abort Python if a program ends in the middle of a file.
            for batch in parquet.iter_batches(256, columns=['text'], use_threads=False):
                yield from batch['text'].to_pylist()

    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as f:
            for line in f:
                if line.strip():
                    yield json.loads(line)['text']

    elif path.endswith('.py'):  # some of Python's own tests are not UTF-8, on purpose
        with open(path, encoding='utf-8', errors='replace') as f:
            yield f.read()

    else:
        with open(path, encoding='utf-8-sig', newline='') as f:  # line ends as they are, as in .jsonl
            text = f.read()
        if '\0' in text:
            raise ValueError('there are NULs in it: is it UTF-16?')
        yield from text.split('<|endoftext|>')


def read_texts(paths, first_file=0, first_row=0):
    """Yields the documents (file, row, text) that are not empty, from a row of a file on."""
    for file in range(first_file, len(paths)):
        row = 0
        try:
            for text in file_rows(paths[file]):
                is_new = file > first_file or row >= first_row
                if text and is_new:
                    text = text.encode(errors='replace').decode()  # half a surrogate pair becomes a ?
                    yield file, row, text
                row += 1
        except Exception as error:  # of many kinds; in which of a thousand files?
            raise ValueError(f'{paths[file]}, row {row}: {type(error).__name__}: {error}') from error


# -------- tokens: documents become tuples (file, row, before, tokens), where `before` is the number of tokens
# in all documents before this one, and tokens is (n,) uint16
VOCAB_SIZES = {'gpt2': 50257, 'bytes': 257, 'chars': 64}
# `bytes` has the bytes of UTF-8, and 256 for end-of-text. `chars` has the 63 most frequent characters of
# Python's standard library, in this order, and 63 for every other byte and for end-of-text.
CHARS = b' estaronil\nfcd._()pu,\'mh"g=b:0xEyTwk1-I#vAN2RLS\\Cq][OPFD3>M45*U'


def load_encoder(name):
    """The function text -> its tokens (n,) uint16, the first of which is end-of-text."""
    if name == 'bytes':
        def encode_bytes(text):
            return np.append(np.uint16(256), np.frombuffer(text.encode(), np.uint8))
        return encode_bytes

    if name == 'chars':
        ids = np.full(256, len(CHARS), np.uint16)  # of each byte
        ids[list(CHARS)] = range(len(CHARS))

        def encode_chars(text):
            return np.append(np.uint16(len(CHARS)), ids[np.frombuffer(text.encode(), np.uint8)])
        return encode_chars

    try:
        gpt2 = tiktoken.get_encoding(name)
    except OSError as error:
        refuse_offline("GPT-2's tokenizer", error)

    def encode_gpt2(text):
        try:
            tokens = gpt2.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million white spaces overflow tiktoken's stack
            half = len(text) // 2
            return np.append(encode_gpt2(text[:half]), encode_gpt2(text[half:])[1:])
        return np.append(np.uint16(gpt2.eot_token), tokens.astype(np.uint16))
    return encode_gpt2


def batches(documents):
    """Yields lists of at most 1,024 documents; a list ends early once it has 8 million characters."""
    batch = []
    n_characters = 0
    for document in documents:
        batch.append(document)
        n_characters += len(document[2])
        if len(batch) == 1024 or n_characters >= 2**23:
            yield batch
            batch = []
            n_characters = 0
    if batch:
        yield batch


def tokenize(documents, encode, workers, before=0):
    """
    Documents (file, row, text) -> (file, row, before, tokens). `before` tokens precede the first document.
    """
    with ThreadPoolExecutor(workers) as pool:  # the tokenizers free the GIL
        for batch in batches(documents):
            encoded = pool.map(encode, [text for _, _, text in batch])
            for (file, row, _), tokens in zip(batch, encoded, strict=True):
                yield file, row, before, tokens
                before += len(tokens)


# -------- shards
def is_held_out(before, n, val_tokens):
    """
    Which of the n tokens of a local document are for val, (n,) bool. `before` tokens are in the documents
    before it.

    The tokens of all documents are numbered from 0 and divided into stretches of 50,000. The first 5,000 of
    each stretch are for val, until there are val_tokens. So val has something of everything, although files
    are often sorted by topic or date. And as nothing counts but a token's number, a command that resumes in
    the middle of the files decides as the first one did.
    """
    held_out = np.zeros(n, bool)
    first_stretch = before // STRETCH
    last_stretch = (before + n - 1) // STRETCH
    for stretch in range(first_stretch, last_stretch + 1):
        n_wanted = val_tokens - stretch * HELD_OUT  # each stretch before this one has HELD_OUT tokens for val
        n_held_out = min(HELD_OUT, max(n_wanted, 0))
        start = stretch * STRETCH - before  # counted from the beginning of this document
        end = start + n_held_out
        held_out[max(start, 0):max(end, 0)] = True
    return held_out


def drop_held_out(documents, val_tokens):
    """Local documents without the tokens that are for val."""
    for file, row, before, tokens in documents:
        yield file, row, before, tokens[~is_held_out(before, len(tokens), val_tokens)]


def hold_out(documents, val_tokens):
    """The val shard of local documents, tokens (n,), and {'exhausted': True} if there is nothing else."""
    parts = [np.zeros(0, np.uint16)]
    n_val = 0
    n_train = 0
    for _, _, before, tokens in documents:
        held_out = is_held_out(before, len(tokens), val_tokens)
        parts.append(tokens[held_out])
        n_val += len(parts[-1])
        n_train += len(tokens) - len(parts[-1])
        if n_val == val_tokens and n_train > 0:
            break
    return np.concatenate(parts), {'exhausted': n_train == 0}


def train_sizes(tokens_left, shard_tokens):
    """Yields the sizes of shards that have tokens_left tokens together."""
    while tokens_left > 0:
        size = min(shard_tokens, tokens_left)
        yield size
        tokens_left -= size


def cut_shards(documents, sizes, used):
    """
    Cuts documents into shards of the given sizes; `used` tokens of the first document are in earlier shards.
    Yields the tokens (n,) of each shard, and the position in the texts at which the next one starts, or
    {'exhausted': True} if the texts end with it.
    """
    size = next(sizes)
    parts = []  # of this shard
    n = 0  # tokens in these parts
    for file, row, before, tokens in documents:
        while used < len(tokens):
            if n == size:  # the shard is full, and the next one has a first token
                yield np.concatenate(parts), {'file': file, 'row': row, 'before': before, 'used': used}
                size = next(sizes, None)
                if size is None:
                    return
                parts = []
                n = 0

            part = tokens[used:used + size - n]
            parts.append(part)
            n += len(part)
            used += len(part)
        used = 0
    yield np.concatenate(parts), {'exhausted': True}


def make_shards(paths, meta, args):
    """
    Writes the missing shards. Yields the path of each, and the entries of meta.json that change with it.
    """
    encode = load_encoder(args.tokenizer)
    texts = read_texts(paths, meta['file'], meta['row'])
    documents = tokenize(texts, encode, args.workers, meta['before'])
    sizes = train_sizes(args.tokens - meta['tokens'], args.shard_tokens)
    val_is_missing = meta['shards'] == 0

    if args.source == 'local':
        documents = drop_held_out(documents, args.val_tokens)
        shards = cut_shards(documents, sizes, meta['used'])
        if val_is_missing:  # it needs a pass of its own over the files
            all_documents = tokenize(read_texts(paths), encode, args.workers)
            val_shard = hold_out(all_documents, args.val_tokens)
            shards = itertools.chain([val_shard], shards)
    else:
        if val_is_missing:  # it has the first tokens
            sizes = itertools.chain([args.val_tokens], sizes)
        shards = cut_shards(documents, sizes, meta['used'])

    for i, (tokens, progress) in enumerate(shards, meta['shards']):
        if i == 0:
            check(not progress.get('exhausted'), f'--val_tokens={args.val_tokens} leaves nothing to train on')
        if args.source == 'local':  # a file that grew between the two passes may be in val and in train
            check(describe(paths) == meta['found'],
                  f'files of {args.files} have changed while they were read; choose another --out')

        name = 'val_000000' if i == 0 else f'train_{i - 1:06d}'
        path = f'{args.out}/{args.source}_{name}.bin'
        write_shard(tokens, path)
        yield path, progress


def write_shard(tokens, path):
    """Writes tokens (n,) uint16 in the format of train.py."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(np.concatenate([header.view('<u2'), tokens]).tobytes(), path)


def download_shards(paths, meta, args):
    """
    Downloads the missing published shards. Yields the path of each, and the entries of meta.json that change
    with it.
    """
    from huggingface_hub import hf_hub_download
    for i in range(meta['shards'], len(paths)):
        # the hub's client resumes a download that was cut short
        download = hf_hub_download(args.name, paths[i], repo_type='dataset', revision=meta['revision'],
                                   local_dir=f'{args.out}/.download')
        shard_length(download)  # refuses what is not a whole shard before it stands where train.py looks
        path = f'{args.out}/{os.path.basename(paths[i])}'
        os.replace(download, path)
        yield path, {'file': i + 1, 'exhausted': i + 1 == len(paths)}


def stretches_in_both(val, shard):
    """How many of 100 stretches of 64 tokens, spread over val (n,), are in a train shard (m,) as well."""
    starts = range(0, len(val) - 64, len(val) // 100 + 1)
    text = shard.tobytes()
    return sum(val[start:start + 64].tobytes() in text for start in starts)


# -------- what is there already, and the loop that goes on from there
def wait_for_folder(path):
    """
    Makes a folder, waits until no other process writes shards in there, and locks it for this one until the
    file that this returns is closed.
    """
    try:
        os.makedirs(path, exist_ok=True)
        lock = open(f'{path}/.lock', 'a')
    except OSError as error:
        check(False, f'--out={path} cannot be written: {error.strerror}')

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f'{path} is in use by another process: waiting for it', flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def settings_of_shards(args, paths):
    """What the shards depend on, as meta.json has it: a command with other settings is refused."""
    settings = dict(vars(args))
    for name in ('out', 'tokens', 'workers'):
        del settings[name]
    settings['vocab_size'] = VOCAB_SIZES[args.tokenizer]
    if args.source == 'local':
        settings['found'] = describe(paths)
        settings['held_out'] = f'{HELD_OUT} of every {STRETCH} tokens'
    return settings


def read_meta(settings, args):
    """What meta.json has, or will have at first. Refuses shards that were made with other settings."""
    counts = {'shards': 0, 'tokens': 0}  # val and train shards, tokens to train on
    position = {'file': 0, 'row': 0, 'before': 0, 'used': 0}  # of the next shard, see cut_shards
    meta = {**settings, **counts, **position}
    path = f'{args.out}/meta.json'
    if glob.glob(SHARD.format('*'), root_dir=args.out):
        saved = read_json(path)
        others = [f'{name}={saved.get(name)!r}' for name in settings if saved.get(name) != settings[name]]
        check(not others, f'{path} was made with {", ".join(others)}; choose another --out')
        meta.update(saved)
    return meta


def is_done(meta, args):
    """Whether there are as many tokens to train on as the command asks for, or as the texts have."""
    return meta['tokens'] >= args.tokens or meta.get('exhausted', False)


def share_done(meta, n_files, args):
    """The share of the work that is done, by its tokens or by its files: texts may end before --tokens."""
    return max(meta['tokens'] / args.tokens, meta['file'] / n_files)


def write_shards(paths, meta, args):
    """The loop: a shard, meta.json, a line. If it is killed, the same command goes on from meta.json."""
    if args.source == 'fineweb':
        paths, meta['revision'] = fineweb_files(args.name, meta.get('revision'))
    if args.source == 'pretokenized':
        paths, meta['revision'] = published_shards(args.name, meta.get('revision'))
    meta['done'] = False
    save(meta, f'{args.out}/meta.json')  # so that all shards are of the same commit

    if args.source == 'pretokenized':
        shards = download_shards(paths, meta, args)
    else:
        shards = make_shards(paths, meta, args)
    begin = time.monotonic()
    share_at_begin = share_done(meta, len(paths), args)
    for path, progress in shards:
        n = shard_length(path)
        is_val = meta['shards'] == 0
        meta['shards'] += 1
        if not is_val:
            meta['tokens'] += n
        meta.update(progress)
        meta['done'] = is_done(meta, args)
        save(meta, f'{args.out}/meta.json')

        line = f'{path}: {n:,} tokens ({args.tokenizer})'
        line += f'; {meta["tokens"]:,} of at most {args.tokens:,} to train on'
        share = share_done(meta, len(paths), args)
        if share > share_at_begin and not meta['done']:
            seconds = time.monotonic() - begin
            seconds_left = seconds * (1 - share) / (share - share_at_begin)
            line += f', {seconds_left / 60:.0f} min left'
        print(line, flush=True)

        # Duplicates are common in one's own texts, and the loss on text that was trained on is too low.
        if args.source == 'local' and not is_val:
            twice = stretches_in_both(read_shard(f'{args.out}/local_val_000000.bin'), read_shard(path))
            print(f'{twice} of 100 stretches of val are in {path} as well', flush=True)

        if meta['done']:
            break


def main(argv=None):
    """Makes the shards that the flags ask for, or those of them that are missing."""
    args = resolve_args(parser.parse_args(argv))

    # what the shards depend on; a hub is asked only if any are missing
    paths = []
    if args.source == 'local':
        paths = golden_order(local_files(args.files))
    if args.source == 'stdlib':
        paths = stdlib_files()
        if args.val_tokens == parser.get_default('val_tokens'):  # a small standard library: hold out half
            n_bytes = sum(os.path.getsize(path) for path in paths)
            args.val_tokens = min(args.val_tokens, n_bytes // 2)
    settings = settings_of_shards(args, paths)

    # what is there already
    meta = read_meta(settings, args)
    if not is_done(meta, args):
        with wait_for_folder(args.out):
            meta = read_meta(settings, args)  # while this process waited, another may have gone on
            if not is_done(meta, args):
                write_shards(paths, meta, args)
    print(f'{args.out} is done: {meta["tokens"]:,} tokens ({args.tokenizer}) to train on')


if __name__ == '__main__':
    main()
