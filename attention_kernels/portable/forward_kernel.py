"""FlashAttention-2's forward pass (Dao 2023) in Triton: one tile of queries over all its keys.

A program holds BLOCK_M query rows and iterates over blocks of keys, with the running maximum and
sum of an online softmax (`online_softmax.py`). `forward_kernel` finds its tile, calls `_attend` for
each range of keys, and stores the output.

- Blocks that are cut by the diagonal, a side of a window or the end of the keys are masked. Blocks
  between them are not masked, and blocks beyond them are not visited. There are up to three ranges
  of blocks, each with its own loop.
- If a mask has been scanned (`visited_blocks.py`), or blocks have been chosen (`block_choice.py`),
  the program visits listed blocks: first whole blocks, then blocks that a query sees in part.
- A head dimension that is not a power of two is split into two pieces: 96 is 64 + 32, 72 is 64 +
  16.
- Query heads that share a key head read that head in place.
- Key and value are loaded through tensor descriptors (TMA) if their strides and the GPU allow it.
  Otherwise, and in small calls, they are loaded through pointers, with any strides. Triton overlaps
  the loads with the products and keeps `num_stages` blocks in flight.

Triton schedules loads and products here. The kernels for Hopper, in Gluon, schedule them
explicitly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.masking import mask_bias, may_see, stretches
from attention_kernels.tiles.matmul import matmul
from attention_kernels.tiles.online_softmax import LN_2, LOG2_E, add_sink, softmax_step, tanh
from attention_kernels.tiles.visited_blocks import first_key


# Numbers that change from call to call must not cause a recompilation if they are 1 or multiples of
# 16. Strides within a head may cause one, because the way of loading depends on them.
@triton.jit(
    do_not_specialize=[
        "q_len", "k_len", "tiles", "heads", "group", "batches", "head_group", "left", "right",
        "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh",
        "stride_mb", "stride_mh", "stride_wb", "stride_wh", "stride_ob", "stride_oh",
        "stride_lb", "stride_lh", "stride_lm",
    ]
)  # fmt: skip
def forward_kernel(
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
    blocks,
    counts,
    computed,
    scale,
    cap,
    left,
    right,
    skip,
    q_len,
    k_len,
    tiles,
    heads,
    group,
    batches,
    head_group,
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
    stride_wb,
    stride_wh,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lm,
    UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
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
    IS_ALIGNED: tl.constexpr,
):
    """Compute a tile of BLOCK_M queries of one head.

    `sinks`, `cap`, `left`, `right`, `skip`, `computed`, and `blocks` with its counts and strides
    are None if a call does not have them. Arguments that are None are not part of the compiled
    program.

    Strides of query, key and value are in UNITs, except between the elements of a row. Strides of
    the mask are in MASK_UNITs, and its number of keys is a multiple of MASK_UNIT. Strides of the
    output are in OUTPUT_UNITs.

    IS_ALIGNED: blocks of keys begin at multiples of BLOCK_N from the first key, even in a window.
    """
    # A row of 72 numbers is a multiple of 16 bytes. Triton infers this from the product.
    stride_qb = tl.cast(stride_qb, tl.int64) * UNIT
    stride_qh = tl.cast(stride_qh, tl.int64) * UNIT
    stride_qm = tl.cast(stride_qm, tl.int64) * UNIT
    stride_kb = tl.cast(stride_kb, tl.int64) * UNIT
    stride_kh = tl.cast(stride_kh, tl.int64) * UNIT
    stride_kn = tl.cast(stride_kn, tl.int64) * UNIT
    stride_vb = tl.cast(stride_vb, tl.int64) * UNIT
    stride_vh = tl.cast(stride_vh, tl.int64) * UNIT
    stride_vn = tl.cast(stride_vn, tl.int64) * UNIT
    stride_mb = tl.cast(stride_mb, tl.int64) * MASK_UNIT
    stride_mh = tl.cast(stride_mh, tl.int64) * MASK_UNIT
    stride_mm = tl.cast(stride_mm, tl.int64) * MASK_UNIT
    stride_ob = tl.cast(stride_ob, tl.int64) * OUTPUT_UNIT
    stride_oh = tl.cast(stride_oh, tl.int64) * OUTPUT_UNIT
    stride_om = tl.cast(stride_om, tl.int64) * OUTPUT_UNIT

    tile, batch, head = tile_of(tl.program_id(0), tiles, heads, batches, head_group)
    kv_head = head // group
    q_start, q_end, k_start, k_end, diagonal = rows_of(
        batch, q_offsets, k_starts, k_lengths, q_len, k_len, IS_BOTTOM_RIGHT, LENGTHS
    )
    batch_in_memory = batch
    if LENGTHS == "packed":
        batch_in_memory = 0
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
        query_main = _load_block(
            query, 0, 0, row, q_end, stride_qm, stride_qd, 0, D_MAIN, BLOCK_M, D, True, False
        )
        query_rest = query_main
        if D_REST > 0:
            query_rest = _load_block(
                query, 0, 0, row, q_end, stride_qm, stride_qd,
                D_MAIN, D_REST, BLOCK_M, D, True, False,
            )  # fmt: skip
        sums = tl.zeros([BLOCK_M, DV_MAIN], tl.float32)
        sums_rest = tl.zeros([BLOCK_M, DV_REST if DV_REST > 0 else 16], tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        rows = row + tl.arange(0, BLOCK_M)

        if blocks is None:
            ends = stretches(
                row + diagonal, k_start, k_end, left, right,
                BLOCK_M, BLOCK_N, IS_CAUSAL, IS_ALIGNED,
            )  # fmt: skip
            for stretch in tl.static_range(1 if left is None else 0, 3):
                sums, sums_rest, maximum, total = _attend(
                    sums, sums_rest, maximum, total, query_main, query_rest, key, value, attn_mask,
                    batch_in_memory, kv_head, rows, rows + diagonal, q_end, k_end,
                    None, None, ends[stretch], ends[stretch + 1], scale, cap, left, right, None,
                    stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn, MASK_UNIT,
                    BLOCK_N, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
                    MASK, IS_CAUSAL, stretch != 1, LENGTHS != "full", HAS_DESCRIPTORS,
                )  # fmt: skip
        else:
            place = wide_batch * stride_wb + wide_head * stride_wh + tile
            width = tl.cdiv(k_len, BLOCK_N)
            blocks += place * 2 * width
            if computed is not None:
                computed += ((wide_batch * heads + wide_head) * tiles + tile) * width
            for kind in tl.static_range(2):
                sums, sums_rest, maximum, total = _attend(
                    sums, sums_rest, maximum, total, query_main, query_rest, key, value, attn_mask,
                    batch_in_memory, kv_head, rows, rows + diagonal, q_end, k_end,
                    blocks + kind * width, computed, 0, tl.load(counts + place * 2 + kind),
                    scale, cap, left, right, skip,
                    stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn, MASK_UNIT,
                    BLOCK_N, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
                    MASK if kind == 1 else "none", IS_CAUSAL, kind == 1, False, HAS_DESCRIPTORS,
                )  # fmt: skip

        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            rescale, maximum, total = add_sink(sink, maximum, total, 1.0)
            sums *= rescale[:, None]
            if DV_REST > 0:
                sums_rest *= rescale[:, None]
        if HAS_LSE:
            tl.store(
                lse + wide_batch * stride_lb + wide_head * stride_lh + rows * stride_lm,
                (maximum + tl.math.log2(total)) * LN_2,
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


@triton.jit
def tile_of(program, tiles, heads, batches, head_group):
    """Return a program's tile of queries, batch element and head.

    Programs run in the order of their numbers, `head_group` heads at a time, so that the keys stay
    in the L2 cache. Within a group, the last tiles come first, because they are the longest in
    causal calls.
    """
    in_section = head_group * tiles
    first_head = program // in_section * head_group
    width = tl.minimum(head_group, batches * heads - first_head)
    place = program % in_section
    tile = tiles - 1 - place // width
    batch = (first_head + place % width) // heads
    head = (first_head + place % width) % heads
    return tile, batch, head


@triton.jit
def rows_of(
    batch,
    q_offsets,
    k_starts,
    k_lengths,
    q_len,
    k_len,
    IS_BOTTOM_RIGHT: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Return the first and the end of a batch element's queries and of its keys, and the distance
    from a query to its diagonal key.

    LENGTHS: "full" (every batch element has all rows of the tensors), "padded" (an element has
    `k_lengths` keys from `k_starts` on, or from 0 if `k_starts` is None), or "packed" (elements are
    concatenated). In a packed batch, `q_offsets` and `k_starts` (B + 1,) are the starts of the
    elements, and causal masks count from these starts. `k_lengths`, if not None, is the number of
    valid keys of each element.
    """
    q_start = 0
    q_end = q_len
    k_start = 0
    k_end = k_len
    diagonal = 0
    if LENGTHS == "packed":
        q_start = tl.load(q_offsets + batch)
        q_end = tl.load(q_offsets + batch + 1)
        k_start = tl.load(k_starts + batch)
        k_end = tl.load(k_starts + batch + 1)
        if k_lengths is not None:
            k_end = tl.minimum(k_end, k_start + tl.load(k_lengths + batch))
        diagonal = k_start - q_start
    elif LENGTHS == "padded":
        if k_starts is not None:
            k_start = tl.load(k_starts + batch)
        k_end = k_start + tl.load(k_lengths + batch)
    if IS_BOTTOM_RIGHT:
        diagonal = k_end - q_end
    return q_start, q_end, k_start, k_end, diagonal


