"""Buffers in which recorded calls wait, and the memory that the buffers take."""

from __future__ import annotations

from capture.recording.memory import BufferPool

LARGE = 1 << 20


def test_closed_pool_holds_nothing() -> None:
    """A closed pool keeps neither its free buffers nor buffers that come back later."""
    pool = BufferPool()
    free, _taken, _small = (
        pool.take(nbytes, pinned=False, limit=4 * LARGE) for nbytes in (LARGE, 2 * LARGE, 7)
    )
    pool.give_back(free)
    assert pool.nbytes == 3 * LARGE + 7
    pool.close()
    assert pool.nbytes == 0
    assert pool.take(LARGE, pinned=False, limit=LARGE) is not free


def test_buffer_is_used_again_until_another_size_needs_its_memory() -> None:
    pool = BufferPool()
    first = pool.take(LARGE, pinned=False, limit=2 * LARGE)
    pool.give_back(first)
    assert pool.take(LARGE, pinned=False, limit=2 * LARGE) is first
    pool.give_back(first)
    pool.take(2 * LARGE, pinned=False, limit=2 * LARGE)
    assert pool.nbytes == 2 * LARGE
