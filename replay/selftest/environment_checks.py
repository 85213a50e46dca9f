"""Checks of the measuring conditions: the GPU's clocks, and the processor's time."""

from __future__ import annotations

import time

import torch

from replay.selftest import work
from replay.selftest.result import Result
from replay.timing.cores import usable_cpus
from replay.timing.gpu_state import read_gpu_state, why_no_state

SLOWDOWNS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Reasons for a lower clock that are not caused by a kernel."""

WORKING_SECONDS = 0.5
QUEUED_CALLS = 32
"""Number of queued calls that keep the GPU busy while its state is read."""
LEAST_SHARE = 0.95
"""Minimum share of a processor that a busy thread must get."""


def clocks(device: torch.device) -> Result:
    """Check that a busy GPU keeps its clocks."""
    if missing := why_no_state(device):
        return Result("clocks", None, missing)
    run = work.attention(work.SHAPES["cuda"], device)
    until, state = time.perf_counter() + WORKING_SECONDS, None
    while time.perf_counter() < until:
        for _ in range(QUEUED_CALLS):
            run()
        # The state is read while the queue is not empty, because an idle GPU lowers its clocks.
        state = read_gpu_state(device)
        torch.cuda.synchronize(device)
    if state is None:
        return Result("clocks", None, "NVML does not report the clocks")
    reasons = state.throttle_reasons or ()
    slow = [reason for reason in reasons if reason in SLOWDOWNS]
    readings = {
        "MHz": state.sm_clock_mhz,
        "MHz memory": state.memory_clock_mhz,
        "W": state.power_w,
        "°C": state.temperature_c,
    }
    texts = [f"{value:.0f} {unit}" for unit, value in readings.items() if value is not None]
    texts.append(f"held down by: {', '.join(reasons)}" if reasons else "not held down")
    figures = {unit: value for unit, value in readings.items() if value is not None}
    return Result(
        "clocks",
        not slow,
        ", ".join(texts),
        f"the GPU slows down ({', '.join(slow)}): check its cooling and power supply",
        {**figures, "reasons": list(reasons)},
    )


def processor(seconds: float = WORKING_SECONDS) -> Result:
    """Check that a busy thread gets a whole processor."""
    began, began_thread = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    share = (time.thread_time() - began_thread) / (time.perf_counter() - began)
    cpus = usable_cpus()
    return Result(
        "processor time",
        share >= LEAST_SHARE,
        f"a busy thread gets {share:.1%} of a CPU; {cpus} usable, {torch.get_num_threads()} "
        "threads of torch",
        "other programs, or a limit on this container, take processor time: end or lift them",
        {"share": share, "usable_cpus": cpus, "threads": torch.get_num_threads()},
    )
