"""Our prefill for Hopper GPUs (`attention_kernels/hopper/hopper_prefill.py`, in Triton's Gluon).

The kernel has FlashAttention 3's schedule, for 16 bits and head dimensions that are multiples of 8.
`triton-fa2` handles other calls and other GPUs. Gluon has no interpreter, so this kernel cannot be
checked on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.kernel_options import kernel_options
from replay.kernels.libraries import TRITON, imported, is_interpreted
from replay.kernels.wrapping import register_adapted

LIBRARY = replace(TRITON, runs_on=lambda capability: capability == (9, 0), needs="9.0")


def _attend(call: Arguments) -> Tensor:
    return imported("attention_kernels.hopper.hopper_prefill", "hopper_prefill")(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        options=kernel_options(call.variant),
        sinks=call.sinks,
    )


def _unavailable(device: torch.device) -> str | None:
    if is_interpreted():
        return "Gluon has no interpreter"
    if device.type == "cpu":
        return "needs a CUDA GPU"
    if reason := LIBRARY.unavailable(device):
        return reason
    try:
        import attention_kernels.hopper.hopper_prefill  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Triton 3.6 or newer: {error}"
    return None


register_adapted(
    "triton-fa3",
    LIBRARY,
    _attend,
    (
        limits.no_dropout,
        limits.half_precision,
        limits.multiple_of_8,
        limits.max_head_dim(256),
        limits.no_huge_softcap,
        limits.no_negative_scale,
    ),
    "ours for Hopper: TMA, warp specialisation, FlashAttention 3's schedule (Gluon)",
    features=("bottom-right", "window", "softcap", "sinks"),
    prefers_rewritten_mask=True,
    unavailable=_unavailable,
)
