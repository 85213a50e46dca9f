"""FP8 weights of a block of scores on Hopper, relative to the largest score of the blocks before.

Softmax divides by the sum of its weights, so that any number may be subtracted from a row's scores.
The largest so far is known only when each thread has compared its scores of the block and four
threads have exchanged what they found, and no exponential begins before. Here the largest of the
blocks before is subtracted, at once, and this block's is found meanwhile, for the next one. Only
where it is so much larger that a weight would be above what e4m3 has, a warp begins anew.

Each warp decides that by itself. Gluon has no branch for a single warp, so this is PTX.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replay.kernels.triton.hopper_scores import first_of_own, for_all_of_own
from replay.kernels.triton.quantise import LOG2_FP8_MAX

LOG2_UNIT = gl.constexpr(7.0)
"""The weight of a score that is as large as what is subtracted, in base 2. It leaves larger ones
1.8, and smaller ones down to 2^-16 of it, where 448 would leave nothing, and 2^-17.8."""


@gluon.jit
def exponentials(scores, scale, reference, largest, addend):
    """2^(scores · scale + addend - reference) in FP8, of scores that all count as they are.

    Args:
        scores: (ROWS, N) float32, N neighbours by N in the order of PV's left operand.
        scale: (ROWS,), of scores in base 2, not negative.
        reference: (ROWS, 4) as `own_sums` has it, what was subtracted in the block before; -inf
            where a row has seen no score.
        largest: the same, of the blocks before.
        addend: a number, LOG2_UNIT in it.

    Returns:
        The weights (ROWS, N); their `own_sums`; the new reference and the new largest; and
        2^(old reference - new).
    """
    LAYOUT: gl.constexpr = scores.type.layout
    OWN: gl.constexpr = reference.type.layout
    scale = gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT))[:, None]
    scale, _ = gl.broadcast(scale, scores)
    COUNT: gl.constexpr = scores.shape[1] // 2  # that a thread has, of two rows
    PTX: gl.constexpr = _instructions(COUNT)
    CONSTRAINTS: gl.constexpr = _constraints(COUNT)
    weights, sums, reference, largest, shrink = gl.inline_asm_elementwise(
        PTX,
        CONSTRAINTS,
        [
            scores,
            scale,
            for_all_of_own(reference, scores, WIDTH),
            for_all_of_own(largest, scores, WIDTH),
            gl.full(scores.shape, 0.0, gl.float32, LAYOUT) + addend,
        ],
        (gl.int8, gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=COUNT,
    )
    return (
        weights.to(gl.float8e4nv, bitcast=True),
        first_of_own(sums, OWN, WIDTH),
        first_of_own(reference, OWN, WIDTH),
        first_of_own(largest, OWN, WIDTH),
        first_of_own(shrink, OWN, WIDTH),
    )


WIDTH = gl.constexpr(4)
"""Weights in a register, of one row."""


@constexpr_function
def _constraints(count):
    """Weights, sums, references, largest, shrinks; scores, scales, references, largest, addends."""
    return ",".join(["=&r"] * (count // 4) + ["=&f"] * (4 * count) + ["f"] * (5 * count))


@constexpr_function
def _instructions(count):
    """What a thread does with its `count` scores: four of one row, four of the other, and so on.
    What there is one of for a row stands in the place of its first score; the other places of
    results are never written, nor read."""
    places = [count // 4 + k * count for k in range(9)]  # behind the weights
    firsts = (0, 4)  # of the two rows
    sums, moved, known, shrink = ([f"${places[k] + i}" for i in firsts] for k in range(4))
    scores = [f"${places[4] + i}" for i in range(count)]
    scale, reference, before, addend = ([f"${places[k] + i}" for i in firsts] for k in range(5, 9))

    weigh = ["mov.f32 sum0, 0.0;", "mov.f32 sum1, 0.0;"]
    compare = [f"mov.f32 most{row}, {scores[firsts[row]]};" for row in (0, 1)]
    for register in range(count // 4):
        row, first = register % 2, 4 * register
        for i in range(first, first + 4):
            weigh += [
                f"fma.rn.f32 weight{i}, {scores[i]}, {scale[row]}, origin{row};",
                f"ex2.approx.ftz.f32 weight{i}, weight{i};",
                f"add.f32 sum{row}, sum{row}, weight{i};",
            ]
            compare += [f"max.f32 most{row}, most{row}, {scores[i]};"]
        weigh += [
            f"cvt.rn.satfinite.e4m3x2.f32 low, weight{first + 1}, weight{first};",
            f"cvt.rn.satfinite.e4m3x2.f32 high, weight{first + 3}, weight{first + 2};",
            f"mov.b32 ${register}, {{low, high}};",
        ]

    begin, check, exchange, move, end = [], [], [], [], []
    for row in (0, 1):
        origin = [
            f"sub.f32 other, {reference[row]}, {moved[row]};",
            f"ex2.approx.ftz.f32 {shrink[row]}, other;",
            f"sub.f32 origin{row}, {addend[row]}, {moved[row]};",
        ]
        # What a thread has is above where the row's largest is, by the same arithmetic.
        above = [
            f"fma.rn.f32 other, most{row}, {scale[row]}, origin{row};",
            f"setp.gt.f32 above{row}, other, {LOG2_FP8_MAX.value:.8e};",
        ]
        begin += [f"max.f32 {moved[row]}, {reference[row]}, {before[row]};", *origin]
        check += above
        for lane in (1, 2):  # of the four threads that share the row
            exchange += [
                f"shfl.sync.bfly.b32 other, most{row}, {lane}, 31, 0xffffffff;",
                f"max.f32 most{row}, most{row}, other;",
            ]
        largest = [
            f"fma.rn.f32 other, most{row}, {scale[row]}, {addend[row]};",
            f"sub.f32 other, other, {LOG2_UNIT.value:.8e};",
        ]
        # No other row's numbers matter, be it of the same warp.
        move += [
            *above,
            *largest,
            f"selp.f32 {moved[row]}, other, {moved[row]}, above{row};",
            *origin,
        ]
        end += [*largest, f"max.f32 {known[row]}, {before[row]}, other;"]
    return "\n".join(
        [
            "{",
            ".reg .f32 origin<2>, sum<2>, most<2>, other;",
            f".reg .f32 weight<{count}>;",
            ".reg .b16 low, high;",
            ".reg .pred above<2>, any;",
            *begin,
            *compare,
            *weigh,
            *check,
            "or.pred any, above0, above1;",
            "vote.sync.any.pred any, any, 0xffffffff;",
            *exchange,
            "@!any bra.uni done;",
            *move,
            *weigh,
            "done:",
            *end,
            *(f"mov.f32 {sums[row]}, sum{row};" for row in (0, 1)),
            "}",
        ]
    )
