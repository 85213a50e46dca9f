"""Checksums of files, computed by several threads.

`sha256-4MiB:HEX` is the SHA-256 of the SHA-256 digests of a file's chunks of 4 MiB (the last chunk
may be shorter), one after the other: chunks can be hashed in any order and at the same time.
`sha256:HEX`, from version 1 of the format, is the SHA-256 of the whole file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK = 4 << 20
"""Bytes per chunk."""

CHUNKED, WHOLE = "sha256-4MiB", "sha256"
_THREADS = 8


class Checksum:
    """The checksum of a file whose content arrives in pieces; a context manager.

    Threads hash while the caller goes on, so a piece must stay alive and unchanged until `result`.

    Example:
        >>> with Checksum() as checksum:
        ...     for piece in pieces:
        ...         checksum.update(piece)
        ...         file.write(piece)
        ...     print(checksum.result())
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._digests: list[Future[bytes]] = []
        self._pending: list[memoryview] = []
        self._pending_bytes = 0

    def __enter__(self) -> Checksum:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def update(self, piece: Any) -> None:
        """Append a piece: bytes, or anything else with a one-dimensional buffer of bytes."""
        view = memoryview(piece)
        while view.nbytes:
            taken = view[: CHUNK - self._pending_bytes]
            view = view[taken.nbytes :]
            self._pending.append(taken)
            self._pending_bytes += taken.nbytes
            if self._pending_bytes == CHUNK:
                self._pool = self._pool or ThreadPoolExecutor(threads())
                self._digests.append(self._pool.submit(digest, self._pending))
                self._pending, self._pending_bytes = [], 0

    def result(self) -> str:
        """Return the checksum of all pieces; `update` must not follow."""
        last = [digest(self._pending)] if self._pending else []
        return combined([*(each.result() for each in self._digests), *last])


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
