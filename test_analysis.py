"""Tables, figures and the report, from csv files and from run folders."""
import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import analyze
import paper
import plots
import tables
import settings as settings_py
import train
from model import SIZES

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD = 'method,size,weight_tying,lr,test_loss'


def row(method='baseline', size='16M', tying=0, lr=0.1, loss=3.0, **more):
    return {**dict.fromkeys(analyze.COLUMNS), 'method': method, 'size': size, 'weight_tying': tying, 'lr': lr, 'test_loss': loss, **more}


def text_of(cell):
    return cell if isinstance(cell, str) else cell[0]


def run(path, out, *flags):
    """analyze.main on a csv with every warning an error -> (exit status, the folder's report, or None)."""
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        status = analyze.main([f'--results={path}', f'--out={out}', *flags])
    return status, (out / 'report.html').read_text()


# ----------------------------------------------------------------------------------------------------------------- tables


def test_lrs_table_marks_the_best_the_converged_and_what_the_paper_has():
    rows = [row(m, s, 0, lr, loss, diverged=d, n_params=1)
            for m, s, losses, d in (('baseline', '16M', (3, 4), 1), ('mu_loss', '16M', (3, 3.03), 0), ('mu_centering', '16M', (3, 3.02), None),
                                    ('baseline', '29M', (3, 3.2), 0), ('mu_loss', '29M', (3, 3.1), 1))
            for lr, loss in zip((0.1, 0.3), losses)] + [row('mu_loss', '16M', 0, 0.01, 3.0, diverged=0, n_params=1)]
    table, missing = tables.lrs_rows(analyze.complete(rows))
    published, ours = tables.lrs_tables(table)
    assert not missing and published['header'] == ['N', 'baseline', 'μ-loss', 'μ-centering']
    cells = {line[0]: line[1:] for line in published['rows']}
    assert cells['16M'][0] == ('1.000 (2 of 3 lr)', '', '0.306 +0.694') and cells['16M'][1] == ('0.015', 'bu', '0.031 -0.016')
    assert cells['16M'][2] == ('0.020 (2 of 3 lr)', '', '0.028 -0.008')  # whether it diverged is not known: no line under it
    assert cells['29M'][0][1] == 'u' and cells['29M'][1][1] == 'b' and cells['29M'][2] == '-'
    assert [text_of(c) for c in ours['rows'][0][1:]] == ['0.500 (2 of 3 lr)', '0.010', '0.010 (2 of 3 lr)']


def test_sensitivity_table_has_a_column_for_each_lam():
    rows = [row('z_loss', '16M', 0, lr, loss, lam=lam) for lam, top in ((1e-7, 3.5), (None, 3.25), (100, 5)) for lr, loss in ((0.1, 3), (0.3, top))]
    table, _ = tables.lrs_rows(analyze.complete(rows))
    found, = tables.sensitivity_tables(table)
    assert found['header'] == ['N', '1e-07', '0.0001', '100']
    assert found['rows'] == [['16M', ('0.500', '', '0.037 +0.463'), ('0.250', 'b', '0.054 +0.196'), ('2.000', '', '1.156 +0.844')]]
    assert tables.sensitivity_tables([r for r in table if r['lam'] == 1e-4]) == []


def test_overhead_averages_all_lam_and_refuses_to_mix_machines():
    rows = [row(lr=lr, train_seconds=100) for lr in (0.1, 0.3)] + [row('z_loss', lr=lr, lam=lam, train_seconds=s) for lr, lam, s in
            ((0.1, 1e-4, 104), (0.3, 1e-4, 106), (0.1, 1e-1, 108), (0.3, 1e-1, 106))] + [row('mu_loss', lr=0.3, lam=1e-4, loss=math.nan, train_seconds=1)]
    (found,), missing = tables.overhead_tables(rows)
    assert found['header'] == ['N', 'z-loss'] and found['rows'] == [['16M', ('6.0%', '', '6.4% -0.40')]] and not missing
    assert 'is assumed' in found['says']
    (named,), _ = tables.overhead_tables([{**r, 'device': 'one'} for r in rows])
    assert 'Machine: one' in named['says']
    found, missing = tables.overhead_tables([{**r, 'device': r['method']} for r in rows])
    assert not found and 'different machines' in missing[0]
    assert tables.overhead_tables([row()]) == ([], ['no table of ΔT: there are no times of a baseline and of another method at one size'])


