"""
The same instrument for models that others trained: any causal language model in Hugging Face format. Is its
mean output embedding far out, what does BF16 cost it, would centering help? By Fact 2 a finished model can
be centered without training (--center_to): no probability changes.
"""
import math
import os
import re
import shutil

import pandas as pd
import torch
from tqdm import tqdm

from analysis import plots, report
from analysis.csv_files import write_csv
from analysis.measure import POSITIONS, TINY, statistics, summary
from model import GPTConfig
from oec import sources
from oec.common import UserError, check, lock_folder
from oec.head import chunked_head

WINDOW = 1024  # tokens of a window, or what the model can take


# -------- the model


def load(path):
    """
    A folder or a hub name -> (model in its own dtype, tokenizer or None). UserError if it is not a causal
    language model that `transformers` can load without running code of the folder's own.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError('--hf needs transformers: pip install transformers') from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    local = os.path.isdir(path)
    check(local or re.fullmatch(r'[\w-][\w.-]*(/[\w.-]+)?', path), f'--hf={path}: no such folder')
    only = {'local_files_only': local, 'trust_remote_code': False}
    what = 'not a causal language model that can be read' if local else 'no such folder, nor on the hub'
    with sources.naming(f'--hf={path}: {what}'):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype='auto', output_loading_info=True, **only)
        missing = sorted(found['missing_keys'])
        check(not missing, f'--hf={path}: its files lack {len(missing)} weights, such as {missing[:1]}')
    head = model.get_output_embeddings()
    check(isinstance(head, torch.nn.Linear) and head.bias is None,
          f'--hf={path}: its head should be a matrix without a bias')
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **only)
        tokenizer = tokenizer if tokenizer('a text')['input_ids'] else None  # else it was made of no files
    except Exception:  # of many kinds; its embeddings can still be measured
        tokenizer = None
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


def is_tied(model):
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def final_states(model, tokens):
    """tokens (n, T) -> the final hidden states (n T, H), which the head multiplies."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


@torch.no_grad()
def head_config(path, model):
    """The GPTConfig whose head gives the model's logits. UserError if more is in between, such as a scale."""
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    E = model.get_output_embeddings().weight
    tokens = torch.arange(min(16, len(E)), device=E.device)[None]
    with sources.naming(f'--hf={path}: not a causal language model that can be run'):
        theirs = model(input_ids=tokens, use_cache=False).logits[0].float()
        ours = final_states(model, tokens).float() @ E.float().T
    ours = cap * torch.tanh(ours / cap) if cap else ours
    unit = 4 * torch.finfo(E.dtype).eps if E.dtype != torch.float32 else 1e-4
    check(torch.allclose(ours, theirs, rtol=0, atol=unit * theirs.abs().max().item()), f'--hf={path}: its '
          'logits are not output embedding times final hidden state; what is between is not understood')
    return GPTConfig(head_mode='soft_capping' if cap else 'baseline', cap=cap or 1.0, logits_dtype='bfloat16',
                     dtype='bfloat16' if model.device.type == 'cuda' else 'float32')


# -------- what is measured


