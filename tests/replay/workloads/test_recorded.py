"""Directories of calls, ours and the older pickled ones, which must not run code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.errors import DatasetError
from capture.storage.call_file import PackedCall
from replay.bench.runner import replay
from replay.workers.sources import workload_of
from replay.workloads.call_metadata import outline
from replay.workloads.recorded import from_directory
from tests.factories import kernel, random_call, settings, store_part

CPU = torch.device("cpu")


def save_pickled(path: Path, **replaced: Any) -> dict[str, Any]:
    data = {
        "q": torch.randn(1, 4, 5, 8, dtype=torch.bfloat16),
        "k": torch.randn(1, 2, 7, 8, dtype=torch.bfloat16),
        "v": torch.randn(1, 2, 7, 8, dtype=torch.bfloat16),
        "kwargs": {"is_causal": True, "scale": 0.5, "dropout_p": 0.0},
        "call_idx": 6,
        **replaced,
    }
    torch.save(data, path)
    return data


class Trojan:
    """Unpickled carelessly, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def test_older_recordings_come_back_as_they_were(tmp_path: Path) -> None:
    data = save_pickled(tmp_path / "cogvideo_input_6.pt")
    workloads, note = from_directory(tmp_path)
    assert ([workload.name for workload in workloads], note) == (["cogvideo_input_6"], "")
    call = workloads[0].load(CPU)
    for tensor, name in ((call.query, "q"), (call.key, "k"), (call.value, "v")):
        assert torch.equal(tensor, data[name])
    assert (call.is_causal, call.scale, call.enable_gqa) == (True, 0.5, True)
    assert (call.origin.model, call.origin.call_index) == ("cogvideo", 6)
    assert (call.output, call.attn_mask) == (None, None)


def test_older_recordings_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0, 1):
        save_pickled(tmp_path / f"flux_input_{number}.pt")
    save_pickled(tmp_path / "a_input_3.pt")
    (tmp_path / "notes_input_final.pt").write_text("no number, no recording")
    names = [workload.name for workload in from_directory(tmp_path)[0]]
    assert names == ["a_input_3", *(f"flux_input_{number}" for number in (0, 1, 2, 10))]


def test_mask_and_missing_options(tmp_path: Path) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    save_pickled(tmp_path / "m_input_0.pt", kwargs={"attn_mask": mask})
    save_pickled(tmp_path / "m_input_1.pt", kwargs=None)
    masked, plain = (workload.load(CPU) for workload in from_directory(tmp_path)[0])
    assert masked.attn_mask is not None
    assert torch.equal(masked.attn_mask, mask)
    assert (plain.attn_mask, plain.is_causal, plain.scale) == (None, False, None)


def test_code_in_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    path = tmp_path / "evil_input_0.pt"
    save_pickled(path, kwargs=Trojan(trace))
    with pytest.raises(DatasetError, match=r"evil_input_0\.pt: not a readable recording"):
        from_directory(tmp_path)[0][0].load(CPU)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the test can fail: read carelessly, it does run
    assert trace.exists()


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"q": torch.zeros(2, 3)}, r"q, k and v must be tensors \(B, H, S, D\)"),
        ({"k": "text"}, r"q, k and v must be tensors \(B, H, S, D\)"),
        ({"call_idx": "first"}, "not a readable recording"),
        ({"kwargs": 3}, "not a readable recording"),
        ({"kwargs": {"scale": "large"}}, "not a readable recording"),
        ({"kwargs": {"attn_mask": "none"}}, "not a readable recording"),
        ({"k": torch.zeros(1, 3, 7, 8)}, "4 query heads, no multiple of 3 key/value heads"),
        ({"v": torch.zeros(1, 2, 6, 8)}, r"value of shape \(1, 2, 6, 8\) where"),
        ({"q": torch.zeros(1, 1, 1, 8).expand(1, 4, 2**30, 8)}, r"\d+ attention scores in a file"),
        ({"q": torch.zeros(1, 4, 5, 8).to_sparse()}, "its tensors are sparse"),
    ],
)
def test_what_is_no_recording_is_named(
    tmp_path: Path, replaced: dict[str, Any], sentence: str
) -> None:
    save_pickled(tmp_path / "x_input_0.pt", **replaced)
    with pytest.raises(DatasetError, match=rf"x_input_0\.pt: {sentence}"):
        from_directory(tmp_path)[0][0].load(CPU)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    save_pickled(tmp_path / "elsewhere")
    (tmp_path / "x_input_0.pt").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "x_input_1.pt")
    link, fifo = from_directory(tmp_path)[0]
    with pytest.raises(DatasetError, match="a symbolic link"):
        link.load(CPU)
    with pytest.raises(DatasetError, match="not a regular file"):
        fifo.load(CPU)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x_input_0.pt"
    save_pickled(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DatasetError, match=r"x_input_0\.pt: not a readable recording"):
        from_directory(tmp_path)[0][0].load(CPU)


