"""
Turns text into token shards for train.py. Run the same command again to resume.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # the authors' data: kjj0/fineweb100B-gpt2
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib  # no network

It writes <source>_val_000000.bin, which is held out, then <source>_train_000000.bin and so on, in
the format of train.py. meta.json says how the shards were made, how far they are, and whether all
that the command asks for is there ("done").
"""
import argparse
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet
import tiktoken
from tqdm import tqdm

from train import SHARD, check, integer, lock_folder, read_json, save, shard_length

# the defaults of --name and --out
DEFAULTS = {
    'fineweb': ('sample-100BT', 'data/fineweb'),
    'pretokenized': ('kjj0/fineweb100B-gpt2', 'data/fineweb'),
    'local': (None, 'data/local'),
    'stdlib': (None, 'data/stdlib')}

parser = argparse.ArgumentParser(usage='%(prog)s [--flag=value ...]', allow_abbrev=False,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add('--source', default='fineweb', choices=DEFAULTS, help='which text')
add('--name', help="config of FineWeb, or a dataset of shards (%(default)s: see DEFAULTS)")
add('--files', type=os.path.expanduser, help='of --source=local, a quoted glob: .txt, .md, .rst, '
    '.jsonl or .parquet (with a field "text")')
add('--out', type=os.path.expanduser, help='folder of the shards (%(default)s: in data/)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'chars'],
    help='bytes and chars need no download')
add('--tokens', type=integer, default=13_200_000_000, help='tokens to train on, at most')
add('--val_tokens', type=integer, default=10_500_000, help='tokens held out: the first ones; of '
    'local files the first 5,000 of every 50,000, up to about this many')
add('--shard_tokens', type=integer, default=100_000_000, help='tokens in a train shard')
add('--workers', type=integer, default=os.cpu_count(), help='threads that tokenize')


# -------- files
def golden_order(items):
    """
    The items in another order: the first n of them, for any n, are spread evenly over all. A
    command needs only some of the files, and neighbours in a list of files are often alike.
    """
    golden_ratio = (5**0.5 - 1) / 2
    order = sorted(range(len(items)), key=lambda i: i * golden_ratio % 1)
    return [items[i] for i in order]


def stdlib_files():
    """The standard library, shuffled by a hash of the files' names, so that val is like train."""
    root = os.path.dirname(os.__file__)
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names = [name for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [f'{root}/{name}' for name in names]


def local_files(pattern):
    """The files that match a glob."""
    paths = glob.glob(pattern, recursive=True)
    paths = {path for path in paths if os.path.isfile(path)}  # a second ** finds all files again
    check(paths, f'no file matches {pattern}')
    return golden_order(sorted(paths))


def fineweb_files(name):
    """The parquet files of a config of FineWeb: hf://datasets/HuggingFaceFW/fineweb@COMMIT/..."""
    from datasets import load_dataset_builder  # takes a second
    builder = load_dataset_builder('HuggingFaceFW/fineweb', name)
    return golden_order(sorted(builder.config.data_files['train']))


def read_file(path):
    """Yields the documents of a file: its rows, its lines, or what <|endoftext|> separates."""
    suffix = Path(path).suffix
    if suffix == '.parquet':
        with fsspec.open(path, block_size=2**23) as f:  # the hub's client retries each block
            batches = pyarrow.parquet.ParquetFile(f).iter_batches(256, columns=['text'])
            for batch in batches:
                yield from batch['text'].to_pylist()
    elif suffix == '.jsonl':
        with open(path, encoding='utf-8-sig') as f:
            for line in f:
                text = json.loads(line)['text']
                yield text.encode(errors='replace').decode()  # half a surrogate pair becomes a ?
    elif suffix == '.py':  # some of Python's own tests are not UTF-8, on purpose
        yield Path(path).read_text(encoding='utf-8', errors='replace')
    else:
        check(suffix in ('.txt', '.md', '.rst'), f'{path} is not a text, .jsonl or .parquet file')
        text = Path(path).read_bytes().decode('utf-8-sig')
        yield from text.split('<|endoftext|>')


# -------- tokens
VOCAB_SIZES = {'gpt2': 50257, 'bytes': 257, 'chars': 64}  # end-of-text is the last one
# `bytes` has the bytes of UTF-8. `chars` has the 63 most frequent characters of Python's standard
# library, in this order, and end-of-text for every other byte as well.
CHARS = b' estaronil\nfcd._()pu,\'mh"g=b:0xEyTwk1-I#vAN2RLS\\Cq][OPFD3>M45*U'


def load_encoder(name):
    """The function text -> its tokens (n,) uint16, the first of which is end-of-text."""
    eot = np.uint16(VOCAB_SIZES[name] - 1)
    ids = np.arange(256, dtype=np.uint16)  # of each byte
    if name == 'chars':
        ids[:] = eot
        ids[list(CHARS)] = range(len(CHARS))
    if name == 'gpt2':
        gpt2 = tiktoken.get_encoding(name)

    def encode(text):
        if name == 'gpt2':
            tokens = gpt2.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        else:
            tokens = ids[np.frombuffer(text.encode(), np.uint8)]
        return np.append(eot, tokens)
    return encode


def tokenize(texts, encode, workers):
    """Yields the tokens (n,) uint16 of documents, 1,024 documents at a time."""
    with ThreadPoolExecutor(workers) as pool:  # the tokenizers free the GIL
        while batch := list(itertools.islice(texts, 1024)):
            yield np.concatenate(list(pool.map(encode, batch)))


# -------- shards
def read_texts(paths):
    """Yields the documents of some files that are not empty."""
    for path in paths:
        for text in read_file(path):
            if text:
                yield text


def without_copies(texts):
    """Yields each text once: of one that is held out, no copy should be trained on."""
    known = set()
    for text in texts:
        if hash(text) not in known:
            known.add(hash(text))
            yield text


def hold_out(batches, val, args):
    """
    Yields the tokens of the first group that are to be trained on, and appends the rest to `val`:
    the first ones, or of local files the first 5,000 of every 50,000. So val has something of
    everything, although one's own files are often sorted by topic or date.
    """
    n = 0
    for tokens in batches:
        numbers = np.arange(n, n + len(tokens))
        n += len(tokens)
        if args.source == 'local':
            held_out = (numbers % 50_000 < 5_000) & (numbers < 10 * args.val_tokens)
        else:
            held_out = numbers < args.val_tokens
        val.append(tokens[held_out])
        yield tokens[~held_out]


def read_tokens(groups, meta, val, args):
    """
    Yields (group, n, tokens): the tokens to train on that follow those in the shards, some at a
    time, and how many the group has up to their end. Appends what is held out to `val`.
    """
    encode = load_encoder(args.tokenizer)
    skip = meta['skip']
    for group in range(meta['group'], len(groups)):
        texts = read_texts(groups[group])
        if args.source == 'local':
            texts = without_copies(texts)
        batches = tokenize(texts, encode, args.workers)
        if group == 0:
            batches = hold_out(batches, val, args)

        n = 0
        for tokens in batches:
            n += len(tokens)
            yield group, n, tokens[skip:]
            skip = max(0, skip - len(tokens))


def write_shards(groups, meta, args):
    """
    Writes the missing shards of the text in `groups`, lists of files: FineWeb has a group for each
    file, others have one of all. meta.json has the group in which the next shard begins, and how
    many tokens of it are in earlier shards. After a kill, that group is tokenized from its start.
    """
    total = args.tokens if args.source == 'fineweb' else None  # of others it may be far too many
    bar = tqdm(initial=meta['tokens'], total=total, unit=' tokens', unit_scale=True,
               disable=None)  # None: no bar in a file
    val = []
    parts = []  # of the next train shard
    n = 0  # tokens in these parts
    size = min(args.shard_tokens, args.tokens - meta['tokens'])
    for group, n_group, tokens in read_tokens(groups, meta, val, args):
        bar.update(len(tokens))
        parts.append(tokens)
        n += len(tokens)
        while n >= size:
            whole = np.concatenate(parts)
            parts = [whole[size:]]
            n -= size
            meta.update(group=group, skip=n_group - n)
            add_shard(whole[:size], val, meta, args)
            size = min(args.shard_tokens, args.tokens - meta['tokens'])
            if size == 0:
                return

    if n > 0:  # the texts end before --tokens
        meta.update(group=len(groups), skip=0)
        add_shard(np.concatenate(parts), val, meta, args)


def add_shard(tokens, val, meta, args):
    """Writes a train shard, val as far as it has been read, and then how far the shards are."""
    path = f'{args.out}/{args.source}'
    write_shard(tokens, f'{path}_train_{meta["shards"] - 1:06d}.bin')
    if val:
        write_shard(np.concatenate(val), f'{path}_val_000000.bin')
    meta['shards'] += 1
    meta['tokens'] += len(tokens)
    save(meta, f'{args.out}/meta.json')


def write_shard(tokens, path):
    """Writes tokens (n,) uint16 in the format of train.py."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(np.concatenate([header.view('<u2'), tokens]).tobytes(), path)


def download_shards(meta, args):
    """Downloads published shards: one for val, and as many as --tokens needs."""
    from huggingface_hub import HfApi, hf_hub_download
    info = HfApi().dataset_info(args.name, revision=meta.get('revision'))
    meta['revision'] = info.sha  # all shards are of one commit
    save(meta, f'{args.out}/meta.json')
    files = [file.rfilename for file in info.siblings]
    val = sorted(fnmatch.filter(files, SHARD.format('val')))
    train = sorted(fnmatch.filter(files, SHARD.format('train')))

    meta.update(shards=0, tokens=0)
    for name in [val[0], *golden_order(train)]:
        # at once if it is there; a download that was cut short is resumed
        path = hf_hub_download(args.name, name, repo_type='dataset', revision=info.sha,
                               local_dir=args.out)
        n = shard_length(path)
        if name != val[0]:
            meta['tokens'] += n
        meta['shards'] += 1
        if meta['tokens'] >= args.tokens:
            break


def main(argv=None):
    """Makes the shards that the flags ask for, or those of them that are missing."""
    args = parser.parse_args(argv)
    check((args.source == 'local') == bool(args.files), '--source=local and --files go together')
    check(args.source != 'pretokenized' or args.tokenizer == 'gpt2',
          '--source=pretokenized has GPT-2 tokens')
    check(args.tokens > 0 and 0 < args.val_tokens < 2**31 and 0 < args.shard_tokens < 2**31,
          '--tokens, --val_tokens and --shard_tokens should be positive, the last two below 2^31')
    default_name, default_out = DEFAULTS[args.source]
    args.name = args.name or default_name
    args.out = args.out or default_out

    if args.source in ('local', 'stdlib'):
        groups = [local_files(args.files) if args.files else stdlib_files()]
        args.bytes = sum(os.path.getsize(path) for path in groups[0])
    if args.source == 'stdlib':
        args.val_tokens = min(args.val_tokens, args.bytes // 2)  # a slim Python is small

    # what the shards depend on
    settings = dict(vars(args), vocab_size=VOCAB_SIZES[args.tokenizer])
    for name in ('out', 'tokens', 'workers'):
        del settings[name]

    with lock_folder(args.out):
        # what is there already; meta['shards'] counts val
        meta = {**settings, 'shards': 1, 'tokens': 0, 'group': 0, 'skip': 0}
        meta_path = f'{args.out}/meta.json'
        if glob.glob(SHARD.format('*'), root_dir=args.out):
            saved = read_json(meta_path)
            others = [name for name in settings if saved.get(name) != settings[name]]
            was = ', '.join(f'{name}={saved.get(name)!r}' for name in others)
            check(not others, f'{meta_path} was made with {was}; choose another --out')
            meta = saved

        if meta['tokens'] < args.tokens:
            meta['done'] = False
            if args.source == 'fineweb':
                meta['paths'] = meta.get('paths') or fineweb_files(args.name)  # of one commit
                groups = [[path] for path in meta['paths']]
            save(meta, meta_path)
            if args.source == 'pretokenized':
                download_shards(meta, args)
            else:
                write_shards(groups, meta, args)
            check(meta['tokens'] > 0, f'--val_tokens={args.val_tokens} leaves nothing to train on')
            meta['done'] = True
            save(meta, meta_path)
    print(f'{args.out} is done: {meta["tokens"]:,} tokens ({args.tokenizer}) to train on')


if __name__ == '__main__':
    main()
