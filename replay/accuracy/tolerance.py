"""Whether an output's error is small enough to call the output right.

Nothing here is a number that someone found comfortable for exact kernels: what one may err by on a
call is measured on that call, with eager attention in the call's own dtype. Quantised kernels are
judged by a rule of their own and never mixed with the exact ones; sparse ones are judged as exact
on the keys that they chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy.errors import check_comparable, chunks, cosines
from replay.rows.row import AccuracyClass, Errors

MINIMUM_COSINE = 0.99
"""Below this a quantised output points elsewhere: working 8-bit kernels on real inputs stay above
0.99 and broken ones (lost heads, overflow, unwritten memory) fall far below."""

MAXIMUM_RELATIVE_L1 = 0.1
"""Above this a quantised output's error is a tenth of its signal, which cosine does not see when
the error is a wrong factor."""

RELIABLE_LENGTH = 4
"""A row that is not this many times as long as its own eager or rounding error has no direction to
judge by: cancellation or underflow has left mostly noise in it."""

RELIABLE_WIDTH = 16
"""Rows of fewer numbers are not judged by direction. Their error is a handful of random numbers,
so the eager kernel's can be near zero by luck where an honest kernel's is not (a row of one number
can only keep its sign or lose it)."""

COSINE_NOISE = 1e-12
"""What a cosine against a float32 or float64 gold is uncertain by."""


@dataclass(frozen=True)
class RowTolerance:
    """The angular error that an exact kernel's row may have: 1 - cosine of it and the gold's."""

    same_dtype: float
    """The largest angular error of the plain formula computed in the call's dtype."""
    rounding: float
    """The largest angular error of the gold rounded to the call's dtype."""
    reliable: Tensor = field(repr=False, compare=False)
    """(B, Hq, Sq) bool: the rows whose direction is more than noise; see `tolerance`."""

    @property
    def limit(self) -> float:
        return 2 * self.same_dtype + self.rounding


@dataclass(frozen=True)
class Tolerance:
    """The error an exact kernel may have on one call, derived from that call's own data."""

    same_dtype_error: float
    """max|O_same_dtype - gold|: the plain formula computed in the call's dtype."""
    rounding: float
    """The most that rounding alone does, whatever the order of a kernel's sums: see `tolerance`."""
    rows: RowTolerance | None = None
    """None where the direction of rows is not judged."""

    @property
    def limit(self) -> float:
        return 2 * self.same_dtype_error + self.rounding


@dataclass(frozen=True)
class Verdict:
    passed: bool
    sentence: str


def tolerance(call: AttentionCall, same_dtype_output: Tensor, gold: Tensor) -> Tolerance:
    """What the exactness rule allows for `call`, from both outputs of `replay.accuracy.reference`.

    `rounding` is max|gold rounded to the call's dtype - gold|. A float32 call adds the noise of
    float32 sums: its eager error depends so much on their order (a product with one query row sums
    otherwise than one with many) that honest kernels would exceed twice that error now and then.

    Calls of 16 bits with Dv ≥ `RELIABLE_WIDTH` also get `rows`, over the rows that are at least
    `RELIABLE_LENGTH` times as long as their errors, both eager and of rounding. A row of zeros, as
    where everything is masked, has no direction and is left to the maximum.

    Elements that are not finite in the same-dtype output (float16 overflows) or in the gold give no
    error to allow and are left out, as are the rows that they stand in.

    Raises:
        ValueError: the outputs' shapes differ, are not four-dimensional, or hold nothing.
    """
    check_comparable(same_dtype_output, gold)
    same_dtype_error = rounding = same_dtype_angle = rounding_angle = 0.0
    reliable = torch.zeros(gold.shape[:3], dtype=torch.bool, device=gold.device)
    for rows, part, expected in chunks(same_dtype_output, gold):
        rounded = expected.to(call.dtype).to(torch.float64)
        same_dtype_error = max(same_dtype_error, _largest_finite(part - expected))
        rounding = max(rounding, _largest_finite(rounded - expected))
        noise = torch.maximum(_lengths(part - expected), _lengths(rounded - expected))
        told = noise * RELIABLE_LENGTH < _lengths(expected)
        reliable[:, :, rows] = told
        same_dtype_angle = max(
            same_dtype_angle, _largest_finite(_angular_errors(part, expected)[told])
        )
        rounding_angle = max(
            rounding_angle, _largest_finite(_angular_errors(rounded, expected)[told])
        )
    if call.dtype.itemsize >= 4:
        return Tolerance(same_dtype_error, rounding + _summation_noise(call))
    if gold.shape[3] < RELIABLE_WIDTH or not reliable.any():
        return Tolerance(same_dtype_error, rounding)
    by_row = RowTolerance(same_dtype_angle, rounding_angle + COSINE_NOISE, reliable)
    return Tolerance(same_dtype_error, rounding, by_row)


