"""FlashAttention-2's backward pass (Dao 2023) in Triton, in two passes that store each gradient
once.

With weights p = 2^(s − lse), as in `online_softmax.py`, and the gradient dO of the output o:

    δ = Σ dO·o − dlse             one number per row, `row_sums.py`
    ds = p · (dO·vᵀ − δ) · (1 − t²)        t is the tanh of a soft cap; without one, t = 0
    dq = scale · ds · k                    `query_kernel`: a tile of queries over its keys
    dk = scale · dsᵀ · q, dv = pᵀ · dO     `key_value_kernel`: a tile of keys over its queries
    dsink = −Σ 2^(sink − lse) · δ          `row_sums.py`

Both passes compute the scores again. One pass could compute all three gradients with five products
instead of seven, but it would have to add up dq in memory, in an order that changes from run to
run. With two passes, the same call always gives the same bits.

- A tile of keys iterates over the queries of all heads that share its key head, so dk and dv need
  neither atomics nor memory for parts.
- Ranges of keys are those of the forward pass (`masking.stretches`). For a tile of keys, the same
  function gives the range of queries, with the sides of the window exchanged.
- A scanned mask (`visited_blocks.py`) lists the blocks of keys of each tile of queries, and the
  scan of its transpose lists the blocks of queries of each tile of keys.
- Scores of the second pass are transposed, (keys, queries), so that p and ds are the left operands
  of dv and dk and stay in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.portable.forward_kernel import rows_of, tile_of
from attention_kernels.tiles.masking import mask_bias, may_see, stretches
from attention_kernels.tiles.matmul import matmul
from attention_kernels.tiles.online_softmax import tanh
from attention_kernels.tiles.row_sums import load_rows
from attention_kernels.tiles.visited_blocks import first_key

# Numbers that change from call to call must not cause a recompilation if they are 1 or multiples of
# 16. Strides may cause one, because the way of loading depends on them.
NUMBERS = [
    "q_len", "k_len", "row_length", "tiles", "heads", "kv_heads", "batches", "head_group", "left",
    "right", "stride_wb", "stride_wh",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def query_kernel(
    query,
    key,
    value,
    attn_mask,
    grad_output,
    logarithms,
    deltas,
    grad_query,
    q_offsets,
    k_starts,
    k_lengths,
    blocks,
    counts,
    scale,
    cap,
    grad_scale,
    left,
    right,
    q_len,
    k_len,
    tiles,
    heads,
    kv_heads,
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
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_wb,
    stride_wh,
    stride_db,
    stride_dh,
    stride_dm,
    stride_dd,
    MASK_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
    MASK: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Compute dq for a tile of BLOCK_M queries of one head.

    Arguments are those of `forward_kernel`, except: `right` is 0 in a causal call; `grad_scale` is
    the scale of the scores in base e; strides count elements. `stride_g` are those of
    `grad_output`, `stride_d` those of `grad_query`.
    """
    tile, batch, head = tile_of(tl.program_id(0), tiles, heads, batches, head_group)
    q_start, q_end, k_start, k_end, diagonal = rows_of(
        batch, q_offsets, k_starts, k_lengths, q_len, k_len, IS_BOTTOM_RIGHT, LENGTHS
    )
    row = q_start + tile * BLOCK_M
    if row < q_end:
        memory = tl.cast(0 if LENGTHS == "packed" else batch, tl.int64)
        wide_head = head.to(tl.int64)
        kv_head = (head // (heads // kv_heads)).to(tl.int64)
        rows = row + tl.arange(0, BLOCK_M)
        query += memory * stride_qb + wide_head * stride_qh
        key += memory * stride_kb + kv_head * stride_kh
        value += memory * stride_vb + kv_head * stride_vh
        grad_output += memory * stride_gb + wide_head * stride_gh
        grad_query += memory * stride_db + wide_head * stride_dh
        if MASK != "none":
            attn_mask += memory * stride_mb + wide_head * stride_mh
        queries = load_rows(query, rows, q_end, stride_qm, stride_qd, D, D_WIDTH, True)
        gradients = load_rows(grad_output, rows, q_end, stride_gm, stride_gd, DV, DV_WIDTH, True)
        places = (memory * heads + head) * q_len + rows
        logarithm = tl.load(logarithms + places, mask=rows < q_end, other=float("inf"))
        delta = tl.load(deltas + places, mask=rows < q_end, other=0.0)
        sums = tl.zeros([BLOCK_M, D_WIDTH], tl.float32)
        if blocks is None:
            ends = stretches(
                row + diagonal, k_start, k_end, left, right, BLOCK_M, BLOCK_N, False, False
            )
            for stretch in tl.static_range(1 if left is None else 0, 3):
                sums = _add_keys(
                    sums, queries, gradients, logarithm, delta, key, value, attn_mask,
                    rows, rows + diagonal, q_end, k_end, None, ends[stretch], ends[stretch + 1],
                    scale, cap, left, right,
                    stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn, MASK_UNIT,
                    BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, MASK, stretch != 1,
                )  # fmt: skip
        else:
            place = memory * stride_wb + wide_head * stride_wh + tile
            width = tl.cdiv(k_len, BLOCK_N)
            blocks += place * 2 * width
            for kind in tl.static_range(2):
                sums = _add_keys(
                    sums, queries, gradients, logarithm, delta, key, value, attn_mask,
                    rows, rows, q_end, k_end,
                    blocks + kind * width, 0, tl.load(counts + place * 2 + kind),
                    scale, cap, left, right,
                    stride_kn, stride_kd, stride_vn, stride_vd, stride_mm, stride_mn, MASK_UNIT,
                    BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, MASK if kind == 1 else "none", kind == 1,
                )  # fmt: skip
        _store_rows(
            grad_query, sums * grad_scale, rows, q_end, stride_dm, stride_dd, D, D_WIDTH
        )  # fmt: skip


@triton.jit
def _add_keys(
    sums,
    queries,
    gradients,
    logarithm,
    delta,
    key,
    value,
    attn_mask,
    rows,
    diagonals,
    q_end,
    k_end,
    blocks,
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
    MASK_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
    MASK: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Add ds · k for the keys [first, last) of a head, or for that range of `blocks`, to `sums`."""
    STEP: tl.constexpr = BLOCK_N if blocks is None else 1
    nothing = tl.zeros([queries.shape[0], BLOCK_N], tl.float32)
    next_start = first
    if blocks is not None:
        next_start = first_key(blocks, first, last, BLOCK_N)
    for place in tl.range(first, last, STEP):
        start = place
        if blocks is not None:
            start = next_start
            next_start = first_key(blocks, place + 1, last, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        key_block = load_rows(key, keys, k_end, stride_kn, stride_kd, D, D_WIDTH, IS_BOUNDED)
        value_block = load_rows(value, keys, k_end, stride_vn, stride_vd, DV, DV_WIDTH, IS_BOUNDED)
        bias = None
        if MASK != "none":
            bias = mask_bias(
                attn_mask, rows, keys, q_end, k_end, stride_mm, stride_mn, MASK_UNIT,
                MASK == "bool" or MASK == "bool keys", IS_BOUNDED,
                MASK == "bool" or MASK == "float",
            )  # fmt: skip
        seen = None
        if IS_BOUNDED:
            seen = may_see(diagonals, keys, k_end, left, right, False)
        _, changes = _weights(
            matmul(queries, key_block.T, nothing), matmul(gradients, value_block.T, nothing),
            bias, seen, logarithm[:, None], delta[:, None], scale, cap, queries.dtype == tl.float32,
        )  # fmt: skip
        sums = matmul(changes.to(key_block.dtype), key_block, sums)
    return sums


@triton.jit(do_not_specialize=NUMBERS)
def key_value_kernel(
    query,
    key,
    value,
    attn_mask,
    grad_output,
    logarithms,
    deltas,
    grad_key,
    grad_value,
    q_offsets,
    k_starts,
    k_lengths,
    blocks,
    counts,
    scale,
    cap,
    grad_scale,
    left,
    right,
    q_len,
    k_len,
    tiles,
    heads,
    kv_heads,
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
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_wb,
    stride_wh,
    stride_db,
    stride_dh,
    stride_dn,
    stride_dd,
    stride_eb,
    stride_eh,
    stride_en,
    stride_ed,
    MASK_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
    MASK: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Compute dk and dv for a tile of BLOCK_N keys of one key head.

    Arguments are those of `query_kernel`. `blocks` and `counts` belong to the transposed mask.
    `stride_d` and `stride_e` are the strides of `grad_key` and `grad_value`.
    """
    from_last, batch, kv_head = tile_of(tl.program_id(0), tiles, kv_heads, batches, head_group)
    tile = tiles - 1 - from_last  # the first keys of a causal call have the most queries
    q_start, q_end, k_start, k_end, diagonal = rows_of(
        batch, q_offsets, k_starts, k_lengths, q_len, k_len, IS_BOTTOM_RIGHT, LENGTHS
    )
    row = k_start + tile * BLOCK_N
    if row < k_end:
        memory = tl.cast(0 if LENGTHS == "packed" else batch, tl.int64)
        wide_head = kv_head.to(tl.int64)
        keys = row + tl.arange(0, BLOCK_N)
        key += memory * stride_kb + wide_head * stride_kh
        value += memory * stride_vb + wide_head * stride_vh
        grad_key += memory * stride_db + wide_head * stride_dh
        grad_value += memory * stride_eb + wide_head * stride_eh
        key_block = load_rows(key, keys, k_end, stride_kn, stride_kd, D, D_WIDTH, True)
        value_block = load_rows(value, keys, k_end, stride_vn, stride_vd, DV, DV_WIDTH, True)
        key_sums = tl.zeros([BLOCK_N, D_WIDTH], tl.float32)
        value_sums = tl.zeros([BLOCK_N, DV_WIDTH], tl.float32)
        group = heads // kv_heads
        for member in tl.range(0, group):
            head = kv_head * group + member
            wide_head = head.to(tl.int64)
            head_query = query + memory * stride_qb + wide_head * stride_qh
            head_gradient = grad_output + memory * stride_gb + wide_head * stride_gh
            head_rows = (memory * heads + head) * q_len
            head_mask = attn_mask
            if MASK != "none":
                head_mask += memory * stride_mb + wide_head * stride_mh
            if blocks is None:
                # Query i sees keys i + diagonal - left to i + diagonal + right, so key j is seen by
                # queries j - diagonal - right to j - diagonal + left.
                ends = stretches(
                    row - diagonal, q_start, q_end, right, left, BLOCK_N, BLOCK_M, False, False
                )
                for stretch in tl.static_range(1 if right is None else 0, 3):
                    key_sums, value_sums = _add_queries(
                        key_sums, value_sums, key_block, value_block, head_query, head_gradient,
                        logarithms + head_rows, deltas + head_rows, head_mask,
                        keys, keys - diagonal, q_end, k_end,
                        None, ends[stretch], ends[stretch + 1], scale, cap, left, right,
                        stride_qm, stride_qd, stride_gm, stride_gd, stride_mm, stride_mn, MASK_UNIT,
                        BLOCK_M, D, D_WIDTH, DV, DV_WIDTH, MASK, stretch != 1,
                    )  # fmt: skip
            else:
                place = memory * stride_wb + wide_head * stride_wh + tile
                width = tl.cdiv(q_len, BLOCK_M)
                head_blocks = blocks + place * 2 * width
                for kind in tl.static_range(2):
                    key_sums, value_sums = _add_queries(
                        key_sums, value_sums, key_block, value_block, head_query, head_gradient,
                        logarithms + head_rows, deltas + head_rows, head_mask,
                        keys, keys, q_end, k_end,
                        head_blocks + kind * width, 0, tl.load(counts + place * 2 + kind),
                        scale, cap, left, right,
                        stride_qm, stride_qd, stride_gm, stride_gd, stride_mm, stride_mn, MASK_UNIT,
                        BLOCK_M, D, D_WIDTH, DV, DV_WIDTH,
                        MASK if kind == 1 else "none", kind == 1,
                    )  # fmt: skip
        _store_rows(grad_key, key_sums * grad_scale, keys, k_end, stride_dn, stride_dd, D, D_WIDTH)
        _store_rows(grad_value, value_sums, keys, k_end, stride_en, stride_ed, DV, DV_WIDTH)


@triton.jit
def _add_queries(
    key_sums,
    value_sums,
    key_block,
    value_block,
    query,
    grad_output,
    logarithms,
    deltas,
    attn_mask,
    keys,
    diagonals,
    q_end,
    k_end,
    blocks,
    first,
    last,
    scale,
    cap,
    left,
    right,
    stride_qm,
    stride_qd,
    stride_gm,
    stride_gd,
    stride_mm,
    stride_mn,
    MASK_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
    MASK: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Add dsᵀ · q and pᵀ · dO for the queries [first, last) of a head, or for that range of
    `blocks`, to the sums of the keys.

    `diagonals` are the queries whose diagonal keys are `keys`.
    """
    STEP: tl.constexpr = BLOCK_M if blocks is None else 1
    nothing = tl.zeros([key_block.shape[0], BLOCK_M], tl.float32)
    next_start = first
    if blocks is not None:
        next_start = first_key(blocks, first, last, BLOCK_M)
    for place in tl.range(first, last, STEP):
        start = place
        if blocks is not None:
            start = next_start
            next_start = first_key(blocks, place + 1, last, BLOCK_M)
        rows = start + tl.arange(0, BLOCK_M)
        queries = load_rows(query, rows, q_end, stride_qm, stride_qd, D, D_WIDTH, IS_BOUNDED)
        gradients = load_rows(
            grad_output, rows, q_end, stride_gm, stride_gd, DV, DV_WIDTH, IS_BOUNDED
        )
        if IS_BOUNDED:
            logarithm = tl.load(logarithms + rows, mask=rows < q_end, other=float("inf"))
            delta = tl.load(deltas + rows, mask=rows < q_end, other=0.0)
        else:
            logarithm = tl.load(logarithms + rows)
            delta = tl.load(deltas + rows)
        bias = None
        if MASK != "none":  # a tile of keys may reach past their end in any block of queries
            bias = mask_bias(
                attn_mask, rows, keys, q_end, k_end, stride_mm, stride_mn, MASK_UNIT,
                MASK == "bool" or MASK == "bool keys", True, MASK == "bool" or MASK == "float",
            ).T  # fmt: skip
        seen = None
        if IS_BOUNDED:
            seen = may_see(diagonals, rows, q_end, right, left, False)
        weights, changes = _weights(
            matmul(key_block, queries.T, nothing), matmul(value_block, gradients.T, nothing),
            bias, seen, logarithm[None, :], delta[None, :], scale, cap,
            key_block.dtype == tl.float32,
        )  # fmt: skip
        value_sums = matmul(weights.to(gradients.dtype), gradients, value_sums)
        key_sums = matmul(changes.to(queries.dtype), queries, key_sums)
    return key_sums, value_sums


@triton.jit
def _weights(
    products, grad_weights, bias, seen, logarithm, delta, scale, cap, IS_FLOAT32: tl.constexpr
):
    """Return the weights p and the gradients ds of q·k, without the scale, in the orientation of
    the operands.

    Args:
        products: q·k.
        grad_weights: dO·v.
        bias, seen: terms that the mask adds, and the scores that count; None for no mask, and for
            all.
        scale, cap: as in `forward_kernel`.
    """
    scores = products * scale
    if cap is not None:
        ratio = tanh(scores, IS_FLOAT32)
        scores = ratio * cap
    if bias is not None:
        scores += bias
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.math.exp2(scores - logarithm)
    changes = weights * (grad_weights - delta)
    if cap is not None:
        changes *= 1.0 - ratio * ratio
    return weights, changes


@triton.jit
def _store_rows(
    target,
    block,
    rows,
    end,
    stride_row,
    stride_column,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    columns = tl.arange(0, WIDTH)
    pointers = (
        target
        + rows.to(tl.int64)[:, None] * stride_row
        + columns.to(tl.int64)[None, :] * stride_column
    )
    inside = (rows[:, None] < end) & (columns[None, :] < HEAD_DIM)
    tl.store(pointers, block.to(target.dtype.element_ty), mask=inside)
