"""Attention of a few queries over many keys, which are split among programs.

Decoding has one query token, so only the keys can be split (Flash-Decoding, Dao, Haziza, Massa and
Sizov 2023). A program attends with all query heads of one key head, and all query tokens, to one
part of the keys. The program stores the maximum, the sum and the unnormalised output of each row.
The parts are merged in the same launch (`split_kv_merge.py`).

The kernel supports four kinds of cache. Position i of a sequence is token i, or the token given by
`indices`. A token is stored in its batch element, or in the page given by `block_table`. If
position i is token i, or a page holds whole blocks of tokens, keys and values are loaded through
tensor descriptors (TMA), provided that their strides and the GPU allow it. `quantised_cache.py`
handles a cache in 8 bits. If the value is the first part of the key, as in DeepSeek's absorbed
latent attention (MLA), that part is read once, and the rest of the key, its tail, is read
separately.

Letters: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, Sq and Sk query and key length,
D and Dv head dimensions, M = G · Sq rows of a key head (row r is head r // Sq, query r % Sq).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.decode.kv_cache import find_tokens
from attention_kernels.decode.quantised_cache import CACHE_BLOCK, fit_query, in_value_order, log2
from attention_kernels.decode.split_kv_assignment import (
    assigned_part,
    own_parts,
    seen_positions,
)
from attention_kernels.decode.split_kv_merge import COUNTERS_TOGETHER, merge, store_rows
from attention_kernels.tiles.addresses import steps_to
from attention_kernels.tiles.fp8_pairs import (
    even_columns,
    first_halves,
    halves_of_query,
    in_units,
    odd_columns,
    row_units,
    second_halves,
)
from attention_kernels.tiles.high_low_parts import (
    LOG2_LARGEST_FP8,
    LOG2_LARGEST_INT8,
    high_low_parts,
    high_low_product,
)
from attention_kernels.tiles.masking import in_base_2
from attention_kernels.tiles.matmul import matmul
from attention_kernels.tiles.online_softmax import LOG2_E, add_sink, softmax_step, tanh


# Numbers that change from call to call must not cause a recompilation.
@triton.jit(
    do_not_specialize=[
        "group", "q_len", "kv_len", "kept", "splits", "left", "right", "stride_table",
        "sequences", "shares", "resident", "least", "q_tokens", "stride_key_factor_sequence",
        "stride_key_factor_head", "stride_value_factor_sequence", "stride_value_factor_head",
    ]
)  # fmt: skip
def split_kv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    key_mean_ptr,
    value_scale_ptr,
    mask_ptr,
    sinks_ptr,
    lengths_ptr,
    indices_ptr,
    table_ptr,
    q_starts_ptr,
    key_factor_ptr,
    value_factor_ptr,
    output_ptr,
    lse_ptr,
    parts_ptr,
    counters_ptr,
    scale,
    cap,
    left,
    right,
    kv_heads,
    group,
    q_len,
    q_tokens,
    kv_len,
    kept,
    splits,
    sequences,
    shares,
    resident,
    least,
    worth,
    head_dim,
    tail_dim,
    v_dim,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    stride_query_dim,
    stride_key_first,
    stride_key_head,
    stride_key_token,
    stride_key_dim,
    stride_value_first,
    stride_value_head,
    stride_value_token,
    stride_value_dim,
    stride_mask_batch,
    stride_mask_head,
    stride_mask_query,
    stride_mask_token,
    stride_table,
    stride_key_factor_sequence,
    stride_key_factor_head,
    stride_value_factor_sequence,
    stride_value_factor_head,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_E5M2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Attend to one part of the keys of a head, and merge parts if that is this program's task.

    Unused arguments are None, and the compiled program does not have them: the mask, sinks,
    lengths, indices, table, log-sum-exps, `cap`, `left` and `right`; the parts and their counters
    if keys are not split; the scales and the mean if the cache is in 16 bits.

    If BLOCK_SEQUENCES is not 0, keys are assigned to programs by the lengths of at most that many
    sequences (`split_kv_assignment.py`), and `splits` is None. Otherwise the fields of a
    `KeyAssignment` are None. If PART is not 0, the parts of a sequence depend only on the keys that
    it sees, and `splits` is the largest number of parts.

    With `q_starts_ptr`, the queries of all sequences are packed: `q_tokens` queries in all, and a
    sequence that has none or more than `q_len` of them is left to another kernel. With
    `key_factor_ptr` and `value_factor_ptr`, keys and values are in FP8, in units of one number for
    each sequence and key head. With IN_PAIRS, key and value are int16, two FP8 numbers each
    (`fp8_pairs.py`); sizes count FP8 numbers, but strides count pairs.

    `cap` is in base 2. With a cap, `scale` is the factor of the exponent in tanh. If BLOCK_TAIL is
    not 0, `head_dim` is the size of the key without its tail: Dv.
    """
    IS_8_BIT: tl.constexpr = key_scale_ptr is not None
    IS_FP8: tl.constexpr = key_factor_ptr is not None
    IS_INT8: tl.constexpr = IS_8_BIT and key_ptr.dtype == tl.int8
    # Base-2 logarithm of the number that represents a weight of 1.
    LOG2_LARGEST: tl.constexpr = LOG2_LARGEST_INT8 if IS_INT8 else LOG2_LARGEST_FP8
    LOG2_UNIT: tl.constexpr = LOG2_LARGEST if IS_8_BIT else 0.0
    IN_ONE: tl.constexpr = 2 if IN_PAIRS else 1  # numbers in an element of the cache
    K_COLUMNS: tl.constexpr = BLOCK_D // IN_ONE
    TAIL_COLUMNS: tl.constexpr = BLOCK_TAIL // IN_ONE
    V_COLUMNS: tl.constexpr = BLOCK_DV // IN_ONE
    ROUNDED_TO: tl.constexpr = CACHE_BLOCK if IS_8_BIT else 1
    BY_PAGE: tl.constexpr = HAS_DESCRIPTORS and PAGE_SIZE != 0
    IS_CUT: tl.constexpr = IS_CAUSAL or right is not None or lengths_ptr is not None
    # An 8-bit cache is finite beyond its valid tokens.
    ENDS_WHOLE: tl.constexpr = HAS_DESCRIPTORS and not IS_8_BIT and (BY_PAGE or IS_CUT)
    head = tl.program_id(0)
    split = tl.program_id(1)
    batch = head // kv_heads
    kv_head = head % kv_heads
    parts = splits
    if BLOCK_SEQUENCES != 0:
        batch, kv_head, split, parts = assigned_part(
            tl.program_id(0),
            lengths_ptr,
            sequences,
            kv_heads,
            q_len,
            left,
            right,
            shares,
            resident,
            least,
            worth,
            q_starts_ptr,
            IS_CAUSAL,
            IS_BOTTOM_RIGHT,
            ROUNDED_TO,
            BLOCK_N,
            BLOCK_SEQUENCES,
        )
        if batch == sequences:
            return
        head = batch * kv_heads + kv_head
    most_rows = group * q_len
    steps = None
    if q_starts_ptr is not None:
        q_start = tl.load(q_starts_ptr + batch)
        own_len = tl.load(q_starts_ptr + batch + 1) - q_start
        if (own_len <= 0) | (own_len > q_len):
            return
        q_len = own_len
        if tl.program_id(2) * BLOCK_M >= group * q_len:
            return
        steps = (q_len, kv_heads * group, q_tokens)
    if PART != 0:
        share, parts = own_parts(
            batch, lengths_ptr, kv_len, q_len, left, right, IS_CAUSAL, IS_BOTTOM_RIGHT,
            PART, MOST_PARTS, BLOCK_N,
        )  # fmt: skip
        if split >= parts:
            return
    q_rows = group * q_len
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = rows < q_rows
    q_heads = kv_head * group + rows // q_len
    queries = rows % q_len
    dims = tl.arange(0, BLOCK_D)
    has_dim = dims < head_dim
    columns = tl.arange(0, BLOCK_DV)
    has_column = columns < v_dim

    if q_starts_ptr is None:
        query_rows = batch.to(tl.int64) * stride_query_batch
    else:
        query_rows = q_start.to(tl.int64) * stride_query_token
    query_rows += q_heads.to(tl.int64) * stride_query_head
    query_rows += queries.to(tl.int64) * stride_query_token
    query = tl.load(
        query_ptr + query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_query_dim,
        mask=has_row[:, None] & has_dim[None, :],
        other=0.0,
    )
    if BLOCK_TAIL != 0:
        tail = head_dim + tl.arange(0, BLOCK_TAIL)
        has_tail = tail < head_dim + tail_dim
        query_tail = tl.load(
            query_ptr + query_rows[:, None] + tail.to(tl.int64)[None, :] * stride_query_dim,
            mask=has_row[:, None] & has_tail[None, :],
            other=0.0,
        )
    row_factors = scale * LOG2_E
    if IS_FP8:
        units = row_units(query)
        if BLOCK_TAIL != 0:
            units = tl.maximum(units, row_units(query_tail))
            query_tail = in_units(query_tail, units)
        query = in_units(query, units)
        if IN_PAIRS:
            query, query_rest = halves_of_query(query, BLOCK_M, BLOCK_D)
            if BLOCK_TAIL != 0:
                query_tail, query_tail_rest = halves_of_query(query_tail, BLOCK_M, BLOCK_TAIL)
        key_factor_ptr += batch.to(tl.int64) * stride_key_factor_sequence
        row_factors *= units[:, None] * tl.load(key_factor_ptr + kv_head * stride_key_factor_head)
    if IS_8_BIT:
        key_mean_ptr += head * head_dim
        query, row_scales, row_offsets = fit_query(query, key_mean_ptr, dims, has_dim, IS_INT8)
        row_scales *= scale * LOG2_E
        row_offsets *= scale * LOG2_E
        if PAGE_SIZE == 0:
            stored = head.to(tl.int64) * tl.cdiv(kv_len, CACHE_BLOCK) * CACHE_BLOCK
            key_scale_ptr += stored
            value_scale_ptr += stored
    if not HAS_DESCRIPTORS:
        key_ptr += kv_head.to(tl.int64) * stride_key_head
        value_ptr += kv_head.to(tl.int64) * stride_value_head
        # Pointers to the columns of a token in slot 0 of the first page or batch element.
        k_columns = tl.arange(0, K_COLUMNS)
        has_k_column = k_columns < head_dim // IN_ONE
        key_columns = key_ptr + k_columns.to(tl.int64) * stride_key_dim
        v_columns = tl.arange(0, V_COLUMNS)
        has_v_column = v_columns < v_dim // IN_ONE
        value_columns = value_ptr + v_columns.to(tl.int64) * stride_value_dim
        if BLOCK_TAIL != 0:
            tail_columns = tl.arange(0, TAIL_COLUMNS)
            has_tail_column = tail_columns < tail_dim // IN_ONE
            tail_columns += head_dim // IN_ONE
            tail_columns = key_ptr + tail_columns.to(tl.int64) * stride_key_dim
    length = kv_len
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + batch)
    positions_begin, positions_end, diagonal = seen_positions(
        length, q_len, left, right, IS_CAUSAL, IS_BOTTOM_RIGHT, ROUNDED_TO
    )
    if indices_ptr is not None:
        indices_ptr += head.to(tl.int64) * kept
        positions_end = kept
    if PART == 0:
        share = tl.cdiv(tl.cdiv(positions_end - positions_begin, BLOCK_N), parts) * BLOCK_N
    begin = positions_begin + split * share
    end = tl.minimum(begin + share, positions_end)

    # All queries see all positions from `whole_begin` to `whole_end`.
    whole_begin = begin
    whole_end = end
    if IS_CAUSAL:
        whole_end = tl.minimum(whole_end, diagonal + 1)
    if right is not None:
        whole_end = tl.minimum(whole_end, diagonal + right + 1)
    if left is not None:
        whole_begin = diagonal + q_len - 1 - left

    place = batch
    next_place = batch
    if BY_PAGE:
        # Pages are looked up a block ahead, as Triton does not prefetch a load whose address is
        # loaded in the same iteration.
        table_ptr += batch.to(tl.int64) * stride_table
        next_place = tl.load(table_ptr + begin // PAGE_SIZE, mask=begin < end, other=0)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Sums are kept per key of a block and added up at the end, because a sum over warps at each
    # block would make the warps wait for each other.
    totals = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # With pairs, the even columns; the odd columns are apart.
    output = tl.zeros((BLOCK_M, V_COLUMNS), tl.float32)
    odd_output = output
    for first in range(begin, end, BLOCK_N):
        block_begin = first
        if ENDS_WHOLE:
            # Keys after the end could be NaN and are not read. The last block therefore begins
            # earlier, with zeros in place of positions before its page.
            block_begin = tl.minimum(first, end - BLOCK_N)
        positions = block_begin + tl.arange(0, BLOCK_N)
        tokens, is_valid, slots, first_axis = find_tokens(
            positions,
            positions >= first if ENDS_WHOLE else positions < end,
            batch,
            length,
            indices_ptr,
            table_ptr,
            stride_table,
            0 if BY_PAGE else PAGE_SIZE,
        )
        row = block_begin
        if BY_PAGE:
            place = next_place
            row = block_begin - first // PAGE_SIZE * PAGE_SIZE
            next_page = (first + BLOCK_N) // PAGE_SIZE
            next_place = tl.load(table_ptr + next_page, mask=first + BLOCK_N < end, other=0)
        if IS_8_BIT:
            block = first // CACHE_BLOCK
            inside = first - block * CACHE_BLOCK
            if PAGE_SIZE == 0:
                key_row, value_row, scale_row = first, block * v_dim, first
            else:
                key_row, value_row = inside, 0
                scale_row = (place.to(tl.int64) * kv_heads + kv_head) * CACHE_BLOCK + inside
            key = key_ptr.load([place, kv_head, key_row, 0]).reshape(BLOCK_N, BLOCK_D)
        elif HAS_DESCRIPTORS:
            key = key_ptr.load([place, kv_head, row, 0]).reshape(BLOCK_N, K_COLUMNS)
        else:
            key_rows = steps_to(first_axis, stride_key_first) + steps_to(slots, stride_key_token)
            key = tl.load(
                key_columns[None, :] + key_rows[:, None],
                mask=is_valid[:, None] & has_k_column[None, :],
                other=0.0,
            )
        if IS_8_BIT:
            scores = high_low_product(query, key)
        else:
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if BLOCK_TAIL != 0:
            if HAS_DESCRIPTORS:
                key_tail = value_ptr.load([place, kv_head, row, K_COLUMNS])
                key_tail = key_tail.reshape(BLOCK_N, TAIL_COLUMNS)
            else:
                key_tail = tl.load(
                    tail_columns[None, :] + key_rows[:, None],
                    mask=is_valid[:, None] & has_tail_column[None, :],
                    other=0.0,
                )
            if IN_PAIRS:
                tail_rest = tl.trans(second_halves(key_tail, IS_E5M2))
                scores = matmul(query_tail_rest, tail_rest, scores)
                key_tail = first_halves(key_tail, IS_E5M2)
            scores = matmul(query_tail, tl.trans(key_tail.to(query_tail.dtype)), scores)
        if IS_8_BIT:
            # The block's pointers come first, so that offsets of keys are the same in all blocks.
            key_scales = tl.load(key_scale_ptr + scale_row + tl.arange(0, BLOCK_N))
            value_scales = value_scale_ptr + scale_row + tl.arange(0, BLOCK_N)
            value_logs = log2(tl.load(value_scales, mask=is_valid, other=1.0))
            scores = scores * row_scales[:, None] * key_scales[None, :] + row_offsets[:, None]
        else:
            halves = key
            if IN_PAIRS:
                rest = tl.trans(second_halves(key, IS_E5M2))
                scores = matmul(query_rest, rest, scores)
                halves = first_halves(key, IS_E5M2)
            scores = matmul(query, tl.trans(halves.to(query.dtype)), scores) * row_factors
        if cap is not None:
            scores = cap * tanh(scores)
        if MASK != 0:
            scores += _mask_bias(
                mask_ptr,
                batch,
                q_heads,
                queries,
                has_row,
                tokens,
                is_valid,
                stride_mask_batch,
                stride_mask_head,
                stride_mask_query,
                stride_mask_token,
                MASK == 2,
            )
        if IS_8_BIT:
            if (first < whole_begin) | (first + BLOCK_N > whole_end):
                scores = _hide(scores, tokens, is_valid, queries, diagonal, left, right, IS_CAUSAL)
        else:
            # Because masking has no branch, one instruction multiplies a score and subtracts its
            # maximum.
            scores = _hide(scores, tokens, is_valid, queries, diagonal, left, right, IS_CAUSAL)
        if IS_8_BIT:
            # The products of weights and value scales are relative to the largest one of the block,
            # so that rounding to 8 bits loses little.
            scores += value_logs[None, :]
            largest = tl.max(scores, axis=1)
            block_share, maximum, rescale = softmax_step(largest[:, None], largest, maximum, 1.0)
            unit = largest - LOG2_UNIT
            weights, _, _ = softmax_step(scores, unit, unit, 1.0)
            unscaled = weights * tl.math.exp2(-value_logs)[None, :]
            totals = totals * rescale[:, None] + unscaled * block_share
            value = value_ptr.load([place, kv_head, value_row, inside]).reshape(BLOCK_DV, BLOCK_N)
            summed = high_low_product(in_value_order(high_low_parts(weights, IS_INT8)), value)
            output = output * rescale[:, None] + summed * block_share
        else:
            largest = tl.max(scores, axis=1)
            weights, maximum, rescale = softmax_step(scores, largest, maximum, 1.0)
            totals = totals * rescale[:, None] + weights
            if BLOCK_TAIL != 0:
                value = key
            elif HAS_DESCRIPTORS:
                value = value_ptr.load([place, kv_head, row, 0]).reshape(BLOCK_N, V_COLUMNS)
            else:
                value_rows = steps_to(first_axis, stride_value_first)
                value_rows += steps_to(slots, stride_value_token)
                value = tl.load(
                    value_columns[None, :] + value_rows[:, None],
                    mask=is_valid[:, None] & has_v_column[None, :],
                    other=0.0,
                )
            weights = weights.to(query.dtype)
            if IN_PAIRS:
                odd_output = odd_output * rescale[:, None]
                odd_output = matmul(weights, odd_columns(value, IS_E5M2), odd_output)
                value = even_columns(value, IS_E5M2)
            output = matmul(weights, value.to(query.dtype), output * rescale[:, None])

    if IN_PAIRS:
        output = tl.join(output, odd_output).reshape(BLOCK_M, BLOCK_DV)
    total = tl.sum(totals, axis=1)
    if sinks_ptr is not None:
        # Sinks count as keys of the first part.
        counts = has_row & (split == 0)
        sinks = tl.load(sinks_ptr + q_heads, mask=counts, other=float("-inf")).to(tl.float32)
        rescale, maximum, total = add_sink(sinks * LOG2_E, maximum, total, 2.0**LOG2_UNIT)
        output *= rescale[:, None]

    if IS_FP8:
        value_factor_ptr += batch.to(tl.int64) * stride_value_factor_sequence
        output *= tl.load(value_factor_ptr + kv_head * stride_value_factor_head)
    # (B, Hq, Sq, Dv), contiguous: the rows of a key head are adjacent. Packed: (Tq, Hq, Dv).
    first_row = head.to(tl.int64) * q_rows
    first_sum = first_row
    if q_starts_ptr is not None:
        first_row = q_start.to(tl.int64) * (kv_heads * group) + kv_head * group
        first_sum = (kv_head * group).to(tl.int64) * q_tokens + q_start
    output_ptr += first_row * v_dim
    if lse_ptr is not None:
        lse_ptr += first_sum
    PARTS_DIFFER: tl.constexpr = BLOCK_SEQUENCES != 0 or PART != 0
    if PARTS_DIFFER and parts_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if parts == 1:
            store_rows(
                output, maximum, total, LOG2_UNIT, output_ptr, lse_ptr, rows, has_row, columns,
                has_column, v_dim, steps,
            )  # fmt: skip
            return
    if parts_ptr is not None:
        # The parts are (programs, M, Dv), with the parts of a head in order. Their maxima and sums
        # follow in memory.
        programs, first_part = tl.num_programs(0), tl.program_id(0) - split
        if BLOCK_SEQUENCES == 0:
            programs, first_part = programs * splits, head * splits
        sums_ptr = parts_ptr + programs.to(tl.int64) * most_rows * v_dim
        sums_ptr += first_part.to(tl.int64) * most_rows * 2
        parts_ptr += first_part.to(tl.int64) * most_rows * v_dim
        own = split * most_rows + rows
        tl.store(sums_ptr + own * 2, maximum, mask=has_row)
        tl.store(sums_ptr + own * 2 + 1, total, mask=has_row)
        tl.store(
            parts_ptr + own[:, None] * v_dim + columns[None, :],
            output,
            mask=has_row[:, None] & has_column[None, :],
        )
        tl.debug_barrier()  # all threads have stored their results before one counts the part
        counters: tl.constexpr = COUNTERS_TOGETHER if TOGETHER else 1
        counters_ptr += (head * tl.num_programs(2) + tl.program_id(2)) * counters
        merge(
            parts_ptr,
            sums_ptr,
            counters_ptr,
            output_ptr,
            lse_ptr,
            LOG2_UNIT,
            tl.program_id(2) * BLOCK_M,
            columns,
            has_column,
            parts,
            q_rows,
            most_rows,
            v_dim,
            steps,
            BLOCK_ROWS,
            ROW_CHUNKS,
            BLOCK_SPLITS,
            TOGETHER,
        )
    else:
        store_rows(
            output, maximum, total, LOG2_UNIT, output_ptr, lse_ptr, rows, has_row, columns,
            has_column, v_dim, steps,
        )  # fmt: skip


@triton.jit
def _hide(scores, tokens, is_valid, queries, diagonal, left, right, IS_CAUSAL: tl.constexpr):
    """Return scores (M, N) with -inf for tokens that a query does not see or that do not exist."""
    if IS_CAUSAL:
        is_seen = tokens[None, :] <= queries[:, None] + diagonal
        scores += tl.where(is_seen, 0.0, float("-inf"))
    if right is not None:
        is_seen = tokens[None, :] <= queries[:, None] + (diagonal + right)
        scores += tl.where(is_seen, 0.0, float("-inf"))
    if left is not None:
        is_seen = tokens[None, :] >= queries[:, None] + (diagonal - left)
        scores += tl.where(is_seen, 0.0, float("-inf"))
    return tl.where(is_valid[None, :], scores, float("-inf"))


@triton.jit
def _mask_bias(
    mask_ptr,
    batch,
    q_heads,
    queries,
    has_row,
    tokens,
    is_valid,
    stride_batch,
    stride_head,
    stride_query,
    stride_token,
    PER_ROW: tl.constexpr,
):
    """Return the terms that a mask adds to scores in base 2: (M, N), or (1, N) if all rows share
    them."""
    places = mask_ptr + batch.to(tl.int64) * stride_batch
    places += tokens.to(tl.int64)[None, :] * stride_token
    is_there = is_valid[None, :]
    if PER_ROW:
        rows = q_heads.to(tl.int64) * stride_head + queries.to(tl.int64) * stride_query
        places += rows[:, None]
        is_there = is_there & has_row[:, None]
    entries = tl.load(places, mask=is_there, other=0)
    # The mask is added and does not replace scores: a masked NaN stays NaN, as in SDPA.
    if mask_ptr.dtype.element_ty == tl.int1:
        bias = tl.where(entries, 0.0, float("-inf"))
    else:
        bias = in_base_2(entries.to(tl.float32))
    return bias
