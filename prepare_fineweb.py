"""
Turns text into token shards for train.py. The same command resumes where it was stopped.

    python prepare_fineweb.py                         # FineWeb: 13.2 billion GPT-2 tokens, 26 GB
    python prepare_fineweb.py --source=pretokenized   # what the authors trained on: kjj0/fineweb100B-gpt2
    python prepare_fineweb.py --source=local --files='texts/**/*.jsonl' --out=data/mine
    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib   # needs no network
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

import fsspec
import numpy as np
import pyarrow.parquet
import tiktoken

from train import SHARD, check, lock_folder, positive_int, read_json, read_shard, save, shard_length

parser = argparse.ArgumentParser(usage='%(prog)s [--flag=value ...]', allow_abbrev=False,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'], help='of text')
add('--name', help='config of FineWeb (None: sample-100BT), or dataset of shards (None: that of the authors)')
add('--files', type=os.path.expanduser, help='quoted glob: .txt, .jsonl or .parquet (column: text)')
add('--out', type=os.path.expanduser, help='folder of the shards (None: data/fineweb or data/stdlib)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes'], help='bytes works offline')
add('--tokens', type=positive_int, default=13_200_000_000, help='to train on')
add('--val_tokens', type=positive_int,
    help='in the val shard (None: 10.5e6; of stdlib at most half; local: 1e5)')
add('--shard_tokens', type=positive_int, default=100_000_000, help='in a train shard, of 2 bytes each')
add('--workers', type=positive_int, default=os.cpu_count(), help='tokenizing threads')


def golden_order(items):
    """The items in an order whose first n lie evenly spread, for any n: by i / (golden ratio) modulo 1."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def local_files(pattern):
    """The .txt, .jsonl or .parquet files that match a glob, sorted by name."""
    found = sorted(glob.glob(pattern, recursive=True), reverse=True)
    # a file with several names, by links or a second **, is read once, under the first of them
    paths = sorted({os.path.realpath(path): path for path in found if not os.path.isdir(path)}.values())
    others = [path for path in paths if not path.endswith(('.txt', '.jsonl', '.parquet'))]
    check(paths and not others, f'{pattern} should match .txt, .jsonl or .parquet files; has {others[:3]}')
    return paths


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = os.path.dirname(os.__file__)
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    paths = [f'{root}/{name}' for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    return [path for path in paths if os.path.getsize(path)]


def file_rows(path):
    """The text of each row of a local or hf:// file. A .txt or .py file is one row."""
    if path.endswith('.parquet'):
        with fsspec.open(path, block_size=2**23) as file:  # the hub's client retries each block
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
            # Threads, as `datasets` has them, abort Python if a program ends in the middle of a file.
            for batch in parquet.iter_batches(256, columns=['text'], use_threads=False):
                yield from batch['text'].to_pylist()
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as file:
            yield from (json.loads(line)['text'] for line in file if line.strip())
    else:
        # Some of Python's own tests are not UTF-8, or begin with a byte order mark, on purpose.
        encoding, errors = ('utf-8', 'replace') if path.endswith('.py') else ('utf-8-sig', 'strict')
        with open(path, encoding=encoding, errors=errors) as file:
            yield file.read()


def read_texts(paths, first_file=0, first_row=0):
    """Yields (file number, row, bytes of that file's text so far, text), from a row of a file on."""
    for file, path in enumerate(paths[first_file:], first_file):
        row = n_bytes = 0
        try:
            for text in file_rows(path):
                utf8 = text.encode(errors='replace')  # half a surrogate pair becomes a ?
                n_bytes += len(utf8)
                if file > first_file or row >= first_row:
                    yield file, row, n_bytes, utf8.decode()
                row += 1
        except Exception as error:  # of many kinds; in which of a thousand files?
            raise ValueError(f'{path}, row {row}: {error!r}') from error


def load_encoder(name):
    """The function text -> its tokens (n,) uint16, the first of which is end-of-text."""
    if name == 'bytes':
        return lambda text: np.append(np.uint16(256), np.frombuffer(text.encode(), np.uint8))
    gpt2 = tiktoken.get_encoding('gpt2')
    # A million white spaces before a word overflow tiktoken's stack; GPT-2 splits before the last one anyway.
    space = r'[^\S\x1c-\x1f]'  # to GPT-2; to Python \x1c to \x1f as well
    last_space = re.compile(rf'(?={space}(?!{space}).)(?<={space}{{1000}})', re.DOTALL)

    def encode(text):
        parts = last_space.split(text) if len(text) > 100_000 else [text]
        tokens = [gpt2.encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate([[gpt2.eot_token], *tokens], dtype=np.uint16, casting='unsafe')
    return encode


def tokenize(texts, args):
    """Yields what read_texts does, but with tokens instead of each text. Both tokenizers free the GIL."""
    encode = load_encoder(args.tokenizer)
    with ThreadPoolExecutor(args.workers) as pool:
        while batch := list(itertools.islice(texts, 1024)):
            encoded = pool.map(encode, [text for *_, text in batch])
            for (*place, _), tokens in zip(batch, encoded, strict=True):
                yield *place, tokens


def cut_shards(texts, starts, val, args, meta):
    """
    Yields each shard to train on, (n,), and where the next one starts. The list `val` gets the first tokens.
    Of local files, whose bytes begin at `starts`, it gets whole documents, spread over all: one whenever it
    has a smaller part of --val_tokens than was read of the files, or trained on of --tokens; the last is cut.
    """
    parts, held = [], 0  # of the next shard: arrays of tokens, and how many
    used = meta['used']  # tokens of the document that are in shards or parts
    n_val = sum(map(len, val))
    due = 0 if meta['shards'] else args.val_tokens  # what n_val should be by now; 0: to resume a document
    for file, row, n_bytes, tokens in tokenize(texts, args):
        if n_val < due:
            val.append(tokens[:args.val_tokens - n_val])
            n_val += len(val[-1])
            used = len(tokens) if starts else len(val[-1])
        while used < len(tokens):
            size = min(args.shard_tokens, args.tokens - meta['tokens'])
            if held == size:
                yield np.concatenate(parts), {'file': file, 'row': row, 'used': used}
                parts, held = [], 0
            else:
                parts.append(tokens[used:used + size - held])
                held, used = held + len(parts[-1]), used + len(parts[-1])
        used = 0
        if starts:
            read = min(starts[file] + n_bytes, starts[file + 1])  # a compressed file is shorter than its text
            due = args.val_tokens * max(read / starts[-1], (meta['tokens'] + held) / args.tokens)
    check(held, f'too few documents or tokens for training and --val_tokens={args.val_tokens}')
    yield np.concatenate(parts), {'exhausted': True}


def write_shard(path, tokens):
    """Writes `tokens` (n,), n < 2^31, from 0 to 65535, as one shard, atomically."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(header.tobytes() + tokens.astype('<u2').tobytes(), path)


def fetch_shards(args, meta):
    """Downloads published shards, a val shard, then in golden order those to train on, and yields these."""
    from huggingface_hub import HfApi, hf_hub_download
    info = HfApi().dataset_info(args.name, revision=meta.get('revision'), timeout=30)
    meta['revision'] = info.sha
    save(meta, f'{args.out}/meta.json')  # all later shards are of the same commit
    files = [file.rfilename for file in info.siblings]
    val, train = (sorted(fnmatch.filter(files, SHARD.format(split))) for split in ('val', 'train'))
    check(val and train, f'--name={args.name} has no *_val_*.bin and *_train_*.bin (six digits last)')
    paths = val[:1] + golden_order(train)
    for path in paths[meta['shards']:]:  # the hub's client resumes a download that was cut short
        download = hf_hub_download(args.name, path, repo_type='dataset', revision=info.sha,
                                   local_dir=f'{args.out}/.download')
        shard_length(download)  # refuses what is not a whole shard before it stands where train.py looks
        shard = f'{args.out}/{os.path.basename(path)}'
        os.replace(download, shard)
        if path != paths[0]:
            yield read_shard(shard), {'exhausted': path == paths[-1]}


def main(argv=None):
    args = parser.parse_args(argv)
    local = args.source == 'local'
    check(bool(args.files) == local and (args.out or not local), '--source=local needs --files and --out')
    args.out = args.out or ('data/stdlib' if args.source == 'stdlib' else 'data/fineweb')
    names = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}
    args.name = args.name or names.get(args.source)
    if args.val_tokens is None:
        args.val_tokens = 100_000 if local else 10_500_000
        if args.source == 'stdlib':  # half of the text of a Python that comes without its tests
            args.val_tokens = min(args.val_tokens, sum(map(os.path.getsize, stdlib_files())) // 2)

    # what the shards depend on: the same command finds it in meta.json and resumes
    settings = {key: value for key, value in vars(args).items() if key not in ('out', 'tokens', 'workers')}
    settings['vocab_size'] = 50257 if args.tokenizer == 'gpt2' else 257
    meta = {**settings, 'shards': 0, 'tokens': 0, 'file': 0, 'row': 0, 'used': 0, 'exhausted': False}
    meta_path = f'{args.out}/meta.json'
    if glob.glob(f'{glob.escape(args.out)}/{SHARD.format("*")}'):
        meta = read_json(meta_path)
        other = [f'{key}={meta.get(key)!r}' for key in settings if meta.get(key) != settings[key]]
        check(not other, f'{meta_path} was made with {", ".join(other)}; choose another --out')
    if meta['exhausted'] or meta['tokens'] >= args.tokens:
        return print(f'{args.out} is done: {meta["tokens"]:,} training tokens, {meta["shards"]} shards')

    if args.source == 'pretokenized':
        shards = fetch_shards(args, meta)
    else:
        if args.source == 'fineweb':
            from datasets import load_dataset_builder  # takes a second
            builder = load_dataset_builder('HuggingFaceFW/fineweb', args.name, revision=meta.get('revision'))
            paths = golden_order(sorted(builder.config.data_files['train']))
            meta['revision'] = re.search('@(.*?)/', paths[0])[1]  # the commit, for all that is read later
        elif args.source == 'stdlib':
            paths = stdlib_files()
        else:
            paths = local_files(args.files)
            stats = [[os.path.getsize(path), os.path.getmtime(path)] for path in paths]
            check(meta.setdefault('stats', stats) == stats, '--files have changed; choose another --out')
        val_path = f'{args.out}/{args.source}_val_000000.bin'
        val = [read_shard(val_path)[:meta.get('val')]] if meta['shards'] else []
        starts = [0, *itertools.accumulate(size for size, _ in stats)] if local else None
        shards = cut_shards(read_texts(paths, meta['file'], meta['row']), starts, val, args, meta)

    with lock_folder(args.out):
        save(meta, meta_path)
        for shard, position in shards:
            n = max(1, meta['shards'])
            if args.source != 'pretokenized':
                write_shard(val_path, np.concatenate(val))  # may be longer than meta['val'] after a kill here
                write_shard(f'{args.out}/{args.source}_train_{n - 1:06d}.bin', shard)
            if local:
                meta['val'] = sum(map(len, val))
            meta.update(position, shards=n + 1, tokens=meta['tokens'] + len(shard))
            save(meta, meta_path)
            print(f'{args.out}: {meta["tokens"]:,} training tokens, {meta["shards"]} shards', flush=True)
            if meta['tokens'] >= args.tokens:
                break


if __name__ == '__main__':
    main()
