"""What cannot work is refused with one line that names it, before anything is written."""
import pytest

import analyze
import prepare_fineweb
import train
from conftest import folder_hash, refused
from small_runs import SMALL, shard

# Flags -> what the line must contain. {bad} is a folder of the FILES below.
FLAGS = {train: '''
    --lam=1 -> --lam, --method=baseline
    --method=soft_capping --cap=0 -> --method=soft_capping, --cap
    --lambda=1 -> --lambda=1
    --steps=40.5 -> --steps, 40.5
    --steps=0 -> --steps=0, step 0
    --micro_batch_size=3 -> --batch_size=4, --micro_batch_size
    --vocab_size=100 -> 257, --vocab_size should be 320
    --data={bad}/unfinished -> unfinished, prepare_fineweb.py
    --data=/nowhere -> /nowhere, prepare_fineweb.py
    --data={bad}/cut -> x_train_000000.bin, cut short
    --data={bad}/few --vocab_size=64 -> few, --block_size=32
    --batch_size=64 -> good
    --init_from={bad}/cut.pt -> cut.pt
    ''', prepare_fineweb: '''
    --source=local -> --files
    --files=x -> --source=local
    --source=local --files={bad}/*.TXT -> *.TXT
    --source=local --files={bad}/a.doc -> a.doc
    --tokenizer=chars -> --tokenizer=chars
    ''', analyze: '''
    -> --results
    {bad}/few -> {bad}/few
    --results={bad}/no_loss.csv -> no_loss.csv, test_loss
    --results={bad}/no_runs.csv -> no_runs.csv
    '''}
CASES = [(program, *line.split('->')) for program in FLAGS for line in FLAGS[program].strip().splitlines()]

GOOD = shard(range(257))
TRAIN, VAL = 'x_train_000000.bin', 'x_val_000000.bin'
FILES = {
    'good/meta.json': b'{"vocab_size": 257}', f'good/{TRAIN}': GOOD, f'good/{VAL}': GOOD,
    'unfinished/meta.json': b'{"vocab_size": 257, "done": false}',
    f'unfinished/{TRAIN}': GOOD, f'unfinished/{VAL}': GOOD,
    f'cut/{TRAIN}': GOOD[:-2],
    f'few/{TRAIN}': shard(range(3)), f'few/{VAL}': GOOD,
    'a.doc': b'x',
    'cut.pt': b'PK',
    'no_loss.csv': b'method,size,weight_tying,lr\nbaseline,16M,0,0.1\n',
    'no_runs.csv': b'method,size,weight_tying,lr,test_loss\n'}


@pytest.mark.parametrize('program, flags, named', CASES)
def test_bad_input(program, flags, named, tmp_path):
    bad = tmp_path / 'bad'
    for path, content in FILES.items():
        (bad / path).parent.mkdir(parents=True, exist_ok=True)
        (bad / path).write_bytes(content)
    before = folder_hash(tmp_path)
    always = ['--steps=2', *SMALL, f'--data={bad}/good'] if program is train else []
    flags, named = (text.strip().replace('{bad}', str(bad)) for text in (flags, named))
    refused(lambda: program.main([*always, f'--out={tmp_path}/out', *flags.split()]), *named.split(', '))
    assert folder_hash(tmp_path) == before
