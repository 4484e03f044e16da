"""analyze.py, tools/ and the scripts of results/: what is measured of a GPT and of runs, what is drawn."""
import copy
import itertools
import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle

import analyze
import train
from analyze import distribution, measure_model
from conftest import ROOT, refused
from model import head_loss
from test_facts import generator, tiny_gpt
from tools import bench, report
from train import read_json, save

QUANTITIES = ['mu_norm', 'logit_mean', 'logit_std', 'logit_absmax', 'r_emb', 'cos_mu_h', 'r_cos', 'r_log']
WINDOWS = torch.randint(64, (40, 17), generator=generator(0))
OWN = 'a_method_of_quite_a_long_name'  # which a fork has added


# -------- a GPT
def test_what_is_measured():
    """
    Rows of zeros in E, such as padding, have no r_emb, but are -mu once centered. Of a fork's head its own
    logits and statistics are measured; r_cos, r_log and cos_mu_h are of e_i . h as before.
    """
    gpt, bias = tiny_gpt(dtype='float32', logits_dtype='float32'), torch.linspace(-2, 3, 64)
    with torch.no_grad():
        gpt.E.mul_(3).add_(0.7 * F.normalize(torch.randn(gpt.E.size(1), generator=generator(0)), dim=0))
        gpt.E[-3:] = 0
        h, E = gpt.hidden(WINDOWS[:, :-1]).flatten(0, 1).double(), gpt.E.double()
    numbers, distributions = map(measure_model(gpt, WINDOWS).get, ('numbers', 'distributions'))
    mu = E.mean(dim=0)
    cos, cos_star = (F.cosine_similarity(h[:, None], X, dim=-1).abs().amax(dim=1) for X in (E, E - mu))
    values = {'r_cos': cos_star / cos, 'cos_mu_h': F.cosine_similarity(h, mu[None]),
              'r_log': (h @ (E - mu).T).abs().amax(dim=1) / (h @ E.T).abs().amax(dim=1),
              'r_emb': (E[:-3] - mu).norm(dim=1) / E[:-3].norm(dim=1)}
    for name, x in values.items():
        expected = [x.mean(), *x.quantile(torch.arange(5.0).to(x) / 4, interpolation='nearest'),
                    (x < 1).double().mean(), (x > 0).double().mean()]
        assert [*distributions[name]] == ['mean', 'min', 'q25', 'median', 'q75', 'max', 'below_1', 'above_0']
        assert [*distributions[name].values()] == pytest.approx([y.item() for y in expected], abs=2e-5)
        assert numbers[name] == distributions[name]['mean']
    for name in ('r_emb', 'r_cos'):
        assert 0 < numbers[f'{name}_below_1'] == distributions[name]['below_1'] < 1
    expected = {'mu_norm': mu.norm(), 'mean_share': 64 * mu.square().sum() / E.square().sum(),
                'r_log_below_1_too': (values['r_log'][values['r_cos'] < 1] < 1).double().mean()}
    assert [numbers[name] for name in expected] == pytest.approx([*map(float, expected.values())], rel=1e-6)
    for values in ([1.0, math.nan], []):
        assert all(math.isnan(value) for value in distribution(torch.tensor(values)).values())

    def forward(tokens, targets):
        """A bias for each logit, as embeddings (e_i, b_i) and states (h, 1), and one more statistic."""
        logits = (gpt.hidden(tokens) @ gpt.E.T + bias).flatten(0, 1)
        objective, stats = head_loss(logits, targets.flatten(), gpt.config, with_stats=True)
        return objective, {**stats, 'my_statistic': stats['logit_mean'] + 1}

    gpt.forward = forward
    forked, logits = measure_model(gpt, WINDOWS)['numbers'], h @ E.T + bias
    expected = {'loss': F.cross_entropy(logits, WINDOWS[:, 1:].flatten()), 'logit_mean': logits.mean(),
                'logit_absmax': logits.abs().amax(dim=1).mean(), 'my_statistic': logits.mean() + 1}
    assert [forked[name] for name in expected] == pytest.approx([*map(float, expected.values())], rel=1e-5)
    unchanged = [name for name in numbers if name.startswith(('r_', 'cos_'))]
    assert len(unchanged) == 7 and all(forked[name] == numbers[name] for name in unchanged)


