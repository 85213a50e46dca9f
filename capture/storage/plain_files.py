"""Opens only regular files, because a dataset may contain symbolic links, FIFOs or devices."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError

# These flags do not exist on Windows.
_CAREFULLY = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)

_SHELL_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Prefixes of the paths of a shell's pipes, for `<(command)` and `command |`."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor."""
    try:
        with refusing(path):
            # Checked before and after opening, because opening a device can have side effects.
            _require_regular(path, os.lstat(path).st_mode)
            descriptor = os.open(path, os.O_RDONLY | _CAREFULLY)
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise DatasetError(f"invalid file name ({error})", path) from error
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
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


def given_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file that the user named; links and a shell's pipes are allowed."""
    name, mode = os.fspath(path), os.stat(path).st_mode
    is_shell_pipe = stat.S_ISFIFO(mode) and name.startswith(_SHELL_PIPES)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_shell_pipe):
        raise OSError(errno.EINVAL, "not a regular file", name)
    with open(path, encoding="utf-8") as file:
        return file.read()


def create(path: Path) -> int:
    """Create a file for writing, replacing any file with this name; return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:  # left by a killed run; or a link, which must not be followed
        os.unlink(path)
        return os.open(path, flags, 0o666)


def written(nbytes: int) -> int:
    """Return the number of bytes that a system call wrote, after checking that it is not 0."""
    if not nbytes:
        raise OSError(errno.EIO, "nothing can be written")
    return nbytes


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Return whether anything exists at a path, even a broken link."""
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Convert an `OSError` about a file to a `DatasetError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError("missing", path) from error
    except OSError as error:
        raise DatasetError(f"cannot be read ({error.strerror or error})", path) from error


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise DatasetError("a symbolic link; put the file itself here", path)
    if not stat.S_ISREG(mode):
        raise DatasetError("not a regular file", path)
