"""bench.py: its tables compare what they say."""
from types import SimpleNamespace

import torch

from model import METHODS
from oec import bench

CPU = torch.device('cpu')
TINY = ('--size=tiny', '--device=cpu', '--dtype=float32', '--threads=1', '--no-compile', '--seconds=0.1',
        '--batch_size=4', '--micro_batch_size=2', '--block_size=32', '--vocab_size=512')


def printed_rows(capsys):
    """The cells of the table that was printed, without its header."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[2:]]


def test_steps_of_every_method_and_heads_are_compared(capsys, monkeypatch):
    bench.main(TINY)
    assert [name for name, *_ in printed_rows(capsys)] == list(METHODS)
    monkeypatch.setattr(torch, 'compile', lambda function, **_: function)  # takes half a minute
    bench.main([*TINY, '--head'])
    rows = printed_rows(capsys)
    assert [name for name, *_ in rows] == ['head_loss', 'compiled', 'by chunks', 'by chunks, compiled']


def test_a_ratio_is_the_median_over_turns_of_the_ratio_within_a_turn(capsys, monkeypatch):
    """On a machine that becomes ten times slower within the third turn: the ratio of the medians is 20."""
    now = [0.0]
    monkeypatch.setattr(bench, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(bench, 'peak_memory', lambda call, device: 0)

    def contestant(*seconds):
        left = iter((100, *seconds))  # the first call compiles

        def call():
            now[0] += next(left)
        return call
    bench.compare({'a': contestant(1, 1, 1, 10, 10), 'b': contestant(2, 2, 20, 20, 20)}, 64, 4e12, 1, CPU)
    assert printed_rows(capsys) == [['a', '1000.00', '64', '1.000', '4', '0'],
                                    ['b', '20000.00', '3', '2.000', '0.2', '0']]
