"""Work whose time, or whose ratio of times, is known in advance."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from replay.isolation.inputs import drop_in
from replay.timing.timer import Function
from replay.workloads.random_calls import Spec

SHAPES = {
    "cpu": Spec(1, 2, 2, 512, 512, 64, 64, dtype=torch.float32),
    "cuda": Spec(4, 16, 16, 4096, 4096, 128, 128, dtype=torch.float16),
}
"""Calls that take milliseconds on two processor cores, and about one millisecond on a large GPU."""

SMALL = {
    "cpu": Spec(1, 2, 2, 64, 64, 64, 64, dtype=torch.float32),
    "cuda": Spec(1, 16, 16, 512, 512, 128, 128, dtype=torch.float16),
}
"""Calls that are short compared with a delay of one millisecond."""

CALIBRATION_CYCLES = 100_000_000

RAW_CLOCK = getattr(time, "CLOCK_MONOTONIC_RAW", None)
"""Clock that is never adjusted, unlike the timer's clock."""


def attention(spec: Spec, device: torch.device, seed: int = 0) -> Function:
    """Return a function that runs PyTorch's attention on random values."""
    generator = torch.Generator(device).manual_seed(seed)
    return drop_in(scaled_dot_product_attention, spec.call(device, generator))


def twice(spec: Spec, device: torch.device) -> Function:
    """Return a function that runs `attention` on two sets of values, so that no cache helps."""
    first, second = attention(spec, device), attention(spec, device, seed=1)

    def run() -> object:
        first()
        return second()

    return run


def delay(device: torch.device) -> Callable[[float], Function]:
    """Return a factory of functions that only wait for a given number of milliseconds."""
    return _gpu_delay(device) if device.type == "cuda" else _cpu_delay


def _cpu_delay(milliseconds: float) -> Function:
    def run() -> None:
        until = _now() + milliseconds / 1000
        while _now() < until:
            pass

    return run


def _now() -> float:
    return time.perf_counter() if RAW_CLOCK is None else time.clock_gettime(RAW_CLOCK)


def _gpu_delay(device: torch.device) -> Callable[[float], Function]:
    """Return a factory of waits in SM clock cycles, calibrated by the host's clock, not events."""
    with torch.cuda.device(device):
        for _ in range(2):  # the clock rate rises during the first wait
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            torch.cuda.synchronize(device)
            cycles_per_ms = CALIBRATION_CYCLES / (time.perf_counter() - began) / 1000

    def make(milliseconds: float) -> Function:
        cycles = int(milliseconds * cycles_per_ms)
        return lambda: torch.cuda._sleep(cycles)

    return make
