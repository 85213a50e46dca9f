"""Change of a kernel's speed between two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from capture.text.counted import counted
from replay.comparison.row_matching import Difference
from replay.rows.row import HERE, INTERRUPTED_BLOCKS, KernelId, Row, SpeedVerdict
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.statistics import (
    RELEVANT,
    MedianInterval,
    independent_interval,
    median_interval,
    percentile,
    ratio_interval,
)

Basis = Literal["speed-up", "time"]
"""Figure that is compared."""

SpeedReason = Literal[
    "within-3-percent",
    "within-spread",
    "interval-above-1",
    "interval-below-1",
    "interval-includes-1",
    "noisy",
    "interrupted",
    "too-few-rounds",
    "too-few-calls",
]

OF_THE_BASELINE = ("device", "torch", "cuda", "cudnn", "threads", "cores", "usable_cpus")
"""Properties of a machine that affect the times of PyTorch's own kernels."""


class Spread(NamedTuple):
    """Difference that is normal between two runs of the same kernels on this machine."""

    share: float
    source: str
    """Source of `share`: the user, or a file's name."""
    of_kernels: Mapping[KernelId, float] = MappingProxyType({})
    """Shares of single kernels, where known; some kernels vary less than others."""

    def of(self, kernel: KernelId) -> float:
        return self.of_kernels.get(kernel, self.share)


NO_SPREAD = Spread(0.0, "")


@dataclass(frozen=True)
class SpeedChange:
    """Ratio of the later speed to the earlier speed, with a 95 % interval."""

    ratio: float
    low: float | None
    high: float | None
    verdict: SpeedVerdict
    reason: SpeedReason
    basis: Basis

    def is_slower_by(self, share: float) -> bool:
        """Return True if the slowdown exceeds this share over the whole interval."""
        return self.verdict == "slow" and self.high is not None and self.high < 1 / (1 + share)

    def may_be_slower_by(self, share: float) -> bool:
        """Return True if the interval allows, but does not show, a slowdown beyond this share."""
        if self.verdict in ("same", "fast") or self.is_slower_by(share):
            return False
        return self.low is None or self.low < 1 / (1 + share)

    def smallest_slowdown(self, share: float) -> float | None:
        """Return the smallest true slowdown that would have exceeded this share, on average.

        The result is None without an interval.
        """
        return None if self.high is None else self.high / self.ratio * (1 + share) - 1


def smallest_in_words(slowdowns: Sequence[float | None], against: str = "") -> str:
    """Describe the slowdowns that rows could not have shown; empty without rows.

    Args:
        slowdowns: smallest slowdown that each row would have shown; None if it has no interval.
        against: words after `slowdowns`, such as `against the baseline`.
    """
    known = [each for each in slowdowns if each is not None]
    words = f"slowdowns {against}".strip()
    unknown = len(slowdowns) - len(known)
    if not known:
        subject = f"the smallest slowdown {against}".strip()
        return f"{subject} that would show is unknown" if unknown else ""
    half, every = f"{percentile(known, 50):.1%}", f"{max(known):.1%}"
    text = f"{words} below {half} would not show"
    if half != every:
        text += f" on half of the rows, and below {every} not on all"
    return f"{text}; unknown for {counted(unknown, 'row')}" if unknown else text


class _Figure(NamedTuple):
    figure: float
    within: MedianInterval | None


def choose_basis(pairs: Sequence[tuple[Row, Row]], differing: Sequence[Difference]) -> Basis:
    """Choose speed-ups, unless the baseline itself may have changed.

    A disturbance slows a kernel and the baseline in the same rounds alike, so speed-ups vary less
    than times.
    """
    changed = {each.field for each in differing if each.environment == HERE}
    if "device" in changed:
        return "speed-up"
    if changed.intersection(OF_THE_BASELINE):
        return "time"
    timed = [pair for pair in pairs if pair[0].speedup or pair[1].speedup]
    have_both = any(_have_same_baseline(*pair) for pair in timed)
    return "speed-up" if have_both else "time"


def compare_speed(before: Row, after: Row, basis: Basis, spread: float) -> SpeedChange | None:
    """Compare a kernel's speed; return None unless both rows are correct, confirmed and timed.

    Args:
        spread: share by which two runs of the same kernels differ.
    """
    if any(not row.is_correct or row.is_unconfirmed for row in (before, after)):
        return None
    if basis == "time":
        # Put the earlier time in the numerator, so that a ratio above 1 is a gain.
        old, new = _time(after), _time(before)
    elif _have_same_baseline(before, after):
        old, new = _speedup(before), _speedup(after)
    else:
        return None
    if old is None or new is None:
        return None
    ratio = new.figure / old.figure
    if old.within is None or new.within is None:
        reason: SpeedReason = "too-few-rounds"
        if any(is_interrupted(row) for row in (before, after)):
            reason = "interrupted"
        return SpeedChange(ratio, None, None, "inconclusive", reason, basis)
    within = ratio_interval(new.figure, new.within, old.figure, old.within)
    return SpeedChange(ratio, *within, *judge(within, spread), basis)


def is_interrupted(row: Row) -> bool:
    """Return True if other programs interrupted too many samples of a row, or of its baseline."""
    if INTERRUPTED_BLOCKS in row.flags or (row.speedup and row.speedup.reason == "interrupted"):
        return True
    time = row.time_ms
    return bool(time and len(time.whole) < min(MINIMUM_ROUNDS, len(time.samples)))


def ratio_text(ratio: float) -> str:
    """Format a ratio such as `0.95×`, and one below 0.1 with its first digit."""
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.1g}×"


def over_calls(changes: Sequence[SpeedChange], spread: float) -> SpeedChange | None:
    """Return the median change over a kernel's calls; None without calls.

    The interval reflects the variation of the change between calls.
    """
    if not changes:
        return None
    ratios = [each.ratio for each in changes]
    ratio, within, basis = percentile(ratios, 50), independent_interval(ratios), changes[0].basis
    if within is None:
        return SpeedChange(ratio, None, None, "inconclusive", "too-few-calls", basis)
    return SpeedChange(ratio, *within, *judge(within, spread), basis)


def judge(within: MedianInterval, spread: float) -> tuple[SpeedVerdict, SpeedReason]:
    """Return the verdict on the interval of a change; the first matching line applies.

    The margin is 3 %, or the spread if that is larger.

        all of it within ±margin             same          within-3-percent, within-spread
        low > 1 + spread                     fast          interval-above-1
        high < 1 / (1 + spread)              slow          interval-below-1
        reaches beyond margin at both ends   inconclusive  noisy
        otherwise                            inconclusive  interval-includes-1

    A kernel therefore counts as faster or slower only if its change exceeds the difference between
    two equal runs.
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
    return "inconclusive", "noisy" if is_noisy else "interval-includes-1"


def spread_of(pairs: Sequence[tuple[Row, Row]], basis: Basis, source: str) -> Spread | None:
    """Return the share within which 95 % of the rows of two equal runs differ.

    A kernel with at least `MINIMUM_ROUNDS` rows also gets its own share. Return None if no pair is
    timed.
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


def _time(row: Row) -> _Figure | None:
    if row.time_ms is None:
        return None
    return _Figure(row.time_ms.p50, median_interval(row.time_ms.whole))


def _speedup(row: Row) -> _Figure | None:
    speedup = row.speedup
    if speedup is None:
        return None
    if speedup.low is None or speedup.high is None:
        return _Figure(speedup.ratio, None)
    return _Figure(speedup.ratio, MedianInterval(speedup.low, speedup.high))
