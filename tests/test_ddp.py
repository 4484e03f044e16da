"""Any number of processes makes the same run; an error in one of them, or a kill, concerns all."""
import shutil
import signal

import numpy as np
import pytest
import torch

import train
from conftest import execute
from oec import data
from processes import finish, folder_hash, one_line, process
from runs import SMALL, assert_same, load, log_of, ranks, record, signal_at_step, state_of

# 45 windows of test tokens, which 2 or 4 processes cannot share evenly; one window of evaluation tokens, so
# that some of them have none. lam is so large that a penalty shows if it is counted once per micro-batch or
# process.
MESH = (*SMALL, '--n_embd=16', '--block_size=16', '--batch_size=8', '--steps=5', '--log_every=1', '--lr=1e-2',
        '--test_tokens=720', '--eval_tokens=16', '--eval_every=2', '--dtype=float32')
KINDS = {'centered': ('--method=mu_centering', '--weight_tying'),
         'regularised': ('--method=mu_loss', '--lam=1000')}
CASES = [(world, micro, kind) for kind in KINDS for world, micro in ((1, 8), (1, 2), (2, 4), (2, 1), (4, 1))]


def in_float64():
    """Runs of this process train in float64, which no flag offers: sums differ by 1e-16, not by 1e-7."""
    make_model = train.make_model

    def make_float64(args, device):
        model, optimizers = make_model(args, device)
        model.double().config.logits_dtype = 'float64'
        return model, optimizers
    train.make_model = make_float64


@pytest.fixture(scope='module')
def meshes(corpus, tmp_path_factory):
    """The same runs by 1, 2 and 4 processes: (processes, micro-batch, kind) -> folder."""
    folder = tmp_path_factory.mktemp('meshes')
    found = {}
    for world, micro, kind in CASES:
        out = found[world, micro, kind] = str(folder / f'{world}-{micro}-{kind}')
        flags = [*MESH, *KINDS[kind], f'--micro_batch_size={micro}', f'--data={corpus}', f'--out={out}']
        for rank in ranks(world, flags, folder / 'stderr', main=record, prepare=(in_float64,)):
            finish(rank, 0)
    return found


def global_batch(corpus, step):
    """The 8 windows (8, 17) of a step of MESH."""
    windows = data.Windows(corpus, 'train', 16, 320)
    return torch.from_numpy(windows[data.batch_windows(1, step, 8, len(windows))])


def test_all_ranks_share_the_same_batches_in_order_and_have_the_same_bits(meshes, corpus):
    for (world, micro, kind), folder in meshes.items():
        seen = [load(folder, f'rank{rank}.pt') for rank in range(world)]
        assert all(len(part) == micro for rank in seen for step in rank['batches'] for part in step)
        for step in range(5):
            read = torch.cat([part for rank in seen for part in rank['batches'][step]])
            assert torch.equal(read, global_batch(corpus, step)[:, :-1]), (world, micro, step)
        first = seen[0]
        for rank in seen[1:]:
            assert_same((rank['weights'], rank['gradients']), (first['weights'], first['gradients']))
        assert_same(dict(first['weights']), dict(load(folder)['model']))
        E = first['weights']['lm_head.weight']
        assert (E.mean(dim=0).norm() <= torch.finfo(E.dtype).eps * E.norm()) == (kind == 'centered')


@pytest.mark.parametrize('kind', ['centered', 'regularised'])
def test_any_number_of_processes_has_the_same_losses_evaluations_and_weights(meshes, kind):
    """Five float64 steps: every value of the log and every weight to 1e-12."""
    one, weights = log_of(meshes[1, 8, kind]), load(meshes[1, 8, kind])['model']
    assert [e['step'] for e in one] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert one[-1]['test_loss'] != one[0]['test_loss'] and weights['lm_head.weight'].dtype == torch.float64
    for (_, _, other), folder in meshes.items():
        if other == kind:
            for a, b in zip(one, log_of(folder), strict=True):
                assert a == {k: pytest.approx(v, rel=1e-12, abs=1e-12) for k, v in b.items()}
            torch.testing.assert_close(load(folder)['model'], weights, rtol=0, atol=1e-12)


def test_two_processes_that_were_killed_end_under_torchrun_as_if_never_stopped(corpus, tmp_path):
    flags = [*SMALL, '--steps=30', '--lr=1e-2', '--log_every=2', '--ckpt_every=7', '--keep_every=30',
             f'--data={corpus}']
    kill = (signal_at_step, signal.SIGKILL, 20)
    for rank in ranks(2, [*flags, f'--out={tmp_path}/killed'], tmp_path / 'stderr', prepare=kill):
        finish(rank, -signal.SIGKILL)
    assert load(tmp_path / 'killed', 'ckpt.pt')['step'] == 14
    execute('torchrun', '--standalone', '--nproc_per_node=2', 'train.py', *flags, f'--out={tmp_path}/killed')
    for rank in ranks(2, [*flags, f'--out={tmp_path}/whole'], tmp_path / 'stderr'):
        finish(rank, 0)
    killed, whole = (state_of(tmp_path / name, 'model_30.pt') for name in ('killed', 'whole'))
    assert_same(killed, whole)


def test_what_all_ranks_see_is_said_once_and_what_one_sees_by_itself(corpus, tmp_path):
    flags = [*SMALL, '--batch_size=3', f'--data={corpus}', f'--out={tmp_path}/run']
    for rank in ranks(2, flags, tmp_path / 'stderr'):
        finish(rank, 2)
    assert '--batch_size' in one_line(tmp_path / 'stderr0') and (tmp_path / 'stderr1').read_text() == ''
    more = [*SMALL, f'--data={corpus}', '--device=cuda']
    finish(process(train.main, more, stderr=tmp_path / 'stderr', env={'LOCAL_WORLD_SIZE': '1000'}), 2)
    assert '1000 processes' in one_line(tmp_path / 'stderr') and not (tmp_path / 'run').exists()

    beyond = shutil.copytree(corpus, tmp_path / 'beyond')  # tokens that the head has no rows for
    data.write_shard(str(beyond / 'stdlib_train_000000.bin'), np.full(50_000, 400))
    more = [*SMALL, f'--data={beyond}', f'--out={tmp_path}/run']
    finish(process(train.main, more, stderr=tmp_path / 'stderr', env={'LOCAL_RANK': '1'}), 2)
    assert 'token 400' in one_line(tmp_path / 'stderr')


@pytest.mark.parametrize('other, named', [
    (['--out=ELSE', '--lr=2'], 'lr: 1.0, 2.0'), (['--out=ELSE'], '--out')])
def test_processes_that_would_not_do_the_same_all_end_at_once_with_one_line(corpus, tmp_path, other, named):
    """As on two nodes, where each has a local rank 0: started with other flags, or where one run is done."""
    flags = [*SMALL, '--steps=5', '--lr=1', f'--data={corpus}', f'--out={tmp_path}/run']
    train.main(flags)
    before = folder_hash(tmp_path)
    other = [flag.replace('ELSE', f'{tmp_path}/ELSE') for flag in other]
    for rank in ranks(2, flags, tmp_path / 'stderr', nodes=[[], other]):
        finish(rank, 2)
    assert all(named in one_line(tmp_path / f'stderr{rank}') for rank in (0, 1))
    assert folder_hash(tmp_path, but=('stderr0', 'stderr1', '.lock')) == before
