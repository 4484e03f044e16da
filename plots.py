"""
Drawing, and nothing but drawing. Each function takes rows (dicts with the columns of results.csv, or of the csv file it
names) and a path without its ending, and leaves a PNG and a PDF there.
"""
import math
import os
import warnings

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import NullFormatter, NullLocator  # noqa: E402

from tables import capped_loss, default_lam, name, offset, readable, sizes, variant, variants  # noqa: E402

COLORS = {'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
          'mu_loss': '#FF9500', 'mu_centering': '#00B945',  # the paper's
          'max_z_loss': '#17BECF', 'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22',
          'laplace_reg': '#7F6000', 'spectrum_control': '#1A1A1A'}
STYLES = {'16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'), '221M': ('X', '-'), 'tiny': ('o', '-')}
ETA, LOSS = r'learning rate $\eta$', r'test loss $\mathcal{L}$'
SYMBOLS = {'mu_norm': r'$\|\mu\|$', 'logit_mean': r'logit mean $\bar{l}$', 'logit_std': r'logit standard deviation $\sigma_l$',
           'logit_absmax': r'$\max_i |l_i|$', 'r_emb': r'$r_{\rm emb}$', 'cos_mu_h': r'$\cos(\mu, h)$', 'r_cos': r'$r_{\rm cos}$', 'r_log': r'$r_{\rm log}$'}

plt.rcParams.update({'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
                     'axes.spines.top': False, 'axes.spines.right': False, 'figure.constrained_layout.use': True, 'pdf.fonttype': 42})


def color(method, lam=None):
    """A method's colour; λ other than its default in lighter (smaller) or darker (larger) shades; with +mu_centering half way to that."""
    base = np.array(to_rgb(COLORS.get(method.split('+')[0], '#444444')))
    if '+' in method:
        base = (base + to_rgb(COLORS['mu_centering'])) / 2
    shade = 0 if lam is None else max(-0.6, min(0.6, 0.12 * math.log10(lam / default_lam(method)))) if lam > 0 else -0.6
    return tuple(base * (1 - shade) if shade > 0 else base - (1 - base) * shade)


def style(size):
    """(marker, line style) of a size: the paper's, or for a size that it does not have one that its name decides."""
    return STYLES.get(size) or ('^v<>ph*'[sum(size.encode()) % 7], ('-', '--', '-.', ':')[sum(size.encode()) % 4])


def plain(words):
    """Text from a csv for a legend or title: matplotlib sets what stands between dollars, and leaves out what starts with _."""
    return words.replace('$', r'\$').lstrip('_') or '?'


def drawable(value):
    """Whether there is a number to draw: not None, NaN, infinite, or so large that an axis overflows."""
    return value is not None and abs(value) < 1e100


