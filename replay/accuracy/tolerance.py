"""How far an exact kernel's output may be from the reference on one call.

No limit here is a constant that looked comfortable: the error allowed on a call is measured on that
call, with eager attention in the call's own dtype. `replay.accuracy.judge` applies it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy.errors import check_comparable, chunks, cosines
from replay.rows.meaning import COSINE_NOISE

RELIABLE_LENGTH = 4
"""A row that is not this many times as long as its own eager or rounding error has no direction to
judge by: cancellation or underflow has left mostly noise in it."""

RELIABLE_WIDTH = 16
"""Rows of fewer numbers are not judged by direction. Their error is a handful of random numbers,
so the eager kernel's can be near zero by luck where an honest kernel's is not (a row of one number
can only keep its sign or lose it)."""


@dataclass(frozen=True)
class RowTolerance:
    """The angular error an exact kernel's row may have: 1 - its cosine with the reference's row."""

    same_dtype: float
    """The largest angular error of the plain formula computed in the call's dtype."""
    rounding: float
    """The largest angular error of the reference rounded to the call's dtype."""
    reliable: Tensor = field(repr=False, compare=False)
    """(B, Hq, Sq) bool: the rows whose direction is more than noise; see `tolerance`."""

    @property
    def limit(self) -> float:
        return 2 * self.same_dtype + self.rounding


@dataclass(frozen=True)
class Tolerance:
    """The error an exact kernel may have on one call, derived from that call's own data."""

    same_dtype_error: float
    """max|O_same_dtype - reference|: the plain formula computed in the call's dtype."""
    rounding: float
    """The most that rounding alone does, whatever the order of a kernel's sums: see `tolerance`."""
    rows: RowTolerance | None = None
    """None where the direction of rows is not judged."""

    @property
    def limit(self) -> float:
        return 2 * self.same_dtype_error + self.rounding


def tolerance(call: AttentionCall, same_dtype_output: Tensor, reference: Tensor) -> Tolerance:
    """What the exactness rule allows for `call`, from both outputs of `replay.accuracy.reference`.

    `rounding` is max|reference rounded to the call's dtype - reference|. A float32 call adds the
    noise of float32 sums: its eager error depends so much on their order (a product with one query
    row is summed differently from one with many) that honest kernels would exceed twice that error
    now and then.

    Calls of 16 bits with Dv ≥ `RELIABLE_WIDTH` also get `rows`, over the rows that are at least
    `RELIABLE_LENGTH` times as long as their errors, both eager and of rounding. A row of zeros, as
    where everything is masked, has no direction and is left to the maximum.

    Elements that are not finite in the same-dtype output (float16 overflows) or in the reference
    give no error to allow and are left out, as are their rows.

    Raises:
        ValueError: the outputs' shapes differ, are not four-dimensional, or hold nothing.
    """
    check_comparable(same_dtype_output, reference)
    same_dtype_error = rounding = same_dtype_angle = rounding_angle = 0.0
    reliable = torch.zeros(reference.shape[:3], dtype=torch.bool, device=reference.device)
    for rows, part, expected in chunks(same_dtype_output, reference):
        rounded = expected.to(call.dtype).to(torch.float64)
        same_dtype_error = max(same_dtype_error, _largest_finite(part - expected))
        rounding = max(rounding, _largest_finite(rounded - expected))
        noise = torch.maximum(_lengths(part - expected), _lengths(rounded - expected))
        trusted = noise * RELIABLE_LENGTH < _lengths(expected)
        reliable[:, :, rows] = trusted
        same_dtype_angle = max(
            same_dtype_angle, _largest_finite(angular_errors(part, expected)[trusted])
        )
        rounding_angle = max(
            rounding_angle, _largest_finite(angular_errors(rounded, expected)[trusted])
        )
    if call.dtype.itemsize >= 4:
        return Tolerance(same_dtype_error, rounding + _summation_noise(call))
    if reference.shape[3] < RELIABLE_WIDTH or not reliable.any():
        return Tolerance(same_dtype_error, rounding)
    by_row = RowTolerance(same_dtype_angle, rounding_angle + COSINE_NOISE, reliable)
    return Tolerance(same_dtype_error, rounding, by_row)


def angular_errors(part: Tensor, expected: Tensor) -> Tensor:
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
