"""xFormers: `xformers.ops.memory_efficient_attention`, which chooses among its own kernels.

The function takes BSHD, grouped heads as views with a fifth dimension, and a mask as a bias of the
query's dtype. It also takes the library's own masks: `LowerTriangularMask`, aligned top left like
SDPA's causal mask, and others for bottom right, windows and packed sequences (`BlockDiagonalMask`).
A bool mask becomes a bias inside the timed call. Bias rows must be aligned to 8 elements, so an
unaligned slice of a larger mask is copied. A mask whose number of keys is not a multiple of 8 is
refused, not padded.

Windows run only on the library's FlashAttention; everything else also runs on PyTorch's efficient
kernel. Without its compiled part, the library can be imported but refuses every call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall, all_of
from replay.kernels.layout import bshd, contiguous_bshd, in_layout
from replay.kernels.libraries import Library
from replay.kernels.wrapping import register_adapted

LIBRARY = Library(
    module="xformers.ops",
    package="xformers",
    install="pip install xformers",
    functions=("memory_efficient_attention", "LowerTriangularMask"),
    runs_on=lambda capability: capability >= (7, 0),
    needs="7.0 or higher",
)


_flash_only = all_of(limits.half_precision, limits.same_value_dim, limits.max_head_dim(256))


def _unavailable(device: torch.device) -> str | None:
    if reason := LIBRARY.unavailable(device):
        return reason
    error = importlib.import_module("xformers._cpp_lib")._cpp_library_load_exception
    if error is None:
        return None
    reason = str(error.__cause__ or error).partition("\n")[0]
    return f"its compiled part cannot be loaded: {reason}"


def _window_of_flash(call: AttentionCall) -> str | None:
    if call.variant.window == (None, None) or call.cu_seqlens_q is not None:
        return None
    reason = _flash_only(call)
    return None if reason is None else f"a window with {reason}"


def _enough_keys(call: AttentionCall) -> str | None:
    """Refuse causal packed sequences with fewer keys than queries; wait for the GPU to find out."""
    offsets_q, offsets_k = call.cu_seqlens_q, call.cu_seqlens_k
    if offsets_q is None or offsets_k is None:
        return None
    if not call.is_causal and call.variant.window == (None, None):
        return None
    if bool((offsets_k.diff() >= offsets_q.diff()).all()):
        return None
    return "causal packed sequences with fewer keys than queries"


def _aligned_mask(call: AttentionCall) -> str | None:
    if call.attn_mask is None or call.shape.kv_len % 8 == 0:
        return None
    return f"attn_mask over {call.shape.kv_len} keys: needs a multiple of 8"


def _causal_packed_window(call: AnyCall) -> str | None:
    left, right = call.variant.window
    if call.cu_seqlens_q is None or (left, right) == (None, None):
        return None
    if left is not None and (call.is_causal or right == 0):
        return None
    return "a window over packed sequences that is not causal"


def _structure(call: AnyCall) -> object:
    """Return the library's mask for causality, window and sequences; None if keys are unlimited."""
    module: Any = LIBRARY.load()
    left, right = call.variant.window
    is_causal = call.is_causal or right == 0
    if reason := _causal_packed_window(call):
        raise NotImplementedError(reason)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        blocks = module.fmha.attn_bias.BlockDiagonalMask.from_seqlens(
            call.cu_seqlens_q.diff().tolist(),
            call.cu_seqlens_k.diff().tolist(),
            device=call.query.device,
        )
        if left is not None:
            return blocks.make_local_attention_from_bottomright(left + 1)
        return blocks.make_causal_from_bottomright() if is_causal else blocks
    if (left, right) != (None, None):
        farthest = call.query.shape[2] + call.key.shape[2]
        return module.fmha.attn_bias.LocalAttentionFromBottomRightMask(
            window_left=farthest if left is None else left,
            window_right=0 if is_causal else farthest if right is None else right,
        )
    if not is_causal:
        return None
    if call.variant.bottom_right:
        return module.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    return module.LowerTriangularMask()


def _bias(call: AnyCall) -> object:
    """Return the mask as (B, Hq, Sq, Sk) in the query's dtype, as a view if possible."""
    if (structure := _structure(call)) is not None:
        return structure
    mask, dtype = call.attn_mask, call.query.dtype
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        mask = bias.masked_fill_(~mask, -torch.inf)
    mask = mask.to(dtype)
    odd_stride = mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1])
    if odd_stride or mask.data_ptr() % 16:
        mask = mask.clone(memory_format=torch.contiguous_format)
    return mask.expand(*call.query.shape[:3], call.key.shape[2])


def _grouped(call: Arguments, bias: object) -> tuple[Tensor, Tensor, Tensor, object]:
    """Return BSHD tensors and a bias, with grouped heads as (B, S, key heads, group, D)."""
    query, key, value = call.query, call.key, call.value
    kv_heads = key.shape[2]
    if query.shape[2] == kv_heads:
        return query, key, value, bias
    query = query.unflatten(2, (kv_heads, -1))
    group = query.shape[3]
    key, value = (each[:, :, :, None].expand(-1, -1, -1, group, -1) for each in (key, value))
    if isinstance(bias, Tensor):
        bias = bias.unflatten(1, (kv_heads, -1))
    return query, key, value, bias


def _run(query: Tensor, key: Tensor, value: Tensor, bias: object, scale: float | None) -> Tensor:
    output = LIBRARY.load().memory_efficient_attention(
        query, key, value, attn_bias=bias, scale=scale
    )
    return (output.flatten(2, 3) if output.ndim == 5 else output).transpose(1, 2)


def _attend(call: Arguments) -> Tensor:
    return _run(*_grouped(in_layout(call, bshd), _bias(call)), call.scale)


def _prepare(call: AttentionCall) -> Callable[[], Tensor]:
    arguments = _grouped(in_layout(call, contiguous_bshd), _bias(call))
    return lambda: _run(*arguments, call.scale)


register_adapted(
    "xformers",
    LIBRARY,
    _attend,
    (
        limits.no_dropout,
        limits.up_to_float32,
        limits.mask_or_causal,
        limits.multiple_of_8,
        _aligned_mask,
        limits.mask_alone,
        limits.window_only_square,
        _causal_packed_window,
        _window_of_flash,
        _enough_keys,
    ),
    "xFormers' memory_efficient_attention",
    prepare=_prepare,
    unavailable=_unavailable,
    features=("bottom-right", "window", "packed"),
    prefers_rewritten_mask=True,
    differentiable=True,
)
