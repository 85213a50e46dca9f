"""The time of calls in a row, measured by the host's clock, to reveal work that samples miss.

A sample's events exclude work on other streams, and a kernel could falsify events. Here the GPU
waits until the host has enqueued several calls between two marks. A mark is a number that the GPU
copies to memory, where the host watches for it. At the end the host waits for the whole device.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from replay.timing.timer import CYCLES_PER_MS, MAXIMUM_WAIT_MS, Function

LONGEST_HEAD_START_MS = 100.0
"""Maximum head start of the host over the GPU."""
TRIES = 3
CALLS = 20
"""Maximum number of calls in a row; work that these calls leave adds up."""
ENOUGH_MS = 5.0
"""Minimum total duration of the calls in a row: a hundred times `UNNOTICED_MS`."""
UNNOTICED_MS = 0.05
UNNOTICED_SHARE = 0.1
"""Remaining work that is ignored as noise, as a share of the calls' time."""


class InARow(NamedTuple):
    """Milliseconds of each call in a row."""

    left_ms: float
    """Work that the call leaves on other streams."""
    gpu_ms: float | None
    """Time until the call's own stream is done. The time is None if the host was not ahead of the
    GPU, because the kernel waits inside or the host is busy."""


def look(function: Function, device: torch.device, call_ms: float, host_ms: float) -> InARow:
    """Measure one call, and several calls in a row; on a CPU, measure nothing.

    The host waits for the calls' stream and then for the device. The second wait is long if work is
    left on other streams. Work that short calls leave adds up in a row. Work that long calls leave
    partly overlaps the next call, so one call is also measured alone.

    Args:
        call_ms: time of a call in the kernel's samples.
        host_ms: time in which the host enqueues a call.
    """
    if device.type != "cuda":
        return InARow(0.0, None)
    number = min(int(ENOUGH_MS / max(call_ms, 1e-3)) + 1, CALLS)
    alone = _look_at(1, function, device, host_ms)
    if number == 1 or alone.left_ms:
        return alone
    row = _look_at(number, function, device, host_ms)
    if alone.gpu_ms is None or row.gpu_ms is None:
        return row
    # Other processes may use the GPU during the row, and marks may dominate the single call.
    return row._replace(gpu_ms=min(alone.gpu_ms, row.gpu_ms))


def _look_at(number: int, function: Function, device: torch.device, host_ms: float) -> InARow:
    def calls() -> None:
        for _ in range(number):
            function()

    # The host must enqueue all calls before the GPU begins: otherwise work on other streams could
    # end before work on the calls' stream.
    ahead_ms = min(MAXIMUM_WAIT_MS + 2 * number * host_ms, LONGEST_HEAD_START_MS)
    tries = []
    for _ in range(TRIES):
        seen = _waits(calls, device, ahead_ms)
        unnoticed_ms = UNNOTICED_MS + UNNOTICED_SHARE * seen.stream_ms
        if seen.host_was_ahead and seen.left_ms <= unnoticed_ms:
            return InARow(0.0, seen.stream_ms / number)
        tries.append((seen.host_was_ahead, seen.left_ms, unnoticed_ms, seen.stream_ms))
        if not seen.host_was_ahead:  # the host is busy, or the kernel synchronises
            ahead_ms = min(2 * ahead_ms, LONGEST_HEAD_START_MS)
    ahead = [values for values in tries if values[0]]
    columns = zip(*(ahead or tries), strict=True)
    _, left_ms, unnoticed_ms, stream_ms = map(min, columns)
    beyond_ms = left_ms
    if left_ms > unnoticed_ms:  # subtract the wait for an idle device
        beyond_ms -= min(_waits(lambda: None, device, ahead_ms).left_ms for _ in range(TRIES))
    return InARow(
        beyond_ms / number if beyond_ms > unnoticed_ms else 0.0,
        stream_ms / number if ahead else None,
    )


class _Waits(NamedTuple):
    stream_ms: float
    """Upper limit of the time between the marks before and after the calls."""
    left_ms: float
    """Time from the end of the calls' stream until the whole device was done."""
    host_was_ahead: bool
    """True if all calls were enqueued before the first mark was set."""


def _waits(function: Function, device: torch.device, ahead_ms: float) -> _Waits:
    begun, done = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
    one = torch.ones(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))
    begun.copy_(one, non_blocking=True)
    function()
    done.copy_(one, non_blocking=True)
    unset = time.perf_counter()
    was_ahead = not begun.item()
    # A delayed host sees a mark late, so this time is an upper limit. Another try may lower it.
    began, _ = _watched(begun, device, unset)
    _, ended = _watched(done, device, began)
    torch.cuda.synchronize(device)
    left_ms = (time.perf_counter() - ended) * 1000
    return _Waits((ended - began) * 1000, left_ms, was_ahead)


def _watched(mark: Tensor, device: torch.device, unset: float) -> tuple[float, float]:
    """Wait for a mark; raise if the GPU refuses all work, because the mark would never be set.

    Returns:
        The times of the last check before and the first check after the mark was set.
    """
    stream = torch.cuda.current_stream(device)
    while True:
        looked = time.perf_counter()
        if mark.item() or stream.query():
            return unset, time.perf_counter()
        unset = looked
