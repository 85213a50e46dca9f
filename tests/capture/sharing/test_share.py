"""`capture share` writes a copy of a recording that others can use."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import scaled_dot_product_attention

from capture import load, share
from capture.cli.file_checks import check_files
from capture.errors import CaptureError, DatasetError
from replay.rows.row_files import save_jsonl
from tests.capture.storage.captures import alter, edit_manifest, started, write_dataset
from tests.capture.storage.servers import serving
from tests.capture.storage.test_remote import address
from tests.factories import accuracy, call_facts, random_call, row, speedup, speedup_over
from tests.in_this_process import RunCli

PROMPT = "a panda | <b>playing</b> guitar"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Recording of six layers with a prompt; the last two have longer calls."""
    calls = [
        random_call(
            q_len=16 if index < 4 else 64,
            kv_len=16 if index < 4 else 64,
            is_causal=index == 1,
            seed=index,
            with_output=True,
            origin={"module": f"layers.{index}", "call_index": index, "phase": "prefill"},
        )
        for index in range(6)
    ]
    # As in a fused projection, there are gaps between the rows of the query.
    calls = [replace(call, query=call.query.repeat(1, 1, 1, 3)[..., :32]) for call in calls]
    dataset = write_dataset(tmp_path / "recorded", *calls)
    settings = {"prompt": PROMPT}
    (capture,) = dataset.captures
    capture = replace(capture, settings=settings, calls_seen=60, device="cpu](x) <b>\n# y")
    dataset.captures = [capture]
    dataset.save_manifest()
    return dataset.directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of two kernels: call 1 is wrong, call 2 less so, call 3 fails, call 4 is slowest."""
    ratios = {("a", 1): 9.0, ("b", 2): 2.0}
    found = [
        row(
            kernel,
            call_facts(f"model-{index}"),
            1.0,
            "crash" if (kernel, index) == ("b", 3) else "ok",
            accuracy=replace(accuracy(), tolerance_ratio=ratios.get((kernel, index), 0.5)),
            speedup=speedup_over(against=speedup(0.5 if (kernel, index) == ("b", 4) else 2.0)),
        )
        for kernel in "ab"
        for index in range(6)
    ]
    save_jsonl(found, tmp_path / "rows.jsonl")
    return tmp_path / "rows.jsonl"


def indices(directory: str | Path) -> list[int]:
    return [entry.origin.call_index for entry in load(directory).entries]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"keep": 3}, [1, 2, 4]),
        ({"keep": "worst:2"}, [1, 3]),
        ({"keep": "slowest:1"}, [4]),
        ({"keep": "worst:2", "max_bytes": 20_000}, [3]),
    ],
)
def test_copy_has_the_chosen_calls_and_the_census(
    recorded: Path, rows: Path, tmp_path: Path, options: dict[str, Any], kept: list[int]
) -> None:
    needs_rows = ":" in str(options.get("keep"))
    share(recorded, tmp_path / "to" / "copy", rows=rows if needs_rows else None, **options)
    copy = load(tmp_path / "to" / "copy")
    assert os.listdir(tmp_path / "to") == ["copy"]
    assert (indices(copy.directory), copy.note) == (kept, "")
    assert all(check.good for check in check_files(copy))
    (capture,), (original,) = copy.captures, load(recorded).captures
    assert replace(capture, left_out="") == original
    assert capture.left_out.startswith(f"a copy of {len(kept)} of 6 recorded calls") == bool(
        options
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "worst:2"}, "--json rows.jsonl`, and name them with `rows=`"),
        ({"keep": "best:2"}, "`keep=` must be N, worst:N or slowest:N"),
        ({"rows": "rows.jsonl"}, "is for worst:N and slowest:N"),
        ({"keep": "worst:2", "rows": "no.jsonl"}, "cannot read no.jsonl"),
        ({"keep": "worst:2", "rows": "recorded/manifest.json"}, "line 1: not a row of"),
        ({"keep": "worst:2", "rows": "empty"}, "has no error of a kernel on these calls"),
        ({"max_bytes": 100}, "raise `max_bytes=`"),
        ({"license": "my own"}, "is not an identifier of the Hub"),
        ({"to": "hf://datasets/org/name"}, "needs `license=`"),
        ({"to": "hf://org/name", "license": "mit"}, "expected hf://datasets/USER/NAME"),
        ({"to": "https://example.org/x"}, "cannot be written over HTTP"),
        ({"to": "calls.zip"}, "share into a directory with `to=`"),
        ({"to": "full"}, "full exists: replace it with `overwrite=True`"),
        ({"to": "full", "overwrite": True}, "full is not a shared copy, so it stays"),
        ({"to": "recorded", "overwrite": True}, "recorded is not a shared copy, so it stays"),
        ({"benchmark": "mine.py"}, "name it benchmark_recorded.py"),
    ],
)
def test_request_that_cannot_be_met_is_refused_with_the_remedy(
    recorded: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(recorded.parent)
    Path("full").mkdir()
    Path("full", "notes.txt").write_text("mine")
    Path("empty").write_text("")
    before = sorted(Path().rglob("*"))
    with pytest.raises((CaptureError, DatasetError)) as refused:
        share("recorded", **{"to": "copy", **options})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert sorted(Path().rglob("*")) == before


def test_parts_that_ranks_share_are_copied_together(tmp_path: Path) -> None:
    origins = ({"split": "heads", "split_ranks": [0, 1], "rank": rank} for rank in range(2))
    parts = (random_call(origin={**each, "call_index": each["rank"]}) for each in origins)
    recorded = write_dataset(tmp_path / "recorded", *parts).directory
    with pytest.raises(CaptureError, match="all are copied: leave out `keep=` and `max_bytes=`"):
        share(recorded, tmp_path / "copy", keep=1)
    assert share(recorded, tmp_path / "copy").calls == 2


@pytest.mark.parametrize("fault", ["altered", "missing", "unfinished"])
def test_damaged_recording_is_refused_and_nothing_is_left(
    recorded: Path, tmp_path: Path, fault: str
) -> None:
    if fault == "altered":
        alter(recorded / "model-3.safetensors")
    elif fault == "missing":
        edit_manifest(recorded, lambda data: data["files"][0].pop("bytes"))
    else:
        started(recorded, "other", range(2))
    with pytest.raises(DatasetError, match=r"capture repair|altered since it was recorded"):
        share(recorded, tmp_path / "to" / "copy")
    assert not (tmp_path / "to").exists() or os.listdir(tmp_path / "to") == []


def test_earlier_copy_is_replaced_only_if_it_is_nothing_else(
    recorded: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    share(recorded, copy)
    share(recorded, copy, keep=1, overwrite=True)
    assert (indices(copy), len(os.listdir(copy))) == ([0], 3)
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(CaptureError, match=r"also contains notes\.txt, so it stays"):
        share(recorded, copy, overwrite=True)


def test_card_has_front_matter_and_names_what_is_inside(
    recorded: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    code, out, err = run_cli(
        "share", str(recorded), "--to", str(tmp_path / "copy"), "--license", "mit"
    )
    assert (code, out.startswith("shared 6 of 6 calls (")) == (0, True)
    assert f"the copy contains the prompt {PROMPT!r}" in err
    _, front, body = (tmp_path / "copy" / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert (fields["license"], fields["size_categories"], fields["viewer"]) == (
        "mit",
        ["n<1K"],
        False,
    )
    assert "attention-replay" in fields["tags"]
    assert (
        "| model | prefill | 1×2×64×32 | float32 | no mask | query strides (12288, 6144, 96" in body
    )
    assert "- weights: random\n- calls: 6 of 60 in the run\n" in body
    assert "- device: cpu\\](x) \\<b\\> \\# y\n" in body  # no name becomes Markdown
    assert "serve for timing, not for judging accuracy" in body
    assert f'\n      "prompt": "{PROMPT}"' in body  # indented, and therefore code
    assert "replay --dir copy" in body
    assert str(tmp_path) not in body


def test_copy_on_the_hub_is_one_commit_and_read_back(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    to = "hf://datasets/org/name"
    with serving("hub", tmp_path / "served") as server:
        address("hub", server, tmp_path, monkeypatch)
        share(recorded, to, license="mit", keep=3)
        assert indices(to) == [1, 2, 4]
        assert f"replay --dir {to}" in (server.root / "org" / "name" / "README.md").read_text()
        with pytest.raises(DatasetError, match="already holds a recording: replace it with"):
            share(recorded, to, license="mit")
        address("hub", server, tmp_path, monkeypatch)  # without what the library remembers
        share(recorded, to, license="mit", keep=1, overwrite=True)
        assert sorted(os.listdir(server.root / "org" / "name")) == [
            *("README.md", "manifest.json", "model-0.safetensors")
        ]
        assert sum("/commit/" in each for each in server.asked) == 2
        server.status = 403
        with pytest.raises(
            DatasetError,
            match=r"cannot be written \(.*\): check the network, and log in with `hf auth",
        ):
            share(recorded, to, license="mit", overwrite=True)


def test_copy_at_another_address_is_read_back(recorded: Path, cache: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    try:
        share(recorded, "memory://shared/calls", keep=3)
        assert len(indices("memory://shared/calls")) == 3
        with pytest.raises(DatasetError, match="already holds a recording: name another place"):
            share(recorded, "memory://shared/calls", overwrite=True)
    finally:
        fsspec.filesystem("memory").rm("/shared", recursive=True)


class Kernel(ModuleType):
    """Kernel of the Hub with FlashAttention's function."""

    factor = 1.0

    def flash_attn_func(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        options = {"is_causal": options["causal"], "scale": options["softmax_scale"]}
        tensors = (each.transpose(1, 2) for each in (query, key, value))
        output = scaled_dot_product_attention(*tensors, **options)
        return (output * self.factor).transpose(1, 2), None


def test_benchmark_runs_the_recorded_calls_and_finds_a_wrong_kernel(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test takes the steps of `kernels benchmark`, which needs a built kernel."""
    masked = random_call(attn_mask=torch.ones(9, 13).bool(), origin={"call_index": 6})
    calls = [*load(recorded), masked]
    write_dataset(recorded, *calls)
    script = tmp_path / "kernel" / "benchmarks" / "benchmark_recorded.py"
    shared = share(recorded, script.parent / "calls", benchmark=script)
    assert shared.benchmark is not None
    assert (shared.benchmark.calls, shared.benchmark.left_out) == (6, "1 with a mask")
    package = ModuleType("kernels.benchmark")
    package.Benchmark = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.benchmark", package)
    names: dict[str, Any] = {"__name__": "benchmark_module", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), names)
    found = names["RecordedCalls"]
    workloads = [name for name in dir(found) if name.startswith("benchmark_")]
    assert workloads == [f"benchmark_model-{index}" for index in range(6)]
    for index, (name, call) in enumerate(zip(workloads, calls, strict=False)):
        instance = found()
        instance.kernel, instance.device = Kernel("kernel"), "cpu"
        getattr(instance, name.replace("benchmark_", "setup_"))()
        assert torch.equal(instance.query, call.query)
        assert instance.query.stride() == call.query.stride()
        getattr(instance, name)()
        verify = getattr(instance, name.replace("benchmark_", "verify_"))
        assert torch.allclose(instance.out, verify(), atol=1e-2)
        instance.kernel.factor, instance.is_checked = 1.001, False
        getattr(instance, name)()
        with pytest.raises(RuntimeError, match=f"model-{index}: wrong in batch 0, head 0"):
            verify()
    with pytest.raises(CaptureError, match=r"benchmark_recorded\.py exists: replace it with"):
        share(recorded, tmp_path / "other", benchmark=script)
