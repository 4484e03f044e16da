"""
Turns text into token shards for train.py. The same command resumes where it was stopped.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # what the authors trained on: kjj0/fineweb100B-gpt2
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib   # needs no network
"""
import argparse
import glob
import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from oec import common, sources
from oec.common import check, lock_folder, number, parse_args, program, read_json, user_path, write_json
from oec.data import HEADER, MAGIC, SHARD, VERSION, read_shard, shard_length

NAMES = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}  # defaults of --name


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add = p.add_argument
    shard_size = number(1, most=2**31 - 1, whole=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'])
    add('--name', help='config of FineWeb (default sample-100BT), or dataset of pretokenized shards')
    add('--files', type=user_path, help='quoted glob of .txt, .jsonl or .parquet (column: text) files')
    add('--out', type=user_path, help='folder of the shards (default data/fineweb or data/stdlib)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes'], help='default gpt2; bytes works offline')
    add('--tokens', type=number(1, whole=True), default=13_200_000_000, help='to train on (default 13.2e9)')
    add('--val_tokens', type=shard_size, help='in the val shard (default 10.5e6, of stdlib at most half, '
        'of local files 1e5)')
    add('--shard_tokens', type=shard_size, default=100_000_000, help='in a train shard (default 1e8, 200 MB)')
    add('--workers', type=number(1, most=1024, whole=True), default=cores, help='tokenizing threads')
    return p


def write_shard(path, tokens):
    """Writes `tokens` (n,), n < 2^31, from 0 to 65535, as one shard, atomically."""
    header = np.array([MAGIC, VERSION, len(tokens)] + [0] * (HEADER - 3), '<i4')
    common.write_atomic(path, lambda file: file.writelines((header, np.ascontiguousarray(tokens, '<u2'))))


def load_encoder(name):
    """The function text -> its tokens, in parts, the first of which is end-of-text."""
    if name == 'bytes':
        return lambda text: [[256], np.frombuffer(text.encode(), np.uint8)]
    import tiktoken
    with sources.naming('--tokenizer=gpt2 is downloaded once', hub=True):
        gpt2 = tiktoken.get_encoding('gpt2')
    # A million spaces before a word overflow tiktoken's stack; GPT-2 splits them before the last one anyway.
    last_space = re.compile(r'(?=[ \t\n\r\xa0\u3000]\S)(?<=[ \t\n\r\xa0\u3000]{1000})')

    def encode(text):
        parts = last_space.split(text) if len(text) > 100_000 else [text]
        return [[gpt2.eot_token], *(gpt2.encode_to_numpy(part, disallowed_special=()) for part in parts)]
    return encode


def tokenize(texts, args):
    """(file, row, text) -> (file, row, tokens (n,) uint16). Threads suffice: both tokenizers free the GIL."""
    encode = load_encoder(args.tokenizer)
    with ThreadPoolExecutor(args.workers) as pool:
        while batch := list(itertools.islice(texts, 1024)):
            encoded = pool.map(encode, [text for _, _, text in batch])
            for (file, row, _), parts in zip(batch, encoded, strict=True):
                yield file, row, np.concatenate(parts, dtype=np.uint16, casting='unsafe')


def cut_shards(documents, args, meta):
    """Yields each shard (n,) and where the next one starts. The caller updates `meta` after each."""
    buffer = np.empty(max(args.val_tokens, args.shard_tokens), np.uint16)
    held = 0  # tokens in the buffer
    used = meta['used']  # tokens of the document that are in shards or in the buffer
    for file, row, tokens in documents:
        while used < len(tokens):
            size = min(args.shard_tokens, args.tokens - meta['tokens']) if meta['shards'] else args.val_tokens
            if held == size:
                yield buffer[:held], {'file': file, 'row': row, 'used': used}
                held = 0
                continue
            n = min(size - held, len(tokens) - used)
            buffer[held:held + n] = tokens[used:used + n]
            held, used = held + n, used + n
        used = 0
    check(meta['shards'], f'only {held:,} tokens, too few for --val_tokens={args.val_tokens} and training')
    yield buffer[:held], {'exhausted': True}


