"""The README's lines for anybody's own training loop do what train.py does, sharded too; Appendix E."""
import itertools
import re

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from conftest import README, finish
from small_runs import ranks
from test_facts import close, generator, normal, tiny_gpt, token_batch, train_steps

NAMES = {}
exec(re.search(r'```python\n(import torch\n.*?)```', README, re.DOTALL)[1], NAMES)
center, mu_loss = NAMES['center'], NAMES['mu_loss']


def hook(optimizer, model):
    line, = re.findall(r'^optimizer\.register_step_post_hook.*$', README, re.M)
    exec(line, {'optimizer': optimizer, 'model': model, 'center': center})


def whole_and_sharded(rank):
    """Anybody's training loop with the README's lines: three steps, on this rank's share of each batch."""
    kinds = (None, DistributedDataParallel, fully_shard)
    methods = ('mu_centering', 'mu_loss')
    for method, tying, V, wrap in itertools.product(methods, (False, True), (61, 64), kinds):
        gpt, reference = (tiny_gpt(m, vocab_size=V, weight_tying=tying) for m in ('baseline', method))
        model = wrap(gpt) if wrap else gpt
        shards = 2 if wrap else 1
        if wrap is fully_shard:
            assert gpt.E.to_local().shape == ((V + 1 - rank) // 2, 16)
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        if method == 'mu_centering':
            hook(optimizer, gpt)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model(*(x.chunk(shards)[rank % shards] for x in token_batch(step)))[0].backward()
            if method == 'mu_loss':
                mu_loss(gpt.E, lam=0.3).backward()
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            optimizer.step()
        list(train_steps(reference, method, 3))
        for p, q in zip(gpt.parameters(), reference.parameters(), strict=True):
            close(p.full_tensor() if wrap is fully_shard else p, q, rtol=0, atol=1e-12)


def vocabulary_parallel(rank):
    """Appendix E: each rank has some of the rows of E, here 31 and 30."""
    E = normal(generator(0), 61, 16) + 1
    mu = E.mean(dim=0)
    part = E.tensor_split(2)[rank].clone().requires_grad_()
    penalty = mu_loss(part, lam=0.3, group=dist.group.WORLD)
    penalty.backward()
    center(part, dist.group.WORLD)
    close(penalty.detach(), 0.3 * mu @ mu)
    close(part.grad, (0.6 * mu / 61).expand_as(part))
    close(part.detach(), (E - mu).tensor_split(2)[rank])


def process_of_two(argv):
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    whole_and_sharded(dist.get_rank())
    vocabulary_parallel(dist.get_rank())
    dist.destroy_process_group()


def test_the_readmes_lines_do_what_train_py_does_sharded_or_not(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=process_of_two):
        finish(started, 0)
