"""Any number of ranks makes the same run; an error in one of them, or a kill, concerns all."""
import gc
import json
import os
import signal

import pytest
import torch
import torch.distributed.run

import train
from conftest import ROOT, finish, process
from model import GPT
from small_runs import SMALL, assert_same, float64_model, load, log_of, ranks, signal_at, state_of

# 45 windows of test tokens, which 2 or 4 ranks cannot share evenly; one window of evaluation tokens, so that
# some have none. lam is so large that a penalty shows if it is counted once per micro-batch or rank.
MESH = (*SMALL, '--n_embd=16', '--block_size=16', '--batch_size=8', '--steps=7', '--lr=1e-2',
        '--test_tokens=720', '--eval_tokens=16', '--eval_every=3')


def in_float64():
    """The run of this process is in float64, and ends without DDP: with it, it may hang."""
    destroy_process_group = train.dist.destroy_process_group

    def destroy_without_ddp():
        assert not any(type(thing) is train.DDP for thing in gc.get_objects())
        destroy_process_group()
    train.make_model = float64_model
    train.dist.destroy_process_group = destroy_without_ddp
    GPT.mfu = lambda gpt, speed, device_name: speed / 100


@pytest.mark.parametrize('kind', ['--method=mu_centering --weight_tying', '--method=mu_loss --lam=1000'])
def test_number_of_ranks(kind, corpus, tmp_path):
    """Seven float64 steps: every value of the log, of all ranks, and every weight is the same to 1e-12."""
    runs = []
    for world, micro in ((1, 8), (2, 2), (4, 1)):
        out = tmp_path / str(world)
        flags = [*MESH, *kind.split(), f'--micro_batch_size={micro}', f'--data={corpus}', f'--out={out}']
        for rank in ranks(world, flags, tmp_path / 'stderr', prepare=(in_float64,)):
            finish(rank, 0)
        last = json.loads((out / 'log.jsonl').read_text().splitlines()[-2])
        runs.append((log_of(out), load(out)['model'], last['mfu'] * world / last['tokens_per_second']))
    (log, weights, mfu), *others = runs
    E = weights['lm_head.weight']
    assert [e['step'] for e in log] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 7] and E.dtype == torch.float64
    assert (E.mean(dim=0).norm() <= 2.0 ** -52 * E.norm()) == ('mu_centering' in kind)
    for other_log, other_weights, other_mfu in others:
        for a, b in zip(log, other_log, strict=True):
            assert a == {k: pytest.approx(v, rel=1e-12, abs=1e-12) for k, v in b.items()}
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-12)
        assert other_mfu == pytest.approx(mfu)


def torchrun(*flags, status=0, stderr=os.devnull):
    argv = ['--standalone', '--nproc_per_node=2', f'{ROOT}/train.py', *flags]
    finish(process(torch.distributed.run.main, argv, stderr), status)


def test_killed_ranks(corpus, tmp_path):
    """Under torchrun they end as if never stopped, and are then done."""
    flags = [*SMALL, '--steps=30', '--lr=1e-2', '--log_every=2', '--ckpt_every=7', '--keep_every=30',
             f'--data={corpus}']
    kill = (signal_at, signal.SIGKILL, 'train_step', 20)
    for rank in ranks(2, [*flags, f'--out={tmp_path}/killed'], tmp_path / 'stderr', prepare=kill):
        finish(rank, -signal.SIGKILL)
    assert load(tmp_path / 'killed', 'ckpt.pt')['step'] == 14
    torchrun(*flags, f'--out={tmp_path}/killed')
    for _ in range(2):
        for rank in ranks(2, [*flags, f'--out={tmp_path}/whole'], tmp_path / 'stderr'):
            finish(rank, 0)
    assert_same(*(state_of(tmp_path / name, 'model_30.pt') for name in ('killed', 'whole')))


def test_refusal_under_torchrun(corpus, tmp_path):
    """Rank 0 alone says it, before the ranks meet, and torchrun ends the others."""
    torchrun(*SMALL, '--batch_size=3', f'--data={corpus}', f'--out={tmp_path}/run',
             status=1, stderr=tmp_path / 'stderr')
    printed = (tmp_path / 'stderr').read_text()
    assert printed.count('usage: ') == printed.count('error: --batch_size=3') == 1
    assert not (tmp_path / 'run').exists()
