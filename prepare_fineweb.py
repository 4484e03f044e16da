"""
Turns text into token shards: FineWeb, shards that others published, local files, or Python's own
standard library, which needs no network and is what the demo and the proxy grid use.

    python prepare_fineweb.py                           # FineWeb sample-100BT, 13.2B GPT-2 tokens, 27 GB
    python prepare_fineweb.py --tokens=1e9              # the first billion of these
    python prepare_fineweb.py --source=local --files='texts/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib

The val shard comes first, then the train shards. Every shard is written whole or not at all, and meta.json
says how much of the text has been used, so the same command resumes where it was stopped. Of FineWeb and of
published shards the files that are taken lie evenly spread over the dataset, as it was at one commit, which
meta.json keeps.
"""
import argparse
import collections
import contextlib
import datetime
import fnmatch
import functools
import glob
import itertools
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import sources
from common import UserError, lock_folder, make_folder, number, parse_args, read_json, run, write_json
from data import read_shard, write_shard

PRETOKENIZED = 'kjj0/fineweb100B-gpt2'  # GPT-2 tokens of FineWeb in our shard format, 100M in each shard
NAMES = {'fineweb': 'sample-100BT', 'pretokenized': PRETOKENIZED}  # defaults of --name


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, shard_size = p.add_argument, number(1, most=2**31 - 1, whole=True)
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'],
        help='where the text comes from (default fineweb)')
    add('--out', default='data/fineweb', help='folder of the shards (default data/fineweb)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'bpe'],
        help='gpt2: by tiktoken (default); bytes: UTF-8 bytes and an end-of-text token, needs no download; '
             'bpe: byte pairs learned from the text itself, needs none either')
    add('--vocab_size', type=number(257, most=2**16, whole=True),
        help='of --tokenizer=bpe, end-of-text and the 256 bytes included (default 1024)')
    add('--tokens', type=number(1, whole=True), default=13_200_000_000,
        help='training tokens to stop at; the paper sees 13.1e9 (default 13.2e9)')
    add('--val_tokens', type=shard_size, default=10_500_000, help='tokens in the val shard (default 10.5e6)')
    add('--shard_tokens', type=shard_size, default=100_000_000, help='in a train shard (default 1e8, 200 MB)')
    add('--files', help='a quoted glob of .txt, .jsonl or .parquet files (column: text) for --source=local')
    add('--name', help='of FineWeb the config, such as sample-10BT (default sample-100BT); of pretokenized '
                       f'shards the dataset (default {PRETOKENIZED})')
    add('--workers', type=number(1, most=1024, whole=True), default=os.cpu_count() or 1,
        help='tokenizing threads (default: all cores)')
    add('--retry_minutes', type=number(0), default=60,
        help='how long to repeat a download that the network or the hub refuses (default 60)')
    return p


# --------------------------------------------------------------------------------------------------
# tokens: every document starts with the end-of-text token


@functools.lru_cache(maxsize=1)
def gpt2():
    """tiktoken's GPT-2 encoding; raises UserError where its ranks cannot be loaded."""
    import tiktoken
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as error:  # of whatever kind its download raises
        raise UserError(f'--tokenizer=gpt2: tiktoken could not load its ranks ({type(error).__name__}): '
                        'they are downloaded once; offline use --tokenizer=bytes', status=1) from error


