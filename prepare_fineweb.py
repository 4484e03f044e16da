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
add('--files', type=os.path.expanduser, help='quoted glob: .txt, .md, .rst; .jsonl, .parquet (field: text)')
add('--out', type=os.path.expanduser, help='folder of the shards (%(default)s: data/fineweb or data/stdlib)')
add('--tokenizer', default='gpt2', choices=['gpt2', 'bytes', 'chars'],
    help='bytes and chars need no download')
add('--tokens', type=number, default=13_200_000_000, help='tokens to train on, at most')
add('--val_tokens', type=number, default=10_500_000, help='tokens held out: the first ones; of local '
    'files the first 5,000 of every 50,000, up to this many')
add('--shard_tokens', type=number, default=100_000_000, help='tokens in a train shard, 2 bytes each')
add('--workers', type=number, default=os.cpu_count(), help='threads that tokenize')

HELD, OF = 5_000, 50_000  # of local files the first 5,000 of every 50,000 tokens are for val


def golden_order(items):
    """The items in an order whose first n lie evenly spread, for any n: by i / (golden ratio) modulo 1."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * (5**0.5 - 1) / 2 % 1)]


def local_files(pattern):
    """The files that match a glob, sorted by name; a file with several names is there once."""
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    check(found, f'no file matches {pattern}')
    endings = ('.txt', '.md', '.rst', '.jsonl', '.parquet')
    others = [path for path in found if not path.endswith(endings)]
    check(not others, f'{pattern} should match {", ".join(endings)} files, not {others[:3]}')
    found.sort(reverse=True)  # so that its first name stays; a second ** finds all files again
    return sorted({os.path.realpath(path): path for path in found}.values())


def stdlib_files():
    """The .py files of the standard library, shuffled by a hash so that val and train are alike."""
    root = os.path.dirname(os.__file__)
    names = glob.glob('**/*.py', root_dir=root, recursive=True)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    paths = [f'{root}/{name}' for name in names if not re.search('(^|/)(site|dist)-packages/', name)]
    return [path for path in paths if os.path.getsize(path)]


def file_rows(path):
    """The documents of a local or hf:// file: rows, lines, or what <|endoftext|> separates in a text."""
    if path.endswith('.parquet'):
        with fsspec.open(path, block_size=2**23) as file:  # the hub's client retries each block
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
            # Threads, as `datasets` has them, abort Python if a program ends in the middle of a file.
            for batch in parquet.iter_batches(256, columns=['text'], use_threads=False):
                yield from batch['text'].to_pylist()
    elif path.endswith('.jsonl'):
        with open(path, encoding='utf-8-sig') as file:
            yield from (json.loads(line)['text'] for line in file if line.strip())
    elif path.endswith('.py'):  # some of Python's own tests are not UTF-8, on purpose
        with open(path, encoding='utf-8', errors='replace') as file:
            yield file.read()
    else:
        with open(path, encoding='utf-8-sig', newline='') as file:  # line ends as they are, as in .jsonl
            text = file.read()
        if '\0' in text:
            raise ValueError('there are NULs in it: is it UTF-16?')
        yield from text.split('<|endoftext|>')


def read_texts(paths, first_file=0, first_row=0):
    """Yields (file number, row, text) of all documents that are not empty, from a row of a file on."""
    for file, path in enumerate(paths[first_file:], first_file):
        row = 0
        try:
            for text in file_rows(path):
                if text and (file > first_file or row >= first_row):
                    yield file, row, text.encode(errors='replace').decode()  # half a surrogate pair: a ?
                row += 1
        except Exception as error:  # of many kinds; in which of a thousand files?
            raise ValueError(f'{path}, row {row}: {error!r}') from error


# The 63 most frequent characters of Python's standard library. Token 63 is every other byte, and end-of-text.
CHARS = b' estaronil\nfcd._()pu,\'mh"g=b:0xEyTwk1-I#vAN2RLS\\Cq][OPFD3>M45*U'


