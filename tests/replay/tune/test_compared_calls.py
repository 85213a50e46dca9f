"""Calls that a tuning compares, which stand for the recorded calls that it has no time for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attention_replay as ar
from capture.storage.call_file import FileEntry
from capture.storage.dataset import Dataset
from replay.rows.row import CallFacts
from replay.tune.compared_calls import of_one_step, rounds_of_a_call, with_nearest
from tests.factories import row


class Layer(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return sdpa(states, states, states)


@pytest.fixture
def entries(tmp_path: Path) -> list[FileEntry]:
    """Return the recorded calls of five layers. The last sees fewer keys."""
    model = nn.Sequential(*(Layer() for _ in range(5)))
    states = torch.randn(1, 2, 8, 16)
    with ar.record(model, tmp_path, max=5, sample="first"):
        for index, layer in enumerate(model):
            layer(states if index < 4 else states[:, :, :5])
    return Dataset.open(str(tmp_path)).entries


def test_left_out_calls_have_the_rows_of_the_nearest_call_of_their_form(
    entries: list[FileEntry],
) -> None:
    rows = [
        row(kernel, call=CallFacts(entries[at].path.stem, module=str(at), step=0, call_index=at))
        for at in (0, 3)
        for kernel in ("one", f"two of {at}")
    ]
    added = with_nearest(rows, entries)[len(rows) :]
    found = [
        (each.call.name, each.call.module, each.call.call_index, each.kernel) for each in added
    ]
    near = {1: 0, 2: 3}
    assert found == [
        (entries[at].path.stem, str(at), at, kernel)
        for at, source in near.items()
        for kernel in ("one", f"two of {source}")
    ]


@pytest.mark.parametrize(("rounds", "expected"), [(30, 30), (4, 4)])
def test_calls_of_a_form_share_their_rounds(
    entries: list[FileEntry], rounds: int, expected: int
) -> None:
    assert rounds_of_a_call(entries, rounds) == expected
    assert rounds_of_a_call(entries[:4], rounds) == min(rounds, 8)
    assert rounds_of_a_call(entries[:4] * 10, rounds) == min(rounds, 6)


def test_one_step_stands_for_others_beside_calls_without_steps() -> None:
    places = [("denoise", 2), ("denoise", 5), ("denoise", 8), ("denoise", 9), ("encode", 0)]
    entries: list[Any] = [
        SimpleNamespace(origin=SimpleNamespace(phase=phase, step=step)) for phase, step in places
    ]
    assert of_one_step(entries) == [entries[1], entries[4]]
    assert of_one_step(entries[:3]) == [entries[1]]
    assert of_one_step(entries[4:]) == entries[4:]
