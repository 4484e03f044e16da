"""results/natural/natural.py: what an arm changes."""
import torch

import train
from results.natural.natural import make_slow_gain


def test_slow_gain():
    """One step of AdamW moves each weight by its learning rate, and the slow gain by a hundredth of it."""
    flags = ['--size=tiny', '--vocab_size=64', '--lr=0.1', '--device=cpu', '--data=.']
    gpt, optimizer = make_slow_gain(train.resolve_args(train.parser.parse_args(flags)), 0.01)
    before = [p.detach().clone() for p in gpt.parameters()]
    for p in gpt.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, was in zip(gpt.parameters(), before, strict=True):
        moved = 0.001 if p is gpt.norm_f.weight else 0.1
        torch.testing.assert_close(was - p.detach(), torch.full_like(p, moved), atol=1e-6, rtol=1e-4)
