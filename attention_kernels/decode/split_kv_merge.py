"""Merging of the parts of an output, one part per program, without a second kernel.

Each program increments a counter when its part is stored. Usually the last program to arrive merges
all parts, which are a few KB for each head. Parts of absorbed latent attention have 512 numbers per
row, 32 KB and more. One program merges 16 such parts in 13 µs, a tenth of the time that decoding
eight sequences of 32,768 tokens takes (H100). In that case, programs wait until all have arrived,
and then take turns at merging rows of the output. A program stops waiting after a while, because
other programs may not have started yet. The last program to arrive always merges.

The parts of a row are always added in one order, so the result does not depend on which program
adds the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.online_softmax import LN_2

COUNTERS_TOGETHER = tl.constexpr(3)
"""Number of counters per head and block of rows: programs that have arrived, rows that programs
have taken, and programs that have left. All are zero before and after the launch. If one program
merges, only the first counter is used."""
PATIENCE = tl.constexpr(64)
"""Maximum number of times that a program checks whether all programs have arrived; 64 atomic
operations take about 50 µs."""


@triton.jit
def merge(
    parts_ptr,
    sums_ptr,
    counters_ptr,
    output_ptr,
    lse_ptr,
    LOG2_UNIT: tl.constexpr,
    first_row,
    columns,
    has_column,
    parts,
    q_rows,
    most_rows,
    v_dim,
    steps,
    BLOCK_ROWS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Count this program as arrived, and merge the rows that the program takes.

    Args:
        parts_ptr, sums_ptr: pointers to one head's unnormalised outputs (parts, M, Dv), and to the
            maximum and sum of each row (parts, M, 2). M is `most_rows`; a sequence
            has the first `q_rows`.
        counters_ptr: counters of the head and this block of rows.
        output_ptr: pointer to the head's output, (M, Dv).
        lse_ptr: pointer to the head's log-sum-exps, (M,), or None.
        LOG2_UNIT: base-2 logarithm of the number that represents a weight of 1 in the sums.
        first_row: first of ROW_CHUNKS times BLOCK_ROWS rows.
        BLOCK_SPLITS: number of parts that are read at a time.
        steps: as for `store_rows`.
        TOGETHER: whether all programs that have arrived merge rows.
    """
    arrived = tl.atomic_add(counters_ptr, 1, sem="acq_rel") + 1
    if TOGETHER:
        looks = 0
        while (arrived < parts) & (looks < PATIENCE):
            arrived = tl.atomic_add(counters_ptr, 0, sem="acquire")
            looks += 1
        if arrived == parts:
            chunk = tl.atomic_add(counters_ptr + 1, 1, sem="relaxed")
            while chunk < ROW_CHUNKS:
                _merge_rows(
                    parts_ptr, sums_ptr, output_ptr, lse_ptr, LOG2_UNIT,
                    first_row + chunk * BLOCK_ROWS,
                    columns, has_column, parts, q_rows, most_rows, v_dim, steps, BLOCK_ROWS,
                    BLOCK_SPLITS,
                )  # fmt: skip
                chunk = tl.atomic_add(counters_ptr + 1, 1, sem="relaxed")
        if tl.atomic_add(counters_ptr + 2, 1, sem="acq_rel") == parts - 1:
            for counter in tl.static_range(COUNTERS_TOGETHER):
                tl.store(counters_ptr + counter, 0)
    elif arrived == parts:
        tl.store(counters_ptr, 0)
        for chunk in tl.static_range(ROW_CHUNKS):
            _merge_rows(
                parts_ptr, sums_ptr, output_ptr, lse_ptr, LOG2_UNIT, first_row + chunk * BLOCK_ROWS,
                columns, has_column, parts, q_rows, most_rows, v_dim, steps, BLOCK_ROWS,
                BLOCK_SPLITS,
            )  # fmt: skip


@triton.jit
def _merge_rows(
    parts_ptr,
    sums_ptr,
    output_ptr,
    lse_ptr,
    LOG2_UNIT: tl.constexpr,
    first_row,
    columns,
    has_column,
    parts,
    q_rows,
    most_rows,
    v_dim,
    steps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Store the output of BLOCK_ROWS rows from all their parts."""
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    has_row = rows < q_rows
    maximum = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    output = tl.zeros((BLOCK_ROWS, columns.shape[0]), tl.float32)
    for first in tl.range(0, parts, BLOCK_SPLITS, num_stages=3):
        group = first + tl.arange(0, BLOCK_SPLITS)
        places = group[:, None] * most_rows + rows[None, :]
        is_there = (group < parts)[:, None] & has_row[None, :]
        maxima = tl.load(sums_ptr + places * 2, mask=is_there, other=float("-inf"))
        sums = tl.load(sums_ptr + places * 2 + 1, mask=is_there, other=0.0)
        outputs = tl.load(
            parts_ptr + places[:, :, None] * v_dim + columns[None, None, :],
            mask=is_there[:, :, None] & has_column[None, None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - origin[None, :])
        rescale = tl.exp2(maximum - origin)
        maximum = new_maximum
        total = total * rescale + tl.sum(weights * sums, axis=0)
        output = output * rescale[:, None] + tl.sum(weights[:, :, None] * outputs, axis=0)
    store_rows(
        output, maximum, total, LOG2_UNIT, output_ptr, lse_ptr, rows, has_row, columns, has_column,
        v_dim, steps,
    )  # fmt: skip


@triton.jit
def store_rows(
    output,
    maximum,
    total,
    LOG2_UNIT: tl.constexpr,
    output_ptr,
    lse_ptr,
    rows,
    has_row,
    columns,
    has_column,
    v_dim,
    steps,
):
    """Store the output of rows when all keys have been processed, and their log-sum-exps if
    `lse_ptr` is not None.

    Args:
        steps: None if the rows of a key head are adjacent. In a packed batch, (Tq, Hq, Dv), a tuple
            of the sequence's number of queries, Hq and Tq.
    """
    places = rows
    sums = rows
    if steps is not None:
        places = rows % steps[0] * steps[1] + rows // steps[0]
        sums = rows // steps[0] * steps[2] + rows % steps[0]
    if lse_ptr is not None:
        lse = (maximum + tl.math.log2(total) - LOG2_UNIT) * LN_2
        tl.store(lse_ptr + sums, lse, mask=has_row)
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output_ptr + places[:, None] * v_dim + columns[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=has_row[:, None] & has_column[None, :],
    )
