"""Two ranks that share a model over NCCL record its calls, which are then joined and replayed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture import load
from capture.cli.file_checks import check_files
from tests.distributed_model import launch
from tests.gpu.replayed_rows import replayed_rows

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SCENARIOS = ("exact", "tensor_parallel", "one_key_head", "medium", "ulysses", "queries")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of recordings: `parts/SCENARIO` of two ranks, `whole/SCENARIO` of one process."""
    directory = tmp_path_factory.mktemp("ranks")
    launch(2, directory / "parts", *SCENARIOS, RANKS_ON="cuda")
    launch(1, directory / "whole", *SCENARIOS, RANKS_ON="cuda")
    return directory


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative L1 error."""
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().sum() / expected.abs().sum())


@pytest.mark.parametrize(
    ("scenario", "limit"),
    [
        ("exact", 0.0),
        ("ulysses", 0.0),
        ("queries", 0.0),
        ("tensor_parallel", 1e-5),
        ("one_key_head", 1e-5),
        ("medium", 0.02),
    ],
)
def test_joined_inputs_are_those_of_the_unsplit_model(
    recordings: Path, scenario: str, limit: float
) -> None:
    """Projections with fewer rows may round differently: in bfloat16, by 1 % of a value."""
    parts, whole = load(recordings / "parts" / scenario), load(recordings / "whole" / scenario)
    joined = parts.joined()
    assert (len(parts), len(joined), joined.note) == (2 * len(whole), len(whole), "")
    for ours, theirs in zip(joined, whole, strict=True):
        assert ours.shape == theirs.shape
        for name in ("query", "key", "value"):
            found, expected = getattr(ours, name), getattr(theirs, name)
            assert (found.stride(), found.dtype) == (expected.stride(), expected.dtype)
            assert relative_error(found, expected) <= limit, name
        assert ours.output is not None
        assert theirs.output is not None
        assert relative_error(ours.output, theirs.output) <= limit + 1e-3


def test_each_rank_names_its_heads_and_its_gpu(recordings: Path) -> None:
    entries = load(recordings / "parts" / "medium").entries
    assert {(each.origin.rank, each.origin.heads) for each in entries} == {(0, "0-7"), (1, "8-15")}
    assert all(each.origin.device.startswith("cuda (") for each in entries)
    assert all(finding.good for finding in check_files(load(recordings / "parts" / "medium")))


def test_joined_calls_are_replayed(recordings: Path, tmp_path: Path) -> None:
    source = ["--dir", str(recordings / "parts" / "medium"), "--join-ranks"]
    rows = replayed_rows(tmp_path, *source, "--kernels", "torch-flash,torch-cudnn")
    assert {row["kernel"] for row in rows} >= {"torch-flash", "torch-cudnn"}
    for row in rows:
        assert row["status"] == "ok"
        assert (row["call"]["shape"]["q_heads"], row["call"]["shape"]["kv_heads"]) == (16, 4)
        assert row["accuracy"]["reference"]["cosine"] > 0.999
