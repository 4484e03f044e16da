"""
The Python parts of on_gpu.sh.

    python tests/on_gpu.py machine                                    the GPU's name, and every method
    python tests/on_gpu.py text FILE.jsonl CHARACTERS VOCAB_SIZE      real text, and how to make tokens of it
    python tests/on_gpu.py steps SECONDS MOST LR_SUM RUNS             how many steps fit, and which lr
    python tests/on_gpu.py tables RUNS FOLDER                         results.csv and curves.csv of runs
    python tests/on_gpu.py report FOLDER [DEVICE]                     FOLDER/README.md from the devices' files
"""
import contextlib
import csv
import glob
import hashlib
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
how long it took and what was left out; `tests.txt` is the output of the tests, `steps.txt` and `heads.txt`
that of `bench.py`. For figures of the runs: `python analyze.py --results=results/gpu/DEVICE/results.csv`.
"""
STEP = ['ms', 'time / baseline', 'tokens/s', 'MFU', 'extra MiB']
RUN = {'method': 'method', 'lr': 'lr', 'steps': 'steps', 'lr_sum': 'Σ lr', 'mu_shift': 'shift',
       'test_loss': 'test loss', 'mu_norm': '‖μ‖', 'logit_mean': 'mean logit',
       'tokens_per_second': 'tokens/s'}


def machine():
    """Prints the GPU's name, or cpu, and every method."""
    import torch

    from model import METHODS
    name = torch.cuda.get_device_name().replace(' ', '_') if torch.cuda.is_available() else 'cpu'
    print(name, *METHODS)


def text(path, characters, vocab_size):
    """
    Writes Python files of the installed packages to a jsonl, in an order that is always the same. Prints the
    flags with which prepare_fineweb.py makes tokens of them: GPT-2's, if that is the vocabulary's size and
    its ranks can be had, else byte pairs learned from them.
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
    def too_slow(*_):
        raise TimeoutError
    tokenizer = f'--tokenizer=bpe\n--vocab_size={vocab_size}'
    if vocab_size == '50257':
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(30)  # for a network that never answers
        with contextlib.suppress(UserError):
            prepare_fineweb.gpt2()
            tokenizer = '--tokenizer=gpt2'
    print(f'--source=local\n--files={path}\n{tokenizer}')


def steps(seconds, most, lr_sum, runs):
    """
    Prints how many steps, up to `most`, fit into a new run of `seconds`, if it is as fast as the latest of
    `runs` was at its end, and as slow to start, compile and evaluate; and the learning rate whose sum over
    them is lr_sum, which is half of lr x steps (5,000 in a published run at 0.1). 0 0 if nothing fits.
    """
    finished = glob.glob(f'{glob.escape(runs)}/*/result.json')
    if not finished:
        print(0, 0)
        return
    run = os.path.dirname(max(finished, key=os.path.getmtime))
    config, result = (json.loads(read(run, name)) for name in ('config.json', 'result.json'))
    log = [json.loads(line) for line in read(run, 'log.jsonl').splitlines()]
    rate = [entry['tokens_per_second'] for entry in log if 'tokens_per_second' in entry][-1]
    per_step = config['batch_size'] * config['block_size'] / rate
    rest = max(0, result['train_seconds'] - config['steps'] * per_step) + 15  # and for Python itself
    fitting = min(int(most), max(0, int((0.9 * float(seconds) - rest) / per_step)))
    print(fitting, f'{2 * float(lr_sum) / fitting:.4g}' if fitting else 0)


def tables(runs, folder):
    """The csv files of analyze.py, without its figures."""
    import analyze
    os.makedirs(folder, exist_ok=True)
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


def steps_and_heads(folder):
    """bench.py's steps as one table, without the baseline of each further group, and its tables of heads."""
    outputs, titles, rows_of = [read(folder, name) for name in ('steps.txt', 'heads.txt')], {}, {}
    for title, rows in speed_tables(outputs[0]):
        size = re.match(r'The training step, (\w+):', title).group(1)
        titles.setdefault(size, f'{title}.')
        for row in rows:
            shown = {'size': size, 'method': row[''], **{column: row[column] for column in STEP}}
            rows_of.setdefault((size, row['']), shown)
    steps = [*titles.values(), markdown(list(rows_of.values()))] if rows_of else []
    heads = [part for title, rows in speed_tables(outputs[1]) for part in (f'{title}.', markdown(rows))]
    left_out = re.findall('^left out: .*', ''.join(outputs), re.M)
    return [*steps, *heads, *dict.fromkeys(left_out)]


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
    return '\n\n'.join([*parts, *steps_and_heads(folder), *trained(folder)]) + '\n'


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
