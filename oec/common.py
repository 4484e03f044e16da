"""What every program needs: errors as one line, flags that are numbers, files written whole, locks."""
import argparse
import contextlib
import fcntl
import json
import math
import os
import sys
import time


class UserError(Exception):
    """Ends a program with one line, status 2 for what the user gave, 1 for a network or disk that failed."""

    def __init__(self, message, status=2, alone=False):
        super().__init__(' '.join(str(message).split()))
        self.status = status
        self.alone = alone  # of several processes LOCAL_RANK 0 prints the line, and one that is alone with it


def check(ok, message):
    """Raises UserError unless `ok`."""
    if not ok:
        raise UserError(message)


def program(main, prints_errors=True):
    """Calls main(argv) as the program. A UserError becomes a line, Ctrl-C status 130, a bug a traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # a locale may lack a letter such as λ
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        if prints_errors or error.alone:
            print(f'error: {error}', file=sys.stderr, flush=True)
        else:
            time.sleep(3)  # torchrun ends all processes once one has ended: let LOCAL_RANK 0 print first
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(130)


def parse_args(parser, argv):
    """parser.parse_args, but it raises UserError where argparse would print two lines and exit."""
    parser.error = lambda message: check(False, message)
    return parser.parse_args(argv)


def user_path(text):
    """An argparse type: a path, of which bash does not expand the ~ in --out=~/runs."""
    if not text:  # --init_from=$CKPT, say, without a CKPT
        raise argparse.ArgumentTypeError("should be a path, is ''")
    return os.path.expanduser(text)


def number(least=-math.inf, above=-math.inf, most=math.inf, below=math.inf, whole=False):
    """An argparse type: a finite number, written 3, 1e-1 or 13.1e9, within these limits."""
    limits = {'from': least, 'above': above, 'to': most, 'below': below}
    wanted = 'a whole number' if whole else 'a number'
    wanted += ''.join(f' {word} {limit:.10g}' for word, limit in limits.items() if math.isfinite(limit))

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        ok = math.isfinite(value) and least <= value <= most and above < value < below
        if not ok or (whole and not value.is_integer()):
            raise argparse.ArgumentTypeError(f'should be {wanted}, is {text!r}')
        return int(value) if whole else value
    return parse


def write_atomic(path, write):
    """Atomic write: write(file) fills a temp file, fsync, rename. Readers never see a partial file."""
    temporary = f'{path}.tmp'
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk's OSError
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UserError(f'{path}: cannot be written ({error.__context__ or error})', status=1) from error
    folder = os.open(os.path.dirname(path) or '.', os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system can do it
        os.fsync(folder)  # or a power cut could undo the rename
    os.close(folder)


def write_json(path, value):
    """Writes `value` as indented JSON, atomically; NaN and infinities as Python's json does."""
    write_atomic(path, lambda file: file.write(f'{json.dumps(value, indent=2)}\n'.encode()))


def read_json(path, missing=None):
    """The JSON object in `path`, or `missing`, if given, where there is no such file; else UserError."""
    if missing is not None and not os.path.exists(path):
        return missing
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: not readable as JSON ({error})') from error
    check(isinstance(value, dict), f'{path}: should hold a JSON object')
    return value


def lock_folder(path, wait=False):
    """Makes and locks a folder -> its lock file, to keep open. UserError if it is locked or not writable."""
    try:
        os.makedirs(path, exist_ok=True)
        file = open(os.path.join(path, '.lock'), 'a')
    except OSError as error:
        raise UserError(f'cannot write in the folder {path}: {error.strerror}') from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise UserError(f'{path}: another process is working in this folder', status=1) from error
    except OSError as error:
        print(f'{path}: this file system has no locks ({error.strerror}): start no second process there',
              file=sys.stderr, flush=True)
    return file
