"""Any number of processes makes the same run; an error in one of them, or a kill, concerns all."""
import gc
import signal

import pytest
import torch

import train
from conftest import execute, finish, one_line
from oec.common import lock_folder
from small_runs import SMALL, assert_same, load, log_of, ranks, signal_at, state_of

# 45 windows of test tokens, which 2 or 4 processes cannot share evenly; one window of evaluation tokens, so
# that some of them have none. lam is so large that a penalty shows if it is counted once per micro-batch or
# process.
MESH = (*SMALL, '--n_embd=16', '--block_size=16', '--batch_size=8', '--steps=5', '--log_every=1', '--lr=1e-2',
        '--test_tokens=720', '--eval_tokens=16', '--eval_every=2', '--dtype=float32')


def in_float64():
    """Runs of this process train in float64, where sums differ by 1e-16, and end without DDP: it may hang."""
    make_model = train.make_model
    destroy_process_group = train.dist.destroy_process_group

    def make_float64(args, device):
        model, optimizer = make_model(args, device)
        model.double().config.logits_dtype = 'float64'
        return model, optimizer

    def cleanup_without_ddp():
        assert not any(type(thing) is train.DDP for thing in gc.get_objects())
        destroy_process_group()
    train.make_model = make_float64
    train.dist.destroy_process_group = cleanup_without_ddp


@pytest.mark.parametrize('kind', [
    '--method=mu_centering --weight_tying', '--method=mu_loss --lam=1000'])
def test_any_number_of_processes_makes_the_same_run(kind, corpus, tmp_path):
    """Five float64 steps: every value of the log, of all ranks, and every weight is the same to 1e-12."""
    runs = []
    for world, micro in ((1, 8), (2, 2), (4, 1)):
        out = tmp_path / str(world)
        flags = [*MESH, *kind.split(), f'--micro_batch_size={micro}', f'--data={corpus}', f'--out={out}']
        for rank in ranks(world, flags, tmp_path / 'stderr', prepare=(in_float64,)):
            finish(rank, 0)
        runs.append((log_of(out), load(out)['model']))
    (log, model), *others = runs
    E = model['lm_head.weight']
    assert [e['step'] for e in log] == [0, 1, 2, 2, 3, 4, 4, 5, 5] and E.dtype == torch.float64
    assert (E.mean(dim=0).norm() <= 2.0 ** -52 * E.norm()) == ('mu_centering' in kind)
    for other_log, other_model in others:
        for a, b in zip(log, other_log, strict=True):
            assert a == {k: pytest.approx(v, rel=1e-12, abs=1e-12) for k, v in b.items()}
        torch.testing.assert_close(other_model, model, rtol=0, atol=1e-12)


def test_two_processes_that_were_killed_end_under_torchrun_as_if_never_stopped(corpus, tmp_path):
    flags = [*SMALL, '--steps=30', '--lr=1e-2', '--log_every=2', '--ckpt_every=7', '--keep_every=30',
             f'--data={corpus}']
    kill = (signal_at, signal.SIGKILL, 'train_step', 20)
    for rank in ranks(2, [*flags, f'--out={tmp_path}/killed'], tmp_path / 'stderr', prepare=kill):
        finish(rank, -signal.SIGKILL)
    assert load(tmp_path / 'killed', 'ckpt.pt')['step'] == 14
    execute('torchrun', '--standalone', '--nproc_per_node=2', 'train.py', *flags, f'--out={tmp_path}/killed')
    for rank in ranks(2, [*flags, f'--out={tmp_path}/whole'], tmp_path / 'stderr'):
        finish(rank, 0)
    assert_same(*(state_of(tmp_path / name, 'model_30.pt') for name in ('killed', 'whole')))


def test_what_cannot_work_is_said_once_and_all_processes_end(corpus, tmp_path):
    flags = [*SMALL, f'--out={tmp_path}/run', '--batch_size=3', f'--data={corpus}']
    for status, rank in zip((2, 0), ranks(2, flags, tmp_path / 'stderr'), strict=True):
        finish(rank, status)
    assert '--batch_size' in one_line(tmp_path / 'stderr0') and (tmp_path / 'stderr1').read_text() == ''
    assert not (tmp_path / 'run').exists()
    command = [*SMALL, '--steps=1', f'--data={corpus}', f'--out={tmp_path}/locked']
    train.main(command)
    (tmp_path / 'locked' / 'result.json').unlink()
    with lock_folder(tmp_path / 'locked'):
        for status, rank in zip((2, 0), ranks(2, command, tmp_path / 'stderr'), strict=True):
            finish(rank, status)
    assert 'another process' in one_line(tmp_path / 'stderr0') and (tmp_path / 'stderr1').read_text() == ''


def test_all_processes_have_the_settings_of_rank_0(corpus, tmp_path):
    flags = [*SMALL, '--steps=5', f'--data={corpus}']
    for rank in ranks(2, flags, tmp_path / 'stderr', nodes=[[f'--out={tmp_path}/a'], ['--lr=2', '--out=x']]):
        finish(rank, 0)
    for rank in ranks(2, [*flags, f'--out={tmp_path}/b'], tmp_path / 'stderr'):
        finish(rank, 0)
    assert_same(*(load(tmp_path / name)['model'] for name in 'ab'))
