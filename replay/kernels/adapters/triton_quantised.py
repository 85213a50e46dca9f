"""Our prefill with 8-bit operands: `triton-sage`, `triton-fp8` and `triton-sage-fp8`.

`triton-sage` has SageAttention 1's arithmetic (INT8 QKᵀ with K smoothing, PV in the call's own 16
bits), `triton-fp8` has both products in FP8, and `triton-sage-fp8` has INT8 QKᵀ and FP8 PV. With
`[smooth_k=off]` no mean is subtracted from the keys. PV in FP8 is summed in float32 from block to
block, or with `[accum=tensor]` in the tensor cores, as in FlashAttention 3 and cuDNN. The drop-in
quantises key and value at every call. The core gets quantised keys and values and the visible
blocks of the mask, and quantises only the query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.kernel_options import kernel_options
from replay.kernels.libraries import TRITON, imported
from replay.kernels.wrapping import register_adapted

MODULE = "attention_kernels.quantised.quantised_prefill"
SMOOTH_OFF, TENSOR = "[smooth_k=off]", "[accum=tensor]"

FP8_LIBRARY = replace(
    TRITON, runs_on=lambda capability: capability >= (8, 9), needs="8.9 or higher"
)


def _attend(call: Arguments, **options: Any) -> Tensor:
    return imported(MODULE, "quantised_prefill")(
        call.query,
        call.key,
        call.value,
        call.is_causal,
        scale=call.scale,
        options=kernel_options(call.variant),
        sinks=call.sinks,
        attn_mask=call.attn_mask,
        lengths=_lengths_of(call),
        **options,
    )


def _lengths_of(call: AnyCall) -> Any:
    """Return the lengths of a call's sequences; None if the call has no lengths.

    The function waits for the GPU if the call does not state its longest packed sequence.
    """
    offsets, used = call.cu_seqlens_q, call.seqused_k
    if offsets is None and used is None:
        return None
    from attention_kernels.options import Lengths

    if offsets is None:
        return Lengths("padded", call.query.shape[0], call.query.shape[2], k_lengths=used)
    longest = call.variant.max_seqlen_q
    longest = int(offsets.diff().max()) if longest is None else longest
    return Lengths("packed", offsets.shape[0] - 1, longest, offsets, call.cu_seqlens_k, used)


def _prepare(
    call: AttentionCall,
    score_dtype: torch.dtype,
    fp8_value: bool,
    smooth_k: bool,
    in_tensor_cores: bool,
) -> Callable[[], Tensor]:
    from attention_kernels.quantised.quantise import quantise_key_value
    from attention_kernels.quantised.quantised_prefill import (
        attend_to_quantised,
        quantised_prefill,
        visited_blocks_of,
    )

    if not (call.query.numel() and call.key.numel()):
        return lambda: quantised_prefill(
            call.query, call.key, call.value, score_dtype=score_dtype, fp8_value=fp8_value
        )
    keep_mean = call.variant.softcap is not None or call.sinks is not None
    quantised = quantise_key_value(
        call.key, call.value, score_dtype, fp8_value, smooth_k, keep_mean, _lengths_of(call)
    )
    mask = call.attn_mask
    visited = None if mask is None else visited_blocks_of(call.query, quantised, mask)
    return lambda: attend_to_quantised(
        call.query,
        quantised,
        call.is_causal,
        scale=call.scale,
        options=kernel_options(call.variant),
        sinks=call.sinks,
        in_tensor_cores=in_tensor_cores,
        attn_mask=mask,
        visited=visited,
    )


def _register(
    base: str, score_dtype: torch.dtype, fp8_value: bool, about: str, variant: str = ""
) -> None:
    options: dict[str, Any] = {
        "score_dtype": score_dtype,
        "fp8_value": fp8_value,
        "smooth_k": variant != SMOOTH_OFF,
        "in_tensor_cores": variant == TENSOR,
    }
    is_fp8 = fp8_value or score_dtype == torch.float8_e4m3fn
    register_adapted(
        base + variant,
        FP8_LIBRARY if is_fp8 else TRITON,
        partial(_attend, **options),
        (
            limits.no_dropout,
            limits.half_precision,
            limits.bool_mask_only,
            limits.mask_or_causal,
            limits.mask_alone,
            limits.max_head_dim(256),
            limits.no_huge_softcap,
        ),
        f"ours: {about}",
        prepare=partial(_prepare, **options),
        accuracy_class="quantised",
        features=FEATURES.keys() - {"paged", "scaled"},
        prefers_rewritten_mask=True,
        variant_of=base if variant else "",
    )


for _name, _score_dtype, _fp8_value, _about in (
    ("triton-sage", torch.int8, False, "INT8 QKᵀ, 16-bit PV"),
    ("triton-fp8", torch.float8_e4m3fn, True, "FP8 QKᵀ and PV"),
    ("triton-sage-fp8", torch.int8, True, "INT8 QKᵀ, FP8 PV"),
):
    for _variant in ("", SMOOTH_OFF, *((TENSOR,) if _fp8_value else ())):
        _register(_name, _score_dtype, _fp8_value, _about, _variant)
