"""A kernel that is wrong on a call, and the experiments that can be made with the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.errors import row_errors
from replay.accuracy.reference import attention
from replay.accuracy.sparse import restricted
from replay.accuracy.thresholds import Thresholds
from replay.accuracy.verdict import Expected, judge
from replay.diagnosis.derived import OutputRows, part
from replay.rows.errors_of_output import AccuracyClass

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
    place: OutputRows | None = None
    """Where, if not where the judge found the worst row."""

    def at(self, place: OutputRows) -> Evidence:
        """The same with a place, where it has none."""
        return self if self.place is not None else replace(self, place=place)


class Score(NamedTuple):
    """How right some rows are."""

    passes: bool
    error: float
    """‖output - reference‖ / ‖reference‖ over the rows; infinite where one of them alone is NaN
    or infinite."""
    worst: float = 0.0
    """The same of the row where it is largest."""

    def is_cure_of(self, before: Score, collapse: float = COLLAPSE) -> bool:
        """Whether the error is gone, or nearly: rounding may differ between two experiments."""
        if before.error == math.inf:
            return self.passes or self.error <= FINITE
        # Rows of a kernel that is wrong by its whole output alone may pass by themselves.
        return (self.passes and not before.passes) or self.error <= before.error / collapse

    def explains(self, own: Score) -> bool:
        """Whether an output that scores `own` is what this score compares it with."""
        is_it = self.passes or self.error <= EXPLAINED
        return is_it and (own.error == math.inf or self.error <= own.error / COLLAPSE)


@dataclass(frozen=True)
class Subject:
    """A kernel, a call, and what it returned."""

    call: AttentionCall
    """The form of the call that the kernel ran."""
    output: Tensor
    """(B, Hq, Sq, Dv): what it returned."""
    place: OutputRows
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

    def score(self, output: Tensor, call: AttentionCall, place: OutputRows | None = None) -> Score:
        """How right rows of an output are, by the rule of the kernel's class.

        Args:
            call: what the output is said to be of.
            place: by default where the subject's own output is most wrong.
        """
        batch, head, rows = place or self.place
        attended = call if self.chosen is None else restricted(call, self.chosen(call))
        expected = Expected.of(part(attended, OutputRows(batch, head, rows)))
        mine = output[batch, head, rows][None, None]
        passes = judge(mine, expected, self.accuracy_class).passed
        found = row_errors(mine, expected.reference)
        if found.mismatched_nonfinite:
            return Score(False, math.inf, math.inf)
        error, size = (found.sums[index].sum().sqrt() for index in (4, 2))
        by_row = found.sums[4].sqrt() / found.sums[2].sqrt()
        worst = by_row.masked_fill(found.sums[4] == 0, 0.0).max()
        return Score(passes, float((error / size).nan_to_num(0.0)), float(worst))

    def tried(self, call: AttentionCall, place: OutputRows | None = None) -> Score | None:
        """Run the kernel on another call and score it; None where it refuses or fails."""
        output = self.run(call)
        return None if output is None else self.score(output, call, place)

    def is_cured(self, score: Score | None) -> bool:
        """Whether what was changed for an experiment took the error away."""
        return score is not None and score.is_cure_of(self.own)

    def computed(self, other: AttentionCall) -> bool:
        """Whether the output is that of another call: what the kernel took this one for.

        A query that sees no key there may have got NaN, as a softmax of nothing gives.
        """
        batch, head, rows = self.place
        mine = self.output[batch, head, rows]
        expected = attention(part(other, self.place))[0, 0]
        undefined = (expected == 0).all(dim=1) & ~mine.isfinite().all(dim=1)
        if bool(undefined.all()):
            without = self.tried(replace(other, attn_mask=None, is_causal=False))
            return without is not None and without.passes
        place = OutputRows(batch, head, rows[~undefined])
        return self.score(self.output, other, place).explains(
            self.own if not bool(undefined.any()) else self.score(self.output, self.call, place)
        )

    def returned(self, expected: Tensor) -> Score:
        """How near the wrong rows are to other numbers, (R, Dv)."""
        batch, head, rows = self.place
        mine = self.output[batch, head, rows].to(torch.float64)
        size = float(torch.linalg.vector_norm(expected))
        error = float(torch.linalg.vector_norm(mine - expected.to(mine)))
        return Score(False, error / size if size and math.isfinite(error) else math.inf)


Hypothesis = Callable[[Subject], "Evidence | None"]


def most_wrong(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> OutputRows:
    """The head with the worst row, and the rows of it that are most wrong, in order."""
    shares = row_shares(output, expected, accuracy_class)
    batch, head = (int(each) for each in divmod(int(shares.amax(dim=2).argmax()), shares.shape[1]))
    of_head = shares[batch, head]
    infinite = (of_head == math.inf).nonzero().flatten()
    finite = of_head.masked_fill(of_head == math.inf, 0.0)
    worst = finite.argsort(descending=True, stable=True)
    failing = int((finite > 1).sum())
    if not failing and not len(infinite):
        failing = MOST_ROWS  # it is wrong by its whole output alone
    halves = (_some(worst[:failing], MOST_ROWS), _some(infinite, MOST_ROWS))
    if all(len(each) for each in halves):
        halves = (_some(halves[0], MOST_ROWS // 2), _some(halves[1], MOST_ROWS // 2))
    return OutputRows(batch, head, torch.cat(halves).unique())


def _some(rows: Tensor, most: int) -> Tensor:
    """The first of some rows, and as many of all: what is wrong alike need not be equally wrong."""
    if len(rows) <= most:
        return rows
    even = torch.linspace(most // 2, len(rows) - 1, most - most // 2).long()
    return torch.cat([rows[: most // 2], rows[even.to(rows.device)]])


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
