"""Softmax weights of a block of scores on Hopper, relative to a reference that rarely changes.

Softmax divides by the sum of its weights, so any number may be subtracted from a row's scores. Most
kernels subtract the largest score so far. The exponentials must then wait until each thread has
compared its scores of the block and four threads have exchanged their maxima. Here, the
exponentials start immediately, with the number that was subtracted in the previous block. Their
sums show whether a weight is too large for its type. Only in that case does a warp find the largest
score and compute the exponentials again.

Each warp decides independently. Gluon has no branch for a single warp, so this module uses PTX.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.scores import first_of_own, for_all_of_own


@gluon.jit
def exponentials(scores, scale, reference, dtype: gl.constexpr, LOG2_LIMIT: gl.constexpr):
    """Return 2^(scores · scale - reference) for scores that are not masked.

    Args:
        scores: (ROWS, N) float32, in the layout of a product.
        scale: factor of the scores, in base 2, not negative.
        reference: (ROWS, 4) in the layout of `own_sums`; -inf for a row without scores so far.
        dtype: float16 or bfloat16.
        LOG2_LIMIT: base-2 logarithm of the largest sum of one thread's weights of a row for which
            `dtype` does not overflow.

    Returns:
        The weights (ROWS, N), two neighbours in a register; their `own_sums`; the new reference,
            which is the row's largest score if a sum was above the limit; and 2^(old reference -
            new).
    """
    LAYOUT: gl.constexpr = scores.type.layout
    OWN: gl.constexpr = reference.type.layout
    scale = gl.full(scores.shape, 0.0, gl.float32, LAYOUT) + scale
    COUNT: gl.constexpr = scores.shape[1] // 2  # scores per thread, in two rows
    PTX: gl.constexpr = _instructions(COUNT, dtype == gl.bfloat16, 2.0**LOG2_LIMIT)
    CONSTRAINTS: gl.constexpr = _constraints(COUNT)
    weights, sums, reference, shrink = gl.inline_asm_elementwise(
        PTX,
        CONSTRAINTS,
        [scores, scale, for_all_of_own(reference, scores)],
        (gl.int16, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=COUNT,
    )
    left, right = gl.split(weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)))
    packed = gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )
    return (
        packed,
        first_of_own(sums, OWN),
        first_of_own(reference, OWN),
        first_of_own(shrink, OWN),
    )


@constexpr_function
def _constraints(count):
    """Return the constraints of the PTX operands: weights, sums, references and shrink factors;
    scores, scales, references."""
    return ",".join(["=&r"] * (count // 2) + ["=&f"] * (3 * count) + ["f"] * (3 * count))


@constexpr_function
def _instructions(count, is_bfloat16, limit):
    """Return a thread's instructions for its `count` scores, which alternate between two of one row
    and two of another row.

    The result of a row is stored in the position of the row's first score. The positions of the
    other scores are neither written nor read.
    """
    rows = [[i for i in range(count) if i // 2 % 2 == row] for row in (0, 1)]
    starts = [count // 2 + k * count for k in range(6)]  # after the weights
    sums, moved, shrink, scores, scale, reference = (
        [f"${start + i}" for i in range(count)] for start in starts
    )

    weigh = ["mov.f32 sum0, 0.0;", "mov.f32 sum1, 0.0;"]
    for pair in range(count // 2):
        row, left, right = pair % 2, 2 * pair, 2 * pair + 1
        for i in (left, right):
            weigh += [
                f"fma.rn.f32 weight{i}, {scores[i]}, {scale[0]}, origin{row};",
                f"ex2.approx.ftz.f32 weight{i}, weight{i};",
                f"add.f32 sum{row}, sum{row}, weight{i};",
            ]
        to = "bf16x2" if is_bfloat16 else "f16x2"
        weigh += [f"cvt.rn.{to}.f32 ${pair}, weight{right}, weight{left};"]

    begin, move = [], []
    for row in (0, 1):
        first = rows[row][0]
        begin += [
            f"mov.f32 {moved[first]}, {reference[first]};",
            f"mov.f32 {shrink[first]}, 1.0;",
            f"neg.f32 origin{row}, {reference[first]};",
        ]
        move += [f"mov.f32 largest, {scores[first]};"]
        move += [f"max.f32 largest, largest, {scores[i]};" for i in rows[row][1:]]
        for lane in (1, 2):  # exchange among the four threads of a row
            for each in ("largest", f"sum{row}"):
                move += [
                    f"shfl.sync.bfly.b32 other, {each}, {lane}, 31, 0xffffffff;",
                    f"max.f32 {each}, {each}, other;",
                ]
        # Numbers of other rows are ignored, even of rows in the same warp.
        move += [
            f"mul.f32 largest, largest, {scale[0]};",
            f"max.f32 largest, largest, {reference[first]};",
            f"setp.gt.f32 above, sum{row}, {limit:.8e};",
            f"selp.f32 {moved[first]}, largest, {reference[first]}, above;",
            f"sub.f32 other, {reference[first]}, {moved[first]};",
            f"@above ex2.approx.ftz.f32 {shrink[first]}, other;",
            f"neg.f32 origin{row}, {moved[first]};",
        ]
    return "\n".join(
        [
            "{",
            ".reg .f32 origin<2>, sum<2>, largest, other;",
            f".reg .f32 weight<{count}>;",
            ".reg .pred above, any;",
            *begin,
            *weigh,
            f"setp.gt.f32 above, sum0, {limit:.8e};",
            f"setp.gt.or.f32 above, sum1, {limit:.8e}, above;",
            "vote.sync.any.pred any, above, 0xffffffff;",
            "@!any bra.uni done;",
            *move,
            *weigh,
            "done:",
            *(f"mov.f32 {sums[rows[row][0]]}, sum{row};" for row in (0, 1)),
            "}",
        ]
    )