def test_lam_zero_is_not_the_default(tmp_path):
    rows = analyze.complete([row('z_loss', lr=lr, loss=3 + lr * (lam == 0), lam=lam) for lam in (0, 1e-4) for lr in (0.1, 0.3)])
    found, = tables.sensitivity_tables(tables.lrs_rows(rows)[0])
    assert found['header'] == ['N', '0', '0.0001'] and found['rows'][0][1] == ('0.200', '', '') and found['rows'][0][2][2] == '0.054 -0.054'
    assert tables.variants(rows) == [('z_loss', 0), ('z_loss', None)]


def test_an_lrs_over_fewer_learning_rates_is_neither_the_best_nor_ranked():
    rows = [row('baseline', lr=lr, loss=3 + lr) for lr in (0.1, 0.3, 1)] + [row('z_loss', lr=lr, loss=3 + 2 * lr) for lr in (0.1, 0.3, 1)]
    rows += [row('mu_loss', lr=lr, loss=3.0) for lr in (0.1, 0.3)]  # its largest learning rate is still to come
    table, _ = tables.lrs_rows(analyze.complete(rows))
    line = tables.lrs_tables(table)[0]['rows'][0]
    assert line[0] == '16M' and 'b' in line[1][1] and line[3] == ('0.000 (2 of 3 lr)', '', '0.031 -0.031')
    assert [r[0] for r in tables.ranking_tables(table)[0]['rows']] == ['baseline', '> z-loss']


def test_ranking_orders_by_lrs_and_separates_by_the_factor():
    tops = {'baseline': 4.0, 'weight_decay': 3.5, 'z_loss': 3.45, 'mu_centering': 3.04}
    rows = [row(m, s, 0, lr, loss) for m, top in tops.items() for s in ('16M', '29M') for lr, loss in ((0.1, 3.0), (0.3, top))]
    rows += [row('baseline', '57M', 0, lr, 3.0) for lr in (0.1, 0.3)]  # a size that the others lack does not count
    ranking, = tables.ranking_tables(tables.lrs_rows(analyze.complete(rows))[0])
    assert [line[0] for line in ranking['rows']] == ['μ-centering', '> z-loss', '≈ weight decay', '> baseline']
    assert ranking['rows'][3] == ['> baseline', '1.000', '+0.500', '2.00', '2 of 2'] and '16M, 29M' in ranking['says']


def test_bootstrap_interval_is_that_of_all_resamples():
    """Of three seeds there are 27 resamples, equally likely, so the 95% interval is the smallest mean (1 of 27) to the largest."""
    rng = np.random.RandomState(0)
    for _ in range(20):
        values = rng.rand(3)
        exact = [np.mean(draw) for draw in itertools.product(values, repeat=3)]
        assert tables.bootstrap(values) == pytest.approx([min(exact), max(exact)])
    assert tables.bootstrap([0.5, 0.5, 0.5]) == pytest.approx([0.5, 0.5])


def test_lrs_of_several_seeds_is_their_mean_and_leaves_out_what_is_not_finished():
    rows = [row(lr=lr, loss=3 + top * (lr == 0.3) + 0.1 * seed, seed=seed) for seed, top in ((1, 0.2), (2, 0.4)) for lr in (0.1, 0.3)]
    (found,), missing = tables.lrs_rows(rows + [row(lr=0.1, loss=9, seed=3)])
    assert found['lrs'] == pytest.approx(0.15) and found['lrs_n1'] == pytest.approx(0.3) and found['seeds'] == 2
    assert found['lrs_low'] == pytest.approx(0.1) and found['lrs_high'] == pytest.approx(0.2) and 'seed 3 of baseline 16M (1 of 2' in missing[0]


