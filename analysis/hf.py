"""
Measures the paper's quantities, and what BF16 costs, on models that others trained: causal language models in
Hugging Face format. By Fact 2 a finished model can be centered without training (--center_to).
"""
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm import tqdm

from analysis import measure, report, runs
from model import GPTConfig, head_loss, join_stats
from oec import sources
from oec.common import check, lock_folder
from oec.head import chunked

WINDOW, POSITIONS = 1024, 16384  # tokens of a window, and of all
SAYS = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that precision; cost: '
        'bf16 - fp32. bf16_centered: with E - μ, if no logit is capped.')
transformers.logging.set_verbosity_error()


def load(name):
    """FOLDER, NAME or NAME@REVISION -> the model in its dtype and its tokenizer. None of its code is run."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    options = dict(revision=revision or 'main', trust_remote_code=False)
    with sources.naming(f'--hf={name}: not a causal language model that can be read'):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype='auto', output_loading_info=True, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    check(not found['missing_keys'], f'--hf={name}: its files lack weights')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


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


@torch.no_grad()
def measure_model(name, args):
    """Loads, measures and, if asked to, centers a model -> its row of models.csv."""
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
    row = {'model': Path(name).name, 'V': len(E), 'H': E.size(1),
           'mu_norm': mu.norm().item(), 'mean_share': measure.mean_share(E).item(),
           'r_emb': measure.norm_ratios(E).mean().item(), 'positions': windows[:, 1:].numel(),
           **means, 'cost': means['bf16'] - means['fp32']}
    if args.center_to:  # last: it changes the model
        center(name, args.center_to, model, tokenizer, windows[:1, :-1].to(E.device))
    return row


@torch.no_grad()
def center(name, new, model, tokenizer, tokens):
    """
    Writes the model with the output embeddings E - mu to the folder `new`, whole or not at all. UserError if
    in fp32 a probability after `tokens` (n, T) changes by more than 1e-5.
    """
    dtype = model.dtype
    W = model.float().get_output_embeddings().weight
    before = model(tokens).logits.softmax(dim=-1)
    W -= W.mean(dim=0)
    change = (model(tokens).logits.softmax(dim=-1) - before).abs().max().item()
    check(change <= 1e-5, f'--center_to={new}: centering {name} changes a probability by {change:.1e}; are '
          'its output embeddings tied to the input embeddings? Nothing was written')
    model.to(dtype).save_pretrained(f'{new}.tmp')
    tokenizer.save_pretrained(f'{new}.tmp')
    os.rename(f'{new}.tmp', new)
    print(f'{new}: {name} with centered output embeddings; probabilities change by at most {change:.0e}, but '
          'sampling with a repetition penalty does change, since that depends on the sign of the logits')


def main(args):
    check(not args.center_to or (len(args.hf) == 1 and not os.path.exists(args.center_to)),
          f'--center_to={args.center_to}: should be a new folder, for one model')
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    rows = measured.dropna(axis='columns', how='all').set_index('model').map('{:.5g}'.format)
    rows = (rows.T.rename_axis('') if len(rows) == 1 else rows).reset_index()
    items = [dict(title='Output embeddings and logits', where='Section 3', rows=rows, says=SAYS)]
    out = args.out or Path('results', measured.model[0])
    with lock_folder(out, wait=True):
        runs.write_csv(Path(out, 'models.csv'), measured)
        report.write_page(out, [], items)
    print('', report.for_terminal(rows), f'wrote {out}', sep='\n')
    return 0
