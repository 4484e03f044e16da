"""The GPT: sizes, initial weights, the Transformer written out, dtypes."""
import math

import pytest
import torch

from analysis import csv_files
from model import GPT, SIZES, GPTConfig, attend
from test_facts import F64, close, tiny_gpt, token_batch


def test_sizes_are_the_published_ones():
    with torch.device('meta'):
        for size, millions in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
            found = {GPT(GPTConfig(**SIZES[size], weight_tying=tying)).n_params() for tying in (False, True)}
            assert found == {csv_files.PUBLISHED[size][1]} and round(min(found) / 1e6, 1) == millions
        flops = GPT(GPTConfig(**SIZES['16M'])).flops_per_token() * 64 * 2048
    assert flops == pytest.approx(1.44e13, rel=2e-3)


@pytest.mark.parametrize('size, tying, checksum', [
    ('tiny', False, -39.735), ('16M', False, 4907.620), ('16M', True, 3100.890)])
def test_initial_weights_are_the_papers_and_a_seed_gives_those_of_the_published_runs(size, tying, checksum):
    """The checksum's tolerance is well above an error in the last bit of each weight, of another CPU."""
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES[size], weight_tying=tying))
    H, L, hidden = {'tiny': (64, 2, 256), '16M': (224, 6, 768)}[size]
    mlp, head = math.sqrt(2 / (H + hidden)), math.sqrt(2 / (H + 50304))
    expected = {'attn.qkv': math.sqrt(2 / (4 * H)), 'attn.proj': 0.02 / math.sqrt(2 * L), 'mlp.gate': mlp,
                'mlp.up': mlp, 'mlp.down': mlp, 'lm_head': head, 'wte': head if tying else H ** -0.5}
    for name, p in gpt.named_parameters():
        kind = '.'.join(name.split('.')[-3:-1])
        if 'norm' in name:
            assert bool((p == 1).all()), name  # gains
        else:
            assert p.std().item() == pytest.approx(expected[kind], rel=5 / math.sqrt(p.numel())), name
    sums = [(i + 1) * p.double().sum().item() for i, p in enumerate(gpt.parameters()) if p.dim() == 2]
    assert sum(sums) == pytest.approx(checksum, abs=0.05)


def reference_hidden(w, tokens, n_layer, n_head):
    """Final hidden states (T, H) of one sequence, from Appendix A and sharing no code with model.py."""
    def norm(x, gain):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * gain

    def rope(x, d):  # neighbours are a complex number, which position t turns by t 10000^(-j / d)
        angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=F64) / d)
        turned = torch.view_as_complex(x[:, :d].unflatten(1, (-1, 2)).contiguous()) * torch.exp(1j * angle)
        return torch.cat((torch.view_as_real(turned).flatten(1), x[:, d:]), dim=1)
    x = w['wte.weight'][tokens]
    T, H = x.shape
    D = H // n_head
    for i in range(n_layer):
        block = {name.removeprefix(f'blocks.{i}.').removesuffix('.weight'): p for name, p in w.items()}
        qkv = norm(x, block['norm_1']) @ block['attn.qkv'].T
        out = torch.zeros_like(x)
        for head in range(n_head):
            q, k, v = (qkv[:, part * H + head * D:part * H + (head + 1) * D] for part in range(3))
            q, k = rope(norm(q, block['attn.norm_q']), D // 2), rope(norm(k, block['attn.norm_k']), D // 2)
            scores = (q @ k.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out[:, head * D:(head + 1) * D] = scores.softmax(-1) @ v
        x = x + out @ block['attn.proj'].T
        y = norm(x, block['norm_2'])
        gate = y @ block['mlp.gate'].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ block['mlp.up'].T)) @ block['mlp.down'].T
    return norm(x, w['norm_f.weight'])


def test_the_transformer_is_the_papers_and_causal():
    gpt = tiny_gpt(n_layer=2, n_embd=64, n_head=4)  # RoPE turns 8 of 16 dimensions, by four angles
    with torch.no_grad():
        for name, p in gpt.named_parameters():  # gains that are not one, an attention that is not flat
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)
    tokens = torch.randint(64, (2, 16))
    found = gpt.hidden(tokens)
    for i in range(2):
        expected = reference_hidden(gpt.state_dict(), tokens[i], 2, 4)
        close(found[i], expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32
    tokens[:, 9:] = (tokens[:, 9:] + 1) % 64
    assert ((gpt.hidden(tokens) - found).abs().amax(dim=(0, 2)) > 1e-12).tolist() == [False] * 9 + [True] * 7


def test_attention_in_bf16_is_exact_up_to_its_roundings():
    """
    q, k and v have so few digits that the scores are exact in bf16. The probabilities P, the gradients G of
    P and S of the scores, and each product are rounded once, each to u = 2^-8 of itself: with all of them,
    S is off by no more than 4 u P (|G| + P |G|), and what is summed from S by one more.
    """
    g, u = torch.Generator().manual_seed(0), 2.0 ** -8
    for T in (1, 7, 64):
        q, k, v = ((torch.randint(-3, 4, (2, 3, T, 16), generator=g) / 4).requires_grad_() for _ in range(3))
        dy = torch.randn(2, 3, T, 16, generator=g).bfloat16()
        y = attend(q, k, v.bfloat16())
        found = [y, *torch.autograd.grad(y, (q, k, v), dy)]
        q, k, v, dy = (x.detach().double() for x in (q, k, v, dy))
        P = (q @ k.mT / 4).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        G, most = dy @ v.mT, dy.abs() @ v.abs().mT
        S = P * (G - (P * G).sum(-1, keepdim=True)) / 4
        off = 5 * P * (most + (P * most).sum(-1, keepdim=True)) / 4
        for x, exact, bound in zip(found, (P @ v, S @ k, S.mT @ q, P.mT @ dy),
                                   (2 * P @ v.abs(), off @ k.abs(), off.mT @ q.abs(), 2 * P.mT @ dy.abs()),
                                   strict=True):
            assert ((x - exact).abs() <= u * bound + 1e-6).all()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_products_are_in_the_dtype_and_norms_and_weights_in_fp32(dtype):
    gpt = tiny_gpt(dtype=dtype, logits_dtype=dtype)
    seen = []
    attn, mlp = gpt.blocks[0].attn, gpt.blocks[0].mlp
    for module in (attn.qkv, attn.norm_q, attn.norm_k, attn.proj, mlp.gate, mlp.down):
        module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    gpt(*token_batch(0))[0].backward()
    low = getattr(torch, dtype)
    assert seen == [low, torch.float32, torch.float32, low, low, low]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in gpt.parameters())
