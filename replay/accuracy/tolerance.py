"""The error that an exact kernel's output may have on one call.

The tolerance comes from the error of eager attention on the call, in the call's own dtype, and from
a model of each row's rounding. `replay.accuracy.verdict` applies the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.errors import check_comparable, chunks
from replay.accuracy.nonfinite import largest_scores
from replay.accuracy.thresholds import ExactThresholds

ROWS_OF_A_HEAD = 32
"""Minimum number of rows for a head to have its own worst eager row; smaller heads share one."""

SHARED_NOISE = 0.5
"""Share of the rounding noise of 16 bits that rows may have in common. With `rounding_factor` (4),
it allows two roundings each of probabilities and outputs, because rows with equal keys and values
round equally. A GPU's matrix units truncate sums to 24 bits after every 16 keys: with 128k keys,
this equals half a rounding in float16, and a sixteenth in bfloat16."""

SHARED_NOISE_OF_SUMS = 1.0
"""Share of the noise in 32 bits that rows may have in common. This noise comes from sums, and sums
of equal terms have equal errors."""


@dataclass(frozen=True)
class RowTolerance:
    """Rounding errors of the rows of one call."""

    noise: Tensor = field(repr=False)
    """(B, Hq, Sq) in float64: result of `rounding_noise`, NaN or infinite where it is unknown."""
    eager: Tensor = field(repr=False)
    """(B, Hq, 1): the same-dtype error of a head's worst row, in units of that row's `noise`."""
    eager_bias: Tensor = field(repr=False)
    """(B, Hq, 1): the part of the same-dtype error that is common to a head's rows, in units of the
    rows' mean `noise` (see `bias_limits`)."""
    shared: float = SHARED_NOISE
    """Share of `noise` that rows may have in common."""

    def limits(self, thresholds: ExactThresholds) -> Tensor:
        """Return the largest allowed ‖output - reference‖ of each row: (B, Hq, Sq)."""
        factors = thresholds.rounding_factor + thresholds.same_dtype_factor * self.eager
        return self.noise * factors

    def bias_limits(self, lengths: Tensor, thresholds: ExactThresholds) -> Tensor:
        """Return the largest allowed |Σ (output - reference) · reference| over a head's rows.

        If a kernel computes a different attention in every row, for example with one key too many,
        the sum grows with the number n of rows; with independent rounding errors it grows with √n.
        The limit adds the rounding error that rows have in common: a share of the noise (`shared`),
        and the common error of eager attention. The result is (B, Hq).

        Args:
            lengths: (B, Hq, S), ‖reference‖ of each row.
        """
        limits, noise = (
            (values.to(lengths.device) * lengths).nan_to_num(0.0, 0.0)
            for values in (self.limits(thresholds), self.noise)
        )
        eager_bias = self.eager_bias[..., 0].to(lengths.device)
        shared = (
            thresholds.rounding_factor * self.shared + thresholds.same_dtype_factor * eager_bias
        )
        return torch.linalg.vector_norm(limits, dim=-1) + shared * noise.sum(-1)


@dataclass(frozen=True)
class Tolerance:
    """Error that an exact kernel may have on one call, derived from the call's data."""

    same_dtype_error: float
    """max|O_same_dtype - reference| of the plain formula in the call's dtype, in the less accurate
    of its forms (`replay.accuracy.reference.same_dtype`)."""
    rounding: float
    """Largest error from rounding alone, for any order of a kernel's sums (see `tolerance`)."""
    noise: float = 0.0
    """Largest rounding noise of a row, per element."""
    rows: RowTolerance | None = field(default=None, compare=False)

    def limit(self, thresholds: ExactThresholds) -> float:
        """Return the largest allowed |output - reference|."""
        measured = thresholds.same_dtype_factor * self.same_dtype_error + self.rounding
        return max(measured, thresholds.rounding_factor * self.noise)