def test_excess_is_the_loss_at_the_largest_learning_rate_over_the_best_of_the_same_seed():
    rng = np.random.RandomState(0)
    for _ in range(20):
        losses = 3 + rng.rand(3, 4)  # seeds x learning rates
        losses[0, 3] = math.nan     # counts as its loss at initialisation
        statistics = {'mu_norm': 2.0, 'logit_mean': 3.0, 'logit_mean_spread': 4.0}
        rows = analyze.complete([row(lr=lr, loss=losses[seed, i], seed=seed, init_loss=9, **statistics)
                                 for i, lr in enumerate((0.01, 0.3, 0.03, 1)) for seed in range(3)])
        losses[0, 3] = 9
        found, = tables.lrs_rows(rows)[0]
        excess = losses[:, 3] - losses.min(axis=1)
        assert [found[k] for k in ('excess', 'excess_low', 'excess_high')] == pytest.approx([excess.mean(), excess.min(), excess.max()])
        best = losses.mean(axis=0).argmin()
        assert (found['best_lr'], found['largest_lr']) == ((0.01, 0.3, 0.03, 1)[best], 1)
        assert found['best_loss'] == pytest.approx(losses[:, best].mean()) and found['largest_lr_loss'] == pytest.approx(losses[:, 3].mean())
    line, = tables.excess_table(rows, [found])['rows']
    assert line[5] == f'{excess.mean():.3f} [{excess.min():.3f}, {excess.max():.3f}]' and line[6:9] == ['2', '3', '5']  # 3-4-5: mean, spread, rms


def test_readme_says_what_the_published_csv_say():
    """Each number of README's table, the paper's half and ours, is the mean over the seeds of rows of the csv that it names."""
    here = os.path.join(HERE, 'results', 'published_here')
    lines = open(os.path.join(HERE, 'README.md'), encoding='utf-8').read().split('## What we measured')[1].split('\n\n')[2].splitlines()[2:]
    assert len(lines) == 7
    names = {'baseline': 'baseline', **{v: k for k, v in tables.NAMES.items()}}
    theirs, ours = (analyze.from_csv(os.path.join(here, file))[0] for file in ('authors_16M.csv', 'proxy/results.csv'))
    for line in lines:
        cells = [c.strip().replace(',', '', 1) if re.match(r'[\d-]', c.strip()) else c.strip() for c in line.strip('|').split('|')]
        for rows, (label, *shown) in (theirs, cells[:5]), (ours, cells[6:]):
            method, lr = label.split(', lr ')
            part = [r for r in rows if r['method'] == names[method] and r['lr'] == float(lr)]
            def mean(f): return sum(map(f, part)) / len(part)
            second = (lambda r: r['logit_mean']) if rows is theirs else tables.offset
            values = [mean(lambda r: r['lr_sum']), mean(lambda r: r['mu_norm']), mean(second), mean(lambda r: r['test_loss'])]
            values += [mean(lambda r: r['rounding_loss'])] if rows is ours else []
            for text, value in zip(shown, values, strict=True):
                digits = len(text.split('.')[1]) if '.' in text and 'e' not in text else 0
                expected = 0.5 * 10 ** (int(text.split('e')[1])) if 'e' in text else 0.5 * 10.0 ** -digits
                assert abs(float(text) - value) <= expected * 1.001, (line, text, value)  # half a unit of the last digit that is shown
    kept = analyze.read_csv(os.path.join(here, 'proxy', 'lrs.csv'), None, ())
    for old, new in zip(kept, tables.lrs_rows(ours)[0], strict=True):
        assert all(old[k] == pytest.approx(new[k]) for k in ('lrs', 'excess', 'excess_low', 'excess_high', 'best_lr'))


def test_hyperparameters_stand_beside_the_papers():
    settings = {'beta1': [0.9], 'batch_size': [64], 'block_size': [128], 'weight_tying': [True, False], 'steps': [100, 200]}
    lines = {line[0]: line[1:] for line in tables.hyperparameter_table(settings)['rows']}
    assert lines['β1'] == [('0.9', '', ''), '0.9'] and lines['batch size (tokens)'] == [('8192', 'b', ''), '131072']
    assert lines['weight tying'][0] == ('false & true', '', '') and lines['training length (steps)'][0] == ('100, 200', 'b', '')
    keys = {key for *_, key in paper.HYPERPARAMETERS if key and ' ' not in key}
    assert keys <= set(vars(settings_py.parser().parse_args([]))), 'a setting that train.py does not have'


