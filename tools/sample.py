"""
Prints a text that a model writes. RUN is a run's folder or one of its .pt files.

    python -m tools.sample out/mine --prompt='To be, or'
    python -m tools.sample out/mine/model_1000.pt --n=500 --temperature=0.8 --top_k=50
"""
import argparse
import os

import tiktoken
import torch

from model import GPT, gpt_config
from prepare_fineweb import CHARS, VOCAB_SIZES, load_encoder
from train import check, integer, read_checkpoint, read_json

parser = argparse.ArgumentParser('python -m tools.sample', description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('run', metavar='RUN', type=os.path.expanduser)
add('--prompt', default='', help='what the text begins with')
add('--n', type=integer, default=200, help='how many tokens to write (200)')
add('--temperature', type=float, default=1.0, help='of the softmax (1.0); 0: the likeliest token')
add('--top_k', type=integer, help='sample from the k likeliest tokens (all)')
add('--seed', type=integer, default=1, help='another one for another text (1)')
add('--tokenizer', choices=VOCAB_SIZES, help="that of the run, if the run's data are gone")


def decode(tokens, tokenizer):
    """A list of tokens -> their text."""
    if tokenizer == 'gpt2':
        return tiktoken.get_encoding('gpt2').decode(tokens)
    if tokenizer == 'chars':  # the last token is end-of-text, and all other characters as well
        pieces = [bytes([byte]) for byte in CHARS] + ['\ufffd'.encode()]
    else:
        pieces = [bytes([byte]) for byte in range(256)] + [b'<|endoftext|>']
    return b''.join(pieces[token] for token in tokens).decode(errors='replace')


@torch.no_grad()
def main(argv=None):
    args = parser.parse_args(argv)

    # the model
    path = args.run
    if os.path.isdir(path):
        path = f'{args.run}/model.pt'
        if not os.path.exists(path):  # the run has not ended
            path = f'{args.run}/ckpt.pt'
    check(os.path.exists(path), f'{args.run} has no model.pt or ckpt.pt')
    saved = read_checkpoint(path)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    gpt.eval()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    gpt.to(device)

    # the tokenizer
    meta_path = f'{saved["config"]["data"]}/meta.json'
    tokenizer = args.tokenizer or read_json(meta_path).get('tokenizer')
    check(tokenizer, f'there is no {meta_path}, which names the tokenizer: give --tokenizer')

    # the text. It begins with end-of-text, as every document does
    torch.manual_seed(args.seed)
    vocab_size = VOCAB_SIZES[tokenizer]
    k = min(args.top_k or vocab_size, vocab_size)
    temperature = args.temperature
    if temperature == 0:
        k = 1
        temperature = 1.0
    tokens = load_encoder(tokenizer)(args.prompt).tolist()
    for _ in range(args.n):
        context = torch.tensor(tokens[-gpt.config.block_size:], device=device)
        logits = gpt.logits(context[None])[0, -1, :vocab_size]  # the other rows are padding
        top = logits.topk(k)
        probabilities = (top.values / temperature).softmax(dim=0)
        choice = probabilities.multinomial(1)
        tokens.append(top.indices[choice].item())
    print(decode(tokens[1:], tokenizer))


if __name__ == '__main__':
    main()