def tolerance(
    call: AttentionCall, same_dtype_outputs: Sequence[Tensor], reference: Tensor, spread: Tensor
) -> Tolerance:
    """Compute the exactness rule's tolerance of `call`, from the results of the reference.

    `rounding` is max|reference rounded to the call's dtype - reference|. For float32 calls it also
    includes the noise of float32 sums. The eager error depends on the order of these sums: a
    product with one query row is summed differently from a product with many rows. If `rounding`
    left out this noise, honest kernels would sometimes exceed twice the eager error.

    Each same-dtype error is the larger error of the outputs. Rows with an element that is infinite
    or NaN in a same-dtype output or in the reference are left out. Rows whose float16 scores
    overflow have the error of float32 scores instead (`_noise_of_large_scores`).

    Args:
        same_dtype_outputs: one or two outputs of `replay.accuracy.reference.same_dtype`.
        spread: (B, Hq, Sq), from `replay.accuracy.reference.attention_and_spread`.

    Raises:
        ValueError: the outputs' shapes differ, are not four-dimensional, or are empty.
    """
    for output in same_dtype_outputs:
        check_comparable(output, reference)
    rounding = 0.0
    noise = torch.empty(reference.shape[:3], dtype=torch.float64, device=reference.device)
    lengths = torch.empty_like(noise)
    for rows, expected, _ in chunks(reference, reference):
        rounded = expected.to(call.dtype).to(torch.float64)
        rounding = max(rounding, _largest_finite(rounded - expected))
        lengths[:, :, rows] = torch.linalg.vector_norm(expected, dim=-1)
        noise[:, :, rows] = rounding_noise(
            lengths[:, :, rows], spread[:, :, rows], call, reference.shape[3]
        )
    shared = SHARED_NOISE
    if call.dtype.itemsize >= 4:
        shared = SHARED_NOISE_OF_SUMS
        true = call.without_scales()
        # The error of a sum of n rounded terms is √n·u of their size (Higham and Mary 2019, "A new
        # approach to probabilistic rounding error analysis"). The error of a score is u times the
        # product of its vectors' norms.
        terms = math.sqrt(call.shape.kv_len) + _largest_score(true)
        noise *= terms
        rounding += torch.finfo(call.dtype).eps / 2 * _largest_finite(true.value) * terms
    noise *= _noise_of_large_scores(call, same_dtype_outputs[0], reference)
    return _with_eager_errors(same_dtype_outputs, reference, noise, lengths, rounding, shared)


