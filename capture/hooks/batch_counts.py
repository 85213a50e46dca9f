"""Lengths of an inference engine's batches, so that few stored batches can predict a whole run.

As JSON this is a list of `{"phase", "signature", "queries", "keys", "calls"}`: the numbers of
queries and of visible keys of each sequence, in order, and the number of calls with these lengths,
one for each layer and step. `signature` is an index into the census's list of signatures.

The lists are bounded: where they would exceed `MOST_LENGTHS`, every second batch is left out, and
from then on every second new one is, then three of four, and so on. The batches that remain are an
even sample, so their calls may be fewer than the calls that the census's rows count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from capture.call.batch import Batch

MOST_LENGTHS = 1 << 19
"""Largest number of lengths that a census keeps: those of 4,000 batches of 64 sequences."""

Signature = TypeVar("Signature")


class BatchCounts(Generic[Signature]):
    """Call counts by phase × signature × lengths.

    Args:
        most: largest number of lengths.
    """

    def __init__(self, most: int = MOST_LENGTHS) -> None:
        self._most = most
        self._calls: dict[tuple[str, Signature, Batch], int] = {}
        self._lengths = 0
        """Number of lengths in the keys of `_calls`."""
        self._seen, self._stride = 0, 1
        self._left_out: dict[tuple[str, Signature], Batch] = {}
        """Latest batch that was left out, because the layers of a step have the same one."""

    def add(self, phase: str, signature: Signature, batch: Batch) -> None:
        """Count a call, unless its batch is left out of the sample."""
        key = phase, signature, batch
        if key in self._calls:
            self._calls[key] += 1
        elif self._left_out.get(key[:2]) != batch:
            self._seen += 1
            if self._seen % self._stride == 0:
                self._calls[key] = 1
                self._lengths += 2 * len(batch.keys)
                while self._lengths > self._most and len(self._calls) > 1:
                    self._halve()
            if key not in self._calls:
                self._left_out[key[:2]] = batch

    def _halve(self) -> None:
        self._calls = dict(list(self._calls.items())[1::2])
        self._lengths = sum(2 * len(batch.keys) for _, _, batch in self._calls)
        self._stride *= 2

    def to_json(self, signatures: Mapping[Signature, int]) -> list[dict[str, Any]]:
        """Return the counts of calls with one of the signatures, which are mapped to indices."""
        return [
            {
                "phase": phase,
                "signature": signatures[signature],
                "queries": list(batch.queries),
                "keys": list(batch.keys),
                "calls": calls,
            }
            for (phase, signature, batch), calls in self._calls.items()
            if signature in signatures
        ]
