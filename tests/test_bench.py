"""analysis/bench.py by a clock that runs as the device finishes steps: 1 s of mu_loss, 2 s of z_loss."""
import copy
from types import SimpleNamespace

import torch

import train
from analysis import bench


def test_ratio(monkeypatch, capsys):
    seen, queued, finished = [], [], []

    def train_step(model, optimizer, batch, step, args, with_stats):
        assert args.method == model.config.head_mode and len(seen) < 16  # else it may never end
        seen.append(args.method)
        queued.append({'mu_loss': 1.0, 'z_loss': 2.0}[args.method])

    def synchronize():
        finished.extend(queued)
        queued.clear()

    monkeypatch.setattr(train, 'parser', copy.deepcopy(train.parser))  # it gets more flags
    monkeypatch.setattr(train, 'train_step', train_step)
    monkeypatch.setattr(torch.cpu, 'synchronize', synchronize)
    monkeypatch.setattr(bench, 'time', SimpleNamespace(perf_counter=lambda: sum(finished)))
    bench.main('--methods=mu_loss,z_loss --size=tiny --batch_size=2 --block_size=8 --device=cpu'.split())
    assert seen == 8 * ['mu_loss', 'z_loss']  # one to compile, 7 turns until 20 s are over
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert rows == [['mu_loss', '1000.00', 'ms', '1.000'], ['z_loss', '2000.00', 'ms', '2.000']]
