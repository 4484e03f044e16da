"""
Turns text into token shards: FineWeb, shards that others published, local files, or Python's own
standard library, which needs no network and is what the demo and the proxy grid use.

    python prepare_fineweb.py                           # FineWeb sample-100BT, 13.2B GPT-2 tokens, 27 GB
    python prepare_fineweb.py --tokens=1e9              # the first billion of these
    python prepare_fineweb.py --source=local --files='texts/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib

Every document starts with the end-of-text token. The val shard is written first, every shard whole or not at
all, and meta.json says where in the text the next one starts: the same command resumes where it was stopped.
"""
import argparse
import collections
import glob
import itertools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from oec import sources
from oec.common import check, lock_folder, number, parse_args, program, read_json, write_json
from oec.data import read_shard, write_shard

NAMES = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}  # defaults of --name
COUNTS = ('shards', 'val_tokens', 'tokens', 'file', 'row', 'used')  # in meta.json


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, shard_size = p.add_argument, number(1, most=2**31 - 1, whole=True)
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'])
    add('--name', help='of FineWeb the config, such as sample-10BT (default sample-100BT); of pretokenized '
                       f'shards the dataset (default {NAMES["pretokenized"]}, the authors\' data)')
    add('--files', help='a quoted glob of .txt, .jsonl or .parquet files (column: text) for --source=local')
    add('--out', help='folder of the shards (default data/fineweb; --source=local has none)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes'],
        help='gpt2: by tiktoken, which downloads it once (default); bytes: UTF-8, needs no download')
    add('--tokens', type=number(1, whole=True), default=13_200_000_000, help='to train on (default 13.2e9)')
    add('--val_tokens', type=shard_size, dest='requested_val_tokens', metavar='VAL_TOKENS',
        help='tokens in the val shard (default 10.5e6; of local files 1e5)')
    add('--shard_tokens', type=shard_size, default=100_000_000, help='in a train shard (default 1e8, 200 MB)')
    add('--workers', type=number(1, most=1024, whole=True), default=os.cpu_count(), help='tokenizing threads')
    return p


def make_encoder(name):
    """-> a function: text -> the end-of-text token and the tokens of each of its parts."""
    if name == 'bytes':
        return lambda text: [[256], np.frombuffer(text.encode(), np.uint8)]
    import tiktoken
    with sources.naming('--tokenizer=gpt2: its ranks are downloaded once', hub=True):
        gpt2 = tiktoken.get_encoding('gpt2')
    # tiktoken's stack does not hold a million spaces before a word: the last one is cut off, where GPT-2 does
    # so as well. To Python, but not to GPT-2, \x1c to \x1f are spaces too.
    last_space = re.compile(r'(?=[^\S\x1c-\x1f][\S\x1c-\x1f])(?<=[^\S\x1c-\x1f]{1000})')

    def encode(text):
        parts = last_space.split(text) if len(text) > 100_000 else [text]
        return [[gpt2.eot_token], *(gpt2.encode_to_numpy(part, disallowed_special=()) for part in parts)]
    return encode


def tokenize(texts, encode, workers):
    """Yields (file, row, tokens (n,) uint16) of each text. Threads suffice: tokenizers free Python's lock."""
    def encode_batch(batch):
        return [(file, row, np.concatenate(encode(text), dtype=np.uint16, casting='unsafe'))
                for file, row, text in batch]
    with ThreadPoolExecutor(workers) as pool:
        pending = collections.deque()
        while batch := list(itertools.islice(texts, 32)):
            pending.append(pool.submit(encode_batch, batch))
            if len(pending) > 4 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def load_meta(args, settings):
    """The meta.json of --out, or of a new folder. UserError if it does not fit the command or the shards."""
    path, shards = f'{args.out}/meta.json', glob.glob(f'{glob.escape(args.out)}/*.bin')
    if not os.path.exists(path):
        check(not shards, f'--out={args.out} has shards but no meta.json; choose another folder')
        return {**settings, **dict.fromkeys(COUNTS, 0), 'exhausted': False}
    meta = read_json(path)
    other = [f'{key}={meta.get(key)!r}' for key, value in settings.items() if meta.get(key) != value]
    check(not other, f'{path} was made with {", ".join(other)}; choose another --out')
    check(all(type(meta.get(key)) is int and meta[key] >= 0 for key in COUNTS) and 'exhausted' in meta
          and meta['val_tokens'] + meta['tokens'] <= sum(len(read_shard(shard)) for shard in shards),
          f'{path} does not fit the shards; choose another --out')
    return meta


