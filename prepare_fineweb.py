"""
Turns text into token shards for train.py. Run the same command again to resume.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # or as many of the authors' tokens
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib  # no network

The first command downloads some 40 GB of text, from all over FineWeb's sample-100BT, and tokenizes
it, in an hour or two of CPU time. The second one downloads 26 GB of tokens, from all over
kjj0/fineweb100B-gpt2, on which the authors trained.

A folder gets *_val_000000.bin, which is held out, then *_train_000000.bin and so on, and meta.json:
how they were made, what is there, and whether that is all. A larger --tokens adds train shards, and
leaves val as it is. A text that occurs more than once in local files is read once.
"""
import argparse
import glob
import hashlib
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet
import tiktoken
from tqdm import tqdm

from train import SHARD, Windows, check, integer, lock_folder, read_json, save

parser = argparse.ArgumentParser(usage='%(prog)s [--flag=value ...]', allow_abbrev=False,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'])
add('--name', default='sample-100BT', help='config of FineWeb')
add('--files', type=os.path.expanduser, help='of --source=local, a quoted glob: .txt, .md, .rst, '
    '.jsonl or .parquet (with a field "text")')
add('--out', type=os.path.expanduser, help='folder of the shards (%(default)s: in data/)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'chars'],
    help='bytes and chars need no download; chars is for --source=stdlib alone')
add('--tokens', type=integer, default=13_200_000_000, help='tokens to train on, at most')
add('--val_tokens', type=integer, default=10_500_000, help='tokens to hold out, at most: the '
    'first ones, or of local files every tenth document')
add('--shard_tokens', type=integer, default=100_000_000, help='tokens in a train shard, at most')


# -------- text
def golden_order(items):
    """The items in an order in which the first n, for any n, are spread evenly over all."""
    # a command may need only some of the files, and neighbours in a list of files are often alike
    golden_ratio = (5**0.5 - 1) / 2
    order = sorted(range(len(items)), key=lambda i: i * golden_ratio % 1)
    return [items[i] for i in order]


def fineweb_files(name):
    """The parquet files of a config of FineWeb: hf://datasets/HuggingFaceFW/fineweb@COMMIT/..."""
    from datasets import load_dataset_builder  # takes a second
    builder = load_dataset_builder('HuggingFaceFW/fineweb', name)
    return golden_order(sorted(builder.config.data_files['train']))


def local_files(pattern):
    """The files that match a glob."""
    known = ('.txt', '.md', '.rst', '.jsonl', '.parquet')
    paths = [path for path in glob.glob(pattern, recursive=True) if path.endswith(known)]
    check(paths, f'no {", ".join(known)} file matches {pattern}')
    return golden_order(sorted(paths))


def stdlib_files():
    """The standard library, shuffled by a hash of the files' names, so that val is like train."""
    root = os.path.dirname(os.__file__)
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names = [name for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [f'{root}/{name}' for name in names]


def read_file(path):
    """Yields the documents of a file. A long text is cut into several, as val may need a part."""
    if path.endswith('.parquet'):
        with fsspec.open(path, block_size=2**23) as f:  # the hub's client retries each block
            for rows in pyarrow.parquet.ParquetFile(f).iter_batches(256, columns=['text']):
                yield from rows['text'].to_pylist()
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as f:
            for line in filter(str.strip, f):  # without empty lines
                yield json.loads(line)['text']
    elif path.endswith('.py'):  # some of Python's own tests are not UTF-8, on purpose
        yield Path(path).read_text(encoding='utf-8', errors='replace')
    else:
        with open(path, encoding='utf-8-sig', newline='') as f:  # '' keeps the line ends
            while text := f.read(2**20) + f.readline():
                for document in text.split('<|endoftext|>'):
                    for start in range(0, len(document), 10_000):
                        yield document[start:start + 10_000]


def read_texts(paths):
    """Yields the documents of some files that are not empty."""
    for path in paths:
        try:
            yield from filter(None, read_file(path))
        except Exception as error:  # of many kinds, which do not name the file
            check(False, f'{path}: {error!r}')


def local_texts(paths, for_val, meta, args):
    """
    Yields every tenth document of local files, for val, or else the others: one's own files are
    often sorted by topic. A text that occurs again is left out and counted.
    """
    # fewer of a large text, so that val is from all of it. A GPT-2 token has some 4 bytes
    every = max(10, args.bytes // (4 * args.val_tokens))
    known = set()
    meta['copies'] = 0
    for text in read_texts(paths):
        number = len(known)
        known.add(hash(text))
        if len(known) == number:
            meta['copies'] += 1
        elif for_val == (number % every == 0):
            yield text


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
        text = text.encode(errors='replace').decode()  # half of a surrogate pair becomes a ?
        if name == 'gpt2':
            tokens = gpt2.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        else:
            tokens = ids[np.frombuffer(text.encode(), np.uint8)]
        return np.append(eot, tokens)
    return encode


def tokenize(texts, encode, bar):
    """Yields the tokens (n,) uint16 of documents, of 512 at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the tokenizers free the GIL
        while batch := list(islice(texts, 512)):
            tokens = np.concatenate(list(pool.map(encode, batch)))
            bar.update(len(tokens))
            yield tokens


def take(n, rest, batches):
    """The first n tokens of `rest` and then of `batches`, fewer at their end, and a new rest."""
    parts = [rest]
    while sum(map(len, parts)) < n:
        tokens = next(batches, None)
        if tokens is None:
            break
        parts.append(tokens)
    whole = np.concatenate(parts)
    return whole[:n], whole[n:]


# -------- shards
def write_shard(tokens, path):
    """Writes tokens (n,) uint16 in the format of train.py."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(np.concatenate([header.view('<u2'), tokens]).tobytes(), path)


def write_shards(groups, encode, meta, args):
    """
    Writes the shards, val first. meta.json has the group of texts that was begun last, and how many
    train shards and tokens come before it: after a kill, all shards of that group are made again.
    """
    n_shards = meta['shards_before']
    n_tokens = meta['tokens_before']
    total = args.tokens if args.source == 'fineweb' else None  # of others it may be far too many
    bar = tqdm(initial=n_tokens, total=total, unit=' tokens', unit_scale=True, disable=None)

    for i in range(meta['group'], len(groups)):
        meta.update(group=i, shards_before=n_shards, tokens_before=n_tokens)
        save(meta, f'{args.out}/meta.json')
        batches = tokenize(groups[i], encode, bar)
        rest = np.zeros(0, np.uint16)
        if i == 0:
            val, rest = take(args.val_tokens, rest, batches)
            write_shard(val, f'{args.out}/{args.source}_val_000000.bin')

        while n_tokens < args.tokens:
            n = min(args.shard_tokens, args.tokens - n_tokens)
            tokens, rest = take(n, rest, batches)
            if len(tokens) == 0:
                break
            write_shard(tokens, f'{args.out}/{args.source}_train_{n_shards:06d}.bin')
            n_shards += 1
            n_tokens += len(tokens)
        if n_tokens >= args.tokens:
            break
    check(n_tokens, f'--val_tokens={args.val_tokens} leaves nothing to train on')


def download_shards(args):
    """Downloads the authors' shards: one for val, and as many to train on as --tokens needs."""
    from huggingface_hub import hf_hub_download
    numbers = golden_order(range(1, 1031))[:math.ceil(args.tokens / 1e8)]  # of 1e8 tokens each
    for name in ['val_000000', *(f'train_{i:06d}' for i in numbers)]:
        name = f'fineweb_{name}.bin'
        if not os.path.exists(f'{args.out}/{name}'):  # the client resumes what was cut short
            hf_hub_download('kjj0/fineweb100B-gpt2', name, repo_type='dataset', local_dir=args.out)


def prepare(paths, meta, args):
    """Downloads the shards, or makes them of texts."""
    try:  # what needs the network
        if args.source == 'pretokenized':
            download_shards(args)
            return
        encode = load_encoder(args.tokenizer)
        if args.source == 'fineweb' and 'paths' not in meta:
            meta['paths'] = fineweb_files(args.name)  # of one commit, after a kill too
    except Exception as error:  # of many kinds
        check(False, f'loading failed: {error!r}; run this again to go on or, without a network, '
                     'use --source=stdlib --tokenizer=bytes')

    groups = [read_texts(paths)]
    if args.source == 'local':
        groups = [local_texts(paths, for_val, meta, args) for for_val in (True, False)]
    if args.source == 'fineweb':  # a group for each file, so that a kill costs minutes
        groups = [read_texts([path]) for path in meta['paths']]
    write_shards(groups, encode, meta, args)


def main(argv=None):
    """Makes the shards that the flags ask for, or those of them that are missing."""
    args = parser.parse_args(argv)
    check((args.source == 'local') == bool(args.files), '--source=local and --files go together')
    check(args.source == 'stdlib' or args.tokenizer != 'chars',
          '--tokenizer=chars is for --source=stdlib: of other texts it loses many characters')
    folder = 'fineweb' if args.source == 'pretokenized' else args.source
    args.out = args.out or f'data/{folder}'

    # the files at hand, and the settings on which the shards depend
    paths = []
    if args.source == 'local':
        paths = local_files(args.files)
        args.bytes = sum(map(os.path.getsize, paths))
    if args.source == 'stdlib':
        paths = stdlib_files()
        half = sum(map(os.path.getsize, paths)) // 2
        args.val_tokens = min(args.val_tokens, half)  # a slim Python is small
    settings = {k: v for k, v in vars(args).items() if k not in ('out', 'tokens')}

    with lock_folder(args.out):
        meta_path = f'{args.out}/meta.json'
        meta = {**settings, 'vocab_size': VOCAB_SIZES[args.tokenizer], 'tokens': 0, 'done': False,
                'group': 0, 'shards_before': 0, 'tokens_before': 0}
        if glob.glob(SHARD.format('*'), root_dir=args.out):
            meta = read_json(meta_path)
            was = {k: meta.get(k) for k in settings if meta.get(k) != settings[k]}
            check(not was, f'{args.out} has shards of {was}; delete it or choose another --out')

        if not meta['done'] or args.tokens > meta['tokens']:
            meta.update(tokens=args.tokens, done=False)
            save(meta, meta_path)
            prepare(paths, meta, args)
        meta['train_tokens'] = Windows(args.out, 'train', 1).n_tokens
        meta['done'] = True
        save(meta, meta_path)
    print(f'{args.out} has {meta["train_tokens"]:,} tokens to train on; '
          f'{meta.get("copies", 0):,} copies of documents were left out')


if __name__ == '__main__':
    main()
