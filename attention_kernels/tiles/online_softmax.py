"""The online softmax of the Triton kernels (Milakov and Gimelshein 2018), in base 2.

Keys are processed in blocks. Each row has a running maximum m, a sum of weights l and an output o.
Each block updates all three:

    s = q·kᵀ·scale·log₂e        m' = max(m, max s)        p = 2^(s − m')
    l' = l·2^(m − m') + Σp      o' = o·2^(m − m') + p·v   output = o / l

log₂e is part of the scale (`base_2`), because the GPU has an instruction for 2^x but none for e^x.
A sink is added last, like a key whose value is 0 (`add_sink`).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def softmax_step(scores, largest, maximum, factor):
    """Return a block's weights p (M, N), the new maximum m', and the factor 2^(m − m') of earlier
    sums.

    Args:
        scores: (M, N); s is `scores` times `factor`, which is not negative.
        largest: (M,), lower bound of the new maximum: max s, or more.
        maximum: (M,), m; -inf for a row that has not seen a key. A score of -inf minus this maximum
            would be NaN.
    """
    new_maximum = tl.maximum(maximum, largest)
    origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.math.exp2(scores * factor - origin[:, None])
    rescale = tl.math.exp2(maximum - origin)
    return weights, new_maximum, rescale


@triton.jit
def add_sink(sink, maximum, total, unit):
    """Return the factor of earlier sums, the new maximum and the new sum.

    A sink is added after the keys. If a large sink were the first maximum, the weights would be so
    small that 8 bits, or even float16, would round them to zero.

    Args:
        sink: (M,), log₂e times the logit; -inf for a row without a sink.
        maximum, total: (M,), maximum and sum over the keys; -inf and 0 for a row that sees no key.
        unit: number that represents a weight of 1.
    """
    new_maximum = tl.maximum(maximum, sink)
    origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.math.exp2(maximum - origin)
    return rescale, new_maximum, total * rescale + unit * tl.math.exp2(sink - origin)


@triton.jit
def tanh(exponents, IS_FLOAT32: tl.constexpr = False):
    """Return tanh x = 1 − 2 / (e^2x + 1) for a soft cap, where 2^exponents = e^2x.

    The error is about the float32 rounding error of 1. In float32 calls, this matters for scores
    far below the cap, so small x use a series. `base_2` returns the scale that turns products into
    these exponents, and the cap that turns the result into s.
    """
    result = 1.0 - 2.0 / (tl.math.exp2(exponents) + 1.0)
    if IS_FLOAT32:
        x = exponents * (LN_2 / 2)
        square = x * x
        series = 2 / 15 + square * (-17 / 315 + square * (62 / 2835))
        series = x + x * square * (-1 / 3 + square * series)
        result = tl.where(square < 0.0625, series, result)
    return result


def base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return the factor that turns q·k into s, and None; with a soft cap, the factor that turns q·k
    into the exponents of `tanh`, and the cap in base 2."""
    if softcap is None:
        return scale * LOG2_E.value, None
    return 2 * scale * LOG2_E.value / softcap, softcap * LOG2_E.value
