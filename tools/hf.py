"""
The paper's quantities of causal language models that others trained, what BF16 logits cost each of them now,
and what would help it. No code that comes with a model is run.

    python -m tools.hf MODEL ...  # NAME or NAME@REVISION of the hub, or folders, with their tokenizers

e: the output embedding of a token; mu: the mean of all V; h: the hidden state of a position, in the dtype of
the file. mean_share: V |mu|^2 / sum |e|^2. r_emb: |e - mu| / |e|. logit_mean, _std, _absmax: mean, standard
deviation and largest size of the BF16 logits of a position; _spread: how their mean varies. r_log, r_cos: the
largest |e . h| or |cosine| with e - mu, over that with e. bf16, fp32: cross entropy in nats with such logits;
cost: their difference; estimate: what rounding at such mean logits should cost (results/mean_logit);
bf16_centered: with the logits (e - mu) . h, which under a cap is another model.
"""
import argparse
import os
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyze import centering_ratios, concatenate, measure_embeddings, write_csv
from model import GPTConfig, head_logits, head_loss, summarize
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check, number

WINDOW, PIECE = 1024, 2**18  # tokens, and characters of a text that are tokenised at a time
COST = 0.005  # nats: where BF16 logits cost less, there is nothing to mend
MASKS = ('.attn.bias', '.attention.bias', '.masked_bias', '.causal_mask')  # in old files; they are no weights

