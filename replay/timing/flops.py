"""The work of an attention call: its floating-point operations and bytes, as exact integers.

The figures depend only on shapes, masks and stored sizes, so they are equal for all kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.block_mask import is_block_mask, rows_of
from capture.call.strides import narrow_expanded

ROWS_AT_A_TIME = 256


def valid_pairs(call: AttentionCall) -> int:
    """Count the (query, key) pairs that take part in the softmax, over batch and query heads.

    Causal masks, windows and packed sequences keep a range of keys visible to each query
    (`capture.call.attention_variant.key_ranges`). A bool mask allows its True entries, a float mask
    the entries other than -inf. In a call with a mask and a range, both must allow a pair, as in
    torch's CPU flash backend; torch's math backend refuses a mask with `is_causal`.
    """
    shape = call.shape
    heads = shape.batch * shape.q_heads
    if not heads * shape.q_len * shape.kv_len:
        return 0  # without keys, a mask has at most one entry, and no pair
    restricts = call.is_causal or bool(call.features)
    if call.attn_mask is not None:
        if restricts or is_block_mask(call.attn_mask):
            return _pairs_in_mask_and_spans(call, call.attn_mask)
        return _pairs_in_mask(call, call.attn_mask)
    if call.is_causal and not call.features:
        return heads * _causal_pairs(shape.q_len, shape.kv_len)
    if restricts:
        first, end = call.key_ranges
        return heads * int((end - first).sum()) // first.shape[0]
    return heads * shape.q_len * shape.kv_len


def flops(call: AttentionCall) -> int:
    """Count the multiplications and additions of QKᵀ and PV over valid pairs: 2·pairs·(D + Dv).

    The softmax itself is not counted, as is usual in attention papers.
    """
    return 2 * valid_pairs(call) * (call.shape.head_dim + call.shape.v_head_dim)


def bytes_moved(call: AttentionCall) -> int:
    """Count the bytes of query, key, value and mask, read once, and of the output, written once.

    Each tensor counts with its stored element size. Expanded (stride 0) dimensions, a value that is
    part of the key, and pages of a cache count once. The output counts in the call's dtype, even
    if a kernel quantises internally.
    """
    shape = call.shape
    output_elements = shape.batch * shape.q_heads * shape.q_len * shape.v_head_dim
    read = [call.query, call.key]
    if not call.value_is_in_key:
        read.append(call.value)
    if call.attn_mask is not None:
        read.append(call.attn_mask)
    read_bytes = sum(_stored_elements(tensor) * tensor.element_size() for tensor in read)
    return read_bytes + output_elements * call.dtype.itemsize


def arithmetic_intensity(call: AttentionCall) -> float:
    """Return the floating-point operations per byte moved; 0 for a call without operations.

    A roofline compares this intensity with the machine's ratio of peak operations to peak bytes.
    """
    operations = flops(call)
    return operations / bytes_moved(call) if operations else 0.0


def tflops(call: AttentionCall, milliseconds: float) -> float:
    """Return a call's floating-point operations per second, in 10¹²."""
    return flops(call) / milliseconds / 1e9


def gb_per_s(call: AttentionCall, milliseconds: float) -> float:
    """Return the bytes per second that a call moved, in 10⁹."""
    return bytes_moved(call) / milliseconds / 1e6


def _causal_pairs(q_len: int, kv_len: int) -> int:
    triangle = min(q_len, kv_len)
    return triangle * (triangle + 1) // 2 + (q_len - triangle) * kv_len


def _pairs_in_mask(call: AttentionCall, attn_mask: Tensor) -> int:
    shape = call.shape
    # Count expanded dimensions once and multiply, as for dimensions that broadcast.
    mask = narrow_expanded(attn_mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    per_head = shape.batch * shape.q_heads // (mask.shape[0] * mask.shape[1])
    per_entry = shape.q_len * shape.kv_len // (mask.shape[2] * mask.shape[3])
    return per_head * per_entry * int(_allowed(mask).count_nonzero())


def _pairs_in_mask_and_spans(call: AttentionCall, attn_mask: Tensor) -> int:
    shape, (first, end) = call.shape, call.key_ranges
    is_of_blocks = is_block_mask(attn_mask)
    mask = attn_mask if is_of_blocks else narrow_expanded(attn_mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    position = torch.arange(shape.kv_len, device=mask.device)
    pairs = 0
    for rows in torch.arange(shape.q_len, device=mask.device).split(ROWS_AT_A_TIME):
        inside = (position >= first[:, rows, None]) & (position < end[:, rows, None])
        if is_of_blocks:
            allowed = rows_of(mask, rows, shape.kv_len)
        else:
            allowed = _allowed(mask if mask.shape[2] == 1 else mask[:, :, rows])
        pairs += int((allowed & inside[:, None]).count_nonzero())
    counted = max(mask.shape[0], first.shape[0]) * mask.shape[1]
    return pairs * (shape.batch * shape.q_heads // counted)


def _allowed(attn_mask: Tensor) -> Tensor:
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf


def _stored_elements(tensor: Tensor) -> int:
    return narrow_expanded(tensor).numel()
