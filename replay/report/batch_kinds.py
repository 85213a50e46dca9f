"""Kinds of an inference engine's batches, which share a table although no two are alike.

Batches that decode are told apart by the number of sequences and the keys of a sequence, chunks of
prompts (prefill and extend) by their queries and keys, and mixed batches by sequences and queries.
Figures share a kind between two powers of `FACTOR`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from capture.call.batch import BatchSize
from replay.rows.row import CallFacts

FACTOR = 4
"""Ratio of the largest to the smallest figure of a kind."""


class Figure(NamedTuple):
    """Figure of a batch by which kinds are told apart."""

    number: int
    unit: str

    @property
    def step(self) -> int:
        """Index of the range of figures that share a kind: 1, 2 to 4, 5 to 16, and so on."""
        return math.ceil(math.log(max(self.number, 1), FACTOR) - 1e-9)


def figures(phase: str, batch: BatchSize) -> tuple[Figure, Figure]:
    """Return the figures by which batches of a phase are told apart."""
    sequences, queries = Figure(batch.sequences, "sequences"), Figure(batch.queries, "queries")
    keys = Figure(round(batch.keys / max(batch.sequences, 1)), "keys")
    if phase == "decode":
        return sequences, keys
    return (sequences, queries) if phase == "mixed" else (queries, keys)


def kind(call: CallFacts) -> tuple[int, ...]:
    """Return a key that calls of one kind of batch share; empty for other calls."""
    if call.batch is None:
        return ()
    return tuple(figure.step for figure in figures(call.phase, call.batch))


def label(calls: Iterable[CallFacts]) -> str:
    """Return the ranges of a kind's figures: `12…16 sequences × 1,030…2,000 keys`.

    The keys are the mean of the sequences, the queries their sum.
    """
    columns = zip(*(figures(call.phase, call.batch) for call in calls if call.batch), strict=True)
    return " × ".join(_range(column) for column in columns)


def _range(column: tuple[Figure, ...]) -> str:
    low, high = min(column).number, max(column).number
    unit = column[0].unit
    if high == 1:
        return f"1 {_ONE[unit]}"
    return f"{low:,} {unit}" if low == high else f"{low:,}…{high:,} {unit}"


_ONE = {"sequences": "sequence", "queries": "query", "keys": "key"}
