"""Judges what kernels returned on one call. It runs no kernel, and may live in another process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.errors import compare, summary
from replay.accuracy.thresholds import ExactThresholds, QuantisedThresholds, Thresholds
from replay.accuracy.tolerance import Tolerance
from replay.accuracy.verdict import Expected, judge
from replay.isolation.input_perturbation import (
    InputPerturbation,
    SteppedPerturbation,
    side_by_side,
    some_rows,
)
from replay.kernels.failures import Finding
from replay.rows.errors_of_output import Accuracy, AccuracyClass, Errors, Summary

T = TypeVar("T")

SLACK = 2.0
"""Factor on the tolerance of the few rows of a timed sample, whose inputs are not the recorded
ones: its purpose is to find results that are stale, skipped or of lower precision."""


OTHER_TIMER = 3.0
"""How many times longer than its row says a call may take by another clock: on a GPU in a row of
them, on a CPU from one message of its sample to the next."""

JUDGED_SAMPLES = 8
"""Of the timed samples of each kernel, drawn after all of them were taken."""


class Sample(NamedTuple):
    """Rows of what one timed call returned."""

    number: int
    """Of the perturbation (`replay.isolation.input_perturbation`) that its inputs had."""
    drawn: int
    """After the call: decides which rows."""
    changed: Tensor
    """(n, Dv), the first of `InputPerturbation.rows`."""
    others: Tensor
    """(n, Dv), the second."""
    is_stepped: bool = False
    """Whether a `SteppedPerturbation` made its inputs and chose its rows, at step `number`."""


@dataclass(frozen=True)
class Judged:
    """What was found about a kernel's output."""

    finding: Finding
    accuracy: Accuracy | None
    """None of an output that is right, where only that was asked."""
    kept: float | None = None
    output_summary: Summary | None = None
    reference_summary: Summary | None = None


class OutputJudge(Protocol):
    """Judges outputs of the kernels of one call."""

    def judge(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        output: Tensor,
        chosen: Tensor | None,
        *,
        of_core: bool = False,
        with_accuracy: bool = True,
    ) -> Judged:
        """Judge an output (B, Hq, Sq, Dv); of a sparse kernel by the keys that it chose.

        Args:
            of_core: the kernel's core returned it, whose errors cost the core's time alone.
            with_accuracy: what is right is measured too; else only what is wrong.
        """

    def judge_samples(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        samples: list[Sample],
        chosen: Tensor | None,
    ) -> str:
        """What is wrong with rows of timed samples; empty for nothing."""

    def clock(
        self, kernel: str, run: Callable[[], Tensor], device: torch.device, call_ms: float
    ) -> Tensor | None:
        """Let a block of calls run by a clock that the kernel cannot reach, if there is one.

        Returns:
            what `run` returned, if it was called exactly once.

        Args:
            call_ms: what a call took when it was timed.
        """


BLOCK_MS = 10.0
MOST_CALLS = 1000


def block_of_calls(run: Callable[[], T], device: torch.device, calls: int) -> T:
    """Calls one after another, until the last one's work is done; what that one returned."""
    for _ in range(calls - 1):
        run()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result


