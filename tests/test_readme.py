"""README.md, the account of our runs: links, commands, tables, an added method, its lines for other loops."""
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
import torch.distributed as dist

import analyze
import prepare_fineweb
import train
from analysis import account
from conftest import ENV, ROOT, read, refused
from processes import finish
from runs import ranks
from test_facts import close, generator, normal, tiny_gpt, token_batch, train_steps

PARSERS = {f'{program.__name__}.py': program.parser for program in (train, prepare_fineweb, analyze)}


@pytest.fixture(params=account.TABLES)
def readme(request):
    if not os.path.exists(os.path.join(ROOT, request.param)):
        pytest.skip('deleted by this fork')
    return request.param


def test_every_link_is_there(readme):
    folder = os.path.dirname(os.path.join(ROOT, readme))
    links = re.findall(r'\]\((?!http)([^)#]+)', read(readme))
    missing = [link for link in links if not os.path.exists(os.path.join(folder, link))]
    assert not missing, f'{readme} links to files that are not there: {missing}'


def test_the_commands_have_flags_that_there_are(readme):
    blocks = ''.join(re.findall(r'```sh\n(.*?)```', read(readme), re.S)).replace('\\\n', '')
    for command in re.split(r'\n|&&', blocks):
        words = shlex.split(command, comments=True)
        program = next((word for word in words if word in PARSERS), None)
        if program:
            PARSERS[program]().parse_args(words[words.index(program) + 1:])
        for script in re.findall(r'bash (\S+)', command):
            assert os.path.exists(os.path.join(ROOT, script)), script


@pytest.mark.skipif(not account.PUBLISHED.exists(), reason='deleted by this fork')
def test_the_tables_are_those_of_the_csv_files(readme):
    assert account.filled(readme) == read(readme), 'run: python -m analysis.account'


def test_a_table_shows_the_seeds_and_no_minus_zero_and_its_markers_are_missed(tmp_path, monkeypatch):
    rows = pd.DataFrame({'label': 'z-loss', 'seed': [1, 2, 3], 'loss': [-0.12, 0, 0.009], 'mu_norm': -0.2})
    columns = account.columns('.2f', 'loss') + account.columns(',.0f', 'mu_norm')
    monkeypatch.setattr(account, 'HERE', tmp_path)
    monkeypatch.setattr(account, 'read', lambda csv: rows)
    monkeypatch.setattr(account, 'TABLES', {'a.md': {'ours': (account.lines('x', 'z-loss'), columns)}})
    (tmp_path / 'a.md').write_text('Before\n<!-- table: ours -->\nold\n<!-- end -->\nafter')
    account.main([])
    assert (tmp_path / 'a.md').read_text().split('\n')[4] == '| z-loss | -0.04 [-0.12, 0.01] | 0 |'
    (tmp_path / 'a.md').write_text('<!-- table: ours -->\nits end is gone')
    refused(lambda: account.filled('a.md'), 'a.md', 'ours')


PLACES = {  # where README's diffs say that their lines go: below what ends a line, above other words
    'METHODS': r'METHODS = {\n', 'logits_to_loss': r'    stats = {.loss.', 'COLORS': r'COLORS = {\n',
    'ON_WEIGHTS': r'ON_WEIGHTS = \(', 'train_step': r'        if every\(args.center_every',
    'equations': r'    return loss, torch.zeros'}


