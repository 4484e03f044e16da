"""
The paper's quantities of causal language models that others trained, and what BF16 and centering cost them;
several checkpoints of a training give a figure. No code that comes with a model is run.
"""
import html
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm import tqdm

from analysis import measure, plots, report, runs
from model import GPTConfig, chunked_head_loss, join_stats, summarize
from oec import sources
from oec.common import check, lock_folder

WINDOW, POSITIONS = 1024, 16384  # tokens of a window, and of all
PIECE = 2**18  # characters of a text that are tokenised at a time
CAPTION = ('mean_share: V‖μ‖² / ‖E‖². fp32, bf16: cross entropy in nats by a head in that '
           'precision; cost: bf16 - fp32. bf16_centered: with E - μ; bf16_zipf_centered: with the mean '
           'weighted by how often a token occurs in --text. Under a cap either is another model. (Section 3)')
STEP = re.compile(r'(?<![a-z])(?:step|checkpoint|ckpt|iter)[-_=]?(\d+)(?![\w.])', re.IGNORECASE)
transformers.logging.set_verbosity_error()


def place(name):
    """FOLDER, NAME or NAME@REVISION -> the folder or name, and the revision."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    return path, revision or 'main'


def training_and_step(name):
    """a/checkpoint-500 -> (a, 500), b@stage1-step20-tokens1B -> (b@stage1, 20), others -> (name, NaN)."""
    path, revision = place(name)
    last = os.path.basename(path.rstrip('/')) if name == path else revision
    steps = list(STEP.finditer(last))
    if not steps:
        return name, math.nan
    return name.rpartition(steps[-1][0])[0].rstrip('/@-_') or '.', int(steps[-1][1])


def from_pretrained(kind, name, **options):
    """What an Auto class of transformers makes of a model's name."""
    path, revision = place(name)
    with sources.naming(f'--hf={name}: not a causal language model that can be read'):
        return kind.from_pretrained(path, revision=revision, trust_remote_code=False, **options)


def load(name):
    """The model of this name, in its own dtype."""
    model, info = from_pretrained(
        transformers.AutoModelForCausalLM, name, dtype='auto', output_loading_info=True)
    check(not info['missing_keys'], f'--hf={name}: its files lack weights')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')


def final_states(model, tokens):
    """tokens (n, T) -> the final hidden states (n T, H) in fp32, the input of the head."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).float()


def head_config(name, model):
    """The GPTConfig with which head_loss gives the model's logits. UserError if they have a bias, a scale."""
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    E = model.get_output_embeddings().weight
    tokens = torch.arange(min(16, len(E)), device=E.device)[None]
    expected = model(input_ids=tokens, use_cache=False).logits[0].float()
    logits = final_states(model, tokens) @ E.float().T
    if cap:
        logits = cap * torch.tanh(logits / cap)
    tolerance = 1e-4 if E.dtype == torch.float32 else 4 * torch.finfo(E.dtype).eps
    check((logits - expected).abs().max() <= tolerance * expected.abs().max(), f'--hf={name}: its logits are '
          'not output embedding times final hidden state; what is between is not understood')
    return GPTConfig(cap=cap, logits_dtype='bfloat16')


