"""The judge of outputs on one call. It runs no kernel, and may be in another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import DIFFERENTIATED, GRADIENTS
from replay.accuracy.errors import compare, summary
from replay.accuracy.gradient_verdict import expected_gradients, verdict_of
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.thresholds import ExactThresholds, QuantisedThresholds, Thresholds
from replay.accuracy.tolerance import Tolerance
from replay.accuracy.verdict import Expected, judge
from replay.isolation.block import BlockVerdict
from replay.isolation.block_inputs import BlockInputs, draw_rows, one_thread
from replay.isolation.output_rows import side_by_side, some_rows
from replay.kernels.failures import Finding
from replay.rows.errors_of_output import (
    Accuracy,
    AccuracyClass,
    Errors,
    GradientErrors,
    Gradients,
    Summary,
)

SLACK = 2.0
"""Factor that widens the tolerance of a block's rows, whose inputs differ from the recorded inputs.
These rows only have to reveal results that are stale, skipped or of lower precision."""
SHARE_SLACK = 1.1
"""Largest factor by which a sparse kernel's share of chosen keys may grow or shrink from its first
call to a block, because fewer keys take less time. The share that it leaves out may not grow more
either, because a free choice makes it easy to find keys that fit an old output."""


@dataclass(frozen=True)
class Judged:
    """Judgement of a kernel's output."""

    finding: Finding
    accuracy: Accuracy | None
    """Errors of the output; None for a right output judged with `with_accuracy=False`."""
    kept: float | None = None
    output_summary: Summary | None = None
    reference_summary: Summary | None = None


@dataclass(frozen=True)
class JudgedGradients:
    """Judgement of the gradients that a kernel's backward pass returned."""

    finding: Finding
    errors: Gradients | None = None
    """Errors of the gradients; None if one of them is missing."""


Choose = Callable[[int], Tensor]


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
            of_core: whether the kernel's core returned the output. If it is wrong, only the core
                time is discarded.
            with_accuracy: return the errors of right outputs too, not only of wrong outputs.
        """

    def judge_gradients(
        self, kernel: str, accuracy_class: AccuracyClass, gradients: dict[str, Tensor]
    ) -> JudgedGradients:
        """Judge the gradients of query, key and value, by name, for the call's `grad_output`."""

    def begin_block(self, kernel: str, calls: int) -> tuple[int, list[Tensor]]:
        """Start the clock of a block of calls.

        Returns:
            The seed of the block's inputs, and a tensor (B, Hq, Sq, Dv) for each call's output.
        """

    def end_block(
        self,
        accuracy_class: AccuracyClass,
        wrong: str,
        restore: Callable[[], None],
        choose: Choose | None,
    ) -> BlockVerdict:
        """Stop the clock, draw rows of the outputs, and judge them.

        Args:
            wrong: why an output's form is wrong; empty if all forms are right.
            restore: writes the recorded inputs, after the clock has stopped.
            choose: returns the keys that a sparse kernel chose in a call, given the call's number.
        """


