"""Choices of one option for each cell, compared with every possible choice."""

import itertools
import math
import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.plan import knapsack
from replay.plan.knapsack import CLOSE, WIDTH, Option, solve

FIGURES = st.sampled_from([*map(float, range(40)), math.nan, math.inf])
CELLS = st.lists(
    st.lists(st.builds(Option, st.just("kernel"), FIGURES, FIGURES), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=400)
@given(CELLS, st.integers(0, 100), st.sampled_from([WIDTH, 1]))
def test_choice_is_close_to_the_best_of_all(
    cells: list[list[Option]], budget: float, width: int
) -> None:
    """A narrow search may miss the best choice, but its bound holds."""
    totals = [
        math.fsum(option.ms for option in choice)
        for choice in itertools.product(*cells)
        if sum(option.energy for option in choice) <= budget
    ]
    best = min((total for total in totals if math.isfinite(total)), default=None)
    with patch.object(knapsack, "WIDTH", width):
        found = solve(cells, budget)
    chosen = [cell[index] for cell, index in zip(cells, found.choices, strict=True)]
    assert found.is_feasible == (best is not None)
    if best is None:
        assert chosen == [cell[0] for cell in cells]
        return
    assert found.energy == sum(option.energy for option in chosen) <= budget
    assert found.objective == sum(option.ms for option in chosen)
    assert found.bound - 1e-9 <= best <= found.objective + 1e-9
    if width == WIDTH:
        assert found.objective <= best * (1 + CLOSE) + 1e-9
        assert found.gap <= CLOSE + 1e-12


@pytest.mark.parametrize(("number", "kernels"), [(36, 4), (200, 4), (3000, 5)])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_gap_of_a_model_is_small(number: int, kernels: int, share: float) -> None:
    draw = random.Random(number)
    cells = [
        [Option("baseline", 10.0, 1e-6)]
        + [Option("k", draw.uniform(5, 11), 10 ** draw.uniform(-5, -2)) for _ in range(kernels - 1)]
        for _ in range(number)
    ]
    budget = share * math.fsum(max(option.energy for option in cell) for cell in cells)
    found = solve(cells, budget)
    assert found.energy <= budget * (1 + 1e-11)
    assert 0 <= found.gap <= 1e-3


def test_budget_may_equal_the_sum_in_any_order() -> None:
    cells = [[Option("a", 2.0, 0.0), Option("b", 1.0, energy)] for energy in (0.1, 0.2, 0.3)]
    assert solve(cells, 0.1 + 0.2 + 0.3).choices == solve(cells, 0.3 + 0.2 + 0.1).choices
    assert solve(cells, 0.3 + 0.2 + 0.1).objective == 3
