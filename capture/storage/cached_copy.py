"""Copies datasets that are not local directories to the cache.

The manifest is copied first. The file of each call is copied when it is first read. The copy is
read and checked like any other dataset.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from capture.errors import DatasetError
from capture.storage import cache, checksums
from capture.storage.names import CALL, LONGEST_MANIFEST, MANIFEST, is_of_dataset

if TYPE_CHECKING:
    from capture.storage.call_file import FileEntry

ProgressReport = Callable[[int, int], None]
"""Function that receives the bytes copied since its last call, and the total bytes expected."""

_AT_A_TIME = 8
"""Number of files that are copied at the same time."""


def no_report(arrived: int, total: int) -> None:
    """Ignore the progress."""


class Unreachable(DatasetError):
    """An address is unreachable or denies access, so that no file can be copied from it."""


class DatasetFiles(Protocol):
    """Files of a dataset that is not a local directory."""

    address: str
    """Address that the user gave, without passwords."""
    cache: Path
    """Directory of the dataset's copies."""

    def sizes(self) -> dict[str, int] | None:
        """Return the size of each file in bytes; None if files cannot be listed."""
        ...

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        """Write a file of at most `limit` bytes to the new path `to`.

        Args:
            arrived: function that receives the bytes copied since its last call.
        """
        ...


class CachedCopy:
    """A dataset that is not a local directory, and the directory of its copy."""

    def __init__(self, files: DatasetFiles, report: ProgressReport = no_report) -> None:
        """Copy the manifest, or all calls if there is no manifest."""
        self.address = files.address
        self._files = files
        limits, total = self._index()
        staging = files.cache / f".{secrets.token_hex(8)}.part"
        with cache.writing(files.cache):
            staging.mkdir(mode=0o700, parents=True)
        try:
            for name, limit in limits.items():
                files.copy(name, staging / name, limit, lambda count: report(count, total))
            # Without a manifest there are no checksums to show that a file has changed, so random
            # bytes start a new version instead of using earlier copies.
            listed = MANIFEST in limits
            content = (staging / MANIFEST).read_bytes() if listed else secrets.token_bytes()
            self.directory = cache.version(files.cache, content)
            with cache.writing(self.directory):
                for name in limits:
                    os.replace(staging / name, self.directory / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _index(self) -> tuple[dict[str, int], int]:
        """Return the files to copy first, each with its maximum bytes, and their total size."""
        sizes = self._files.sizes()
        if sizes is None or MANIFEST in sizes:
            return {MANIFEST: LONGEST_MANIFEST}, (sizes or {}).get(MANIFEST, 0)
        names = [name for name in sizes if is_of_dataset(name) and name.endswith(CALL)]
        if not names:
            raise DatasetError(f"{self.address}: holds no recorded calls")
        return {name: sizes[name] for name in names}, sum(sizes[name] for name in names)

    def fetch(self, entry: FileEntry, arrived: Callable[[int], None] = lambda count: None) -> None:
        """Copy a call's file and compare its checksum, unless the cache already holds the file.

        Raises:
            DatasetError: the file is missing or altered.
            Unreachable: no file of the dataset can be copied.
        """
        name, checksum = entry.path.name, entry.checksum
        if os.path.lexists(entry.path):
            return
        with cache.placed(entry.path) as temporary:
            self._files.copy(name, temporary, entry.nbytes, arrived)
            if checksum is not None and checksums.checksum(temporary) != checksum:
                raise DatasetError(
                    f"{self.address}: {name} was altered since it was recorded (checksum differs)"
                )

    def fetch_all(
        self, entries: Iterable[FileEntry], report: ProgressReport = no_report
    ) -> dict[Path, DatasetError]:
        """Copy calls' files, several at a time; return the errors of files that were not copied."""
        missing = [entry for entry in entries if not os.path.lexists(entry.path)]
        total = sum(entry.nbytes for entry in missing)
        stopped = threading.Event()

        def arrived(count: int) -> None:
            if stopped.is_set():
                raise DatasetError("stopped")
            report(count, total)

        errors = {}
        pool = ThreadPoolExecutor(_AT_A_TIME)
        try:
            futures = {pool.submit(self.fetch, entry, arrived): entry.path for entry in missing}
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
