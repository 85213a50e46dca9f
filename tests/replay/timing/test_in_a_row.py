"""Back-to-back calls timed by the host's clock; the GPU and the clock are simulated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from replay.timing import in_a_row

CUDA = torch.device("cuda")
STEP_MS = 0.001
"""Simulated time that each operation of the host takes."""


class Gpu:
    """Simulated GPU with two streams."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.ends = {"current": 0.0, "other": 0.0}

    def enqueue(self, ms: float, stream: str = "current") -> float:
        """Enqueue work that takes `ms`, and return its end time."""
        self.now_ms += STEP_MS
        self.ends[stream] = max(self.now_ms, self.ends[stream]) + ms
        return self.ends[stream]

    def synchronize(self, device: object = None) -> None:
        self.now_ms = max(self.now_ms, *self.ends.values())

    def is_done(self) -> bool:
        self.now_ms += STEP_MS
        return self.now_ms >= self.ends["current"]


class Mark:
    """Simulated number in pinned memory that the host can read."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, float("inf")

    def pin_memory(self) -> Mark:
        return self

    def copy_(self, one: object, non_blocking: bool) -> None:
        assert non_blocking
        self._at = self._gpu.enqueue(0.0)

    def item(self) -> int:
        self._gpu.now_ms += STEP_MS
        return int(self._gpu.now_ms >= self._at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    pretended = Gpu()
    cycles_per_ms = in_a_row.CYCLES_PER_MS
    stream = SimpleNamespace(query=pretended.is_done)
    for name, does in {
        "synchronize": pretended.synchronize,
        "_sleep": lambda cycles: pretended.enqueue(cycles / cycles_per_ms),
        "current_stream": lambda device: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: Mark(pretended))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    clock = SimpleNamespace(perf_counter=lambda: pretended.now_ms / 1000)
    monkeypatch.setattr(in_a_row, "time", clock)
    return pretended


@pytest.mark.parametrize("call_ms", [0.01, 0.4, 40.0])
@pytest.mark.parametrize("said_ms", [0.001, 0.4])
def test_calls_in_a_row_show_their_true_time(gpu: Gpu, call_ms: float, said_ms: float) -> None:
    seen = in_a_row.look(lambda: gpu.enqueue(call_ms), CUDA, said_ms, host_ms=0.01)
    assert seen.left_ms == 0.0
    assert seen.gpu_ms == pytest.approx(call_ms, abs=5 * STEP_MS)


@pytest.mark.parametrize("here_ms", [0.0, 0.2])
def test_work_on_another_stream_is_found(gpu: Gpu, here_ms: float) -> None:
    def call() -> None:
        gpu.enqueue(here_ms)
        gpu.ends["other"] = max(gpu.ends.values())
        gpu.enqueue(0.2, "other")

    seen = in_a_row.look(call, CUDA, 0.2, host_ms=0.01)
    assert seen.left_ms == pytest.approx(0.2, abs=10 * STEP_MS)


def test_time_of_other_processes_is_not_counted(gpu: Gpu) -> None:
    """Interruptions occur every few milliseconds: often in a row of calls, rarely in one call."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        gpu.enqueue(0.4 if calls % 5 else 20.0)

    seen = in_a_row.look(call, CUDA, 0.4, host_ms=0.01)
    assert seen.gpu_ms == pytest.approx(0.4, abs=5 * STEP_MS)


def test_call_that_waits_inside_has_no_time(gpu: Gpu) -> None:
    def call() -> None:
        gpu.enqueue(0.4)
        gpu.synchronize()

    assert in_a_row.look(call, CUDA, 0.4, host_ms=0.4) == in_a_row.InARow(0.0, None)


def test_nothing_is_known_on_a_cpu() -> None:
    calls: list[str] = []
    seen = in_a_row.look(lambda: calls.append("call"), torch.device("cpu"), 1.0, 1.0)
    assert seen == in_a_row.InARow(0.0, None)
    assert not calls


@pytest.mark.parametrize(
    ("call_ms", "left_ms", "calls", "found"),
    [
        (40.0, [0.01], 1, 0.0),
        (1.0, [0.01, 0.01], 1 + 6, 0.0),
        (0.001, [0.01, 0.01], 1 + 20, 0.0),
        (0.001, [0.01, 9.0, 0.01], 1 + 40, 0.0),
        # The excess over the time of an empty stream is measured three times in a row.
        (0.001, [0.01, 9.0, 5.0, 7.0, 1.0, 2.0, 3.0], 1 + 60, 4.0 / 20),
        (0.001, [0.01, 9.0, 5.0, 7.0, 6.0, 6.0, 6.0], 1 + 60, 0.0),
        # A negative time means that the stream finished before the host: the time left is unknown.
        (0.001, [0.01, -0.01, 5.0, 7.0, 1.0, 2.0, 3.0], 1 + 60, 4.0 / 20),
        # The host is never ahead, because the calls wait inside; little time is left.
        (0.001, [0.01, -0.01, -0.02, -0.03], 1 + 60, 0.0),
        (0.001, [0.01, -9.0, -5.0, -7.0, 1.0, 2.0, 3.0], 1 + 60, 4.0 / 20),
        # The time is measured after one call, because calls in a row overlap.
        (1.0, [9.0, 5.0, 7.0, 1.0, 2.0, 3.0], 3, 4.0),
    ],
)
def test_suspected_work_is_checked_again(
    monkeypatch: pytest.MonkeyPatch, call_ms: float, left_ms: list[float], calls: int, found: float
) -> None:
    made = 0

    def call() -> None:
        nonlocal made
        made += 1

    answers = iter(left_ms)

    def waits(function: Callable[[], object], *_: object) -> in_a_row._Waits:
        function()
        left = next(answers)
        return in_a_row._Waits(7.0, abs(left), host_was_ahead=left > 0)

    monkeypatch.setattr(in_a_row, "_waits", waits)
    seen = in_a_row.look(call, torch.device("cuda"), call_ms, host_ms=0.02)
    assert (made, seen.left_ms) == (calls, pytest.approx(found))
    assert list(answers) == []