def save(figure, path):
    """Writes path.png and path.pdf, each whole or not at all, and closes the figure."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    for ending in ('png', 'pdf'):
        temporary = f'{path}.tmp.{ending}'
        with warnings.catch_warnings():  # a crowded grid of panels is still drawn, only less well spaced
            warnings.filterwarnings('ignore', 'constrained_layout not applied')
            figure.savefig(temporary, dpi=160)
        os.replace(temporary, f'{path}.{ending}')
    plt.close(figure)


def legend(figure, rows):
    """One legend below the figure: a colour a method, a marker and line style a size."""
    handles = [Line2D([], [], color=color(*v), label=plain(name(*v))) for v in variants(rows)]
    handles += size_handles(rows)
    figure.legend(handles=handles, loc='outside lower center', ncols=max(2, int(figure.get_figwidth() / 1.6)))


def plain_numbers(axis):
    """0.03 instead of 3 x 10^-2 on a log axis, and numbers between the powers of ten where it spans few of them."""
    axis.set_major_formatter('{x:g}')
    low, high = axis.get_view_interval()
    axis.set_minor_formatter('{x:.2g}' if high < 8 * low else NullFormatter())


def size_handles(rows):
    """For a legend: the marker and line style of each size, where there are several."""
    return [Line2D([], [], color='black', marker=style(s)[0], linestyle=style(s)[1], markerfacecolor='white', label=plain(s))
            for s in sizes(rows)[:12] if len(sizes(rows)) > 1]


def series(rows, value, x='lr'):
    """(size, method, λ) -> its points by x as [x, mean over the seeds, smallest, largest, whether a run diverged]; no value, no point."""
    found = {}
    for r in rows:
        y = value(r)
        if drawable(y) and drawable(r[x]):
            found.setdefault((r['size'], *variant(r)), {}).setdefault(r[x], []).append((y, bool(r['diverged'])))
    return {key: [[at, sum(y for y, _ in ys) / len(ys), min(ys)[0], max(ys)[0], any(d for _, d in ys)] for at, ys in sorted(points.items())]
            for key, points in found.items()}


def curves(ax, rows, value, x='lr'):
    """One line a (size, variant) of value(row) against x; a bar from the smallest to the largest seed; filled: a run diverged."""
    for (size, *which), points in series(rows, value, x).items():
        marker, line = style(size)
        xs, ys, low, high, diverged = map(np.array, zip(*points))
        ax.plot(xs, ys, linestyle=line, color=color(*which), linewidth=1.2, zorder=2)
        if (high > low).any():
            ax.vlines(xs, low, high, color=color(*which), linewidth=0.8, alpha=0.6)
        for filled in (False, True):
            ax.plot(xs[diverged == filled], ys[diverged == filled], marker, color=color(*which), zorder=3,
                    markerfacecolor=color(*which) if filled else 'white')
    ax.set_xscale('log')


def loss_against_lr(rows, path):
    """The paper's main figure: all sizes together, then the two largest learning rates of one size a panel, on the same axis."""
    rows = readable(rows)
    panels = sizes(rows)[-5:]
    figure, axes = plt.subplots(1, 1 + len(panels), figsize=(3.6 + 1.5 * len(panels), 3.6), squeeze=False, sharey=len(panels) > 1,
                                width_ratios=[3] + [1] * len(panels))
    curves(axes[0, 0], rows, capped_loss)
    axes[0, 0].set(xlabel=ETA, ylabel=LOSS)
    for ax, size in zip(axes[0, 1:], panels):
        largest = sorted({r['lr'] for r in rows if r['size'] == size})[-2:]
        curves(ax, [r for r in rows if r['size'] == size and r['lr'] in largest], capped_loss)
        ax.set(title=plain(size), xlabel=r'$\eta$', xticks=largest, xticklabels=[f'{lr:g}' for lr in largest])
        ax.minorticks_off()
        ax.margins(x=0.25)
    legend(figure, rows)
    save(figure, path)


def lrs_against_n(rows, path):
    """LRS against N, log-log, from rows of lrs.csv with n_params; bars: the interval over seeds; filled: a learning rate diverged."""
    rows = readable(rows)
    figure, ax = plt.subplots(figsize=(4.6, 3.6))
    draw_lrs(ax, rows)
    legend(figure, [{**r, 'size': ''} for r in rows])
    save(figure, path)


def draw_lrs(ax, rows):
    """What lrs_against_n draws, in the given axes."""
    for v in variants(rows):
        points = sorted((r for r in rows if variant(r) == v), key=lambda r: r['n_params'])
        ax.plot([r['n_params'] for r in points], [r['lrs'] for r in points], '--', color=color(*v), linewidth=1.2)
        for r in points:
            ax.plot(r['n_params'], r['lrs'], style(r['size'])[0], color=color(*v), markerfacecolor=color(*v) if r['diverged'] else 'white')
            if r['lrs_low'] is not None:
                ax.vlines(r['n_params'], r['lrs_low'], r['lrs_high'], color=color(*v), linewidth=0.8, alpha=0.6)
    ticks = {r['n_params']: r['size'] for r in rows}
    ax.set(xscale='log', yscale='log', xlabel='$N$', ylabel='LRS')
    ax.set_xticks(list(ticks), list(map(plain, ticks.values())))
    ax.xaxis.set_minor_locator(NullLocator())
    plain_numbers(ax.yaxis)


