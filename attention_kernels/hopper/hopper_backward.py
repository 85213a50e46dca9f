"""Backward pass for Hopper GPUs (compute capability 9.0): planning and launch of the kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention_kernels.hopper.hopper_backward_kernel import KEYS, backward_kernel
from attention_kernels.hopper.hopper_prefill import tile_descriptor
from attention_kernels.hopper.operands import are_loadable
from attention_kernels.hopper.query_gradients import CHUNK_ROWS, COLUMNS, SIDE, convert_kernel
from attention_kernels.launch.launcher import Launch, PlanCache, PlannedCall, alignments, layout
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import base_2
from attention_kernels.tiles.row_sums import Gradients, empty_gradient, row_sums_launch

HEAD_GROUP_BYTES = 32 * 2**20
"""Size of the queries, dO and dQ that programs with neighbouring numbers share, in bytes: a part of
the L2 cache."""
REGISTERS = 232
"""Registers per thread of a consumer."""
BLOCKS = {64: 128, 128: 64}
"""Number of queries in a block, by head dimension. Each consumer computes 64 × 64 numbers of dQ."""


def takes_backward(
    query: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> bool:
    """Return whether `hopper_backward` supports such a call, on a GPU with Gluon kernels."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == value.shape[3]
        and query.shape[3] in BLOCKS
        and (scale is None or scale > 0)
        and attn_mask is None
        and sinks is None
        and softcap is None
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
    *,
    options: AttentionOptions = PLAIN,
    grad_lse: Tensor | None = None,
) -> Gradients:
    """Return the gradients of attention's query, key and value.

    The bits of the query's gradient may differ from call to call, because programs add its parts in
    the order in which they finish; those of key and value do not. Tensors that TMA cannot address
    are copied first, as in `hopper_prefill`.

    Args:
        grad_output: gradient of the output, (B, Hq, Sq, D), any strides; D is 64 or 128.
        query, key, value, is_causal, scale: arguments of the forward pass, as for `prefill`, in 16
            bits; the scale is positive.
        output, lse: results of that forward pass, (B, Hq, Sq, D) and (B, Hq, Sq) float32.
        options: bottom right and window of the forward pass.
        grad_lse: gradient of the log-sum-exp, (B, Hq, Sq) float32; None for zeros.

    Returns:
        Gradients that are dense in BSHD if the tensor is, else in BHSD; no gradient of sinks.

    Raises:
        ValueError: the shapes do not fit together.
    """
    grad_query, grad_key, grad_value = map(empty_gradient, (query, key, value))
    query, key, value, grad_output = (
        each if are_loadable(each) else empty_gradient(each).copy_(each)
        for each in (query, key, value, grad_output)
    )
    if not (query.numel() and key.numel()):
        return Gradients(grad_query.zero_(), grad_key.zero_(), grad_value.zero_(), None)
    shape = (
        *map(layout, (grad_output, query, key, value, output)),
        alignments(output),
        *(is_causal, scale, options, grad_lse is None),
    )
    planned = _plans.get(shape) or _plans.keep(
        shape, _plan(grad_output, query, key, value, output, is_causal, scale, options)
    )
    batch, heads, _, head_dim = query.shape
    logarithms, deltas = lse.new_empty(2, batch * heads * planned.row_length).unbind()
    rows = batch * heads * planned.row_length * head_dim // COLUMNS.value
    sums = lse.new_empty(rows, COLUMNS.value)
    below = None if grad_lse is None else grad_lse.contiguous()
    rest = None, None, logarithms, deltas, None, sums
    planned.row_sums(output, grad_output, lse.contiguous(), below, *rest)
    planned.main.launch(
        *planned.main.operands(query, key, value, grad_output, logarithms, deltas, sums),
        grad_key,
        grad_value,
    )
    planned.convert(sums, grad_query)
    return Gradients(grad_query, grad_key, grad_value, None)


class _PlannedBackward(NamedTuple):
    """Launches for calls of one shape."""

    row_sums: Launch
    main: PlannedCall
    convert: Launch
    row_length: int
    """Number of rows of a head's sums: the queries, rounded up to whole blocks."""


_plans: PlanCache[_PlannedBackward] = PlanCache()


def _plan(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    is_causal: bool,
    scale: float | None,
    options: AttentionOptions,
) -> _PlannedBackward:
    """Plan everything about a call except the addresses of its tensors."""
    check_shapes(query.shape, key.shape, value.shape)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1:3]
    is_causal, left, right = window_sides(is_causal, options, q_len, k_len)
    right = 0 if is_causal else right
    scale = head_dim**-0.5 if scale is None else scale
    rows = BLOCKS[head_dim]
    blocks = triton.cdiv(q_len, rows)
    row_length = blocks * rows
    tiles = triton.cdiv(k_len, KEYS.value)
    head_bytes = row_length * head_dim * 2 * query.element_size() + row_length * head_dim * 4
    strides = (empty_gradient(each, device="meta").stride()[:3] for each in (key, value))
    (batch_k, head_k, row_k), (batch_v, head_v, row_v) = strides
    launch = Launch(
        backward_kernel,
        (tiles * batch * kv_heads, 1, 1),
        query.device,
        {
            "scale": base_2(scale, None)[0],
            "grad_scale": scale,
            "q_len": q_len,
            "k_len": k_len,
            "diagonal": k_len - q_len if options.bottom_right else 0,
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
            "REGISTERS": REGISTERS,
            "MASKED": k_len % KEYS.value > 0 or left is not None or right is not None,
        },
        num_warps=4,
    )
    of_block = functools.partial(tile_descriptor, columns=head_dim, dtype=query.dtype)
    numbers = batch * heads * row_length
    descriptors = (
        of_block(query.shape, query.stride(), rows),
        of_block(key.shape, key.stride(), KEYS.value),
        of_block(value.shape, value.stride(), KEYS.value),
        of_block(grad_output.shape, grad_output.stride(), rows),
        _dense((numbers,), (rows,)),
        _dense((numbers,), (rows,)),
        _dense(
            (numbers * head_dim // COLUMNS.value, COLUMNS.value), (CHUNK_ROWS.value, COLUMNS.value)
        ),
    )
    of_gradient = empty_gradient(query, device="meta").stride()
    chunks = row_length // SIDE.value
    convert = Launch(
        convert_kernel,
        (batch * heads * chunks * head_dim // SIDE.value, 1, 1),
        query.device,
        {
            "scale": scale,
            "length": q_len,
            "heads": heads,
            "row_chunks": chunks,
            "stride_b": of_gradient[0],
            "stride_h": of_gradient[1],
            "stride_m": of_gradient[2],
            "PIECES": head_dim // SIDE.value,
        },
        num_warps=4,
    )
    lengths = Lengths("full", batch, q_len)
    row_sums = row_sums_launch(output, grad_output, lengths, row_length)
    return _PlannedBackward(row_sums, PlannedCall(launch, descriptors), convert, row_length)


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
