"""Reads datasets in `.zip`, `.tar` or `.tar.gz` archives from untrusted sources.

Nothing is unpacked to a path that the archive names. The members of the folder that holds the
dataset are read one by one, and copied to the cache like the files of any other location.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import logging
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
from functools import partial
from pathlib import Path
from typing import Protocol

from capture.errors import DatasetError
from capture.storage import cache, plain_files
from capture.storage.names import MANIFEST, is_of_dataset
from capture.text.printable import printable

logger = logging.getLogger(__name__)

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
EXPANSION = 64
EXPANSION_AT_LEAST = 2 << 30
"""Maximum content of an archive: `EXPANSION` times its size, but at least this many bytes."""
MEMBERS = 1_000_000
"""Maximum number of members."""

_PIECE = 1 << 20
"""Number of bytes in one step of a copy."""
_HEADER_AT_MOST = 16 << 20
"""Maximum size in bytes of a tar header, which is read into memory."""
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, OSError),
    *(ValueError, OverflowError, RuntimeError),  # including too much recursion
)
"""Errors that the libraries raise for a damaged or unknown archive."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ArchiveMember:
    """A file in an archive."""

    name: str
    """Path in the archive."""
    nbytes: int
    """Size that the archive declares."""
    obstacle: str
    """Reason why the member cannot be read; usually empty."""
    opened: Callable[[], _Readable]


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
                members = _zip_members(path)
            else:
                members = _tar_members(self._unzipped(path) if first == b"\x1f\x8b" else path)
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
        if member.obstacle:
            raise DatasetError(f"{where} {member.obstacle}")
        with _as_dataset_error(where), contextlib.closing(member.opened()) as packed:
            _copy(packed, to, limit, arrived)

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


def _zip_members(path: Path) -> Iterator[ArchiveMember]:
    archive = zipfile.ZipFile(path)
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        obstacle = ""
        if info.is_dir():
            continue
        if kind not in (0, stat.S_IFREG):
            obstacle = "is not a regular file"
        elif info.flag_bits & 1:
            obstacle = "is encrypted: unpack the archive, and give the directory"
        elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            obstacle = "is compressed in an unusual way: unpack the archive, and give the directory"
        # Some programs for Windows write backslashes as separators.
        name = info.filename if "/" in info.filename else info.filename.replace("\\", "/")
        yield ArchiveMember(name, info.file_size, obstacle, partial(archive.open, info))


def _tar_members(path: Path) -> Iterator[ArchiveMember]:
    with _Cautious(io.FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for info in archive:
            if info.isdir():
                continue
            regular = info.isreg() and not info.issparse()
            obstacle = "" if regular else "is not a regular file"
            opened = partial(_Part, path, info.offset_data, info.size)
            yield ArchiveMember(info.name, info.size, obstacle, opened)


def _dataset_among(members: Iterable[ArchiveMember], address: str) -> dict[str, ArchiveMember]:
    """Return the files of the dataset among an archive's members, by name without folders.

    The dataset is the topmost folder with a manifest. If no folder has a manifest, the dataset is
    the topmost folder with recorded calls.
    """
    folders: dict[str, dict[str, ArchiveMember]] = defaultdict(dict)
    others = 0
    for number, member in enumerate(members):
        if number == MEMBERS:
            raise DatasetError(f"{address}: has more than {MEMBERS} members")
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if member.name.startswith("/") or ".." in parts or re.match("[A-Za-z]:", member.name):
            raise DatasetError(
                f"{address}: its member {printable(member.name[:200])} leads out of the archive: "
                "pack the directory by a relative path"
            )
        if not parts or not is_of_dataset(parts[-1]):
            others += 1
            continue
        folder = folders["/".join(parts[:-1])]
        if parts[-1] in folder:
            raise DatasetError(
                f"{address}: has two members called {printable(member.name[:200])}: pack it again"
            )
        folder[parts[-1]] = member
    if others:
        logger.info("%s: %d members are not of a dataset, and are ignored", address, others)
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


class _Cautious(io.BufferedReader):
    """A file that refuses large reads, because a malicious tar header makes `tarfile` try them."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _HEADER_AT_MOST:
            raise tarfile.ReadError("a header is too long")
        return super().read(size)


class _Part:
    """Part of a file: `nbytes` bytes from `offset` on."""

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        self._file = path.open("rb")
        self._file.seek(offset)
        self._left = nbytes

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        if self._left and not data:
            raise EOFError("it ends early")
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


def _copy(packed: _Readable, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
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
            f"{where} cannot be unpacked ({printable(reason)}): it may be incomplete, copy it again"
        ) from error
