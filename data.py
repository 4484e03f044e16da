"""
Token shards and the batch order.

A shard is the .bin format of llm.c and modded-nanogpt: 256 little-endian int32 (magic, version, number of
tokens, zeros), then the tokens as uint16. A folder holds NAME_train_%06d.bin and NAME_val_%06d.bin, and
meta.json if prepare_fineweb.py made it.

A training batch is a pure function of (seed, step). Windows of block_size tokens and the next one are cut
from the shards side by side; each epoch visits every window once, in an order drawn from (seed, epoch).
Nothing depends on the number of processes or the micro-batch, and a resumed run needs only its step.
"""
import functools
import glob
import hashlib
import os

import numpy as np

from common import UserError, read_json, write_atomic

MAGIC, VERSION, HEADER = 20240520, 1, 256


def write_shard(path, tokens):
    """Writes `tokens` (n,), n < 2^31, as one shard, atomically. Raises ValueError unless all fit uint16."""
    tokens = np.asarray(tokens)
    if tokens.size and not (0 <= int(tokens.min()) and int(tokens.max()) < 2**16):
        raise ValueError('shards hold tokens from 0 to 65535')
    header = np.zeros(HEADER, '<i4')
    header[:3] = MAGIC, VERSION, len(tokens)
    tokens = np.ascontiguousarray(tokens, '<u2')  # 200 MB of our own: no copy
    write_atomic(path, lambda file: file.writelines((header.tobytes(), tokens.data)))


def read_shard(path):
    """The tokens of a shard, a read-only memory map (n,) uint16. Raises UserError if it is not whole."""
    try:
        size = os.path.getsize(path)
        magic, version, n = (int(x) for x in np.fromfile(path, '<i4', 3)) if size >= 4 * HEADER else (0, 0, 0)
    except OSError as error:
        raise UserError(f'{path}: not readable as a token shard ({error.strerror})') from error
    if size < 4 * HEADER:
        raise UserError(f'{path}: too short for a token shard ({size} bytes, its header has {4 * HEADER})')
    if magic != MAGIC:
        raise UserError(f'{path}: not a token shard (magic number {magic}, should be {MAGIC})')
    if version != VERSION:
        raise UserError(f'{path}: shard version {version}, this code reads version {VERSION}')
    if size != 4 * HEADER + 2 * n:
        held = (size - 4 * HEADER) / 2
        raise UserError(f'{path}: the header says {n} tokens, the file holds {held:g}; cut short or damaged')
    return np.memmap(path, '<u2', 'r', offset=4 * HEADER, shape=(n,)) if n else np.zeros(0, '<u2')


def load_shards(folder, split):
    """The shards of a split, train or val, in the order of their names. UserError if there are none."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f'*_{split}_*.bin')))
    if not paths:
        why = 'no such folder' if not os.path.isdir(folder) else f'it has no *_{split}_*.bin'
        make = f'python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out={folder}'
        raise UserError(f'--data={folder}: {why}; make one with: {make}')
    return [read_shard(path) for path in paths]


def vocabulary(folder):
    """How many token ids the shards use, from meta.json; GPT-2's 50257 for shards that others published."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return 50257
    size = read_json(path).get('vocab_size')
    if type(size) is not int or not 0 < size <= 2**16:
        raise UserError(f'{path}: vocab_size should be a whole number from 1 to 65536, is {size!r}')
    return size


def unfinished(folder):
    """A line that says so where meta.json knows that prepare_fineweb.py was stopped on the way, else None."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path) if os.path.exists(path) else {}
    if meta.get('complete') is False:
        return (f'{folder} is not complete: it has {meta.get("tokens")} of {meta.get("requested_tokens")} '
                'training tokens')


def fingerprint(shards):
    """A short hash of what the shards hold: each one's length, its first and its last 32,768 tokens."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(b'%d:' % len(shard) + shard[:2**15].tobytes() + shard[-2**15:].tobytes())
    return digest.hexdigest()[:16]


def count_windows(shards, block_size):
    """How many windows of block_size tokens and the next one each shard holds: (n_shards,) int64."""
    return np.array([max(0, len(shard) - 1) // block_size for shard in shards])


def check_tokens(shard, start, end, vocab_size, any_rank=False):
    """shard[start:end]. Raises UserError if a token is beyond a head of vocab_size rows."""
    tokens = shard[start:end]
    if len(tokens) and tokens.max() >= vocab_size:
        raise UserError(f'{shard.filename}: it has the token {tokens.max()}, but the head has only '
                        f'{vocab_size} rows (--vocab_size)', any_rank=any_rank)
    return tokens


def read_windows(shards, block_size, windows, vocab_size):
    """
    Windows (n,), numbered through all shards -> their tokens (n, block_size + 1) int64. Raises UserError if
    one is not below vocab_size.
    """
    ends = np.cumsum(count_windows(shards, block_size))
    which = np.searchsorted(ends, windows, side='right')
    starts = (windows - np.concatenate(([0], ends))[which]) * block_size
    rows = [check_tokens(shards[shard], start, start + block_size + 1, vocab_size, any_rank=True)
            for shard, start in zip(which, starts, strict=True)]
    return np.stack(rows).astype(np.int64)


@functools.lru_cache(maxsize=2)  # two epochs, for a batch that straddles them
def epoch_order(seed, epoch, n_windows):
    """The order in which `epoch` visits the windows. NumPy keeps the stream of RandomState frozen."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, step, batch_size, n_windows, rank=0, world_size=1):
    """
    The windows (batch_size / world_size,) that `rank` reads of the global batch of `step`. Epochs follow each
    other without a gap, and each visits every window once.
    """
    share = batch_size // world_size
    first = step * batch_size + rank * share
    epochs, within = np.divmod(np.arange(first, first + share), n_windows)
    return np.concatenate([epoch_order(seed, int(epoch), n_windows)[within[epochs == epoch]]
                           for epoch in np.unique(epochs)])
