"""Comparison of a run with an earlier one: verdicts on each pair of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from replay.comparison.accuracy_change import AccuracyChange, compare_accuracy
from replay.comparison.row_matching import (
    ComparisonError,
    Difference,
    Run,
    check_settings,
    differences,
    match,
)
from replay.comparison.speed_change import (
    Basis,
    SpeedChange,
    Spread,
    choose_basis,
    compare_speed,
    over_calls,
    smallest_in_words,
    spread_of,
)
from replay.rows.row import UNCONFIRMED, KernelId, Row
from replay.rows.row_files import plain

FAILED = ("error", "crash", "timeout", "out-of-memory")
REFUSED = ("unsupported", "unavailable")


@dataclass(frozen=True)
class Pair:
    """Rows of one kernel on one call, from the earlier and the later run."""

    before: Row
    after: Row
    speed: SpeedChange | None
    """None if speeds are not comparable, or for the baseline if speed-ups are compared."""
    accuracy: AccuracyChange | None
    """None if the output was not judged in both runs."""

    @property
    def ran(self) -> tuple[bool, bool]:
        """Two values, before and after, that are True if the kernel ran in that run."""
        before, after = (row.status not in (*FAILED, *REFUSED) for row in (self.before, self.after))
        return before, after

    @property
    def outcome(self) -> Literal["failed", "refused", "recovered", ""]:
        """Change in whether the kernel runs; empty without a change."""
        if self.ran == (True, False):
            return "failed" if self.after.status in FAILED else "refused"
        return "recovered" if self.ran == (False, True) else ""

    @property
    def became_wrong(self) -> bool:
        """True if the output was correct, and is now inaccurate or has more NaN or infinity."""
        reason = self.accuracy.reason if self.accuracy else ""
        return self.before.is_correct and reason in ("now-inaccurate", "more-nan")

    @property
    def unconfirmed(self) -> list[str]:
        """Flags by which the time of one of the rows may not be compared, without duplicates."""
        flags = dict.fromkeys((*self.after.flags, *self.before.flags))
        return [flag for flag in flags if flag.startswith(UNCONFIRMED)]

    @property
    def changes(self) -> set[str]:
        """Words for all changes, for better or worse; empty if nothing changed."""
        found: set[str] = {self.outcome}
        found |= {change.verdict for change in (self.speed, self.accuracy) if change is not None}
        return found - {"", "same", "inconclusive"}


@dataclass(frozen=True)
class KernelChange:
    """Change of a kernel, summarised over all of the kernel's calls."""

    kernel: KernelId
    pairs: tuple[Pair, ...]
    speed: SpeedChange | None
    """None if the speeds cannot be compared on any call."""


@dataclass(frozen=True)
class Comparison:
    """Two runs, their pairs of rows, and the verdicts."""

    before: Run
    after: Run
    basis: Basis
    baseline: str
    """Kernel that speed-ups are relative to; empty if times are compared."""
    spread: Spread
    differences: tuple[Difference, ...]
    pairs: tuple[Pair, ...]
    kernels: tuple[KernelChange, ...]
    baseline_time: SpeedChange | None
    """Change of the baseline's own time, if speed-ups on the same device are compared."""
    missing: tuple[Row, ...]
    new: tuple[Row, ...]

    def hides_speed(self, pair: Pair) -> bool:
        """Return True if the change of speed is unknown, because a time is unconfirmed."""
        if pair.before.kernel == self.baseline or not pair.unconfirmed:
            return False
        return all(row.is_correct and row.time_ms for row in (pair.before, pair.after))


def compare(before: Run, after: Run, spread: Spread, basis: Basis | None = None) -> Comparison:
    """Match two runs and judge the change of every kernel on every call.

    Args:
        spread: share by which two runs of the same kernels differ.
        basis: figure to compare; by default, that of `choose_basis`.

    Raises:
        ComparisonError: the runs have nothing in common, or were timed in different ways.
    """
    matched = match(before, after)
    check_settings(matched.pairs, before, after)
    differing = differences(matched.pairs)
    # Compare only speed-ups across devices, because times on two devices are not comparable.
    crosses = any(each.field == "device" for each in differing)
    if crosses and basis == "time":
        raise ComparisonError(
            f"{before.name} and {after.name} are of different devices, whose times cannot be "
            "compared: leave out --of time"
        )
    basis = basis or choose_basis(matched.pairs, differing)
    pairs = tuple(
        Pair(
            old, new, compare_speed(old, new, basis, spread.of(old.id)), compare_accuracy(old, new)
        )
        for old, new in matched.pairs
    )
    # A few rows may have another baseline; report the most common one.
    baselines = [each.before.speedup.vs for each in pairs if each.before.speedup is not None]
    baseline = max(set(baselines), key=baselines.count) if baselines else ""
    return Comparison(
        before,
        after,
        basis,
        baseline if basis == "speed-up" else "",
        spread,
        tuple(differing),
        pairs,
        tuple(_kernels(pairs, spread)),
        (_baseline_time(pairs, baseline, spread) if basis == "speed-up" and not crosses else None),
        tuple(matched.missing),
        tuple(matched.new),
    )


