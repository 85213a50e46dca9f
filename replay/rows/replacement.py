"""Writes a file in one step, so that an interruption or a full disk leaves what there was."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_FIXED = (errno.EBUSY, errno.EPERM)
"""Of a file that is mounted alone, as in a container, or is another user's in `/tmp`."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a file that takes the place of the one at `path` when the `with` block ends.

    If the block raises, nothing is left of it. A link is followed, and permissions are kept. What
    cannot be replaced is written to: a pipe, a device, a file with several names, and `-`, stdout.

    Raises:
        OSError: it cannot be written.
    """
    if str(path) == "-":
        yield sys.stdout
        return
    if not _can_be_replaced(path):
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()
    # Its name may be as long as the file system allows, and leave no room for a suffix.
    written = path.with_name(f".{path.name[:25]}.{os.getpid()}.tmp")
    try:
        with written.open("w", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # there is none yet, or all have the same
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
        try:
            os.replace(written, path)
        except OSError as error:
            if error.errno not in _FIXED:
                raise
            shutil.copyfile(written, path)
            written.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def _can_be_replaced(path: Path) -> bool:
    """Whether another file can take its place without a loss.

    Not in a directory that takes no other file. `/dev/stdout` and `/dev/fd/63` may be links to a
    pipe, which has no path of its own.
    """
    if not path.exists():
        return True
    status = path.stat()
    has_one_name = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return has_one_name and os.access(path.resolve().parent, os.W_OK)


def why_not_written(error: OSError) -> str:
    """Why a file cannot be written, with the remedy where that is the same for every file."""
    said = error.strerror or str(error)
    return f"{said}: make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else said
