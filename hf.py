"""
The same instrument for models that others trained: any causal language model in Hugging Face format. Is its
mean output embedding far out, what does BF16 cost it, would centering help?

    python analyze.py --hf FOLDER                                   # or the name of a model on the hub
    python analyze.py --hf FOLDER OTHER --text='texts/*.txt' --positions=16384
    python analyze.py --hf FOLDER --center_to=NEW                   # writes it with centered embeddings

By Fact 2 a finished model can be centered without training: no probability changes.
"""
import math
import os
import shutil
import tempfile

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import plots
import sources
import tables
from analyze import statistics, summary, write_csv, write_report
from common import UserError, lock_folder, make_folder
from model import GPTConfig, head_stats

WINDOW = 1024   # tokens of a window, or what the model can take
CHECKED = 2048  # positions whose probabilities --center_to compares

# --------------------------------------------------------------------------------------------------
# the model


def load(path):
    """
    A folder or a hub name -> (model in its own dtype, tokenizer or None). Raises UserError if it is not a
    causal language model that `transformers` can load without running code of the folder's own.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError('--hf needs transformers: pip install transformers') from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    only = {'local_files_only': os.path.isdir(path), 'trust_remote_code': False}
    with sources.naming(f'--hf={path}: not a model that can be read'):
        config = transformers.AutoConfig.from_pretrained(path, **only)
        names = getattr(config, 'architectures', None) or ['a model of no named architecture']
        if config.is_encoder_decoder or not names[0].endswith(('ForCausalLM', 'LMHeadModel')):
            raise UserError(f'--hf={path}: should be a causal language model, is {names[0]}')
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype='auto', output_loading_info=True, **only)
        if found['missing_keys']:
            raise UserError(f'--hf={path}: its files lack {len(found["missing_keys"])} weights, such as '
                            f'{sorted(found["missing_keys"])[0]}')
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise UserError(f'--hf={path}: its head should be a matrix without a bias')
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **only)
        if not tokenizer('a text')['input_ids']:  # made of no files
            tokenizer = None
    except Exception:  # of many kinds; its embeddings can still be measured
        tokenizer = None
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


def is_tied(model):
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def final_states(model, tokens):
    """tokens (n, T) -> the final hidden states (n T, H), which the head multiplies."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


def head_config(path, model):
    """
    The GPTConfig whose head computes the model's logits from its final hidden states. Raises UserError if
    something else stands between the two, such as a scale.
    """
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    on_gpu = model.device.type == 'cuda'
    config = GPTConfig(method='soft_capping' if cap else 'baseline', cap=cap or 1.0,
                       dtype='bfloat16' if on_gpu else 'float32', logits_dtype='bfloat16')
    E = model.get_output_embeddings().weight
    tokens = torch.arange(min(16, len(E)), device=E.device)[None]
    with torch.no_grad(), sources.naming(f'--hf={path}: not a model that can be read'):
        theirs = model(input_ids=tokens, use_cache=False).logits[0].float()
        ours = final_states(model, tokens).float() @ E.float().T
    ours = cap * torch.tanh(ours / cap) if cap else ours
    unit = 4 * torch.finfo(E.dtype).eps if E.dtype != torch.float32 else 1e-4
    if not torch.allclose(ours, theirs, rtol=0, atol=unit * theirs.abs().max().item()):
        raise UserError(f'--hf={path}: its logits are not those of its output embeddings and final hidden '
                        'states; something between them is not understood')
    return config


# --------------------------------------------------------------------------------------------------
# the output embeddings alone


