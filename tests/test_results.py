"""The scripts that make tables and figures of results/: signs and sizes of their pages' main numbers."""
import json
import runpy
import shutil
import sys

import matplotlib.pyplot as plt
import pytest

from conftest import ROOT


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """script(name, *arguments) runs it in a copy of results/ -> its folder, first panel and output."""
    def run(name, *arguments):
        path = shutil.copytree(f'{ROOT}/results', tmp_path / 'results') / name
        path.with_name('figure.png').unlink()
        monkeypatch.setattr(sys, 'path', [*sys.path])  # to which the script adds
        monkeypatch.setattr(sys, 'argv', [str(path), *map(str, arguments)])
        plt.close('all')
        runpy.run_path(str(path), run_name='__main__')
        return path.parent, plt.gcf().axes[0], capsys.readouterr().out
    return run


@pytest.mark.parametrize('name, drawn, numbers', [
    ('combined/combined.py', ('μ-centering', 'get_xdata', 0.60975), [
        'True NaN 0.003 300 0 0.000 [0.000, 0.000] -0.008 [-0.036, 0.031] 0.233 [0.215, 0.256]',
        '331 0.000 [0.000, 0.000] -1.183 [-1.463, -0.748]']),
    ('rounding_study/study.py', ('baseline', 'get_ydata', 1.70252), [
        '(AMX) baseline bfloat16 3.22 [3.15, 3.28] 3.43 [3.40, 3.46] 4.56 [4.35, 4.89]',
        'float32 3.19 [3.14, 3.24] 3.23 [3.17, 3.27] 3.16 [3.15, 3.17]',
        'soft_capping bfloat16 10.83', 'soft_capping bfloat16 3.13 10.83 10.83',
        '21 to 60 1 1.161151 1516.780750', '261 to 300 1 -0.093309 246.531790']),
    ('drift/drift.py', ('H200 baseline s1', 'get_ydata', 4.75256), [
        'H200 baseline s1 3.683 0.000 0.000 337.2 -5.9 5.1 6665.0 12500 362.7',
        'H200 fp32 logits s1 3.608 0.075 0.091 350.6 -5.5 6.9 5797.0 11904 371.4',
        'H100 fp32 logits s1 3.696 -0.006 -0.003 365.1 -5.9 6.0 5375.0 8175 376.8',
        'H200 baseline s1 64x1024 3.528 0.0 0.0 162.5 -14.4 21.8 NaN 13000 162.7 1424.0 3.714'])])
def test_main_numbers(name, drawn, numbers, script):
    folder, panel, printed = script(name)
    for number in numbers:
        assert number in ' '.join(printed.split()), printed
    label, data, highest = drawn
    values = [max(getattr(line, data)()) for line in panel.lines if line.get_label() == label]
    assert max(values) == pytest.approx(highest, abs=1e-4)
    assert (folder / 'figure.png').stat().st_size > 10_000


def test_drift_of_own_runs(script, tmp_path):
    """Two runs: one that is done, one that is not, with other steps in its log and the last code's names."""
    config = {'size': '16M', 'weight_tying': False, 'lr': 0.3, 'steps': 8, 'batch_size': 8, 'block_size': 512,
              'seed': 1, 'logits_dtype': 'bfloat16', 'device_name': 'a card'}
    line = {'logit_mean': -5.0, 'logit_mean_spread': 2.0, 'logit_max': 9.0, 'tokens_per_second': None}
    done = [{**line, 'step': step, 'loss': 4.0, 'mu_norm': 50.0 * step} for step in range(1, 9)]
    done += [{'step': step, 'val_loss': 10.0 - step} for step in (0, 3, 6)] + [{'step': 8, 'test_loss': 1.5}]
    killed = [{**line, 'step': step, 'loss': 4.5, 'mu_norm': 0.0} for step in (1, 2, 4, 6, 7)]
    killed += [{'step': step, 'test_loss': 10.5 - step} for step in (0, 3)]
    for method, log in (('baseline', done), ('mu_centering', killed)):
        folder = tmp_path / 'runs' / f'16M-untied-{method}'
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps({**config, 'method': method}))
        (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))
    folder, _, printed = script('drift/drift.py', tmp_path / 'runs')
    printed = ' '.join(printed.split())
    assert '16M-untied-baseline 7.0 0.0 0.0 325.0 -5.0 2.0 7.0 8 400.0 9.0 1.5 NaN' in printed
    assert '16M-untied-mu_centering 7.5 -0.5 -0.5 0.0 -5.0 2.0 NaN 7 0.0 9.0 NaN NaN' in printed
    assert (tmp_path / 'runs' / 'drift.png').exists() and not (folder / 'figure.png').exists()
