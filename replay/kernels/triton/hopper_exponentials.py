"""Softmax's weights of a block of scores on Hopper, relative to a reference that rarely moves.

Softmax divides by the sum of its weights, so that any number may be subtracted from a row's
scores. Usually it is the largest score so far, and no exponential begins before each thread has
compared its scores of the block and four threads have exchanged what they found. Here exponentials
begin at once, and what was subtracted in the block before is subtracted again. Only where weights
get too large for their type, which their sums tell, a warp looks for the largest score and begins
anew.

Each warp decides that by itself. Gluon has no branch for a single warp, so this is PTX.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replay.kernels.triton.hopper_scores import first_of_own, for_all_of_own


@gluon.jit
def exponentials(
    scores, scale, reference, addend, dtype: gl.constexpr, UNIT: gl.constexpr, LIMIT: gl.constexpr
):
    """2^(scores · scale + addend - reference), of those scores that count as they are.

    Args:
        scores: (ROWS, N) float32, in the layout of a product's left operand of `dtype`; none is
            hidden.
        scale: (ROWS,), not negative.
        reference: (ROWS, 4) as `own_sums` has it, -inf where a row has seen no score.
        addend: a number; the largest score, plus it, is UNIT above its reference.
        dtype: of 8 or 16 bits.
        LIMIT: what sums of one thread's weights of a row may be, at most the largest of `dtype`.

    Returns:
        The weights (ROWS, N) as `dtype`; their `own_sums`; the new reference, which has moved to
        the row's largest score where a sum was above LIMIT; and 2^(old reference - new).
    """
    LAYOUT: gl.constexpr = scores.type.layout
    OWN: gl.constexpr = reference.type.layout
    BITS: gl.constexpr = dtype.primitive_bitwidth
    scale = gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT))[:, None]
    scale, _ = gl.broadcast(scale, scores)
    reference = for_all_of_own(reference, scores, 32 // BITS)
    addend = gl.full(scores.shape, 0.0, gl.float32, LAYOUT) + addend
    COUNT: gl.constexpr = scores.shape[1] // 2  # that a thread has, of two rows
    PTX: gl.constexpr = _instructions(COUNT, BITS, dtype == gl.bfloat16, UNIT, LIMIT)
    CONSTRAINTS: gl.constexpr = _constraints(COUNT, BITS)
    operands = [scores, scale, reference, addend]
    # Gluon takes no types of results from a constant.
    if BITS == 8:
        weights, sums, reference, shrink = gl.inline_asm_elementwise(
            PTX,
            CONSTRAINTS,
            operands,
            (gl.int8, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=COUNT,
        )
    else:
        weights, sums, reference, shrink = gl.inline_asm_elementwise(
            PTX,
            CONSTRAINTS,
            operands,
            (gl.int16, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=COUNT,
        )
    sums = first_of_own(sums, 32 // BITS, OWN)
    reference = first_of_own(reference, 32 // BITS, OWN)
    shrink = first_of_own(shrink, 32 // BITS, OWN)
    return weights.to(dtype, bitcast=True), sums, reference, shrink


@constexpr_function
def _constraints(count, bits):
    """Weights, sums, references and shrinks; scores, scales, references and addends."""
    return ",".join(["=&r"] * (count * bits // 32) + ["=&f"] * (3 * count) + ["f"] * (4 * count))


@constexpr_function
def _instructions(count, bits, is_bfloat16, unit, limit):
    """What a thread does with its `count` scores, which are of two rows in turn, as many of each as
    a register has weights. What there is one of for a row stands in the place of its first score;
    the other places of results are never written, nor read."""
    width = 32 // bits
    registers = count // width
    rows = [[i for i in range(count) if i // width % 2 == row] for row in (0, 1)]
    starts = [0, *(registers + k * count for k in range(7))]

    def names(operand, row):
        return f"${starts[operand] + rows[row][0]}"

    sums, moved, shrink = ([names(operand, row) for row in (0, 1)] for operand in (1, 2, 3))
    scale, reference, addend = ([names(operand, row) for row in (0, 1)] for operand in (5, 6, 7))
    scores = [f"${starts[4] + i}" for i in range(count)]

    weigh = ["mov.f32 sum0, 0.0;", "mov.f32 sum1, 0.0;"]
    for register in range(registers):
        row = register % 2
        first = register * width
        for i in range(first, first + width):
            weigh += [
                f"fma.rn.f32 weight{i}, {scores[i]}, {scale[row]}, origin{row};",
                f"ex2.approx.ftz.f32 weight{i}, weight{i};",
                f"add.f32 sum{row}, sum{row}, weight{i};",
            ]
        pairs = [f"weight{i + 1}, weight{i}" for i in range(first, first + width, 2)]
        if bits == 8:
            weigh += [
                f"cvt.rn.satfinite.e4m3x2.f32 low, {pairs[0]};",
                f"cvt.rn.satfinite.e4m3x2.f32 high, {pairs[1]};",
                f"mov.b32 ${register}, {{low, high}};",
            ]
        else:
            to = "bf16x2" if is_bfloat16 else "f16x2"
            weigh += [f"cvt.rn.{to}.f32 ${register}, {pairs[0]};"]

    begin, move = [], []
    for row in (0, 1):
        begin += [
            f"mov.f32 {moved[row]}, {reference[row]};",
            f"mov.f32 {shrink[row]}, 1.0;",
            f"sub.f32 origin{row}, {addend[row]}, {reference[row]};",
        ]
        move += [f"mov.f32 largest, {scores[rows[row][0]]};"]
        move += [f"max.f32 largest, largest, {scores[i]};" for i in rows[row][1:]]
        for lane in (1, 2):  # of the four threads that share the row
            for each in ("largest", f"sum{row}"):
                move += [
                    f"shfl.sync.bfly.b32 other, {each}, {lane}, 31, 0xffffffff;",
                    f"max.f32 {each}, {each}, other;",
                ]
        # No other row's numbers matter, be it of the same warp.
        move += [
            f"fma.rn.f32 largest, largest, {scale[row]}, {addend[row]};",
            f"sub.f32 largest, largest, {unit:.8e};",
            f"max.f32 largest, largest, {reference[row]};",
            f"setp.gt.f32 above, sum{row}, {limit:.8e};",
            f"selp.f32 {moved[row]}, largest, {reference[row]}, above;",
            f"sub.f32 other, {reference[row]}, {moved[row]};",
            f"@above ex2.approx.ftz.f32 {shrink[row]}, other;",
            f"sub.f32 origin{row}, {addend[row]}, {moved[row]};",
        ]
    return "\n".join(
        [
            "{",
            ".reg .f32 origin<2>, sum<2>, largest, other;",
            f".reg .f32 weight<{count}>;",
            ".reg .b16 low, high;",
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
            f"mov.f32 {sums[0]}, sum0;",
            f"mov.f32 {sums[1]}, sum1;",
            "}",
        ]
    )