def test_the_papers_tables_are_whole():
    """Five sizes by all columns, each number once; the averages below are those of the printed tables."""
    for published, columns in ((paper.LRS[0], 6), (paper.LRS[1], 6), *((t, 4) for t in paper.LRS_OF_LAM.values()), (paper.OVERHEAD[0], 5), (paper.OVERHEAD[1], 5)):
        assert len(published) == 5 * columns and {size for size, _ in published} == set(SIZES) - {'tiny'}
    for method in ('mu_loss', 'z_loss'):  # the column of λ = 1e-4 is that of the main table
        for size in ('16M', '29M', '57M', '109M', '221M'):
            assert paper.LRS_OF_LAM[method][size, '0.0001'] == paper.LRS[0][size, method]


def test_a_table_in_every_form():
    table = {'title': 'A & B', 'where': 'Table 9', 'says': 'μ % of λ_1 | #1 ~ {x} \\ ‖e‖', 'header': ['N', 'a|b'], 'rows': [['1', ('0.5', 'bu', '0.4 +0.1')]]}
    assert '**_0.5_** (0.4 +0.1)' in tables.text(table) and '(Table 9)' in tables.text(table)
    assert '**<u>0.5</u>** <sub>0.4 +0.1</sub>' in tables.text(table, tables.MARKDOWN)
    latex = tables.latex(table)
    assert latex.isascii() and r'\textbf{\underline{0.5}}' in latex and r'A \& B' in latex and r'\toprule' in latex
    bare = re.sub(r'\\[a-zA-Z]+|\\[&%$#_{}\\]', '', latex)
    assert bare.count('{') == bare.count('}') and not set('#_~^') & set(bare) and bare.count('%') == 1  # the one that ends \resizebox's line
    for size in range(32, 0x2260):  # whatever stands in a csv, LaTeX gets ASCII without a bare special character
        cell = tables.latex({**table, 'rows': [[chr(size), 'x']]}).split(r'\midrule')[1]
        assert cell.isascii() and not re.search(r'(?<!\\)[#_^%~]', cell)


# ---------------------------------------------------------------------------------------------------------------- figures


def test_series_is_the_mean_and_the_spread_over_seeds():
    rng = np.random.RandomState(3)
    rows = [row(m, s, 0, lr, seed=seed, mu_norm=float(rng.choice([rng.rand(), math.nan, math.inf, 1e300], p=[.7, .1, .1, .1])), diverged=int(rng.rand() < 0.2))
            for m in ('baseline', 'z_loss') for s in ('16M', '29M') for lr in (0.1, 0.3, 1.0) for seed in range(6)]
    for (size, method, lam), points in plots.series(rows, lambda r: r['mu_norm']).items():
        for lr, mean, low, high, diverged in points:
            part = [r for r in rows if (r['size'], r['method'], r['lr']) == (size, method, lr) and r['mu_norm'] < 1e100]
            values = [r['mu_norm'] for r in part]
            assert (mean, low, high, diverged) == (pytest.approx(np.mean(values)), min(values), max(values), any(r['diverged'] for r in part))


def test_projection_keeps_norms_and_products_with_mu_and_h():
    """Fig. 1: dot products are kept where one of the two vectors lies in span(μ, h), norms always."""
    rng = np.random.RandomState(4)
    for _ in range(20):
        H = rng.randint(3, 50)
        X, mu, h = rng.randn(30, H), rng.randn(H), rng.randn(H)
        P = plots.norm_preserving_projection(np.vstack((X, mu, h)), mu, h)
        assert P.shape == (32, 3) and np.allclose(np.linalg.norm(P, axis=1), np.linalg.norm(np.vstack((X, mu, h)), axis=1))
        assert np.allclose(P[:30] @ P[30], X @ mu) and np.allclose(P[:30] @ P[31], X @ h)
        assert np.allclose(P[30:, 2], 0, atol=1e-12)


def test_mu_moves_with_adam_alone():
    """Gradients of the logits sum to zero over the vocabulary: what is the same for all embeddings leaves their mean."""
    moved = plots.drift_of_mu(steps=50)
    assert max(moved['SGD']) < 1e-13 and max(moved['Coupled Adam']) < 1e-13 and moved['Adam'][-1] > 0.05
    assert all(b > a for a, b in zip(moved['Adam'][::10], moved['Adam'][10::10]))


