"""Checksums of files, computed by several threads.

`sha256-4MiB:HEX` is the SHA-256 of the SHA-256 digests of a file's chunks of 4 MiB (the last chunk
may be shorter), one after the other: chunks can be hashed in any order and at the same time.
`sha256:HEX`, from version 1 of the format, is the SHA-256 of the whole file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from capture.storage import plain_files

CHUNK = 4 << 20
"""Bytes per chunk."""

CHUNKED, WHOLE = "sha256-4MiB", "sha256"
PATTERN = re.compile(f"({CHUNKED}|{WHOLE}):[0-9a-f]{{64}}")

_THREADS = 8


def chunked(pieces: Iterable[Any]) -> list[list[memoryview]]:
    """Cut a file's content, given in pieces with a buffer of bytes, into chunks."""
    chunks: list[list[memoryview]] = []
    room = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view.nbytes:
            if not room:
                chunks.append([])
                room = CHUNK
            taken = view[:room]
            chunks[-1].append(taken)
            view, room = view[taken.nbytes :], room - taken.nbytes
    return chunks


def checksum(path: Path) -> str:
    """Compute the chunked checksum of a file.

    Raises:
        DatasetError: it is missing, not a regular file, or cannot be read.
    """
    with plain_files.opened(path) as descriptor, plain_files.refusing(path):

        def digest_at(offset: int) -> bytes:
            return digest([os.pread(descriptor, CHUNK, offset)])

        offsets = range(0, os.fstat(descriptor).st_size, CHUNK)
        if len(offsets) < 2:
            return combined(map(digest_at, offsets))
        with ThreadPoolExecutor(threads()) as pool:
            return combined(pool.map(digest_at, offsets))


def matches(path: Path, recorded: str) -> bool:
    """Whether a file has this checksum, of either kind.

    Raises:
        DatasetError: it is missing, not a regular file, or cannot be read.
    """
    if recorded.startswith(f"{CHUNKED}:"):
        return checksum(path) == recorded
    with plain_files.opened(path) as descriptor, plain_files.refusing(path):
        offsets = range(0, os.fstat(descriptor).st_size, CHUNK)
        return whole(os.pread(descriptor, CHUNK, offset) for offset in offsets) == recorded


def whole(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of version 1 of the format."""
    return f"{WHOLE}:{digest(pieces).hex()}"


def digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the SHA-256 of pieces, one after the other."""
    chunk = hashlib.sha256()
    for piece in pieces:
        chunk.update(piece)  # without the interpreter's lock
    return chunk.digest()


def combined(digests: Iterable[bytes]) -> str:
    """Return a file's checksum, given the digests of its chunks in order."""
    return f"{CHUNKED}:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def threads() -> int:
    """How many threads to read and hash a file with."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(_THREADS, available or 1)
