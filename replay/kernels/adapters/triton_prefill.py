"""Our FlashAttention-2-style kernel in Triton for any mask, stride, length and head_dim up to 256.

The kernel also supports windows, sinks, soft caps and bottom-right diagonals. `triton-varlen`
supports packed sequences.
"""

from __future__ import annotations

from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels.constraints import max_head_dim, no_dropout, no_huge_softcap, up_to_float32
from replay.kernels.kernel_options import kernel_options
from replay.kernels.libraries import TRITON, imported
from replay.kernels.wrapping import register_adapted


def _attend(call: Arguments) -> Tensor:
    return imported("attention_kernels.portable.prefill", "prefill")(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.is_causal,
        scale=call.scale,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )


register_adapted(
    "triton-fa2",
    TRITON,
    _attend,
    (no_dropout, up_to_float32, max_head_dim(256), no_huge_softcap),
    "ours: FlashAttention 2 in Triton, of any mask, strides and head_dim",
    features=("bottom-right", "window", "softcap", "sinks"),
    prefers_rewritten_mask=True,
)
