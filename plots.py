"""
Drawing, and nothing but drawing. Each function takes rows (dicts with the columns of results.csv or lrs.csv) and a path
without its ending, and leaves a PNG and a PDF there.
"""
import math
import os

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

COLORS = {'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
          'mu_loss': '#FF9500', 'mu_centering': '#00B945'}  # the paper's
LABELS = {'weight_decay': 'weight decay', 'z_loss': 'z-loss', 'soft_capping': 'soft-capping', 'mu_loss': r'$\mu$-loss',
          'mu_centering': r'$\mu$-centering'}
STYLES = {'16M': ('o', '-'), '29M': ('s', '--'), '57M': ('^', '-.'), '109M': ('D', ':'), '221M': ('v', (0, (5, 1))), 'tiny': ('o', '-')}

plt.rcParams.update({'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
                     'axes.spines.top': False, 'axes.spines.right': False, 'figure.constrained_layout.use': True})


def variant(row):
    """What one colour stands for: the method, and its λ where that is not the paper's 1e-4."""
    return row['method'], row['lam'] if row['lam'] not in (None, 1e-4) else None


def color(method, lam):
    """The paper's colour; λ other than 1e-4 in lighter (smaller) or darker (larger) shades of it."""
    base = to_rgb(COLORS.get(method, '#444444'))
    if lam is None:
        return base
    shade = max(-0.6, min(0.6, 0.12 * (math.log10(lam) + 4))) if lam > 0 else -0.6
    return tuple(c * (1 - shade) if shade > 0 else c + (1 - c) * -shade for c in base)


def label(method, lam):
    """What a legend calls a variant."""
    return LABELS.get(method, method) + ('' if lam is None else rf' $\lambda$={lam:g}')


def variants(rows):
    """The variants in `rows`, in the paper's order."""
    order = list(COLORS)
    return sorted({variant(r) for r in rows}, key=lambda v: (order.index(v[0]) if v[0] in order else 99, v[0], v[1] or 1e-4))


def readable(rows):
    """All rows, or those with the paper's λ alone where there are more than eight variants."""
    return rows if len(variants(rows)) <= 8 else [r for r in rows if r['lam'] in (None, 1e-4)]


def curves(ax, rows, value):
    """One line a (variant, size) of value(row) against the learning rate, seeds averaged; filled markers: a run diverged."""
    for size in dict.fromkeys(r['size'] for r in rows):
        marker, style = STYLES.get(size, ('o', '-'))
        for method, lam in variants(rows):
            points = {}
            for r in rows:
                if r['size'] == size and variant(r) == (method, lam) and value(r) is not None and math.isfinite(value(r)):
                    points.setdefault(r['lr'], []).append(r)
            lrs = sorted(points)
            ys = [sum(map(value, points[lr])) / len(points[lr]) for lr in lrs]
            ax.plot(lrs, ys, linestyle=style, color=color(method, lam), linewidth=1.2, zorder=2)
            for lr, y in zip(lrs, ys):
                filled = any(r['diverged'] for r in points[lr])
                ax.plot(lr, y, marker, color=color(method, lam), markerfacecolor=color(method, lam) if filled else 'white', zorder=3)
    ax.set_xscale('log')
    ax.set_xlabel(r'learning rate $\eta$')


def legend(figure, rows):
    """One legend below the figure: a colour a method, a marker and line style a size."""
    handles = [Line2D([], [], color=color(*v), label=label(*v)) for v in variants(rows)]
    sizes = list(dict.fromkeys(r['size'] for r in rows))
    if len(sizes) > 1:
        handles += [Line2D([], [], color='black', marker=STYLES.get(s, ('o', '-'))[0], linestyle=STYLES.get(s, ('o', '-'))[1],
                           markerfacecolor='white', label=s) for s in sizes]
    figure.legend(handles=handles, loc='outside lower center', ncols=max(2, int(figure.get_figwidth() / 1.35)))


