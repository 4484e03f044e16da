"""
The GPT of "Output Embedding Centering for Stable LLM Pretraining" and its output head, with every method that
tames the output logits.

Names and shapes: E output embeddings (V, H), mu their mean (H,), h final hidden states (N, H), logits (N,
V) with l_i = e_i . h, lam the coefficient lambda, cap the soft-cap c. N counts token positions, V the
vocabulary, H the width. Equation numbers are the paper's.

Where a method lives: if it acts on the logits, in logits_to_loss; if it penalises the embeddings, in
embeddings_to_loss; if it acts on the weights (weight_decay, coupled_adam, mu_centering), in train_step of
train.py.
"""
import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError

# Every method and the default of its lambda, None if it has none: the paper's six, those that it cites, ours.
METHODS = {
    'baseline': None,
    'weight_decay': 1e-4,
    'z_loss': 1e-4,
    'soft_capping': None,
    'mu_loss': 1e-4,
    'mu_centering': None,
    'max_z_loss': 2e-4,        # Baichuan 2 (Yang et al. 2023)
    'norm_softmax': None,      # Jiang et al. (2023)
    'coupled_adam': None,      # Stollenwerk and Stollenwerk (2025)
    'cosine_reg': 1.0,         # Gao et al. (2019)
    'laplace_reg': 1.0,        # Zhang et al. (2020)
    'spectrum_control': 1e-4,  # Wang et al. (2020)
    'zero_sum': None,          # Fact 4 in test_facts.py
    'centered_head': None,     # Fact 2: a head that works on E - mu
}

ROUNDED = ('operands', 'logits', 'gradient')  # what logits_dtype rounds: h and E, the logits, their gradient

# The paper's five sizes, from Porian et al. (2024), and one for a CPU.
SIZES = {
    'tiny': dict(n_layer=2, n_embd=64, n_head=4),
    '16M': dict(n_layer=6, n_embd=224, n_head=4),
    '29M': dict(n_layer=9, n_embd=320, n_head=4),
    '57M': dict(n_layer=12, n_embd=480, n_head=4),
    '109M': dict(n_layer=15, n_embd=640, n_head=4),
    '221M': dict(n_layer=21, n_embd=832, n_head=4),
}


