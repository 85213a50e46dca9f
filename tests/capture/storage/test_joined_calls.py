"""Files with parts of one call are joined, and incomplete calls are reported."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.errors import DatasetError
from capture.storage.dataset import load
from capture.storage.joined_calls import JoinedCalls
from tests.capture.storage.captures import alter
from tests.factories import random_call, store_part


def joined(directory: Path) -> JoinedCalls:
    return load(directory).joined()


CALL = random_call(q_heads=4, with_output=True, origin={"module": "layers.0", "phase": "encode"})


def test_call_is_joined_in_the_order_of_its_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        store_part(tmp_path, CALL, rank, [1, 0], call_index=3 + rank)
    (call,) = joined(tmp_path)
    assert torch.equal(call.query, CALL.query)
    assert call.output is not None
    assert torch.equal(call.output, CALL.output if CALL.output is not None else call.query)
    assert call.origin == replace(CALL.origin, split_ranks=[1, 0], call_index=4)
    assert [each.name for each in joined(tmp_path).calls] == ["model.ranks0-1-000004"]


@pytest.mark.parametrize(
    "other",
    [
        {"module": "layers.1"},
        {"step": 1},
        {"forward_index": 1},
        {"phase": "decode"},
        {"call_in_step": 1},
    ],
    ids=str,
)
def test_calls_from_elsewhere_are_not_parts(tmp_path: Path, other: dict[str, Any]) -> None:
    store_part(tmp_path, CALL, 0, [0, 1])
    store_part(tmp_path, CALL, 1, [0, 1], **other)
    found = joined(tmp_path)
    assert list(found) == []
    assert found.missing == [
        "model.rank0-000000 lacks the part of rank 1",
        "model.rank1-000000 lacks the part of rank 0",
    ]
    assert (
        found.note == f"2 calls are left out, because a rank's part is missing: {found.missing[0]}"
    )


def test_forward_passes_of_one_step_are_joined_separately(tmp_path: Path) -> None:
    for rank, forward in itertools.product((0, 1), (4, 5)):
        store_part(tmp_path, CALL, rank, [0, 1], call_index=forward, forward_index=forward, step=2)
    assert [call.origin.forward_index for call in joined(tmp_path)] == [4, 5]


def test_ranks_that_work_in_groups(tmp_path: Path) -> None:
    """The two tensor-parallel groups are data parallel to each other."""
    other = random_call(q_heads=4, seed=1, origin={"module": "layers.0", "phase": "encode"})
    for rank in (0, 1):
        store_part(tmp_path, CALL, rank, [0, 1])
        store_part(tmp_path, other, rank + 2, [2, 3])
    found = joined(tmp_path)
    assert [call.name for call in found.calls] == ["model.ranks0-1-000000", "model.ranks2-3-000000"]
    assert [torch.equal(call.query, CALL.query) for call in found] == [True, False]
    assert torch.equal(found[1].query, other.query)
    assert [len(found[:1]), len(found), found.note] == [1, 2, ""]


def test_whole_calls_stay(tmp_path: Path) -> None:
    for rank in (0, 1):
        store_part(tmp_path, CALL, rank, [0, 1], split="", split_ranks=[])
    assert [call.origin.rank for call in joined(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ({"split": "batches"}, "is split by 'batches' (only heads and queries"),
        ({"split_ranks": [0, 2]}, "recorded by rank 1, which is not among the sharing ranks"),
        ({"split_ranks": [0, 1, 1]}, "recorded by rank 1, which is not among the sharing ranks"),
        ({"split_ranks": [-1, 1]}, "recorded by rank 1, which is not among the sharing ranks"),
        ({"rank": None}, "recorded by rank None, which is not among the sharing ranks"),
    ],
)
def test_parts_of_nothing_are_left_out(tmp_path: Path, origin: dict[str, Any], reason: str) -> None:
    store_part(tmp_path, CALL, 1, [0, 1], **origin)
    (missing,) = joined(tmp_path).missing
    assert reason in missing


def test_two_parts_of_one_rank(tmp_path: Path) -> None:
    store_part(tmp_path, CALL, 0, [0, 1])
    store_part(tmp_path, CALL, 0, [0, 1], call_index=7)
    store_part(tmp_path, CALL, 1, [0, 1])
    assert joined(tmp_path).missing == ["model.rank0-000000 has several parts of one rank"]


def test_parts_that_do_not_fit_together_are_reported_when_loaded(tmp_path: Path) -> None:
    store_part(tmp_path, CALL, 0, [0, 1])
    store_part(tmp_path, replace(CALL, scale=2.0), 1, [0, 1])
    with pytest.raises(DatasetError, match=r"ranks0-1-000000 cannot be joined: .* differ in scale"):
        joined(tmp_path)[0]


def test_altered_part_is_found(tmp_path: Path) -> None:
    for rank in (0, 1):
        store_part(tmp_path, CALL, rank, [0, 1])
    load(tmp_path).save_manifest()
    alter(tmp_path / "model.rank1-000000.safetensors")
    with pytest.raises(DatasetError, match="rank1-000000"):
        joined(tmp_path)[0]
    assert len(list(load(tmp_path, check=False).joined())) == 1
