"""Assignment of a plan's kernels to the places of a target, with the losses.

Where a target has one kernel for several of the plan's choices, a kernel may replace the choice of
a layer only if the plan shows that its error is acceptable there: it is the layer's own choice, or
it is exact and the layer was not measured with it and left to the model's own attention. Among
these kernels, the one that saves most time per run is used. Times depend on sizes alone, so the
time of a kernel at a layer may come from another layer with the same key lengths and baseline time.
"""

from __future__ import annotations

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
    known = _Known(plan)
    losses = _Losses(plan, target, known)
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
                kernel = known.joined([choice for choice, _ in group], target)
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


class _Known:
    """Times and errors that a plan holds, by kernel."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chosen: dict[str, list[LayerChoice]] = {}
        for choice in plan.choices:
            self._chosen.setdefault(choice.kernel, []).append(choice)

    def joined(self, choices: Sequence[LayerChoice], target: Target) -> str:
        """Return the kernel for choices that share a place; empty for the model's own attention."""
        chosen = dict.fromkeys(choice.kernel for choice in choices)
        own = {own_kernel(choice, self._plan) for choice in choices}
        candidates = [kernel for kernel in chosen if kernel in target.kernels and {kernel} != own]
        if len(chosen) == 1:
            return candidates[0] if candidates else ""
        saved = {
            kernel: sum(self.saved_ms(choice, kernel) or 0.0 for choice in choices)
            for kernel in candidates
            if all(self._is_acceptable(choice, kernel) for choice in choices)
        }
        best = max(saved, key=lambda kernel: saved[kernel], default="")
        return best if best and saved[best] > 0 else ""

    def saved_ms(self, choice: LayerChoice, kernel: str) -> float | None:
        """Return the time that a kernel saves at a layer per run; None if the plan has no time."""
        if kernel == choice.kernel:
            return choice.saved_ms
        if kernel == own_kernel(choice, self._plan):
            return 0.0
        alike = next((each for each in self._chosen[kernel] if _is_alike(each, choice)), None)
        return None if alike is None else alike.saved_ms / alike.calls * choice.calls

    def worst(self, kernel: str) -> float | None:
        """Return the worst error of a kernel at the layers for which the plan chose it."""
        metric = self._plan.budget.metric
        figures = [
            each.worst.of(metric) for each in self._chosen.get(kernel, []) if each.worst is not None
        ]
        return max(figures, key=self._plan.budget.badness, default=None)

    def _is_acceptable(self, choice: LayerChoice, kernel: str) -> bool:
        if kernel == choice.kernel:
            return True
        if not _is_exact(kernel):
            return False
        kept_own = choice.covered and choice.kernel == own_kernel(choice, self._plan)
        return not kept_own or self.saved_ms(choice, kernel) is None


class _Losses:
    """Collector of losses, which joins those of many layers."""

    def __init__(self, plan: Plan, target: Target, known: _Known) -> None:
        self._plan, self._target, self._known = plan, target, known
        self._lost: dict[tuple[str, str, str, bool], tuple[dict[str, None], list[float]]] = {}

    def note(self, choice: LayerChoice, kernel: str, part: float) -> None:
        """Add a part of a choice's calls, which a kernel (or the model's own attention) runs."""
        used = kernel or own_kernel(choice, self._plan)
        if used == choice.kernel or not part:
            return
        saved = self._known.saved_ms(choice, used)
        key = (self._reason(choice, kernel), choice.kernel, used, saved is not None)
        modules, times = self._lost.setdefault(key, ({}, []))
        modules[choice.module] = None
        times.append((choice.saved_ms - (saved or 0.0)) * part)

    def found(self) -> list[Loss]:
        """Return the losses, the most expensive first."""
        losses = [
            Loss(
                reason, planned, used, tuple(modules), math.fsum(times), is_timed, self._error(used)
            )
            for (reason, planned, used, is_timed), (modules, times) in self._lost.items()
        ]
        return sorted(losses, key=lambda loss: -loss.lost_ms)

    def _reason(self, choice: LayerChoice, kernel: str) -> str:
        if self._target.place(choice) is None:
            return f"{self._target.name} cannot address these calls"
        if not kernel and choice.kernel not in self._target.kernels:
            return f"{self._target.name} does not have {choice.kernel}"
        return f"{self._target.name} has one kernel for {self._target.joins}"

    def _error(self, used: str) -> str:
        if used in {own_kernel(choice, self._plan) for choice in self._plan.choices}:
            return "that of the model's own attention"
        worst = self._known.worst(used)
        return "not measured" if worst is None else f"{self._plan.budget.metric} {worst:.5g}"


def _is_alike(one: LayerChoice, other: LayerChoice) -> bool:
    """Return True if two choices have calls of the same sizes, as far as a plan tells."""
    if one.baseline_ms is None or other.baseline_ms is None or not one.calls:
        return False
    same = (one.phase, one.kv_lens, one.baseline) == (other.phase, other.kv_lens, other.baseline)
    return same and math.isclose(one.baseline_ms, other.baseline_ms, rel_tol=1e-6)


def _is_exact(kernel: str) -> bool:
    from replay.kernels.registry import find

    return find(kernel).accuracy_class == "exact"
