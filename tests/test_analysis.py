"""Statistics of runs, csv files, tables, figures and the report."""
import csv
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import warnings
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch

import analyze
import common
import paper
import plots
import tables
import train
from conftest import refused
from model import METHODS, SIZES
from runs import SMALL

HEAD = 'method,size,weight_tying,lr,test_loss'
STATS = 'mu_norm,logit_mean,logit_std,logit_absmax,r_emb,cos_mu_h,r_cos,r_log'
TWO = (0.1, 0.3)  # learning rates


def row(method='baseline', size='16M', lr=0.1, loss=3.0, **more):
    return {'method': method, 'size': size, 'weight_tying': 0, 'lr': lr, 'test_loss': loss, **more}


def runs_of(rows):
    """Rows as analyze.py has them once a csv is read."""
    texts = [{column: str(value) for column, value in r.items() if value is not None} for r in rows]
    cells = pd.DataFrame(texts, columns=analyze.COLUMNS, dtype=str).fillna('')
    return analyze.complete(analyze.parse(cells, analyze.REQUIRED), 'here')


def lrs_of(rows):
    return tables.lrs_table(runs_of(rows))[0]


def analyzed(path, out, *flags):
    """The report that analyze.main makes of a csv, with every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert analyze.main([f'--results={path}', f'--out={out}', *flags]) == 0
    return (out / 'report.html').read_text()


def read(path):
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


@pytest.fixture
def undrawn(monkeypatch):
    """For a test that is not about figures."""
    monkeypatch.setattr(analyze, 'draw', lambda *_: ([], []))


# -------------------- tables


def test_lrs_table_marks_the_best_the_converged_and_what_the_paper_has():
    tops = {('baseline', '16M'): (4, 1), ('mu_loss', '16M'): (3.03, 0), ('mu_centering', '16M'): (3.02, None),
            ('baseline', '29M'): (3.2, 0), ('mu_loss', '29M'): (3.1, 1)}
    rows = [row(method, size, lr, loss, diverged=diverged) for (method, size), (top, diverged) in tops.items()
            for lr, loss in zip(TWO, (3, top), strict=True)] + [row('mu_loss', lr=0.01, diverged=0)]
    table = lrs_of(rows)
    published, ours = tables.lrs_tables(table)
    assert published['header'] == ['N', 'baseline', 'μ-loss', 'μ-centering']
    (_, *first), (_, *second) = published['rows']
    assert first == [('1.000 (2 of 3 lr)', '', '0.306 +0.694'), ('0.015', 'bu', '0.031 -0.016'),
                     ('0.020 (2 of 3 lr)', '', '0.028 -0.008')]  # not known whether it diverged: no u
    assert second[0][1] == 'u' and second[1][1] == 'b' and second[2] == '-'
    assert [cell[0] for cell in ours['rows'][0][1:]] == ['0.500 (2 of 3 lr)', '0.010', '0.010 (2 of 3 lr)']
    assert tables.ranking_tables(table) == []  # over fewer learning rates LRS is another quantity


def test_each_lam_has_its_column_and_names_are_exact():
    rows = [row('z_loss', lr=lr, loss=loss, lam=lam) for lam, top in ((0, 4), (None, 3.25), (100, 5))
            for lr, loss in zip(TWO, (3, top), strict=True)]
    table = lrs_of(rows)
    found, = tables.sensitivity_tables(table)
    assert found['header'] == ['N', '0', '0.0001', '100'] and found['rows'] == [
        ['16M', ('1.000', '', ''), ('0.250', 'b', '0.054 +0.196'), ('2.000', '', '1.156 +0.844')]]
    assert [tables.name(v) for v in tables.variants(table)] == ['z-loss λ=0', 'z-loss', 'z-loss λ=100']
    assert tables.sensitivity_tables(table[table.lam == 1e-4]) == []
    methods = ('mu_centering_ema', 'z_loss+mu_centering', 'z-loss')
    odd = runs_of([row(method, lr=lr) for method in methods for lr in TWO])
    names = ['z-loss + μ-centering', 'mu_centering_ema', 'z-loss']
    assert list(map(tables.name, tables.variants(odd))) == names
    assert odd.set_index('method').lam['z_loss+mu_centering'].eq(1e-4).all() and odd.lam.isna().sum() == 4
    colors = {plots.color(method) for method in METHODS}
    assert len(colors) == len(METHODS) and plots.color('mu_centering_ema') not in colors


def test_overhead_averages_all_lam_and_refuses_to_mix_machines():
    seconds = {(0.1, 1e-4): 104, (0.3, 1e-4): 106, (0.1, 1e-1): 108, (0.3, 1e-1): 106}
    rows = [row(lr=lr, train_seconds=100) for lr in TWO]
    rows += [row('z_loss', lr=lr, lam=lam, train_seconds=s) for (lr, lam), s in seconds.items()]
    rows += [row('mu_loss', loss=math.nan, train_seconds=1)]  # one that ended early does not count
    (found,), missing = tables.overhead_tables(runs_of(rows))
    assert found['header'] == ['N', 'z-loss'] and found['rows'] == [['16M', ('6.0%', '', '6.4% -0.40')]]
    assert not missing and 'assumed' in found['says']
    (named,), _ = tables.overhead_tables(runs_of([{**r, 'device': 'one'} for r in rows]))
    assert 'Machine: one' in named['says']
    found, missing = tables.overhead_tables(runs_of([{**r, 'device': r['method']} for r in rows]))
    assert not found and 'different machines' in missing[0]


def test_ranking_orders_by_lrs_and_separates_by_the_factor():
    tops = {'baseline': 4.0, 'weight_decay': 3.5, 'z_loss': 3.45, 'mu_centering': 3.04}
    rows = [row(m, s, lr, loss) for m, top in tops.items() for s in ('16M', '29M')
            for lr, loss in zip(TWO, (3, top), strict=True)]
    rows += [row('baseline', '57M', lr) for lr in TWO]  # a size that the others lack does not count
    ranking, = tables.ranking_tables(lrs_of(rows))
    order = ['μ-centering', '> z-loss', '≈ weight decay', '> baseline']
    assert [line[0] for line in ranking['rows']] == order
    assert ranking['rows'][3] == ['> baseline', '1.000', '+0.500', '2.00', '2 of 2']
    assert '16M, 29M' in ranking['says']


def test_bootstrap_interval_is_that_of_all_resamples():
    """Of three seeds there are 27 equally likely resamples: 95% is from the smallest mean to the largest."""
    rng = np.random.RandomState(0)
    for _ in range(20):
        values = rng.rand(3)
        exact = [np.mean(draw) for draw in itertools.product(values, repeat=3)]
        assert tables.bootstrap(values) == pytest.approx([min(exact), max(exact)])


def test_several_seeds_are_averaged_and_an_unfinished_one_left_out():
    rng, lrs = np.random.RandomState(0), (0.01, 0.3, 0.03, 1)
    for _ in range(10):
        losses = 3 + rng.rand(3, 4)  # seeds x learning rates
        losses[0, 3] = math.nan      # counts as its loss at initialisation
        known = {'init_loss': 9, 'mu_norm': 2.0, 'logit_mean': 3.0, 'logit_mean_spread': 4.0}
        rows = [row(lr=lr, loss=losses[seed, i], seed=seed, **known)
                for i, lr in enumerate(lrs) for seed in range(3)]
        runs = runs_of([*rows, row(lr=1, seed=7)])
        table, missing = tables.lrs_table(runs)
        losses[0, 3] = 9
        rise, found = losses - losses.min(axis=1, keepdims=True), table.iloc[0]
        assert len(table) == 1 and found.seeds == 3 and 'seed 7 of baseline 16M (1 of 4' in missing[0]
        assert found.lrs == pytest.approx(rise.mean()) and found.lrs_n1 == pytest.approx(rise.mean() * 4 / 3)
        assert found.lrs_low <= found.lrs <= found.lrs_high
        excess = [rise[:, 3].mean(), rise[:, 3].min(), rise[:, 3].max()]
        assert list(found[['excess', 'excess_low', 'excess_high']]) == pytest.approx(excess)
        best = losses.mean(axis=0).argmin()
        assert (found.best_lr, found.largest_lr) == (lrs[best], 1)
        assert found.best_loss == pytest.approx(losses[:, best].mean())
    line, = tables.excess_table(runs[runs.seed < 7], table)['rows']
    assert line[5] == '{:.3f} [{:.3f}, {:.3f}]'.format(*excess)
    assert line[6:9] == ['2', '3', '5']  # the last the rms of 3 and 4


def test_the_papers_numbers_are_whole_and_its_settings_are_flags():
    sizes = set(SIZES) - {'tiny'}
    for group, n in (paper.LRS, 6), (paper.OVERHEAD, 5), (paper.LRS_OF_LAM, 4):
        for table in group.values():
            assert len(table) == 5 * n and {size for size, _ in table} == sizes
    for method, size in itertools.product(paper.LRS_OF_LAM, sizes):  # λ = 1e-4 is in the main table too
        assert paper.LRS_OF_LAM[method][size, '0.0001'] == paper.LRS[0][size, method]
    keys = {key for *_, key in paper.HYPERPARAMETERS if key and ' ' not in key}
    assert keys <= set(vars(train.parser().parse_args([])))
    settings = {'beta1': [0.9], 'batch_size': [64], 'block_size': [128], 'weight_tying': [True, False],
                'steps': [100, 200]}
    lines = {line[0]: line[1:] for line in tables.hyperparameter_table(settings)['rows']}
    assert lines['β1'] == [('0.9', '', ''), '0.9'] and lines['weight tying'][0][1] == ''
    assert lines['batch size (tokens)'] == [('8192', 'b', ''), '131072']
    assert lines['training length (steps)'][0] == ('100, 200', 'b', '')


def test_a_table_in_every_form():
    table = {'title': 'A & B', 'where': 'Table 9', 'says': 'μ % of λ_1 | #1 ~ {x} \\ ‖e‖',
             'header': ['N', 'a|b'], 'rows': [['1', ('0.5', 'bu', '0.4 +0.1')]]}
    assert '**_0.5_** (0.4 +0.1)' in tables.text(table) and '(Table 9)' in tables.text(table)
    assert '**<u>0.5</u>** <sub>0.4 +0.1</sub>' in tables.text(table, 'markdown')
    assert '<b><u>0.5</u></b> <span class="grey">0.4 +0.1</span>' in tables.grid(table, 'html')
    latex = tables.latex(table)
    assert r'\textbf{\underline{0.5}}' in latex and r'A \& B' in latex and latex.count('rule') == 3
    bare = re.sub(r'\\[a-zA-Z]+|\\[&%$#_{}\\]', '', latex)
    assert bare.count('{') == bare.count('}') and not set('#_~^') & set(bare)
    for code in range(32, 0x2260):  # whatever a csv holds, LaTeX gets ASCII without a bare special character
        cell = tables.grid({**table, 'rows': [[f'x{chr(code)}x', 'x']]}, 'latex').split(r'\hline')[2]
        assert cell.isascii() and not re.search(r'(?<!\\)[#_^%~]', cell)


# -------------------- a shifted mean

COSTS = {'baseline': {0: (1.9, 2.0), 300: (2.3, 3.3), 1000: (4.9, 30.0)},
         'z_loss': {0: (1.95, 1.95), 1000: (2.4, 2.5)}, 'mu_centering': {0: (1.9, 2.0), 1000: (1.92, 2.0)}}


def shift_rows(**more):
    """Two seeds of three methods at several norms, and of the baseline without all or some roundings."""
    cells = [(method, norm, tables.ALL, losses) for method, norms in COSTS.items()
             for norm, losses in norms.items()]
    cells += [('baseline', 1000, 'none', (1.9, 2.0)), ('baseline', 1000, 'logits,gradient', (3.0, 3.5))]
    return [row(method, 'tiny', 0.01, loss, mu_shift=norm, rounded=rounded, seed=seed, init_loss=5.7,
                logit_mean=490 if 'gradient' in rounded else 6, logits_dtype='bfloat16', **more)
            for method, norm, rounded, losses in cells for seed, loss in enumerate(losses, 1)]


def test_shift_and_rounding_have_defaults_are_checked_and_tell_runs_apart():
    assert len(set(tables.SUBSETS)) == 8 and tables.SUBSETS[-1] == 'operands,logits,gradient'
    rows = [row(seed=1), row(seed=1, mu_shift=300), *(row(seed=2, rounded=r) for r in tables.SUBSETS)]
    runs = runs_of(rows)
    found = runs[runs.seed == 1]
    assert list(found.mu_shift) == [0, 300] and set(found.rounded) == {tables.ALL}
    assert set(runs.rounded) == set(tables.SUBSETS) and list(tables.usual(runs).seed) == [1, 2]
    refused(lambda: runs_of([row(), row(mu_shift=0, rounded=tables.ALL)]), 'twice', 'mu_shift=0', 'rounded=')
    for column, wrong in (('rounded', 'logits,operands'), ('rounded', 'all'), ('rounded', 'logits,logits'),
                          ('mu_shift', '-1'), ('mu_shift', 'inf')):
        refused(lambda wrong=wrong, column=column: runs_of([row(**{column: wrong})]), column, wrong)


def test_the_usual_tables_do_not_see_a_shift(tmp_path, capsys, undrawn):
    known = {'steps': 100, 'train_seconds': 9, 'logits_dtype': 'bfloat16'}
    usual = [row(method, 'tiny', lr, 2 + lr, seed=seed, **known)
             for method in ('baseline', 'z_loss') for lr in (0.01, 0.1) for seed in (1, 2)]
    shifts = [r for r in shift_rows(train_seconds=99) if r['mu_shift']]
    shown, lrs = [], []
    for i, rows in enumerate((usual, usual + shifts)):
        path, out = tmp_path / f'{i}.csv', tmp_path / f'out{i}'
        pd.DataFrame(rows).to_csv(path, index=False)
        analyzed(path, out)
        lrs.append((out / 'lrs.csv').read_text())
        shown.append((out / 'tables.md').read_text().split('### '))
    added = [part.split('\n')[0] for part in shown[1] if part not in shown[0]]
    assert added == ['The cost of a shifted mean, tiny untied, lr 0.01',
                     'Which rounding costs what, tiny untied, lr 0.01', 'All runs']
    assert lrs[0] == lrs[1] and 'added to μ' not in shown[0][-1] and ' added to μ |' in shown[1][-1]
    capsys.readouterr()
    pd.DataFrame(shifts).to_csv(path, index=False)
    assert '<b>At a mean embedding of norm 1000' in analyzed(path, out)
    said = capsys.readouterr().out
    assert 'no LRS' not in said and 'no table' not in said and (out / 'lrs.csv').read_text().count('\n') == 1


def test_what_a_shift_costs_by_method_and_by_rounding():
    cost, rounding = tables.shift_tables(runs_of(shift_rows()))
    assert cost['header'] == ['method', 'norm 0', 'norm 300', 'norm 1000'] and cost['rows'] == [
        ['baseline', '1.950 [1.900, 2.000]', '2.800 [2.300, 3.300]', '17.450 [4.900, 30.000]'],
        ['baseline without any rounding', '-', '-', '1.950 [1.900, 2.000]'],
        ['z-loss', '1.950 [1.950, 1.950]', '-', '2.450 [2.400, 2.500]'],
        ['μ-centering', '1.950 [1.900, 2.000]', '-', '1.960 [1.920, 2.000]']]
    assert rounding['header'] == ['rounded to bf16', 'loss at norm 1000', 'logit mean at 1000']
    assert rounding['rows'] == [['none', '1.950 [1.900, 2.000]', '+6 [+6, +6]'],
                                ['logits, gradient', '3.250 [3.000, 3.500]', '+490 [+490, +490]'],
                                ['operands, logits, gradient', '17.450 [4.900, 30.000]', '+490 [+490, +490]']]
    assert tables.shift_tables(runs_of([row()])) == []
    one = shift_rows()[:1] + [row(size='tiny', lr=0.01, loss=math.nan, mu_shift=30, seed=1, init_loss=5.7)]
    (found,) = tables.shift_tables(runs_of(one))  # a loss that is not finite is that at initialisation
    assert found['rows'] == [['baseline', '1.900', '5.700']]
    others = [row(lr=0.3), row('mu_loss', 'tiny', 0.01)]  # which were not shifted
    rows = tables.shifted(runs_of(shift_rows() + others))
    assert set(rows.lr) == {0.01} and set(rows.method) == set(COSTS)
    assert set(rows.label) >= {'', tables.WITHOUT}
    rows = tables.shifted(runs_of([*shift_rows(), row('zero_sum', 'tiny', 0.01, 3, mu_shift=300, seed=1)]))
    for (method, norm), part in rows[rows.rounded == tables.ALL].groupby(['method', 'mu_shift']):
        loss = 3 if method == 'zero_sum' else np.mean(COSTS[method][norm])  # which has no run without a shift
        assert part.excess.mean() == pytest.approx(loss - 1.95)


def test_the_sentence_says_what_the_runs_support():
    def said(keep=lambda r: True, **more):
        return tables.shift_sentence(runs_of([{**r, **more} for r in shift_rows() if keep(r)]))
    start = 'At a mean embedding of norm 1000 BF16 costs the baseline '
    left = '; z-loss leaves 0.50 of it, μ-centering 0.01.'
    assert said() == start + '15.50 nats (17.45 instead of 1.95 without rounding; means of 2 seeds)' + left
    one_seed = '3.00 nats (4.90 instead of 1.90 without rounding)' + left.replace('0.01', '0.02')
    assert said(lambda r: r['seed'] == 1) == start + one_seed
    all_rounded = said(lambda r: r['rounded'] != 'none')
    assert all_rounded.startswith(start + '15.50 nats (17.45 instead of 1.95 at norm 0; means of 2 seeds); z')
    assert said(lambda r: r['method'] == 'baseline').endswith('means of 2 seeds).')
    # a seed that the baseline lacks without rounding does not count, nor a method that lacks one of its seeds
    second = said(lambda r: r['rounded'] != 'none' or r['seed'] == 2)
    assert second.startswith(start + '28.00 nats (30.00 instead of 2.00 without rounding); z-loss')
    without = said(lambda r: r['method'] != 'z_loss' or r['seed'] == 2)
    assert without.endswith('; μ-centering leaves 0.01 of it.')
    short = 'norm 300 BF16 costs the baseline 0.85 nats (2.80 instead of 1.95 at norm 0; means of 2 seeds).'
    assert said(lambda r: r['mu_shift'] < 1000).endswith(short)
    assert said(test_loss=2) == start + 'nothing (2.00 instead of 2.00 without rounding; means of 2 seeds).'
    for keep in (lambda r: not r['mu_shift'], lambda r: r['method'] != 'baseline',
                 lambda r: r['rounded'] != tables.ALL):
        assert said(keep) == ''
    assert said(logits_dtype='float32') == ''
    worse = [row('soft_capping', 'tiny', 0.01, 40, mu_shift=1000, seed=s) for s in (1, 2)]
    centered = [row('zero_sum', 'tiny', 0.01, 1.9, mu_shift=1000, seed=s) for s in (1, 2)]
    both = tables.shift_sentence(runs_of(shift_rows() + worse + centered))
    assert 'soft-capping all' in both and both.endswith(', zero-sum nothing.')


def test_published_baselines_lose_with_the_norm_of_their_mean_embedding():
    sizes, lrs = set(SIZES) - {'tiny'}, ('0.0003', '0.001', '0.003', '0.01', '0.03', '0.1', '0.3')
    assert set(paper.MU_NORM) == set(paper.EXCESS) == set(itertools.product(sizes, lrs))
    points = [(paper.MU_NORM[key], paper.EXCESS[key]) for key in paper.MU_NORM]
    for least, below, low, high in ((0, 21, -0.005, 0.005), (50, 80, 0.004, 0.04), (144, 210, 0.08, 0.71),
                                    (320, 470, 1.2, 2.6)):
        part = [excess for norm, excess in points if least <= norm < below]
        assert part and all(low <= excess <= high for excess in part)
    for size in sizes:
        norms = [paper.MU_NORM[size, lr] for lr in lrs]
        assert norms == sorted(norms)


def test_figures_of_a_shift(tmp_path, capsys, monkeypatch):
    folder = tmp_path / 'in'
    folder.mkdir()
    rows = shift_rows()
    pd.DataFrame(rows).to_csv(folder / 'results.csv', index=False)
    logged = [{**r, 'step': step, 'logit_mean': r['logit_mean'] * step} for r in rows for step in (1, 2, 3)]
    pd.DataFrame(logged).to_csv(folder / 'curves.csv', index=False)
    drawn, save = {}, plots.save

    def saved(figure, path):
        drawn[os.path.basename(path)] = [len(ax.lines) for ax in figure.axes]
        save(figure, path)
    monkeypatch.setattr(plots, 'save', saved)
    html = analyzed(folder / 'results.csv', tmp_path / 'out')
    assert drawn['shift_untied'] == [5 + 2 * 4 + 1]  # five sizes, lines and points of four, and zero
    assert drawn['mean_logit_untied'] == [2, 6]      # runs of the baseline at norm 300 and 1000
    assert 'loss_untied' in drawn and 'What a mean embedding of some norm costs, untied' in html
    assert capsys.readouterr().out.splitlines()[-1].startswith('At a mean embedding of norm 1000 BF16 costs')
    drawn.clear()
    pd.DataFrame([r for r in rows if r['mu_shift']]).to_csv(tmp_path / 'r.csv', index=False)
    analyzed(tmp_path / 'r.csv', tmp_path / 'out')
    said = capsys.readouterr().out
    assert not drawn and 'have only the tables and figures of a shifted mean' in said
    assert 'Loss against' not in said


def test_runs_with_a_shift_and_without_rounding_are_analyzed(corpus, tmp_path):
    flags = [*SMALL, '--steps=20', '--lr=0.01', '--logits_dtype=bfloat16', f'--data={corpus}']
    for i, more in enumerate(([], ['--mu_shift=1000'], ['--mu_shift=1000', '--rounded=none'])):
        assert train.main([*flags, *more, f'--out={tmp_path}/runs/{i}']) == 0
    assert analyze.main([f'{tmp_path}/runs', f'--out={tmp_path}/out']) == 0
    usual, exact, shifted = read(tmp_path / 'out' / 'results.csv')
    assert [r['mu_shift'] for r in (usual, exact, shifted)] == ['0', '1000', '1000']
    assert [r['rounded'] for r in (usual, exact, shifted)] == [tables.ALL, 'none', tables.ALL]
    assert abs(float(exact['gradient_sum'])) < 1e-6 < 1e-5 < abs(float(shifted['gradient_sum']))
    assert float(exact['mu_norm']) == pytest.approx(1000, rel=0.01)
    for name in ('curves', 'distributions'):
        assert len({(r['mu_shift'], r['rounded']) for r in read(tmp_path / 'out' / f'{name}.csv')}) == 3
    sums = [float(r['gradient_sum']) for r in read(tmp_path / 'out' / 'curves.csv') if r['rounded'] == 'none']
    assert sums and max(map(abs, sums)) < 1e-5


# -------------------- figures


def test_series_is_the_mean_and_the_spread_over_seeds():
    rng, odd = np.random.RandomState(3), [math.nan, math.inf, 1e300]
    grid = itertools.product(('baseline', 'z_loss'), ('16M', '29M'), (0.1, 0.3, 1.0), range(6))
    rows = [row(m, s, lr, seed=seed, mu_norm=rng.choice(odd) if rng.rand() < 0.3 else rng.rand(),
                diverged=int(rng.rand() < 0.2)) for m, s, lr, seed in grid]
    for (size, method), points in plots.series(runs_of(rows), 'mu_norm').items():
        for lr, point in points.iterrows():
            part = [r for r in rows if (r['size'], r['method'], r['lr']) == (size, method, lr)]
            part = [r for r in part if r['mu_norm'] < 1e99]
            values = [r['mu_norm'] for r in part]
            assert (point.low, point.high) == (min(values), max(values))
            assert point['mean'] == pytest.approx(np.mean(values))
            assert point.diverged == any(r['diverged'] for r in part)


def test_projection_keeps_norms_and_products_with_mu_and_h():
    """Fig. 1: dot products are kept if one of the two vectors lies in span(μ, h), norms always."""
    rng = np.random.RandomState(4)
    for _ in range(20):
        H = rng.randint(3, 50)
        X, mu, h = rng.randn(30, H), rng.randn(H), rng.randn(H)
        P = plots.norm_preserving_projection(np.vstack((X, mu, h)), mu, h)
        assert np.allclose(np.linalg.norm(P, axis=1), np.linalg.norm(np.vstack((X, mu, h)), axis=1))
        assert np.allclose(P[:30] @ P[30], X @ mu) and np.allclose(P[:30] @ P[31], X @ h)
        assert np.allclose(P[30:, 2], 0, atol=1e-12)


def test_a_row_that_a_fork_adds_to_the_training_curves_is_drawn(monkeypatch):
    numbers = dict.fromkeys(('loss', 'mu_norm', 'logit_mean', 'logit_absmax', 'logit_std', 'seed'), 1.0)
    logged = {**row(), **numbers, **tables.DEFAULTS, 'lam': math.nan, 'part': ''}
    curves = pd.DataFrame([{**logged, 'step': step} for step in (1, 2)])
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.extend(len(ax.lines) for ax in figure.axes))
    monkeypatch.setattr(plots, 'TRAINING', {**plots.TRAINING, 'logit_std': 'log'})
    plots.training_curves(curves.assign(variant=curves.method), 'x')
    assert drawn == [1] * 5


# -------------------- csv files


def full_csv(path):
    """A csv with all that a figure can use: tyings, sizes, several λ, seeds, a run that ended early."""
    lines = [f'{HEAD},lam,{STATS},diverged,steps,train_seconds,seed']
    methods = ('baseline,', 'z_loss,1e-4', 'z_loss,0.1', 'mu_loss,', 'mu_loss,0.1', 'mu_centering,')
    grid = itertools.product(methods, ('16M', '29M'), (0, 1), enumerate(TWO), (1, 2))
    for variant, size, tying, (i, lr), seed in grid:
        method, lam = variant.split(',')
        nan = (method, size, lr, seed) == ('baseline', '16M', 0.3, 1)
        loss = 'nan' if nan else 3 + 0.1 * i + 0.01 * seed
        lines.append(f'{method},{size},{tying},{lr},{loss},{lam},{10 * i},{5 * i},3,{20 * i},.9,.1,.5,.4,'
                     f'{int(nan)},1000,{100 + seed},{seed}')
    path.write_text('\n'.join(lines) + '\n')


class Page(HTMLParser):
    """The links of a page, whose tags are all closed."""

    def __init__(self, html):
        super().__init__()
        self.open_tags, self.links = [], []
        self.feed(html)
        assert not self.open_tags

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ('src', 'href', 'action', 'data')]
        if tag not in ('meta', 'img', 'br', 'link'):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag


def test_a_full_csv_gives_every_figure_and_a_report_that_needs_nothing_else(tmp_path, capsys):
    full_csv(tmp_path / 'r.csv')
    html = analyzed(tmp_path / 'r.csv', tmp_path / 'out', '--theory', '--method=z_loss')
    wanted = [f'{name}_{word}' for name in ('loss', 'lrs', 'statistics', 'fact3', 'sensitivity', 'drift')
              for word in ('untied', 'tied')] + ['theory_centering', 'theory_zloss_1d', 'theory_zloss_2d']
    figures = tmp_path / 'out' / 'figures'
    assert set(os.listdir(figures)) == {f'{name}.{ending}' for name in wanted for ending in ('png', 'pdf')}
    assert all((figures / f'{name}.png').read_bytes()[:4] == b'\x89PNG' for name in wanted)
    assert all((figures / f'{name}.pdf').read_bytes()[:4] == b'%PDF' for name in wanted)
    out = capsys.readouterr().out
    assert 'no figure "Training curves' in out and 'no figure "Distributions' in out
    links = Page(html).links
    assert all(link.startswith(('#', 'data:image/png;base64,')) for link in links) and 'http' not in html
    assert sum(link.startswith('data:') for link in links) == len(wanted) and 'Fact 3 for z-loss' in html
    assert 'prefers-color-scheme: dark' in html and html.count('<tr><td') > 100


@pytest.mark.parametrize('lines, said', [
    (['baseline,16M,0,0.1,4'], 'no LRS tables'),
    ([f'{m},16M,0,{lr},{x}' for m in ('baseline', 'mu_loss') for lr, x in ((1, 'inf'), (3, 'nan'))], 'LRS'),
    ([f'{m},tiny,0,{lr},nan' for m in ('baseline', 'mu_loss') for lr in TWO], 'no figure "Loss against'),
    ([f'{m},1B,0,{lr},{3 + lr}' for m in ('baseline', 'mine') for lr in TWO], 'no figure "LRS against'),
    ([f'{m},16M,0,{lr},{loss}' for m, loss in (('baseline', 1e308), ('mu_loss', 3)) for lr in TWO], 'wrote'),
    *(([','.join(['baseline,16M,0', str(lr), *[value] * 9, '100']) for lr in TWO], 'LRS')
      for value in ('nan', 'inf', '1e308', '-1e308', '0')),
], ids='one diverged no_L0 unknown_size overflow nan inf huge -huge zero'.split())
def test_little_or_odd_data_still_make_a_report(tmp_path, capsys, lines, said):
    head = HEAD if lines[0].count(',') == HEAD.count(',') else f'{HEAD},{STATS},steps'
    (tmp_path / 'r.csv').write_text('\n'.join([head, *lines]) + '\n')
    html = analyzed(tmp_path / 'r.csv', tmp_path / 'out')
    assert said in capsys.readouterr().out and f'{len(lines)} finished runs' in html


def test_a_csv_with_the_required_columns_alone_is_enough(tmp_path, undrawn):
    """Even after a byte order mark; what it does not say is filled in if it follows, else unknown."""
    lines = ['\ufeff' + HEAD, 'baseline,16M,0,0.1,4.0', 'baseline,16M,false,0.3,4.5', 'mu_loss,16M,0,0.1,4.0',
             'mu_loss,16M,0,0.3,nan']
    (tmp_path / 'r.csv').write_text('\n'.join(lines) + '\n')
    assert '1 of them diverged (of 3 it is not known)' in analyzed(tmp_path / 'r.csv', tmp_path / 'out')
    baseline, mu_loss = read(tmp_path / 'out' / 'lrs.csv')
    assert (baseline['lrs'], baseline['lrs_n1'], baseline['diverged']) == ('0.25', '0.5', '')
    assert float(mu_loss['lrs']) == pytest.approx((10.83 - 4) / 2) and mu_loss['diverged'] == '1'
    runs, *_ = analyze.from_csv(str(tmp_path / 'r.csv'))
    assert set(runs.n_params) == {15572480} and list(runs.lam.fillna(0)) == [0, 0, 1e-4, 1e-4]


def test_names_in_a_csv_are_neither_paths_nor_html_nor_formulas(tmp_path):
    evil = ['<script>alert(1)</script>', '../../x', '$\\frac', '_hidden', '\\input{/etc/passwd}', '{{ 7*7 }}',
            '"><img src=x onerror=alert(1)>', "a'b&c"]
    folder, out = tmp_path / 'in', tmp_path / 'out'
    folder.mkdir()
    rows = [row(m, s, lr, 3 + lr) for m, s in zip(evil, evil[::-1], strict=True) for lr in TWO]
    pd.DataFrame(rows).to_csv(folder / 'results.csv', index=False)
    logged = dict.fromkeys(('loss', 'mu_norm', 'logit_mean', 'logit_absmax'), 3)
    rows = [{**row(m, m), **logged, 'step': step} for m in evil for step in (1, 2)]
    pd.DataFrame(rows).to_csv(folder / 'curves.csv')
    before = set(tmp_path.rglob('*'))
    html = analyzed(folder / 'results.csv', out)
    assert '<script>alert' not in html and 'onerror=alert(1)>' not in html
    assert '49' not in re.findall(r'Methods: (.*)', html)[0]
    assert r'\input' not in (out / 'tables.tex').read_text()
    assert all(path in before or out in (path, *path.parents) for path in tmp_path.rglob('*'))
    assert len(list((out / 'figures').glob('curves_*.png'))) == len(evil)


def test_method_and_theory_flags(tmp_path, monkeypatch):
    (tmp_path / 'r.csv').write_text(f'{HEAD}\nbaseline,16M,0,0.1,3\n')
    flags = [f'--results={tmp_path}/r.csv', f'--out={tmp_path}/out', '--method=z_los']
    refused(lambda: analyze.main(flags), '--method=z_los', 'baseline')
    assert not os.path.exists(tmp_path / 'out')
    monkeypatch.setattr(plots, 'THEORY', dict(list(plots.THEORY.items())[1:2]))
    assert analyze.main(['--theory', f'--out={tmp_path}/theory']) == 0
    assert sorted(os.listdir(tmp_path / 'theory')) == ['.lock', 'figures', 'report.html']


# -------------------- logs


def test_diverged_is_a_rise_of_the_median_after_warmup():
    rng = np.random.RandomState(0)
    for _ in range(50):
        n, every, warmup = 20 * rng.randint(100, 500), rng.randint(1, 5), rng.randint(0, 300)
        steps = np.arange(every, n + 1, every)
        noise = rng.uniform(-0.2, 0.2, len(steps))

        def found(losses, last=None, n=n, warmup=warmup, steps=steps):
            return analyze.diverged(steps[:last], losses[:last], n, warmup)
        fall = 8 * np.exp(-5 * steps / n) + 2 + noise  # falls by more than the margin
        spikes = fall + 9 * (rng.rand(len(steps)) < 0.2)
        low_in_warmup = np.where(steps <= warmup, 1, fall)
        assert found(fall) == found(spikes) == found(low_in_warmup) == (0, None)
        window = rng.randint(warmup * 20 // n + 2, 20)  # not the first after warm-up
        first = window * n // 20 + 1
        for height, expected in ((0.3, (0, None)), (0.9, (1, first))):
            assert found(3 + noise / 4 + height * (steps >= first)) == expected
        assert found(fall, last=-(n // every // 20)) == (None, None)  # nothing of the last window
        fall[40] = rng.choice([np.nan, np.inf])
        assert found(fall) == found(fall, last=41) == (1, steps[40])
    assert analyze.diverged([], [], 1000, 50) == (None, None)
    assert analyze.diverged(range(1, 400), [3.0] * 399, 400, 20) == (None, None)


def test_training_curve_sums_the_learning_rates_and_keeps_the_end():
    args = train.parser().parse_args(['--lr=0.3', '--warmup=150', '--steps=3000'])
    rates = [train.learning_rate(step, args) for step in range(3000)]
    log = [{'step': step, 'loss': 1.0, 'lr': rates[step - 1]} for step in range(1, 3001)]
    dense = analyze.training_curve(log + [{'step': 3000, 'test_loss': 2.0}])
    assert len(dense) == 1000 and dense.step.iloc[-1] == 3000 and dense.lr_step.iloc[-1] == rates[-1]
    for curve in dense, analyze.training_curve(log[::30] + log[-1:]):
        exact = [sum(rates[:step]) for step in curve.step]
        assert list(curve.lr_sum) == pytest.approx(exact, abs=0.3)  # linear between log lines
    assert runs_of([row(lr=0.3, steps=3000)]).lr_sum[0] == pytest.approx(sum(rates), abs=0.3)


def test_a_log_with_broken_lines(tmp_path):
    lines = [b'[1]', b'{"step": "x", "loss": 1}', b'{"loss": 1}', b'{"step": 1, "loss": 2}', b'half', b'\xff',
             b'{"step": 1, "test_loss": 3}', b'{"step": 1, "loss": 2.0, "lr": 0.1}']
    (tmp_path / 'log.jsonl').write_bytes(b'\n'.join(lines))
    assert analyze.read_log(tmp_path) == [{'step': 1, 'test_loss': 3}, {'step': 1, 'loss': 2.0, 'lr': 0.1}]


# -------------------- run folders


def test_a_sweep_ends_with_a_report_of_everything_that_its_csv_files_give_again(swept, tmp_path):
    html = open(f'{swept.results}/report.html', encoding='utf-8').read()
    assert '4 runs: 4 done, 0 running, 0 failed, 0 waiting' in swept.stdout
    assert '| μ-centering' in swept.stdout
    assert '4 finished runs, 0' in html and 'Hyper-parameters' in html and torch.__version__ in html
    figures = set(os.listdir(f'{swept.results}/figures'))
    names = ('loss', 'statistics', 'fact3', 'distributions', 'drift', 'curves_tiny')
    assert {f'{name}_untied.{ending}' for name in names for ending in ('png', 'pdf')} <= figures
    logs = [link for link in Page(html).links if link.endswith('log.jsonl')]
    assert len(logs) == 4 and all(os.path.exists(os.path.join(swept.results, log)) for log in logs)
    again = analyzed(f'{swept.results}/results.csv', tmp_path / 'again', '--theory')
    assert 'log.jsonl' not in again and 'Hyper-parameters' in again
    assert figures <= set(os.listdir(tmp_path / 'again' / 'figures'))
    for name in ('tables.md', 'tables.tex', 'lrs.csv'):
        before = open(f'{swept.results}/{name}', encoding='utf-8').read()
        assert (tmp_path / 'again' / name).read_text() == before


def test_the_csv_files_of_a_sweep(swept):
    files = [read(f'{swept.results}/{name}.csv') for name in ('results', 'distributions', 'curves')]
    results, distributions, curves = files
    assert len(results) == 4 and list(results[0]) == analyze.COLUMNS and list(curves[0]) == analyze.CURVES
    drifted = {(r['method'], float(r['mu_norm']) > 1e-3) for r in results}
    assert drifted == {('baseline', True), ('mu_centering', False)}
    assert {r['diverged'] for r in results} == {''}  # too few log lines to say
    assert {r['quantity'] for r in distributions} == set(
        'loss logit_mean logit_std logit_absmax cos_mu_h r_cos r_log r_emb fact_3 fact_3_premise'.split())
    for line in distributions:
        v = {key: float(line[key]) for key in analyze.SUMMARY}
        ordered = [v[key] for key in ('min', 'q25', 'median', 'q75', 'max')]
        assert ordered == sorted(ordered) and v['min'] <= v['mean'] <= v['max']
        assert (v['below_1'] == 1) == (v['max'] < 1) and (v['above_0'] == 1) == (v['min'] > 0)
    values = torch.randn(1001, dtype=torch.float64)
    found = analyze.summary(values)
    assert [found[key] for key in analyze.SUMMARY[1:6]] == values.sort().values[::250].tolist()
    shares = found['below_1'], found['above_0']
    assert shares == ((values < 1).double().mean(), (values > 0).double().mean())


def with_cell(path, column, value):
    """Puts a value into a column of the first line of a csv, of all lines where `value` is a tuple of one."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.loc[:0 if isinstance(value, str) else None, column] = value if isinstance(value, str) else value[0]
    table.to_csv(path, index=False)


