"""Calls restricted to the keys that a sparse kernel chose; the kernel is judged on these calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.block_mask import is_block_mask, rows_of
from replay.timing.flops import valid_pairs


def restricted(call: AttentionCall, chosen: Tensor) -> AttentionCall:
    """Return the call with all keys masked except the chosen keys.

    Args:
        chosen: bool, True = attend, broadcasts to (B, Hq, Sq, Sk); or a block mask
            (`capture.call.block_mask`), which is expanded only if the call has a mask of its own.

    Raises:
        ValueError: `chosen` has a wrong dtype or shape.
    """
    if chosen.dtype != torch.bool or not _fits(chosen, call):
        shape = call.shape
        sizes = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
        raise ValueError(
            f"chosen keys are a bool mask that broadcasts to {sizes}, not "
            f"{chosen.dtype} {tuple(chosen.shape)}"
        )
    if call.attn_mask is None:
        return call.with_tensors({"attn_mask": chosen})
    if is_block_mask(chosen):
        queries = torch.arange(call.shape.q_len, device=chosen.device)
        chosen = rows_of(chosen, queries, call.shape.kv_len)
    if call.attn_mask.dtype == torch.bool:
        mask = chosen & call.attn_mask
    else:
        mask = torch.where(chosen, call.attn_mask, -math.inf)
    return call.with_tensors({"attn_mask": mask})


def _fits(chosen: Tensor, call: AttentionCall) -> bool:
    shape = call.shape
    if is_block_mask(chosen):
        rows, keys = chosen.shape[3], chosen.shape[5]
        runs = chosen.shape[2], chosen.shape[4]
        needed = -(-shape.q_len // max(rows, 1)), -(-shape.kv_len // max(keys, 1))
        is_whole = min(rows, keys) > 0 and runs == needed
        return is_whole and all(
            size in (1, whole)
            for size, whole in zip(chosen.shape, (shape.batch, shape.q_heads), strict=False)
        )
    sizes = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    return chosen.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(chosen.shape[::-1], sizes[::-1], strict=False)
    )


def kept_share(call: AttentionCall, kept: AttentionCall) -> float:
    """Return the share of the call's (query, key) pairs that remain in its restriction `kept`."""
    pairs = valid_pairs(call)
    return valid_pairs(kept) / pairs if pairs else 1.0