# -------- csv files
def row(method='baseline', size='16M', lr=0.1, loss=3.0, **more):
    return dict(method=method, size=size, weight_tying=0, lr=lr, test_loss=loss, init_loss=10.8) | more


def grid(method, losses, lrs=(0.01, 0.1, 0.3), **more):
    """Rows of a method: seed -> its losses at these learning rates."""
    return [row(method, lr=lr, loss=loss, seed=seed, **more)
            for seed, of_seed in losses.items() for lr, loss in zip(lrs, of_seed, strict=False)]


def written(path, rows):
    pd.DataFrame(rows).to_csv(path, index=False)
    return path



# -------- a sweep, by a second, naive way: dicts and loops
METHODS = {'baseline': None, 'z_loss': 1e-4, 'mu_loss': 1e-4, 'mu_centering': None, 'soft_capping': None, OWN: None}
WORDS = {'z_loss': 'z-loss', 'mu_loss': 'μ-loss', 'mu_centering': 'μ-centering', 'soft_capping': 'soft-capping'}
USUAL = {'beta2': '0.95', 'block_size': '2048', 'mu_shift': '0', 'logits_dtype': 'bfloat16', 'dropout': '0',
         'dtype': 'bfloat16', 'warmup': '50', 'init_from': '', 'cap': ''}
SIZES = ['16M', '57M', '221M']


def made_up(rng):
    """Runs of a made-up sweep, dicts of text as a csv has them, in no order. Some are of a fork's flag."""
    rows, other = [], {}
    for flag, values in {'beta2': ['0.9', '0.99'], 'block_size': ['104', '128'], 'logits_dtype': ['float32'],
                         'mu_shift': ['331'], 'dropout': ['0.10'], 'cap': ['15'], 'dtype': ['float32'],
                         'warmup': ['9'], 'init_from': ['a/x.pt', 'b/x.pt']}.items():
        if rng.rand() < 0.2:
            other[flag] = values
    settings = [{}, *({flag: value} for flag, values in other.items() for value in values)]
    every_rate = [0.01, 0.03, 0.1, 0.3]
    for size, tied, method, seed in itertools.product(SIZES[:rng.randint(1, 3)], (0, 1), METHODS, (1, 2, 3)):
        lams = [METHODS[method]] if METHODS[method] is None else [METHODS[method], 0.1, 100.0][:rng.randint(1, 4)]
        for lam, setting in itertools.product(lams, settings):
            if rng.rand() < 0.25 or setting and method not in ('baseline', 'mu_loss'):
                continue
            dead = rng.rand() < 0.03
            rates = every_rate if rng.rand() < 0.8 else every_rate[:rng.randint(1, 4)]
            for lr in rates:
                loss = 10.75 if dead else rng.choice([3, 3.0302, 3.01, 3.2, 11, math.nan], p=[.4, .2, .2, .1, .05, .05])
                loss += 1e-5 * rng.rand()  # or 0.0025 would be 0.002 or 0.003
                rows.append({'method': method, 'size': size, 'weight_tying': tied, 'lr': lr, 'seed': seed, 'steps': 1000,
                             'lam': '' if lam is None or lam == METHODS[method] and rng.rand() < 0.5 else lam,
                             'test_loss': loss, 'init_loss': 10.8, 'n_params': int(size[:-1]) * 10**6, **setting,
                             'run': f'r{len(rows)}', 'my_stat': round(rng.rand(), 3),
                             **{name: rng.choice([0.5, 700]) * rng.rand() for name in QUANTITIES}})
    for i, row in enumerate(rows):  # an empty cell is the default
        rows[i] = {flag: value if rng.rand() < 0.5 else '' for flag, value in USUAL.items()} | row
        if row['method'] == 'soft_capping' and 'cap' not in row:
            rows[i]['cap'] = rng.choice(['', '30'])
    return [rows[i] for i in rng.permutation(len(rows))]


