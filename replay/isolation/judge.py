"""The judge of kernels' outputs on one call, which runs no kernel and may be in another process."""

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
"""Factor that widens the tolerance of sampled rows, whose inputs differ from the recorded inputs.
Samples only have to reveal results that are stale, skipped or of lower precision."""

OTHER_TIMER = 3.0
"""Factor by which another clock may measure a longer time than a call's row. The other clock times
a series of calls on a GPU, and the interval between a sample's messages on a CPU."""

JUDGED_SAMPLES = 8
"""Number of timed samples of each kernel that are judged, drawn after all samples were taken."""


class Sample(NamedTuple):
    """Rows of the output of one timed call."""

    number: int
    """Number of the perturbation of the call's inputs (`replay.isolation.input_perturbation`)."""
    drawn: int
    """Random number, drawn after the call, that determines the rows."""
    changed: Tensor
    """(n, Dv): rows at the positions in the first result of `InputPerturbation.rows`."""
    others: Tensor
    """(n, Dv): rows at the positions in the second result of `InputPerturbation.rows`."""
    is_stepped: bool = False
    """True if step `number` of a `SteppedPerturbation` made the inputs and chose the rows."""


@dataclass(frozen=True)
class Judged:
    """Judgement of a kernel's output."""

    finding: Finding
    accuracy: Accuracy | None
    """Errors of the output; None for a right output judged with `with_accuracy=False`."""
    kept: float | None = None
    output_summary: Summary | None = None
    reference_summary: Summary | None = None


class OutputJudge(Protocol):
    """Judge of the outputs of the kernels of one call."""

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
        """Judge an output (B, Hq, Sq, Dv).

        Args:
            chosen: the keys that a sparse kernel chose; the output is judged on these keys.
            of_core: whether the kernel's core returned the output; a wrong output of the core
                costs the kernel only its core time.
            with_accuracy: return the errors of right outputs too, not only of wrong outputs.
        """

    def judge_samples(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        samples: list[Sample],
        chosen: Tensor | None,
    ) -> str:
        """Return what is wrong with rows of timed samples; empty if all rows are right."""

    def clock(
        self, kernel: str, run: Callable[[], Tensor], device: torch.device, call_ms: float
    ) -> Tensor | None:
        """Time a block of calls by a clock that the kernel cannot reach, if such a clock exists.

        Returns:
            The output of `run` if `run` was called exactly once; otherwise None.

        Args:
            call_ms: time of a call in the kernel's samples.
        """


BLOCK_MS = 10.0
MOST_CALLS = 1000


def block_of_calls(run: Callable[[], T], device: torch.device, calls: int) -> T:
    """Run this many calls in a row, wait until all are done, and return the last output."""
    for _ in range(calls - 1):
        run()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result


class LocalJudge:
    """Judge in the process that runs the kernels.

    Args:
        seed: seed of the perturbations.
        compared: output of the kernel that `errors_against` names, if any.
        thresholds: thresholds that outputs are judged by.
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
            spoilt_rows=verdict.spoilt_rows,
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
        # One small computation on the CPU judges all samples, each against its own limits.
        with _one_thread():
            right = Expected.of_heads(side_by_side(*made)) if made else []
        for rows, expected_rows in zip(found, right, strict=True):
            if wrong := _wrong_rows(rows, expected_rows, expected.tolerance, factors):
                return wrong
        return ""

    def clock(
        self, kernel: str, run: Callable[[], Tensor], device: torch.device, call_ms: float
    ) -> None:
        """Do nothing, because a kernel can reach every clock of its own process."""

    def _expected_of(self, kernel: str, chosen: Tensor | None) -> Expected:
        if chosen is None:
            return self._expected
        if kernel not in self._chosen:
            self._chosen[kernel] = Expected.of(self._call, chosen)
        return self._chosen[kernel]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one CPU thread for many small operations.

    Several threads wait for each other after each operation. On a busy machine (two cores, a load
    of 3) two threads took 2,240 ms and one thread 45 ms.
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
    """Return why rows (n, Dv) of a timed sample are wrong; empty if all rows are right.

    Args:
        whole: tolerance of the whole output, for the recorded inputs.
    """
    right = expected.reference[0, 0]
    rows = rows.to(right.device)
    error = rows.to(torch.float64) - right.to(torch.float64)
    odd = ~rows.isfinite() & right.isfinite()
    if expected.exposed is not None:
        odd &= ~expected.exposed[0, 0, :, None].to(odd.device)
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
    # Late rows of a long causal call are small, so a stale row could stay below the maximum error.
    lengths = torch.linalg.vector_norm(right.to(torch.float64).nan_to_num(), dim=-1)
    noise = limit * math.sqrt(rows.shape[-1])
    far = torch.linalg.vector_norm(error, dim=-1) > WRONG_DIRECTION * lengths
    if (far & (lengths > RELIABLE_LENGTH * noise)).any():
        return f"a row's error is more than {WRONG_DIRECTION:.0%} of its length"
    return ""


WRONG_DIRECTION = 0.5
"""Largest error of a row as a share of the row's norm; rounding to 16 bits causes a hundredth."""
RELIABLE_LENGTH = 4
"""Minimum norm of a row that is judged by its direction, in units of the row's noise."""

QUANTISED_SLACK = 3.0
"""Largest mean relative L2 error of a sample's rows, in units of the largest allowed relative L1 of
the whole output; an honest 8-bit kernel stays below a tenth."""


def _both(mask: Tensor | None, chosen: Tensor) -> Tensor:
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return torch.where(chosen, mask, float("-inf"))
