"""Special functions, one instruction each, as the softmax of our Hopper kernels needs them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2 = gl.constexpr("lg2.approx.ftz.f32")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32")
TANH = gl.constexpr("tanh.approx.f32")
"""To some 11 bits; the other two are right to some 22."""


@gluon.jit
def approximately(INSTRUCTION: gl.constexpr, number):
    """The GPU's own function of float32 numbers; one that is right to the last bit, and for numbers
    below 1e-38, takes some 20 instructions more."""
    PTX: gl.constexpr = INSTRUCTION + " $0, $1;"
    return gl.inline_asm_elementwise(PTX, "=f,f", [number], dtype=gl.float32, is_pure=True, pack=1)
