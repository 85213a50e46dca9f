"""Softmax of a block in `hopper_prefill_kernel.py`: soft cap, mask, and weights for PV."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.exponentials import exponentials
from attention_kernels.hopper.key_ranges import hide_unseen
from attention_kernels.hopper.mask_blocks import hide, mask_of
from attention_kernels.hopper.scores import own, own_sums
from attention_kernels.hopper.special_functions import TANH, approximately
from attention_kernels.tiles.online_softmax import LN_2, LOG2_E

SLACK = gl.constexpr(15.0)
"""Maximum of a score minus its reference, in base 2, because float16 goes up to 2^16."""


class SoftmaxExtras(NamedTuple):
    """Operands of softmax other than scores and mask; None for operands that a call does not
    have."""

    scale: Any
    """Scale of the scores, in base 2 unless a mask is added. With a cap, the scale of tanh's
    argument."""
    cap: Any
    """Soft cap, in base 2 unless a mask is added."""
    sinks: Any
    """(Hq,)."""


@gluon.jit
def weigh(
    scores,
    reference,
    rings,
    masks,
    first_query,
    first_key,
    element,
    bounds,
    extras,
    WHO: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Return a block's packed weights, their `own_sums`, their new reference, and the factor of
    earlier sums.

    Reference and factor are (ROWS, 4) like the sums. The reference is the row's largest score so
    far, or less by at most SLACK. The reference is in base 2, or in base e if a mask is added:
    masks may contain the lowest number of their type, and that number times log₂ e would be -inf.
    The reference of a row that has not seen a key is -inf; -inf minus -inf would be NaN.
    """
    OWN: gl.constexpr = reference.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    DTYPE: gl.constexpr = rings.value.buffers.dtype
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    scale = extras.scale
    if extras.cap is not None:
        # A soft cap needs three special functions per score; `tanh.approx` reduces them to two.
        scores = approximately(TANH, scores * extras.scale)
        scale = extras.cap
    # If the mask has been scanned, only blocks that the mask cuts read it.
    READS_MASK: gl.constexpr = IS_MASKED or bounds.visited is None
    if rings.mask is not None and READS_MASK:
        scores = hide(scores, rings.mask, masks, CONSUMERS, WHO)
    if rings.bias is not None:
        scores = scores * scale
        if READS_MASK:
            LAYOUT: gl.constexpr = scores.type.layout
            scores += mask_of(rings.bias, masks, CONSUMERS, WHO, LAYOUT)
    if IS_MASKED:
        scores = hide_unseen(scores, first_query, first_key, element, bounds)
    most = gl.max(scores, 1)
    if rings.bias is None:
        most = most * scale
    before = gl.convert_layout(gl.max(reference, 1), ROW)
    UNIT: gl.constexpr = 1.0 if rings.bias is None else LN_2
    now = gl.where(most - before > SLACK * UNIT, most, before)
    subtracted = now
    if IS_MASKED or rings.mask is not None or rings.bias is not None:
        subtracted = gl.where(now == float("-inf"), 0.0, now)
    if rings.bias is not None:
        factor = gl.exp2((before - subtracted) * LOG2_E)
        weights = gl.exp2((scores - subtracted[:, None]) * LOG2_E)
    else:
        factor = gl.exp2(before - subtracted)
        weights = gl.exp2(scores * scale - subtracted[:, None])
    return pack(weights, DTYPE), own_sums(weights), own(now, OWN), own(factor, OWN)


@gluon.jit
def weigh_whole(scores, reference, extras, dtype: gl.constexpr):
    """Return the results of `weigh` for a block without a mask that all queries see in full."""
    scale = extras.scale
    if extras.cap is not None:
        scores = approximately(TANH, scores * extras.scale)
        scale = extras.cap
    return exponentials(scores, scale, reference, dtype, SLACK)


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Pack neighbours into one register, (ROWS, KEYS / 2) int32.

    Unpacked 16-bit values that are carried from one block to the next would take one register each,
    and would have to be packed each time.
    """
    TO: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    left, right = gl.split(weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)))
    CONVERT: gl.constexpr = "cvt.rn." + TO + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        CONVERT, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(packed, output, dtype: gl.constexpr):
    """Return packed weights in the form that PV needs, (ROWS, KEYS)."""
    left, right = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [packed],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, output.type.layout, 2)
    weights = gl.join(left, right).reshape((packed.shape[0], packed.shape[1] * 2))
    return gl.convert_layout(weights.to(dtype, bitcast=True), LAYOUT, assert_trivial=True)
