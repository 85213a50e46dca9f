"""Our decode over a key/value cache in 8 bits: `triton-decode-int8` and `triton-decode-fp8`.

The core reads a cache that is in 8 bits already, as a server has it. The drop-in, which gets 16
bits, quantises all of it with every call and so takes longer than decode in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.hooks.interceptor import Arguments
from capture.variant import FEATURES
from replay.kernels.adapters.triton_decode import DECODE_LIMITS
from replay.kernels.adapters.triton_quantised import FP8_LIBRARY
from replay.kernels.library import TRITON
from replay.kernels.registry import register
from replay.kernels.wrapping import adapt


def _attend(call: Arguments, dtype: torch.dtype) -> Tensor:
    from replay.kernels.triton.quantised_decode import quantised_decode

    return quantised_decode(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.is_causal,
        dtype=dtype,
        scale=call.scale,
        seqused_k=call.seqused_k,
        sinks=call.sinks,
        variant=call.variant,
    )


def _prepare(call: AttentionCall, dtype: torch.dtype) -> Callable[[], Tensor]:
    from replay.kernels.triton.quantised_cache import quantise_cache
    from replay.kernels.triton.split_kv import attend

    cache = quantise_cache(call.key, call.value, dtype, lengths=call.seqused_k)
    return lambda: attend(
        call.query,
        cache,
        attn_mask=call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        sinks=call.sinks,
        variant=call.variant,
    )


for _name, _dtype, _library, _about in (
    ("triton-decode-int8", torch.int8, TRITON, "INT8"),
    ("triton-decode-fp8", torch.float8_e4m3fn, FP8_LIBRARY, "FP8"),
):
    register(
        adapt(
            _name,
            _library,
            partial(_attend, dtype=_dtype),
            DECODE_LIMITS,
            f"ours: decode in Triton over a key/value cache in {_about}",
            prepare=partial(_prepare, dtype=_dtype),
            accuracy_class="quantised",
            features=FEATURES.keys() - {"packed", "paged"},
            prefers_restated=True,
        )
    )
