"""What cannot work is refused with one line that names it, before anything is written."""
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import analyze
import prepare_fineweb
import train
from conftest import folder_hash, refused
from small_runs import SMALL, shard

PROGRAMS = {'train': train, 'prepare': prepare_fineweb, 'analyze': analyze}

# Flags -> what the line must contain. {bad} is the folder that the fixture `bad` makes.
FLAGS = {'train': '''
    --lam=1 -> --lam, --method=baseline
    --lr=nan -> --lr, above 0
    --lr=0 -> --lr, above 0
    --warmup=-1 -> --warmup, at least 0
    --beta1=1 -> --beta1
    --min_lr=1 -> --min_lr=1, --lr
    --rope_fraction=2 -> --rope_fraction
    --seed=5000000000 -> --seed
    --steps=1.5 -> --steps
    --warmup=100 --steps=100 -> --warmup=100, --steps=100
    --micro_batch_size=3 -> --batch_size=4, --micro_batch_size
    --n_embd=30 --n_head=4 -> --n_embd, --n_head
    --mu_shift=30 --weight_tying -> --mu_shift
    --mu_shift=30 --init_from=x -> --mu_shift
    --init_from= -> '' is not readable
    --device=cuda -> --device=cuda, GPU
    --wandb=x -> --wandb, pip install wandb
    --out={bad}/x.txt -> x.txt
    --vocab_size=100 -> 257, --vocab_size
    --data=/nowhere -> /nowhere, *_train_, prepare_fineweb.py
    --data={bad}/no_val -> no_val, *_val_
    --data={bad}/cut -> x_train_000000.bin, cut short
    --data={bad}/magic -> magic, uint16
    --data={bad}/llama -> llama, uint16
    --data={bad}/few -> few, --block_size=32
    --data={bad}/words --vocab_size=100 -> --vocab_size=100
    ''', 'prepare': '''
    --source=local --files=x --out= -> --out
    --files=x -> --source=local
    --tokens=1.5 -> --tokens, whole
    --source=local --tokenizer=bytes --files={bad}/*.* -> .doc, .parquet
    --source=local --tokenizer=bytes --files={bad}/*_i* -> no_index
    --source=local --tokenizer=bytes --files=/nowhere/* -> /nowhere
    ''', 'analyze': '''
    -> --results
    /nowhere -> /nowhere
    {bad}/empty -> {bad}/empty
    --results={bad}/no_loss.csv -> no_loss.csv, test_loss
    --results={bad}/no_runs.csv -> no_runs.csv
    --results={bad}/cells.csv -> cells.csv
    --results={bad}/twice.csv -> twice.csv
    '''}

HEAD = b'method,size,weight_tying,lr,test_loss'
FILES = {
    'a.doc': b'x', 'no_index': b'x', 'is_it.txt': b'x',
    'x.parquet': b'x', 'x.txt': b'x' * 100, 'words/meta.json': b'{"vocab_size": 60}',
    'no_runs.csv': HEAD + b'\n', 'good.csv': HEAD + b'\nbaseline,16M,0,0.1,3\n',
    'no_loss.csv': b'method,size,weight_tying,lr\nbaseline,16M,0,0.1\n',
    'cells.csv': HEAD + b'\nbaseline,16M,0,0.1,3,4\n',
    'twice.csv': HEAD + b'\nbaseline,16M,0,0.1,3\nbaseline,16M,0,0.1,4\n'}

CASES = [(program, *line.split('->')) for program in FLAGS for line in FLAGS[program].strip().splitlines()]


@pytest.fixture(scope='module')
def bad(corpus, tmp_path_factory):
    """A folder of files and folders of shards that cannot be read, each named for what is wrong with it."""
    root = tmp_path_factory.mktemp('bad')
    good = Path(corpus, 'stdlib_train_000000.bin').read_bytes()
    llama = np.array([20240801, 7, 1] + [0] * 254, '<i4').tobytes()  # one token, which has 32 bits
    shards = {'cut': good[:-2], 'magic': b'x' + good[1:], 'few': shard(range(3)), 'llama': llama,
              'no_val': good, 'words': good}
    shards = {f'{name}/x_train_000000.bin': content for name, content in shards.items()}
    shards['words/x_val_000000.bin'] = good
    for path, content in {**shards, **FILES}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / 'empty').mkdir()
    (root / 'folder/x_train_000000.bin').mkdir(parents=True)
    return root


@pytest.mark.parametrize('program, flags, words', CASES, ids=lambda part: part.strip()[:50])
def test_bad_input(program, flags, words, bad, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setitem(sys.modules, 'wandb', None)
    before = folder_hash(bad)
    out = f'--out={tmp_path}/out'
    always = {'train': ['--steps=2', *SMALL, f'--data={corpus}', out], 'prepare': ['--workers=1', out],
              'analyze': [out]}
    flags, words = (text.replace('{bad}', str(bad)) for text in (flags, words))
    refused(lambda: PROGRAMS[program].main([*always[program], *flags.split()]), *words.strip().split(', '))
    assert folder_hash(tmp_path) == {} and folder_hash(bad) == before
