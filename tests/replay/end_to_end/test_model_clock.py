"""Times by phase of modules that advance a simulated clock by a known time."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from replay.end_to_end import model_clock
from replay.end_to_end.model_clock import OUTSIDE, Clock
from replay.timing.thread_times import ThreadTimes

CPU = torch.device("cpu")

Pass = Callable[[float], None]


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pass:
    """`let_pass(seconds)` advances the simulated clock."""
    now = 0.0

    def let_pass(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(model_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(model_clock, "ThreadTimes", lambda: ThreadTimes(tmp_path))
    return let_pass


class Denoiser(nn.Module):
    def __init__(self, let_pass: Pass) -> None:
        super().__init__()
        self.let_pass = let_pass

    def forward(self, x: Tensor, timestep: int) -> Tensor:
        self.let_pass(0.02 if timestep else 0.04)
        return x + 0


class Writer(nn.Module):
    """Language model whose first call is prefill and whose later calls are decode."""

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
        return input_ids


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_every_forward_of_the_roots_has_its_time(let_pass: Pass) -> None:
    model, signs = Denoiser(let_pass), []
    clock = Clock({"": model}, CPU, lambda: signs.append("alive"))
    with clock.running() as times:
        for step in range(3):
            model(torch.zeros(1), timestep=step)
        let_pass(0.03)
    assert len(signs) == 3
    assert times.forwards == {"denoise": pytest.approx([0.04, 0.02, 0.02])}
    assert times.run == pytest.approx(0.11)
    assert times.attention == times.tokens == {}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with clock.running() as again:
        model(torch.zeros(1), timestep=1)
    assert len(again.forwards["denoise"]) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_timed_outside_its_one_graph(in_place: bool) -> None:
    model, counter = Denoiser(lambda seconds: None), CompileCounter()
    if in_place:
        model.compile(backend=counter, fullgraph=True)
    run = model if in_place else torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        with Clock({"": model}, CPU).running() as times:
            for step in (1, 1, 1):
                run(torch.zeros(1) + step, timestep=step)
        assert len(times.forwards["denoise"]) == 3
    assert counter.frame_count == 1


def test_tokens_and_phases_of_a_language_model() -> None:
    model = Writer()
    with Clock({"": model}, CPU).running() as times:
        model(input_ids=torch.zeros(2, 7, dtype=torch.int64), past_key_values=Cache(0))
        for length in (7, 8):
            model(input_ids=torch.zeros(2, 1, dtype=torch.int64), past_key_values=Cache(length))
    assert {phase: len(each) for phase, each in times.forwards.items()} == {
        "prefill": 1,
        "decode": 2,
    }
    assert times.tokens == {"prefill": 14, "decode": 2}


def test_attention_calls_belong_to_the_phase_they_are_made_in(let_pass: Pass) -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            with clock.call():
                let_pass(0.01)
            let_pass(0.04)
            return x

    model = Attending()
    clock = Clock({"": model}, CPU)
    with clock.running() as times:
        with clock.call():
            let_pass(0.02)
        for _ in range(3):
            model(torch.zeros(1), timestep=0)
    assert times.attention == pytest.approx({OUTSIDE: 0.02, "denoise": 0.03})
    assert times.forwards == {"denoise": pytest.approx([0.05] * 3)}


@pytest.mark.parametrize("in_own_thread", [False, True])
def test_time_without_a_processor_does_not_count(
    let_pass: Pass, tmp_path: Path, in_own_thread: bool
) -> None:
    caller, worker = threading.get_native_id(), 2**22 + 1  # no thread of Linux has this number

    def waited(*threads: tuple[int, int]) -> None:
        for thread, ms in threads:
            (tmp_path / f"{thread}").mkdir(exist_ok=True)
            (tmp_path / f"{thread}" / "schedstat").write_text(f"7 {ms * 1_000_000} 7\n")

    class Waiting(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            let_pass(0.05)
            # The worker's last wait began long before this pass.
            waited((threading.get_native_id(), 30 * (timestep + 1)), (worker, 1000 * timestep))
            if in_own_thread:
                waited((caller, 40))
            return x

    def run() -> None:
        waited((threading.get_native_id(), 0))
        for step in range(2):
            model(torch.zeros(1), timestep=step)

    waited((caller, 0), (worker, 0))
    model = Waiting()
    with Clock({"": model}, CPU).running() as times:
        if in_own_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
    assert times.forwards == {"denoise": pytest.approx([0.02, 0.02])}
    assert (times.run, times.waited) == pytest.approx((0.04, 0.06))


def test_drained_run_measures_the_host_without_its_waits(
    let_pass: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enqueuing(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            for _ in range(2):
                with clock.call():
                    let_pass(0.001)
                let_pass(0.004)
            return x

    model = Enqueuing()
    clock = Clock({"": model}, CPU)
    monkeypatch.setattr(clock, "_synchronize", lambda: let_pass(0.3))
    with clock.running(drains=True) as times:
        for step in range(2):
            model(torch.zeros(1), timestep=step)
    assert times.host == {"denoise": pytest.approx([0.01, 0.01])}


def test_forwards_of_two_threads_keep_their_own_times(let_pass: Pass) -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            begun[timestep].set()
            assert may_end[timestep].wait(60)
            return x

    begun, may_end = ([threading.Event(), threading.Event()] for _ in range(2))
    model = Waiting()
    with Clock({"": model}, CPU).running() as times:
        # The forward pass that starts first ends first, while the other is running.
        threads = [threading.Thread(target=model, args=(torch.zeros(1), step)) for step in (0, 1)]
        for thread, has_begun in zip(threads, begun, strict=True):
            thread.start()
            assert has_begun.wait(60)
            let_pass(0.05)
        for thread, ends in zip(threads, may_end, strict=True):
            let_pass(0.2)
            ends.set()
            thread.join()
    # If both passes shared one start time, a duration would be 0.25 or 0.5.
    assert times.forwards == {"denoise": pytest.approx([0.3, 0.45])}
