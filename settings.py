"""
The settings of a run: the flags of train.py, what they default to, what cannot work, and what a run that goes on takes over.
"""
import argparse
import math
import os
import subprocess
import sys
import warnings
import zipfile

import torch

import data
from common import die, number, parse_args, read_json
from model import LAM, METHODS, SIZES, head_mode

# Settings that may change when a run goes on; all others must be as they were.
FREE = ('micro_batch_size', 'device', 'compile', 'ckpt_every', 'keep_every', 'wandb', 'threads', 'data', 'out',
        'processes', 'commit', 'versions', 'device_name')

# What a run with --init_from does not take over from the other: its method, its place, and what may change anyway.
OWN = ('method', 'lam', 'cap', 'center_every', 'center_input', 'init_from', *FREE)


def parser(description=None):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    whole, count, positive = number(0, integer=True), number(1, integer=True), number(above=0)
    extent = number(1, below=2**16 + 1, integer=True)
    flag = argparse.BooleanOptionalAction

    g = p.add_argument_group('method (Sections 1 and 2 of the paper)')
    g.add_argument('--method', default='baseline', metavar='METHOD', choices=(*METHODS, *(f'{m}+mu_centering' for m in METHODS[1:] if m != 'mu_centering')),
                   help=f'how the output logits are tamed: {", ".join(METHODS)}, or one of them with +mu_centering after it (default baseline)')
    g.add_argument('--lam', type=number(0), 
                   help='λ of the methods that have one (Eq. 3, 5, 15; default: ' + ', '.join(f'{m} {lam:g}' for m, lam in LAM.items()) + ')')
    g.add_argument('--cap', type=positive, default=30.0, help='soft-cap c of soft_capping (Eq. 6; default 30)')
    g.add_argument('--center_every', type=count, default=1, help='steps from one μ-centering to the next (default 1, as the paper)')
    g.add_argument('--center_input', action=flag, default=False, help='μ-centering of the input embeddings as well (default no)')
    g.add_argument('--init_from', metavar='RUN_OR_FILE',
                   help='go on from the weights, and where it has one the optimizer state, of another run: its folder, ckpt.pt or a kept model, '
                        'from that step; every setting that is not given is as it was there, except those of the method and the machine')

    g = p.add_argument_group('model (Appendix A)')
    g.add_argument('--size', default='16M', choices=SIZES, help='one of the published sizes, or tiny (Eq. 19; default 16M)')
    g.add_argument('--weight_tying', action=flag, default=False, help='one matrix for input and output embeddings (default no)')
    g.add_argument('--n_layer', type=extent, help='layers (default: from --size)')
    g.add_argument('--n_embd', type=extent, help='width H (default: from --size)')
    g.add_argument('--n_head', type=extent, help='attention heads (default: from --size)')
    g.add_argument('--vocab_size', type=extent, help='rows V of the head (default 50304; tiny: what the data needs, rounded up to 64)')
    g.add_argument('--block_size', type=count, default=2048, help='sequence length in tokens (default 2048)')
    g.add_argument('--rope_fraction', type=number(0, below=1.001), default=0.5,
                   help='share of each head that RoPE rotates (default 0.5, as the published runs had it)')

    g = p.add_argument_group('optimization (Appendix A)')
    g.add_argument('--lr', type=number(above=0, below=1e33), default=3e-3, help='peak learning rate η (Eq. 18; default 3e-3)')
    g.add_argument('--min_lr', type=number(0), default=1e-5, help='where the cosine ends (default 1e-5)')
    g.add_argument('--warmup', type=whole, help='steps of linear warm-up (default 5%% of --steps: 5,000 of 100,000)')
    g.add_argument('--steps', type=count, default=100_000, help='optimizer steps (default 100,000)')
    g.add_argument('--batch_size', type=extent, default=64, help='sequences in a step, all processes together (default 64)')
    g.add_argument('--beta1', type=number(0, below=1), default=0.9, help='AdamW β1 (default 0.9)')
    g.add_argument('--beta2', type=number(0, below=1), default=0.95, help='AdamW β2 (default 0.95)')
    g.add_argument('--eps', type=positive, default=1e-8, help='AdamW ε (default 1e-8)')
    g.add_argument('--grad_clip', type=number(0), default=1.0, help='largest norm of the gradient, 0 for no clipping (default 1.0)')
    g.add_argument('--seed', type=number(0, below=2**32, integer=True), default=1, help='of initialisation and data order (default 1)')

    g = p.add_argument_group('precision and machine')
    g.add_argument('--device', help='cuda, mps or cpu (default: the best there is)')
    g.add_argument('--dtype', choices=['bfloat16', 'float32', 'float64'],
                   help='of the matrix products; bfloat16 is autocast over fp32 weights (default bfloat16 on cuda, float32 elsewhere)')
    g.add_argument('--logits_dtype', choices=['bfloat16', 'float32', 'float64'],
                   help='what the logits are rounded to (default: --dtype); bfloat16 under float32 gives a CPU the numerics of BF16')
    g.add_argument('--micro_batch_size', type=count,
                   help='sequences in one forward pass of one process (default: the most that is estimated to fit); no effect on the result')
    g.add_argument('--head', choices=['chunked', 'plain'], default='chunked',
                   help='chunked never holds tokens x vocabulary logits, plain does (default chunked)')
    g.add_argument('--compile', action=flag, help='torch.compile (default on cuda)')
    g.add_argument('--threads', type=number(1, below=1025, integer=True), help='CPU threads of this process (default: what PyTorch chooses)')
    g.add_argument('--deterministic', action=flag, default=False, help='deterministic kernels, for bit-exact resume on a GPU')

    g = p.add_argument_group('data, output, logging')
    g.add_argument('--data', help='folder of token shards (default data/fineweb)')
    g.add_argument('--out', help="the run's own folder (default out/train/<name made from the settings>)")
    g.add_argument('--log_every', type=count, default=10, help='steps between log lines (default 10)')
    g.add_argument('--eval_every', type=whole, default=5000, help='steps between evaluations on the way, 0 for none (default 5,000)')
    g.add_argument('--eval_tokens', type=count,
                   help='test tokens of the initial loss and the evaluations on the way (default 1,048,576; on a CPU 16,384)')
    g.add_argument('--test_tokens', type=count, help='test tokens of the final test loss (default 10,485,760; on a CPU 131,072)')
    g.add_argument('--ckpt_every', type=whole, default=1000, help='steps between checkpoints, 0 for none (default 1,000)')
    g.add_argument('--keep_every', type=whole, default=0, help='keep model_<step>.pt every so many steps, 0 for none (default 0)')
    g.add_argument('--divergence_margin', type=positive, default=0.5,
                   help='nats that the smoothed loss may stand above its lowest before the run counts as diverged (default 0.5)')
    g.add_argument('--stop_on_divergence', action=flag, default=False, help='stop there (default: train on, as the paper does)')
    g.add_argument('--wandb', help='Weights & Biases project to log to as well (default none)')
    return p


