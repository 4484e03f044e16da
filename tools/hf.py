"""
Measures causal language models that others trained. Each is a folder, or a NAME on the hub, with
its tokenizer. It needs transformers (pip install 'transformers>=5.0').

    python -m tools.hf MODEL ...

It prints the numbers below, where e is the output embedding of a token, mu the mean of all V of
them, and h the hidden state of a position, in the dtype of the model's file. Numbers of a position
are averaged over all positions.

mu_norm                      |mu|
mean_share                   V |mu|^2 / (sum of all |e|^2)
r_emb                        the mean of |e - mu| / |e|
logit_mean, _std, _absmax    mean, standard deviation and largest size of a position's BF16 logits
logit_mean_spread            the standard deviation over positions of their mean logits
logit_max                    the largest size of a logit
logit_mean_left              what centering would leave of the mean logit, with each token weighted
                             by how often it is in the text: rare tokens may have another mean
loss                         the cross entropy in nats with fp32 logits
bf16_cost                    how much larger it is with BF16 logits
bf16_cost_centered           how much larger it is with BF16 logits (e - mu) . h. Centering a model
                             that has a soft-cap makes another model of it
"""
import argparse
import os

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyze import concatenate, measure_embeddings
from model import GPTConfig, head_logits, head_loss, summarize
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check, integer

parser = argparse.ArgumentParser('python -m tools.hf', description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('models', nargs='+', metavar='MODEL', help='a folder, or a NAME on the hub')
add('--text', type=os.path.expanduser, help='like --files of prepare_fineweb.py (default: the '
    'standard library)')
add('--positions', type=integer, default=16384, help='about how many to measure (16384)')


def read_windows(tokenizer, pattern, n):
    """
    Windows (T + 1,) int64 of a text, with about n positions together. Each begins as any text does
    for this tokenizer, with its BOS token for example.
    """
    paths = local_files(pattern) if pattern else stdlib_files()
    windows = []
    for text in read_texts(paths):
        for start in range(0, len(text), 3000):  # characters: most often fewer than 1,024 tokens
            piece = text[start:start + 3000]
            ids = tokenizer(piece, truncation=True, max_length=1024)['input_ids']
            if len(ids) > 1:
                windows.append(torch.tensor(ids))
                n -= len(ids) - 1
            if n <= 0:
                return windows
    return windows


def hidden_states(model, tokens):
    """tokens (T,) int64 -> the head's inputs h (T, H), in fp32."""
    return model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0].float()


def check_head(name, model, E, cap, tokens):
    """
    Refuses a model whose logits are not E h, with the soft-cap of its config: some scale them, and
    where E is quantised, its numbers are codes.
    """
    expected = head_logits(hidden_states(model, tokens), E, GPTConfig(cap=cap))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    error = (expected - logits).abs().max()
    check(model.get_output_embeddings().bias is None and error <= 0.02 * logits.abs().max(),
          f'{name}: its logits are not E h; what else its head does is not understood')


@torch.no_grad()
def measure(name, args):
    """Loads and measures a model -> a dict of numbers."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    check(tokenizer('a')['input_ids'] != tokenizer('b')['input_ids'],
          f'{name} has no files of a tokenizer')  # transformers makes an empty one then
    model = AutoModelForCausalLM.from_pretrained(name, dtype='auto').eval()
    model.to('cuda' if torch.cuda.is_available() else 'cpu')
    E = model.get_output_embeddings().weight.float()
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    bf16 = GPTConfig(cap=cap, logits_dtype='bfloat16')
    fp32 = GPTConfig(cap=cap, logits_dtype='float32')
    centered = GPTConfig(cap=cap, logits_dtype='bfloat16', head_mode='centered_head')

    windows = read_windows(tokenizer, args.text, args.positions)
    windows = [window.to(E.device) for window in windows]
    check_head(name, model, E, cap, windows[0][:16])
    targets_of_all = torch.cat([window[1:] for window in windows])
    counts = targets_of_all.bincount(minlength=len(E)).float()
    mu_f = counts @ E / counts.sum()  # the mean of e, weighted by how often each token occurs
    left = mu_f - E.mean(dim=0)

    parts = []
    for window in tqdm(windows, unit=' windows', disable=None):
        h = hidden_states(model, window[:-1])
        targets = window[1:]
        logits = head_logits(h, E, bf16)
        _, part = head_loss(logits, targets, bf16)  # numbers (T,) of each position
        del part['reg']  # 0
        bf16_loss = part.pop('loss')
        centered_loss = F.cross_entropy(head_logits(h, E, centered), targets, reduction='none')
        part['loss'] = F.cross_entropy(head_logits(h, E, fp32), targets, reduction='none')
        part['logit_mean_left'] = h @ left
        part['bf16_cost'] = bf16_loss - part['loss']
        part['bf16_cost_centered'] = centered_loss - part['loss']
        parts.append(part)
    facts = {'V': len(E), 'positions': len(targets_of_all), 'cap': cap or 0}
    return {**facts, **measure_embeddings(E), **summarize(concatenate(parts), E)}


def main(argv=None):
    args = parser.parse_args(argv)
    for name in args.models:
        numbers = measure(name, args)
        print(name)
        for key, value in numbers.items():
            print(f'    {key:20}{value:12.6g}')


if __name__ == '__main__':
    main()
