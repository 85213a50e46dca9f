"""Backward pass for Hopper GPUs (compute capability 9.0): planning and launch of the kernels.

Head dimensions up to 64 run the kernel for 64, and others up to 128 the kernel for 128: TMA reads
columns past the last one as zeros. Wider ones have a kernel of their own, without packs or soft
caps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention_kernels.hopper.hopper_backward_kernel import KEYS, backward_kernel
from attention_kernels.hopper.hopper_backward_wide_kernel import wide_backward_kernel
from attention_kernels.hopper.hopper_prefill import tile_descriptor
from attention_kernels.hopper.operands import are_loadable
from attention_kernels.hopper.query_gradients import CHUNK_ROWS, COLUMNS, SIDE, convert_kernel
from attention_kernels.hopper.scores import ROWS
from attention_kernels.launch.launcher import Launch, PlanCache, PlannedCall, alignments, layout
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import LOG2_E
from attention_kernels.tiles.row_sums import (
    Gradients,
    empty_gradient,
    row_sum_tiles,
    row_sums_launch,
)

HEAD_GROUP_BYTES = 32 * 2**20
"""Size of the queries, dO and dQ that programs with neighbouring numbers share, in bytes: a part of
the L2 cache."""
REGISTERS = 232
"""Registers per thread of the second consumer; the first has 248."""
PACKED_REGISTERS = 240
"""The same in packed calls and for wide heads; the first consumer then has 240 too."""
BLOCKS = {64: 128, 128: 64}
"""Number of queries in a block, by the head dimension of a kernel. Each consumer computes 64 × 64
numbers of dQ."""
WIDE = {(192, 128), (256, 256)}
"""Head dimensions of keys and values of the kernel for wide heads, whose blocks have 64 queries."""
SMALLEST_HEAD_DIM = 32
"""Smallest head dimension of a call. Smaller ones would mostly multiply zeros."""


def takes_backward(
    query: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    is_packed: bool,
) -> bool:
    """Return whether `hopper_backward` supports such a call, on a GPU with Gluon kernels."""
    dims = query.shape[3], value.shape[3]
    is_wide = dims in WIDE and softcap is None and not is_packed
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and (
            is_wide or all(SMALLEST_HEAD_DIM <= dim <= max(BLOCKS) and dim % 8 == 0 for dim in dims)
        )
        and (scale is None or scale > 0)
        and attn_mask is None
        and query.numel() > 0
        and value.numel() > 0
    )


def hopper_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Lengths | None = None,
    *,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> Gradients:
    """Return the gradients of attention's query, key, value and sinks.

    The bits of the query's gradient may differ from call to call, because programs add its parts in
    the order in which they finish; those of key and value do not. Tensors that TMA cannot address
    are copied first, as in `hopper_prefill`.

    Args:
        grad_output: gradient of the output, (B, Hq, Sq, Dv), any strides.
        query, key, value, is_causal, scale, sinks: arguments of the forward pass, as for `prefill`,
            that `takes_backward` accepts; packed batches have one batch element.
        output, lse: results of that forward pass, (B, Hq, Sq, Dv) and (B, Hq, Sq) float32.
        lengths: "full" or "packed"; None for full.
        options: bottom right, window and soft cap of the forward pass.
        grad_lse: gradient of the log-sum-exp, (B, Hq, Sq) float32; None for zeros.

    Returns:
        Gradients that are dense in BSHD if the tensor is, else in BHSD.

    Raises:
        ValueError: the shapes do not fit together.
    """
    batch, heads, q_len, _ = query.shape
    lengths = lengths or Lengths("full", batch, q_len)
    grad_query, grad_key, grad_value = (
        empty_gradient(each, lengths.kind) for each in (query, key, value)
    )
    query, key, value, grad_output = (
        each if are_loadable(each) else empty_gradient(each).copy_(each)
        for each in (query, key, value, grad_output)
    )
    shape = (
        *map(layout, (grad_output, query, key, value, output, sinks)),
        alignments(output),
        *(is_causal, scale, options, grad_lse is None),
        *(lengths[:3], *map(layout, lengths[3:])),
    )
    planned = _plans.get(shape) or _plans.keep(
        shape, _plan(grad_output, query, key, value, output, is_causal, scale, lengths, options)
    )
    rows = batch * heads * planned.row_length
    logarithms, deltas = lse.new_empty(2, rows).unbind()
    sums = lse.new_empty(rows * planned.columns // COLUMNS.value, COLUMNS.value)
    parts = None
    if sinks is not None:
        parts = lse.new_empty(lengths.batches, heads, planned.row_tiles)
    planned.row_sums(
        output,
        grad_output,
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        None if sinks is None else sinks.contiguous(),
        lengths.q_offsets,
        logarithms,
        deltas,
        parts,
        sums,
    )
    planned.main.launch(
        *planned.main.operands(query, key, value, grad_output, logarithms, deltas, sums),
        grad_key,
        grad_value,
        *(() if planned.is_wide else lengths[3:]),
    )
    planned.convert(sums, grad_query, lengths.q_offsets)
    grad_sinks = None
    if parts is not None and sinks is not None:
        grad_sinks = parts.sum((0, 2)).to(sinks.dtype)
    return Gradients(grad_query, grad_key, grad_value, grad_sinks)


class _PlannedBackward(NamedTuple):
    """Launches for calls of one shape."""

    row_sums: Launch
    main: PlannedCall
    convert: Launch
    row_length: int
    """Number of rows of a head's sums: the queries, in whole blocks of each sequence."""
    row_tiles: int
    """Number of tiles of each head and sequence of `row_sums`."""
    columns: int
    """Number of columns of the sums."""
    is_wide: bool


