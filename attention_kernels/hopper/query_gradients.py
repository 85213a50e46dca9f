"""Sums of dQ in float32, to which programs of the Hopper backward kernels add parts.

The sums are chunks of 64 queries by 64 columns. A chunk's numbers are in the order in which the
threads of a warp group hold them: the four numbers of a thread that belong to the same eight
columns are adjacent. A thread thus stores or adds 16 bytes at once, a warp 512 adjacent bytes, and
no two threads use the same bank of shared memory. With m the query and n the column in a chunk, the
number is at

    n // 8 · 512 + m // 16 · 128 + m % 8 · 16 + n % 8 // 2 · 4 + m % 16 // 8 · 2 + n % 2

(PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"). `convert_kernel` undoes the order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attention_kernels.hopper.pipeline import meet

SIDE = gl.constexpr(64)
"""Number of queries and of columns of a chunk."""
COLUMNS = gl.constexpr(128)
"""Number of float32 in a row of the tensor of sums, a unit of TMA."""
CHUNK_ROWS = gl.constexpr(64 * 64 // 128)
"""Number of such rows that hold a chunk."""


@builtin
def _reduce_add(desc, coord, source, _semantic=None):
    """Start to add a block of shared memory to the block at `coord` of a descriptor's tensor. Gluon
    before Triton 3.9 has no name for this instruction (`cp.reduce.async.bulk.tensor`)."""
    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, place, source.handle)


@gluon.jit
def add_chunk(part, desc, chunk, buffer):
    """Start to add a product (64, 64) of a warp group to chunk number `chunk` of the sums.

    All warps must have met since `tma.store_wait(0)`: TMA may still read the previous part from
    `buffer` (CHUNK_ROWS, COLUMNS).
    """
    ordered = part.reshape((4, 2, 8, 8, 4, 2)).permute((3, 0, 2, 4, 1, 5))
    buffer.store(ordered.reshape((CHUNK_ROWS, COLUMNS)))
    fence_async_shared()
    meet()
    _reduce_add(desc, [chunk * CHUNK_ROWS, 0], buffer)


@gluon.jit
def add_from_registers(part, sums, chunk):
    """Add a product (64, 64) of a warp group to chunk number `chunk` of the sums, without shared
    memory. `sums` points to float32; each thread adds 16 bytes at a time."""
    ORDER: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    ordered = part.reshape((4, 2, 8, 8, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((SIDE * SIDE,))
    ordered = gl.convert_layout(ordered, ORDER, assert_trivial=True)
    places = gl.arange(0, SIDE * SIDE, ORDER)
    pointer = sums + chunk.to(gl.int64) * (SIDE * SIDE)
    gl.atomic_add(pointer + places, ordered, sem="relaxed")


@triton.jit(do_not_specialize=["length", "heads", "row_chunks", "tiles"])
def convert_kernel(
    sums,
    gradients,
    q_offsets,
    scale,
    length,
    heads,
    row_chunks,
    tiles,
    stride_b,
    stride_h,
    stride_m,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store a chunk of the sums, multiplied by `scale`, in the gradient (B, H, length, HEAD_DIM).

    Chunks of the sums are in the order of batch, head, queries and columns; `row_chunks` is the
    number of chunks along the queries of a head, and PIECES that along its columns. The first
    `tiles` chunks of a batch element or sequence are converted. Blocks of BLOCK rows of packed
    sequences are those of `row_sums_launch`.
    """
    piece = tl.program_id(0) % PIECES
    tile = tl.program_id(0) // PIECES % tiles
    which = tl.program_id(0) // PIECES // tiles
    batch, head = which // heads, which % heads
    start = 0
    end = length
    chunk = tile
    memory = batch
    if q_offsets is not None:
        start = tl.load(q_offsets + batch).to(tl.int32)
        end = tl.load(q_offsets + batch + 1).to(tl.int32)
        chunk += (start // BLOCK + batch) * (BLOCK // 64)
        memory = 0
    rows = start + tile * 64 + tl.arange(0, 64)
    columns = piece * 64 + tl.arange(0, 64)
    inside = (rows < end)[:, None]
    if HEAD_DIM < 64 * PIECES:
        inside = inside & (columns < HEAD_DIM)[None, :]
    if start + tile * 64 < end:
        row_chunk = (tl.cast(memory, tl.int64) * heads + head) * row_chunks + chunk
        numbers = (row_chunk * PIECES + piece) * 4096 + tl.arange(0, 4096)
        values = tl.load(sums + numbers) * scale
        values = tl.permute(tl.reshape(values, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
        values = tl.reshape(values, (64, 64)).to(gradients.dtype.element_ty)
        places = rows[:, None].to(tl.int64) * stride_m + columns[None, :]
        places += tl.cast(memory, tl.int64) * stride_b + head.to(tl.int64) * stride_h
        tl.store(gradients + places, values, mask=inside)
