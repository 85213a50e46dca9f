"""Fewer cases than the product has, and no pair less."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.replay.kernels.kinds import KINDS, LAYOUTS, VARIANTS, cases, every_case
from tests.replay.kernels.pairwise import Case, Pair, pairs, pairwise

FACTORS = (("a", "b", "c"), ("1", "2", "3"), ("x", "y", "z"))


def met(cases: list[Case]) -> set[Pair]:
    return set().union(*map(pairs, cases))


def test_pairs() -> None:
    assert pairs(("a", "1", "a")) == {(0, "a", 1, "1"), (0, "a", 2, "a"), (1, "1", 2, "a")}


def test_a_product() -> None:
    product = list(itertools.product(*FACTORS))
    chosen = pairwise(product)
    assert met(chosen) == met(product)
    assert 9 <= len(chosen) <= 13, "9 pairs of two factors at least, of 27 cases"
    assert chosen == pairwise(product)


@given(st.lists(st.tuples(*map(st.sampled_from, FACTORS)), unique=True))
def test_any_part_of_a_product(some: list[Case]) -> None:
    chosen = pairwise(some)
    assert met(chosen) == met(some)
    assert chosen == [case for case in some if case in chosen]


def test_chosen_cases_cover_all_pairs() -> None:
    chosen, every = cases(), every_case()
    assert set(chosen) <= set(every)
    assert met(chosen) == met(every)
    assert len(chosen) < 0.4 * len(every)
    assert {case[2] for case in every} == set(KINDS)
    assert {case[3] for case in every} == set(LAYOUTS)
    assert {(case[0], case[1]) for case in every} >= {
        (name, variant) for name, variants in VARIANTS.items() for variant in variants
    }
