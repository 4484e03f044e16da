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
    train.WORLD_SIZE = int(match[1]) if match else 1  # which resolve_args makes run.processes
    run = train.resolve_args(train.parser.parse_args(words[words.index('train.py') + 1:]))
    train.check(run.device == 'cpu' or run.processes <= torch.cuda.device_count(), f'too few GPUs: {line}')
    run.data_fingerprint = train.fingerprint(train.open_data(run))
    run.done, _ = train.find_start(run)
    run.words, run.out = words, Path(run.out)
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(usage='%(prog)s [--jobs=1] <runs.txt', description=__doc__)
    parser.add_argument('--jobs', type=int, default=1, help='how many runs go at once; they may share a GPU')
    jobs = max(1, parser.parse_args(argv).jobs)
    runs = [read_run(line) for line in sys.stdin.read().splitlines() if not re.match(r'\s*(#|$)', line)]
    outs = {run.out for run in runs}
    folder, *more = {out.parent for out in outs}
    train.check(not more and len(outs) == len(runs), f'each --out should be another folder in {folder}')
    # let analyze.py refuse now what it could not compare: these runs, with a made-up loss, and others there
    others = {path.parent for path in folder.rglob('result.json')} - outs
    rows = [{**vars(run), 'run': str(run.out)} for run in runs]
    rows += [{**train.read_json(path / 'config.json'), 'run': str(path)} for path in others]
    analyze.complete(pd.DataFrame(rows).fillna(float('nan')).infer_objects().assign(test_loss=1.0))
    for number in signal.SIGTERM, signal.SIGHUP:  # act as Ctrl-C does, unless nohup ignores them
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    (folder / 'logs').mkdir(parents=True, exist_ok=True)
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']  # this python, and its torchrun
    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', '0,1,2,3,4,5,6,7').split(',')[:torch.cuda.device_count()]
    todo, running, failed = [run for run in runs if not run.done], [], []
    total, begin = len(todo), time.monotonic()
    print(f'{total} of {len(runs)} runs to do in {folder}, {jobs} at a time; see its logs/', flush=True)
    try:
        while todo or running:
            while todo and len(running) < jobs:
                run = todo.pop(0)
                used = [gpu for other in running for gpu in other.gpus]
                run.gpus = sorted(gpus, key=used.count)[:run.processes] if run.device == 'cuda' else []
                env = {**os.environ, 'PATH': path, 'CUDA_VISIBLE_DEVICES': ','.join(run.gpus)}
                with open(f'{folder}/logs/{run.out.name}.log', 'ab') as run.log:
                    run.process = subprocess.Popen(  # in a new session, which Ctrl-C does not reach
                        run.words, env=env, stdout=run.log, stderr=run.log, start_new_session=True)
                running.append(run)
            time.sleep(0.1)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                failed += [run.out.name] if run.process.returncode else []
                ended = total - len(todo) - len(running)
                minutes = (time.monotonic() - begin) / ended * (total - ended) / 60
                last = Path(run.log.name).read_text(errors='replace').splitlines()[-1:]
                print(f'[{ended}/{total}, about {minutes:.0f} min left] {run.out.name}:', *last, flush=True)
    except KeyboardInterrupt:
        for run in running:
            os.killpg(run.process.pid, signal.SIGTERM)
        for run in running:
            run.process.wait()
        sys.exit('stopped; run the same command again to go on')
    print(f'all have ended, failed: {" ".join(failed) or "none"}; models are measured now', flush=True)
    analyze.main([str(folder)])
    sys.exit(f'failed; the same command tries again: {" ".join(failed)}' if failed else 0)


if __name__ == '__main__':
    main()
