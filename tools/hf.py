"""
Measures causal language models that others trained. Each is a folder, or a NAME on the hub, with
its tokenizer. It needs transformers (pip install 'transformers>=5.0').

    python -m tools.hf MODEL ...

It prints these numbers, where e is the output embedding of a token, mu the mean of all of them,
and h the hidden state of a position. Those with h are means over all positions of a text.

mu_norm              |mu|
r_emb                the mean of |e - mu| / |e|
logit_mean           the mean of a position's logits, mu . h
logit_mean_left      what centering would leave of it, with each token weighted by how often it is
                     in the text: rare tokens may have another mean
loss                 the cross entropy in nats with fp32 logits
bf16_cost            how much larger it is with BF16 logits
bf16_cost_centered   how much larger it is with BF16 logits (e - mu) . h. Centering a model that
                     has a soft-cap makes another model of it
"""
import argparse
import os

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import GPTConfig, head_logits
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check, integer

parser = argparse.ArgumentParser('python -m tools.hf', description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('models', nargs='+', metavar='MODEL', help='a folder, or a NAME on the hub')
add('--text', type=os.path.expanduser, help='files, a quoted glob (the standard library)')
add('--positions', type=integer, default=16384, help='about how many to measure (16384)')


def read_windows(tokenizer, pattern, n):
    """
    Windows (T + 1,) int64 of a text, with about n positions together. Each begins as any text does
    for this tokenizer, with its BOS token for example.
    """
    windows = []
    for text in read_texts(local_files(pattern) if pattern else stdlib_files()):
        for start in range(0, len(text), 3000):  # characters: most often fewer than 1,024 tokens
            piece = text[start:start + 3000]
            ids = tokenizer(piece, truncation=True, max_length=1024)['input_ids']
            if len(ids) > 1:
                windows.append(torch.tensor(ids))
                n -= len(ids) - 1
            if n <= 0:
                return windows
    return windows


@torch.no_grad()
def measure(name, args):
    """Loads and measures a model -> a dict of numbers."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype='auto')
    except (OSError, ValueError) as error:
        check(False, f'{name}: {error!r}')
    check(tokenizer('a')['input_ids'] != tokenizer('b')['input_ids'],
          f'{name} has no files of a tokenizer')  # transformers makes an empty one then
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model.eval().to(device)
    head = model.get_output_embeddings()
    E = head.weight.float()
    mu = E.mean(dim=0)
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    of_fp32 = GPTConfig(cap=cap, logits_dtype='float32')
    of_bf16 = GPTConfig(cap=cap, logits_dtype='bfloat16')
    of_centered = GPTConfig(cap=cap, logits_dtype='bfloat16', head_mode='centered_head')

    windows = read_windows(tokenizer, args.text, args.positions)
    counts = torch.cat([window[1:] for window in windows]).bincount(minlength=len(E))
    weighted_mu = counts.to(E) @ E / counts.sum()
    parts = []
    for window in windows:
        window = window.to(device)
        targets = window[1:]
        out = model(input_ids=window[None, :-1], output_hidden_states=True, use_cache=False)
        h = out.hidden_states[-1][0].float()
        fp32 = head_logits(h, E, of_fp32)
        bf16 = head_logits(h, E, of_bf16)
        centered = head_logits(h, E, of_centered)

        # some models scale their logits, and where E is quantised, its numbers are codes
        error = (fp32 - out.logits[0]).abs().max()
        check(head.bias is None and error <= 0.02 * fp32.abs().max(),
              f'{name}: its logits are not E h; what else its head does is not understood')

        loss = F.cross_entropy(fp32, targets, reduction='none')
        parts.append(torch.stack([
            bf16.mean(dim=1),
            h @ (weighted_mu - mu),
            loss,
            F.cross_entropy(bf16, targets, reduction='none') - loss,
            F.cross_entropy(centered, targets, reduction='none') - loss]))
    means = torch.cat(parts, dim=1).double().mean(dim=1)
    norms = E.norm(dim=1)
    r_emb = ((E - mu).norm(dim=1) / norms)[norms > 0]  # some models have rows of zeros
    names = 'mu_norm r_emb logit_mean logit_mean_left loss bf16_cost bf16_cost_centered'.split()
    return dict(zip(names, [mu.norm(), r_emb.mean(), *means], strict=True))


def main(argv=None):
    args = parser.parse_args(argv)
    for name in args.models:
        print(name)
        for key, value in measure(name, args).items():
            print(f'    {key:20}{value:12.6g}')


if __name__ == '__main__':
    main()
