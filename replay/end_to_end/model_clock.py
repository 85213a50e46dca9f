"""Time a model's runs, and each forward of its main modules by phase.

To keep the overhead small, only the modules that perform the model's steps have hooks, two per
forward. A compiled module is timed outside its graph, because hooks would become part of it. On
CUDA, a forward's time is the time between two events on its stream, including waits for the host.
On a CPU it is wall time without the time that a thread waited for a processor
(`replay.timing.thread_times`), which other programs took; the rest of the model and every kernel
would lose a different share of it. Only the thread that runs the forward counts, and the threads
outside Python that may compute for it: an engine may run the model in a thread of its own, while
the thread that called it waits for the results.

A run can also be inspected: every attention call is then timed, at a small cost. On CUDA, each
forward also waits at its first attention call until the host has enqueued the remaining kernels, so
that the forward's time without that wait is nearly the GPU's busy time. An earlier wait would fail:
before its first layer, a model may read from the GPU whether a mask is needed, which would use up
the wait before any kernel is enqueued.

The host's time for a forward is measured in a run that is drained: the host waits for the GPU
before each forward and each attention call, and these waits are not counted. The driver's queue of
launches, which blocks the host when it is full, then holds one layer's launches at most.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture.hooks.phases import stepping
from replay.patch.wrapped_forward import (
    compiled_wrappers,
    is_compiled_in_place,
    wrapped_outside,
)
from replay.timing.thread_times import ThreadTime, ThreadTimes, waits_ns
from replay.timing.timer import CYCLES_PER_MS

OUTSIDE = ""
"""Phase name of attention calls outside all watched forwards."""

LONGEST_WAIT = 0.25
"""Maximum seconds that a forward waits for the host: the time to enqueue about 10,000 kernels."""

EMPTY_CALLS = 51
"""Number of calls that measure the time that timing a call takes."""


@dataclass
class RunTimes:
    """Times of one run, in seconds."""

    run: float = 0.0
    """Time from the start to the last result, without `waited`."""
    forwards: dict[str, list[float]] = field(default_factory=dict)
    """Time of each forward, in order, by phase: `denoise`, `prefill`, `decode`, `encode`."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that one forward reads (prefill) or generates (decode), over the batch; as `run`, the
    tokens that an engine generates in the run."""
    attention: dict[str, float] = field(default_factory=dict)
    """Total time of all attention calls, by phase and `OUTSIDE`, if timed."""
    host: dict[str, list[float]] = field(default_factory=dict)
    """Host time of each forward, by phase, if the run was drained."""
    waited: float = 0.0
    """Time that the run's threads waited for a processor; 0 on a GPU."""


class _Moment(NamedTuple):
    """Point in time of a CPU's run."""

    seconds: float
    threads: dict[int, ThreadTime]


class _Begun(NamedTuple):
    module: nn.Module
    phase: str
    start: Any
    """Time of the start; None for the forward inside a compiled module's call."""
    host_start: float


class _Inside(threading.local):
    """Forwards that the calling thread is currently in."""

    def __init__(self) -> None:
        self.begun: list[_Begun] = []
        self.wait: float | None = None
        self.waited: list[tuple[Any, Any]] = []
        self.drained = 0.0


