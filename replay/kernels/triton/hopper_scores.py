"""Scores of a Hopper consumer: 64 queries by a block of keys, spread over its 128 threads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

ROWS = gl.constexpr(64)
"""Queries of a consumer: what one warp group's matrix instruction (`wgmma`) takes."""


@gluon.jit
def start_scores(query, keys):
    """Start QKᵀ, (ROWS, N): int32 of INT8, else float32. To be waited for before it is read.

    Args:
        query: (ROWS, D) in shared memory.
        keys: (N, D) in shared memory.
    """
    N: gl.constexpr = keys.shape[0]
    # An instruction takes 32 bytes of each row.
    K: gl.constexpr = 256 // keys.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, K])
    DTYPE: gl.constexpr = gl.int32 if keys.dtype == gl.int8 else gl.float32
    nothing = gl.zeros([ROWS, N], DTYPE, LAYOUT)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_scores(scores, query, keys):
    """Start QKᵀ of another piece of the head_dim, added to `scores`."""
    return warpgroup_mma(query, keys.permute((1, 0)), scores, is_async=True)


@gluon.jit
def soft_cap(exponents, cap):
    """`online_softmax.soft_cap`: cap · (1 − 2 / (2^exponent + 1)), to a few units of float32.

    With softmax's own there are three special functions for a score, and the units for them would
    take longer than the tensor cores. So of every two scores one has its power of two from a
    polynomial: 2^x = 2^n · 2^f, n being x rounded, and 2^f of degree 4, the best for its relative
    error on [-1/2, 1/2], 2.6e-6. Beyond ±30 tanh is ±1 to float32's rounding.
    """
    inverse = gl.inline_asm_elementwise(
        """{
            .reg .f32 power, x, rounded, n, f, scale;
            .reg .b32 bits;
            ex2.approx.ftz.f32 power, $2;
            add.f32 power, power, 0f3f800000;
            rcp.approx.ftz.f32 $0, power;
            max.NaN.f32 x, $3, 0fc1f00000;
            min.NaN.f32 x, x, 0f41f00000;
            add.f32 rounded, x, 0f4b400000;
            sub.f32 n, rounded, 0f4b400000;
            sub.f32 f, x, n;
            fma.rn.f32 power, f, 0f3c1ccbea, 0f3d650a20;
            fma.rn.f32 power, power, f, 0f3e76036d;
            fma.rn.f32 power, power, f, 0f3f31706e;
            fma.rn.f32 power, power, f, 0f3f7ffff4;
            mov.b32 bits, rounded;
            mad.lo.s32 bits, bits, 8388608, 1065353216;
            mov.b32 scale, bits;
            fma.rn.f32 power, power, scale, 0f3f800000;
            rcp.approx.ftz.f32 $1, power;
        }""",
        "=f,=f,f,f",
        [exponents],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )
    return cap - 2.0 * cap * inverse


@gluon.jit
def own_sums(weights):
    """Sums of weights (ROWS, N), in the layout of scores, over what each thread holds: (ROWS, 4).

    Four threads share a row. That they add up their sums can wait until the last block.
    """
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape((ROWS, N // 8, 4, 2)), 3), 1)
