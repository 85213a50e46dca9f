"""Ranks of a distributed model record into one directory; their joined calls are the model's.

A single process records the expected calls: it runs the same model unsplit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capture import load
from capture.call.attention_call import AttentionCall
from tests.distributed_model import SCENARIOS, launch

pytestmark = pytest.mark.slow

SPLIT = ("tensor_parallel", "one_key_head", "exact", "ulysses", "queries")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two ranks' recordings `parts/SCENARIO` and one process's `whole/SCENARIO`.

    The last scenario kills a rank.
    """
    directory = tmp_path_factory.mktemp("ranks")
    launch(2, directory / "parts", *SPLIT, "differing_calls", "killed", fails=True)
    for name in SPLIT:
        SCENARIOS[name](directory / "whole" / name)
    return directory


def assert_same(joined: AttentionCall, whole: AttentionCall, *, tolerance: float) -> None:
    """Compare values with a tolerance for rounded sums, and everything else exactly."""
    ours, theirs = joined.tensors(), whole.tensors()
    assert {name: (each.shape, each.stride(), each.dtype) for name, each in ours.items()} == {
        name: (each.shape, each.stride(), each.dtype) for name, each in theirs.items()
    }
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=tolerance)
    plain = dict.fromkeys(ours)
    # Which libraries this process has imported depends on earlier tests.
    origin = replace(joined.origin, split_ranks=[], versions=whole.origin.versions)
    assert replace(joined, **plain, origin=origin) == replace(whole, **plain)


@pytest.mark.parametrize(
    ("scenario", "tolerance", "calls"),
    [
        ("exact", 0.0, 2),
        ("ulysses", 0.0, 1),
        ("queries", 1e-6, 1),
        ("tensor_parallel", 1e-6, 6),
        ("one_key_head", 1e-6, 6),
    ],
)
def test_joined_calls_are_those_of_the_unsplit_model(
    recordings: Path, scenario: str, tolerance: float, calls: int
) -> None:
    parts, whole = load(recordings / "parts" / scenario), load(recordings / "whole" / scenario)
    joined = parts.joined()
    assert (len(parts), len(joined), len(whole)) == (2 * calls, calls, calls)
    assert (joined.note, whole[0].origin.split) == ("", "")
    for ours, theirs in zip(joined, whole, strict=True):
        assert_same(ours, theirs, tolerance=tolerance)


def test_parts_name_their_heads(recordings: Path) -> None:
    parts = load(recordings / "parts" / "tensor_parallel")
    assert {(each.origin.rank, each.origin.heads) for each in parts.entries} == {
        (0, "0-1"),
        (1, "2-3"),
    }
    assert all(each.origin.split_ranks == [0, 1] for each in parts.entries)
    assert {each.origin.split for each in load(recordings / "parts" / "queries").entries} == {
        "queries"
    }


def test_ranks_with_different_calls_are_joined_by_module(recordings: Path) -> None:
    """An additional call on one rank does not shift others; calls of a single rank are reported."""
    parts = load(recordings / "parts" / "differing_calls")
    assert parts.note == ""
    joined = parts.joined()
    assert [call.origin.module for call in joined] == ["own", "shared", "shared"]
    assert [call.shape.q_heads for call in joined] == [2, 4, 4]
    whole = load(recordings / "whole" / "exact")
    for ours, theirs in zip(joined[1:], whole, strict=True):
        assert torch.equal(ours.query, theirs.query)
    assert joined.missing == ["model.rank0-000003 lacks the part of rank 1"]


def test_calls_that_a_killed_rank_stored_are_joined(recordings: Path) -> None:
    """Calls that both ranks stored are joined, even if one rank was killed."""
    parts = recordings / "parts"
    dataset = load(parts / "killed")
    assert sum(entry.origin.rank == 1 for entry in dataset.entries) == 1
    # The problem is reported until the other rank's capture ends and updates the manifest.
    said = f"finish it with `capture repair {parts / 'killed'}`"
    killed = f"the capture of model.rank1 was killed: 1 complete call; {said}"
    assert dataset.note in (killed, "")
    joined = dataset.joined()
    assert [call.shape.q_heads for call in joined] == [4]
    assert joined.missing in ([], ["model.rank0-000001 lacks the part of rank 1"])