def fetch_shards(paths, args, meta):
    """Downloads published shards and yields each. The hub's client resumes one that was cut short."""
    from huggingface_hub import hf_hub_download
    for path in paths[meta['shards']:]:
        with sources.naming(path, hub=True):
            download = hf_hub_download(args.name, path, repo_type='dataset', revision=meta['revision'],
                                       local_dir=f'{args.out}/.download')
        shard_length(download)  # refuses what is not a whole shard before it stands where train.py looks
        shard = f'{args.out}/{os.path.basename(path)}'
        os.replace(download, shard)
        yield read_shard(shard), {'exhausted': path == paths[-1]}


def main(argv=None):
    args = parse_args(parser(), argv)
    local = args.source == 'local'
    ready = args.source == 'pretokenized'
    check(bool(args.files) == local and (args.out or not local),
          '--source=local needs --files="GLOB" and --out=FOLDER, and --files needs --source=local')
    check(args.name is None or args.source in NAMES, f'--source={args.source} has no --name')
    check(not ready or (args.tokenizer == 'gpt2' and args.val_tokens is None),
          '--source=pretokenized has GPT-2 tokens and a val shard: leave out --tokenizer and --val_tokens')
    args.out = args.out or ('data/stdlib' if args.source == 'stdlib' else 'data/fineweb')
    args.name = args.name or NAMES.get(args.source)
    if args.val_tokens is None:
        args.val_tokens = 100_000 if local else 10_500_000
        if args.source == 'stdlib':  # half of the text of a Python that comes without its tests
            size = sum(map(os.path.getsize, sources.stdlib_files()))
            args.val_tokens = min(args.val_tokens, size // 2)

    # what the shards depend on: the same command finds it in meta.json and resumes
    settings = {key: value for key, value in vars(args).items() if key not in ('out', 'tokens', 'workers')}
    settings['vocab_size'] = 50257 if args.tokenizer == 'gpt2' else 257
    meta = {**settings, 'shards': 0, 'tokens': 0, 'file': 0, 'row': 0, 'used': 0, 'exhausted': False}
    meta_path = f'{args.out}/meta.json'
    lengths = [shard_length(path) for path in glob.glob(f'{glob.escape(args.out)}/{SHARD.format("*")}')]
    if lengths or os.path.exists(meta_path):
        saved = read_json(meta_path)
        other = [f'{key}={saved.get(key)!r}' for key in settings if saved.get(key) != settings[key]]
        check(not other, f'{meta_path} was made with {", ".join(other)}; choose another --out')
        check(meta.keys() <= saved.keys() and 0 <= len(lengths) - saved['shards'] <= 1,
              f'{meta_path} does not fit the shards; choose another --out')
        meta = saved
    if meta['exhausted'] or meta['tokens'] >= args.tokens:
        print(f'{args.out} is done: {meta["tokens"]:,} training tokens, {meta["shards"]} shards')
        return

    if ready:
        meta['revision'], paths = sources.published_shards(args.name, meta.get('revision'))
        shards = fetch_shards(paths, args, meta)
    else:
        if local:
            paths = sources.local_files(args.files)
            stats = [[os.path.getsize(path), os.path.getmtime(path)] for path in paths]
            check(meta.setdefault('stats', stats) == stats, '--files have changed; choose another --out')
        elif args.source == 'stdlib':
            paths = sources.stdlib_files()
        else:
            paths = sources.fineweb_files(args.name, meta.get('revision'))
            meta['revision'] = re.search('@(.*?)/', paths[0])[1]  # the commit, for all that is read later
        documents = tokenize(sources.read_texts(paths, meta['file'], meta['row']), args)
        shards = cut_shards(documents, args, meta)
        if meta['shards'] == 0:  # what cannot be read, or is too short, is found before anything is written
            shards = itertools.chain([next(shards)], shards)

    with lock_folder(args.out):
        write_json(meta_path, meta)
        n_shards = 1 + math.ceil(args.tokens / args.shard_tokens)
        for shard, position in tqdm(shards, 'shards', n_shards, initial=meta['shards']):
            if meta['shards'] > 0:
                meta['tokens'] += len(shard)
            if not ready:
                name = f'train_{meta["shards"] - 1:06d}' if meta['shards'] else 'val_000000'
                write_shard(f'{args.out}/{args.source}_{name}.bin', shard)
            meta.update(position, shards=meta['shards'] + 1)
            write_json(meta_path, meta)
            if meta['tokens'] >= args.tokens:
                break
    print(f'{args.out}: {meta["tokens"]:,} training tokens, {meta["shards"]} shards')


if __name__ == '__main__':
    program(main)