def test_training_curve_sums_the_learning_rates_and_keeps_the_end():
    s = {'lr': 0.3, 'min_lr': 1e-5, 'warmup': 150, 'steps': 3000}
    rates = [train.learning_rate(i, s) for i in range(3000)]
    log = [{'step': step, 'loss': 1.0, 'lr': rates[step - 1]} for step in range(1, 3001)]
    lines = analyze.training_curve([dict(e) for e in log] + [{'step': 3000, 'test_loss': 2.0}])
    assert len(lines) == 1000 and lines[-1]['step'] == 3000 and lines[-1]['lr_step'] == rates[-1] and 'lr' not in lines[0]
    sparse = analyze.training_curve([dict(e) for e in log[::30]] + [dict(log[-1])])
    for found in (lines, sparse):
        for e in found:  # linear between log lines: the schedule bends by less than lr in 30 steps
            assert e['lr_sum'] == pytest.approx(sum(rates[:e['step']]), abs=0.3)
    assert analyze.complete([row(lr=0.3, steps=3000)])[0]['lr_sum'] == pytest.approx(sum(rates), abs=0.3)


FULL = 'mu_norm,logit_mean,logit_std,logit_absmax,r_emb,cos_mu_h,r_cos,r_log,diverged,steps,train_seconds,seed'


def full_csv(path):
    """A csv with all that a figure can use: two tyings, two sizes, λ of two methods, three seeds, one run that is not finite."""
    lines = [f'{HEAD},lam,{FULL}']
    for m, lams in (('baseline', ['']), ('z_loss', ['1e-4', '0.1']), ('mu_loss', ['1e-4', '0.1']), ('mu_centering', [''])):
        for lam, size, tying, (i, lr), seed in itertools.product(lams, ('16M', '29M'), (0, 1), enumerate((0.03, 0.1, 0.3)), (1, 2, 3)):
            loss = 'nan' if (m, size, lr, seed) == ('baseline', '16M', 0.3, 1) else 3 + 0.1 * i + 0.01 * seed
            lines.append(f'{m},{size},{tying},{lr},{loss},{lam},{10 * i},{5 * i},3,{20 * i},.9,.1,.5,.4,{int(loss == "nan")},1000,{100 + seed},{seed}')
    path.write_text('\n'.join(lines) + '\n')


def test_a_full_csv_gives_every_figure_and_a_report_that_needs_nothing_else(tmp_path, capsys):
    full_csv(tmp_path / 'r.csv')
    status, html = run(tmp_path / 'r.csv', tmp_path / 'out', '--theory', '--method=z_loss')
    wanted = [f'{name}_{word}' for name in ('loss', 'lrs', 'statistics', 'fact3', 'sensitivity', 'drift') for word in ('untied', 'tied')]
    wanted += ['theory_centering', 'theory_zloss_1d', 'theory_zloss_2d', 'theory_root_cause']
    assert status == 0 and sorted(os.listdir(tmp_path / 'out' / 'figures')) == sorted(f'{name}.{ending}' for name in wanted for ending in ('png', 'pdf'))
    for name in wanted:
        assert (tmp_path / 'out' / 'figures' / f'{name}.png').read_bytes()[:4] == b'\x89PNG' and (tmp_path / 'out' / 'figures' / f'{name}.pdf').read_bytes()[:4] == b'%PDF'
    out = capsys.readouterr().out
    assert 'no figure "Training curves' in out and 'no figure "Distributions' in out and 'Fact 3 for z-loss' in html
    open_tags, links = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            links.extend(v for k, v in attributes if k in ('src', 'href', 'action', 'data'))
            if tag not in ('meta', 'img', 'br', 'link'):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag
    Reader().feed(html)
    assert not open_tags and all(link.startswith(('#', 'data:image/png;base64,')) for link in links)
    assert sum(link.startswith('data:') for link in links) == len(wanted) and 'http' not in html and 'prefers-color-scheme: dark' in html
    assert 'width=device-width' in html and html.count('<tr><td>') > 100


