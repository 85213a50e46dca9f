"""Finds a dataset in a directory, in an archive or at an address."""

from __future__ import annotations

import os
from pathlib import Path

from capture.errors import DatasetError
from capture.storage import cache, remote
from capture.storage.archives import ENDINGS, Archive, is_archive
from capture.storage.cached_copy import CachedCopy, ProgressReport, no_report
from capture.text.printable import quoted


def cached_copy_of(where: str | Path, report: ProgressReport = no_report) -> CachedCopy | None:
    """Return the copy of a dataset in the cache; None for a local directory."""
    where = os.fspath(where)
    if remote.is_address(where):
        if not is_archive(remote.path_of(where)):
            return CachedCopy(remote.RemoteDirectory(where), report)
        path, copies = remote.archive(where, report)
        return CachedCopy(Archive(path, remote.without_secrets(where), copies), report)
    if directory_of(where) is not None:
        return None
    path = Path(where)
    copies = cache.directory_of(str(path.resolve()), cache.user_cache())
    return CachedCopy(Archive(path, where, copies), report)


def directory_of(where: str | Path) -> Path | None:
    """Return the directory of a dataset; None for an archive or an address."""
    where = os.fspath(where)
    path = Path(where)
    if remote.is_address(where):
        return None
    if path.is_file():
        if is_archive(path.name):
            return None
        raise DatasetError(
            f"{where}: is a file: give a directory that `capture` wrote, or an archive of one "
            f"({', '.join(ENDINGS)})"
        )
    if path.is_dir():
        return path
    if is_archive(path.name) and not path.exists():
        raise DatasetError(f"{where}: no such archive; check the path")
    raise DatasetError(
        f"{path}: no such directory; record into it with "
        f"`capture --model NAME --out {quoted(path)}`"
    )


def why_read_only(where: str | Path) -> str:
    """Return why a location is read-only; empty if it may be a directory."""
    where = os.fspath(where)
    if remote.is_address(where):
        return f"{remote.without_secrets(where)} is an address, which is read-only"
    if is_archive(where.rstrip("/")) and not Path(where).is_dir():
        return f"{where} is an archive, which is read-only"
    return ""
