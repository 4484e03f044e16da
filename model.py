"""
The GPT of "Output Embedding Centering for Stable LLM Pretraining", and the output head with every way of taming its logits.

Names and shapes: E output embeddings (V, H), mu their mean (H,), h final hidden states (N, H), logits (N, V) with
l_i = e_i . h, lam the coefficient lambda, cap the soft-cap c. N counts token positions, V the vocabulary, H the width.

A method that acts on the logits is a few lines in logits_to_loss, one that acts on the embeddings alone a few lines in
embeddings_to_loss; those that act on the weights (weight_decay, coupled_adam, mu_centering) are a few lines around
optimizer.step() in train.py.
"""
import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

METHODS = ('baseline', 'weight_decay', 'z_loss', 'soft_capping', 'mu_loss', 'mu_centering',
           'max_z_loss', 'norm_softmax', 'coupled_adam', 'cosine_reg', 'laplace_reg', 'spectrum_control')
# the methods that have a lambda, and its default (sweep.sh reads this line)
LAM = {'weight_decay': 1e-4, 'z_loss': 1e-4, 'mu_loss': 1e-4, 'max_z_loss': 2e-4, 'cosine_reg': 1, 'laplace_reg': 1, 'spectrum_control': 1e-4}

SIZES = {  # the paper's five, from Porian et al. (2024), and one for a CPU
    'tiny': dict(n_layer=2, n_embd=64, n_head=4),
    '16M': dict(n_layer=6, n_embd=224, n_head=4),
    '29M': dict(n_layer=9, n_embd=320, n_head=4),
    '57M': dict(n_layer=12, n_embd=480, n_head=4),
    '109M': dict(n_layer=15, n_embd=640, n_head=4),
    '221M': dict(n_layer=21, n_embd=832, n_head=4),
}

# What the head reports of a batch, as one vector: sums over positions, and last a maximum.
STATS = ('loss', 'reg', 'logit_mean', 'logit_mean_squared', 'logit_std', 'logit_absmax', 'logit_max')


@dataclass
class GPTConfig:
    """What GPT is built from. gpt_config makes one from a run's settings."""

    n_layer: int = 6
    n_embd: int = 224
    n_head: int = 4
    vocab_size: int = 50304
    block_size: int = 2048
    weight_tying: bool = False
    rope_fraction: float = 0.5         # share of each head's dimensions that RoPE rotates
    head_mode: str = 'baseline'        # one of METHODS
    lam: float = 1e-4
    cap: float = 30.0
    dtype: str = 'float32'             # of the matrix products: float32, bfloat16 (autocast over fp32 weights) or float64
    logits_dtype: str = 'float32'      # what the logits are rounded to
    head: str = 'chunked'              # chunked: never holds N x V logits; plain: holds them all, for comparison


def head_mode(method):
    """The method beside mu-centering: z_loss of z_loss+mu_centering, any other name as it is."""
    return method.removesuffix('+mu_centering')


def gpt_config(settings):
    """The GPTConfig of a run's settings (train.py's flags, config.json), which call head_mode method."""
    return GPTConfig(**{f.name: settings[f.name] for f in fields(GPTConfig) if f.name != 'head_mode'}, head_mode=head_mode(settings['method']))


# ----------------------------------------------------------------------------------------------------------------------
# the output head


def logits_to_loss(logits, targets, config, with_stats=True):
    """
    What a method does with the logits. The only place where the cross entropy, z-loss, soft-capping and their like are written.

    logits (N, V) in the dtype they were rounded to, targets (N,) int64. Returns the loss summed over positions (what
    training minimises: cross entropy and regulariser) and the STATS vector (7,), detached, zero after `reg` without
    with_stats. The softmax is in fp32; norm_softmax's temperature is part of it, the statistics are of the logits before it.
    """
    full = torch.promote_types(logits.dtype, torch.float32)
    if config.head_mode == 'soft_capping':  # l <- c tanh(l / c), Eq. 6; rounded once more, as a bf16 model would
        logits = (config.cap * torch.tanh(logits.to(full) / config.cap)).to(logits.dtype)
    logits = scores = logits.to(full)
    if config.head_mode == 'norm_softmax':  # softmax(l / sigma_l), Jiang et al. (2023); that it centers l too drops out of the softmax
        scores = F.layer_norm(logits, logits.shape[-1:], eps=1e-12)
    log_z = torch.logsumexp(scores, dim=-1)                                   # log Z, Eq. 4
    # L = -log p_t = log Z - l_t, Eq. 1; nll_loss is -l_t, its gradient needs no second N x V tensor when compiled
    loss = log_z + F.nll_loss(scores, targets, reduction='none')
    if config.head_mode == 'z_loss':                                          # L_z = lam log^2 Z, Eq. 5
        reg = config.lam * log_z.square()
    elif config.head_mode == 'max_z_loss':                                    # lam (max_i l_i)^2, Baichuan 2 (2023)
        reg = config.lam * logits.amax(dim=-1).square()
    else:
        reg = torch.zeros_like(loss)
    sums = torch.stack([loss.sum(), reg.sum()]).detach().to(stats_dtype(logits))
    return (loss + reg).sum(), torch.cat((sums, logit_stats(logits.detach()) if with_stats else sums.new_zeros(len(STATS) - 2)))