@pytest.mark.parametrize('lines, said', [
    (['baseline,16M,0,0.1,4'], 'no LRS tables'),
    ([f'baseline,16M,{t},{lr},{4 + lr}' for t in (0, 1) for lr in (.1, .3)], 'Sensitivity'),
    ([f'{m},16M,0,{lr},{bad}' for m in ('baseline', 'mu_loss') for lr, bad in ((.1, 'inf'), (.3, 'nan'))], 'no figure'),
    ([f'{m},tiny,0,{lr},nan' for m in ('baseline', 'mu_loss') for lr in (.1, .3)], 'no figure "Loss against learning rate, untied": no loss is finite'),
    ([f'{m},1B,0,{lr},{3 + lr}' for m in ('baseline', 'mine') for lr in (.1, .3)], 'it takes two sizes'),
    ([f'{m},16M,0,{lr},{loss}' for m, loss in (('baseline', 1e308), ('mu_loss', 3)) for lr in (.1, .3)], 'wrote'),
], ids=['one run', 'one method', 'only diverged', 'only diverged, no L0', 'unknown size', 'overflow'])
def test_little_or_odd_data_still_make_a_picture_or_one_line(tmp_path, capsys, lines, said):
    (tmp_path / 'r.csv').write_text('\n'.join([HEAD, *lines]) + '\n')
    status, html = run(tmp_path / 'r.csv', tmp_path / 'out')
    assert status == 0 and said in capsys.readouterr().out and f'{len(lines)} finished runs' in html


def test_statistics_that_are_no_numbers_or_huge(tmp_path):
    for value in ('nan', 'inf', '1e308', '-1e308', '0'):
        (tmp_path / 'r.csv').write_text('\n'.join([f'{HEAD},{FULL}', *(f'baseline,16M,0,{lr},nan,{",".join([value] * 8)},1,100,5,1' for lr in (.1, .3))]) + '\n')
        assert run(tmp_path / 'r.csv', tmp_path / 'out')[0] == 0


def test_names_in_a_csv_are_neither_paths_nor_html_nor_formulas(tmp_path):
    evil = ['<script>alert(1)</script>', '../../x', '$\\frac', '_hidden', '\\input{/etc/passwd}', '{{ 7*7 }}', '"><img src=x onerror=alert(1)>', "a'b&c"]
    (tmp_path / 'in').mkdir()
    with open(tmp_path / 'in' / 'results.csv', 'w', newline='') as file:
        csv.writer(file).writerows([HEAD.split(','), *([m, s, 0, lr, 3 + lr] for m, s in zip(evil, evil[::-1]) for lr in (.1, .3))])
    with open(tmp_path / 'in' / 'curves.csv', 'w', newline='') as file:
        csv.writer(file).writerows([['method', 'size', 'weight_tying', 'lam', 'lr', 'seed', 'diverged', 'step', 'loss', 'mu_norm', 'logit_mean', 'logit_absmax', 'lr_sum'],
                                    *([m, m, 0, '', .1, 1, 0, step, 3, 1, 1, 1, step] for m in evil for step in (1, 2))])
    before = {str(p) for p in tmp_path.rglob('*')}
    status, html = run(tmp_path / 'in' / 'results.csv', tmp_path / 'out')
    assert status == 0 and '<script>alert' not in html and 'onerror=alert(1)>' not in html and '49' not in re.findall(r'Methods: (.*)', html)[0]
    assert all(p in before or p.startswith(str(tmp_path / 'out')) for p in map(str, tmp_path.rglob('*')))
    assert r'\input' not in (tmp_path / 'out' / 'tables.tex').read_text()
    assert len(list((tmp_path / 'out' / 'figures').glob('curves_*.png'))) == len(evil)


def test_method_and_theory_flags(tmp_path, capsys):
    (tmp_path / 'r.csv').write_text(f'{HEAD}\nbaseline,16M,0,0.1,3\n')
    for flags, named in (([f'--results={tmp_path}/r.csv', '--method=z_los'], '--method=z_los'), ([], '--theory')):
        with pytest.raises(SystemExit) as stopped:
            analyze.main([*flags, f'--out={tmp_path}/out'])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and named in error and error.count('\n') == 1 and not os.path.exists(tmp_path / 'out')
    assert analyze.main(['--theory', f'--out={tmp_path}/theory']) == 0
    assert sorted(os.listdir(tmp_path / 'theory')) == ['.lock', 'figures', 'report.html'] and len(os.listdir(tmp_path / 'theory' / 'figures')) == 8


