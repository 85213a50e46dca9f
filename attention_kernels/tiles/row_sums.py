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
    output: Tensor, grad_output: Tensor, lengths: Lengths, row_length: int
) -> Launch:
    """Return a launch of `row_sums_kernel` for tensors (B, Hq, Sq, Dv), with `row_length` numbers
    for each head's queries; that is Sq for packed batches."""
    _, heads, q_len, v_head_dim = output.shape
    longest = row_length if lengths.kind == "full" else lengths.longest_query
    tiles = triton.cdiv(longest, ROWS_OF_SUMS)
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
            "DV": v_head_dim,
            "DV_WIDTH": max(16, triton.next_power_of_2(v_head_dim)),
        },
        num_warps=4,
    )


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
    DV: tl.constexpr,
    DV_WIDTH: tl.constexpr,
):
    """Store what each row of a tile of queries needs: its log-sum-exp in base 2, and δ.

    A row that sees nothing, or that has an infinite log-sum-exp for another reason, gets a
    logarithm of infinity, with which all its weights are zero, and a δ of zero. A row whose mask
    values are all -1e30 or less is treated likewise: beside such a number, its log-sum-exp cannot
    hold its sum of exponentials.

    `lse` and `grad_lse` are (B, Hq, Sq), dense. `logarithms` and `deltas` are (B, Hq, row_length),
    and rows after the last query get infinity and zero too. `grad_sinks` (B, Hq, tiles) gets the
    tile's part of the gradient of its head's sink. `sums` (B, Hq, row_length, DV) gets zeros, to
    which another kernel adds.
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
    rows = q_start + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < q_end
    is_stored = rows < row_length if q_offsets is None else inside
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
    places = (memory * heads + head) * row_length + rows
    tl.store(logarithms + places, logarithm, mask=is_stored)
    tl.store(deltas + places, delta, mask=is_stored)
    if sinks is not None:
        weights = tl.math.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - logarithm)
        tl.store(grad_sinks + tl.program_id(0), -tl.sum(weights * delta, 0))
    if sums is not None:
        numbers = tl.arange(0, BLOCK_M * DV)
        first = tl.program_id(0).to(tl.int64) * (BLOCK_M * DV)
        tl.store(sums + first + numbers, tl.zeros_like(numbers).to(tl.float32))


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
