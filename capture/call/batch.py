"""Batches of an inference engine: packed sequences whose keys lie in pages.

A step of an engine processes one batch. The tensors of a batch are large, but its time depends
almost only on the lengths of its sequences, which are a few small numbers. A recording therefore
keeps the lengths of the batches whose tensors it does not store. Does not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from capture.call.attention_variant import CallOptions


class BatchSize(NamedTuple):
    """Figures of a batch that determine the time of its attention."""

    sequences: Annotated[int, "number of sequences"]
    queries: Annotated[int, "number of queries, over all sequences"]
    keys: Annotated[int, "number of keys that a sequence's queries see, over all sequences"]
    longest: Annotated[int, "largest number of these keys in a sequence"]
    pairs: Annotated[int, "number of (query, key) pairs, as if no query saw keys after its own"]

    def distance(self, other: BatchSize) -> float:
        """Return the largest difference between the logarithms of two batches' figures."""
        return max(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(self, other, strict=True))


class Batch(NamedTuple):
    """Lengths of the sequences of a packed call over pages."""

    queries: tuple[int, ...]
    """Number of queries of each sequence."""
    keys: tuple[int, ...]
    """Number of keys that these queries see; a window hides the others."""

    @classmethod
    def of(cls, call: CallOptions) -> Batch | None:
        """Return the lengths of a call; None unless it is packed over pages. Waits for the GPU."""
        if not is_batch(call):
            return None
        assert call.cu_seqlens_q is not None
        assert call.seqused_k is not None
        queries, keys = call.cu_seqlens_q.diff().tolist(), call.seqused_k.clamp(min=0).tolist()
        left, _ = call.variant.window
        if left is not None:
            pairs = zip(queries, keys, strict=True)
            keys = [min(length, left + query) for query, length in pairs]
        return cls(tuple(queries), tuple(keys))

    @property
    def size(self) -> BatchSize:
        """Figures of the batch."""
        pairs = sum(
            query * keys - query * (query - 1) // 2
            for query, keys in zip(self.queries, self.keys, strict=True)
        )
        return BatchSize(
            len(self.queries), sum(self.queries), sum(self.keys), max(self.keys, default=0), pairs
        )


def is_batch(call: CallOptions) -> bool:
    """Return whether a call is packed over pages, as the batches of inference engines."""
    starts, lengths = call.cu_seqlens_q, call.seqused_k
    if starts is None or lengths is None or call.page_table is None:
        return False
    return starts.shape[0] == lengths.shape[0] + 1