@pytest.mark.parametrize('name, column, value', [
    ('curves', 'step', '1e308'), ('curves', 'step', 'x'), ('curves', 'loss', 'low'), ('curves', 'lr', '-1'),
    ('distributions', 'median', 'x'), ('distributions', 'weight_tying', '2'), ('distributions', 'size', '\0'),
    ('settings', 'batch_size', ['8']), ('settings', 'steps', 5), ('settings', 'half', None)])
def test_what_lies_beside_a_csv_is_checked_before_anything_is_written(swept, tmp_path, name, column, value):
    results, out = shutil.copytree(swept.results, tmp_path / 'results'), tmp_path / 'out'
    if name == 'settings':
        text = (results / 'settings.json').read_text()
        whole = json.dumps({**json.loads(text), column: value})
        (results / 'settings.json').write_text(whole if value else text[:100])
        refused(lambda: analyze.main([f'--results={results}/results.csv', f'--out={out}']), 'settings.json')
    else:
        with_cell(results / f'{name}.csv', column, value)
        refused(lambda: analyze.main([f'--results={results}/results.csv', f'--out={out}']),
                f'{name}.csv line 2', column)
    assert not out.exists()


@pytest.mark.parametrize('column, value', [('min', 'inf'), ('max', '1e308'), ('q75', '')])
def test_distributions_that_cannot_be_drawn_are_left_out(swept, tmp_path, column, value):
    results = shutil.copytree(swept.results, tmp_path / 'results')
    with_cell(results / 'distributions.csv', column, (value,))
    _, distributions, _, _ = analyze.from_csv(str(results / 'results.csv'))
    plots.distributions(distributions, str(tmp_path / 'figure'))
    assert (tmp_path / 'figure.png').stat().st_size > 1000


