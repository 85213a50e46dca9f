"""How far an exact kernel's output may be from the reference on one call.

No limit here is a constant that looked comfortable: the error allowed on a call is measured on that
call, with eager attention in the call's own dtype (of 16 bits in two forms, of which the larger
error counts), and with a model of what rounding does to each of its rows.
`replay.accuracy.verdict` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.errors import check_comparable, chunks
from replay.accuracy.thresholds import ExactThresholds

ROWS_OF_A_HEAD = 32
"""A head with fewer rows is no sample: the worst eager row is then that of all heads."""

SHARED_NOISE = 0.5
"""Of its rounding noise, what a row of 16 bits may have in common with others: four times that is
two roundings of each, of probabilities and of outputs, which are equal where keys and values are. A
GPU's matrix units cut sums off at 24 bits where others round, after every 16 keys: of 128k keys,
half a rounding in float16, and a sixteenth in bfloat16."""

SHARED_NOISE_OF_SUMS = 1.0
"""Of 32 bits, whose noise is that of sums: each addition of equal terms may err the same way."""


@dataclass(frozen=True)
class RowTolerance:
    """What rounding does to the rows of one call."""

    noise: Tensor = field(repr=False)
    """(B, Hq, Sq) in float64: see `rounding_noise`. NaN or infinite where nothing can be said."""
    eager: Tensor = field(repr=False)
    """(B, Hq, 1): the same-dtype error of a head's worst row, in units of its `noise`."""
    eager_bias: Tensor = field(repr=False)
    """(B, Hq, 1): the part of the same-dtype error that a head's rows have in common, in units of
    their mean `noise`: see `bias_limits`."""
    shared: float = SHARED_NOISE
    """Of `noise`, what rounding may have in common in all rows."""

    def limits(self, thresholds: ExactThresholds) -> Tensor:
        """(B, Hq, Sq): the largest ‖output - reference‖ of each row."""
        factors = thresholds.rounding_factor + thresholds.same_dtype_factor * self.eager
        return self.noise * factors

    def bias_limits(self, lengths: Tensor, thresholds: ExactThresholds) -> Tensor:
        """(B, Hq): the largest |Σ (output - reference) · reference| over the rows of each head.

        Where a kernel computes another attention in every row, say with one key too many, it grows
        with their number n. Rounding errors are independent: of rows at their `limits` it grows
        with √n. What rounding has in common is a share of the noise (`shared`), or what
        eager attention shows.

        Args:
            lengths: (B, Hq, S), ‖reference‖ of each row.
        """
        limits, noise = (
            (each.to(lengths.device) * lengths).nan_to_num(0.0, 0.0)
            for each in (self.limits(thresholds), self.noise)
        )
        eager_bias = self.eager_bias[..., 0].to(lengths.device)
        shared = (
            thresholds.rounding_factor * self.shared + thresholds.same_dtype_factor * eager_bias
        )
        return torch.linalg.vector_norm(limits, dim=-1) + shared * noise.sum(-1)


@dataclass(frozen=True)
class Tolerance:
    """The error an exact kernel may have on one call, derived from that call's own data."""

    same_dtype_error: float
    """max|O_same_dtype - reference|: the plain formula computed in the call's dtype, in the form
    that is further from the reference (`replay.accuracy.reference.same_dtype`)."""
    rounding: float
    """The most that rounding alone does, whatever the order of a kernel's sums: see `tolerance`."""
    noise: float = 0.0
    """The largest rounding noise of a row, per element."""
    rows: RowTolerance | None = field(default=None, compare=False)

    def limit(self, thresholds: ExactThresholds) -> float:
        """The largest |output - reference|."""
        measured = thresholds.same_dtype_factor * self.same_dtype_error + self.rounding
        return max(measured, thresholds.rounding_factor * self.noise)


