"""What a dataset is read from when it is not a directory of this machine.

Its files are copied to a directory of the cache: first those that list the calls, then the call
files that somebody asks for. There they are read, and checked, like any others.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, Protocol

from capture.errors import DatasetError
from capture.storage import cache, checksums, plain_files
from capture.storage.names import (
    CALL,
    LONGEST_JOURNAL,
    LONGEST_MANIFEST,
    MANIFEST,
    is_of_dataset,
)

ProgressReport = Callable[[int, int], None]
"""Called with the bytes that arrived since the last time, and those that are to arrive in all."""

_AT_A_TIME = 8
"""Files that are copied at the same time."""


def no_report(arrived: int, total: int) -> None:
    """The `ProgressReport` of those who want none."""


class Unreachable(DatasetError):
    """A place does not answer, or lets nobody in: no other file of it can be had either."""


class DatasetFiles(Protocol):
    """The files of a directory that is somewhere else."""

    address: str
    """What the user gave, without passwords."""
    cache: Path
    """The directory of its copies."""

    def sizes(self) -> dict[str, int] | None:
        """The bytes of each file; None where files cannot be listed.

        Raises:
            DatasetError: there is no such directory, or it cannot be reached.
        """
        ...

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        """Write a file of at most `limit` bytes to the path `to`, where there is none.

        Args:
            arrived: called with the bytes since the last time.

        Raises:
            DatasetError: it is missing, longer, or no regular file.
            Unreachable: nothing can be had of the directory.
        """
        ...


class WantedFile(NamedTuple):
    """The file of a call."""

    path: Path
    """Where its copy belongs."""
    nbytes: int
    checksum: str | None
    """As the manifest has it, which may have none."""


class CachedCopy:
    """A dataset somewhere else, and the directory of its copy."""

    def __init__(self, files: DatasetFiles, report: ProgressReport = no_report) -> None:
        """Copy what lists the calls, manifest and journals; all files where there is none of them.

        Raises:
            DatasetError: the place cannot be read, or has no recorded calls.
        """
        self.address = files.address
        self._files = files
        limits, total = self._index()
        staging = files.cache / f".{secrets.token_hex(8)}.part"
        with cache.writing(files.cache):
            staging.mkdir(mode=0o700, parents=True)
        try:
            for name, limit in limits.items():
                files.copy(name, staging / name, limit, lambda count: report(count, total))
            self.directory = cache.version(files.cache, *_content(staging, limits))
            with cache.writing(self.directory):
                for name in limits:
                    os.replace(staging / name, self.directory / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _index(self) -> tuple[dict[str, int], int]:
        """The files that list the calls, with the bytes that each may have, and those they have."""
        sizes = self._files.sizes()
        if sizes is None:
            return {MANIFEST: LONGEST_MANIFEST}, 0
        sizes = {name: size for name, size in sizes.items() if is_of_dataset(name)}
        if not sizes:
            raise DatasetError(f"{self.address}: holds no recorded calls")
        limits = {
            name: LONGEST_MANIFEST if name == MANIFEST else LONGEST_JOURNAL
            for name in sizes
            if not name.endswith(CALL)
        }
        if MANIFEST not in limits:
            limits |= {name: size for name, size in sizes.items() if name.endswith(CALL)}
        total = sum(sizes[name] for name in limits)
        cache.require_room(self._files.cache, total, self.address)
        return limits, total

    def fetch(
        self, wanted: WantedFile, arrived: Callable[[int], None] = lambda count: None
    ) -> None:
        """Copy a call's file, unless it is here, and compare its checksum.

        Raises:
            DatasetError: it is missing or altered.
            Unreachable: nothing can be had of the dataset.
        """
        path, nbytes, checksum = wanted
        if plain_files.is_there(path):
            return
        with cache.placed(path) as temporary:
            self._files.copy(path.name, temporary, nbytes, arrived)
            if checksum is not None and not checksums.matches(temporary, checksum):
                raise DatasetError(
                    f"{self.address}: {path.name} was altered since it was recorded (checksum "
                    "differs)"
                )

    def fetch_all(
        self, wanted: Iterable[WantedFile], report: ProgressReport = no_report
    ) -> dict[Path, DatasetError]:
        """Copy calls' files, several at a time; return why those that cannot be had cannot.

        Raises:
            DatasetError: there is no room for them.
            Unreachable: nothing can be had of the dataset.
        """
        missing = [each for each in wanted if not plain_files.is_there(each.path)]
        total = sum(each.nbytes for each in missing)
        cache.require_room(self.directory, total, self.address)
        stopped = threading.Event()

        def arrived(count: int) -> None:
            if stopped.is_set():
                raise DatasetError("stopped")
            report(count, total)

        errors = {}
        pool = ThreadPoolExecutor(_AT_A_TIME)
        try:
            futures = {pool.submit(self.fetch, each, arrived): each.path for each in missing}
            for future in as_completed(futures):
                try:
                    future.result()
                except Unreachable:
                    raise
                except DatasetError as error:
                    errors[futures[future]] = DatasetError(error.reason, error.path)
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
        return errors


def _content(directory: Path, names: Iterable[str]) -> Iterator[bytes]:
    """What tells one version of a dataset from another.

    Call files have checksums in the manifest or a journal; without these, nothing tells whether one
    has changed, and none is taken from an earlier copy.
    """
    index = sorted(name for name in names if not name.endswith(CALL))
    if not index:
        yield secrets.token_bytes()
    for name in index:
        yield name.encode()
        yield plain_files.read(directory / name, LONGEST_JOURNAL)