def test_states_of_planned_runs(swept, tmp_path, capsys, undrawn):
    out = shutil.copytree(swept.out, tmp_path / 'out')
    done, failed, running, waiting = sorted(path.parent for path in out.glob('*/result.json'))
    for path in (failed, running, waiting):
        os.unlink(path / 'result.json')
    (out / 'logs' / 'plan').write_text(f'{failed.name}\n{done.name}\nnever_begun\n')
    (out / 'logs' / f'{failed.name}.failed').touch()
    with common.lock_folder(running):
        assert analyze.main([str(out), f'--out={tmp_path}/results']) == 0
    said = capsys.readouterr().out
    assert said.startswith('5 runs: 1 done, 1 running, 1 failed, 2 waiting\n')
    assert f'failed: {failed}, see {out}/logs/{failed.name}.log' in said
    assert f'running: {running}, step 60 of 60' in said
    assert '1 finished runs and 4 that are not finished' in (tmp_path / 'results' / 'report.html').read_text()
    with open(running / '.lock') as file:  # the look at it has left it free
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused(lambda: analyze.main([str(failed)]), 'no finished run (one with a result.json) in', failed)


def test_a_run_that_began_from_another_is_drawn_with_what_was_before(corpus, tmp_path):
    flags = [*SMALL, '--steps=30', '--lr=0.1', f'--data={corpus}', '--log_every=5']
    source, results = tmp_path / 'source', tmp_path / 'results'
    assert train.main(['--method=baseline', *flags, '--keep_every=15', f'--out={source}']) == 0
    rescue = [f'--init_from={source}/model_15.pt', f'--out={tmp_path}/rescue/a']
    assert train.main(['--method=mu_centering', *flags, *rescue]) == 0
    assert analyze.main([f'{tmp_path}/rescue', f'--out={results}']) == 0
    lines, (result,) = read(results / 'curves.csv'), read(results / 'results.csv')
    found = [(line['part'], int(line['step'])) for line in lines]
    assert found == [('before', s) for s in (1, 5, 10, 15)] + [('rescue', s) for s in (20, 25, 30)]
    args = train.parser().parse_args(['--lr=0.1', '--steps=30', '--warmup=1'])
    whole = sum(train.learning_rate(step, args) for step in range(30))
    assert float(lines[-1]['lr_sum']) == float(result['lr_sum']) == pytest.approx(whole, abs=0.1)
    assert (results / 'figures' / 'rescue_untied.png').exists()
    assert 'Rescue' in (results / 'report.html').read_text()


