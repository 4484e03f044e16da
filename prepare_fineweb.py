"""
Turns text into token shards for train.py. Run the same command again to resume.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # or as many of the authors' tokens
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib  # no network

The first command downloads some 40 GB of text, from all over FineWeb's sample-100BT, and tokenizes
it, in an hour or two of CPU time. The second one downloads 26 GB of tokens: shards from all over
kjj0/fineweb100B-gpt2, on which the authors trained.

It writes <source>_val_000000.bin, which is held out, then <source>_train_000000.bin and so on, in
the format of train.py. meta.json says how the shards were made, how far they are, and whether all
that the command asks for is there ("done"). A larger --tokens adds train shards to a folder, and
leaves val as it is: the runs before can still be measured, but not resumed.
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
    help='bytes and chars need no download; chars is for --source=stdlib alone')
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


def match(pattern):
    """The paths that match a glob. Its ** follows links to folders, but enters none twice."""
    if os.path.basename(pattern) == '**':  # all files
        pattern += '/*'
    top, stars, rest = pattern.partition('**/')
    if not stars:
        return set(glob.glob(pattern))

    paths = set()
    entered = set()
    folders = sorted(glob.glob(top)) if top else ['']
    for folder in folders:  # the list grows
        real = os.path.realpath(folder)
        if real not in entered:
            entered.add(real)
            folder = glob.escape(folder)
            paths |= match(folder + rest)
            folders += sorted(glob.glob(f'{folder}*/'))
    return paths


def local_files(pattern):
    """The files that match a glob."""
    paths = [path for path in match(pattern) if os.path.isfile(path)]
    check(paths, f'no file matches {pattern}')
    for path in paths:
        known = path.endswith(('.txt', '.md', '.rst', '.jsonl', '.parquet'))
        check(known, f'{path} is not a .txt, .md, .rst, .jsonl or .parquet file')
    return golden_order(sorted(paths))


def fineweb_files(name):
    """The parquet files of a config of FineWeb: hf://datasets/HuggingFaceFW/fineweb@COMMIT/..."""
    from datasets import load_dataset_builder  # takes a second
    builder = load_dataset_builder('HuggingFaceFW/fineweb', name)
    return golden_order(sorted(builder.config.data_files['train']))


def published_shards(name, commit):
    """The shards of a dataset, one for val and then those to train on, and their commit."""
    from huggingface_hub import HfApi
    info = HfApi().dataset_info(name, revision=commit)  # None: the newest
    files = [file.rfilename for file in info.siblings]
    val = sorted(fnmatch.filter(files, SHARD.format('val')))
    train = sorted(fnmatch.filter(files, SHARD.format('train')))
    check(val and train, f'--name={name} has no *_val_000000.bin, or none to train on')
    return [val[0], *golden_order(train)], info.sha


def read_file(path):
    """Yields the documents of a file: its rows, its lines, or what <|endoftext|> separates."""
    if path.endswith('.parquet'):
        with fsspec.open(path, block_size=2**23) as f:  # the hub's client retries each block
            batches = pyarrow.parquet.ParquetFile(f).iter_batches(256, columns=['text'])
            for batch in batches:
                yield from batch['text'].to_pylist()
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as f:
            for line in f:
                if line.strip():
                    yield json.loads(line)['text']
    elif path.endswith('.py'):  # some of Python's own tests are not UTF-8, on purpose
        yield Path(path).read_text(encoding='utf-8', errors='replace')
    else:
        text = Path(path).read_bytes().decode('utf-8-sig')  # with its line ends as they are
        yield from text.split('<|endoftext|>')


def read_texts(paths):
    """Yields the documents of some files that are not empty."""
    for path in paths:
        n = 0  # documents that have been read
        try:
            for text in read_file(path):
                if text:
                    yield text.encode(errors='replace').decode()  # half a surrogate pair: a ?
                n += 1
        except Exception as error:  # of many kinds, which do not name the file
            check(False, f'{path}, document {n + 1}: {type(error).__name__}: {error}')


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


BATCH = 2**23  # characters that are tokenized at a time, by all threads


def batches_of(texts):
    """Yields lists of documents, with BATCH characters each or a little more."""
    batch = []
    n = 0
    for text in texts:
        batch.append(text)
        n += len(text)
        if n >= BATCH:
            yield batch
            batch = []
            n = 0
    if batch:
        yield batch


def tokenize(texts, encode, workers):
    """Yields the tokens (n,) uint16 of documents, a batch of them at a time."""
    with ThreadPoolExecutor(workers) as pool:  # the tokenizers free the GIL
        for batch in batches_of(texts):
            yield np.concatenate(list(pool.map(encode, batch)))


# -------- shards
def without_copies(texts):
    """Yields each text once: of one that is held out, no copy should be trained on."""
    known = set()
    for text in texts:
        if hash(text) not in known:
            known.add(hash(text))
            yield text


def hold_out(batches, args):
    """
    Takes val from the tokens of the first group: the first ones, or of local files the first 5,000
    of every 50,000, as one's own files are often sorted by topic or date. Val is complete before
    the first train shard is written, and so it is the same whatever --tokens.

    Returns val (n,), and an iterator over all other tokens.
    """
    is_local = args.source == 'local'
    end = 10 * args.val_tokens if is_local else args.val_tokens  # no later token is held out
    val = [np.zeros(0, np.uint16)]
    rest = []
    n = 0
    for tokens in batches:
        numbers = np.arange(n, n + len(tokens))
        held_out = numbers < end
        if is_local:
            held_out &= numbers % 50_000 < 5_000
        val.append(tokens[held_out])
        rest.append(tokens[~held_out])
        n += len(tokens)
        if n > end:
            break
    val = np.concatenate(val)
    check(n > len(val), f'--val_tokens={args.val_tokens} leaves nothing to train on')
    return val, itertools.chain(rest, batches)


