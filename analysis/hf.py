"""
The paper's quantities of causal language models that others trained, what BF16 and centering cost them, and
whether to center them. No code that comes with a model is run.
"""
import os

import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyze import centering_ratios, concatenate, measure_embeddings, write_csv
from model import GPTConfig, head_logits, head_loss, summarize
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check

WINDOW = 1024  # tokens
PIECE = 2**18  # characters of a text that are tokenised at a time
MASKS = ('.attn.bias', '.attention.bias', '.masked_bias', '.causal_mask')  # in old files; they are no weights
CAPTION = (
    'e: the output embedding, H numbers, of one of V tokens; μ: their mean; h: the hidden state of a '
    'position. mu_norm: ‖μ‖. mean_share: V‖μ‖² / sum of ‖e‖². r_emb: ‖e - μ‖ / ‖e‖. '
    'logit_mean, _std, _absmax: mean, standard deviation, largest size of the bf16 logits of a position. '
    'logit_mean_spread: how their mean varies. logit_max: the largest of all. cos_mu_h: cosine of μ, h. '
    'r_log, r_cos: the largest |e . h|, or |cosine| of e and h, with e - μ / with e. bf16, fp32: cross '
    'entropy in nats; cost: their difference; bf16_centered: with e - μ, under a cap another model.')


def verdict(tied, cap):
    """README's advice to those who train such a model."""
    if cap:
        return "Don't center: under a cap it trains another model, untested where μ drifts."
    if tied:
        return 'Use μ-loss. Both it and centering move the input embeddings too.'
    return 'Center: it changes no probability (Fact 2). Or use μ-loss.'


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
        tokens += tokenizer(piece, add_special_tokens=False)['input_ids']
    starts = range(0, len(tokens) - of_text + 1, of_text)[:n_windows]
    check(starts, f'--text={pattern}: has fewer than {of_text} tokens')
    return torch.tensor([start + tokens[i:i + of_text] for i in starts])


@torch.no_grad()
def measure_model(name, args):
    """Loads and measures a model -> its row of models.csv."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    hub = {'revision': revision or 'main', 'trust_remote_code': False}
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype='auto', output_loading_info=True, **hub)
    odd = [key for key in [*info['missing_keys'], *info['unexpected_keys']] if not key.endswith(MASKS)]
    check(not odd, f'--hf={name}: only its files or only the model of transformers has {", ".join(odd[:3])}')
    model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')
    head = model.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and head.bias is None and type(head.weight) is torch.nn.Parameter
    check(plain and head.weight.dtype in (torch.float32, torch.bfloat16, torch.float16),  # others hold codes
          f'--hf={name}: its head is not a floating matrix E without a bias, but {str(head).splitlines()[0]}')
    E = head.weight.float()
    tied = torch.equal(model.get_input_embeddings().weight.float(), E)  # whatever its config says
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    bf16, fp32 = (GPTConfig(cap=cap, logits_dtype=dtype) for dtype in ('bfloat16', 'float32'))
    h, logits = states_and_logits(model, torch.arange(16, device=E.device)[None], E)
    known = (head_logits(h, E, fp32) - logits[0]).abs().max() <= 1e-5 * logits.abs().max()
    row = {'model': name, 'tying': 'tied' if tied else 'untied', 'cap': cap or 'none',
           'verdict': verdict(tied, cap) if known else 'Unknown: its logits are not E h.',
           'V': len(E), 'H': E.size(1), **measure_embeddings(E)}
    if args.positions == 0:
        return row

    check(known, f'--hf={name}: its logits are not E h; what comes between is not understood')
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **hub)
        if tokenizer('a')['input_ids'] == tokenizer('b')['input_ids']:
            raise ValueError('transformers makes one without a vocabulary')
    except (ImportError, OSError, ValueError) as error:
        check(False, f'--hf={name}: no tokenizer; --positions=0 for E alone ({" ".join(str(error).split())})')
    windows = read_text(model, tokenizer, args.text, args.positions).to(E.device)
    check(windows.max() < len(E), f'--hf={name}: its tokenizer makes token {windows.max()}, of only {len(E)}')

    centered = E - E.mean(dim=0)
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB
    parts = []
    for window in tqdm(windows, unit='windows'):
        states, _ = states_and_logits(model, window[None, :-1], E)
        for h, targets in zip(states.split(n), window[1:].split(n), strict=True):
            _, stats = head_loss(h, E, targets, bf16)
            del stats['reg']
            losses = {'bf16': stats.pop('loss'), 'fp32': head_loss(h, E, targets, fp32)[1]['loss'],
                      'bf16_centered': head_loss(h, centered, targets, bf16)[1]['loss']}
            parts.append({**stats, **centering_ratios(h, E), **losses})
    numbers = summarize(concatenate(parts), E)
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


def measure_models(args, out):
    """Writes models.csv and prints the verdicts -> the table of the report."""
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    write_csv(out / 'models.csv', measured)
    advice = [f'{m.model}: {m.tying}, cap {m.cap}. {m.verdict}' for m in measured.itertuples()]
    print('', *advice, sep='\n')
    rows = measured.drop(columns=['tying', 'cap', 'verdict']).set_index('model').map('{:.6g}'.format)
    rows = rows.T.rename_axis('').reset_index()  # a line for each number, a column for each model
    return [dict(title='Output embeddings and logits', rows=rows, caption='<br>'.join([*advice, CAPTION]))]
