"""
Turns text into token shards: FineWeb, shards that others published, local files, or Python's own
standard library, which needs no network and is what the demo and the proxy grid use.

    python prepare_fineweb.py                           # FineWeb sample-100BT, 13.2B GPT-2 tokens, 27 GB
    python prepare_fineweb.py --tokens=1e9              # the first billion of them
    python prepare_fineweb.py --source=local --files='texts/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib

The val shard comes first, then the train shards. Every shard is written whole or not at all, and meta.json
says how much of the text has been used, so the same command resumes where it was stopped.
"""
import argparse
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sysconfig

import numpy as np
from tqdm import tqdm

from common import UserError, lock_folder, make_folder, number, parse_args, read_json, run, write_json
from data import read_shard, write_shard

PRETOKENIZED = 'kjj0/fineweb100B-gpt2'  # GPT-2 tokens of FineWeb in our shard format, 100M in each shard


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add, shard_size = p.add_argument, number(1, below=2**31, integer=True)
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'],
        help='where the text comes from (default fineweb)')
    add('--out', default='data/fineweb', help='folder of the shards (default data/fineweb)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'bpe'],
        help='gpt2: by tiktoken (default); bytes: UTF-8 bytes and an end-of-text token, needs no download; '
             'bpe: byte pairs learned from the text itself, needs none either')
    add('--vocab_size', type=number(257, below=2**16 + 1, integer=True),
        help='of --tokenizer=bpe, end-of-text and the 256 bytes included (default 1024)')
    add('--tokens', type=number(1, integer=True), default=13_200_000_000,
        help='training tokens to stop at; the paper sees 13.1e9 (default 13.2e9)')
    add('--val_tokens', type=shard_size, default=10_500_000, help='tokens in the val shard (default 10.5e6)')
    add('--shard_tokens', type=shard_size, default=100_000_000, help='in a train shard (default 1e8, 200 MB)')
    add('--files', help='a quoted glob of .txt, .jsonl or .parquet files (column: text) for --source=local')
    add('--name', help='of FineWeb the config, such as sample-10BT (default sample-100BT); of pretokenized '
                       f'shards the dataset (default {PRETOKENIZED})')
    add('--workers', type=number(1, below=1025, integer=True), default=os.cpu_count() or 1,
        help='tokenizing processes (default: all cores)')
    return p


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
    """What datasets.load_dataset needs to read the files that match the glob `pattern`."""
    paths = sorted(glob.glob(pattern))
    endings = ' '.join(sorted({os.path.splitext(path)[1] for path in paths}))
    kinds = {'.txt': {'path': 'text', 'sample_by': 'document'}, '.jsonl': {'path': 'json'},
             '.parquet': {'path': 'parquet'}}
    if not paths:
        raise UserError(f'--files={pattern}: no such files; give a quoted glob such as --files="texts/*.txt"')
    if endings not in kinds:
        raise UserError(f'--files={pattern}: should match one kind of {", ".join(kinds)}, matches {endings}')
    return {'data_files': paths, **kinds[endings]}


def read_texts(args):
    """The texts of --source, one by one: FineWeb and local files are streamed by Hugging Face datasets."""
    with one_line(args):
        if args.source == 'stdlib':
            yield from stdlib_texts()
            return
        if args.source == 'local':
            where = local_files(args.files)
        else:
            print('asking the Hugging Face hub for FineWeb', flush=True)
            where = {'path': 'HuggingFaceFW/fineweb', 'name': args.name or 'sample-100BT'}
        import datasets  # slow to import, and not needed for the other sources
        for name in ('datasets', 'huggingface_hub'):  # what goes wrong is said in our one line
            logging.getLogger(name).setLevel(logging.CRITICAL)
        for row in datasets.load_dataset(**where, split='train', streaming=True):
            if not isinstance(row.get('text'), str):
                raise UserError(f'--files={args.files}: each row needs a text column, found {", ".join(row)}')
            yield row['text']


