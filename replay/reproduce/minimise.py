"""Search for the smallest part of a call on which a kernel still fails in the same way.

The method is delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating
failure-inducing input") on ranges: along each axis in turn, all but one, halves, quarters … are
left out at either end as long as the failure remains. The places with the largest errors are tried
first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from capture.call.attention_call import AttentionCall
from replay.reproduce.crop import DERIVED, EXACT, Axis
from replay.reproduce.trials import TrialOutcome

Range = tuple[int, int]
"""First index and end index; the end is excluded."""


@dataclass
class Smallest:
    """Smallest part of a call found so far."""

    call: AttentionCall
    outcome: TrialOutcome
    kept: dict[str, Range] = field(default_factory=dict)
    """Remaining ranges of the recorded call, by axis."""
    is_derived: bool = False
    """True if visible keys were left out, so that the call has no output yet."""
    trials: int = 0
    is_complete: bool = True
    """False if the time limit ended the search early."""


def minimise(
    call: AttentionCall,
    outcome: TrialOutcome,
    run: Callable[[AttentionCall], TrialOutcome],
    seconds: float,
    report: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Smallest:
    """Leave out every part of a call that a kernel's failure does not depend on.

    Args:
        outcome: the kernel's failure on the whole call.
        run: runs the kernel on a part.
        seconds: time limit for the search; a running trial is not interrupted.
        report: called with each trial before it runs.
    """
    search = _Search(Smallest(call, outcome), run, clock() + seconds, report, clock)
    search.along(EXACT)
    search.along(DERIVED)
    return search.found


class _TimeIsOver(Exception):
    """Signal that ends the search."""


@dataclass
class _Search:
    found: Smallest
    run: Callable[[AttentionCall], TrialOutcome]
    deadline: float
    report: Callable[[str], None]
    clock: Callable[[], float]

    def along(self, axes: tuple[Axis, ...]) -> None:
        """Shorten every axis until no axis can be shortened further."""
        try:
            while sum(self._shorten(axis) for axis in axes):
                continue
        except _TimeIsOver:
            self.found.is_complete = False

    def _shorten(self, axis: Axis) -> bool:
        before = axis.length(self.found.call)
        for first, end in _guesses(axis, self.found):
            if end - first < axis.length(self.found.call) and self._fails(axis, first, end):
                break
        step = max(axis.length(self.found.call) - 1, 0)  # the call may have no keys
        while step:
            length = axis.length(self.found.call)
            if self._fails(axis, step, length) or self._fails(axis, 0, length - step):
                step = min(step, axis.length(self.found.call) - 1)
            else:
                step //= 2
        return axis.length(self.found.call) < before

    def _fails(self, axis: Axis, first: int, end: int) -> bool:
        """Try a part, and continue from it if the failure remains."""
        found = self.found
        part = axis.take(found.call, first, end)
        if part is None:
            return False
        if self.clock() >= self.deadline:
            raise _TimeIsOver
        begin, _ = found.kept.get(axis.name, (0, 0))
        kept = (begin + first, begin + end)
        self.report(f"{axis.name} {kept[0]}-{kept[1] - 1}")
        found.trials += 1
        outcome = self.run(part)
        if not outcome.is_like(found.outcome):
            return False
        found.call, found.outcome = part, outcome
        found.kept[axis.name] = kept
        found.is_derived = found.is_derived or not axis.is_exact
        return True


def _guesses(axis: Axis, found: Smallest) -> Iterator[Range]:
    """Yield the ranges with the largest errors."""
    call, worst, where = found.call, found.outcome.worst_row, found.outcome.where
    places: list[tuple[int, int, int, int]] = []
    if worst is not None:
        places.append((*worst, worst[2]))
    if where is not None:
        places.append((*where.head, *where.queries))
    for batch, head, first, last in places:
        if axis.name == "sequences" and call.cu_seqlens_q is None:
            yield batch, batch + 1
        elif axis.name == "key heads":
            group = head // (call.shape.q_heads // call.shape.kv_heads)
            yield group, group + 1
        elif axis.name == "queries":
            yield first, last + 1
