"""What a run computes: defaults, data, batch order, the step, and all of a run written out."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare_fineweb
import train
from model import METHODS, GPTConfig, gpt_config
from small_runs import SMALL, float64_model, load, log_of, result_of, shard
from test_facts import close, equations, equations_logits, equations_step, tiny_gpt, token_batch
from test_model import settings


def test_defaults_are_appendix_a(tmp_path, monkeypatch):
    """On a GPU. prepare_fineweb.py makes enough tokens for them."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda: (8, 0))
    expected = dict(
        beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, min_lr=1e-5, warmup=5000, steps=100_000,
        batch_size=64, block_size=2048, size='16M', n_layer=6, n_embd=224, n_head=4, vocab_size=50304,
        weight_tying=False, rope_fraction=0.5, method='baseline', lam=None, cap=None,
        device='cuda', compile=True, eval_every=5000, eval_tokens=1_048_576, test_tokens=10_485_760, seed=1)
    assert expected.items() <= vars(settings()).items()
    lams = dict.fromkeys(['weight_decay', 'z_loss', 'mu_loss', 'adamw_decay'], 1e-4)
    lams |= {'max_z_loss': 2e-4, 'cosine_reg': 1}
    assert {method: settings(f'--method={method}').lam for method in lams} == lams
    assert settings('--method=soft_capping').cap == 30 and settings('--cap=15').cap == 15
    assert prepare_fineweb.parser.get_default('tokens') > 100_000 * 64 * 2048
    assert prepare_fineweb.parser.get_default('val_tokens') > 10_485_760
    zeros = gpt_config(vars(settings('--method=mu_loss', '--lam=0', '--rope_fraction=0')))
    assert (zeros.lam, zeros.rope_fraction) == (0, 0)  # a zero is no default
    assert [settings(f'--steps={n}').ckpt_every for n in (5, 300, 20_000, 40_000)] == [1, 15, 1000, 1000]
    assert gpt_config(vars(settings('--dtype=float32'))) == GPTConfig()
    monkeypatch.setenv('HOME', '/h')  # bash leaves the ~ in --out=~/x
    assert {vars(settings(f'--{name}=~/x'))[name] for name in ('data', 'out', 'init_from')} == {'/h/x'}
    train.save({'vocab_size': 257}, f'{tmp_path}/meta.json')
    assert settings(f'--data={tmp_path}').vocab_size == 320  # up to a multiple of 64


def test_what_a_fork_finds_in_a_step():
    """A group has the schedule's rate times its lr_scale, and a method the rate of E's group."""
    gpt = tiny_gpt()
    before = gpt.E.detach().clone()
    optimizer = torch.optim.AdamW([{'params': [gpt.E], 'lr_scale': 0.5}, {'params': [gpt.wte.weight]}])
    optimizer.step = lambda: None  # AdamW's decay alone
    args = train.parser.parse_args('--lr=0.1 --min_lr=0.1 --warmup=0 --method=adamw_decay --lam=0.2'.split())
    train.train_step(gpt, optimizer, [token_batch(0)], 1, args)
    assert [group['lr'] for group in optimizer.param_groups] == [0.05, 0.1]
    close(gpt.E.detach(), before * (1 - 0.05 * 0.2), rtol=1e-14, atol=0)
    assert all(p.grad is None for p in gpt.parameters())
    with pytest.raises(ValueError, match='optimizer'):  # made for other parameters: nothing would train
        train.train_step(tiny_gpt(), optimizer, [token_batch(0)], 1, args)


@pytest.mark.parametrize('flags, gpu, dtype, micro_batch', [
    ('', True, 'bfloat16', 16), ('', False, 'float32', 2), ('--device=cpu', True, 'float32', 2),
    ('--device=cpu --block_size=512 --batch_size=12', True, 'float32', 6),
    ('--device=cuda', False, 'bfloat16', 16),  # on a login node
    ('--dtype=float32 --block_size=65536', True, 'float32', 1)])
