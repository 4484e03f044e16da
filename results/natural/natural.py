"""
Runs of a model for a laptop in which the paper's harm arises by itself, and what makes it.

    python -m results.natural.natural [TABLE ...]    # trains what has no row yet, two runs at a time

A TABLE is a folder beside this file. results.csv has a row for each run. Of runs that a figure draws,
curves.csv has some lines of the log. last_norm.csv has what the last LayerNorm does, and distributions.csv
what Figures 11 and 12 of the paper show. The runs of `grid` and `quick` are those of sweep.sh; an arm of
the other tables changes one thing of a run, by one of the functions below.
"""
import os
import subprocess
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import analyze
import model
import train
from results.mean_logit.mean_logit import cost

HERE = Path(__file__).parent
PLAIN_HEAD = model.head_logits
SEEDS = (1, 2, 3)


# -------- the arms: each changes one thing of a run
def rounded(logits, h, E):
    """Replaces the values of fp32 logits by those of a head in BF16; their gradient stays exact."""
    logits.data = (h.bfloat16() @ E.bfloat16().T).float()
    return logits.clone()


def head_with_exact_gradient(h, E, config):
    """BF16 logits, as in training, whose gradient is not rounded on its way to h and E."""
    return rounded(h @ E.T, h, E)


def head_with_rounded_gradient(h, E, config):
    """fp32 logits, whose gradient is rounded to BF16."""
    logits = h @ E.T
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient.bfloat16().float())
    return logits


def head_with_random_scale(h, E, config):
    """BF16 logits, whose gradient is rounded as if the loss were 2^u times as large, u new in each step."""
    logits = h @ E.T
    if logits.requires_grad:
        scale = 2 ** torch.rand(())
        logits.register_hook(lambda gradient: (gradient * scale).bfloat16().float() / scale)
    return rounded(logits, h, E)


def momentum_step(E, optimizer):
    """AdamW's step for all parameters but E, which SGD with momentum moves, at the same learning rate."""
    before = E.clone()
    optimizer.step()
    group = optimizer.param_groups[0]
    state = optimizer.state[E]
    momentum = state['exp_avg'] / (1 - group['betas'][0] ** state['step'])
    E.copy_(before - group['lr'] * momentum)


def token_frequencies(data, vocab_size):
    """How often each token occurs in the train shards, (V,), as shares."""
    counts = np.zeros(vocab_size)
    for path in train.Windows(data, 'train', 1).paths:
        counts += np.bincount(np.fromfile(path, '<u2', offset=1024), minlength=vocab_size)
    return torch.from_numpy(counts / counts.sum()).float()


def make_centered(args, weights):
    """train.make_model with an optimizer that takes the mean of E, weighted by `weights` (V,), off E."""
    gpt, optimizer = MAKE_MODEL(args)

    def center(*_):
        gpt.E.sub_(weights @ gpt.E)

    optimizer.register_step_post_hook(center)
    return gpt, optimizer


def make_slow_gain(args, scale):
    """train.make_model, with the gain of the last LayerNorm in a group whose learning rate is scaled."""
    gpt, optimizer = MAKE_MODEL(args)
    gain = gpt.norm_f.weight
    (group,) = optimizer.param_groups
    group['params'] = [p for p in group['params'] if p is not gain]
    optimizer.add_param_group({'params': [gain]})

    def slow_down(*_):  # train_step has just set the learning rate of all groups
        optimizer.param_groups[1]['lr'] *= scale

    optimizer.register_step_pre_hook(slow_down)
    return gpt, optimizer


MAKE_MODEL = train.make_model


def apply(arm, data):
    """Changes model.py and train.py, in this process alone, as an arm says."""
    heads = {'exact gradient': head_with_exact_gradient,
             'fp32 logits, BF16 gradient': head_with_rounded_gradient,
             'gradient at a random scale': head_with_random_scale}
    if arm in heads:
        model.head_logits = heads[arm]
    if arm == 'SGD on E':
        train.coupled_adam_step = momentum_step
    if arm == 'centered by frequency':
        train.make_model = lambda args: make_centered(args, token_frequencies(data, args.vocab_size))
    if arm == 'centered by rows in use':
        def mean_of_rows_in_use(args):
            in_use = token_frequencies(data, args.vocab_size) > 0
            return make_centered(args, in_use / in_use.sum())
        train.make_model = mean_of_rows_in_use
    if arm in SLOW_GAINS:
        train.make_model = lambda args: make_slow_gain(args, SLOW_GAINS[arm])


