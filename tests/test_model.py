"""The GPT: sizes, initial weights, the Transformer written out, its numbers, on a GPU if there is one."""
import math

import pytest
import torch
import torch.nn.functional as F

import train
from model import GPT, SIZES, gpt_config, rotate
from small_runs import float64_model
from test_facts import F64, close, generator, tiny_gpt, token_batch

DRAWN = {False: [0.15773958, -0.05497751, 0.00303591], True: [-0.05497751, -0.05497751, 0.00303591]}  # seed 1
BF16_UNIT = 2.0 ** -8  # largest relative error of one rounding to bf16 (8 significant bits)


def settings(*flags):
    """Of a command, without data, which would say what the vocabulary is."""
    return train.resolve_args(train.parser.parse_args([*flags, '--data=/nowhere']))


def test_published_sizes():
    for size, millions in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
        for tying in ('--weight_tying', '--no-weight_tying'):
            with torch.device('meta'):
                gpt = GPT(gpt_config(vars(settings(f'--size={size}', '--vocab_size=50304', tying))))
            assert (round(gpt.n_params() / 1e6, 1), gpt.blocks[0].attn.n_head) == (millions, 4)


@pytest.mark.parametrize('tying', [False, True])
def test_initial_weights(tying):
    """Those of Appendix A; --mu_shift adds one vector of this norm to all output embeddings."""
    gpt = train.make_model(settings('--vocab_size=640', *['--weight_tying'] * tying))[0]
    H, L, hidden = 224, 6, 768
    mlp, head = math.sqrt(2 / (H + hidden)), math.sqrt(2 / (H + 640))  # Xavier
    expected = {'attn.qkv': math.sqrt(2 / (4 * H)), 'attn.proj': 0.02 / math.sqrt(2 * L), 'mlp.gate': mlp,
                'mlp.up': mlp, 'mlp.down': mlp, 'lm_head': head, 'wte': head if tying else H ** -0.5}
    for name, p in gpt.named_parameters():
        kind = '.'.join(name.split('.')[-3:-1])
        if 'norm' in name:
            assert bool((p == 1).all()), name  # gains
        elif kind in expected:
            assert p.std().item() == pytest.approx(expected[kind], rel=5 / math.sqrt(p.numel())), name
            assert p.abs().max() > 3 * p.std(), name  # normal: a uniform distribution ends at 1.7
    drawn = [w[0, 0].item() for w in (gpt.wte.weight, gpt.E, gpt.blocks[5].attn.proj.weight)]
    assert drawn == pytest.approx(DRAWN[tying], rel=1e-5)  # or a seed's old runs could not be repeated
    if not tying:
        shifts = (train.make_model(settings('--vocab_size=640', '--mu_shift=30'))[0].E - gpt.E).detach()
        assert shifts[0].norm().item() == pytest.approx(30, rel=1e-6)
        assert shifts[0, 0].item() == pytest.approx(-0.5906, rel=1e-3)  # of this seed
        close(shifts, shifts[:1].expand_as(shifts), rtol=0, atol=2.0 ** -23 * 30)


def reference_hidden(w, tokens, n_layer, n_head, rope_fraction):
    """Final hidden states (T, H) of one sequence, from Appendix A, without code of model.py."""
    def norm(x, gain):
        return F.layer_norm(x, gain.shape, gain)

    def rope(x, d):  # neighbours are a complex number, which position t turns by t 10000^(-j / d)
        angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=F64) / d)
        turned = torch.view_as_complex(x[:, :d].unflatten(1, (-1, 2)).contiguous()) * torch.exp(1j * angle)
        return torch.cat((torch.view_as_real(turned).flatten(1), x[:, d:]), dim=1)
    x = w['wte.weight'][tokens]
    T, H = x.shape
    D = H // n_head
    for i in range(n_layer):
        block = {name.removeprefix(f'blocks.{i}.').removesuffix('.weight'): p for name, p in w.items()}
        heads = []
        qkv = norm(x, block['norm_1']) @ block['attn.qkv'].T
        for q, k, v in qkv.view(T, 3, n_head, D).permute(2, 1, 0, 3):
            q = rope(norm(q, block['attn.norm_q']), int(D * rope_fraction))
            k = rope(norm(k, block['attn.norm_k']), int(D * rope_fraction))
            scores = (q @ k.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, dim=1) @ block['attn.proj'].T
        y = norm(x, block['norm_2'])
        x = x + (F.silu(y @ block['mlp.gate'].T) * (y @ block['mlp.up'].T)) @ block['mlp.down'].T
    return norm(x, w['norm_f.weight'])


