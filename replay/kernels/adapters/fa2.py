"""FlashAttention 2: the package `flash-attn` (`flash_attn.flash_attn_func` and its siblings).

It takes BSHD, fewer key heads than query heads, a scale, and a causal mask aligned bottom right
(SDPA's is top left, so causal calls need as many queries as keys). It takes no mask; `fa2-varlen`
and `fa2-kvcache` serve those that only hide padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import (
    all_of,
    causal_only_square,
    decode_only,
    half_precision,
    mask_or_causal,
    max_head_dim,
    multiple_of_8,
    needs_padding,
    no_dropout,
    no_mask,
    padding_mask_only,
    same_value_dim,
)
from replay.kernels.layout import Packed, on_bshd, padding_keys, refuse, unit_stride
from replay.kernels.library import Library
from replay.kernels.registry import Kernel, register

LIBRARY = Library(
    module="flash_attn",
    package="flash-attn",
    install="pip install flash-attn --no-build-isolation",
    functions=("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    series=2,
)

_limits = (no_dropout, half_precision, same_value_dim, max_head_dim(256), multiple_of_8)


def _run(query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool) -> Tensor:
    return LIBRARY.load().flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal)


def _run_packed(packed: Packed, scale: float | None) -> Tensor:
    output = LIBRARY.load().flash_attn_varlen_func(
        packed.query_THD,
        packed.key_THD,
        packed.value_THD,
        packed.q_offsets,
        packed.k_offsets,
        packed.longest_query,
        packed.longest_key,
        softmax_scale=scale,
        causal=False,
    )
    return packed.unpack(output)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`flash_attn_varlen_func` on a padded batch, packing included."""
    refuse(None, dropout_p)
    if attn_mask is None or is_causal:
        raise NotImplementedError("this kernel is for padding masks")
    return _run_packed(Packed.of(query, key, value, attn_mask), scale)


def _prepare_varlen(call: AttentionCall) -> Callable[[], Tensor]:
    assert call.attn_mask is not None
    packed = Packed.of(call.query, call.key, call.value, call.attn_mask)
    return lambda: _run_packed(packed, call.scale)


def _run_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    is_causal: bool,
    keys: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`keys` is where the keys of each batch element begin and end; None for all of them."""
    limits = {} if keys is None else {"cache_leftpad": keys[0], "cache_seqlens": keys[1]}
    return LIBRARY.load().flash_attn_with_kvcache(
        query, key, value, softmax_scale=scale, causal=is_causal, **limits
    )


def _begin_and_end(keys: Tensor) -> tuple[Tensor, Tensor]:
    begin = keys.to(torch.int32).argmax(dim=1).to(torch.int32)
    return begin, begin + keys.sum(dim=1, dtype=torch.int32)


def kvcache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`flash_attn_with_kvcache`: one new query over a cache, split over keys."""
    refuse(None, dropout_p)
    keys = None
    if attn_mask is not None:
        keys = _begin_and_end(padding_keys(attn_mask, query.shape[0], key.shape[2]))
    query, key, value = (unit_stride(each).transpose(1, 2) for each in (query, key, value))
    return _run_cached(query, key, value, scale, is_causal, keys).transpose(1, 2)


def _prepare_kvcache(call: AttentionCall) -> Callable[[], Tensor]:
    keys, mask = None, call.attn_mask
    if mask is not None:
        keys = _begin_and_end(padding_keys(mask, call.shape.batch, call.shape.kv_len))
    query, key, value = (
        each.transpose(1, 2).contiguous() for each in (call.query, call.key, call.value)
    )
    return lambda: _run_cached(query, key, value, call.scale, call.is_causal, keys).transpose(1, 2)


_attention, _prepare = on_bshd(_run)
register(
    Kernel(
        "fa2",
        _attention,
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(*_limits, no_mask, causal_only_square),
        prepare=_prepare,
        about="FlashAttention 2",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
register(
    Kernel(
        "fa2-varlen",
        varlen,
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(*_limits, mask_or_causal, needs_padding),
        prepare=_prepare_varlen,
        about="FlashAttention 2 on a padded batch, packed by its padding mask",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
register(
    Kernel(
        "fa2-kvcache",
        kvcache,
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(
            *_limits, decode_only, mask_or_causal, causal_only_square, padding_mask_only
        ),
        prepare=_prepare_kvcache,
        about="FlashAttention 2's decode over a key/value cache",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