class LocalJudge:
    """Judges in this process.

    Args:
        seed: of the flips.
        compared: the output of the kernel that errors are wanted against.
        thresholds: the constants to judge by.
    """

    def __init__(
        self,
        call: AttentionCall,
        seed: int,
        errors_against: str = "reference",
        compare_stats: bool = False,
        compared: Tensor | None = None,
        thresholds: Thresholds = Thresholds(),  # noqa: B008 - it is immutable
    ) -> None:
        self._call = call
        self._thresholds = thresholds
        self.seed = seed
        self._errors_against = errors_against
        self._compare_stats = compare_stats
        self.compared = compared
        self._expected = Expected.of(call)
        self._chosen: dict[str, Expected] = {}
        self._noise_floor: Errors | None = None
        if call.output is not None:
            self._noise_floor = compare(call.output, self._expected.reference)

    def judge(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        output: Tensor,
        chosen: Tensor | None,
        *,
        of_core: bool = False,
        with_accuracy: bool = True,
    ) -> Judged:
        expected = self._expected_of(kernel, chosen)
        reference, captured = self._expected.reference, self._call.output
        verdict = judge(output, expected, accuracy_class, self._thresholds)
        finding = Finding("ok" if verdict.passed else "inaccurate", verdict.sentence)
        if verdict.passed and not with_accuracy:
            return Judged(finding, None, expected.kept)
        is_sparse = chosen is not None
        accuracy = Accuracy(
            reference=compare(output, reference) if is_sparse else verdict.errors,
            captured=None if captured is None else compare(output, captured),
            kernel=None if self.compared is None else compare(output, self.compared),
            noise_floor=self._noise_floor,
            chosen=verdict.errors if is_sparse else None,
            where=verdict.where,
        )
        judged = Judged(finding, accuracy, expected.kept)
        if not self._compare_stats:
            return judged
        against = {"reference": reference, "captured": captured}.get(
            self._errors_against, self.compared
        )
        return replace(
            judged,
            output_summary=summary(output),
            reference_summary=None if against is None else summary(against),
        )

    def judge_samples(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        samples: list[Sample],
        chosen: Tensor | None,
    ) -> str:
        expected = self._expected_of(kernel, chosen)
        call = self._call
        if chosen is not None:
            call = call.with_tensors({"attn_mask": _both(call.attn_mask, chosen)})
        factors = self._thresholds.of(accuracy_class)
        made, found = [], []
        for sample in samples:
            kind = SteppedPerturbation if sample.is_stepped else InputPerturbation
            perturbation = kind(call, self.seed, sample.number, values_only=chosen is not None)
            perturbation.apply()
            try:
                parts = (some_rows(call, rows) for rows in perturbation.rows(sample.drawn))
                made.append(side_by_side(*parts))
            finally:
                perturbation.apply()
            found += [sample.changed, sample.others]
        # Attention of all at once: each is little work for a GPU. Each has limits of its own.
        with _one_thread():
            right = Expected.of_heads(side_by_side(*made)) if made else []
        for rows, expected_rows in zip(found, right, strict=True):
            if wrong := _wrong_rows(rows, expected_rows, expected.tolerance, factors):
                return wrong
        return ""

    def clock(
        self, kernel: str, run: Callable[[], Tensor], device: torch.device, call_ms: float
    ) -> None:
        """In this process there is no clock that a kernel could not reach."""

    def _expected_of(self, kernel: str, chosen: Tensor | None) -> Expected:
        if chosen is None:
            return self._expected
        if kernel not in self._chosen:
            self._chosen[kernel] = Expected.of(self._call, chosen)
        return self._chosen[kernel]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Have one thread do many small operations on the CPU.

    Several would wait for each other at the end of each. Beside other programs a wait takes ten
    milliseconds, and the whole of it 2,240 ms where one thread took 45 (two cores, a load of 3).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wrong_rows(
    rows: Tensor,
    expected: Expected,
    whole: Tolerance,
    factors: ExactThresholds | QuantisedThresholds,
) -> str:
    """Why rows (n, Dv) of a timed sample are wrong, given the tolerance of the whole output too."""
    right = expected.reference[0, 0]
    rows = rows.to(right.device)
    error = rows.to(torch.float64) - right.to(torch.float64)
    odd = ~rows.isfinite() & right.isfinite()
    if odd.any():
        return f"{int(odd.sum())} elements of {rows.numel()} are NaN or infinite"
    error = error.nan_to_num(0.0, 0.0, 0.0)
    if isinstance(factors, QuantisedThresholds):
        lengths = torch.linalg.vector_norm(right.to(torch.float64).nan_to_num(), dim=-1)
        scale = float(lengths.mean())
        found = float(torch.linalg.vector_norm(error, dim=-1).mean()) / scale if scale else 0.0
        allowed = QUANTISED_SLACK * factors.maximum_relative_l1
        if found > allowed:
            return f"relative error {found:.2g} exceeds {allowed:.2g}"
        return ""
    limit = expected.tolerance.limit(factors)
    allowed = SLACK * max(whole.limit(factors), limit)
    largest = float(error.abs().amax()) if error.numel() else 0.0
    if largest > allowed:
        return f"max abs error {largest:.2g} exceeds {allowed:.2g}"
    # Late rows of a long causal call are small: stale ones would hide below that maximum.
    lengths = torch.linalg.vector_norm(right.to(torch.float64).nan_to_num(), dim=-1)
    noise = limit * math.sqrt(rows.shape[-1])
    far = torch.linalg.vector_norm(error, dim=-1) > WRONG_DIRECTION * lengths
    if (far & (lengths > RELIABLE_LENGTH * noise)).any():
        return f"a row's error is more than {WRONG_DIRECTION:.0%} of its length"
    return ""


WRONG_DIRECTION = 0.5
"""Of a row's length: its error in 16 bits is a hundredth."""
RELIABLE_LENGTH = 4
"""Times the noise of its sums that a row is long, to be judged by."""

QUANTISED_SLACK = 3.0
"""Times the relative L1 of a whole output that the rows of a sample may have as their mean relative
L2 error: an honest 8-bit kernel stays below a tenth."""


def _both(mask: Tensor | None, chosen: Tensor) -> Tensor:
    """The keys that a mask allows and a sparse kernel chose."""
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return torch.where(chosen, mask, float("-inf"))
