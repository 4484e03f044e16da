"""tools/sample.py: the text of a model, against a naive loop; what it draws from."""
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
    assert sample.decode([start], tokenizer) == ('\ufffd' if tokenizer == 'chars' else '<|endoftext|>')


def test_runs(trained, tmp_path, capsys):
    """
    The likeliest token each time, after the last block_size tokens, of those that the tokenizer has.
    Of a run's folder, done or not; without its data the tokenizer has to be given.
    """
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
        logits = gpt.logits(torch.tensor([tokens[-16:]]))[0, -1]
        tokens.append(int(logits[:257].argmax()))

    def text(*flags, run=folder):
        capsys.readouterr()
        sample.main([str(run), '--prompt=import ', '--n=20', *flags])
        return capsys.readouterr().out[:-1]

    assert text('--temperature=0') == sample.decode(tokens[1:], 'bytes')
    assert text('--seed=1') == text('--seed=1') != text('--seed=2')

    begun = tmp_path / 'begun'
    begun.mkdir()
    saved['config']['data'] = f'{tmp_path}/gone'
    train.save(saved, f'{begun}/ckpt.pt')
    refused(lambda: sample.main([str(begun)]), f'{tmp_path}/gone/meta.json', '--tokenizer')
    assert text('--tokenizer=bytes', run=begun) == text()


def test_probabilities(trained, monkeypatch):
    """The softmax of logits / temperature over the top k."""
    folder = trained('run', '--steps=1')
    drawn = []

    def multinomial(probabilities, n):
        drawn.append(probabilities.sort().values)
        return torch.tensor([0])

    logits = torch.arange(320.0)  # the last 63 stand for no token
    monkeypatch.setattr(GPT, 'logits', lambda gpt, tokens: logits.expand(1, tokens.size(1), 320))
    monkeypatch.setattr(torch.Tensor, 'multinomial', multinomial)
    sample.main([folder, '--n=1', '--top_k=3', '--temperature=2'])
    sample.main([folder, '--n=1'])
    torch.testing.assert_close(drawn[0], (torch.tensor([254.0, 255, 256]) / 2).softmax(dim=0))
    torch.testing.assert_close(drawn[1], torch.arange(257.0).softmax(dim=0))
