"""Timing on a real GPU satisfies relations that hold on any GPU; no absolute time is tested."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay.bench.resources import with_peak_bytes
from replay.timing.gpu_state import read_gpu_state
from replay.timing.rounds import measure
from replay.timing.timer import Function, first_call


def spin(milliseconds: float) -> Callable[[], None]:
    """Return a function that keeps the GPU busy for a while without using memory."""
    cycles = int(milliseconds * 1_000_000)
    return lambda: torch.cuda._sleep(cycles)


def medians(candidates: dict[str, Function], cache: str) -> dict[str, float]:
    found = measure(candidates, "cuda", cache=cache, rounds=15)  # type: ignore[arg-type]
    return {name: statistics.median(samples.ms) for name, samples in found.items()}


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_twice_the_work_takes_twice_the_time(cache: str) -> None:
    ms = medians({"one": spin(1), "two": spin(2)}, cache)
    assert 1.9 < ms["two"] / ms["one"] < 2.1


class Read(TorchDispatchMode):
    """Records the size in bytes of each tensor that is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("cache", "per_sample"), [("cold", 1), ("warm", 0)])
def test_cold_cache_holds_nothing_of_the_inputs(cache: str, per_sample: int) -> None:
    rounds, l2_bytes = 5, torch.cuda.get_device_properties(0).L2_cache_size
    with Read() as read:
        measure({"spin": spin(0.1)}, "cuda", cache=cache, rounds=rounds)  # type: ignore[arg-type]
    large = sum(size >= 2 * l2_bytes for size in read.sizes)
    assert large >= rounds * per_sample
    assert bool(large) == bool(per_sample)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_launch_cost_is_hidden_and_reported_apart(cache: str) -> None:
    data = torch.zeros(16, device="cuda")

    def slow_to_launch() -> None:
        time.sleep(0.002)
        data.add_(1)

    samples = measure(
        {"slow to launch": slow_to_launch, "plain": lambda: data.add_(1)},
        "cuda",
        cache=cache,  # type: ignore[arg-type]
        rounds=15,
    )
    assert statistics.median(samples["slow to launch"].ms) < 0.1
    host_ms = samples["slow to launch"].host_ms
    assert host_ms is not None
    assert host_ms >= 2
    assert (samples["plain"].host_ms or 1) < 1
    for each in samples.values():
        assert each.host_ms is not None
        assert len(each.layer_host_ms) == len(each.ms)
        assert statistics.median(each.layer_host_ms) > each.host_ms


def test_candidate_that_raises_is_dropped() -> None:
    def failing() -> None:
        torch.empty(2**50, device="cuda")

    samples = measure({"failing": failing, "plain": spin(0.1)}, "cuda", rounds=5)
    assert isinstance(samples["failing"].error, torch.cuda.OutOfMemoryError)
    assert len(samples["plain"].ms) == 5


def test_calls_before_a_sample_end_before_it() -> None:
    calls = 0

    def function() -> None:
        nonlocal calls
        calls += 1
        torch.cuda.synchronize()  # like kernels that plan on the host
        spin(20)()

    samples = measure({"one": function}, "cuda", rounds=5, calls_before=3)["one"]
    # Two calls find out how long the host and the GPU take.
    assert calls == samples.warm_up_calls + 2 + 5 * 4
    assert samples.host_ms is not None
    assert samples.host_ms < statistics.median(samples.ms) / 2


def test_first_call_waits_for_the_result() -> None:
    data = torch.zeros(1, device="cuda")

    def function() -> torch.Tensor:
        spin(20)()
        return data + 1

    result, milliseconds = first_call(function, "cuda")
    assert milliseconds > 5
    assert result.item() == 1


def test_peak_memory_counts_output_and_workspace() -> None:
    data = torch.zeros(2**20, device="cuda")  # 4 MiB
    assert with_peak_bytes(lambda: data + 1, "cuda")[1] == 4 * 2**20
    assert with_peak_bytes(lambda: (data + 1) + 1, "cuda")[1] == 8 * 2**20


def test_gpu_state_is_read_with_nvml() -> None:
    pytest.importorskip("pynvml")
    spin(100)()
    state = read_gpu_state("cuda")
    assert state is not None
    assert state.sm_clock_mhz is None or state.sm_clock_mhz > 100
    assert state.temperature_c is None or 0 < state.temperature_c < 120
