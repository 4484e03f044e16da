"""What a run computes: defaults, data, batch order, the step, and all of a run written out."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare_fineweb
import train
from model import gpt_config
from small_runs import SMALL, float64_model, load, log_of, result_of, shard
from test_facts import close, tiny_gpt
from test_model import settings


def test_defaults_are_appendix_a(tmp_path, monkeypatch):
    """On a GPU. prepare_fineweb.py makes enough tokens for them."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    expected = dict(
        beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, min_lr=1e-5, warmup=5000, steps=100_000,
        batch_size=64, block_size=2048, size='16M', n_layer=6, n_embd=224, n_head=4, vocab_size=50304,
        weight_tying=False, rope_fraction=0.5, final_gain=True, method='baseline', lam=None, cap=None,
        device='cuda', compile=True, eval_every=5000, eval_tokens=1_048_576, test_tokens=10_485_760, seed=1)
    assert vars(settings()).items() >= expected.items()
    for method in ('weight_decay', 'z_loss', 'mu_loss'):
        assert settings(f'--method={method}').lam == 1e-4
    assert settings('--method=soft_capping').cap == 30
    assert prepare_fineweb.parser.get_default('tokens') > 100_000 * 64 * 2048
    assert prepare_fineweb.parser.get_default('val_tokens') > 10_485_760


def test_other_settings(tmp_path, monkeypatch):
    zeros = gpt_config(vars(settings('--method=mu_loss', '--lam=0', '--rope_fraction=0')))
    assert (zeros.lam, zeros.rope_fraction) == (0, 0)  # a zero is no default
    assert [settings(f'--steps={n}').ckpt_every for n in (5, 300, 40_000)] == [1, 15, 1000]
    monkeypatch.setenv('HOME', '/h')  # bash leaves the ~ in --out=~/x
    assert settings('--out=~/x').out == '/h/x'
    train.save({'vocab_size': 257}, f'{tmp_path}/meta.json')
    assert settings(f'--data={tmp_path}').vocab_size == 320  # up to a multiple of 64


@pytest.mark.parametrize('flags, gpu, dtype, micro_batch', [
    ('', True, 'bfloat16', 16), ('', False, 'float32', 2),
    ('--device=cpu --block_size=512 --batch_size=12', True, 'float32', 6),
    ('--dtype=float32 --block_size=65536', True, 'float32', 1)])
def test_defaults_of_the_machine(flags, gpu, dtype, micro_batch, monkeypatch):
    """BF16 on a GPU. A micro-batch divides the batch; 32,768 tokens at most, or 4,096."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
    args = settings(*flags.split())
    assert (args.dtype, args.logits_dtype, args.micro_batch_size) == (dtype, dtype, micro_batch)


class Numbers:
    """Windows that hold nothing but their own number."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, ids):
        return np.stack([ids, ids], axis=1)


def window_ids(seed, step, batch_size, n):
    """The windows that a step of train.load_batch reads."""
    args = settings(f'--seed={seed}', f'--batch_size={batch_size}', '--device=cpu')
    return [i for tokens, _ in train.load_batch(Numbers(n), step, args) for i in tokens.flatten().tolist()]


def test_batch_order():
    """Values of the frozen RandomState stream: were they to change, old runs could not be resumed."""
    assert window_ids(1, 1, 5, 1000) == [775, 813, 549, 55, 416]
    assert window_ids(2**32 - 1, 8, 5, 10) == [1, 7, 8, 0, 3]
    epochs = np.array([window_ids(1, step, 5, 12) for step in range(1, 41)]).reshape(20, 10)
    assert all(len(set(epoch)) == 10 for epoch in epochs.tolist())  # no window twice, two left out
    assert set(epochs.flatten()) == set(range(12))  # by turns


def make_shards(folder, split, lengths):
    """Writes shards of a vocabulary of 60 -> their windows (n, 17), one after another."""
    windows = []
    for i, n in enumerate(lengths):
        tokens = np.cumsum(np.random.RandomState(i).randint(0, 3, n)) % 60
        (folder / f'x_{split}_{i:06d}.bin').write_bytes(shard(tokens))
        for start in range(0, n - 16, 16):
            windows.append(tokens[start:start + 17])
    return torch.from_numpy(np.stack(windows))


