"""Division by numbers that a call has and its programs do not know when they are compiled.

A GPU divides integers in some 40 instructions, most of which wait for the one before. The host
knows the divisors: a multiplication and a shift are left.

    Granlund, Montgomery: "Division by Invariant Integers using Multiplication", 1994.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def reciprocal(divisor: int) -> int:
    """What `quotient` divides by a positive number with, of 64 bits: the number of bits to shift by
    in the upper half, and in the lower one 2 to that power over the divisor, rounded up."""
    shift = 31 + (divisor - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // divisor)


@gluon.jit
def quotient(number, reciprocal):
    """An int32 that is not negative, over the number that this is the `reciprocal` of, rounded
    down."""
    number = gl.to_tensor(number).to(gl.uint64)
    return (number * (reciprocal & 0xFFFFFFFF) >> (reciprocal >> 32)).to(gl.int32)
