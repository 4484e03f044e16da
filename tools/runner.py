"""
Trains a list of runs, then measures and draws them with analyze.py:

    DRY_RUN=1 bash sweep.sh >runs.txt
    python -m tools.runner --check <runs.txt   # only refuses what could not run
    python -m tools.runner --jobs=2 <runs.txt

Each line of the list is a command that contains train.py and has its own --out, all of them in one
folder. What train.py would refuse is refused before the first run. The same list again skips the
runs that are done and resumes the others. The output of a run is appended to run.log in its --out.
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

import analyze
import train


def read_run(words, on_gpu):
    """
    The words of a command -> its run. Refuses what train.py would refuse; on_gpu: as on a machine
    that has the GPUs.
    """
    train.check('train.py' in words, f'no train.py in: {" ".join(words)}')
    i = words.index('train.py')
    match = re.search('nproc.per.node[= ]([0-9]+)', ' '.join(words[:i]))  # of torchrun
    processes = int(match[1]) if match else 1
    flags = words[i + 1:]
    if on_gpu:
        flags = ['--device=cuda', *flags]  # a --device of the command wins
    settings = train.read_command(flags, processes)
    n_gpus = processes if settings.device == 'cuda' else 0
    return argparse.Namespace(words=words, n_gpus=n_gpus, out=Path(settings.out))


def is_done(run):
    return (run.out / 'result.json').exists()


def last_line(path):
    """The last line of a run's log, which says how it ended."""
    lines = path.read_text(errors='replace').splitlines()
    return lines[-1] if lines else ''


def start(run, running, gpus):
    """Starts a run on the GPUs that the fewest others use."""
    used = [gpu for other in running for gpu in other.gpus]
    run.gpus = sorted(gpus, key=used.count)[:run.n_gpus]
    search_path = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']
    env = {**os.environ, 'PATH': search_path, 'CUDA_VISIBLE_DEVICES': ','.join(run.gpus)}

    run.out.mkdir(parents=True, exist_ok=True)
    run.log = run.out / 'run.log'
    with open(run.log, 'ab') as log:
        run.process = subprocess.Popen(run.words, env=env, stdout=log, stderr=log)


def run_all(todo, jobs):
    """Runs `todo`, `jobs` at a time. If an error or a signal ends this, SIGTERM makes them save."""
    all_gpus = ','.join(str(i) for i in range(torch.cuda.device_count()))
    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', all_gpus).split(',')  # [''] if there are none
    waiting = list(todo)
    running = []
    begin = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                start(run, running, gpus)
                running.append(run)
            time.sleep(0.1)

            for run in list(running):
                if run.process.poll() is None:
                    continue
                running.remove(run)
                left = len(waiting) + len(running)
                ended = len(todo) - left
                minutes_left = (time.monotonic() - begin) / ended * left / 60
                print(f'[{ended}/{len(todo)}, about {minutes_left:.0f} min left] {run.out.name}: '
                      f'{last_line(run.log)}', flush=True)
    finally:
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()


def main(argv=None):
    parser = argparse.ArgumentParser(usage='python -m tools.runner [--jobs=1] [--check] <runs.txt',
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time; they may share a GPU')
    parser.add_argument('--check', action='store_true',
                        help='start nothing; runs without --device are to get GPUs elsewhere')
    args = parser.parse_args(argv)
    train.check(args.jobs > 0, '--jobs should be positive')

    runs = []
    for line in sys.stdin:
        words = shlex.split(os.path.expandvars(line), comments=True)
        if words:
            runs.append(read_run(words, on_gpu=args.check))
    todo = [run for run in runs if not is_done(run)]
    print(f'{len(todo)} of {len(runs)} runs to do, the others are done', flush=True)
    if args.check:
        return

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C
    try:
        run_all(todo, args.jobs)
    except KeyboardInterrupt:
        sys.exit('stopped; the same command resumes')

    failed = [run.out.name for run in todo if not is_done(run)]
    begun = [run for run in runs if is_done(run) or (run.out / 'config.json').exists()]
    if begun:
        folders = {str(run.out.parent) for run in begun}
        analyze.main(sorted(folders))
    if failed:
        sys.exit(f'not done, see their run.log; the same command resumes them: {" ".join(failed)}')


if __name__ == '__main__':
    main()
