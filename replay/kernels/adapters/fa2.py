"""FlashAttention 2: the package `flash-attn` (`flash_attn.flash_attn_func` and related functions).

The library supports BSHD, fewer key heads than query heads, a scale, a window, a soft cap, and a
causal mask aligned bottom right (SDPA aligns top left, so SDPA's causal calls need as many queries
as keys). It takes no mask, but `fa2-varlen` and `fa2-kvcache` convert padding masks. `fa2-varlen`
also supports packed sequences, `fa2-kvcache` supports key lengths, and both support keys in pages
whose size is a multiple of 256.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.flash_attention import KNOWN, options, varlen_arguments
from replay.kernels.layout import (
    Packed,
    bshd,
    contiguous_bshd,
    in_layout,
    on_bshd,
    on_packed,
    padding_keys,
)
from replay.kernels.libraries import Library
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="flash_attn",
    package="flash-attn",
    install="pip install flash-attn --no-build-isolation",
    functions=("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    series=2,
)

PAGE_SIZE = 256
"""Number of keys that every page size must be a multiple of."""

_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.same_value_dim,
    limits.max_head_dim(256),
    limits.multiple_of_8,
)


def _run(call: Arguments) -> Tensor:
    return LIBRARY.load().flash_attn_func(call.query, call.key, call.value, **options(call))


def _run_varlen(call: AnyCall, packed: Packed) -> Tensor:
    arguments = varlen_arguments(call, packed)
    if packed.page_table is not None:  # pass key lengths as offsets, even with pages
        lengths = arguments.pop("seqused_k").cumsum(0, dtype=torch.int32)
        arguments["cu_seqlens_k"] = torch.nn.functional.pad(lengths, (1, 0))
        arguments["block_table"] = arguments.pop("page_table")
    return LIBRARY.load().flash_attn_varlen_func(**arguments)


def _key_limits(call: AnyCall) -> dict[str, Tensor]:
    """Return arguments for the start and end of each batch element's keys, and for the pages."""
    if call.seqused_k is not None:
        pages = {} if call.page_table is None else {"block_table": call.page_table}
        return {"cache_seqlens": call.seqused_k, **pages}
    keys = padding_keys(call)
    if keys is None:
        return {}
    begin = keys.to(torch.int32).argmax(dim=1).to(torch.int32)
    end = begin + keys.sum(dim=1, dtype=torch.int32)
    return {"cache_leftpad": begin, "cache_seqlens": end}


def _run_cached(call: Arguments, key_limits: dict[str, Tensor]) -> Tensor:
    """Run `flash_attn_with_kvcache`: few new queries over a cache, with work split over keys."""
    output = LIBRARY.load().flash_attn_with_kvcache(
        call.query, call.key, call.value, **options(call), **key_limits
    )
    return output.transpose(1, 2)


def _attend_cached(call: Arguments) -> Tensor:
    return _run_cached(in_layout(call, bshd), _key_limits(call))


def _prepare_cached(call: AttentionCall) -> Callable[[], Tensor]:
    laid_out, key_limits = in_layout(call, contiguous_bshd), _key_limits(call)
    return lambda: _run_cached(laid_out, key_limits)


_attend, _prepare = on_bshd(_run)
_prepare_varlen = on_packed(_run_varlen)
register_adapted(
    "fa2",
    LIBRARY,
    _attend,
    (*_limits, limits.no_mask, limits.causal_only_square),
    "FlashAttention 2",
    prepare=_prepare,
    features=KNOWN,
    differentiable=True,
)
register_adapted(
    "fa2-varlen",
    LIBRARY,
    at_once(_prepare_varlen),
    (*_limits, *limits.PADDED_OR_PACKED, limits.page_size_multiple_of(PAGE_SIZE)),
    "FlashAttention 2 on packed sequences, and on padded batches, packed by their mask",
    prepare=_prepare_varlen,
    features=(*KNOWN, "packed", "paged"),
    differentiable=True,
)
register_adapted(
    "fa2-kvcache",
    LIBRARY,
    _attend_cached,
    (
        *_limits,
        limits.decode_or_key_lengths,
        limits.mask_or_causal,
        limits.mask_alone,
        limits.causal_only_square,
        limits.padding_mask_only,
        limits.page_size_multiple_of(PAGE_SIZE),
    ),
    "FlashAttention 2's decode over a key/value cache",
    prepare=_prepare_cached,
    features=(*KNOWN, "key-lengths", "paged"),
    packed_decode=True,
)