@triton.jit
def _attend(
    sums,
    sums_rest,
    maximum,
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
    blocks,
    computed,
    first,
    last,
    scale,
    cap,
    left,
    right,
    skip,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    stride_mm,
    stride_mn,
    MASK_UNIT: tl.constexpr,
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
):
    """Iterate over the keys [first, last) of a head, or over that range of `blocks`, whose entries
    are the first keys of blocks.

    `rows` and keys count from the tensors' beginnings; `diagonals` are the diagonal keys of the
    rows. `cap`, `left` and `right` are None if there is no soft cap or no such side of a window.
    With a cap, `scale` is the factor of the exponent in tanh. `skip` is log₂λ (`block_sparse.py`)
    or None, and `computed` receives a 1 for each block that is not skipped, or is None. IS_BOUNDED:
    a block may reach past `k_end` or cross the diagonal or a side. IS_PART: keys past `k_end` may
    belong to another batch element.
    """
    STEP: tl.constexpr = BLOCK_N if blocks is None else 1
    next_start = first
    if blocks is not None:
        next_start = first_key(blocks, first, last, BLOCK_N)
    for place in tl.range(first, last, STEP):
        start = place
        if blocks is not None:
            start = next_start
            next_start = first_key(blocks, place + 1, last, BLOCK_N)
        key_main = _load_block(
            key, batch, kv_head, start, k_end, stride_kn, stride_kd,
            0, D_MAIN, BLOCK_N, D, IS_BOUNDED, HAS_DESCRIPTORS,
        )  # fmt: skip
        nothing = tl.zeros([query.shape[0], BLOCK_N], tl.float32)
        scores = matmul(query, key_main.T, nothing)
        if D_REST > 0:
            key_rest = _load_block(
                key, batch, kv_head, start, k_end, stride_kn, stride_kd,
                D_MAIN, D_REST, BLOCK_N, D, IS_BOUNDED, False,
            )  # fmt: skip
            scores = matmul(query_rest, key_rest.T, scores)
        keys = start + tl.arange(0, BLOCK_N)
        factor = scale
        if cap is not None:
            # Blocks with and without IS_BOUNDED must round alike. With `factor`, both multiply by
            # the cap in the multiply-add that subtracts the maximum.
            scores = tanh(scores * scale, query.dtype == tl.float32)
            factor = cap
        if MASK != "none":
            scores = scores * factor + mask_bias(
                attn_mask, rows, keys, q_end, k_end, stride_mm, stride_mn, MASK_UNIT,
                MASK == "bool" or MASK == "bool keys", IS_BOUNDED,
                MASK == "bool" or MASK == "float",
            )  # fmt: skip
            factor = 1.0
        if IS_BOUNDED:
            seen = may_see(diagonals, keys, k_end, left, right, IS_CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.max(scores, 1) * factor
        is_needed = True
        if skip is not None:
            is_small = (largest < maximum + skip) | (rows >= q_end)  # false for a NaN
            is_needed = tl.min(is_small.to(tl.int32), 0) == 0
        if is_needed:
            if computed is not None:
                tl.store(computed + start // BLOCK_N, 1)
            weights, maximum, rescale = softmax_step(scores, largest, maximum, factor)
            total = total * rescale + tl.sum(weights, 1)
            sums = sums * rescale[:, None]
            value_main = _load_block(
                value, batch, kv_head, start, k_end, stride_vn, stride_vd,
                0, DV_MAIN, BLOCK_N, DV, IS_BOUNDED, HAS_DESCRIPTORS,
            )  # fmt: skip
            if HAS_DESCRIPTORS and IS_BOUNDED and IS_PART:
                value_main = tl.where(keys[:, None] < k_end, value_main, 0.0)
            weights = weights.to(value_main.dtype)
            sums = matmul(weights, value_main, sums)
            if DV_REST > 0:
                value_rest = _load_block(
                    value, batch, kv_head, start, k_end, stride_vn, stride_vd,
                    DV_MAIN, DV_REST, BLOCK_N, DV, IS_BOUNDED, False,
                )  # fmt: skip
                sums_rest = sums_rest * rescale[:, None]
                sums_rest = matmul(weights, value_rest, sums_rest)
    return sums, sums_rest, maximum, total


@triton.jit
def _load_block(
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
    """Load (ROWS, COLUMNS) of a head from (`row`, FIRST) on, with zeros past HEAD_DIM.

    If IS_BOUNDED, some rows may be past `end`. Pointers load these rows as zeros. A descriptor
    loads the tensor's actual contents, or zeros past the tensor's end.
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
