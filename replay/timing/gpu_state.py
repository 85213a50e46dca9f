"""What state the GPU was in: the clock, power and temperature that a timing depends on.

Read through NVML (package `nvidia-ml-py`), which is optional: without it, or on a device it does
not know, there is no state rather than an error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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
    if device.type != "cuda":
        return None
    try:
        nvml, handle = _handle(device)
    except NoReading:
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
        memory_clock_mhz=reading("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
    )


def energy_counter(device: torch.device | str) -> Callable[[], int]:
    """Millijoules that the GPU has drawn since its driver was loaded, whenever it is called.

    Raises:
        NoReading: there is no counter; the message says why.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise NoReading("energy needs an NVIDIA GPU")
    nvml, handle = _handle(device)

    def millijoules() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except (nvml.NVMLError, AttributeError) as error:
            raise NoReading(f"this GPU does not count its energy: {error}") from error

    millijoules()
    return millijoules


def why_no_state(device: torch.device) -> str:
    """Say why a GPU's clocks and power are not known; empty where they are, and on a CPU."""
    if device.type != "cuda":
        return ""
    try:
        _handle(device)
    except NoReading as error:
        return f"no clocks, power or energy of the GPU: {error}"
    return ""


class NoReading(Exception):
    """NVML does not tell."""


def _handle(device: torch.device) -> tuple[Any, Any]:
    """NVML, and what it knows a device by.

    Raises:
        NoReading: there is none.
    """
    nvml = _nvml()
    if isinstance(nvml, str):
        raise NoReading(nvml)
    try:
        # By UUID, because CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's.
        uuid = torch.cuda.get_device_properties(device).uuid
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (nvml.NVMLError, AttributeError) as error:
        raise NoReading(f"NVML does not find it: {error}") from error


def gpu_is_lost(device: torch.device) -> bool:
    """Whether CUDA refuses all further work, as it does after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False  # it works, and has no byte left
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
    """NVML's module, or why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except Exception as error:  # built for another Python, or another package of that name
        missing = isinstance(error, ImportError)
        return "no NVML (pip install nvidia-ml-py)" if missing else f"pynvml fails: {error}"
    try:
        nvml.nvmlInit()
    except Exception as error:  # no driver, no permission
        return f"NVML does not start: {error}"
    return nvml
