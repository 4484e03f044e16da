"""
Runs commands of train.py, one a line, each with an --out=FOLDER/NAME of its own, then analyze.py on FOLDER.
What either would refuse is refused before the first run. The same list again skips the runs that are done and
resumes the others. What they print is appended to FOLDER/logs/NAME.log.
"""
import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch

import analyze
import train


def read_run(line):
    """A command -> its run: the settings, the words, and whether it is done. Refuses what train.py would."""
    words = shlex.split(line)
    train.check('train.py' in words and '=' not in words[0], f'no train.py, or NAME=value before it: {line}')
    match = re.search('--nproc[-_]per[-_]node[= ]([0-9]+)', line)
    processes = int(match[1]) if match else 1
    run = train.resolve_args(train.parser.parse_args(words[words.index('train.py') + 1:]), processes)
    train.check(run.device == 'cpu' or run.processes <= torch.cuda.device_count(), f'too few GPUs: {line}')
    run.data_fingerprint = train.fingerprint(train.open_data(run))
    run.done, source = train.find_start(run)
    train.check_start(run.done, source, run)
    run.words, run.out = words, Path(run.out)
    return run


def read_runs(lines):
    """The runs of a list of commands; empty lines and comments are skipped."""
    runs = []
    for line in lines:
        line = line.strip()
        if line and not line.startswith('#'):
            runs.append(read_run(line))
    train.check(runs, 'no commands on stdin')
    return runs


def check_comparable(runs, folder):
    """Refuses now what analyze.py would refuse at the end: these runs, with a made-up loss, and others there."""
    outs = {run.out for run in runs}
    rows = [{**vars(run), 'run': str(run.out)} for run in runs]
    for path in folder.rglob('result.json'):
        if path.parent not in outs:
            config = train.read_json(path.parent / 'config.json')
            rows.append({**config, 'run': str(path.parent)})
    table = pd.DataFrame(rows).fillna(float('nan')).infer_objects()
    analyze.complete(table.assign(test_loss=1.0))


def visible_gpus():
    names = os.environ.get('CUDA_VISIBLE_DEVICES', '0,1,2,3,4,5,6,7').split(',')
    return names[:torch.cuda.device_count()]


def start(run, running, gpus, folder):
    """Starts a run on the GPUs that the fewest others use."""
    used = [gpu for other in running for gpu in other.gpus]
    run.gpus = []
    if run.device == 'cuda':
        run.gpus = sorted(gpus, key=used.count)[:run.processes]

    path = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']  # this python, and its torchrun
    env = {**os.environ, 'PATH': path, 'CUDA_VISIBLE_DEVICES': ','.join(run.gpus)}
    run.log = folder / 'logs' / f'{run.out.name}.log'
    with open(run.log, 'ab') as log:
        run.process = subprocess.Popen(run.words, env=env, stdout=log, stderr=log,
                                       start_new_session=True)  # which Ctrl-C does not reach


def stop(running):
    for run in running:
        os.killpg(run.process.pid, signal.SIGTERM)
    for run in running:
        run.process.wait()


def last_line(path):
    lines = path.read_text(errors='replace').splitlines()
    return lines[-1] if lines else ''


def run_all(todo, jobs, folder):
    """Runs them, `jobs` at a time -> the names of those that failed."""
    todo, running, failed = list(todo), [], []
    total = len(todo)
    gpus = visible_gpus()
    begin = time.monotonic()
    while todo or running:
        while todo and len(running) < jobs:
            run = todo.pop(0)
            try:
                start(run, running, gpus, folder)
                running.append(run)
            except KeyboardInterrupt:
                stop(running)
                raise
        time.sleep(0.1)

        for run in list(running):
            if run.process.poll() is None:
                continue
            running.remove(run)
            if run.process.returncode != 0:
                failed.append(run.out.name)
            ended = total - len(todo) - len(running)
            seconds_each = (time.monotonic() - begin) / ended
            minutes = seconds_each * (total - ended) / 60
            print(f'[{ended}/{total}, about {minutes:.0f} min left] {run.out.name}: {last_line(run.log)}',
                  flush=True)
    return failed


def main(argv=None):
    parser = argparse.ArgumentParser(usage='%(prog)s [--jobs=1] <runs.txt', description=__doc__)
    parser.add_argument('--jobs', type=int, default=1, help='how many runs go at once; they may share a GPU')
    jobs = max(1, parser.parse_args(argv).jobs)

    runs = read_runs(sys.stdin)
    folders = {run.out.parent for run in runs}
    folder = folders.pop()
    train.check(not folders, f'every --out should be in one folder, {folder}')
    train.check(len({run.out for run in runs}) == len(runs), 'two commands have the same --out')
    check_comparable(runs, folder)

    for number in (signal.SIGTERM, signal.SIGHUP):  # act as Ctrl-C does, unless nohup ignores them
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    (folder / 'logs').mkdir(parents=True, exist_ok=True)

    todo = [run for run in runs if not run.done]
    print(f'{len(todo)} of {len(runs)} runs to do in {folder}, {jobs} at a time; see its logs/', flush=True)
    try:
        failed = run_all(todo, jobs, folder)
    except KeyboardInterrupt:
        sys.exit('stopped; run the same command again to go on')

    print(f'all have ended, failed: {" ".join(failed) or "none"}; models are measured now', flush=True)
    analyze.main([str(folder)])
    if failed:
        sys.exit(f'failed; the same command tries again: {" ".join(failed)}')
    sys.exit(0)


if __name__ == '__main__':
    main()
