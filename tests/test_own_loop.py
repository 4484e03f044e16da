"""The README's lines for anybody's own training loop do what train.py does, sharded too; Appendix E."""
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from conftest import read
from processes import finish
from runs import ranks
from test_facts import close, generator, normal, tiny_gpt, token_batch, train_steps


def readme_functions():
    names = {}
    exec(re.search(r'```python\n(import torch\n.*?)```', read('README.md'), re.DOTALL)[1], names)
    return names['center'], names['mu_loss']


def whole_and_sharded(rank):
    """Anybody's training loop with the README's lines: three steps, on this rank's share of each batch."""
    center, mu_loss = readme_functions()
    for method, tying, shards in itertools.product(('mu_centering', 'mu_loss'), (False, True), (1, 2)):
        own, ours = (tiny_gpt(m, vocab_size=61, weight_tying=tying) for m in ('baseline', method))
        if shards == 2:
            fully_shard(own)
            assert own.E.to_local().shape == (31 - rank, 16)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            own(*(x.chunk(shards)[rank % shards] for x in token_batch(step)))[0].backward()
            if method == 'mu_loss':
                mu_loss(own.E, lam=0.3).backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            optimizer.step()
            if method == 'mu_centering':
                center(own.E)
        list(train_steps(ours, method, 3))
        for p, q in zip(own.parameters(), ours.parameters(), strict=True):
            close(p.full_tensor() if shards == 2 else p, q, rtol=0, atol=1e-12)


def split_embeddings(rank):
    """Appendix E: if E is split by rows they take no collective but all_reduce, of H numbers; else none."""
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
