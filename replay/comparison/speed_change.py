"""Whether a kernel became faster or slower from one run to another.

Within a run, what disturbs the machine hits a kernel and the baseline of the same rounds alike. A
speed-up is therefore the same in the next run where times are not, and the two speed-ups are
compared, unless the baseline itself may have changed: with another version of PyTorch on the same
device, times are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from replay.comparison.row_matching import Difference
from replay.rows.row import HERE, KernelId, Row, SpeedVerdict
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.statistics import (
    RELEVANT,
    Interval,
    independent_interval,
    median_interval,
    percentile,
    ratio_interval,
)

Basis = Literal["speed-up", "time"]
"""What is compared."""

SpeedReason = Literal[
    "within-3-percent",
    "within-spread",
    "interval-above-1",
    "interval-below-1",
    "interval-includes-1",
    "noisy",
    "too-few-rounds",
    "too-few-calls",
]

OF_THE_BASELINE = ("device", "torch", "cuda", "cudnn", "threads", "cores", "usable_cpus")
"""Fields of a machine on which the time of PyTorch's own kernels depends."""


class Spread(NamedTuple):
    """By how much two runs of the same kernels differ on this machine."""

    share: float
    source: str
    """Who says so: a file, or the user."""
    of_kernels: Mapping[KernelId, float] = MappingProxyType({})
    """The share of those that have one of their own: some repeat better than others."""

    def of(self, kernel: KernelId) -> float:
        return self.of_kernels.get(kernel, self.share)


NO_SPREAD = Spread(0.0, "")


@dataclass(frozen=True)
class SpeedChange:
    """How many times faster it is than before, with a 95 % interval, by time or by speed-up."""

    ratio: float
    low: float | None
    high: float | None
    verdict: SpeedVerdict
    reason: SpeedReason
    basis: Basis

    def is_slower_by(self, share: float) -> bool:
        """Whether all of the interval says that it takes more than this share longer."""
        return self.verdict == "slow" and self.high is not None and self.high < 1 / (1 + share)


class _Measured(NamedTuple):
    figure: float
    within: Interval | None

    @property
    def is_positive(self) -> bool:
        """Whether it is a figure that has ratios; a damaged file may hold others."""
        return all(0 < each < math.inf for each in (self.figure, *(self.within or ())))


def choose_basis(pairs: Sequence[tuple[Row, Row]], differing: Sequence[Difference]) -> Basis:
    """What tells most: speed-ups, unless only times of the same device mean the same."""
    changed = {each.field for each in differing if each.environment == HERE}
    if "device" in changed:
        return "speed-up"
    if changed.intersection(OF_THE_BASELINE):
        return "time"
    timed = [pair for pair in pairs if pair[0].speedup or pair[1].speedup]
    have_both = any(_have_same_baseline(*pair) for pair in timed)
    return "speed-up" if have_both else "time"


def compare_speed(before: Row, after: Row, basis: Basis, spread: float) -> SpeedChange | None:
    """Compare a kernel that is correct in both runs; None where one of them has no such figure,
    or none that is positive and finite.

    Args:
        spread: the share by which two runs of the same kernels differ.
    """
    if not (before.is_correct and after.is_correct):
        return None
    if basis == "time":
        # A ratio above 1 is a gain, and so the earlier time stands above.
        old, new = _time(after), _time(before)
    elif _have_same_baseline(before, after):
        old, new = _speedup(before), _speedup(after)
    else:
        return None
    if old is None or new is None or not (old.is_positive and new.is_positive):
        return None
    ratio = new.figure / old.figure
    if old.within is None or new.within is None:
        return SpeedChange(ratio, None, None, "ambiguous", "too-few-rounds", basis)
    within = ratio_interval(new.figure, new.within, old.figure, old.within)
    return SpeedChange(ratio, *within, *judge(within, spread), basis)


def over_calls(changes: Sequence[SpeedChange], spread: float) -> SpeedChange | None:
    """The change of a kernel over its calls: the median, with an interval from how they differ.

    None where there are no changes. What differs between two runs for a single call alone is
    counted in, since it is what the calls differ by.
    """
    if not changes:
        return None
    ratios = [each.ratio for each in changes]
    ratio, within, basis = percentile(ratios, 50), independent_interval(ratios), changes[0].basis
    if within is None:
        return SpeedChange(ratio, None, None, "ambiguous", "too-few-calls", basis)
    return SpeedChange(ratio, *within, *judge(within, spread), basis)


def judge(within: Interval, spread: float) -> tuple[SpeedVerdict, SpeedReason]:
    """What an interval of the change says: the first line that fits. The margin is 3 %, or the
    spread if that is more.

        all of it within ±margin             same       within-3-percent, within-spread
        low > 1 + spread                     fast       interval-above-1
        high < 1 / (1 + spread)              slow       interval-below-1
        reaches beyond margin at both ends   ambiguous  noisy
        otherwise                            ambiguous  interval-includes-1

    A kernel is thus faster or slower only if two runs of the same kernel do not differ as much.
    """
    low, high = within
    margin = max(RELEVANT, 1 + spread)
    if low > 1 / margin and high < margin:
        return "same", "within-3-percent" if margin == RELEVANT else "within-spread"
    if low > 1 + spread:
        return "fast", "interval-above-1"
    if high < 1 / (1 + spread):
        return "slow", "interval-below-1"
    is_noisy = low <= 1 / margin and high >= margin
    return "ambiguous", "noisy" if is_noisy else "interval-includes-1"


def spread_of(pairs: Sequence[tuple[Row, Row]], basis: Basis, source: str) -> Spread | None:
    """The share within which 95 % of the rows of two runs of the same kernels differ.

    Of all, and of each kernel that has `MINIMUM_ROUNDS` rows. None if nothing was timed in both.
    """
    found: dict[KernelId, list[float]] = {}
    for before, after in pairs:
        change = compare_speed(before, after, basis, 0.0)
        if change is not None:
            found.setdefault(before.id, []).append(max(change.ratio, 1 / change.ratio) - 1)
    if not found:
        return None
    of_kernels = {
        kernel: percentile(shares, 95)
        for kernel, shares in found.items()
        if len(shares) >= MINIMUM_ROUNDS
    }
    return Spread(
        percentile([each for shares in found.values() for each in shares], 95), source, of_kernels
    )


def _have_same_baseline(before: Row, after: Row) -> bool:
    old, new = before.speedup, after.speedup
    return old is not None and new is not None and old.vs == new.vs


def _time(row: Row) -> _Measured | None:
    if row.time_ms is None:
        return None
    return _Measured(row.time_ms.p50, median_interval(row.time_ms.samples))


def _speedup(row: Row) -> _Measured | None:
    speedup = row.speedup
    if speedup is None:
        return None
    if speedup.low is None or speedup.high is None:
        return _Measured(speedup.ratio, None)
    return _Measured(speedup.ratio, Interval(speedup.low, speedup.high))
