"""Matrix of kernels and kinds of call: the change of speed, and what broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replay.comparison.comparison import Comparison, Pair
from replay.comparison.speed_change import SpeedChange, judge, over_calls
from replay.report.groups import Group, group_rows
from replay.rows.row import KernelId
from replay.timing.statistics import MedianInterval, percentile

Change = Literal[
    "broken",
    "now wrong",
    "wrong",
    "cannot run",
    "mended",
    "slower",
    "faster",
    "same",
    "undecided",
    "reference kernel",
    "not timed",
]


@dataclass(frozen=True)
class ChangeCell:
    """Change of one kernel in one kind of call."""

    change: Change
    speed: SpeedChange | None = None
    """Change over the calls of the kind; None if the kernel was not timed in both runs."""
    reason: str = ""
    """Status of a broken kernel, such as `crash`."""


@dataclass(frozen=True)
class ChangeMatrix:
    """Cells of the kernels that ran, in all kinds of call."""

    kinds: list[Group]
    kernels: list[KernelId]
    cells: dict[tuple[KernelId, int], ChangeCell]
    """Cells by kernel and index of the kind; a kernel without a row in a kind has none."""


def change_matrix(comparison: Comparison) -> ChangeMatrix:
    """Summarise a comparison by kernel and kind of call."""
    kernels = [each.kernel for each in comparison.kernels]
    pair_of = {id(pair.after): pair for pair in comparison.pairs}
    kinds = group_rows([pair.after for pair in comparison.pairs])
    cells = {
        (kernel, at): _cell([pair_of[id(row)] for row in kind.rows[kernel]], comparison)
        for at, kind in enumerate(kinds)
        for kernel in kernels
        if kernel in kind.rows
    }
    return ChangeMatrix(kinds, kernels, cells)


def _cell(pairs: Sequence[Pair], comparison: Comparison) -> ChangeCell:
    first = pairs[0].before
    speed = _typical([pair.speed for pair in pairs if pair.speed], comparison.spread.of(first.id))
    for pair in pairs:
        if pair.outcome in ("failed", "refused"):
            return ChangeCell("broken", speed, pair.after.status)
    if any(pair.became_wrong for pair in pairs):
        return ChangeCell("now wrong", speed)
    if any(pair.after.status == "inaccurate" for pair in pairs):
        return ChangeCell("wrong", speed)
    if not any(all(pair.ran) for pair in pairs):
        mended = any(pair.outcome == "recovered" for pair in pairs)
        return ChangeCell("mended" if mended else "cannot run")
    if any(pair.before.status == "inaccurate" for pair in pairs):
        return ChangeCell("mended", speed)
    if speed and speed.verdict in ("slow", "fast"):
        return ChangeCell("slower" if speed.verdict == "slow" else "faster", speed)
    if any(
        comparison.hides_speed(pair) or (pair.speed and pair.speed.low is None) for pair in pairs
    ):
        return ChangeCell("undecided", speed)
    if speed is None:
        is_reference = first.kernel == comparison.baseline
        return ChangeCell("reference kernel" if is_reference else "not timed")
    return ChangeCell("same" if speed.verdict == "same" else "undecided", speed)


def _typical(changes: Sequence[SpeedChange], spread: float) -> SpeedChange | None:
    """Return the change over the calls of a kind.

    With too few calls for an interval, it is the median of the ratios and of the ends of their
    intervals: calls of one kind cost the same.
    """
    overall = over_calls(changes, spread)
    lows = [each.low for each in changes if each.low is not None]
    highs = [each.high for each in changes if each.high is not None]
    if overall is None or overall.low is not None or not lows:
        return overall
    within = MedianInterval(percentile(lows, 50), percentile(highs, 50))
    return SpeedChange(overall.ratio, *within, *judge(within, spread), overall.basis)
