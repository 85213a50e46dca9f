"""Reads datasets in `.zip`, `.tar` or `.tar.gz` archives from untrusted sources.

Nothing is unpacked to a path that the archive names. The members of the folder that holds the
dataset are read one by one, and copied to the cache like the files of any other location.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from capture.errors import DatasetError
from capture.storage import cache, plain_files
from capture.storage.names import MANIFEST, is_of_dataset
from capture.text.printable import printable

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
EXPANSION = 64
EXPANSION_AT_LEAST = 2 << 30
"""Bytes that any archive may contain; a larger one may contain `EXPANSION` times its size."""
MEMBERS = 1_000_000
"""Maximum number of files in an archive."""

_PIECE = 1 << 20
"""Number of bytes in one step of a copy."""
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, OSError),
    *(ValueError, OverflowError, RuntimeError, MemoryError),  # including too deep recursion
)
"""Errors that the libraries raise for a damaged or unknown archive."""


@dataclass(frozen=True)
class ArchiveMember:
    """A file in an archive."""

    name: str
    """Path in the archive."""
    nbytes: int
    """Size that the archive declares."""
    is_regular: bool
    info: zipfile.ZipInfo | tarfile.TarInfo


def is_archive(name: str) -> bool:
    """Return whether a file name has an archive's extension, in upper or lower case."""
    return name.lower().endswith(ENDINGS)


class Archive:
    """Files of the dataset in an archive (see `DatasetFiles`)."""

    def __init__(self, path: Path, address: str, cache_directory: Path) -> None:
        """List an archive's members."""
        self.address = address
        self.cache = cache_directory
        with _as_dataset_error(address):
            with path.open("rb") as file:
                first = file.read(2)
            if first == b"PK":
                self._zip = zipfile.ZipFile(path)
                members = _zip_members(self._zip)
            else:
                self._tar = self._unzipped(path) if first == b"\x1f\x8b" else path
                members = _tar_members(self._tar)
            self._members = _dataset_among(members, address)
        contained, limit = sum(member.nbytes for member in self._members.values()), _limit(path)
        if contained > limit:
            raise DatasetError(f"{address}: contains {contained} bytes (at most {limit} are read)")

    def sizes(self) -> dict[str, int]:
        return {name: member.nbytes for name, member in self._members.items()}

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        if name not in self._members:
            raise DatasetError(f"{self.address}: {name} is missing")
        member = self._members[name]
        where = f"{self.address}: {printable(member.name)}"
        if not member.is_regular:
            raise DatasetError(f"{where} is not a regular file")
        with _as_dataset_error(where), self._opened(member.info) as packed:
            _copy(packed, to, limit, arrived)

    @contextlib.contextmanager
    def _opened(self, info: zipfile.ZipInfo | tarfile.TarInfo) -> Iterator[IO[bytes]]:
        if isinstance(info, zipfile.ZipInfo):
            with self._zip.open(info) as packed:
                yield packed
        else:  # one file handle for each copy, because several threads copy
            with tarfile.open(self._tar, "r:") as archive, archive.extractfile(info) as packed:  # type: ignore[union-attr]
                yield packed

    def _unzipped(self, path: Path) -> Path:
        """Decompress a tar archive to the cache, because a compressed archive is slow to search."""
        found = path.stat()
        state = (found.st_size, found.st_mtime_ns, found.st_ino)
        plain = cache.version(self.cache, repr(state).encode()) / "decompressed.tar"
        if not plain.exists():
            with cache.placed(plain) as temporary, gzip.open(path) as packed:
                _copy(packed, temporary, _limit(path), lambda count: None)
        return plain


def _limit(path: Path) -> int:
    return max(EXPANSION * path.stat().st_size, EXPANSION_AT_LEAST)


def _zip_members(archive: zipfile.ZipFile) -> Iterator[ArchiveMember]:
    for info in archive.infolist():
        if not info.is_dir():
            is_regular = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            # Some programs for Windows write backslashes as separators.
            name = info.filename if "/" in info.filename else info.filename.replace("\\", "/")
            yield ArchiveMember(name, info.file_size, is_regular, info)


def _tar_members(path: Path) -> Iterator[ArchiveMember]:
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            if not info.isdir():
                is_regular = info.isreg() and not info.issparse()
                yield ArchiveMember(info.name, info.size, is_regular, info)


def _dataset_among(members: Iterable[ArchiveMember], address: str) -> dict[str, ArchiveMember]:
    """Return the files of the dataset among an archive's members, by name without folders.

    The dataset is the topmost folder with a manifest. If no folder has a manifest, the dataset is
    the topmost folder with recorded calls.
    """
    folders: dict[str, dict[str, ArchiveMember]] = defaultdict(dict)
    for number, member in enumerate(members):
        if number == MEMBERS:
            raise DatasetError(f"{address}: has more than {MEMBERS} members")
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if member.name.startswith("/") or ".." in parts or re.match("[A-Za-z]:", member.name):
            raise DatasetError(
                f"{address}: its member {printable(member.name[:200])} leads out of the archive: "
                "pack the directory with a relative path"
            )
        if not parts or not is_of_dataset(parts[-1]):
            continue
        folder = folders["/".join(parts[:-1])]
        if parts[-1] in folder:
            raise DatasetError(
                f"{address}: has two members called {printable(member.name[:200])}: pack it again"
            )
        folder[parts[-1]] = member
    found = [folder for folder in folders if MANIFEST in folders[folder]] or list(folders)
    if not found:
        raise DatasetError(f"{address}: holds no recorded calls")
    top = min(folder.count("/") + bool(folder) for folder in found)
    nearest = [folder for folder in found if folder.count("/") + bool(folder) == top]
    if len(nearest) > 1:
        raise DatasetError(
            f"{address}: holds {len(nearest)} datasets, such as {printable(nearest[0][:100])} and "
            f"{printable(nearest[1][:100])}: unpack it, and give the directory of one"
        )
    return folders[nearest[0]]


def _copy(
    packed: IO[bytes] | gzip.GzipFile, to: Path, limit: int, arrived: Callable[[int], None]
) -> None:
    """Write the content of a member to a new file."""
    left = limit
    with cache.writing(to.parent):
        unpacked = os.fdopen(plain_files.create(to), "wb")
    with unpacked:
        while piece := packed.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise ValueError(f"it has more than {limit} bytes")
            with cache.writing(to.parent):
                unpacked.write(piece)
            arrived(len(piece))


@contextlib.contextmanager
def _as_dataset_error(where: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DatasetError(
            f"{where} cannot be unpacked ({printable(reason)}): copy the archive again, or unpack "
            "it and give the directory"
        ) from error
