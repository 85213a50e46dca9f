"""Locks a directory against other processes that record into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECONDS = 30.0
PATIENCE_AT_THE_END_SECONDS = 5.0
"""Time to wait for a lock while the model waits; after that, another process ends the capture."""
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class LocksUnsupported(OSError):
    """The file system does not support locks; some network file systems do not."""


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds its lock.

    Args:
        shared: allow other processes to hold a shared lock at the same time.
    """
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
    """Lock an open file, after waiting for another process to release it.

    Args:
        seconds: time to wait (default: half a minute).
    """
    deadline = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", str(path))
        time.sleep(0.01)


def unlock(descriptor: int) -> None:
    """Release the lock, even if a child process that was forked later still has the file open."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None if the file system has no locks.

    Several processes can check the same file at the same time.
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
    """Hold a directory's lock; do nothing if the file system has no locks.

    Args:
        seconds: time to wait (default: half a minute).
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(LocksUnsupported):
            wait_for_lock(descriptor, directory, seconds)
        yield
    finally:
        unlock(descriptor)
        with contextlib.suppress(OSError):  # nothing was written through this descriptor
            os.close(descriptor)
