"""The energy of a call, and the time it settles at, from a block of calls back to back.

NVML counts the energy that a whole GPU draws, and moves the count every 20 to 100 ms. So calls
follow each other for a second without a gap, and what is read between two movements of the counter
is divided by the calls between them. Nothing is subtracted: what an idle GPU draws is in it.

In the same block the GPU gets as warm and as slow as under a steady load. The first calls after a
pause run at the clock that a single burst gets, the last ones at the clock that power allows for
long.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from replay.timing.gpu_state import NoReading, energy_counter

Function = Callable[[], object]

PAUSE_SECONDS = 0.1
"""Before a block, so that its first calls meet a GPU at rest."""
SETTLING_SECONDS = 0.25
"""Of a block, before the counter is read: clocks need some 40 ms to follow the power drawn."""
BLOCK_SECONDS = 1.0
"""Between the first and the last reading of the counter, ten of its movements or more."""
CHUNK_MS = 5.0
"""Work between two looks at the counter. One more lies queued, so that the GPU never waits."""
BURST_MS = 20.0
SUSTAINED_SHARE = 0.25
"""Of a block: its end."""
STANDSTILL_SECONDS = 5.0
"""A counter that does not move for so long, while the GPU works, is none."""

DIFFERENT = 0.03
"""Burst and sustained times further apart than this share are told apart."""


@dataclass(frozen=True)
class EnergyBlock:
    """What a block of calls showed."""

    mj: float
    """Energy of a call."""
    power_w: float
    seconds: float
    burst_ms: float
    sustained_ms: float

    @property
    def settles(self) -> bool:
        """Whether a call takes another time for long than in a burst."""
        return abs(self.sustained_ms / self.burst_ms - 1) > DIFFERENT


def measure_energy(
    function: Function,
    device: torch.device,
    call_ms: float,
    keep: Callable[[object], None] = lambda result: None,
) -> EnergyBlock:
    """Run a block of calls of a function that takes about `call_ms`.

    Args:
        keep: given what one call in some milliseconds returned, on average, right after that call;
            it must not wait for the GPU.

    Raises:
        NoReading: the device has no energy counter, or one that stands still.
    """
    read = energy_counter(device)
    calls = max(int(CHUNK_MS / call_ms), 1)
    torch.cuda.synchronize(device)
    time.sleep(PAUSE_SECONDS)
    try:
        with torch.cuda.device(device):
            return block(_chunks(function, calls, keep), calls, read)
    finally:
        torch.cuda.synchronize(device)


def block(
    chunks: Iterable[float],
    calls: int,
    read: Callable[[], int],
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyBlock:
    """Watch chunks of calls, until the counter was read for long enough.

    Args:
        chunks: milliseconds of each, as soon as it is over; endless.
        calls: how many a chunk has.
        read: the counter, in millijoules.
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
                raise NoReading(f"the GPU's energy counter stands still for {now - moved:.0f} s")
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


def _chunks(function: Function, calls: int, keep: Callable[[object], None]) -> Iterator[float]:
    """Run chunks of calls for ever, one ahead of the one that is waited for."""
    under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    while True:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            result = function()
            if secrets.randbelow(calls) == 0:  # not known before the call
                keep(result)
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
