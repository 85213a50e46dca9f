"""Check that a device supports the Gluon kernels."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_gluon_kernels(device: torch.device) -> bool:
    """Return whether a device is a Hopper GPU (compute capability 9.0) and Triton's Gluon is new
    enough."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from attention_kernels.hopper import pipeline  # noqa: F401
    except (ImportError, AttributeError):  # Triton before 3.6
        return False
    return True
