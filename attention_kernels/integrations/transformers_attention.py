"""Attention of transformers' models: `attn_implementation="attention_kernels"`.

The masks are made by transformers' function for SDPA, so a model gets the same masks as with SDPA:
padding, packed sequences, chunks, sliding windows, static and sliding caches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from attention_kernels.integrations import NAME, PRECISIONS
from attention_kernels.operators import attention
from attention_kernels.options import PLAIN, AttentionOptions


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, precision in PRECISIONS.items():
        AttentionInterface.register(name, partial(attention_forward, precision=precision))
        AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    precision: str = "exact",
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output (B, Sq, Hq, Dv) of a layer, and no weights.

    Args:
        query: (B, Hq, Sq, D).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), not repeated for the query heads.
        attention_mask: (B, 1, Sq, Sk) bool (True = attend) or float (added). None for all keys, or
            for a causal mask from the top left if the module is causal and there are several
            queries.
        others: ignored, like the sliding window, which is part of the mask.

    Raises:
        NotImplementedError: the call has a position bias or a paged cache, or is refused by
            `attention_kernels.attention`.
    """
    for name in ("position_bias", "cache"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{NAME} takes no {name}: use attn_implementation='sdpa'")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    output = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        bool(is_causal) and query.shape[2] > 1 and attention_mask is None,
        scaling,
        enable_gqa=True,
        precision=precision,
        sinks=s_aux,
        options=PLAIN if softcap is None else AttentionOptions(softcap=softcap),
    )
    return output.transpose(1, 2).contiguous(), None
