"""README.md, tools/README.md, tools/adopt.md: commands, an added method, lines for loops."""
import copy
import functools
import importlib
import re
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

from conftest import ROOT, finish
from small_runs import ranks
from test_facts import close, generator, normal, tiny_gpt, token_batch, train_steps

README, TOOLS, ADOPT = (Path(ROOT, page).read_text(encoding='utf-8')
                        for page in ('README.md', 'tools/README.md', 'tools/adopt.md'))
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}


def test_adding_a_method(tmp_path, monkeypatch):
    """With README's diff the new method is its equation."""
    for file in ('model.py', 'test_facts.py'):
        shutil.copy(f'{ROOT}/{file}', tmp_path)
    for file, place, added in re.findall(r'^--- (\S+\.py), in (\w+).*\n((?:\+.*\n)+)', README, re.M):
        lines = added.replace('\n+', '\n')[1:]
        before, after = (tmp_path / file).read_text().split(ABOVE[place], maxsplit=1)
        (tmp_path / file).write_text(before + lines + ABOVE[place] + after)

    monkeypatch.delitem(sys.modules, 'model')
    monkeypatch.syspath_prepend(tmp_path)  # where test_facts.py finds the changed model.py
    facts = {}
    exec((tmp_path / 'test_facts.py').read_text(), facts)
    facts['test_head_equation']('l2_logits')
    facts['test_model_equation']('l2_logits', False)


def test_commands():
    """The flags of the programs, and those that sweep.sh is given for train.py, are known."""
    text = (README + TOOLS).replace('\\\n', ' ')
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', text)
    commands += [('train', flags) for _, flags in re.findall(r"""FLAGS=(['"])(.*?)\1""", text)]
    for name, flags in commands:
        importlib.import_module(name).parser.parse_args(flags.split())


# -------- the lines for one's own loop
def code(mark):
    """The first block of Python in adopt.md, or code in a line, that holds `mark`."""
    for block, span in re.findall(r'```python\n(.*?)```|`([^`\n]+)`', ADOPT, re.S):
        if mark in block + span:
            return block + span


HEAD = code('class CenteredHead')
FUNCTIONS, BEFORE, HOOK, PENALTY, CHECK = re.split(r'\n(?=# )', code('def center'))
same = functools.partial(close, rtol=0, atol=1e-12)


def run(lines, **names):
    """Runs lines of adopt.md, with `names` -> all names after it."""
    names = {'torch': torch, 'F': F, 'dist': dist, 'group': None, 'V': 61, **names}
    exec(f'{FUNCTIONS}\n{lines}', names)
    return names


def largest_mean_logit(logits):
    """What adopt.md's line that checks prints."""
    return eval(CHECK.splitlines()[1], {'logits': logits, 'print': torch.Tensor.item})


def gpt_with_a_mean(method, tied):
    gpt = tiny_gpt(method, weight_tying=tied, vocab_size=61)
    gpt.E.data += 1
    return gpt


