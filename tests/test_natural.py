"""results/natural/natural.py: what an arm changes, and what is kept of a log."""
import math
from pathlib import Path

import pandas as pd
import torch

import train
from conftest import ROOT
from results.natural.natural import make_slow_gain, thin


def test_curves_are_thin():
    """Of each run that a figure draws, some 100 lines."""
    log = pd.DataFrame({'step': range(5000), 'loss': 1.0, 'val_loss': math.nan, 'logit_mean': 1.0})
    log.loc[::500, 'val_loss'] = 2.0
    lines = thin(log)
    assert 100 <= len(lines) <= 200 and lines.val_loss.notna().sum() == 10
    for path in Path(ROOT, 'results/natural').glob('*/curves.csv'):
        assert pd.read_csv(path).groupby('run').size().max() <= 200, path


def test_slow_gain():
    """One step of AdamW moves each weight by its learning rate, and the slow gain by a hundredth of it."""
    flags = ['--size=tiny', '--vocab_size=64', '--lr=0.1', '--device=cpu', '--data=.', '--final_gain']
    args = train.resolve_args(train.parser.parse_args(flags))
    gpt, optimizer = make_slow_gain(args, 0.01)
    before = [p.detach().clone() for p in gpt.parameters()]
    for p in gpt.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, was in zip(gpt.parameters(), before, strict=True):
        moved = 0.001 if p is gpt.norm_f.weight else 0.1
        torch.testing.assert_close(was - p.detach(), torch.full_like(p, moved), atol=1e-6, rtol=1e-4)