def number(text):
    return f'{float(text):g}' if re.fullmatch(r'[\d.]+', str(text)) else str(text)


def setting_of(row, flag):
    """A flag's value, '' if it is the default."""
    value, usual = number(row[flag]), '30' if (flag, row['method']) == ('cap', 'soft_capping') else USUAL[flag]
    return '' if value in ('', usual) else value


def parts_of_name(row, rows):
    """Of a run: method, λ, setting, rounding, as text."""
    lam = METHODS[row['method']] if row['lam'] == '' else row['lam']
    texts = {'setting': '', 'rounding': ''}
    for flag in analyze.FLAGS:
        if flag in USUAL:
            differ, everywhere = False, [setting_of(x, flag) for x in rows]
            for size, tied in itertools.product(SIZES, (0, 1)):
                here = {setting_of(x, flag) for x in rows if (x['size'], x['weight_tying']) == (size, tied)}
                differ |= len(here) > 1
            own = setting_of(row, flag)
            usual = '' if '' in everywhere else max(sorted(set(everywhere)), key=everywhere.count)
            if differ and own != usual:
                texts['rounding' if flag in ('logits_dtype', 'mu_shift') else 'setting'] += (
                    ', fp32 logits' if flag == 'logits_dtype' else f', {flag} {own}')
    shown = '' if lam is None or lam == METHODS[row['method']] else f' λ={lam:g}'
    return WORDS.get(row['method'], row['method']), shown, texts['setting'], texts['rounding']


def marks(rows):
    """The mark of each run among these, by its name."""
    found = {}
    for row in rows:
        alike = [x for x in rows if all(x[key] == row[key] for key in ('size', 'weight_tying', 'lr'))
                 and x['parts'][2:] == row['parts'][2:]]
        means = {}
        for name in {x['variant'] for x in alike}:
            losses = [x['test_loss'] for x in alike if x['variant'] == name]
            means[name] = sum(losses) / len(losses)
        finite = [x for x in means.values() if not math.isnan(x)]
        own = means[row['variant']]
        bad = math.isnan(own) or (own - min(finite)) / min(finite) > 0.01
        found[row['run']] = None if len(means) == 1 and not math.isnan(own) else int(bad)
    return found


def sensitivities(rows):
    """{(size, tied, name): (lrs, n1, n, seeds, lowest n1, highest n1, behind, rates)} of these runs, by seeds."""
    marked, found, left_out = marks(rows), {}, set()
    for key in {(x['size'], x['weight_tying'], x['variant']) for x in rows}:
        seeds = {}
        for x in rows:
            if (x['size'], x['weight_tying'], x['variant']) == key:
                seeds.setdefault(x['seed'], {})[x['lr']] = x
        most = max((sorted(seeds[s]) for s in sorted(seeds)), key=len)
        used = [s for s in sorted(seeds) if sorted(seeds[s]) == most and len(most) > 1]
        left_out |= {(*key, s) for s in seeds if s not in used}
        if used:
            sums = []
            for s in used:
                losses = [min(10.8, 10.8 if math.isnan(x['test_loss']) else x['test_loss']) for x in seeds[s].values()]
                learned = min(losses) < 10.8 - 0.1
                sums.append(sum(x - min(losses) for x in losses) if learned else math.nan)
            n, bad = len(most), [marked[x['run']] for s in used for x in seeds[s].values()]
            n1 = [x / (n - 1) for x in sums]
            bad = [x for x in bad if x is not None]
            lowest = n1 if all(x == x for x in n1) else []
            found[key] = (sum(sums) / len(sums) / n, sum(n1) / len(n1), n, len(used), min(lowest, default=math.nan),
                          max(lowest, default=math.nan), max(bad, default=math.nan), ' '.join(f'{x:g}' for x in most))
    return found, left_out