def cut_shards(documents, args, meta, bar):
    """Cuts the tokens of documents into shards. Yields each, and where in the text the next one begins."""
    shard, held, used = np.empty(max(args.val_tokens, args.shard_tokens), np.uint16), 0, meta['used']
    for file, row, tokens in documents:
        while used < len(tokens):
            size = min(args.shard_tokens, args.tokens - meta['tokens']) if meta['shards'] else args.val_tokens
            part = tokens[used:used + size - held]
            shard[held:held + len(part)] = part
            held, used = held + len(part), used + len(part)
            bar.update(len(part))
            if held == size:
                yield shard[:held], {'file': file, 'row': row, 'used': used}
                held = 0
        used = 0
    meta['exhausted'] = True
    if held:
        yield shard[:held], {}


def fetch_shards(files, args, meta, bar):
    """Downloads published shards and yields each. The hub's client resumes one that is cut."""
    from huggingface_hub import hf_hub_download
    for name in files[meta['shards']:]:
        with sources.naming(name, hub=True):
            path = hf_hub_download(args.name, name, repo_type='dataset', revision=meta['revision'],
                                   local_dir=args.out)
        bar.update(len(shard := read_shard(path)))
        meta['exhausted'] = name == files[-1]
        yield shard, {}


def main(argv=None):
    args = parse_args(parser(), argv)
    local, ready, hub = args.source == 'local', args.source == 'pretokenized', args.source in NAMES
    check(bool(args.files) == local and (args.out or not local),
          '--source=local needs --files="GLOB" and --out=FOLDER, and --files needs --source=local')
    check(hub or not args.name, f'--source={args.source} has no --name')
    check(args.tokenizer == 'gpt2' or not ready, '--source=pretokenized has --tokenizer=gpt2')
    args.out, args.name = args.out or 'data/fineweb', args.name or NAMES.get(args.source)
    args.vocab_size = {'gpt2': 50257, 'bytes': 257}[args.tokenizer]

    # what the shards depend on; the same command finds it in meta.json and resumes
    settings = {key: value for key, value in vars(args).items() if key not in ('out', 'tokens', 'workers')}
    meta = load_meta(args, settings)
    if meta['exhausted'] or meta['tokens'] >= args.tokens:
        return print(f'{args.out} is done: {meta["tokens"]:,} training tokens in {meta["shards"]} shards')

    # what cannot be read or tokenized, or is too short, is found before anything is written
    if hub:
        from huggingface_hub import HfApi
        repository = args.name if ready else sources.FINEWEB
        print(f'asking the Hugging Face hub for {repository}', flush=True)
        with sources.naming(repository, hub=True):
            info = HfApi().dataset_info(repository, revision=meta.get('revision'), timeout=30)
        meta['revision'] = info.sha
    if ready:
        names = sorted(file.rfilename for file in info.siblings)
        val, train = ([name for name in names if f'_{split}_' in name] for split in ('val', 'train'))
        check(val and train, f'--name={args.name} has no shards such as fineweb_train_000001.bin')
        args.val_tokens, files = 0, val[:1] + sources.spread(train)
    else:
        paths = (sources.local_files(args.files) if local else sources.stdlib_files() if not hub else
                 sources.fineweb_files(args.name, meta['revision']))
        args.val_tokens = args.requested_val_tokens or (100_000 if local else 10_500_000)
        texts = sources.read_texts(paths, meta['file'], meta['row'])
        documents = tokenize(texts, make_encoder(args.tokenizer), args.workers)
        ahead, n = [], 0
        while not meta['shards'] and n <= args.val_tokens and (document := next(documents, None)):
            ahead.append(document)
            n += len(document[-1])
        check(meta['shards'] or n > args.val_tokens,
              f'the text has only {n:,} tokens, too few for --val_tokens={args.val_tokens} and training')

    with lock_folder(args.out), tqdm(
            total=args.val_tokens + args.tokens, initial=meta['tokens'] + meta['val_tokens'], unit=' tokens',
            unit_scale=True, mininterval=10, file=sys.stdout) as bar:
        check(load_meta(args, settings)['shards'] == meta['shards'],
              f'{args.out}: another process has just worked there; start again', status=3)
        write_json(f'{args.out}/meta.json', {**meta, 'complete': False})
        shards = (fetch_shards(files, args, meta, bar) if ready else
                  cut_shards(itertools.chain(ahead, documents), args, meta, bar))
        for shard, position in shards:
            if not ready:
                name = f'train_{meta["shards"] - 1:06d}' if meta['shards'] else 'val_000000'
                write_shard(f'{args.out}/{args.source}_{name}.bin', shard)
            meta['tokens' if meta['shards'] else 'val_tokens'] += len(shard)
            meta.update(position, shards=meta['shards'] + 1)
            done = meta['exhausted'] or meta['tokens'] >= args.tokens
            write_json(f'{args.out}/meta.json', {**meta, 'complete': done})
            if done:
                break
        write_json(f'{args.out}/meta.json', {**meta, 'complete': True})
    print(f'{args.out}: {meta["val_tokens"]:,} val and {meta["tokens"]:,} training tokens, '
          f'{meta["shards"]} shards' + meta['exhausted'] * ', all that the text has')


if __name__ == '__main__':
    program(main)
