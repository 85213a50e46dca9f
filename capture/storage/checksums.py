"""Computes checksums of files with several threads.

`sha256-4MiB:HEX` is the SHA-256 of the concatenated SHA-256 digests of a file's chunks of 4 MiB.
The last chunk may be shorter. Chunks can be hashed in any order and at the same time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from capture.storage import plain_files

CHUNK = 4 << 20
"""Bytes per chunk."""

PATTERN = re.compile("sha256-4MiB:[0-9a-f]{64}")

_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def chunked(pieces: Iterable[Any]) -> list[list[memoryview]]:
    """Divide a file's content, given as pieces of memory, into chunks."""
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
    """Compute the checksum of a file."""
    with plain_files.opened(path) as descriptor, plain_files.refusing(path):

        def digest_at(offset: int) -> bytes:
            return digest([os.pread(descriptor, CHUNK, offset)])

        return combined(in_threads(digest_at, range(0, os.fstat(descriptor).st_size, CHUNK)))


def digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the SHA-256 of concatenated pieces."""
    chunk = hashlib.sha256()
    for piece in pieces:
        chunk.update(piece)  # releases the interpreter's lock
    return chunk.digest()


def combined(digests: Iterable[bytes]) -> str:
    """Return a file's checksum, given the digests of its chunks in order."""
    return f"sha256-4MiB:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `work` for all items; use only this thread if no other can start.

    Args:
        work: function of one item. `work` may be called twice for the same item.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(_THREADS, available or 1)) as pool:
        try:
            results = pool.map(work, items)
        except RuntimeError:  # the interpreter is ending, or the system has no more threads
            return [work(item) for item in items]
        return list(results)
