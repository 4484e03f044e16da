"""
Turns text into token shards: FineWeb, shards that others published, local files, or Python's own standard library.

    python prepare_fineweb.py                                     # FineWeb sample-100BT, 13.2B GPT-2 tokens, 27 GB
    python prepare_fineweb.py --tokens=1e9                        # the first billion of them
    python prepare_fineweb.py --source=local --files='texts/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib     # no network, what the demo uses
    python prepare_fineweb.py --source=stdlib --tokenizer=bpe --out=data/stdlib_bpe   # no network, what the proxy grid uses

The val shard comes first, then the train shards. Every shard is written whole or not at all and meta.json says how far
the text is used up, so the same command continues where it was stopped.
"""
import argparse
import contextlib
import functools
import glob
import hashlib
import itertools
import logging
import multiprocessing
import os
import sysconfig

import numpy as np
from tqdm import tqdm

from common import die, lock_folder, make_folder, number, parse_args, read_json, run, write_atomic, write_json
from data import read_shard, write_shard

PRETOKENIZED = 'kjj0/fineweb100B-gpt2'  # GPT-2 tokens of FineWeb in this very format, 100M a shard


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = p.add_argument
    add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'],
        help='where the text comes from (default fineweb)')
    add('--out', default='data/fineweb', help='folder of the shards (default data/fineweb)')
    add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'bpe'],
        help='gpt2: by tiktoken; bytes: UTF-8 bytes and an end-of-text token, needs no download; bpe: byte pairs learned from the '
             'text itself, needs none either (default gpt2)')
    add('--vocab_size', type=number(257, below=2**16 + 1, integer=True), help='of --tokenizer=bpe, end-of-text and the 256 bytes included (default 1024)')
    add('--tokens', type=number(1, integer=True), default=13_200_000_000,
        help='training tokens to stop at; the paper sees 13.1e9 (default 13.2e9)')
    add('--val_tokens', type=number(1, below=2**31, integer=True), default=10_500_000, help='tokens in the val shard (default 10.5e6)')
    add('--shard_tokens', type=number(1, below=2**31, integer=True), default=100_000_000,
        help='tokens in a train shard (default 1e8, 200 MB)')
    add('--files', help="with --source=local: a quoted glob of .txt, .jsonl or .parquet files with a text column")
    add('--name', help='FineWeb config, such as sample-10BT (default sample-100BT), or the dataset of pretokenized shards '
                       f'(default {PRETOKENIZED})')
    add('--workers', type=number(1, below=1025, integer=True), default=os.cpu_count() or 1, help='tokenizing processes (default: all cores)')
    return p


# ----------------------------------------------------------------------------------------------------------------------
# documents: each source yields texts, in an order that is always the same


def stdlib_texts():
    """The .py files of the standard library, in an order shuffled by a hash so that val and train are alike."""
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


def dataset_texts(args):
    """The text column of FineWeb or of local files, through Hugging Face datasets, streaming."""
    if args.source == 'local':
        paths = sorted(glob.glob(args.files or ''))
        kinds = {os.path.splitext(path)[1] for path in paths}
        loaders = {'.txt': 'text', '.jsonl': 'json', '.parquet': 'parquet'}
        if not paths:
            die(f'--files={args.files}: no such files; give a quoted glob such as --files="texts/*.txt"')
        if len(kinds) > 1 or not kinds <= set(loaders):
            die(f'--files={args.files}: should match one kind of .txt, .jsonl or .parquet, matches {", ".join(sorted(kinds))}')
    import datasets  # slow to import, and not needed for the other sources
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said below, in one line
    if args.source == 'local':
        whole = {'sample_by': 'document'} if kinds == {'.txt'} else {}
        rows = datasets.load_dataset(loaders[kinds.pop()], data_files=paths, split='train', streaming=True, **whole)
    else:
        print('asking the Hugging Face hub for FineWeb', flush=True)
        logging.getLogger('huggingface_hub').setLevel(logging.CRITICAL)
        rows = datasets.load_dataset('HuggingFaceFW/fineweb', name=args.name or 'sample-100BT', split='train', streaming=True)
    for row in rows:
        if not isinstance(row.get('text'), str):
            die(f'--files={args.files}: each row needs a text column, found {", ".join(row)}')
        yield row['text']


