"""Whether a kernel's output is right: tensors in, a verdict out.

Nothing here runs a kernel or knows the process it ran in, so that outputs can be judged elsewhere.
Quantised kernels are judged by a rule of their own and never mixed with exact ones; sparse ones are
judged as exact on the keys they chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy.errors import chunks, compare
from replay.accuracy.reference import attention, reference_dtype, same_dtype
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.tolerance import RowTolerance, Tolerance, angular_errors, tolerance
from replay.rows.row import AccuracyClass, Errors

MINIMUM_COSINE = 0.99
"""Below this a quantised output points elsewhere: working 8-bit kernels on real inputs stay above
0.99 and broken ones (lost heads, overflow, unwritten memory) fall far below."""

MAXIMUM_RELATIVE_L1 = 0.1
"""Above this a quantised output's error is a tenth of its signal, which cosine does not see when
the error is a wrong factor."""


@dataclass(frozen=True)
class Expected:
    """What an output must be, and how near."""

    reference: Tensor
    """(B, Hq, Sq, Dv) in float64 or float32."""
    tolerance: Tolerance
    kept: float | None = None
    """Of a sparse kernel, the share of (query, key) pairs that it attends to."""

    @classmethod
    def of(cls, call: AttentionCall, chosen: Tensor | None = None) -> Expected:
        """What attention to a call's keys gives, or to those of them that a kernel chose.

        Args:
            chosen: bool, True = attend, broadcasts to (B, Hq, Sq, Sk).

        Raises:
            ValueError: `chosen` has another dtype or shape.
        """
        attended = call if chosen is None else restricted(call, chosen)
        output = attention(attended, reference_dtype(call.device, call.dtype))
        allowed = tolerance(attended, same_dtype(attended), output)
        return cls(output, allowed, None if chosen is None else kept_share(call, attended))


@dataclass(frozen=True)
class Verdict:
    """Whether an output is right, why, and how far from the reference it is."""

    passed: bool
    sentence: str
    errors: Errors


def judge(output: Tensor, expected: Expected, accuracy_class: AccuracyClass) -> Verdict:
    """Whether `output`, of the reference's shape, is right for its class of kernel.

    `exact` (the kernel computes in the call's 16 or 32 bits): max|O - reference| ≤
    2 · max|O_same_dtype - reference| + rounding, the rule of FlashAttention's own tests. A long
    causal call's late rows are so small beside its first ones that losing one hides below that
    maximum, so calls of 16 bits must also have max(1 - row cosine) ≤ 2 · that of the same-dtype
    output + that of rounding. (Not those of 32: honest kernels reach 78 times that limit there, by
    the order of their sums.)

    `sparse` (it attends to keys it chose): the same rule for what attention to those keys
    gives. How far that is from attention to all keys is recorded, for the user to judge.

    `quantised`: `MINIMUM_COSINE` and `MAXIMUM_RELATIVE_L1`, which separate usable from broken; what
    is good enough for a model is for its user to decide on the recorded figures.

    Raises:
        ValueError: the output has another shape than the reference.
    """
    errors = compare(output, expected.reference)
    if errors.mismatched_nonfinite:
        passed, sentence = (
            False,
            f"{errors.mismatched_nonfinite} elements are NaN or infinite in the output and not in "
            f"the reference, or the other way round ({errors.nan_count} NaN and "
            f"{errors.inf_count} infinite in the output)",
        )
    elif accuracy_class == "quantised":
        passed, sentence = _judge_quantised(errors)
    else:
        passed, sentence = _judge_largest(errors, expected.tolerance)
        if expected.tolerance.rows is not None:
            rows_passed, rows = _judge_rows(output, expected, errors, expected.tolerance.rows)
            passed, sentence = passed and rows_passed, f"{sentence}; {rows}"
        if accuracy_class == "sparse":
            sentence = f"on the keys it chose, {sentence}"
    return Verdict(passed, sentence, errors)


def _judge_largest(errors: Errors, tolerance: Tolerance) -> tuple[bool, str]:
    passed = errors.max_abs <= tolerance.limit
    return passed, (
        f"max abs error {errors.max_abs:.2g} {'is within' if passed else 'exceeds'} "
        f"{tolerance.limit:.2g} = 2 × {tolerance.same_dtype_error:.2g} (same-dtype eager) + "
        f"{tolerance.rounding:.2g} (rounding)"
    )


def _judge_rows(
    output: Tensor, expected: Expected, errors: Errors, allowed: RowTolerance
) -> tuple[bool, str]:
    angular_error, row = 1 - errors.row_cosine_min, errors.worst_row
    # The recorded figure is of all rows: only where it is too large do we ask which ones count.
    if not angular_error <= allowed.limit:
        angular_error, row = _largest_angular_error(output, expected.reference, allowed.reliable)
    passed = angular_error <= allowed.limit
    batch, head, query = row
    return passed, (
        f"worst row (batch {batch}, head {head}, query {query}): 1 - cosine {angular_error:.2g} "
        f"{'is within' if passed else 'exceeds'} {allowed.limit:.2g} = "
        f"2 × {allowed.same_dtype:.2g} (same-dtype eager) + {allowed.rounding:.2g} (rounding)"
    )


def _judge_quantised(errors: Errors) -> tuple[bool, str]:
    cosine_passed = errors.cosine >= MINIMUM_COSINE
    error_passed = errors.relative_l1 <= MAXIMUM_RELATIVE_L1
    return cosine_passed and error_passed, (
        f"cosine {errors.cosine:.5f} is {'at least' if cosine_passed else 'below'} "
        f"{MINIMUM_COSINE}, relative L1 {errors.relative_l1:.2g} "
        f"{'is within' if error_passed else 'exceeds'} {MAXIMUM_RELATIVE_L1}"
    )


def _largest_angular_error(
    output: Tensor, reference: Tensor, reliable: Tensor
) -> tuple[float, tuple[int, int, int]]:
    """The largest angular error among the reliable rows, and its (batch, head, query)."""
    found = torch.full(reliable.shape, -math.inf, dtype=torch.float64, device=output.device)
    for rows, part, expected in chunks(output, reference):
        ignored = ~reliable[:, :, rows].to(output.device)
        found[:, :, rows] = angular_errors(part, expected).masked_fill(ignored, -math.inf)
    flat = found.argmax()
    batch, head, query = (int(place) for place in torch.unravel_index(flat, found.shape))
    return float(found.flatten()[flat]), (batch, head, query)
