"""Applies `torch.autocast` to SDPA's arguments as SDPA does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments

is_any_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Function that returns whether autocast is on in this thread, for any type of device."""


def autocast_dtype(query: Tensor) -> torch.dtype | None:
    """Return the dtype that SDPA casts its arguments to in this thread; None without autocast."""
    device = query.device.type
    try:
        # torch 2.11 cannot trace `is_autocast_available` in a compiled model.
        is_on = torch.is_autocast_enabled(device)
    except RuntimeError:  # this type of device has no autocast, such as meta
        return None
    return torch.get_autocast_dtype(device) if is_on else None


def cast(arguments: Arguments, dtype: torch.dtype | None) -> Arguments:
    """Cast the arguments as SDPA does, to get the tensors that the kernel receives."""
    if dtype is None:
        return arguments

    def one(argument: Any) -> Any:
        eligible = isinstance(argument, Tensor) and argument.is_floating_point()
        return argument.to(dtype) if eligible and argument.dtype != torch.float64 else argument

    return Arguments(*map(one, arguments))
