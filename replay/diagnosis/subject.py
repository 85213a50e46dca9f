"""Kernel that is wrong on a call, with functions for experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
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
from replay.diagnosis.derived import HeadRows, changed, part
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
    "kv-heads",
    "other-sequence",
    "strides",
    "layout",
    "head-dim",
    "too-large",
    "nonfinite-input",
    "nonfinite-hidden",
    "cannot-be-captured",
    "other-stream",
    "stale-in-graph",
    "replay-differs",
    "compile-error",
    "compile-differs",
    "graph-break",
    "unknown",
]

MOST_ROWS = 64
"""Maximum number of rows of the worst head used to score an experiment."""

COLLAPSE = 4.0
"""Factor by which an experiment must shrink the error to have removed its cause."""

FINITE = 0.5
"""Maximum error that counts as cured if the output had NaN or infinity before."""

EXPLAINED = 0.05
"""Maximum relative error of an output that another call explains."""


class Flickers(Exception):
    """Error for a kernel that is wrong in some runs of the same call and right in others."""

    def __init__(self, score: Score) -> None:
        super().__init__("wrong in some runs of the same call and right in others")
        self.score = score
        """Score of a run that was right."""


class KernelRunner(Protocol):
    """Function that runs the kernel on a call; it returns None if the kernel refuses or fails.

    The kernel may change the call's tensors. Its Python code gets memory filled with `poison`.
    """

    def __call__(self, call: AttentionCall, poison: float | None = None) -> Tensor | None: ...


@dataclass(frozen=True)
class Evidence:
    """Cause of an error, and the numbers that show it."""

    cause: Cause
    sentence: str
    """Sentence about the error and the experiment, without the kernel's name."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers behind the evidence, as plain JSON."""
    place: HeadRows | None = None
    """Place of the error, if it differs from the worst row that the judge found."""

    def at(self, place: HeadRows) -> Evidence:
        """Return the evidence with this place, unless the evidence already has one."""
        return self if self.place is not None else replace(self, place=place)


class Reading(NamedTuple):
    """Call that the kernel may have computed by misreading the given call."""

    cause: Cause
    sentence: str
    call: AttentionCall


class Score(NamedTuple):
    """Correctness of some rows."""

    passes: bool
    error: float
    """‖output - reference‖ / ‖reference‖ over the rows; infinite if only one of the tensors has a
    NaN or an infinity."""
    worst: float = 0.0
    """Error of the worst row."""

    def is_cure_of(self, before: Score, collapse: float = COLLAPSE) -> bool:
        """Return True if the error is gone, or so small that rounding explains the difference."""
        if before.error == math.inf:
            return self.passes or self.error <= FINITE
        # Single rows may pass if only the output as a whole exceeds its limit.
        return (self.passes and not before.passes) or self.error <= before.error / collapse

    def explains(self, own: Score) -> bool:
        """Return True if this score, against another call, is good and far better than `own`."""
        is_it = self.passes or self.error <= EXPLAINED
        return is_it and (own.error == math.inf or self.error <= own.error / COLLAPSE)


