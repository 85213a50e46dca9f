"""Crossovers are claimed only between lengths whose intervals lie on different sides of 1."""

from collections.abc import Sequence

import pytest

from capture.call.shape import Shape
from replay.report.crossover import crossover_lines
from replay.report.matrix import matrix
from replay.rows.row import Row
from tests.replay.report.sweep_rows import LENGTHS, Ratio, call, sweep
from tests.replay.report.test_matrix_table import screen


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        # Halfway between two lengths, by their logarithms: 1448; after a quarter: 609.
        ((0.5, 0.8, 1.25, 1.5), "from about 1,400 keys on (slower at 1,024, faster at 2,048)"),
        ((0.9, 1.372), "from about 610 keys on (slower at 512, faster at 1,024)"),
        ((0.8, 1.25, 1.5, 1.0), "from about 720 to 2,048 keys (slower at 512, faster at 1,024)"),
        ((2.0, 1.25, 0.8), "up to about 1,400 keys (faster at 1,024, slower at 2,048)"),
        ((1.0, 1.25, 0.8), "from 1,024 to about 1,400 keys (faster at 1,024, slower at 2,048)"),
        ((0.5, 1.0, 1.25), "from 2,048 keys on (slower at 512, faster at 2,048, neither between)"),
        ((0.8, "unsupported", 1.25, 1.0), "at 2,048 keys (slower at 512, faster at 2,048, neither"),
    ],
)
def test_only_change_of_order_is_a_crossover(ratios: Sequence[Ratio], sentence: str) -> None:
    assert f"mine: faster {sentence}" in screen(sweep(ratios), 120)


@pytest.mark.parametrize(
    ("ratios", "noise", "reason"),
    [
        ((1.2, 1.3, 1.4), 0.001, ""),
        ((0.8, 1.0), 0.001, ""),
        ((0.8, 1.25, 0.8), 0.001, ""),  # two changes
        ((0.95, 1.05), 0.2, ": undecided at 2 of 2 lengths"),  # the intervals include 1
        (
            (0.5, "inaccurate", 2.0),
            0.001,
            ": no kernel but the baseline ran correctly at all of them",
        ),
    ],
)
def test_other_orders_have_no_crossover(ratios: Sequence[Ratio], noise: float, reason: str) -> None:
    (line,) = crossover_lines(matrix(sweep(ratios, noise)))
    assert line == f"no crossover shown from 512 to {LENGTHS[len(ratios) - 1]:,} keys{reason}"


def test_sweeps_hold_each_call_and_are_named_by_what_differs() -> None:
    def named(*parts: list[Row]) -> list[str]:
        lines = crossover_lines(matrix([row for part in parts for row in part]))
        return [line.partition(" (slower")[0] for line in lines]

    prefill, decode = sweep((0.8, 1.25)), sweep((0.5, 2.0), q=16)
    found = "mine: faster from about 720 keys on"
    assert named(prefill, decode) == [found, f"Sq 16: {found}"]
    assert named(prefill, sweep((0.8, 1.25), dim=128)) == [
        f"1×8×S×64: {found}",
        f"1×8×S×128: {found}",
    ]
    fixed = [
        call(str(q), ratio, Shape(1, 8, 8, q, 64, 64, 64))
        for q, ratio in ((64, 0.8), (128, 1.25), (256, 1.5))
    ]
    assert named(*fixed) == ["mine: faster from about 91 queries on"]
    assert named(sweep((0.5,))) == []
