"""The measurement of one sample of a kernel's time (`docs/method.md`).

On CUDA, a sample is the GPU time between two events on the stream. A wait, and the reads for a cold
cache, keep the GPU busy while the host enqueues the call, so launch cost is excluded. `host_ms` is
the launch cost after other work, as in a model (`replay.timing.host_load`). `layer_host_ms` also
includes work after the call, which is slower if the kernel's launcher has filled processor caches.

- `cold` reads a buffer of at least twice the L2 cache before each sample. Writes to the buffer
  would leave dirty lines, which go to memory while the kernel runs and take up to 9 µs (H100).
- `warm` runs the kernel once, untimed, before each sample.

On a CPU, a sample is the mean wall time of enough calls to last a millisecond. Calls that other
programs interrupt are left out and repeated (`replay.timing.interruptions`).

In a model, the previous layer runs the same kernel. `calls_before` therefore puts calls of the same
kernel before each sample, which matters for launches and for a GPU at its power limit.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch

from replay.rows.row import GpuState
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.gpu_state import gpu_is_lost, read_gpu_state
from replay.timing.host_load import RestOfLayer
from replay.timing.interruptions import Interruptions

Function = Callable[[], object]
Cache = Literal["cold", "warm"]

T = TypeVar("T")

TIMERS = {
    ("cuda", "cold"): "cuda-events-after-reads",
    ("cuda", "warm"): "cuda-events",
    ("cpu", "warm"): "perf_counter",
}
"""Names of timers by type of device and cache. `cuda-events` with a cold cache is from earlier
versions, which made the cache cold by writes."""

LEAST_UNRELATED_BYTES = 256 * 2**20
CYCLES_PER_MS = 2_000_000
"""Number of GPU cycles that take at least a millisecond at the usual 1–2 GHz."""
MAXIMUM_WAIT_MS = 5.0
"""Maximum wait of the GPU for the host. A longer wait would not help a kernel that synchronises."""

MINIMUM_CPU_SAMPLE_MS = 1.0
LONGEST_CPU_SAMPLE_MS = 20.0
"""Time after which a sample ends early, if calls became much slower than in the warm-up."""
MAXIMUM_CPU_CALLS = 1000
LEAST_SHARE = 0.67
"""Share of a sample's time without waits below which its whole calls are too few to represent it.
Long calls are interrupted more often than short ones, so the rest would favour long kernels."""
OFTEN = 0.1
"""Share of samples with interruptions above which each sample has one call."""


@dataclass(eq=False)
class Budget:
    """Time that all candidates share for their samples."""

    seconds: float


@dataclass(eq=False)
class Candidate:
    """Function to time, with its samples so far."""

    function: Function
    before: Function = lambda: None
    """Function that is called, untimed, right before each timed call."""
    after: Function = lambda: None
    """Function that is called, untimed, after the warm-up and after each sample."""
    rounds: int = 0
    is_over_time: bool = False
    warm_up_ms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    layer_host_ms: list[float] = field(default_factory=list)
    budget: Budget = field(default_factory=lambda: Budget(0.0))
    shares: list[float] = field(default_factory=list)
    """Share of each sample's time in which no thread waited for a processor; empty on a GPU."""
    interrupted: list[int] = field(default_factory=list)
    """Rounds whose sample consists of interrupted calls."""
    error: BaseException | None = None

    def forget(self) -> None:
        """Discard the samples so far."""
        for samples in (self.ms, self.host_ms, self.layer_host_ms, self.shares):
            samples.clear()
        self.interrupted.clear()

    def drop(self, error: BaseException) -> None:
        # The frames of the traceback hold the candidate's tensors, which may be gigabytes.
        traceback.clear_frames(error.__traceback__)
        self.error = error


