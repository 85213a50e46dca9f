"""The transfer of recorded calls to another machine, which keeps the received files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capture.storage import cache

EDGE_BYTES = 1 << 16
"""Number of bytes at each end of a file that identify the file. These bytes include the header, and
the checksum is verified when the file is loaded."""


@dataclass(frozen=True)
class FileFacts:
    """Facts that identify a file on every machine."""

    path: Path
    """Path on the machine that has the file."""
    nbytes: int
    digest: str
    """Digest of both ends of the file."""

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Read the size and both ends of a file.

        Raises:
            OSError: the file cannot be read.
        """
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            found = hashlib.sha256(file.read(EDGE_BYTES))
            file.seek(max(nbytes - EDGE_BYTES, 0))
            found.update(file.read())
        return cls(path, nbytes, found.hexdigest())

    def is_at(self, path: Path) -> bool:
        """Return whether the same file is at `path`."""
        try:
            return FileFacts.of(path) == FileFacts(path, self.nbytes, self.digest)
        except OSError:
            return False


def directory_here(files: Sequence[FileFacts]) -> Path:
    """Return the directory of a workload's files on this machine: the original or a cache."""
    (home,) = {facts.path.parent for facts in files}
    if all(facts.is_at(facts.path) for facts in files):
        return home
    copies = cache.directory_of(str(home), cache.user_cache())
    return cache.version(copies, *(facts.digest.encode() for facts in files))


def lacking(files: Sequence[FileFacts], directory: Path) -> list[FileFacts]:
    """Return the files that are missing in a directory returned by `directory_here`."""
    return [facts for facts in files if not facts.is_at(directory / facts.path.name)]


def receive(facts: FileFacts, content: bytes, directory: Path) -> None:
    """Write a file into a directory returned by `directory_here`."""
    with cache.placed(directory / facts.path.name) as temporary, cache.writing(directory):
        temporary.write_bytes(content)
