"""Choice of the batches of an inference engine whose tensors represent all of its batches.

The chosen batches differ as much as possible in their figures (`capture.call.batch.BatchSize`): of
the two nearest ones, one is dropped, until few enough remain. A batch thus has a chosen one near
it, of whose time its own can be computed. Equal batches, such as those of two layers in one step,
are spread over the layers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from capture.call.batch import BatchSize


class Candidate(NamedTuple):
    """Batch that may be chosen."""

    size: BatchSize
    layer: int = 0


def redundant(candidates: Sequence[Candidate]) -> int:
    """Return the index of the batch to drop from two or more: one of the two nearest.

    If the last one, which is new, is one of the two, it is dropped, because a kept batch that
    followed slowly growing batches would leave none behind. Otherwise the one that is nearer to a
    third batch is dropped. Of equal batches, the one in the layer with more batches is dropped.
    """
    first, second = min(
        itertools.combinations(range(len(candidates)), 2),
        key=lambda pair: _distance(candidates[pair[0]].size, candidates[pair[1]].size),
    )
    pair = candidates[first], candidates[second]
    if pair[0].size == pair[1].size:
        of_layer = Counter(each.layer for each in candidates)
        return first if of_layer[pair[0].layer] > of_layer[pair[1].layer] else second
    if second == len(candidates) - 1:
        return second
    others = [each for at, each in enumerate(candidates) if at not in (first, second)]
    gaps = [min((_distance(each.size, one.size) for one in others), default=0.0) for each in pair]
    return first if gaps[0] < gaps[1] else second


@functools.lru_cache(maxsize=1 << 14)
def _distance(size: BatchSize, other: BatchSize) -> float:
    return size.distance(other)