def cells_of_lrs(found, tied):
    """The cells of an LRS table: {(size, name): text}, of `sensitivities`; who is bold."""
    found = {(size, name): x for (size, t, name), x in found.items() if t == tied}
    if max((x[2] for x in found.values()), default=0) < 3:
        return {}
    rates = [x[7] for x in found.values() if x[2] == max(y[2] for y in found.values())]
    usual = max(sorted(set(rates)), key=rates.count)
    cells = {}
    for (size, name), (_, n1, n, seeds, low, high, bad, own_rates) in found.items():
        rivals = {k: x for k, x in found.items() if k[0] == size and x[7] == usual and not math.isnan(x[1])}
        best = [x for x in rivals.values() if round(x[1], 3) == min(round(y[1], 3) for y in rivals.values())]
        apart = all(x[4] > max(y[5] for y in best) for x in rivals.values() if x not in best)
        text = f'{n1:.3f}' + f' ({n} lr)' * (own_rates != usual)
        text = f'<u>{text}</u>' if bad == 0 else text
        text = f'<b>{text}</b>' if (size, name) in rivals and rivals[size, name] in best and apart else text
        text += f' [{low:.3f}, {high:.3f}]' if seeds > 1 else ''
        cells[size, name] = '-' if math.isnan(n1) else text
    return cells


def tables_in(path):
    """{title: rows, each {column: text}} of a tables.md."""
    found = {}
    for part in path.read_text().split('### ')[1:]:
        title, _, head, _, *lines = part.split('\n')
        split = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')]
        names = [name.strip() for name in head.strip('|').split('|')]
        found[title] = [dict(zip(names, cells, strict=True)) for cells in split]
    return found


def fork(monkeypatch):
    """This code with a fork's flag."""
    monkeypatch.setattr(analyze, 'FLAGS', {**analyze.FLAGS, 'dropout': 0.0})
    monkeypatch.setattr(analyze, 'IN_NAMES', [*analyze.IN_NAMES, 'dropout'])


