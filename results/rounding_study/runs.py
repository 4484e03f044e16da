"""
Trains the tiny models of README.md on a CPU, one after the other -> a line each in tiny.csv, and the logs of
the long ones in curves.csv. What has a line is skipped. With a folder, reads its finished runs -> 16M.csv.

    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib
    python results/rounding_study/runs.py  # ten seconds a model of 300 steps
    python results/rounding_study/runs.py out/shift
"""
import json
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import model  # noqa: E402
import train  # noqa: E402

FLAGS = ('--size=tiny --lr=1e-2 --device=cpu --threads=1 --dtype=float32 --batch_size=4 --block_size=128 '
         '--log_every=2 --eval_every=0 --eval_tokens=16384 --test_tokens=32768 --data=data/stdlib').split()
METHODS = ['baseline', 'z_loss', 'soft_capping', 'mu_loss', 'mu_centering']
PARTS = ['operands', 'logits', 'gradient', 'operands logits', 'operands gradient', 'logits gradient',
         'operands logits gradient']
SEEDS, LONG = [1, 2, 3], 1500
NAMES = ['method', 'mu_shift', 'seed', 'head', 'loss', 'steps']  # what a run is
# The head: of --logits_dtype, or fp32 with the named parts rounded. The loss: old_cross_entropy before.
RUNS = [*product(METHODS, [0, 57, 187, 331, 1000], SEEDS, ['bfloat16'], ['now'], [300]),
        *product(['baseline'], [0, 331, 1000, 10000], SEEDS, ['float32'], ['now'], [300]),
        *product(['baseline'], [331, 1000], SEEDS, ['bfloat16'], ['before'], [300]),
        *product(['baseline'], [10000], SEEDS, ['float32'], ['before'], [300]),
        *product(['baseline'], [331], SEEDS, PARTS, ['now'], [300]),
        *product(['baseline', 'mu_centering'], [331], SEEDS, ['bfloat16'], ['now'], [LONG]),
        *product(['baseline'], [331], SEEDS, ['float32'], ['now'], [LONG])]


class Round(torch.autograd.Function):
    """x, rounded to BF16 if `value`; its gradient, rounded if `gradient`."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.gradient = gradient
        return x.bfloat16().float() if value else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().float() if ctx.gradient else grad, None, None


def rounded_head(parts):
    """head_logits of model.py with fp32 products and these parts rounded, for a baseline."""
    def head_logits(h, E, config):
        h, E = Round.apply(h, 'operands' in parts, False), Round.apply(E, 'operands' in parts, False)
        return Round.apply(h @ E.T, 'logits' in parts, 'gradient' in parts)
    return head_logits


def old_cross_entropy(logits, targets, **_):
    """The loss until 2102aab, log Z - l_t: next to a large logit, log Z has lost its digits."""
    return torch.logsumexp(logits, dim=-1) - logits.gather(1, targets[:, None])[:, 0]


@torch.no_grad()
def measure(path, n_tokens):
    """Of a model.pt: norm of mu, mean logit and its spread over positions, and its loss by both heads."""
    saved = train.read_checkpoint(path)
    config = saved['config']
    gpt = model.GPT(model.gpt_config(config))
    gpt.load_state_dict(saved['model'])
    windows = train.Windows(config['data'], 'val', config['block_size'], config['vocab_size'])
    tokens = torch.from_numpy(windows[windows.evenly_spaced(n_tokens)])
    numbers = {'mu_norm': gpt.E.mean(dim=0).norm().item()}
    for dtype in ('bfloat16', 'float32'):
        gpt.config = replace(gpt.config, logits_dtype=dtype)
        parts = [gpt(part[:, :-1], part[:, 1:])[1] for part in tokens.split(2)]
        loss, mean = (torch.cat([part[name] for part in parts]) for name in ('loss', 'logit_mean'))
        numbers[f'loss_{dtype}'] = loss.mean().item()
    spread = mean.std(correction=0).item()
    return numbers | {'logit_mean': mean.mean().item(), 'logit_mean_spread': spread}


def read_run(folder, n_tokens):
    """The test loss of the run in a folder, and what its model measures."""
    result = json.loads(Path(folder, 'result.json').read_text())
    return {'test_loss': result['test_loss'], **measure(f'{folder}/model.pt', n_tokens)}


def one(method, mu_shift, seed, head, loss, steps, out):
    """Trains a model in the folder `out` -> its line of tiny.csv and its log."""
    flags = [f'--method={method}', f'--mu_shift={mu_shift}', f'--seed={seed}', f'--steps={steps}']
    flags += [f'--logits_dtype={head}' if head in train.dtypes else '--logits_dtype=float32']
    flags += ['--min_lr=1e-2', '--warmup=15'] if steps == LONG else []  # a constant learning rate
    usual = model.head_logits, F.cross_entropy
    if head not in train.dtypes:
        model.head_logits = rounded_head(head.split())
    if loss == 'before':
        F.cross_entropy = old_cross_entropy
    train.main([*FLAGS, *flags, f'--out={out}'])
    model.head_logits, F.cross_entropy = usual
    log = pd.read_json(f'{out}/log.jsonl', lines=True)
    return read_run(out, 32768), log.dropna(subset='loss')


def append(rows, path):
    """Adds rows to a csv file."""
    rows.round(5).to_csv(path, mode='a', header=not path.exists(), index=False)


def train_tiny():
    """All of RUNS that have no line yet."""
    tiny, curves = HERE / 'tiny.csv', HERE / 'curves.csv'
    done = set(pd.read_csv(tiny)[NAMES].itertuples(index=False, name=None)) if tiny.exists() else ()
    for run in RUNS:
        if run in done:
            continue
        with tempfile.TemporaryDirectory() as out:
            numbers, log = one(*run, out)
        name = dict(zip(NAMES, run, strict=True))
        if name['steps'] == LONG:
            log = log[log.step % 20 == 0].rename(columns={'loss': 'loss_of_step'})
            append(log.assign(**name)[[*NAMES, 'step', 'loss_of_step', 'mu_norm', 'logit_mean']], curves)
        append(pd.DataFrame([name | numbers]), tiny)


def read_16m(folder):
    """The finished runs of a folder -> 16M.csv. Lines of other runs stay."""
    path = HERE / '16M.csv'
    rows = pd.read_csv(path).to_dict('records') if path.exists() else []
    for result in sorted(Path(folder).glob('*/result.json')):
        config = json.loads(result.with_name('config.json').read_text())
        name = {'run': result.parent.name, 'loss': 'now', 'head': config['logits_dtype'],
                **{key: config[key] for key in ('method', 'mu_shift', 'seed', 'steps', 'commit')}}
        if name['run'] not in [row['run'] for row in rows if row['loss'] == 'now']:
            rows.append(name | read_run(result.parent, 16384))
    pd.DataFrame(rows).round(5).to_csv(path, index=False)


if __name__ == '__main__':
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        read_16m(sys.argv[1])
    else:
        train_tiny()