def save(figure, path):
    """Writes path.png and path.pdf, each whole or not at all, and closes the figure."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    for ending in ('png', 'pdf'):
        temporary = f'{path}.tmp.{ending}'
        figure.savefig(temporary, dpi=160)
        os.replace(temporary, f'{path}.{ending}')
    plt.close(figure)


def capped_loss(row):
    """What LRS counts: the test loss, but no more than the loss at initialisation."""
    L, L0 = row['test_loss'], row['init_loss'] if row['init_loss'] is not None else math.inf
    return L0 if not math.isfinite(L) else min(L, L0)


def loss_against_lr(rows, path):
    """The paper's main figure: all sizes together, then the two largest learning rates of one size a panel."""
    rows = readable(rows)
    sizes = list(dict.fromkeys(r['size'] for r in rows))
    largest = sorted({r['lr'] for r in rows})[-2:]
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(3.2 + 1.9 * len(sizes), 3.4), squeeze=False,
                                width_ratios=[1.7] + [1] * len(sizes))
    curves(axes[0, 0], rows, capped_loss)
    axes[0, 0].set(ylabel=r'test loss $\mathcal{L}$', title='all' if len(sizes) > 1 else sizes[0])
    for ax, size in zip(axes[0, 1:], sizes):
        part = [r for r in rows if r['size'] == size and r['lr'] in largest]
        curves(ax, part, capped_loss)
        ax.set(title=f'{size}, largest' if len(sizes) == 1 else size, xticks=largest, xticklabels=[f'{lr:g}' for lr in largest])
        ax.minorticks_off()
        ax.margins(x=0.2)
    legend(figure, rows)
    save(figure, path)


def statistics_against_lr(rows, path):
    """Four panels against the learning rate: norm of the mean embedding, logit mean, standard deviation, largest |logit|."""
    rows = readable(rows)
    panels = [('mu_norm', r'$\|\mu\|$', 'symlog'), ('logit_mean', r'logit mean $\overline{l}$', 'symlog'),
              ('logit_std', r'logit standard deviation $\sigma_l$', 'log'), ('logit_absmax', r'$\max_i |l_i|$', 'log')]
    panels = [p for p in panels if any(r[p[0]] is not None for r in rows)]
    figure, axes = plt.subplots(-(-len(panels) // 2), min(2, len(panels)), figsize=(7.2, 3 * -(-len(panels) // 2) + 0.5), squeeze=False)
    for ax, (column, name, scale) in zip(axes.flat, panels):
        ax.set_yscale(scale, **({'linthresh': 1} if scale == 'symlog' else {}))
        curves(ax, rows, lambda r: r[column])
        ax.margins(y=0.1)
        ax.set_ylabel(name)
        if column == 'mu_norm':
            ax.set_ylim(bottom=-0.1)
    for ax in list(axes.flat)[len(panels):]:
        ax.remove()
    legend(figure, rows)
    save(figure, path)


def lrs_against_n(rows, path):
    """LRS against N, log-log, from rows of lrs.csv with n_params; filled markers: a learning rate diverged."""
    rows = readable(rows)
    figure, ax = plt.subplots(figsize=(4.6, 3.6))
    for method, lam in variants(rows):
        points = sorted((r['n_params'], r['lrs'], r['diverged']) for r in rows if variant(r) == (method, lam))
        ax.plot([p[0] for p in points], [p[1] for p in points], color=color(method, lam), linewidth=1.2)
        for n, y, diverged in points:
            ax.plot(n, y, 'o', color=color(method, lam), markerfacecolor=color(method, lam) if diverged else 'white')
    sizes = {r['n_params']: r['size'] for r in rows}
    ax.set(xscale='log', yscale='log', xlabel='number of parameters $N$', ylabel='LRS')
    ax.set_xticks(list(sizes), list(sizes.values()))
    ax.minorticks_off()
    legend(figure, [{**r, 'size': ''} for r in rows])
    save(figure, path)
