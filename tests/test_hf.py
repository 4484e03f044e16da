"""analyze.py --hf: each figure against a second computation, on small random models made by transformers."""
import json
import re
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import analyze
import hf
from conftest import refused
from model import GPT, GPTConfig

pytest.importorskip('transformers', reason='analyze.py --hf needs it: pip install transformers')
from tokenizers import ByteLevelBPETokenizer  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    StableLmConfig,
    StableLmForCausalLM,
)

LLAMA = dict(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)
GEMMA = {**LLAMA, 'num_key_value_heads': 1, 'head_dim': 16, 'initializer_range': 0.05}


def tokenizer():
    """Bytes and an end of text: 257 tokens."""
    bytes_alone = ByteLevelBPETokenizer()
    bytes_alone.train_from_iterator([], vocab_size=257, special_tokens=['<|endoftext|>'], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone._tokenizer, bos_token='<|endoftext|>')


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """Folders of models whose output embeddings have a mean put in by hand."""
    root, words = tmp_path_factory.mktemp('models'), tokenizer()

    def save(name, model, norm, **how):
        torch.manual_seed(1)
        direction = torch.randn(model.config.hidden_size)
        with torch.no_grad():
            model.get_output_embeddings().weight.add_(norm * direction / direction.norm())
        model.save_pretrained(root / name, **how)
        words.save_pretrained(root / name)

    torch.manual_seed(0)
    shape = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    save('gpt2', GPT2LMHeadModel(GPT2Config(**shape)), 5)
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False))
    save('llama', llama, 40)
    save('sharded', llama, 0, max_shard_size='60KB')
    save('llama_bf16', llama.bfloat16(), 0)
    save('gemma2', Gemma2ForCausalLM(Gemma2Config(**GEMMA, final_logit_softcapping=4.0)), 0.3)
    save('cohere', CohereForCausalLM(CohereConfig(**GEMMA, logit_scale=0.25)), 1)
    save('phi', PhiForCausalLM(PhiConfig(**LLAMA)), 1)
    save('bert', BertForMaskedLM(BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1,
                                            num_attention_heads=2, intermediate_size=32)), 1)
    assert len(list((root / 'sharded').glob('*.safetensors'))) > 1
    return root


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp('text') / 'a.txt'
    path.write_text('To centre or not to centre, that is the rounding. ' * 30)
    return str(path)


def measured(models, text, tmp_path, *names, flags=()):
    """What models.csv says of these models: a list of dicts."""
    out = tmp_path / 'results'
    folders = [str(models / name) for name in names]
    flags = [f'--text={text}', '--positions=1000', f'--out={out}', *flags]
    assert analyze.main(['--hf', *folders, *flags]) == 0
    assert (out / 'report.html').stat().st_size > 10_000
    return pd.read_csv(out / 'models.csv').to_dict('records')


