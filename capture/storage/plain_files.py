"""Opens only regular files, because a dataset may contain symbolic links, FIFOs or devices."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError

_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def possible(path: str | os.PathLike[str]) -> Path:
    """Return a path; refuse one that no file can have, for which Python raises ValueError.

    Raises:
        OSError: the path contains a null character, or half of a surrogate pair.
    """
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise OSError(errno.EINVAL, "no file can have this name", os.fspath(path))
    return Path(path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor."""
    with refusing(path):
        descriptor = os.open(possible(path), os.O_RDONLY | _CAREFULLY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DatasetError("not a regular file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with opened(path) as descriptor, refusing(path):
        nbytes = os.fstat(descriptor).st_size
        if nbytes > limit:
            raise DatasetError(f"{nbytes} bytes long (at most {limit} are read)", path)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(limit)


def create(path: Path) -> int:
    """Create a file for writing, replacing any file with this name; return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:  # left by a killed run; or a link, which must not be followed
        os.unlink(path)
        return os.open(path, flags, 0o666)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Convert an `OSError` about a file to a `DatasetError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError("missing", path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:  # O_NOFOLLOW found a symbolic link
            raise DatasetError("a symbolic link; put the file itself here", path) from error
        raise DatasetError(f"cannot be read ({error.strerror or error})", path) from error
