"""The machine that a replay runs on: versions, memory and speed."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
import time
from pathlib import Path

import torch

from replay.rows.row import Machine
from replay.timing.cores import physical_cores, usable_cpus


def usual_device() -> str:
    """Return the default device: the GPU if there is one, otherwise the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(device: torch.device) -> Machine:
    """Describe the device and the versions of its software."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    on_gpu = device.type == "cuda"
    return Machine(
        device=device_name(device),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda) if on_gpu else "",
        cudnn=str(torch.backends.cudnn.version()) if on_gpu else "",
        triton=triton,
        threads="" if on_gpu else str(torch.get_num_threads()),
        cores=str(physical_cores() or ""),
        usable_cpus=str(usable_cpus()),
    )


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def available_bytes(device: torch.device) -> int:
    """Return the free memory of the device; on a CPU without /proc, all of its memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # macOS reports only the total.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_flops_per_second() -> float:
    """Estimate the rate of float32 matrix products: one thread's rate times the number of threads.

    Only one thread is measured, because threads wait for each other: while another program uses one
    of two processors, a product with two threads takes ten times as long as with one.
    """
    return torch.get_num_threads() * _flops_per_second_of_a_thread()


@functools.cache
def _flops_per_second_of_a_thread() -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.randn(512, 512)
        matrix @ matrix
        fastest = math.inf
        start = now = time.perf_counter()
        while now - start < 0.1:
            began = now
            matrix @ matrix
            now = time.perf_counter()
            fastest = min(fastest, now - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * 512**3 / fastest