@pytest.mark.parametrize('rope_fraction', [0.5, 1.0])  # of 16 dimensions
def test_transformer(rope_fraction):
    """It is the paper's, and causal. At the last of 100,000 positions an fp32 angle would lose its digits."""
    gpt = tiny_gpt(n_layer=2, n_embd=64, n_head=4, block_size=100_000, rope_fraction=rope_fraction)
    gpt.cos, gpt.sin = gpt.cos[-16:], gpt.sin[-16:]
    with torch.no_grad():
        for name, p in gpt.named_parameters():  # gains that are not one, an attention that is not flat
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)
    tokens = torch.randint(64, (2, 16))
    hidden = gpt.hidden(tokens)
    for i in range(2):
        expected = reference_hidden(gpt.state_dict(), tokens[i], 2, 4, rope_fraction)
        close(hidden[i], expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32
    tokens[:, 9:] = (tokens[:, 9:] + 1) % 64
    assert ((gpt.hidden(tokens) - hidden).abs().amax(dim=(0, 2)) > 1e-12).tolist() == [False] * 9 + [True] * 7


def test_dtypes(monkeypatch):
    """Matmuls are in bf16, the residual stream in fp32, as are QK-LayerNorm and RoPE, rounded once after."""
    gpt = tiny_gpt(dtype='bfloat16')
    block, low, streams, q_and_k = gpt.blocks[0], [], [], []
    for module in (block.attn.qkv, block.attn.proj, block.mlp.gate, block.mlp.down):
        module.register_forward_hook(lambda module, inputs, output: low.append(output))
    for module in (block.norm_1, block.norm_2, gpt.norm_f):  # from the embedding on
        module.register_forward_hook(lambda module, inputs, output: streams.append(*inputs))
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda q, k, v, **_: q_and_k.extend((q, k)) or v)
    gpt.hidden(token_batch(0)[0])
    assert {x.dtype for x in streams} == {torch.float32}
    assert {x.dtype for x in [*low, *q_and_k]} == {torch.bfloat16}
    for x, y in zip(low[0].double().view(4, 16, 3, 2, 8).unbind(2), q_and_k, strict=False):
        exact = rotate(F.layer_norm(x, (8,)), gpt.cos, gpt.sin).transpose(1, 2)
        assert ((y - exact).abs() <= 1.001 * BF16_UNIT * exact.abs() + 1e-6).all()


@pytest.mark.parametrize('size', SIZES if torch.cuda.is_available() else ['16M'])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 100 * 2.0 ** -24), ('bfloat16', 16 * BF16_UNIT)])
def test_gradients_against_float64(dtype, tolerance, size):
    """On the device, by the kernels that it chooses. TF32 would be off by thousands of units of fp32."""
    block_size = 2048 if torch.cuda.is_available() else 64
    flags = f'--size={size} --n_layer=1 --block_size={block_size} --vocab_size=512 --dtype={dtype}'.split()
    exact, _ = float64_model(settings(*flags, '--device=cpu'))
    exact.config.dtype = 'float64'
    model, _ = train.make_model(settings(*flags))
    for gpt in (exact, model):
        tokens = torch.randint(512, (2, block_size + 1), generator=generator(0)).to(gpt.E.device)
        gpt(tokens[:, :-1], tokens[:, 1:])[0].backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert (p.grad.double().cpu() - q.grad).norm() <= tolerance * q.grad.norm()


def test_fp32_logits_of_a_bf16_trunk():
    """With a mean logit of some hundreds: in training, as in `logits`, they are not rounded."""
    gpt = tiny_gpt(dtype='bfloat16', logits_dtype='float32')
    tokens, targets = token_batch(0)
    with torch.no_grad():
        gpt.E.add_(100 * gpt.hidden(tokens).mean(dim=(0, 1)))
    h = gpt.hidden(tokens).double().flatten(0, 1)
    loss = F.cross_entropy(h @ gpt.E.double().T, targets.flatten())
    assert gpt(tokens, targets)[1]['loss'].mean().item() == pytest.approx(loss.item(), abs=1e-4)
