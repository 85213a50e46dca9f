"""The energy of a call, and its sustained time, from a block of calls without gaps.

NVML counts the energy of the whole GPU and updates the count every 20 to 100 ms. So calls run
without gaps for a second, and the energy between two updates is divided by the number of calls. The
first calls run at the clock frequency of a short burst, and the last calls at the frequency that
the power limit allows.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from replay.timing.gpu_state import NoReading, energy_counter

Function = Callable[[], object]

PAUSE_SECONDS = 0.1
"""Pause before a block, so that the GPU is at rest when the block begins."""
SETTLING_SECONDS = 0.25
"""Time from a block's start to the first reading: clocks take about 40 ms to adapt to the power."""
BLOCK_SECONDS = 1.0
"""Time between the first and last reading of the counter, enough for at least ten updates."""
CHUNK_MS = 5.0
"""Duration of the calls between two readings. More calls are queued, so the GPU never waits."""
BURST_MS = 20.0
SUSTAINED_SHARE = 0.25
"""Share of a block, at its end, that the sustained time is computed from."""
STANDSTILL_SECONDS = 5.0
"""Time without an update, while the GPU is busy, after which the measurement fails."""

DIFFERENT = 0.03
"""Minimum relative difference between burst and sustained times to report both times."""


@dataclass(frozen=True)
class EnergyBlock:
    """Energy and times of a block of calls."""

    mj: float
    """Energy of a call, in millijoules."""
    power_w: float
    seconds: float
    burst_ms: float
    sustained_ms: float

    @property
    def settles(self) -> bool:
        """True if the sustained time of a call differs from its time in a burst."""
        return abs(self.sustained_ms / self.burst_ms - 1) > DIFFERENT


def measure_energy(function: Function, device: torch.device, call_ms: float) -> EnergyBlock:
    """Run a block of calls, each of about `call_ms`, and measure energy and times."""
    read = energy_counter(device)
    calls = max(int(CHUNK_MS / call_ms), 1)
    torch.cuda.synchronize(device)
    time.sleep(PAUSE_SECONDS)
    try:
        with torch.cuda.device(device):
            return block(_chunks(function, calls), calls, read)
    finally:
        torch.cuda.synchronize(device)


def block(
    chunks: Iterable[float],
    calls: int,
    read: Callable[[], int],
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyBlock:
    """Measure energy and times while chunks of calls run.

    Args:
        chunks: endless iterator that yields the milliseconds of each chunk when the chunk is done.
        calls: number of calls in a chunk.
        read: function that reads the counter, in millijoules.
    """
    times: list[float] = []
    began = moved = clock()
    last = read()
    first: tuple[float, int, int] | None = None
    for milliseconds in chunks:
        times.append(milliseconds)
        now, millijoules = clock(), read()
        if millijoules == last:
            if now - moved > STANDSTILL_SECONDS:
                raise NoReading(f"the GPU's energy counter has not changed for {now - moved:.0f} s")
            continue
        moved, last = now, millijoules
        if first is None:
            if now - began >= SETTLING_SECONDS:
                first = (now, millijoules, len(times))
        elif now - first[0] >= BLOCK_SECONDS:
            seconds, used = now - first[0], millijoules - first[1]
            return EnergyBlock(
                mj=used / (len(times) - first[2]) / calls,
                power_w=used / 1000 / seconds,
                seconds=seconds,
                burst_ms=statistics.median(_beginning(times)) / calls,
                sustained_ms=statistics.median(_end(times)) / calls,
            )
    raise NoReading("the calls ended before the energy was counted")


def _chunks(function: Function, calls: int) -> Iterator[float]:
    """Run chunks of calls without end; wait for each chunk while the next is queued."""
    under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    while True:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        under_way.append((start, end))
        if len(under_way) > 1:
            start, end = under_way.popleft()
            end.synchronize()
            yield start.elapsed_time(end)


def _beginning(times: list[float]) -> list[float]:
    total = 0.0
    for count, milliseconds in enumerate(times, start=1):
        total += milliseconds
        if total >= BURST_MS:
            return times[:count]
    return times


def _end(times: list[float]) -> list[float]:
    return times[-max(int(len(times) * SUSTAINED_SHARE), 1) :]
