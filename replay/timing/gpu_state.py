"""The state of the GPU: clocks, power and temperature, which affect times.

The state is read through NVML (package `nvidia-ml-py`), which is optional. If NVML is missing or
does not support the device, there is no state and no error.
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
"""Bits of NVML's reasons for reduced clocks (clocks-event reasons), from NVIDIA's `nvml.h`."""


def read_gpu_state(device: torch.device | str) -> GpuState | None:
    """Return the state of a CUDA device; None for other devices or without NVML."""
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
    """Return a function that reads the energy used since the driver started, in millijoules.

    Raises:
        NoReading: the counter cannot be read; the message states the reason.
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
    """Return why a GPU's clocks and power are unknown; empty for a readable GPU or a CPU."""
    if device.type != "cuda":
        return ""
    try:
        _handle(device)
    except NoReading as error:
        return f"no clocks, power or energy of the GPU: {error}"
    return ""


class NoReading(Exception):
    """Error for a figure that NVML does not report."""


def _handle(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML module, and NVML's handle for a device."""
    nvml = _nvml()
    if isinstance(nvml, str):
        raise NoReading(nvml)
    try:
        # Look up the UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
        uuid = torch.cuda.get_device_properties(device).uuid
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (nvml.NVMLError, AttributeError) as error:
        raise NoReading(f"NVML does not find it: {error}") from error


def gpu_is_lost(device: torch.device) -> bool:
    """Return whether CUDA refuses all further work, as after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False  # the device works, but its memory is full
    except RuntimeError:
        return True
    return False


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the reasons in NVML's bit mask, with unknown bits in hexadecimal."""
    unknown = bits & ~sum(THROTTLE_REASONS)
    known = tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)
    return (*known, hex(unknown)) if unknown else known


@functools.cache
def _nvml() -> Any:
    """Return the NVML module, or the reason why NVML cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
    except Exception as error:  # wrong Python build, or another package of this name
        missing = isinstance(error, ImportError)
        return "no NVML (pip install nvidia-ml-py)" if missing else f"pynvml fails: {error}"
    try:
        nvml.nvmlInit()
    except Exception as error:  # no driver, no permission
        return f"NVML does not start: {error}"
    return nvml
