"""tools/sample.py: the text of a model, against a naive loop, and how often it draws each token."""
import numpy as np
import pytest
import tiktoken
import torch

import train
from conftest import refused
from model import GPT, GPTConfig
from tools import sample

VOCAB_SIZES = {'chars': 64, 'bytes': 257, 'gpt2': 50257}
PROMPTS = {'chars': ('if x', [63, 8, 11, 0, 30]), 'bytes': ('n\xfc', [256, 110, 195, 188]),
           'gpt2': ('To be', [50256, 2514, 307])}


def write_model(folder, tokenizer, **settings):
    """Saves an untrained model, whose padding rows have the largest logits -> the model and its .pt file."""
    torch.manual_seed(0)
    V = 64 * -(-VOCAB_SIZES[tokenizer] // 64) + 64
    config = dict(method='baseline', n_layer=1, n_embd=8, n_head=2, vocab_size=V, block_size=4, **settings)
    gpt = GPT(GPTConfig(**{name: value for name, value in config.items() if name != 'method'}))
    with torch.no_grad():
        gpt.E.mul_(9)
        gpt.E[VOCAB_SIZES[tokenizer]:] = 99 * gpt.E[0]
        gpt.E[VOCAB_SIZES[tokenizer]::2] *= -1
    data = folder / 'data'
    data.mkdir()
    train.save({'tokenizer': tokenizer}, f'{data}/meta.json')
    train.save({'model': gpt.state_dict(), 'step': 1, 'config': {**config, 'data': str(data)}},
               f'{folder}/model.pt')
    return gpt, f'{folder}/model.pt'


@pytest.mark.parametrize('settings', [
    {}, {'weight_tying': True}, {'cap': 2.0}, {'logits_dtype': 'bfloat16', 'final_gain': False}])
@pytest.mark.parametrize('tokenizer', VOCAB_SIZES)
def test_likeliest(tokenizer, settings, tmp_path, capsys):
    """The likeliest token each time, of the last block_size tokens: a prompt is cut from the left."""
    if tokenizer == 'gpt2':
        try:
            gpt2 = tiktoken.get_encoding('gpt2')
        except Exception:  # of requests
            pytest.skip("tiktoken cannot download GPT-2's ranks here")
    gpt, path = write_model(tmp_path, tokenizer, **settings)
    prompt, tokens = PROMPTS[tokenizer]
    with torch.no_grad():
        for _ in range(9):
            logits = gpt.logits(torch.tensor([tokens[-4:]]))[0, -1]
            tokens = [*tokens, int(logits[:VOCAB_SIZES[tokenizer]].argmax())]

    chars = " estaronil\nfcd._()pu,'mh\"g=b:0xEyTwk1-I#vAN2RLS\\Cq][OPFD3>M45*U\ufffd"
    if tokenizer == 'gpt2':
        expected = gpt2.decode(tokens[1:])
    elif tokenizer == 'chars':
        expected = ''.join(chars[token] for token in tokens[1:])
    else:
        parts = [b'<|endoftext|>' if token == 256 else bytes([token]) for token in tokens[1:]]
        expected = b''.join(parts).decode(errors='replace')
    sample.main([path, f'--prompt={prompt}', '--n=9', '--temperature=0'])
    assert capsys.readouterr().out == expected + '\n'


@pytest.mark.parametrize('flags, temperature, top_k', [
    ([], 1.0, 64), (['--temperature=0.5'], 0.5, 64), (['--top_k=5'], 1.0, 5),
    (['--top_k=3', '--temperature=2'], 2.0, 3), (['--top_k=99'], 1.0, 64)])
def test_how_often(flags, temperature, top_k, tmp_path, capsys, monkeypatch):
    """Tokens are drawn as often as softmax(logits / temperature) over the top k says."""
    path = write_model(tmp_path, 'chars')[1]
    logits = torch.linspace(2, -2, 128).roll(30)
    logits[64:] = 50.0  # padding
    monkeypatch.setattr(GPT, 'logits', lambda self, tokens: logits.expand(1, tokens.size(1), -1))
    sample.main([path, '--n=4000', *flags])
    text = capsys.readouterr().out[:-1]
    assert len(text) == 4000

    p = np.exp(logits[:64].double().numpy() / temperature)
    p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    chars = " estaronil\nfcd._()pu,'mh\"g=b:0xEyTwk1-I#vAN2RLS\\Cq][OPFD3>M45*U\ufffd"
    share = np.array([text.count(char) for char in chars]) / 4000
    assert (np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / 4000)).all()


def test_runs(trained, tmp_path, capsys):
    """A run's folder, done or not; without its data the tokenizer has to be given."""
    folder = trained('run', '--steps=2', '--keep_every=1')
    capsys.readouterr()
    texts = []
    for seed in (1, 2, 1):
        sample.main([folder, '--prompt=import ', '--n=20', f'--seed={seed}'])
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith('import ') and texts[0] == texts[2] != texts[1]

    model = train.read_checkpoint(f'{folder}/model.pt')
    (tmp_path / 'begun').mkdir()
    model['config']['data'] = f'{tmp_path}/gone'
    train.save(model, f'{tmp_path}/begun/ckpt.pt')
    refused(lambda: sample.main([f'{tmp_path}/begun']), f'{tmp_path}/gone/meta.json', '--tokenizer')
    sample.main([f'{tmp_path}/begun', '--prompt=import ', '--n=20', '--tokenizer=bytes'])
    assert capsys.readouterr().out == texts[0]

    (tmp_path / 'empty').mkdir()
    refused(lambda: sample.main([f'{tmp_path}/empty']), 'empty', 'model.pt')
