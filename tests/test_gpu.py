"""
What depends on the device: on a GPU with the head of the paper's runs and the compiler, which tests/on_gpu.sh
does first; elsewhere with small shapes and no compiler, so that these tests keep starting.
"""
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import train
from model import SIZES, Attention, GPTConfig, head_loss, rope_tables
from oec import machine
from oec.head import chunked
from processes import finish, process
from runs import SMALL, assert_same, signal_at, state_of
from test_facts import close
from test_head import BF16_UNIT, assert_compiling_keeps_every_rounding, assert_exact_up_to_bf16, chunks_of

ON_GPU = torch.cuda.is_available()
V = 50304 if ON_GPU else 512
SIZE = '16M' if ON_GPU else 'tiny'
only_gpu = pytest.mark.skipif(not ON_GPU, reason='no GPU')


@pytest.fixture
def device():
    """The device, set up as in train.py. Each test compiles anew, as there is a limit to how often."""
    args = SimpleNamespace(device='cuda' if ON_GPU else 'cpu', threads=None, deterministic=False, n_embd=224,
                           n_head=4, dtype='bfloat16', block_size=2048)
    yield machine.set_up_machine(args, local_rank=0, world_size=1)
    torch._dynamo.reset()


def run_of(device, **more):
    """Settings, model and optimizers of a run in fp32: two layers, as wide as `SIZE`, compiled on a GPU."""
    settings = {**SIZES[SIZE], 'n_layer': 2, 'vocab_size': V, 'block_size': 256, 'compile': ON_GPU,
                'method': 'baseline', 'lam': 1e-4, 'mu_shift': 0.0, 'grad_clip': 1.0, 'seed': 0, 'warmup': 0,
                'lr': 1e-3, 'min_lr': 1e-3, 'steps': 100, 'beta1': 0.9, 'beta2': 0.95, 'eps': 1e-8}
    args = SimpleNamespace(**{**settings, **more})
    return args, *train.make_model(args, device)


def batch_of(device):
    """Two micro-batches of two sequences."""
    tokens = torch.randint(V, (4, 257), generator=torch.Generator().manual_seed(0)).to(device)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]


@pytest.mark.parametrize('size', SIZES)
def test_attention_of_every_size_is_that_of_float64(size, device):
    """
    Forward and backward, by the kernel that the device chooses. What enters and leaves a product is rounded
    to bf16. Once 109M and 221M pass with cuDNN here, oec/machine.py need not avoid it for wide heads.
    """
    config = GPTConfig(**SIZES[size], block_size=2048 if ON_GPU else 64)
    torch.backends.cuda.enable_cudnn_sdp(config.n_embd // config.n_head <= 128)  # as in oec/machine.py
    torch.manual_seed(0)
    attention = Attention(config)
    x, upstream = torch.randn(2, 2, config.block_size, config.n_embd)
    results = []
    for dtype, on in ((torch.float64, x.device), (torch.float32, device)):
        attention.to(on, dtype)
        tables = [table.to(on, dtype) for table in rope_tables(config)]
        with torch.autocast(on.type, torch.bfloat16, enabled=dtype == torch.float32):
            y = attention(x.to(on, dtype), *tables)
        gradients = torch.autograd.grad(y, list(attention.parameters()), upstream.to(on, y.dtype))
        results.append([found.detach().double().cpu() for found in (y, *gradients)])
    for right, found in zip(*results, strict=True):
        assert (found - right).norm() <= 16 * BF16_UNIT * right.norm()


@only_gpu
def test_compiling_keeps_every_rounding_and_adds_none(device):
    """On a CPU test_head.py shows it, but a GPU has another compiler."""
    assert_compiling_keeps_every_rounding('baseline', device, 512, V)


def test_a_head_in_bf16_is_exact_up_to_its_roundings(device, monkeypatch):
    chunks_of(1, V, 2, monkeypatch)
    config = GPTConfig(n_embd=SIZES[SIZE]['n_embd'], vocab_size=V, logits_dtype='bfloat16')
    assert_exact_up_to_bf16(chunked(head_loss, compile=ON_GPU), config, 128, device)


def test_a_step_in_fp32_is_that_of_a_cpu_in_float64(device):
    """On a CPU the gains of the QK-norms are the worst, off by 50 units; TF32 would be off by thousands."""
    _, exact, _ = run_of('cpu', compile=False)
    exact.double().config.logits_dtype = 'float64'
    _, model, _ = run_of(device)
    for gpt in (exact, model):
        tokens, targets = batch_of(gpt.E.device)[0]
        gpt(tokens, targets)[0].backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        error = (p.grad.double().cpu() - q.grad).norm() / q.grad.norm()
        assert error <= 100 * 2.0 ** -24, error


def test_a_deterministic_run_that_was_killed_ends_as_if_never_stopped(corpus, tmp_path):
    large = ('--size=16M', '--n_layer=2', '--block_size=512', '--batch_size=16')
    flags = [*(large if ON_GPU else SMALL), f'--data={corpus}', '--deterministic', '--lr=1e-2', '--steps=8',
             '--log_every=1', '--eval_tokens=512', '--test_tokens=2048', '--keep_every=4']
    kill = (signal_at, signal.SIGKILL, 'train_step', 6)
    for name, prepare, status in (('killed', kill, -signal.SIGKILL), ('killed', (), 0), ('whole', (), 0)):
        started = process(train.main, [*flags, f'--out={tmp_path}/{name}'], prepare=prepare)
        finish(started, status, seconds=300)
    assert_same(*(state_of(tmp_path / name, 'model_8.pt') for name in ('killed', 'whole')))


def test_ddp_in_one_process_takes_the_same_steps(tmp_path, device):
    """What each of several processes does, without the others: with NCCL on a GPU, and compiled there."""
    backend = 'cpu:gloo,cuda:nccl' if ON_GPU else 'gloo'
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.FileStore(str(tmp_path / 'store'), 1))
    results = []
    for parallel in (False, True):
        args, model, optimizers = run_of(device, method='mu_loss', lam=1.0)
        if parallel:  # as in train.py
            model = DDP(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        steps = [train.train_step(model, optimizers, batch_of(device), step, args) for step in range(1, 6)]
        results.append([(machine.join_processes(stats['loss']).mean(), norm) for stats, norm in steps])
    del model
    dist.destroy_process_group()
    close(*results, rtol=1e-4, atol=0)
    assert results[0][-1][0] < results[0][0][0]
