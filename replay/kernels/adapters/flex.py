"""FlexAttention, compiled.

Causal masks, windows and sequences become a block mask. A block mask that depends only on lengths
and options is cached between calls, as in a model; a block mask of packed sequences is made for
every call. A recorded mask that is causal or a window becomes a block mask too. Any other mask
becomes part of the `score_mod`, because a block mask would have to be remade whenever the mask's
values change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, Window
from replay.kernels.compiled_functions import CompiledPerSignature, import_compiler
from replay.kernels.constraints import AnyCall, all_of, no_dropout, up_to_float32
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import at_once, drop_in

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key indices that returns True if the key is visible."""


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask | None,
    attn_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    options: object,
) -> Tensor:
    """Run FlexAttention; calls with other `options` of the block mask are compiled separately."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if attn_mask is None:
            return score
        if attn_mask.dtype == torch.bool:
            return torch.where(attn_mask[b, h, q, k], score, -float("inf"))
        return score + attn_mask[b, h, q, k]

    changed = score_mod if softcap is not None or attn_mask is not None else None
    if sinks is None:
        output = flex_attention(
            query, key, value, changed, block_mask, scale=scale, enable_gqa=enable_gqa
        )
        assert isinstance(output, Tensor)
        return output
    output, lse = flex_attention(
        query, key, value, changed, block_mask, scale, enable_gqa, return_lse=True
    )
    # A sink takes a share of the weights but has no value.
    return output * torch.sigmoid(lse - sinks[:, None])[..., None].to(output.dtype)


_compiled = CompiledPerSignature(cast(FunctionType, _flex))


def _on_diagonal(is_causal: bool, window: Window, shift: int | Tensor) -> Mod:
    left, right = window
    if is_causal:
        right = 0 if right is None else min(right, 0)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        diagonal = q + shift
        seen = k >= 0
        if left is not None:
            seen = seen & (k >= diagonal - left)
        if right is not None:
            seen = seen & (k <= diagonal + right)
        return seen

    return sees


@functools.lru_cache(maxsize=64)
def _block_mask(
    is_causal: bool, window: Window, shift: int, q_len: int, kv_len: int, device: torch.device
) -> BlockMask:
    sees = _on_diagonal(is_causal, window, shift)
    return create_block_mask(sees, None, None, q_len, kv_len, device=str(device))


def _block_mask_of_lengths(call: AnyCall) -> BlockMask:
    """Make the block mask of a call whose sequences have their own lengths."""
    q_len, kv_len, device = call.query.shape[2], call.key.shape[2], call.query.device
    window, bottom_right = call.variant.window, call.variant.bottom_right
    used = call.seqused_k
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        assert used is not None
        lengths = used.to(device)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            shift = lengths[b] - q_len if bottom_right else 0
            return (k < lengths[b]) & _on_diagonal(call.is_causal, window, shift)(b, h, q, k)

        return create_block_mask(sees, call.query.shape[0], None, q_len, kv_len, device=str(device))
    starts_q, starts_k = call.cu_seqlens_q.to(device), call.cu_seqlens_k.to(device)
    # Find the sequence of each token, so that queries see only keys of their own sequence.
    of_query, of_key = (
        torch.repeat_interleave(starts.diff(), output_size=total)
        for starts, total in ((starts_q, q_len), (starts_k, kv_len))
    )
    ends_k = starts_k[1:] if used is None else starts_k[:-1] + used.to(starts_k)
    shifts = starts_k[:-1] - starts_q[:-1]
    if bottom_right:
        shifts = ends_k - starts_q[1:]

    def sees_packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sequence = of_query[q]
        near = _on_diagonal(call.is_causal, window, shifts[sequence])(b, h, q, k)
        return (sequence == of_key[k]) & (k < ends_k[sequence]) & near

    return create_block_mask(sees_packed, None, None, q_len, kv_len, device=str(device))


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    query, key, value, variant = call.query, call.key, call.value, call.variant
    q_len, kv_len = query.shape[2], key.shape[2]
    block_mask, options = None, None
    if call.cu_seqlens_q is not None or call.seqused_k is not None:
        block_mask = _block_mask_of_lengths(call)
        options = (call.is_causal, variant.window, variant.bottom_right)
    elif call.is_causal or variant.window != (None, None):
        shift = kv_len - q_len if variant.bottom_right else 0
        block_mask = _block_mask(call.is_causal, variant.window, shift, q_len, kv_len, query.device)
        options = (call.is_causal, variant.window, variant.bottom_right)
    mask = call.attn_mask
    if mask is not None:
        mask = mask.expand(*query.shape[:3], kv_len)
    sinks, gqa = call.sinks, call.enable_gqa
    return lambda: _compiled(
        query, key, value, block_mask, mask, variant.softcap, sinks, call.scale, gqa, options
    )


def _sinks_on_gpu(call: AnyCall) -> str | None:
    if call.sinks is None or call.query.device.type != "cpu":
        return None
    return "attention sinks on a CPU: FlexAttention compiled for one returns no log-sum-exp"


def _some_keys(call: AnyCall) -> str | None:
    if call.key.shape[2]:
        return None
    return "a call without keys: FlexAttention compiled for a CPU divides by their number"


def _backward_on_gpu(call: AttentionCall) -> str | None:
    if call.grad_output is None or call.device.type != "cpu":
        return None
    return "has no backward on a CPU"


def _block_mask_is_kept(call: AnyCall) -> bool:
    """Return True if the block mask is made only once, as in a model."""
    return call.cu_seqlens_q is None and call.seqused_k is None


_limits = (no_dropout, up_to_float32, _sinks_on_gpu, _some_keys)
_KNOWN = FEATURES.keys() - {"paged", "scaled"}

register(
    Kernel(
        "flex",
        drop_in(at_once(_prepare), _limits, _KNOWN),
        unsupported=all_of(*_limits, _backward_on_gpu),
        about="FlexAttention under torch.compile",
        library="torch",
        features=frozenset(_KNOWN),
        differentiable=True,
        prefers_rewritten_mask=_block_mask_is_kept,
        warm_up=import_compiler,
    )
)
