"""Row sums of backward passes, and tensors for gradients, for any kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.launcher import Launch, named
from attention_kernels.options import Lengths
from attention_kernels.tiles.online_softmax import LOG2_E
from attention_kernels.tiles.visited_blocks import HIDDEN

ROWS_OF_SUMS = 64
"""Number of queries of a program of `row_sums_kernel`."""


class Gradients(NamedTuple):
    """Gradients of an attention call, in the shapes and types of its tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def empty_gradient(
    tensor: Tensor, kind: str = "full", device: torch.device | str | None = None
) -> Tensor:
    """Return a gradient (B, H, S, D) to be written, dense in BSHD if the tensor is, else in BHSD.

    Rows of packed tensors that belong to no sequence are not written, so those of `kind` "packed"
    are zeros.
    """
    batch, heads, length, head_dim = tensor.shape
    new = tensor.new_zeros if kind == "packed" else tensor.new_empty
    device = device or tensor.device
    if tensor.stride(1) < tensor.stride(2):
        return new((batch, length, heads, head_dim), device=device).transpose(1, 2)
    return new((batch, heads, length, head_dim), device=device)


def row_sums_launch(
    output: Tensor,
    grad_output: Tensor,
    lengths: Lengths,
    row_length: int,
    block: int = 1,
    columns: int = 0,
) -> Launch:
    """Return a launch of `row_sums_kernel` for tensors (B, Hq, Sq, Dv).

    Args:
        row_length: number of rows of the sums of a head.
        block: number of rows in a block. Each batch element and sequence has whole blocks; those of
            sequence b begin at block number offsets[b] // block + b. With 1, rows are those of the
            queries.
        columns: number of columns of the sums that get zeros.
    """
    _, heads, q_len, v_head_dim = output.shape
    tiles = row_sum_tiles(lengths, block)
    return Launch(
        row_sums_kernel,
        (tiles * lengths.batches * heads, 1, 1),
        output.device,
        named("stride_o", "bhmd", output.stride())
        | named("stride_g", "bhmd", grad_output.stride())
        | {
            "q_len": q_len,
            "row_length": row_length,
            "tiles": tiles,
            "heads": heads,
            "BLOCK_M": ROWS_OF_SUMS,
            "BLOCK": block,
            "COLUMNS": columns,
            "DV": v_head_dim,
            "DV_WIDTH": max(16, triton.next_power_of_2(v_head_dim)),
        },
        num_warps=4,
    )


def row_sum_tiles(lengths: Lengths, block: int = 1) -> int:
    """Return the number of tiles of each head and sequence of `row_sums_kernel`."""
    return triton.cdiv(triton.cdiv(lengths.longest_query, block) * block, ROWS_OF_SUMS)


@triton.jit(do_not_specialize=["q_len", "row_length", "tiles", "heads"])
def row_sums_kernel(
    output,
    grad_output,
    lse,
    grad_lse,
    sinks,
    q_offsets,
    logarithms,
    deltas,
    grad_sinks,
    sums,
    q_len,
    row_length,
    tiles,
    heads,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
):
    """Store what each row of a tile of queries needs: its log-sum-exp in base 2, and δ.

    A row that sees nothing, or that has an infinite log-sum-exp for another reason, gets a
    logarithm of infinity, with which all its weights are zero, and a δ of zero. A row whose mask
    values are all -1e30 or less is treated likewise: beside such a number, its log-sum-exp cannot
    hold its sum of exponentials.

    `lse` and `grad_lse` are (B, Hq, Sq), dense. `logarithms` and `deltas` are (B, Hq, row_length),
    and rows after the last query get infinity and zero too, up to a multiple of BLOCK. `grad_sinks`
    (B, Hq, tiles) gets the tile's part of the gradient of its head's sink. `sums` (B, Hq,
    row_length, COLUMNS) gets zeros, to which another kernel adds.
    """
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    q_start = 0
    q_end = q_len
    memory = batch
    if q_offsets is not None:
        q_start = tl.load(q_offsets + batch)
        q_end = tl.load(q_offsets + batch + 1)
        memory = 0
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = q_start + own
    inside = rows < q_end
    is_stored = own < tl.cdiv(q_end - q_start, BLOCK) * BLOCK
    first = q_start
    if BLOCK > 1 and q_offsets is not None:
        first = (q_start // BLOCK + batch) * BLOCK
    memory = tl.cast(memory, tl.int64)
    wide_head = head.to(tl.int64)
    output += memory * stride_ob + wide_head * stride_oh
    grad_output += memory * stride_gb + wide_head * stride_gh
    block = load_rows(output, rows, q_end, stride_om, stride_od, DV, DV_WIDTH, True)
    gradients = load_rows(grad_output, rows, q_end, stride_gm, stride_gd, DV, DV_WIDTH, True)
    delta = tl.sum(block.to(tl.float32) * gradients.to(tl.float32), 1)
    places = (memory * heads + head) * q_len + rows
    if grad_lse is not None:
        delta -= tl.load(grad_lse + places, mask=inside, other=0.0)
    logarithm = tl.load(lse + places, mask=inside, other=float("inf")) * LOG2_E
    sees = (logarithm > HIDDEN) & (logarithm != float("inf"))
    # A NaN stays one, so that it reaches the gradients.
    sees = sees | (logarithm != logarithm)
    delta = tl.where(sees, delta, 0.0)
    logarithm = tl.where(sees, logarithm, float("inf"))
    places = (memory * heads + head) * row_length + first + own
    tl.store(logarithms + places, logarithm, mask=is_stored)
    tl.store(deltas + places, delta, mask=is_stored)
    if sinks is not None:
        weights = tl.math.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - logarithm)
        tl.store(grad_sinks + tl.program_id(0), -tl.sum(weights * delta, 0))
    if sums is not None:
        numbers = tl.arange(0, BLOCK_M * 64)
        place = ((memory * heads + head) * row_length + first + tile * BLOCK_M) * COLUMNS
        is_whole = tile * BLOCK_M < tl.cdiv(q_end - q_start, BLOCK) * BLOCK
        zeros = tl.zeros([BLOCK_M * 64], tl.float32)
        for i in tl.static_range(COLUMNS // 64):  # a range has a power of two of numbers
            part = place + i * BLOCK_M * 64
            tl.store(sums + part + numbers, zeros, mask=(numbers >= 0) & is_whole)


@triton.jit
def load_rows(
    source,
    rows,
    end,
    stride_row,
    stride_column,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Load (rows, WIDTH) of a head, with zeros past HEAD_DIM. If IS_BOUNDED, some rows may be past
    `end`, and are zeros."""
    columns = tl.arange(0, WIDTH)
    pointers = (
        source
        + rows.to(tl.int64)[:, None] * stride_row
        + columns.to(tl.int64)[None, :] * stride_column
    )
    if HEAD_DIM < WIDTH:
        inside = columns[None, :] < HEAD_DIM
        if IS_BOUNDED:
            inside = inside & (rows[:, None] < end)
        block = tl.load(pointers, mask=inside, other=0.0)
    elif IS_BOUNDED:
        block = tl.load(pointers, mask=rows[:, None] < end, other=0.0)
    else:
        block = tl.load(pointers)
    return block
