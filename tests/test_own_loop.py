"""The README's lines for anybody's own training loop do what train.py does, sharded too; Appendix E."""
import itertools
import re

import pytest
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
    center(part, group=dist.group.WORLD)
    close(penalty.detach(), 0.3 * mu @ mu)
    close(part.grad, (0.6 * mu / 61).expand_as(part))
    close(part.detach(), (E - mu).tensor_split(2)[rank])
    counts = torch.arange(61.0, dtype=E.dtype)
    weighted = E.tensor_split(2)[rank].clone()
    center(weighted, counts.tensor_split(2)[rank], group=dist.group.WORLD)
    close(weighted, (E - counts @ E / counts.sum()).tensor_split(2)[rank])


def process_of_two(argv):
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    whole_and_sharded(dist.get_rank())
    vocabulary_parallel(dist.get_rank())
    dist.destroy_process_group()


def test_the_readmes_lines_do_what_train_py_does_sharded_or_not(tmp_path):
    for started in ranks(2, [], tmp_path / 'stderr', main=process_of_two):
        finish(started, 0)


def test_the_hook_in_a_trainer_that_one_does_not_own(tmp_path):
    """Hugging Face's, with a tiny GPT-2, whose embeddings are tied."""
    tf = pytest.importorskip('transformers')
    pytest.importorskip('accelerate', reason='transformers.Trainer needs it')
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    tokens = [dict(input_ids=row, labels=row) for row in token_batch(0)[0]]
    args = tf.TrainingArguments(tmp_path, max_steps=3, learning_rate=0.1, use_cpu=True, report_to='none')
    trainer = tf.Trainer(model, args, train_dataset=tokens)
    hook(trainer.create_optimizer(), model)
    trainer.train()
    assert model.lm_head.weight.mean(dim=0).norm() < 1e-6 < model.lm_head.weight.std()


@pytest.mark.parametrize('centered, near_0', [('weights', False), ('masters', True)])
def test_fp32_masters_undo_the_centering_of_bf16_weights(centered, near_0):
    """An optimizer of fp32 copies, which it copies over the weights in each step, as Megatron-LM's does."""
    masters = (normal(generator(0), 61, 16).float() + 3).requires_grad_()
    masters.grad = normal(generator(1), 61, 16).float()
    optimizer = torch.optim.AdamW([masters], lr=0.01)
    for _ in range(2):
        optimizer.step()
        if centered == 'masters':
            center(masters)
        weights = masters.bfloat16()
        if centered == 'weights':
            center(weights)
    assert (masters.mean(dim=0).norm() < 1e-5) == near_0


def test_fused_gradient_accumulation_drops_what_mu_loss_adds():
    """Megatron-LM's puts the gradient into main_grad itself, and throws away what comes into grad."""
    W = (normal(generator(0), 61, 16) + 3).requires_grad_()
    W.main_grad = torch.zeros_like(W)
    W.register_post_accumulate_grad_hook(lambda W: setattr(W, 'grad', None))
    mu_loss(W).backward()
    assert not W.main_grad.any()
    W.main_grad += torch.autograd.grad(mu_loss(W), W)[0]  # the remedy
    close(W.main_grad, (2e-4 / 61 * W.mean(dim=0)).expand(61, 16).detach())


@pytest.mark.parametrize('weights', [None, torch.arange(61.0, dtype=torch.float64)])
def test_a_bias_keeps_its_mean_in_the_logits_unless_it_is_centered_too(weights):
    h, E, bias = normal(generator(0), 5, 16), normal(generator(1), 61, 16) + 1, normal(generator(2), 61) + 3
    share = torch.full_like(bias, 1 / 61) if weights is None else weights / weights.sum()
    before, mean_bias = (h @ E.T + bias).softmax(dim=1), share @ bias
    center(E, weights)
    close((h @ E.T + bias) @ share, mean_bias.expand(5), rtol=0, atol=1e-12)
    center(E, weights, bias)
    close((h @ E.T + bias) @ share, torch.zeros_like(h[:, 0]), rtol=0, atol=1e-12)
    close((h @ E.T + bias).softmax(dim=1), before, rtol=0, atol=1e-12)


def test_what_reads_the_zero_of_the_logits_is_changed_by_centering():
    """A soft-capped head, and sampling with a repetition penalty, by transformers."""
    tf = pytest.importorskip('transformers')
    h, E = normal(generator(0), 5, 16), normal(generator(1), 61, 16) + 1
    said = torch.arange(5 * 7).view(5, 7)  # tokens
    readers = {'plain': lambda logits: logits, 'capped': lambda logits: 5 * torch.tanh(logits / 5),
               'penalised': lambda logits: tf.RepetitionPenaltyLogitsProcessor(1.3)(said, logits)}
    before = {name: reader(h @ E.T).softmax(dim=1) for name, reader in readers.items()}
    center(E)
    for name, reader in readers.items():
        same = torch.allclose(reader(h @ E.T).softmax(dim=1), before[name], rtol=0, atol=1e-12)
        assert same == (name == 'plain'), name