def read_windows(model, tokenizer, pattern, n):
    """At least n tokens, if there are so many, of the text that `pattern` names: (windows, length + 1)."""
    max_length = getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW)
    length = min(WINDOW, max_length, n)
    n_tokens = -(-n // length) * (length + 1)  # rounded up to whole windows
    paths = sources.local_files(pattern, '--text') if pattern else sources.stdlib_files()
    texts = (text for _, _, text in sources.read_texts(paths))
    pieces = (text[i:i + PIECE] for text in texts for i in range(0, len(text), PIECE))
    tokens = []
    for piece in pieces:
        tokens += tokenizer(piece)['input_ids']
        if len(tokens) >= n_tokens:
            break
    n_tokens = min(n_tokens, len(tokens) // (length + 1) * (length + 1))
    check(n_tokens, f'--text={pattern}: the text has fewer than {length + 1} tokens')
    return torch.tensor(tokens[:n_tokens]).view(-1, length + 1)


@torch.no_grad()
def measure_model(name, args):
    """Loads, measures and, if asked to, centers a model -> its row of models.csv."""
    training, step = training_and_step(name)
    model = load(name)
    E = model.get_output_embeddings().weight.float()
    row = {'model': name, 'training': training, 'step': step, 'V': len(E), 'H': E.size(1),
           **measure.of_embeddings(E)}
    if args.positions == 0:
        return row

    tokenizer = from_pretrained(transformers.AutoTokenizer, name)
    config = head_config(name, model)
    check(not (config.cap and args.center_to), f'--center_to={args.center_to}: the logits of {name} are '
          'capped, and centering would change their probabilities')
    in_fp32 = replace(config, logits_dtype='float32')
    windows = read_windows(model, tokenizer, args.text, args.positions or POSITIONS).to(E.device)
    unigram = windows.flatten().bincount(minlength=len(E)) / windows.numel()
    means = {'bf16_centered': E.mean(dim=0), 'bf16_zipf_centered': unigram @ E}
    parts = []
    for window in tqdm(windows, unit='windows', disable=None):
        h, targets = final_states(model, window[None, :-1]), window[1:]
        stats = measure.statistics(h, E, targets, config)
        stats['bf16'] = stats.pop('loss')
        stats['fp32'] = chunked_head_loss(h, E, targets, in_fp32, with_stats=False)[1]['loss']
        for centered, mean in means.items():
            stats[centered] = chunked_head_loss(h, E - mean, targets, config, with_stats=False)[1]['loss']
        parts.append({key: values.double().cpu() for key, values in stats.items()})
    numbers = summarize(join_stats(parts), E)
    if args.center_to:  # last: it changes the model
        center(name, args.center_to, model, tokenizer)
    return {**row, 'positions': windows[:, 1:].numel(), **numbers, 'cost': numbers['bf16'] - numbers['fp32']}


@torch.no_grad()
def center(name, new, model, tokenizer):
    """Writes the model with the output embeddings E - mu to the folder `new`, whole or not at all."""
    W = model.get_output_embeddings().weight
    check(W is not model.get_input_embeddings().weight, f'--center_to={new}: the output embeddings of {name} '
          'are tied to the input embeddings, and centering would change these')
    W.copy_(W.float() - W.float().mean(dim=0))
    temporary = f'{os.path.normpath(new)}.tmp'
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    os.rename(temporary, new)
    print(f'{new}: {name} with centered output embeddings; tune its repetition penalty again, if it has one')


def shown_number(x):
    return f'{x:.0f}' if float(x).is_integer() else f'{x:.5g}'


def main(args):
    if args.center_to:
        check(len(args.hf) == 1 and args.positions != 0 and not os.path.exists(args.center_to),
              f'--center_to={args.center_to}: should be a new folder, for one model, without --positions=0')
    measured = pd.DataFrame([measure_model(name, args) for name in args.hf])
    shown = measured.drop(columns='training').dropna(axis='columns', how='all')
    rows = shown.set_index(shown.model.map(html.escape)).drop(columns='model').map(shown_number)
    rows = (rows.T.rename_axis('') if len(rows) == 1 else rows).reset_index()
    items = [dict(title='Output embeddings and logits', rows=rows, caption=CAPTION)]
    out = args.out or Path('results', 'hf-' + args.hf[0].replace('/', '--'))
    with lock_folder(out, wait=True):
        runs.write_csv(Path(out, 'models.csv'), measured)
        by_step = plots.drift(measured)
        if by_step:
            items.append(plots.save(by_step, 'drift', out))
        report.write_page(out, [], items)
    print('', report.for_terminal(rows), f'wrote {out}', sep='\n')
    return 0
