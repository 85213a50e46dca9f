"""Recorded calls on the way to another machine: a file is sent where it is not, and kept there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capture.storage import cache

EDGE_BYTES = 1 << 16
"""At either end of a file, by which one is known: its header is there, and loading it verifies its
checksum."""


@dataclass(frozen=True)
class FileFacts:
    """What a file is known by on every machine."""

    path: Path
    """Where it is on the machine that has it."""
    nbytes: int
    digest: str
    """Of both ends."""

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Read them.

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
        """Whether this file is there too."""
        try:
            return FileFacts.of(path) == FileFacts(path, self.nbytes, self.digest)
        except OSError:
            return False


def directory_here(files: Sequence[FileFacts]) -> Path:
    """Where the files of a workload are here, or will be: where they were, or in the cache.

    Raises:
        DatasetError: the cache cannot be written to.
    """
    (home,) = {facts.path.parent for facts in files}
    if all(facts.is_at(facts.path) for facts in files):
        return home
    copies = cache.directory_of(str(home), cache.user_cache())
    return cache.version(copies, *(facts.digest.encode() for facts in files))


def lacking(files: Sequence[FileFacts], directory: Path) -> list[FileFacts]:
    """Those that are not in a directory of `directory_here`."""
    return [facts for facts in files if not facts.is_at(directory / facts.path.name)]


def receive(facts: FileFacts, content: bytes, directory: Path) -> None:
    """Write a file into a directory of `directory_here`.

    Raises:
        DatasetError: there is no room for it, or it cannot be written.
    """
    cache.require_room(directory, facts.nbytes, facts.path.name)
    with cache.placed(directory / facts.path.name) as temporary, cache.writing(directory):
        temporary.write_bytes(content)
