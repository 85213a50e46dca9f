"""Rescaling of an output on Hopper, for rows that rarely change their reference."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.scores import for_all_of_own


@gluon.jit
def rescale(output, factor):
    """Multiply `output` (ROWS, DV), the result of a product, by `factor` (ROWS, 4), which is equal
    in a row's four threads.

    A warp multiplies only if one of its factors is not 1.
    """
    COUNT: gl.constexpr = output.shape[1] // 2  # elements per thread, in two rows
    PTX: gl.constexpr = _instructions(COUNT)
    CONSTRAINTS: gl.constexpr = _constraints(COUNT)
    operands = [output, for_all_of_own(factor, output)]
    return gl.inline_asm_elementwise(
        PTX, CONSTRAINTS, operands, dtype=gl.float32, is_pure=True, pack=COUNT
    )


@constexpr_function
def _constraints(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@constexpr_function
def _instructions(count):
    """Return the instructions of a thread, whose elements alternate between two of one row and two
    of another row."""
    outputs, factors = range(count, 2 * count), range(2 * count, 3 * count)
    return "\n".join(
        [
            "{ .reg .pred moved, any;",
            *(f"mov.b32 ${i}, ${output};" for i, output in enumerate(outputs)),
            f"setp.neu.f32 moved, ${factors[0]}, 1.0;",
            f"setp.neu.or.f32 moved, ${factors[2]}, 1.0, moved;",
            "vote.sync.any.pred any, moved, 0xffffffff;",
            "@!any bra.uni done;",
            *(f"mul.f32 ${i}, ${i}, ${factor};" for i, factor in enumerate(factors)),
            "done: }",
        ]
    )
