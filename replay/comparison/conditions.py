"""Conditions under which a comparison fails, such as `--fail-on slow:3%,inaccurate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capture.text.counted import counted
from replay.comparison.comparison import Comparison, Pair, smallest_slowdown
from replay.comparison.row_matching import ComparisonError
from replay.rows.row import TIE
from replay.timing.statistics import RELEVANT

CONDITIONS = {
    "slow": "a kernel is slower on a call or over all its calls; slow:3% only if by more than 3 %",
    "inaccurate": "an output that was correct is now inaccurate",
    "less-accurate": "an output that was correct is now inaccurate, or an error grew",
    "error": "a kernel that ran fails: error, crash, timeout or out-of-memory",
    "missing": "a row is missing, or its kernel now refuses the call",
}
"""Description of each condition, by name."""


@dataclass(frozen=True)
class Condition:
    """One part of `--fail-on`."""

    name: str
    share: float = 0.0
    """Minimum slowdown that meets a `slow` condition."""

    def __str__(self) -> str:
        return f"{self.name}:{100 * self.share:.3g}%" if self.share else self.name

    def failures(self, comparison: Comparison) -> list[str]:
        """Return the kernels that meet the condition, such as `kernel on 3 of 12 calls`."""
        found = []
        for each in comparison.kernels:
            failing = [pair for pair in each.pairs if self._holds(pair)]
            if len(failing) == len(each.pairs) == 1:
                found.append(f"{each.kernel} on {failing[0].before.call.name}")
            elif failing:
                calls = counted(len(each.pairs), "call")
                found.append(f"{each.kernel} on {len(failing):,} of {calls}")
            elif self.name == "slow" and each.speed and each.speed.is_slower_by(self.share):
                found.append(f"{each.kernel} over all calls")
        if self.name == "missing" and comparison.missing:
            gone, first = len(comparison.missing), comparison.missing[0]
            found.append(f"{counted(gone, 'row')}, e.g. {first.id} on {first.call.name}")
        return found

    def undecided(self, comparison: Comparison) -> list[str]:
        """Return the kernels for which the condition could be met, but is not shown to be.

        A slowdown must be at least `RELEVANT`. If all calls together exclude it, only calls count
        that may be slower by more than `TIE`: with many calls, some intervals are wide by chance.
        """
        found = []
        share = max(self.share, RELEVANT - 1)
        for each in comparison.kernels:
            is_excluded = each.speed is not None and not each.speed.may_be_slower_by(share)
            limit = max(share, TIE - 1) if is_excluded else share
            count = sum(
                pair.speed is not None
                and pair.speed.may_be_slower_by(limit)
                and not pair.speed.is_slower_by(self.share)
                if self.name == "slow"
                else self.name == "less-accurate"
                and pair.accuracy is not None
                and pair.accuracy.verdict == "inconclusive"
                for pair in each.pairs
            )
            if count:
                found.append(f"{each.kernel} on {count:,} of {counted(len(each.pairs), 'call')}")
        return found

    def _holds(self, pair: Pair) -> bool:
        match self.name:
            case "slow":
                return bool(pair.speed and pair.speed.is_slower_by(self.share))
            case "inaccurate":
                reason = pair.accuracy.reason if pair.accuracy else ""
                return pair.before.is_correct and reason in ("now-inaccurate", "more-nan")
        word = {"less-accurate": "worse", "error": "failed", "missing": "refused"}[self.name]
        return word in pair.changes


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


def undecided(comparisons: Sequence[Comparison], conditions: Iterable[Condition]) -> list[str]:
    """Return a sentence for each condition that could not be decided, with the kernels.

    The sentence about `slow` ends with the smallest slowdown that the runs could have shown.
    """
    sentences = []
    for comparison in comparisons:
        for condition in conditions:
            if found := condition.undecided(comparison):
                sentence = f"{condition}: {', '.join(found)}"
                smallest = smallest_slowdown(comparison, condition.share)
                if condition.name == "slow" and smallest:
                    sentence += f" ({smallest})"
                sentences.append(sentence)
    return sentences


def failures(comparisons: Iterable[Comparison], conditions: Iterable[Condition]) -> list[str]:
    """Return a sentence for each condition that is met, with the kernels that meet it."""
    return [
        f"{condition}: {', '.join(found)}"
        for comparison in comparisons
        for condition in conditions
        if (found := condition.failures(comparison))
    ]
