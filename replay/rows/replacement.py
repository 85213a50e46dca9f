"""Replacement of a file in one step, so that an interruption keeps the old file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from capture.storage.plain_files import possible


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a file that replaces the one at `path` when the `with` block ends.

    If the block raises, the old file stays. A link keeps pointing to the file, which keeps its
    permissions. Pipes, devices and `-` (stdout) are written directly.

    Raises:
        OSError: the file cannot be written.
    """
    if str(path) == "-":
        yield sys.stdout
        return
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = possible(path).resolve()
    # The name may have the file system's maximum length, so nothing can be appended to it.
    written = path.with_name(f".{path.name[:25]}.{os.getpid()}.tmp")
    try:
        with written.open("w", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # there may be no old file, or no permissions
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def why_not_written(error: OSError) -> str:
    """Return the reason why a file cannot be written, with the remedy for a full disk."""
    reason = error.strerror or str(error)
    return f"{reason}: make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else reason
