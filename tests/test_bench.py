"""bench.py: its tables compare what they say, and what does not fit is left out with a line."""
import numpy as np
import pytest
import torch

from conftest import refused
from model import METHODS
from oec import bench

CPU = torch.device('cpu')
TINY = ('--device=cpu', '--dtype=float32', '--threads=1', '--seconds=0.1', '--batch_size=2',
        '--block_size=32', '--vocab_size=512')


def printed_rows(capsys):
    """The cells of the table that was printed, without its header."""
    lines = [line for line in capsys.readouterr().out.replace(',', '').splitlines() if line.startswith('|')]
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[2:]]


def test_the_step_of_every_method_and_the_loss_of_every_head(capsys):
    bench.main(TINY)
    rows = printed_rows(capsys)
    assert [name for name, *_ in rows] == list(METHODS)
    for _, ms, tokens_per_second, *_ in rows:
        assert float(tokens_per_second) == pytest.approx(64_000 / float(ms), rel=0.01)
    bench.main([*TINY, '--head'])
    rows = printed_rows(capsys)
    assert {'plain', 'plain compiled', 'chunked', 'chunked compiled'} <= {name for name, *_ in rows}
    losses = [float(loss) for *_, loss in rows]
    assert max(losses) - min(losses) < 2e-4  # the last digit may be rounded either way


def test_a_ratio_is_the_median_over_turns_of_the_ratio_within_a_turn(capsys, monkeypatch):
    """On a machine that becomes ten times slower within the third turn: the ratio of the medians is 20."""
    times = np.array([[1, 2], [1, 2], [1, 20], [10, 20], [10, 20]])
    monkeypatch.setattr(bench, 'take_turns', lambda *_: times)
    bench.compare(dict.fromkeys('ab', lambda: lambda: torch.zeros(())), 64, 4e11, 1e12, 1, CPU)
    out = capsys.readouterr().out
    assert ' 2.000 ' in out and '40%' in out.split('| a ')[1].split('\n')[0]


def test_what_does_not_fit_is_left_out_with_a_line(capsys):
    def large():
        raise torch.OutOfMemoryError('CUDA out of memory.\nTried to allocate 26 GiB')
    bench.compare({'large': large, 'small': lambda: lambda: torch.zeros(())}, 64, 1e9, 1e12, 0.01, CPU)
    line, table = capsys.readouterr().out.split('\n', 1)
    assert 'left out: large' in line and '26 GiB' in line and 'small' in table and 'large' not in table
    refused(lambda: bench.compare({'large': large}, 64, 1e9, 1e12, 0.01, CPU), 'see above', status=1)


def test_extra_memory_is_what_a_call_takes():
    found = bench.extra_memory(lambda: torch.ones(2**24), CPU)
    assert np.isnan(found) or found == pytest.approx(2**26, rel=0.1)