@dataclass
class GPTConfig:
    n_layer: int = 6
    n_embd: int = 224
    n_head: int = 4
    vocab_size: int = 50304
    block_size: int = 2048
    weight_tying: bool = False
    rope_fraction: float = 0.5     # the share of each head's dimensions that RoPE rotates
    method: str = 'baseline'       # one of METHODS
    lam: float = 1e-4
    cap: float = 30.0
    dtype: str = 'float32'         # of products: float32, float64 or bfloat16 (autocast over fp32 weights)
    logits_dtype: str = 'float32'  # what the logits are rounded to
    rounded: str = ','.join(ROUNDED)  # which of ROUNDED are, or none
    head: str = 'chunked'          # chunked never holds N x V logits; plain holds them all, for comparison

    @property
    def n_hidden(self):
        """The hidden width of the SwiGLU: 8/3 of the model's width, rounded up to a multiple of 256."""
        return 256 * math.ceil((8 * self.n_embd // 3) / 256)


def base_method(method):
    """The method beside mu-centering: z_loss of z_loss+mu_centering, and any other name as it is."""
    return method.removesuffix('+mu_centering')


def gpt_config(settings):
    """
    The GPTConfig of a run's settings, a dict such as config.json; a field that they lack keeps its
    default.
    """
    known = {f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}
    return GPTConfig(**{**known, 'method': base_method(settings['method'])})


# --------------------------------------------------------------------------------------------------
# what the methods do to the loss


def to_logits_dtype(x, part, config):
    """
    Rounds x to logits_dtype, but keeps its dtype, if config.rounded names this `part` of ROUNDED. In the
    backward pass autograd rounds the gradient in the same way, if config.rounded names the gradient.
    """
    parts = config.rounded.split(',')
    low = x.to(getattr(torch, config.logits_dtype)).to(x.dtype)
    if part in parts and 'gradient' in parts:
        return low
    if part in parts:  # the value alone: x + (low - x) is low exactly
        return x + (low - x).detach()
    if part == 'logits' and 'gradient' in parts:  # the gradient alone
        return low + (x - low).detach()
    return x


def logits_to_loss(logits, targets, config, with_stats=True):
    """
    The language modeling head (Eq. 1) and the methods that act on its logits.

    logits (N, V) in the dtype that they were rounded to, targets (N,) int64. Returns what training
    minimises, cross entropy plus regulariser summed over positions, and a dict of detached statistics,
    each (N,): `loss` (the bare cross entropy) and `reg`, and those of logit_stats unless with_stats is
    False. The softmax is in fp32.
    """
    full = torch.promote_types(logits.dtype, torch.float32)
    if config.method == 'soft_capping':  # l <- c tanh(l / c), Eq. 6; rounded once more, as in a bf16 model
        logits = to_logits_dtype(config.cap * torch.tanh(logits.to(full) / config.cap), 'logits', config)
    logits = scores = logits.to(full)
    if config.method == 'norm_softmax':  # softmax(l / sigma_l); centering l changes no probability
        scores = F.layer_norm(logits, logits.shape[-1:], eps=1e-12)

    # L = -log p_t = log Z - l_t. nll_loss is -l_t: its gradient needs no second N x V tensor when compiled.
    log_z = torch.logsumexp(scores, dim=-1)
    loss = log_z + F.nll_loss(scores, targets, reduction='none')

    reg = torch.zeros_like(loss)
    if config.method == 'z_loss':  # L_z = lam log^2 Z, Eq. 5
        reg = config.lam * log_z.square()
    if config.method == 'max_z_loss':  # lam (max_i l_i)^2
        reg = config.lam * logits.amax(dim=-1).square()

    stats = {'loss': loss.detach(), 'reg': reg.detach()}
    if with_stats:
        stats.update(logit_stats(logits.detach()))
    return (loss + reg).sum(), stats


def embeddings_to_loss(E, config, step=0):
    """
    The methods that penalise the output embeddings E (V, H): what they add to the mean loss, a scalar,
    without a V x V tensor. `step` decides which rows laplace_reg samples, so that a step is the same
    after a resume.

    cosine_reg is the mean cosine of all pairs i != j, exactly. laplace_reg is the mean heat-kernel
    similarity of 256 rows, each step the next ones, with all rows; it is made from the title and
    references of Zhang et al. (2020), whose equations we could not read, so kernel and coefficient are
    ours. spectrum_control pulls the singular values of E towards the exponential prior of Wang et al.
    (2020), there of a factorisation of E, with constants of ours; it takes them from the H x H Gram
    matrix. On a GPU the host waits for its eigenvalues in every step.
    """
    if config.method == 'mu_loss':  # L_mu = lam mu . mu, Eq. 14
        return config.lam * E.mean(dim=0).square().sum()
    if config.method == 'cosine_reg':  # lam / V^2 sum_(i != j) cos(e_i, e_j)
        return config.lam * (F.normalize(E).sum(dim=0).square().sum() - len(E)) / len(E) ** 2
    if config.method == 'laplace_reg':  # lam mean_ij exp(-|e_i/|e_i| - e_j/|e_j||^2)
        unit, n = F.normalize(E), min(256, len(E))
        rows = (step * n + torch.arange(n, device=E.device)) % len(E)
        return config.lam * torch.exp(2 * (unit[rows] @ unit.T - 1)).mean()
    if config.method == 'spectrum_control':  # lam sum_k (sigma_k - c exp(-k / H))^2, c the initial sigma
        scale = E.detach().abs().amax()  # the squares of a diverging E would overflow before E does
        squares = torch.linalg.eigvalsh((E / scale).T @ (E / scale)).flip(0)[:len(E)]
        k = torch.arange(1, len(squares) + 1, dtype=E.dtype, device=E.device) / E.size(1)
        prior = math.sqrt(2 * len(E) / sum(E.shape)) * torch.exp(-k)
        return config.lam * (scale * squares.clamp(min=1e-12).sqrt() - prior).square().sum()
    return E.new_zeros(())


def logit_stats(logits):
    """
    Statistics of logits (N, V) over the vocabulary, each (N,) in float64: mean, its square, standard
    deviation and largest |logit|.
    """
    mean = logits.mean(dim=-1)
    std = (logits - mean[:, None]).square().mean(dim=-1).sqrt().double()
    absmax = torch.maximum(logits.amax(dim=-1), -logits.amin(dim=-1)).double()
    mean = mean.double()  # before it is squared: fp32 would lose the spread of a mean of 1000
    return {'logit_mean': mean, 'logit_mean_squared': mean.square(), 'logit_std': std, 'logit_absmax': absmax}


def sum_stats(stats):
    """Statistics of positions, each (N,), summed in float64; and `logit_max`, the largest |logit| of all."""
    sums = {name: values.sum().double() for name, values in stats.items()}
    return {**sums, 'logit_max': stats['logit_absmax'].amax()} if 'logit_absmax' in stats else sums


def merge_stats(a, b):
    """The sums of sum_stats of two sets of positions as those of one; `a` is {} for no positions."""
    if not a:
        return b
    return {name: torch.maximum(a[name], b[name]) if name == 'logit_max' else a[name] + b[name] for name in b}


def head_operands(h, E, config):
    """
    h (N, H) and E (V, H) as they enter the product e_i . h, in config.dtype. bf16 logits under fp32 give the
    numbers of bf16 on a machine that has no bf16 units.
    """
    if config.method == 'centered_head':  # E - mu in the head alone: the parameters stay as they are
        E = E - E.detach().mean(dim=0)
    return tuple(to_logits_dtype(x, 'operands', config).to(getattr(torch, config.dtype)) for x in (h, E))


def product_dtype(config):
    """The dtype of the product e_i . h: that of its operands, or logits_dtype if that is wider."""
    return torch.promote_types(getattr(torch, config.dtype), getattr(torch, config.logits_dtype))


def plain_head(h, E, targets, config, with_stats=True):
    """
    h (N, H), E (V, H), targets (N,) -> loss and statistics of logits_to_loss, summed over positions.
    Autograd keeps all N x V logits.
    """
    h, E = (x.to(product_dtype(config)) for x in head_operands(h, E, config))
    product = h @ E.T  # l_i = e_i . h, Eq. 1
    if config.method == 'zero_sum':  # dL/dh -= (sum_i g_i) mu, and no logit changes
        mean_logit = h @ E.detach().mean(dim=0)
        product = product - (mean_logit - mean_logit.detach())[:, None]
    loss, stats = logits_to_loss(to_logits_dtype(product, 'logits', config), targets, config, with_stats)
    return loss, sum_stats(stats)


# --------------------------------------------------------------------------------------------------
# the Transformer


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension with a gain and no bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


def rope_tables(config):
    """
    The tables of `rotate`, each (block_size, D) for heads of D dimensions: the cosine of m theta_j, theta_j =
    10000^(-2j / d), for both dimensions of pair j of the first d, and the sine, negative for the first one.
    1 and 0 for the dimensions that are not rotated.
    """
    D = config.n_embd // config.n_head
    d = int(config.rope_fraction * D) // 2 * 2
    theta = 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(config.block_size).double()[:, None] * theta
    angle = F.pad(angle.repeat_interleave(2, dim=1), (0, D - d))
    return angle.cos().float(), (angle.sin() * torch.tensor([-1.0, 1.0]).repeat(D // 2)).float()


def rotate(x, cos, sin):
    """RoPE: rotates neighbouring pairs of dimensions of x (B, n_head, T, D) by the tables (T, D)."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


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


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020): (B, T, H) -> (B, T, H)."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.up = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.down = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-LayerNorm Transformer block: (B, T, H) -> (B, T, H)."""

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
    """A decoder-only Transformer. `E` is its output embedding matrix, and its input embedding too if tied."""

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
        self.loss_and_grad = loss_and_grad  # which compile_parts replaces

        # Appendix A: 1 / sqrt(H) for the input embedding, Xavier for every linear weight but the attention's
        # projection. It is drawn twice, as in the published runs, so that a seed gives their weights.
        nn.init.normal_(self.wte.weight, std=config.n_embd ** -0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2 / sum(module.weight.shape)))
        for block in self.blocks:
            nn.init.normal_(block.attn.proj.weight, std=0.02 / math.sqrt(2 * config.n_layer))
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
        """
        FLOP of a training step for each token: 6 per weight of a matrix product, and causal attention at
        half.
        """
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 6 * c.n_layer * c.block_size * c.n_embd

    def compile_parts(self):
        """
        Compiles the Transformer and the body of the chunked head apart: together the chunk loop would be
        unrolled.
        """
        self.hidden = torch.compile(self.hidden, dynamic=False)
        self.loss_and_grad = compile_head(self.loss_and_grad, self.config)

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
        tokens, targets (B, T) int64 -> what training minimises, the mean over the B T positions of cross
        entropy and the regulariser of the logits (that of the embeddings joins once per step, in
        train.py), and the statistics of logits_to_loss, summed over positions. Under no_grad (evaluation)
        the loss is None.
        """
        h, targets = self.hidden(tokens).flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            return None, head_stats(h, self.E, targets, self.config, with_stats)
        if self.config.head == 'chunked':
            loss, stats = ChunkedHead.apply(h, self.E, targets, self.config, with_stats, self.loss_and_grad)
        else:
            loss, stats = plain_head(h, self.E, targets, self.config, with_stats)
        return loss / len(h), stats


# --------------------------------------------------------------------------------------------------
# The chunked head: an optimisation that you can skip. It computes what plain_head does, chunk by chunk
# of tokens, so that N x V logits are never held: loss and gradients together in the forward pass, three
# matrix products in all.


def n_chunks(h, E):
    """
    How many chunks the chunked head makes of h. On a CPU a chunk has so few tokens that its logits stay in
    cache. On a GPU it has up to 16,384, to keep the card busy, and its bf16 logits take at most 1/32 of the
    card's memory. Were it the free memory, a resumed run might sum in another order.
    """
    tokens = max(64, min(1024, 2**24 // len(E)))
    if h.device.type == 'cuda':
        memory = torch.cuda.get_device_properties(h.device).total_memory
        tokens = min(16384, max(1024, memory // 32 // (2 * len(E))))
    return -(-len(h) // tokens)


def add_product(out, a, b, beta=1):
    """out <- beta out + a b, summed in the dtype of `out`, which may be wider than that of a and b."""
    wider = {} if a.dtype == out.dtype else {'out_dtype': out.dtype}
    if wider and out.device.type != 'cuda':  # which alone has such products
        a, b, wider = a.to(out.dtype), b.to(out.dtype), {}
    torch.addmm(out, a, b, beta=beta, out=out, **wider)


def products(h, E, config):
    """The products e_i . h (n, V), Eq. 1, of the operands h (n, H) and E (V, H)."""
    out = h.new_empty(len(h), len(E), dtype=product_dtype(config))
    add_product(out, h, E.T, beta=0)
    return out


def loss_and_grad(product, targets, config, with_stats):
    """
    A chunk's products e_i . h (n, V), which it may overwrite -> the gradient with respect to them in
    config.dtype, and the summed loss and statistics. The gradient is rounded to logits_dtype like the
    logits. Compiled, this is a few fused kernels.
    """
    grad_and_value = torch.func.grad_and_value(logits_to_loss, has_aux=True)
    logits = to_logits_dtype(product, 'logits', config)
    grad, (loss, stats) = grad_and_value(logits, targets, config, with_stats)
    grad = to_logits_dtype(grad, 'gradient', config).to(getattr(torch, config.dtype))
    if with_stats:  # sum_i g_i: 0 before rounding, for the cross entropy
        stats['gradient_sum'] = grad.sum(dim=-1, dtype=loss.dtype).double()
    stats = sum_stats(stats)
    # Writing in place is free in a fused kernel and one more pass otherwise; Inductor for CPUs fails on
    # it in norm_softmax.
    if torch.compiler.is_compiling() and config.method != 'norm_softmax' and grad.dtype == product.dtype:
        grad = product.copy_(grad)
    return grad, loss, stats


def check_compiler(config):
    """
    Raises UserError where torch.compile would drop a rounding to bf16: before torch 2.13 it drops those of
    fp32 numbers that stay fp32, such as the second rounding of soft_capping.
    """
    stay_fp32 = config.dtype != 'bfloat16' or config.method == 'soft_capping'
    if torch.__version__ < '2.13' and config.logits_dtype == 'bfloat16' and stay_fp32:
        raise UserError(f'--compile in torch {torch.__version__} drops the rounding of the logits of '
                        f'{config.method} in {config.dtype}; 2.13 keeps it, and so does --no-compile')


def compile_head(function, config):
    """
    torch.compile that keeps every rounding to bf16: fused kernels drop a cast down and up unless told not to.
    """
    check_compiler(config)
    options = {'emulate_precision_casts': True}
    if torch.cuda.is_available() and config.method not in ('norm_softmax', 'max_z_loss'):
        options['realize_reads_threshold'] = 1  # log Z of a position is computed once, not for every logit
    return torch.compile(function, dynamic=False, options=options)


class ChunkedHead(torch.autograd.Function):
    """
    plain_head without the N x V logits. Products of bf16 numbers are summed in fp32: a bf16 model rounds
    the logits and their gradient, but not the gradients of h and E.
    """

    @staticmethod
    def forward(ctx, h, E, targets, config, with_stats=True, loss_and_grad=loss_and_grad):
        n = n_chunks(h, E)
        h_op, E_op = head_operands(h, E, config)
        grad_h, grad_E = torch.empty_like(h), torch.zeros_like(E)
        loss, stats = 0, {}
        mu = E_op.to(E.dtype).mean(dim=0) if config.method == 'zero_sum' else None
        for h_c, targets_c, grad_h_c in zip(h_op.chunk(n), targets.chunk(n), grad_h.chunk(n), strict=True):
            grad, loss_c, stats_c = loss_and_grad(products(h_c, E_op, config), targets_c, config, with_stats)
            add_product(grad_h_c, grad, E_op, beta=0)
            if config.method == 'zero_sum':  # dL/dh -= (sum_i g_i) mu
                grad_h_c -= grad.sum(dim=-1, keepdim=True, dtype=grad_h.dtype) * mu
            add_product(grad_E, grad.T, h_c)
            loss, stats = loss + loss_c, merge_stats(stats, stats_c)
            del grad  # before the next chunk takes as much again
        ctx.save_for_backward(grad_h, grad_E)
        return loss, stats

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_h, grad_E = ctx.saved_tensors
        return grad_h * grad_loss, grad_E * grad_loss, None, None, None, None


@torch.no_grad()
def head_stats(h, E, targets, config, with_stats=True):
    """The statistics of logits_to_loss for h (N, H), chunk by chunk and without gradients: evaluation."""
    n = n_chunks(h, E)
    h_op, E_op = head_operands(h, E, config)
    stats = {}
    for h_c, targets_c in zip(h_op.chunk(n), targets.chunk(n), strict=True):
        logits = to_logits_dtype(products(h_c, E_op, config), 'logits', config)
        stats = merge_stats(stats, sum_stats(logits_to_loss(logits, targets_c, config, with_stats)[1]))
    return stats