@contextlib.contextmanager
def one_line(args):
    """Raises whatever the libraries that read and download raise as a UserError that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if args.source == 'local':
            raise UserError(f'--files={args.files}: {first}') from error
        raise UserError(f'--source={args.source} cannot be read ({first}); '
                        'without a network use --source=stdlib --tokenizer=bytes', status=1) from error


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
    """text -> tokens (n,) uint16, the first is 50256."""
    return np.array([gpt2().eot_token] + gpt2().encode_ordinary(text), np.uint16)


def encode_bytes(text):
    """text -> tokens (n,) uint16: 256, then the UTF-8 bytes."""
    utf8 = np.frombuffer(text.encode('utf-8', 'surrogateescape'), np.uint8)
    return np.concatenate(([256], utf8)).astype(np.uint16)


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


@functools.lru_cache(maxsize=1)
def bpe(path):
    """The tokenizer that learn_bpe wrote; raises UserError where it is gone or damaged."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{path}: not a tokenizer ({str(error)[:100]}); choose another --out') from error
    tokenizer.encode_special_tokens = True  # an end-of-text that a text spells out is text
    return tokenizer


def encode_bpe(path, text):
    """text -> tokens (n,) uint16: 0, then the byte pairs."""
    return np.array([0] + bpe(path).encode(text.encode('utf-8', 'replace').decode()).ids, np.uint16)


def encode_all(texts, encode, workers):
    """Yields encode(text) for each of the texts, in order, from several processes."""
    if workers == 1:
        yield from map(encode, texts)
        return
    # spawned, not forked: tokenizer threads do not survive a fork, and a fork would inherit the folder lock
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit that and leave Ctrl-C to us
    with multiprocessing.get_context('spawn').Pool(workers) as pool:
        signal.signal(signal.SIGINT, handler)
        while batch := list(itertools.islice(texts, 256 * workers)):  # no more than these are read ahead
            result = pool.map_async(encode, batch, chunksize=16)
            try:
                yield from result.get()
            finally:
                result.wait()  # a pool that is ended while it works can block us for ever


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
    for key, value in fresh.items():
        found = meta.get(key)
        if key in settings and found != value:
            raise UserError(f'{path} was made with {key}={found!r}, not {value!r}; choose another --out')
        if type(found) is not type(value) or (key not in settings and found < 0):
            raise UserError(f'{path}: {key} should not be {found!r}; it is damaged, choose another --out')
    for split, n, tokens in (('val', 1, meta['val_tokens']), ('train', meta['shards'] - 1, meta['tokens'])):
        found = sum(len(read_shard(shard)) for shard in shards[split][:n])
        if found != tokens:
            raise UserError(f'{path} counts {n} {split} shards with {tokens:,} tokens, the folder has '
                            f'{found:,} in {len(shards[split])}; choose another --out')
    return meta


