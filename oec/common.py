"""What every program needs: errors as one line, flags that are numbers, files written whole, locks."""
import argparse
import contextlib
import ctypes
import fcntl
import json
import math
import os
import sys


class UserError(Exception):
    """Ends a program with one line: status 2 for the user's input, 3 for a folder in use, 1 for the rest."""

    def __init__(self, message, status=2):
        super().__init__(' '.join(str(message).split()))
        self.status = status


def check(right, message, status=2):
    """Raises UserError unless `right` holds."""
    if not right:
        raise UserError(message, status)


def program(main):
    """Calls main(argv) as the program: the one place where an error becomes a line and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='replace')  # in an older encoding λ becomes ?
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as caught:
        error = caught
    except KeyboardInterrupt:
        error = UserError('interrupted', 130)
    except OSError as failed:  # a disk that fails, be it the one that holds the terminal's output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try once more to write its buffer
        error = UserError(f'{failed.strerror or failed}: {failed.filename or "standard output"}', 1)
    if os.environ.get('LOCAL_RANK', '0') == '0' or error.status == 1:  # all see bad input, one speaks
        print(f'error: {error}', file=sys.stderr, flush=True)
    sys.exit(error.status)


def parse_args(parser, argv):
    """parser.parse_args, but it raises UserError where argparse would print two lines and exit."""
    parser.error = lambda message: check(False, message)
    return parser.parse_args(argv)


def number(least=-math.inf, above=-math.inf, most=math.inf, whole=False):
    """An argparse type: a finite number, written 3, 1e-1 or 13.1e9, that is >= least, > above and <= most."""
    limits = [f'{word} {limit:g}' for word, limit in (('from', least), ('above', above), ('to', most))
              if math.isfinite(limit)]
    wanted = ' '.join(['a whole number' if whole else 'a number', *limits])

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above
                and (value.is_integer() or not whole)):
            raise argparse.ArgumentTypeError(f'should be {wanted}, is {text!r}')
        return int(value) if whole else value
    return parse


def write_atomic(path, write, mode='wb'):
    """
    write(file) fills a temporary file, which replaces `path` once it is safely on disk: a reader sees the old
    content or the new, never half. Raises UserError where the disk refuses; then the old file stays.
    """
    temporary = f'{path}.tmp'
    try:
        with open(temporary, mode, **({} if 'b' in mode else {'encoding': 'utf-8', 'newline': ''})) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        os.fsync(folder)  # the rename itself must survive a power cut
        os.close(folder)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        reason = getattr(error, 'strerror', None) or getattr(error.__context__, 'strerror', None) or error
        raise UserError(f'cannot write {path}: {reason}', status=1) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_json(path, value):
    """Writes `value` as indented JSON, atomically; NaN and infinities as Python's json does."""
    write_atomic(path, lambda file: file.write(json.dumps(value, indent=2) + '\n'), mode='w')


def read_json(path):
    """The JSON object in `path`; raises UserError where it is not one."""
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path}: not readable as JSON ({error})') from error
    check(isinstance(value, dict), f'{path}: should hold a JSON object')
    return value


def lock_folder(path, wait=False):
    """
    Makes the folder, takes it for this process and returns the open lock file: the lock ends with that.
    Raises UserError where another process has it (status 3; or waits) or the folder cannot be written.
    """
    try:
        os.makedirs(path, exist_ok=True)
        file = open(os.path.join(path, '.lock'), 'a')
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise UserError(f'{path}: another process is working in this folder', status=3) from error
    except OSError as error:
        raise UserError(f'cannot write in the folder {path}: {error.strerror}') from error
    return file


def keep_freed_memory():
    """Tells glibc to keep freed memory: zeroing new pages is half the time of a small step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: None)  # glibc alone has it
    mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
    mallopt(-1, -1)     # M_TRIM_THRESHOLD: never
