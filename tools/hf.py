"""
The paper's quantities of causal language models that others trained, what BF16 costs each of them now, and
what would help it. No code that comes with a model is run.

    python -m tools.hf MODEL ...   # folders, or names on the hub: NAME or NAME@REVISION
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
from tools import report
from train import check, number

WINDOW, PIECE = 1024, 2**18  # tokens, and characters of a text that are tokenised at a time
COST = 0.005  # nats: where BF16 logits cost less, there is nothing to mend
MASKS = ('.attn.bias', '.attention.bias', '.masked_bias', '.causal_mask')  # in old files; they are no weights
CAPTION = (
    'e: the output embedding of a token; μ: the mean of all V; h: the hidden state of a position, in the '
    'dtype of the file. mean_share: V‖μ‖² / Σ‖e‖². r_emb: ‖e - μ‖ / ‖e‖. logit_mean, _std, _absmax: mean, '
    'standard deviation, largest size of the BF16 logits of a position; _spread: how their mean varies; '
    'all_equal: share of the positions where they are all one number. r_log, r_cos: the largest |e · h| or '
    '|cosine| with e - μ, over that with e. bf16, fp32: cross entropy in nats with such logits; cost: their '
    'difference; estimate: what rounding at such mean logits should cost (results/mean_logit); '
    'bf16_centered: with e - μ, which under a cap is another model.')

parser = argparse.ArgumentParser(usage='python -m tools.hf MODEL [...] [--flag=value ...]',
                                 description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add('models', nargs='+', metavar='MODEL', help='a folder, NAME or NAME@REVISION')
add('--text', type=os.path.expanduser, help='like --files of prepare_fineweb.py (default: the stdlib)')
add('--positions', type=number, default=16384, help='how many to measure (16384); 0: E alone')
add('--out', type=os.path.expanduser, help='folder to write to (default: results/NAME, or NAME+NAME)')


def estimated_cost(mean, spread):
    """
    What BF16 logits should cost in nats where the mean logits of the positions are N(mean, spread), by
    results/mean_logit/README.md: log(sinh(s/2) / (s/2)) for numbers s apart. Of no use above 2,048.
    """
    normal = torch.special.ndtri((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    size = (mean + spread * normal).abs().clamp(1e-3)
    half = 2 ** (size.log2().floor() - 8)  # s / 2; BF16 keeps 8 significant bits
    return (half.sinh() / half).log().mean().item()


def verdict(m):
    """What a row of models.csv says of the model: the facts, and what to do."""
    facts = (f'{m.model}: {m.tying}, cap {m.cap}, {m.file_dtype}. ‖μ‖ {m.mu_norm:.3g}, squared '
             f"{m.mean_share:.1%} of the embeddings' mean square")
    centered = m.mean_share < 0.1 / m.V  # of new random weights it is about 1 / V
    if 'cost' not in m:
        return f'{facts}. {"Already centered." if centered else "What BF16 costs was not measured."}'
    estimate = '' if 'estimate' not in m else f' (estimate: {m.estimate:.3f})'
    cost = f'BF16 logits cost {m.cost:.3f} nats{estimate}'
    if m.all_equal > 0.5:
        advice = 'All BF16 logits of a position are equal: the losses say nothing.'
    elif centered:
        advice = f'Already centered: {cost}.'
    elif m.cost < COST:
        advice = f'Nothing to mend now: {cost}.'
    elif m.cap != 'none':
        advice = f'{cost}: compute them in fp32, as centering would change a capped model.'
    elif m.tying == 'tied':
        advice = f'{cost}: train on with μ-loss; to evaluate, center a copy of the head.'
    else:
        advice = f'{cost}: center, and they cost {m.bf16_centered - m.fp32:.3f}.'
    return f'{facts}; mean logit {m.logit_mean:.3g} ± {m.logit_mean_spread:.2g}. {advice}'


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
    """from_pretrained of a class of transformers; what it cannot read is refused in one line."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    try:
        return kind.from_pretrained(path, revision=revision or 'main', trust_remote_code=False, **more)
    except (ImportError, OSError, ValueError) as error:
        check(False, f'{name}: {" ".join(str(error).split())} (E alone, --positions=0, needs no tokenizer)')


@torch.no_grad()
def measure_model(name, args):
    """Loads and measures a model -> its row of models.csv."""
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
    bf16, fp32 = (GPTConfig(cap=cap, logits_dtype=dtype) for dtype in ('bfloat16', 'float32'))
    h, logits = states_and_logits(model, torch.arange(16, device=E.device)[None], E)
    known = (head_logits(h, E, fp32) - logits[0]).abs().max() <= 1e-5 * logits.abs().max()
    row = {'model': name, 'file_dtype': str(head.weight.dtype).removeprefix('torch.'),
           'tying': 'tied' if tied else 'untied', 'cap': str(cap or 'none'), 'V': len(E), 'H': E.size(1),
           **measure_embeddings(E)}
    if args.positions == 0:
        return row

    check(known, f'{name}: its logits are not E h; what comes between is not understood')
    tokenizer = load(AutoTokenizer, name)
    check(tokenizer('a')['input_ids'] != tokenizer('b')['input_ids'],  # made without a file
          f'{name}: its tokenizer has no vocabulary; --positions=0 measures E alone')
    windows = read_text(model, tokenizer, args.text, args.positions).to(E.device)
    check(windows.max() < len(E), f'{name}: its tokenizer makes token {windows.max()}, of only {len(E)}')
    centered = E - E.mean(dim=0)
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB
    parts = []
    for window in tqdm(windows, unit='windows'):
        states, _ = states_and_logits(model, window[None, :-1], E)
        for h, targets in zip(states.split(n), window[1:].split(n), strict=True):
            _, stats = head_loss(head_logits(h, E, bf16), targets, bf16)
            del stats['reg']
            of_fp32, of_centered = head_logits(h, E, fp32), head_logits(h, centered, bf16)
            losses = {'bf16': stats.pop('loss'), 'fp32': head_loss(of_fp32, targets, fp32)[1]['loss'],
                      'bf16_centered': head_loss(of_centered, targets, bf16)[1]['loss']}
            # fp32 rounds their mean; a single logit that is another BF16 number gives more
            equal = {'all_equal': (stats['logit_std'] <= 1e-5 * stats['logit_absmax']).float()}
            parts.append({**stats, **equal, **centering_ratios(h, E), **losses})
    numbers = summarize(concatenate(parts), E)
    if not cap:  # before which the logits are rounded, at means that are not known
        numbers['estimate'] = estimated_cost(numbers['logit_mean'], numbers['logit_mean_spread'])
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


def main(argv=None):
    """Measures the models, writes models.csv and report.html, and prints what they say."""
    args = parser.parse_args(argv)
    rows = pd.DataFrame([measure_model(name, args) for name in args.models])
    rows['verdict'] = [verdict(row.dropna()) for _, row in rows.iterrows()]
    out = Path(args.out or Path('results', '+'.join(Path(name).resolve().name for name in args.models)))
    write_csv(out / 'models.csv', rows)
    table = rows.drop(columns='verdict').set_index('model')
    table = table.map(lambda x: f'{x:.6g}' if isinstance(x, float) else x)
    table = table.T.rename_axis('').reset_index()  # a line for each number, a column for each model
    tables = [dict(title='Output embeddings and logits', rows=table, caption=CAPTION)]
    report.write_page(out / 'report.html', tables, rows.verdict)
    print(table.to_string(index=False), '', *rows.verdict, '', sep='\n')
    print(f'wrote {out}; open {out / "report.html"} in a browser')


if __name__ == '__main__':
    main()
