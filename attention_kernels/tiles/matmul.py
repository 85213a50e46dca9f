"""Product of tiles in the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if kernels run on the CPU in Triton's interpreter; this is decided when Triton is imported.
"""


@triton.jit
def matmul(left, right, sums):
    """Return left · right + sums, (M, N) in float32.

    Triton's interpreter treats the bits of bfloat16 as integers, so the operands are converted to
    float32.
    """
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")
