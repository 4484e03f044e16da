"""
Trains the runs of a list, as many at a time as there are GPUs (on a CPU: cores) for them:

    DRY_RUN=1 bash sweep.sh >runs.txt
    python -m tools.runner <runs.txt

A line is a train.py command with its own --out; all are checked before the first run. The same
list again skips what is done and resumes the rest. A run has one CPU thread, or OMP_NUM_THREADS.
"""
import argparse
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import train


def read_run(line):
    """A line of the list -> the words of its command, the GPUs that it needs, and its --out."""
    launch, program, flags = line.partition('train.py')
    train.check(program, f'no train.py in: {line}')
    match = re.search('nproc.per.node[= ]([0-9]+)', launch)  # of torchrun
    processes = int(match[1]) if match else 1
    settings, _, _ = train.read_command(shlex.split(flags), processes)
    n_gpus = processes if settings.device == 'cuda' else 0
    return argparse.Namespace(words=shlex.split(line), n_gpus=n_gpus, out=Path(settings.out))


def start(run, gpus):
    """Starts a run that sees these GPUs alone, and returns it."""
    run.out.mkdir(parents=True, exist_ok=True)
    env = {'OMP_NUM_THREADS': '1', **os.environ, 'CUDA_VISIBLE_DEVICES': ','.join(gpus),
           'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': '300'}  # seconds in which torchrun lets it save
    with open(run.out / 'run.log', 'ab') as log:
        run.process = subprocess.Popen(run.words, env=env, stdout=log, stderr=log)
    return run


def run_all(todo, slots):
    """Runs `todo`, one at a time in each slot, a list of GPUs. If this ends early, all save."""
    waiting = list(todo)
    running = {}  # {the number of a slot: its run}
    begin = time.monotonic()
    try:
        while waiting or running:
            for i, gpus in enumerate(slots):
                if waiting and i not in running:
                    running[i] = start(waiting.pop(0), gpus)
                elif i in running and running[i].process.poll() is not None:
                    run = running.pop(i)
                    ended = len(todo) - len(waiting) - len(running)
                    rounds = math.ceil(ended / len(slots))
                    rounds_left = math.ceil(len(waiting) / len(slots))
                    minutes_left = (time.monotonic() - begin) / 60 / rounds * rounds_left
                    lines = (run.out / 'run.log').read_text(errors='replace').splitlines() or ['']
                    print(f'[{ended}/{len(todo)}, about {minutes_left:.0f} min left] '
                          f'{run.out.name}: {lines[-1]}', flush=True)
            time.sleep(0.1)
    finally:
        for run in running.values():
            run.process.terminate()
        for run in running.values():
            run.process.wait()


def main(argv=None):
    parser = argparse.ArgumentParser(usage='python -m tools.runner [--jobs=N] <runs.txt')
    parser.add_argument('--jobs', type=int, help='runs at a time; they share GPUs if there are few')
    args = parser.parse_args(argv)

    runs = [read_run(line) for line in sys.stdin if line.strip()]
    train.check(len({run.out for run in runs}) == len(runs), 'two lines have the same --out')
    n_gpus = torch.cuda.device_count()  # without those that CUDA_VISIBLE_DEVICES hides
    all_gpus = ','.join(map(str, range(n_gpus)))
    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', all_gpus).split(',')
    n = max((run.n_gpus for run in runs), default=0)
    train.check(n <= n_gpus, f'a run needs {n} GPUs, but there are {n_gpus}')
    cores = len(os.sched_getaffinity(0))
    jobs = args.jobs or (n_gpus // n if n else cores)
    turns = gpus * n * jobs  # the slots take the GPUs in turn
    slots = [turns[i * n:(i + 1) * n] for i in range(jobs)]

    todo = [run for run in runs if not (run.out / 'result.json').exists()]
    resume = sum((run.out / 'ckpt.pt').exists() for run in todo)
    done = len(runs) - len(todo)
    print(f'runs: {done} done, {resume} to resume, {len(todo) - resume} new. '
          'What a run prints goes to run.log in its --out', flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        run_all(todo, slots)
    except KeyboardInterrupt:
        print('stopped; the same command resumes', file=sys.stderr)
        sys.exit(130)

    failed = [run.out.name for run in todo if not (run.out / 'result.json').exists()]
    if failed:
        sys.exit(f'not done, see their run.log; the same command resumes them: {" ".join(failed)}')


if __name__ == '__main__':
    main()
