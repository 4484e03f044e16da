"""
Measures causal language models that others trained: the paper's quantities, what BF16 logits cost each model
now, and what would help. It needs transformers (pip install 'transformers>=5.0'). No code that comes with a
model is run.

    python -m tools.hf MODEL ...  # each a folder, or NAME or NAME@REVISION on the hub, with its tokenizer

In this list e is the output embedding of a token, mu the mean of all V of them, and h the hidden state of a
position, in the dtype of the model's file. Numbers of a position are averaged over all positions.

mu_norm                            |mu|
mean_share                         V |mu|^2 / (sum of all |e|^2)
r_emb                              the mean of |e - mu| / |e|
logit_mean, _std, _absmax          mean, standard deviation and largest size of a position's BF16 logits
logit_mean_spread                  the standard deviation over positions of their mean logits
logit_mean_f                       the mean logit with each token weighted by how often it is in the text:
                                   mu_f . h, before a cap, where mu_f is the mean of e weighted in this way
r_log, r_cos                       the largest |e . h|, or |cosine|, with e - mu, divided by that with e
cos_mu_h                           the cosine of mu and h
fp32, bf16                         the cross entropy in nats with logits in that dtype
cost                               bf16 - fp32
estimate                           what BF16 should cost at such mean logits (results/mean_logit)
bf16_centered                      the cross entropy with BF16 logits (e - mu) . h. Centering a model with
                                   a soft-cap makes another model of it
"""
import argparse
import os
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analyze import centering_ratios, concatenate, estimate_bf16_cost, measure_embeddings, write_csv
from model import GPTConfig, head_logits, head_loss, summarize
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check, integer

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as missing:
    check(False, f"tools.hf needs transformers, pip install 'transformers>=5.0': {missing}")

WINDOW = 1024  # tokens that a model sees at a time
PIECE = 2**18  # characters of a text that are tokenised at a time
COST = 0.005  # nats: where BF16 logits cost less, there is nothing to mend
LARGE = 64  # a mean logit from which on BF16's spacing is 0.5 or more
MASKS = ('.attn.bias', '.attention.bias', '.masked_bias', '.causal_mask')  # in old files; they are no weights

