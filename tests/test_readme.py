"""README.md: its commands, LRS tables, added method, how it loads a model, its lines for other loops."""
import functools
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
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
from test_facts import close, generator, normal, tiny_gpt, token_batch, train_steps

README = Path(ROOT, 'README.md').read_text(encoding='utf-8')
PARSERS = {'train': train.parser, 'prepare_fineweb': prepare_fineweb.parser, 'analyze': analyze.parser}
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}


def test_flags_of_commands():
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', README)
    assert {name for name, _ in commands} == PARSERS.keys()
    for name, flags in commands:
        PARSERS[name].parse_args(flags.split())


@pytest.mark.parametrize('tying', ['untied', 'tied'])
def test_lrs_table(tying):
    """The paper's numbers, underlined where all runs converged."""
    table = re.search(rf'^{tying} *\| *16M.*\n-.*\n((?:.+\|.+\n)+)', README, re.M)[1].replace(' | ', '|')
    paper = pd.read_csv(f'{ROOT}/analysis/paper_lrs.csv').query('tying == @tying').dropna()
    cells = paper.lrs.map('{:.3f}'.format)
    cells = cells.where(paper.converged == 0, '<u>' + cells + '</u>').groupby(paper.variant, sort=False)
    assert table.splitlines() == ['|'.join([name, *row]) for name, row in cells]


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


def test_loading_a_model(corpus, tmp_path, monkeypatch):
    code = re.search(r'```python\n(from model import .*?)```', README, re.S)[1]
    out = re.search(r"'(.*)/model\.pt'", code)[1]
    command, env = ['bash', f'{ROOT}/sweep.sh', 'demo'], {**ENV, 'DRY_RUN': '1'}
    assert f'--out={out}\n' in subprocess.check_output(command, env=env, text=True)
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, f'--data={corpus}', f'--out={out}', '--steps=1'])
    names = {'tokens': torch.arange(24).view(2, 12)}
    exec(code, names)
    assert torch.equal(names['gpt'].E, names['saved']['model']['lm_head.weight'])
    assert names['logits'].shape == (2, 12, 320)


# -------- the lines for other loops
BLOCK = re.search(r'```python\n(import torch\n.*?)```', README, re.DOTALL)[1]
*FUNCTIONS, HOOK, CHECK = BLOCK.splitlines()
adamw = functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
NAMES = {}
exec('\n'.join(FUNCTIONS), NAMES)
center, mu_loss = NAMES['center'], NAMES['mu_loss']


def hook(optimizer, model):
    exec(HOOK, {**NAMES, 'optimizer': optimizer, 'model': model})


def shows_0(E):
    """Whether README's line that checks prints 0, but for rounding."""
    printed = []
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=E))
    exec(CHECK, {'model': model, 'print': printed.append})
    return (printed[0] <= torch.finfo(E.dtype).eps * E.norm()).item()


def two_ranks(argv):
    """DDP and FSDP2, with shards of unequal length, two micro-batches and GradScaler, a factor of 65,536."""
    from torch.distributed.fsdp import fully_shard  # takes a second
    dist.init_process_group('gloo')
    for wrap, method, tying in product((DDP, fully_shard), ('mu_centering', 'mu_loss'), (False, True)):
        gpt, reference = (tiny_gpt(name, vocab_size=61, weight_tying=tying) for name in ('baseline', method))
        model = wrap(gpt)
        optimizer, scaler = adamw(gpt.parameters()), torch.amp.GradScaler('cpu')
        if method == 'mu_centering':
            hook(optimizer, gpt)
        for step in (1, 2, 3):
            for micro_batch in range(2 * dist.get_rank(), 2 * dist.get_rank() + 2):
                loss, _ = model(*(x[micro_batch][None] for x in token_batch(step)))
                loss = loss + mu_loss(gpt.E, lam=0.3) if method == 'mu_loss' else loss
                scaler.scale(loss / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        list(train_steps(reference, method, 3, grad_clip=0))
        assert shows_0(gpt.E) == (method == 'mu_centering')
        for p, q in zip(gpt.parameters(), reference.parameters(), strict=True):
            close(p.full_tensor() if wrap is fully_shard else p, q, rtol=0, atol=1e-12)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=two_ranks):
        finish(started, 0)


@pytest.mark.parametrize('times', [1, 4])
def test_sums_of_token_losses(times):
    """Divided by the tokens of all micro-batches and ranks; once a step, or to each of the four over four."""
    gpt, reference = tiny_gpt(), tiny_gpt('mu_loss')
    tokens, targets = token_batch(1)
    for i, (x, t) in enumerate(zip(tokens.split(1), targets.split(1), strict=True)):
        loss = F.cross_entropy(gpt.logits(x)[0], t[0], reduction='sum') / targets.numel()
        (loss + mu_loss(gpt.E, lam=0.3) / times if i < times else loss).backward()
    reference(tokens, targets)[0].backward()
    for p, q in zip(gpt.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def test_muon_beside_adamw():
    """The hook is on the optimizer that steps E."""
    gpt = tiny_gpt()
    hidden = [p for p in gpt.blocks.parameters() if p.dim() == 2]
    others = [p for p in gpt.parameters() if not any(p is q for q in hidden)]
    optimizers = torch.optim.Muon(hidden, lr=0.01), adamw(others)
    hook(optimizers[1], gpt)
    gpt(*token_batch(1))[0].backward()
    for optimizer in optimizers:
        optimizer.step()
    assert shows_0(gpt.E)


def test_lora():
    """The frozen matrix stays centered, and the merged one, which one evaluates, is not."""
    h, E, B = normal(generator(0), 64, 16), normal(generator(1), 64, 16), normal(generator(2), 2, 16)
    A = torch.zeros(64, 2, dtype=E.dtype, requires_grad=True)
    center(E)
    F.cross_entropy(h @ (E + A @ B).T, torch.arange(64) // 2).backward()
    adamw([A]).step()
    assert shows_0(E) and not shows_0(E + A.detach() @ B)


def test_fp32_masters():
    """An optimizer of fp32 copies, which are copied over the bf16 weights after each step."""
    both_signs = torch.linspace(-3, 3, 16)  # the mean of all entries is 0, that of the rows is not
    masters = (normal(generator(0), 61, 16).float() + both_signs).requires_grad_()
    masters.grad = normal(generator(1), 61, 16).float()
    weights = masters.detach().bfloat16()
    center(weights)
    adamw([masters]).step()
    assert not shows_0(masters.detach().bfloat16())
    center(masters)
    assert shows_0(masters.detach().bfloat16())
    with pytest.raises(AssertionError, match='FSDP1'):
        center(masters.detach().flatten())


def test_bias():
    h, E, bias = normal(generator(0), 5, 16), normal(generator(1), 61, 16) + 1, normal(generator(2), 61) + 3
    before = (h @ E.T + bias).softmax(dim=1)
    center(E, bias)
    close((h @ E.T + bias).mean(dim=1), torch.zeros_like(h[:, 0]), rtol=0, atol=1e-12)
    close((h @ E.T + bias).softmax(dim=1), before, rtol=0, atol=1e-12)
