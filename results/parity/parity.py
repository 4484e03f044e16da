"""
Trains the published code and ours from the same weights on the same batches, and compares them.

    git clone https://github.com/flxst/output-embedding-centering AUTHORS
    pip install rotary-embedding-torch                           # which the published model.py imports
    python results/parity/parity.py AUTHORS --data=data/stdlib   # prints and writes exact.csv, training.csv

Of the published code model.py is imported; the learning rate and the step are executed as they stand in its
train.py, a script that cannot be imported.
"""
import argparse
import importlib.util
import itertools
import math
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import train  # noqa: E402
from model import METHODS, SIZES  # noqa: E402

METHODS_OF_BOTH = ['baseline', 'z_loss', 'mu_loss', 'mu_centering']
BATCH, T, V = 4, 64, 320
STEPS = 200
EXACT_STEPS = 5


def our_settings(method, tying, dtype, **more):
    """Of a tiny model, as train.py has them; in float64 the mean of E is far from 0, so that it matters."""
    args = train.parser.parse_args([f'--method={method}', '--device=cpu'])
    vars(args).update(SIZES['tiny'], vocab_size=V, block_size=T, weight_tying=tying, dtype=dtype,
                      logits_dtype=dtype, mu_shift=float(dtype == 'float64'), **more)
    return args


def our_model(args):
    model, optimizer = train.make_model(args)
    return model.to(torch.float64 if args.dtype == 'float64' else torch.float32), optimizer


class Published:
    """The published model, with the weights of ours, and its training step."""

    def __init__(self, clone, gpt, settings):
        spec = importlib.util.spec_from_file_location('published_model', clone / 'nanoGPT' / 'model.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.GPTConfig(
            **SIZES['tiny'], block_size=T, vocab_size=V, bias=False, qk_layernorm=True,
            weight_tying=settings.weight_tying, z_loss=settings.method == 'z_loss',
            muloss=settings.method == 'mu_loss', gamma=settings.lam)
        self.model = module.GPT(config).to(gpt.E.dtype)
        for theirs, ours in zip(self.parameters(), gpt.parameters(), strict=True):  # in the same order
            theirs.data.copy_(ours.data)

        script = (clone / 'nanoGPT' / 'train.py').read_text(encoding='utf-8')
        self.names = dict(
            math=math, torch=torch, model=self.model, raw_model=self.model, ddp=False,
            gradient_accumulation_steps=1, grad_clip=settings.grad_clip,
            mucentering=settings.method == 'mu_centering',
            learning_rate=settings.lr, min_lr=settings.min_lr, warmup_iters=settings.warmup,
            lr_decay_iters=settings.steps, ctx=nullcontext(),
            scaler=torch.amp.GradScaler('cpu', enabled=False),
            optimizer=self.model.configure_optimizers(0.0, settings.lr, (0.9, 0.95), 'cpu'))
        if gpt.config.dtype == 'bfloat16':
            self.names['ctx'] = torch.autocast('cpu', torch.bfloat16)
        exec(cut(script, 'def get_lr_decayed', '# learning rate constant'), self.names)
        self.step_code = cut(script, '    # forward backward update', '    # timing and logging')

    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]  # not the frequencies of RoPE

    def step(self, number, batch):
        for group in self.names['optimizer'].param_groups:
            group['lr'] = self.names['get_lr_decayed'](number - 1)
        self.names['X'], self.names['Y'] = batch
        self.names['get_batch'] = lambda split: batch  # the step fetches the next one, which is not used
        exec(self.step_code, self.names)
        return self.names['loss'].item()


def cut(text, start, end):
    """The lines of a text from the one that begins with `start` up to the one that begins with `end`."""
    first = text.index('\n' + start) + 1
    return textwrap.dedent(text[first:text.index('\n' + end, first) + 1])


def our_step(gpt, optimizer, number, batch, settings):
    stats, _ = train.train_step(gpt, optimizer, [batch], number, settings)
    return stats['loss'].mean().item()


def largest_difference(ours, theirs):
    """Of two lists of tensors: the largest difference of an entry, relative to the tensor's largest entry."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


def compare_exactly(clone, batches, method, tying):
    """In float64, with a λ of 1: the loss, all gradients, and all weights after a few steps."""
    settings = our_settings(method, tying, 'float64', lam=1.0, lr=3e-3, warmup=2, steps=100)
    gpt, optimizer = our_model(settings)
    published = Published(clone, gpt, settings)
    tokens, targets = batches[0]
    objective, stats = gpt(tokens, targets)
    _, loss, _, published_objective = published.model(tokens, targets)
    gradients = torch.autograd.grad(objective, list(gpt.parameters()))
    published_gradients = torch.autograd.grad(published_objective, published.parameters())
    row = {'method': method, 'weight_tying': tying,
           'loss': abs(stats['loss'].mean() - loss).item(),
           'objective': abs(objective - published_objective).item(),
           'gradients': largest_difference(gradients, published_gradients)}
    for number, batch in enumerate(batches[:EXACT_STEPS], 1):
        our_step(gpt, optimizer, number, batch, settings)
        published.step(number, batch)
    row['weights'] = largest_difference([p.data for p in gpt.parameters()],
                                        [p.data for p in published.parameters()])
    return row


def compare_training(clone, batches, method, tying, lr):
    """
    In bf16: the losses of both codes, and of ours from output embeddings that differ in their last bit, which
    says how far two runs of one code come apart.
    """
    settings = our_settings(method, tying, 'bfloat16', lam=METHODS[method] or 1.0, lr=lr,
                            warmup=STEPS // 20, steps=STEPS)
    gpt, optimizer = our_model(settings)
    published = Published(clone, gpt, settings)
    nudged, nudged_optimizer = our_model(settings)
    with torch.no_grad():
        nudged.E.mul_(1 + torch.finfo(torch.float32).eps)
    losses = pd.DataFrame(
        [{'published': published.step(number, batch),
          'ours': our_step(gpt, optimizer, number, batch, settings),
          'ours_nudged': our_step(nudged, nudged_optimizer, number, batch, settings)}
         for number, batch in enumerate(batches, 1)])
    difference = (losses.ours - losses.published).abs()
    by_nudge = (losses.ours - losses.ours_nudged).abs()
    last = losses.tail(STEPS // 10).mean()
    return {'method': method, 'weight_tying': tying, 'lr': lr, 'first_loss': difference[0],
            'to_step_20': difference[:20].max(), 'to_step_20_nudged': by_nudge[:20].max(),
            'to_step_200': difference.max(), 'to_step_200_nudged': by_nudge.max(), **last}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('authors', type=Path, help='a clone of the published code')
    p.add_argument('--data', default='data/stdlib', help='shards of bytes')
    args = p.parse_args()
    windows = train.Windows(args.data, 'train', T, V)
    batches = []
    for step in range(1, STEPS + 1):
        batch = torch.from_numpy(windows[train.batch_windows(1, step, BATCH, len(windows))])
        batches.append((batch[:, :-1].contiguous(), batch[:, 1:].contiguous()))

    cases = list(itertools.product(METHODS_OF_BOTH, [False, True]))
    exact = pd.DataFrame([compare_exactly(args.authors, batches, *case) for case in cases])
    training = pd.DataFrame([compare_training(args.authors, batches, *case, lr)
                             for case in cases for lr in (3e-3, 0.1, 0.3)])
    for name, table in (('exact', exact), ('training', training)):
        table.to_csv(HERE / f'{name}.csv', index=False, float_format='%.3g' if name == 'exact' else '%.6g')
        print(name, table.to_string(index=False), sep='\n')


if __name__ == '__main__':
    main()