def judge(
    output: Tensor,
    gold: Tensor,
    errors: Errors,
    accuracy_class: AccuracyClass,
    tolerance: Tolerance | None = None,
) -> Verdict:
    """Whether `output` is right for its class of kernel; `errors` are `compare(output, gold)`.

    `exact` (the kernel computes in the call's 16 or 32 bits): max|O - gold| ≤ 2 · max|O_same_dtype
    - gold| + rounding, the rule of FlashAttention's own tests. A long causal call's late rows are
    so small beside its first ones that losing one hides below that maximum, so calls of 16 bits
    must also have max(1 - row cosine) ≤ 2 · that of the same-dtype output + that of rounding. (Not
    those of 32: honest kernels reach 78 times that limit there, by the order of their sums.)

    `sparse` (it attends to keys that it chose): the same rule, with gold, errors and tolerance of
    the call restricted to those keys (`replay.accuracy.sparse.restricted`). How far that is from
    attention to all keys is recorded and judged by nobody but the user.

    `quantised`: `MINIMUM_COSINE` and `MAXIMUM_RELATIVE_L1`, which separate usable from broken; what
    is good enough for a model is for its user to decide on the recorded figures.

    Raises:
        ValueError: class `exact` or `sparse` without a tolerance.
    """
    if errors.mismatched_nonfinite:
        return Verdict(
            False,
            f"{errors.mismatched_nonfinite} elements are NaN or infinite in the output and not in "
            f"the reference, or the other way round ({errors.nan_count} NaN and "
            f"{errors.inf_count} infinite in the output)",
        )
    if accuracy_class == "quantised":
        return _judge_quantised(errors)
    if tolerance is None:
        raise ValueError(
            f"a kernel of class {accuracy_class!r} is judged by a tolerance: pass `tolerance(...)`"
        )
    largest = _judge_largest(errors, tolerance)
    if tolerance.rows is None:
        return largest
    rows = _judge_rows(output, gold, errors, tolerance.rows)
    return Verdict(largest.passed and rows.passed, f"{largest.sentence}; {rows.sentence}")


def _judge_largest(errors: Errors, tolerance: Tolerance) -> Verdict:
    passed = errors.max_abs <= tolerance.limit
    return Verdict(
        passed,
        f"max abs error {errors.max_abs:.2g} {'is within' if passed else 'exceeds'} "
        f"{tolerance.limit:.2g} = 2 × {tolerance.same_dtype_error:.2g} (same-dtype eager) + "
        f"{tolerance.rounding:.2g} (rounding)",
    )


def _judge_rows(output: Tensor, gold: Tensor, errors: Errors, allowed: RowTolerance) -> Verdict:
    angular_error, row = 1 - errors.row_cosine_min, errors.worst_row
    # The recorded figure is of all rows: only where it is too large do we ask which ones count.
    if not angular_error <= allowed.limit:
        angular_error, row = _largest_angular_error(output, gold, allowed.reliable)
    passed = angular_error <= allowed.limit
    batch, head, query = row
    return Verdict(
        passed,
        f"worst row (batch {batch}, head {head}, query {query}): 1 - cosine {angular_error:.2g} "
        f"{'is within' if passed else 'exceeds'} {allowed.limit:.2g} = "
        f"2 × {allowed.same_dtype:.2g} (same-dtype eager) + {allowed.rounding:.2g} (rounding)",
    )


def _judge_quantised(errors: Errors) -> Verdict:
    cosine_passed = errors.cosine >= MINIMUM_COSINE
    error_passed = errors.relative_l1 <= MAXIMUM_RELATIVE_L1
    return Verdict(
        cosine_passed and error_passed,
        f"cosine {errors.cosine:.5f} is {'at least' if cosine_passed else 'below'} "
        f"{MINIMUM_COSINE}, relative L1 {errors.relative_l1:.2g} "
        f"{'is within' if error_passed else 'exceeds'} {MAXIMUM_RELATIVE_L1}",
    )


def _largest_angular_error(
    output: Tensor, gold: Tensor, reliable: Tensor
) -> tuple[float, tuple[int, int, int]]:
    """The largest angular error among the reliable rows, and its (batch, head, query)."""
    angular_errors = torch.full(
        reliable.shape, -math.inf, dtype=torch.float64, device=output.device
    )
    for rows, part, expected in chunks(output, gold):
        told = reliable[:, :, rows].to(output.device)
        angular_errors[:, :, rows] = _angular_errors(part, expected).masked_fill(~told, -math.inf)
    flat = angular_errors.argmax()
    batch, head, query = (int(place) for place in torch.unravel_index(flat, angular_errors.shape))
    return float(angular_errors.flatten()[flat]), (batch, head, query)


def _angular_errors(part: Tensor, expected: Tensor) -> Tensor:
    """1 - cosine of each row."""
    found = cosines((part * expected).sum(-1), part.square().sum(-1), expected.square().sum(-1))
    return 1 - found


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return lengths


def _summation_noise(call: AttentionCall) -> float:
    """u · max|V| · (√Sk + scale · max‖q‖ · max‖k‖), where u is half the call's machine epsilon.

    A sum of n rounded terms errs by √n·u of their size (Higham and Mary 2019, "A new approach to
    probabilistic rounding error analysis"); a score errs by u of the norms of its vectors.
    """
    query_norm, key_norm = (_largest_finite(_lengths(each)) for each in (call.query, call.key))
    unit_roundoff = torch.finfo(call.dtype).eps / 2
    terms = math.sqrt(call.shape.kv_len) + abs(call.softmax_scale) * query_norm * key_norm
    return unit_roundoff * _largest_finite(call.value) * terms


def _largest_finite(tensor: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    if tensor.numel() == 0:
        return 0.0
    magnitudes = tensor.abs()
    return float(magnitudes.masked_fill_(~magnitudes.isfinite(), 0.0).amax())
