"""
Prints a text that a model writes. RUN is a run's folder, whose model.pt it reads, or a .pt file.

    python -m tools.sample out/mine --prompt='To be, or'
    python -m tools.sample out/mine/ckpt.pt --n=500 --temperature=0.8 --top_k=50
"""
import argparse
import glob
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
add('--temperature', type=float, default=1.0, help='0 for the likeliest token (1.0)')
add('--top_k', type=integer, help='sample from the k likeliest tokens (all)')
add('--seed', type=integer, default=1, help='another one for another text (1)')


def decode(tokens, tokenizer):
    """A list of tokens -> their text."""
    if tokenizer == 'gpt2':
        return tiktoken.get_encoding('gpt2').decode(tokens)
    alphabet = CHARS if tokenizer == 'chars' else range(256)
    pieces = [bytes([byte]) for byte in alphabet] + [b'<|endoftext|>']
    return b''.join(pieces[token] for token in tokens).decode(errors='replace')


@torch.no_grad()
def main(argv=None):
    args = parser.parse_args(argv)
    path = f'{args.run}/model.pt' if os.path.isdir(args.run) else args.run
    models = glob.glob(f'{args.run}/*/model.pt')  # of the runs, if it is a sweep's folder
    check(os.path.exists(path), f'there is no {path}; the runs are: {models}')
    saved = read_checkpoint(path)
    gpt = GPT(gpt_config(saved['config']))
    gpt.load_state_dict(saved['model'])
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    gpt.eval().to(device)

    # the text begins with end-of-text, as every document does
    path = f'{saved["config"]["data"]}/meta.json'
    tokenizer = read_json(path).get('tokenizer')
    check(tokenizer in VOCAB_SIZES, f'{path} names no tokenizer of prepare_fineweb.py')
    vocab_size = VOCAB_SIZES[tokenizer]
    tokens = load_encoder(tokenizer)(args.prompt).tolist()
    torch.manual_seed(args.seed)
    for _ in range(args.n):
        context = torch.tensor([tokens[-gpt.config.block_size:]], device=device)
        h = gpt.hidden(context)[0, -1]
        logits = gpt.head(h)[:vocab_size]  # the other rows are padding
        values, ids = logits.sort(descending=True)
        choice = 0
        if args.temperature > 0:
            choice = (values[:args.top_k] / args.temperature).softmax(dim=0).multinomial(1)
        tokens.append(ids[choice].item())
    print(decode(tokens[1:], tokenizer))


if __name__ == '__main__':
    main()
