"""README.md: its commands, added method, sample of a model, its lines for one's own loop."""
import functools
import re
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import analyze
import prepare_fineweb
import train
from conftest import ENV, ROOT, finish
from small_runs import SMALL, ranks
from test_facts import close, generator, normal

README = Path(ROOT, 'README.md').read_text(encoding='utf-8')
PROGRAMS = {'train': train, 'prepare_fineweb': prepare_fineweb, 'analyze': analyze}
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}


def test_adding_a_method(tmp_path, monkeypatch):
    """With README's diff the new method is its equation."""
    for file in ('model.py', 'test_facts.py'):
        shutil.copy(f'{ROOT}/{file}', tmp_path)
    for file, place, lines in re.findall(r'^--- (\S+\.py), in (\w+).*\n((?:\+.*\n)+)', README, re.M):
        before, after = (tmp_path / file).read_text().split(ABOVE[place])
        (tmp_path / file).write_text(before + lines.replace('\n+', '\n')[1:] + ABOVE[place] + after)
    monkeypatch.delitem(sys.modules, 'model')
    monkeypatch.syspath_prepend(tmp_path)  # where test_facts.py finds the changed model.py
    facts = {}
    exec((tmp_path / 'test_facts.py').read_text(), facts)
    facts['test_head_equation']('l2_logits')
    facts['test_model_equation']('l2_logits', False)


def test_commands():
    """Their flags, and two sweeps: a cell of the paper's table, three methods in three seeds on own text."""
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', README)
    assert {name for name, _ in commands} == PROGRAMS.keys()
    for name, flags in commands:
        PROGRAMS[name].parser.parse_args(flags.split())
    grids = []
    for line in re.findall(r'^([A-Z]+=.*bash sweep.sh)', README, re.M):
        printed = subprocess.check_output(f'DRY_RUN=1 {line}', env=ENV, shell=True, text=True, cwd=ROOT)
        grids.append([train.parser.parse_args(shlex.split(run)[2:]) for run in printed.splitlines()])
    cell, own_text = sorted(grids, key=len)
    assert {(run.size, run.method, run.weight_tying) for run in cell} == {('16M', 'mu_loss', False)}
    assert len({run.lr for run in cell}) == len(cell) == 7
    assert len(own_text) == 27 and {run.seed for run in own_text} == {1, 2, 3}
    assert not any(run.weight_tying for run in own_text)


def test_sample(corpus, tmp_path, monkeypatch, capsys):
    """Of the model that the command trains. In this corpus too, token 256 begins each document."""
    code = re.search(r'```python\n([^`]*?from model import .*?)```', README, re.S)[1]
    out = re.search(r"'(.*)/model\.pt'", code)[1]
    assert f' --out={out}\n' in README
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, f'--data={corpus}', f'--out={out}', '--steps=1', '--block_size=256'])
    capsys.readouterr()
    names = {}
    exec(code, names)
    assert torch.equal(names['gpt'].E, names['saved']['model']['lm_head.weight'])
    assert names['logits'].shape == (256,) and len(names['text']) == 201
    assert capsys.readouterr().out == bytes(names['text'][1:]).decode(errors='replace') + '\n'


# -------- the lines for one's own loop
BLOCK = re.search(r'```python\n(import torch\n.*?)```', README, re.S)[1]
FUNCTIONS, HOOK, PENALTY, CHECK = re.split(r'\n(?=optimizer\.|add_mu_loss|print)', BLOCK)
NAMES = {'V': 61, 'lam': 0.3}
exec(FUNCTIONS, NAMES)
center = NAMES['center']
adamw = functools.partial(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)


class LM(torch.nn.Module):
    """A bigram model in float64, tokens (B, T) -> logits (B, T, 61)."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.mlp = torch.nn.Embedding(61, 16), torch.nn.Linear(16, 16)
        self.lm_head = torch.nn.Linear(16, 61, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight
        self.double()

    def forward(self, tokens):
        return self.lm_head(self.mlp(self.wte(tokens)).tanh())


def losses(model, i, reduction='mean'):
    """Of sequence i, 16 tokens, whose successor is the next number."""
    tokens = torch.randint(61, (1, 16), generator=generator(i))
    return F.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 61, reduction=reduction)


def largest_mean_logit(logits):
    """What README's line that checks prints."""
    return eval(CHECK, {'logits': logits, 'print': torch.Tensor.item})