class Clock:
    """Times runs of a model, one at a time.

    Args:
        roots: the modules whose forwards are the model's steps.
        alive: called at each forward, as a sign of life.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        device: torch.device,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._modules = {
            module: role for root in roots.values() for module, role in stepping(root).items()
        }
        self._compiled = compiled_wrappers(self._modules)
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._alive = alive
        self._inside = _Inside()
        self._calls: list[tuple[str, Any, Any]] = []
        self._drains = False
        self._threads = ThreadTimes()

    @contextlib.contextmanager
    def running(
        self, waits: Mapping[str, float] | None = None, *, drains: bool = False
    ) -> Iterator[RunTimes]:
        """Time the `with` block; the times are complete at its end.

        Args:
            waits: on CUDA, seconds by phase that a forward waits at its first attention call,
                excluded from its time; at least as long as the host needs to enqueue the forward.
            drains: measure the host's time, which changes the other times.
        """
        times = RunTimes()
        marks: list[tuple[str, Any, Any, list[tuple[Any, Any]]]] = []
        waited_in: dict[int, float] = {}
        counts = dict.fromkeys(self._modules, 0)
        self._inside, self._calls = _Inside(), []
        self._drains = drains

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inside = self._inside
            if inside.begun and inside.begun[-1].module is module:
                inside.begun.append(inside.begun[-1]._replace(start=None))
                return
            self._alive()
            self._follow()
            phase = self._modules[module].phase(None, args, kwargs, counts[module]) or "encode"
            counts[module] += 1
            tokens = kwargs.get("input_ids")
            if phase in ("prefill", "decode") and isinstance(tokens, Tensor):
                times.tokens[phase] = tokens.numel()
            inside.wait = waits.get(phase) if self._on_gpu and waits else None
            inside.waited = []
            if drains:
                self._synchronize()
                inside.drained = 0.0
            inside.begun.append(_Begun(module, phase, self._now(), time.perf_counter()))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inside = self._inside
            begun = inside.begun.pop()
            if begun.start is None:
                return
            now = self._now()
            marks.append((begun.phase, begun.start, now, inside.waited))
            if not self._on_gpu and not inside.begun:
                thread = threading.get_ident()
                waited = self._waited(begun.start, now)
                waited_in[thread] = waited_in.get(thread, 0.0) + waited
            if drains:
                host = time.perf_counter() - begun.host_start - inside.drained
                times.host.setdefault(begun.phase, []).append(host)

        def timing(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(forward)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return forward(*args, **kwargs)
                enter(module, args, kwargs)
                try:
                    return forward(*args, **kwargs)
                finally:
                    leave(module, args, None)

            return timed

        with contextlib.ExitStack() as hooks:
            for module in self._modules:
                compiled = self._compiled.get(module, ())
                if compiled or is_compiled_in_place(module):
                    timed = partial(timing, module)
                    hooks.enter_context(wrapped_outside(module, timed, compiled))
                    continue
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            # Earlier work must not count as part of the run.
            self._synchronize()
            self._follow()
            start = self._moment()
            yield times
            self._synchronize()
            end = self._moment()
        # A thread that ran the model may have ended. Its waits are those of its forwards, in turn.
        times.waited = max(self._waited(start, end), *waited_in.values(), 0.0)
        times.run = end.seconds - start.seconds - times.waited
        # Events are read after the run, because reading one earlier would wait for the GPU.
        for phase, begin, end, waited in marks:
            seconds = self._between(begin, end) - sum(self._between(*each) for each in waited)
            times.forwards.setdefault(phase, []).append(seconds)
        calls, overhead = self._calls, self._overhead()
        for phase, begin, end in calls:
            seconds = self._between(begin, end) - overhead
            times.attention[phase] = times.attention.get(phase, 0.0) + seconds

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time an attention call."""
        if self._drains:
            entered = time.perf_counter()
            self._synchronize()
            self._inside.drained += time.perf_counter() - entered
        start, inside = self._now(), self._inside
        if inside.wait is not None:
            with torch.cuda.device(self._device):
                # The wait is doubled, because timing the calls slows the host down.
                seconds = min(2 * inside.wait, LONGEST_WAIT)
                torch.cuda._sleep(int(1000 * seconds * CYCLES_PER_MS))
            asleep, start, inside.wait = start, self._now(), None
            inside.waited.append((asleep, start))
        yield
        self._calls.append((self._phase(), start, self._now()))

    def _overhead(self) -> float:
        """Return the time that a timed call takes without a kernel; 0 on a GPU, by its events."""
        if self._on_gpu or not self._calls:
            return 0.0
        self._calls = []
        for _ in range(EMPTY_CALLS):
            with self.call():
                pass
        return statistics.median(self._between(begin, end) for _, begin, end in self._calls)

    def _phase(self) -> str:
        return self._inside.begun[-1].phase if self._inside.begun else OUTSIDE

    def _now(self) -> Any:
        if not self._on_gpu:
            return self._moment()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        if self._on_gpu:
            return float(begin.elapsed_time(end) / 1000)
        return float(end.seconds - begin.seconds - self._waited(begin, end))

    def _follow(self) -> None:
        if not self._on_gpu:
            self._threads.follow()

    def _moment(self) -> _Moment:
        return _Moment(time.perf_counter(), {} if self._on_gpu else self._threads.read())

    @staticmethod
    def _waited(begin: _Moment, end: _Moment) -> float:
        """Return the longest wait of a thread between two moments, in seconds.

        A wait that is not shorter than the time between them began earlier, and its share of this
        time is unknown. It does not count, so the remaining time is positive.
        """
        wall = end.seconds - begin.seconds
        waits = (each / 1e9 for each in waits_ns(begin.threads, end.threads))
        return max((each for each in waits if each < wall), default=0.0)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
