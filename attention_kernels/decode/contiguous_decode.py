"""Attention of a few query tokens over keys in one piece."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.split_kv import attend_to_cache
from attention_kernels.options import PLAIN, AttentionOptions


def contiguous_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Return softmax(scale · QKᵀ + mask) · V for a short query, (B, Hq, Sq, Dv), contiguous.

    Any Sq is computed correctly. The keys are read once for every 64 rows (G · Sq) of a key head,
    so a prefill kernel is the better choice for more.

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, D ≤ 256, any strides; Hq a multiple of Hkv.
        key: (B, Hkv, Sk, D), in the query's dtype and on its device, any strides.
        value: (B, Hkv, Sk, Dv), likewise.
        attn_mask: broadcasts to (B, Hq, Sq, Sk); bool (True = attend) or float (added). A query
            whose keys are all masked gets zeros.
        is_causal: aligned top left: query i sees keys 0 to i, or bottom right, if `options` says
            so. Keys beyond the first Sq are not read top left, so that a NaN there reaches nothing.
        scale: factor of the scores; None for 1/√D.
        seqused_k: (B,) int32, how many keys count, from the first; None for all.
        sinks: (Hq,), a logit of each head that takes weight and has no value.
        options: bottom right, window and soft cap; keys before every query's window are not read.
    """
    if seqused_k is not None and seqused_k.dtype != torch.int32:
        seqused_k = seqused_k.int()  # descriptors take places of 32 bits
    return attend_to_cache(
        query,
        Cache(key, value, lengths=seqused_k),
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        sinks=sinks,
        options=options,
    )