def two_steps(method, tied, wrap):
    """A baseline after two clipped steps on two of four sequences, with adopt.md's lines."""
    gpt = gpt_with_a_mean('baseline', tied)
    names = run(BEFORE, model=gpt)
    names['model'] = model = wrap(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    scaler = torch.amp.GradScaler('cpu')
    if method == 'mu_centering':
        run(HOOK, **names, optimizer=optimizer)
    for step in (1, 2):
        tokens, targets = token_batch(step)
        for i in (dist.get_rank(), dist.get_rank() + 2):
            loss, _ = model(tokens[i:i + 1], targets[i:i + 1])
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        if method == 'mu_loss':
            run(PENALTY.replace('lam=1e-4', 'lam=0.3'), **names)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return gpt


def steps_on_two_ranks(argv):
    """DDP, and FSDP2 with shards of unequal length, against train.py's step on all four sequences."""
    from torch.distributed.fsdp import fully_shard  # takes a second
    dist.init_process_group('gloo')
    for wrap, tied, method in product((DDP, fully_shard), (False, True), ('mu_centering', 'mu_loss')):
        expected = gpt_with_a_mean(method, tied)
        list(train_steps(expected, method, 2, lr=0.1, grad_clip=0.1))
        for p, q in zip(two_steps(method, tied, wrap).parameters(), expected.parameters(), strict=True):
            same(p if wrap is DDP else p.full_tensor(), q)
    dist.destroy_process_group()


def rows_on_two_ranks(argv):
    """Each rank has some rows of E. G is a gradient of logits: it sums to 0 over the vocabulary."""
    dist.init_process_group('gloo')
    g = generator(0)
    h, E, G = normal(g, 5, 16), normal(g, 61, 16) + 1, normal(g, 5, 61)
    G -= G.mean(dim=1, keepdim=True)
    centered = E - E.mean(dim=0)
    mine = slice(0, 31) if dist.get_rank() == 0 else slice(31, 61)
    shard = E[mine].clone().requires_grad_()
    logits = run(code('E.detach()'), h=h, E=shard)['logits']
    logits.backward(G[:, mine])
    same(logits, (h @ centered.T)[:, mine])
    same(shard.grad, (G.T @ h)[mine])
    same(run(code('E -= mu / V'), E=E[mine].clone())['E'], centered[mine])
    dist.destroy_process_group()


@pytest.mark.parametrize('main', [steps_on_two_ranks, rows_on_two_ranks])
def test_two_ranks(main, tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=main):
        finish(started, 0)


def test_line():
    """The head's lines have the baseline's softmax. The others refuse a shard of rows, or a flat one."""
    g = generator(0)
    h, E, b = normal(g, 5, 16), normal(g, 61, 16) + 1, normal(g, 61) + 1
    for line, bias in zip(code('b - b.mean()').splitlines(), (0, b), strict=True):
        logits = run(line, h=h, E=E, b=b)['logits']
        same(logits.softmax(dim=1), (h @ E.T + bias).softmax(dim=1))
        assert largest_mean_logit(logits) < 1e-6
    for line, wrong in (('center(E, V)', E[:31]), ('add_mu_loss_gradient(E, V)', E[:31]),
                        (code('E -= mu / V'), E.flatten())):
        with pytest.raises(AssertionError):
            run(line, E=wrong)


def test_nanogpt(tmp_path):
    """git applies the patch to a file with its context; what it adds runs, and is μ-loss."""
    patch = Path(ROOT, 'tools/nanogpt.diff')
    before = [''] * 400
    for start, hunk in re.findall(r'^@@ -(\d+).*\n((?:[ +].*\n)+)', patch.read_text(), re.M):
        for i, line in enumerate(re.findall(r'^ (.*)', hunk, re.M), int(start) - 1):
            before[i] = line
    (tmp_path / 'train.py').write_text('\n'.join(before))
    subprocess.run(['git', 'apply', patch], cwd=tmp_path, check=True)

    after = (tmp_path / 'train.py').read_text().splitlines()
    added = [line.strip() for line in after if line not in before]
    model = gpt_with_a_mean('baseline', True)
    names = {'torch': torch, 'model': model, 'logits': normal(generator(0), 2, 5, 61), 'loss': 2}
    exec('\n'.join(added), names)
    same(names['loss'], 2 + 1e-4 * model.E.mean(dim=0).square().sum())


@pytest.mark.parametrize('tied', [False, True])
def test_transformers(tied):
    """A Llama and its copies have the same gradients with the head's line."""
    tf = pytest.importorskip('transformers')
    config = tf.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                            num_attention_heads=2, tie_word_embeddings=tied)
    tokens = torch.arange(61)[None]
    gradients = []
    for lines in ('', HEAD):
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(config).double()
        model.lm_head.weight.data += 1
        run(lines, model=model)
        model = copy.deepcopy(model)
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert largest_mean_logit(out.logits) < 1e-5
    close(*gradients, rtol=1e-3, atol=1e-5)  # parts of it are in fp32
