"""Search for the number that a kernel used as the scale, or by which it multiplied the mask.

Plausible numbers lie close together (log2 e is 4 % below 1.5), so an output close to that of one
number proves little. The number that fits the output best is therefore searched for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.accuracy.sparse import restricted
from replay.diagnosis.derived import HeadRows, mask_of, padded_sizes, part
from replay.diagnosis.subject import COLLAPSE, Cause, Evidence, Subject

SAME = 0.01
"""Relative distance at which the best fit still counts as a known number, because rounding shifts
the fit by less; also the maximum relative error of an output explained by an unknown number."""

STEP = math.sqrt(2)
"""Ratio of neighbouring numbers in a search; the best number is then refined within one step."""

STEPS = 20
"""Number of steps on either side of the first number."""

LOG2_E = math.log2(math.e)


def wrong_factor(subject: Subject) -> Evidence | None:
    """Explain the output by another factor of the additive mask, or by another scale."""
    return _mask_factor(subject) or _scale(subject)


def _mask_factor(subject: Subject) -> Evidence | None:
    call, (batch, head, _) = subject.call, subject.place
    if call.attn_mask is None or call.attn_mask.dtype == torch.bool:
        return None
    every = torch.arange(call.shape.q_len, device=call.device)
    of_head = replace(call, attn_mask=mask_of(call, batch, head, every))
    scale = call.softmax_scale or 1.0
    known = {
        "multiplied by the scale": scale,
        "divided by the scale": 1 / scale,
        "multiplied by ln 2, as in a kernel that uses powers of 2": 1 / LOG2_E,
        "multiplied by log2 e": LOG2_E,
        "added twice": 2.0,
        "subtracted": -1.0,
    }
    for first in (1.0, -1.0):
        if found := _searched(subject, of_head, _with_mask_times, first, known):
            named = found.name or f"multiplied by {found.value:.3g}"
            numbers = {**found.numbers, "factor": found.value}
            return Evidence("mask-misread", f"the additive mask is {named}", numbers)
    return None


def _scale(subject: Subject) -> Evidence | None:
    call = subject.call
    dim, scale = call.shape.head_dim, call.softmax_scale
    padded = {f"1/√{wide}, of the padded head dimension": wide**-0.5 for wide in padded_sizes(dim)}
    known = {
        "1/√D instead of the call's scale": dim**-0.5,
        "no scale": 1.0,
        "1/D": 1 / dim,
        **padded,
        "the scale times log2 e": scale * LOG2_E,
        "the scale times ln 2": scale / LOG2_E,
        "the scale applied twice": scale * scale,
    }
    found = _searched(subject, call, _with_scale, scale or dim**-0.5, known)
    if found is None:
        return None
    sentence = f"the output is that of {found.name}: {found.value:.4g} where {scale:.4g} is right"
    if not found.name:
        times = f", which is {found.value / scale:.3g} times as large" if scale else ""
        sentence = f"the output uses the scale {found.value:.3g} instead of {scale:.3g}{times}"
    cause: Cause = "head-dim" if found.name in padded else "wrong-scale"
    return Evidence(cause, sentence, {**found.numbers, "scale": found.value})


def _with_scale(call: AttentionCall, scale: float) -> AttentionCall:
    return replace(call, scale=scale)


def _with_mask_times(call: AttentionCall, factor: float) -> AttentionCall:
    assert call.attn_mask is not None
    wide = call.attn_mask.to(torch.float32)
    return replace(call, attn_mask=torch.where(wide == 0, wide, wide * factor))


class _Found(NamedTuple):
    """Number that explains the output, its name if it is a known one, and the errors."""

    value: float
    name: str
    numbers: dict[str, float]


def _searched(
    subject: Subject,
    call: AttentionCall,
    applied: Callable[[AttentionCall, float], AttentionCall],
    first: float,
    known: Mapping[str, float],
) -> _Found | None:
    """Return the number that fits the output best; None if it does not explain the output.

    Args:
        applied: function from a call and a number to the call for which that number is right.
        first: number in the middle of the search.
        known: plausible numbers by name.
    """
    distance = _Distance.of(subject, applied)
    near = min((first * STEP**step for step in range(-STEPS, STEPS + 1)), key=distance.__call__)
    value = _refined(distance, near)
    same = (name for name, each in known.items() if math.isclose(each, value, rel_tol=SAME))
    if name := next(same, ""):
        value = known[name]
    # Reject a number whose neighbours fit as well: any small scale gives equal weights.
    elif distance(value) > min(distance(value / STEP), distance(value * STEP)) / COLLAPSE:
        return None
    other = applied(call, value)
    if not subject.computed(other):
        return None
    score = subject.score(subject.output, other)
    if not (name or score.passes or score.error <= SAME):
        return None
    return _Found(value, name, {"error": subject.own.error, "error_of_this_reading": score.error})


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
    """Return the best number within a step of `near`, to a tenth of `SAME`."""
    step = STEP
    while step > 1 + SAME / 10:
        step = math.sqrt(step)
        near = min((near / step, near, near * step), key=distance.__call__)
    return near
