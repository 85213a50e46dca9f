"""Manages the cache of datasets that are not local directories.

    ~/.cache/attention-replay/datasets/      (or in `$XDG_CACHE_HOME`)
        bucket-calls-1f0e…/                  one directory per address, named after the address
            5b1c…/                           one version

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
from collections.abc import Iterator
from pathlib import Path

from capture.errors import DatasetError


def user_cache(content: str = "datasets") -> Path:
    """Return this user's directory for a kind of content, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base.absolute() / "attention-replay" / content


def directory_of(address: str, root: Path) -> Path:
    """Return the directory for all versions of an address; its name resembles the address."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", address.partition("?")[0]).strip("-.")[-60:]
    return root / f"{readable.strip('-.') or 'dataset'}-{_digest(address.encode())}"


def version(directory: Path, *content: bytes) -> Path:
    """Return the directory of the version with this content, and create it if it is missing."""
    found = directory / _digest(*content)
    with writing(directory):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _digest(*content: bytes) -> str:
    digests = b"".join(hashlib.sha256(part).digest() for part in content)
    return hashlib.sha256(digests).hexdigest()[:16]
