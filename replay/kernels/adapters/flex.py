"""FlexAttention, compiled.

A causal call uses a block mask, which depends on the lengths alone and is kept between calls as a
model would. A recorded mask becomes a `score_mod`: its values are data, and building a block mask
from them would have to be repeated whenever they change.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from capture.hooks.interceptor import Arguments
from replay.kernels.adapter import drop_in
from replay.kernels.compiling import CompiledPerSignature
from replay.kernels.constraints import all_of, mask_or_causal, no_dropout, up_to_float32
from replay.kernels.registry import Kernel, register


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    output = flex_attention(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa
    )
    assert isinstance(output, Tensor)
    return output


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if attn_mask.dtype == torch.bool:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(attn_mask[b, h, q, k], score, -float("inf"))
    else:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + attn_mask[b, h, q, k]

    output = flex_attention(
        query, key, value, score_mod=score_mod, scale=scale, enable_gqa=enable_gqa
    )
    assert isinstance(output, Tensor)
    return output


_compiled_plain = CompiledPerSignature(cast(FunctionType, _plain))
_compiled_masked = CompiledPerSignature(cast(FunctionType, _masked))


@functools.lru_cache(maxsize=64)
def _causal_block_mask(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    return create_block_mask(causal, None, None, q_len, kv_len, device=str(device))


def _attend(call: Arguments) -> Tensor:
    query, key, value, attn_mask, _, is_causal, scale, enable_gqa = call
    if attn_mask is not None:
        mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return _compiled_masked(query, key, value, mask, scale, enable_gqa)
    block_mask = None
    if is_causal:
        block_mask = _causal_block_mask(query.shape[2], key.shape[2], query.device)
    return _compiled_plain(query, key, value, block_mask, scale, enable_gqa)


_limits = (no_dropout, mask_or_causal, up_to_float32)

register(
    Kernel(
        "flex",
        drop_in(_attend, _limits),
        unsupported=all_of(*_limits),
        about="FlexAttention under torch.compile",
        library="torch",
    )
)
