"""Times by phase, on modules that take a known time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replay.end_to_end.model_clock import OUTSIDE, Clock

CPU = torch.device("cpu")


class Denoiser(nn.Module):
    def forward(self, x: Tensor, timestep: int) -> Tensor:
        time.sleep(0.02 if timestep else 0.04)
        return x


class Writer(nn.Module):
    """Prefill where the cache is empty, decode afterwards."""

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
        return input_ids


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_every_forward_of_the_roots_has_its_time() -> None:
    model, signs = Denoiser(), []
    clock = Clock({"": model}, CPU, lambda: signs.append("alive"))
    with clock.running() as times:
        for step in range(3):
            model(torch.zeros(1), timestep=step)
        time.sleep(0.03)
    denoise = times.forwards["denoise"]
    assert len(denoise) == len(signs) == 3
    assert denoise[0] >= 0.04
    assert all(0.02 <= each < denoise[0] for each in denoise[1:])
    assert times.run >= sum(denoise) + 0.03
    assert times.attention == times.tokens == {}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with clock.running() as again:
        model(torch.zeros(1), timestep=1)
    assert len(again.forwards["denoise"]) == 1


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


def test_attention_calls_belong_to_the_phase_they_are_made_in() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            with clock.call():
                time.sleep(0.01)
            return x

    model = Attending()
    clock = Clock({"": model}, CPU)
    with clock.running() as times:
        with clock.call():
            time.sleep(0.02)
        for _ in range(3):
            model(torch.zeros(1), timestep=0)
    assert times.attention.keys() == {OUTSIDE, "denoise"}
    assert times.attention[OUTSIDE] >= 0.02
    assert 0.03 <= times.attention["denoise"] <= sum(times.forwards["denoise"])
    assert times.launch == {}  # on a CPU the call itself


def test_what_calls_cost_the_host_is_told_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({}, CPU)
    monkeypatch.setattr(clock, "_on_gpu", True)
    monkeypatch.setattr(clock, "_now", time.perf_counter)
    monkeypatch.setattr(clock, "_between", lambda begin, end: end - begin)
    monkeypatch.setattr(clock, "_synchronize", lambda: None)
    with clock.running() as times:
        for seconds in (0.5, 0.01, 0.01):  # the first had to wait for the GPU
            with clock.call():
                time.sleep(seconds)
    assert times.attention[OUTSIDE] >= 0.52
    assert 0.03 <= times.launch[OUTSIDE] < 0.5


def test_a_forward_that_raises_leaves_no_hook() -> None:
    model = Denoiser()
    with pytest.raises(TypeError), Clock({"": model}, CPU).running():
        model(torch.zeros(1))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_forwards_of_two_threads_keep_their_own_times() -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            time.sleep(0.3 if timestep else 0.1)
            return x

    model = Waiting()
    with Clock({"": model}, CPU).running() as times:
        # The one that begins first ends first, while the other runs.
        threads = [threading.Thread(target=model, args=(torch.zeros(1), step)) for step in (0, 1)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    first, second = times.forwards["denoise"]
    assert first >= 0.1  # 0.05 by the other's beginning
    assert second >= 0.3
