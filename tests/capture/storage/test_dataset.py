"""A dataset is read back unchanged, and damage is reported."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from capture import load
from capture.call.attention_call import AttentionCall, Origin
from capture.call.attention_variant import AttentionVariant
from capture.cli.file_checks import check_files
from capture.errors import DatasetError
from capture.storage.call_file import FORMAT, FileEntry, PackedCall
from capture.storage.dataset import MANIFEST, Dataset
from tests.capture.storage.captures import alter, edit_manifest, write_dataset
from tests.factories import bits, normal
from tests.variant_calls import paged_call

MakeCall = Callable[..., AttentionCall]


@pytest.fixture
def dataset(tmp_path: Path, make_call: MakeCall) -> Dataset:
    calls = (make_call(call_index=index, output=None) for index in range(3))
    return write_dataset(tmp_path / "data", *calls)


def same(left: AttentionCall, right: AttentionCall) -> bool:
    """Return whether two calls, with their strides and options, are equal bit for bit."""
    tensors = left.tensors()
    return (
        tensors.keys() == right.tensors().keys()
        and all(
            other.shape == tensor.shape
            and other.stride() == tensor.stride()
            and other.dtype == tensor.dtype
            and torch.equal(bits(other), bits(tensor))
            for name, tensor in tensors.items()
            for other in [right.tensors()[name]]
        )
        and (
            (left.is_causal, left.scale, left.enable_gqa, left.dropout_p, left.origin)
            == (right.is_causal, right.scale, right.enable_gqa, right.dropout_p, right.origin)
        )
    )


def random_layout_call(seed: int) -> AttentionCall:
    """Return a call with random sizes, strides, dtypes and options."""
    chance = random.Random(seed)
    batch, kv_heads, group, q_len, kv_len, dim, v_dim = (chance.randint(1, 3) for _ in range(7))
    dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])

    def tensor(heads: int, length: int, size: int) -> Tensor:
        layouts = {
            "dense": torch.randn(batch, heads, length, size),
            "BSHD": torch.randn(batch, length, heads, size).transpose(1, 2),
            "slice of a longer cache": torch.randn(batch, heads, length + 4, size)[:, :, :length],
            "repeated heads": torch.randn(batch, 1, length, size).expand(-1, heads, -1, -1),
        }
        return layouts[chance.choice(list(layouts))].to(dtype)

    masks = [
        None,
        torch.ones(1, 1, q_len, kv_len, dtype=torch.bool),
        torch.randn(1, 1, q_len, kv_len).expand(batch, kv_heads * group, -1, -1),
    ]
    return AttentionCall(
        query=tensor(kv_heads * group, q_len, dim),
        key=tensor(kv_heads, kv_len, dim),
        value=tensor(kv_heads, kv_len, v_dim),
        attn_mask=chance.choice(masks),
        output=chance.choice([None, tensor(kv_heads * group, q_len, v_dim)]),
        is_causal=chance.choice([True, False]),
        scale=chance.choice([None, chance.uniform(0.01, 10)]),
        enable_gqa=group > 1,
        dropout_p=chance.choice([0.0, 0.1]),
        origin=Origin(
            model=chance.choice(["model", "modèle"]),
            module="a.b.0",
            call_index=chance.randint(0, 10**7),
            seed=chance.choice([None, -(2**63), 2**64 - 1]),
            versions={"torch": torch.__version__},
        ),
    )


@pytest.mark.parametrize("seed", range(30))
def test_round_trip_with_and_without_the_manifest(tmp_path: Path, seed: int) -> None:
    call = random_layout_call(seed)
    dataset = write_dataset(tmp_path, call)
    assert same(dataset[0], call)
    (tmp_path / MANIFEST).unlink()
    rebuilt = load(tmp_path)
    assert same(rebuilt[0], call)
    assert "is missing: the files were read instead" in rebuilt.note


def test_nothing_but_plain_files(dataset: Dataset) -> None:
    names = sorted(path.name for path in dataset.directory.iterdir())
    assert names == [MANIFEST, *(f"model-{index}.safetensors" for index in range(3))]
    # Any safetensors reader can load the values.
    assert set(load_file(dataset.entries[0].path)) == {"query", "key", "value"}
    assert json.loads((dataset.directory / MANIFEST).read_text())["format"] == FORMAT


def test_indexing_slicing_iterating(dataset: Dataset) -> None:
    indices = [call.origin.call_index for call in dataset]
    assert indices == [0, 1, 2]
    assert len(dataset) == 3
    assert dataset[-1].origin.call_index == 2
    assert [call.origin.call_index for call in dataset[1:]] == [1, 2]
    assert dataset.nbytes == sum(entry.path.stat().st_size for entry in dataset.entries)
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()}, "causal"),
        (
            {"attn_mask": torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16).expand(1, 2, 5, 5)},
            "no mask",
        ),
        ({"attn_mask": torch.arange(5) < 3}, "padding"),
        ({"attn_mask": torch.arange(5) < 3, "seqused_k": torch.tensor([3])}, ""),
    ],
)
def test_header_has_the_structure_of_the_mask(
    make_call: MakeCall, fields: dict[str, Tensor], words: str
) -> None:
    assert PackedCall.of(make_call(**fields)).header.mask_structure == words


def test_tensors_that_share_memory_are_stored(tmp_path: Path, make_call: MakeCall) -> None:
    shared = torch.randn(1, 2, 5, 8)
    call = make_call(query=shared, key=shared, value=shared[..., :3], output=shared[..., 2:5])
    assert same(write_dataset(tmp_path / "data", call)[0], call)


def findings_of(dataset: Dataset) -> dict[str, str]:
    """Return the faults that a check finds, by file."""
    return {item.path.name: item.text for item in check_files(dataset) if not item.good}


def test_outputs_are_recomputed(
    tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # Additive masks of -inf may mask every key of a row; some backends then return NaN.
    calls = [make_call(), make_call(value=torch.full((1, 2, 5, 8), torch.nan))]
    calls = [replace(call, output=attention(**call.arguments())) for call in calls]
    paged = paged_call([9, 6], 4, variant=AttentionVariant(softcap=2.0))
    calls += [
        replace(calls[0], origin=replace(calls[0].origin, device="cuda (NVIDIA H200)")),
        make_call(output=None),
        make_call(dropout_p=0.1),
        replace(paged, output=torch.zeros_like(paged.query)),
    ]
    numbered = [
        replace(call, origin=replace(call.origin, model="model", call_index=index))
        for index, call in enumerate(calls)
    ]
    findings = check_files(write_dataset(tmp_path / "data", *numbered))
    assert all(finding.good for finding in findings)
    assert [finding.text for finding in findings] == [
        "intact; output bit-identical",
        "intact; output bit-identical",
        "intact; output bit-identical (recomputed on cpu, recorded on cuda)",
        "intact; no output recorded",
        "intact; dropout 0.1 cannot be recomputed",
        "intact; cannot be recomputed, as SDPA has no soft cap 2, pages of 4",
    ]


def test_sums_in_another_order_pass(tmp_path: Path, make_call: MakeCall) -> None:
    """The values cancel: their mean is about a hundredth of their size."""
    query, key, value = (
        normal(1, 2, 1, 8),
        normal(1, 2, 8192, 8, seed=1),
        normal(1, 2, 8192, 8, seed=2),
    )
    weights = (query @ key.mT * 8**-0.5).softmax(-1)
    one_by_one = (weights.mT * value).cumsum(2)[:, :, -1:]
    fields = {"query": query, "key": key, "value": value}
    data = write_dataset(
        tmp_path / "data",
        make_call(**fields, output=one_by_one),
        make_call(call_index=1, **fields, output=one_by_one * (1 + 1e-4)),
        make_call(call_index=2, **fields, output=torch.zeros_like(one_by_one)),
    )
    assert [finding.good for finding in check_files(data)] == [True, False, False]
    right, *_ = findings_of(data).values()
    assert float(right.partition("L1 ")[2].split()[0]) > 4 * torch.finfo(torch.float32).eps


def test_wrong_outputs_are_found(tmp_path: Path, make_call: MakeCall) -> None:
    data = write_dataset(
        tmp_path / "data",
        make_call(),
        make_call(call_index=1, output=torch.zeros(1, 2, 5, 4)),
        make_call(call_index=2, query=torch.randn(1, 2, 5, 8, dtype=torch.float64)),
    )
    wrong, dtype, shape = findings_of(data).values()
    assert wrong.startswith("output differs by relative L1")
    assert "output of shape (1, 2, 5, 4), but the other tensors require (1, 2, 5, 8)" in shape
    assert dtype.startswith("output cannot be recomputed here: ")
    assert "\n" not in dtype


# One of three files is damaged; the others stay readable.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, r"\d+ bytes, but \d+ were recorded"),
        (alter, r"altered since it was recorded \(checksum differs\)"),
        (Path.unlink, "missing"),
    ],
)
def test_damaged_file_is_named(dataset: Dataset, damage: Callable[[Path], None], told: str) -> None:
    path = dataset.entries[1].path
    damage(path)
    again = load(dataset.directory)
    [(name, text)] = findings_of(again).items()
    assert name == path.name
    assert re.search(told, text)
    with pytest.raises(DatasetError, match=str(path)):
        again[1]
    assert [again[index].origin.call_index for index in (0, 2)] == [0, 2]


@pytest.mark.parametrize("damage", [truncate, empty, make_foreign])
def test_without_a_manifest_damaged_files_are_left_out_and_named(
    dataset: Dataset, damage: Callable[[Path], None]
) -> None:
    path = dataset.entries[1].path
    damage(path)
    (dataset.directory / MANIFEST).unlink()
    again = load(dataset.directory)
    assert [call.origin.call_index for call in again] == [0, 2]
    [damaged] = again.damaged
    [(name, text)] = findings_of(again).items()
    assert name == path.name
    assert str(damaged.error) == f"{path}: {text}"


def save_header(path: Path, header: str) -> None:
    save_file(load_file(path), path, {"attention-replay": header})


@pytest.mark.parametrize("header", ["", "{", "[]", '{"origin": {}}'])
def test_damaged_header_is_named(dataset: Dataset, header: str) -> None:
    path = dataset.entries[1].path
    save_header(path, header)
    with pytest.raises(DatasetError, match=f"{path}: its header is damaged"):
        FileEntry.read(path)
    (dataset.directory / MANIFEST).unlink()
    assert len(load(dataset.directory)) == 2


def test_header_of_a_later_version_may_say_more_about_the_origin(dataset: Dataset) -> None:
    path = dataset.entries[0].path
    header = dataset.entries[0].header.to_json()
    header["origin"]["mood"] = "sunny"
    save_header(path, json.dumps(header))
    assert FileEntry.read(path).origin == dataset.entries[0].origin


def test_capture_that_the_manifest_does_not_describe_has_a_record(dataset: Dataset) -> None:
    edit_manifest(dataset.directory, lambda data: data["captures"].clear())
    again = load(dataset.directory)
    assert len(again) == 3
    assert [capture.model for capture in again.captures] == ["model"]


def without(name: str) -> Callable[[str], str]:
    def changed(text: str) -> str:
        data = json.loads(text)
        del data[name]
        return json.dumps(data)

    return changed


@pytest.mark.parametrize(
    "change",
    [
        *(lambda _, text=text: text for text in ("", "{", "[]", "7", "\x00", '"text"')),
        *map(without, ("files", "captures")),
        lambda text: text.replace('"model":', '"model_of":', 1),
    ],
)
def test_damaged_manifest_is_rebuilt_from_the_files(
    dataset: Dataset, change: Callable[[str], str]
) -> None:
    manifest = dataset.directory / MANIFEST
    manifest.write_text(change(manifest.read_text()))
    again = load(dataset.directory)
    assert len(again) == 3
    assert "manifest.json is damaged" in again.note
    assert "without a census" in again.note


@pytest.mark.parametrize("version", ["attention-replay/3", None])
def test_manifest_of_another_format_is_not_guessed_at(dataset: Dataset, version: Any) -> None:
    edit_manifest(dataset.directory, lambda data: data.update(format=version))
    told = rf"format {version!r}, but this version reads '{FORMAT}': use the version that"
    with pytest.raises(DatasetError, match=told):
        load(dataset.directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item.pop("call"),
        lambda item: item["call"]["layouts"].pop("query"),
        lambda item: item["call"].update(scale=1e999),
        lambda item: item["call"]["origin"].update(module=[]),
        lambda item: item.update(bytes="many"),
        lambda item: item.update(checksum="md5:0"),
        lambda item: item.pop("checksum"),
    ],
)
def test_damaged_entry_costs_one_file(
    dataset: Dataset, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit_manifest(dataset.directory, lambda data: change(data["files"][1]))
    again = load(dataset.directory)
    assert [call.origin.call_index for call in again] == [0, 2]
    [damaged] = again.damaged
    path = dataset.entries[1].path
    assert damaged.path == path
    assert str(damaged.error).startswith(f"{path}: its entry in the manifest is damaged (")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "{absolute}",
        "a/../../evil.safetensors",
        "a/b.safetensors",
        *("..", ".", "", "/", "...safetensors", ".hidden.safetensors", "a\0.safetensors"),
        "x" * 300,
        3,
        None,
    ],
)
def test_manifest_cannot_point_outside_its_directory(
    dataset: Dataset, tmp_path: Path, name: Any
) -> None:
    outside = tmp_path / "evil.safetensors"
    shutil.copy(dataset.entries[0].path, outside)
    if isinstance(name, str):
        name = name.format(absolute=outside)
    edit_manifest(dataset.directory, lambda data: data["files"][0].update(file=name))
    again = load(dataset.directory)
    assert [call.origin.call_index for call in again] == [1, 2]
    [damaged] = again.damaged
    assert damaged.path == dataset.directory / MANIFEST


def test_repeated_files_and_captures_are_listed_once(dataset: Dataset) -> None:
    def twice(data: Any) -> None:
        data["files"].append(data["files"][0])
        data["captures"].append({**data["captures"][0], "device": "last"})

    edit_manifest(dataset.directory, twice)
    again = load(dataset.directory)
    assert len(again) == 3
    assert [capture.device for capture in again.captures] == ["last"]
    assert "lists captures twice" in again.note
    [damaged] = again.damaged
    assert str(damaged.error).startswith(str(dataset.entries[0].path))
    assert "listed twice" in damaged.error.reason


def test_what_a_manifest_cannot_check_is_reported(dataset: Dataset) -> None:
    def without_checksum(data: Any) -> None:
        data["files"][1].update(checksum=None)

    edit_manifest(dataset.directory, without_checksum)
    assert "lacks the checksums of 1 of its files" in load(dataset.directory).note


def test_manifest_and_the_files_agree(dataset: Dataset) -> None:
    def other_module(data: Any) -> None:
        data["files"][1]["call"]["origin"]["module"] = "another"

    edit_manifest(dataset.directory, other_module)
    again = load(dataset.directory)
    assert again[0].origin.module == again[2].origin.module == "attention"
    with pytest.raises(DatasetError, match="its header differs from the manifest"):
        again[1]


def test_altered_file_is_loaded_without_checks(dataset: Dataset) -> None:
    alter(dataset.entries[1].path)
    unchecked = load(dataset.directory, check=False)
    assert [call.origin.call_index for call in unchecked] == [0, 1, 2]
    assert unchecked[1:][0].origin.call_index == 1


def test_checksum_is_that_of_the_values_that_are_loaded(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read only once, so it cannot change between its check and its use."""
    read = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(sum(buffer.nbytes for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    call = dataset[0]
    assert sum(read) == sum(t.numel() * t.element_size() for t in call.tensors().values())


def test_directories_without_calls(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such directory; record into it with `capture"):
        load(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"nowhere\.zip: no such archive; check the path$"):
        load(tmp_path / "nowhere.zip")
    with pytest.raises(DatasetError, match="holds no recorded calls; record some with `capture"):
        load(tmp_path)
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DatasetError, match=r"holds no recorded calls .*model.safetensors: not a"):
        load(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DatasetError, match="holds no recorded call"):
        load(tmp_path)


def test_leftovers_of_a_killed_run_are_not_read(dataset: Dataset) -> None:
    (dataset.directory / ".model-9.safetensors.tmp").write_bytes(b"half a fi")
    (dataset.directory / ".manifest.json.tmp").write_text("{")
    assert len(load(dataset.directory)) == 3
    (dataset.directory / MANIFEST).unlink()
    assert len(load(dataset.directory)) == 3
