"""
Turns text into token shards for train.py. Run the same command again to resume.

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

from train import SHARD, check, lock_folder, number, read_json, read_shard, save, shard_length

parser = argparse.ArgumentParser(usage='%(prog)s [--flag=value ...]', allow_abbrev=False,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add('--source', default='fineweb', choices=['fineweb', 'pretokenized', 'local', 'stdlib'], help='which text')
add('--name', help="config of FineWeb, or dataset of shards (%(default)s: sample-100BT, or the authors')")
add('--files', type=os.path.expanduser, help='quoted glob of .txt, .jsonl or .parquet files (column: text)')
add('--out', type=os.path.expanduser, help='folder of the shards (%(default)s: data/fineweb or data/stdlib)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes'], help='bytes needs no download')
add('--tokens', type=number, default=13_200_000_000, help='tokens to train on, at most')
add('--val_tokens', type=number, default=10_500_000, help='tokens for val: the first ones; of local '
    'files at most so many: the end of each document, or of 100 and more 1%%, chosen by hash')
add('--shard_tokens', type=number, default=100_000_000, help='tokens in a train shard, 2 bytes each')
add('--workers', type=number, default=os.cpu_count(), help='threads that tokenize')


def golden_order(items):
    """The items in an order whose first n lie evenly spread, for any n: by i / (golden ratio) modulo 1."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def local_files(pattern):
    """The .txt, .jsonl or .parquet files that match a glob, sorted by name."""
    found = sorted(glob.glob(pattern, recursive=True), reverse=True)
    # a file with several names, by links or a second **, is read once, under the first of them
    paths = sorted({os.path.realpath(path): path for path in found if not os.path.isdir(path)}.values())
    others = [path for path in paths if not path.endswith(('.txt', '.jsonl', '.parquet'))]
    check(paths and not others, f'{pattern} should match .txt, .jsonl or .parquet files, not {others[:3]}')
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
        newline = None if path.endswith('.py') else ''  # line ends as they are, as in jsonl
        with open(path, encoding=encoding, errors=errors, newline=newline) as file:
            yield file.read()


def read_texts(paths, first_file=0, first_row=0):
    """Yields (file number, row, text), from a row of a file on."""
    for file, path in enumerate(paths[first_file:], first_file):
        row = 0
        try:
            for text in file_rows(path):
                if file > first_file or row >= first_row:
                    yield file, row, text.encode(errors='replace').decode()  # half a surrogate pair: a ?
                row += 1
        except Exception as error:  # of many kinds; in which of a thousand files?
            raise ValueError(f'{path}, row {row}: {error!r}') from error


def load_encoder(name):
    """The function text -> its tokens (n,) uint16, the first of which is end-of-text."""
    if name == 'bytes':
        return lambda text: np.append(np.uint16(256), np.frombuffer(text.encode(), np.uint8))
    bpe = tiktoken.get_encoding(name)
    # A million white spaces before a word overflow tiktoken's stack; GPT-2 splits before the last one anyway.
    space = r'[^\S\x1c-\x1f]'  # to GPT-2; to Python \x1c to \x1f as well
    last_space = re.compile(rf'(?={space}(?!{space}).)(?<={space}{{1000}})', re.DOTALL)

    def encode(text):
        parts = last_space.split(text) if len(text) > 100_000 else [text]
        tokens = [bpe.encode_to_numpy(part, disallowed_special=()) for part in parts]
        tokens = np.concatenate([[np.uint32(bpe.eot_token)], *tokens])
        check(tokens.max() < 2**16, f'--tokenizer={name}: token {tokens.max()}, but shards hold 16 bits')
        return tokens.astype(np.uint16)
    return encode


def tokenize(texts, args):
    """Yields what read_texts does, and the tokens of each text. Both tokenizers free the GIL."""
    encode = load_encoder(args.tokenizer)
    with ThreadPoolExecutor(args.workers) as pool:
        while batch := list(itertools.islice(texts, 1024)):
            encoded = pool.map(encode, [text for *_, text in batch])
            yield from ((*document, tokens) for document, tokens in zip(batch, encoded, strict=True))


