"""Finds a dataset in a directory, in an archive or at an address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from capture.errors import DatasetError
from capture.storage import cache, remote
from capture.storage.archives import ENDINGS, Archive, is_archive
from capture.storage.cached_copy import CachedCopy, ProgressReport, no_report
from capture.storage.names import is_of_dataset
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
    # Unlike the methods of `Path`, these functions also take a name that is too long.
    if os.path.isfile(path):
        if is_archive(path.name):
            return None
        raise DatasetError(
            f"{where}: is a file: give a directory that `capture` wrote, or an archive of one "
            f"({', '.join(ENDINGS)})"
        )
    if os.path.isdir(path):
        return path
    if is_archive(path.name) and not os.path.exists(path):
        raise DatasetError(f"{where}: no such archive; check the path")
    remedy = _did_you_mean(get_close_matches(path.name, _recordings(path.parent), 1), path.parent)
    remedy = remedy or f"; record into it with `capture --model NAME --out {quoted(path)}`"
    raise DatasetError(f"{path}: no such directory{remedy}")


def where_instead(directory: Path) -> str:
    """Return what to do about a directory without recorded calls, as the end of a sentence."""
    if inside := _did_you_mean(_recordings(directory)[:5], directory):
        return inside
    if any(directory.iterdir()):
        return "; name a directory that `capture` wrote"
    return f"; record some with `capture --model NAME --out {quoted(directory)}`"


def _did_you_mean(names: Sequence[str], parent: Path) -> str:
    found = " or ".join(str(parent / name) for name in names)
    return f": did you mean {found}?" if found else ""


def _recordings(parent: Path) -> list[str]:
    """Return the names of the subdirectories that hold a recording."""
    found = []
    with contextlib.suppress(OSError):  # the parent may be missing or unreadable
        for entry in sorted(parent.iterdir()):
            if entry.is_dir() and any(map(is_of_dataset, os.listdir(entry))):
                found.append(entry.name)
    return found


def why_read_only(where: str | Path) -> str:
    """Return why a location is read-only; empty if it may be a directory."""
    where = os.fspath(where)
    if remote.is_address(where):
        return f"{remote.without_secrets(where)} is an address, which is read-only"
    if is_archive(where.rstrip("/")) and not os.path.isdir(where):
        return f"{where} is an archive, which is read-only"
    return ""
