"""
Turns text into token shards: FineWeb, shards that others published, local files, or Python's own
standard library, which needs no network and is what the demo and the proxy grid use.

    python prepare_fineweb.py                           # FineWeb sample-100BT, 13.2B GPT-2 tokens, 27 GB
    python prepare_fineweb.py --tokens=1e9              # the first billion of these
    python prepare_fineweb.py --source=local --files='texts/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib

Every document starts with the end-of-text token. The val shard is written first, every shard whole or not at
all, and meta.json says how much of the text has been used: the same command resumes where it was stopped. Of
FineWeb and of published shards the files that are taken lie evenly spread, at the commit in meta.json.
"""
import argparse
import collections
import contextlib
import functools
import glob
import itertools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from oec import sources
from oec.common import UserError, check, lock_folder, number, parse_args, program, read_json, write_json
from oec.data import read_shard, write_shard

NAMES = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}  # defaults of --name


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, shard_size = p.add_argument, number(1, most=2**31 - 1, whole=True)
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'],
        help='where the text comes from (default fineweb)')
    add('--out', help='folder of the shards (default data/fineweb; --source=local has none)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'bpe'],
        help='gpt2: by tiktoken (default); bytes: UTF-8 bytes and an end-of-text token, needs no download; '
             'bpe: byte pairs learned from the text itself, needs none either')
    add('--vocab_size', type=number(257, most=2**16, whole=True),
        help='of --tokenizer=bpe, end-of-text and the 256 bytes included (default 1024)')
    add('--tokens', type=number(1, whole=True), default=13_200_000_000,
        help='training tokens to stop at; the paper sees 13.1e9 (default 13.2e9)')
    add('--val_tokens', type=shard_size,
        help='tokens in the val shard (default 10.5e6; 5%% of a local text that is too short for these)')
    add('--shard_tokens', type=shard_size, default=100_000_000, help='in a train shard (default 1e8, 200 MB)')
    add('--files', help='a quoted glob of .txt, .jsonl or .parquet files (column: text) for --source=local')
    add('--name', help='of FineWeb the config, such as sample-10BT (default sample-100BT); of pretokenized '
                       f'shards the dataset (default {NAMES["pretokenized"]})')
    add('--workers', type=number(1, most=1024, whole=True), default=os.cpu_count() or 1,
        help='tokenizing threads (default: all cores)')
    add('--retry_minutes', type=number(0), default=60,
        help='how long to repeat a download that the network or the hub refuses (default 60)')
    return p


def load_gpt2():
    """tiktoken's GPT-2 encoding; raises UserError where its ranks cannot be loaded."""
    import tiktoken
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as error:  # of whatever kind its download raises
        raise UserError(f'--tokenizer=gpt2: tiktoken could not load its ranks ({type(error).__name__}): '
                        'they are downloaded once; offline use --tokenizer=bytes', status=1) from error


