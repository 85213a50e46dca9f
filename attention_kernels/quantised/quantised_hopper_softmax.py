"""Softmax of a block in `quantised_hopper_kernel.py`: soft cap, mask, scales, weights for PV."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.key_ranges import hide_unseen
from attention_kernels.hopper.mask_blocks import hide
from attention_kernels.hopper.scores import ROWS, own_sums
from attention_kernels.hopper.special_functions import RECIPROCAL, TANH, approximately
from attention_kernels.tiles.round_to_eight_bits import LOG2_FP8_MAX


@gluon.jit
def weigh(
    scores,
    scale,
    rows,
    rings,
    exponent,
    of_values,
    maximum,
    total,
    masks,
    block,
    element,
    bounds,
    cap,
    OUTPUT: gl.constexpr,
    WHO: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Return the weights of one block (ROWS, KEYS) in the layout OUTPUT for PV, the new maximum
    (ROWS,) and sums (ROWS, 4) of `own_sums`, and the factor (ROWS,) of earlier sums.

    FP8 weights, and the maximum of their exponents, include the scale of the block's values. The
    sums do not include that scale.

    Args:
        scores: (ROWS, KEYS), products of 8-bit numbers.
        scale: (ROWS,), not negative: scores times `scale` are in base 2; with a cap, they are the
            argument of tanh.
        rows: `QueryRows` of the scores.
        exponent: log₂ of `of_values` in FP8, else 0.
        of_values: scale of the block's values.
        masks: number of blocks of the mask so far.
        block: number of the block within the batch element.
        cap: soft cap times log₂ e, or None.
    """
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    DTYPE: gl.constexpr = rings.value.buffers.dtype
    FP8_VALUE: gl.constexpr = DTYPE == gl.float8e4nv  # noqa: SIM300
    KEYS: gl.constexpr = scores.shape[1]
    scores = scores.to(gl.float32)
    if cap is not None:
        scores *= scale[:, None]
        if rows.shift is not None:
            scores += rows.shift[:, None]
        # A soft cap needs three special functions per score; `tanh.approx` reduces them to two. Its
        # 11 exact bits are enough for scores of 8-bit operands.
        scores = approximately(TANH, scores)
    if IS_MASKED:
        if rings.mask is not None:
            scores = hide(scores, rings.mask, masks, CONSUMERS, WHO)
        else:
            scores = hide_unseen(scores, rows.first, block * KEYS, element, bounds)
    largest = gl.max(scores, 1)
    # A group of INT8 keys with a NaN has NaN as its scale. NaN times -inf is NaN, but a row that
    # sees no key of the group must not get it.
    SPREADS_NAN: gl.constexpr = IS_MASKED and cap is None and rows.query.dtype == gl.int8
    not_finite = 0.0
    if SPREADS_NAN:
        not_finite = gl.where(largest > float("-inf"), scale * 0.0, 0.0)
        scale = gl.where(scale == scale, scale, 1.0)
    # Scales are not negative, so the largest product gives the largest score.
    largest = largest * (scale if cap is None else cap)
    new_maximum = gl.maximum(maximum, largest + exponent)
    subtracted = new_maximum
    MAY_SEE_NOTHING: gl.constexpr = (
        bounds.left is not None
        or bounds.diagonal is None
        or bounds.k_lengths is not None
        or bounds.q_offsets is not None
        or rings.mask is not None
    )
    if IS_MASKED and MAY_SEE_NOTHING:
        # For a row that has not seen a key, -inf minus -inf would be NaN.
        subtracted = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    origin = subtracted - exponent
    if FP8_VALUE:
        origin = origin - LOG2_FP8_MAX
    if SPREADS_NAN:
        origin = origin + not_finite
    if cap is None:
        weights = gl.exp2(scores * scale[:, None] - origin[:, None])
    else:
        weights = gl.exp2(scores * cap - origin[:, None])
    shrink = gl.exp2(maximum - subtracted)
    sums = own_sums(weights)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
    if FP8_VALUE:
        total = total + sums * approximately(RECIPROCAL, of_values)
        # Reordering to KEY_ORDER only renames the registers of a thread.
        weights = weights.to(DTYPE).reshape((ROWS, KEYS // 16, 2, 4, 2))
        weights = weights.permute((0, 1, 3, 2, 4)).reshape((ROWS, KEYS))
    else:
        total = total + sums
        weights = weights.to(DTYPE)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4 if FP8_VALUE else 2)
    return gl.convert_layout(weights, WEIGHTS), new_maximum, total, shrink
