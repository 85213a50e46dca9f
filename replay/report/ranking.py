"""Which kernels of a group are correct, in which order, and which of a class is the fastest."""

from __future__ import annotations

from dataclasses import dataclass

from replay.report.groups import Group
from replay.report.pooled import pooled_speedup, typical_time
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import KernelId, Speedup


@dataclass(frozen=True)
class Fastest:
    """The fastest correct kernel of a group in one accuracy class."""

    kernel: KernelId
    ties: list[KernelId]
    """Those that the rounds do not tell from it."""
    speedup: Speedup | None
    """Over the group's baseline; None if it is the baseline, or ties with it."""


def is_correct(group: Group, kernel: KernelId) -> bool:
    """Whether it is on all calls that it ran."""
    return all(row.is_correct for row in group.rows[kernel])


def rank(group: Group, kernel: KernelId) -> tuple[bool, float]:
    """A key that sorts correct kernels first, then by time."""
    time = typical_time(group.rows[kernel])
    return (not is_correct(group, kernel), time.p50 if time else float("inf"))


def fastest(group: Group, accuracy_class: AccuracyClass) -> Fastest | None:
    """The fastest that may stand in a model; None if none of the class was timed and correct.

    Do not ask it for sparse kernels: they do less work, and speed does not show whether that is
    enough.
    """
    timed = [
        kernel
        for kernel in group.rows
        if group.class_of(kernel) == accuracy_class
        and is_correct(group, kernel)
        and typical_time(group.rows[kernel])
        and not any(row.overwrites for row in group.rows[kernel])
    ]
    if not timed:
        return None
    best, *others = sorted(timed, key=lambda kernel: rank(group, kernel))
    ties = [other for other in others if _is_tie(group, best, other)]
    ties_with_baseline = best.name == group.baseline or KernelId(group.baseline) in ties
    return Fastest(best, ties, None if ties_with_baseline else pooled_speedup(group, best))


def _is_tie(group: Group, best: KernelId, other: KernelId) -> bool:
    speedup = pooled_speedup(group, best, over=other)
    return speedup is not None and speedup.is_tie
