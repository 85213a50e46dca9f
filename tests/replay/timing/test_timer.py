"""The steps of a timed sample, with a simulated CUDA that logs its calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from replay.timing import timer
from replay.timing.timer import Candidate, CpuTimer, CudaTimer

CPU = torch.device("cpu")


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock; otherwise, a sample could end at a call that waited for the processor."""
    monkeypatch.setattr(timer.time, "perf_counter", lambda: 0.0)


@pytest.mark.usefixtures("no_time_passes")
def test_cpu_sample_lasts_long_enough_to_be_timed() -> None:
    calls = 0

    def function() -> None:
        nonlocal calls
        calls += 1

    candidate = Candidate(function, warm_up_ms=[0.05])
    timer = CpuTimer(calls_before=0)
    cost_ms = timer.calibrate(candidate)
    assert calls == 0
    timer.sample(candidate)
    assert calls == 21  # calls of 0.05 ms, for a millisecond
    assert cost_ms == pytest.approx(21 * 0.05)


def test_calls_before_a_sample_are_not_timed_but_cost() -> None:
    calls: list[str] = []
    candidate = Candidate(lambda: calls.append("call"), warm_up_ms=[2.0])
    timer = CpuTimer(calls_before=3)
    assert timer.calibrate(candidate) == pytest.approx(4 * 2.0)
    timer.sample(candidate)
    assert len(calls) == 4


def test_cpu_sample_ends_where_calls_became_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # each call takes one second
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(clock))
    candidate = Candidate(lambda: None, warm_up_ms=[0.01])
    cpu = CpuTimer(calls_before=0)
    cpu.calibrate(candidate)
    cpu.sample(candidate)
    assert candidate.ms == [1000]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of CUDA calls and kernel launches, in order."""
    asked: list[str] = []

    class Event:
        is_over = False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def query(self) -> bool:
            return Event.is_over

        def record(self) -> None:
            asked.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 1.5

    class Layer:
        def __init__(self, device: torch.device) -> None:
            pass

        def __call__(self) -> None:
            asked.append("layer")

    def unrelated(*arguments: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(sum=lambda: asked.append("read"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("synchronise"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    properties = SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "zeros", unrelated)
    monkeypatch.setattr(timer, "RestOfLayer", Layer)
    return asked


SAMPLE = ["event", "call", "event", "layer"]


@pytest.mark.parametrize(
    ("cache", "calls_before", "expected"),
    [
        ("cold", 0, ["synchronise", "layer", "wait", "read", *SAMPLE]),
        ("cold", 2, ["call", "call", "synchronise", "layer", "wait", "read", *SAMPLE]),
        ("warm", 0, ["call", "synchronise", "layer", "wait", *SAMPLE]),
        ("warm", 2, ["call", "call", "synchronise", "layer", "wait", *SAMPLE]),
    ],
)
def test_cuda_sample_makes_its_calls_in_order(
    log: list[str], cache: timer.Cache, calls_before: int, expected: list[str]
) -> None:
    on_cuda = CudaTimer(CPU, cache, calls_before)
    candidate = Candidate(lambda: log.append("call"), warm_up_ms=[2.0])
    cost_ms = on_cuda.calibrate(candidate)
    assert cost_ms >= 2.0 * (1 + expected[: -len(SAMPLE)].count("call"))
    log.clear()
    on_cuda.sample(candidate)
    assert log == expected
    assert not candidate.ms
    on_cuda.collect()
    assert candidate.ms == [1.5]
    (host_ms,), (layer_host_ms,) = candidate.host_ms, candidate.layer_host_ms
    assert 0 < host_ms < layer_host_ms
    on_cuda.collect()
    assert len(candidate.ms) == 1


@pytest.mark.parametrize("waits_itself", [False, True])
def test_cuda_sample_of_a_late_host_is_interrupted(
    log: list[str], monkeypatch: pytest.MonkeyPatch, waits_itself: bool
) -> None:
    """The sample contains launches, unless the call waits for the GPU, which takes its time too."""
    on_cuda, candidate = CudaTimer(CPU, "cold", 0), Candidate(lambda: None, warm_up_ms=[2.0])
    monkeypatch.setattr(torch.cuda.Event, "is_over", waits_itself)
    on_cuda.calibrate(candidate)
    on_cuda.wait_cycles[candidate] = 1000
    for late in (True, False, True):
        monkeypatch.setattr(torch.cuda.Event, "is_over", late)
        on_cuda.sample(candidate)
    on_cuda.collect()
    assert candidate.interrupted == ([] if waits_itself else [0, 2])
    assert on_cuda.wait_cycles[candidate] == (1000 if waits_itself else 4000)