def parts(E):
    """The rows of E (V, H), some thousand at a time, in fp32."""
    return (rows.float() for rows in E.split(max(1, 2**24 // E.size(1))))


def odd_rows(E, n_tokens):
    """
    Rows of E (V, H) that training has hardly formed: what they are -> mask (V,). Padding is beyond the
    tokenizer's n_tokens (None: not known); of one norm are at least max(8, V / 1000) rows, within 1e-6.
    """
    norms = torch.cat([rows.double().norm(dim=1) for rows in parts(E)]).clamp_min(1e-30)
    _, group, count = (norms.log() / 1e-6).round().unique(return_inverse=True, return_counts=True)
    padding = torch.arange(len(E), device=E.device) >= (len(E) if n_tokens is None else n_tokens)
    return {'padding': padding, 'of one norm': count[group] >= max(8, len(E) / 1000)}


def embedding_facts(E, mu):
    """
    What E (V, H) tells without any text, and r_emb (V,). `lost` is the share of the embeddings' variance, the
    mean of |e_i - mu|^2, that rounding E to bf16 destroys, `lost_centered` the same of E - mu. A number
    stored in bf16 has lost unit^2 / 12 on average, its unit being the distance to the next one.
    """
    sums, r_emb = torch.zeros(3, dtype=torch.float64), []
    for rows in parts(E):
        star = rows - mu
        unit = torch.exp2(torch.frexp(rows).exponent.double() - 8) * (rows != 0)
        error = unit / math.sqrt(12) if E.dtype == torch.bfloat16 else rows.bfloat16().float() - rows
        sums += torch.stack([x.double().square().sum().cpu()
                             for x in (star, error, star.bfloat16().float() - star)])
        r_emb.append(star.norm(dim=1) / rows.norm(dim=1).clamp_min(TINY))
    spread, mu_norm = math.sqrt(sums[0] / len(E)), mu.double().norm().item()
    lost, lost_centered = (sums[1:] / sums[0].clamp_min(TINY)).tolist()
    return {'mu_norm': mu_norm, 'spread': spread, 'ratio': mu_norm / max(spread, TINY), 'lost': lost,
            'lost_centered': lost_centered}, torch.cat(r_emb).cpu()


def read_windows(tokenizer, pattern, length, n):
    """Up to n windows (n, length + 1) of tokens of the text that `pattern` names, a short one as one."""
    tokens, wanted = [], n * (length + 1)
    for text in sources.local_texts(pattern, '--text') if pattern else sources.stdlib_texts():
        tokens += tokenizer(text)['input_ids']
        if len(tokens) >= wanted:
            break
    check(len(tokens) > 1, f'--text={pattern}: the text has fewer than two tokens')
    length = min(length, len(tokens) - 1)
    n = min(n, len(tokens) // (length + 1))
    return torch.tensor(tokens[:n * (length + 1)]).view(n, length + 1)


@torch.no_grad()
def text_facts(model, E, mu, windows, config):
    """
    Cross entropies in nats over all positions of `windows` (n, T + 1) by the head in that precision, `fp32`,
    `bf16` and, unless logits are capped, `bf16_centered`; and the values of `statistics`.
    """
    centered = torch.cat([(rows - mu).bfloat16() for rows in parts(E)])
    losses, n = [], windows[:, 1:].numel()

    def batches():
        for batch in tqdm(windows.split(max(1, 4096 // windows.size(1))), unit='batches', disable=None):
            batch = batch.to(E.device)
            h, targets = final_states(model, batch[:, :-1]), batch[:, 1:].flatten()
            losses.append(chunked_head(h, centered, targets, config, with_stats=False)[0].item())
            yield h, targets
    values = statistics(batches(), E, config, mu)
    loss, cost = (values[name].double().mean().item() for name in ('loss', 'rounding_loss'))
    facts = {'positions': n, 'bf16': loss, 'cost': cost, 'fp32': loss - cost}
    if config.head_mode != 'soft_capping':
        facts |= {'bf16_centered': sum(losses) / n, 'cost_centered': sum(losses) / n - facts['fp32']}
    return facts, values


@torch.no_grad()
def center(path, new, model, tokenizer, mu, tokens):
    """
    Writes the model with the output embeddings E - mu to the folder `new`, whole or not at all, beside all
    files of `path` that are not weights. UserError if in fp32 a probability over `tokens` (n, T) changes by
    more than 1e-5, as tied embeddings or capped logits make it.
    """
    def probabilities():
        return model(tokens, use_cache=False).logits.softmax(dim=-1)
    dtype = model.dtype
    model.float()
    before = probabilities()
    model.get_output_embeddings().weight.sub_(mu)
    change = (probabilities() - before).abs().max().item()
    why = ', since they are its input embeddings as well (tied)' if is_tied(model) else ''
    check(change <= 1e-5, f'--center_to={new}: centering the output embeddings of {path} changes a '
          f'probability by {change:.1e} in fp32, more than 1e-5{why}; nothing was written')
    temporary = f'{new}.tmp'
    try:
        model.to(dtype).save_pretrained(temporary)
        if os.path.isdir(path):
            weights = shutil.ignore_patterns('*.safetensors*', '*.bin*')
            shutil.copytree(path, temporary, ignore=weights, dirs_exist_ok=True)
        else:
            tokenizer.save_pretrained(temporary)
        os.rename(temporary, new)
    except OSError as error:
        raise UserError(f'--center_to={new}: cannot be written ({error})', status=1) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f'{new}: {path} with centered output embeddings. Over {tokens.numel():,} positions probabilities '
          f'change by at most {change:.0e} in fp32; it is stored in {str(dtype).removeprefix("torch.")}')


def measure(path, args):
    """Loads, measures and, if asked to, centers a model -> (numbers and summaries, distributions), dicts."""
    model, tokenizer = load(path)
    check(tokenizer or not (args.text or args.positions or args.center_to),
          f'--hf={path}: has no tokenizer, which --text, --positions and --center_to need')
    config, E = head_config(path, model), model.get_output_embeddings().weight.detach()
    odd = odd_rows(E, None if tokenizer is None else len(tokenizer))
    kept = E[~torch.stack(list(odd.values())).any(dim=0)] if args.drop_odd_rows else E
    check(len(kept), f'--drop_odd_rows leaves none of the {len(E)} rows of {path}')
    mu = (sum(rows.double().sum(dim=0) for rows in parts(kept)) / len(kept)).float()
    found, r_emb = embedding_facts(kept, mu)
    words = ', '.join(f'{mask.sum():,} {what}' for what, mask in odd.items() if mask.any())
    found |= {'name': os.path.basename(os.path.normpath(path)), 'V': E.size(0), 'H': E.size(1),
              'dtype': str(E.dtype)[6:], 'tied': is_tied(model), 'odd_rows': words or 'none'}
    values, n = {}, POSITIONS if args.positions is None else args.positions
    if not (tokenizer and n):
        why = '--positions=0' if tokenizer else 'no tokenizer that can be read'
        print(f'{path}: {why}, so all that takes a text is -')
    else:
        length = min(WINDOW, n, getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW))
        windows = read_windows(tokenizer, args.text, length, -(-n // length))
        check(windows.max() < len(E), f'--hf={path}: its tokenizer has more tokens than its head has rows')
        of_text, values = text_facts(model, E.float(), mu, windows, config)
        found |= of_text
        if args.center_to:
            center(path, args.center_to, model, tokenizer, mu, windows[:1, :-1].to(model.device))
    values['r_emb'] = r_emb
    return {**found, **{name: summary(v) for name, v in values.items()}}, values


# -------- the table


SHOWN = """V H dtype tied odd_rows mu_norm spread ratio lost lost_centered r_emb_median r_emb_below_1
    positions logit_mean_q25 logit_mean_median logit_mean_q75 logit_std_mean logit_absmax_max
    cos_mu_h_q25 cos_mu_h_median cos_mu_h_q75 r_cos_median r_log_median fact_3_premise_mean fact_3_mean
    gradient_sum_mean fp32 bf16 bf16_centered cost cost_centered""".split()  # of models.csv


def table_of(measured):
    """The table of all models, from the rows of models.csv."""
    rows = measured.set_index('name').reindex(columns=SHOWN).T.astype(object)
    rows = rows.map(lambda x: '-' if pd.isna(x) else f'{x:.5g}' if isinstance(x, float) else str(x))
    return dict(title='Output embeddings and logits', where='Section 3',
                rows=rows.rename_axis(index='', columns=None).reset_index(),
                says='Odd rows: padding beyond the tokenizer, or of one constant norm. Spread: rms of the '
                     'embeddings around μ; ratio: ‖μ‖ / spread. Lost: the share of their variance that '
                     'rounding to bf16 destroys, on average if they are stored in it. fp32, bf16: cross '
                     'entropy in nats by a head in that precision; cost: bf16 - fp32. Centered: of E - μ.')


def main(args):
    """What analyze.py does with --hf: a table, and a page with it and the distributions."""
    check(args.positions != 0 or not args.text, '--text does nothing with --positions=0')
    one = len(args.hf) == 1 and args.positions != 0
    check(not args.center_to or (one and not os.path.exists(args.center_to)),
          f'--center_to={args.center_to}: should be a new folder, for one model and text')
    results = [measure(path, args) for path in args.hf]
    measured = pd.json_normalize([found for found, _ in results], sep='_')
    out = args.out or os.path.join('results', '-'.join(measured.name))
    if measured.name.duplicated().any():
        measured['name'] = args.hf
    values = {name: values for name, (_, values) in zip(measured.name, results, strict=True)}
    table = table_of(measured)
    with lock_folder(out, wait=True):
        write_csv(os.path.join(out, 'models.csv'), measured)
        figure = plots.save(plots.histograms(values), out, 'distributions', 'Distributions', 'Section 3',
                            'Over the vocabulary (r_emb) and the positions.')
        report.write_report(out, [table, figure], [])
    print('', report.markdown(table, 'text'), sep='\n')
    print(f'wrote {out}; open {os.path.join(out, "report.html")} in a browser')
    return 0
