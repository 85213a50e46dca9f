"""Number that a kernel has used as the scale, or multiplied the mask by.

Plausible numbers lie close together (log2 e is 4 % below 1.5), so an output close to that of one
number proves little: the outputs of neighbouring numbers must be further away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.accuracy.sparse import restricted
from replay.diagnosis.derived import HeadRows, mask_of, part
from replay.diagnosis.subject import COLLAPSE, Evidence, Subject

SAME = 0.01
"""Relative distance within which the best fit counts as a known number, since rounding moves it by
less; also the maximum relative error of an output explained by an unknown number."""

STEP = math.sqrt(2)
"""Ratio of neighbouring numbers in a search; the best number is then refined within one step."""

STEPS = 20
"""Number of steps on either side of the first number."""


class Factor(NamedTuple):
    """Number that a kernel may have used."""

    applied: Callable[[AttentionCall, float], AttentionCall]
    """Function from a call and the number to the call for which that number is correct."""
    value: float


def with_scale(call: AttentionCall, scale: float) -> AttentionCall:
    """Return the call with a different scale."""
    return replace(call, scale=scale)


def with_mask_times(call: AttentionCall, factor: float) -> AttentionCall:
    """Return the call with its additive mask multiplied by a factor."""
    assert call.attn_mask is not None
    wide = call.attn_mask.to(torch.float32)
    return replace(call, attn_mask=torch.where(wide == 0, wide, wide * factor))


def fits(subject: Subject, factor: Factor) -> bool:
    """Return True if the factor's number fits the output better than neighbouring numbers do."""
    distance = _Distance.of(subject, factor.applied)
    if distance(factor.value) == math.inf:
        return True  # only NaN can be compared, and no number is closer to NaN
    return math.isclose(_refined(distance, factor.value), factor.value, rel_tol=SAME)


def unnamed(subject: Subject) -> Evidence | None:
    """Explain the output by an arbitrary scale, or by an arbitrary factor of the mask."""
    call = subject.call
    scale = call.softmax_scale
    value, found = _searched(subject, call, with_scale, scale or call.shape.head_dim**-0.5)
    if found is not None:
        times = f", which is {value / scale:.3g} times as large" if scale else ""
        sentence = f"the output uses the scale {value:.3g} instead of {scale:.3g}{times}"
        return Evidence("wrong-scale", sentence, {**found, "scale": value})
    if call.attn_mask is None or call.attn_mask.dtype == torch.bool:
        return None
    batch, head, _ = subject.place
    every = torch.arange(call.shape.q_len, device=call.device)
    of_head = replace(call, attn_mask=mask_of(call, batch, head, every))
    for first in (1.0, -1.0):
        value, found = _searched(subject, of_head, with_mask_times, first)
        if found is not None:
            sentence = f"the additive mask is multiplied by {value:.3g}"
            return Evidence("mask-misread", sentence, {**found, "factor": value})
    return None


def _searched(
    subject: Subject,
    call: AttentionCall,
    applied: Callable[[AttentionCall, float], AttentionCall],
    first: float,
) -> tuple[float, dict[str, float] | None]:
    """Return the best-fitting number, and the errors; None if it does not explain the output."""
    distance = _Distance.of(subject, applied)
    near = min((first * STEP**step for step in range(-STEPS, STEPS + 1)), key=distance.__call__)
    value = _refined(distance, near)
    beside = min(distance(value / STEP), distance(value * STEP))
    # For example, any small scale fits saturated scores.
    if distance(value) > beside / COLLAPSE:
        return value, None
    score = subject.score(subject.output, applied(call, value))
    if not (score.explains(subject.own) and (score.passes or score.error <= SAME)):
        return value, None
    return value, {"error": subject.own.error, "error_of_this_reading": score.error}


class _Distance(NamedTuple):
    """Distance of the finite wrong rows from the reference, as a function of the number used."""

    applied: Callable[[AttentionCall, float], AttentionCall]
    small: AttentionCall
    """Wrong rows as a call: (1, 1, R, D)."""
    output: Tensor
    """Output of these rows: (R, Dv), float64."""

    @classmethod
    def of(
        cls, subject: Subject, applied: Callable[[AttentionCall, float], AttentionCall]
    ) -> _Distance:
        batch, head, rows = subject.place
        rows = rows[subject.output[batch, head, rows].isfinite().all(dim=1)]
        call, chosen = subject.call, subject.chosen
        attended = call if chosen is None else restricted(call, chosen(call))
        small = part(attended, HeadRows(batch, head, rows))
        return cls(applied, small, subject.output[batch, head, rows].to(torch.float64))

    def __call__(self, value: float) -> float:
        """Return ‖output - reference‖; infinite if it is undefined or no row remains."""
        expected = attention(self.applied(self.small, value))[0, 0]
        found = float(torch.linalg.vector_norm(self.output - expected.to(self.output)))
        return found if len(self.output) and math.isfinite(found) else math.inf


def _refined(distance: _Distance, near: float) -> float:
    """Return the best number within a step of `near`, to a tenth of `SAME`.

    The method is a golden-section search in the logarithm.
    """
    ratio = (math.sqrt(5) - 1) / 2
    low, high = -math.log(STEP), math.log(STEP)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    of_left, of_right = (distance(near * math.exp(each)) for each in (left, right))
    while high - low > SAME / 10:
        if of_left < of_right:
            high, right, of_right = right, left, of_left
            left = high - ratio * (high - low)
            of_left = distance(near * math.exp(left))
        else:
            low, left, of_left = left, right, of_right
            right = low + ratio * (high - low)
            of_right = distance(near * math.exp(right))
    return near * math.exp((low + high) / 2)
