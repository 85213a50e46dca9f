"""Our prefill with 8-bit operands: `triton-sage`, `triton-fp8` and `triton-sage-fp8`.

`triton-sage` is SageAttention 1's arithmetic (INT8 QKᵀ with K smoothing, PV in the call's own 16
bits), `triton-fp8` has both products in FP8, `triton-sage-fp8` INT8 QKᵀ and FP8 PV. With
`[smooth_k=off]` the key's mean stays where it is. The drop-in quantises key and value with every
call, the core is the attention kernel on what is quantised already (it quantises the query itself).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import all_of, half_precision, max_head_dim, no_dropout, no_mask
from replay.kernels.layout import refuse
from replay.kernels.library import TRITON_INSTALL, is_interpreted, triton_unavailable
from replay.kernels.registry import Kernel, register


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    score_dtype: torch.dtype,
    fp8_value: bool,
    smooth_k: bool,
) -> Tensor:
    from replay.kernels.triton.quantised_prefill import quantised_prefill

    refuse(attn_mask, dropout_p)
    return quantised_prefill(
        query,
        key,
        value,
        is_causal,
        scale=scale,
        score_dtype=score_dtype,
        fp8_value=fp8_value,
        smooth_k=smooth_k,
    )


def _prepare(
    call: AttentionCall, score_dtype: torch.dtype, fp8_value: bool, smooth_k: bool
) -> Callable[[], Tensor]:
    from replay.kernels.triton.quantise import quantise_key_value
    from replay.kernels.triton.quantised_prefill import attend

    quantised = quantise_key_value(call.key, call.value, score_dtype, fp8_value, smooth_k)
    return lambda: attend(call.query, quantised, call.is_causal, scale=call.scale)


def _fp8_unavailable(device: torch.device) -> str | None:
    reason = triton_unavailable(device)
    if reason is None and not is_interpreted():
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            here = ".".join(map(str, capability))
            reason = f"FP8 needs compute capability 8.9 or newer (this GPU has {here})"
    return reason


def _register(
    base: str, score_dtype: torch.dtype, fp8_value: bool, about: str, smooth_k: bool
) -> None:
    options: dict[str, Any] = {
        "score_dtype": score_dtype,
        "fp8_value": fp8_value,
        "smooth_k": smooth_k,
    }
    is_int8_only = score_dtype == torch.int8 and not fp8_value
    register(
        Kernel(
            base if smooth_k else f"{base}[smooth_k=off]",
            partial(_run, **options),
            accuracy_class="quantised",
            unavailable=triton_unavailable if is_int8_only else _fp8_unavailable,
            unsupported=all_of(no_dropout, half_precision, no_mask, max_head_dim(256)),
            prepare=partial(_prepare, **options),
            default=smooth_k,
            about=f"ours: {about}",
            library="triton",
            install=TRITON_INSTALL,
            variant_of="" if smooth_k else base,
        )
    )


for _name, _score_dtype, _fp8_value, _about in (
    ("triton-sage", torch.int8, False, "INT8 QKᵀ, 16-bit PV"),
    ("triton-fp8", torch.float8_e4m3fn, True, "FP8 QKᵀ and PV"),
    ("triton-sage-fp8", torch.int8, True, "INT8 QKᵀ, FP8 PV"),
):
    _register(_name, _score_dtype, _fp8_value, _about, smooth_k=True)
    _register(_name, _score_dtype, _fp8_value, _about, smooth_k=False)