@dataclass(frozen=True)
class Subject:
    """Kernel, call and output under examination."""

    call: AttentionCall
    """Form of the call that the kernel ran."""
    output: Tensor
    """Output of the kernel: (B, Hq, Sq, Dv)."""
    place: HeadRows
    """Rows of one head with the largest errors."""
    own: Score
    """Score of the rows in `place`."""
    run_on: KernelRunner
    accuracy_class: AccuracyClass = "exact"
    chosen: Callable[[AttentionCall], Tensor] | None = None
    """Function that returns the keys a sparse kernel attends to."""
    sentence: str = ""
    """The judge's sentence about the error."""
    fault: str = "is wrong"
    """Verb phrase for what the kernel does on the call."""

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        output: Tensor,
        run_on: KernelRunner,
        accuracy_class: AccuracyClass,
        chosen: Callable[[AttentionCall], Tensor] | None,
        expected: Expected,
        sentence: str,
    ) -> Subject:
        """Find the rows whose errors against the reference are largest."""
        place = most_wrong(output, expected, accuracy_class)
        blank = Score(False, 0.0)
        made = cls(call, output, place, blank, run_on, accuracy_class, chosen, sentence)
        return replace(made, own=made.score(output, call))

    def run(self, call: AttentionCall) -> Tensor | None:
        """Run the kernel on a copy of a call; return None if the kernel refuses or fails."""
        return self.run_on(call.to(call.device))

    def score(self, output: Tensor, call: AttentionCall, place: HeadRows | None = None) -> Score:
        """Score rows of an output by the rule of the kernel's class.

        Args:
            call: call that provides the reference for the output.
            place: rows to score; default: the subject's own.
        """
        batch, head, rows = place or self.place
        attended = call if self.chosen is None else restricted(call, self.chosen(call))
        expected = Expected.of(part(attended, HeadRows(batch, head, rows)))
        mine = output[batch, head, rows][None, None]
        passes = judge(mine, expected, self.accuracy_class).passed
        found = row_errors(mine, expected.reference)
        if found.mismatched_nonfinite:
            return Score(False, math.inf, math.inf)
        error, size = (found.sums[index].sum().sqrt() for index in (4, 2))
        by_row = found.sums[4].sqrt() / found.sums[2].sqrt()
        worst = by_row.masked_fill(found.sums[4] == 0, 0.0).max()
        return Score(passes, float((error / size).nan_to_num(0.0)), float(worst))

    def tried(self, call: AttentionCall, place: HeadRows | None = None) -> Score | None:
        """Run the kernel on another call and score its output; None if it refuses or fails."""
        output = self.run(call)
        return None if output is None else self.score(output, call, place)

    def is_cured(self, score: Score | None) -> bool:
        """Return True if an experiment removed the error."""
        return score is not None and score.is_cure_of(self.own)

    def cured_by(
        self,
        trial: AttentionCall | Callable[[], Score | None],
        control: AttentionCall | Callable[[], Score | None] | None = None,
        before: Score | None = None,
        collapse: float = COLLAPSE,
    ) -> Score | None:
        """Return the score of an experiment that removes the error; None if it does not.

        After a cure, the control must be wrong again, then the experiment right again, and right
        with other values too if it is a call.

        Args:
            trial: derived call, or a function that runs the experiment.
            control: experiment that had the error; default: the subject's own call.
            before: error of the control; default: the subject's own.

        Raises:
            Flickers: a second run contradicts the first.
        """
        before = before or self.own

        def cure(experiment: AttentionCall | Callable[[], Score | None]) -> Score | None:
            score = experiment() if callable(experiment) else self.tried(experiment)
            return score if score is not None and score.is_cure_of(before, collapse) else None

        first = cure(trial)
        if first is None:
            return None
        if (right := cure(control or self.call)) or cure(trial) is None:
            raise Flickers(right or first)
        # A kernel that keeps values by shape is right on the first call of a new shape only.
        is_kept = isinstance(trial, AttentionCall) and cure(changed(trial)) is None
        return None if is_kept else first

    @property
    def loose(self) -> list[str]:
        """Names of the call's tensors that are not contiguous."""
        given = self.call.tensors()
        return [name for name in given if name != "output" and not given[name].is_contiguous()]

    def in_dense_memory(
        self, names: Collection[str] | None = None, *, heads_inside: bool = False
    ) -> AttentionCall:
        """Return the call with the same values in memory without gaps; default: all tensors.

        Args:
            heads_inside: order query, key and value in memory as (B, S, H, D), not (B, H, S, D).
        """
        found = self.call.tensors()
        dense: dict[str, Tensor] = {}
        for name in found.keys() - {"output"} if names is None else names:
            dense[name] = found[name].contiguous()
            if heads_inside and name in ("query", "key", "value"):
                dense[name] = found[name].transpose(1, 2).contiguous().transpose(1, 2)
        if self.call.value_is_in_key and "key" in dense:
            dense["value"] = dense["key"][..., : self.call.value.shape[-1]]
        return self.call.with_tensors(dense)

    def with_call(self, call: AttentionCall, expected: Expected | None) -> Subject:
        """Return the subject of another form of the call, which has the same reference.

        Later experiments then differ from this form in one property. If the kernel refuses the
        form, the subject stays as it is.

        Args:
            expected: right output, which tells the worst rows; None to keep the rows.
        """
        output = self.run(call)
        if output is None:
            return self
        if expected is None:
            return replace(self, call=call, output=output)
        return Subject.of(
            call,
            output,
            self.run_on,
            self.accuracy_class,
            self.chosen,
            expected,
            self.sentence,
        )

    def computed(self, other: AttentionCall) -> bool:
        """Return True if the output is that of another call, computed by mistake.

        A query that sees no key in the other call may get NaN, the softmax of an empty row.
        """
        batch, head, rows = self.place
        mine = self.output[batch, head, rows]
        expected = attention(part(other, self.place))[0, 0]
        undefined = (expected == 0).all(dim=1) & ~mine.isfinite().all(dim=1)
        if bool(undefined.all()):
            without = self.tried(replace(other, attn_mask=None, is_causal=False))
            return without is not None and without.passes
        place = HeadRows(batch, head, rows[~undefined])
        return self.score(self.output, other, place).explains(
            self.own if not bool(undefined.any()) else self.score(self.output, self.call, place)
        )

    def returned(self, expected: Tensor) -> Score:
        """Return the distance between the wrong rows and the given numbers (R, Dv)."""
        batch, head, rows = self.place
        mine = self.output[batch, head, rows].to(torch.float64)
        size = float(torch.linalg.vector_norm(expected))
        error = float(torch.linalg.vector_norm(mine - expected.to(mine)))
        return Score(False, error / size if size and math.isfinite(error) else math.inf)


