"""
Measures the paper's quantities, and what BF16 costs, on models that others trained: causal language models in
Hugging Face format, and along the checkpoints of a training run. By Fact 2 a finished model can be centered
without training (--center_to).
"""
import contextlib
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from safetensors import safe_open
from tqdm import tqdm
from transformers.utils import cached_file

from analysis import measure, plots, report, runs
from model import GPTConfig, head_loss, join_stats
from oec import sources
from oec.common import check, lock_folder, read_json
from oec.head import chunked

WINDOW, POSITIONS = 1024, 16384  # tokens of a window, and of all
UNREADABLE = '--hf={}: not a causal language model that can be read'
SAYS = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that precision; cost: '
        'bf16 - fp32. bf16_centered: with E - μ, if no logit is capped.')
transformers.logging.set_verbosity_error()


def place(name):
    """FOLDER, NAME or NAME@REVISION -> the folder or hub name, and the options of from_pretrained."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    return path, dict(revision=revision or 'main', trust_remote_code=False)


def step_of(name):
    """The step in a name such as NAME@step1000 or run/checkpoint-500, NaN if it has none."""
    found = re.search(r'(?:step|checkpoint|ckpt)[-_]?(\d+)', name) or re.search(r'@\D*(\d+)', name)
    return int(found[1]) if found else math.nan


def load(name):
    """The model of this name, in its own dtype, and its tokenizer. No code that comes with it is run."""
    path, options = place(name)
    with sources.naming(UNREADABLE.format(name)):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype='auto', output_loading_info=True, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    check(not found['missing_keys'], f'--hf={name}: its files lack weights')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


def load_output_embeddings(name):
    """E (V, H) of the model of this name. Of safetensors files no other tensor is read."""
    path, options = place(name)
    file_of = {}  # tensor name -> file
    with sources.naming(UNREADABLE.format(name)):
        with torch.device('meta'):
            shapes = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(path, **options))
        with contextlib.suppress(OSError):  # if it is in one file
            with safe_open(cached_file(path, 'model.safetensors', **options), 'pt') as file:
                file_of = dict.fromkeys(file.keys(), 'model.safetensors')
        with contextlib.suppress(OSError):  # if it is in several
            file_of = read_json(cached_file(path, 'model.safetensors.index.json', **options))['weight_map']
    E = shapes.get_output_embeddings().weight
    its_names = [key for key, tensor in shapes.named_parameters(remove_duplicate=False) if tensor is E]
    for key in file_of:  # a file may leave out the first part of a name
        if any(f'.{whole}'.endswith(f'.{key}') for whole in its_names):
            with sources.naming(UNREADABLE.format(name)):
                with safe_open(cached_file(path, file_of[key], **options), 'pt') as file:
                    return file.get_tensor(key)
    return load(name)[0].get_output_embeddings().weight


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
        return {**row, **of_embeddings(load_output_embeddings(name).float())}

    model, tokenizer = load(name)
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
    print(f'{new}: {name} with centered output embeddings. No probability changes, but what a repetition '
          'penalty does changes: it depends on the sign of the logits')


def drift(measured, out):
    """Draws models that are checkpoints of a training -> an item in a list, empty without two steps."""
    rows = measured.dropna(subset='step').sort_values('step')
    if rows.step.nunique() < 2:
        return []
    columns = [column for column in ('mu_norm', 'mean_share', 'logit_mean', 'cost') if column in rows]
    figure, axes = plt.subplots(1, len(columns), figsize=(3.3 * len(columns), 3))
    for ax, column in zip(axes, columns, strict=True):
        for name, part in rows.groupby(rows.model.str.replace(r'@.*|\d+$', '', regex=True), sort=False):
            ax.plot(part.step, part[column], marker='.', label=name)
        ax.set(xlabel='step', ylabel=plots.LABELS[column])
    axes[0].legend()
    item = dict(figure=figure, title='The same, by training step', where='', says=SAYS)
    return [plots.save(item, 'drift', out)]


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
        report.write_page(out, [], items + drift(measured, out))
    print('', report.for_terminal(rows), f'wrote {out}', sep='\n')
    return 0