def embeddings_to_loss(E, config, step=0):
    """
    What a method adds to the mean loss as a function of the output embeddings E (V, H) alone: a scalar, without a V x V tensor.
    `step` picks what laplace_reg samples, so that a step means the same after a resume and on every process.

    mu_loss: Eq. 14. cosine_reg: mean cosine of pairs i != j, exactly (Gao et al. 2019; their coefficient is 1).
    laplace_reg: mean heat-kernel similarity of pairs; its gradient is the graph Laplacian of these similarities applied to the
    unit embeddings, so it drives near ones apart. Sampled: 256 embeddings a step, in turn, against all. From the title and the
    references of Zhang et al. (2020), whose own equations we could not read; kernel and coefficient are ours.
    spectrum_control: singular values towards a slowly decaying prior c_1 exp(-c_2 k^gamma), the exponential one of Wang et al.
    (2020), on E itself instead of their factorisation of it, from the eigenvalues of the H x H Gram matrix. c_1, the size at
    initialisation, c_2 = 1 / H, gamma = 1 and the coefficient are ours.
    """
    if config.head_mode == 'mu_loss':                                         # L_mu = lam mu . mu, Eq. 14
        return config.lam * E.mean(dim=0).square().sum()
    if config.head_mode == 'cosine_reg':                                      # lam / V^2 sum_(i != j) cos(e_i, e_j)
        return config.lam * (F.normalize(E).sum(dim=0).square().sum() - len(E)) / len(E) ** 2
    if config.head_mode == 'laplace_reg':                                     # lam mean_ij exp(-|e_i/|e_i| - e_j/|e_j||^2)
        unit, n = F.normalize(E), min(256, len(E))
        rows = (step * n + torch.arange(n, device=E.device)) % len(E)
        return config.lam * torch.exp(2 * (unit[rows] @ unit.T - 1)).mean()
    if config.head_mode == 'spectrum_control':                                # lam sum_k (sigma_k - c_1 exp(-k / H))^2
        scale = E.detach().abs().amax()  # or the squares of a diverging E overflow before E does
        squares = torch.linalg.eigvalsh((E / scale).T @ (E / scale)).flip(0)[:len(E)]
        k = torch.arange(1, len(squares) + 1, dtype=E.dtype, device=E.device) / E.size(1)
        prior = math.sqrt(2 * len(E) / sum(E.shape)) * torch.exp(-k)
        return config.lam * (scale * squares.clamp(min=1e-12).sqrt() - prior).square().sum()
    return E.new_zeros(())


def logit_stats(logits):
    """The STATS of logits (N, V) after loss and reg, (5,): moments over V and the largest |logit|, summed over N; the largest of all."""
    wide = stats_dtype(logits)
    mean = logits.mean(dim=-1)
    std = (logits - mean[:, None]).square().mean(dim=-1).sqrt()
    absmax = torch.maximum(logits.amax(dim=-1), -logits.amin(dim=-1))
    mean, std, absmax = mean.to(wide), std.to(wide), absmax.to(wide)
    return torch.stack([mean.sum(), mean.square().sum(), std.sum(), absmax.sum(), absmax.amax()])


def stats_dtype(logits):
    """float64, so that the spread of a mean of 1000 survives its squares; float32 on MPS, which has no float64."""
    return torch.float32 if logits.device.type == 'mps' else torch.float64


