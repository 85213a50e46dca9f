"""Last step of a consumer's tile in a Hopper kernel: its output is divided and stored."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from attention_kernels.hopper.key_ranges import is_own, store_rows
from attention_kernels.hopper.pipeline import tma_store
from attention_kernels.hopper.scores import ROWS, add_sink, matrix, of_rows
from attention_kernels.tiles.online_softmax import LN_2, LOG2_E


class Outputs(NamedTuple):
    """Destinations of outputs; None for destinations that a call does not have."""

    buffers: Any
    """One buffer for each consumer, (1, 1, ROWS, columns), for the whole first piece of the output
    or one part of it at a time."""
    descriptor: Any
    """Descriptor through which TMA stores, if `pointer` is None."""
    pointer: Any
    """Pointer to the outputs of a call whose tiles may end within another sequence, or begin before
    the first query: TMA stores nothing from a negative row on, but fails."""
    stride_head: Any
    stride_token: Any
    lse: Any = None
    """Pointer to (B, Hq, rows), for the logarithms of the sums of exponentials."""
    rows: Any = None
    stride_batch: Any = None
    """None if the batch is packed."""
    rest_buffers: Any = None
    """Buffers for the second piece of the output, if there is one."""
    rest_descriptor: Any = None


@gluon.jit
def finish(
    output,
    reference,
    total,
    sink,
    outputs,
    place,
    element,
    WHO: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
    LOG2_UNIT: gl.constexpr = 0.0,
):
    """Divide a consumer's output (ROWS, Dv) by the sums of the weights, and store the result.

    Args:
        output: a tuple of one tensor for each piece of Dv.
        reference: (ROWS,), base-2 references of the weights.
        total: (ROWS,), sum of the weights of each row.
        sink: sink of the head in base 2, or of each row; None without sinks.
        place: batch element, number of query heads, head, and first query.
        LOG2_UNIT: base-2 logarithm of the number that represents a weight of 1.
    """
    shrink = 1.0
    if sink is not None:
        shrink, reference, total = add_sink(sink, reference, total, LOG2_UNIT)
    factor = gl.where(total == 0.0, 0.0, shrink / total)  # a query may see no key
    divided = output[:0]
    for i in gl.static_range(len(output)):
        divided += (output[i] * of_rows(factor, output[i]),)
    _store(divided, outputs, place, element, WHO, V_HEAD_DIM)
    if outputs.lse is not None:
        batch, q_heads, q_head, first = place
        queries = first + gl.arange(0, ROWS, total.type.layout)
        start = (batch * q_heads + q_head).to(gl.int64) * outputs.rows + element.q_start
        logarithms = (reference + gl.log2(total)) * LN_2
        gl.store(outputs.lse + start + queries, logarithms, mask=is_own(queries, element))


@gluon.jit
def sink_of(sinks, q_head):
    """Return a head's sink in base 2; None without sinks."""
    sink = None
    if sinks is not None:
        sink = gl.load(sinks + q_head).to(gl.float32) * LOG2_E
    return sink


@gluon.jit
def _store(output, outputs, place, element, WHO: gl.constexpr, V_HEAD_DIM: gl.constexpr):
    batch, _, q_head, _ = place
    COLUMNS: gl.constexpr = outputs.buffers.shape[4]
    parts = _column_parts(output[0], COLUMNS)
    pointer = outputs.pointer
    if pointer is not None:
        pointer += q_head.to(gl.int64) * outputs.stride_head
        if outputs.stride_batch is not None:
            pointer += batch.to(gl.int64) * outputs.stride_batch
    stride_token = outputs.stride_token
    buffer, descriptor = outputs.buffers.index(WHO), outputs.descriptor
    for i in gl.static_range(len(parts)):
        tma.store_wait(0)  # the previous part or tile may still be read from this memory
        _store_part(
            parts[i], buffer, descriptor, pointer, stride_token, place, element,
            i * COLUMNS, V_HEAD_DIM,
        )  # fmt: skip
    if outputs.rest_buffers is not None:  # the wait above was also for this memory
        buffer, descriptor = outputs.rest_buffers.index(WHO), outputs.rest_descriptor
        _store_part(
            output[1], buffer, descriptor, pointer, stride_token, place, element,
            output[0].shape[1], V_HEAD_DIM,
        )  # fmt: skip


@gluon.jit
def _store_part(
    part,
    buffer,
    descriptor,
    pointer,
    stride_token,
    place,
    element,
    FIRST: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Store a part of an output, whose columns begin at FIRST."""
    batch, _, q_head, first = place
    matrix(buffer).store(part.to(buffer.dtype))
    fence_async_shared()
    if pointer is None:
        tma_store(descriptor, [batch, q_head, first, FIRST], buffer)
    else:
        store_rows(buffer, pointer + FIRST, stride_token, first, element, V_HEAD_DIM - FIRST)


@gluon.jit
def _column_parts(output, COLUMNS: gl.constexpr):
    """Split an output (ROWS, Dv) into one, two or four parts (ROWS, COLUMNS) that share its
    registers."""
    if output.shape[1] == COLUMNS:
        parts = (output,)
    elif output.shape[1] == 2 * COLUMNS:
        parts = _column_halves(output)
    else:
        left, right = _column_halves(output)
        parts = _column_halves(left) + _column_halves(right)
    return parts


@gluon.jit
def _column_halves(output):
    HALF: gl.constexpr = output.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(output.reshape((ROWS, 2, HALF)).permute((0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)