class Timer(Protocol):
    """Timer of one type of device."""

    def warm_up_ms(self, function: Function) -> float:
        """Return the wall time of one call on an idle device, in milliseconds."""

    def calibrate(self, candidate: Candidate) -> float:
        """Choose how to sample a warmed-up candidate; return the milliseconds of a sample."""

    def sample(self, candidate: Candidate) -> None:
        """Run one sample, or enqueue the sample."""

    def collect(self) -> None:
        """Wait for enqueued samples, and add them to their candidates."""

    def state(self) -> GpuState | None:
        """Return the current clocks and power of the GPU; None on a CPU."""

    def is_lost(self) -> bool:
        """Return whether the device refuses all further work."""


def timer_for(device: torch.device, cache: Cache, calls_before: int) -> Timer:
    """Return the timer of a device."""
    if device.type == "cuda":
        return CudaTimer(device, cache, calls_before)
    if device.type != "cpu":
        raise ValueError(f"cannot time on {device}: only CPU and CUDA devices can be timed")
    if cache == "cold":
        raise ValueError('on the CPU the cache is always warm: ask for cache="warm"')
    return CpuTimer(calls_before)


class _Enqueued(NamedTuple):
    candidate: Candidate
    host_ms: float
    start: torch.cuda.Event
    end: torch.cuda.Event
    is_late: bool
    """True if the GPU was ready before the host had enqueued the call."""
    layer_host_ms: float = 0.0


