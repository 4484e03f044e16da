"""
The paper's quantities of causal language models that others trained, and what BF16 and centering cost them.
No code that comes with a model is run.
"""
import os
from dataclasses import replace

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
CAPTION = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that '
           'precision; cost: bf16 - fp32. bf16_centered: with E - μ, another model under a cap. (Section 3)')


def states_and_logits(model, tokens):
    """
    tokens (n, T) int64 -> the inputs h (n T, H) of the model's head, and the logits (n T, V) that the model
    makes of E h. Both are in fp32, and so is what comes between the two, such as a cap.
    """
    inputs = []

    def in_fp32(head, given, _):
        inputs.append(given[0].float())
        return inputs[-1] @ head.weight.float().T

    hook = model.get_output_embeddings().register_forward_hook(in_fp32)
    logits = model(input_ids=tokens, use_cache=False).logits
    hook.remove()
    return inputs[0].flatten(0, 1), logits.flatten(0, 1).float()


def read_text(model, tokenizer, pattern, n):
    """
    The text that `pattern` names as windows (m, T + 1) int64, with n targets if it has as many tokens. Each
    begins with what the tokenizer begins a text with, BOS or nothing.
    """
    with_bos, text = tokenizer('x')['input_ids'], tokenizer('x', add_special_tokens=False)['input_ids']
    start = with_bos[:with_bos.index(text[0])]
    max_length = getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW)
    length = min(WINDOW, max_length, n)
    n_windows = -(-n // length)
    of_text = length + 1 - len(start)  # tokens in a window: it has length + 1, and length targets
    paths = local_files(pattern) if pattern else stdlib_files()
    texts = (text for *_, text in read_texts(paths))
    pieces = (text[i:i + PIECE] for text in texts for i in range(0, len(text), PIECE))
    tokens = []
    while len(tokens) < n_windows * of_text and (piece := next(pieces, None)):
        tokens += tokenizer(piece, add_special_tokens=False)['input_ids']
    n_windows = min(n_windows, len(tokens) // of_text)
    check(n_windows, f'--text={pattern}: has fewer than {of_text} tokens')
    tokens = torch.tensor(tokens[:n_windows * of_text]).view(n_windows, of_text)
    return torch.cat([torch.tensor([start] * n_windows, dtype=torch.int64), tokens], dim=1)


@torch.no_grad()
def measure_model(name, args):
    """Loads and measures a model -> its row of models.csv."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    hub = {'revision': revision or 'main', 'trust_remote_code': False}
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype='auto', output_loading_info=True, **hub)
    check(not info['missing_keys'], f'--hf={name}: its files lack weights')
    model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')
    head = model.get_output_embeddings()
    check(isinstance(head, torch.nn.Linear) and head.bias is None,
          f'--hf={name}: its head is not a matrix E without a bias, but {head}')
    E = head.weight.float()
    row = {'model': name, 'V': len(E), 'H': E.size(1), **measure_embeddings(E)}
    if args.positions == 0:
        return row

    tokenizer = AutoTokenizer.from_pretrained(path, **hub)
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    config = GPTConfig(cap=cap, logits_dtype='bfloat16')
    in_fp32 = replace(config, logits_dtype='float32')
    windows = read_text(model, tokenizer, args.text, args.positions).to(E.device)
    check(windows.max() < len(E), f'--hf={name}: its tokenizer makes token {windows.max()}, of only {len(E)}')
    h, logits = states_and_logits(model, windows[:1, :16])
    check((head_logits(h, E, in_fp32) - logits).abs().max() <= 1e-5 * logits.abs().max(),
          f'--hf={name}: its logits are not E h; what comes between is not understood')

    centered = E - E.mean(dim=0)
    n = max(1, 2**25 // len(E))  # positions at a time: no N x V tensor is over 128 MB
    parts = []
    for window in tqdm(windows, unit='windows'):
        states, _ = states_and_logits(model, window[None, :-1])
        for h, targets in zip(states.split(n), window[1:].split(n), strict=True):
            _, stats = head_loss(h, E, targets, config)
            del stats['reg']
            losses = {'bf16': stats.pop('loss'),
                      'fp32': head_loss(h, E, targets, in_fp32)[1]['loss'],
                      'bf16_centered': head_loss(h, centered, targets, config)[1]['loss']}
            parts.append({**stats, **centering_ratios(h, E), **losses})
    numbers = summarize(concatenate(parts), E)
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


def measure_models(args, out):
    """Writes models.csv -> the table of the report, a line for each model or revision."""
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    write_csv(out / 'models.csv', measured)
    rows = measured.set_index('model').map('{:.6g}'.format)
    rows = (rows.T.rename_axis('') if len(rows) == 1 else rows).reset_index()
    return [dict(title='Output embeddings and logits', rows=rows, caption=CAPTION)]
