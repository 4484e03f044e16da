"""
Token shards and the batch order.

A shard is the .bin format of llm.c and modded-nanogpt: 256 little-endian int32 (magic, version, number of tokens, zeros),
then the tokens as uint16. A folder holds NAME_train_%06d.bin and NAME_val_%06d.bin, and meta.json where we wrote it.

A training batch is a pure function of (seed, step). Windows of block_size tokens and the next one are cut from the
shards side by side; each epoch visits every window once, in an order drawn from (seed, epoch). Nothing depends on the
number of processes or the micro-batch, and a resumed run needs only its step.
"""
import functools
import glob
import hashlib
import os

import numpy as np

from common import die, read_json, write_atomic

MAGIC, VERSION, HEADER = 20240520, 1, 256


def write_shard(path, tokens):
    """Writes `tokens` (n,), n < 2^31, as one shard, whole or not at all. Raises ValueError for tokens that are not uint16 values."""
    tokens = np.asarray(tokens)
    if tokens.size and not (0 <= int(tokens.min()) and int(tokens.max()) < 2**16):
        raise ValueError('shards hold tokens from 0 to 65535')
    header = np.zeros(HEADER, '<i4')
    header[:3] = MAGIC, VERSION, len(tokens)
    write_atomic(path, lambda file: (file.write(header.tobytes()), file.write(tokens.astype('<u2').tobytes())))


def read_shard(path):
    """The tokens of a shard as a read-only memory map (n,) uint16; exits with 2 where the file is not a whole shard."""
    try:
        size = os.path.getsize(path)
        magic, version, n = (int(x) for x in np.fromfile(path, '<i4', 3)) if size >= 4 * HEADER else (0, 0, 0)
    except OSError as error:
        die(f'{path}: not readable as a token shard ({error.strerror})')
    if size < 4 * HEADER:
        die(f'{path}: too short for a token shard ({size} bytes, the header alone has {4 * HEADER})')
    if magic != MAGIC:
        die(f'{path}: not a token shard (magic number {magic}, should be {MAGIC})')
    if version != VERSION:
        die(f'{path}: shard version {version}, this code reads version {VERSION}')
    if size != 4 * HEADER + 2 * n:
        die(f'{path}: the header says {n} tokens, the file holds {(size - 4 * HEADER) / 2:g}; cut short or damaged')
    return np.memmap(path, '<u2', 'r', offset=4 * HEADER, shape=(n,)) if n else np.zeros(0, '<u2')


def load_shards(folder, split):
    """All shards of `split` ('train' or 'val') in `folder`, in the order of their names; exits with 2 where there are none."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f'*_{split}_*.bin')))
    if not paths:
        why = 'no such folder' if not os.path.isdir(folder) else f'it has no *_{split}_*.bin'
        die(f'--data={folder}: {why}; make one with: python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out={folder}')
    return [read_shard(path) for path in paths]


def vocabulary(folder):
    """Number of token ids that the shards in `folder` use, from meta.json; GPT-2's 50257 for shards that others published."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return 50257
    size = read_json(path).get('vocab_size')
    if type(size) is not int or not 0 < size <= 2**16:
        die(f'{path}: vocab_size should be a whole number from 1 to 65536, is {size!r}')
    return size


def fingerprint(shards):
    """A short hash of what the shards hold: each one's length, its first and its last 32,768 tokens."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(b'%d:' % len(shard) + shard[:2**15].tobytes() + shard[-2**15:].tobytes())
    return digest.hexdigest()[:16]


def count_windows(shards, block_size):
    """How many windows of block_size tokens and the next one fit into each shard, side by side: (n_shards,) int64."""
    return np.array([max(0, len(shard) - 1) // block_size for shard in shards])


def check_tokens(shard, start, end, vocab_size, any_rank=False):
    """shard[start:end]; exits with 2 on a token that a head of vocab_size rows does not have. any_rank: as for die."""
    tokens = shard[start:end]
    if len(tokens) and tokens.max() >= vocab_size:
        die(f'{shard.filename}: it has the token {tokens.max()}, but the head has only {vocab_size} rows (--vocab_size)', any_rank=any_rank)
    return tokens


def read_windows(shards, block_size, windows, vocab_size):
    """Windows (n,) by number, counted through all shards -> tokens (n, block_size + 1) int64, each below vocab_size."""
    ends = np.cumsum(count_windows(shards, block_size))
    which = np.searchsorted(ends, windows, side='right')
    first = np.concatenate(([0], ends))
    starts = (windows - first[which]) * block_size
    tokens = np.stack([check_tokens(shards[i], s, s + block_size + 1, vocab_size, any_rank=True) for i, s in zip(which, starts)])
    return tokens.astype(np.int64)


@functools.lru_cache(maxsize=2)  # two epochs, for a batch that straddles them
def epoch_order(seed, epoch, n_windows):
    """The order in which `epoch` visits the windows. NumPy keeps RandomState's stream frozen, so it never changes."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, step, batch_size, n_windows, rank=0, world_size=1):
    """
    The numbers (batch_size / world_size,) of the windows that `rank` reads of the global batch of `step`, side by side:
    each window once an epoch, epochs end to end.
    """
    share = batch_size // world_size
    first = step * batch_size + rank * share
    position = np.arange(first, first + share)
    epochs, within = np.divmod(position, n_windows)
    return np.concatenate([epoch_order(seed, int(e), n_windows)[within[epochs == e]] for e in np.unique(epochs)])