_plans: PlanCache[_PlannedBackward] = PlanCache()


def _plan(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    is_causal: bool,
    scale: float | None,
    lengths: Lengths,
    options: AttentionOptions,
) -> _PlannedBackward:
    """Plan everything about a call except the addresses of its tensors."""
    check_shapes(query.shape, key.shape, value.shape)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1:3]
    v_head_dim, is_packed = value.shape[3], lengths.kind == "packed"
    is_causal, left, right = window_sides(is_causal, options, q_len, k_len)
    right = 0 if is_causal else right
    scale = head_dim**-0.5 if scale is None else scale
    is_wide = (head_dim, v_head_dim) in WIDE
    if is_wide:
        rows, keys, width = 64, ROWS.value, head_dim
        box, v_box = triton.next_power_of_2(head_dim), v_head_dim
    else:
        width = min(each for each in BLOCKS if each >= max(head_dim, v_head_dim))
        rows, keys = BLOCKS[width], KEYS.value
        box = v_box = width
    longest = triton.cdiv(lengths.longest_query, rows)
    blocks, tiles = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    seen = blocks * rows
    if is_packed:
        blocks, tiles = q_len // rows + lengths.batches, k_len // KEYS.value + lengths.batches
        seen = triton.cdiv(q_len, lengths.batches)
    row_length = blocks * rows
    head_bytes = seen * width * (2 * query.element_size() + 4)
    cap = options.softcap
    strides = (empty_gradient(each, device="meta").stride()[:3] for each in (key, value))
    (batch_k, head_k, row_k), (batch_v, head_v, row_v) = strides
    diagonal: int | None = 0
    if options.bottom_right:  # each sequence has its own
        diagonal = None if is_packed else k_len - q_len
    of_narrow = {
        "cap": None if cap is None else cap * LOG2_E.value,
        "sequences": lengths.batches,
        "V_HEAD_DIM": v_head_dim,
    }
    launch = Launch(
        wide_backward_kernel if is_wide else backward_kernel,
        (tiles * batch * kv_heads, 1, 1),
        query.device,
        ({} if is_wide else of_narrow)
        | {
            "scale": scale * LOG2_E.value if cap is None else scale / cap,
            "grad_scale": scale,
            "q_len": q_len,
            "k_len": k_len,
            "diagonal": diagonal,
            "left": left,
            "right": right,
            "blocks": blocks,
            "kv_heads": kv_heads,
            "group": heads // kv_heads,
            "tiles": tiles,
            "head_group": _head_group(batch * kv_heads, head_bytes * heads // kv_heads, right),
            "stride_kb": batch_k,
            "stride_kh": head_k,
            "stride_kn": row_k,
            "stride_vb": batch_v,
            "stride_vh": head_v,
            "stride_vn": row_v,
            "REGISTERS": PACKED_REGISTERS if is_packed or is_wide else REGISTERS,
            "MASKED": is_packed or k_len % keys > 0 or (left, right) != (None, None),
            "HEAD_DIM": head_dim,
        },
        num_warps=4,
    )
    of_block = functools.partial(tile_descriptor, dtype=query.dtype)
    numbers = batch * heads * row_length
    descriptors = (
        of_block(query.shape, query.stride(), rows, box),
        of_block(key.shape, key.stride(), keys, box),
        of_block(value.shape, value.stride(), keys, v_box),
        of_block(grad_output.shape, grad_output.stride(), rows, v_box),
        _dense((numbers,), (rows,)),
        _dense((numbers,), (rows,)),
        None
        if is_wide
        else _dense(
            (numbers * width // COLUMNS.value, COLUMNS.value), (CHUNK_ROWS.value, COLUMNS.value)
        ),
    )
    of_gradient = empty_gradient(query, device="meta").stride()
    chunks, pieces = longest * rows // SIDE.value, width // SIDE.value
    convert = Launch(
        convert_kernel,
        (lengths.batches * heads * chunks * pieces, 1, 1),
        query.device,
        {
            "scale": scale,
            "length": q_len,
            "heads": heads,
            "row_chunks": row_length // SIDE.value,
            "tiles": chunks,
            "stride_b": of_gradient[0],
            "stride_h": of_gradient[1],
            "stride_m": of_gradient[2],
            "BLOCK": rows,
            "PIECES": pieces,
            "HEAD_DIM": head_dim,
        },
        num_warps=4,
    )
    row_sums = row_sums_launch(output, grad_output, lengths, row_length, rows, width)
    main = PlannedCall(launch, descriptors)
    row_tiles = row_sum_tiles(lengths, rows)
    return _PlannedBackward(row_sums, main, convert, row_length, row_tiles, width, is_wide)


def _head_group(heads: int, head_bytes: int, right: int | None) -> int:
    """Return the number of key heads whose programs run together, a divisor of `heads`."""
    if right is None:
        return 1
    most = max(1, HEAD_GROUP_BYTES // head_bytes)
    return max(each for each in range(1, heads + 1) if heads % each == 0 and each <= most)


def _dense(shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """Return a descriptor of a dense float32 tensor, which is moved by `at`."""
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(shape))
    tensor = torch.empty(shape, device="meta")
    return TensorDescriptor(tensor, list(shape), list(tensor.stride()), list(block), plain)
