"""The machine's peaks are measured, and a roof follows from them."""

import itertools
from collections.abc import Callable

import pytest
import torch

from replay.rows.row import Roof
from replay.timing import roof
from replay.timing.roof import measure_roof


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "COPIED_BYTES", {"cpu": 1000})
    monkeypatch.setattr(roof, "SECONDS", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fastest_call_counts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(roof, "SECONDS", 0.005)
    monkeypatch.setattr(roof, "SIDES", {"cpu": (32, 64)})
    taken: list[float] = []

    def slow_at_first(work: Callable[[], object]) -> float:
        work()
        taken.append(0.002 if len(taken) % 3 else 9.0)
        return taken[-1]

    monkeypatch.setattr(roof, "_cpu_seconds", slow_at_first)
    monkeypatch.setattr(roof.Interruptions, "interrupted", lambda _, seconds: False)
    found = measure_roof(dtype, torch.device("cpu"))
    assert found == Roof(
        pytest.approx(2 * 64**3 / 0.002 / 1e12), pytest.approx(2 * 1000 / 0.002 / 1e9)
    )


@pytest.mark.parametrize("is_ever_idle", [True, False])
def test_interrupted_calls_count_only_without_others(
    monkeypatch: pytest.MonkeyPatch, is_ever_idle: bool
) -> None:
    monkeypatch.setattr(roof, "LONGEST_SECONDS", 0.02 + 600 * is_ever_idle)
    monkeypatch.setattr(roof, "SIDES", {"cpu": (32,)})
    taken = itertools.cycle([1.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(roof, "_cpu_seconds", lambda work: next(taken))
    monkeypatch.setattr(
        roof.Interruptions, "interrupted", lambda _, seconds: not is_ever_idle or seconds < 2.0
    )
    found = measure_roof(torch.float32, torch.device("cpu"))
    seconds = 2.0 if is_ever_idle else 1.0
    assert found == Roof(
        pytest.approx(2 * 32**3 / seconds / 1e12), 2 * 1000 / seconds / 1e9, not is_ever_idle
    )


def test_bandwidth_limits_calls_of_low_intensity() -> None:
    machine = Roof(tflops=2.0, gb_per_s=100.0)
    assert machine.at(10.0) == pytest.approx(1.0)
    assert machine.at(20.0) == pytest.approx(2.0)
    assert machine.at(400.0) == 2.0


def test_slow_dtype_costs_no_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "SIDES", {"cpu": (16, 2**20)})
    monkeypatch.setattr(roof, "_cpu_seconds", lambda work: (work(), 1.0)[1])
    found = measure_roof(torch.float16, torch.device("cpu"))
    assert found.tflops == pytest.approx(8192 / 1e12)


@pytest.mark.parametrize("error", [RuntimeError("not implemented"), torch.OutOfMemoryError()])
def test_roof_is_none_without_a_product(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch, "matmul", refuse)
    assert measure_roof(torch.float32, torch.device("cpu")) is None
