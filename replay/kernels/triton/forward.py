"""The forward pass that `prefill.py` and `varlen.py` share: one tile of queries over all its keys.

It is FlashAttention-2's scheme (Dao 2023): a program holds BLOCK_M query rows and goes through the
keys a block at a time with the running maximum and sum of an online softmax. In base 2, log₂e being
part of the scale:

    s = q·kᵀ·scale·log₂e        m' = max(m, max s)        p = 2^(s − m')
    l' = l·2^(m − m') + Σp      o' = o·2^(m − m') + p·v   output = o / l

- Blocks that the diagonal, a side of a window or the end of the keys cuts are masked, those between
  are not, and those beyond are not gone through at all.
- A soft cap takes tanh as 1 - 2 / (e^2x + 1), which is right to float32's rounding. A sink is where
  maximum and sum begin: m = sink, l = 1.
- A head dimension that is no power of two is two pieces: 96 is 64 + 32, 72 is 64 + 16.
- Query heads that share a key head read it in place.
- Key and value come through tensor descriptors (TMA) where their strides allow it and the GPU has
  them, else through pointers, of any strides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from capture.variant import PLAIN, Variant
from replay.kernels.triton.descriptors import at, can_be_described, described, nowhere
from replay.kernels.triton.launch import Kept, Launch, PlannedCall, is_aligned, layout, named

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
"""The largest float32: what a mask of -finfo.max must not leave when it is turned to base 2."""


@triton.jit
def _block(
    source,
    batch,
    head,
    row,
    end,
    stride_row,
    stride_column,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
):
    """(ROWS, COLUMNS) of a head from (`row`, FIRST) on, zeros past HEAD_DIM.

    If IS_BOUNDED some rows may lie past `end`: zeros through pointers, and through a descriptor
    what the tensor has there (zeros past its own end).
    """
    rows = row + tl.arange(0, ROWS)
    if HAS_DESCRIPTOR:
        block = source.load([batch, head, row, FIRST]).reshape(ROWS, COLUMNS)
    else:
        columns = FIRST + tl.arange(0, COLUMNS)
        pointers = (
            source
            + rows.to(tl.int64)[:, None] * stride_row
            + columns.to(tl.int64)[None, :] * stride_column
        )
        if FIRST + COLUMNS > HEAD_DIM:
            inside = columns[None, :] < HEAD_DIM
            if IS_BOUNDED:
                inside = inside & (rows[:, None] < end)
            block = tl.load(pointers, mask=inside, other=0.0)
        elif IS_BOUNDED:
            block = tl.load(pointers, mask=rows[:, None] < end, other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def _product(left, right, sums, WIDEN: tl.constexpr):
    """left · right + sums in float32.

    WIDEN multiplies in float32, for Triton's interpreter, which takes bfloat16's bits for integers.
    """
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _bias(
    attn_mask,
    rows,
    keys,
    q_end,
    k_end,
    stride_row,
    stride_key,
    IS_BOOL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """What a mask adds to scores in base 2: (BLOCK_M, BLOCK_N), or (1, BLOCK_N) without rows."""
    inside = keys[None, :] < k_end
    pointers = attn_mask + keys.to(tl.int64)[None, :] * stride_key
    if HAS_ROWS:
        pointers += rows.to(tl.int64)[:, None] * stride_row
        inside = inside & (rows[:, None] < q_end)
        values = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    elif IS_BOUNDED:
        values = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    else:
        values = tl.load(pointers).to(tl.float32)
    if IS_BOOL:
        bias = tl.where(values != 0, 0.0, float("-inf"))
    else:
        # Only -inf may become -inf: a row of -finfo.max alone is an ordinary row.
        scaled = tl.maximum(values * LOG2_E, -LARGEST)
        is_ordinary = (values != float("-inf")) & (values == values)
        bias = tl.where(is_ordinary, scaled, values)
    return bias


@triton.jit
def _attend(
    sums,
    sums_rest,
    highest,
    total,
    query,
    query_rest,
    key,
    value,
    attn_mask,
    batch,
    kv_head,
    rows,
    diagonals,
    q_end,
    k_end,
    first,
    last,
    scale,
    cap,
    left,
    right,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    stride_mm,
    stride_mn,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    DV: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_REST: tl.constexpr,
    MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Go through the keys [first, last) of a head, a block at a time.

    `rows` and keys count from the tensors' beginnings; `diagonals` are the keys beside the rows.
    `cap`, `left` and `right` are None where there is no soft cap or side of a window; with a cap,
    `scale` is that of the exponent in tanh. IS_BOUNDED: a block may reach past `k_end` or cross the
    diagonal or a side. IS_PART: past `k_end` there may be somebody else's keys.
    """
    for start in tl.range(first, last, BLOCK_N):
        key_main = _block(
            key, batch, kv_head, start, k_end, stride_kn, stride_kd,
            0, D_MAIN, BLOCK_N, D, IS_BOUNDED, HAS_DESCRIPTORS,
        )  # fmt: skip
        nothing = tl.zeros([query.shape[0], BLOCK_N], tl.float32)
        scores = _product(query, key_main.T, nothing, WIDEN)
        if D_REST > 0:
            key_rest = _block(
                key, batch, kv_head, start, k_end, stride_kn, stride_kd,
                D_MAIN, D_REST, BLOCK_N, D, IS_BOUNDED, False,
            )  # fmt: skip
            scores = _product(query_rest, key_rest.T, scores, WIDEN)
        keys = start + tl.arange(0, BLOCK_N)
        if cap is not None:
            factor = 1.0
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * scale) + 1.0))
        elif MASK == "none":
            factor = scale
        else:
            factor = 1.0
            scores = scores * scale
        if MASK != "none":
            scores = scores + _bias(
                attn_mask, rows, keys, q_end, k_end, stride_mm, stride_mn,
                MASK == "bool" or MASK == "bool keys", IS_BOUNDED,
                MASK == "bool" or MASK == "float",
            )  # fmt: skip
        if IS_BOUNDED:
            allowed = keys[None, :] < k_end
            if IS_CAUSAL:
                allowed = allowed & (keys[None, :] <= diagonals[:, None])
            if right is not None:
                allowed = allowed & (keys[None, :] <= diagonals[:, None] + right)
            if left is not None:
                allowed = allowed & (keys[None, :] >= diagonals[:, None] - left)
            scores = tl.where(allowed, scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1) * factor)
        shift = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.math.exp2(scores * factor - shift[:, None])
        fade = tl.math.exp2(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        highest = risen
        sums = sums * fade[:, None]
        value_main = _block(
            value, batch, kv_head, start, k_end, stride_vn, stride_vd,
            0, DV_MAIN, BLOCK_N, DV, IS_BOUNDED, HAS_DESCRIPTORS,
        )  # fmt: skip
        if HAS_DESCRIPTORS and IS_BOUNDED and IS_PART:
            value_main = tl.where(keys[:, None] < k_end, value_main, 0.0)
        weights = weights.to(value_main.dtype)
        sums = _product(weights, value_main, sums, WIDEN)
        if DV_REST > 0:
            value_rest = _block(
                value, batch, kv_head, start, k_end, stride_vn, stride_vd,
                DV_MAIN, DV_REST, BLOCK_N, DV, IS_BOUNDED, False,
            )  # fmt: skip
            sums_rest = sums_rest * fade[:, None]
            sums_rest = _product(weights, value_rest, sums_rest, WIDEN)
    return sums, sums_rest, highest, total


# What changes from call to call must not compile the kernel again for integers that are 1 or
# multiples of 16. Strides within a head are left out: what they are decides how loads are done.
@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "tiles", "heads", "group", "batches", "section", "left", "right",
        "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh",
        "stride_mb", "stride_mh", "stride_ob", "stride_oh", "stride_lb", "stride_lh", "stride_lm",
    ]
)  # fmt: skip
def _forward(
    query,
    key,
    value,
    attn_mask,
    sinks,
    output,
    lse,
    q_offsets,
    k_starts,
    k_lengths,
    scale,
    cap,
    left,
    right,
    q_len,
    k_len,
    tiles,
    heads,
    group,
    batches,
    section,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lm,
    UNIT: tl.constexpr,
    OUTPUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    DV: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_REST: tl.constexpr,
    MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    LENGTHS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A tile of BLOCK_M queries of one head.

    LENGTHS: "full" (every batch element has all rows of the tensors), "padded" (its keys are
    `k_lengths` many from `k_starts` on), "packed" (batch elements lie one after another;
    `q_offsets` and `k_starts` are (B + 1,), say where each begins, and causal counts from there;
    `k_lengths`, if not None, how many of its keys count).

    `sinks`, `cap`, `left` and `right` are None where a call has none, and then no arguments of the
    compiled program.

    Strides of query, key and value, but those between the elements of a row, count in UNITs, those
    of the output in OUTPUT_UNITs.

    Programs run in the order of their numbers: `section` heads at a time, so that their keys stay
    in the L2 cache, and within those the last tiles first, which are the longest when causal.
    """
    # A row of 72 numbers is a multiple of 16 bytes, which Triton sees in the product only.
    stride_qb = tl.cast(stride_qb, tl.int64) * UNIT
    stride_qh = tl.cast(stride_qh, tl.int64) * UNIT
    stride_qm = tl.cast(stride_qm, tl.int64) * UNIT
    stride_kb = tl.cast(stride_kb, tl.int64) * UNIT
    stride_kh = tl.cast(stride_kh, tl.int64) * UNIT
    stride_kn = tl.cast(stride_kn, tl.int64) * UNIT
    stride_vb = tl.cast(stride_vb, tl.int64) * UNIT
    stride_vh = tl.cast(stride_vh, tl.int64) * UNIT
    stride_vn = tl.cast(stride_vn, tl.int64) * UNIT
    stride_ob = tl.cast(stride_ob, tl.int64) * OUTPUT_UNIT
    stride_oh = tl.cast(stride_oh, tl.int64) * OUTPUT_UNIT
    stride_om = tl.cast(stride_om, tl.int64) * OUTPUT_UNIT

    program = tl.program_id(0)
    in_section = section * tiles
    first_head = program // in_section * section
    width = tl.minimum(section, batches * heads - first_head)
    place = program % in_section
    tile = tiles - 1 - place // width
    batch = (first_head + place % width) // heads
    head = (first_head + place % width) % heads
    kv_head = head // group

    q_start = 0
    q_end = q_len
    k_start = 0
    k_end = k_len
    diagonal = 0
    batch_in_memory = batch
    if LENGTHS == "packed":
        q_start = tl.load(q_offsets + batch)
        q_end = tl.load(q_offsets + batch + 1)
        k_start = tl.load(k_starts + batch)
        k_end = tl.load(k_starts + batch + 1)
        if k_lengths is not None:
            k_end = tl.minimum(k_end, k_start + tl.load(k_lengths + batch))
        diagonal = k_start - q_start
        batch_in_memory = 0
    elif LENGTHS == "padded":
        k_start = tl.load(k_starts + batch)
        k_end = k_start + tl.load(k_lengths + batch)
    if IS_BOTTOM_RIGHT:
        diagonal = k_end - q_end
    row = q_start + tile * BLOCK_M
    if row < q_end:
        wide_batch = tl.cast(batch_in_memory, tl.int64)
        wide_head = head.to(tl.int64)
        query += wide_batch * stride_qb + wide_head * stride_qh
        if not HAS_DESCRIPTORS:
            key += wide_batch * stride_kb + kv_head.to(tl.int64) * stride_kh
            value += wide_batch * stride_vb + kv_head.to(tl.int64) * stride_vh
        if MASK != "none":
            attn_mask += wide_batch * stride_mb + wide_head * stride_mh
        query_main = _block(
            query, 0, 0, row, q_end, stride_qm, stride_qd, 0, D_MAIN, BLOCK_M, D, True, False
        )
        query_rest = query_main
        if D_REST > 0:
            query_rest = _block(
                query, 0, 0, row, q_end, stride_qm, stride_qd,
                D_MAIN, D_REST, BLOCK_M, D, True, False,
            )  # fmt: skip
        sums = tl.zeros([BLOCK_M, DV_MAIN], tl.float32)
        sums_rest = tl.zeros([BLOCK_M, DV_REST if DV_REST > 0 else 16], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            highest = tl.zeros([BLOCK_M], tl.float32) + sink * LOG2_E
            total += 1.0
        rows = row + tl.arange(0, BLOCK_M)

        first = k_start
        last = k_end
        unmasked = k_end - k_start
        if IS_CAUSAL:
            last = tl.minimum(k_end, row + diagonal + BLOCK_M)
            unmasked = tl.minimum(unmasked, row + diagonal + 1 - k_start)
        if right is not None:
            last = tl.minimum(k_end, row + diagonal + BLOCK_M + right)
            unmasked = tl.minimum(unmasked, row + diagonal + 1 + right - k_start)
        if left is not None:
            first = tl.maximum(k_start, row + diagonal - left)
            unmasked -= first - k_start
        unmasked = first + tl.maximum(unmasked, 0) // BLOCK_N * BLOCK_N
        inner = first
        if left is not None:
            # From here on no row's window has yet to begin.
            cut = tl.maximum(row + diagonal + BLOCK_M - 1 - left - first, 0)
            inner = tl.minimum(first + tl.cdiv(cut, BLOCK_N) * BLOCK_N, tl.maximum(first, last))
            unmasked = tl.maximum(unmasked, inner)
            sums, sums_rest, highest, total = _attend(
                sums, sums_rest, highest, total, query_main, query_rest, key, value, attn_mask,
                batch_in_memory, kv_head, rows, rows + diagonal, q_end, k_end,
                first, inner, scale, cap, left, right,
                stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn,
                BLOCK_N, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
                MASK, IS_CAUSAL, True, LENGTHS != "full", HAS_DESCRIPTORS, WIDEN,
            )  # fmt: skip
        sums, sums_rest, highest, total = _attend(
            sums, sums_rest, highest, total, query_main, query_rest, key, value, attn_mask,
            batch_in_memory, kv_head, rows, rows + diagonal, q_end, k_end,
            inner, unmasked, scale, cap, left, right,
            stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn,
            BLOCK_N, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
            MASK, IS_CAUSAL, False, LENGTHS != "full", HAS_DESCRIPTORS, WIDEN,
        )  # fmt: skip
        sums, sums_rest, highest, total = _attend(
            sums, sums_rest, highest, total, query_main, query_rest, key, value, attn_mask,
            batch_in_memory, kv_head, rows, rows + diagonal, q_end, k_end,
            unmasked, last, scale, cap, left, right,
            stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn,
            BLOCK_N, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
            MASK, IS_CAUSAL, True, LENGTHS != "full", HAS_DESCRIPTORS, WIDEN,
        )  # fmt: skip

        if HAS_LSE:
            tl.store(
                lse + wide_batch * stride_lb + wide_head * stride_lh + rows * stride_lm,
                (highest + tl.math.log2(total)) * LN_2,
                mask=rows < q_end,
            )
        total = tl.where(total == 0.0, 1.0, total)
        output += wide_batch * stride_ob + wide_head * stride_oh
        pointers = output + rows.to(tl.int64)[:, None] * stride_om
        columns = tl.arange(0, DV_MAIN)
        tl.store(
            pointers + columns[None, :] * stride_od,
            (sums / total[:, None]).to(output.dtype.element_ty),
            mask=(rows[:, None] < q_end) & (columns[None, :] < DV),
        )
        if DV_REST > 0:
            columns = DV_MAIN + tl.arange(0, DV_REST)
            tl.store(
                pointers + columns[None, :] * stride_od,
                (sums_rest / total[:, None]).to(output.dtype.element_ty),
                mask=(rows[:, None] < q_end) & (columns[None, :] < DV),
            )


def _whole(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def pieces(head_dim: int) -> tuple[int, int]:
    """A head dimension as two powers of two, at least 16 each, that cover it; the second may be 0.

    Two pieces only where that is less than the next power of two. Rows that cannot be copied to
    shared memory asynchronously are given as one piece: two of them came out wrong at head_dim 72
    on an H200 with Triton 3.6, for a reason not found.
    """
    whole = _whole(head_dim)
    if whole == head_dim or whole == 16:
        return whole, 0
    main = whole // 2
    rest = max(16, triton.next_power_of_2(head_dim - main))
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


class Blocks(NamedTuple):
    """How a call is cut up."""

    rows: int
    """Queries of a program."""
    keys: int
    """Keys at a time."""
    warps: int
    stages: int
    """Blocks of keys and values in flight."""
    registers: int | None = None
    """The most a thread may take, so that more programs share a multiprocessor."""


def blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    has_descriptors: bool,
    variant: Variant = PLAIN,
) -> Blocks:
    """The fastest found on an H200; other GPUs, and other ways to load, get what fits them."""
    left, right = variant.window
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32:  # exact products, which no tensor core does
        return Blocks(64, 32, 4, 1) if head_dim <= 64 else Blocks(32, 32, 4, 1)
    if not has_descriptors:
        if head_dim <= 64:
            return Blocks(128, 64, 4, 3)
        return Blocks(128, 64, 8, 3) if head_dim <= 128 else Blocks(64, 32, 4, 2)
    if head_dim <= 64:
        # Few rows waste less beside a diagonal.
        is_cut = is_causal or variant.window != (None, None)
        return Blocks(64, 128, 4, 2) if is_cut else Blocks(128, 128, 8, 3, 128)
    if head_dim <= 128:
        # Small programs end more evenly; large ones read keys and values half as often.
        seen = key.shape[2] if left is None else left + (right or 0)
        is_short = seen < 8192
        return Blocks(64, 64, 4, 3) if is_short else Blocks(128, 64, 8, 2, 128)
    return Blocks(128, 64, 8, 2)


SECTION_BYTES = 16 * 2**20
"""Keys and values that programs of neighbouring numbers share; a part of the L2 cache."""


class Lengths(NamedTuple):
    """Which rows of the tensors belong to which batch element; see `_forward`."""

    kind: str
    batches: int
    longest_query: int
    q_offsets: Tensor | None = None
    k_starts: Tensor | None = None
    k_lengths: Tensor | None = None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    lengths: Lengths,
    has_lse: bool,
    cut: Blocks | None = None,
    *,
    variant: Variant = PLAIN,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output, in memory as the query is (BHSD or BSHD), and the log-sum-exp if asked for.

    Args:
        query, key, value: BHSD; those of packed batches have one batch element.
        cut: how to cut up the call; None is `blocks`.
        variant: its longest sequences are not read.
        sinks: (Hq,).

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if scale <= 0:  # the kernel takes the maximum before it multiplies
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    shape = (
        query.device,
        *map(layout, (query, key, value, attn_mask, sinks)),
        *map(is_aligned, (query, key, value)),
        is_causal,
        scale,
        *lengths[:3],
        *map(layout, lengths[3:]),
        has_lse,
        cut,
        variant,
    )
    planned = _calls.get(shape) or _calls.keep(
        shape,
        _plan(query, key, value, attn_mask, is_causal, scale, lengths, has_lse, cut, variant),
    )
    output = _output(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if has_lse else None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    if planned.descriptors is not None:
        of_key, of_value = planned.descriptors
        key, value = at(of_key, key), at(of_value, value)
    planned.launch(
        query,
        key,
        value,
        attn_mask,
        None if sinks is None else sinks.contiguous(),
        output,
        lse,
        *lengths[3:],
    )
    return output, lse


_calls: Kept[PlannedCall] = Kept()


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    lengths: Lengths,
    has_lse: bool,
    cut: Blocks | None,
    variant: Variant,
) -> PlannedCall:
    """All of a call but its tensors' addresses; arguments as those of `forward`, scale > 0."""
    _check(query, key, value)
    memory, heads, q_len, head_dim = query.shape
    kv_heads, k_len, v_head_dim = key.shape[1], key.shape[2], value.shape[3]
    output = _output(query, v_head_dim)
    unit, output_unit = _unit(query, key, value), _unit(output)
    main, rest = pieces(head_dim) if unit > 1 else (_whole(head_dim), 0)
    v_main, v_rest = pieces(v_head_dim) if unit > 1 else (_whole(v_head_dim), 0)
    has_descriptors = (
        not rest
        and not v_rest
        and head_dim == main
        and v_head_dim == v_main
        and can_be_described(key)
        and can_be_described(value)
    )
    cut = cut or blocks(query, key, value, is_causal, has_descriptors, variant)
    tiles = triton.cdiv(lengths.longest_query, cut.rows)
    mask, kind = _as_numbers(attn_mask, (memory, heads, q_len, k_len))
    left, right = (_limit(side, q_len + k_len) for side in variant.window)
    if is_causal or right == 0:
        is_causal, right = True, None
    scale, cap = scale * LOG2_E.value, None
    if variant.softcap is not None:
        scale, cap = 2 * scale / variant.softcap, variant.softcap * LOG2_E.value
    kv_bytes = k_len * (head_dim + v_head_dim) * key.element_size() * kv_heads // max(1, heads)
    launch = Launch(
        _forward,
        (tiles * lengths.batches * heads, 1, 1),
        query.device,
        named("stride_q", "bhmd", _strides(query, unit))
        | named("stride_k", "bhnd", _strides(key, unit))
        | named("stride_v", "bhnd", _strides(value, unit))
        | named("stride_m", "bhmn", mask.stride() if mask is not None else (0, 0, 0, 0))
        | named("stride_o", "bhmd", _strides(output, output_unit))
        | named("stride_l", "bhm", (heads * q_len, q_len, 1) if has_lse else (0, 0, 0))
        | {
            "scale": scale,
            "cap": cap,
            "left": left,
            "right": right,
            "q_len": q_len,
            "k_len": k_len,
            "tiles": tiles,
            "heads": heads,
            "group": heads // kv_heads,
            "batches": lengths.batches,
            "section": max(1, SECTION_BYTES // max(1, kv_bytes)) if is_causal else 1,
            "UNIT": unit,
            "OUTPUT_UNIT": output_unit,
            "BLOCK_M": cut.rows,
            "BLOCK_N": cut.keys,
            "D": head_dim,
            "D_MAIN": main,
            "D_REST": rest,
            "DV": v_head_dim,
            "DV_MAIN": v_main,
            "DV_REST": v_rest,
            "MASK": kind,
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": variant.bottom_right,
            "LENGTHS": lengths.kind,
            "HAS_LSE": has_lse,
            "HAS_DESCRIPTORS": has_descriptors,
            "WIDEN": query.device.type == "cpu" and query.dtype == torch.bfloat16,
        },
        num_warps=cut.warps,
        num_stages=cut.stages,
        maxnreg=cut.registers,
    )
    if not has_descriptors:
        return PlannedCall(launch)
    of_key, of_value = described(key, cut.keys, main), described(value, cut.keys, v_main)
    return PlannedCall(launch, (nowhere(of_key), nowhere(of_value)))


def _limit(side: int | None, farthest: int) -> int | None:
    """A side of a window; None where it ends beyond all keys."""
    return None if side is None or side >= farthest else side


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    batch, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    if key.shape[0] != batch or key.shape[3] != head_dim or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "do not fit together"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if max(head_dim, value.shape[3]) > 256:
        raise ValueError(f"head_dim {max(head_dim, value.shape[3])}: at most 256")


def _output(query: Tensor, v_head_dim: int) -> Tensor:
    batch, heads, q_len, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, q_len, heads, v_head_dim).transpose(1, 2)
    return query.new_empty(batch, heads, q_len, v_head_dim)


def _as_numbers(
    attn_mask: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[Tensor | None, str]:
    """The mask broadcast by strides, a bool one as bytes, and what `_attend` calls its kind."""
    if attn_mask is None:
        return None, "none"
    mask = attn_mask.expand(shape)
    kind = "float"
    if mask.dtype == torch.bool:
        mask, kind = mask.view(torch.uint8), "bool"
    return mask, f"{kind} keys" if mask.stride(2) == 0 else kind


def _unit(*tensors: Tensor) -> int:
    """8 where every row is adjacent elements and begins at a multiple of 16 bytes, else 1."""
    for tensor in tensors:
        others_fit = all(stride % 8 == 0 for stride in tensor.stride()[:3])
        if tensor.stride(3) != 1 or tensor.data_ptr() % 16 or not others_fit:
            return 1
    return 8


def _strides(tensor: Tensor, unit: int) -> list[int]:
    """All but the last in units."""
    *others, last = tensor.stride()
    return [*(stride // unit for stride in others), last]
