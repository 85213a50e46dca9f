"""Ranges of denoising steps, because an error may matter at some steps and not at others.

Steps are numbered as in a recording, from 0 in each run of the pipeline. A step that no range of a
layer contains keeps the model's own attention.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from replay.plan.key_lengths import KernelsByLength, KeyLengths, kernels_by_length

MOST_STEPS = 10_000
"""Number of steps that a plan can distinguish."""

MARK = "by step: "
"""Beginning of the text of `KernelsByStep`, which no kernel's name has."""

MOST_KERNELS = 1_000_000
"""Largest number of kernels of a layer, counted in each range of steps."""

LONGEST = 200
"""Largest number of characters of a text that names the kernels."""


class StepRange(NamedTuple):
    """Range of denoising steps from 0, with both ends."""

    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


ALL_STEPS = StepRange(0, MOST_STEPS - 1)


@dataclass(frozen=True)
class KernelsByStep:
    """Kernels of a layer that depend on the step."""

    parts: tuple[tuple[StepRange, KernelsByLength], ...]
    """Ranges in order, which do not overlap, and their kernels."""

    def at(self, step: int) -> KernelsByLength:
        """Return the kernels of a step; empty if no range contains it."""
        index = bisect_right(self._firsts, step) - 1
        if index < 0:
            return ()
        steps, kernels = self.parts[index]
        return kernels if step <= steps.last else ()

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [steps.first for steps, _ in self.parts]

    def __str__(self) -> str:
        """Name all kernels: `by step: steps 0 to 3: fa2; steps 4 to 9: fa2 from 38 keys, sage1`.

        A digest stands for a long text, which compiled graphs would copy in each call.
        """
        text = "; ".join(f"{steps}: {_text(kernels)}" for steps, kernels in self.parts)
        if len(text) > LONGEST:
            text = f"{len(self.parts)} ranges, {hashlib.sha256(text.encode()).hexdigest()}"
        return MARK + text


def _text(kernels: KernelsByLength) -> str:
    return ", ".join(
        f"{kernel} from {start} keys" if start else kernel for start, kernel in kernels
    )


def kernels_by_step(choices: Iterable[tuple[StepRange, KeyLengths, str]]) -> KernelsByStep:
    """Return the kernels of a layer's ranges of steps and key lengths.

    Raises:
        ValueError: two choices are for the same step and length, or there are too many of them.
    """
    begin: dict[int, list[tuple[KeyLengths, str]]] = {}
    end: dict[int, list[tuple[KeyLengths, str]]] = {}
    for steps, lengths, kernel in choices:
        begin.setdefault(steps.first, []).append((lengths, kernel))
        end.setdefault(steps.last + 1, []).append((lengths, kernel))
    parts: list[tuple[StepRange, KernelsByLength]] = []
    active: list[tuple[KeyLengths, str]] = []
    number = 0
    for first, following in itertools.pairwise(sorted({*begin, *end})):
        for choice in end.get(first, ()):
            active.remove(choice)
        active += begin.get(first, ())
        if not active:
            continue
        number += len(active)
        if number > MOST_KERNELS:
            raise ValueError(f"a layer has more than {MOST_KERNELS:,} kernels in ranges of steps")
        steps = StepRange(first, following - 1)
        try:
            kernels = kernels_by_length(active)
        except ValueError as error:
            raise ValueError(f"two choices of a layer overlap at {steps}") from error
        parts.append((steps, kernels))
    return KernelsByStep(tuple(parts))
