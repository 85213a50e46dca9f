"""Calls restricted to the keys that a sparse kernel chose; the kernel is judged on these calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.timing.flops import valid_pairs


def restricted(call: AttentionCall, chosen: Tensor) -> AttentionCall:
    """Return the call with all keys masked except the chosen keys.

    Args:
        chosen: bool, True = attend, broadcasts to (B, Hq, Sq, Sk).

    Raises:
        ValueError: `chosen` has a wrong dtype or shape.
    """
    shape = call.shape
    sizes = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    fits = chosen.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(chosen.shape[::-1], sizes[::-1], strict=False)
    )
    if chosen.dtype != torch.bool or not fits:
        raise ValueError(
            f"chosen keys are a bool mask that broadcasts to {sizes}, not "
            f"{chosen.dtype} {tuple(chosen.shape)}"
        )
    mask = chosen
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        mask = chosen & call.attn_mask
    elif call.attn_mask is not None:
        mask = torch.where(chosen, call.attn_mask, -math.inf)
    return call.with_tensors({"attn_mask": mask})


def kept_share(call: AttentionCall, kept: AttentionCall) -> float:
    """Return the share of the call's (query, key) pairs that remain in its restriction `kept`."""
    pairs = valid_pairs(call)
    return valid_pairs(kept) / pairs if pairs else 1.0