def tolerance(
    call: AttentionCall, same_dtype_outputs: Sequence[Tensor], reference: Tensor, spread: Tensor
) -> Tolerance:
    """What the exactness rule allows for `call`, from the outputs of `replay.accuracy.reference`.

    `rounding` is max|reference rounded to the call's dtype - reference|. A float32 call adds the
    noise of float32 sums: its eager error depends so much on their order (a product with one query
    row is summed differently from one with many) that honest kernels would exceed twice that error
    now and then.

    Each same-dtype error is the largest of any output. Elements that are not finite in a
    same-dtype output (float16 overflows) or in the reference give no error to allow and are left
    out, as are their rows.

    Args:
        same_dtype_outputs: of `replay.accuracy.reference.same_dtype`, one or two.
        spread: (B, Hq, Sq), of `replay.accuracy.reference.attention_and_spread`.

    Raises:
        ValueError: the outputs' shapes differ, are not four-dimensional, or hold nothing.
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
        terms = _terms_of_a_sum(call)
        noise *= terms
        rounding += torch.finfo(call.dtype).eps / 2 * _largest_finite(call.value) * terms
    weight = lengths.mul_(noise)
    eager = [_eager_errors(output, reference, noise, weight) for output in same_dtype_outputs]
    errors, worst, bias = zip(*eager, strict=True)
    per_element = _largest_finite(noise) / math.sqrt(reference.shape[3])
    rows_allowed = RowTolerance(noise, _largest(worst), _largest(bias), shared)
    return Tolerance(max(errors), rounding, per_element, rows_allowed)


def tolerances_of_heads(
    call: AttentionCall, same_dtype_outputs: Sequence[Tensor], reference: Tensor, spread: Tensor
) -> list[Tolerance]:
    """`tolerance` of each head of a call alone, without what it allows each row.

    All heads at once, for a few rows of many: of one head it is some fifty small operations.

    Args:
        same_dtype_outputs, reference, spread: as those of `tolerance`; no two heads share a key
            head.
    """
    exact = reference.to(torch.float64)
    rounding = _largest_finite_of_heads(exact.to(call.dtype).to(torch.float64) - exact)
    lengths = torch.linalg.vector_norm(exact, dim=-1)
    noise = rounding_noise(lengths, spread, call, exact.shape[3])
    if call.dtype.itemsize >= 4:
        query_norm, key_norm = (
            _largest_finite_of_heads(torch.linalg.vector_norm(each, dim=-1)).to(exact)
            for each in (call.query, call.key)
        )
        terms = math.sqrt(call.shape.kv_len) + abs(call.softmax_scale) * query_norm * key_norm
        noise *= terms[:, None]
        values = _largest_finite_of_heads(call.value).to(exact)
        rounding += torch.finfo(call.dtype).eps / 2 * values * terms
    errors = [_largest_finite_of_heads(each.to(exact) - exact) for each in same_dtype_outputs]
    per_element = _largest_finite_of_heads(noise) / math.sqrt(exact.shape[3])
    of_heads = torch.stack((_largest(errors), rounding, per_element), dim=1).tolist()
    return [Tolerance(*each) for each in of_heads]


def _eager_errors(
    same_dtype_output: Tensor, reference: Tensor, noise: Tensor, weight: Tensor
) -> tuple[float, Tensor, Tensor]:
    """`same_dtype_error`, `eager` and `eager_bias` of one same-dtype output.

    Args:
        noise: (B, Hq, Sq), of each row.
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
    along, weight = (each.masked_fill(~known, 0.0).sum(2, True) for each in (along, weight))
    bias = (along.abs() / weight).nan_to_num(0.0, 0.0)
    if eager.shape[2] < ROWS_OF_A_HEAD:
        worst, bias = (each.amax().expand_as(each) for each in (worst, bias))
    return largest, worst, bias


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Element by element."""
    return torch.stack(tuple(tensors)).amax(dim=0)


def rounding_noise(lengths: Tensor, spread: Tensor, call: AttentionCall, v_head_dim: int) -> Tensor:
    """u · √(‖o‖² + Σⱼ pⱼ²‖vⱼ‖²) of each row, where u is half the call's machine epsilon.

    A kernel of 16 bits rounds its probabilities, an independent relative error of at most u each,
    and its output. A sum of independent vectors of mean zero and lengths of at most cⱼ is longer
    than t · √Σcⱼ² with a probability of at most 2·exp(-t²/2), whatever their number and dimension
    (Pinelis 1994, "Optimum bounds for the distributions of martingales in Banach spaces", theorem
    3.5); cⱼ is u·pⱼ‖vⱼ‖ here. This holds for a row of one key as for one of thousands, and for a
    row whose terms cancel.

    Below the smallest normal number, rounding has the size of the smallest number there is.

    Args:
        lengths: ‖o‖ of each row of the reference.
        spread: √Σⱼ pⱼ²‖vⱼ‖² of each.
    """
    limits = torch.finfo(call.dtype)
    smallest = limits.tiny * limits.eps * math.sqrt(v_head_dim)
    return torch.hypot(lengths, spread.to(lengths)) * (limits.eps / 2) + smallest


def _terms_of_a_sum(call: AttentionCall) -> float:
    """√Sk + scale · max‖q‖ · max‖k‖: what float32 sums err by, in units of u times their terms.

    A sum of n rounded terms errs by √n·u of their size (Higham and Mary 2019, "A new approach to
    probabilistic rounding error analysis"); a score errs by u of the norms of its vectors.
    """
    query_norm, key_norm = (
        _largest_finite(torch.linalg.vector_norm(each, dim=-1)) for each in (call.query, call.key)
    )
    return math.sqrt(call.shape.kv_len) + abs(call.softmax_scale) * query_norm * key_norm


def _largest_finite_of_heads(tensor: Tensor) -> Tensor:
    """The largest finite magnitude of each head of (B, H, …), (H,); 0 where there is none."""
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
    """The largest finite magnitude; 0 where there is none."""
    if tensor.numel() == 0:
        return 0.0
    magnitudes = tensor.abs()
    return float(magnitudes.masked_fill_(~magnitudes.isfinite(), 0.0).amax())