def parse_run(argv, description=None):
    """
    The settings of a command line, and the checkpoint that --init_from names or None. With it, what argv does not name is as
    in that checkpoint's config, or in the config of the run itself where it has begun: the other may have gone on since.
    """
    p = parser(description)
    args = parse_args(p, argv)
    if not args.init_from:
        return args, None
    path = args.init_from.rstrip('/')
    if os.path.isdir(path):
        path = next((f for f in (os.path.join(path, name) for name in ('ckpt.pt', 'model.pt')) if os.path.exists(f)), os.path.join(path, 'ckpt.pt'))
    out = args.out or os.path.join('out', 'rescue', f'{os.path.basename(os.path.dirname(os.path.abspath(path)))}-to-{args.method}')
    if os.path.exists(os.path.join(out, 'ckpt.pt')) or os.path.exists(os.path.join(out, 'result.json')):
        config, source = read_json(os.path.join(out, 'config.json')), None
    else:
        source = load_checkpoint(path, ('model', 'config'), '--init_from should name a run\'s folder, its ckpt.pt, model.pt or model_<step>.pt')
        config = source['config']
    taken = [f'--{key}={config[key]}' if not isinstance(config[key], bool) else f'--{key}' if config[key] else f'--no-{key}'
             for key in vars(args) if key not in OWN or key == 'data' if config.get(key) is not None]
    p.set_defaults(out=out)
    return parse_args(p, [*taken, *(sys.argv[1:] if argv is None else argv)]), source  # what is given comes last and counts


def run_name(s):
    """<size>-<tied|untied>-<method>[-lam<λ>]-lr<lr>-s<seed>, numbers as %g."""
    lam = f'-lam{s["lam"]:g}' if head_mode(s['method']) in LAM else ''
    return f'{s["size"]}-{"tied" if s["weight_tying"] else "untied"}-{s["method"]}{lam}-lr{s["lr"]:g}-s{s["seed"]}'


def default_data(on_laptop):
    """The folder of shards when --data is not given: FineWeb; on a laptop, where there is none, the standard library's source."""
    if os.path.isdir('data/fineweb'):
        return 'data/fineweb'
    if not on_laptop:
        die('--data: data/fineweb is not there; make it with: python prepare_fineweb.py, or name another folder')
    if not os.path.exists('data/stdlib/meta.json') and 'RANK' not in os.environ:
        print('no data/fineweb here: making data/stdlib from the Python standard library instead', flush=True)
        prepare = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'prepare_fineweb.py')
        done = subprocess.run([sys.executable, prepare, '--source=stdlib', '--tokenizer=bytes', '--out=data/stdlib'])
        if done.returncode:
            sys.exit(done.returncode)
    return 'data/stdlib'


