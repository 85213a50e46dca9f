"""Our prefill for Hopper GPUs (`replay/kernels/triton/prefill_hopper.py`, in Triton's Gluon).

FlashAttention 3's schedule, for what Hopper's units take as it is: no mask, 16 bits,
head_dim to 128. `triton-fa2` is for the rest, and for other GPUs. Gluon has no interpreter, so this
kernel cannot be checked on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import (
    all_of,
    half_precision,
    max_head_dim,
    multiple_of_8,
    no_dropout,
    no_mask,
    same_value_dim,
)
from replay.kernels.layout import refuse
from replay.kernels.library import TRITON_INSTALL, is_interpreted, triton_unavailable
from replay.kernels.registry import Kernel, register

HOPPER = (9, 0)


def attention(
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
    """SDPA's arguments to `prefill_hopper`'s."""
    from replay.kernels.triton.prefill_hopper import prefill_hopper

    refuse(attn_mask, dropout_p)
    return prefill_hopper(query, key, value, is_causal=is_causal, scale=scale)


def unavailable(device: torch.device) -> str | None:
    if is_interpreted():
        return "Gluon has no interpreter"
    if reason := triton_unavailable(device):
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return f"needs compute capability 9.0 (this GPU has {'.'.join(map(str, capability))})"
    try:
        import replay.kernels.triton.prefill_hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Triton 3.6 or newer: {error}"
    return None


def no_negative_scale(call: AttentionCall) -> str | None:
    scale = call.softmax_scale
    return None if scale >= 0 else f"scale {scale:g}: must not be negative"


register(
    Kernel(
        "triton-fa3",
        attention,
        unavailable=unavailable,
        unsupported=all_of(
            no_dropout,
            half_precision,
            no_mask,
            same_value_dim,
            multiple_of_8,
            max_head_dim(128),
            no_negative_scale,
        ),
        about="ours for Hopper: TMA, warp specialisation, FlashAttention 3's schedule (Gluon)",
        library="triton",
        install=TRITON_INSTALL,
    )
)
