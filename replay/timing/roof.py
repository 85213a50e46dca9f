"""The measured peaks of a machine: the two limits of a roofline (Williams et al. 2009).

The peaks are the rates of the fastest of several large matrix products, and of several copies
between buffers larger than any cache. A kernel with fewer bits or cached data may exceed the peaks.
On a CPU, runs that other programs interrupted count only if there is no other.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from replay.rows.row import Roof
from replay.timing.interruptions import Interruptions

SECONDS = 0.1
"""Duration of each measurement, after a warm-up call."""
LONGEST_SECONDS = 0.5
"""Duration of a measurement that other programs interrupt all the time."""
SIDES = {"cuda": (8192,), "cpu": (256, 1024)}
"""Sides of square matrices. A CPU without instructions for a dtype gets only the first size."""
SLOW = 0.025
"""Duration of one product, in seconds, above which no larger matrix is tried."""
COPIED_BYTES = {"cuda": 2**29, "cpu": 2**27}


def measure_roof(dtype: torch.dtype, device: torch.device) -> Roof | None:
    """Measure matrix products in `dtype`, and copies.

    Returns:
        The peaks; None if PyTorch has no matrix product in `dtype`, or too little memory is free.
    """
    try:
        tflops, one = _tflops(dtype, device)
        gb_per_s, other = _gb_per_s(device)
        return Roof(tflops, gb_per_s, interrupted=one or other)
    except (RuntimeError, MemoryError):
        return None


def _tflops(dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    fastest, interrupted = 0.0, False
    for side in SIDES[device.type]:
        factor = torch.randn(side, side, device=device).to(dtype)
        product = torch.empty_like(factor)
        multiply = functools.partial(torch.matmul, factor, factor, out=product)
        seconds, is_disturbed = _fastest(multiply, device)
        tflops = 2 * side**3 / seconds / 1e12
        if tflops > fastest:
            fastest, interrupted = tflops, is_disturbed
        if seconds > SLOW:
            break
    return fastest, interrupted


def _gb_per_s(device: torch.device) -> tuple[float, bool]:
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds, interrupted = _fastest(lambda: target.copy_(source), device)
    return 2 * source.numel() / seconds / 1e9, interrupted


def _fastest(work: Callable[[], object], device: torch.device) -> tuple[float, bool]:
    """Return the shortest time, in seconds, and True if other programs interrupted every run."""
    on_gpu = device.type == "cuda"
    clock = _gpu_seconds if on_gpu else _cpu_seconds
    clock(work)
    interruptions, begin = Interruptions(), time.monotonic()
    whole = interrupted = math.inf
    interruptions.begin_sample()
    while True:
        interruptions.begin_call()
        seconds = clock(work)
        if not on_gpu and interruptions.interrupted(seconds):
            interrupted = min(interrupted, seconds)
        else:
            whole = min(whole, seconds)
        is_whole = whole < math.inf
        if time.monotonic() - begin >= (SECONDS if is_whole else LONGEST_SECONDS):
            interruptions.end_sample()
            return (whole if is_whole else interrupted), not is_whole


def _cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _gpu_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
