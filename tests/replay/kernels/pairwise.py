"""Choice of test cases in which every pair of values occurs, where all cases are too many.

Most defects need one factor, or two that meet (a causal call in other strides); testing every pair
finds them at a fraction of the product's cost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterable

Case = tuple[Hashable, ...]
"""One value of each factor."""
Pair = tuple[int, Hashable, int, Hashable]


def pairs(case: Case) -> set[Pair]:
    """The values that meet in a case, each with the number of its factor."""
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Some of the cases, in their order, with every pair of values that occurs in all of them.

    Greedy, and the same each time: first cases with as many new pairs as a case can have, then the
    others. Cases are visited in shuffled order, so that whatever no pair decides is spread over all
    values.
    """
    listed = list(cases)
    shuffled = random.Random(0).sample(listed, len(listed))
    most = max((len(pairs(case)) for case in listed), default=0)
    met: set[Pair] = set()
    chosen: set[Case] = set()
    for gain in range(most, 0, -1):
        for case in shuffled:
            if len(pairs(case) - met) >= gain:
                met |= pairs(case)
                chosen.add(case)
    return [case for case in listed if case in chosen]
