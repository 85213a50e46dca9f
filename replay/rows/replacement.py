"""Writes a file in one step, so that an interruption or a full disk leaves what there was."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a file that takes the place of the one at `path` when the `with` block ends.

    If the block raises, nothing is left of it. A link is followed; a pipe or a device is written
    to, not replaced.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()
    is_replaced = path.is_file() or not path.exists()
    written = path.with_name(f".{path.name}.tmp") if is_replaced else path
    try:
        with written.open("w", encoding="utf-8") as file:
            yield file
        if is_replaced:
            os.replace(written, path)
    except BaseException:
        if is_replaced:
            with contextlib.suppress(OSError):
                written.unlink()
        raise


def why_not_written(error: OSError) -> str:
    """Why a file cannot be written, with the remedy where that is the same for every file."""
    said = error.strerror or str(error)
    return f"{said}: make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else said
