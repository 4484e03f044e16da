"""
What only a GPU can show: `python -m pytest -m gpu`, which tests/on_gpu.sh does first. Without CUDA these
tests are skipped. DEVICE=cpu runs the same code with smaller shapes on a CPU, except for what CUDA alone has.
"""
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from model import GPT, METHODS, SIZES, GPTConfig, attend, gpt_config
from oec import bench, machine
from oec import head as head_py
from oec.common import UserError
from oec.head import chunked_head, compiled_head
from processes import finish, process
from runs import SMALL, assert_same, load, log_of, signal_at_step
from test_facts import close
from test_head import BF16_UNIT, assert_compiling_keeps_every_rounding, assert_exact_up_to_bf16

ON_GPU = os.environ.get('DEVICE') != 'cpu'
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(),
                                                  reason='no CUDA; DEVICE=cpu tries these on a CPU')]
only_cuda = pytest.mark.skipif(not ON_GPU, reason='cannot be tried on a CPU')

V, H = (50304, 224) if ON_GPU else (512, 32)


@pytest.fixture
def device():
    """The device, set up as in train.py; each method is compiled anew, as there is a limit to how often."""
    yield machine.set_up_machine('cuda' if ON_GPU else 'cpu', 0, threads=None, deterministic=False)
    torch._dynamo.reset()


def config_of(method, dtype='bfloat16', **more):
    """A small model with bf16 logits and, on a GPU, the head of 16M."""
    return gpt_config({**dict(n_layer=1, n_embd=H, vocab_size=V, method=method, lam=0.01, dtype=dtype,
                              logits_dtype='bfloat16'), **more})


def head_of(config):
    """The head of a run, compiled on a GPU. Skips the test where torch is too old for that."""
    try:
        return compiled_head(config, torch.device('cuda')) if ON_GPU else chunked_head
    except UserError as error:
        pytest.skip(str(error))


def model_of(config, device):
    """The model of a run, compiled on a GPU."""
    torch.manual_seed(0)
    gpt = GPT(config).to(device)
    gpt.head, gpt.hidden = head_of(config), torch.compile(gpt.hidden, dynamic=False, disable=not ON_GPU)
    return gpt