def read_tokens(groups, encode, meta, args):
    """
    Yields (group, n, tokens): the next tokens to train on that are in no shard yet, and n, how
    many of their group have been read. With the first group, writes the val shard too.
    """
    skip = meta['skip']
    for group in range(meta['group'], len(groups)):
        texts = read_texts(groups[group])
        if args.source == 'local':
            texts = without_copies(texts)
        batches = tokenize(texts, encode, args.workers)
        if group == 0:
            val, batches = hold_out(batches, args)
            write_shard(val, f'{args.out}/{args.source}_val_000000.bin')

        n = 0
        for tokens in batches:
            n += len(tokens)
            yield group, n, tokens[skip:]
            skip = max(0, skip - len(tokens))


def write_shards(groups, encode, meta, args):
    """
    Writes the missing shards of the text in `groups`, lists of files: FineWeb has a group for each
    file, others have one of all. meta.json has the group in which the next shard begins, and how
    many of the group's tokens are in shards. After a kill that group is tokenized from its start.
    """
    total = args.tokens if args.source == 'fineweb' else None  # of others it may be far too many
    bar = tqdm(initial=meta['tokens'], total=total, unit=' tokens', unit_scale=True,
               disable=None)  # None: no bar in a file
    parts = []  # of the next shard
    n = 0  # tokens in these parts
    size = min(args.shard_tokens, args.tokens - meta['tokens'])
    for group, n_group, tokens in read_tokens(groups, encode, meta, args):
        bar.update(len(tokens))
        parts.append(tokens)
        n += len(tokens)
        while n >= size:
            whole = np.concatenate(parts)
            parts = [whole[size:]]
            n -= size
            meta.update(group=group, skip=n_group - n)
            add_shard(whole[:size], meta, args)
            size = min(args.shard_tokens, args.tokens - meta['tokens'])
            if size == 0:
                return

    meta['exhausted'] = True  # the texts end before --tokens
    if n > 0:
        add_shard(np.concatenate(parts), meta, args)


def add_shard(tokens, meta, args):
    """Writes a train shard, and then how far the shards are."""
    write_shard(tokens, f'{args.out}/{args.source}_train_{meta["shards"] - 1:06d}.bin')
    meta['shards'] += 1
    meta['tokens'] += len(tokens)
    save(meta, f'{args.out}/meta.json')


def write_shard(tokens, path):
    """Writes tokens (n,) uint16 in the format of train.py."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(np.concatenate([header.view('<u2'), tokens]).tobytes(), path)


def download_shards(names, meta, args):
    """Downloads published shards: one for val, and as many to train on as --tokens needs."""
    from huggingface_hub import hf_hub_download
    meta.update(shards=0, tokens=0)
    for name in names:
        path = f'{args.out}/{os.path.basename(name)}'
        if not os.path.exists(path):
            # the client resumes a download that was cut short
            whole = hf_hub_download(args.name, name, repo_type='dataset',
                                    revision=meta['revision'], local_dir=f'{args.out}/.download')
            shard_length(whole)  # looked at before it stands where train.py looks
            os.replace(whole, path)
        if meta['shards'] > 0:  # the first one is val
            meta['tokens'] += shard_length(path)
        meta['shards'] += 1
        if meta['tokens'] >= args.tokens:
            return
    meta['exhausted'] = True


def main(argv=None):
    """Makes the shards that the flags ask for, or those of them that are missing."""
    args = parser.parse_args(argv)
    check((args.source == 'local') == bool(args.files), '--source=local and --files go together')
    check(args.source != 'pretokenized' or args.tokenizer == 'gpt2',
          '--source=pretokenized has GPT-2 tokens')
    check(args.source == 'stdlib' or args.tokenizer != 'chars',
          '--tokenizer=chars is for --source=stdlib: of other texts it loses many characters')
    check(args.tokens > 0 and 0 < args.val_tokens < 2**31 and 0 < args.shard_tokens < 2**31,
          '--tokens, --val_tokens and --shard_tokens should be positive, the last two below 2^31')
    default_name, default_out = DEFAULTS[args.source]
    args.name = args.name or default_name
    args.out = args.out or default_out

    if args.source in ('local', 'stdlib'):
        paths = local_files(args.files) if args.files else stdlib_files()
        groups = [paths]
        n_bytes = sum(os.path.getsize(path) for path in paths)
    if args.source == 'local':
        args.bytes = n_bytes
    if args.source == 'stdlib':
        args.val_tokens = min(args.val_tokens, n_bytes // 2)  # a slim Python is small

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

        if meta['tokens'] < args.tokens and not meta.get('exhausted'):
            try:  # what needs the network
                if args.source == 'pretokenized':
                    names, meta['revision'] = published_shards(args.name, meta.get('revision'))
                else:
                    check('group' in meta, f'{args.out} was begun by an older version; delete it')
                    encode = load_encoder(args.tokenizer)
                if args.source == 'fineweb':
                    meta['paths'] = meta.get('paths') or fineweb_files(args.name)  # of one commit
                    groups = [[path] for path in meta['paths']]
            except Exception as error:  # of many kinds
                check(False, f'loading failed: {error!r}; without a network, use '
                             '--source=stdlib --tokenizer=bytes')

            meta['done'] = False
            save(meta, meta_path)
            if args.source == 'pretokenized':
                download_shards(names, meta, args)
            else:
                write_shards(groups, encode, meta, args)
        meta['done'] = True
        save(meta, meta_path)
    print(f'{args.out} is done: {meta["tokens"]:,} tokens ({args.tokenizer}) to train on')


if __name__ == '__main__':
    main()
