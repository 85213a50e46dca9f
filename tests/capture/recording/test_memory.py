"""Memory in which recorded calls wait is used again, and released at the end."""

from capture.recording.memory import BufferPool

LARGE = 1 << 20


def test_closed_pool_holds_nothing() -> None:
    """A closed pool keeps neither its free memory nor memory that comes back later."""
    pool = BufferPool(4 * LARGE)
    free, taken, small = map(pool.allocate, (LARGE, 2 * LARGE, 7))
    pool.give_back(free)
    assert pool.nbytes == 3 * LARGE + 7
    pool.close()
    assert pool.nbytes == 2 * LARGE + 7
    pool.give_back(taken)
    pool.give_back(small)
    assert pool.nbytes == 0


def test_memory_is_used_again_until_another_size_needs_it() -> None:
    pool = BufferPool(2 * LARGE)
    first = pool.allocate(LARGE)
    pool.give_back(first)
    assert pool.allocate(LARGE) is first
    pool.give_back(first)
    pool.allocate(2 * LARGE)
    assert pool.nbytes == 2 * LARGE
