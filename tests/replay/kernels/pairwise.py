"""Choice of test cases that covers every pair of values when there are too many cases.

Most defects depend on one or two factors, such as a causal call with unusual strides. Testing every
pair finds them at a fraction of the cost of all combinations.
"""

import itertools
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

Case = tuple[Hashable, ...]
"""Test case: one value for each factor."""
Pair = tuple[int, Hashable, int, Hashable]


def pairs(case: Case) -> set[Pair]:
    """Return all pairs of a case's values; each value comes with the number of its factor."""
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Return some cases that cover every pair of values of all cases, in the original order.

    The choice is greedy and deterministic: cases with the maximum number of new pairs come first.
    Cases are visited in shuffled order, so that the choice is spread over all values.
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


def each_pair(
    *fixtures: str, **factors: Iterable[Hashable]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a test on cases which cover every pair of values.

    Args:
        fixtures: the factors whose values are parameters of the fixtures of the same names.
        factors: the values of every factor.
    """
    cases = pairwise(itertools.product(*factors.values()))

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        marked = pytest.mark.parametrize(tuple(factors), cases, indirect=fixtures, ids=str)(test)
        return pytest.mark.usefixtures(*fixtures)(marked) if fixtures else marked

    return decorate
