"""Sums of dQ in float32, to which programs of `hopper_backward_kernel.py` add parts.

The sums are chunks of 64 queries by 64 columns. A chunk's numbers are in the order in which the
threads of a warp group hold them: the four numbers of a thread that belong to the same eight
columns are adjacent. A thread thus stores 16 bytes at once, and no two threads use the same bank of
shared memory. With m the query and n the column in a chunk, the number is at

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


@triton.jit(do_not_specialize=["length", "heads", "row_chunks"])
def convert_kernel(
    sums,
    gradients,
    scale,
    length,
    heads,
    row_chunks,
    stride_b,
    stride_h,
    stride_m,
    PIECES: tl.constexpr,
):
    """Store a chunk of the sums, multiplied by `scale`, in the gradient (B, H, length, 64·PIECES).

    Chunks of the sums are in the order of batch, head, queries and columns; `row_chunks` is the
    number of chunks along the queries of a head.
    """
    chunk = tl.program_id(0)
    piece = chunk % PIECES
    row_chunk = chunk // PIECES % row_chunks
    which = chunk // PIECES // row_chunks
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    numbers = tl.load(sums + chunk.to(tl.int64) * 4096 + tl.arange(0, 4096)) * scale
    ordered = tl.permute(tl.reshape(numbers, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    rows = row_chunk * 64 + tl.arange(0, 64)
    places = rows[:, None].to(tl.int64) * stride_m + (piece * 64 + tl.arange(0, 64))[None, :]
    places += batch * stride_b + head * stride_h
    values = tl.reshape(ordered, (64, 64)).to(gradients.dtype.element_ty)
    tl.store(gradients + places, values, mask=(rows < length)[:, None])
