"""Ranking of a group's kernels, and the fastest correct kernel of a class."""

from __future__ import annotations

from dataclasses import dataclass

from replay.report.groups import Group
from replay.report.pooled import pooled_speedup, typical_time
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import KernelId, Speedup


@dataclass(frozen=True)
class Fastest:
    """Fastest correct kernel of one accuracy class in a group of calls."""

    kernel: KernelId
    ties: list[KernelId]
    """Kernels with the same speed (`Speedup.verdict`)."""
    undecided: list[KernelId]
    """Kernels that may be as fast or slower: the interval is wide."""
    speedup: Speedup | None
    """Speed-up over the group's baseline; None if the kernel is not faster than the baseline."""


def is_correct(group: Group, kernel: KernelId) -> bool:
    """Return True if a kernel is correct on all calls that it ran."""
    return all(row.is_correct for row in group.rows[kernel])


def rank(group: Group, kernel: KernelId) -> tuple[bool, float]:
    """Return a sort key that puts correct kernels first, then fast ones."""
    time = typical_time([row for row in group.rows[kernel] if row.is_comparable])
    return (not is_correct(group, kernel), time.p50 if time else float("inf"))


def fastest(group: Group, accuracy_class: AccuracyClass) -> Fastest | None:
    """Return the fastest usable kernel of a class; None if no kernel was timed and correct.

    The class must not be `sparse`: sparse kernels do less work, and speed alone does not show
    whether that work is sufficient.
    """
    timed = [
        kernel
        for kernel in group.rows
        if group.class_of(kernel) == accuracy_class
        and is_correct(group, kernel)
        and typical_time([row for row in group.rows[kernel] if row.is_ranked])
        and not any(row.overwrites for row in group.rows[kernel])
    ]
    if not timed:
        return None
    best, *others = sorted(timed, key=lambda kernel: rank(group, kernel))
    over = {other: pooled_speedup(group, best, over=other) for other in others}
    close = [other for other, each in over.items() if each is not None and not each.differs]
    ties = [other for other in close if (each := over[other]) and each.verdict == "same"]
    undecided = [other for other in close if other not in ties]
    is_faster = best.name != group.baseline and KernelId(group.baseline) not in close
    return Fastest(best, ties, undecided, pooled_speedup(group, best) if is_faster else None)