# -------- what is measured of a checkpoint
@torch.no_grad()
def measure(path, config):
    """A checkpoint's test loss with logits in BF16 and in fp32, and mean logits, over 131,072 positions."""
    gpt = model.GPT(model.gpt_config(config))
    gpt.load_state_dict(train.read_checkpoint(path)['model'])
    windows = train.Windows(config['data'], 'val', config['block_size'])
    tokens = torch.from_numpy(windows[windows.evenly_spaced(131_072)])
    f = token_frequencies(config['data'], config['vocab_size'])
    measured = analyze.measure_model(gpt, tokens)
    numbers = measured['numbers']

    h = torch.cat([gpt.hidden(part[:, :-1]).flatten(0, 1) for part in tokens.split(128)])
    targets = tokens[:, 1:].flatten()
    for dtype in ('bfloat16', 'float32'):
        gpt.config.logits_dtype = dtype
        losses = []
        for part, of_part in zip(h.split(4096), targets.split(4096), strict=True):
            _, stats = model.head_loss(PLAIN_HEAD(part, gpt.E, gpt.config), of_part, gpt.config, False)
            losses.append(stats['loss'])
        numbers[f'test_loss_{dtype}'] = torch.cat(losses).mean().item()
    E = gpt.E
    if config['method'] == 'centered_head':
        E = E - E.mean(dim=0)
    numbers['logit_mean_f'] = (h.mean(dim=0) @ (f @ E)).item()  # over the rows, weighted by frequency
    numbers['h_norm'] = h.norm(dim=1).mean().item()
    numbers['estimate'] = cost(numbers['logit_mean'], numbers['logit_mean_spread']).item()
    return numbers, measured['distributions']


@torch.no_grad()
def measure_last_norm(path, config):
    """
    Where the energy of the last LayerNorm's output lies before its gain, and what the gain makes of it,
    over 8,192 test positions. The largest four dimensions are numbered from 1 on; gains are without sign, and
    their median is that of all but the largest three.
    """
    gpt = model.GPT(model.gpt_config(config))
    gpt.load_state_dict(train.read_checkpoint(path)['model'])
    windows = train.Windows(config['data'], 'val', config['block_size'])
    tokens = torch.from_numpy(windows[windows.evenly_spaced(8192)])
    seen = []
    gpt.norm_f.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0]))
    h = gpt.hidden(tokens[:, :-1]).flatten(0, 1)
    x = seen[0].flatten(0, 1)  # what the last LayerNorm gets
    n = torch.nn.functional.layer_norm(x, x.shape[1:])  # its output, before the gain
    gain = gpt.norm_f.weight.abs() if gpt.config.final_gain else torch.ones(n.size(1))

    energy = n.square().mean(dim=0)
    share, order = (energy / energy.sum()).sort(descending=True)
    mean_n = n.mean(dim=0)
    mu = gpt.E.mean(dim=0)
    numbers = {'x_norm': x.norm(dim=1).mean(), 'h_norm': h.norm(dim=1).mean(), 'mu_norm': mu.norm(),
               'logit_mean': h.mean(dim=0) @ mu,
               'cos_mu_h': torch.cosine_similarity(h, mu[None]).mean(),
               'cos_mu_mean_n': torch.cosine_similarity(mean_n, mu, dim=0),
               'constant_share': mean_n.square().sum() / energy.sum(),  # 1 if n is the same everywhere
               'gain_median': gain[order[3:]].median()}
    for i in range(4):
        numbers |= {f'share_{i + 1}': share[i], f'gain_{i + 1}': gain[order[i]]}
    return {name: value.item() for name, value in numbers.items()}


