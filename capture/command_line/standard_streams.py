"""Makes stdout and stderr usable if they lack characters, are full or lose their reader."""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import stat
import sys
from typing import Any, NoReturn

PLAIN = str.maketrans("×·µ…–−²√→", "x-u.--2v>")
"""Replacements, of the same width, for characters that an encoding lacks."""

_STDOUT = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def make_usable() -> None:
    """Replace characters that an encoding lacks, and ignore a width of 0 in `COLUMNS`."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)
    codecs.register_error("attention-replay", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="attention-replay")


def is_of_stdout(error: Exception) -> bool:
    """Return whether an exception means that stdout cannot be written."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    if not isinstance(error, BrokenPipeError):
        return error.errno in _FULL
    poll = select.poll()  # the broken pipe may belong to another process
    poll.register(_STDOUT, 0)
    return bool(poll.poll(0))


def is_full_stdout() -> bool:
    """Return whether stdout is a full device, or a file on a full disk."""
    try:
        os.write(_STDOUT, b"")  # fails on a full device
        return stat.S_ISREG(os.fstat(_STDOUT).st_mode) and not os.fstatvfs(_STDOUT).f_bavail
    except OSError as error:
        return error.errno in _FULL


def give_up_stdout(command: str, error: OSError) -> int:
    """Report that stdout cannot be written, unless its reader closed it; return the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)  # receives the rest of stdout's buffer
    os.close(nowhere)
    if not isinstance(error, BrokenPipeError):
        print(f"{command}: cannot write to stdout: {error.strerror}", file=sys.stderr)
    return 1


def exit_with(command: str, code: Any) -> NoReturn:
    """Flush stdout, and exit with a code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        code = give_up_stdout(command, error)
    sys.exit(code)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(PLAIN)
    return lacking.encode("ascii", "replace").decode("ascii"), error.end
