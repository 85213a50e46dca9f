"""Our decode over a key/value cache in 8 bits: `triton-decode-int8` and `triton-decode-fp8`.

The core reads a cache that is already in 8 bits, as in a server. The drop-in gets a 16-bit cache
and quantises the whole cache at every call, so it takes longer than decode in 16 bits. The cache of
`triton-paged-decode-int8` and `triton-paged-decode-fp8` has pages of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES
from capture.hooks.interceptor import Arguments
from replay.kernels.adapters.triton_decode import DECODE_LIMITS
from replay.kernels.adapters.triton_quantised import FP8_LIBRARY
from replay.kernels.kernel_options import kernel_options
from replay.kernels.libraries import TRITON
from replay.kernels.wrapping import register_adapted


def _attend(call: Arguments, dtype: torch.dtype, in_pages: bool) -> Tensor:
    from attention_kernels.decode.quantised_decode import quantised_decode

    return quantised_decode(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.is_causal,
        dtype=dtype,
        in_pages=in_pages,
        scale=call.scale,
        seqused_k=call.seqused_k,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )


def _prepare(call: AttentionCall, dtype: torch.dtype, in_pages: bool) -> Callable[[], Tensor]:
    from attention_kernels.decode.quantised_cache import quantise_cache
    from attention_kernels.decode.quantised_decode import quantised_decode, random_pages
    from attention_kernels.decode.split_kv import attend_to_cache

    if not (call.query.numel() and call.key.numel()):
        return lambda: quantised_decode(call.query, call.key, call.value, dtype=dtype)
    table = random_pages(call.key) if in_pages else None
    cache = quantise_cache(call.key, call.value, dtype, lengths=call.seqused_k, block_table=table)
    return lambda: attend_to_cache(
        call.query,
        cache,
        attn_mask=call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )


for _name, _dtype, _library, _about, _in_pages in (
    ("triton-decode-int8", torch.int8, TRITON, "INT8", False),
    ("triton-decode-fp8", torch.float8_e4m3fn, FP8_LIBRARY, "FP8", False),
    ("triton-paged-decode-int8", torch.int8, TRITON, "INT8, in shuffled pages of 128 keys", True),
    ("triton-paged-decode-fp8", torch.float8_e4m3fn, FP8_LIBRARY, "FP8, in such pages", True),
):
    register_adapted(
        _name,
        _library,
        partial(_attend, dtype=_dtype, in_pages=_in_pages),
        DECODE_LIMITS,
        f"ours: decode in Triton over a key/value cache in {_about}",
        prepare=partial(_prepare, dtype=_dtype, in_pages=_in_pages),
        accuracy_class="quantised",
        features=FEATURES.keys() - {"packed", "paged", "scaled"},
        prefers_rewritten_mask=True,
    )