class LocalJudge:
    """Judge in this process (`replay.workers.remote_judge` reaches one in another process).

    Args:
        compared: output of the kernel that `errors_against` names, if any.
        thresholds: limits for errors.
    """

    def __init__(
        self,
        call: AttentionCall,
        errors_against: str = "reference",
        compare_stats: bool = False,
        compared: Tensor | None = None,
        thresholds: Thresholds = Thresholds(),  # noqa: B008 - it is immutable
    ) -> None:
        self.call = call.without_gradients()
        self._with_gradients = call
        self._thresholds = thresholds
        self._errors_against = errors_against
        self._compare_stats = compare_stats
        self.compared = compared
        self._expected = Expected.of(call)
        self._chosen: dict[str, Expected] = {}
        """Right output for the recorded inputs, on the keys that each sparse kernel chose first."""
        self.other_shares: dict[str, str] = {}
        """Sentence for each sparse kernel that chose another share of the keys in a block."""
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
        reference, captured = self._expected.reference, self.call.output
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
            tolerance_ratio=verdict.tolerance_ratio,
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

    def judge_gradients(
        self, kernel: str, accuracy_class: AccuracyClass, gradients: dict[str, Tensor]
    ) -> JudgedGradients:
        for name in DIFFERENTIATED:
            if name not in gradients:
                reason = f"its backward returns no {GRADIENTS[name]}"
                return JudgedGradients(Finding("inaccurate", reason))
        try:
            expected = self._expected_gradients
        except ValueError as error:
            return JudgedGradients(Finding("unsupported", str(error)))
        call, found = self._with_gradients, {name: gradients[name] for name in DIFFERENTIATED}
        verdict = verdict_of(call, found, expected, self._thresholds, accuracy_class)
        errors = {
            name: GradientErrors(
                each.tolerance_ratio,
                each.errors.relative_l1,
                each.errors.max_abs,
                None if each.passed else each.where,
            )
            for name, each in verdict.verdicts.items()
        }
        finding = Finding("ok" if verdict.passed else "inaccurate", verdict.sentence)
        return JudgedGradients(finding, Gradients(**errors))

    @cached_property
    def _expected_gradients(self) -> dict[str, Expected]:
        assert self._with_gradients.grad_output is not None
        return expected_gradients(self.call, self._with_gradients.grad_output)

    def judge_block(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        seed: int,
        outputs: Sequence[Tensor],
        drawn: int,
        chosen: Iterable[tuple[int, Tensor]] | None,
    ) -> str:
        """Return why rows of a block's outputs are wrong; empty if all rows are right.

        Args:
            seed: seed of the block's inputs (`replay.isolation.block_inputs`).
            outputs: outputs of all calls, (B, Hq, Sq, Dv) each.
            drawn: random number, drawn after the block, that determines the rows.
            chosen: number of each examined call, and the keys that a sparse kernel chose in it;
                read while the recorded inputs are in place. None for other kernels.
        """
        expected = self._expected if chosen is None else self._chosen[kernel]
        inputs = BlockInputs(self.call)
        factors = self._thresholds.of(accuracy_class)
        examined = draw_rows(self.call, len(outputs), drawn)
        parts, found, numbers = [], [], []
        try:
            inputs.draw(seed, len(outputs))
            for number, keys in dict.fromkeys(examined).items() if chosen is None else chosen:
                inputs.apply(number, outputs[number - 1] if number else None)
                changed, groups = self.call.without_pages(), examined[number]
                if keys is not None:
                    changed = self._on_keys(changed, kernel, keys)
                parts += [side_by_side(some_rows(changed, rows)) for rows in groups]
                found += [rows.of(outputs[number]) for rows in groups]
                numbers += [number] * len(groups)
                inputs.restore()
        finally:
            inputs.restore()
        with one_thread():
            elements = max(parts[0].key.numel() + parts[0].value.numel(), 1)
            for start in range(0, len(parts), step := max(MOST_ELEMENTS // elements, 1)):
                at_once = slice(start, start + step)
                right = Expected.of_heads(side_by_side(*parts[at_once]))
                for number, rows, each in zip(numbers[at_once], found[at_once], right, strict=True):
                    for allowed in expected.tolerances(_largest_error(rows, each)):
                        if not (wrong := _wrong_rows(rows, each, allowed, factors)):
                            break
                    else:
                        return f"call {number} of a block: {wrong}"
        return ""

    def _expected_of(self, kernel: str, chosen: Tensor | None) -> Expected:
        if chosen is None:
            return self._expected
        if kernel not in self._chosen:
            self._chosen[kernel] = Expected.of(self.call, chosen)
        return self._chosen[kernel]

    def _on_keys(self, call: AttentionCall, kernel: str, chosen: Tensor) -> AttentionCall:
        """Return a block's call on the keys that a sparse kernel chose, and note their share."""
        kept = restricted(call, chosen)
        found, first = kept_share(call, kept), self._chosen[kernel].kept or 0.0
        is_alike = first / SHARE_SLACK <= found <= first * SHARE_SLACK
        if not is_alike or 1 - found > (1 - first) * SHARE_SLACK:
            sentence = f"it chose {found:.3g} of the keys in a block, {first:.3g} in its first call"
            self.other_shares[kernel] = sentence
        return kept


def _largest_error(rows: Tensor, expected: Expected) -> float:
    right = expected.reference[0, 0].to(torch.float64)
    error = (rows.to(right) - right).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(error.amax()) if error.numel() else 0.0


def _wrong_rows(
    rows: Tensor,
    expected: Expected,
    whole: Tolerance,
    factors: ExactThresholds | QuantisedThresholds,
) -> str:
    """Return why rows (n, Dv) of a block are wrong; empty if all rows are right.

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
        if expected.spread is not None:  # terms may cancel, but their 8-bit errors do not
            lengths = torch.hypot(lengths, expected.spread[0, 0].to(lengths).nan_to_num())
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
    # Late rows of a long causal call are small, so a stale row could stay below this limit.
    lengths = torch.linalg.vector_norm(right.to(torch.float64).nan_to_num(), dim=-1)
    noise = limit * math.sqrt(rows.shape[-1])
    far = torch.linalg.vector_norm(error, dim=-1) > WRONG_DIRECTION * lengths
    if (far & (lengths > RELIABLE_LENGTH * noise)).any():
        return f"a row's error is more than {WRONG_DIRECTION:.0%} of its length"
    return ""


MOST_ELEMENTS = 2**27
"""Maximum number of elements of keys and values that are used in one computation."""
WRONG_DIRECTION = 0.5
"""Largest error of a row, as a share of the row's norm. Rounding to 16 bits causes 0.01."""
RELIABLE_LENGTH = 4
"""Smallest norm, in units of the row's noise, of a row for which `WRONG_DIRECTION` counts."""

QUANTISED_SLACK = 4.0
"""Largest mean relative L2 error of a block's rows, in units of the largest allowed relative L1 of
the whole output. An honest 8-bit kernel stays below a tenth of this limit."""