def load_encoder(name):
    """The function text -> its tokens (n,) uint16, the first of which is end-of-text."""
    if name == 'chars':
        ids = np.full(256, len(CHARS), np.uint16)
        ids[list(CHARS)] = range(len(CHARS))
        return lambda text: np.append(np.uint16(len(CHARS)), ids[np.frombuffer(text.encode(), np.uint8)])
    if name == 'bytes':
        return lambda text: np.append(np.uint16(256), np.frombuffer(text.encode(), np.uint8))
    bpe = tiktoken.get_encoding(name)  # of fewer than 2^16 tokens

    def encode(text):
        try:
            tokens = bpe.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million white spaces overflow tiktoken's stack: cut the text in two
            return np.append(encode(text[:len(text) // 2]), encode(text[len(text) // 2:])[1:])
        return np.append(np.uint16(bpe.eot_token), tokens.astype(np.uint16))
    return encode


def tokenize(texts, args, before=0):
    """Yields (file, row, before, tokens) of texts: `before` is the number of tokens in all earlier ones."""
    encode = load_encoder(args.tokenizer)
    with ThreadPoolExecutor(args.workers) as pool:  # both tokenizers free the GIL
        while batch := list(itertools.islice(texts, 1024)):
            encoded = pool.map(encode, [text for *_, text in batch])
            for (file, row, _), tokens in zip(batch, encoded, strict=True):
                yield file, row, before, tokens
                before += len(tokens)


def is_held_out(before, n, args):
    """Which of the n tokens of a local document are for val, by their place in all of the text alone."""
    stretch, place = np.divmod(np.arange(before, before + n), OF)
    return (place < HELD) & (stretch * HELD + place < args.val_tokens)


def hold_out(paths, args):
    """Yields the val shard of local files. They are read once more for the others."""
    parts, n_val, n = [], 0, 0
    for _, _, before, tokens in tokenize(read_texts(paths), args):
        parts.append(tokens[is_held_out(before, len(tokens), args)])
        n_val, n = n_val + len(parts[-1]), before + len(tokens)
        if n > n_val == args.val_tokens:
            break
    yield np.concatenate(parts or [[]]), {'exhausted': n == n_val}


def cut_shards(documents, args, meta):
    """Yields the tokens (n,) of each shard, and where the next one starts: at which token of a document."""
    parts, n = [], 0  # of this shard, and how many tokens that is
    used = meta['used']  # tokens of the first document: they are in earlier shards
    for file, row, before, tokens in documents:
        if args.source == 'local':
            tokens = tokens[~is_held_out(before, len(tokens), args)]
        while used < len(tokens):
            size = min(args.shard_tokens, args.tokens - meta['tokens']) if meta['shards'] else args.val_tokens
            if n == size:
                yield np.concatenate(parts), {'file': file, 'row': row, 'before': before, 'used': used}
                parts, n = [], 0
            else:
                parts.append(tokens[used:used + size - n])
                n, used = n + len(parts[-1]), used + len(parts[-1])
        used = 0
    yield np.concatenate(parts or [[]]), {'exhausted': True}


def stretches_in_both(val, shard):
    """How many of 100 stretches of 64 tokens, spread over val (n,), are in a train shard (m,) as well."""
    starts, text = range(0, len(val) - 64, len(val) // 100 + 1), shard.astype('<u2').tobytes()
    return sum(val[i:i + 64].tobytes() in text for i in starts)


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
    if args.source == 'stdlib':
        paths = stdlib_files()
        if args.val_tokens == parser.get_default('val_tokens'):  # a small Python: half
            args.val_tokens = min(args.val_tokens, sum(map(os.path.getsize, paths)) // 2)
    check(max(args.val_tokens, args.shard_tokens) < 2**31, 'a shard has less than 2^31 tokens')

    # what the shards depend on: the same command finds it in meta.json and resumes
    settings = {key: value for key, value in vars(args).items() if key not in ('out', 'tokens', 'workers')}
    settings['vocab_size'] = {'gpt2': 50257, 'bytes': 257, 'chars': 64}[args.tokenizer]
    if local:
        paths = golden_order(local_files(args.files))
        stats = repr([(os.path.getsize(path), os.path.getmtime(path)) for path in paths])
        settings['found'] = f'{len(paths)} files ({hashlib.sha256(stats.encode()).hexdigest()[:16]})'
        settings['held_out'] = f'{HELD} of every {OF} tokens'
    meta = {**settings, 'shards': 0, 'tokens': 0, 'file': 0, 'row': 0, 'before': 0, 'used': 0}
    meta_path = f'{args.out}/meta.json'
    if glob.glob(SHARD.format('*'), root_dir=args.out):
        saved = read_json(meta_path)
        other = [f'{key}={saved.get(key)!r}' for key in settings if saved.get(key) != settings[key]]
        check(not other, f'{meta_path} was made with {", ".join(other)}; choose another --out')
        meta |= saved
    if meta.get('exhausted') or meta['tokens'] >= args.tokens:
        return print(f'{args.out} is done: {meta["tokens"]:,} tokens ({args.tokenizer}) to train on')

    if args.source == 'fineweb':
        from datasets import load_dataset_builder  # takes a second
        builder = load_dataset_builder('HuggingFaceFW/fineweb', args.name, revision=meta.get('revision'))
        paths = golden_order(sorted(builder.config.data_files['train']))
        meta['revision'] = re.search('@(.*?)/', paths[0])[1]  # the commit, for all that is read later
    if args.source == 'pretokenized':
        shards = fetch_shards(args, meta)
    else:
        documents = tokenize(read_texts(paths, meta['file'], meta['row']), args, meta['before'])
        shards = cut_shards(documents, args, meta)
        if local and not meta['shards']:
            shards = itertools.chain(hold_out(paths, args), shards)

    with lock_folder(args.out):
        save(meta, meta_path)
        for shard, position in shards:
            check(meta['shards'] or not position.get('exhausted'), 'all is for val: fewer --val_tokens?')
            name = f'train_{meta["shards"] - 1:06d}' if meta['shards'] else 'val_000000'
            if args.source != 'pretokenized':
                header = np.array([20240520, 1, len(shard)] + [0] * 253, '<i4')
                save(header.tobytes() + shard.astype('<u2').tobytes(), f'{args.out}/{args.source}_{name}.bin')
            meta['tokens'] += len(shard) if meta['shards'] else 0
            meta.update(position, shards=meta['shards'] + 1)
            save(meta, meta_path)
            print(f'{name}: {len(shard):,} tokens ({args.tokenizer}); train: {meta["tokens"]:,}', flush=True)
            if local and meta['tokens']:
                twice = stretches_in_both(read_shard(f'{args.out}/local_val_000000.bin'), shard)
                print(f'{twice} of 100 stretches of val are in {name} as well', flush=True)
            if meta['tokens'] >= args.tokens:
                break


if __name__ == '__main__':
    main()