parser = argparse.ArgumentParser('python -m tools.hf', description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('models', nargs='+', metavar='MODEL', help='a folder, NAME or NAME@REVISION')
add('--text', type=os.path.expanduser, help='like --files of prepare_fineweb.py (default: the stdlib)')
add('--positions', type=number, default=16384, help='how many to measure (16384); 0: E alone, no tokenizer')
add('--out', type=Path, help='a csv file to write as well, with a row for each model')


def bf16_cost(mean, spread):
    """What BF16 logits cost in nats at mean logits N(mean, spread) up to 2,048, by results/mean_logit."""
    normal = torch.special.ndtri((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    size = (mean + spread * normal).abs().clamp(1e-3)
    half = 2 ** (size.log2().floor() - 8)  # s / 2; BF16 keeps 8 significant bits
    return (half.sinh() / half).log().mean().item()


def nats(x):
    return f'{round(x, 3) + 0:.3f}'  # + 0: never -0.000


def verdict(row):
    """What a model's row says of it: the facts, and what to do."""
    kind = f'{row["tying"]}, cap {row["cap"]}, {row["file_dtype"]}'
    share = f'‖μ‖ {row["mu_norm"]:.3g}, and ‖μ‖² is {row["mean_share"]:.1%} of the mean ‖e‖²'
    facts = f'{row["model"]}: {kind}. {share}'
    if 'cost' not in row:
        return f'{facts}. What BF16 costs was not measured.'
    cost = f'BF16 logits cost {nats(row["cost"])} nats'
    if 'estimate' in row:
        cost += f' (estimate: {nats(row["estimate"])})'
    if row['cost'] < COST:
        advice = f'Nothing to mend now: {cost}.'
    elif row['cap'] != 'none':
        advice = f'{cost}: compute them in fp32, as centering would change a capped model.'
    elif row['bf16'] - row['bf16_centered'] < COST:
        advice = f'{cost}: compute them in fp32, as centering would not help.'
    else:
        after = nats(row['bf16_centered'] - row['fp32'])
        advice = f'{cost}: serve and train with (e_i - μ) · h, and they cost {after}.'
    return f'{facts}; mean logit {row["logit_mean"]:.3g} ± {row["logit_mean_spread"]:.2g}. {advice}'


def states_and_logits(model, tokens, E):
    """tokens (n, T) int64 -> the head's inputs h (n T, H), and the logits (n, 16, V) of the first 16."""
    inputs = []

    def forward(h):  # in fp32, and so is what the model does to the logits after it, such as a cap
        inputs.append(h.float())
        return inputs[0][:, :16] @ E.T

    head = model.get_output_embeddings()
    head.forward = forward  # its own would make all n T V logits
    logits = model(input_ids=tokens, use_cache=False).logits
    del head.forward
    return inputs[0].flatten(0, 1), logits.float()


def read_text(model, tokenizer, pattern, n):
    """The text that `pattern` names as windows (m, T + 1) int64, with n targets if it has as many tokens."""
    with_bos, text = tokenizer('x')['input_ids'], tokenizer('x', add_special_tokens=False)['input_ids']
    start = with_bos[:with_bos.index(text[0])]  # of each window, as of any text: BOS or nothing
    length = min(WINDOW, n, getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW))
    of_text = length + 1 - len(start)  # tokens in a window: it has length + 1, and length targets
    n_windows = -(-n // length)
    texts = read_texts(local_files(pattern) if pattern else stdlib_files())
    pieces = (text[i:i + PIECE] for *_, text in texts for i in range(0, len(text), PIECE))
    tokens = []
    while len(tokens) < n_windows * of_text and (piece := next(pieces, None)):
        tokens += tokenizer(piece, add_special_tokens=False, split_special_tokens=True)['input_ids']
    starts = range(0, len(tokens) - of_text + 1, of_text)[:n_windows]
    check(starts, f'--text={pattern}: has fewer than {of_text} tokens')
    return torch.tensor([start + tokens[i:i + of_text] for i in starts])


def load(kind, name, **more):
    """from_pretrained of a class of transformers, for a folder, NAME or NAME@REVISION."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    return kind.from_pretrained(path, revision=revision or 'main', trust_remote_code=False, **more)


@torch.no_grad()
def measure_model(name, args):
    """Loads and measures a model -> its row, a dict."""
    model, info = load(AutoModelForCausalLM, name, dtype='auto', output_loading_info=True)
    odd = [key for key in [*info['missing_keys'], *info['unexpected_keys']] if not key.endswith(MASKS)]
    check(not odd, f'{name}: only its files or only the model of transformers has {", ".join(odd[:3])}')
    model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')
    head = model.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and head.bias is None and type(head.weight) is torch.nn.Parameter
    check(plain and head.weight.dtype in (torch.float32, torch.bfloat16, torch.float16),  # others hold codes
          f'{name}: its head is not a floating matrix E without a bias, but {str(head).splitlines()[0]}')
    E = head.weight.float()
    tied = torch.equal(model.get_input_embeddings().weight.float(), E)  # whatever its config says
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    row = {'model': name, 'file_dtype': str(head.weight.dtype).removeprefix('torch.'),
           'tying': 'tied' if tied else 'untied', 'cap': str(cap or 'none'), 'V': len(E), 'H': E.size(1),
           **measure_embeddings(E)}
    if args.positions == 0:
        return row

    bf16, fp32 = (GPTConfig(cap=cap, logits_dtype=dtype) for dtype in ('bfloat16', 'float32'))
    bf16_centered = GPTConfig(head_mode='centered_head', cap=cap, logits_dtype='bfloat16')
    h, logits = states_and_logits(model, torch.arange(16, device=E.device)[None], E)
    known = (head_logits(h, E, fp32) - logits[0]).abs().max() <= 1e-5 * logits.abs().max()
    check(known, f'{name}: its logits are not E h; what comes between is not understood')
    tokenizer = load(AutoTokenizer, name)
    check(tokenizer('a')['input_ids'] != tokenizer('b')['input_ids'],  # made without a file
          f'{name}: it has no tokenizer; --positions=0 measures E alone, without one')
    windows = read_text(model, tokenizer, args.text, args.positions).to(E.device)
    check(windows.max() < len(E), f'{name}: its tokenizer makes token {windows.max()}, of only {len(E)}')
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB
    parts = []
    for window in tqdm(windows, unit='windows', disable=None):  # None: no bar in a file
        states, _ = states_and_logits(model, window[None, :-1], E)
        for h, targets in zip(states.split(n), window[1:].split(n), strict=True):
            _, stats = head_loss(head_logits(h, E, bf16), targets, bf16)
            del stats['reg']
            stats['bf16'] = stats.pop('loss')
            for key, config in (('fp32', fp32), ('bf16_centered', bf16_centered)):
                stats[key] = head_loss(head_logits(h, E, config), targets, config)[1]['loss']
            parts.append({**stats, **centering_ratios(h, E)})
    numbers = summarize(concatenate(parts), E)
    if not cap:  # before which the logits are rounded, at means that are not known
        numbers['estimate'] = bf16_cost(numbers['logit_mean'], numbers['logit_mean_spread'])
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


def main(argv=None):
    """Measures the models, prints what they say, and then their numbers."""
    args = parser.parse_args(argv)
    rows = []
    for name in args.models:
        row = measure_model(name, args)
        rows.append({**row, 'verdict': verdict(row)})
        print(rows[-1]['verdict'], flush=True)
        if args.out:  # at once, as the next model may be refused
            write_csv(args.out, pd.DataFrame(rows))
    table = pd.DataFrame(rows).drop(columns='verdict').set_index('model')
    table = table.map(lambda x: f'{x:.6g}' if isinstance(x, float) else x)
    table = table.T.rename_axis('').reset_index()  # a line for each number, a column for each model
    print(table.to_string(index=False))


if __name__ == '__main__':
    main()
