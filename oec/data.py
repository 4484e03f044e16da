"""
Token shards and the batch order.

A shard is the .bin format of llm.c and modded-nanogpt: 256 little-endian int32 (magic, version, number of
tokens, zeros), then the tokens as uint16. A folder holds NAME_train_%06d.bin and NAME_val_%06d.bin, and
meta.json if prepare_fineweb.py made it.

A training batch is a pure function of (seed, step), whatever the processes and the micro-batch. Shards are
cut into consecutive windows of block_size + 1 tokens, which overlap by one. Each epoch visits every window
once, in an order drawn from (seed, epoch), and the next begins without a gap.
"""
import functools
import glob
import hashlib
import os

import numpy as np

from oec.common import UserError, check, read_json, write_atomic

MAGIC, VERSION, HEADER = 20240520, 1, 256


def write_shard(path, tokens):
    """Writes `tokens` (n,), n < 2^31, as one shard, atomically. Raises ValueError unless all fit uint16."""
    tokens = np.asarray(tokens)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 2**16:
        raise ValueError('shards hold tokens from 0 to 65535')
    header = np.zeros(HEADER, '<i4')
    header[:3] = MAGIC, VERSION, len(tokens)
    tokens = np.ascontiguousarray(tokens, '<u2')  # no copy of what is uint16 already
    write_atomic(path, lambda file: file.writelines((header.tobytes(), tokens.data)))


def read_shard(path):
    """The tokens of a shard, a read-only memory map (n,) uint16. Raises UserError if it is not whole."""
    try:
        header = np.fromfile(path, '<i4', 3).tolist()
        size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f'{path}: not readable as a token shard ({error.strerror})') from error
    check(len(header) == 3 and header[:2] == [MAGIC, VERSION],
          f'{path}: not a token shard: should begin with {MAGIC} and {VERSION}, begins with {header[:2]}')
    check(size == 4 * HEADER + 2 * header[2],
          f'{path}: cut short or damaged; its header says {header[2]} tokens, its size is {size} bytes')
    return np.memmap(path, '<u2', 'r', offset=4 * HEADER) if header[2] else np.zeros(0, '<u2')


def read_meta(folder):
    """The meta.json of prepare_fineweb.py. Shards without one are taken for GPT-2 tokens."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path) if os.path.exists(path) else {'vocab_size': 50257}
    size = meta.get('vocab_size')
    check(type(size) is int and 0 < size <= 2**16,
          f'{path}: vocab_size should be a whole number from 1 to 65536, is {size!r}')
    return meta


class Windows:
    """The windows of all shards of a split, train or val; windows[numbers] are the tokens of some of them."""

    def __init__(self, folder, split, block_size, vocab_size):
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), f'*_{split}_*.bin')))
        check(paths, f'--data={folder} has no *_{split}_*.bin; make some: python prepare_fineweb.py '
              f'--out={folder}, or without a network --source=stdlib --tokenizer=bytes')
        self.shards = [read_shard(path) for path in paths]
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.ends = np.cumsum([max(0, len(shard) - 1) // block_size for shard in self.shards])
        check(len(self), f'--data={folder} has no {split} shard as long as --block_size={block_size}')

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, numbers):
        """Numbers (n,) of windows, counted through all shards -> their tokens (n, block_size + 1) int64."""
        which = np.searchsorted(self.ends, numbers, side='right')
        starts = (numbers - np.concatenate(([0], self.ends))[which]) * self.block_size
        length = self.block_size + 1
        tokens = np.stack([self.shards[i][s:s + length] for i, s in zip(which, starts, strict=True)])
        if tokens.max() >= self.vocab_size:  # perhaps only in this process, which has to say so
            raise UserError(f'the data have token {tokens.max()}, the head only {self.vocab_size} rows',
                            alone=True)
        return tokens.astype(np.int64)


def evenly_spaced(n, n_windows):
    """The numbers (n,) of windows that lie evenly over all of them, not in one long document."""
    return np.arange(n) * n_windows // n


def fingerprint(shards):
    """A short hash of what the shards hold: each one's length, its first and its last 32,768 tokens."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(b'%d:' % len(shard) + shard[:2**15].tobytes() + shard[-2**15:].tobytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=2)  # two epochs, for a batch that straddles them
def epoch_order(seed, epoch, n_windows):
    """The order in which `epoch` visits the windows. NumPy keeps the stream of RandomState frozen."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, step, batch_size, n_windows, rank=0, world_size=1):
    """The windows (batch_size / world_size,) of `rank` in the global batch `step`, counted from 0."""
    share = batch_size // world_size
    first = step * batch_size + rank * share
    epochs, within = np.divmod(np.arange(first, first + share), n_windows)
    return np.concatenate([epoch_order(seed, int(epoch), n_windows)[within[epochs == epoch]]
                           for epoch in np.unique(epochs)])


def load_batches(windows, start, args, device, rank, world_size):
    """Yields what `rank` has of each batch after step `start`: micro-batches (tokens, targets), int64."""
    import torch  # 175 MB, of which prepare_fineweb.py has no need
    for step in range(start, args.steps):
        numbers = batch_windows(args.seed, step, args.batch_size, len(windows), rank, world_size)
        batch = torch.from_numpy(windows[numbers])
        if device.type == 'cuda':
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield [(part[:, :-1], part[:, 1:]) for part in batch.split(args.micro_batch_size)]