CHOICES = dict(
    method=['z_loss', 'mu_loss', 'mu_centering'], steps=[6, 8, 9], warmup=[0, 1, 3], lr=[0.01, 0.03],
    min_lr=[0, 1e-3], grad_clip=[0, 0.05, 1], beta1=[0.8, 0.9], beta2=[0.9, 0.95], micro_batch_size=[1, 2, 4],
    log_every=[2, 3], eval_every=[3, 4], eval_tokens=[165, 300], test_tokens=[500, 10**9])


@pytest.mark.parametrize('seed', range(8))
def test_a_run_written_out(seed, tmp_path, monkeypatch):
    """train.main in float64, of random settings: its log, its result and its weights, by a naive loop."""
    rng = np.random.RandomState(seed)
    train_windows = make_shards(tmp_path, 'train', [1200, 0, 48 * 16 + 1])
    val_windows = make_shards(tmp_path, 'val', [900])
    flags = [*SMALL, '--n_embd=16', '--n_head=2', '--vocab_size=64', '--block_size=16', '--eps=1e-4',
             '--seed=5', '--weight_tying' if seed % 2 else '--no-weight_tying',
             f'--data={tmp_path}', f'--out={tmp_path}/run']
    for name, values in CHOICES.items():
        flags.append(f'--{name}={rng.choice(values)}')
    args = train.parser.parse_args(flags)
    if args.method != 'mu_centering':
        flags.append('--lam=0.3')
    monkeypatch.setattr(train, 'make_model', float64_model)
    train.main(flags)

    gpt = tiny_gpt(args.method, seed=5, weight_tying=args.weight_tying)
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(args.beta1, args.beta2), eps=1e-4, weight_decay=0)

    @torch.no_grad()
    def val_loss(n_tokens):
        n = min(len(val_windows), n_tokens // 16)
        windows = val_windows[[i * len(val_windows) // n for i in range(n)]]
        logits = gpt.head(gpt.hidden(windows[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()

    expected = [{'step': 0, 'val_loss': val_loss(args.eval_tokens)}]
    for step in range(1, args.steps + 1):
        windows = train_windows[window_ids(5, step, 4, len(train_windows))]
        tokens, targets = windows[:, :-1], windows[:, 1:]
        logits = gpt.head(gpt.hidden(tokens)).flatten(0, 1).detach()
        loss = F.cross_entropy(logits, targets.flatten())
        objective, _ = gpt(tokens, targets)
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), args.grad_clip or math.inf)

        rate = args.lr * step / (args.warmup + 1)
        if step > args.warmup:
            done = (step - 1 - args.warmup) / (args.steps - args.warmup)
            rate = args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]['lr'] = rate
        optimizer.step()
        optimizer.zero_grad()
        if args.method == 'mu_centering':
            gpt.E.data -= gpt.E.data.mean(dim=0)

        means = logits.mean(dim=1)
        if step in (1, args.steps) or step % args.log_every == 0:
            expected.append({
                'step': step, 'loss': loss, 'reg': objective.detach() - loss, 'lr': rate, 'grad_norm': norm,
                'mu_norm': gpt.E.detach().mean(dim=0).norm(), 'logit_mean': means.mean(),
                'logit_mean_spread': means.std(correction=0), 'logit_max': logits.abs().max(),
                'logit_std': logits.std(dim=1, correction=0).mean(),
                'logit_absmax': logits.abs().amax(dim=1).mean()})
        if step % args.eval_every == 0 and step < args.steps:
            expected.append({'step': step, 'val_loss': val_loss(args.eval_tokens)})
    expected.append({'step': args.steps, 'test_loss': val_loss(args.test_tokens)})

    run = tmp_path / 'run'
    close(load(run)['model'], dict(gpt.state_dict()), rtol=1e-9, atol=1e-11)
    for entry, right in zip(log_of(run), expected, strict=True):
        for name, value in right.items():
            assert entry[name] == pytest.approx(float(value), rel=1e-8, abs=1e-11), name
    result = result_of(run)
    assert result['init_loss'] == pytest.approx(expected[0]['val_loss'], rel=1e-8)
    assert result['test_loss'] == pytest.approx(expected[-1]['test_loss'], rel=1e-8)
    assert (result['model_step'], result['n_params']) == (args.steps, gpt.n_params())
