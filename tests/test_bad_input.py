"""What cannot work is refused with one line that names it, before anything is written: bad_input.txt."""
import glob
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import analyze
import bench
import common
import prepare_fineweb
import train
from checkpoint import FORMAT
from conftest import ENV, links, refused
from processes import finish, one_line, process
from runs import SMALL

PROGRAMS = {'train': train, 'prepare': prepare_fineweb, 'analyze': analyze, 'bench': bench}
LIKE_CORPUS = '--source=stdlib --tokenizer=bytes --val_tokens=20000 --shard_tokens=50000 --tokens=1e6'


def read_table():
    """The cases (program, flags, words), those that also run as processes, and the files to make."""
    kinds = {'file': (None, '{}', None), 'meta': ('train', 'meta_{}/meta.json', '--data={{bad}}/meta_{}'),
             'csv': ('analyze', '{}.csv', '--results={{bad}}/{}.csv')}
    cases, processes, files = [], [], {}
    with open(os.path.join(os.path.dirname(__file__), 'bad_input.txt'), encoding='utf-8') as file:
        lines = [line.strip() for line in file if line.strip() and not line.startswith('#')]
    for line in lines:
        given, _, words = line.partition('->')
        words = [word.strip() for word in words.split(',')]
        program, _, rest = given.removeprefix('! ').strip().partition(' ')
        flags = shlex.split(rest.replace('{like_corpus}', LIKE_CORPUS)) if program not in kinds else []
        if program in kinds:
            name, _, content = rest.partition(':')
            content = content.strip().replace('{head}', 'method,size,weight_tying,lr,test_loss')
            program, path, flag = kinds[program]
            files[path.format(name)] = content.encode().decode('unicode_escape').encode('latin-1')
            if program is None:
                continue
            flags, words = [flag.format(name)], [name, *words]
        cases.append((program, flags, words))
        if line.startswith('!'):
            processes.append(cases[-1])
    return cases, processes, files


CASES, PROCESSES, TABLE_FILES = read_table()
SWEEPS = [case for case in CASES if case[0] == 'sweep']
IN_PROCESS = [case for case in CASES if case[0] != 'sweep']
IDS = [' '.join([program, *flags]) for program, flags, _ in IN_PROCESS]


def bad_shards(shard):
    """Folder -> what its train shard is, made from a good one of 50,000 tokens."""
    def header(*values, order='<i4'):
        return np.array([*values] + [0] * (256 - len(values)), order).tobytes()
    tokens = shard[1024:]
    return {'short': shard[:4], 'cut': shard[:-2], 'half_a_token': shard + b'x',
            'magic': header(1, 1, 50000) + tokens, 'version': header(20240520, 2, 50000) + tokens,
            'big_endian': header(20240520, 1, 50000, order='>i4') + tokens,
            'longer': header(20240520, 1, 60000) + tokens, 'negative': header(20240520, 1, -5),
            'beyond': shard[:-2] + b'\xff\x7f', 'few': header(20240520, 1, 3) + tokens[:6],
            'none': header(20240520, 1, 0)}


@pytest.fixture(scope='module')
def bad(corpus, tmp_path_factory):
    """A folder of files and folders of shards that cannot be read, each named for what is wrong with it."""
    root = tmp_path_factory.mktemp('bad')
    shard, val = (open(f'{corpus}/stdlib_{split}_000000.bin', 'rb').read() for split in ('train', 'val'))
    shards, files = bad_shards(shard), {'deep/meta.json': b'[' * 100_000, **TABLE_FILES}
    for name in {'no_val', 'val_cut', 'folder', 'link', *shards, *(os.path.dirname(path) for path in files)}:
        folder = root / name
        folder.mkdir(exist_ok=True)
        if name == 'folder':
            (folder / 'x_train_000000.bin').mkdir()
        elif name == 'link':
            (folder / 'x_train_000000.bin').symlink_to('/nowhere')
        elif name:
            (folder / 'x_train_000000.bin').write_bytes(shards.get(name, shard))
        if name not in ('', 'no_val'):
            (folder / 'x_val_000000.bin').write_bytes(val[:-1000] if name == 'val_cut' else val)
            (folder / 'meta.json').write_bytes(b'{"vocab_size": 257}')
    for path, content in files.items():
        (root / path).write_bytes(content)
    for name, config in (('older_run', {'lr': 7}), ('other_run', {'format': FORMAT, 'lr': 7})):
        (root / name).mkdir()
        common.write_json(str(root / name / 'config.json'), config)
    (root / 'empty').mkdir()
    return root


def full_command(program, flags, words, bad, corpus, out):
    """The flags and words of a case in full."""
    always = {'train': ['--steps=2', *SMALL, f'--data={corpus}', f'--out={out}'], 'bench': [],
              'prepare': ['--workers=1', f'--out={out}'], 'analyze': [f'--out={out}']}
    flags, words = ([x.replace('{bad}', str(bad)) for x in texts] for texts in (flags, words))
    return [*always[program], *flags], words


def times(folder):
    """When everything in a folder was last written."""
    paths = glob.glob('**', root_dir=folder, recursive=True, include_hidden=True)
    return {path: os.lstat(os.path.join(folder, path)).st_mtime_ns for path in paths}


@pytest.mark.parametrize('program, flags, words', IN_PROCESS, ids=IDS)
def test_bad_input_is_refused_with_one_line(program, flags, words, bad, corpus, tmp_path):
    before = times(bad)
    flags, words = full_command(program, flags, words, bad, corpus, tmp_path / 'out')
    refused(lambda: PROGRAMS[program].main(flags), *words)
    assert os.listdir(tmp_path) == [] and times(bad) == before


def test_every_flag_of_a_run_refuses_what_is_no_value_of_it():
    """Numbers refuse what is none, is not finite or negative; a choice refuses what it does not offer."""
    parser = train.parser()
    flags = [action for action in parser._actions if action.type or action.choices]
    assert len(flags) > 30
    for action in flags:
        name = action.option_strings[0]
        for text in ('', 'x', 'nan', 'inf', '-1', '1e400', '0x1', '1 2'):
            refused(lambda: common.parse_args(parser, [f'{name}={text}']), name)  # noqa: B023


def test_bad_input_ends_a_process_with_status_2(bad, corpus, tmp_path):
    before = times(bad)
    assert {program for program, *_ in PROCESSES} == set(PROGRAMS)
    for case in PROCESSES:
        flags, words = full_command(*case, bad, corpus, tmp_path / 'out')
        finish(process(PROGRAMS[case[0]].main, flags, stderr=tmp_path / 'stderr'), 2)
        line = one_line(tmp_path / 'stderr')
        assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == ['stderr'] and times(bad) == before


def test_bad_variables_of_a_sweep_are_refused_with_one_line(tmp_path, corpus):
    folder = links(str(tmp_path / 'checkout'))
    before = times(folder)

    def refuse(case):
        variables = dict(x.split('=', 1) for x in case[1] if '=' in x)
        grids = [x for x in case[1] if '=' not in x] or ['demo']
        return subprocess.run(['bash', 'sweep.sh', *grids], cwd=folder, capture_output=True, text=True,
                              env={**ENV, 'DATA': corpus, **variables})
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(refuse, SWEEPS))
    for (_, arguments, words), done in zip(SWEEPS, ends, strict=True):
        line, seen = done.stderr, (arguments, done.returncode, done.stderr)
        assert done.returncode == 2 and line.startswith('error: ') and line.count('\n') == 1, seen
        assert all(word in line for word in words), seen
    assert times(folder) == before
