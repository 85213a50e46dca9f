"""Division by numbers that the host knows but that are not compile-time constants.

A GPU divides integers in some 40 instructions, and most of these depend on the previous one. If the
host knows the divisor, a multiplication and a shift are enough.

    Granlund, Montgomery: "Division by Invariant Integers using Multiplication", 1994.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def reciprocal(divisor: int) -> int:
    """Return 64 bits with which `quotient` divides by a positive number.

    The upper half is the number of bits to shift by, n. The lower half is 2ⁿ divided by the
    divisor, rounded up.
    """
    shift = 31 + (divisor - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // divisor)


@gluon.jit
def quotient(number, reciprocal):
    """Divide an int32 that is not negative by the divisor of a `reciprocal`, rounded down."""
    number = gl.to_tensor(number).to(gl.uint64)
    return (number * (reciprocal & 0xFFFFFFFF) >> (reciprocal >> 32)).to(gl.int32)
