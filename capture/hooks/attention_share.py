"""Measures attention's share of the time of a model's forward passes.

The share bounds what a faster kernel can gain (`CaptureRecord.most_gain`).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch

from capture.errors import reraise_from_signal_handler
from capture.hooks.batch_phase import prepared
from capture.hooks.modules import CallSite, ModuleTracker, WatchedModule
from capture.hooks.phases import RECOMPUTE

Mark = Any
"""Point in time: seconds of the host's clock, or a CUDA event."""


class _Pass(NamedTuple):
    """Measured forward pass of an outermost module."""

    key: tuple[str, str]
    """Path and phase; an engine knows the phase of its batch, and the model does not."""
    earlier: int
    """Number of passes of the same path and phase before it."""
    marks: list[Mark]
    """Start, three marks for each attention call (`AttentionShare.mark`), and end."""


class _Seconds(NamedTuple):
    """Seconds of a pass without the recorder's work, and those of its attention calls."""

    whole: float
    attention: float
    calls: int
    """Number of attention calls."""


class AttentionShare:
    """Time of attention calls, relative to that of the forward passes of outermost modules.

    Passes 1, 2, 4, 8 and so on of each module and phase are measured, so that long runs cost
    little, and the pass after each. The shorter of the two represents all passes until the next
    pair: a kernel that is compiled anew lengthens only one. If the two make different numbers of
    calls, because a cache of outputs saves some, both represent them. Pass 0 counts only if it is
    the only one, because `SampledStep` slows it down. Then its first attention call, in which
    libraries load and compile kernels, counts with the median of the others. The recorder's own
    work is subtracted. If CUDA is in use, times are the current stream's. The share is unknown
    without calls, or if one is made outside its thread's passes or in the capture of a CUDA graph.
    """

    def __init__(self, tracker: ModuleTracker) -> None:
        self._passes: Counter[tuple[str, str]] = Counter()
        self._measured: list[_Pass] = []
        self._thread = _Running()
        self._is_known = True
        tracker.outermost.append(self)

    def enter(self, watched: WatchedModule, site: CallSite) -> None:
        """Begin a forward pass."""
        key = watched.path, prepared.phase or site.phase
        self._thread.is_inside = True
        if site.phase == RECOMPUTE:
            return
        earlier = self._passes[key]
        self._passes[key] += 1
        if not earlier or _is_start(earlier) or _is_start(earlier - 1):
            self._thread.running = _Pass(key, earlier, [])
            self.mark()

    def leave(self) -> None:
        """End the calling thread's forward pass."""
        running = self._thread.running
        if running is not None:
            self.mark()
            self._measured.append(running)
        self._thread.running, self._thread.is_inside = None, False

    def mark(self) -> None:
        """Mark the start or end of an attention call, or the end of the recorder's work after it.

        Each attention call makes the three marks in this order, even outside a measured pass.
        """
        running = self._thread.running
        if running is None:
            self._is_known &= self._thread.is_inside
            return
        try:
            running.marks.append(_now())
        except Exception as error:
            reraise_from_signal_handler(error)
            self._is_known = False

    def share(self) -> float | None:
        """Return attention's share, from 0 to 1; None if it is unknown."""
        seconds: dict[tuple[str, str], dict[int, _Seconds]] = defaultdict(dict)
        for each in self._measured:
            try:
                seconds[each.key][each.earlier] = _seconds(each)
            except Exception as error:  # such as events of two devices
                reraise_from_signal_handler(error)
                return None
        whole = attention = 0.0
        for key, found in seconds.items():
            starts = sorted(filter(_is_start, found)) or [min(found)]
            ends = [*starts[1:], self._passes[key]]
            for start, begin, end in zip(starts, [0, *ends], ends, strict=False):
                pair = [found[at] for at in (start, start + 1) if at in found]
                if len({each.calls for each in pair}) == 1:
                    pair = [min(pair)]
                whole += (end - begin) * statistics.fmean(each.whole for each in pair)
                attention += (end - begin) * statistics.fmean(each.attention for each in pair)
        return min(attention / whole, 1.0) if self._is_known and attention > 0 else None


class _Running(threading.local):
    running: _Pass | None = None
    """Pass that is measured."""
    is_inside = False
    """True inside a forward pass."""


def _is_start(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


def _seconds(measured: _Pass) -> _Seconds:
    first, *calls, last = measured.marks
    begins, ends, recorded = calls[::3], calls[1::3], calls[2::3]
    attention = [*map(_between, begins, ends)]
    left_out = sum(map(_between, ends, recorded))
    if not measured.earlier and len(attention) > 1:
        warm_up = max(0.0, attention[0] - statistics.median(attention[1:]))
        left_out += warm_up
        attention[0] -= warm_up
    return _Seconds(_between(first, last) - left_out, sum(attention), len(attention))


def _now() -> Mark:
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("no time passes while a CUDA graph is captured")
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