# ----------------------------------------------------------------------------------------------------------------------
# tokens: every document starts with the end-of-text token


@functools.lru_cache(maxsize=1)
def gpt2():
    """tiktoken's GPT-2 encoding; raises whatever its download raises where its ranks are not at hand."""
    import tiktoken
    return tiktoken.get_encoding('gpt2')


def encode_gpt2(text):
    """text -> tokens (n,) uint16, the first is 50256."""
    return np.array([gpt2().eot_token] + gpt2().encode_ordinary(text), np.uint16)


def encode_bytes(text):
    """text -> tokens (n,) uint16: 256, then the UTF-8 bytes."""
    return np.concatenate(([256], np.frombuffer(text.encode('utf-8', 'surrogateescape'), np.uint8))).astype(np.uint16)


def learn_bpe(texts, vocab_size, path):
    """
    Learns byte pairs (GPT-2's splitting of the text, Sennrich et al. 2016) from the first 64 million characters of the texts
    and writes them to `path`. Token 0 is the end of text, then the 256 bytes, then the merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def first(characters):
        for text in texts:
            yield text
            characters -= len(text)
            if characters <= 0:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(first(64_000_000), trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=['<|endoftext|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    write_atomic(path, lambda file: file.write(tokenizer.to_str()), mode='w')


@functools.lru_cache(maxsize=1)
def bpe(path):
    """The tokenizer that learn_bpe wrote; exits with 2 where the file is not one."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:
        die(f'{path}: not a tokenizer ({str(error)[:100]}); choose another --out')
    tokenizer.encode_special_tokens = True  # an end-of-text that a text spells out is text
    return tokenizer


def encode_bpe(path, text):
    """text -> tokens (n,) uint16: 0, then the byte pairs."""
    return np.array([0] + bpe(path).encode(text.encode('utf-8', 'replace').decode()).ids, np.uint16)


def encode_all(texts, encode, workers):
    """Encodes texts in several processes, in order, reading ahead no more than a few thousand of them."""
    if workers == 1:
        yield from map(encode, texts)
        return
    # spawned, not forked: tokenizer threads do not survive a fork, and a fork would inherit the folder lock
    with multiprocessing.get_context('spawn').Pool(workers) as pool:
        while batch := list(itertools.islice(texts, 256 * workers)):
            results = pool.imap(encode, batch, chunksize=16)
            try:
                for tokens in results:  # not yield from, which would close `results` with this generator and leave nothing to wait for
                    yield tokens
            finally:  # also where the reader has enough: a worker ended while it holds the queue's lock would block us
                for _ in results:
                    pass


def fetch_pretokenized(args, meta, meta_path):
    """Downloads published shards: the val shard, then train shards until --tokens. Finished downloads are kept."""
    from huggingface_hub import hf_hub_download
    while not meta['complete']:
        i = meta['shards']
        file = f'fineweb_val_{0:06d}.bin' if i == 0 else f'fineweb_train_{i:06d}.bin'
        try:
            tokens = len(read_shard(hf_hub_download(args.name or PRETOKENIZED, file, repo_type='dataset', local_dir=args.out)))
        except Exception as error:
            if i > 1 and type(error).__name__ in ('EntryNotFoundError', 'RemoteEntryNotFoundError'):
                print(f'{args.name or PRETOKENIZED} has no more shards')
                break
            raise
        meta.update(shards=i + 1, **{'val_tokens' if i == 0 else 'tokens': tokens + (0 if i == 0 else meta['tokens'])})
        meta['complete'] = meta['tokens'] >= args.tokens
        write_json(meta_path, meta)
        print(f'{file}: {tokens:,} tokens')
    write_json(meta_path, {**meta, 'complete': True})


