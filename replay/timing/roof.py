"""The measured peaks of a machine: the two limits of a roofline (Williams et al. 2009).

The peaks are the rates of the fastest of several large matrix products, and of several copies
between buffers larger than any cache. A kernel with fewer bits or cached data may exceed the peaks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from replay.rows.row import Roof

SECONDS = 0.1
"""Duration of each measurement, after a warm-up call."""
SIDES = {"cuda": (8192,), "cpu": (256, 1024)}
"""Sides of square matrices. A CPU without instructions for a dtype gets only the first size."""
SLOW = 0.025
"""Duration of one product, in seconds, above which no larger matrix is tried."""
COPIED_BYTES = {"cuda": 2**29, "cpu": 2**27}


def measure_roof(dtype: torch.dtype, device: torch.device) -> Roof | None:
    """Measure matrix products in `dtype`, and copies, on an idle device.

    Returns:
        The peaks; None if PyTorch has no matrix product in `dtype`, or too little memory is free.
    """
    try:
        return Roof(_tflops(dtype, device), _gb_per_s(device))
    except (RuntimeError, MemoryError):
        return None


def _tflops(dtype: torch.dtype, device: torch.device) -> float:
    fastest = 0.0
    for side in SIDES[device.type]:
        factor = torch.randn(side, side, device=device).to(dtype)
        product = torch.empty_like(factor)
        multiply = functools.partial(torch.matmul, factor, factor, out=product)
        seconds = _fastest(multiply, device)
        fastest = max(fastest, 2 * side**3 / seconds / 1e12)
        if seconds > SLOW:
            break
    return fastest


def _gb_per_s(device: torch.device) -> float:
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = _fastest(lambda: target.copy_(source), device)
    return 2 * source.numel() / seconds / 1e9


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    clock = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    clock(work)
    found, deadline = clock(work), time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = min(found, clock(work))
    return found


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
