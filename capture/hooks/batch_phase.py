"""Phase of a batch of requests, which a server's step computes together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat

CACHING = ("prefill", "extend", "decode", "mixed")
"""Phases of a language model that keeps keys and values in a cache."""


class _Prepared(threading.local):
    phase: str | None = None
    """Phase of the batch that the engine prepared last in this thread; None outside of engines."""


prepared = _Prepared()
"""Batch of an engine, whose model receives no argument that tells the phase of its next forward."""


def phase_of_lengths(
    queries: Sequence[int],
    keys: Sequence[int] | None,
    reads_prompt: Sequence[bool] | None = None,
) -> str:
    """Return the phase of a batch: `prefill`, `extend` or `decode`; `mixed` if requests differ.

    A request that reads its prompt is in `prefill`, or in `extend` if the cache already holds a
    part of it.

    Args:
        queries: number of new tokens of each request; requests without new tokens are padding.
        keys: number of keys of each request, with the new ones; None if they are unknown.
        reads_prompt: true for requests that read their prompt (default: those with several new
            tokens or without earlier ones, although one new token may also end a prompt).
    """
    known = repeat(None) if reads_prompt is None else reads_prompt
    lengths = repeat(None) if keys is None else keys
    phases = {
        _phase(query, length, reads)
        for query, length, reads in zip(queries, lengths, known, strict=False)
        if query
    }
    return phases.pop() if len(phases) == 1 else "mixed"


def _phase(query: int, length: int | None, reads_prompt: bool | None) -> str:
    if reads_prompt is None:
        reads_prompt = query > 1 or length == query
    if not reads_prompt:
        return "decode"
    return "extend" if length is not None and length > query else "prefill"
