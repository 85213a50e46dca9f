"""Ranking of a group's kernels, and the fastest correct kernel of a class."""

from __future__ import annotations

from dataclasses import dataclass

from replay.report.cells import speedup_text
from replay.report.groups import Group, first_few
from replay.report.pooled import pooled_speedup, typical_time
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import KernelId, Speedup


@dataclass(frozen=True)
class Fastest:
    """Fastest correct kernel of one accuracy class in a group of calls."""

    kernel: KernelId
    ties: list[KernelId]
    """Kernels whose times the rounds cannot distinguish from those of the fastest one."""
    speedup: Speedup | None
    """Speed-up over the group's baseline; None if the kernel is the baseline or ties with it."""


def details(group: Group, found: Fastest) -> str:
    """Format the text after a kernel's name: ` 1.13× (1.12-1.14) vs torch-default, tied with …`."""
    text = ""
    if found.speedup is not None:
        text += f" {speedup_text(found.speedup)} vs {group.baseline}"
    if words := {row.restated_as for row in group.rows[found.kernel]} - {""}:
        text += f", its mask rewritten as {' or '.join(sorted(words))}"
    if found.ties:
        text += f", tied with {first_few(list(map(str, found.ties)), 5)}"
    return text


def is_correct(group: Group, kernel: KernelId) -> bool:
    """Return True if a kernel is correct on all calls that it ran."""
    return all(row.is_correct for row in group.rows[kernel])


def rank(group: Group, kernel: KernelId) -> tuple[bool, float]:
    """Return a sort key that puts correct kernels first, then fast ones."""
    time = typical_time(group.rows[kernel])
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
