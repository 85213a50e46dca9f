"""The backends that PyTorch's SDPA chooses from, by the names of their kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import TORCH_SDPA, Arguments

BACKENDS = {
    0: "torch-math",
    1: "torch-flash",
    2: "torch-efficient",
    3: "torch-cudnn",
    4: "torch-overrideable",
}
"""Kernel names by the number that PyTorch's dispatcher returns."""

_IS_ENABLED = {
    "torch-math": torch.backends.cuda.math_sdp_enabled,
    "torch-flash": torch.backends.cuda.flash_sdp_enabled,
    "torch-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch-cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}


def chosen_backend(call: Arguments | AttentionCall) -> str:
    """Return the backend that PyTorch would choose for a call now.

    The result is empty for tensor subclasses and devices that cannot report the backend.
    """
    try:
        choice = torch._fused_sdp_choice(
            call.query,
            call.key,
            call.value,
            call.attn_mask,
            call.dropout_p,
            call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )
    except RuntimeError:
        return ""
    return BACKENDS.get(choice, "")


def disabled_backends() -> list[str]:
    """Return the backends that `sdpa_kernel` or `torch.backends.cuda` has switched off."""
    return [name for name, is_enabled in _IS_ENABLED.items() if not is_enabled()]


def function_or_backend(arguments: Arguments, sdpa: Callable[..., Tensor]) -> str:
    """Return the backend of an SDPA call, or the name of the function called in its place."""
    if sdpa is TORCH_SDPA:
        return chosen_backend(arguments)
    return f"{sdpa.__module__}.{getattr(sdpa, '__qualname__', sdpa)}"