def fetch_pretokenized(args, meta, meta_path):
    """Downloads published shards: the val shard, then train shards until --tokens. Finished ones are kept."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    repository = args.name or PRETOKENIZED
    while meta['tokens'] < args.tokens:
        i = meta['shards']
        file = f'fineweb_train_{i:06d}.bin' if i else 'fineweb_val_000000.bin'
        try:
            path = hf_hub_download(repository, file, repo_type='dataset', local_dir=args.out)
        except EntryNotFoundError as error:
            if i < 2 or isinstance(error, LocalEntryNotFoundError):  # the latter: no network
                raise
            print(f'{repository} has no more shards')
            return
        tokens = len(read_shard(path))
        meta['tokens' if i else 'val_tokens'] += tokens
        meta['shards'] += 1
        write_json(meta_path, meta)
        print(f'{file}: {tokens:,} tokens', flush=True)


def fill_shards(encoded, args, meta, meta_path):
    """
    Cuts the encoded documents, which start at number meta['documents'], into the val shard and train shards
    up to --tokens. After each shard meta.json says where the next one starts; killed in between, the same
    shard is made again. Raises UserError where the text is too short for a val shard and training.
    """
    buffer, held = [], 0  # tokens of the shard in the making
    documents, within = meta['documents'], meta['within_document']  # where in the text they end

    def finish_shard():
        split, i = ('train', meta['shards'] - 1) if meta['shards'] else ('val', 0)
        write_shard(os.path.join(args.out, f'{args.source}_{split}_{i:06d}.bin'), np.concatenate(buffer))
        meta['tokens' if meta['shards'] else 'val_tokens'] += held
        meta.update(shards=meta['shards'] + 1, documents=documents, within_document=within)
        write_json(meta_path, meta)

    with tqdm(total=args.tokens + args.val_tokens, initial=meta['tokens'] + meta['val_tokens'], unit='tok',
              unit_scale=True, mininterval=1, disable=None) as bar:
        for tokens in encoded:
            tokens = tokens[within:]  # a finished shard has the rest
            while len(tokens):
                left = args.tokens - meta['tokens']
                wanted = min(args.shard_tokens, left) if meta['shards'] else args.val_tokens
                if wanted <= 0:
                    return
                part, tokens = np.split(tokens, [wanted - held])
                buffer.append(part)
                held, within = held + len(part), within + len(part)
                bar.update(len(part))
                if not len(tokens):
                    documents, within = documents + 1, 0
                if held == wanted:
                    finish_shard()
                    buffer, held = [], 0

    # the text ended before --tokens
    if not meta['shards']:
        raise UserError(f'the text has only {held:,} tokens, too few for --val_tokens={args.val_tokens}')
    if held:
        finish_shard()
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
    vocab_size = {'gpt2': 50257, 'bytes': 257, 'bpe': args.vocab_size or 1024}[args.tokenizer]
    settings = {'source': args.source, 'name': args.name, 'files': args.files, 'tokenizer': args.tokenizer,
                'vocab_size': vocab_size, 'requested_val_tokens': args.val_tokens,
                'shard_tokens': args.shard_tokens}
    fresh = {**settings, 'documents': 0, 'within_document': 0, 'val_tokens': 0, 'tokens': 0, 'shards': 0,
             'complete': False}
    meta_path = os.path.join(args.out, 'meta.json')
    meta = stored_meta(args.out, settings, fresh)
    if (meta['complete'] and meta['tokens'] >= args.tokens) or meta.get('exhausted'):
        print(f'{args.out} is done: {meta["tokens"]:,} training tokens in {meta["shards"]} shards')
        return

    # what cannot be read or downloaded is found before a folder is made
    if args.source != 'pretokenized':
        texts = read_texts(args)
        texts = itertools.chain(list(itertools.islice(texts, 1)), texts)
        encode = {'gpt2': encode_gpt2, 'bytes': encode_bytes}.get(args.tokenizer)
        if args.tokenizer == 'gpt2':
            gpt2()

    make_folder(args.out)
    with lock_folder(args.out):
        if stored_meta(args.out, settings, fresh) != meta:
            raise UserError(f'{args.out}: another process has just worked there; start again', status=3)
        meta['complete'] = False
        write_json(meta_path, meta)
        if args.source == 'pretokenized':
            with one_line(args):
                fetch_pretokenized(args, meta, meta_path)
        else:
            if args.tokenizer == 'bpe':
                tokenizer_path = os.path.join(args.out, 'tokenizer.json')
                if meta['shards'] == 0:
                    print('learning byte pairs', flush=True)
                    learn_bpe(read_texts(args), vocab_size, tokenizer_path)
                encode = functools.partial(encode_bpe, tokenizer_path)
            texts = itertools.islice(texts, meta['documents'], None)
            with contextlib.closing(encode_all(texts, encode, args.workers)) as encoded:
                fill_shards(encoded, args, meta, meta_path)
        write_json(meta_path, {**meta, 'complete': True})
    print(f'{args.out}: {meta["val_tokens"]:,} val and {meta["tokens"]:,} training tokens, '
          f'{meta["shards"]} shards, vocabulary {vocab_size}')


if __name__ == '__main__':
    run(main)
