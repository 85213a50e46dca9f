"""Each faulty kernel fails where the answer key states, and healthy kernels never fail."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replay.bench.runner import replay_here
from replay.diagnosis.poison import poisoned
from replay.kernels.registry import find
from replay.rows.row import Row
from replay.workloads.recorded import from_directory
from tests.factories import settings
from tests.replay.doctor_faults.answers import FAULTS, HEALTHY, HERE, Fault, module
from tests.replay.doctor_faults.recordings import HEALTHY as HEALTHY_CALLS
from tests.replay.doctor_faults.recordings import RECORDINGS, Recording


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Recording], Path]:
    """`written(name, recording)` returns the directory of a recording, which is made once."""
    root = tmp_path_factory.mktemp("recordings")

    def directory(name: str, recording: Recording) -> Path:
        if not (root / name).exists():
            recording.write(root / name)
        return root / name

    return directory


def rows_of(directory: Path, kernels: list[str]) -> list[Row]:
    workloads, _ = from_directory(directory)
    # Unwritten memory may hold another kernel's right answer.
    leaves_memory = any("output_unwritten" in each for each in kernels)
    with poisoned(0.7) if leaves_memory else contextlib.nullcontext():
        rows = list(replay_here(workloads, [find(each) for each in kernels], settings(rounds=1)))
    return [row for row in rows if row.kernel in kernels]


def is_faulty(row: Row) -> bool:
    return row.status != "ok" or bool(row.changed_inputs)


NONFINITE = "nonfinite-input"

QUICK = ("softmax_without_maximum", "never_passed_on", "query_takes_the_scale")
"""Faults tested quickly: one appears in some steps, one in every step, one changes its inputs."""


def cases() -> list[Any]:
    return [
        pytest.param(
            fault,
            id=f"{fault.cause}-{fault.function}",
            marks=() if fault.function in QUICK else pytest.mark.slow,
        )
        for fault in FAULTS
        if fault.cause != NONFINITE
    ]


def shortened(name: str) -> Recording:
    """Return a recording of one step if its faults appear in every step."""
    recording = RECORDINGS[name]
    some = any(fault.steps for fault in FAULTS if fault.recording == name)
    return recording if some or recording.steps > 2 else replace(recording, steps=1)


@pytest.fixture(scope="module")
def replayed(written: Callable[[str, Recording], Path]) -> Callable[[str], list[Row]]:
    """`replayed(name)` returns the rows of all kernels that fail on a recording."""

    @functools.cache
    def rows(name: str) -> list[Row]:
        kernels = [fault.kernel for fault in FAULTS if fault.recording == name]
        return rows_of(written(name, shortened(name)), kernels)

    return rows


@pytest.mark.parametrize("fault", cases())
def test_kernel_fails_where_the_answer_says(
    fault: Fault, replayed: Callable[[str], list[Row]]
) -> None:
    recording = shortened(fault.recording)
    rows = [row for row in replayed(fault.recording) if row.kernel == fault.kernel]
    steps = range(recording.steps) if fault.steps is None else fault.steps
    found = {(row.call.module, row.call.step): row.reason for row in rows if is_faulty(row)}
    assert found.keys() == {(module(layer), step) for layer in fault.layers for step in steps}, (
        found
    )
    changed = {row.call.module for row in rows if row.changed_inputs}
    assert changed == (fault.modules if fault.cause == "input-changed" else set())


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.cause == NONFINITE])
def test_inputs_are_not_finite_where_the_answer_says(fault: Fault, tmp_path: Path) -> None:
    recording = RECORDINGS[fault.recording]
    recording.write(tmp_path / "calls")
    calls = [each.load(torch.device("cpu")) for each in from_directory(tmp_path / "calls")[0]]
    spoilt = {
        (call.origin.module, call.origin.step)
        for call in calls
        if any(
            bool((each != each).any() | (each == torch.inf).any())
            for each in call.tensors().values()
        )
    }
    steps = range(recording.steps) if fault.steps is None else fault.steps
    assert spoilt == {(module(layer), step) for layer in fault.layers for step in steps}


@pytest.mark.slow
def test_healthy_kernels_fail_nowhere(written: Callable[[str, Recording], Path]) -> None:
    """This test runs one step; `benchmarks.doctor_score` runs all steps."""
    directory = written("healthy", replace(HEALTHY_CALLS, steps=1))
    rows = rows_of(directory, [f"{HERE / 'healthy.py'}:{function}" for function in HEALTHY])
    assert len(rows) == 25 * len(HEALTHY)
    assert not [(row.kernel, row.call.module, row.reason) for row in rows if is_faulty(row)]


def test_each_cause_has_five_kernels() -> None:
    assert min(Counter(fault.cause for fault in FAULTS).values()) >= 5
    assert len({fault.kernel for fault in FAULTS}) == len(FAULTS)