def no_stats(x):
    """STATS (7,) of no positions, on x's device: what sums start from."""
    return torch.zeros(len(STATS), dtype=stats_dtype(x), device=x.device)


def merge_stats(a, b):
    """STATS of two sets of positions together: sums are summed, the maximum is maximised."""
    return torch.cat((a[:-1] + b[:-1], torch.maximum(a[-1:], b[-1:])))


def product_operand(x, config):
    """
    Rounds h or E to logits_dtype and returns it in the dtype of the product. Under bf16 that is a plain cast; with bf16
    logits under fp32 it gives the same numbers on a machine that has no bf16 units.
    """
    logits_dtype = getattr(torch, config.logits_dtype)
    return x.to(logits_dtype).to(torch.promote_types(getattr(torch, config.dtype), logits_dtype))


def plain_head(h, E, targets, config, with_stats=True):
    """Loss summed over positions and STATS, from h (N, H), E (V, H), targets (N,), by autograd over all N x V logits."""
    product = product_operand(h, config) @ product_operand(E, config).T       # l_i = e_i . h, Eq. 1
    return logits_to_loss(product.to(getattr(torch, config.logits_dtype)), targets, config, with_stats)


def loss_and_grad(product, targets, config, with_stats):
    """
    The products e_i . h (n, V) of a chunk, which it may overwrite -> their gradient (n, V) in their dtype, the summed
    loss and STATS. Fused when compiled. The gradient is rounded to logits_dtype as the logits are.
    """
    grad_and_value = torch.func.grad_and_value(logits_to_loss, has_aux=True)
    grad, (loss, stats) = grad_and_value(product.to(getattr(torch, config.logits_dtype)), targets, config, with_stats)
    # a fused kernel writes in place for nothing, otherwise it would be one more pass; PyTorch's compiler for CPUs fails on it in norm_softmax
    if torch.compiler.is_compiling() and config.head_mode != 'norm_softmax':
        return product.copy_(grad), loss, stats
    return grad.to(product.dtype), loss, stats


def compile_head(function):
    """torch.compile that keeps every rounding to bf16: fused kernels drop a cast down and up again unless told not to."""
    return torch.compile(function, dynamic=False, options={'emulate_precision_casts': True})


