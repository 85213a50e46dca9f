"""The first calls are spread over models, layers and steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from capture.storage.call_file import PackedCall
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import from_directory
from replay.workloads.representative import halving, tiers
from replay.workloads.workload import Workload, random_workload, with_counterparts
from tests.factories import random_call


@pytest.fixture
def layers(tmp_path: Path) -> list[Workload]:
    """Calls of two models, with eight and three layers, in two steps each."""
    number = 0
    for step in range(2):
        for model, count in (("large", 8), ("small", 3)):
            for layer in range(count):
                call = random_call(origin={"module": f"layers.{layer}", "step": step})
                call = replace(call, origin=replace(call.origin, model=model, call_index=number))
                PackedCall.of(call).write(tmp_path / f"{number:06d}.{model}.safetensors")
                number += 1
    return from_directory(tmp_path)[0]


def test_halving_spreads_numbers() -> None:
    assert halving(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert [halving(count) for count in (0, 1, 2, 3)] == [[0][:0], [0], [0, 1], [0, 2, 1]]
    for count in range(70):
        assert sorted(halving(count)) == list(range(count))


def test_another_length_is_in_the_first_tier() -> None:
    calls = [
        random_workload(str(place), "suite", Spec(1, 2, 2, length, length, 32, 32), 0)
        for place, length in enumerate([64, 64, 4096])
    ]
    assert tiers(calls) == [0, 1, 0]


def test_counterparts_stay_with_their_call(layers: list[Workload]) -> None:
    found = tiers(with_counterparts(layers, 0))
    assert found[::3] == found[1::3] == found[2::3] == tiers(layers)
