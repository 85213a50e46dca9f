"""Checksums of files, computed by several threads.

`sha256-4MiB:HEX` is the SHA-256 of the SHA-256 digests of a file's chunks of 4 MiB (the last chunk
may be shorter), one after the other: chunks can be hashed in any order and at the same time.
`sha256:HEX`, from version 1 of the format, is the SHA-256 of the whole file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK = 4 << 20
"""Bytes per chunk."""

CHUNKED, WHOLE = "sha256-4MiB", "sha256"
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
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def digest_at(offset: int) -> bytes:
            return digest([os.pread(file.fileno(), CHUNK, offset)])

        offsets = range(0, size, CHUNK)
        if len(offsets) < 2:
            return combined(map(digest_at, offsets))
        with ThreadPoolExecutor(threads()) as pool:
            return combined(pool.map(digest_at, offsets))


def matches(path: Path, recorded: str) -> bool:
    """Whether a file has a recorded checksum, of either kind.

    Raises:
        OSError: it cannot be read.
    """
    if recorded.startswith(f"{CHUNKED}:"):
        return checksum(path) == recorded
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            whole.update(block)
    return f"{WHOLE}:{whole.hexdigest()}" == recorded


def digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the SHA-256 of one chunk, given in pieces."""
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