def test_our_own_recordings(tmp_path: Path, make_call: Callable[..., AttentionCall]) -> None:
    save_pickled(tmp_path / "older_input_0.pt")  # ours win where both are
    call = make_call(origin={"call_index": 3}, with_output=True)
    PackedCall.of(call).write(tmp_path / "model-000003.safetensors")
    workloads, note = from_directory(tmp_path)
    assert [workload.name for workload in workloads] == ["model-000003"]
    assert "manifest.json is missing" in note
    loaded = workloads[0].load(CPU)
    assert torch.equal(loaded.query, call.query)
    path = tmp_path / "model-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DatasetError, match=r"model-000003\.safetensors: "):
        workloads[0].load(CPU)


@pytest.fixture
def damaged(tmp_path: Path, make_call: Callable[..., AttentionCall]) -> Path:
    """A directory of three recorded calls, of which one is cut off and one is a link."""
    paths = [tmp_path / f"model-{index}.safetensors" for index in range(3)]
    for index, path in enumerate(paths):
        PackedCall.of(make_call(origin={"call_index": index})).write(path)
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    paths[1].symlink_to(paths[1].rename(tmp_path / "elsewhere"))
    return tmp_path


def test_a_damaged_file_costs_one_row(damaged: Path) -> None:
    workloads, _ = from_directory(damaged)
    assert len(workloads) == 3
    for each in (workloads, [workload_of(json.loads(json.dumps(w.source))) for w in workloads]):
        rows = list(replay(each, [kernel("fast")], settings()))
        assert len([row for row in rows if row.kernel == "fast"]) == 1
        reasons = [row.reason for row in rows if not row.kernel]
        assert len(reasons) == 2
        assert "model-0.safetensors: not a readable" in reasons[0]
        assert "model-1.safetensors: a symbolic link" in reasons[1]


def test_directories_without_recordings(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no recorded call"):
        from_directory(tmp_path)
    with pytest.raises(DatasetError, match="no such directory"):
        from_directory(tmp_path / "missing")


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A call that two ranks share, and one of which a rank's part is missing."""
    for rank in (0, 1):
        store_part(tmp_path, random_call(q_heads=4), rank, [0, 1])
    store_part(tmp_path, random_call(q_heads=4), 0, [0, 1], call_index=1, step=1)
    return tmp_path


def test_parts_of_ranks_are_replayed_as_they_are_and_said_to_be_parts(parts: Path) -> None:
    workloads, note = from_directory(parts)
    assert [each.load(CPU).shape.q_heads for each in workloads] == [2, 2, 2]
    assert "these calls are parts that ranks share: --join-ranks replays whole calls" in note


def test_whole_calls_are_joined_on_request_also_by_a_worker(parts: Path) -> None:
    workloads, note = from_directory(parts, join_ranks=True)
    assert [each.name for each in workloads] == ["model.ranks0-1-000000"]
    assert "1 call is left out" in note
    again = workload_of(json.loads(json.dumps(workloads[0].source)))
    for each in (workloads[0], again):
        call = each.load(CPU)
        assert (each.name, call.origin.model) == ("model.ranks0-1-000000", "model")
        assert torch.equal(call.query, random_call(q_heads=4).query)


def test_a_whole_call_is_outlined_by_its_parts(parts: Path) -> None:
    whole, *_ = from_directory(parts, join_ranks=True)[0]
    part, *_ = from_directory(parts)[0]
    shape = outline(part).shape
    assert shape is not None
    assert outline(whole).shape == shape._replace(q_heads=2 * shape.q_heads)
    assert outline(whole).form != outline(part).form


def test_where_nothing_can_be_joined_that_is_said(parts: Path, tmp_path: Path) -> None:
    for path in parts.glob("*rank1*"):
        path.unlink()
    with pytest.raises(DatasetError, match=r"2 calls are left out.*leave out --join-ranks to"):
        from_directory(parts, join_ranks=True)
    whole = tmp_path / "whole"
    store_part(whole, random_call(q_heads=4), 0, [0], split="", split_ranks=[])
    with pytest.raises(DatasetError, match="every call is whole, none is shared by ranks"):
        from_directory(whole, join_ranks=True)
