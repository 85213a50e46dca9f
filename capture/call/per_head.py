"""Tensors with one number per head: sinks, and the scales of 8-bit tensors.

The true value of an 8-bit element is the stored number times the scale of its key/value head. A
query has the scale of the key/value head that it attends to, as FlashAttention's `q_descale`.
Engines that keep one scale per tensor repeat it for each head.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

SCALES = {"query": "query_scale", "key": "key_scale", "value": "value_scale"}
"""Field of the scale of each tensor."""
PER_HEAD = ("sinks", *SCALES.values())


def numbers_of_heads(tensors: Mapping[str, Tensor], heads: Any, kv_heads: Any) -> dict[str, Any]:
    """Return a call's sinks and scales for some heads, by field name.

    Args:
        tensors: the call's tensors, by field name.
        heads: index of the query heads: a slice, a list or a tensor.
        kv_heads: index of the key/value heads that these query heads attend to.
    """
    index = {"sinks": heads, **dict.fromkeys(SCALES.values(), kv_heads)}
    return {name: tensors[name][index[name]] for name in PER_HEAD if name in tensors}


def scaled_text(given: Container[str], dtype: str) -> str:
    """Return `scaled key and value (int8)`; empty if none of a call's tensors is a scale.

    Args:
        given: names of the call's tensors.
        dtype: dtype of the key.
    """
    names = [name for name, scale in SCALES.items() if scale in given]
    return f"scaled {' and '.join(names)} ({dtype})" if names else ""


def true_values(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the true values of a tensor in `dtype`.

    Args:
        stored: (…, H, S, D).
        scale: float32 (Hkv,), where H is a multiple of Hkv; None if the stored values are true.
    """
    if scale is None:
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    factors = scale.to(wide).repeat_interleave(stored.shape[-3] // scale.shape[0])
    return (stored.to(wide) * factors[:, None, None]).to(dtype)
