"""tools/sample.py: the text of a model, against a naive loop."""
import pytest
import torch

import train
from conftest import refused
from model import GPT, gpt_config
from prepare_fineweb import load_encoder
from test_prepare import gpt2_or_skip
from tools import sample


@pytest.mark.parametrize('tokenizer', ['bytes', 'chars', 'gpt2'])
def test_decode(tokenizer):
    if tokenizer == 'gpt2':
        gpt2_or_skip()
    text = 'def f(x):\n    return x == "if"'
    start, *tokens = load_encoder(tokenizer)(text).tolist()
    assert sample.decode(tokens, tokenizer) == text
    assert sample.decode([start], tokenizer) == '<|endoftext|>'


def test_runs(trained, tmp_path, capsys):
    """The likeliest token each time, after the last block_size tokens, of those that the tokenizer has."""
    folder = trained('run', '--steps=2', '--block_size=16')
    saved = train.read_checkpoint(f'{folder}/model.pt')
    E = saved['model']['lm_head.weight']
    E[:257] = torch.randn(257, 32)  # so that each context has another token
    E[257:] = 9 * torch.randn(63, 32)
    train.save(saved, f'{folder}/model.pt')
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    tokens = load_encoder('bytes')('import ').tolist()
    for _ in range(20):
        logits = gpt.head(gpt.hidden(torch.tensor([tokens[-16:]])))[0, -1]
        tokens.append(int(logits[:257].argmax()))

    def text(*flags, run=folder):
        capsys.readouterr()
        sample.main([run, '--prompt=import ', '--n=20', *flags])
        return capsys.readouterr().out[:-1]

    assert text('--top_k=1') == sample.decode(tokens[1:], 'bytes')
    assert text('--temperature=0', run=f'{folder}/model.pt') == text('--top_k=1')
    assert text('--top_k=999') == text('--seed=1') != text('--seed=2')

    refused(lambda: text(run=str(tmp_path)), f'{tmp_path}/model.pt', f'{folder}/model.pt')
    saved['config']['data'] = str(tmp_path)
    train.save(saved, f'{folder}/model.pt')
    refused(text, f'{tmp_path}/meta.json', 'tokenizer')
    train.save({'tokenizer': 'of my own'}, f'{tmp_path}/meta.json')
    refused(text, f'{tmp_path}/meta.json', 'tokenizer')
