"""Attention of a few query tokens over contiguous keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.split_kv import PlannedDecode, attend_to_cache, planned_call
from attention_kernels.launch.launcher import PlanCache, layout
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
    return_lse: bool = False,
) -> Any:
    """Return softmax(scale · QKᵀ + mask) · V for a short query, as a contiguous (B, Hq, Sq, Dv).

    Any Sq gives correct results. A key head has Hq / Hkv · Sq rows. Its keys are read once for
    every 64 rows, so with more rows a prefill kernel is faster.

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, D ≤ 256, any strides; Hq a multiple of Hkv.
        key: (B, Hkv, Sk, D), dtype and device of the query, any strides.
        value: (B, Hkv, Sk, Dv), like the key.
        attn_mask: broadcasts to (B, Hq, Sq, Sk); bool (True = attend) or float (added). A query
            whose keys are all masked gets zeros.
        is_causal: query i sees keys 0 to i (top left), unless `options` specifies bottom right.
            With top left, keys beyond the first Sq are not read, so a NaN in them has no effect.
        scale: factor of the scores; None for 1/√D.
        seqused_k: (B,) int32, number of valid keys, counted from the first; None for all.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom right, window and soft cap. Keys before the first query's window are not
            read.
        return_lse: as for `attend_to_cache`.
    """
    if seqused_k is not None and seqused_k.dtype != torch.int32:
        seqused_k = seqused_k.int()  # descriptors take 32-bit coordinates
    return attend_to_cache(
        query,
        Cache(key, value, lengths=seqused_k),
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        sinks=sinks,
        options=options,
        return_lse=return_lse,
    )


class DecodeOfShape:
    """`contiguous_decode` for calls whose query, key, value and mask have given shapes, types and
    devices.

    Only strides and addresses may differ, so looking up the plan of a call takes the host half as
    long as for any call.
    """

    def __init__(
        self, is_causal: bool, scale: float | None, options: AttentionOptions, return_lse: bool
    ) -> None:
        self._given = is_causal, scale, options, return_lse
        self._plans: PlanCache[PlannedDecode] = PlanCache()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        sinks: Tensor | None,
    ) -> Any:
        key_address, value_address = key.data_ptr(), value.data_ptr()
        layouts = (
            query.stride(),
            key.stride(),
            value.stride(),
            None if attn_mask is None else attn_mask.stride(),
            None if sinks is None else layout(sinks),
            (key_address | value_address) % 16 == 0,
            key_address == value_address,
        )
        planned = self._plans.get(layouts)
        if planned is None:
            is_causal, scale, options, return_lse = self._given
            if query.numel() == 0:
                return contiguous_decode(query, key, value, options=options, return_lse=return_lse)
            planned = planned_call(
                query,
                Cache(key, value),
                attn_mask,
                is_causal,
                scale,
                sinks,
                options,
                None,
                return_lse,
            )
            self._plans.keep(layouts, planned)
        return planned.run(query, key, value, attn_mask, sinks)
