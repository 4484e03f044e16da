"""
The paper's quantities of causal language models that others trained, and what BF16 and centering cost them;
several checkpoints of a training give a figure. No code that comes with a model is run.
"""
import math
import os
import re
from dataclasses import replace

import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis import measure, plots, runs
from model import GPTConfig, head_logits, summarize
from prepare_fineweb import local_files, read_texts, stdlib_files
from train import check

WINDOW = 1024  # tokens
PIECE = 2**18  # characters of a text that are tokenised at a time
CAPTION = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that '
           'precision; cost: bf16 - fp32. bf16_centered: with E - μ; bf16_zipf_centered: with the mean '
           'weighted by how often a token occurs in --text. Under a cap either is another model. (Section 3)')
STEP = re.compile(r'(?<![a-z])(?:step|checkpoint|ckpt|iter)[-_=]?(\d+)(?![\w.])(?!.*/.)', re.IGNORECASE)


def training_and_step(name):
    """a/checkpoint-500 -> (a, 500), b@stage1-step20-tokens1B -> (b@stage1, 20), others -> (name, NaN)."""
    steps = list(STEP.finditer(name))
    if not steps:
        return name, math.nan
    return name[:steps[-1].start()].rstrip('/@-_') or '.', int(steps[-1][1])


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
    The text that `pattern` names as windows (m, T) int64, of at least n tokens if it has as many, and what
    the tokenizer begins a text with, (m, 0 or more): BOS, with which each window begins as well.
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
    return tokens, torch.tensor([start] * n_windows, dtype=torch.int64)


@torch.no_grad()
def measure_model(name, args):
    """Loads, measures and, if asked to, centers a model -> its row of models.csv."""
    training, step = training_and_step(name)
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    options = {'revision': revision or 'main', 'trust_remote_code': False}
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype='auto', output_loading_info=True, **options)
    check(not info['missing_keys'], f'--hf={name}: its files lack weights')
    model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')
    head = model.get_output_embeddings()
    check(isinstance(head, torch.nn.Linear) and head.bias is None,
          f'--hf={name}: its head is not a matrix E without a bias, but {head}')
    E = head.weight.float()
    row = {'model': name, 'training': training, 'step': step, 'V': len(E), 'H': E.size(1),
           **measure.of_embeddings(E)}
    if args.positions == 0:
        return row

    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    config = GPTConfig(cap=cap, logits_dtype='bfloat16')
    in_fp32 = replace(config, logits_dtype='float32')
    tokens, start = read_text(model, tokenizer, args.text, args.positions)
    tied = head.weight is model.get_input_embeddings().weight
    check(not (args.center_to and (tied or cap)), f'--center_to: the output embeddings of {name} are tied, '
          'or its logits are capped: it would become another model')
    windows = torch.cat([start, tokens], dim=1).to(E.device)
    check(windows.max() < len(E), f'--hf={name}: its tokenizer makes token {windows.max()}, of only {len(E)}')
    h, logits = states_and_logits(model, windows[:1, :16])
    check((head_logits(h, E, in_fp32) - logits).abs().max() <= 1e-5 * logits.abs().max(),
          f'--hf={name}: its logits are not E h; what comes between is not understood')

    frequencies = tokens.flatten().bincount(minlength=len(E)).to(E) / tokens.numel()
    means = {'bf16_centered': E.mean(dim=0), 'bf16_zipf_centered': frequencies @ E}
    parts = []
    for window in tqdm(windows, unit='windows'):
        h, targets = states_and_logits(model, window[None, :-1])[0], window[1:]
        stats = measure.statistics(h, E, targets, config)
        stats['bf16'] = stats.pop('loss')
        stats['fp32'] = measure.statistics(h, E, targets, in_fp32, loss_alone=True)['loss']
        for centered, mean in means.items():
            stats[centered] = measure.statistics(h, E - mean, targets, config, loss_alone=True)['loss']
        parts.append(stats)
    numbers = summarize(measure.join(parts), E)
    if args.center_to:  # last: it changes the model
        head.weight.copy_(E - E.mean(dim=0))
        model.save_pretrained(args.center_to)
        tokenizer.save_pretrained(args.center_to)
        print(f'{args.center_to} is centered; tune its repetition penalty again, if it has one')
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


def of_models(args, out):
    """Writes models.csv and, of several checkpoints, a figure -> the items of the report."""
    check(not args.center_to or (len(args.hf) == 1 and args.positions and not os.path.exists(args.center_to)),
          '--center_to should be a new folder, for one model, without --positions=0')
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    runs.write_csv(out / 'models.csv', measured)
    rows = measured.drop(columns='training').dropna(axis='columns', how='all')
    rows = rows.set_index('model').map('{:.6g}'.format)
    rows = (rows.T.rename_axis('') if len(rows) == 1 else rows).reset_index()
    table = dict(title='Output embeddings and logits', rows=rows, caption=CAPTION)
    return [table, *plots.draw(plots.drift, [measured], '', 'drift', out)]