def encode_gpt2(tokenizer, text):
    """
    text -> tokens (n,) uint16, the first is 50256. tiktoken's stack does not hold a million spaces before a
    word, so a long run of spaces is cut before its last one, where GPT-2's pattern divides it in any case.
    """
    cuts = [0, len(text)]
    if len(text) > 100_000:
        runs = re.finditer(r'[^\S\x1c-\x1f]{1000,}', text)  # spaces to Python, but not to GPT-2: \x1c-\x1f
        cuts[1:1] = [run.end() - 1 for run in runs if run.end() < len(text)]
    try:
        parts = [tokenizer.encode_to_numpy(text[start:end], disallowed_special=())
                 for start, end in itertools.pairwise(cuts)]
    except UnicodeEncodeError:  # half a pair of surrogates is no character
        return encode_gpt2(tokenizer, text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace'))
    return np.concatenate([[tokenizer.eot_token], *parts], dtype=np.uint16, casting='unsafe')


def encode_bytes(text):
    """text -> tokens (n,) uint16: 256, then the UTF-8 bytes."""
    utf8 = np.frombuffer(text.encode('utf-8', 'surrogateescape'), np.uint8)
    return np.concatenate([[256], utf8], dtype=np.uint16, casting='unsafe')


def learn_bpe(texts, vocab_size):
    """
    A tokenizer of byte pairs (Sennrich et al. 2016, within GPT-2's pieces of the text), learned from the
    first 64 million characters. Token 0 is the end of text, then come the 256 bytes and the merges.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    print('learning byte pairs', flush=True)

    def first(characters):
        while characters > 0 and (text := next(texts, None)) is not None:
            yield text
            characters -= len(text)

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(first(64_000_000), vocab_size, min_frequency=0, show_progress=False,
                                  special_tokens=['<|endoftext|>'])
    return Tokenizer.from_str(tokenizer.to_str())


def load_bpe(path):
    """The tokenizer of a folder of shards; raises UserError where it is gone or damaged."""
    from tokenizers import Tokenizer
    with sources.naming(f'{path}: not a tokenizer, choose another --out'):
        return Tokenizer.from_file(path)


def encode_bpe(tokenizer, text):
    """text -> tokens (n,) uint16: 0, then the byte pairs."""
    [encoded] = tokenizer.encode_batch_fast([text.encode('utf-8', 'replace').decode()])  # without the GIL
    return np.array([0, *encoded.ids], np.uint16)


def in_batches(texts):
    """Lists of 256 texts, or of fewer where they are long."""
    batch = []
    for text in texts:
        batch.append(text)
        if len(batch) == 256 or sum(map(len, batch)) > 1_000_000:
            yield batch
            batch = []
    yield batch


def encode_batch(encode, texts):
    """The tokens of each text. Raises UserError that quotes the one that the tokenizer cannot take."""
    try:
        return [encode(text := each) for each in texts]
    except BaseException as error:  # a panic in a tokenizer's Rust code is no Exception
        raise UserError(f'the text that starts with {text[:60]!r}, {len(text):,} characters, cannot be '
                        f'tokenized: {sources.first_line(error)}') from error


def encode_all(texts, encode, workers):
    """
    Yields the tokens of all texts, in order. Threads make them while further texts are read: the tokenizers
    let go of Python's lock, and unlike processes threads cannot be lost, nor do they outlive the program.
    """
    pool, pending = ThreadPoolExecutor(workers), collections.deque()
    try:
        for batch in in_batches(texts):
            pending.append(pool.submit(encode_batch, encode, batch))
            while pending and (len(pending) > 16 + 2 * workers or pending[0].done()):
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def shard_path(args, i):
    """The path of shard i that is made from text: the first is for validation, the others for training."""
    split, i = ('train', i - 1) if i else ('val', 0)
    return os.path.join(args.out, f'{args.source}_{split}_{i:06d}.bin')


def stored_meta(args, settings, fresh):
    """The meta.json of --out, or `fresh` without a shard. UserError if it does not fit the shards."""
    path = os.path.join(args.out, 'meta.json')
    if not os.path.exists(path):
        check(not glob.glob(os.path.join(glob.escape(args.out), '*.bin')),
              f'--out={args.out} has shards but no meta.json; choose another folder')
        return fresh
    meta = read_json(path)
    if meta.get('shards') == 0:
        return fresh
    for key, value in fresh.items():
        found = meta.get(key)
        check(found == value or key not in settings,
              f'{path} was made with {key}={found!r}, not {value!r}; choose another --out')
        check(type(found) is type(value) and (type(found) is not int or found >= 0),
              f'{path}: {key} should not be {found!r}; damaged, or by an older version: choose another --out')
    shards = [shard_path(args, i) for i in range(meta['shards'])]
    if args.source == 'pretokenized':
        shards = [os.path.join(args.out, os.path.basename(name)) for name in meta['taken']]
    found, counted = sum(len(read_shard(shard)) for shard in shards), meta['val_tokens'] + meta['tokens']
    check(found == counted, f'{path} counts {counted:,} tokens in {meta["shards"]} shards, which have '
          f'{found:,}; choose another --out')
    return meta


def note_shard(args, meta, tokens, **position):
    """Counts a shard that is written, with its tokens, in meta.json, and notes where the next one begins."""
    meta['tokens' if meta['shards'] else 'val_tokens'] += tokens
    meta.update(shards=meta['shards'] + 1, **position)
    write_json(os.path.join(args.out, 'meta.json'), meta)


def fetch_shards(files, args, meta, bar):
    """Downloads published shards one by one until there are --tokens. Finished ones are kept."""
    for path in files[meta['shards']:]:
        if meta['tokens'] >= args.tokens:
            return
        shard = os.path.join(args.out, os.path.basename(path))
        sources.download(meta['name'], meta['revision'], path, shard)
        tokens = len(read_shard(shard))
        bar.update(tokens)
        note_shard(args, meta, tokens, taken={**meta['taken'], path: tokens})
    meta['exhausted'] = meta['tokens'] < args.tokens


def read_val(documents, args, shrink):
    """
    Reads on until there is text enough for --val_tokens and training. Returns all documents and the size of
    the val shard: with `shrink` at most 5% of a text that is smaller than asked for. UserError if too short.
    """
    enough = args.val_tokens + (min(19 * args.val_tokens, args.tokens) if shrink else 1)
    read, n, size = [], 0, args.val_tokens
    while n < enough and (tokens := next(documents, None)) is not None:
        read.append(tokens)
        n += len(tokens)
    if shrink and n < enough:
        size = max(1, n // 20)
        print(f'the text has only {n:,} tokens: --val_tokens={size}, 5% of them')
    check(n > size, f'the text has only {n:,} tokens, too few for --val_tokens={size} and training')
    return itertools.chain(read, documents), size


def fill_shards(documents, args, meta, taken, bar):
    """
    Cuts the tokens of documents, from number meta['documents'] on, into the val shard and train shards up to
    --tokens. After each, meta.json says where the next one starts. UserError where no documents are left.
    """
    document, within = meta['documents'], meta['within_document']  # the next one, and its tokens in a shard
    tokens = next(documents, None)
    check(tokens is not None or meta.get('exhausted'),
          f'{args.out}/meta.json: the text has less than {document:,} documents; choose another --out')
    while tokens is not None and meta['tokens'] < args.tokens:
        size = min(args.shard_tokens, args.tokens - meta['tokens']) if meta['shards'] else args.val_tokens
        shard, held = np.empty(size, np.uint16), 0
        while tokens is not None and held < size:
            part = tokens[within:within + size - held]
            shard[held:held + len(part)] = part
            held, within = held + len(part), within + len(part)
            bar.update(len(part))
            if within == len(tokens):
                document, within, tokens = document + 1, 0, next(documents, None)
        write_shard(shard_path(args, meta['shards']), shard[:held])
        begun = {path: i for path, i in taken.items() if i < document + (within > 0)}  # none read ahead
        note_shard(args, meta, held, documents=document, within_document=within, taken=begun,
                   exhausted=tokens is None)


def main(argv=None):
    args = parse_args(parser(), argv)
    hub, local = args.source in NAMES, args.source == 'local'
    check(bool(args.files) == local and (args.out or not local),
          '--source=local needs --files="GLOB" and --out=FOLDER, and --files needs --source=local')
    check(args.name is None or (hub and args.name),
          f'--name={args.name}: should be a config of --source=fineweb or a dataset of --source=pretokenized')
    check(args.vocab_size is None or args.tokenizer == 'bpe',
          f'--vocab_size={args.vocab_size} needs --tokenizer=bpe')
    check(args.source != 'pretokenized' or args.tokenizer == 'gpt2',
          '--source=pretokenized has GPT-2 tokens: leave out --tokenizer')
    args.out = 'data/fineweb' if args.out is None else args.out
    shrink, args.val_tokens = local and not args.val_tokens, args.val_tokens or 10_500_000

    # what the shards depend on; the same command finds it in meta.json and resumes
    vocab_size = {'gpt2': 50257, 'bytes': 257, 'bpe': args.vocab_size or 1024}[args.tokenizer]
    settings = {'source': args.source, 'name': args.name or NAMES.get(args.source), 'files': args.files,
                'tokenizer': args.tokenizer, 'vocab_size': vocab_size,
                'requested_val_tokens': args.val_tokens, 'shard_tokens': args.shard_tokens}
    fresh = {**settings, 'documents': 0, 'within_document': 0, 'val_tokens': 0, 'tokens': 0, 'shards': 0,
             'complete': False}
    if hub:  # the commit, and of its files those that were taken, with their first document or their tokens
        fresh.update(revision='', taken={})
    found = stored_meta(args, settings, fresh)
    if found['complete'] and (found['tokens'] >= args.tokens or found.get('exhausted')):
        print(f'{args.out} is done: {found["tokens"]:,} training tokens in {found["shards"]} shards'
              + (', all that the text has' if found.get('exhausted') else ''))
        return

    meta, taken = dict(found), {}
    meta_path, bpe_path = (os.path.join(args.out, name) for name in ('meta.json', 'tokenizer.json'))
    if hub:
        repository = sources.FINEWEB if args.source == 'fineweb' else settings['name']
        print(f'asking the Hugging Face hub for {repository}; without a network use --source=stdlib '
              '--tokenizer=bytes', flush=True)
        api = sources.patient_hub(args.retry_minutes)
        with sources.naming(repository):
            meta['revision'] = api.dataset_info(repository, revision=meta['revision'] or 'main').sha

    with contextlib.ExitStack() as stack:
        # what cannot be read or tokenized, or is too short, is found before a folder is made
        if args.source == 'pretokenized':
            files = sources.published_shards(api, repository, meta['revision'])
        else:
            encode = encode_bytes
            if args.tokenizer == 'gpt2':
                encode = functools.partial(encode_gpt2, load_gpt2())
            elif args.tokenizer == 'bpe':
                tokenizer = (load_bpe(bpe_path) if meta['shards'] else
                             learn_bpe(sources.read_texts(args, meta, {}), vocab_size))
                tokenizer.encode_special_tokens = True  # an end-of-text that a text spells out is text
                encode = functools.partial(encode_bpe, tokenizer)
            documents = encode_all(sources.read_texts(args, meta, taken), encode, args.workers)
            stack.enter_context(contextlib.closing(documents))
            if not meta['shards']:
                documents, args.val_tokens = read_val(documents, args, shrink)
        stack.enter_context(lock_folder(args.out))
        check(stored_meta(args, settings, fresh) == found,
              f'{args.out}: another process has just worked there; start again', status=3)
        if args.tokenizer == 'bpe' and not meta['shards']:
            write_json(bpe_path, json.loads(tokenizer.to_str()))
        meta.update(complete=False, requested_tokens=max(args.tokens, meta['tokens']))
        write_json(meta_path, meta)
        bar = stack.enter_context(tqdm(
            total=args.tokens + args.val_tokens, initial=meta['tokens'] + meta['val_tokens'], unit=' tokens',
            unit_scale=True, mininterval=10, file=sys.stdout))
        if args.source == 'pretokenized':
            fetch_shards(files, args, meta, bar)
        else:
            fill_shards(documents, args, meta, taken, bar)
        write_json(meta_path, {**meta, 'complete': True})
    if meta.get('exhausted'):
        print(f'the text has ended before --tokens={args.tokens:,}')
    print(f'{args.out}: {meta["val_tokens"]:,} val and {meta["tokens"]:,} training tokens, '
          f'{meta["shards"]} shards, vocabulary {vocab_size}')


if __name__ == '__main__':
    program(main)