# ---------------------------------------------------------------------------------------------------------- from run folders


@pytest.fixture(scope='module')
def sweep_of_two(tmp_path_factory):
    """A watched sweep of two methods at two learning rates, as a user runs it -> (its folder, its results, what it printed)."""
    out = tmp_path_factory.mktemp('sweep') / 'watched'
    env = {**os.environ, 'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH'], 'OMP_NUM_THREADS': '1'}
    subprocess.run([sys.executable, 'prepare_fineweb.py', '--source=stdlib', '--tokenizer=bytes', f'--out={out.parent}/data', '--val_tokens=20000',
                    '--tokens=90000'], cwd=HERE, env=env, check=True, capture_output=True)
    lines = subprocess.run(['bash', 'sweep.sh', 'demo'], cwd=HERE, capture_output=True, text=True, timeout=600, env={
        **env, 'METHODS': 'baseline mu_centering', 'LRS': '1e-2 1e-1', 'STEPS': '30', 'JOBS': '1', 'OUT': str(out), 'DATA': f'{out.parent}/data', 'WATCH': '1'})
    assert lines.returncode == 0, lines.stdout + lines.stderr
    results = os.path.join(HERE, 'results', 'watched')
    yield out, results, lines.stdout
    subprocess.run(['rm', '-rf', results])


def test_a_sweep_ends_with_a_report_of_everything_and_refreshes_it_on_the_way(sweep_of_two):
    out, results, stdout = sweep_of_two
    assert 'finished runs' not in stdout and f'open results/watched{os.sep}report.html' in stdout
    html = open(os.path.join(results, 'report.html'), encoding='utf-8').read()
    assert '4 finished runs, 0' in html and 'Hyper-parameters' in html and 'float32' in html and torch.__version__ in html
    figures = set(os.listdir(os.path.join(results, 'figures')))
    assert {f'{name}_untied.png' for name in ('loss', 'statistics', 'fact3', 'distributions', 'drift', 'curves_tiny')} <= figures
    logs = re.findall(r'<a href="([^"#]*log\.jsonl)">', html)
    assert len(logs) == 4 and all(os.path.exists(os.path.join(results, log)) for log in logs)
    assert re.search(r'\[1/[123]\]', open(out / 'logs' / 'analyze.log').read())  # a refresh was made while runs were left
    assert not list((out / 'logs').glob('watching*'))


def test_what_a_sweep_leaves_can_be_drawn_again_elsewhere(sweep_of_two, tmp_path):
    """results.csv with the files beside it gives the same tables, figures and settings, without the runs."""
    _, results, _ = sweep_of_two
    status, html = run(os.path.join(results, 'results.csv'), tmp_path / 'again', '--theory')
    assert status == 0 and 'log.jsonl' not in html and 'Hyper-parameters' in html
    assert set(os.listdir(tmp_path / 'again' / 'figures')) == set(os.listdir(os.path.join(results, 'figures')))
    for name in ('tables.md', 'tables.tex', 'lrs.csv'):
        assert (tmp_path / 'again' / name).read_text() == open(os.path.join(results, name), encoding='utf-8').read()


def test_distributions_hold_quartiles_extrema_and_shares(sweep_of_two):
    out, results, _ = sweep_of_two
    lines = list(csv.DictReader(open(os.path.join(results, 'distributions.csv'))))
    for line in lines:
        v = {k: float(line[k]) for k in analyze.DISTRIBUTION}
        assert v['min'] <= v['q25'] <= v['median'] <= v['q75'] <= v['max'] and v['min'] <= v['mean'] <= v['max']
        assert (v['below_1'] == 1) == (v['max'] < 1) and (v['above_0'] == 1) == (v['min'] > 0)
    assert {line['quantity'] for line in lines} >= {'r_emb', 'cos_mu_h', 'r_cos', 'r_log'} and len({line['lr'] for line in lines}) == 2
    values = torch.randn(1001, dtype=torch.float64)
    found, ordered = analyze.summary(values), values.sort().values
    assert [found[k] for k in ('min', 'q25', 'median', 'q75', 'max')] == [ordered[i].item() for i in (0, 250, 500, 750, 1000)]
    assert found['above_0'] == (values > 0).double().mean().item() and found['below_1'] == (values < 1).double().mean().item()