def n_chunks(h, E):
    """
    Into how many chunks the chunked head cuts the tokens: on a GPU some thousand tokens each, enough to keep it busy and
    to pay for re-reading the gradient of E; on a CPU few enough for the logits to stay in cache.
    """
    tokens = 4096 if h.device.type == 'cuda' else max(64, min(1024, 2**24 // len(E)))
    return -(-len(h) // tokens)


class ChunkedHead(torch.autograd.Function):
    """
    plain_head without the N x V logits: loss and gradients together, chunk by chunk, with three products in all. Under
    bf16 each chunk's product for grad_E is rounded to bf16 and summed in fp32.
    """

    @staticmethod
    def forward(ctx, h, E, targets, config, with_stats=True, loss_and_grad=loss_and_grad):
        n = n_chunks(h, E)
        h_op, E_op = product_operand(h, config), product_operand(E, config)
        grad_h, grad_E = torch.empty_like(h), torch.zeros_like(E)
        loss, stats = 0, no_stats(h)
        for h_c, targets_c, grad_h_c in zip(h_op.chunk(n), targets.chunk(n), grad_h.chunk(n)):
            grad, loss_c, stats_c = loss_and_grad(h_c @ E_op.T, targets_c, config, with_stats)
            grad_h_c.copy_(grad @ E_op)
            if grad.dtype == grad_E.dtype:
                grad_E.addmm_(grad.T, h_c)
            else:
                grad_E += grad.T @ h_c
            loss, stats = loss + loss_c, merge_stats(stats, stats_c)
            del grad  # before the next chunk takes as much again
        ctx.save_for_backward(grad_h, grad_E)
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_h, grad_E = ctx.saved_tensors
        return grad_h * grad_loss, grad_E * grad_loss, None, None, None, None


@torch.no_grad()
def head_stats(h, E, targets, config, with_stats=True):
    """STATS of h (N, H) without gradients, chunk by chunk: evaluation."""
    n = n_chunks(h, E)
    h_op, E_op = product_operand(h, config), product_operand(E, config)
    stats = no_stats(h)
    for h_c, targets_c in zip(h_op.chunk(n), targets.chunk(n)):
        logits = (h_c @ E_op.T).to(getattr(torch, config.logits_dtype))
        stats = merge_stats(stats, logits_to_loss(logits, targets_c, config, with_stats)[1])
    return stats


# ----------------------------------------------------------------------------------------------------------------------
# the Transformer


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension with a gain and no bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


def rope_tables(config):
    """cos and sin (block_size, d / 2) of m theta_j, theta_j = 10000^(-2j/d), for the d = rope_fraction * D rotated dimensions."""
    d = int(config.rope_fraction * (config.n_embd // config.n_head)) // 2 * 2
    theta = 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(config.block_size).double()[:, None] * theta
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """RoPE: turns the neighbouring pairs of the first dimensions of x (B, n_head, T, D) by the tables (T, d / 2)."""
    d = 2 * cos.size(-1)
    even, odd = x[..., 0:d:2], x[..., 1:d:2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., d:]), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with QK-LayerNorm (one gain for all heads) and RoPE: (B, T, H) -> (B, T, H)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.norm_q = LayerNorm(config.n_embd // config.n_head)
        self.norm_k = LayerNorm(config.n_embd // config.n_head)

    def forward(self, x, cos, sin):
        B, T, H = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.qkv(x).split(H, dim=2))
        q, k = rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, H))


def swiglu_width(n_embd):
    """Hidden width of the SwiGLU: 8/3 of the width, rounded up to a multiple of 256."""
    return 256 * math.ceil((8 * n_embd // 3) / 256)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020): (B, T, H) -> (B, T, H)."""

    def __init__(self, config):
        super().__init__()
        hidden = swiglu_width(config.n_embd)
        self.gate = nn.Linear(config.n_embd, hidden, bias=False)
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-LayerNorm Transformer block: (B, T, H) -> (B, T, H)."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.norm_2 = LayerNorm(config.n_embd)
        self.mlp = SwiGLU(config)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only Transformer; `E` is its output embedding matrix, the input embedding too where tied."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.loss_and_grad = loss_and_grad

        nn.init.normal_(self.wte.weight, std=config.n_embd ** -0.5)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                small = name.endswith('attn.proj')
                fan = sum(module.weight.shape)
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * config.n_layer) if small else math.sqrt(2 / fan))
        if config.weight_tying:
            self.wte.weight = self.lm_head.weight

    @property
    def E(self):
        return self.lm_head.weight

    def n_params(self):
        """N as the paper counts it: every parameter, the head included, but not an untied input embedding."""
        n = sum(p.numel() for p in self.parameters())
        return n if self.config.weight_tying else n - self.wte.weight.numel()

    def flops_per_token(self):
        """FLOP that a training step needs for one token: 6 for each weight in a matrix product, and causal attention at half."""
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 6 * c.n_layer * c.block_size * c.n_embd

    def compile_parts(self):
        """Compiles the Transformer and the body of the chunked head apart: compiled together the chunk loop is unrolled."""
        self.hidden = torch.compile(self.hidden, dynamic=False)
        self.loss_and_grad = compile_head(self.loss_and_grad)

    def hidden(self, tokens):
        """tokens (B, T) int64 -> final hidden states h (B, T, H)."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.dtype == 'bfloat16'):
            x = self.wte(tokens)
            cos, sin = self.cos[:tokens.size(1)], self.sin[:tokens.size(1)]
            for block in self.blocks:
                x = block(x, cos, sin)
            return self.norm_f(x)

    def forward(self, tokens, targets, with_stats=True):
        """
        tokens, targets (B, T) int64 -> what training minimises (the mean over the B T positions of cross entropy and the
        regulariser of the logits; that of the embeddings is added once a step, in train.py) and the STATS vector (7,) of those
        positions, without with_stats loss and reg alone. Without gradients (evaluation) the first is None.
        """
        h, targets = self.hidden(tokens).flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            return None, head_stats(h, self.E, targets, self.config, with_stats)
        if self.config.head == 'chunked':
            loss, stats = ChunkedHead.apply(h, self.E, targets, self.config, with_stats, self.loss_and_grad)
        else:
            loss, stats = plain_head(h, self.E, targets, self.config, with_stats)
        return loss / len(h), stats
