"""
What only a GPU can show: `python -m pytest -m gpu`, which tests/on_gpu.sh does first. Without CUDA these
tests are skipped. DEVICE=cpu runs the same code with smaller shapes on a CPU, except for what CUDA alone has.
"""
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bench
import model
import train
from common import UserError
from conftest import python
from model import GPT, METHODS, SIZES, ChunkedHead, GPTConfig, logits_to_loss, plain_head
from processes import finish, process
from runs import assert_same, keep_checkpoint, log_of, signal_at_step, state_of

ON_GPU = os.environ.get('DEVICE') != 'cpu'
DEVICE = 'cuda' if ON_GPU else 'cpu'
pytestmark = pytest.mark.gpu

BF16_UNIT, FP32_UNIT = 2.0 ** -9, 2.0 ** -24  # largest relative error of one rounding
V, H = (50304, 224) if ON_GPU else (512, 32)
close = torch.testing.assert_close


def find_device(only_cuda=False):
    """The device as train.py and bench.py set it up. Skips the test where it has none to run on."""
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip('no CUDA here; DEVICE=cpu tries these tests on a CPU')
    if only_cuda and not ON_GPU:
        pytest.skip('whether the host waits for a GPU, its memory and NCCL cannot be tried on a CPU')
    return train.find_device(SimpleNamespace(device=DEVICE, threads=None), 0)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each method is compiled anew, and there is a limit to how often."""
    yield
    torch._dynamo.reset()


def config_of(method, dtype='bfloat16', **more):
    """A small model with bf16 logits and, on a GPU, the head of 16M."""
    return GPTConfig(**{**dict(n_layer=1, n_embd=H, vocab_size=V, method=method, lam=0.01, dtype=dtype,
                               logits_dtype='bfloat16'), **more})


def compiled_body(config):
    """The body of the chunked head as train.py compiles it; skips the test where torch is too old for it."""
    with torch.device('meta'):
        gpt = GPT(config)
    try:
        gpt.compile_parts()
    except UserError as error:
        pytest.skip(str(error))
    return gpt.loss_and_grad


# --------------------------------------------------------------------------------------------------
# numbers


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('method', METHODS if ON_GPU else ['soft_capping'])  # which rounds twice
def test_compiling_keeps_every_rounding(method, dtype):
    device, config, g = find_device(), config_of(method, dtype), torch.Generator().manual_seed(0)
    n = 512 if ON_GPU else 16
    products = (10 * torch.randn(n, V, generator=g)).to(device, getattr(torch, dtype))
    targets = torch.randint(V, (n,), generator=g).to(device)
    (expected, eager, _), (found, loss, _) = (body(products.clone(), targets, config, False)
                                              for body in (model.loss_and_grad, compiled_body(config)))
    close(loss, eager, rtol=1e-5, atol=0)
    # fp32 may tip a value over to the next bf16 number here and there; a missing rounding would change most
    expected, found = expected.float(), found.float()
    assert ((found - expected).abs() > 1e-5 * expected.abs() + 1e-30).float().mean() < 0.01
    assert torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize('method', METHODS)
def test_the_chunked_head_agrees_with_the_plain_one(method, monkeypatch):
    """
    In bf16, compiled on a GPU. h and E - mu have few digits, so that the logits are exact in any order of
    summation. A head rounds the logit gradient D and its products once each at most: the gradient of h is off
    by at most 2 BF16_UNIT |D| |E|, that of E by 2 BF16_UNIT |D|^T |h|.
    """
    monkeypatch.setattr(model, 'n_chunks', lambda h, E: 3)
    device, config, g = find_device(), config_of(method), torch.Generator().manual_seed(0)
    body = compiled_body(config) if ON_GPU else model.loss_and_grad
    n = 4096 if ON_GPU else 100
    half = torch.randint(-3, 4, (V // 2, H), generator=g) / 4
    E = (0.5 + torch.cat((half, -half))).to(device).requires_grad_()
    h = (torch.randint(-3, 4, (n, H), generator=g) / 4).to(device).requires_grad_()
    targets = torch.randint(V, (n,), generator=g).to(device)

    results = []
    for head, more in ((plain_head, ()), (ChunkedHead.apply, (body,))):
        loss, stats = head(h, E, targets, config, True, *more)
        stats.pop('gradient_sum', None)  # which only the chunked head can see
        results.append((loss.detach(), stats, *torch.autograd.grad(loss, (h, E))))
    (loss, stats, *plain), (found, found_stats, *chunked) = results
    close(found, loss, rtol=1e-5, atol=0)
    close(found_stats, stats, rtol=1e-4, atol=1e-2)
    h, E = h.detach(), E.detach()
    if method == 'centered_head':
        E = E - E.mean(dim=0)
    logits = (h @ E.T).bfloat16().requires_grad_()
    D = torch.autograd.grad(logits_to_loss(logits, targets, config, False)[0], logits)[0].float().abs()
    for ours, theirs, bound in zip(chunked, plain, (D @ E.abs(), D.T @ h.abs()), strict=True):
        assert ((ours - theirs).abs() <= 4 * BF16_UNIT * bound + 1e-7).all()
        assert theirs.norm() > 1e-4


@pytest.mark.parametrize('dtype, unit', [('float32', FP32_UNIT), ('bfloat16', BF16_UNIT)])
def test_a_step_of_16M_is_that_of_a_cpu_in_float64(dtype, unit):
    """
    The loss and the gradient of every weight, as far as the format goes. Of 16M the gains of the QK-norms are
    the worst, on a CPU by 54 units of fp32 and 39 of bf16; TF32 would be off by thousands of units of fp32.
    """
    device = find_device()
    size, length = ('16M', 256) if ON_GPU else ('tiny', 32)
    shape = dict(SIZES[size], vocab_size=V, block_size=length)
    tokens = torch.randint(V, (2, length + 1), generator=torch.Generator().manual_seed(0))
    results = []
    for where, kind in (('cpu', 'float64'), (device, dtype)):
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(**shape, dtype=kind, logits_dtype=kind))
        gpt = gpt.to(where, torch.float64 if kind == 'float64' else torch.float32)
        if where == device and ON_GPU:
            gpt.compile_parts()
        x = tokens.to(where)
        loss, _ = gpt(x[:, :-1], x[:, 1:])
        loss.backward()
        results.append((loss.item(), {name: p.grad.double().cpu() for name, p in gpt.named_parameters()}))
    (loss, expected), (found_loss, found) = results
    assert abs(found_loss - loss) <= 4 * unit * loss
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= 100 * unit, (name, error / unit)


# --------------------------------------------------------------------------------------------------
# runs


def run_flags(corpus, *more):
    """A short run: on a GPU two layers and the head of 16M, compiled."""
    shape = ('--size=16M', '--n_layer=2', '--block_size=512', '--batch_size=16')
    small = ('--size=tiny', '--n_layer=1', '--block_size=32', '--batch_size=4', '--threads=1')
    return [*(shape if ON_GPU else small), f'--device={DEVICE}', f'--data={corpus}', '--lr=1e-2',
            '--log_every=1', '--eval_tokens=512', '--test_tokens=2048', *more]


def test_a_deterministic_run_that_was_stopped_ends_as_if_never_stopped(corpus, tmp_path):
    find_device()
    flags = run_flags(corpus, '--deterministic', '--steps=8', '--ckpt_every=3')
    stop = partial(signal_at_step, signal.SIGTERM, 5)
    for name, prepare, status in (('stopped', stop, 143), ('stopped', keep_checkpoint, 0),
                                  ('whole', keep_checkpoint, 0)):
        started = process(train.main, [*flags, f'--out={tmp_path}/{name}'], prepare=prepare)
        finish(started, status, seconds=300)
    assert_same(*(state_of(tmp_path / name) for name in ('stopped', 'whole')))


def test_ddp_in_one_process_takes_the_same_steps(tmp_path):
    """With NCCL on a GPU, and compiled there: what each of several processes does, without the others."""
    device, args = find_device(), SimpleNamespace(method='mu_centering', grad_clip=1.0, center_every=1)
    config = config_of('mu_centering', 'float32', logits_dtype='float32', block_size=32)
    dist.init_process_group('nccl' if ON_GPU else 'gloo', store=dist.FileStore(str(tmp_path / 'store'), 1),
                            rank=0, world_size=1, device_id=device if ON_GPU else None)
    try:
        results = []
        for wrap in (lambda gpt, _: gpt, train.wrap_in_ddp):
            torch.manual_seed(0)
            gpt = GPT(config).to(device)
            if ON_GPU:
                gpt.compile_parts()
            wrapped, finite = wrap(gpt, device), torch.ones((), device=device)
            optimizer = torch.optim.AdamW(gpt.parameters(), weight_decay=0.0, fused=True)
            tokens = torch.randint(V, (4, 33), generator=torch.Generator().manual_seed(0)).to(device)
            batch = [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]
            steps = [train.train_step(wrapped, gpt, optimizer, batch, step, 1e-3, args, finite, False)
                     for step in range(1, 6)]
            results.append([(stats['loss'].item(), norm.item()) for stats, norm in steps])
            del wrapped
    finally:
        dist.destroy_process_group()
    close(*map(torch.tensor, results), rtol=1e-4, atol=0)
    assert results[0][-1][0] < results[0][0][0]


def test_torchrun_on_all_gpus_has_the_losses_of_one(corpus, tmp_path):
    find_device(only_cuda=True)
    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU here: NCCL between GPUs needs two')
    n = next(n for n in (8, 4, 2) if n <= torch.cuda.device_count())
    flags = run_flags(corpus, '--dtype=float32', '--steps=5')
    python('train.py', *flags, f'--out={tmp_path}/1')
    python('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', 'train.py', *flags,
           f'--out={tmp_path}/{n}')
    one, several = ([e['loss'] for e in log_of(tmp_path / name) if 'loss' in e] for name in ('1', str(n)))
    assert several == pytest.approx(one, rel=1e-4)


# --------------------------------------------------------------------------------------------------
# the device


def step_of(config, sequences, device, compiled):
    """A function that makes an optimizer step on so many sequences at once."""
    args = SimpleNamespace(batch_size=sequences, block_size=config.block_size, vocab_size=config.vocab_size,
                           compile=compiled)
    return bench.training_step(config, sequences, args, device)


STEPS = [(method, False) for method in METHODS if method != 'spectrum_control']  # which waits for eigenvalues
STEPS += [(method, True) for method in ('baseline', 'mu_centering', 'zero_sum')]


@pytest.mark.parametrize('method, compiled', STEPS)
def test_the_host_does_not_wait_for_a_step(method, compiled):
    step = step_of(config_of(method, block_size=256), 4, find_device(only_cuda=True), compiled)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('compiled', [True, False])
def test_a_micro_batch_takes_the_memory_that_was_estimated_for_it(compiled, monkeypatch):
    """
    fitting_micro_batch fills 0.7 of the free memory. What 16 more sequences take, measured and estimated: the
    difference leaves out the weights and the chunk of logits.
    """
    device, config = find_device(only_cuda=True), GPTConfig(dtype='bfloat16', logits_dtype='bfloat16')

    def estimate(sequences):
        """Bytes: 0.7 of the least free memory in which all sequences would be one micro-batch."""
        least, most = 0, 2**44
        while most - least > 2**10:
            free = (least + most) // 2
            monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device, free=free: (free, free))
            fits = train.fitting_micro_batch(sequences, config, device, compiled) == sequences
            least, most = (least, free) if fits else (free, most)
        return 0.7 * most

    def measured(sequences):
        step = step_of(config, sequences, device, compiled)
        step()
        return bench.extra_memory(step, device)
    assert measured(32) - measured(16) == pytest.approx(estimate(32) - estimate(16), rel=0.1)