# the columns of results.csv
RESULTS = '''
    arm run method size n_params weight_tying lam cap lr seed steps batch_size block_size vocab_size
    test_tokens train_tokens val_tokens dtype logits_dtype final_gain init_from init_loss test_loss
    model_step mu_norm mean_share logit_mean logit_mean_spread logit_std
    logit_absmax logit_max cos_mu_h r_emb r_cos r_log r_emb_below_1 r_cos_below_1 r_log_below_1_too
    bf16_cost train_seconds tokens_per_second device processes commit
    n_layer n_embd warmup beta2 grad_clip torch largest_loss last_logit_mean
    test_loss_bfloat16 test_loss_float32 logit_mean_f h_norm estimate'''.split()


def thin(log):
    """What the figures show of a log: some 100 of its lines, and those with a held-out loss."""
    every = max(1, len(log) // 100)
    shown = log[(log.index % every == 0) | log.val_loss.notna()]
    return shown[['step', 'val_loss', 'logit_mean']]


def is_drawn(table, config):
    """Whether a figure draws the curves of a run."""
    if table == 'grid':
        return config['lr'] == 0.3 and config['method'] in ('baseline', 'mu_loss', 'mu_centering')
    return table in ('cause', 'slow_gain')


def run(table, arm, words):
    """Trains one run, unless it is done -> {csv file: rows of it}."""
    torch.set_num_threads(1)
    args = train.parser.parse_args(words)
    apply(arm, args.data)
    train.main(words)

    out = Path(args.out)
    config = train.read_json(out / 'config.json')
    log = pd.read_json(out / 'log.jsonl', lines=True)
    numbers, distributions = measure(str(out / 'model.pt'), config)
    row = {**config, **train.read_json(out / 'result.json'), **numbers}
    row |= {'arm': arm, 'run': out.name, 'device': config['device_name']}
    row['largest_loss'] = log.loss.max()
    row['last_logit_mean'] = log.logit_mean.dropna().iloc[-1]

    found = {'results': [{name: row.get(name) for name in RESULTS}]}
    if is_drawn(table, config):
        found['curves'] = thin(log).assign(run=out.name)
    if table == 'again':
        found['distributions'] = [{'run': out.name, 'quantity': name, **values}
                                  for name, values in distributions.items()]
    if table in ('gain', 'slow_gain'):
        found['last_norm'] = []
        for path in out.glob('model_*.pt'):
            step = int(path.stem.removeprefix('model_'))
            numbers = measure_last_norm(path, config)
            found['last_norm'].append({'run': out.name, 'step': step, **numbers})
    return found


# -------- the runs
def sweep(grid='laptop', **environment):
    """The commands of sweep.sh, as lists of train.py's words."""
    listed = subprocess.run(['bash', 'sweep.sh', grid], env={**os.environ, 'DRY_RUN': '1', **environment},
                            capture_output=True, text=True, check=True)
    commands = [line.split() for line in listed.stdout.splitlines()]
    return [words[words.index('train.py') + 1:] for words in commands]


def one(name, flags, seed, rate='1', steps='8000'):
    """One baseline of sweep.sh laptop with more flags, as train.py's words."""
    flags = f'{flags} --log_every=100'
    (words,) = sweep(METHODS='baseline', LRS=rate, STEPS=steps, SEEDS=str(seed), FLAGS=flags)
    name = name.replace(' ', '_').replace(',', '')
    words[-1] = f'--out=out/natural/{name}-lr{rate}-{steps}-s{seed}'
    return words


QUICK = dict(STEPS='8000', LRS='1e-3 3e-3 1e-2 3e-2 1e-1 3e-1 1', OUT='out/quick')
CAUSES = {  # arm: its flags
    'BF16 logits': '',
    'fp32 logits': '--logits_dtype=float32',
    'exact gradient': '',
    'fp32 logits, BF16 gradient': '--logits_dtype=float32',
    'gradient at a random scale': '',
    'Coupled Adam': '--method=coupled_adam',
    'SGD on E': '--method=coupled_adam',
    'centered head': '--method=centered_head',
    'with a gain': '--final_gain',
}
RARE = {  # the same with 257 bytes in 320 rows
    'baseline': '',
    'fp32 logits': '--logits_dtype=float32',
    'weight decay': '--method=weight_decay',
    'z-loss': '--method=z_loss',
    'soft-capping': '--method=soft_capping',
    'μ-loss': '--method=mu_loss --lam=0.1',
    'μ-centering': '--method=mu_centering',
    'centered by frequency': '',
    'centered by rows in use': '',
    'centered head': '--method=centered_head',
}
TAKES = {  # what is changed: flags of the baseline, with BF16 and with fp32 logits
    'nothing': '',
    'width 192': '--n_embd=192',
    'width 48': '--n_embd=48',
    '2 layers': '--n_layer=2',
    '4 layers': '--n_layer=4',
    '512 tokens a step': '--batch_size=16',
    '128 tokens of one sequence': '--batch_size=1 --block_size=128',
    'β2 0.99': '--beta2=0.99',
    'β2 0.999': '--beta2=0.999',
    'no warm-up': '--warmup=0',
    'warm-up of 4,000 steps': '--warmup=4000',
    'no clipping': '--grad_clip=0',
    'a gain': '--final_gain',
}


OTHERS = {  # methods that the paper cites
    'max-z-loss': '--method=max_z_loss',
    'NormSoftmax': '--method=norm_softmax',
    'cosine regularization': '--method=cosine_reg',
}
SLOW_GAINS = {  # the learning rate of the last gain, as a multiple of that of all else
    'gain at 1e-3': 1e-3,
    'gain at 10^-3.5': 10 ** -3.5,
    'gain at 1e-4': 1e-4,
    'gain at 1e-4, fp32 logits': 1e-4,
}


def list_runs():
    """All runs as (table, arm, train.py's words), the most telling first."""
    runs = []

    def add(table, arm, words):
        runs.append((table, arm, words))

    def add_sweep(table, **environment):
        for words in sweep(**environment):
            add(table, '', words)

    def add_fp32_baselines(table, **environment):
        flags = environment.pop('FLAGS', '') + ' --logits_dtype=float32'
        for words in sweep(**environment, METHODS='baseline', FLAGS=flags):
            add(table, 'fp32 logits', [*words[:-1], f'{words[-1]}-fp32head'])

    # the paper's grid: all rates with one seed, the two largest with three
    for seed in SEEDS:
        for rate in ('3e-1', '1e-1'):
            settings = dict(LRS=rate, SEEDS=str(seed), OUT='out/laptop')
            add_sweep('grid', **settings)
            add_fp32_baselines('grid', **settings)
        if seed == 1:
            add_sweep('grid', LRS='3e-2 1e-2 3e-3 1e-3 3e-4', OUT='out/laptop')

    # what makes the harm
    for seed in SEEDS:
        for arm, flags in CAUSES.items():
            add('cause', arm, one(arm, flags, seed))

    # the demo; on another machine, with seed 1
    for words in sweep('demo', SEEDS='1 2 3 4 5'):
        arm = 'fp32 logits' if words[-1].endswith('-fp32head') else ''
        add('demo', arm, words)
        if '--seed=1' in words:
            add('again', arm, words)

    # 257 bytes in 320 rows, and 64 characters in more than 64 rows
    for seed in SEEDS:
        for arm, flags in RARE.items():
            add('rare', arm, one(f'bytes {arm}', f'{flags} --data=data/stdlib', seed))
    for rows in (96, 128, 256, 640):
        for arm in ('baseline', 'μ-centering', 'centered by frequency'):
            add('rare', arm, one(f'{rows} rows {arm}', f'{RARE[arm]} --vocab_size={rows}', 1))

    # what it takes
    for name, flags in TAKES.items():
        add('takes', name, one(name, flags, 1))
        add('takes', f'{name}; fp32 logits', one(f'{name} fp32', f'{flags} --logits_dtype=float32', 1))

    # 8,000 steps: the grid, tied too, and Table 4's values of λ
    for seed in SEEDS:
        add_sweep('quick', **QUICK, SEEDS=str(seed))
        add_fp32_baselines('quick', **QUICK, SEEDS=str(seed))
    add_sweep('quick', **QUICK, TYING='tied')
    large = {**QUICK, 'LRS': '1e-1 3e-1 1'}
    add_sweep('quick', **large, METHODS='z_loss', LAMS='1e-7 1e-1 1e2')
    add_sweep('quick', **large, METHODS='mu_loss', LAMS='1e-7 1e-4 1e2')

    # the cause at the paper's rate and steps; the grid has these two arms
    for arm, flags in CAUSES.items():
        if arm not in ('BF16 logits', 'fp32 logits'):
            add('cause_0.3', arm, one(f'paper {arm}', flags, 1, '3e-1', '100000'))

    # weight decay that follows the schedule, λ η_t / η: AdamW's, with λ / η
    for rate, seeds in (('3e-3', SEEDS), ('3e-1', (1,))):
        for seed in seeds:
            flags = f'--method=adamw_decay --lam={1e-4 / float(rate):.10g}'
            add('decay', 'with the schedule', one('decay', flags, seed, rate, '100000'))

    # other methods at rate 1
    for seed in SEEDS:
        for arm, flags in OTHERS.items():
            add('methods', arm, one(arm, flags, seed))

    # a gain that learns slowly
    for seed in SEEDS:
        for arm in SLOW_GAINS:
            flags = '--final_gain --keep_every=400'
            if arm.endswith('fp32 logits'):
                flags += ' --logits_dtype=float32'
            add('slow_gain', arm, one(arm, flags, seed))
    for arm in ('gain at 1e-3', 'gain at 10^-3.5', 'gain at 1e-4'):
        add('slow_gain', arm, one(arm, '--final_gain --keep_every=5000', 1, '3e-1', '100000'))

    # the grid's baseline again, with the distributions of Figures 11 and 12
    for seed in SEEDS:
        add('again', 'baseline', one('baseline', '', seed, '3e-1', '100000'))

    # what a gain does: 4, 16 and 64 sequences of 32 tokens a step
    def add_gain(sequences, seed):
        for arm, flags in (('with a gain', '--final_gain'), ('without', '')):
            flags += f' --batch_size={sequences} --keep_every=1000'
            add('gain', arm, one(f'{arm} {32 * sequences} tokens', flags, seed, '3e-1', '20000'))

    for seed in SEEDS:
        add_gain(4, seed)
        add_gain(16, seed)
    add_gain(64, 1)

    # Eq. 2 and the baseline beside the decay with the schedule, and a second rate for Figures 11 and 12
    for seed in SEEDS:
        add('again', 'baseline', one('baseline', '', seed, '3e-3', '100000'))
        add('decay', 'Eq. 2', one('eq2', '--method=weight_decay', seed, '3e-3', '100000'))
    add_gain(64, 2)
    add_gain(64, 3)
    return runs


def append(rows, path):
    """Adds rows to a csv file."""
    path.parent.mkdir(exist_ok=True)
    table = pd.DataFrame(rows)
    if path.exists():
        table = table.reindex(columns=pd.read_csv(path, nrows=0).columns)
    table.to_csv(path, mode='a', header=not path.exists(), index=False, float_format='%.6g')


def main(tables):
    """Runs what has no row yet, of the tables named or of all, two at a time."""
    todo = []
    for table, arm, words in list_runs():
        path = HERE / table / 'results.csv'
        done = set(pd.read_csv(path).run) if path.exists() else set()
        name = words[-1].split('/')[-1]
        if name not in done and (table in tables or not tables):
            todo.append((table, arm, words))
    print(f'{len(todo)} runs to do', flush=True)

    with Pool(2, maxtasksperchild=1) as pool:
        results = [(table, pool.apply_async(run, (table, arm, words))) for table, arm, words in todo]
        for table, result in results:
            found = result.get()
            for name, rows in found.items():
                append(rows, HERE / table / f'{name}.csv')
            (row,) = found['results']
            print(f'{table}, {row["run"]}: {row["test_loss"]:.3f}, {row["logit_mean"]:.0f}', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
