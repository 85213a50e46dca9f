"""Fixtures: random calls, short samples, kernels of a test, and commands run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capture.call.attention_call import AttentionCall
from replay.bench.runner import replay_here
from replay.bench.settings import Settings
from replay.isolation.block import calls_of_block
from replay.kernels import registry
from replay.kernels.registry import Kernel
from replay.rows.row import Row
from replay.timing.interruptions import Interruptions
from tests.factories import made_workload, random_call, save_calls, settings
from tests.in_this_process import RunCli, runner

CALLS_TO_CHECK = 3
CALLS_TO_WARM_UP = 18
"""Calls of a kernel before it is timed, in samples of two, where `known_calls` is used."""


def few_calls(*figures: Any) -> int:
    """Return the number of calls in a block that this process runs: 16 at most."""
    return min(calls_of_block(*figures), 16)


@pytest.fixture(autouse=True)
def short_samples() -> Iterator[None]:
    """Shorten samples, warm-up and blocks, because no test depends on the spread of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.workers.judge_process.NULL_BLOCKS", 1)
        patch.setattr("replay.isolation.block.NULL_BLOCKS", 1)
        patch.setattr("replay.bench.output_check.calls_of_block", few_calls)
        patch.setattr("replay.timing.rounds.MINIMUM_WARM_UP_MS", 1.0)
        patch.setattr("replay.timing.timer.MINIMUM_CPU_SAMPLE_MS", 0.1)
        yield


@pytest.fixture(autouse=True)
def nothing_interrupts() -> Iterator[None]:
    """Let no sample in this process be interrupted, however busy the machine is."""
    undisturbed = partial(Interruptions, Path("no such folder"))
    with pytest.MonkeyPatch.context() as patch:  # undone after the patches of the test itself
        patch.setattr("replay.timing.timer.Interruptions", undisturbed)
        yield


@pytest.fixture
def known_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes 61 µs by the timer's clock, so that the number of calls is known."""
    looks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(looks) * 2.0**-14)
    monkeypatch.setattr("replay.timing.timer.time", clock)


@pytest.fixture
def quick() -> Settings:
    """Settings for three rounds on the CPU."""
    return settings()


@pytest.fixture
def replayed(quick: Settings) -> Callable[..., dict[str, Row]]:
    """`replayed(call, kernel, …, energy=True)` returns rows by kernel; keywords set `Settings`."""

    def run(call: AttentionCall, *kernels: Kernel, **fields: Any) -> dict[str, Row]:
        calls = [made_workload("call", lambda device: call)]
        return {row.kernel: row for row in replay_here(calls, kernels, replace(quick, **fields))}

    return run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A directory of three recorded calls, with a manifest."""
    others = ["torch-flash", "torch-efficient", "torch-cudnn"]
    by_math = {"backend": "torch-math", "disabled_backends": others}
    origins = [{**by_math, "call_index": at, "module": f"layers.{at}"} for at in range(3)]
    calls = (random_call(seed=at, with_output=True, origin=origins[at]) for at in range(3))
    return save_calls(tmp_path / "recorded", calls)


@pytest.fixture
def kernels() -> Iterator[Callable[..., Kernel]]:
    """`kernels(name, attention, …)` registers a kernel until the test ends."""
    registry.catalogue()
    before = dict(registry._kernels)

    def add(name: str, attention: Callable[..., Any], **fields: Any) -> Kernel:
        return registry.register(Kernel(name, attention, **fields))

    try:
        yield add
    finally:
        registry._kernels.clear()
        registry._kernels.update(before)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """`run_cli("suite", "flux")` returns exit code, stdout and stderr."""
    from replay.cli.main import main

    return runner(main, capsys)