def fill_in(args, device_type, world_size):
    """Fills in the settings that follow from others, and refuses combinations that cannot work."""
    for key in ('data', 'out'):
        if getattr(args, key) == '':
            die(f'--{key}= is empty; should be a folder')
    for key in ('n_layer', 'n_embd', 'n_head'):
        setattr(args, key, getattr(args, key) or SIZES[args.size][key])
    args.dtype = args.dtype or ('bfloat16' if device_type == 'cuda' else 'float32')
    args.logits_dtype = args.logits_dtype or args.dtype
    args.compile = device_type == 'cuda' if args.compile is None else args.compile
    args.warmup = args.steps // 20 if args.warmup is None else args.warmup
    args.lam = LAM.get(head_mode(args.method), 1e-4) if args.lam is None else args.lam
    args.eval_tokens = args.eval_tokens or (2**14 if device_type == 'cpu' else 2**20)
    args.test_tokens = args.test_tokens or (2**17 if device_type == 'cpu' else 10 * 2**20)
    args.out = args.out or os.path.join('out', 'train', run_name(vars(args)))

    if args.n_embd % args.n_head or args.n_embd // args.n_head % 2:
        die(f'--n_embd={args.n_embd} should be an even multiple of --n_head={args.n_head}')
    if args.rope_fraction > 1:
        die(f'--rope_fraction={args.rope_fraction:g} should be from 0 to 1')
    if args.method.startswith('weight_decay') and args.lam > 1:
        die(f'--lam={args.lam:g} should be at most 1 with --method={args.method}: E <- (1 - lam) E')
    if 'mu_centering' not in args.method and (args.center_every > 1 or args.center_input):
        die(f'--center_every and --center_input are of μ-centering: should go with --method=mu_centering, not {args.method}')
    if args.min_lr > args.lr:
        die(f'--min_lr={args.min_lr:g} should not be above --lr={args.lr:g}')
    if args.warmup >= args.steps:
        die(f'--warmup={args.warmup} should be below --steps={args.steps}')
    if args.batch_size % world_size:
        die(f'--batch_size={args.batch_size} does not divide by the {world_size} processes')
    if args.micro_batch_size and args.batch_size // world_size % args.micro_batch_size:
        die(f'--micro_batch_size={args.micro_batch_size} does not divide the {args.batch_size // world_size} sequences of each process')
    for key in ('eval_tokens', 'test_tokens'):
        if getattr(args, key) < args.block_size:
            die(f'--{key}={getattr(args, key)} should be at least --block_size={args.block_size}')
    if 'float64' in (args.dtype, args.logits_dtype) and args.dtype != args.logits_dtype:
        die(f'--dtype={args.dtype} with --logits_dtype={args.logits_dtype}: float64 goes with float64 only')
    if args.compile and device_type == 'cpu' and args.logits_dtype == 'bfloat16' and torch.__version__ < '2.13':
        die(f'--compile on a CPU drops the rounding to --logits_dtype={args.logits_dtype} in torch {torch.__version__}; 2.13 keeps it')
    args.data = args.data or default_data(device_type != 'cuda')


def check_settings(where, before, settings):
    """Exits with 2 where `before`, the settings of the run in `where`, are not those of this command."""
    for key, value in settings.items():
        if key not in FREE and before.get(key) != value:
            die(f'{where} holds a run with {key}={before.get(key)!r}, this command has {value!r}; choose another --out')


def load_data(args):
    """The train and the val shards; sets args.vocab_size. Exits with 2 where they do not fit the head or have no window."""
    train_shards, val_shards = data.load_shards(args.data, 'train'), data.load_shards(args.data, 'val')
    for split, shards in (('train', train_shards), ('val', val_shards)):
        if data.count_windows(shards, args.block_size).sum() == 0:
            die(f'--data={args.data}: no {split} shard has a whole window of --block_size={args.block_size} tokens')
    vocabulary = data.vocabulary(args.data)
    if args.vocab_size is None:
        args.vocab_size = 64 * math.ceil(vocabulary / 64) if args.size == 'tiny' else 50304
    if vocabulary > args.vocab_size:
        die(f'--data={args.data}: its vocabulary has {vocabulary} tokens, more than the head (--vocab_size={args.vocab_size})')
    for shard in train_shards + val_shards:  # the start of each here, the rest as it is read
        data.check_tokens(shard, 0, 2**20, args.vocab_size)
    return train_shards, val_shards


def load_checkpoint(path, keys=('model', 'optimizer', 'config', 'counters'), advice='move it away to start from the beginning'):
    """A checkpoint: a dict with `step` and these dicts, tensors on the CPU; nothing in it is executed. Exits with 2 where it is not whole."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, but does not look at them
            if archive.testzip():
                raise ValueError(f'{archive.testzip()} is damaged')
        with warnings.catch_warnings():  # torch warns of an odd pickle before it refuses it; one line is enough
            warnings.simplefilter('ignore')
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        if not isinstance(checkpoint['step'], int) or not all(isinstance(checkpoint[key], dict) for key in keys):
            raise ValueError('its parts are not what train.py writes')
        return checkpoint
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:150] if str(error).strip() else type(error).__name__
        die(f'{path}: not a whole checkpoint ({reason}); {advice}')