@pytest.fixture
def one(swept, tmp_path):
    """A copy of a finished run."""
    name = next(name for name in sorted(os.listdir(swept.out)) if 'baseline' in name)
    return shutil.copytree(os.path.join(swept.out, name), tmp_path / 'sweep' / name)


@pytest.mark.parametrize('column, value', [('lr', '<b>'), ('weight_tying', 2), ('test_loss', 'low'),
                                           ('test_loss', None), ('seed', [1]), ('n_params', -1)])
def test_a_damaged_result_is_one_line(one, column, value, tmp_path):
    common.write_json(one / 'result.json', {**common.read_json(one / 'result.json'), column: value})
    refused(lambda: analyze.main([str(one), f'--out={tmp_path}/out']), 'result.json', column)


class Evil:
    """What a model file could hold: code that runs as it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def test_a_model_that_is_damaged_or_of_other_settings_or_would_run_code_is_one_line(one, tmp_path):
    path, pwned = one / 'model.pt', tmp_path / 'pwned'
    whole, checkpoint = path.read_bytes(), torch.load(path, weights_only=True)
    os.unlink(one / 'analysis.json')
    for content in (None, whole[:-1000], whole[:4000] + b'x' + whole[4001:], {'model': {}}, {'config': {}},
                    {'config': {**checkpoint['config'], 'n_embd': 32}}, {'model': Evil(pwned)}, Evil(pwned)):
        if content is None:
            os.unlink(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save({**checkpoint, **content} if isinstance(content, dict) else content, path)
        refused(lambda: analyze.main([str(one), f'--out={tmp_path}/out']), 'model.pt')
    assert not pwned.exists()


def test_statistics_are_kept_until_the_model_or_what_they_are_changes(one):
    kept = one / 'analysis.json'
    before, text = analyze.analyze_run(one), kept.read_text()
    whole = {**json.loads(text), 'statistics': {}}
    for older in ({'columns': ['old']}, {'positions': 8192}, {'logits': None}):
        content = {key: value for key, value in {**whole, **older}.items() if value is not None}
        kept.write_text(json.dumps(content))
        assert analyze.analyze_run(one) == before and kept.read_text() == text
    checkpoint = torch.load(one / 'model.pt', weights_only=True)
    checkpoint['model']['lm_head.weight'] *= 2
    torch.save(checkpoint, one / 'model.pt')
    os.utime(one / 'model.pt', (kept.stat().st_mtime + 1,) * 2)
    assert analyze.analyze_run(one)['mu_norm'] == pytest.approx(2 * before['mu_norm'], rel=1e-5)
