"""A kernel that is wrong on a call, and the experiments that can be made with the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy.errors import row_errors
from replay.accuracy.judge import Expected, judge
from replay.accuracy.sparse import restricted
from replay.accuracy.thresholds import Thresholds
from replay.diagnosis.derived import Place, part
from replay.rows.row import AccuracyClass

Cause = Literal[
    "overflow",
    "k-outlier-channel",
    "mask-ignored",
    "mask-misread",
    "late-sink",
    "input-changed",
    "output-unwritten",
    "odd-length",
    "causal-alignment",
    "stale-graph",
    "wrong-scale",
    "head-mapping",
    "unknown",
]

MOST_ROWS = 64
"""Rows that an experiment is scored by: those of the worst head that are most wrong."""

COLLAPSE = 4.0
"""How many times smaller the error must become for an experiment to have removed its cause."""

FINITE = 0.5
"""The same where there was no error but NaN or infinity: the largest error after."""

EXPLAINED = 0.05
"""The largest relative error of what a kernel is said to have computed instead."""


class Run(Protocol):
    """Runs the kernel on a call, whose tensors it may change; None where it refuses or fails."""

    def __call__(self, call: AttentionCall, poison: float | None = None) -> Tensor | None:
        """Args: poison: what the memory holds that the kernel's Python code allocates."""


@dataclass(frozen=True)
class Evidence:
    """A cause, and what shows it."""

    cause: Cause
    sentence: str
    """What is wrong and how that was found, without the kernel's name."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Plain JSON."""
    place: Place | None = None
    """Where, if not where the judge found the worst row."""

    def at(self, place: Place) -> Evidence:
        """The same with a place, where it has none."""
        return self if self.place is not None else replace(self, place=place)


class Score(NamedTuple):
    """How right some rows are."""

    passes: bool
    error: float
    """‖output - reference‖ / ‖reference‖ over the rows; infinite where one of them alone is NaN
    or infinite."""

    def is_cure_of(self, before: Score) -> bool:
        """Whether the error is gone, or nearly: rounding may differ between two experiments."""
        if self.passes or before.error == math.inf:
            return self.passes or self.error <= FINITE
        return self.error <= before.error / COLLAPSE


@dataclass(frozen=True)
class Subject:
    """A kernel, a call, and what it returned."""

    call: AttentionCall
    """The form of the call that the kernel ran."""
    output: Tensor
    """(B, Hq, Sq, Dv): what it returned."""
    place: Place
    """The rows that are most wrong, of one head."""
    own: Score
    """The score of these rows."""
    run_on: Run
    accuracy_class: AccuracyClass = "exact"
    chosen: Callable[[AttentionCall], Tensor] | None = None
    """Which keys a sparse kernel attends to."""
    sentence: str = ""
    """What the judge said."""

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        output: Tensor,
        run_on: Run,
        accuracy_class: AccuracyClass = "exact",
        chosen: Callable[[AttentionCall], Tensor] | None = None,
        *,
        expected: Expected | None = None,
        sentence: str = "",
    ) -> Subject:
        """Find the rows that are most wrong.

        Args:
            expected: of the call, where it is known.
        """
        if expected is None:
            expected = Expected.of(call, None if chosen is None else chosen(call))
        place = most_wrong(output, expected, accuracy_class)
        blank = Score(False, 0.0)
        made = cls(call, output, place, blank, run_on, accuracy_class, chosen, sentence)
        return replace(made, own=made.score(output, call))

    def run(self, call: AttentionCall) -> Tensor | None:
        """What the kernel returns for a copy of a call; None where it refuses or fails."""
        return self.run_on(call.to(call.device))

    def score(self, output: Tensor, call: AttentionCall, place: Place | None = None) -> Score:
        """How right rows of an output are, by the rule of the kernel's class.

        Args:
            call: what the output is said to be of.
            place: by default where the subject's own output is most wrong.
        """
        batch, head, rows = place or self.place
        attended = call if self.chosen is None else restricted(call, self.chosen(call))
        expected = Expected.of(part(attended, Place(batch, head, rows)))
        mine = output[batch, head, rows][None, None]
        passes = judge(mine, expected, self.accuracy_class).passed
        found = row_errors(mine, expected.reference)
        errors, sizes = (float(found.sums[index].sum().sqrt()) for index in (4, 2))
        if found.mismatched_nonfinite:
            return Score(False, math.inf)
        return Score(passes, errors / sizes if sizes else (math.inf if errors else 0.0))

    def tried(self, call: AttentionCall, place: Place | None = None) -> Score | None:
        """Run the kernel on another call and score it; None where it refuses or fails."""
        output = self.run(call)
        return None if output is None else self.score(output, call, place)

    def is_cured(self, score: Score | None) -> bool:
        """Whether what was changed for an experiment took the error away."""
        return score is not None and score.is_cure_of(self.own)

    def computed(self, other: AttentionCall) -> bool:
        """Whether the output is that of another call: what the kernel took this one for."""
        score = self.score(self.output, other)
        is_it = score.passes or score.error <= EXPLAINED
        return is_it and score.error <= self.own.error / COLLAPSE


Hypothesis = Callable[[Subject], "Evidence | None"]


def most_wrong(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> Place:
    """The head with the worst row, and the rows of it that are most wrong, in order."""
    shares = row_shares(output, expected, accuracy_class)
    batch, head = (int(each) for each in divmod(int(shares.amax(dim=2).argmax()), shares.shape[1]))
    worst = shares[batch, head].argsort(descending=True, stable=True)
    failing = int((shares[batch, head] > 1).sum())
    # Some of the worst, and some of all: what is wrong in the same way need not be equally wrong.
    few = worst[: failing or MOST_ROWS]
    if len(few) > MOST_ROWS:
        even = torch.linspace(MOST_ROWS // 2, len(few) - 1, MOST_ROWS // 2).long()
        few = torch.cat([few[: MOST_ROWS // 2], few[even.to(few.device)]])
    return Place(batch, head, few.unique())


def row_shares(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> Tensor:
    """(B, Hq, Sq): the error of each row as a share of what its rule allows; above 1 is wrong."""
    found = row_errors(output, expected.reference)
    limits = None
    thresholds = Thresholds()
    if accuracy_class == "quantised":
        if expected.quantised is not None:
            limits = expected.quantised.row_limits(thresholds.quantised)
    elif expected.tolerance.rows is not None:
        limits = expected.tolerance.rows.limits(thresholds.exact)
    lengths = found.lengths
    if limits is None:
        limits = found.sums[2].sqrt()
    shares = lengths / limits.to(lengths.device)
    nonfinite = ~lengths.isfinite()
    return shares.nan_to_num(nan=0.0, posinf=0.0).masked_fill_(nonfinite, math.inf)
