"""
Drawing, and nothing but drawing. Each function takes rows (DataFrames with the columns of results.csv and
tables.derive, or of the csv that it names) and a path without its ending, and writes a PNG and a PDF there.
"""
import math
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

import paper
from tables import WITHOUT, default_lam, method_and_lam, name, readable, variants

COLORS = {
    'baseline': '#FF2C00', 'weight_decay': '#845B97', 'z_loss': '#0C5DA5', 'soft_capping': '#9E9E9E',
    'mu_loss': '#FF9500', 'mu_centering': '#00B945',  # these are the paper's
    'max_z_loss': '#17BECF', 'norm_softmax': '#8C564B', 'coupled_adam': '#E377C2', 'cosine_reg': '#BCBD22',
    'laplace_reg': '#7F6000', 'spectrum_control': '#1A1A1A', 'zero_sum': '#5B2A86',
    'centered_head': '#00797A'}
STYLES = {'16M': ('s', (0, (1, 4))), '29M': ('d', (0, (1, 2))), '57M': ('o', '--'), '109M': ('P', '-.'),
          '221M': ('X', '-'), 'tiny': ('o', '-')}
LABELS = {
    'lr': r'learning rate $\eta$', 'capped_loss': r'test loss $\mathcal{L}$', 'step': 'step',
    'loss': r'training loss $\mathcal{L}$', 'mu_norm': r'$\|\mu\|$', 'logit_mean': r'logit mean $\bar{l}$',
    'logit_std': r'logit standard deviation $\sigma_l$', 'logit_absmax': r'$\max_i |l_i|$',
    'offset': 'rms mean logit of a position', 'lr_sum': r'sum of learning rates $\sum_t \eta_t$',
    'cos_mu_h': r'$\cos(\mu, h)$', 'r_emb': r'$r_{\rm emb}$', 'r_cos': r'$r_{\rm cos}$',
    'r_log': r'$r_{\rm log}$'}
STATISTICS = {'mu_norm': 'symlog', 'logit_mean': 'symlog', 'logit_std': 'log', 'logit_absmax': 'log'}
FACT_3 = {'r_emb': 'linear', 'cos_mu_h': 'linear', 'r_cos': 'linear', 'r_log': 'linear'}
TRAINING = {'loss': 'linear', 'mu_norm': 'symlog', 'logit_mean': 'symlog', 'logit_absmax': 'log'}
RUN = ['part', 'variant', 'size', 'lr', 'seed', 'mu_shift', 'rounded']  # tells runs of curves.csv apart

plt.switch_backend('agg')
plt.rcParams.update({
    'font.size': 9, 'axes.grid': True, 'grid.alpha': 0.25, 'legend.frameon': False, 'lines.markersize': 5,
    'axes.spines.top': False, 'axes.spines.right': False, 'figure.constrained_layout.use': True,
    'pdf.fonttype': 42})


def color(variant):
    """A method's colour, lighter below its default λ, darker above; with +mu_centering nearer to that."""
    method, lam = method_and_lam(variant)
    base = np.array(to_rgb(COLORS.get(method.split('+')[0], '#444444')))
    if '+' in method:
        base = (base + to_rgb(COLORS['mu_centering'])) / 2
    powers = 0 if lam is None else math.log10(lam / default_lam(method)) if lam > 0 else -math.inf
    shade = max(-0.6, min(0.6, 0.12 * powers))
    return tuple(base * (1 - shade) if shade > 0 else base - (1 - base) * shade)


def style(size):
    """(marker, line style) of a size: the paper's, or what its name happens to give."""
    n = sum(size.encode())
    return STYLES.get(size) or ('^v<>ph*'[n % 7], ('-', '--', '-.', ':')[n % 4])


def plain(words):
    """Words of a csv for matplotlib, which reads $ as a formula and leaves out what starts with _."""
    return words.replace('$', r'\$').lstrip('_') or '?'


def drawable(values):
    """Which numbers of a column can be drawn: not NaN, infinite, or so large that an axis overflows."""
    return values.abs() < 1e100