def smallest_slowdown(comparison: Comparison, share: float = 0.0) -> str:
    """Describe the slowdowns that the runs could not have shown; empty if no speed is compared.

    Args:
        share: slowdown that all of an interval must exceed.
    """
    share = max(share, comparison.spread.share)
    return smallest_in_words(
        [
            pair.speed.smallest_slowdown(share) if pair.speed else None
            for pair in comparison.pairs
            if pair.speed or comparison.hides_speed(pair)
        ]
    )


def measured_spread(run: Run, again: Run, basis: Basis | None = None) -> Spread:
    """Return the spread between a run and a repetition of that run.

    Raises:
        ComparisonError: the runs have no times in common.
    """
    matched = match(run, again)
    check_settings(matched.pairs, run, again)
    basis = basis or choose_basis(matched.pairs, differences(matched.pairs))
    spread = spread_of(matched.pairs, basis, again.name)
    if spread is None:
        raise ComparisonError(
            f"{run.name} and {again.name} have no times in common: give --spread a share, as 1.5%"
        )
    return spread


def basis_of(before: Run, after: Run) -> Basis:
    """Return the default basis for comparing two runs.

    Raises:
        ComparisonError: the runs have nothing in common.
    """
    pairs = match(before, after).pairs
    return choose_basis(pairs, differences(pairs))


def _kernels(pairs: Sequence[Pair], spread: Spread) -> list[KernelChange]:
    grouped: dict[KernelId, list[Pair]] = {}
    for pair in pairs:
        if any(pair.ran):
            grouped.setdefault(pair.before.id, []).append(pair)
    return [
        KernelChange(
            kernel,
            tuple(members),
            over_calls([each.speed for each in members if each.speed], spread.of(kernel)),
        )
        for kernel, members in grouped.items()
    ]


def _baseline_time(pairs: Sequence[Pair], baseline: str, spread: Spread) -> SpeedChange | None:
    own = [each for each in pairs if each.before.kernel == baseline]
    times = [compare_speed(each.before, each.after, "time", spread.share) for each in own]
    return over_calls([each for each in times if each], spread.share)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain JSON, in which NaN and infinity become null."""
    return plain(
        {
            "comparison": 1,
            "before": comparison.before.name,
            "after": comparison.after.name,
            "basis": comparison.basis,
            "baseline": comparison.baseline,
            "spread": {
                "share": comparison.spread.share,
                "source": comparison.spread.source,
                "of_kernels": {
                    str(kernel): share for kernel, share in comparison.spread.of_kernels.items()
                },
            },
            "differences": comparison.differences,
            "baseline_time": comparison.baseline_time and asdict(comparison.baseline_time),
            "kernels": [
                {
                    "kernel": each.kernel,
                    "calls": len(each.pairs),
                    "speed": each.speed and asdict(each.speed),
                }
                for each in comparison.kernels
            ],
            "rows": [
                {
                    **_subject(each.before),
                    "status": [each.before.status, each.after.status],
                    "outcome": each.outcome,
                    "time_ms": [
                        row.time_ms and row.time_ms.p50 for row in (each.before, each.after)
                    ],
                    "speed": each.speed and asdict(each.speed),
                    "accuracy": each.accuracy and asdict(each.accuracy),
                }
                for each in comparison.pairs
            ],
            "missing": [_subject(row) for row in comparison.missing],
            "new": [_subject(row) for row in comparison.new],
        }
    )


def _subject(row: Row) -> dict[str, Any]:
    return {
        "kernel": row.kernel,
        "environment": row.environment,
        "call": row.call.name,
        "module": row.call.module,
        "step": row.call.step,
    }
