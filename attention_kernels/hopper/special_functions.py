"""Special functions, one instruction each, for the softmax of the Hopper kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2 = gl.constexpr("lg2.approx.ftz.f32")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32")
TANH = gl.constexpr("tanh.approx.f32")
"""Hyperbolic tangent, exact to some 11 bits. The other functions are exact to some 22 bits."""


@gluon.jit
def approximately(INSTRUCTION: gl.constexpr, number):
    """Return the GPU's approximation of a function of float32 numbers.

    An implementation that is exact to the last bit, also for numbers below 1e-38, takes some 20
    more instructions.
    """
    PTX: gl.constexpr = INSTRUCTION + " $0, $1;"
    return gl.inline_asm_elementwise(PTX, "=f,f", [number], dtype=gl.float32, is_pure=True, pack=1)