def plain(folder, text, n=1000):
    """A model in float64, its output embeddings, and final hidden states and targets over the text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    n = -(-n // 64)
    tokens = torch.tensor(tokenizer()(open(text).read())['input_ids'])[:n * 65].view(n, 65)
    found = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
    hook.remove()
    E = model.get_output_embeddings().weight.detach()
    return model, E, found[0].flatten(0, 1), logits, tokens[:, 1:].flatten()


def low(x):
    return x.bfloat16().double()


@pytest.mark.parametrize('name', ['gpt2', 'llama', 'sharded', 'gemma2'])
def test_each_figure_is_a_plain_computation_in_float64(models, text, tmp_path, name):
    (found,) = measured(models, text, tmp_path, name)
    model, E, h, logits, targets = plain(models / name, text)
    mu, variance = E.mean(dim=0), (E - E.mean(dim=0)).square().sum()
    lost, lost_centered = ((low(x) - x).square().sum() / variance for x in (E, E - mu))
    expected = {'V': len(E), 'H': 32, 'tied': name in ('gpt2', 'gemma2'), 'positions': 1024,
                'mu_norm': mu.norm(), 'spread': (variance / len(E)).sqrt(),
                'ratio': mu.norm() / (variance / len(E)).sqrt(), 'lost': lost, 'lost_centered': lost_centered,
                'r_emb_mean': ((E - mu).norm(dim=1) / E.norm(dim=1)).mean(),
                'cos_mu_h_mean': F.cosine_similarity(mu[None], h).mean(), 'fact_3_mean': 1.0,
                'r_log_mean': ((h @ (E - mu).T).abs().amax(dim=1) / (h @ E.T).abs().amax(dim=1)).mean(),
                'fp32': F.cross_entropy(logits, targets)}
    for key, value in expected.items():  # h and E are in fp32 there
        assert found[key] == pytest.approx(float(value), rel=2e-3 if 'lost' in key else 1e-4, abs=1e-6), key

    # the head in bf16; fp32 hidden states may tip over to the next bf16 number here and there
    def rounded(E):
        logits = low(low(h) @ low(E).T)
        return low(4 * torch.tanh(logits / 4)) if name == 'gemma2' else logits
    assert found['bf16'] == pytest.approx(F.cross_entropy(rounded(E), targets).item(), abs=2e-3)
    assert found['logit_mean_mean'] == pytest.approx(rounded(E).mean().item(), rel=1e-2)
    if name == 'gemma2':
        assert 'bf16_centered' not in found and abs(found['logit_absmax_max']) <= 4
        return
    assert found['bf16_centered'] == pytest.approx(F.cross_entropy(rounded(E - mu), targets).item(), abs=5e-4)
    assert abs(found['bf16'] - found['fp32']) > 10 * abs(found['bf16_centered'] - found['fp32'])
    p, y = rounded(E).softmax(dim=1), F.one_hot(targets, len(E))
    assert found['gradient_sum_mean'] == pytest.approx(low(p - y).sum(dim=1).mean().item(), abs=5e-5)


def test_several_models_and_weights_in_bf16(models, text, tmp_path, capsys):
    whole, sharded, low_ = measured(models, text, tmp_path, 'llama', 'sharded', 'llama_bf16')
    assert {**whole, 'name': ''} == {**sharded, 'name': ''} and low_['dtype'] == 'bfloat16'
    copy = shutil.copytree(models / 'gpt2', tmp_path / 'llama')
    names = [m['name'] for m in measured(models, text, tmp_path, 'llama', copy, flags=['--positions=64'])]
    assert names == [str(models / 'llama'), str(copy)]
    # stored in bf16 it has lost unit^2 / 12 on average, which is what rounding the fp32 model loses
    assert low_['lost'] == pytest.approx(whole['lost'], rel=0.1)
    said = capsys.readouterr().out
    assert f'BF16 costs llama {whole["bf16"] - whole["fp32"]:.4f} nats, centered ' in said


def test_this_code_s_own_model_has_the_same_statistics(text, tmp_path):
    """A GPT of model.py as StableLM, whose rotary pairs are (j, j + d / 2) instead of (2j, 2j + 1)."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_embd=32, n_head=2, vocab_size=320, block_size=64, logits_dtype='bfloat16')
    gpt = GPT(config)
    with torch.no_grad():
        gpt.E.add_(3 * torch.randn(32))
        for p in gpt.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    theirs = StableLmForCausalLM(StableLmConfig(
        vocab_size=320, hidden_size=32, intermediate_size=config.n_hidden, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, qk_layernorm=True,
        partial_rotary_factor=0.5, layer_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False)).eval()
    order = torch.cat((torch.arange(0, 8, 2), torch.arange(1, 8, 2), torch.arange(8, 16)))
    weights = {'model.embed_tokens.weight': gpt.wte.weight, 'model.norm.weight': gpt.norm_f.weight,
               'lm_head.weight': gpt.E}
    for i, block in enumerate(gpt.blocks):
        q, k, v = block.attn.qkv.weight.chunk(3)
        q, k = (x.view(2, 16, 32)[:, order].reshape(32, 32) for x in (q, k))
        at, mlp = f'model.layers.{i}.self_attn', f'model.layers.{i}.mlp'
        weights.update({f'{at}.q_proj.weight': q, f'{at}.k_proj.weight': k, f'{at}.v_proj.weight': v,
                        f'{at}.o_proj.weight': block.attn.proj.weight,
                        f'model.layers.{i}.input_layernorm.weight': block.norm_1.weight,
                        f'model.layers.{i}.post_attention_layernorm.weight': block.norm_2.weight})
        weights.update({f'{mlp}.{name}_proj.weight': getattr(block.mlp, name).weight
                        for name in ('gate', 'up', 'down')})
        for head in range(2):
            weights[f'{at}.q_layernorm.norms.{head}.weight'] = block.attn.norm_q.weight[order]
            weights[f'{at}.k_layernorm.norms.{head}.weight'] = block.attn.norm_k.weight[order]
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.endswith('norm.bias') for name in missing)

    windows = torch.randint(320, (6, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = analyze.statistics(analyze.positions(gpt, windows), gpt.E, config)
        E = theirs.get_output_embeddings().weight
        facts, found = hf.text_facts(theirs, E, E.mean(dim=0), windows, config)
    assert ours.keys() == found.keys() and len(ours['loss']) == 384
    for name in ('logit_mean', 'logit_std', 'cos_mu_h', 'r_cos', 'r_log', 'r_emb', 'loss'):
        a, b = ours[name].double().mean().item(), found[name].double().mean().item()
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
    exact = (ours['loss'].double() - ours['rounding_loss']).mean().item()
    assert facts['fp32'] == pytest.approx(exact, rel=1e-5)


def test_odd_rows_are_named_and_left_out_on_request(models, text, tmp_path):
    torch.manual_seed(0)
    E = torch.randn(3000, 16)
    E[7] = E[2000]
    E[100:120] *= 2 / E[100:120].norm(dim=1, keepdim=True)
    found = hf.odd_rows(E, 2990)
    assert {what: hf.ranges(rows) for what, rows in found.items()} == {
        'padding beyond the tokenizer': '2990-2999', 'equal to another row': '7, 2000',
        'of one constant norm': '100-119'}
    assert hf.odd_rows(torch.randn(3000, 16), None) == {}
    (found,) = measured(models, text, tmp_path, 'llama', flags=['--drop_odd_rows'])
    _, E, *_ = plain(models / 'llama', text)
    assert found['odd'] == '63 padding beyond the tokenizer (257-319)'
    assert found['mu_norm'] == pytest.approx(E[:257].mean(dim=0).norm().item(), rel=1e-6)


@pytest.mark.parametrize('name', ['llama', 'sharded'])
def test_a_centered_copy_is_the_same_model(models, text, tmp_path, name):
    new = tmp_path / 'centered'
    measured(models, text, tmp_path, name, flags=[f'--center_to={new}'])
    before, E, _, logits, _ = plain(models / name, text)
    after, centered, _, logits_after, _ = plain(new, text)
    assert centered.mean(dim=0).norm() < 1e-6 * E.norm() < E.mean(dim=0).norm()
    assert (logits.softmax(dim=1) - logits_after.softmax(dim=1)).abs().max() < 1e-5
    for key, value in before.state_dict().items():
        assert key == 'lm_head.weight' or torch.equal(value, after.state_dict()[key]), key
    assert sorted(p.name for p in new.iterdir()) == sorted(p.name for p in (models / name).iterdir())
    prompt = torch.arange(1, 9)[None]
    first, second = (model.generate(prompt, max_new_tokens=40, do_sample=False) for model in (before, after))
    assert torch.equal(first, second)
    refused(lambda: analyze.main(['--hf', str(models / name), f'--center_to={new}']), 'be a new folder')


def test_what_cannot_be_centered(models, text, tmp_path):
    new = tmp_path / 'new'
    for name, word in (('gpt2', 'tied'), ('gemma2', 'tied')):
        refused(lambda name=name: analyze.main(['--hf', str(models / name), f'--center_to={new}']), word)
    llama = ['--hf', str(models / 'llama')]
    refused(lambda: analyze.main([*llama, f'--center_to={tmp_path}/no/folder']), 'folder')
    refused(lambda: analyze.main([*llama, str(models / 'gpt2'), f'--center_to={new}']), 'one model')
    # with a mean of 1e6 the logits are not exact enough in fp32 to say that the probabilities are the same
    far, words = AutoModelForCausalLM.from_pretrained(models / 'llama'), tokenizer()
    with torch.no_grad():
        far.get_output_embeddings().weight.add_(1e6)
    far.save_pretrained(tmp_path / 'far')
    words.save_pretrained(tmp_path / 'far')
    flags = [f'--text={text}', '--positions=64', f'--center_to={new}']
    refused(lambda: analyze.main(['--hf', str(tmp_path / 'far'), *flags]), 'changes probabilities', status=1)
    shutil.rmtree(tmp_path / 'far')
    bare = shutil.copytree(models / 'llama', tmp_path / 'bare')
    torch.save(hf.load(str(bare))[0].state_dict(), bare / 'pytorch_model.bin')
    (bare / 'model.safetensors').unlink()
    refused(lambda: analyze.main(['--hf', str(bare), *flags]), 'safetensors')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['bare']


def test_folders_that_are_no_such_model(models, text, tmp_path, monkeypatch):
    def damaged(name, change):
        folder = shutil.copytree(models / 'llama', tmp_path / name)
        change(folder)
        return str(folder)

    def edit(**values):
        def change(folder):
            config = json.loads((folder / 'config.json').read_text())
            (folder / 'config.json').write_text(json.dumps({**config, **values}))
        return change

    def cut(folder):
        data = (folder / 'model.safetensors').read_bytes()
        (folder / 'model.safetensors').write_bytes(data[:len(data) // 2])
    pwned = tmp_path / 'pwned'

    def code(folder):
        (folder / 'evil.py').write_text(f'open({str(pwned)!r}, "w")\n')
        edit(model_type='evil', architectures=['EvilForCausalLM'],
             auto_map={'AutoConfig': 'evil.C', 'AutoModelForCausalLM': 'evil.M'})(folder)
    (tmp_path / 'empty').mkdir()
    for folder, *words in (
            (str(tmp_path / 'empty'),), (str(models / 'bert'), 'BertForMaskedLM'), (damaged('cut', cut),),
            (damaged('code', code),), (damaged('no_json', lambda f: (f / 'config.json').write_text('{')),),
            (damaged('other', edit(num_hidden_layers=3)), 'lack'), (str(models / 'cohere'), 'not understood'),
            (str(models / 'phi'), 'bias'), (damaged('typed', edit(hidden_size='x')),)):
        refused(lambda folder=folder: analyze.main(['--hf', folder, f'--out={tmp_path}/out']), folder, *words)
    assert not pwned.exists() and not (tmp_path / 'out').exists()
    one = ['--hf', str(models / 'llama'), f'--out={tmp_path}/out']
    refused(lambda: analyze.main([*one, '--text=/nowhere/*.txt']), '--text=/nowhere')
    refused(lambda: analyze.main([*one, '--theory']), '--hf')
    refused(lambda: analyze.main(['--center_to=x', '--theory']), '--hf')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    refused(lambda: analyze.main(one), 'pip install transformers')


def test_without_text_or_tokenizer(models, tmp_path, capsys):
    folder = shutil.copytree(models / 'gpt2', tmp_path / 'gpt2')
    for path in folder.glob('tokenizer*'):
        path.unlink()
    for where in (folder, models / 'gpt2'):
        assert analyze.main(['--hf', str(where), '--positions=0', f'--out={tmp_path}/out']) == 0
        said = capsys.readouterr().out
        assert 'times the spread of the output embeddings' in said
        assert re.search(r'cross entropy, head in fp32 +\| +- \|', said)
    refused(lambda: analyze.main(['--hf', str(folder), '--text=x', f'--out={tmp_path}/out']), 'tokenizer')


def test_ranges():
    assert hf.ranges(np.array([1])) == '1' and hf.ranges(np.array([1, 2, 5, 7, 8])) == '1-2, 5, 7-8'
    assert hf.ranges(np.arange(0, 40, 2)) == '0, 2, 4, 6, 8, 10, ...'
