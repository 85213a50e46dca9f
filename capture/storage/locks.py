"""Locks between processes that record into one directory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

PATIENCE_SECONDS = 30.0
PATIENCE_AT_THE_END_SECONDS = 5.0
"""Where a model waits, and what is not done now, whoever holds the lock or comes later does."""
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class LocksUnsupported(OSError):
    """The file system, usually a network one, has no locks."""


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file for this process until it is closed; False if another one holds it.

    Args:
        shared: others may hold it likewise, and nobody otherwise.

    Raises:
        LocksUnsupported: nothing can be locked here.
    """
    if fcntl is None:
        raise LocksUnsupported(errno.ENOSYS, "this system has no flock")
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise LocksUnsupported(error.errno, error.strerror) from error
        raise
    return True


def wait_for_lock(descriptor: int, path: Path, seconds: float | None = None) -> None:
    """Lock an open file that nobody locks for long.

    Args:
        seconds: how long to wait; by default half a minute.

    Raises:
        LocksUnsupported: nothing can be locked here.
        TimeoutError: another process has held the lock all the while.
    """
    deadline = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", str(path))
        time.sleep(0.01)


def unlock(descriptor: int) -> None:
    """Release the lock, also for a child process that was forked while it was held."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None where nothing can be locked.

    Others who ask at the same time do not count.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    except LocksUnsupported:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def locked(directory: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold a directory's lock, which nobody holds for longer than writing a manifest takes.

    Does nothing where there are no locks.

    Args:
        seconds: how long to wait; by default half a minute.

    Raises:
        TimeoutError: another process has held it all the while.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(LocksUnsupported):
            wait_for_lock(descriptor, directory, seconds)
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        with contextlib.suppress(OSError):  # nothing was written to it
            os.close(descriptor)
