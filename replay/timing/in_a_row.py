"""What a kernel's samples may not show, looked for in calls in a row, by the host's clock.

A sample ends with the stream that its call was made on, and its time is that between two events. So
work on other streams is not in it, and who reaches the events decides what they say. Here the GPU
waits until the host has enqueued some calls, with a mark before and behind them: a number copied to
memory that the host watches. No event is asked, and the device is waited for at the end.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from replay.timing.timer import CYCLES_PER_MS, MAXIMUM_WAIT_MS, Function

LONGEST_HEAD_START_MS = 100.0
"""Of the host before the GPU."""
TRIES = 3
CALLS = 20
"""In a row at most, so that what each leaves behind adds up."""
ENOUGH_MS = 5.0
"""Of calls in a row: what goes unnoticed whatever they take is then a hundredth of them."""
UNNOTICED_MS = 0.05
UNNOTICED_SHARE = 0.1
"""What may be left without being noticed: asking takes as long, and varies as much."""


class InARow(NamedTuple):
    """Of each call, in milliseconds."""

    left_ms: float
    """Of work that it leaves on other streams."""
    gpu_ms: float | None
    """Until its own stream is done; None where the host was not ahead: the kernel waits inside, or
    the host is busy."""


def look(function: Function, device: torch.device, call_ms: float, host_ms: float) -> InARow:
    """Look at one call, and at some in a row; nothing is left, and nothing known, on a CPU.

    After calls their stream is waited for, and then the device. The second takes long where work
    was left, and otherwise no longer than after an equally long wait on the stream alone. What
    short calls leave adds up in a row, while what long ones leave is done in part beside the next.

    Args:
        call_ms: what a call took when it was timed.
        host_ms: what the host took to enqueue it.
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
    # Other processes that use the GPU get their turns amid a row; marks are long beside one call.
    return row._replace(gpu_ms=min(alone.gpu_ms, row.gpu_ms))


def _look_at(number: int, function: Function, device: torch.device, host_ms: float) -> InARow:
    def calls() -> None:
        for _ in range(number):
            function()

    # The host must be done with all calls before the GPU begins; else what they leave is over
    # before the stream is.
    ahead_ms = min(MAXIMUM_WAIT_MS + 2 * number * host_ms, LONGEST_HEAD_START_MS)
    tries = []
    for _ in range(TRIES):
        seen = _waits(calls, device, ahead_ms)
        unnoticed_ms = UNNOTICED_MS + UNNOTICED_SHARE * seen.stream_ms
        if seen.host_was_ahead and seen.left_ms <= unnoticed_ms:
            return InARow(0.0, seen.stream_ms / number)
        tries.append((seen.host_was_ahead, seen.left_ms, unnoticed_ms, seen.stream_ms))
        if not seen.host_was_ahead:  # it is busy, or the kernel synchronises
            ahead_ms = min(2 * ahead_ms, LONGEST_HEAD_START_MS)
    ahead = [each for each in tries if each[0]]
    columns = zip(*(ahead or tries), strict=True)
    _, left_ms, unnoticed_ms, stream_ms = (min(each) for each in columns)
    beyond_ms = left_ms
    if left_ms > unnoticed_ms:  # else nothing is left, however long an idle device is waited for
        beyond_ms -= min(_waits(lambda: None, device, ahead_ms).left_ms for _ in range(TRIES))
    return InARow(
        beyond_ms / number if beyond_ms > unnoticed_ms else 0.0,
        stream_ms / number if ahead else None,
    )


class _Waits(NamedTuple):
    stream_ms: float
    """From the mark before the calls to that behind them, at most."""
    left_ms: float
    """How much longer the device took."""
    host_was_ahead: bool
    """Whether all was enqueued before the first mark."""


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
    # A host that is held up sees a mark late. So the calls take no longer than this, whoever makes
    # it late, and another try can show that they take less.
    began = _watched(begun, device, unset).unset
    ended = _watched(done, device, began).seen
    torch.cuda.synchronize(device)
    left_ms = (time.perf_counter() - ended) * 1000
    return _Waits((ended - began) * 1000, left_ms, was_ahead)


class _Watched(NamedTuple):
    unset: float
    """When a mark was last not there."""
    seen: float
    """When it first was."""


def _watched(mark: Tensor, device: torch.device, unset: float) -> _Watched:
    """Watch for a mark; a GPU that refuses all work raises, since no mark would come."""
    stream = torch.cuda.current_stream(device)
    while True:
        asked = time.perf_counter()
        if mark.item() or stream.query():
            return _Watched(unset, time.perf_counter())
        unset = asked