def test_a_run_that_went_on_from_another_is_drawn_with_what_was_before(sweep_of_two, tmp_path):
    out, _, _ = sweep_of_two
    source = tmp_path / 'source'
    flags = ['--size=tiny', '--steps=30', '--lr=0.1', '--batch_size=4', '--block_size=32', '--device=cpu', f'--data={out.parent}/data', '--log_every=5',
             '--eval_tokens=128', '--test_tokens=128']
    assert train.main(['--method=baseline', *flags, '--keep_every=15', f'--out={source}']) == 0
    assert train.main(['--method=mu_centering', f'--init_from={source}/model_15.pt', '--device=cpu', f'--out={tmp_path}/rescue/a']) == 0
    assert analyze.main([str(tmp_path / 'rescue'), f'--out={tmp_path}/results']) == 0
    lines = [r for r in csv.DictReader(open(tmp_path / 'results' / 'curves.csv'))]
    assert [(r['part'], r['step']) for r in lines] == [('before', s) for s in ('1', '5', '10', '15')] + [('rescue', s) for s in ('20', '25', '30')]
    settings = json.load(open(source / 'config.json'))
    assert float(lines[-1]['lr_sum']) == pytest.approx(sum(train.learning_rate(i, settings) for i in range(30)), abs=0.1)
    assert json.load(open(tmp_path / 'rescue' / 'a' / 'result.json'))['init_loss'] is None  # a kept model does not say what it was at initialisation
    assert (tmp_path / 'results' / 'figures' / 'rescue_untied.png').exists()
    assert 'Rescue' in run(tmp_path / 'results' / 'results.csv', tmp_path / 'again')[1]  # from the csv files alone too


def test_damaged_files_of_a_run_are_one_line(sweep_of_two, tmp_path, capsys):
    out, results, _ = sweep_of_two
    source = next(p for p in sorted(out.iterdir()) if (p / 'model.pt').exists())
    result = json.load(open(source / 'result.json'))
    for name, change in (('lr', '<b>'), ('weight_tying', 2), ('test_loss', 'low'), ('seed', [1]), ('n_params', -1)):
        folder = tmp_path / 'sweep' / name
        os.makedirs(folder)
        for file in source.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        (folder / 'result.json').write_text(json.dumps({**result, name: change}))
        with pytest.raises(SystemExit) as stopped:
            analyze.analyze_run(str(folder))
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count('\n') == 1 and name in error and 'result.json' in error
    (folder / 'log.jsonl').write_text('[1]\n{"step": "x", "loss": 1}\n{"loss": 1}\n{"step": 1, "loss": 2}\nhalf a li\n{"step": 1, "loss": 2.0, "lr": 0.1}\n')
    assert analyze.read_log(str(folder / 'log.jsonl')) == [{'step': 1, 'loss': 2.0, 'lr': 0.1}]
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / 'results.csv').write_text(f'{HEAD}\nbaseline,16M,0,0.1,3\n')
    (tmp_path / 'x' / 'settings.json').write_text('{"steps": [1]}')
    assert run(tmp_path / 'x' / 'results.csv', tmp_path / 'out')[0] == 0


def test_statistics_of_an_older_analysis_are_made_again(sweep_of_two, capsys):
    """A kept analysis.json that lacks a column is not believed."""
    out, _, _ = sweep_of_two
    folder = next(p for p in sorted(out.iterdir()) if (p / 'model.pt').exists())
    kept = json.load(open(folder / 'analysis.json'))
    row_before, before = analyze.analyze_run(str(folder))
    (folder / 'analysis.json').write_text(json.dumps({**kept, 'r_emb': {'mean': 99.0}}))
    row_after, after = analyze.analyze_run(str(folder))
    assert after == before and row_after == row_before
