"""The GPT: sizes, initial weights, the Transformer written out, its numbers, on a GPU if there is one."""
import math

import pytest
import torch
import torch.nn.functional as F

import train
from model import GPT, SIZES, gpt_config
from small_runs import float64_model
from test_facts import F64, close, generator, tiny_gpt, token_batch

DRAWN = {False: [0.15773958, -0.05497751, 0.00303591], True: [-0.05497751, -0.05497751, 0.00303591]}  # seed 1


def settings(*flags):
    """Of a command, without data, which would say what the vocabulary is."""
    return train.resolve_args(train.parser.parse_args(['--data=/nowhere', *flags]))


def test_published_sizes():
    for size, millions in {'16M': 15.6, '29M': 28.6, '57M': 57.3, '109M': 108.4, '221M': 220.8}.items():
        for tying in ('--weight_tying', '--no-weight_tying'):
            with torch.device('meta'):
                gpt = GPT(gpt_config(vars(settings(f'--size={size}', '--vocab_size=50304', tying))))
            assert (round(gpt.n_params() / 1e6, 1), gpt.blocks[0].attn.n_head) == (millions, 4)


@pytest.mark.parametrize('tying', [False, True])
def test_initial_weights(tying):
    """Those of Appendix A, and for a seed always the same."""
    gpt, _ = train.make_model(settings('--vocab_size=640', *['--weight_tying'] * tying))
    block = gpt.blocks[5]
    head = math.sqrt(2 / (224 + 640))  # Xavier's, as those of the MLP
    mlp = math.sqrt(2 / (224 + 768))
    expected = {gpt.lm_head: head, gpt.wte: head if tying else 224 ** -0.5, block.mlp.down: mlp,
                block.attn.qkv: math.sqrt(2 / (224 + 3 * 224)), block.attn.proj: 0.02 / math.sqrt(2 * 6)}
    for layer, std in expected.items():
        assert layer.weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(layer.weight.numel()))
    drawn = [w[0, 0].item() for w in (gpt.wte.weight, gpt.E, block.attn.proj.weight)]
    assert drawn == pytest.approx(DRAWN[tying], rel=1e-5)  # or a seed's old runs could not be repeated


def test_final_gain():
    """The last LayerNorm's gain is one more parameter. It is not drawn: all others are the same."""
    with_gain, without = (tiny_gpt(final_gain=gain).state_dict() for gain in (True, False))
    del with_gain['norm_f.weight']
    close(with_gain, without, rtol=0, atol=0)


def rope(x, d):
    """x (T, D): neighbours among the first d are a complex number, which position t turns."""
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=F64) / d)
    turned = torch.view_as_complex(x[:, :d].reshape(len(x), d // 2, 2)) * torch.exp(1j * angle)
    return torch.cat((torch.view_as_real(turned).flatten(1), x[:, d:]), dim=1)


def reference_hidden(gpt, tokens, d):
    """Final hidden states (T, H) of one sequence, from Appendix A; four heads of 16 dimensions."""
    x = gpt.wte.weight[tokens]
    T = len(tokens)
    future = torch.ones(T, T).triu(1).bool()
    for block in gpt.blocks:
        heads = []
        qkv = block.attn.qkv(block.norm_1(x)).view(T, 3, 4, 16)
        for i in range(4):
            q = rope(block.attn.norm_q(qkv[:, 0, i]), d)
            k = rope(block.attn.norm_k(qkv[:, 1, i]), d)
            scores = (q @ k.T / math.sqrt(16)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(dim=1) @ qkv[:, 2, i])
        x = x + block.attn.proj(torch.cat(heads, dim=1))
        y = block.norm_2(x)
        x = x + block.mlp.down(F.silu(block.mlp.gate(y)) * block.mlp.up(y))
    return gpt.norm_f(x)


@pytest.mark.parametrize('rope_fraction', [0.5, 1.0])
def test_transformer(rope_fraction):
    """It is the paper's. At the last of 100,000 positions an fp32 angle would lose its digits."""
    gpt = tiny_gpt(n_layer=2, n_embd=64, n_head=4, block_size=100_000, rope_fraction=rope_fraction)
    gpt.cos, gpt.sin = gpt.cos[-16:], gpt.sin[-16:]
    with torch.no_grad():
        for name, p in gpt.named_parameters():  # gains that are not one, an attention that is not flat
            assert 'bias' not in name
            p.copy_(torch.rand_like(p) + 0.5 if 'norm' in name else 5 * p)
    tokens = torch.randint(64, (2, 16))
    for hidden, sequence in zip(gpt.hidden(tokens), tokens, strict=True):
        expected = reference_hidden(gpt, sequence, int(16 * rope_fraction))
        close(hidden, expected, rtol=1e-6, atol=1e-6)  # the RoPE tables are fp32


def test_dtypes():
    """The trunk's matmuls are in bf16; the residual stream, LayerNorms and, if so chosen, logits in fp32."""
    gpt = tiny_gpt(dtype='bfloat16', logits_dtype='float32')
    outputs = set()
    of_norms = set()
    for module in gpt.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: outputs.add(output.dtype))
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(lambda module, inputs, output: of_norms.add(inputs[0].dtype))
    tokens, targets = token_batch(0)
    h = gpt.hidden(tokens).detach()
    assert (outputs, of_norms, h.dtype) == ({torch.bfloat16}, {torch.float32}, torch.float32)
    gpt.E.data += 100 * h.mean(dim=(0, 1))
    loss = F.cross_entropy((h.double() @ gpt.E.double().T).flatten(0, 1), targets.flatten())
    assert gpt(tokens, targets)[1]['loss'].mean().item() == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize('size', SIZES if torch.cuda.is_available() else ['16M'])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 100 * 2.0 ** -24), ('bfloat16', 16 * 2.0 ** -8)])
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

