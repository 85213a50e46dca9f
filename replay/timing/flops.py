"""What one attention call must at least do: floating-point operations and bytes, exactly.

The figures depend on shapes, masks and stored sizes only, never on a kernel, so that the TFLOPS and
GB/s of all kernels of a call share one numerator. They are integers: nothing is rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.strides import narrow_expanded


def valid_pairs(call: AttentionCall) -> int:
    """(query, key) pairs that take part in the softmax, over batch and query heads.

    `is_causal` is aligned top left as in PyTorch: query i sees keys 0…i, whatever Sq and Sk are. A
    bool mask counts its True entries, a float mask those that are not -inf. With both, a pair must
    be allowed by both: torch's math backend refuses that combination, its CPU flash backend
    computes it.
    """
    shape = call.shape
    heads = shape.batch * shape.q_heads
    if call.attn_mask is not None:
        return _pairs_in_mask(call, call.attn_mask)
    if call.is_causal:
        return heads * _causal_pairs(shape.q_len, shape.kv_len)
    return heads * shape.q_len * shape.kv_len


def flops(call: AttentionCall) -> int:
    """Multiplications and additions of QKᵀ and PV over the valid pairs: 2·pairs·(D + Dv).

    The softmax itself is not counted, which is the convention of the attention papers.
    """
    return 2 * valid_pairs(call) * (call.shape.head_dim + call.shape.v_head_dim)


def bytes_moved(call: AttentionCall) -> int:
    """Bytes of query, key, value and mask, each read once, and of the output, written once.

    Each counts at its own stored element size; an expanded (stride 0) dimension is stored once. The
    output has the query's dtype, as SDPA's has, also where a kernel quantises inside.
    """
    shape = call.shape
    output_elements = shape.batch * shape.q_heads * shape.q_len * shape.v_head_dim
    read = [call.query, call.key, call.value]
    if call.attn_mask is not None:
        read.append(call.attn_mask)
    read_bytes = sum(_stored_elements(tensor) * tensor.element_size() for tensor in read)
    return read_bytes + output_elements * call.query.element_size()


def arithmetic_intensity(call: AttentionCall) -> float:
    """Floating-point operations per byte moved: compare with the machine's balance (roofline)."""
    return flops(call) / bytes_moved(call)


def tflops(call: AttentionCall, milliseconds: float) -> float:
    """10¹² floating-point operations per second for a call that took `milliseconds`."""
    return flops(call) / milliseconds / 1e9


def gb_per_s(call: AttentionCall, milliseconds: float) -> float:
    """10⁹ bytes per second for a call that took `milliseconds`."""
    return bytes_moved(call) / milliseconds / 1e6


def _causal_pairs(q_len: int, kv_len: int) -> int:
    triangle = min(q_len, kv_len)
    return triangle * (triangle + 1) // 2 + (q_len - triangle) * kv_len


def _pairs_in_mask(call: AttentionCall, attn_mask: Tensor) -> int:
    shape = call.shape
    # Expanded dimensions are counted once and multiplied, as are those that only broadcast.
    mask = narrow_expanded(attn_mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    per_head = shape.batch * shape.q_heads // (mask.shape[0] * mask.shape[1])
    if call.is_causal:
        return per_head * _pairs_in_causal_mask(mask, shape.q_len, shape.kv_len)
    per_entry = shape.q_len * shape.kv_len // (mask.shape[2] * mask.shape[3])
    return per_head * per_entry * int(_allowed(mask).count_nonzero())


def _pairs_in_causal_mask(mask: Tensor, q_len: int, kv_len: int) -> int:
    mask = mask.expand(-1, -1, -1, kv_len)
    if mask.shape[2] == q_len:
        return sum(
            int(_allowed(mask[:, :, row, : row + 1]).count_nonzero()) for row in range(q_len)
        )
    # The mask is the same for all queries, of which j…Sq-1 come at or after key j.
    queries = (q_len - torch.arange(kv_len, device=mask.device)).clamp(min=0)
    return int((_allowed(mask).sum(dim=(0, 1, 2)) * queries).sum())


def _allowed(attn_mask: Tensor) -> Tensor:
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf


def _stored_elements(tensor: Tensor) -> int:
    return narrow_expanded(tensor).numel()
