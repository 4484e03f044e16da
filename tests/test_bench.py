"""tools/bench.py times the steps of train.py."""
import re

import pytest

import train
from conftest import finish, process
from small_runs import assert_same
from tools import bench

FLAGS = ['--size=tiny', '--device=cpu', '--dtype=float32', '--threads=1', '--batch_size=4', '--block_size=16',
         '--micro_batch_size=2', '--no-compile']


def test_lines(tmp_path):
    """A line for each method: the first one's ratio is 1."""
    # in a process of its own, as bench.py adds its flags to train.py's parser
    argv = [*FLAGS, '--methods=mu_centering,baseline', '--seconds=1', '--vocab_size=128']
    finish(process(main_into, [f'{tmp_path}/printed', *argv]), 0)
    printed = (tmp_path / 'printed').read_text()
    lines = re.findall(r'^(\w+) +([\d.]+) ms +([\d.]+)$', printed, re.MULTILINE)
    (first, time, ratio), (second, other_time, other_ratio) = lines
    assert (first, second, ratio) == ('mu_centering', 'baseline', '1.000')
    assert float(other_ratio) == pytest.approx(float(other_time) / float(time), rel=0.5)


def main_into(argv):
    """bench.main, which prints into the file argv[0]."""
    import contextlib
    with open(argv[0], 'w') as file, contextlib.redirect_stdout(file):
        bench.main(argv[1:])


@pytest.mark.parametrize('method', ['baseline', 'mu_centering'])
def test_step(method, monkeypatch):
    """Two steps leave the weights that train_step leaves."""
    args = train.resolve_args(train.parser.parse_args([*FLAGS, f'--method={method}', '--vocab_size=128']))
    models, make_model, train_step = [], train.make_model, train.train_step
    batches = []

    def recorded_model(args):
        model, optimizer = make_model(args)
        models.append(model)
        return model, optimizer

    def recorded_step(model, optimizer, batch, *more, **named):
        batches.append(batch)
        return train_step(model, optimizer, batch, *more, **named)

    monkeypatch.setattr(train, 'make_model', recorded_model)
    monkeypatch.setattr(train, 'train_step', recorded_step)
    step = bench.make_step(args)
    step()
    step()

    model, optimizer = make_model(args)
    train_step(model, optimizer, batches[0], 1, args)
    train_step(model, optimizer, batches[0], 2, args)
    assert_same(models[0].state_dict(), model.state_dict())
    assert [[tokens.shape for tokens, _ in batch] for batch in batches] == 2 * [2 * [(2, 16)]]
