"""
Trains the runs of a list, as many at a time as there are GPUs (on a CPU: cores) for them:

    DRY_RUN=1 bash sweep.sh >runs.txt
    python -m tools.runner <runs.txt

Each line of the list is a command that contains train.py and has its own --out. What train.py would
refuse is refused before the first run. The same list again skips the runs that are done and resumes
the others. The output of a run is appended to run.log in its --out.
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

import torch

import train


def read_run(line):
    """A line of the list -> the words of its command, the GPUs that it needs, and its --out."""
    words = shlex.split(line)
    train.check('train.py' in words, f'no train.py in: {line}')
    i = words.index('train.py')
    match = re.search('nproc.per.node[= ]([0-9]+)', ' '.join(words[:i]))  # of torchrun
    processes = int(match[1]) if match else 1
    settings, *_ = train.read_command(words[i + 1:], processes)
    n_gpus = processes if settings.device == 'cuda' else 0
    return argparse.Namespace(words=words, n_gpus=n_gpus, out=Path(settings.out))


def start(run, gpus):
    """Starts a run that sees these GPUs alone."""
    run.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, 'CUDA_VISIBLE_DEVICES': ','.join(gpus),
           'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': '300'}  # seconds in which torchrun lets it save
    with open(run.out / 'run.log', 'ab') as log:
        run.process = subprocess.Popen(run.words, env=env, stdout=log, stderr=log)


def run_all(todo, slots):
    """Runs `todo`, one at a time in each slot, a list of GPUs. If this ends early, all runs save."""
    waiting = list(todo)
    running = {}  # {the number of a slot: its run}
    begin = time.monotonic()
    try:
        while waiting or running:
            for i, gpus in enumerate(slots):
                if waiting and i not in running:
                    running[i] = waiting.pop(0)
                    start(running[i], gpus)
            time.sleep(0.1)

            for i, run in list(running.items()):
                if run.process.poll() is None:
                    continue
                del running[i]
                left = len(waiting) + len(running)
                ended = len(todo) - left
                minutes_left = (time.monotonic() - begin) / ended * left / 60
                lines = (run.out / 'run.log').read_text(errors='replace').splitlines()
                print(f'[{ended}/{len(todo)}, about {minutes_left:.0f} min left] {run.out.name}: '
                      f'{lines[-1] if lines else ""}', flush=True)
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
    todo = [run for run in runs if not (run.out / 'result.json').exists()]
    print(f'{len(todo)} of {len(runs)} runs to do, the others are done', flush=True)

    # the slots
    all_gpus = ','.join(str(i) for i in range(torch.cuda.device_count()))
    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', all_gpus).split(',')  # [''] if there are none
    n = max((run.n_gpus for run in runs), default=0)
    cores = os.cpu_count() if sys.platform == 'darwin' else len(os.sched_getaffinity(0))
    jobs = args.jobs or (len(gpus) // n if n else cores)
    train.check(jobs, f'a run needs {n} GPUs, but there are {len(gpus)}')
    slots = [[gpus[(slot * n + i) % len(gpus)] for i in range(n)] for slot in range(jobs)]

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
