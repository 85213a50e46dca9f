"""Our FlashAttention-2-style kernel in Triton that skips fully masked key blocks.

The core gets the visible blocks of the mask, as in a model whose layers share a mask.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replay.kernels.constraints import (
    AnyCall,
    mask_or_causal,
    max_head_dim,
    no_dropout,
    up_to_float32,
)
from replay.kernels.libraries import TRITON
from replay.kernels.wrapping import at_once, register_adapted


def _has_mask(call: AnyCall) -> str | None:
    return "takes calls with an attn_mask only" if call.attn_mask is None else None


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    from attention_kernels.portable.masked_prefill import masked_prefill, visited_blocks_of

    mask = call.attn_mask
    assert mask is not None
    visited = visited_blocks_of(call.query, call.value, mask)
    return lambda: masked_prefill(
        call.query, call.key, call.value, mask, scale=call.scale, visited=visited
    )


register_adapted(
    "triton-masked",
    TRITON,
    at_once(_prepare),
    (no_dropout, up_to_float32, max_head_dim(256), _has_mask, mask_or_causal),
    "ours: FlashAttention 2 in Triton, which skips the blocks that a mask hides",
    prepare=_prepare,
)
