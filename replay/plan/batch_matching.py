"""Time of an inference engine's batches, from the replayed ones that represent them.

A batch takes the time of the nearest replayed batch of its phase (`BatchSize.distance`), times the
ratio of their work. The work is the number of (query, key) pairs, plus that of keys times
`PAIRS_PER_KEY`, because a kernel computes with each pair and reads each key once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from capture.call.batch import Batch, BatchSize
from replay.rows.row import CallFacts

PAIRS_PER_KEY = 50
"""Number of pairs that take the time of reading a key and its value.

An H100 does 600·10¹² operations and reads 3·10¹² bytes per second. A pair takes 4·D operations in
each query head, and a key 4·D bytes in each key head, so that the number is 200 · Hkv / Hq; this is
for four query heads to a key head. It matters little, because only similar batches are compared.
"""


def work(size: BatchSize) -> float:
    """Return a number proportional to the expected time of a batch."""
    return size.pairs + PAIRS_PER_KEY * size.keys


def weights(batches: Mapping[BatchSize, float], chosen: Sequence[BatchSize]) -> list[float]:
    """Return the factors of the chosen batches' times in the total time of all batches.

    Args:
        batches: number of calls of each batch.
        chosen: figures of the batches whose time is known.
    """
    found = [0.0] * len(chosen)
    for size, calls in batches.items():
        at = min(range(len(chosen)), key=lambda index: size.distance(chosen[index]))
        found[at] += calls * work(size) / max(work(chosen[at]), 1.0)
    return found


class BatchShares:
    """Shares of replayed batches in the time of a census's batches."""

    def __init__(self, census: Mapping[str, Any]) -> None:
        self._batches: dict[tuple[str, int], dict[BatchSize, float]] = {}
        for batch in census.get("batches", ()):
            size = Batch(tuple(batch["queries"]), tuple(batch["keys"])).size
            counts = self._batches.setdefault((batch["phase"], batch["signature"]), {})
            counts[size] = counts.get(size, 0.0) + batch["calls"]
        self._known: dict[tuple[object, ...], dict[str, float]] = {}

    def shares(
        self, phase: str, signature: int, replayed: Sequence[CallFacts]
    ) -> Mapping[str, float]:
        """Return the factors of the calls' times in the mean time of a batch.

        Without recorded lengths, as in old recordings, the replayed calls have equal shares.
        """
        key = phase, signature, *(call.name for call in replayed)
        if key not in self._known:
            sizes = {call.name: call.batch for call in replayed if call.batch is not None}
            counts = self._batches.get((phase, signature)) or dict.fromkeys(sizes.values(), 1.0)
            total = math.fsum(counts.values())
            found = zip(sizes, weights(counts, list(sizes.values())), strict=True)
            self._known[key] = {name: weight / total for name, weight in found if weight}
        return self._known[key]
