"""
A run's folder: the settings that may not change, its lock, log and checkpoints, and the signals that save it.

The folder holds config.json, log.jsonl, ckpt.pt while the run lasts, and at the end model.pt and result.json.
A run whose result.json exists is done.
"""
import json
import os
import platform
import signal
import subprocess
import warnings
import zipfile

import torch

from common import UserError, lock_folder, make_folder, read_json, write_atomic, write_json

# Settings that may change when a run resumes; all others must be as they were.
FREE = ('micro_batch_size', 'device', 'compile', 'ckpt_every', 'keep_every', 'wandb', 'threads', 'data',
        'out', 'processes', 'commit', 'versions', 'device_name')


def check_settings(where, before, settings):
    """Raises UserError if `before`, the settings of the run in `where`, are not those of this command."""
    for key, value in settings.items():
        if key not in FREE and before.get(key) != value:
            raise UserError(f'{where} holds a run with {key}={before.get(key)!r}, this command has '
                            f'{value!r}; choose another --out')


def provenance(device):
    """What config.json says of the machine and the code, beside the settings."""
    try:
        with open('/proc/cpuinfo') as file:
            name = next(line.split(':')[1].strip() for line in file if line.startswith('model name'))
    except (OSError, StopIteration, IndexError):  # not Linux, or a processor that has no name there
        name = platform.machine()
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'cpu ({name})'
    try:
        here = os.path.dirname(os.path.abspath(__file__))
        git = ['git', '-C', here, 'rev-parse', 'HEAD']
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = None
    versions = {'python': platform.python_version(), 'torch': str(torch.__version__)}
    return {'device_name': name, 'threads': torch.get_num_threads(), 'commit': commit, 'versions': versions}


def load_checkpoint(path, parts=('model', 'optimizer', 'config', 'counters'),
                    advice='move it away to start from the beginning'):
    """
    What train.py saved at `path`: a dict with `step` and these `parts`, each a dict, tensors on the CPU.
    Nothing in the file is executed. Raises UserError, with the advice, if it is not whole.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, but does not check them
            if archive.testzip():
                raise ValueError(f'{archive.testzip()} is damaged')
        with warnings.catch_warnings():  # torch warns of an odd pickle, then refuses it; once is enough
            warnings.simplefilter('ignore')
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        if not isinstance(checkpoint['step'], int) or not all(isinstance(checkpoint[p], dict) for p in parts):
            raise ValueError('its parts are not what train.py writes')
        return checkpoint
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
        raise UserError(f'{path}: not a whole checkpoint ({reason}); {advice}') from error


class Run:
    """
    The folder of a run with these settings (config.json). Rank 0, the master, locks it and writes; the other
    processes only read.
    """

    def __init__(self, folder, settings, master):
        self.folder, self.settings, self.master = folder, settings, master
        self.lock = self.wandb = None
        self.before = read_json(self.path('config.json')) if self.has('config.json') else {}
        if self.before:
            check_settings(folder, self.before, settings)

    def path(self, name):
        return os.path.join(self.folder, name)

    def has(self, name):
        return os.path.exists(self.path(name))

    def take(self):
        """Makes the folder and locks it. Raises UserError (status 3) if another process has it."""
        if self.master:
            make_folder(self.folder)
            self.lock = lock_folder(self.folder)

    def result(self):
        """What result.json says if the run is done, else None. Raises UserError if it is damaged."""
        if not self.has('result.json'):
            return None
        result = read_json(self.path('result.json'))
        self.remove_checkpoint()  # left there by a run that was killed between the two
        return result

    def checkpoint(self, counters):
        """The checkpoint to resume from, with such counters, or None. UserError if it does not fit."""
        if not self.has('ckpt.pt'):
            return None
        checkpoint = load_checkpoint(self.path('ckpt.pt'))
        check_settings(self.path('ckpt.pt'), checkpoint['config'], self.settings)
        if checkpoint['counters'].keys() != counters.keys():
            raise UserError(f'{self.path("ckpt.pt")}: another version of train.py made it, with counters '
                            f'{", ".join(checkpoint["counters"])}; move it away to start from the beginning')
        return checkpoint

    def begin(self, step):
        """
        Writes config.json and cuts the log back to the checkpoint's step (None: there is none): what a
        stopped run logged after it will be trained and logged again, and so will its final test loss.
        """
        if not self.master:
            return
        write_json(self.path('config.json'), self.settings)
        if self.has('log.jsonl'):
            kept, steps = [], self.settings['steps']
            for line in open(self.path('log.jsonl'), encoding='utf-8', errors='replace'):
                try:
                    entry = json.loads(line)
                    final = 'test_loss' in entry and entry['step'] >= steps
                    if step is not None and entry['step'] <= step and not final:
                        kept.append(line)
                except (ValueError, TypeError, KeyError):
                    pass  # half a line, written as the power went or the disk was full
            write_atomic(self.path('log.jsonl'), lambda file: file.write(''.join(kept)), mode='w')
        if self.settings['wandb']:
            import wandb
            self.wandb = wandb
            wandb.init(project=self.settings['wandb'], name=self.folder, config=self.settings,
                       id=self.folder.strip('/').replace('/', '-'), resume='allow')

    def log(self, entry):
        """Appends a dict to the log, as one line."""
        if not self.master:
            return
        try:
            with open(self.path('log.jsonl'), 'a', encoding='utf-8') as file:
                file.write(json.dumps(entry) + '\n')
        except OSError as error:
            raise UserError(f'cannot write {self.path("log.jsonl")}: {error.strerror}; the same command '
                            'resumes from the last checkpoint', 1) from error
        if self.wandb:
            self.wandb.log(entry, step=entry['step'])

    def save(self, name, model, step, **more):
        """Saves the model's weights, the step, the settings and `more` as `name`, atomically."""
        if not self.master:
            return
        with open(self.path('log.jsonl'), 'a') as file:
            os.fsync(file.fileno())  # the log must be on disk before a checkpoint that counts on it
        state = {'model': model.state_dict(), 'step': step, 'config': self.settings, **more}
        write_atomic(self.path(name), lambda file: torch.save(state, file))

    def finish(self, result):
        """Writes result.json, after which the run is done, and removes the checkpoint."""
        if self.master:
            write_json(self.path('result.json'), result)
            self.remove_checkpoint()

    def remove_checkpoint(self):
        if self.master and self.has('ckpt.pt'):
            os.unlink(self.path('ckpt.pt'))

    def close(self):
        """Lets go of the folder."""
        if self.lock:
            self.lock.close()


class Signals:
    """SIGTERM and SIGINT ask a run to save and stop, SIGUSR1 (SLURM's warning) to save and continue."""

    def __init__(self):
        self.received = set()
        self.previous = {number: signal.signal(number, lambda number, _: self.received.add(int(number)))
                         for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def take(self):
        """What came since the last call: (SIGTERM, SIGINT or 0; 1 if SIGUSR1 came, else 0)."""
        received = set(self.received)
        self.received -= received
        return int(max(received - {signal.SIGUSR1}, default=0)), int(signal.SIGUSR1 in received)

    def exit_at_once(self):
        """From here on a signal to stop ends the process at once: the last step is saved."""
        def stop(number, _):
            print('stopped by a signal after the last step; the same command resumes there', flush=True)
            os._exit(128 + number)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
