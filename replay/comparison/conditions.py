"""Conditions under which a comparison fails, such as `--fail-on slow:3%,inaccurate`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from capture.text.counted import counted
from replay.comparison.comparison import Comparison, KernelChange, Pair
from replay.comparison.row_matching import ComparisonError
from replay.rows.row import KernelId
from replay.timing.statistics import RELEVANT

CONDITIONS = {
    "slow": "a kernel is slower on a call or over all its calls; slow:3% only if by more than 3 %",
    "inaccurate": "an output that was correct is now inaccurate",
    "less-accurate": "an output that was correct is now inaccurate, or an error grew",
    "error": "a kernel that ran fails: error, crash, timeout or out-of-memory",
    "missing": "a row is missing, or its kernel now refuses the call",
}
"""Description of each condition, by name."""

TIE = 1.15
"""Ratio of two times up to which a comparison of many calls accepts an inconclusive interval."""


@dataclass(frozen=True)
class Condition:
    """One part of `--fail-on`."""

    name: str
    share: float = 0.0
    """Minimum slowdown that meets a `slow` condition."""

    def __str__(self) -> str:
        return f"{self.name}:{100 * self.share:.3g}%" if self.share else self.name

    def failures(self, comparison: Comparison) -> list[Failure]:
        """Return the kernels that meet the condition."""
        found = []
        for each in comparison.kernels:
            failing = tuple(pair for pair in each.pairs if self.holds(pair))
            if len(failing) == len(each.pairs) == 1:
                words = f"on {failing[0].before.call.name}"
            elif failing:
                words = f"on {len(failing):,} of {counted(len(each.pairs), 'call')}"
            elif self.name == "slow" and each.speed and each.speed.is_slower_by(self.share):
                words = "over all calls"
            else:
                continue
            found.append(Failure(self, each.kernel, words, failing))
        if self.name == "missing":
            gone: dict[KernelId, list[str]] = {}
            for row in comparison.missing:
                gone.setdefault(row.id, []).append(row.call.name)
            for kernel, calls in gone.items():
                more = f" and {counted(len(calls) - 1, 'other call')}" if len(calls) > 1 else ""
                found.append(Failure(self, kernel, f"on {calls[0]}{more}"))
        return found

    def open_pairs(self, comparison: Comparison, kernel: KernelChange) -> list[Pair]:
        """Return the calls of a kernel that neither meet the condition nor exclude it.

        An unconfirmed time may hide any slowdown. Otherwise, a slowdown must be at least
        `RELEVANT`. If all calls together exclude it, only calls count
        that may be slower by more than `TIE`: with many calls, some intervals are wide by chance.
        """
        share = max(self.share, RELEVANT - 1)
        is_excluded = kernel.speed is not None and not kernel.speed.may_be_slower_by(share)
        limit = max(share, TIE - 1) if is_excluded else share

        def is_open(pair: Pair) -> bool:
            if self.name == "less-accurate":
                return pair.accuracy is not None and pair.accuracy.verdict == "inconclusive"
            if self.name != "slow" or pair.speed is None:
                return self.name == "slow" and comparison.hides_speed(pair)
            return pair.speed.may_be_slower_by(limit) and not self.holds(pair)

        return [pair for pair in kernel.pairs if is_open(pair)]

    def holds(self, pair: Pair) -> bool:
        """Return True if a kernel meets the condition on a single call."""
        match self.name:
            case "slow":
                return bool(pair.speed and pair.speed.is_slower_by(self.share))
            case "inaccurate":
                return pair.became_wrong
        word = {"less-accurate": "worse", "error": "failed", "missing": "refused"}[self.name]
        return word in pair.changes


@dataclass(frozen=True)
class Failure:
    """Kernel that meets a condition."""

    condition: Condition
    kernel: KernelId
    words: str
    """Calls in words, such as `on 3 of 12 calls` or `over all calls`."""
    pairs: tuple[Pair, ...] = ()
    """Pairs that meet the condition; none if rows are missing, or all calls together meet it."""

    def __str__(self) -> str:
        return f"{self.kernel} {self.words}"


def read_conditions(text: str | None) -> list[Condition]:
    """Parse conditions such as `slow:3%,inaccurate`; return an empty list for None.

    Raises:
        ComparisonError: a condition or its share is invalid.
    """
    if text is None:
        return []
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, share = part.partition(":")
        if name not in CONDITIONS:
            raise ComparisonError(
                f"--fail-on {part}: no such condition, choose from {', '.join(CONDITIONS)}"
            )
        if share and name != "slow":
            raise ComparisonError(f"--fail-on {part}: only slow takes a share, as slow:3%")
        found.append(Condition(name, read_share(share, "--fail-on slow:") if share else 0.0))
    if not found:
        raise ComparisonError(f"--fail-on is empty: choose from {', '.join(CONDITIONS)}")
    return found


def read_share(text: str, option: str) -> float:
    """Parse `1.5%` or `0.015` as a share below 1.

    Raises:
        ComparisonError: the string is not a share below 1.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ComparisonError(f"{option}{text}: not a share, write e.g. 3% or 0.03")
    return value


def failures(comparisons: Iterable[Comparison], conditions: Iterable[Condition]) -> list[str]:
    """Return a sentence for each condition that is met, with the kernels that meet it."""
    return [
        f"{condition}: {', '.join(map(str, found))}"
        for comparison in comparisons
        for condition in conditions
        if (found := condition.failures(comparison))
    ]