@pytest.mark.parametrize('turn', range(3))
def test_a_sweep_by_hand(turn, tmp_path, monkeypatch):
    """Every cell of lrs.csv and of the tables, and all names, of a made-up sweep."""
    seed = int.from_bytes(os.urandom(4))
    print(f'seed {seed}')
    fork(monkeypatch)
    monkeypatch.setattr(report, 'draw_figures', lambda *_: [])
    rng = np.random.RandomState(seed)
    rows = made_up(rng)
    csv = written(tmp_path / 'r.csv', [{**row, 'test_loss': str(row['test_loss'])} for row in rows])
    analyze.main([f'--results={csv}', f'--out={tmp_path}'])
    for row in rows:
        row['parts'] = parts_of_name(row, rows)
        row['variant'] = ''.join(row['parts'])
    key = ('size', 'weight_tying')
    usual = [x for x in rows if not x['parts'][1]]
    default = [x for x in rows if not x['parts'][1] or not any(
        all(y[k] == x[k] for k in (*key, 'method')) and y['parts'][2:] == x['parts'][2:] for y in usual)]
    several = [x for x in rows if len({y['parts'][1] for y in rows if all(
        y[k] == x[k] for k in ('weight_tying', 'method')) and y['parts'][2:] == x['parts'][2:]}) > 1]
    tables, page = tables_in(tmp_path / 'tables.md'), (tmp_path / 'report.html').read_text()

    seen = pd.read_csv(tmp_path / 'lrs.csv').set_index(['table', 'size', 'weight_tying', 'variant'])
    n_cells = 0
    for table, part in (('methods', default), ('λ', several)):
        found, left_out = sensitivities(part)
        own = seen.loc[table] if table in seen.index.get_level_values(0) else seen[:0]
        assert {*own.index} == {*found}
        for where, (lrs, n1, n, seeds, low, high, bad, rates) in found.items():
            got = own.loc[where]
            assert [got.lrs, got.lrs_n1, got.n_lrs, got.seeds, got.lrs_n1_lowest, got.lrs_n1_highest, got.behind] == (
                pytest.approx([lrs, n1, n, seeds, low, high, bad], abs=1e-9, nan_ok=True)), where
            assert got.rates == rates and math.isnan(got.published)
        for size, tied, name, s in left_out:
            assert f'not in LRS: {name} {size}, {report.TYING[tied]}, seed {s},' in page
        for tied, word in report.TYING.items():
            title = f'Learning rate sensitivity (LRS), {word}'
            if table == 'methods':
                groups = {title: {k: x for k, x in found.items() if k[1] == tied}}
            else:
                groups = {}
                for where, x in found.items():
                    of = next(y for y in several if y['variant'] == where[2])
                    plain = of['parts'][0] + of['parts'][2] + of['parts'][3]
                    lam = number(METHODS[of['method']] if of['lam'] == '' else of['lam'])
                    if where[1] == tied:
                        groups.setdefault(f'{title}, of {plain} for several λ', {})[(*where[:2], lam)] = x
            for name, group in groups.items():
                cells = cells_of_lrs(group, tied)
                assert bool(cells) == (name in tables), name
                got = {(row['N'], column): text for row in tables.get(name, []) for column, text in row.items()
                       if column != 'N'}
                n_cells += len(cells)
                columns = {column for _, column in cells}
                sizes = {size for size, _ in cells}
                assert got == {k: cells.get(k, '-') for k in itertools.product(sizes, columns)}, name

    bad = marks(default)
    order = sorted(rows, key=lambda x: (x['weight_tying'], SIZES.index(x['size']), [*report.NAMES].index(x['method'])
                   if x['method'] in report.NAMES else 99 if x['method'] == OWN else -1))
    got = tables['All runs']
    expected = {(x['variant'], x['size'], str(x['weight_tying']), f'{x["lr"]:g}', str(x['seed'])): (
        '' if math.isnan(x['test_loss']) else f'{x["test_loss"]:.4f}',
        '' if bad.get(x['run']) is None else str(bad[x['run']]), f'{x["my_stat"]:.4g}') for x in rows}
    assert len(order) == len(got) == len(expected)
    for line in got:
        where = tuple(line[k] for k in ('variant', 'size', 'weight_tying', 'lr', 'seed'))
        assert (line['test_loss'], line['behind'], line['my_stat']) == expected[where]

    differences = {}  # to the baseline of the same seed
    for x in rows:
        for y in rows:
            if x['method'] != 'baseline' == y['method'] and x['parts'][2:] == y['parts'][2:] and all(
                    x[k] == y[k] for k in (*key, 'lr', 'seed')):
                gap = x['test_loss'] - y['test_loss']
                where = (x['size'], report.TYING[x['weight_tying']], f'{x["lr"]:g}', x['variant'])
                differences.setdefault(where, []).extend([] if math.isnan(gap) else [gap])
    for where, gaps in differences.items():
        (line,) = [line for line in tables['Test loss minus that of the baseline of the same seed']
                   if (line['N'], line['tying'], line['η']) == where[:3]] or [{}]
        text = '' if len(gaps) < 2 else (f'{sum(gaps) / len(gaps):+.3f} [{min(gaps):+.3f}, {max(gaps):+.3f}]')
        assert line.get(where[3], '-').replace('-0.000', '+0.000') == (text.replace('-0.000', '+0.000') or '-')
    assert n_cells > 10


# -------- what is drawn, read back from the figures
PAPERS = {'baseline': '#ff2c00', 'z-loss': '#0c5da5', 'soft-capping': '#9e9e9e', 'μ-loss': '#ff9500',
          'μ-centering': '#00b945'}
MARKERS = {'16M': ('s', (0, (1, 4))), '57M': ('o', '--'), '221M': ('X', '-')}
LOG = pd.DataFrame({'step': 3 * np.arange(0, 41)}).assign(
    **{name: lambda x, i=i: 2 + np.sin(x.step + i) for i, name in enumerate(
        ['loss', 'mu_norm', 'logit_mean', 'logit_mean_spread', 'logit_std', 'logit_absmax'])})


