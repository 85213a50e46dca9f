"""Attention of packed queries over keys and values in pages, in Triton.

A program computes a tile of BLOCK_M rows: all query heads of one key head, for BLOCK_M / PACKED
neighbouring queries of one sequence. It iterates over blocks of keys with an online softmax
(`online_softmax.py`), in up to three ranges (`masking.stretches`); one needs no mask.

The host knows the number of queries T but not where sequences begin. Sequence b begins at tile
offsets[b] // QUERIES + b, so the host starts T // QUERIES + B tiles for each key head. Tiles past
the last query of their sequence end at once, and so do the tiles of sequences with at most
`decoded` queries or a negative length, which another kernel computes.

The pages of a block of keys are looked up one block ahead, because Triton does not prefetch a load
whose address is loaded in the same iteration.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.addresses import steps_to
from attention_kernels.tiles.fp8_pairs import in_units, row_units
from attention_kernels.tiles.masking import may_see, stretches
from attention_kernels.tiles.matmul import matmul
from attention_kernels.tiles.online_softmax import LN_2, LOG2_E, add_sink, softmax_step, tanh
from attention_kernels.tiles.uniform import uniform


# Numbers that change from call to call must not cause a recompilation.
@triton.jit(
    do_not_specialize=[
        "left", "right", "decoded", "sequences", "q_tokens", "group", "kv_heads", "stride_table",
        "stride_key_factor_sequence", "stride_key_factor_head", "stride_value_factor_sequence",
        "stride_value_factor_head",
    ]
)  # fmt: skip
def paged_prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    sinks_ptr,
    lengths_ptr,
    table_ptr,
    q_starts_ptr,
    key_factor_ptr,
    value_factor_ptr,
    output_ptr,
    lse_ptr,
    scale,
    cap,
    left,
    right,
    decoded,
    sequences,
    q_tokens,
    kv_heads,
    group,
    stride_query_token,
    stride_query_head,
    stride_query_dim,
    stride_key_page,
    stride_key_token,
    stride_key_head,
    stride_key_dim,
    stride_value_page,
    stride_value_token,
    stride_value_head,
    stride_value_dim,
    stride_table,
    stride_key_factor_sequence,
    stride_key_factor_head,
    stride_value_factor_sequence,
    stride_value_factor_head,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """Compute PACKED query heads of one key head, for BLOCK_M // PACKED queries of one sequence.

    Unused arguments are None, and the compiled program does not have them: sinks, log-sum-exps,
    `cap`, `left`, `right`, and the factors of an FP8 cache (`split_kv_kernel.py`).
    """
    QUERIES: tl.constexpr = BLOCK_M // PACKED
    IS_FP8: tl.constexpr = key_factor_ptr is not None
    bundles = tl.cdiv(group, PACKED)
    bundle = tl.program_id(0) % (kv_heads * bundles)
    # The last tiles of a sequence come first, because they are the longest in causal calls.
    tile = q_tokens // QUERIES + sequences - 1 - tl.program_id(0) // (kv_heads * bundles)
    own = tl.arange(0, BLOCK_SEQUENCES)
    starts = tl.load(q_starts_ptr + own, mask=own < sequences, other=0) // QUERIES + own
    is_before = (starts <= tile) & (own < sequences)
    sequence = uniform(tl.sum(is_before.to(tl.int32), axis=0) - 1)
    q_start = tl.load(q_starts_ptr + sequence)
    q_len = tl.load(q_starts_ptr + sequence + 1) - q_start
    first_query = (tile - q_start // QUERIES - sequence) * QUERIES
    length = tl.load(lengths_ptr + sequence)
    if (first_query >= q_len) | (q_len <= decoded) | (length < 0):
        return
    kv_head = bundle // bundles
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // PACKED
    in_group = bundle % bundles * PACKED + rows % PACKED
    heads = kv_head * group + in_group
    has_row = (queries < q_len) & (in_group < group) & (rows < QUERIES * PACKED)
    dims = tl.arange(0, BLOCK_D)
    query_rows = (q_start + queries).to(tl.int64) * stride_query_token
    query_rows += heads.to(tl.int64) * stride_query_head
    query = tl.load(
        query_ptr + query_rows[:, None] + dims[None, :] * stride_query_dim,
        mask=has_row[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    factors = scale
    if IS_FP8:
        # Float16 holds all FP8 numbers, and a GPU converts FP8 to it in one step.
        units = row_units(query)
        query = in_units(query, units)
        key_factor_ptr += sequence.to(tl.int64) * stride_key_factor_sequence
        unit = tl.load(key_factor_ptr + kv_head * stride_key_factor_head)
        # The kernel finds the maximum before it scales scores, so factors must be positive. They
        # could be 0 if all queries or keys are.
        query = tl.where(unit < 0.0, -query, query)
        factors = tl.maximum(scale * units * tl.abs(unit), 2.0**-126)
    key_ptr += kv_head.to(tl.int64) * stride_key_head
    value_ptr += kv_head.to(tl.int64) * stride_value_head
    table_ptr += sequence.to(tl.int64) * stride_table

    diagonal = first_query * 0
    if IS_BOTTOM_RIGHT:
        diagonal = length - q_len
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    ends = stretches(
        first_query + diagonal, 0, length, left, right, QUERIES, BLOCK_N, IS_CAUSAL, True
    )
    for stretch in tl.static_range(1 if left is None else 0, 3):
        sums, maximum, total = _attend(
            sums, maximum, total, query, queries + diagonal, key_ptr, value_ptr, table_ptr,
            ends[stretch], ends[stretch + 1], factors, cap, left, right,
            stride_key_page, stride_key_token, stride_key_dim,
            stride_value_page, stride_value_token, stride_value_dim,
            PAGE_SIZE, HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, IS_CAUSAL, stretch != 1, IS_FP8,
        )  # fmt: skip

    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=has_row, other=float("-inf")).to(tl.float32)
        rescale, maximum, total = add_sink(sinks * LOG2_E, maximum, total, 1.0)
        sums *= rescale[:, None]
    if lse_ptr is not None:
        lse_ptr += heads.to(tl.int64) * q_tokens + q_start + queries
        tl.store(lse_ptr, (maximum + tl.math.log2(total)) * LN_2, mask=has_row)
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_FP8:
        value_factor_ptr += sequence.to(tl.int64) * stride_value_factor_sequence
        sums *= tl.load(value_factor_ptr + kv_head * stride_value_factor_head)
    places = (q_start + queries).to(tl.int64) * (kv_heads * group) + heads
    columns = tl.arange(0, BLOCK_DV)
    tl.store(
        output_ptr + places[:, None] * V_DIM + columns[None, :],
        sums.to(output_ptr.dtype.element_ty),
        mask=has_row[:, None] & (columns[None, :] < V_DIM),
    )


@triton.jit
def _attend(
    sums,
    maximum,
    total,
    query,
    diagonals,
    key_ptr,
    value_ptr,
    table_ptr,
    first,
    last,
    factors,
    cap,
    left,
    right,
    stride_key_page,
    stride_key_token,
    stride_key_dim,
    stride_value_page,
    stride_value_token,
    stride_value_dim,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Iterate over the keys [first, last) of a sequence; `first` is a multiple of BLOCK_N.

    IS_BOUNDED: a block may reach past `last` or cross the diagonal or a side of the window.
    """
    next_pages, next_slots = _places(table_ptr, first, last, PAGE_SIZE, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        pages, slots = next_pages, next_slots
        next_pages, next_slots = _places(table_ptr, start + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        key = _load_tokens(
            key_ptr, pages, slots, keys, last, stride_key_page, stride_key_token, stride_key_dim,
            HEAD_DIM, BLOCK_D, IS_BOUNDED,
        )  # fmt: skip
        if IS_FP8:
            key = key.to(tl.float16)
        scores = matmul(query, key.T, tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        factor, row_factors = factors, factors
        if IS_FP8:
            factor = factors[:, None]
        if cap is not None:
            scores = tanh(scores * factor, query.dtype == tl.float32)
            factor, row_factors = cap, cap
        if IS_BOUNDED:
            seen = may_see(diagonals, keys, last, left, right, IS_CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.max(scores, 1) * row_factors
        weights, maximum, rescale = softmax_step(scores, largest, maximum, factor)
        total = total * rescale + tl.sum(weights, 1)
        value = _load_tokens(
            value_ptr, pages, slots, keys, last, stride_value_page, stride_value_token,
            stride_value_dim, V_DIM, BLOCK_DV, IS_BOUNDED,
        )  # fmt: skip
        if IS_FP8:
            value = value.to(tl.float16)
        sums = matmul(weights.to(value.dtype), value, sums * rescale[:, None])
    return sums, maximum, total


@triton.jit
def _places(table_ptr, start, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pages of BLOCK_N keys from `start` on, and the keys' slots in these pages.

    If a page holds whole blocks of keys, the page is one number. No page is read past `last`.
    """
    keys = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + start // PAGE_SIZE, mask=start < last, other=0)
        pages = pages.to(tl.int64)
        slots = start % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        numbers = keys.to(tl.uint32)  # dividing numbers without sign takes fewer instructions
        pages = tl.load(table_ptr + numbers // PAGE_SIZE, mask=keys < last, other=0)
        slots = numbers % PAGE_SIZE
    return pages, slots


@triton.jit
def _load_tokens(
    source,
    pages,
    slots,
    keys,
    last,
    stride_page,
    stride_token,
    stride_dim,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Load (N, COLUMNS) of one head, with zeros past HEAD_DIM and for tokens from `last` on."""
    columns = tl.arange(0, COLUMNS)
    if pages.type.is_block():
        places = steps_to(pages, stride_page) + steps_to(slots, stride_token)
        pointers = (source + columns.to(tl.int64) * stride_dim)[None, :] + places[:, None]
    else:  # most of the sum is the same for all blocks
        places = pages * stride_page + slots * stride_token
        pointers = source + places[:, None] + columns[None, :] * stride_dim
    if HEAD_DIM < COLUMNS:
        inside = columns[None, :] < HEAD_DIM
        if IS_BOUNDED:
            inside = inside & (keys[:, None] < last)
        block = tl.load(pointers, mask=inside, other=0.0)
    elif IS_BOUNDED:
        block = tl.load(pointers, mask=keys[:, None] < last, other=0.0)
    else:
        block = tl.load(pointers)
    return block
