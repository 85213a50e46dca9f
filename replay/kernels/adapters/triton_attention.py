"""Our functions with a backward pass: `attention`, and `flash_attn_varlen_func` for packed calls.

The forward pass runs the fastest of our kernels for the call, and the backward pass is in Triton
(`attention_kernels/portable/backward.py`). The adapters of those kernels have no backward pass.
"""

from __future__ import annotations

from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels.constraints import (
    PADDED_OR_PACKED,
    AnyCall,
    max_head_dim,
    no_dropout,
    no_huge_softcap,
    up_to_float32,
)
from replay.kernels.flash_attention import varlen_arguments
from replay.kernels.kernel_options import kernel_options
from replay.kernels.layout import Packed, on_packed
from replay.kernels.libraries import TRITON, imported
from replay.kernels.wrapping import at_once, register_adapted


def _attend(call: Arguments) -> Tensor:
    output: Tensor = imported("attention_kernels.operators", "attention")(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )
    return output


def _run_varlen(call: AnyCall, packed: Packed) -> Tensor:
    arguments = varlen_arguments(call, packed)
    output: Tensor = imported("attention_kernels.flash_attention", "flash_attn_varlen_func")(
        **arguments, learnable_sink=call.sinks
    )
    return output


_limits = (no_dropout, up_to_float32, max_head_dim(256), no_huge_softcap)
register_adapted(
    "triton-attention",
    TRITON,
    _attend,
    _limits,
    "ours: the fastest of our kernels for the call, with a backward pass in Triton",
    default=False,
    features=("bottom-right", "window", "softcap", "sinks"),
    prefers_rewritten_mask=True,
    differentiable=True,
)
_prepare_varlen = on_packed(_run_varlen)
register_adapted(
    "triton-attention-varlen",
    TRITON,
    at_once(_prepare_varlen),
    (*_limits, *PADDED_OR_PACKED),
    "ours on packed sequences, and on padded batches, packed by their mask, with a backward pass",
    prepare=_prepare_varlen,
    default=False,
    features=("bottom-right", "window", "softcap", "sinks", "packed", "key-lengths"),
    differentiable=True,
)
