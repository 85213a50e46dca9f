"""SageAttention 1 (`sageattention` 1.x, Triton): INT8 QKᵀ, float16 PV, one scale per block.

`sageattention.sageattn` with `tensor_layout="HND"`, which is SDPA's BHSD. By default, the function
subtracts the mean over the sequence from the key **in place**. The adapter does not hide this, and
the row reports it (`changed_inputs`): in a language model the key is the cache, so the generated
text becomes wrong. `smooth_k=off` keeps the key unchanged. The function supports no mask. Causal
calls need as many queries as keys, and head_dim must be 64, 96 or 128.

Version 1.0.6 does not mask the end of the last block of keys in non-causal calls: unless the number
of keys is a multiple of 64, each missing key counts in the softmax like a key of score 0. With 130
keys the relative L1 error is 0.22 instead of 0.01; with more keys the difference is smaller.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.layout import on_bhsd, unit_stride
from replay.kernels.libraries import Library
from replay.kernels.wrapping import register_adapted

LIBRARY = Library(
    module="sageattention",
    package="sageattention",
    install="pip install sageattention==1.0.6",
    functions=("sageattn",),
    series=1,
)


def _run(call: Arguments, smooth_k: bool) -> Tensor:
    return LIBRARY.load().sageattn(
        call.query,
        call.key,
        call.value,
        tensor_layout="HND",
        is_causal=call.is_causal,
        sm_scale=call.scale,
        smooth_k=smooth_k,
    )


def _prepare(call: AttentionCall, smooth_k: bool) -> Callable[[], Tensor]:
    """Prepare the Triton kernel alone, with quantised query and key and the value in float16."""
    LIBRARY.load()
    core = importlib.import_module("sageattention.core")
    query, key, value = (unit_stride(each) for each in (call.query, call.key, call.value))
    if smooth_k:
        key = key - key.mean(dim=2, keepdim=True)
    if call.shape.head_dim == 96:
        quantise, plain, causal = core.per_block_int8_hd96, core.attn_h96_false, core.attn_h96_true
    else:
        quantise, plain, causal = core.per_block_int8, core.attn_false, core.attn_true
    # (query, its scales, key, its scales)
    quantised = quantise(query, key, sm_scale=call.softmax_scale, tensor_layout="HND")
    query_int8, q_scale, key_int8, k_scale = quantised
    value_fp16 = value.to(torch.float16)
    run = causal if call.is_causal else plain
    return lambda: run(
        query_int8,
        key_int8,
        value_fp16,
        q_scale,
        k_scale,
        tensor_layout="HND",
        output_dtype=call.dtype,
    )


_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.no_mask,
    limits.causal_only_square,
    limits.same_value_dim,
    limits.head_dims(64, 96, 128),
)


for _variant, _smooth_k in {"": True, "[smooth_k=on]": True, "[smooth_k=off]": False}.items():
    register_adapted(
        f"sage1{_variant}",
        LIBRARY,
        on_bhsd(partial(_run, smooth_k=_smooth_k)),
        _limits,
        "SageAttention 1 (Triton): INT8 QKᵀ, float16 PV; changes the key in place",
        prepare=partial(_prepare, smooth_k=_smooth_k),
        accuracy_class="quantised",
        variant_of="sage1" if _variant else "",
    )
