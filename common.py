"""What every program needs: one-line errors, number flags, files written whole or not at all, locks."""
import argparse
import contextlib
import difflib
import fcntl
import json
import math
import os
import sys


class UserError(Exception):
    """
    What ends a program with one line on stderr. `status` is 2 for the user's input, 3 for a folder in
    use, 1 for the rest. Of several processes rank 0 speaks for all, unless only this rank can have seen
    the error (`any_rank`).
    """

    def __init__(self, message, status=2, any_rank=False):
        super().__init__(' '.join(str(message).split()))
        self.status, self.any_rank = status, any_rank


def run(main):
    """Runs main(argv) as the program: the one place where an error becomes a line and an exit status."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as caught:
        error = caught
    except KeyboardInterrupt:
        error = UserError('interrupted', 130)
    except OSError as failed:  # a disk that fails, be it the one that holds the terminal's output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try once more to write its buffer
        where = failed.filename or 'standard output'
        error = UserError(f'{failed.strerror}: {where}' if failed.strerror else failed, 1, any_rank=True)
    if error.any_rank or os.environ.get('RANK', '0') == '0':
        print(f'error: {error}', file=sys.stderr, flush=True)
    sys.exit(error.status)


def number(least=None, above=None, below=None, integer=False):
    """An argparse type: a finite number, written 3, 1e-1 or 13.1e9, that is >= least, > above and < below."""
    limits = [f'{word} {limit:g}' for word, limit in (('from', least), ('above', above), ('below', below))
              if limit is not None]
    wanted = ' '.join(['a whole number' if integer else 'a number', ' and '.join(limits)]).strip()

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        good = math.isfinite(value) and (not integer or value == int(value))
        good = good and (least is None or value >= least) and (above is None or value > above)
        good = good and (below is None or value < below)
        if not good:
            raise argparse.ArgumentTypeError(f'should be {wanted}, is {text!r}')
        return int(value) if integer else value
    return parse


def parse_args(parser, argv):
    """parser.parse_args that raises UserError where argparse would exit; an unknown flag: did you mean."""
    def fail(message):
        raise UserError(message)
    parser.error = fail
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        close = difflib.get_close_matches(unknown[0].split('=')[0], flags, 1)
        fail(f'unknown argument {unknown[0]}' + (f', did you mean {close[0]}?' if close else ', see --help'))
    return args


def write_atomic(path, write, mode='wb'):
    """
    write(file) fills a temporary file beside `path`, which replaces `path` only once it is safely on
    disk: a reader sees the old content or the new, never half. Where the disk refuses, the old file
    stays and UserError is raised.
    """
    temporary = f'{path}.tmp'
    try:
        with open(temporary, mode, **({} if 'b' in mode else {'encoding': 'utf-8', 'newline': ''})) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        reason = getattr(error, 'strerror', None) or getattr(error.__context__, 'strerror', None) or error
        raise UserError(f'cannot write {path}: {reason}', status=1) from error


def write_json(path, value):
    """Writes `value` to `path` as indented JSON, atomically; NaN and infinities as Python's json does."""
    write_atomic(path, lambda file: file.write(json.dumps(value, indent=2) + '\n'), mode='w')


def read_json(path):
    """The JSON object in `path`; raises UserError where it is not one."""
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path}: not readable as JSON ({error})') from error
    if not isinstance(value, dict):
        raise UserError(f'{path}: should hold a JSON object')
    return value


def make_folder(path):
    """os.makedirs that raises UserError where the folder cannot be made."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {path}: {error.strerror}') from error


def lock_folder(path, wait=False):
    """
    Takes the folder for this process and returns the open lock file: the lock goes when the file is
    closed or the process ends, however it ends. While another process has it, raises UserError with
    status 3, or waits.
    """
    try:
        file = open(os.path.join(path, '.lock'), 'a')
    except OSError as error:
        raise UserError(f'cannot write in the folder {path}: {error.strerror}', status=1) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        file.close()
        raise UserError(f'{path}: another process is working in this folder', status=3) from error
    return file
