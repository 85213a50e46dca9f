"""Processes the chunks of a file with several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from capture.storage import checksums

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `work` for all items; use only this thread if no other can start.

    Args:
        work: function of one item. It may be called twice for the same item.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(checksums.threads()) as pool:
        try:
            results = pool.map(work, items)
        except RuntimeError:  # the interpreter is ending, or the system has no more threads
            return [work(item) for item in items]
        return list(results)
