"""Assignment of a plan's kernels to the places of a target, with the losses.

A target may lack a plan's kernel, or have one kernel for several of its choices. Then a kernel may
replace the choice of a layer only if the plan allows it there: it is one of the choice's `others`.
Among the kernels that are allowed at all layers of a place, the one that saves most time per run is
used.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from replay.export.choice_steps import contains, share, starts
from replay.export.exported import Loss
from replay.export.target import KernelsAt, Ranges, Target
from replay.plan.key_lengths import KeyLengths, kernels_by_length
from replay.plan.plan import LayerChoice, Plan

Part = tuple[LayerChoice, float]
"""Choice, and the share of its calls that are made in a range of steps."""

ANY_LENGTH = KeyLengths(0, sys.maxsize)


class Assignment(NamedTuple):
    """Kernels in the places of a target, and the losses."""

    ranges: Ranges
    losses: list[Loss]


def assign(plan: Plan, target: Target) -> Assignment:
    """Assign a kernel to each place of a target."""
    losses = _Losses(plan, target)
    ranges: list[tuple[int, KernelsAt]] = []
    for start, parts in _parts(plan, target):
        together: dict[Hashable, list[Part]] = {}
        for choice, part in parts:
            place = target.place(choice)
            if place is None:
                losses.note(choice, "", part)
            else:
                together.setdefault(place, []).append((choice, part))
        kernels = {}
        for place, members in together.items():
            named = []
            for lengths, group in _groups(members, target.has_lengths):
                kernel = _joined(group, plan, target)
                named.append((lengths, kernel))
                for choice, part in group:
                    losses.note(choice, kernel, part)
            kernels[place] = kernels_by_length(named)
        ranges.append((start, kernels))
    return Assignment(ranges, losses.found())


def _parts(plan: Plan, target: Target) -> Iterator[tuple[int, list[Part]]]:
    """Yield the first step of each range that the target can distinguish, and the choices there."""
    firsts = starts(plan.choices)
    if not target.has_steps or len(firsts) == 1:
        yield 0, [(choice, 1.0) for choice in plan.choices]
        return
    total = firsts[-1]  # the run for which the plan was made ends there
    for start, end in zip(firsts, [*firsts[1:], total], strict=True):
        here = [choice for choice in plan.choices if contains(choice, start)]
        yield start, [(choice, share(choice, start, end, total)) for choice in here]


def _groups(parts: list[Part], has_lengths: bool) -> list[tuple[KeyLengths, list[Part]]]:
    """Return the parts that share a kernel, which are those with overlapping key lengths."""
    groups: list[tuple[KeyLengths, list[Part]]] = []
    ranged = [((has_lengths and part[0].kv_lens) or ANY_LENGTH, part) for part in parts]
    for lengths, part in sorted(ranged, key=itemgetter(0)):
        if groups and lengths.low <= groups[-1][0].high:
            joined, members = groups.pop()
            lengths = KeyLengths(joined.low, max(joined.high, lengths.high))
            groups.append((lengths, [*members, part]))
        else:
            groups.append((lengths, [part]))
    return groups


def own_kernel(choice: LayerChoice, plan: Plan) -> str:
    """Return the kernel that the model itself runs at a layer."""
    return choice.baseline or plan.baseline


def _joined(parts: Sequence[Part], plan: Plan, target: Target) -> str:
    """Return the kernel for choices that share a place; empty for the model's own attention."""
    chosen = {choice.kernel for choice, _ in parts}
    own = {own_kernel(choice, plan) for choice, _ in parts}
    if len(chosen) == 1 and (chosen == own or chosen <= target.kernels.keys()):
        return "" if chosen == own else chosen.pop()
    allowed = [(choice.kernel, own_kernel(choice, plan), *choice.others) for choice, _ in parts]
    saved = {
        kernel: math.fsum(_saved_ms(choice, kernel) * part for choice, part in parts)
        for kernel in dict.fromkeys(itertools.chain(*allowed))
        if kernel in target.kernels and {kernel} != own and all(kernel in each for each in allowed)
    }
    best = max(saved, key=lambda kernel: saved[kernel], default="")
    return best if best and saved[best] > 0 else ""


def _saved_ms(choice: LayerChoice, kernel: str) -> float:
    """Return the time that a kernel saves at a layer per run; 0 for the model's own attention."""
    return choice.saved_ms if kernel == choice.kernel else choice.others.get(kernel, 0.0)


class _Losses:
    """Collector of losses, which joins those of many layers."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self._plan, self._target = plan, target
        self._lost: dict[tuple[str, str, str, str], tuple[dict[str, None], list[float]]] = {}

    def note(self, choice: LayerChoice, kernel: str, part: float) -> None:
        """Add a part of a choice's calls, which a kernel (or the model's own attention) runs."""
        used = kernel or own_kernel(choice, self._plan)
        if used == choice.kernel or not part:
            return
        key = (self._reason(choice), choice.kernel, used, self._error(choice, used))
        modules, times = self._lost.setdefault(key, ({}, []))
        modules[choice.module] = None
        times.append((choice.saved_ms - _saved_ms(choice, used)) * part)

    def found(self) -> list[Loss]:
        """Return the losses, the most expensive first."""
        losses = [
            Loss(reason, planned, used, tuple(modules), math.fsum(times), error)
            for (reason, planned, used, error), (modules, times) in self._lost.items()
        ]
        return sorted(losses, key=lambda loss: -loss.lost_ms)

    def _reason(self, choice: LayerChoice) -> str:
        if self._target.place(choice) is None:
            return f"{self._target.name} cannot address these calls"
        if choice.kernel not in (own_kernel(choice, self._plan), *self._target.kernels):
            return f"{self._target.name} does not have {choice.kernel}"
        return f"{self._target.name} has one kernel for {self._target.joins}"

    def _error(self, choice: LayerChoice, used: str) -> str:
        if used == own_kernel(choice, self._plan):
            return "that of the model's own attention"
        return f"within {self._plan.budget}" if choice.covered else "not measured"
