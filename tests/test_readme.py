"""README.md, tools/README.md, tools/adopt.md: the demo, commands, an added method, lines for loops."""
import copy
import functools
import importlib
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import train
from conftest import ENV, ROOT, finish
from small_runs import ranks
from test_facts import close, generator, normal

README, ADOPT, TOOLS = (Path(ROOT, page).read_text(encoding='utf-8')
                        for page in ('README.md', 'tools/adopt.md', 'tools/README.md'))
ABOVE = {'METHODS': "    'baseline'", 'head_loss': '    stats = {', 'equations': '    return loss, torch'}
CODE = [block or span for page in (ADOPT, TOOLS, README)
        for block, span in re.findall(r'```python\n(.*?)```|`([^`\n]+)`', page, re.S)]


def code(mark):
    """The first block of Python, or code in a line, that holds `mark`."""
    return next(code for code in CODE if mark in code)


def test_adding_a_method(tmp_path, monkeypatch):
    """With README's diff the new method is its equation."""
    for file in ('model.py', 'test_facts.py'):
        shutil.copy(f'{ROOT}/{file}', tmp_path)
    for file, place, lines in re.findall(r'^--- (\S+\.py), in (\w+).*\n((?:\+.*\n)+)', README, re.M):
        before, after = (tmp_path / file).read_text().split(ABOVE[place], maxsplit=1)
        (tmp_path / file).write_text(before + lines.replace('\n+', '\n')[1:] + ABOVE[place] + after)
    monkeypatch.delitem(sys.modules, 'model')
    monkeypatch.syspath_prepend(tmp_path)  # where test_facts.py finds the changed model.py
    facts = {}
    exec((tmp_path / 'test_facts.py').read_text(), facts)
    facts['test_head_equation']('l2_logits')
    facts['test_model_equation']('l2_logits', False)


def is_shown(line, printed):
    """Whether README shows what is printed as this line, but for its numbers and what ... stands for."""
    number = r'-?\d+(\.\d+)?'
    pattern = re.escape(re.sub(number, '0', line)).replace(r'\.\.\.', '.*')
    return re.fullmatch(pattern, re.sub(number, '0', printed)) is not None


def test_demo(corpus, tmp_path, capsys):
    """README's sample: the demo's runs, a line of a log, and how a run ends; of 20 steps on other text."""
    sample, = re.findall(r'\n\n```\n(.*?)\n```', README, re.S)
    log_line, *ends = sample.splitlines()
    env = {**ENV, 'DRY_RUN': '1', 'DATA': corpus, 'OUT': str(tmp_path), 'STEPS': '20',
           'FLAGS': '--eval_tokens=256 --test_tokens=256'}
    sweep = subprocess.run(['bash', 'sweep.sh', 'demo'], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    runs = [line.split()[2:] for line in sweep.stdout.splitlines()]
    train.main(runs[0])
    printed = capsys.readouterr().out.splitlines()
    assert any(is_shown(log_line, line) for line in printed)
    for i, (end, run) in enumerate(zip(ends, runs, strict=True), 1):
        name = Path(train.parser.parse_args(run).out).name
        assert is_shown(end, f'[{i}/4, about 2 min left] {name}: {printed[-1]}')  # by tools/runner.py


def test_commands():
    """The flags of the programs, and those that sweep.sh is given for train.py, are known."""
    text = (README + TOOLS).replace('\\\n', ' ')
    commands = re.findall(r'(\w+)\.py (--[^#\n`]*)', text)
    commands += [('train', flags) for flags in re.findall("FLAGS='(.*?)'", text)]
    for name, flags in commands:
        importlib.import_module(name).parser.parse_args(flags.split())


# -------- the lines for one's own loop
HEAD = code('class CenteredHead')
FUNCTIONS, HOOK, PENALTY, CHECK = re.split(r'\n(?=# )', code('def center'))
METHODS = ('centered_head', 'mu_centering', 'mu_loss')
TOKENS = torch.arange(61)[None]
same = functools.partial(close, rtol=0, atol=1e-12)


def run(lines, **names):
    """Runs lines of adopt.md, with `names` -> all names after it."""
    names = {'torch': torch, 'F': F, 'dist': dist, 'group': None, 'V': 61, 'lam': 0.3, **names}
    exec(f'{FUNCTIONS}\n{lines}', names)
    return names


def language_model(tied=False):
    """A bigram model in float64, tokens (B, T) -> logits (B, T, 61), whose output embeddings have a mean."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(OrderedDict(
        wte=torch.nn.Embedding(61, 16), mlp=torch.nn.Linear(16, 16), tanh=torch.nn.Tanh(),
        lm_head=torch.nn.Linear(16, 61))).double()
    model.lm_head.weight.data += 1
    if tied:
        model.wte.weight = model.lm_head.weight
    return model


def largest_mean_logit(logits):
    """What adopt.md's line that checks prints."""
    return eval(CHECK.splitlines()[1], {'logits': logits, 'print': torch.Tensor.item})


def two_steps(method, tied, lines, wrap=lambda model: model, rank=0, world=1):
    """A model after two clipped steps of four micro-batches, with adopt.md's lines or by the equations."""
    raw_model = language_model(tied)
    if lines and method == 'centered_head':
        run(HEAD, model=raw_model)
    model = wrap(raw_model)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    scaler = torch.amp.GradScaler('cpu')
    if lines and method == 'mu_centering':
        run(HOOK, optimizer=optimizer, model=raw_model)
    for step in range(2):
        for i in range(rank, 4, world):
            tokens = torch.randint(61, (1, 16), generator=generator(4 * step + i))
            loss = F.cross_entropy(model(tokens)[0], (tokens[0] + 1) % 61) * world / 4
            if not lines and method == 'mu_loss':
                loss = loss + 0.3 / 4 * raw_model.lm_head.weight.mean(dim=0).square().sum()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if lines and method == 'mu_loss':
            run(PENALTY.replace('lam=1e-4', 'lam=0.3'), model=raw_model)
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if not lines and method == 'mu_centering':
            raw_model.lm_head.weight.data -= raw_model.lm_head.weight.data.mean(dim=0)
        optimizer.zero_grad()
    return raw_model


def check_lines(method, tied, *ranks):
    model = two_steps(method, tied, True, *ranks)
    for p, q in zip(model.parameters(), two_steps(method, tied, False).parameters(), strict=True):
        same(p.full_tensor() if hasattr(p, 'full_tensor') else p, q)


def two_ranks(argv):
    """DDP, and FSDP2 with shards of unequal length."""
    from torch.distributed.fsdp import fully_shard  # takes a second
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    for wrap, tied, method in product((DDP, fully_shard), (False, True), METHODS):
        check_lines(method, tied, wrap, rank, 2)

    # rows of E on each rank; G is a gradient of logits: as cross entropy's it sums to 0 over the vocabulary
    h, E, G = (normal(generator(0), *shape) + 1 for shape in ((5, 16), (61, 16), (5, 61)))
    G -= G.mean(dim=1, keepdim=True)
    mu, mine = E.mean(dim=0), slice(31 * rank, 31 * rank + 31)
    same(run(code('E -= mu / V'), E=E[mine].clone())['E'], (E - mu)[mine])
    shard = E[mine].clone().requires_grad_()
    logits = run(code('E.detach()'), h=h, E=shard)['logits']
    logits.backward(G[:, mine])
    same(logits, (h @ (E - mu).T)[:, mine])
    same(shard.grad, (G.T @ h)[mine])
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=two_ranks):
        finish(started, 0)