def no_network(args, error):
    """One line for a download that failed, with what to do instead."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    die(f'--source={args.source}: download failed ({first}); without a network use --source=stdlib --tokenizer=bytes', 1)


def no_text(args, error):
    """One line for a source that cannot be read."""
    if args.source == 'fineweb':
        no_network(args, error)
    die(f'--files={args.files}: {error}' if args.source == 'local' else f'--source={args.source}: {error}', 2 if args.source == 'local' else 1)


def stored_meta(folder, settings, fresh):
    """
    The meta.json in `folder`, or `fresh` where no shard is finished. Exits with 2 where it was made with other settings,
    is damaged, or counts shards that are not there.
    """
    path = os.path.join(folder, 'meta.json')
    shards = {split: sorted(glob.glob(os.path.join(glob.escape(folder), f'*_{split}_*.bin'))) for split in ('val', 'train')}
    if not os.path.exists(path):
        if any(shards.values()):
            die(f'--out={folder} has shards but no meta.json; choose another folder')
        return fresh
    meta = read_json(path)
    if meta.get('shards') == 0:
        return fresh
    for key, value in settings.items():
        if meta.get(key) != value:
            die(f'{path} was made with {key}={meta.get(key)!r}, this command says {value!r}; choose another --out')
    for key in fresh:
        if key not in settings and (type(meta.get(key)) is not type(fresh[key]) or meta[key] < 0):
            die(f'{path}: {key} should not be {meta.get(key)!r}; it is damaged, choose another --out')
    for split, n, tokens in (('val', 1, meta['val_tokens']), ('train', meta['shards'] - 1, meta['tokens'])):
        found = sum(len(read_shard(shard)) for shard in shards[split][:n])
        if found != tokens:
            die(f'{path} counts {n} {split} shards with {tokens:,} tokens, the folder has {found:,} in {len(shards[split])}; choose another --out')
    return meta


def main(argv=None):
    args = parse_args(parser(), argv)
    if (args.files is not None) != (args.source == 'local'):
        die('--source=local needs --files="GLOB", and --files needs --source=local')
    if args.name is not None and args.source not in ('fineweb', 'pretokenized'):
        die(f'--name={args.name} needs --source=fineweb or pretokenized')
    if args.vocab_size is not None and args.tokenizer != 'bpe':
        die(f'--vocab_size={args.vocab_size} needs --tokenizer=bpe')

    # what the shards depend on; the same command finds it in meta.json and continues
    settings = {'source': args.source, 'name': args.name, 'files': args.files, 'tokenizer': args.tokenizer,
                'vocab_size': {'gpt2': 50257, 'bytes': 257, 'bpe': args.vocab_size or 1024}[args.tokenizer],
                'requested_val_tokens': args.val_tokens, 'shard_tokens': args.shard_tokens}
    fresh = {**settings, 'documents': 0, 'within_document': 0,
             'val_tokens': 0, 'tokens': 0, 'shards': 0, 'complete': False}
    meta_path = os.path.join(args.out, 'meta.json')
    meta = stored_meta(args.out, settings, fresh)
    if meta['complete'] and meta['tokens'] >= args.tokens or meta.get('exhausted'):
        print(f'{args.out} is done: {meta["tokens"]:,} training tokens in {meta["shards"]} shards')
        return

    encode = encode_bytes
    if args.source == 'pretokenized' and args.tokenizer != 'gpt2':
        die('--source=pretokenized has GPT-2 tokens: leave out --tokenizer')
    if args.source != 'pretokenized':
        read = stdlib_texts if args.source == 'stdlib' else functools.partial(dataset_texts, args)
        texts = read()
        try:
            first = list(itertools.islice(texts, 1))  # files that cannot be read are found before a folder is made
        except (OSError, RuntimeError, ValueError) as error:
            no_text(args, error)
        texts = itertools.chain(first, texts)
    if args.source != 'pretokenized' and args.tokenizer == 'gpt2':
        encode = encode_gpt2
        try:
            gpt2()
        except Exception as error:
            die(f"--tokenizer=gpt2: tiktoken could not load its ranks ({type(error).__name__}); "
                "they are downloaded on first use. Without a network use --tokenizer=bytes", 1)

    make_folder(args.out)
    lock = lock_folder(args.out)
    if stored_meta(args.out, settings, fresh) != meta:
        die(f'{args.out}: another process has just worked in this folder; start again', 3)
    meta['complete'] = False
    write_json(meta_path, meta)
    if args.source == 'pretokenized':
        try:
            fetch_pretokenized(args, meta, meta_path)
        except Exception as error:
            no_network(args, error)
        return

    if args.tokenizer == 'bpe':
        path = os.path.join(args.out, 'tokenizer.json')
        try:
            if meta['shards'] == 0:
                print('learning byte pairs', flush=True)
                learn_bpe(read(), args.vocab_size or 1024, path)
        except (OSError, RuntimeError, ValueError) as error:
            no_text(args, error)
        if not os.path.exists(path):
            die(f'{path} is gone, and the shards there need it; choose another --out')
        encode = functools.partial(encode_bpe, path)

    name = 'fineweb' if args.source == 'fineweb' else args.source
    buffer, held = [], 0              # tokens of the shard in the making
    skip = meta['within_document']    # tokens of the next document that a finished shard has already
    documents, within = meta['documents'], skip
    bar = tqdm(total=args.tokens + args.val_tokens, initial=meta['tokens'] + meta['val_tokens'], unit='tok', unit_scale=True,
               mininterval=1, disable=None)

    def room():
        """Tokens that still go into the shard in the making."""
        return (args.val_tokens if meta['shards'] == 0 else min(args.shard_tokens, args.tokens - meta['tokens'])) - held

    def finish_shard():
        """Writes the shard, then says so in meta.json: killed in between, the same shard is made again."""
        split = 'val' if meta['shards'] == 0 else 'train'
        write_shard(os.path.join(args.out, f'{name}_{split}_{max(0, meta["shards"] - 1):06d}.bin'), np.concatenate(buffer))
        meta.update(shards=meta['shards'] + 1, documents=documents, within_document=within)
        meta['val_tokens' if split == 'val' else 'tokens'] += held
        write_json(meta_path, meta)

    try:
        with contextlib.closing(encode_all(itertools.islice(texts, documents, None), encode, args.workers)) as encoded:
            for tokens in encoded:
                tokens, within = tokens[skip:], skip
                skip = 0
                while len(tokens) and room() > 0:
                    part = tokens[:room()]
                    buffer.append(part)
                    held, within, tokens = held + len(part), within + len(part), tokens[len(part):]
                    bar.update(len(part))
                    if len(tokens) == 0:
                        documents, within = documents + 1, 0
                    if room() == 0:
                        finish_shard()
                        buffer, held = [], 0
                if room() <= 0:
                    break
            else:  # the text ended before --tokens
                if meta['shards'] == 0:
                    die(f'the text has only {held:,} tokens, too few for --val_tokens={args.val_tokens}')
                if held:
                    finish_shard()
                meta['exhausted'] = True
    except (OSError, RuntimeError, ValueError) as error:
        no_text(args, error)
    bar.close()
    if meta['tokens'] == 0:
        die(f'the text has only {meta["val_tokens"]:,} tokens, none are left to train on; lower --val_tokens')
    write_json(meta_path, {**meta, 'complete': True})
    print(f'{args.out}: {meta["documents"]:,} documents, {meta["val_tokens"]:,} val and {meta["tokens"]:,} training tokens, '
          f'{meta["shards"]} shards, vocabulary {meta["vocab_size"]}')
    lock.close()


if __name__ == '__main__':
    run(main)
