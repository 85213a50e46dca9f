"""A count-based baseline: an interpolated, modified Kneser–Ney model over token ids.

Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1998, section 3
(discounts D₁, D₂, D₃₊ estimated from the counts of counts, per order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class _Order:
    """One order: sorted n-grams with counts; sorted contexts with totals and held-back mass."""

    grams: Ids
    counts: Values
    contexts: Ids
    totals: Values
    held_back: Values
    discounts: Values


class KneserNey:
    """Probabilities of the next token, given ``order - 1`` preceding tokens.

    Args:
        tokens: (N,) ids below ``vocabulary``.

    Raises:
        ValueError: ``vocabulary`` is too large to pack ``order`` ids into 63 bits.

    Example:
        >>> KneserNey(tokens, vocabulary=2048).perplexity(held_out)
    """

    def __init__(self, tokens: Ids, *, vocabulary: int, order: int = 5) -> None:
        self.vocabulary = vocabulary
        self.order = order
        self._bits = max(1, (vocabulary - 1).bit_length())
        if self._bits * order > 63:
            raise ValueError(f"{order} ids below {vocabulary} do not fit into 63 bits")
        self._orders: list[_Order] = []
        grams, counts = np.unique(self._pack(tokens, order), return_counts=True)
        for length in range(order, 0, -1):
            self._orders.append(self._estimate(grams, counts.astype(np.float64)))
            # Below the highest order, a gram counts once for each token that precedes it.
            without_first = grams & ((1 << (self._bits * (length - 1))) - 1)
            grams, counts = np.unique(without_first, return_counts=True)
        self._orders.reverse()

    def perplexity(self, tokens: Ids) -> float:
        """Return the perplexity of all tokens after the first ``order - 1``, given previous
        tokens."""
        return math.exp(-float(np.log(self.probabilities(tokens)).mean()))

    def probabilities(self, tokens: Ids) -> Values:
        """Return (N - order + 1,) probabilities of all tokens but the first ``order - 1``."""
        grams = self._pack(tokens, self.order)
        probability: Values = np.full(len(grams), 1 / self.vocabulary)
        for length, order in enumerate(self._orders, start=1):
            ending = grams & ((1 << (self._bits * length)) - 1)
            counts = _look_up(order.grams, order.counts, ending)
            context = ending >> self._bits
            totals = _look_up(order.contexts, order.totals, context)
            held_back = _look_up(order.contexts, order.held_back, context)
            known = totals > 0
            discounted = np.maximum(counts - order.discounts[_class(counts)], 0)
            # An unseen context leaves all its probability to the shorter context.
            own = np.divide(discounted, totals, out=np.zeros_like(totals), where=known)
            back = np.divide(held_back, totals, out=np.ones_like(totals), where=known)
            probability = own + back * probability
        return probability

    def _pack(self, tokens: Ids, length: int) -> Ids:
        """Pack every run of ``length`` ids into one integer, the last id in the lowest bits."""
        count = len(tokens) - length + 1
        packed = np.zeros(count, dtype=np.int64)
        for start in range(length):
            packed = (packed << self._bits) | tokens[start : start + count].astype(np.int64)
        return packed

    def _estimate(self, grams: Ids, counts: Values) -> _Order:
        discounts = _discounts(counts)
        contexts, first = np.unique(grams >> self._bits, return_index=True)
        return _Order(
            grams=grams,
            counts=counts,
            contexts=contexts,
            totals=np.add.reduceat(counts, first),
            held_back=np.add.reduceat(discounts[_class(counts)], first),
            discounts=discounts,
        )


def _class(counts: Values) -> Ids:
    return np.minimum(counts, 3).astype(np.int64)


def _discounts(counts: Values) -> Values:
    """Compute D₀ = 0, D₁, D₂, D₃₊ from how many grams occur once, twice, three and four times."""
    once, twice, thrice, four = (max(1, int((counts == number).sum())) for number in (1, 2, 3, 4))
    share = once / (once + 2 * twice)
    raw = [
        0.0,
        1 - 2 * share * twice / once,
        2 - 3 * share * thrice / twice,
        3 - 4 * share * four / thrice,
    ]
    return np.clip(raw, [0.0, 0.05, 0.1, 0.1], [0.0, 0.95, 1.9, 2.9])


def _look_up(keys: Ids, values: Values, wanted: Ids) -> Values:
    """Return the value of each wanted key, 0 if it is unknown; ``keys`` are sorted."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)