@pytest.fixture
def figures_of(monkeypatch):
    """figures_of(main, arguments) -> the figures that it saves, by name. Their margins are white."""
    def call(main, *arguments):
        figures, save_figure = {}, plt.Figure.savefig

        def savefig(figure, path, **more):
            save_figure(figure, path, **more)
            figures[path.stem] = figure
            picture = plt.imread(path)  # (height, width, 4)
            for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
                assert (edge == 1).all(), f'{path.stem} is cut off'
        with monkeypatch.context() as patch, plt.rc_context({'figure.dpi': 40}):  # which is faster
            patch.setattr(plt.Figure, 'savefig', savefig)
            main(*arguments)
        return figures
    return call


def means(rows, y):
    """{(size, variant): {lr: (mean, lowest, highest, whether one is behind)}} of these runs."""
    found = {}
    for x in rows:
        if not math.isnan(x[y]):
            found.setdefault((x['size'], x['variant']), {}).setdefault(x['lr'], []).append((x[y], x['mark']))
    return {key: {lr: (np.mean([v for v, _ in found[key][lr]]), min(found[key][lr])[0], max(found[key][lr])[0],
                       any(m == 1 for _, m in found[key][lr])) for lr in sorted(found[key])} for key in found}


def assert_drawn(ax, rows, y, colors, one_look=False):
    """Each line, point and bar on an axis is that of a size and variant, and none is missing."""
    expected = means(rows, y)
    lines = [line for line in ax.lines if len({*line.get_ydata()}) > 1 or line.get_linestyle() != ':']
    points = [c for c in ax.collections if not isinstance(c, LineCollection)]
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert len(lines) == len(points) == len(bars) == len(expected)
    for line, point, bar in zip(lines, points, bars, strict=True):
        color = to_hex(line.get_color())
        (key,) = [k for k in expected if colors[k[1]] == color and [*expected[k]] == [*line.get_xdata()]
                  and np.allclose([x[0] for x in expected[k].values()], line.get_ydata())]
        of_key = [*expected.pop(key).values()]
        marker, dash = ('o', '-') if one_look else MARKERS[key[0]]
        twin = Line2D([], [], linestyle=dash, linewidth=line.get_linewidth())
        assert line._unscaled_dash_pattern == twin._unscaled_dash_pattern
        style = MarkerStyle(marker)
        assert np.array_equal(point.get_paths()[0].vertices, style.get_path().transformed(style.get_transform()).vertices)
        faces = [to_hex(face) for face in np.resize(point.get_facecolors(), (len(of_key), 4))]
        assert faces == [color if x[3] else '#ffffff' for x in of_key]
        assert np.allclose([part[:, 1] for part in bar.get_segments()], [x[1:3] for x in of_key])
    assert not expected


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('turn', range(2))
def test_figures(turn, tmp_path, figures_of, monkeypatch):
    """Every line of every figure of a made-up sweep: its color, dash, marker, label and numbers."""
    seed = int.from_bytes(os.urandom(4))
    print(f'seed {seed}')
    rng = np.random.RandomState(seed)
    fork(monkeypatch)
    rows = [x for x in made_up(rng) if x['seed'] < 3 and x['lr'] != 0.03]
    for row in rows:
        row['parts'] = parts_of_name(row, rows)
        row['variant'] = ''.join(row['parts'])
    usual = {(x['size'], x['weight_tying'], x['method'], *x['parts'][2:]) for x in rows if not x['parts'][1]}
    default = [x for x in rows if not x['parts'][1]
               or (x['size'], x['weight_tying'], x['method'], *x['parts'][2:]) not in usual]
    marked = marks(default)
    for row in default:
        row |= {'mark': marked[row['run']], 'capped': min(x for x in (row['test_loss'], 10.8) if x == x)}
    keep = ['run', 'test_loss', *USUAL, *QUANTITIES, 'method', 'size', 'weight_tying', 'lr', 'seed', 'steps', 'lam',
            'init_loss', 'n_params']
    csv = written(tmp_path / 'results.csv', [{**{k: x[k] for k in keep}, 'test_loss': str(x['test_loss'])} for x in rows])
    logged = [x for x in rows if rng.rand() < 0.5 and x['lr'] == 0.1]
    factor = {x['run']: 1 + rng.rand() for x in logged}
    written(tmp_path / 'curves.csv', pd.concat(
        LOG.set_index('step').mul(factor[x['run']]).reset_index().assign(run=x['run']) for x in logged))
    (tmp_path / 'out/figures').mkdir(parents=True)
    for stale in ('loss_of_others', 'training_of_others', 'of_an_appendix'):
        (tmp_path / f'out/figures/{stale}.png').touch()
    figures = figures_of(analyze.main, [f'--results={csv}', f'--out={tmp_path}/out'])
    assert {path.stem for path in tmp_path.glob('out/figures/*')} == {*figures, 'of_an_appendix'}
    page = (tmp_path / 'out/report.html').read_text()
    assert page.count('src="data:') == len(figures) and not re.findall(r'(?:src|href)="(?!data:|#)', page)

    colors = {}  # of each variant, in all legends
    for figure in figures.values():
        for legend in figure.legends:
            for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True):
                color = to_hex(line.get_color())
                assert colors.setdefault(text.get_text(), color) == color
                if text.get_text() in SIZES:
                    assert line.get_marker() == MARKERS[text.get_text()][0]
    assert all(colors[name] == color for name, color in PAPERS.items() if name in colors)
    for text, face in (('over 1% above the best method', 'black'), ('within 1% of it', 'white')):
        for legend in figures['loss_untied'].legends:
            faces = [line.get_markerfacecolor() for t, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
                     if t.get_text() == text]
            assert faces in ([face], [])
    variants = {x['variant'] for x in rows}
    own = [color for name, color in colors.items() if name in variants]
    assert len({*own}) == len(own)

    for tied, word in report.TYING.items():
        part = [x for x in default if x['weight_tying'] == tied]
        finite = [x for x in part if x['test_loss'] == x['test_loss']]
        assert_drawn(figures[f'loss_{word}'].axes[0], part, 'capped', colors)
        for ax in figures[f'loss_{word}'].axes[1:]:
            assert_drawn(ax, [x for x in part if x['size'] == ax.get_title() and x['lr'] > 0.05], 'capped', colors)
        panels = {ax.get_ylabel(): ax for name in ('statistics', 'fact_3') for ax in figures[f'{name}_{word}'].axes}
        for name in QUANTITIES:
            of = finite if QUANTITIES.index(name) < 4 else [x for x in finite if x['method'] == 'baseline']
            assert_drawn(panels[report.LABELS[name]], of, name, colors)
        first = min((x['size'] for x in part), key=SIZES.index)
        three = [x for x in part if x['size'] == first and x['variant'] in ('baseline', 'μ-loss', 'μ-centering')]
        left, right = figures[f'summary_{word}'].axes
        assert_drawn(left, three, 'capped', colors, one_look=True)
        assert_drawn(right, three, 'logit_mean', colors, one_look=True)

    places = {(x['size'], x['weight_tying']) for x in logged}
    assert {name for name in figures if name.startswith('training')} == {
        f'training_{size}_{report.TYING[tied]}_lr0.1' for size, tied in places}
    for size, tied in places:
        here = [x for x in logged if (x['size'], x['weight_tying']) == (size, tied)]
        rounded = any(x['parts'][:3] == y['parts'][:3] and x['seed'] == y['seed'] and x['parts'] != y['parts']
                      for x in here for y in here)
        name = f'{size}_{report.TYING[tied]}_lr0.1'
        assert rounded == (f'rounding_{name}' in figures)
        for figure, n in ((figures[f'training_{name}'], 6), (figures.get(f'rounding_{name}'), 2)):
            for ax in figure.axes if figure else ():
                (y,) = [y for y in LOG if report.LABELS.get(y) == ax.get_title()]
                assert len(figure.axes) == n and len(ax.lines) == len(here)
                for line, x in zip(ax.lines, sorted(here, key=lambda x: factor[x['run']]), strict=False):
                    assert line.get_xdata().tolist() == LOG.step[1:].tolist()
                for x in here:
                    assert any(line.get_label() == x['variant'] and to_hex(line.get_color()) == colors[x['variant']]
                               and np.allclose(line.get_ydata(), LOG[y][1:] * factor[x['run']]) for line in ax.lines)
