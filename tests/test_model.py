"""The GPT: sizes, initial weights, the Transformer written out, dtypes."""
import math

import pytest
import torch

from model import GPT, SIZES, GPTConfig
from test_facts import F64, close, tiny_gpt, token_batch


def test_sizes_are_the_published_ones():
    with torch.device('meta'):
        for size, millions in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
            for tying in (False, True):
                n = GPT(GPTConfig(**SIZES[size], weight_tying=tying)).n_params()
                assert round(n / 1e6, 1) == millions
        flops = GPT(GPTConfig(**SIZES['16M'])).flops_per_token() * 64 * 2048
    assert flops == pytest.approx(1.44e13, rel=2e-3)


@pytest.mark.parametrize('tying, checksum', [(False, 4907.620), (True, 3100.890)])
def test_initial_weights_are_the_papers_and_a_seed_gives_those_of_the_published_runs(tying, checksum):
    """The checksum's tolerance is well above an error in the last bit of each weight, of another CPU."""
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES['16M'], weight_tying=tying))
    H, L, hidden = 224, 6, 768
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


def reference_hidden(w, tokens, n_layer, n_head, rope_fraction):
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
            q, k = (rope(norm(x, block[f'attn.norm_{name}']), int(D * rope_fraction))
                    for name, x in (('q', q), ('k', k)))
            scores = (q @ k.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out[:, head * D:(head + 1) * D] = scores.softmax(-1) @ v
        x = x + out @ block['attn.proj'].T
        y = norm(x, block['norm_2'])
        gate = y @ block['mlp.gate'].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ block['mlp.up'].T)) @ block['mlp.down'].T
    return norm(x, w['norm_f.weight'])


@pytest.mark.parametrize('rope_fraction', [0.5, 1.0])  # of 16 dimensions
def test_the_transformer_is_the_papers_and_causal(rope_fraction):
    gpt = tiny_gpt(n_layer=2, n_embd=64, n_head=4, rope_fraction=rope_fraction)
    with torch.no_grad():
        for name, p in gpt.named_parameters():  # gains that are not one, an attention that is not flat
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)
    tokens = torch.randint(64, (2, 16))
    found = gpt.hidden(tokens)
    for i in range(2):
        expected = reference_hidden(gpt.state_dict(), tokens[i], 2, 4, rope_fraction)
        close(found[i], expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32
    tokens[:, 9:] = (tokens[:, 9:] + 1) % 64
    assert ((gpt.hidden(tokens) - found).abs().amax(dim=(0, 2)) > 1e-12).tolist() == [False] * 9 + [True] * 7


def test_products_are_in_the_dtype_and_norms_and_weights_in_fp32():
    gpt = tiny_gpt(dtype='bfloat16', logits_dtype='bfloat16')
    seen = []
    attn, mlp = gpt.blocks[0].attn, gpt.blocks[0].mlp
    for module in (attn.qkv, attn.norm_q, attn.norm_k, attn.proj, mlp.gate, mlp.down):
        module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    gpt(*token_batch(0))[0].backward()
    low, fp32 = torch.bfloat16, torch.float32
    assert seen == [low, fp32, fp32, low, low, low]
    assert all(p.dtype == p.grad.dtype == fp32 for p in gpt.parameters())
