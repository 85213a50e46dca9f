"""Opens nothing but regular files: no symbolic link, FIFO or device that a dataset may contain."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError

# Windows has neither.
_CAREFULLY = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)

_OF_THE_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Where `<(command)` and `command |` are."""
LONGEST_GIVEN = 4 << 30
"""Bytes. Rows of a million calls have fewer."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Raises:
        DatasetError: the file is missing, something else, or cannot be opened.
    """
    try:
        with refusing(path):
            # Asked first as well, because opening a device can do something.
            _require_regular(path, os.lstat(path).st_mode)
            descriptor = os.open(path, os.O_RDONLY | _CAREFULLY)
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise DatasetError(f"no possible file name ({error})", path) from error
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: Path, limit: int) -> bytes:
    """Read a regular file whole.

    Raises:
        DatasetError: it cannot be read, or is longer than `limit` bytes.
    """
    with opened(path) as descriptor, refusing(path):
        nbytes = os.fstat(descriptor).st_size
        if nbytes > limit:
            raise DatasetError(f"{nbytes} bytes long, and at most {limit} are read", path)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(limit)


def given_text(path: str | os.PathLike[str]) -> str:
    """Read a file that a user named, as UTF-8: also a link to one, or a pipe that the shell made.

    Raises:
        OSError: it cannot be read, is something else, or is longer than any of ours.
        UnicodeDecodeError: it is not UTF-8.
    """
    # Asked first as well, because opening a device can do something.
    _require_given(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, encoding="utf-8") as file:
        _require_given(path, os.fstat(descriptor))
        os.set_blocking(descriptor, True)
        return file.read()


def _require_given(path: str | os.PathLike[str], found: os.stat_result) -> None:
    name = os.fspath(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    is_shell_s = stat.S_ISFIFO(found.st_mode) and name.startswith(_OF_THE_SHELL)
    if not (stat.S_ISREG(found.st_mode) or is_shell_s):
        raise OSError(errno.EINVAL, "not a regular file", name)
    if found.st_size > LONGEST_GIVEN:
        raise OSError(errno.EFBIG, f"longer than {LONGEST_GIVEN} bytes", name)


def create(path: Path) -> int:
    """Create a file for writing, in place of any of that name, and return its descriptor.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:  # a leftover of a killed run, or a link, which is not followed
        os.unlink(path)
        return os.open(path, flags, 0o666)


def written(nbytes: int) -> int:
    """Return what a system call says that it wrote, which must be something.

    Raises:
        OSError: it wrote nothing, and would again.
    """
    if not nbytes:
        raise OSError(errno.EIO, "nothing can be written")
    return nbytes


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk.

    Raises:
        OSError: it is missing, or the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name, be it a broken link."""
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn what the system says of a file into a `DatasetError`."""
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
