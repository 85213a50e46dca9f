"""FlashAttention-2-style attention for any call without dropout whose sequences are not packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.portable.forward import forward


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
) -> Any:
    """Return softmax(scale · QKᵀ + mask) · V, for tensors of any strides without a copy.

    A query whose keys are all masked gets zeros, as in SDPA. A NaN or an infinity spreads as in
    SDPA's fused backends: blocks beyond the diagonal are not read, so a NaN beyond the diagonal
    affects at most queries of tiles that read its block.

    Args:
        query: (B, Hq, Sq, D) in float16, bfloat16, or float32 (slow: no tensor cores).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); Hq is a multiple of Hkv. D and Dv are at
            most 256.
        attn_mask: broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added).
        is_causal: aligned top left, unless `options` specifies bottom right. An `attn_mask` applies
            in addition.
        scale: factor of the scores; None for 1/√D.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom right, window and soft cap. Blocks of keys outside the window are not read.
        return_lse: return a tuple of the output and the natural logarithm of each row's sum of
            exponentials, (B, Hq, Sq) float32, sinks included; -inf where every key is masked.

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    lengths = Lengths("full", query.shape[0], query.shape[2])
    output, lse = forward(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        lengths,
        return_lse,
        options=options,
        sinks=sinks,
    )
    return output if lse is None else (output, lse)