def panels_against_lr(rows, columns, path):
    """Up to four panels against the learning rate, those of `columns` that the rows have: (name of the column, y scale) each."""
    rows = readable(rows)
    columns = [c for c in columns if any(drawable(r[c[0]]) for r in rows)]
    figure, axes = plt.subplots(-(-len(columns) // 2), min(2, len(columns)), figsize=(7.2, 2.8 * -(-len(columns) // 2) + 0.6), squeeze=False)
    for ax, (column, scale) in zip(axes.flat, columns):
        scale = scale if scale != 'log' or any(drawable(r[column]) and r[column] > 0 for r in rows) else 'linear'
        ax.set_yscale(scale, **({'linthresh': 1} if scale == 'symlog' else {}))
        curves(ax, rows, lambda r: r[column])
        ax.margins(y=0.1)
        ax.set(xlabel=ETA, ylabel=SYMBOLS[column])
        if scale == 'log':
            plain_numbers(ax.yaxis)
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
    for ax in list(axes.flat)[len(columns):]:
        ax.remove()
    legend(figure, rows)
    save(figure, path)


def distributions(rows, path):
    """Box, median and extrema of the quantities of Fact 3 in rows of distributions.csv, one row a size; red: the share that meets the condition."""
    columns = [('r_emb', 'below_1', '$< 1$'), ('cos_mu_h', 'above_0', '$> 0$'), ('r_cos', 'below_1', '$< 1$'), ('r_log', 'below_1', '$< 1$')]
    figure, axes = plt.subplots(len(sizes(rows)), 4, figsize=(12, 2.1 * len(sizes(rows)) + 0.5), squeeze=False, sharex=True)
    for line, size in zip(axes, sizes(rows)):
        for ax, (quantity, share, condition) in zip(line, columns):
            part = sorted((r for r in rows if r['size'] == size and r['quantity'] == quantity and drawable(r['median'])),
                          key=lambda r: r['lr'])
            lrs = sorted({r['lr'] for r in part})
            at = [[r for r in part if r['lr'] == lr] for lr in lrs]  # several seeds: the quartiles' mean, the outermost extrema

            def mean(key):
                return [sum(r[key] for r in seeds) / len(seeds) for seeds in at]
            boxes = [{'q1': q1, 'med': median, 'q3': q3, 'whislo': min(r['min'] for r in seeds), 'whishi': max(r['max'] for r in seeds)}
                     for seeds, q1, median, q3 in zip(at, mean('q25'), mean('median'), mean('q75'))]
            extreme = max([abs(v) for box in boxes for v in (box['whislo'], box['whishi'])], default=1)
            low, high = (-1.1 * extreme, 1.1 * extreme) if quantity == 'cos_mu_h' else (0, min(4, max(1.3, 1.1 * extreme)))
            ax.set_xscale('log')
            ax.bxp(boxes, positions=lrs, widths=[0.35 * lr for lr in lrs], showfliers=False, patch_artist=True, manage_ticks=False,
                   boxprops={'facecolor': '0.75', 'linewidth': 0.5}, medianprops={'color': 'black'})
            ax.axhline(0 if quantity == 'cos_mu_h' else 1, color=COLORS['baseline'], linewidth=0.8, linestyle=':')
            ax.set_ylim(low, high)
            ax.set_ylabel(SYMBOLS[quantity])
            ax.set_title(plain(size))
            right = ax.twinx()
            right.grid(False)
            right.plot(lrs, [100 * v for v in mean(share)], '--', color=COLORS['baseline'], linewidth=1)
            for lr, y, seeds in zip(lrs, mean(share), at):
                right.plot(lr, 100 * y, 'o', color=COLORS['baseline'], markerfacecolor=COLORS['baseline'] if any(r['diverged'] for r in seeds) else 'white')
            right.set_ylim(0, 100)
            right.spines['right'].set_visible(True)
            right.set_ylabel(f'% {condition}', color=COLORS['baseline'])
            right.tick_params(colors=COLORS['baseline'])
    for ax in axes[-1]:
        ax.set_xlabel(ETA)
    save(figure, path)


def sensitivity(rows, lrs_rows, path):
    """Loss against learning rate and, where there is one, LRS against N, for each λ; one column a method. `lrs_rows` of lrs.csv."""
    methods = [m for m in dict.fromkeys(v[0] for v in variants(rows)) if len({r['lam'] for r in rows if r['method'] == m}) > 1]
    lines = 2 if len({r['n_params'] for r in lrs_rows if r['method'] in methods}) > 1 else 1
    figure, axes = plt.subplots(lines, len(methods), figsize=(4.2 * len(methods), 3.2 * lines), squeeze=False, sharey='row')
    for column, method in zip(axes.T, methods):
        part = [r for r in rows if r['method'] == method]
        curves(column[0], part, capped_loss)
        column[0].set(title=plain(name(method)), xlabel=ETA, ylabel=LOSS)
        lams = [Line2D([], [], color=color(*v), label=rf'$\lambda$ = {default_lam(method) if v[1] is None else v[1]:g}') for v in variants(part)]
        column[0].legend(handles=lams + size_handles(part), fontsize=8)
        if lines == 2:
            draw_lrs(column[1], [r for r in lrs_rows if r['method'] == method])
    save(figure, path)


def training_curves(rows, path):
    """Loss, ‖μ‖, logit mean and largest |logit| against the step, from rows of curves.csv; one line a learning rate, one column a method."""
    rows, which = readable(rows), variants(readable(rows))
    lines = [('loss', r'training loss $\mathcal{L}$', 'linear'), ('mu_norm', SYMBOLS['mu_norm'], 'symlog'),
             ('logit_mean', SYMBOLS['logit_mean'], 'symlog'), ('logit_absmax', SYMBOLS['logit_absmax'], 'log')]
    runs = {}
    for r in rows:
        if r['loss'] is not None:
            runs.setdefault((variant(r), r['lr'], r['seed']), []).append(r)
    lrs = sorted({lr for _, lr, _ in runs})
    shade = dict(zip(lrs, plt.get_cmap('viridis_r')(np.linspace(0.05, 0.95, len(lrs)))))
    figure, axes = plt.subplots(4, len(which), figsize=(max(3.5, 1.75 * len(which)), 7.2), squeeze=False, sharex=True, sharey='row')
    for (v, lr, _), run in sorted(runs.items(), key=lambda item: item[0][1]):
        for ax, (column, _, _) in zip(axes[:, which.index(v)], lines):
            points = [(r['step'], r[column]) for r in run if drawable(r[column])]
            ax.plot(*zip(*points) if points else ([], []), color=shade[lr], linewidth=0.8)
    for line, (_, label, scale) in zip(axes, lines):
        line[0].set_ylabel(label)
        line[0].set_yscale(scale, **({'linthresh': 1} if scale == 'symlog' else {}))
        if scale == 'log':
            plain_numbers(line[0].yaxis)
    losses = [r['loss'] for r in rows if drawable(r['loss'])]
    if losses:
        axes[0, 0].set_ylim(top=max(np.percentile(losses, 97), min(losses) + 1))  # the first steps would flatten all else
    for ax, v in zip(axes[0], which):
        ax.set_title(plain(name(*v)), fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel('step')
    figure.legend(handles=[Line2D([], [], color=shade[lr], label=rf'$\eta$ = {lr:g}') for lr in lrs], loc='outside lower center', ncols=max(2, len(which)))
    save(figure, path)


def drift(rows, curve_rows, path):
    """
    ‖μ‖, |logit mean| and the rms of a position's mean logit against the sum of the learning rates so far: each run's end a
    point, its way there (curves.csv) a line.
    """
    rows, curve_rows = ([{**r, 'offset': offset(r)} for r in readable(part)] for part in (rows, curve_rows))
    columns = [c for c in ('mu_norm', 'logit_mean', 'offset') if any(drawable(r[c]) for r in rows)]
    figure, axes = plt.subplots(1, len(columns), figsize=(3.7 * len(columns), 3.6), squeeze=False)
    runs, ends = {}, {}
    for r in curve_rows:
        runs.setdefault((variant(r), r['size'], r['lr'], r['seed']), []).append(r)
    for r in rows:
        ends.setdefault((variant(r), r['size'], bool(r['diverged'])), []).append(r)
    for ax, column in zip(axes[0], columns):
        def points(part):
            found = [(r['lr_sum'], abs(r[column])) for r in part if r['lr_sum'] and drawable(r[column])]
            return zip(*found) if found else ([], [])
        for (v, *_), run in runs.items():
            ax.plot(*points(run), color=color(*v), linewidth=0.5, alpha=0.5)
        for (v, size, diverged), part in ends.items():
            ax.plot(*points(part), style(size)[0], color=color(*v), markerfacecolor=color(*v) if diverged else 'white')
        ax.set_yscale('symlog', linthresh=0.1)
        ax.set_ylim(bottom=-0.01)
        ax.set(xscale='log', xlim=(min(r['lr_sum'] for r in rows if r['lr_sum']) / 30, None), xlabel=r'sum of learning rates $\sum_t \eta_t$',
               ylabel={'mu_norm': SYMBOLS['mu_norm'], 'logit_mean': r'|logit mean| $|\bar{l}|$', 'offset': 'rms mean logit of a position'}[column])
    legend(figure, rows)
    save(figure, path)


def rescue(rows, path):
    """‖μ‖ and logit mean of runs that went on from another's weights (--init_from), rows of curves.csv; black: that other run before."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.6))
    runs = {}
    for r in rows:
        runs.setdefault((r['part'] == 'before', variant(r), r['lr'], r['seed']), []).append(r)
    for ax, column in zip(axes, ('mu_norm', 'logit_mean')):
        for (before, v, *_), run in runs.items():
            points = [(r['step'], r[column]) for r in run if drawable(r[column])]
            ax.plot(*zip(*points) if points else ([], []), color='black' if before else color(*v), linewidth=1)
        ax.axvline(min(r['step'] for r in rows if r['part'] == 'rescue'), color='black', linewidth=0.8, linestyle=':')
        ax.set_yscale('symlog', linthresh=0.1)
        ax.set(xlabel='step', ylabel=SYMBOLS[column], **({'ylim': (-0.01, None)} if column == 'mu_norm' else {}))
    legend(figure, [{**r, 'size': ''} for r in rows if r['part'] == 'rescue'])
    save(figure, path)


# ----------------------------------------------------------------------------------------------------------------------
# the theory, from formulas


def norm_preserving_projection(X, mu, h):
    """X (n, H) -> (n, 3): x1, x2 in the plane of μ and h, and the norm of the rest, which keeps norms and products with μ and h (Fig. 1)."""
    Q, R = np.linalg.qr(np.stack((mu, h), axis=1))
    Q *= np.sign(np.diag(R))  # so that x1 points along μ
    return np.column_stack((X @ Q, np.linalg.norm(X - X @ Q @ Q.T, axis=1)))


def centering_in_three_dimensions(path, H=1024, V=2000):
    """Embeddings (V, H) that are isotropic around a shifted mean, and h, before and after μ-centering (Fig. 1)."""
    rng = np.random.RandomState(0)
    mu, h = np.zeros(H), np.zeros(H)
    mu[0], h[:2] = 0.25, (0.3, 0.15)
    E = mu + rng.randn(V, H) / np.sqrt(H)  # around μ their length is about 1
    figure = plt.figure(figsize=(8.5, 4.2))
    for i, (points, title) in enumerate(((E, r'before: $e_i$'), (E - E.mean(axis=0), r'after $\mu$-centering: $e_i^\star = e_i - \mu$'))):
        ax = figure.add_subplot(1, 2, i + 1, projection='3d')
        ax.scatter(*norm_preserving_projection(points, mu, h).T, s=2, color=COLORS['baseline'], alpha=0.4)
        for vector, label in (((mu, r'$\mu$'),) if i == 0 else ()) + ((h, '$h$'),):
            x1, x2, _ = norm_preserving_projection(vector[None], mu, h)[0]
            ax.quiver(0, 0, 0, x1, x2, 0, color='black', arrow_length_ratio=0.08, linewidth=1.5)
            ax.text(1.08 * x1, 1.08 * x2, 0, label, fontsize=12)
        cosine = points @ h / np.linalg.norm(points, axis=1) / np.linalg.norm(h)
        ax.set(title=f'{title}\nmean of cos = {cosine.mean():.2f}, largest |cos| = {abs(cosine).max():.2f}', xlabel='$x_1$', ylabel='$x_2$',
               zlabel='$x_3^{(3)}$', xlim=(-0.1, 0.4), ylim=(-0.2, 0.2), zlim=(0, 1.2))
        ax.locator_params(nbins=5)
        ax.view_init(elev=18, azim=-62)
        ax.set_box_aspect(None, zoom=0.85)
    save(figure, path)


def zloss_of_one_logit(path):
    """z-loss without its λ, log²(exp(l_i) + S), against one logit for three S, the sum over the other logits (Eq. 16, Fig. 6)."""
    l = np.linspace(-6, 6, 500)
    figure, ax = plt.subplots(figsize=(4.6, 3.4))
    for S, line in ((0, '-'), (1, '--'), (10, ':')):
        ax.plot(l, np.logaddexp(l, np.log(S) if S else -np.inf) ** 2, line, color=COLORS['z_loss'], label=f'$S = {S}$')
    ax.set(xlabel='$l_i$', ylabel=r'$\mathcal{L}_z / \lambda$')
    ax.legend()
    save(figure, path)


def zloss_of_two_logits(path):
    """Z and z-loss without its λ over two logits; black: the optimum, Z = 1 (Fig. 7)."""
    l1, l2 = np.meshgrid(np.linspace(-4, 2, 121), np.linspace(-4, 2, 121))
    Z = np.exp(l1) + np.exp(l2)
    best = np.linspace(-4, np.log1p(-np.exp(-4)), 200)
    figure = plt.figure(figsize=(8.5, 4))
    for i, (value, optimum, label) in enumerate(((Z, 1, '$Z$'), (np.log(Z) ** 2, 0, r'$\mathcal{L}_z / \lambda$'))):
        ax = figure.add_subplot(1, 2, i + 1, projection='3d', computed_zorder=False)
        ax.plot_surface(l1, l2, value, cmap='viridis', alpha=0.85, linewidth=0)
        ax.plot(best, np.log1p(-np.exp(best)), optimum, color='black', linewidth=2, zorder=5)
        ax.set(xlabel='$l_1$', ylabel='$l_2$', title=label)
        ax.view_init(elev=28, azim=-120)
    save(figure, path)


def drift_of_mu(steps=200, V=200, H=16, N=64):
    """
    A language modeling head alone, in float64: ‖μ_t - μ_0‖ after each step with SGD, Adam and Coupled Adam (whose second moment
    is averaged over the vocabulary). The gradients of the logits sum to 0 over the vocabulary, so those of the e_i do too.
    """
    moved = {}
    for optimizer in ('SGD', 'Adam', 'Coupled Adam'):
        rng = np.random.RandomState(0)
        E, m, v, start = rng.randn(V, H) / np.sqrt(H), 0, 0, None
        frequency = 1 / np.arange(1, V + 1)  # of the tokens: Zipf's law, which makes second moments differ
        moved[optimizer], start = [], E.mean(axis=0)
        for t in range(1, steps + 1):
            h, targets = rng.randn(N, H) + 1, rng.choice(V, N, p=frequency / frequency.sum())
            p = np.exp(h @ E.T - (h @ E.T).max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            g = (p - np.eye(V)[targets]).T @ h / N
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            second = {'SGD': 1, 'Adam': v / (1 - 0.95**t), 'Coupled Adam': v.mean(axis=0) / (1 - 0.95**t)}[optimizer]
            E = E - 0.01 * m / (1 - 0.9**t) / (np.sqrt(second) + 1e-8)
            moved[optimizer].append(np.linalg.norm(E.mean(axis=0) - start))
    return moved


def root_cause(path):
    """How far the mean embedding moves with SGD, Adam and Coupled Adam, in a head trained by itself."""
    figure, ax = plt.subplots(figsize=(4.6, 3.4))
    for (optimizer, moved), line in zip(drift_of_mu().items(), ('--', '-', ':')):
        ax.plot(range(1, len(moved) + 1), moved, line, color=COLORS['coupled_adam' if optimizer == 'Coupled Adam' else 'baseline'], label=optimizer)
    ax.set(yscale='log', xlabel='step', ylabel=r'$\|\mu_t - \mu_0\|$', ylim=(1e-18, 10))
    ax.legend()
    save(figure, path)