class CudaTimer:
    """Timer with CUDA events around each call, on the device's current stream."""

    def __init__(self, device: torch.device, cache: Cache, calls_before: int) -> None:
        self.device = device
        self.cache = cache
        self.calls_before = max(calls_before, 1) if cache == "warm" else calls_before
        self.rest_of_layer = RestOfLayer(device)
        self.rest_of_layer()  # the first call initialises libraries
        self.wait_cycles: dict[Candidate, int] = {}
        self.synchronous: set[Candidate] = set()
        """Candidates that wait for the GPU themselves, so that the host is never ahead of it."""
        self.pending: list[_Enqueued] = []
        if cache == "cold":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            size = max(2 * l2_bytes, LEAST_UNRELATED_BYTES)
            self.unrelated = torch.zeros(size // 4, dtype=torch.float32, device=device)

    def warm_up_ms(self, function: Function) -> float:
        return first_call(function, self.device)[1]

    def calibrate(self, candidate: Candidate) -> float:
        self.rest_of_layer()
        host_ms = _wall_ms(candidate.function)
        torch.cuda.synchronize(self.device)
        # Double the time, because the host enqueues more slowly on a busy GPU and with cold caches.
        wait_ms = min(2 * host_ms, MAXIMUM_WAIT_MS)
        self.wait_cycles[candidate] = int(wait_ms * CYCLES_PER_MS)
        if self._enqueue(candidate).is_late:
            self.synchronous.add(candidate)
        return (self.calls_before + 1) * min(candidate.warm_up_ms) + wait_ms

    def sample(self, candidate: Candidate) -> None:
        with torch.cuda.device(self.device):
            for _ in range(self.calls_before):
                candidate.function()
            # Synchronize, because the host might wait for room in a full queue of launches.
            torch.cuda.synchronize(self.device)
            candidate.before()
            self.rest_of_layer()
            call = self._enqueue(candidate)
            layer_host_ms = call.host_ms + _wall_ms(self.rest_of_layer)
            candidate.after()
        if call.is_late:
            longest = int(MAXIMUM_WAIT_MS * CYCLES_PER_MS)
            self.wait_cycles[candidate] = min(2 * self.wait_cycles[candidate], longest)
        self.pending.append(call._replace(layer_host_ms=layer_host_ms))

    def _enqueue(self, candidate: Candidate) -> _Enqueued:
        """Enqueue a call behind a wait of the GPU."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self.wait_cycles[candidate])
        if self.cache == "cold":
            self.unrelated.sum()
        start.record()
        began = time.perf_counter()
        result = candidate.function()
        host_ms = (time.perf_counter() - began) * 1000
        end.record()
        is_late = start.query() and candidate not in self.synchronous
        del result  # frees the output outside the timed interval
        return _Enqueued(candidate, host_ms, start, end, is_late)

    def collect(self) -> None:
        torch.cuda.synchronize(self.device)
        for sample in self.pending:
            if sample.is_late:
                sample.candidate.interrupted.append(len(sample.candidate.ms))
            sample.candidate.ms.append(sample.start.elapsed_time(sample.end))
            sample.candidate.host_ms.append(sample.host_ms)
            sample.candidate.layer_host_ms.append(sample.layer_host_ms)
        self.pending.clear()

    def state(self) -> GpuState | None:
        return read_gpu_state(self.device)

    def is_lost(self) -> bool:
        return gpu_is_lost(self.device)


def calls_of_cpu_sample(call_ms: float) -> int:
    """Return the number of calls in a sample on a CPU; one call takes `call_ms`."""
    return min(int(MINIMUM_CPU_SAMPLE_MS / call_ms) + 1, MAXIMUM_CPU_CALLS)


class CpuTimer:
    """Timer with wall time, for calls that use all of torch's threads."""

    def __init__(self, calls_before: int) -> None:
        self.calls_before = calls_before
        self.calls: dict[Candidate, int] = {}
        self.quickest_ms: dict[Function, float] = {}
        """Shortest call of each function in the warm-up, if any was not interrupted."""
        self.interruptions = Interruptions()
        self.samples = self.disturbed = 0

    def warm_up_ms(self, function: Function) -> float:
        self.interruptions.begin_sample()
        self.interruptions.begin_call()
        milliseconds = first_call(function, "cpu")[1]
        if not self.interruptions.interrupted(milliseconds / 1000):
            quickest = self.quickest_ms.get(function, math.inf)
            self.quickest_ms[function] = min(quickest, milliseconds)
        self.interruptions.end_sample()
        return milliseconds

    def calibrate(self, candidate: Candidate) -> float:
        call_ms = min(candidate.warm_up_ms)
        if self.quickest_ms:
            call_ms = self.quickest_ms.get(candidate.function, MINIMUM_CPU_SAMPLE_MS)
        number = calls_of_cpu_sample(call_ms)
        self.calls[candidate] = number
        return call_ms * (self.calls_before + number)

    def sample(self, candidate: Candidate) -> None:
        number = self.calls[candidate]
        if self.disturbed > max(2, OFTEN * self.samples):
            number = 1  # threads seldom run undisturbed for longer
        whole: list[float] = []
        interrupted: list[float] = []
        for _ in range(self.calls_before):
            candidate.function()
        self.interruptions.begin_sample()
        try:
            while len(whole) < number:
                candidate.before()
                self.interruptions.begin_call()
                began = time.perf_counter()
                result = candidate.function()
                seconds = time.perf_counter() - began
                del result  # frees the output outside the timed interval
                is_interrupted = self.interruptions.interrupted(seconds)
                (interrupted if is_interrupted else whole).append(seconds)
                candidate.budget.seconds -= seconds
                is_long = (sum(whole) + sum(interrupted)) * 1000 > LONGEST_CPU_SAMPLE_MS
                if is_long and (whole or candidate.budget.seconds < 0):
                    break
        finally:
            share = self.interruptions.end_sample()
        candidate.after()
        self.samples += 1
        self.disturbed += bool(interrupted)
        if not whole or share < LEAST_SHARE:
            candidate.interrupted.append(len(candidate.ms))
        is_late = candidate.budget.seconds < 0 and len(candidate.ms) >= MINIMUM_ROUNDS
        if is_late and not whole:
            candidate.rounds = len(candidate.ms) + 1
        candidate.shares.append(share)
        candidate.ms.append(statistics.mean(whole or interrupted) * 1000)

    def collect(self) -> None:
        """Do nothing, because `sample` waits for its calls on a CPU."""

    def state(self) -> GpuState | None:
        """Return None, because there is no GPU."""
        return None

    def is_lost(self) -> bool:
        """Return False, because a CPU remains usable after every error."""
        return False


def first_call(function: Callable[[], T], device: torch.device | str) -> tuple[T, float]:
    """Return the result of `function`, and the milliseconds until the result was complete."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return result, (time.perf_counter() - start) * 1000


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _wall_ms(function: Function) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000
