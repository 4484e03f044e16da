"""The paper's figures that follow from its equations alone: python -m results.theory.theory"""
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def project(x):
    """x (..., H) -> (x1, x2, x3): its first two coordinates, and the norm of all others."""
    return *x[..., :2].T, np.linalg.norm(x[..., 2:], axis=-1)


def figure_1(H=1024, V=2000):
    """Embeddings isotropic around μ, before and after e_i* = e_i - μ (Eq. 9)."""
    mu = np.zeros(H)
    h = np.zeros(H)
    mu[0] = 0.5
    h[:2] = 0.5, 0.3  # so x1 and x2 are the plane of μ and h
    E = 0.3 * np.random.RandomState(1).standard_normal((V, H)) / np.sqrt(H)
    E += mu - E.mean(axis=0)

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), subplot_kw={'projection': '3d'})
    panels = ((r'$e_i$', E, {r'$\mu$': mu, '$h$': h}),
              (r'$e_i^\star = e_i - \mu$', E - mu, {'$h$': h}))
    for ax, (title, points, arrows) in zip(axes, panels, strict=True):
        ax.scatter(*project(points), s=2, color='#FF2C00', alpha=0.4)  # the paper's baseline
        for label, vector in arrows.items():
            ax.quiver(0, 0, 0, *project(vector), color='black', arrow_length_ratio=0.1)
            ax.text(*project(1.15 * vector), label, fontsize=12)
        cos = points @ h / np.linalg.norm(points, axis=1) / np.linalg.norm(h)
        ax.set(title=f'{title}\nmean of cos($h$, ·): {abs(cos.mean()):.2f}',
               xlabel='$x_1$', xlim=(-0.2, 0.7), ylabel='$x_2$', ylim=(-0.3, 0.5),
               zlabel='$x_3^{(3)}$', zlim=(0, 0.5))
        ax.locator_params(nbins=5)
        ax.view_init(elev=20, azim=-60)
        ax.zaxis.labelpad = 8
        ax.set_box_aspect(None, zoom=0.9)
    return figure


def figure_6():
    """L_z / λ = log²(exp(l_i) + S) (Eq. 16): of one logit, for three sums S over the others."""
    logit = np.linspace(-6, 6, 400)
    figure, ax = plt.subplots(figsize=(4.6, 3.4), layout='constrained')
    for S, line in ((0, '-'), (1, '--'), (10, ':')):
        ax.plot(logit, np.log(np.exp(logit) + S) ** 2, line, color='#0C5DA5', label=f'$S = {S}$')
    ax.set(xlabel='$l_i$', ylabel=r'$\mathcal{L}_z / \lambda$')
    ax.legend(frameon=False)
    return figure


def figure_7():
    """Z = exp(l_1) + exp(l_2) (Eq. 4) and L_z / λ = log² Z (Eq. 5). Black: Z = 1."""
    l1, l2 = np.meshgrid(np.linspace(-4, 2, 121), np.linspace(-4, 2, 121))
    Z = np.exp(l1) + np.exp(l2)
    best = np.linspace(-4, np.log(1 - np.exp(-4)), 400)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), subplot_kw={'projection': '3d'})
    panels = (('$Z$', Z, 1), (r'$\mathcal{L}_z / \lambda$', np.log(Z) ** 2, 0))
    for ax, (title, value, optimum) in zip(axes, panels, strict=True):
        ax.computed_zorder = False  # the curve lies in the surface: draw it last
        ax.plot_surface(l1, l2, value, cmap='viridis', alpha=0.85, linewidth=0)
        ax.plot(best, np.log(1 - np.exp(best)), optimum, color='black', linewidth=2, zorder=5)
        ax.set(xlabel='$l_1$', ylabel='$l_2$', title=title)
        ax.view_init(elev=42, azim=-65)
    return figure


if __name__ == '__main__':
    for draw in (figure_1, figure_6, figure_7):
        draw().savefig(Path(__file__).with_name(f'{draw.__name__}.png'), dpi=75)
