"""
The same quantities of models that others trained, any causal language model in Hugging Face format, and what
BF16 costs it. By Fact 2 a finished model can be centered without training (--center_to).
"""
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analysis import measure, report, runs
from model import GPTConfig, head_loss, join_stats
from oec import sources
from oec.common import UserError, check, lock_folder
from oec.head import chunked

WINDOW, POSITIONS = 1024, 16384  # tokens of a window, and of all


def load(path):
    """A folder or a hub name -> (model in its own dtype, tokenizer); no code of the folder's own is run."""
    try:
        import transformers
    except ImportError as error:
        raise UserError('--hf needs transformers: pip install transformers') from error
    transformers.logging.set_verbosity_error()
    with sources.naming(f'--hf={path}: not a causal language model that can be read'):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype='auto', trust_remote_code=False, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    check(not found['missing_keys'], f'--hf={path}: its files lack weights')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


def final_states(model, tokens):
    """tokens (n, T) -> the final hidden states (n T, H) in fp32, which the head multiplies."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).float()


def head_config(path, model):
    """The GPTConfig whose head has the model's logits. UserError if they have more to them."""
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    E = model.get_output_embeddings().weight
    tokens = torch.arange(min(16, len(E)), device=E.device)[None]
    theirs = model(input_ids=tokens, use_cache=False).logits[0].float()
    ours = final_states(model, tokens) @ E.float().T
    if cap:
        ours = cap * torch.tanh(ours / cap)
    near = 1e-4 if E.dtype == torch.float32 else 4 * torch.finfo(E.dtype).eps
    check((ours - theirs).abs().max() <= near * theirs.abs().max(), f'--hf={path}: its logits are not output '
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
def measure_model(path, args):
    """Loads, measures and, if asked to, centers a model -> its row of models.csv."""
    model, tokenizer = load(path)
    config = head_config(path, model)
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
        if config.head_mode == 'baseline':  # centering would change capped logits
            found['bf16_centered'] = head(h, E - mu, targets, config, with_logit_stats=False)[1]['loss']
        parts.append({name: values.cpu() for name, values in found.items()})
    means = {name: values.double().mean().item() for name, values in join_stats(parts).items()}
    if args.center_to:
        center(path, args.center_to, model, tokenizer, windows[:1, :-1].to(E.device))
    return {'model': Path(path).name, 'V': len(E), 'H': E.size(1), 'positions': windows[:, 1:].numel(),
            'mu_norm': mu.norm().item(), 'mean_share': measure.mean_share(E).item(),
            'r_emb': measure.norm_ratios(E).mean().item(), **means, 'cost': means['bf16'] - means['fp32']}


def center(path, new, model, tokenizer, tokens):
    """
    Writes the model with the output embeddings E - mu to the folder `new`, whole or not at all. UserError if
    in fp32 a probability after `tokens` (n, T) changes by more than 1e-5.
    """
    dtype = model.dtype
    W = model.float().get_output_embeddings().weight
    before = model(tokens).logits.softmax(dim=-1)
    W -= W.mean(dim=0)
    change = (model(tokens).logits.softmax(dim=-1) - before).abs().max().item()
    check(change <= 1e-5, f'--center_to={new}: centering {path} changes a probability by {change:.1e}; are '
          'its output embeddings tied to the input embeddings, or its logits capped? Nothing was written')
    model.to(dtype).save_pretrained(f'{new}.tmp')
    tokenizer.save_pretrained(f'{new}.tmp')
    os.rename(f'{new}.tmp', new)
    print(f'{new}: {path} with centered output embeddings; probabilities change by at most {change:.0e}')


def main(args):
    check(not args.center_to or (len(args.hf) == 1 and not os.path.exists(args.center_to)),
          f'--center_to={args.center_to}: should be a new folder, for one model')
    measured = pd.DataFrame([measure_model(path, args) for path in args.hf])
    rows = measured.set_index('model').T.map('{:.5g}'.format).rename_axis('').reset_index()
    table = dict(
        title='Output embeddings and logits', where='Section 3', rows=rows,
        says='mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that precision; cost: '
             'bf16 - fp32. bf16_centered: with E - μ, if no logit is capped.')
    out = args.out or Path('results', '-'.join(measured.model))
    with lock_folder(out, wait=True):
        runs.write_csv(Path(out, 'models.csv'), measured)
        report.write_page(out, [], [table])
    print('', report.for_terminal(rows), f'wrote {out}', sep='\n')
    return 0
