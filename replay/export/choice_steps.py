"""Denoising steps of a plan's choices, and the steps at which the choices change.

A step that no choice of a layer contains keeps the model's own attention, as with `use_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable

from replay.plan.plan import LayerChoice


def starts(choices: Iterable[LayerChoice]) -> list[int]:
    """Return the steps, from 0, at which a choice begins or has ended, in order."""
    ranges = [choice.steps for choice in choices if choice.steps is not None]
    return sorted({0, *(step for first, last in ranges for step in (first, last + 1))})


def contains(choice: LayerChoice, step: int) -> bool:
    """Return True if a choice is for a step."""
    steps = choice.steps
    return steps is None or steps.first <= step <= steps.last


def share(choice: LayerChoice, start: int, end: int, total: int) -> float:
    """Return the share of a choice's calls that are made between two steps that it contains.

    Args:
        start: first step.
        end: first step after.
        total: number of steps in a run.
    """
    first, last = choice.steps or (0, total - 1)
    return (end - start) / (last - first + 1)
