"""What state the GPU was in: the clock, power and temperature that a timing depends on.

Read through NVML (package `nvidia-ml-py`), which is optional: without it, or on a device it does
not know, there is no state rather than an error.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from replay.rows.row import GpuState

THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
}
"""Bits of NVML's clocks-event (formerly throttle) reasons, from NVIDIA's `nvml.h`."""


def read_gpu_state(device: torch.device | str) -> GpuState | None:
    """The state of a CUDA device now; None on other devices or where NVML is unavailable."""
    device = torch.device(device)
    nvml = _nvml()
    if device.type != "cuda" or nvml is None:
        return None
    try:
        # By UUID, because CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's.
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (nvml.NVMLError, AttributeError):
        return None

    def reading(function: str, *arguments: int) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    milliwatts = reading("nvmlDeviceGetPowerUsage")
    reasons = reading("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuState(
        sm_clock_mhz=reading("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=reading("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttle_reasons=None if reasons is None else throttle_reasons(reasons),
    )


def gpu_is_lost(device: torch.device) -> bool:
    """Whether CUDA refuses all further work, as it does after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of the reasons in NVML's bit mask, unknown bits in hexadecimal."""
    unknown = bits & ~sum(THROTTLE_REASONS)
    known = tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)
    return (*known, hex(unknown)) if unknown else known


@functools.cache
def _nvml() -> Any:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: all mean "no readings"
        return None
    return nvml