def parts(E):
    """The rows of E (V, H), some thousand at a time, in fp32."""
    return (rows.float() for rows in E.split(max(1, 2**24 // E.size(1))))


def odd_rows(E, n_tokens):
    """
    Rows of E (V, H) that training has hardly formed: what they are -> their numbers. Padding lies beyond the
    tokenizer's n_tokens (None if that is not known); of equal rows, and of at least max(8, V / 1000) rows
    whose norms agree within 1e-6, all are named.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(E.size(1), generator=generator, dtype=torch.float64).to(E.device)
    keys = torch.cat([(rows.double() * direction).sum(dim=1) for rows in parts(E)]).cpu().numpy()
    norms = torch.cat([rows.double().norm(dim=1) for rows in parts(E)]).cpu().numpy()
    _, group, count = np.unique(keys, return_inverse=True, return_counts=True)
    found = {'equal to another row': np.flatnonzero(count[group] > 1)}
    common = np.round(np.log(np.maximum(norms, 1e-30)) / 1e-6)
    _, group, count = np.unique(common, return_inverse=True, return_counts=True)
    found['of one constant norm'] = np.flatnonzero(count[group] >= max(8, len(E) / 1000))
    if n_tokens is not None:
        found = {'padding beyond the tokenizer': np.arange(min(n_tokens, len(E)), len(E)), **found}
    return {what: rows for what, rows in found.items() if len(rows)}


def ranges(rows, most=6):
    """Sorted row numbers in words: 3, 7-9."""
    pieces = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    words = [f'{piece[0]}-{piece[-1]}' if len(piece) > 1 else str(piece[0]) for piece in pieces]
    return ', '.join(words[:most]) + (', ...' if len(words) > most else '')


def mean_embedding(E, kept):
    """mu (H,) in fp32 of the rows of E (V, H) that the mask `kept` (V,) has."""
    masks = kept.split(max(1, 2**24 // E.size(1)))
    total = sum(rows[mask].double().sum(dim=0) for rows, mask in zip(parts(E), masks, strict=True))
    return (total / kept.sum()).float()


def embedding_facts(E, mu):
    """
    What E (V, H) tells without any text: a dict name -> number, and r_emb (V,). `lost` is the share of the
    variance of the embeddings, mean |e_i - mu|^2, that one rounding of E to bf16 destroys, `lost_centered`
    the same of E - mu. A number that is stored in bf16 has lost unit^2 / 12 on average, its unit being the
    distance to the next one.
    """
    variance, lost, lost_centered, r_emb = 0.0, 0.0, 0.0, []
    for rows in parts(E):
        star = rows - mu
        variance += star.double().square().sum().item()
        if E.dtype == torch.bfloat16:
            unit = torch.exp2(torch.frexp(rows).exponent.double() - 8) * (rows != 0)
            lost += (unit.square() / 12).sum().item()
        else:
            lost += (rows.bfloat16().float() - rows).double().square().sum().item()
        lost_centered += (star.bfloat16().float() - star).double().square().sum().item()
        norm = rows.norm(dim=1)
        r_emb.append(star.norm(dim=1) / norm.clamp_min(torch.finfo(torch.float32).tiny))
    spread, mu_norm = math.sqrt(variance / len(E)), mu.double().norm().item()
    return {'mu_norm': mu_norm, 'spread': spread, 'ratio': mu_norm / spread if spread else math.inf,
            'lost': lost / variance if variance else math.nan,
            'lost_centered': lost_centered / variance if variance else math.nan}, torch.cat(r_emb).cpu()


# --------------------------------------------------------------------------------------------------
# with text


def read_windows(tokenizer, pattern, length, n):
    """
    Up to n windows (n, length + 1) of tokens, int64, of the text that `pattern` names (None: the source of
    Python's standard library). A text shorter than a window is one window.
    """
    tokens, wanted = [], n * (length + 1)
    try:
        for text in sources.local_texts(pattern) if pattern else sources.stdlib_texts():
            tokens += tokenizer(text)['input_ids']
            if len(tokens) >= wanted:
                break
    except UserError as error:
        raise UserError(str(error).replace('--files', '--text'), error.status) from error
    if len(tokens) < 2:
        raise UserError(f'--text={pattern}: the text has fewer than two tokens')
    length = min(length, len(tokens) - 1)
    n = min(n, len(tokens) // (length + 1))
    return torch.tensor(tokens[:n * (length + 1)]).view(n, length + 1)


def text_facts(model, E, mu, windows, config):
    """
    The statistics of `statistics` over all positions of `windows` (n, T + 1), and cross entropies in nats:
    `fp32`, `bf16` and, unless logits are capped, `bf16_centered`, by the head in that precision.
    """
    # rounded once here: it is all that the centered head works on
    centered = None if config.method == 'soft_capping' else torch.cat([
        (rows - mu).bfloat16() for rows in parts(E)])
    total = 0.0

    def batches():
        nonlocal total
        with tqdm(total=windows[:, 1:].numel(), unit='positions', mininterval=1, disable=None) as bar:
            for batch in windows.split(max(1, 4096 // windows.size(1))):
                batch = batch.to(E.device)
                h, targets = final_states(model, batch[:, :-1]), batch[:, 1:].flatten()
                if centered is not None:
                    total += head_stats(h, centered, targets, config, with_stats=False)['loss'].item()
                yield h, targets
                bar.update(len(h))
    values = statistics(batches(), E, config, mu)
    loss = values['loss'].double().mean().item()
    facts = {'bf16': loss, 'fp32': loss - values['rounding_loss'].double().mean().item()}
    if centered is not None:
        facts['bf16_centered'] = total / windows[:, 1:].numel()
    return facts, values


# --------------------------------------------------------------------------------------------------
# --center_to


@torch.no_grad()
def center(path, new, model, mu, windows):
    """
    Writes the model in the folder `path` with the output embeddings E - mu to the folder `new`, whole or not
    at all, after checking in fp32 that no probability over `windows` changes by more than 1e-5.
    """
    E = model.get_output_embeddings().weight
    h, change, stored = final_states(model, windows[:, :-1].to(E.device))[:CHECKED].float(), 0.0, 0.0
    centered = torch.cat([rows - mu for rows in parts(E)])
    for h_c in h.split(max(1, 2**24 // len(E))):
        p = (h_c @ E.float().T).softmax(dim=1)
        change = max(change, (p - (h_c @ centered.T).softmax(dim=1)).abs().max().item())
        stored = max(stored, (p - (h_c @ centered.to(E.dtype).float().T).softmax(dim=1)).abs().max().item())
    if not change <= 1e-5:
        raise UserError(f'--center_to={new}: centering changes probabilities by {change:.1e} in fp32, more '
                        'than 1e-5; nothing was written', status=1)

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    holds = []  # the files and names of the output embeddings
    for name in sorted(os.listdir(path)):
        if name.endswith('.safetensors'):
            with safe_open(os.path.join(path, name), 'pt') as file:
                for key in file.keys():
                    same = file.get_slice(key).get_shape() == list(E.shape)
                    if same and torch.equal(file.get_tensor(key).to(E), E):
                        holds.append((name, key, file.metadata()))
    if len(holds) != 1:
        raise UserError(f'--center_to: {path} should have the output embeddings once in its *.safetensors, '
                        f'has them {len(holds)} times')
    (name, key, metadata), = holds
    temporary = tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(new)), prefix='.centering-')
    try:
        shutil.copytree(path, temporary, dirs_exist_ok=True, ignore=lambda *_: [name])
        weights = load_file(os.path.join(path, name))
        weights[key] = centered.to(weights[key].dtype).cpu().contiguous()
        save_file(weights, os.path.join(temporary, name), metadata)
        os.rename(temporary, new)
    except OSError as error:
        raise UserError(f'--center_to={new}: cannot be written ({error.strerror})', status=1) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f'{new}: {path} with centered output embeddings. Over {len(h):,} positions its probabilities '
          f'change by at most {change:.0e} in fp32, and by {stored:.0e} as stored, in {str(E.dtype)[6:]}')


def check_center_to(path, new, model):
    """Raises UserError if the model cannot be centered, or if there is something at `new`."""
    if is_tied(model):
        raise UserError(f'--center_to: the output embeddings of {path} are its input embeddings as well '
                        '(tied), which would move; only untied models can be centered')
    if getattr(model.config.get_text_config(), 'final_logit_softcapping', None):
        raise UserError(f'--center_to: {path} caps its logits, so centering would change its probabilities')
    if not os.path.isdir(path):
        raise UserError(f'--center_to needs --hf to be a folder, not {path}')
    if os.path.exists(new) or not os.path.isdir(os.path.dirname(os.path.abspath(new))):
        raise UserError(f'--center_to={new}: should be a new folder in one that is there')


# --------------------------------------------------------------------------------------------------
# the table


def share(x):
    return f'{100 * x:.3g}%'


def table_of(measured):
    """The table of all models; `measured` is a list of dicts, one per model, which may lack entries."""
    def spread(name):
        return lambda m: ' / '.join(f'{m[name][key]:.3g}' for key in ('q25', 'median', 'q75'))

    lines = {
        'vocabulary x width': lambda m: f'{m["V"]:,} x {m["H"]:,}, {m["dtype"]}',
        'tied': lambda m: 'yes' if m['tied'] else 'no',
        'odd rows': lambda m: m['odd'],
        '‖μ‖': lambda m: f'{m["mu_norm"]:.4g}',
        'spread of the embeddings around μ (rms)': lambda m: f'{m["spread"]:.4g}',
        '‖μ‖ / spread': lambda m: f'{m["ratio"]:.3g}',
        'r_emb: quartiles': spread('r_emb'),
        'r_emb < 1': lambda m: share(m['r_emb']['below_1']),
        'variance lost by rounding E to bf16': lambda m: share(m['lost']),
        'the same of E - μ': lambda m: share(m['lost_centered']),
        'positions': lambda m: f'{m["positions"]:,}',
        'mean logit: quartiles': spread('logit_mean'),
        'logit standard deviation': lambda m: f'{m["logit_std"]["mean"]:.4g}',
        'max |logit|': lambda m: f'{m["logit_absmax"]["max"]:.4g}',
        'cos(μ, h): quartiles': spread('cos_mu_h'),
        'r_cos: quartiles': spread('r_cos'),
        'r_log: quartiles': spread('r_log'),
        'premise of Fact 3 holds': lambda m: share(m['fact_3_premise']['mean']),
        'Fact 3 holds': lambda m: share(m['fact_3']['mean']),
        'gradient sum': lambda m: f'{m["gradient_sum"]["mean"]:.2e}',
        'cross entropy, head in fp32': lambda m: f'{m["fp32"]:.5f}',
        'in bf16': lambda m: f'{m["bf16"]:.5f} ({m["bf16"] - m["fp32"]:+.5f})',
        'in bf16, centered': lambda m: f'{m["bf16_centered"]:.5f} ({m["bf16_centered"] - m["fp32"]:+.5f})'}

    def cell(line, m):
        try:
            return line(m)
        except KeyError:  # without text, or with capped logits
            return '-'
    rows = [[title, *(cell(line, m) for m in measured)] for title, line in lines.items()]
    says = ('Odd rows: padding, equal or of one constant norm. Variance lost: of embeddings that are stored '
            'in bf16, what that costs on average. In brackets: nats above fp32.')
    return dict(title='Output embeddings and logits', where='Section 3', rows=rows, says=says,
                header=['', *(m['name'] for m in measured)])


def sentence_of(m):
    if 'fp32' not in m:
        return f'{m["name"]}: ‖μ‖ is {m["ratio"]:.3g} times the spread of the output embeddings.'
    centered = f', centered {m["bf16_centered"] - m["fp32"]:.4f}' if 'bf16_centered' in m else ''
    return f'BF16 costs {m["name"]} {m["bf16"] - m["fp32"]:.4f} nats{centered}.'


def measure(path, args):
    """Loads a model, measures it and centers it if asked to -> a dict for table_of, and distributions."""
    model, tokenizer = load(path)
    if args.center_to:
        check_center_to(path, args.center_to, model)
    config, E = head_config(path, model), model.get_output_embeddings().weight.detach()
    odd = odd_rows(E, None if tokenizer is None else len(tokenizer))
    kept = torch.ones(len(E), dtype=torch.bool)
    if args.drop_odd_rows:
        kept[np.concatenate([[], *odd.values()]).astype(int)] = False
        if not kept.any():
            raise UserError(f'--drop_odd_rows leaves none of the {len(E)} rows of {path}')
    mu = mean_embedding(E, kept.to(E.device))
    words = '; '.join(f'{len(rows):,} {what} ({ranges(rows)})' for what, rows in odd.items())
    found = {'name': os.path.basename(os.path.normpath(path)), 'V': E.size(0), 'H': E.size(1),
             'dtype': str(E.dtype).removeprefix('torch.'), 'tied': is_tied(model), 'odd': words or 'none'}
    facts, r_emb = embedding_facts(E[kept] if args.drop_odd_rows else E, mu)
    found.update(facts, r_emb=summary(r_emb))
    values = {'r_emb': r_emb}
    if tokenizer is None and (args.text or args.center_to):
        raise UserError(f'--hf={path}: has no tokenizer, which text needs')
    if tokenizer is None or args.positions == 0:
        print(f'{path}: without text, ' + ('--positions=0' if tokenizer else 'since it has no tokenizer'))
        return found, values
    longest = getattr(model.config.get_text_config(), 'max_position_embeddings', WINDOW)
    length = min(WINDOW, longest, args.positions)
    windows = read_windows(tokenizer, args.text, length, -(-args.positions // length))
    if windows.max() >= len(E):
        raise UserError(f'--hf={path}: its tokenizer made token {windows.max()}, its head has {len(E)} rows')
    if args.center_to:
        center(path, args.center_to, model, mu, windows[:max(1, CHECKED // length)])
    with torch.no_grad():
        facts, values = text_facts(model, E.float(), mu, windows, config)
    found.update(facts, positions=windows[:, 1:].numel())
    found.update({name: summary(v) for name, v in values.items()})
    return found, {**values, 'r_emb': r_emb}


def main(args):
    """What analyze.py does with --hf: a table, and a page with it and the distributions."""
    if args.center_to and len(args.hf) > 1:
        raise UserError('--center_to needs one model, not several')
    results = [measure(path, args) for path in args.hf]
    measured = [found for found, _ in results]
    out = args.out or os.path.join('results', '-'.join(m['name'] for m in measured))
    if len({m['name'] for m in measured}) < len(measured):
        for path, m in zip(args.hf, measured, strict=True):
            m['name'] = path
    make_folder(out)
    with lock_folder(out, wait=True):
        table, sentence = table_of(measured), ' '.join(map(sentence_of, measured))
        write_csv(os.path.join(out, 'models.csv'), pd.json_normalize(measured, sep='_'))
        plots.histograms({found['name']: values for found, values in results},
                         os.path.join(out, 'figures', 'distributions'))
        figure = {'title': 'Distributions', 'where': 'Section 3', 'file': 'distributions',
                  'says': plots.histograms.__doc__}
        write_report(out, pd.DataFrame({'method': []}), [table, figure], [], {}, 0, sentence)
    print(f'\n{tables.text(table)}\n\nwrote {out}; open {os.path.join(out, "report.html")} in a browser')
    print(sentence)
    return 0
