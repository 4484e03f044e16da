"""
Trains a list of runs, then measures and draws them with analyze.py:

    DRY_RUN=1 bash sweep.sh >runs.txt
    python -m tools.runner --check <runs.txt   # only refuses what could not run, and says how many are done
    python -m tools.runner --jobs=2 <runs.txt

Each line of the list is a command that contains train.py. Each has its own --out=FOLDER/NAME, all in the same
FOLDER. What train.py or analyze.py would refuse is refused before the first run. The same list again
skips the runs that are done and resumes the others. The output of a run is appended to FOLDER/logs/NAME.log.
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


# -------- the list
def read_launcher(words):
    """The words before train.py -> how many processes torchrun would start, or 1."""
    processes = 1
    for flag in ('--nproc[-_]per[-_]node', '--nnodes'):
        match = re.search(f'{flag}[= ]([0-9]+)', ' '.join(words))
        if match:
            processes *= int(match[1])
    return processes


def read_run(line, fingerprints, gpus_elsewhere):
    """
    A command -> its run: the words of the command, train.py's settings, and whether it is done. Refuses
    what train.py would refuse on this machine or, if gpus_elsewhere, on one that has the GPUs. `fingerprints`
    keeps those of the data that were read for earlier runs.
    """
    words = shlex.split(os.path.expandvars(line))  # expands $SCRATCH and the like, as a shell would
    train.check('train.py' in words, f'no train.py in: {line}')
    train.check('\\$' not in line, f'\\$ is no variable to a shell, but a folder of that name: {line}')
    train.check('=' not in words[0], f'NAME=value before the command, which only a shell understands: {line}')
    train.check(not any('$' in word for word in words), f'$ without a variable of this name: {line}')

    i = words.index('train.py')
    settings = train.parser.parse_args(words[i + 1:])
    if gpus_elsewhere and settings.device is None:
        settings.device = 'cuda'
    train.resolve_args(settings, read_launcher(words[:i]))
    if settings.device == 'cuda' and not gpus_elsewhere:
        train.check(settings.processes <= torch.cuda.device_count(), f'too few GPUs: {line}')

    shards = (settings.data, settings.block_size, settings.vocab_size)
    if shards not in fingerprints:
        fingerprints[shards] = train.fingerprint(train.open_data(settings))
    settings.data_fingerprint = fingerprints[shards]
    done, source = train.find_start(settings)
    train.check_start(done, source, settings)
    return argparse.Namespace(words=words, settings=settings, out=Path(settings.out), done=done)


def read_runs(lines, gpus_elsewhere):
    """The runs of a list of commands; empty lines and comments are skipped."""
    runs = []
    fingerprints = {}
    for line in lines:
        line = line.strip()
        if line and not line.startswith('#'):
            runs.append(read_run(line, fingerprints, gpus_elsewhere))
    train.check(runs, 'no commands on stdin')
    return runs


def common_folder(runs):
    """The folder in which each run has a folder of its own. Refuses runs that do not."""
    folder = runs[0].out.parent
    outs = set()
    for run in runs:
        train.check(run.out.parent == folder, f'{run.out} should be in {folder}, as the first --out is')
        train.check(run.out not in outs, f'two commands have --out={run.out}')
        outs.add(run.out)
    return folder


def check_comparable(runs, folder):
    """
    Refuses runs that analyze.py could not compare with each other or with the others in their folder:
    analyze.complete is what refuses them.
    """
    rows = []
    for run in runs:
        rows.append({**vars(run.settings), 'run': str(run.out)})
    outs = {run.out for run in runs}
    for path in folder.rglob('result.json'):
        if path.parent not in outs:
            config = train.read_json(path.parent / 'config.json')
            rows.append({**config, 'run': str(path.parent)})

    # None, of a method without λ, becomes NaN, and its column is one of numbers
    table = pd.DataFrame(rows).fillna(float('nan')).infer_objects()
    table['test_loss'] = 1.0  # which the runs do not have yet
    analyze.complete(table)


# -------- the runs
def visible_gpus():
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES has them."""
    n = torch.cuda.device_count()
    if 'CUDA_VISIBLE_DEVICES' in os.environ:
        return os.environ['CUDA_VISIBLE_DEVICES'].split(',')[:n]
    return [str(i) for i in range(n)]