def encode_gpt2(text):
    """
    text -> tokens (n,) uint16, the first is 50256. tiktoken's stack does not hold a million spaces before a
    word, so a long run of spaces is cut before its last one, where GPT-2's pattern divides it in any case.
    """
    cuts = [0, len(text)]
    if len(text) > 100_000:
        runs = re.finditer(r'[^\S\x1c-\x1f]{1000,}', text)  # spaces to Python, but not to GPT-2: \x1c-\x1f
        cuts[1:1] = [run.end() - 1 for run in runs if run.end() < len(text)]
    try:
        parts = [gpt2().encode_to_numpy(text[start:end], disallowed_special=())
                 for start, end in itertools.pairwise(cuts)]
    except UnicodeEncodeError:  # half a pair of surrogates is no character
        return encode_gpt2(text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace'))
    return np.concatenate([[gpt2().eot_token], *parts], dtype=np.uint16, casting='unsafe')


def encode_bytes(text):
    """text -> tokens (n,) uint16: 256, then the UTF-8 bytes."""
    utf8 = np.frombuffer(text.encode('utf-8', 'surrogateescape'), np.uint8)
    return np.concatenate([[256], utf8], dtype=np.uint16, casting='unsafe')


def learn_bpe(texts, vocab_size, path):
    """
    Learns byte pairs (Sennrich et al. 2016, within GPT-2's pieces of the text) from the first 64 million
    characters and writes them to `path`. Token 0 is the end of text, then come the 256 bytes and the merges.
    """
    from tokenizers import ByteLevelBPETokenizer

    def first(characters):
        for text in texts:
            yield text
            characters -= len(text)
            if characters <= 0:
                return

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(first(64_000_000), vocab_size, min_frequency=0, show_progress=False,
                                  special_tokens=['<|endoftext|>'])
    write_json(path, json.loads(tokenizer.to_str()))


def load_bpe(path):
    """The tokenizer that learn_bpe wrote; raises UserError where it is gone or damaged."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{path}: not a tokenizer ({str(error)[:100]}); choose another --out') from error
    tokenizer.encode_special_tokens = True  # an end-of-text that a text spells out is text
    return tokenizer


def encode_bpe(tokenizer, text):
    """text -> tokens (n,) uint16: 0, then the byte pairs."""
    [encoded] = tokenizer.encode_batch_fast([text.encode('utf-8', 'replace').decode()])  # without the GIL
    return np.array([0, *encoded.ids], np.uint16)


def in_batches(texts):
    """Lists of 256 texts, or of fewer where they are long."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == 256 or size > 1_000_000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batch(encode, texts):
    """The tokens of each text. Raises UserError that quotes the one that the tokenizer cannot take."""
    encoded = []
    for text in texts:
        try:
            encoded.append(encode(text))
        except BaseException as error:  # a panic in a tokenizer's Rust code is no Exception
            raise UserError(f'the text that starts with {text[:60]!r}, {len(text):,} characters, cannot be '
                            f'tokenized: {sources.first_line(error)}') from error
    return encoded


def encode_all(texts, encode, workers):
    """
    Yields the tokens of all texts, in order. Threads make them while further texts are read: tokenizers let
    go of Python's lock, a thread cannot be lost as a process can, and all of them end with the program.
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


# --------------------------------------------------------------------------------------------------
# shards


def stored_meta(folder, settings, fresh):
    """
    The meta.json in `folder`, or `fresh` where no shard is finished. Raises UserError where it was made with
    other settings, is damaged, or counts shards that are not there.
    """
    path = os.path.join(folder, 'meta.json')
    shards = {split: sorted(glob.glob(os.path.join(glob.escape(folder), f'*_{split}_*.bin')))
              for split in ('val', 'train')}
    if not os.path.exists(path):
        if any(shards.values()):
            raise UserError(f'--out={folder} has shards but no meta.json; choose another folder')
        return fresh
    meta = read_json(path)
    if meta.get('shards') == 0:
        return fresh
    meta['name'] = meta.get('name') or NAMES.get(settings['source'])
    for key, value in fresh.items():
        found = meta.get(key)
        if key in settings and found != value:
            raise UserError(f'{path} was made with {key}={found!r}, not {value!r}; choose another --out')
        if key in ('revision', 'taken') and key not in meta:  # made by an older version
            continue
        numbers = found.values() if isinstance(found, dict) else [found] if isinstance(found, int) else []
        if type(found) is not type(value) or any(type(n) not in (int, bool) or n < 0 for n in numbers):
            raise UserError(f'{path}: {key} should not be {found!r}; it is damaged, choose another --out')
    if settings['source'] == 'pretokenized' and 'taken' in meta:
        shards = {split: [os.path.join(folder, os.path.basename(file)) for file in meta['taken']
                          if f'_{split}_' in file] for split in shards}
    for split, n, tokens in (('val', 1, meta['val_tokens']), ('train', meta['shards'] - 1, meta['tokens'])):
        found = sum(len(read_shard(shard)) for shard in shards[split][:n])
        if found != tokens:
            raise UserError(f'{path} counts {n} {split} shards with {tokens:,} tokens, the folder has '
                            f'{found:,} in {len(shards[split])}; choose another --out')
    return meta


def progress(done, total):
    """Returns report(tokens), to be called after each step, which says every now and then how far we are."""
    begin = said = time.monotonic()
    first, pause = done, 10 if sys.stdout.isatty() else 60

    def report(tokens):
        nonlocal done, said
        done, now = done + tokens, time.monotonic()
        if now - said < pause:
            return
        said, rate = now, (done - first) / (now - begin)
        left = datetime.timedelta(seconds=round(max(0, total - done) / rate))
        print(f'{done:,} of {total:,} tokens, {rate:,.0f} a second, {left} left', flush=True)
    return report


def published_shards(repository, commit):
    """The val shard and the train shards of a dataset, these spread. Raises UserError where it has none."""
    files = sources.list_files(repository, commit)
    val, train = (fnmatch.filter(files, f'*_{split}_*.bin') for split in ('val', 'train'))
    if not val or not train:
        raise UserError(f'--name={repository}: this dataset has no shards such as fineweb_train_000001.bin')
    return val[:1] + sources.spread(train)


def fetch_pretokenized(files, args, meta, meta_path, report):
    """Downloads published_shards one by one until there are --tokens. Finished ones are kept."""
    for path in files[meta['shards']:]:
        if meta['tokens'] >= args.tokens:
            return
        shard = os.path.join(args.out, os.path.basename(path))
        sources.download(meta['name'], meta['revision'], path, shard)
        tokens = len(read_shard(shard))
        report(tokens)
        meta['tokens' if meta['shards'] else 'val_tokens'] += tokens
        meta.update(shards=meta['shards'] + 1, taken={**meta['taken'], path: tokens})
        write_json(meta_path, meta)
    meta['exhausted'] = meta['tokens'] < args.tokens


def fill_shards(documents, args, meta, meta_path, taken, report):
    """
    Cuts the tokens of documents, the first of which is number meta['documents'], into the val shard and train
    shards up to --tokens. After each shard meta.json says where the next one starts; killed in between, the
    same shard is made again. Raises UserError where the text is too short for a val shard and training.
    """
    shard, held = None, 0  # the shard in the making and how many of its tokens are there
    document, within = meta['documents'], meta['within_document']  # the next one, and its tokens in a shard

    def finish_shard(document, within):
        split, i = ('train', meta['shards'] - 1) if meta['shards'] else ('val', 0)
        write_shard(os.path.join(args.out, f'{args.source}_{split}_{i:06d}.bin'), shard[:held])
        meta['tokens' if meta['shards'] else 'val_tokens'] += held
        meta.update(shards=meta['shards'] + 1, documents=document, within_document=within)
        if 'taken' in meta:
            meta['taken'] = {path: first for path, first in taken.items() if first < document + (within > 0)}
        write_json(meta_path, meta)

    for tokens in documents:
        while within < len(tokens):
            if not held:
                left = args.tokens - meta['tokens']
                wanted = min(args.shard_tokens, left) if meta['shards'] else args.val_tokens
                if wanted <= 0:
                    return
                shard = np.empty(wanted, np.uint16)
            part = tokens[within:within + len(shard) - held]
            shard[held:held + len(part)] = part
            held, within = held + len(part), within + len(part)
            report(len(part))
            if held == len(shard):
                finish_shard(*((document, within) if within < len(tokens) else (document + 1, 0)))
                held = 0
        document, within = document + 1, 0

    # the text ended before --tokens
    if not meta['shards']:
        raise UserError(f'the text has only {held:,} tokens, too few for --val_tokens={args.val_tokens}')
    if held:
        finish_shard(document, 0)
    if not meta['tokens']:
        raise UserError(f'the val shard has all {meta["val_tokens"]:,} tokens, none are left to train on; '
                        'lower --val_tokens')
    meta['exhausted'] = True


def main(argv=None):
    args = parse_args(parser(), argv)
    if (args.files is not None) != (args.source == 'local'):
        raise UserError('--source=local needs --files="GLOB", and --files needs --source=local')
    if args.name is not None and args.source not in ('fineweb', 'pretokenized'):
        raise UserError(f'--name={args.name} needs --source=fineweb or pretokenized')
    if args.vocab_size is not None and args.tokenizer != 'bpe':
        raise UserError(f'--vocab_size={args.vocab_size} needs --tokenizer=bpe')
    if args.source == 'pretokenized' and args.tokenizer != 'gpt2':
        raise UserError('--source=pretokenized has GPT-2 tokens: leave out --tokenizer')

    # what the shards depend on; the same command finds it in meta.json and resumes
    hub = args.source in NAMES
    vocab_size = {'gpt2': 50257, 'bytes': 257, 'bpe': args.vocab_size or 1024}[args.tokenizer]
    settings = {'source': args.source, 'name': args.name or NAMES.get(args.source), 'files': args.files,
                'tokenizer': args.tokenizer, 'vocab_size': vocab_size,
                'requested_val_tokens': args.val_tokens, 'shard_tokens': args.shard_tokens}
    fresh = {**settings, 'documents': 0, 'within_document': 0, 'val_tokens': 0, 'tokens': 0, 'shards': 0,
             'complete': False}
    if hub:  # the commit, and of its files those that were taken, with their first document or their tokens
        fresh.update(revision='', taken={})
    meta_path = os.path.join(args.out, 'meta.json')
    found = stored_meta(args.out, settings, fresh)
    if (found['complete'] and found['tokens'] >= args.tokens) or found.get('exhausted'):
        print(f'{args.out} is done: {found["tokens"]:,} training tokens in {found["shards"]} shards'
              + (', all that the text has' if found.get('exhausted') else ''))
        return
    if hub and 'revision' not in found:
        raise UserError(f'{meta_path} was made by an older version, which took the files from the first on '
                        'instead of spreading them; choose another --out')

    # what cannot be read or downloaded is found before a folder is made
    meta, taken = dict(found), {}
    if hub:
        repository = sources.FINEWEB if args.source == 'fineweb' else meta['name']
        print(f'asking the Hugging Face hub for {repository}; without a network use --source=stdlib '
              '--tokenizer=bytes', flush=True)
        sources.retry_requests(args.retry_minutes)
        with sources.naming(repository):
            meta['revision'] = sources.find_commit(repository, meta['revision'] or 'main')
            if args.source == 'pretokenized':
                files = published_shards(repository, meta['revision'])
    if args.source != 'pretokenized':
        texts = sources.read_texts(args, meta, taken)
        texts = itertools.chain(list(itertools.islice(texts, 256)), texts)
        encode = {'gpt2': encode_gpt2, 'bytes': encode_bytes}.get(args.tokenizer)
        if args.tokenizer == 'gpt2':
            gpt2()

    make_folder(args.out)
    with lock_folder(args.out):
        if stored_meta(args.out, settings, fresh) != found:
            raise UserError(f'{args.out}: another process has just worked there; start again', status=3)
        meta.update(complete=False, requested_tokens=max(args.tokens, meta['tokens']))
        write_json(meta_path, meta)
        report = progress(meta['tokens'] + meta['val_tokens'], args.tokens + args.val_tokens)
        if args.source == 'pretokenized':
            fetch_pretokenized(files, args, meta, meta_path, report)
        else:
            if args.tokenizer == 'bpe':
                tokenizer_path = os.path.join(args.out, 'tokenizer.json')
                if meta['shards'] == 0:
                    print('learning byte pairs', flush=True)
                    learn_bpe(sources.read_texts(args, meta, {}), vocab_size, tokenizer_path)
                encode = functools.partial(encode_bpe, load_bpe(tokenizer_path))
            with contextlib.closing(encode_all(texts, encode, args.workers)) as documents:
                fill_shards(documents, args, meta, meta_path, taken, report)
        write_json(meta_path, {**meta, 'complete': True})
    if meta.get('exhausted'):
        print(f'the text has ended before --tokens={args.tokens:,}')
    print(f'{args.out}: {meta["val_tokens"]:,} val and {meta["tokens"]:,} training tokens, '
          f'{meta["shards"]} shards, vocabulary {vocab_size}')


if __name__ == '__main__':
    run(main)
