"""Manages the cache of datasets that are not local directories.

    ~/.cache/attention-replay/datasets/      (or in `$XDG_CACHE_HOME`)
        bucket-calls-1f0e…/                  one directory per address, named after the address
            5b1c…/                           one version, deleted if outdated and unused for a day

A file gets its final name when it is complete, so a file with this name is never incomplete, even
if processes copy the same file at the same time or are killed. The cache may be deleted at any
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError

UNUSED_SECONDS = 24 * 3600
"""Time after its last use for which a version is kept once a newer version exists."""


def user_cache() -> Path:
    """Return the directory of this user's copies, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base.absolute() / "attention-replay" / "datasets"


def directory_of(address: str, root: Path) -> Path:
    """Return the directory for all versions of an address; its name resembles the address."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", address.partition("?")[0]).strip("-.")[-60:]
    return root / f"{readable.strip('-.') or 'dataset'}-{_digest(address.encode())}"


def version(directory: Path, *content: bytes) -> Path:
    """Return the directory of the version with this content, and create it if it is missing."""
    found = directory / _digest(*content)
    with writing(directory):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(found)
    _forget_others(directory, found)
    return found


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on exit without an exception, that file is renamed to `path`."""
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        with writing(path.parent):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require_room(directory: Path, nbytes: int, address: str) -> None:
    """Create a directory, and check that `nbytes` fit into it."""
    with writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise DatasetError(
            f"{address}: {nbytes} bytes are to be copied to {directory}, where {free} are free: "
            "make room, or set XDG_CACHE_HOME to a directory on a larger disk"
        )


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Convert an `OSError` about the cache to a `DatasetError`."""
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"cannot write to the cache {directory} ({error.strerror or error}): set "
            "XDG_CACHE_HOME to a directory that can be written to"
        ) from error


def _forget_others(directory: Path, current: Path) -> None:
    """Delete other versions, and leftovers of killed processes, if unused for a day."""
    before = time.time() - UNUSED_SECONDS
    with contextlib.suppress(OSError):
        for other in [*directory.iterdir(), *current.glob(".*.part")]:
            if other != current and other.lstat().st_mtime < before:
                if other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other, ignore_errors=True)
                else:
                    other.unlink(missing_ok=True)


def _digest(*content: bytes) -> str:
    digests = b"".join(hashlib.sha256(part).digest() for part in content)
    return hashlib.sha256(digests).hexdigest()[:16]
