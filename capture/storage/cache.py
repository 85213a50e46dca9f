"""Where copies of datasets lie that are not a local directory, and how they get there.

    ~/.cache/attention-replay/datasets/      (`$XDG_CACHE_HOME`, or what the system has for it)
        bucket-calls-1f0e…/                  one of these per place, named by its address
            5b1c…/                           one version of it; an earlier one goes after a day

A file gets its name when it is complete: processes that fetch the same one, or die while they do,
leave nothing that is half of one. The cache may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError

UNUSED_SECONDS = 24 * 3600
"""How long a version is kept after its last use, once there is a newer one."""


def user_cache() -> Path:
    """The directory of copies of this user; it may not exist."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base.absolute() / "attention-replay" / "datasets"


def directory_of(address: str, root: Path) -> Path:
    """The directory of a place's versions, by a name in which people recognise the address."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", address.partition("?")[0]).strip("-.")[-60:]
    return root / f"{readable.strip('-.') or 'dataset'}-{_digest(address.encode())}"


def version(directory: Path, *content: bytes) -> Path:
    """The directory of what has this content, made if it is new, beside other versions.

    Raises:
        DatasetError: it cannot be made.
    """
    found = directory / _digest(*content)
    with writing(directory):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(found)
    _forget_others(directory, found)
    return found


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Yield a name to write to; what is there at the end becomes `path`, if nothing was raised.

    Raises:
        DatasetError: it cannot be written.
    """
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        with writing(path.parent):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require_room(directory: Path, nbytes: int, address: str) -> None:
    """Make a directory, and refuse what would not fit into it.

    Raises:
        DatasetError: its file system has less than `nbytes` left, or it cannot be made.
    """
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
    """Turn what the system says of the cache into a `DatasetError`."""
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"cannot write to the cache {directory} ({error.strerror or error}): set "
            "XDG_CACHE_HOME to a directory that can be written to"
        ) from error


def _forget_others(directory: Path, current: Path) -> None:
    """Delete what nobody used for a day: earlier versions, and what killed processes left."""
    before = time.time() - UNUSED_SECONDS
    with contextlib.suppress(OSError):
        for other in [*directory.iterdir(), *current.glob(".*.part")]:
            if other != current and other.lstat().st_mtime < before:
                if other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other, ignore_errors=True)
                else:
                    other.unlink(missing_ok=True)


def _digest(*content: bytes) -> str:
    found = hashlib.sha256()
    for each in content:
        found.update(hashlib.sha256(each).digest())
    return found.hexdigest()[:16]
