"""
The Python parts of on_gpu.sh.

    python tests/on_gpu.py machine                                    its torch and GPU, and every method
    python tests/on_gpu.py text FILE.jsonl CHARACTERS VOCAB_SIZE      real text, and how to make tokens of it
    python tests/on_gpu.py steps SECONDS RUNS                         how many steps a run of SECONDS can make
    python tests/on_gpu.py tables RUNS FOLDER                         results.csv and curves.csv of runs
    python tests/on_gpu.py report FOLDER [DEVICE]                     FOLDER/README.md from the devices' files
"""
import csv
import glob
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import sysconfig

from tabulate import tabulate

import prepare_fineweb
from common import UserError

INTRODUCTION = """# Measured on GPUs

`bash tests/on_gpu.sh` writes this page from the files in each device's folder: `log.txt` says what was run,
how long it took and what was left out; `tests.txt` is the output of the tests, `speed.txt` that of
`bench.py`. For figures of the runs: `python analyze.py --results=results/gpu/DEVICE/results.csv`.
"""
STEP = ['ms', 'time / baseline', 'tokens/s', 'MFU', 'extra MiB']
RUN = {'method': 'method', 'lr': 'lr', 'steps': 'steps', 'lr_sum': 'Σ lr', 'mu_shift': 'shift',
       'test_loss': 'test loss', 'mu_norm': '‖μ‖', 'logit_mean': 'mean logit',
       'tokens_per_second': 'tokens/s'}


def machine():
    """Prints torch's version, the GPU's name or cpu, and every method."""
    import torch

    from model import METHODS
    name = torch.cuda.get_device_name().replace(' ', '_') if torch.cuda.is_available() else 'cpu'
    print(torch.__version__, name, *METHODS)


def text(path, characters, vocab_size):
    """
    Writes Python files of the installed packages to a jsonl, in an order that is always the same. Prints the
    flags with which prepare_fineweb.py makes tokens of them: GPT-2's if that is the size and its ranks can be
    had; of the standard library where Hugging Face datasets is not installed, which reads local files.
    """
    root = sysconfig.get_paths()['purelib']
    paths = glob.glob('**/*.py', root_dir=root, recursive=True)
    left = int(characters)
    with open(path, 'w', encoding='utf-8') as out:
        for name in sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest()):
            with open(os.path.join(root, name), encoding='utf-8', errors='replace') as file:
                source = file.read(left)
            if source:
                out.write(json.dumps({'text': source}) + '\n')
            left -= len(source)
            if left <= 0:
                break
    if left < int(characters) and importlib.util.find_spec('datasets'):
        print(f'--source=local\n--files={path}')
    else:
        print('--source=stdlib')

    def too_slow(*_):
        raise TimeoutError
    try:
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(30)  # for a network that never answers
        if vocab_size != '50257':
            raise ValueError
        prepare_fineweb.gpt2()
        print('--tokenizer=gpt2')
    except (UserError, ValueError):
        print(f'--tokenizer=bpe\n--vocab_size={vocab_size}')


def steps(seconds, runs):
    """
    Prints how many steps fit into a new run of `seconds`, if it is as fast as the latest of `runs` was at its
    end, and as slow to start, compile and evaluate; 0 if there are no runs.
    """
    finished = glob.glob(f'{glob.escape(runs)}/*/result.json')
    if not finished:
        print(0)
        return
    run = os.path.dirname(max(finished, key=os.path.getmtime))
    config, result = (json.loads(read(run, name)) for name in ('config.json', 'result.json'))
    log = [json.loads(line) for line in read(run, 'log.jsonl').splitlines()]
    rate = [entry['tokens_per_second'] for entry in log if 'tokens_per_second' in entry][-1]
    per_step = config['batch_size'] * config['block_size'] / rate
    rest = max(0, result['train_seconds'] - config['steps'] * per_step) + 15  # and for Python itself
    print(max(0, int((0.9 * float(seconds) - rest) / per_step)))


def tables(runs, folder):
    """The csv files of analyze.py, without its figures."""
    import analyze
    done = sorted(os.path.dirname(path) for path in glob.glob(f'{glob.escape(runs)}/*/result.json'))
    analyze.write_csvs(analyze.read_results(done), folder)


def read(folder, name):
    """The text of a file, '' where it is not there."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return ''
    with open(path, encoding='utf-8') as file:
        return file.read()


def markdown(rows):
    """A list of dicts as a table, numbers to the right."""
    align = ['right' if re.match(r'[-+]?\d|-$|nan', str(cell)) else 'left' for cell in rows[0].values()]
    return tabulate(rows, 'keys', 'github', disable_numparse=True, colalign=align)


def speed_tables(output):
    """The tables that bench.py has printed, one after another: pairs of a title and its rows, dicts."""
    tables, title = [], ''
    for paragraph in output.split('\n\n'):
        lines = paragraph.strip().splitlines()
        table = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line[:1] == '|']
        if table:
            tables.append((title, [dict(zip(table[0], row, strict=True)) for row in table[2:]]))
        title = lines[-1] if lines else ''
    return tables


def speed(output):
    """bench.py's steps as one table, without the baseline of each further group, and its tables of heads."""
    steps, titles, heads = {}, [], []
    for title, rows in speed_tables(output):
        if not title.startswith('The training step'):
            heads += [f'{title}:', markdown(rows)]
            continue
        size = title.split(',')[1].split(':')[0].strip()
        titles += [] if any(size in known for known in titles) else [f'{title}.']
        for row in rows:
            first = {'size': size, 'method': row['']}
            steps.setdefault((size, row['']), {**first, **{column: row[column] for column in STEP}})
    left_out = sorted(set(re.findall('^left out: .*', output, re.M)))
    return [*titles, *([markdown(list(steps.values()))] if steps else []), *left_out, *heads]


def trained(folder):
    """The runs of results.csv as a table."""
    def shown(text):
        try:
            return f'{float(text):.4g}'
        except ValueError:
            return text or '-'
    rows = list(csv.DictReader(read(folder, 'results.csv').splitlines()))
    rows.sort(key=lambda row: (float(row['steps']), row['method'], float(row['mu_shift'] or 0)))
    rows = [{name: shown(row[column]) for column, name in RUN.items()} for row in rows]
    return [markdown(rows)] if rows else []


def section(folder):
    """What one device's files say, in Markdown."""
    begins = re.findall('^# (.*)', read(folder, 'log.txt'), re.M)
    tests = read(folder, 'tests.txt').strip().splitlines()
    parts = [f'## {os.path.basename(folder).replace("_", " ")}', *begins]
    parts += [f'The tests: {tests[-1].strip("= ")}.'] if tests else []
    parts += [line for line in tests if line.startswith('FAILED ')]
    return '\n\n'.join([*parts, *speed(read(folder, 'speed.txt')), *trained(folder)]) + '\n'


def report(folder, device=''):
    """Writes README.md; prints the section of one device if it is named."""
    logs = sorted(glob.glob(f'{glob.escape(folder)}/*/log.txt'))
    sections = [section(os.path.dirname(log)) for log in logs] or ['No GPU has been measured yet.\n']
    path = os.path.join(folder, 'README.md')
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
        file.write('\n'.join([INTRODUCTION, *sections]))
    os.replace(path + '.tmp', path)
    if device:
        print(section(os.path.join(folder, device)), end='')


if __name__ == '__main__':
    commands = {'machine': machine, 'text': text, 'steps': steps, 'tables': tables, 'report': report}
    commands[sys.argv[1]](*sys.argv[2:])