def test_line():
    """The head's lines have the baseline's softmax. The others refuse a shard of rows, or a flat one."""
    h, E, b = (normal(generator(0), *shape) + 1 for shape in ((5, 16), (61, 16), (61,)))
    for line, bias in zip(code('b - b.mean()').splitlines(), (0, b), strict=True):
        logits = run(line, h=h, E=E, b=b)['logits']
        same(logits.softmax(dim=1), (h @ E.T + bias).softmax(dim=1))
        assert largest_mean_logit(logits) < 1e-6
    for line, wrong in (('center(E, V)', E[:31]), ('add_mu_loss_gradient(E, V)', E[:31]),
                        (code('E -= mu / V'), E.flatten())):
        with pytest.raises(AssertionError):
            run(line, E=wrong)


def llama(tied=False):
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=32,
                               num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=tied))


@pytest.mark.parametrize('kind', ['untied', 'tied', 'lora'])
def test_transformers(kind):
    """A Llama and its copies have the same gradients with the line; with LoRA on the head too."""
    peft = pytest.importorskip('peft') if kind == 'lora' else None
    models = []
    for head, lora in (('', ''), (HEAD, code('].__class__ ='))):
        model = llama(tied=kind == 'tied').double()
        model.lm_head.weight.data += 1
        names = run(head, model=model)
        model = copy.deepcopy(model)
        if kind == 'lora':
            adapter = peft.LoraConfig(target_modules=['lm_head'], init_lora_weights=False)
            model = peft.get_peft_model(model, adapter)
            run(lora, **{**names, 'model': model})
        out = model(input_ids=TOKENS, labels=TOKENS)
        out.loss.backward()
        models.append(model)
    assert largest_mean_logit(out.logits) < 1e-5
    for p, q in zip(*([p for p in m.parameters() if p.requires_grad] for m in models), strict=True):
        close(p.grad, q.grad, rtol=1e-3, atol=1e-5)  # parts of it are in fp32


@pytest.mark.parametrize('kind', ['Trainer', 'accelerate'])
def test_trainers(kind, tmp_path):
    """The hook, where adopt.md's table says that it goes, keeps the embeddings centered."""
    tf, accelerate = map(pytest.importorskip, ('transformers', 'accelerate'))
    model = llama()
    E, optimizer = model.lm_head.weight, torch.optim.AdamW(model.parameters(), lr=0.1)
    names = run(HOOK, model=model, optimizer=optimizer)
    if kind == 'Trainer':
        arguments = tf.TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
        data = [{'input_ids': TOKENS[0], 'labels': TOKENS[0]}] * 9
        trainer = tf.Trainer(model, arguments, train_dataset=data)
        exec(code('trainer.create_optimizer'), {**names, 'trainer': trainer})
        trainer.train()
    else:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        optimizer.step()
    assert E.mean(dim=0).norm() < 1e-6 < E.norm()