def most_wrong(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> HeadRows:
    """Return the head with the worst row, and its rows with the largest errors, in index order."""
    shares = row_shares(output, expected, accuracy_class)
    batch, head = (int(each) for each in divmod(int(shares.amax(dim=2).argmax()), shares.shape[1]))
    of_head = shares[batch, head]
    infinite = (of_head == math.inf).nonzero().flatten()
    finite = of_head.masked_fill(of_head == math.inf, 0.0)
    worst = finite.argsort(descending=True, stable=True)
    failing = int((finite > 1).sum())
    if not failing and not len(infinite):
        failing = MOST_ROWS  # only the output as a whole is wrong
    halves = (_some(worst[:failing], MOST_ROWS), _some(infinite, MOST_ROWS))
    if all(len(each) for each in halves):
        halves = (_some(halves[0], MOST_ROWS // 2), _some(halves[1], MOST_ROWS // 2))
    return HeadRows(batch, head, torch.cat(halves).unique())


def _some(rows: Tensor, most: int) -> Tensor:
    """Return the first rows and evenly spaced others, because equal faults differ in size."""
    if len(rows) <= most:
        return rows
    even = torch.linspace(most // 2, len(rows) - 1, most - most // 2).long()
    return torch.cat([rows[: most // 2], rows[even.to(rows.device)]])


def heads_of(rows: Tensor) -> str:
    """Name the heads that have any of the given rows: (B, Hq, Sq) bool.

    The result is like `3 of 8 heads`; with several sequences, it also tells these from heads.
    """
    by_head = rows.any(dim=2)
    batch, heads = by_head.shape
    sequences = by_head.any(dim=1).nonzero().flatten().tolist()
    count = int(by_head.sum())
    if batch == 1:
        return f"{count} of {heads} heads"
    if len(sequences) == 1:
        return f"{count} of {heads} heads of sequence {sequences[0]} alone, of {batch} sequences"
    return f"{count} of {batch * heads} heads ({batch} sequences of {heads} heads)"


def row_shares(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> Tensor:
    """Return each row's error as a share of its limit: (B, Hq, Sq); above 1 is wrong."""
    found = row_errors(output, expected.reference)
    limits = None
    thresholds = Thresholds()
    if accuracy_class == "quantised":
        if expected.quantised is not None:
            limits = expected.quantised.row_limits(thresholds.quantised)
    elif expected.tolerance.rows is not None:
        limits = expected.tolerance.rows.limits(thresholds.exact)
    if limits is None:
        limits = found.sums[2].sqrt()
    shares = found.lengths / limits.to(found.lengths.device)
    nonfinite = ~found.lengths.isfinite()
    return shares.nan_to_num(nan=0.0, posinf=0.0).masked_fill_(nonfinite, math.inf)
