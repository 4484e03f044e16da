"""
Trains the tiny models of README.md on a CPU -> results.csv, unless it is there; its tables, in the terminal.

    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib
    python results/weight_decay/decay.py
"""
import sys
import tempfile
from itertools import product
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import train  # noqa: E402

FLAGS = ('--size=tiny --steps=1000 --device=cpu --threads=1 --dtype=float32 --logits_dtype=bfloat16 '
         '--batch_size=4 --block_size=128 --eval_every=0 --eval_tokens=16384 --test_tokens=131072 '
         '--data=data/stdlib').split()
METHODS = {'baseline': [], 'weight_decay': ['--lam=0.01'], 'adamw_decay': ['--lam=0.01']}


def run(method, lr, seed):
    """Trains a model -> its line of results.csv. The mean logit is that of the last step's batch."""
    with tempfile.TemporaryDirectory() as out:
        settings = [f'--method={method}', *METHODS[method], f'--lr={lr}', f'--seed={seed}', f'--out={out}']
        train.main([*FLAGS, *settings])
        E = train.read_checkpoint(f'{out}/model.pt')['model']['lm_head.weight']
        log = pd.read_json(f'{out}/log.jsonl', lines=True)
    return {'method': method, 'lr': lr, 'seed': seed, 'mu_norm': E.mean(dim=0).norm().item(),
            'mean_e_norm': E.norm(dim=1).mean().item(), 'logit_mean': log.logit_mean.dropna().iloc[-1],
            'test_loss': log.test_loss.iloc[-1]}


if __name__ == '__main__':
    if not (HERE / 'results.csv').exists():
        runs = pd.DataFrame([run(*settings) for settings in product(METHODS, [0.01, 0.1], [1, 2, 3])])
        runs.round(5).to_csv(HERE / 'results.csv', index=False)
    runs = pd.read_csv(HERE / 'results.csv')
    over_seeds = runs.drop(columns='seed').groupby(['lr', 'method'], sort=False)
    print(over_seeds.agg(['mean', 'min', 'max']).round(3).to_string())
    norms = runs.pivot(index=['lr', 'seed'], columns='method', values=['mu_norm', 'mean_e_norm'])
    for name in ('mu_norm', 'mean_e_norm'):
        ratios = norms[name].div(norms[name].baseline, axis=0).groupby('lr').agg(['min', 'max'])
        print(f'{name} over that of the baseline of the same seed', ratios.round(3).to_string(), sep='\n')

    runs = pd.read_csv(HERE.parent / 'authors/results.csv').query('weight_tying == 0 and method in @METHODS')
    norms = runs.pivot(index=['size', 'lr'], columns='method', values='mu_norm')
    ratios = (norms.weight_decay / norms.baseline).groupby('lr').agg(['min', 'max'])
    print("the authors' mu_norm over that of their baselines, five sizes", ratios.round(3), sep='\n')