def save(figure, path):
    """Writes path.png and path.pdf, each whole or not at all, and closes the figure."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    for ending in ('png', 'pdf'):
        with warnings.catch_warnings():  # a crowded grid of panels is only less well spaced
            warnings.filterwarnings('ignore', 'constrained_layout not applied')
            figure.savefig(f'{path}.tmp.{ending}', dpi=160)
        os.replace(f'{path}.tmp.{ending}', f'{path}.{ending}')
        figure.set_layout_engine('none')  # what was found for the PNG is good for the PDF
    plt.close(figure)


def size_handles(rows):
    """For a legend: the marker and line style of each size, if there are several."""
    sizes = rows['size'].unique()
    return [Line2D([], [], color='black', marker=style(size)[0], linestyle=style(size)[1], label=plain(size),
                   markerfacecolor='white') for size in sizes[:12] if len(sizes) > 1]


def legend(figure, rows, sizes=True):
    """One legend below the figure: a colour for each variant, a marker and line style for each size."""
    handles = [Line2D([], [], color=color(v), label=plain(name(v))) for v in variants(rows)]
    handles += size_handles(rows) if sizes else []
    ncols = max(2, int(figure.get_figwidth() / 1.6))
    figure.legend(handles=handles, loc='outside lower center', ncols=ncols)


def set_scale(ax, scale, linthresh=1):
    """The scale of the y axis; a log axis has 0.03 instead of 3 x 10^-2."""
    ax.set_yscale(scale, **({'linthresh': linthresh} if scale == 'symlog' else {}))
    if scale == 'log':
        ax.yaxis.set_major_formatter('{x:g}')
        low, high = ax.yaxis.get_view_interval()
        ax.yaxis.set_minor_formatter('{x:.2g}' if high < 8 * low else NullFormatter())


def mark(ax, x, y, marker, color, diverged):
    """Points, filled if the run diverged."""
    ax.plot(x, y, marker, color=color, markerfacecolor=color if diverged else 'white', zorder=3)


def series(rows, column):
    """
    (size, variant) -> its points as a DataFrame with the learning rate as index: mean, low and high of
    `column` over the seeds, and whether a run diverged.
    """
    rows = rows[drawable(rows[column])].assign(diverged=rows.diverged == 1)
    points = dict(mean=(column, 'mean'), low=(column, 'min'), high=(column, 'max'),
                  diverged=('diverged', 'any'))
    groups = rows.groupby(['size', 'variant'], sort=False)
    return {key: part.groupby('lr').agg(**points) for key, part in groups}


def curves(ax, rows, column):
    """One line per size and variant against the learning rate, with bars over the seeds."""
    for (size, variant), points in series(rows, column).items():
        marker, line = style(size)
        ax.plot(points.index, points['mean'], linestyle=line, color=color(variant), linewidth=1.2, zorder=2)
        ax.vlines(points.index, points.low, points.high, color=color(variant), linewidth=0.8, alpha=0.6)
        for diverged, part in points.groupby('diverged'):
            mark(ax, part.index, part['mean'], marker, color(variant), diverged)
    ax.set_xscale('log')
    ax.set(xlabel=LABELS['lr'], ylabel=LABELS[column])


def lines(ax, rows, x, y, color_of, **more):
    """One line per run, of two columns of curves.csv, in the colour color_of(a row of it)."""
    for _, run in rows[drawable(rows[y])].groupby(RUN, dropna=False):
        ax.plot(run[x], run[y], color=color_of(run.iloc[0]), **more)


# --------------------------------------------------------------------------------------------------
# figures of runs


def loss_against_lr(rows, path):
    """
    The test loss after training, or the loss at initialisation if that is lower: flat is stable, a line that
    rises to the right is not. Left all sizes, then the two largest learning rates of each. Filled: diverged.
    """
    rows = readable(rows)
    sizes = rows['size'].unique()[-5:]
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(3.6 + 1.5 * len(sizes), 3.6), squeeze=False,
                                sharey=len(sizes) > 1, width_ratios=[3] + [1] * len(sizes))
    curves(axes[0, 0], rows, 'capped_loss')
    for ax, size in zip(axes[0, 1:], sizes, strict=True):
        part = rows[rows['size'] == size]
        largest = sorted(part.lr.unique())[-2:]
        curves(ax, part[part.lr.isin(largest)], 'capped_loss')
        ax.set(title=plain(size), xlabel=r'$\eta$', ylabel='')
        ax.set_xticks(largest, [f'{lr:g}' for lr in largest])
        ax.minorticks_off()
        ax.margins(x=0.25)
    legend(figure, rows)
    save(figure, path)


def draw_lrs(ax, rows):
    """LRS against N from rows of lrs.csv with n_params, and bars for the interval over the seeds."""
    for _, r in rows.sort_values('n_params').iterrows():
        mark(ax, r.n_params, r.lrs, style(r['size'])[0], color(r.variant), r.diverged == 1)
    for variant, points in rows.sort_values('n_params').groupby('variant'):
        ax.plot(points.n_params, points.lrs, '--', color=color(variant), linewidth=1.2)
        ax.vlines(points.n_params, points.lrs_low, points.lrs_high, color=color(variant), linewidth=0.8)
    ticks = rows.drop_duplicates('n_params')
    ax.set(xscale='log', xlabel='$N$', ylabel='LRS')
    ax.set_xticks(ticks.n_params, list(map(plain, ticks['size'])))
    ax.xaxis.set_minor_locator(NullLocator())
    set_scale(ax, 'log')


def lrs_against_n(rows, path):
    """How far the loss rises above its best over the learning rates. Lower is more stable."""
    figure, ax = plt.subplots(figsize=(4.6, 3.6))
    draw_lrs(ax, readable(rows))
    legend(figure, readable(rows), sizes=False)
    save(figure, path)


def panels_against_lr(rows, scales, path):
    """A panel for each column of `scales` (column -> y scale) that the rows have, against learning rate."""
    rows = readable(rows)
    columns = [column for column in scales if drawable(rows[column]).any()]
    n = -(-len(columns) // 2)
    figure, axes = plt.subplots(n, min(2, len(columns)), figsize=(7.2, 2.8 * n + 0.6), squeeze=False)
    if axes.size > len(columns):
        axes[-1, -1].remove()
    for ax, column in zip(axes.flat, columns, strict=False):
        curves(ax, rows, column)
        ax.margins(y=0.1)
        positive = (rows[column][drawable(rows[column])] > 0).any()
        set_scale(ax, scales[column] if positive or scales[column] != 'log' else 'linear')
        if column.startswith('r_'):
            ax.axhline(1, color='black', linewidth=0.8, linestyle=':')  # what Fact 3 is about
    legend(figure, rows)
    save(figure, path)


def statistics(rows, path):
    """Where the mean output embedding moves away from the origin, the mean logit follows."""
    panels_against_lr(rows, STATISTICS, path)


def fact_3(rows, path):
    """
    What centering would do to these models: the ratios of norms, of largest cosines and of largest logits
    after and before it, and how far the hidden state points along the mean embedding.
    """
    panels_against_lr(rows, FACT_3, path)


def distributions(rows, path):
    """
    The same quantities over the vocabulary (r_emb) or the test positions: quartiles and extrema. Red: the
    share below 1, or of cosines above 0. Filled: the run diverged.
    """
    shares = {'r_emb': 'below_1', 'cos_mu_h': 'above_0', 'r_cos': 'below_1', 'r_log': 'below_1'}
    sizes, red = rows['size'].unique(), COLORS['baseline']
    figure, axes = plt.subplots(len(sizes), 4, figsize=(12, 2.1 * len(sizes) + 0.5), squeeze=False)
    for line, size in zip(axes, sizes, strict=True):
        for ax, (quantity, share) in zip(line, shares.items(), strict=True):
            whole = drawable(rows[['min', 'q25', 'median', 'q75', 'max']]).all(axis=1)
            part = rows[(rows['size'] == size) & (rows.quantity == quantity) & whole]
            boxes = part.groupby('lr').agg(
                q1=('q25', 'mean'), med=('median', 'mean'), q3=('q75', 'mean'), whislo=('min', 'min'),
                whishi=('max', 'max'), share=(share, 'mean'), diverged=('diverged', 'max'))
            ax.bxp(boxes.to_dict('records'), positions=boxes.index, widths=0.35 * boxes.index,
                   showfliers=False, patch_artist=True, manage_ticks=False, medianprops={'color': 'black'},
                   boxprops={'facecolor': '0.75', 'linewidth': 0.5})
            extreme = 1.1 * max(abs(boxes.whislo.min()), abs(boxes.whishi.max())) if len(boxes) else 1
            limits = (-extreme, extreme) if share == 'above_0' else (0, min(4, max(1.3, extreme)))
            ax.set(title=plain(size), xscale='log', xlabel=LABELS['lr'], ylabel=LABELS[quantity], ylim=limits)
            ax.axhline(0 if share == 'above_0' else 1, color=red, linewidth=0.8, linestyle=':')
            right = ax.twinx()
            right.plot(boxes.index, 100 * boxes.share, '--', color=red, linewidth=1)
            for lr, box in boxes.iterrows():
                mark(right, lr, 100 * box.share, 'o', red, box.diverged == 1)
            right.grid(False)
            right.spines['right'].set_visible(True)
            right.set_ylim(0, 100)
            right.set_ylabel('% $> 0$' if share == 'above_0' else '% $< 1$', color=red)
            right.tick_params(colors=red)
    save(figure, path)


def histograms(models, path):
    """Over the vocabulary (r_emb) and the test positions (all others) of each model."""
    quantities = ('r_emb', 'cos_mu_h', 'r_cos', 'r_log', 'logit_mean', 'logit_std')
    figure, axes = plt.subplots(2, 3, figsize=(10, 5))
    for ax, quantity in zip(axes.flat, quantities, strict=True):
        for i, (model, values) in enumerate(models.items()):
            x = values[quantity].double().numpy() if quantity in values else np.array([])
            x = x[np.abs(x) < 1e30]
            if len(x):
                ax.hist(x, bins=100, density=True, histtype='step', color=f'C{i}', label=plain(model))
        ax.set(xlabel=LABELS[quantity], yticks=[])
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc='outside lower center', ncols=3)
    save(figure, path)


def sensitivity(rows, lrs_rows, path):
    """Loss against learning rate and LRS against model size for each λ: how much tuning it takes."""
    methods = variants(rows, 'method')
    n = 2 if lrs_rows[lrs_rows.method.isin(methods)].n_params.nunique() > 1 else 1
    figure, axes = plt.subplots(n, len(methods), figsize=(4.2 * len(methods), 3.2 * n), squeeze=False,
                                sharey='row')
    for column, method in zip(axes.T, methods, strict=True):
        part = rows[rows.method == method]
        curves(column[0], part, 'capped_loss')
        lams = [(v, default_lam(method) if v == method else method_and_lam(v)[1]) for v in variants(part)]
        handles = [Line2D([], [], color=color(v), label=rf'$\lambda$ = {lam:g}') for v, lam in lams]
        column[0].legend(handles=handles + size_handles(part), fontsize=8)
        column[0].set_title(plain(name(method)))
        if n == 2:
            draw_lrs(column[1], lrs_rows[lrs_rows.method == method])
    save(figure, path)


def training_curves(rows, path):
    """The drift as it grows, during training; one line per run, one colour per learning rate."""
    rows = readable(rows)
    which, lrs = variants(rows), sorted(rows.lr.unique())
    shade = dict(zip(lrs, plt.get_cmap('viridis_r')(np.linspace(0.05, 0.95, len(lrs))), strict=True))
    figure, axes = plt.subplots(len(TRAINING), len(which), squeeze=False, sharex=True, sharey='row',
                                figsize=(max(3.5, 1.75 * len(which)), 1.8 * len(TRAINING)))
    for line, (column, scale) in zip(axes, TRAINING.items(), strict=True):
        for ax, variant in zip(line, which, strict=True):
            lines(ax, rows[rows.variant == variant], 'step', column, lambda r: shade[r.lr], linewidth=0.8)
        set_scale(line[0], scale)
        line[0].set_ylabel(LABELS[column])
    losses = rows.loss[drawable(rows.loss)]
    if len(losses):  # the first steps would flatten all else
        axes[0, 0].set_ylim(top=max(np.percentile(losses, 97), losses.min() + 1))
    for top, bottom, variant in zip(axes[0], axes[-1], which, strict=True):
        top.set_title(plain(name(variant)), fontsize=8)
        bottom.set_xlabel(LABELS['step'])
    handles = [Line2D([], [], color=shade[lr], label=rf'$\eta$ = {lr:g}') for lr in lrs]
    figure.legend(handles=handles, loc='outside lower center', ncols=max(2, len(which)))
    save(figure, path)


def drift(rows, curve_rows, path):
    """
    The mean embedding drifts with the sum of the learning rates that a run has gone through. A point is the
    end of a run, a thin line its way there.
    """
    rows, curve_rows = readable(rows), readable(curve_rows)
    columns = [column for column in ('mu_norm', 'logit_mean', 'offset') if drawable(rows[column]).any()]
    figure, axes = plt.subplots(1, len(columns), figsize=(3.7 * len(columns), 3.6), squeeze=False)
    for ax, column in zip(axes[0], columns, strict=True):
        ways, ends = (part.assign(**{column: part[column].abs()}) for part in (curve_rows, rows))
        lines(ax, ways, 'lr_sum', column, lambda r: color(r.variant), linewidth=0.5, alpha=0.5)
        for _, r in ends[drawable(ends[column])].iterrows():
            mark(ax, r.lr_sum, r[column], style(r['size'])[0], color(r.variant), r.diverged == 1)
        set_scale(ax, 'symlog', 0.1)
        ax.set(xscale='log', xlim=(rows.lr_sum.min() / 30, None), ylim=(-0.01, None), xlabel=LABELS['lr_sum'],
               ylabel=r'|logit mean| $|\bar{l}|$' if column == 'logit_mean' else LABELS[column])
    legend(figure, rows)
    save(figure, path)


def rescue(rows, path):
    """One run (black), and the runs that began with its weights (--init_from) at the dotted line."""
    after = rows[rows.part == 'rescue']
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.6))
    for ax, column in zip(axes, ('mu_norm', 'logit_mean'), strict=True):
        lines(ax, rows, 'step', column, lambda r: 'black' if r.part == 'before' else color(r.variant))
        ax.axvline(after.step.min(), color='black', linewidth=0.8, linestyle=':')
        set_scale(ax, 'symlog', 0.1)
        ax.set(xlabel=LABELS['step'], ylabel=LABELS[column])
    legend(figure, after, sizes=False)
    save(figure, path)


# --------------------------------------------------------------------------------------------------
# figures of the effect of a shifted mean


def shift(rows, path):
    """
    Adding one vector to every output embedding changes nothing in exact arithmetic (Fact 2). With bf16 logits
    it costs the more the longer the vector is: the test loss minus that without it, of the same method or, if
    that was not run, of the baseline (lines: means over the seeds; points: the seeds). Grey: what the
    published untied baselines lose against μ-centering at the same size and learning rate, by the norm that
    their mean embedding reached on its own.
    """
    figure, ax = plt.subplots(figsize=(7.2, 4.6))
    ours, theirs = {}, []
    for size in dict.fromkeys(size for size, _ in paper.EXCESS):
        points = np.array([(paper.MU_NORM[key], paper.EXCESS[key]) for key in paper.EXCESS if key[0] == size])
        theirs += ax.plot(*points.T, style(size)[0], color='0.55', markeredgecolor='white',
                          markeredgewidth=0.5, markersize=7, label=size)
    rows = rows[drawable(rows.excess)]
    for (label, variant, size, _), part in rows.groupby(['label', 'variant', 'size', 'lr'], sort=False):
        mean, line = part.groupby('mu_shift').excess.mean(), ':' if label == WITHOUT else style(size)[1]
        ours[label], = ax.plot(mean.index, mean, line, color=color(variant), label=plain(label), zorder=3)
        ax.plot(part.mu_shift, part.excess, 'o', color=color(variant), markerfacecolor='white', markersize=4,
                zorder=4, clip_on=False)
    ax.axhline(0, color='black', linewidth=0.8, zorder=1)
    ax.set_xscale('symlog', linthresh=1, linscale=0.3)
    ax.set_yscale('symlog', linthresh=0.1)
    ax.xaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_major_formatter('{x:g}')
    ax.set(xlim=(-0.4, 1.4 * rows.mu_shift.max()), ylim=(min(-0.05, 1.2 * rows.excess.min()), None),
           xlabel=r'norm of the mean output embedding $\|\mu\|$', ylabel='additional test loss [nats]')
    sizes = plain(', '.join(rows['size'].unique()))
    title = f'{sizes} models, one vector of this norm added before training:'
    ax.legend(handles=list(ours.values()), title=title, loc='upper left', alignment='left')
    title = "The paper's baselines minus its μ-centering, by the norm that μ drifted to in training:"
    figure.legend(handles=theirs, title=title, loc='outside lower center', ncols=len(theirs))
    save(figure, path)


def mean_logit(rows, path):
    """
    The mean logit while baselines train whose output embeddings were shifted by a vector of the norm above
    the panel. The gradient of the logits sums to 0; rounded to bf16 it does not, and what is left moves the
    hidden states along the mean embedding. One line per run.
    """
    norms = sorted(rows.mu_shift.unique())
    figure, axes = plt.subplots(1, len(norms), figsize=(0.6 + 3 * len(norms), 3.4), squeeze=False)
    colors = {True: COLORS['baseline'], False: COLORS['z_loss']}
    for ax, norm in zip(axes[0], norms, strict=True):
        part = rows[rows.mu_shift == norm]
        lines(ax, part, 'step', 'logit_mean', lambda r: colors['gradient' in r.rounded], linewidth=0.9)
        ax.set(title=f'norm {norm:g}', xlabel=LABELS['step'])
    axes[0, 0].set_ylabel(LABELS['logit_mean'])
    words = {True: 'gradient of the logits rounded', False: 'gradient of the logits not rounded'}
    handles = [Line2D([], [], color=colors[rounded], label=words[rounded]) for rounded in words]
    figure.legend(handles=handles, loc='outside lower center', ncols=2)
    save(figure, path)


# --------------------------------------------------------------------------------------------------
# figures of the theory, from formulas


def norm_preserving_projection(X, mu, h):
    """X (n, H) -> (n, 3): x1 and x2 in the plane of μ and h, and the norm of the rest (Fig. 1)."""
    Q, R = np.linalg.qr(np.stack((mu, h), axis=1))
    Q *= np.sign(np.diag(R))  # so that x1 points along μ
    return np.column_stack((X @ Q, np.linalg.norm(X - X @ Q @ Q.T, axis=1)))


def centering_in_three_dimensions(path, H=1024, V=2000):
    """Embeddings around a mean μ that points along h all have a cosine with h; centering takes that away."""
    mu, h = np.zeros(H), np.zeros(H)
    mu[0], h[:2] = 0.25, (0.3, 0.15)
    E = mu + np.random.RandomState(0).randn(V, H) / np.sqrt(H)  # around μ their length is about 1
    figure = plt.figure(figsize=(8.5, 4.2))
    panels = ((r'before: $e_i$', E, {r'$\mu$': mu, '$h$': h}),
              (r'after $\mu$-centering: $e_i^\star = e_i - \mu$', E - E.mean(axis=0), {'$h$': h}))
    for i, (title, points, vectors) in enumerate(panels, 1):
        ax = figure.add_subplot(1, 2, i, projection='3d')
        ax.scatter(*norm_preserving_projection(points, mu, h).T, s=2, color=COLORS['baseline'], alpha=0.4)
        for label, vector in vectors.items():
            x1, x2, _ = norm_preserving_projection(vector[None], mu, h)[0]
            ax.quiver(0, 0, 0, x1, x2, 0, color='black', arrow_length_ratio=0.08, linewidth=1.5)
            ax.text(1.08 * x1, 1.08 * x2, 0, label, fontsize=12)
        cosine = points @ h / np.linalg.norm(points, axis=1) / np.linalg.norm(h)
        ax.set(title=f'{title}\nmean of cos = {cosine.mean():.2f}, largest |cos| = {abs(cosine).max():.2f}',
               xlim=(-0.1, 0.4), ylim=(-0.2, 0.2), zlim=(0, 1.2), xlabel='$x_1$', ylabel='$x_2$',
               zlabel='$x_3^{(3)}$')
        ax.locator_params(nbins=5)
        ax.view_init(elev=18, azim=-62)
        ax.set_box_aspect(None, zoom=0.85)
    save(figure, path)


def zloss_of_one_logit(path):
    """
    z-loss / λ = log²(exp(l_i) + S), S the sum over the other logits (Eq. 16), punishes a large positive
    logit and tolerates a large negative one.
    """
    logit = np.linspace(-6, 6, 500)
    figure, ax = plt.subplots(figsize=(4.6, 3.4))
    for S, log_S, line in ((0, -np.inf, '-'), (1, 0, '--'), (10, math.log(10), ':')):
        ax.plot(logit, np.logaddexp(logit, log_S) ** 2, line, color=COLORS['z_loss'], label=f'$S = {S}$')
    ax.set(xlabel='$l_i$', ylabel=r'$\mathcal{L}_z / \lambda$')
    ax.legend()
    save(figure, path)


def zloss_of_two_logits(path):
    """Black: where z-loss is smallest, Z = 1, which runs off to large negative logits."""
    l1, l2 = np.meshgrid(np.linspace(-4, 2, 121), np.linspace(-4, 2, 121))
    Z, best = np.exp(l1) + np.exp(l2), np.linspace(-4, np.log1p(-np.exp(-4)), 200)
    figure = plt.figure(figsize=(8.5, 4))
    panels = (('$Z$', Z, 1), (r'$\mathcal{L}_z / \lambda$', np.log(Z) ** 2, 0))
    for i, (label, value, optimum) in enumerate(panels, 1):
        ax = figure.add_subplot(1, 2, i, projection='3d', computed_zorder=False)
        ax.plot_surface(l1, l2, value, cmap='viridis', alpha=0.85, linewidth=0)
        ax.plot(best, np.log1p(-np.exp(best)), optimum, color='black', linewidth=2, zorder=5)
        ax.set(xlabel='$l_1$', ylabel='$l_2$', title=label)
        ax.view_init(elev=28, azim=-120)
    save(figure, path)


# file: (function, title, its place in the paper untied and tied); the docstring is what the report says
FIGURES = {
    'shift': (shift, 'What a mean embedding of some norm costs', ('', '')),
    'mean_logit': (mean_logit, 'The mean logit with a shifted mean', ('', '')),
    'loss': (loss_against_lr, 'Loss against learning rate', ('Figure 2', 'Appendix D, Figure 9')),
    'lrs': (lrs_against_n, 'LRS against model size', ('Figure 3', 'Appendix D, Figure 10')),
    'statistics': (statistics, 'Mean embedding and logits', ('Figure 4', '')),
    'fact3': (fact_3, 'Fact 3 for {}', ('Figure 5', '')),
    'distributions': (distributions, 'Distributions behind Fact 3 for {}', ('Appendix F, Figs. 11, 12', '')),
    'sensitivity': (sensitivity, 'Sensitivity to λ', ('Appendix C, Figure 8', '')),
    'drift': (drift, 'Drift against the sum of learning rates', ('', '')),
    'curves': (training_curves, 'Training curves of {}', ('', '')),
    'rescue': (rescue, 'Rescue: another method takes over', ('', ''))}
THEORY = {
    'theory_centering': (centering_in_three_dimensions, 'μ-centering in three dimensions', 'Figure 1'),
    'theory_zloss_1d': (zloss_of_one_logit, 'z-loss of one logit', 'Appendix B, Figure 6'),
    'theory_zloss_2d': (zloss_of_two_logits, 'Z and z-loss of two logits', 'Appendix B, Figure 7')}
