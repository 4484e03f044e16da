"""tools/bench.py times the steps of train.py."""
import copy
import re
import time

import pytest

import train
from tools import bench


def test_bench(monkeypatch, capsys):
    """Whole steps of each method in turn, and a line for each: the first one's ratio is 1."""
    methods = []

    def recorded(model, optimizer, batch, step, args, train_step=train.train_step, **more):
        assert [tokens.shape for tokens, _ in batch] == [(2, 16), (2, 16)]
        train_step(model, optimizer, batch, step, args, **more)
        time.sleep(0.02 if args.method == 'baseline' else 0)
        methods.append(args.method)
        assert (model.E.mean(dim=0).norm() < 1e-6) == (args.method == 'mu_centering')

    monkeypatch.setattr(train, 'train_step', recorded)
    monkeypatch.setattr(train, 'parser', copy.deepcopy(train.parser))  # bench.py adds its flags to it
    bench.main(['--methods=mu_centering,baseline', '--size=tiny', '--vocab_size=128', '--batch_size=4',
                '--block_size=16', '--micro_batch_size=2', '--device=cpu', '--no-compile', '--seconds=0.5'])
    assert methods == len(methods) // 2 * ['mu_centering', 'baseline']
    printed = capsys.readouterr().out
    assert f' {len(methods) // 2 - 1} turns\n' in printed  # the first one compiles
    lines = re.findall(r'^(\w+) +([\d.]+) ms +([\d.]+)$', printed, re.MULTILINE)
    (first, ms, ratio), (second, other_ms, other_ratio) = lines
    assert (first, second, ratio) == ('mu_centering', 'baseline', '1.000')
    assert float(other_ratio) == pytest.approx(float(other_ms) / float(ms), rel=0.05)