def tolerance_of_gradient(
    call: AttentionCall, same_dtype: Sequence[Tensor], reference: Tensor, noise: Tensor
) -> Tolerance:
    """Compute the exactness rule's tolerance of a gradient of `call`, as `tolerance` of an output.

    Args:
        same_dtype: the gradient in the call's dtype, from one or two forms of eager attention.
        reference: four-dimensional gradient in float64.
        noise: `replay.accuracy.gradient_reference.Gradient.noise` of the reference.
    """
    limits, shared = torch.finfo(call.dtype), SHARED_NOISE
    smallest = limits.tiny * limits.eps * math.sqrt(reference.shape[3])
    noise = noise * (limits.eps / 2) + smallest
    rounding = _largest_finite(reference.to(call.dtype).double() - reference)
    if call.dtype.itemsize >= 4:
        shared = SHARED_NOISE_OF_SUMS
        shape = call.shape
        longest = max(shape.kv_len, shape.q_len * shape.q_heads // shape.kv_heads)
        noise *= math.sqrt(longest) + _largest_score(call)
        rounding += _largest_finite(noise) / math.sqrt(reference.shape[3])
    lengths = torch.linalg.vector_norm(reference, dim=-1)
    # An error of a probability has the direction of the row, so it is largest where the row is.
    even = 1 / math.sqrt(reference.shape[3])
    peaks = (reference.abs().amax(-1) / lengths).nan_to_num(nan=even)
    per_element = _largest_finite(noise * peaks)
    allowed = _with_eager_errors(same_dtype, reference, noise, lengths, rounding, shared)
    return replace(allowed, noise=per_element)


def _with_eager_errors(
    same_dtype_outputs: Sequence[Tensor],
    reference: Tensor,
    noise: Tensor,
    lengths: Tensor,
    rounding: float,
    shared: float,
) -> Tolerance:
    """Return a tolerance with the errors of eager attention; `lengths` is overwritten."""
    weight = lengths.mul_(noise)
    eager = [_eager_errors(output, reference, noise, weight) for output in same_dtype_outputs]
    errors, worst, bias = zip(*eager, strict=True)
    per_element = _largest_finite(noise) / math.sqrt(reference.shape[3])
    rows_allowed = RowTolerance(noise, _largest(worst), _largest(bias), shared)
    return Tolerance(max(errors), rounding, per_element, rows_allowed)


def tolerances_of_heads(
    call: AttentionCall, same_dtype_outputs: Sequence[Tensor], reference: Tensor, spread: Tensor
) -> list[Tolerance]:
    """Compute the `tolerance` of each head of a call by itself, without a `RowTolerance`.

    All heads are computed at once, because each head alone would take about fifty small operations.

    Args:
        same_dtype_outputs, reference, spread: see `tolerance`; no two heads share a key head.
    """
    exact = reference.to(torch.float64)
    rounding = _largest_finite_of_heads(exact.to(call.dtype).to(torch.float64) - exact)
    lengths = torch.linalg.vector_norm(exact, dim=-1)
    noise = rounding_noise(lengths, spread, call, exact.shape[3])
    if call.dtype.itemsize >= 4:
        true = call.without_scales()
        query_norm, key_norm = (
            _largest_finite_of_heads(torch.linalg.vector_norm(tensor, dim=-1)).to(exact)
            for tensor in (true.query, true.key)
        )
        terms = math.sqrt(call.shape.kv_len) + abs(call.softmax_scale) * query_norm * key_norm
        noise *= terms[:, None]
        values = _largest_finite_of_heads(true.value).to(exact)
        rounding += torch.finfo(call.dtype).eps / 2 * values * terms
    noise *= _noise_of_large_scores(call, same_dtype_outputs[0], exact)
    errors = [_largest_finite_of_heads(output.to(exact) - exact) for output in same_dtype_outputs]
    per_element = _largest_finite_of_heads(noise) / math.sqrt(exact.shape[3])
    of_heads = torch.stack((_largest(errors), rounding, per_element), dim=1).tolist()
    return [Tolerance(*figures) for figures in of_heads]


def _eager_errors(
    same_dtype_output: Tensor, reference: Tensor, noise: Tensor, weight: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Return `same_dtype_error`, `eager` and `eager_bias` of one same-dtype output.

    Args:
        noise: (B, Hq, Sq), the noise of each row.
        weight: (B, Hq, Sq), ‖reference‖ · noise of each row.
    """
    largest = 0.0
    eager, along = torch.empty_like(noise), torch.empty_like(noise)
    for rows, part, expected in chunks(same_dtype_output, reference):
        error = part - expected
        largest = max(largest, _largest_finite(error))
        eager[:, :, rows] = torch.linalg.vector_norm(error, dim=-1)
        along[:, :, rows] = (error * expected).sum(-1)
    eager /= noise
    worst = eager.masked_fill_(~eager.isfinite(), 0.0).amax(dim=2, keepdim=True)
    known = along.isfinite() & weight.isfinite()
    along, weight = (sums.masked_fill(~known, 0.0).sum(2, True) for sums in (along, weight))
    bias = (along.abs() / weight).nan_to_num(0.0, 0.0)
    if eager.shape[2] < ROWS_OF_A_HEAD:
        worst, bias = (figures.amax().expand_as(figures) for figures in (worst, bias))
    return largest, worst, bias


def _noise_of_large_scores(
    call: AttentionCall, same_dtype_output: Tensor, reference: Tensor
) -> Tensor | float:
    """Return the factor of each row's noise by which float32 scores increase it: (B, Hq, Sq).

    Only rows whose scores overflow in float16 have a factor, because no eager error exists there. A
    score s has an error of √D · u₃₂ · |s| in float32, which is the relative error of its
    probability.
    """
    lost = (~same_dtype_output.isfinite() & reference.isfinite()).any(-1)
    if call.dtype != torch.float16 or not bool(lost.any()):
        return 1.0
    scores = largest_scores(call).to(lost.device, torch.float64) * abs(call.softmax_scale)
    per_score = math.sqrt(call.shape.head_dim) * torch.finfo(torch.float32).eps
    errors = scores * (per_score / torch.finfo(call.dtype).eps)
    return torch.hypot(torch.ones_like(errors), errors.masked_fill_(~lost, 0.0))


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(tensors)).amax(dim=0)


def rounding_noise(lengths: Tensor, spread: Tensor, call: AttentionCall, v_head_dim: int) -> Tensor:
    """Return u · √(‖o‖² + Σⱼ pⱼ²‖vⱼ‖²) of each row, where u is half the call's machine epsilon.

    A kernel of 16 bits rounds its output and its probabilities, each with an independent relative
    error of at most u. A sum of independent vectors of mean zero and lengths of at most cⱼ is
    longer than t · √Σcⱼ² with a probability of at most 2·exp(-t²/2), whatever their number and
    dimension (Pinelis 1994, "Optimum bounds for the distributions of martingales in Banach spaces",
    theorem 3.5). Here cⱼ = u·pⱼ‖vⱼ‖. So the bound holds for rows of one key or of thousands, and
    for rows whose terms cancel.

    Below the smallest normal number, rounding has the size of the smallest subnormal number.

    Args:
        lengths: ‖o‖ of each row of the reference.
        spread: √Σⱼ pⱼ²‖vⱼ‖² of each row.
    """
    limits = torch.finfo(call.dtype)
    smallest = limits.tiny * limits.eps * math.sqrt(v_head_dim)
    return torch.hypot(lengths, spread.to(lengths)) * (limits.eps / 2) + smallest


def _largest_score(call: AttentionCall) -> float:
    """Return a bound of the scores, scale · max‖q‖ · max‖k‖."""
    query_norm, key_norm = (
        _largest_finite(torch.linalg.vector_norm(tensor, dim=-1))
        for tensor in (call.query, call.key)
    )
    return abs(call.softmax_scale) * query_norm * key_norm


def _largest_finite_of_heads(tensor: Tensor) -> Tensor:
    """Return the largest finite magnitude of each head of (B, H, …): (H,); 0 if there is none."""
    heads = tensor.transpose(0, 1).flatten(1)
    if not heads.shape[1]:  # no keys
        return heads.new_zeros(len(heads))
    # NaN stays NaN. On a CPU, `aminmax` of a dimension takes twenty times as long.
    largest = torch.maximum(-heads.amin(1), heads.amax(1))
    if bool(largest.isfinite().all()):
        return largest
    magnitudes = heads.abs()
    return magnitudes.masked_fill_(~magnitudes.isfinite(), 0.0).amax(1)


def _largest_finite(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    magnitudes = tensor.abs()
    return float(magnitudes.masked_fill_(~magnitudes.isfinite(), 0.0).amax())
