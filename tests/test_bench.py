"""bench.py: its tables compare what they say, and what does not fit is one line."""
import numpy as np
import pytest
import torch

import bench
import train
from conftest import refused

TINY = ('--device=cpu', '--threads=1', '--seconds=0.1', '--batch_size=2', '--block_size=32',
        '--vocab_size=512')
CPU = torch.device('cpu')


def table_of(argv, capsys):
    """Runs bench.py and returns its table: name -> {column: text}."""
    bench.main(argv)
    lines = [line for line in capsys.readouterr().out.split('\n') if line.startswith('|')]
    header, _, *rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_the_training_step_of_each_method(capsys, monkeypatch):
    monkeypatch.setattr(train, 'peak_flops', lambda name: 1e12)
    rows = table_of([*TINY, '--methods=baseline,mu_loss,mu_centering', '--dtype=bfloat16'], capsys)
    assert list(rows) == ['baseline', 'mu_loss', 'mu_centering']
    assert rows['baseline']['time / baseline'] == '1.000'
    flops = 6 * (2 * (4 * 64 * 64 + 3 * 64 * 256) + 512 * 64) + 6 * 2 * 32 * 64  # products; half of attention
    for row in rows.values():
        rate = 2 * 32 / (float(row['ms']) / 1000)
        assert float(row['tokens/s'].replace(',', '')) == pytest.approx(rate, rel=0.01)
        assert float(row['MFU'].rstrip('%')) == pytest.approx(100 * rate * flops / 1e12, abs=0.06)


def test_all_heads_have_the_same_loss(capsys):
    rows = table_of([*TINY, '--head', '--tokens=256'], capsys)
    assert {'plain', 'plain, compiled', 'chunked', 'chunked, compiled'} <= set(rows)
    assert len({row['loss'] for row in rows.values()}) == 1


def test_what_does_not_fit_is_left_out_with_a_line(capsys):
    def too_large():
        raise torch.OutOfMemoryError('CUDA out of memory.\nTried to allocate 26 GiB')
    line = 'left out: large: OutOfMemoryError: CUDA out of memory. Tried to allocate 26 GiB\n'
    contestants = {'large': too_large, 'small': lambda: lambda: None}
    bench.compare('title', contestants, 0.01, CPU, lambda *_: {})
    out = capsys.readouterr().out
    assert out.startswith(line) and '| small' in out and '| large' not in out
    refused(lambda: bench.compare('', {'large': too_large}, 0.01, CPU, None), 'see above', status=1)
    assert capsys.readouterr().out == line


def test_a_ratio_is_the_median_over_turns_of_the_ratio_within_a_turn(capsys, monkeypatch):
    """On a machine that becomes ten times slower within the third turn: the ratio of the medians is 20."""
    times = np.array([[1, 2], [1, 2], [1, 20], [10, 20], [10, 20]])
    monkeypatch.setattr(bench, 'take_turns', lambda *_: times)
    bench.compare('', dict.fromkeys('ab', lambda: lambda: None), 1, CPU, lambda *_: {})
    assert ' 2.000 ' in capsys.readouterr().out


def test_extra_memory_is_what_a_call_takes():
    found = bench.extra_memory(lambda: torch.ones(2**24), CPU)
    assert np.isnan(found) or found == pytest.approx(2**26, rel=0.1)


def test_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.main([*TINY, '--profile'])
    assert 'aten::mm' in capsys.readouterr().out and (tmp_path / 'trace.json').exists()
