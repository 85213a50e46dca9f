"""The verdict on a kernel's output. Nothing here runs a kernel, so another process may judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.errors import RowErrors, row_errors, unravelled
from replay.accuracy.nonfinite import largest_scores, nonfinite_inputs
from replay.accuracy.quantised import QuantisedNoise
from replay.accuracy.reference import (
    attention_and_spread,
    reference_dtype,
    same_dtype,
    summed_in_order,
)
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.thresholds import ExactThresholds, QuantisedThresholds, Thresholds
from replay.accuracy.tolerance import RowTolerance, Tolerance, tolerance, tolerances_of_heads
from replay.rows.errors_of_output import AccuracyClass, Errors, Where


@dataclass(frozen=True)
class Expected:
    """Right output of a call, and the tolerance around it."""

    reference: Tensor
    """(B, Hq, Sq, Dv) in float64 or float32."""
    tolerance: Tolerance
    kept: float | None = None
    """Share of (query, key) pairs that a sparse kernel attends to; None for other kernels."""
    call: AttentionCall | None = field(default=None, repr=False, compare=False)
    """Call whose 8-bit noise is computed when a quantised kernel is judged; its tensors must not
    change until then. If None, quantised kernels are judged by their whole output only."""
    spread: Tensor | None = field(default=None, repr=False, compare=False)
    """(B, Hq, Sq), from `replay.accuracy.reference.attention_and_spread`."""
    exposed: Tensor | None = field(default=None, repr=False, compare=False)
    """(B, Hq, Sq) bool: rows in which a kernel may return NaN, because it may read NaN or infinite
    inputs that are hidden from the row (`replay.accuracy.nonfinite`); None if all inputs are
    finite."""

    @classmethod
    def of(cls, call: AttentionCall, chosen: Tensor | None = None) -> Expected:
        """Compute the right output of a call, or of a call restricted to chosen keys.

        Args:
            chosen: as in `replay.accuracy.sparse.restricted`.

        Raises:
            ValueError: `chosen` has a wrong dtype or shape.
        """
        attended = call if chosen is None else restricted(call, chosen)
        output, spread = attention_and_spread(attended, reference_dtype(call.device, call.dtype))
        allowed = tolerance(attended, same_dtype(attended), output, spread)
        exposed = _exposed(attended)
        if chosen is not None:
            return cls(output, allowed, kept_share(call, attended), attended, exposed=exposed)
        return cls(output, allowed, None, call, spread, exposed)

    @classmethod
    def of_heads(cls, call: AttentionCall) -> list[Expected]:
        """Compute the right output of each head separately; no two heads may share a key head.

        The call has few rows, and tolerances are computed on the CPU, because on a GPU the host
        would have to wait for each of many small results.
        """
        computed = attention_and_spread(call, reference_dtype(call.device, call.dtype))
        output, spread = (tensor.cpu() for tensor in computed)
        eager = [tensor.cpu() for tensor in same_dtype(call)]
        allowed = tolerances_of_heads(call, eager, output, spread)
        exposed = _exposed(call)
        return [
            cls(
                output[:, [n]],
                limits,
                spread=spread[:, [n]],
                exposed=None if exposed is None else exposed.cpu()[:, [n]],
            )
            for n, limits in enumerate(allowed)
        ]

    def tolerances(self, error: float) -> Iterator[Tolerance]:
        """Yield the tolerance and, in 32 bits, that of kernels that add one key after another.

        An exact kernel is right within one of them. The second is computed when it is asked for, if
        such a kernel can have the error: adding n terms in any order, |error| ≤ n · u · max|V|
        (Higham 2002, "Accuracy and Stability of Numerical Algorithms", 4.2).

        Args:
            error: largest |output - reference|.
        """
        yield self.tolerance
        call = self.call
        if call is None or call.dtype.itemsize < 4 or not call.value.numel():
            return
        largest = float(call.without_scales().value.abs().nan_to_num(0.0, 0.0, 0.0).amax())
        possible = call.shape.kv_len * torch.finfo(call.dtype).eps / 2 * largest
        if error <= 2 * possible and self.added_in_order is not None:
            yield self.added_in_order

    @cached_property
    def added_in_order(self) -> Tolerance | None:
        """Tolerance of kernels that add one key after another; None for long calls
        (`replay.accuracy.reference.summed_in_order`), or if `call` or `spread` is None."""
        call, spread = self.call, self.spread
        if call is None or spread is None or (in_order := summed_in_order(call)) is None:
            return None
        return tolerance(call, (*same_dtype(call), in_order), self.reference, spread)

    @cached_property
    def quantised(self) -> QuantisedNoise | None:
        """Noise of 8-bit attention; None if `call` or `spread` is None."""
        if self.call is None or self.spread is None:
            return None
        lengths = torch.linalg.vector_norm(self.reference, dim=-1)
        return QuantisedNoise.of(self.call, self.reference, torch.hypot(lengths, self.spread))

    def overflow(self, found: RowErrors) -> str:
        """Return a sentence if rows are zero or NaN because scores overflow; empty otherwise."""
        call = self.call
        if call is None or call.dtype != torch.float16:
            return ""
        size, right = found.sums[1], self.reference.isfinite().all(-1).to(found.sums.device)
        lost = right & ((size == 0) & (found.sums[2] > 0) | ~size.isfinite())
        if not bool(lost.any()):
            return ""
        largest = float(largest_scores(call).to(lost.device)[lost].max())
        limit, scaled = torch.finfo(call.dtype).max, largest * abs(call.softmax_scale)
        if largest <= limit and scaled <= limit:
            return ""
        reaches = f"|QK|·scale reaches {scaled:.2g}"
        if scaled <= limit:
            reaches = f"|QK| reaches {largest:.2g} before it is scaled"
        return f"float16 scores overflow: {reaches}, above {limit:.0f}"


@dataclass(frozen=True)
class OutputVerdict:
    """Verdict on an output, with its reason and errors."""

    sentence: str
    errors: Errors
    tolerance_ratio: float
    """Largest of the judged errors, each divided by its limit: 0 if no element is finite, infinite
    for elements that are NaN or infinite in only one of output and reference."""
    rows: RowErrors = field(repr=False, compare=False)

    @property
    def passed(self) -> bool:
        return self.tolerance_ratio <= 1

    @property
    def spoilt_rows(self) -> int:
        """Number of rows that are NaN or infinite because of inputs that these rows do not see."""
        return 0 if self.rows.spoilt is None else int(self.rows.spoilt.sum())

    @cached_property
    def where(self) -> Where:
        """Errors by head and range of queries."""
        return self.rows.where()


def judge(
    output: Tensor,
    expected: Expected,
    accuracy_class: AccuracyClass,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - it is immutable
) -> OutputVerdict:
    """Judge an `output`, which has the reference's shape, by the rule for its class of kernel.

    `exact` kernels compute in the call's 16 or 32 bits. They must have max|O - reference| ≤
    2 · max|O_same_dtype - reference| + rounding, the rule of FlashAttention's own tests. In 16 bits
    there are two O_same_dtype, scaled before and after QKᵀ, and the larger error counts
    (`replay.accuracy.reference.same_dtype`). In 32 bits a second one adds one key after another; it
    is computed only for an output that exceeds the limit without it.

    This rule could hide a lost row among larger rows. So every row must also have ‖o - reference‖ ≤
    (4 + 2e) · noise. The noise is the row's own rounding noise
    (`replay.accuracy.tolerance.rounding_noise`). The number e is the same-dtype error of the worst
    row of the head, in units of that row's noise. The common error of a head's rows has a stricter
    limit, because rounding errors are random (`RowTolerance.bias_limits`).

    `sparse` kernels choose keys. The rule for `exact` kernels applies, with attention to the chosen
    keys as reference. The difference from attention to all keys is recorded for the user to judge.

    `quantised` kernels must stay within limits on the whole output's cosine and relative L1, which
    separate usable from broken kernels. The errors of the whole output, of each head and of each
    row are also compared with those of honest 8-bit attention on this call
    (`replay.accuracy.quantised`). Users decide by the recorded figures whether the accuracy is good
    enough for a model.

    NaN is right where the reference has NaN, and in exposed rows (`Expected.exposed`). A quantised
    kernel may have one scale for all heads, so an exposed row exposes all its rows.

    Raises:
        ValueError: the output's shape differs from the reference's.
    """
    exposed = expected.exposed
    if exposed is not None and accuracy_class == "quantised":
        exposed = exposed.any().expand_as(exposed)
    found = row_errors(output, expected.reference, exposed)
    errors = found.errors()
    if errors.mismatched_nonfinite:
        ratio, sentence = (
            math.inf,
            f"{errors.mismatched_nonfinite} elements are NaN or infinite in the output and not in "
            f"the reference, or the other way round ({errors.nan_count} NaN and "
            f"{errors.inf_count} infinite in the output)",
        )
    elif not found.has_figures:
        ratio, sentence = 0.0, "nothing to compare: no element is finite"
    elif accuracy_class == "quantised":
        ratio, sentence = _judge_quantised(found, errors, expected, thresholds.quantised)
    else:
        factors = thresholds.sparse if accuracy_class == "sparse" else thresholds.exact
        for allowed in expected.tolerances(errors.max_abs):
            ratio, sentence = _judge_exact(found, errors, allowed, factors)
            if ratio <= 1:
                break
        sentence = f"{_times(ratio)} its tolerance: {sentence}"
        if accuracy_class == "sparse":
            sentence = f"on the keys it chose, {sentence}"
    if ratio > 1 and (overflow := expected.overflow(found)):
        sentence = f"{overflow}; {sentence}"
    return OutputVerdict(sentence, errors, ratio, found)


def _exposed(call: AttentionCall) -> Tensor | None:
    odd = nonfinite_inputs(call)
    return None if odd is None or not bool(odd.exposed.any()) else odd.exposed


def _judge_exact(
    found: RowErrors, errors: Errors, allowed: Tolerance, factors: ExactThresholds
) -> tuple[float, str]:
    ratio, sentence = _judge_largest(errors, allowed, factors)
    if allowed.rows is None:
        return ratio, sentence
    of_rows, rows = _judge_rows(found, allowed.rows, factors)
    of_bias, bias = _judge_bias(found, allowed.rows, factors)
    return max(ratio, of_rows, of_bias), f"{sentence}; {rows}{bias if of_rows <= 1 else ''}"


def _judge_largest(
    errors: Errors, tolerance: Tolerance, factors: ExactThresholds
) -> tuple[float, str]:
    limit = tolerance.limit(factors)
    ratio = _ratio(errors.max_abs, limit)
    return ratio, f"max abs error {errors.max_abs:.2g} {_within(ratio)} {limit:.2g}"


def _judge_rows(
    found: RowErrors, allowed: RowTolerance, factors: ExactThresholds
) -> tuple[float, str]:
    place, length, limit, ratio = _worst(found.lengths, allowed.limits(factors))
    return ratio, _of_worst_row(place, length, limit, ratio)


def _of_worst_row(place: tuple[int, ...], length: float, limit: float, ratio: float) -> str:
    batch, head, query = place
    return (
        f"worst row (batch {batch}, head {head}, query {query}): error norm {length:.2g} "
        f"{_within(ratio)} {limit:.2g}"
    )


def _judge_bias(
    found: RowErrors, allowed: RowTolerance, factors: ExactThresholds
) -> tuple[float, str]:
    lengths = found.reference_lengths
    limits = allowed.bias_limits(lengths, factors)
    known = (allowed.noise.to(lengths.device) * lengths).isfinite() & found.along.isfinite()
    biases = found.along.masked_fill(~known, 0.0).sum(-1)
    place, bias, limit, ratio = _worst(biases.abs(), limits)
    if ratio <= 1:  # rounding explains it
        return ratio, ""
    batch, head = place
    unit = float(lengths[batch, head].masked_fill(~known[batch, head], 0.0).square().sum())
    size = "long" if biases[place] > 0 else "short"
    return ratio, (
        f"; the rows of batch {batch}, head {head} err alike: together {100 * bias / unit:.2g}% "
        f"too {size}, where rounding is within {100 * limit / unit:.2g}%"
    )


def _judge_quantised(
    found: RowErrors, errors: Errors, expected: Expected, factors: QuantisedThresholds
) -> tuple[float, str]:
    largest, noise = factors.maximum_relative_l1, expected.quantised
    source = ""
    if noise is not None and (limit := noise.whole_limit(factors)) < largest:
        largest, source = limit, " (8-bit attention)"
    of_cosine = _ratio(max(1 - errors.cosine, 0.0), 1 - factors.minimum_cosine)
    of_error = _ratio(errors.relative_l1, largest)
    sentence = (
        f"cosine {errors.cosine:.5f} is {'at least' if of_cosine <= 1 else 'below'} "
        f"{factors.minimum_cosine:g}, relative L1 {errors.relative_l1:.2g} "
        f"{_within(of_error)} {largest:.2g}{source}"
    )
    if noise is None:
        return max(of_cosine, of_error), sentence
    (batch, head), error, limit, of_head = _worst(found.head_errors, noise.head_limits(factors))
    place, length, row_limit, of_row = _worst(found.lengths, noise.row_limits(factors))
    return max(of_cosine, of_error, of_head, of_row), (
        f"{sentence}; worst head (batch {batch}, head {head}): relative L1 {error:.2g} "
        f"{_within(of_head)} {limit:.2g} (8-bit attention there); "
        f"{_of_worst_row(place, length, row_limit, of_row)} (8-bit attention in that head)"
    )


def _ratio(error: float, limit: float) -> float:
    """Return error / limit: infinite for NaN, and for any error if the limit is 0."""
    if error == 0:
        return 0.0
    ratio = error / limit if limit > 0 else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _worst(errors: Tensor, limits: Tensor) -> tuple[tuple[int, ...], float, float, float]:
    """Return the index, error, limit and error / limit of the largest error relative to its limit.

    A limit of NaN means that there is no limit.
    """
    limits = limits.to(errors.device)
    shares = (errors / limits).nan_to_num(nan=-math.inf, posinf=math.inf)
    shares = shares.masked_fill((errors == 0) | limits.isnan(), 0.0)
    place = unravelled(int(shares.argmax()), shares.shape)
    return place, float(errors[place]), float(limits[place]), float(shares[place])


def _times(ratio: float) -> str:
    """Return a ratio with three digits, such as `1.25 ×` or `126,000 ×`."""
    if math.isinf(ratio):
        return "∞ ×"
    if ratio >= 1e9:
        return f"{ratio:.2g} ×"
    return f"{float(f'{ratio:.3g}'):,.0f} ×" if ratio >= 100 else f"{ratio:.3g} ×"


def _within(ratio: float) -> str:
    return "is within" if ratio <= 1 else "exceeds"
