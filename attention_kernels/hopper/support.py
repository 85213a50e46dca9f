"""Whether our kernels for Hopper GPUs, which are in Gluon, can run on a device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_gluon_kernels(device: torch.device) -> bool:
    """Whether it is a Hopper GPU (compute capability 9.0), and this Triton's Gluon new enough."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import attention_kernels.hopper.pipeline  # noqa: F401
    except (ImportError, AttributeError):  # before Triton 3.6
        return False
    return True
