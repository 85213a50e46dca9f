"""Numbers that all threads of a program share."""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.matmul import INTERPRETED


@triton.jit
def uniform(number):
    """Return an integer that is the same in every thread, in a form that `ptxas` recognises as
    uniform.

    `ptxas` assumes that a sum over threads may differ between threads, so that a loop bounded by
    the sum may diverge. In such a loop, it moves shared-memory descriptors between registers at
    each product.
    """
    if not INTERPRETED:
        number = tl.inline_asm_elementwise(
            "redux.sync.max.s32 $0, $1, 0xffffffff;",
            "=r,r",
            [number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return number