def start(run, running, gpus, folder):
    """Starts a run on the GPUs that the fewest others use."""
    used = [gpu for other in running for gpu in other.gpus]
    run.gpus = []
    if run.settings.device == 'cuda':
        run.gpus = sorted(gpus, key=used.count)[:run.settings.processes]

    # this python, and its torchrun
    search_path = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']
    env = {**os.environ, 'PATH': search_path, 'CUDA_VISIBLE_DEVICES': ','.join(run.gpus)}
    run.log = folder / 'logs' / f'{run.out.name}.log'
    with open(run.log, 'ab') as log:
        run.process = subprocess.Popen(run.words, env=env, stdout=log, stderr=log,
                                       start_new_session=True)  # which Ctrl-C does not reach


def stop(running):
    """Ends runs by SIGTERM: they save a checkpoint first."""
    for run in running:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGTERM)
    for run in running:
        run.process.wait()


def last_line(path):
    """The last line of a run's log, which says how it ended."""
    lines = path.read_text(errors='replace').splitlines()
    return lines[-1] if lines else ''


def run_all(todo, jobs, folder):
    """
    Runs `todo`, `jobs` at a time. SIGINT, SIGTERM and the like stop all runs and end the loop. Returns the
    numbers of these signals.
    """
    signals = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            handlers[number] = signal.signal(number, lambda number, frame: signals.append(number))

    waiting = list(todo)
    running = []
    gpus = visible_gpus()
    begin = time.monotonic()
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                start(run, running, gpus, folder)
                running.append(run)
            time.sleep(0.1)

            for run in list(running):
                if run.process.poll() is None:
                    continue
                running.remove(run)
                left = len(waiting) + len(running)
                ended = len(todo) - left
                seconds_each = (time.monotonic() - begin) / ended
                minutes_left = seconds_each * left / 60
                progress = f'[{ended}/{len(todo)}, about {minutes_left:.0f} min left]'
                train.say(f'{progress} {run.out.name}: {last_line(run.log)}')
    finally:
        stop(running)  # they have sessions of their own, so no signal reaches them otherwise

    for number, handler in handlers.items():
        signal.signal(number, handler)
    return signals


def main(argv=None):
    parser = argparse.ArgumentParser(usage='python -m tools.runner [--jobs=1] [--check] <runs.txt',
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--jobs', type=int, default=1, help='how many runs go at once; they may share a GPU')
    parser.add_argument('--check', action='store_true',
                        help='start nothing; a run without --device=cpu is taken to get its GPUs elsewhere, '
                             'with units for BF16: for older ones, give --dtype')
    args = parser.parse_args(argv)
    train.check(args.jobs > 0, f'--jobs={args.jobs} should be positive')

    runs = read_runs(sys.stdin, gpus_elsewhere=args.check)
    folder = common_folder(runs)
    check_comparable(runs, folder)
    todo = [run for run in runs if not run.done]
    train.say(f'{len(todo)} of {len(runs)} runs to do in {folder}, the others are done')
    if args.check:
        return

    (folder / 'logs').mkdir(parents=True, exist_ok=True)
    signals = run_all(todo, args.jobs, folder)
    if signals:
        train.say('stopped; the same command resumes the runs')
        sys.exit(128 + signals[0])  # a shell's status for a command that a signal ended

    not_done = [run.out.name for run in todo if not (run.out / 'result.json').exists()]
    n_done = len(runs) - len(not_done)
    train.say(f'{n_done} of {len(runs)} runs are done; the models are measured now')
    analyze.main([str(folder)])
    if not_done:
        sys.exit(f'not done, see {folder}/logs; the same command resumes them: {" ".join(not_done)}')


if __name__ == '__main__':
    main()
