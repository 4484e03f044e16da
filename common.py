"""What every program here needs: one-line errors, number parsing, files written whole or not at all, the folder lock."""
import argparse
import contextlib
import difflib
import fcntl
import json
import math
import os
import sys


def die(message, status=2, any_rank=False):
    """Prints one line on stderr, rank 0 for all ranks unless any_rank, and exits: 2 the user's input, 3 folder in use, 1 the rest."""
    if any_rank or os.environ.get('RANK', '0') == '0':
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
    sys.exit(status)


def number(minimum=-math.inf, above=None, below=math.inf, integer=False):
    """An argparse type: a finite number >= minimum (or > above) and < below, written 3, 1e-1 or 13.1e9."""
    floor = f' > {above}' if above is not None else f' >= {minimum}' if minimum > -math.inf else ''
    wanted = ('a whole number' if integer else 'a number') + floor + (f' and < {below}' if below < math.inf else '')

    def parse(text):
        try:
            value = float(text)
            bad = not math.isfinite(value) or value < minimum or value >= below or (above is not None and value <= above)
            if integer and not bad:
                bad, value = value != int(value), int(value)
        except ValueError:
            bad = True
        if bad:
            raise argparse.ArgumentTypeError(f'{text!r} is not {wanted}')
        return value
    return parse


def parse_args(parser, argv):
    """parser.parse_args with the project's error format, and "did you mean" for a flag that does not exist."""
    parser.error = die
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        close = difflib.get_close_matches(unknown[0].split('=')[0], flags, 1)
        die(f'unknown argument {unknown[0]}' + (f', did you mean {close[0]}?' if close else ', see --help'))
    return args


def run(main):
    """sys.exit(main(argv)), in which Ctrl-C and a disk that fails (for the terminal's output, too) are one line as well."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        die('interrupted', 130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try to write what is left once more
        die(f'{error.strerror}: {error.filename or "standard output"}' if error.strerror else error, 1, any_rank=True)


def write_atomic(path, write, mode='wb'):
    """
    write(file) fills a temporary file beside `path`, which replaces `path` only once it is safely on disk: a reader
    sees the old content or the new, never half. Where the disk refuses, the old file stays and the program exits with 1.
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
    except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of an OSError
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        die(f'cannot write {path}: {getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None) or error}', status=1)


def write_json(path, value):
    """Writes `value` to `path` as indented JSON, atomically. NaN and infinities are written as Python's json does."""
    write_atomic(path, lambda file: file.write(json.dumps(value, indent=2) + '\n'), mode='w')


def read_json(path):
    """The JSON object in `path`; exits with 2 where it is not one."""
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        die(f'{path}: not readable as JSON ({error})')
    if not isinstance(value, dict):
        die(f'{path}: should hold a JSON object')
    return value


def make_folder(path):
    """os.makedirs that exits with 2 where the folder cannot be made."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        die(f'cannot make the folder {path}: {error.strerror}')


def lock_folder(path, wait=False):
    """
    Takes `path` for this process and returns the open lock file: the lock goes when the file is closed or the process
    ends, however it ends. Exits with 3 while another process holds it, or waits for it.
    """
    try:
        file = open(os.path.join(path, '.lock'), 'a')
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return file
    except BlockingIOError:
        die(f'{path}: another process is working in this folder', status=3)
    except OSError as error:
        die(f'cannot write in the folder {path}: {error.strerror}', status=1)