@pytest.mark.parametrize('size', SIZES)
def test_attention_of_every_size_is_that_of_float64(size, device):
    """
    Forward and backward, by the kernel that the device chooses. The output, the weights and their gradients
    are rounded to bf16 a few times each. Once 109M and 221M pass here with cuDNN, main need not avoid it.
    """
    n = (2, 4, 2048) if ON_GPU else (1, 2, 64)
    g, D = torch.Generator().manual_seed(0), SIZES[size]['n_embd'] // SIZES[size]['n_head']
    torch.backends.cuda.enable_cudnn_sdp(D <= 128)  # as in train.py
    q, k, v, grad = (torch.randn(*n, D, generator=g).bfloat16() for _ in range(4))
    results = []
    for dtype, on in ((torch.float64, 'cpu'), (torch.bfloat16, device)):
        inputs = [x.to(on, dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        gradients = torch.autograd.grad(out, inputs, grad.to(on, dtype))
        results.append([x.detach().double().cpu() for x in (out, *gradients)])
    for right, found in zip(*results, strict=True):
        assert (found - right).norm() <= 16 * BF16_UNIT * right.norm()


@only_cuda
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('method', ['baseline', 'soft_capping'])
def test_compiling_keeps_every_rounding(method, dtype, device):
    """On a CPU test_head.py shows it, but a GPU has another compiler, and the loss an option of its own."""
    config = config_of(method, dtype)
    assert_compiling_keeps_every_rounding(head_of(config), config, 512, device)


@pytest.mark.parametrize('method', ['baseline', 'soft_capping', 'z_loss', 'max_z_loss', 'norm_softmax',
                                    'zero_sum', 'centered_head'])  # what differs in the head
def test_heads_agree_within_bf16_rounding(method, device, monkeypatch):
    """On a GPU products of bf16 numbers are others than on a CPU, see add_product."""
    monkeypatch.setattr(head_py, 'n_chunks', lambda h, E, config: 3)
    config = config_of(method)
    assert_exact_up_to_bf16(head_of(config), config, 4096 if ON_GPU else 100, device)


@pytest.mark.parametrize('dtype, unit', [('float32', 2.0 ** -24), ('bfloat16', BF16_UNIT)])
def test_a_step_of_16M_is_that_of_a_cpu_in_float64(dtype, unit, device):
    """
    The loss and the gradient of every weight, as far as the format goes. Of 16M the gains of the QK-norms are
    the worst, on a CPU by 54 units of fp32 and 39 of bf16; TF32 would be off by thousands of units of fp32.
    """
    length, results = 256 if ON_GPU else 32, []
    shape = dict(SIZES['16M' if ON_GPU else 'tiny'], vocab_size=V, block_size=length)
    tokens = torch.randint(V, (2, length + 1), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)  # as in model_of
    exact = GPT(GPTConfig(**shape, dtype='float64', logits_dtype='float64')).double()  # not compiled
    for gpt in (exact, model_of(GPTConfig(**shape, dtype=dtype, logits_dtype=dtype), device)):
        loss, _ = gpt(tokens[:, :-1].to(gpt.E.device), tokens[:, 1:].to(gpt.E.device))
        loss.backward()
        results.append((loss.item(), {name: p.grad.double().cpu() for name, p in gpt.named_parameters()}))
    (loss, expected), (found_loss, found) = results
    assert abs(found_loss - loss) <= 4 * unit * loss
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= 100 * unit, (name, error / unit)


def test_a_deterministic_run_that_was_stopped_ends_as_if_never_stopped(corpus, tmp_path):
    large = ('--size=16M', '--n_layer=2', '--block_size=512', '--batch_size=16', '--device=cuda')  # compiled
    flags = [*(large if ON_GPU else SMALL), f'--data={corpus}', '--deterministic', '--lr=1e-2', '--steps=8',
             '--log_every=1', '--eval_tokens=512', '--test_tokens=2048']
    for name, prepare, status in (('stopped', (signal_at_step, signal.SIGTERM, 5), 143),
                                  ('stopped', (), 0), ('whole', (), 0)):
        started = process(train.main, [*flags, f'--out={tmp_path}/{name}'], prepare=prepare)
        finish(started, status, seconds=300)
    assert_same(*((log_of(tmp_path / name), load(tmp_path / name)['model']) for name in ('stopped', 'whole')))


def test_ddp_in_one_process_takes_the_same_steps(tmp_path, device):
    """What each of several processes does, without the others: with NCCL on a GPU, and compiled there."""
    args = SimpleNamespace(method='mu_centering', grad_clip=1.0, center_every=1)
    config = config_of('mu_centering', 'float32', logits_dtype='float32', block_size=32)
    tokens, results = torch.randint(V, (4, 33), generator=torch.Generator().manual_seed(0)).to(device), []
    batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]
    dist.init_process_group('cpu:gloo,cuda:nccl' if ON_GPU else 'gloo', rank=0, world_size=1,
                            store=dist.FileStore(str(tmp_path / 'store'), 1))  # as machine.together does
    for wrap in (lambda gpt: gpt, machine.wrap_in_ddp):
        gpt, updates = model_of(config, device), torch.tensor(0, device=device)
        model, optimizer = wrap(gpt), torch.optim.AdamW(gpt.parameters(), weight_decay=0.0, fused=True)
        steps = [train.train_step(model, optimizer, batch, step, 1e-3, args, updates, False)
                 for step in range(1, 6)]
        results.append(torch.tensor([(stats['loss'].mean(), norm) for stats, norm in steps]))
    del model
    dist.destroy_process_group()
    close(*results, rtol=1e-4, atol=0)
    assert results[0][-1, 0] < results[0][0, 0]


@only_cuda
@pytest.mark.parametrize('method, compiled', [
    *((method, False) for method in METHODS if method != 'spectrum_control'),  # which waits for eigenvalues
    *((method, True) for method in ('baseline', 'mu_centering', 'zero_sum'))])
def test_the_host_does_not_wait_for_a_step(method, compiled, device):
    args = SimpleNamespace(batch_size=4, micro_batch_size=2, compile=compiled)
    step = bench.training_step(config_of(method, block_size=256), method, args, device)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