def hold_out(documents, val, args, meta):
    """
    Yields the local documents without what goes into the list `val`, --val_tokens at most: of fewer than 100
    documents the last tenth of each; of more the first one and 1% of the others, chosen by hash.
    """
    first = list(itertools.islice(documents, 100))
    few = meta.setdefault('few', len(first) % 100)  # 0: many
    for file, row, text, tokens in itertools.chain(first, documents):
        if few:
            n = min(len(tokens) // 10, args.val_tokens // few)
            held, tokens = tokens[len(tokens) - n:].copy(), tokens[:len(tokens) - n]
            held[:1] = tokens[0]  # end-of-text, with which every document begins
            if [file, row] <= meta.setdefault('held', [-1, 0]):
                held = held[:0]  # it was added before the stop
            meta['held'] = max(meta['held'], [file, row])
        else:
            bucket = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
            is_val = bucket == meta.setdefault('bucket', bucket)  # the first document's
            held = tokens[:args.val_tokens - meta['val'] if is_val else 0]
            tokens = tokens[:0] if is_val else tokens
        val.append(held)
        meta['val'] += len(held)
        yield file, row, text, tokens


def cut_shards(documents, args, meta):
    """Yields the tokens (n,) of each shard, and where the next one starts: at which token of a document."""
    parts, n = [], 0  # of this shard, and how many tokens that is
    start = meta['used']  # in the first document: what is before it is in earlier shards
    for file, row, _, tokens in documents:
        while start < len(tokens):
            size = min(args.shard_tokens, args.tokens - meta['tokens']) if meta['shards'] else args.val_tokens
            if n == size:
                yield np.concatenate(parts), {'file': file, 'row': row, 'used': start}
                parts, n = [], 0
            else:
                parts.append(tokens[start:start + size - n])
                n, start = n + len(parts[-1]), start + len(parts[-1])
        start = 0
    check(parts and meta['shards'], 'all is for val: give more documents or fewer --val_tokens')
    yield np.concatenate(parts), {'exhausted': True}


def write_shard(path, tokens):
    """Writes `tokens` (n,) uint16, n < 2^31, as one shard, atomically."""
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, '<i4')
    save(header.tobytes() + tokens.astype('<u2', casting='safe').tobytes(), path)


def fetch_shards(args, meta):
    """Downloads and yields published shards: one for val, then in golden order those to train on."""
    from huggingface_hub import HfApi, hf_hub_download
    info = HfApi().dataset_info(args.name, revision=meta.get('revision'), timeout=30)
    meta['revision'] = info.sha
    save(meta, f'{args.out}/meta.json')  # all later shards are of the same commit
    files = [file.rfilename for file in info.siblings]
    val, train = (sorted(fnmatch.filter(files, SHARD.format(split))) for split in ('val', 'train'))
    check(val and train and len({*map(os.path.basename, val + train)}) == len(val + train),
          f'--name={args.name} should have *_val_*.bin and *_train_*.bin (six digits last), each name once')
    paths = val[:1] + golden_order(train)
    for path in paths[meta['shards']:]:  # the hub's client resumes a download that was cut short
        download = hf_hub_download(args.name, path, repo_type='dataset', revision=info.sha,
                                   local_dir=f'{args.out}/.download')
        shard_length(download)  # refuses what is not a whole shard before it stands where train.py looks
        shard = f'{args.out}/{os.path.basename(path)}'
        os.replace(download, shard)
        yield read_shard(shard), {'exhausted': path == paths[-1]}