parser = argparse.ArgumentParser('python -m tools.hf', description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('models', nargs='+', metavar='MODEL', help='a folder, NAME or NAME@REVISION')
add('--text', type=os.path.expanduser, help='like --files of prepare_fineweb.py (default: the stdlib)')
add('--positions', type=integer, default=16384, help='how many to measure (16384); 0: E alone, no tokenizer')
add('--out', type=os.path.expanduser, help='a csv file to which a row for each model is added')


# -------- the model
def load(kind, name, **more):
    """from_pretrained of a class of transformers, for a folder, NAME or NAME@REVISION."""
    if os.path.isdir(name):
        path, revision = name, ''
    else:
        path, _, revision = name.partition('@')
    return kind.from_pretrained(path, revision=revision or 'main', trust_remote_code=False, **more)


def load_model(name):
    """The model of transformers, which has exactly the weights of its files."""
    model, info = load(AutoModelForCausalLM, name, dtype='auto', output_loading_info=True)
    odd = [*info['missing_keys'], *info['unexpected_keys']]
    odd = [key for key in odd if not key.endswith(MASKS)]
    check(not odd, f'{name}: only its files or only the model of transformers has {", ".join(odd[:3])}')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')


def check_head(model, name):
    """Refuses a head that does anything but h -> E h, with E a matrix of floating numbers in memory."""
    head = model.get_output_embeddings()
    kind = str(head).splitlines()[0]

    # quantised weights are in a Linear or a Parameter of another class, or in another dtype
    is_plain = type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter
    is_floating = is_plain and head.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    check(is_floating and head.bias is None,
          f'{name}: its head is not a floating matrix E without a bias, but {kind}')

    # accelerate's hooks replace `forward`, and leave the weights on the disk or on the meta device
    is_placed = 'forward' not in vars(head) and not head.weight.is_meta
    check(is_placed, f'{name}: its head {kind} is under a device_map, or its forward is replaced')


def states_and_logits(model, tokens, E):
    """
    tokens (n, T) int64 -> the head's inputs h (n T, H), and the logits (n, 16, V) of the first 16 positions.
    Both are in fp32, and so is what the model does to the logits, such as a soft-cap.
    """
    inputs = []

    def forward(h):
        inputs.append(h.float())
        return h[:, :16].float() @ E.T

    head = model.get_output_embeddings()
    head.forward = forward  # for this call: the head's own would make all n T V logits
    logits = model(input_ids=tokens, use_cache=False).logits
    del head.forward
    return inputs[0].flatten(0, 1), logits.float()


def check_logits(model, E, cap, name):
    """Refuses a model whose logits are not E h, with the soft-cap of its config: some scale them, say."""
    tokens = torch.arange(16, device=E.device)[None]
    h, logits = states_and_logits(model, tokens, E)
    expected = head_logits(h, E, GPTConfig(cap=cap, logits_dtype='float32'))
    error = (expected - logits[0]).abs().max()
    check(error <= 1e-5 * logits.abs().max(),
          f'{name}: its logits are not E h; what comes between is not understood')


# -------- the text
def load_tokenizer(name):
    """The tokenizer of a model. Refuses the empty one that transformers makes if there is no file of it."""
    tokenizer = load(AutoTokenizer, name)
    check(tokenizer('a')['input_ids'] != tokenizer('b')['input_ids'],
          f'{name}: it has no tokenizer; --positions=0 measures E alone, without one')
    return tokenizer


def read_windows(model, tokenizer, pattern, n):
    """
    The text that `pattern` names as windows (m, T + 1) int64, which have n targets together if the text has
    as many tokens. Each window begins as any text does for this tokenizer: with its BOS token, or nothing.
    """
    with_bos = tokenizer('x')['input_ids']
    without_bos = tokenizer('x', add_special_tokens=False)['input_ids']
    bos = with_bos[:with_bos.index(without_bos[0])]

    longest = getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW)
    n_targets = min(WINDOW, n, longest)  # of a window
    n_text = n_targets + 1 - len(bos)  # tokens of the text in a window
    n_windows = -(-n // n_targets)  # rounded up

    tokens = []
    for piece in read_pieces(pattern):
        tokens += tokenizer(piece, add_special_tokens=False, split_special_tokens=True)['input_ids']
        if len(tokens) >= n_windows * n_text:
            break

    starts = range(0, len(tokens) - n_text + 1, n_text)[:n_windows]
    check(starts, f'--text={pattern} has fewer than {n_text} tokens')
    return torch.tensor([bos + tokens[start:start + n_text] for start in starts])


def read_pieces(pattern):
    """Yields the text that `pattern` names, or that of the standard library, in pieces."""
    paths = local_files(pattern) if pattern else stdlib_files()
    for _, _, text in read_texts(paths):
        for start in range(0, len(text), PIECE):
            yield text[start:start + PIECE]


# -------- the numbers
def measure_text(model, E, cap, windows):
    """Measures a model with output embeddings E (V, H) on windows (m, T + 1) int64 -> a dict of numbers."""
    heads = {'bf16': GPTConfig(cap=cap, logits_dtype='bfloat16'),
             'fp32': GPTConfig(cap=cap, logits_dtype='float32'),
             'bf16_centered': GPTConfig(cap=cap, logits_dtype='bfloat16', head_mode='centered_head')}
    counts = torch.bincount(windows[:, 1:].flatten(), minlength=len(E)).float()
    mu_f = counts @ E / counts.sum()  # the mean of e, weighted by how often each token occurs
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB

    parts = []
    for window in tqdm(windows, unit='windows', disable=None):  # None: no bar in a file
        states, _ = states_and_logits(model, window[None, :-1], E)
        for h, targets in zip(states.split(n), window[1:].split(n), strict=True):
            part = {}  # numbers (n,) of these positions
            for name, config in heads.items():
                logits = head_logits(h, E, config)
                _, stats = head_loss(logits, targets, config, with_stats=name == 'bf16')
                part[name] = stats.pop('loss')
                del stats['reg']  # 0
                part.update(stats)
            part['logit_mean_f'] = h @ mu_f
            part.update(centering_ratios(h, E))
            parts.append(part)

    numbers = summarize(concatenate(parts), E)
    numbers['cost'] = numbers['bf16'] - numbers['fp32']
    if not cap:  # with one, the logits are rounded before it, at means that are not known
        numbers['estimate'] = estimate_bf16_cost(numbers['logit_mean'], numbers['logit_mean_spread'])
    return numbers


@torch.no_grad()
def measure_model(name, args):
    """Loads and measures a model -> its row, a dict."""
    model = load_model(name)
    check_head(model, name)
    weight = model.get_output_embeddings().weight
    E = weight.float()
    is_tied = torch.equal(model.get_input_embeddings().weight.float(), E)  # whatever its config says
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    row = {
        'model': name,
        'file_dtype': str(weight.dtype).removeprefix('torch.'),
        'tying': 'tied' if is_tied else 'untied',
        'cap': str(cap or 'none'),
        'V': len(E),
        'H': E.size(1),
        **measure_embeddings(E)}
    if args.positions == 0:
        return row

    check_logits(model, E, cap, name)
    windows = read_windows(model, load_tokenizer(name), args.text, args.positions).to(E.device)
    check(windows.max() < len(E), f'{name}: its tokenizer makes token {windows.max()}, of only {len(E)}')
    row['text'] = args.text or 'stdlib'
    row['positions'] = windows[:, 1:].numel()
    return {**row, **measure_text(model, E, cap, windows)}


# -------- what the numbers say
def nats(x):
    return f'{round(x, 3) + 0:.3f}'  # + 0: never -0.000


def verdict(row):
    """What a model's row says of it: the facts, and what to do."""
    facts = f'{row["model"]}: {row["tying"]}, cap {row["cap"]}, {row["file_dtype"]}. '
    facts += f'‖μ‖ {row["mu_norm"]:.3g}, and ‖μ‖² is {row["mean_share"]:.1%} of the mean ‖e‖²'
    if 'cost' not in row:
        return f'{facts}. What BF16 costs was not measured.'

    cost = f'BF16 logits cost {nats(row["cost"])} nats'
    if 'estimate' in row:
        cost += f' (estimate: {nats(row["estimate"])})'

    saved = row['bf16'] - row['bf16_centered']
    if row['cost'] < COST:
        advice = f'Nothing to mend now: {cost}.'
    elif row['cap'] != 'none':
        advice = f'{cost}: compute them in fp32, as centering would change a capped model.'
    elif saved < COST:
        advice = f'{cost}: compute them in fp32, as centering would not help.'
    else:
        after = nats(row['bf16_centered'] - row['fp32'])
        advice = f'{cost}: serve and train with (e_i - μ) · h, and they cost {after}.'

    # centering takes mu . h off each logit: where rare tokens have other embeddings, that is not enough
    left = row['logit_mean_f'] - row['logit_mean']
    if row['cap'] == 'none' and abs(left) >= LARGE:
        advice += (f' After centering, the mean logit would be {left:.0f} with each token weighted by how '
                   'often it occurs; with a μ that is weighted in the same way it would be 0.')
    return f'{facts}; mean logit {row["logit_mean"]:.3g} ± {row["logit_mean_spread"]:.2g}. {advice}'


def read_rows(path):
    """The rows of a csv file that an earlier call wrote, as texts; [] if there is no such file."""
    check(not os.path.isdir(path), f'--out={path} is a folder, and should be a csv file')
    if not os.path.exists(path):
        return []
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    check('model' in table, f'--out={path} is not a csv file of tools.hf')
    return table.to_dict('records')


def main(argv=None):
    """Measures the models, prints what they say, and then their numbers."""
    args = parser.parse_args(argv)
    check(args.positions >= 0, f'--positions={args.positions} should not be negative')
    earlier = read_rows(args.out) if args.out else []
    rows = []
    for name in args.models:
        row = measure_model(name, args)
        row['verdict'] = verdict(row)
        rows.append(row)
        print(row['verdict'], flush=True)
        if args.out:  # at once, as the next model may be refused
            write_csv(Path(args.out), pd.DataFrame(earlier + rows))

    table = pd.DataFrame(rows).drop(columns='verdict').set_index('model')
    table = table.map(lambda x: f'{x:.6g}' if isinstance(x, float) else x)
    table = table.T.rename_axis('').reset_index()  # a line for each number, a column for each model
    print(table.to_string(index=False))


if __name__ == '__main__':
    main()
