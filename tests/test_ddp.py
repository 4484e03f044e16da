"""Any number of ranks makes the same run; a signal to one of them, or a kill, concerns all."""
import signal

import pytest
import torch
import torch.distributed.run

import small_runs
import train
from conftest import ROOT, finish, process
from small_runs import SMALL, assert_same, at_step, kill, load, log_of, ranks, state_of


def in_float64():
    train.make_model = small_runs.float64_model


def test_number_of_ranks(corpus, tmp_path):
    """In float64 every value of the log and every weight is the same, even if a rank has no val window."""
    flags = [*SMALL, '--method=mu_loss', '--weight_tying', '--n_embd=16', '--block_size=16', '--batch_size=8',
             '--steps=7', '--lr=1e-2', '--eval_tokens=16', '--eval_every=3', f'--data={corpus}',
             '--test_tokens=720',  # 45 windows, which no two ranks share evenly
             '--lam=1000']  # so large that it shows if a penalty counts once per micro-batch or rank
    runs = []
    for world, micro_batch_size in ((1, 8), (2, 2), (4, 1)):
        out = tmp_path / str(world)
        argv = [*flags, f'--micro_batch_size={micro_batch_size}', f'--out={out}']
        for rank in ranks(world, argv, tmp_path / 'stderr', prepare=(in_float64,)):
            finish(rank, 0)
        runs.append((log_of(out), load(out)['model']))

    (log, weights), *others = runs
    assert [e['step'] for e in log] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    for other_log, other_weights in others:
        for a, b in zip(log, other_log, strict=True):
            assert a == {k: pytest.approx(v, rel=1e-12, abs=1e-12) for k, v in b.items()}
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-12)


def test_killed_ranks(corpus, tmp_path):
    """Under torchrun, which forks them here, they end as if never stopped."""
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    flags = [*SMALL, '--method=mu_centering', '--steps=8', '--lr=1e-2', '--ckpt_every=3', '--keep_every=8',
             '--batch_size=6', f'--data={corpus}']
    for rank in ranks(3, [*flags, f'--out={whole}'], tmp_path / 'stderr'):
        finish(rank, 0)
    for rank in ranks(3, [*flags, f'--out={killed}'], tmp_path / 'stderr', prepare=(at_step, 6, kill)):
        finish(rank, -signal.SIGKILL)
    assert load(killed, 'ckpt.pt')['step'] == 3
    argv = ['--standalone', '--nproc_per_node=3', '--start_method=fork', '--run_path', f'{ROOT}/train.py',
            *flags, f'--out={killed}']
    finish(process(torch.distributed.run.main, argv, daemon=False), 0)
    assert_same(state_of(killed), state_of(whole))


def signal_in_rank_1(model):
    if train.RANK == 1:
        signal.raise_signal(signal.SIGTERM)


def test_signal_to_one_rank(corpus, tmp_path):
    """All ranks end after the same step."""
    flags = [*SMALL, '--steps=6', '--ckpt_every=0', f'--data={corpus}', f'--out={tmp_path}/run']
    for rank in ranks(2, flags, tmp_path / 'stderr', prepare=(at_step, 3, signal_in_rank_1)):
        finish(rank, 128 + signal.SIGTERM)
    assert load(tmp_path / 'run', 'ckpt.pt')['step'] == 3
