"""
Token shards, NAME_train_%06d.bin and NAME_val_%06d.bin, the format of modded-nanogpt and llm.c's GPT-2: 256
little-endian int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

A training batch is a pure function of (seed, step), whatever the processes and the micro-batch. Shards are
cut into consecutive windows of block_size + 1 tokens, which overlap by one. Each epoch visits every window
once, in an order drawn from (seed, epoch), and the next begins without a gap.
"""
import functools
import glob
import hashlib
import math
import os

import numpy as np

from oec.common import UserError, check, read_json

MAGIC, VERSION, HEADER = 20240520, 1, 256
SHARD = '*_{}_' + 6 * '[0-9]' + '.bin'  # SHARD.format('val') is the glob of val shards


def shard_length(path):
    """The number of tokens in a shard. Raises UserError if it is not whole, or not one of uint16 tokens."""
    try:
        header, size = np.fromfile(path, '<i4', 3).tolist(), os.path.getsize(path)
    except OSError as error:
        raise UserError(f'{path}: not readable as a token shard ({error.strerror})') from error
    check(len(header) == 3 and header[:2] == [MAGIC, VERSION], f'{path}: not a shard of uint16 tokens, which '
          f'begins with {MAGIC} and {VERSION}; begins with {header[:2]}')
    check(size == 4 * HEADER + 2 * header[2],
          f'{path}: cut short or damaged; its header says {header[2]} tokens, its size is {size} bytes')
    return header[2]


def read_shard(path, start=0, n=-1):
    """Tokens (n,) uint16 of a shard, all or n from `start` on. No file stays open: there may be thousands."""
    return np.fromfile(path, '<u2', n, offset=4 * HEADER + 2 * start)


def read_vocab_size(folder):
    """The vocabulary size that meta.json names. Shards without a meta.json are taken for GPT-2 tokens."""
    path = os.path.join(folder, 'meta.json')
    size = read_json(path, {'vocab_size': 50257}).get('vocab_size')
    check(type(size) is int and 0 < size <= 2**16,
          f'{path}: vocab_size should be a whole number from 1 to 65536, is {size!r}')
    return size


class Windows:
    """The windows of all shards of a split, train or val; windows[ids] are the tokens of some of them."""

    def __init__(self, folder, split, block_size, vocab_size):
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), SHARD.format(split))))
        check(paths, f'--data={folder} has no *_{split}_*.bin (six digits last); make some: python '
              f'prepare_fineweb.py --out={folder}, without a network --source=stdlib --tokenizer=bytes')
        self.shards = [(path, shard_length(path)) for path in paths]
        self.block_size, self.vocab_size = block_size, vocab_size
        self.bounds = np.cumsum([0] + [max(0, n - 1) // block_size for _, n in self.shards])
        check(len(self), f'--data={folder} has no {split} shard as long as --block_size={block_size}')

    def __len__(self):
        return int(self.bounds[-1])

    def __getitem__(self, ids):
        """Ids (n,) of windows, counted through all shards -> their tokens (n, block_size + 1) int64."""
        which = np.searchsorted(self.bounds, ids, side='right') - 1
        starts = (ids - self.bounds[which]) * self.block_size
        tokens = np.stack([read_shard(self.shards[i][0], start, self.block_size + 1)
                           for i, start in zip(which, starts, strict=True)])
        if tokens.max() >= self.vocab_size:  # perhaps in this process alone: alone=True prints it
            raise UserError(f'the data have token {tokens.max()}, E only {self.vocab_size} rows', alone=True)
        return tokens.astype(np.int64)


def evenly_spaced(n, n_windows):
    """The ids (n,) of windows that lie evenly over all of them, not in one long document."""
    return np.arange(n) * n_windows // n


def unigram(windows, E, n_tokens=2**27):
    """The share (V,) that each token has of evenly spaced windows, n_tokens at most, as a tensor like E."""
    n = min(max(1, n_tokens // windows.block_size), len(windows))
    counts = np.zeros(windows.vocab_size)
    for ids in np.array_split(evenly_spaced(n, len(windows)), math.ceil(n / 1024)):
        counts += np.bincount(windows[ids][:, 1:].ravel(), minlength=windows.vocab_size)
    return E.new_tensor(counts / counts.sum())


def fingerprint(shards):
    """A short hash of shards, (path, length) each: of their lengths, first and last 32,768 tokens."""
    digest = hashlib.sha256()
    for path, n in shards:
        digest.update(b'%d:' % n + read_shard(path, 0, 2**15).tobytes())
        digest.update(read_shard(path, max(0, n - 2**15)).tobytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=2)  # two epochs, for a batch that straddles them
def epoch_order(seed, epoch, n_windows):
    """The order in which `epoch` visits the windows. NumPy keeps the stream of RandomState frozen."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, steps_done, batch_size, n_windows, rank=0, world_size=1):
    """The windows (batch_size / world_size,) that `rank` has in the step after `steps_done` steps."""
    share = batch_size // world_size
    first = steps_done * batch_size + rank * share
    return np.array([epoch_order(seed, i // n_windows, n_windows)[i % n_windows]
                     for i in range(first, first + share)])