def test_defaults_of_the_machine(flags, gpu, dtype, micro_batch, monkeypatch):
    """BF16 on a GPU. A micro-batch divides the batch; 32,768 tokens at most, or 4,096."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
    args = settings(*flags.split())
    assert (args.dtype, args.logits_dtype, args.micro_batch_size) == (dtype, dtype, micro_batch)


def test_batch_order():
    """Values of the frozen RandomState stream: were they to change, old runs could not be resumed."""
    assert train.batch_windows(1, 1, 5, 1000).tolist() == [775, 813, 549, 55, 416]
    assert train.batch_windows(2**32 - 1, 8, 5, 10).tolist() == [1, 7, 8, 0, 3]
    for batch_size, n in ((5, 12), (20, 3)):
        order = np.concatenate([train.batch_windows(1, step, batch_size, n) for step in range(1, 37)])
        assert (np.sort(order.reshape(-1, n)) == np.arange(n)).all()  # every epoch


def test_fingerprint(tmp_path):
    """It sees every token of val shards, and of a train shard its length and 16 blocks of 8,192 tokens."""
    path, n = str(tmp_path / 'x_train_000000.bin'), 400_000
    tokens = np.random.RandomState(0).randint(1, 2**16, n)

    def fingerprints(n=n):
        """Of a folder that has the tokens as train, and of one that has them as val."""
        found = []
        for of_train, of_val in ((tokens[:n], [1]), ([1], tokens[:n])):
            Path(path).write_bytes(shard(of_train))
            Path(path.replace('train', 'val')).write_bytes(shard(of_val))
            train.fingerprint.cache_clear()
            found.append(train.fingerprint(str(tmp_path)))
        return found
    before = fingerprints()
    for i, of_train in ((0, 1), (24_999, 0), (25_000, 1), (33_191, 1), (375_000, 1), (n - 1, 0)):
        tokens[i] ^= 1
        assert [a != b for a, b in zip(before, fingerprints(), strict=True)] == [of_train, True]
        tokens[i] ^= 1
    assert fingerprints(n - 1)[0] != before[0]


def make_shards(folder, split, lengths):
    """Writes shards of a vocabulary of 60 and returns their windows (n, 17), one after another."""
    windows = []
    for i, n in enumerate(lengths):
        tokens = np.cumsum(np.random.RandomState(i).randint(0, 3, n)) % 60
        (folder / f'x_{split}_{i:06d}.bin').write_bytes(shard(tokens))
        windows += [tokens[start:start + 17] for start in range(0, n - 16, 16)]
    return torch.from_numpy(np.stack(windows))


CHOICES = dict(
    steps=[6, 8, 9], warmup=[0, 1, 3], micro_batch_size=[1, 2, 4], log_every=[2, 3], eval_every=[3, 4],
    lr=[0.01, 0.03], min_lr=[0, 1e-3], grad_clip=[0, 0.05, 1], beta1=[0.8, 0.9], beta2=[0.9, 0.95],
    eval_tokens=[165, 300], test_tokens=[500, 10**9])


@pytest.mark.parametrize('tying', [False, True])
@pytest.mark.parametrize('method', METHODS)
def test_a_run_written_out(method, tying, tmp_path, monkeypatch):
    """train.main in float64, of random settings: all that it logs, its result and its weights, by hand."""
    monkeypatch.setattr(train, 'make_model', float64_model)
    rng, run = np.random.RandomState([tying, *method.encode()]), tmp_path / 'run'
    cap = 30 if method == 'soft_capping' else int(rng.choice([0, 3]))  # any method may have one
    train_windows = make_shards(tmp_path, 'train', [1200, 0, 48 * 16 + 1])
    val_windows = make_shards(tmp_path, 'val', [900])
    flags = [*SMALL, *'--seed=5 --n_embd=16 --n_head=2 --vocab_size=64 --block_size=16 --eps=1e-4'.split(),
             *(f'--{name}={rng.choice(values)}' for name, values in CHOICES.items()),
             *['--weight_tying'] * tying, *['--lam=0.3'] * bool(METHODS[method]), *['--cap=3'] * (cap == 3),
             f'--method={method}', f'--data={tmp_path}', f'--out={run}']
    train.main(flags)
    args = train.parser.parse_args(flags)
    steps, warmup, lr, min_lr, lam = args.steps, args.warmup, args.lr, args.min_lr, args.lam
    beta1, beta2 = args.beta1, args.beta2
    gpt = tiny_gpt(seed=5, weight_tying=tying)
    parameters, moments = list(gpt.parameters()), {}

    def forward(windows):
        """What the equations of test_facts.py say of windows, and their logits."""
        h, targets = gpt.hidden(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
        logits = equations_logits(method, h, gpt.E, cap).detach()
        return *equations(method, h, gpt.E, targets, lam, cap), logits

    def val_loss(n):
        return forward(val_windows[[i * 56 // n for i in range(n)]])[0].item()

    n_eval, n_test = (min(56, n // 16) for n in (args.eval_tokens, args.test_tokens))
    expected = [{'step': 0, 'val_loss': val_loss(n_eval)}]
    for t in range(1, steps + 1):
        rate = lr * t / (warmup + 1)
        if t > warmup:
            done = (t - 1 - warmup) / (steps - warmup)
            rate = min_lr + (lr - min_lr) * (1 + math.cos(math.pi * done)) / 2
        loss, reg, logits = forward(train_windows[train.batch_windows(5, t, 4, 74 + 48)])
        gradients = torch.autograd.grad(loss + reg, parameters)
        norm = sum(g.square().sum() for g in gradients) ** 0.5
        factor = min(1, args.grad_clip / (norm + 1e-6)) if args.grad_clip else 1
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                m, v = moments.get(p, (0, 0))
                m, v = beta1 * m + (1 - beta1) * g * factor, beta2 * v + (1 - beta2) * (g * factor) ** 2
                moments[p] = m, v
                m_hat, v_hat = m / (1 - beta1 ** t), v / (1 - beta2 ** t)
                of_p = method if p is gpt.E else 'baseline'
                p.copy_(equations_step(of_p, p, m_hat, v_hat, rate, lam, eps=1e-4))
            mu_norm = gpt.E.mean(dim=0).norm()
        mean = logits.mean(dim=1)
        if t in (1, steps) or t % args.log_every == 0:
            expected.append({
                'step': t, 'loss': loss, 'reg': reg, 'lr': rate, 'grad_norm': norm, 'mu_norm': mu_norm,
                'logit_mean': mean.mean(), 'logit_mean_spread': mean.std(correction=0),
                'logit_std': logits.std(dim=1, correction=0).mean(), 'logit_max': logits.abs().max(),
                'logit_absmax': logits.abs().amax(dim=1).mean()})
        if t % args.eval_every == 0 and t < steps:
            expected.append({'step': t, 'val_loss': val_loss(n_eval)})
    expected.append({'step': steps, 'test_loss': val_loss(n_test)})

    close(load(run)['model'], dict(gpt.state_dict()), rtol=1e-9, atol=1e-11)
    for entry, right in zip(log_of(run), expected, strict=True):
        right = {name: torch.as_tensor(x, dtype=torch.float64).item() for name, x in right.items()}
        assert {name: entry[name] for name in right} == pytest.approx(right, rel=1e-8, abs=1e-11)
    right = {
        'n_params': sum(p.numel() for p in parameters) - (0 if tying else 64 * 16), 'model_step': steps,
        'init_loss': expected[0]['val_loss'], 'test_loss': expected[-1]['test_loss']}
    result = result_of(run)
    assert {name: result[name] for name in right} == pytest.approx(right, rel=1e-8)
