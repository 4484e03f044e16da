"""
Measures the paper's quantities, and what BF16 costs, on causal language models that others trained, and along
the checkpoints of a training. By Fact 2 a finished model can be centered without training (--center_to).
"""
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analysis import hub, measure, plots, report, runs
from model import GPTConfig, head_loss, join_stats
from oec import sources
from oec.common import check, lock_folder
from oec.head import chunked

WINDOW, POSITIONS = 1024, 16384  # tokens of a window, and of all
SAYS = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that precision; cost: '
        'bf16 - fp32. bf16_centered: with E - μ, if no logit is capped.')


def step_of(name):
    """The step in a name such as NAME@step1000 or run/checkpoint-500, NaN if it has none."""
    found = re.search(r'(?:step|checkpoint|ckpt)[-_]?(\d+)', name) or re.search(r'@\D*(\d+)', name)
    return int(found[1]) if found else math.nan


def final_states(model, tokens):
    """tokens (n, T) -> the final hidden states (n T, H) in fp32, which the head multiplies."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).float()


def head_config(name, model):
    """The GPTConfig with which head_loss has the model's logits. UserError if it cannot: a bias, a scale."""
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    E = model.get_output_embeddings().weight
    tokens = torch.arange(min(16, len(E)), device=E.device)[None]
    theirs = model(input_ids=tokens, use_cache=False).logits[0].float()
    ours = final_states(model, tokens) @ E.float().T
    if cap:
        ours = cap * torch.tanh(ours / cap)
    near = 1e-4 if E.dtype == torch.float32 else 4 * torch.finfo(E.dtype).eps
    check((ours - theirs).abs().max() <= near * theirs.abs().max(), f'--hf={name}: its logits are not output '
          'embedding times final hidden state; what is between is not understood')
    return GPTConfig(head_mode='soft_capping' if cap else 'baseline', cap=cap or 1.0, logits_dtype='bfloat16')


def read_windows(model, tokenizer, pattern, n):
    """At least n tokens, if there are so many, of the text that `pattern` names: (windows, length + 1)."""
    most = getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW)
    length = min(WINDOW, most, n)
    wanted = -(-n // length)  # windows
    paths = sources.local_files(pattern, '--text') if pattern else sources.stdlib_files()
    tokens = []
    for _, _, text in sources.read_texts(paths):
        tokens += tokenizer(text)['input_ids']
        if len(tokens) >= wanted * (length + 1):
            break
    wanted = min(wanted, len(tokens) // (length + 1))
    check(wanted > 0, f'--text={pattern}: the text has fewer than {length + 1} tokens')
    return torch.tensor(tokens[:wanted * (length + 1)]).view(wanted, length + 1)


def of_embeddings(E):
    """E (V, H) in fp32 -> what models.csv says of it."""
    return {'V': len(E), 'H': E.size(1), 'mu_norm': E.mean(dim=0).norm().item(),
            'mean_share': measure.mean_share(E).item(), 'r_emb': measure.norm_ratios(E).mean().item()}


@torch.no_grad()
def measure_model(name, args):
    """Loads, measures and, if asked to, centers a model -> its row of models.csv."""
    row = {'model': Path(name).name, 'step': step_of(name)}
    if args.positions == 0:
        return {**row, **of_embeddings(hub.load_output_embeddings(name).float())}

    model, tokenizer = hub.load(name)
    config = head_config(name, model)
    capped = config.head_mode == 'soft_capping'
    check(not (capped and args.center_to), f'--center_to={args.center_to}: the logits of {name} are capped, '
          'and centering would change their probabilities')
    in_fp32 = replace(config, logits_dtype='float32')
    head = chunked(head_loss)
    E = model.get_output_embeddings().weight.float()
    mu = E.mean(dim=0)
    windows = read_windows(model, tokenizer, args.text, args.positions or POSITIONS)
    parts = []
    for window in tqdm(windows.to(E.device), unit='windows', disable=None):
        h, targets = final_states(model, window[None, :-1]), window[1:]
        found = measure.statistics(h, E, targets, config)
        found['bf16'] = found.pop('loss')
        found['fp32'] = head(h, E, targets, in_fp32, with_logit_stats=False)[1]['loss']
        if not capped:
            found['bf16_centered'] = head(h, E - mu, targets, config, with_logit_stats=False)[1]['loss']
        parts.append({name: values.cpu() for name, values in found.items()})
    means = {name: values.double().mean().item() for name, values in join_stats(parts).items()}
    row |= {**of_embeddings(E), 'positions': windows[:, 1:].numel(), **means,
            'cost': means['bf16'] - means['fp32']}
    if args.center_to:  # last: it changes the model
        center(name, args.center_to, model, tokenizer)
    return row


@torch.no_grad()
def center(name, new, model, tokenizer):
    """Writes the model with the output embeddings E - mu to the folder `new`, whole or not at all."""
    W = model.get_output_embeddings().weight
    check(W is not model.get_input_embeddings().weight, f'--center_to={new}: the output embeddings of {name} '
          'are tied to the input embeddings, and centering would change these')
    W.copy_(W.float() - W.float().mean(dim=0))
    model.save_pretrained(f'{new}.tmp')
    tokenizer.save_pretrained(f'{new}.tmp')
    os.rename(f'{new}.tmp', new)
    print(f'{new}: {name} with centered output embeddings; tune its repetition penalty again, if it has one')


def main(args):
    right = len(args.hf) == 1 and args.positions != 0 and not os.path.exists(args.center_to or '')
    check(not args.center_to or right,
          f'--center_to={args.center_to}: should be a new folder, for one model, without --positions=0')
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    rows = measured.dropna(axis='columns', how='all').set_index('model').map('{:.5g}'.format)
    rows = (rows.T.rename_axis('') if len(rows) == 1 else rows).reset_index()
    items = [dict(title='Output embeddings and logits', where='Section 3', rows=rows, says=SAYS)]
    out = args.out or Path('results', measured.model[0])
    with lock_folder(out, wait=True):
        runs.write_csv(Path(out, 'models.csv'), measured)
        by_step = plots.drift(measured)
        if by_step:
            items.append(plots.save(by_step, 'drift', out))
        report.write_page(out, [], items)
    print('', report.for_terminal(rows), f'wrote {out}', sep='\n')
    return 0