def test_methods_can_be_added_as_the_readme_says(tmp_path):
    """Its diffs are applied to a copy of the project, in which the tests of the new methods then pass."""
    copy = tmp_path / 'copy'
    kept = shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'wandb', 'results')
    shutil.copytree(ROOT, copy, ignore=kept)
    diffs = ''.join(re.findall(r'```diff\n(.*?)```', read('README.md'), re.S))
    pieces = re.split(r'^--- (\S+\.py), in (\w+).*\n', diffs, flags=re.M)[1:]
    for file, place, added in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        text, lines = (copy / file).read_text(), ''.join(line[1:] + '\n' for line in added.splitlines())
        [found] = re.finditer(PLACES[place], text)
        at = found.end() if place.isupper() else found.start()
        (copy / file).write_text(text[:at] + lines + text[at:])
    methods = re.findall(r"^\+    '(\w+)': (?:None|\d)", diffs, re.M)
    fast = ['test_facts.py', 'tests/test_head.py', 'tests/test_step.py', '-k', ' or '.join(methods)]
    command = [sys.executable, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', *fast]
    done = subprocess.run(command, cwd=copy, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in methods:
        assert len(re.findall(rf'\[.*{method}.*\] PASSED', done.stdout)) >= 2, method


def readme_functions():
    names, first_line = {}, '# mu-centering and mu-loss in any PyTorch training loop\n'
    exec(re.search(rf'```python\n({first_line}.*?)```', read('README.md'), re.DOTALL)[1], names)
    return names['center'], names['mu_loss']


def own_loop(gpt, method, rank, shards):
    """Anybody's training loop with the README's lines: three steps on this rank's share of each batch."""
    center, mu_loss = readme_functions()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        gpt(*(x.chunk(shards)[rank % shards] for x in token_batch(step)))[0].backward()
        if method == 'mu_loss':
            mu_loss(gpt.E, lam=0.3).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        if method == 'mu_centering':
            center(gpt.E)


def whole_and_sharded(rank):
    """The README's lines do what train.py does, also with an E of 61 rows that is sharded into 31 and 30."""
    from torch.distributed.fsdp import fully_shard
    for method, tying, shards in itertools.product(('mu_centering', 'mu_loss'), (False, True), (1, 2)):
        own, ours = (tiny_gpt(m, vocab_size=61, weight_tying=tying) for m in ('baseline', method))
        if shards == 2:
            fully_shard(own)
            assert own.E.to_local().shape == (31 - rank, 16)
        own_loop(own, method, rank, shards)
        list(train_steps(ours, method, 3))
        for p, q in zip(own.parameters(), ours.parameters(), strict=True):
            close(p.full_tensor() if shards == 2 else p, q, rtol=0, atol=1e-12)


def split_embeddings(rank):
    """
    Appendix E: with an E that is split across the vocabulary, as a DTensor or as a plain tensor, the README's
    lines take no collective but all_reduce (of H numbers); across the hidden dimension they take none.
    """
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    center, mu_loss = readme_functions()
    mesh, full = init_device_mesh('cpu', (2,)), normal(generator(0), 61, 16) + 1
    mu = full.mean(dim=0)
    gradient = (0.6 * mu / 61).expand(61, 16)  # of 0.3 mu . mu
    for dim, collectives in ((0, {'all_reduce'}), (1, set())):
        E = distribute_tensor(full, mesh, [Shard(dim)]).requires_grad_()
        with CommDebugMode() as seen:
            penalty = mu_loss(E, lam=0.3)
            penalty.backward()
            center(E)
        assert {str(op).split('.')[-1] for op, n in seen.get_comm_counts().items() if n} == collectives
        close(penalty.full_tensor(), 0.3 * mu @ mu)
        close(E.grad.full_tensor(), gradient)
        close(E.full_tensor(), full - mu)

        part = full.tensor_split(2, dim)[rank].clone().requires_grad_()
        group = dist.group.WORLD if dim == 0 else None
        penalty = mu_loss(part, lam=0.3, group=group)
        penalty.backward()
        center(part, group)
        assert dim == 1 or penalty.item() == pytest.approx((0.3 * mu @ mu).item())
        close(part.grad, gradient.tensor_split(2, dim)[rank])
        close(part, (full - mu).tensor_split(2, dim)[rank])


def process_of_two(argv):
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    whole_and_sharded(dist.get_rank())
    split_embeddings(dist.get_rank())
    dist.destroy_process_group()


def test_the_readmes_lines_do_what_train_py_does_sharded_or_not(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=process_of_two):
        finish(started, 0)
