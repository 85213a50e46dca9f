"""Kernels that may have become slower or less accurate, although the rows do not show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capture.text.counted import counted
from replay.comparison.comparison import Comparison, Pair, smallest_slowdown
from replay.comparison.conditions import Condition
from replay.comparison.speed_change import ratio_text
from replay.rows.row import INTERRUPTED_BLOCKS, KernelId
from replay.timing.defaults import MINIMUM_ROUNDS

INTERRUPTED = "too few undisturbed samples; run again on a quieter machine"
FEW = f"fewer than {MINIMUM_ROUNDS} rounds; use more"
NOISE = "noise hides the answer; more rounds or a quieter machine would decide"


@dataclass(frozen=True)
class Undecided:
    """Calls of a kernel that neither meet a condition nor exclude it, for the same reason."""

    condition: Condition
    kernel: KernelId
    pairs: tuple[Pair, ...]
    calls: int
    """Number of the kernel's calls, decided ones included."""
    reason: str
    """Reason and remedy."""

    def __str__(self) -> str:
        """Format as `mine.py:other (1 of 4 calls, measured 0.01×)`."""
        ratios = [pair.speed.ratio for pair in self.pairs if pair.speed]
        words = f"{len(self.pairs):,} of {counted(self.calls, 'call')}"
        if self.condition.name == "slow" and ratios:
            worst = " at worst" if len(ratios) > 1 else ""
            words += f", measured {ratio_text(min(ratios))}{worst}"
        return f"{self.kernel} ({words})"


def undecided(comparison: Comparison, conditions: Iterable[Condition]) -> list[Undecided]:
    """Return the kernels for which a condition could be met, but is not shown to be."""
    found = []
    for condition in conditions:
        for kernel in comparison.kernels:
            by_reason: dict[str, list[Pair]] = {}
            for pair in condition.open_pairs(comparison, kernel):
                by_reason.setdefault(reason_of(pair, condition), []).append(pair)
            found += [
                Undecided(condition, kernel.kernel, tuple(pairs), len(kernel.pairs), reason)
                for reason, pairs in by_reason.items()
            ]
    return found


def reason_of(pair: Pair, condition: Condition) -> str:
    """Return why a condition is undecided for a pair, and the remedy."""
    if condition.name != "slow":
        return "noise hides whether the error grew"
    if pair.speed is None:
        flag = pair.unconfirmed[0]
        return INTERRUPTED if flag == INTERRUPTED_BLOCKS else flag
    return {"interrupted": INTERRUPTED, "too-few-rounds": FEW}.get(pair.speed.reason, NOISE)


def speed_conditions(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the conditions, and `slow` if none of them is about speed."""
    given = list(conditions)
    return given if any(each.name == "slow" for each in given) else [*given, Condition("slow")]


def sentences(comparisons: Sequence[Comparison], conditions: Sequence[Condition]) -> list[str]:
    """Return a sentence for each condition and reason, with the kernels that are undecided.

    The last sentence about `slow` states which slowdowns the runs could not have shown.
    """
    told = []
    for comparison in comparisons:
        for condition in conditions:
            found = undecided(comparison, [condition])
            by_reason = grouped(found)
            told += [
                f"{condition}: {', '.join(map(str, each))}: {reason}"
                for reason, each in by_reason.items()
            ]
            if found and condition.name == "slow":
                told[-1] += f" ({smallest_slowdown(comparison, condition.share)})"
    return told


def grouped(found: Iterable[Undecided]) -> dict[str, list[Undecided]]:
    """Group undecided kernels by reason."""
    groups: dict[str, list[Undecided]] = {}
    for each in found:
        groups.setdefault(each.reason, []).append(each)
    return groups
