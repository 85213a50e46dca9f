"""What a sample consists of; CUDA is pretended, and only writes down what it is asked."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from replay.timing import timer
from replay.timing.timer import Candidate, CpuTimer, CudaTimer

CPU = torch.device("cpu")


def test_a_cpu_sample_lasts_long_enough_to_be_timed() -> None:
    calls = 0

    def function() -> None:
        nonlocal calls
        calls += 1

    candidate = Candidate(function, warm_up_ms=[0.05])
    timer = CpuTimer(calls_before=0)
    cost_ms = timer.calibrate(candidate)
    assert calls == 0
    timer.sample(candidate)
    assert calls == 21  # a millisecond of 0.05 ms calls
    assert cost_ms == pytest.approx(21 * 0.05)


def test_calls_before_a_sample_are_not_timed_but_cost() -> None:
    calls: list[str] = []
    candidate = Candidate(lambda: calls.append("call"), warm_up_ms=[2.0])
    timer = CpuTimer(calls_before=3)
    assert timer.calibrate(candidate) == pytest.approx(4 * 2.0)
    timer.sample(candidate)
    assert len(calls) == 4


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CUDA was asked, and the layer's launches, in order."""
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 1.5

    class Layer:
        def __init__(self, device: torch.device) -> None:
            pass

        def __call__(self) -> None:
            asked.append("layer")

    def flush(*arguments: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(zero_=lambda: asked.append("flush"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("synchronise"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    properties = SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", flush)
    monkeypatch.setattr(timer, "RestOfLayer", Layer)
    return asked


SAMPLE = ["event", "call", "event", "layer"]


@pytest.mark.parametrize(
    ("cache", "calls_before", "expected"),
    [
        ("cold", 0, ["synchronise", "layer", "wait", "flush", *SAMPLE]),
        ("cold", 2, ["call", "call", "synchronise", "layer", "wait", "flush", *SAMPLE]),
        ("warm", 0, ["call", "synchronise", "layer", "wait", *SAMPLE]),
        ("warm", 2, ["call", "call", "synchronise", "layer", "wait", *SAMPLE]),
    ],
)
def test_a_sample_on_cuda(
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