def train_by_the_equations(model, method):
    """Two steps of four sequences, clipped: mu-loss in the loss, by autograd, centering after the step."""
    optimizer, E = adamw(model.parameters()), model.lm_head.weight
    for step in range(2):
        loss = sum(losses(model, 4 * step + i) for i in range(4)) / 4
        penalty = 0.3 * E.mean(dim=0).square().sum() if method == 'mu_loss' else 0
        (loss + penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if method == 'mu_centering':
            E.data -= E.data.mean(dim=0)
        optimizer.zero_grad()
    return model


def train_with_the_lines(raw_model, method, model, rank, world, sums=False):
    """The same in micro-batches of one sequence, with a GradScaler; `sums`: divided by the tokens later."""
    optimizer, scaler = adamw(raw_model.parameters()), torch.amp.GradScaler('cpu')
    if method == 'mu_centering':
        exec(HOOK, {**NAMES, 'optimizer': optimizer, 'model': raw_model})
    for step in range(2):
        for i in range(rank, 4, world):
            loss = losses(model, 4 * step + i, 'sum') if sums else losses(model, 4 * step + i) * world / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in raw_model.parameters() if sums else ():
            p.grad /= 4 * 16
        if method == 'mu_loss':
            exec(PENALTY, {**NAMES, 'model': raw_model})
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def assert_trained_alike(model, method, tied):
    reference = train_by_the_equations(LM(tied), method)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p.full_tensor() if hasattr(p, 'full_tensor') else p, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize('method', ['mu_centering', 'mu_loss'])
@pytest.mark.parametrize('sums, tied', [(False, False), (False, True), (True, False)])
def test_one_process(method, sums, tied):
    model = LM(tied)
    train_with_the_lines(model, method, model, rank=0, world=1, sums=sums)
    assert_trained_alike(model, method, tied)
    logits = model(torch.arange(61)[None])
    assert (largest_mean_logit(logits) < 1e-6) == (method == 'mu_centering')


def two_ranks(argv):
    """DDP, and FSDP2 with shards of unequal length, which shards the head in three ways."""
    from torch.distributed.fsdp import fully_shard  # takes a second

    def head_first(model):
        fully_shard(model.lm_head)
        return fully_shard(model)
    dist.init_process_group('gloo')
    resharded = functools.partial(fully_shard, reshard_after_forward=True)
    wraps = [*product((DDP, fully_shard, resharded), (False, True)), (head_first, False)]
    for (wrap, tied), method in product(wraps, ('mu_centering', 'mu_loss')):
        raw_model = LM(tied)
        train_with_the_lines(raw_model, method, wrap(raw_model), dist.get_rank(), world=2)
        assert_trained_alike(raw_model, method, tied)

    # Megatron's vocabulary shards
    E = normal(generator(0), 61, 16) + 1
    shard = E.split(31)[dist.get_rank()].clone()
    exec(re.search('`(mu = E.sum.*?)`', README)[1], {**NAMES, 'E': shard, 'dist': dist, 'group': None})
    close(shard, (E - E.mean(dim=0)).split(31)[dist.get_rank()], rtol=0, atol=1e-12)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=two_ranks):
        finish(started, 0)


def test_refused():
    """A shard of the rows, a matrix stored (H, V), one of the head's two matrices, a flat shard of FSDP1."""
    E = normal(generator(0), 61, 16)
    before = E.clone()
    for wrong in (E[:31], E.T, E[:60], E.flatten()):
        with pytest.raises(ValueError, match='61'):
            center(wrong, 61)
    assert torch.equal(E, before)


def test_bias_and_lora():
    """A head bias has a mean of its own, and so has the B of an adapter: each is centered by itself."""
    shapes = ((61, 16), (61, 2), (61,), (2, 16), (5, 16))
    E, B, bias, A, h = (normal(generator(0), *shape) + 1 for shape in shapes)
    before = (h @ (E + B @ A).T + bias).softmax(dim=1)
    for part in (E, B, bias):
        assert largest_mean_logit(h @ (E + B @ A).T + bias) > 0.5
        center(part, 61)
    assert largest_mean_logit(h @ (E + B @ A).T + bias) < 1e-6
    close((h @ (E + B @ A).T + bias).softmax(dim=1), before, rtol=0, atol=1e-12)