def main(argv=None):
    args = parser.parse_args(argv)
    local = args.source == 'local'
    check(bool(args.files) == local and (args.out or not local), '--source=local needs --files and --out')
    args.out = args.out or ('data/stdlib' if args.source == 'stdlib' else 'data/fineweb')
    names = {'fineweb': 'sample-100BT', 'pretokenized': 'kjj0/fineweb100B-gpt2'}
    args.name = args.name or names.get(args.source)
    paths = stdlib_files() if args.source == 'stdlib' else local_files(args.files) if local else []
    if args.source == 'stdlib' and args.val_tokens == parser.get_default('val_tokens'):
        args.val_tokens = min(args.val_tokens, sum(map(os.path.getsize, paths)) // 2)  # a small Python: half
    check(max(args.val_tokens, args.shard_tokens) < 2**31, 'a shard has less than 2^31 tokens')

    # what the shards depend on: the same command finds it in meta.json and resumes
    settings = {key: value for key, value in vars(args).items() if key not in ('out', 'tokens', 'workers')}
    settings['vocab_size'] = {'gpt2': 50257, 'bytes': 257}[args.tokenizer]
    if local:
        stats = repr([(os.path.getsize(path), os.path.getmtime(path)) for path in paths])
        settings['found'] = f'{len(paths)} files ({hashlib.sha256(stats.encode()).hexdigest()[:16]})'
    meta = {**settings, 'shards': int(local), 'tokens': 0, 'val': 0, 'file': 0, 'row': 0, 'used': 0}
    meta_path = f'{args.out}/meta.json'
    if glob.glob(SHARD.format('*'), root_dir=args.out):
        meta = read_json(meta_path)
        other = [f'{key}={meta.get(key)!r}' for key in settings if meta.get(key) != settings[key]]
        check(not other, f'{meta_path} was made with {", ".join(other)}; choose another --out')
    if meta.get('exhausted') or meta['tokens'] >= args.tokens:
        if meta.get('finished') is False:  # it was stopped on the way to more --tokens
            save(meta | {'finished': True}, meta_path)
        return print(f'{args.out} is done: {meta["tokens"]:,} training tokens')

    val_path = f'{args.out}/{args.source}_val_000000.bin'
    if args.source == 'pretokenized':
        shards = fetch_shards(args, meta)
    else:
        if args.source == 'fineweb':
            from datasets import load_dataset_builder  # takes a second
            builder = load_dataset_builder('HuggingFaceFW/fineweb', args.name, revision=meta.get('revision'))
            paths = golden_order(sorted(builder.config.data_files['train']))
            meta['revision'] = re.search('@(.*?)/', paths[0])[1]  # the commit, for all that is read later
        documents = tokenize(read_texts(paths, meta['file'], meta['row']), args)
        if local:
            val = [read_shard(val_path, 0, meta['val'])] if meta['val'] else []
            documents = hold_out(documents, val, args, meta)
        shards = cut_shards(documents, args, meta)

    with lock_folder(args.out):
        meta.update(eot=settings['vocab_size'] - 1, finished=False)
        save(meta, meta_path)
        for shard, position in shards:
            name = f'train_{meta["shards"] - 1:06d}' if meta['shards'] else 'val_000000'
            if local:  # a kill after this leaves more val tokens than meta.json says
                write_shard(val_path, np.concatenate(val))
            if args.source != 'pretokenized':
                write_shard(f'{args.out}/{args.source}_{name}.bin', shard)
            meta['tokens'] += len(shard) if meta['shards'] else 0
            meta.update(position, shards=meta['shards'] + 1)
            meta['finished'] = meta.get('exhausted', False) or meta['tokens'] >= args.tokens
            save(meta, meta_path)
            n_val = sum(map(shard_length, glob.glob(f'{glob.escape(args.out)}/{SHARD.format("val")}')))
            ends = f', the end of each of {meta["few"]} documents' if meta.get('few') else ''
            print(f'{args.out}: {n_val:,} val tokens{ends}; {meta["tokens"]:,} training tokens', flush=True)
            if meta['finished']:
                break


if __name__ == '__main__':
    main()
