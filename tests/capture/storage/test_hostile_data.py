"""A stranger's directory is not trusted: links are not followed, and pipes are not waited for."""

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capture import load
from capture.call.attention_call import AttentionCall
from capture.cli.file_checks import check_files
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry, PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import MANIFEST, Dataset
from capture.storage.journal import Journal
from capture.storage.repair import repair
from capture.storage.tensor_file import write_safetensors
from tests.capture.storage.captures import edit_manifest, write_dataset
from tests.factories import census as census_of

MakeCall = Callable[..., AttentionCall]
RunCli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dataset(tmp_path: Path, make_call: MakeCall) -> Dataset:
    """Dataset of two calls; the tests corrupt the second call."""
    return write_dataset(tmp_path / "data", *(make_call(call_index=index) for index in range(2)))


def refused(dataset: Dataset, match: str) -> None:
    """Check that only the second file is refused, and that one sentence names it."""
    path = dataset.entries[1].path
    again = load(dataset.directory)
    assert again[0].origin.call_index == 0
    with pytest.raises(DatasetError, match=match) as told:
        again.entries[1].load()
    assert str(told.value).startswith(f"{path}: ")
    assert "\n" not in str(told.value)
    [finding] = [finding for finding in check_files(again) if finding.path == path]
    assert not finding.good
    (dataset.directory / MANIFEST).unlink()
    rebuilt = load(dataset.directory)
    assert [entry.path for entry in rebuilt.entries] == [again.entries[0].path]
    assert [damaged.path for damaged in rebuilt.damaged] == [path]


def rewrite(entry: FileEntry, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a call's header in the same way in its file and in the manifest."""
    header = json.loads(json.dumps(entry.header.to_json()))
    change(header)
    metadata = {"attention-replay": json.dumps(header)}
    checksum = write_safetensors(entry.path, load_file(entry.path), metadata)
    fields = {"call": header, "bytes": entry.path.stat().st_size, "checksum": checksum}

    def describe(data: Any) -> None:
        [item] = [item for item in data["files"] if item["file"] == entry.path.name]
        item.update(fields)

    edit_manifest(entry.path.parent, describe)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("link", "a symbolic link; put the file itself here"),
        ("broken link", "a symbolic link"),
        ("link to a device", "a symbolic link"),
        ("fifo", "not a regular file"),
        ("directory", "not a regular file"),
    ],
)
def test_only_regular_files_are_opened(dataset: Dataset, kind: str, sentence: str) -> None:
    path = dataset.entries[1].path
    kept = path.rename(path.parent.parent / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link": kept, "broken link": "nowhere"}.get(kind, "/dev/zero"))
    refused(dataset, sentence)


def test_manifest_that_is_a_link_is_not_read(dataset: Dataset) -> None:
    manifest = dataset.directory / MANIFEST
    manifest.symlink_to(manifest.rename(dataset.directory.parent / "elsewhere"))
    again = load(dataset.directory)
    assert len(again) == 2
    assert again.note == (
        f"{manifest} is damaged (a symbolic link; put the file itself here): the files were read "
        "instead, without a census or checksums"
    )


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_writing_replaces_what_is_there(
    dataset: Dataset, tmp_path: Path, make_call: MakeCall, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (".manifest.json.tmp", "model-2.safetensors"):
        path = dataset.directory / name
        path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    PackedCall.of(make_call(call_index=2)).write(dataset.directory / "model-2.safetensors")
    dataset.save_manifest()
    assert victim.read_text() == "precious"
    assert len(load(dataset.directory)) == 2


@pytest.mark.parametrize("name", ["query", "output"])
def test_stride_reserves_no_memory_that_the_file_does_not_account_for(
    dataset: Dataset, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far_apart(header: dict[str, Any]) -> None:
        header["layouts"][name]["stride"][2] = 200_000_000

    rewrite(dataset.entries[1], far_apart)

    def reserve(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("2.4 GB are reserved")

    monkeypatch.setattr(torch, "empty_strided", reserve)
    refused(dataset, r"take \d+ bytes of memory for a file of \d+ .limit: 64 times the file")


@pytest.mark.parametrize(
    ("length", "size", "sentence"),
    [
        (1, {0: 1, 1: 2, 2: 2**20}, r"2199023255552 attention scores in a file .*limit: 16384"),
        (0, {0: 2**20, 2: 0}, r"1048576 × 2 heads in a file of \d+ bytes .limit: one per byte"),
    ],
)
def test_expanded_dimensions_make_no_work_that_the_file_does_not_account_for(
    dataset: Dataset, length: int, size: dict[int, int], sentence: str
) -> None:
    def expand(header: dict[str, Any]) -> None:
        for layout in header["layouts"].values():
            for dimension, elements in size.items():
                layout["size"][dimension] = elements
            layout["stride"][:3] = [0, 0, 0]

    entry = dataset.entries[1]
    values = {
        name: values[:, :1, :length].contiguous() for name, values in load_file(entry.path).items()
    }
    write_safetensors(entry.path, values, {})
    rewrite(entry, expand)
    refused(dataset, sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h: h["layouts"]["key"]["size"].__setitem__(0, 2), "key of shape .* require"),
        (lambda h: h["layouts"]["query"]["size"].pop(), "four dimensions"),
        (lambda h: h["layouts"]["query"]["size"].__setitem__(0, -1), "size is not a list of sizes"),
        (lambda h: h["layouts"]["query"]["size"].__setitem__(0, True), "not a list of sizes"),
        (lambda h: h["layouts"]["query"].update(stride="1"), "stride is not a list of sizes"),
        (lambda h: h["layouts"]["query"].update(order=[0, 1, 1, 3]), "four dimensions"),
        (lambda h: [h["layouts"][n]["size"].__setitem__(3, 0) for n in ("query", "key")], "be 0"),
        (lambda h: h["layouts"].update(bias=h["layouts"]["key"]), "tensors"),
        (lambda h: h["dtypes"].update(query="int64"), "query of dtype 'int64'"),
        (lambda h: h["dtypes"].update(query="float64"), "differ from its header"),
        (lambda h: h.update(dropout_p=7.0), "dropout_p 7.0"),
        (lambda h: h.update(is_causal="yes"), "is_causal is 'yes'"),
        (lambda h: h["origin"].update(call_index="3"), "call_index is '3'"),
        (lambda h: h["origin"].update(versions={"torch": 2}), "versions is a dict"),
    ],
)
def test_header_says_what_an_attention_call_can_be(
    dataset: Dataset, change: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    rewrite(dataset.entries[1], change)
    path = dataset.entries[1].path
    with pytest.raises(DatasetError, match=f"{path}: .*{sentence}"):
        FileEntry.read(path)
    assert [each.path for each in load(dataset.directory).damaged] in ([path], [])


def with_tensor_header(entry: FileEntry, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the safetensors header of a file, adjust its stated length, and keep the data."""
    content = entry.path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    entry.path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["query"].update(data_offsets=[0, 2**40]),
        lambda h: h["query"].update(data_offsets=h["key"]["data_offsets"]),  # query and key overlap
        lambda h: h["query"].update(data_offsets=[-320, 0]),
        lambda h: h["query"].update(data_offsets=[0]),
        lambda h: h["query"].update(shape=[2**20, 2**20]),
        lambda h: h["query"].update(shape=[-1]),
        lambda h: h["query"].update(dtype="F7"),
        lambda h: h.update(query=[]),
        lambda h: h.clear(),
        lambda h: h["__metadata__"].update(x=1),
        lambda h: h.update(__metadata__=[]),
        lambda h: [],
    ],
)
def test_header_of_tensors_fits_the_file(
    dataset: Dataset, change: Callable[[dict[str, Any]], Any]
) -> None:
    with_tensor_header(dataset.entries[1], change)
    with pytest.raises(DatasetError, match="not a readable safetensors file"):
        FileEntry.read(dataset.entries[1].path)


@pytest.mark.parametrize("length", [0, 1, 2**20 + 1, 2**62, 2**64 - 1])
def test_no_header_is_longer_than_any_call_has(dataset: Dataset, length: int) -> None:
    path = dataset.entries[1].path
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(DatasetError, match=f"not a readable safetensors file .*{length} bytes"):
        FileEntry.read(path)


def test_deep_json_is_damage(dataset: Dataset) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    manifest = dataset.directory / MANIFEST
    text = manifest.read_text().replace('"settings": {}', f'"settings": {{"a": {deep}}}')
    manifest.write_text(text)
    assert deep in manifest.read_text()
    again = load(dataset.directory)
    assert "manifest.json is damaged" in again.note
    with_tensor_header(
        dataset.entries[1], lambda header: header["__metadata__"].update({"attention-replay": deep})
    )
    with pytest.raises(DatasetError, match="its header is damaged"):
        FileEntry.read(dataset.entries[1].path)


@pytest.mark.parametrize("device", ["", " ", "meta", "cuda:99 (x)", "mps", "\x00"])
def test_no_device_is_believed(dataset: Dataset, device: str) -> None:
    rewrite(dataset.entries[1], lambda header: header["origin"].update(device=device))
    again = load(dataset.directory)
    assert not again.damaged
    assert len(check_files(again)) == 2


SIGNATURES = census_of(("a", "decode", 7, 1))["signatures"]
BATCH = {"phase": "decode", "signature": 0, "queries": [1], "keys": [7], "calls": 1}


@pytest.mark.parametrize(
    "census",
    [
        {"rows": []},
        {"signatures": [], "rows": [{"module": "a", "phase": "b", "signature": 0, "calls": 1}]},
        {"signatures": [{}], "rows": []},
        {"rows": "many", "signatures": []},
        *(
            {"signatures": SIGNATURES, "rows": [], "batches": [{**BATCH, **damage}]}
            for damage in ({"keys": [1, 2]}, {"keys": [-1]}, {"calls": 0}, {"signature": 1})
        ),
    ],
)
def test_damaged_census_is_left_out_and_reported(dataset: Dataset, census: object) -> None:
    edit_manifest(dataset.directory, lambda data: data["captures"][0].update(census=census))
    again = load(dataset.directory)
    assert len(again) == 2
    assert "manifest.json is damaged" in again.note


def test_manifest_takes_no_memory_that_its_length_does_not_account_for(dataset: Dataset) -> None:
    edit_manifest(dataset.directory, lambda data: data["files"].extend([[]] * 1_100_000))
    again = load(dataset.directory)
    assert "is damaged (more lists and objects than its length accounts for" in again.note
    assert len(again) == 2


@pytest.mark.parametrize("line", [{"sampled": 1e999}, {"dropped": 1}, {"call": 3}, 7, {}])
def test_damaged_line_of_a_journal_costs_itself(dataset: Dataset, line: object) -> None:
    journal = Journal.begin(
        dataset.directory / "other.journal",
        CaptureRecord("other", "random").to_json(),
        replaces=False,
    )
    journal.append(sampled=1)
    journal.close()
    with journal.path.open("a") as file:
        for each in (line, {"sampled": 2}):
            text = json.dumps(each).encode()
            file.write(f"{text.decode()}\t{zlib.crc32(text):08x}\n")
    told = "0 complete calls, and 1 line of its journal cannot be read"
    assert told in load(dataset.directory).note
    assert "1 call" not in " ".join(repair(dataset.directory))
    assert not journal.path.exists()


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\ud800\u202e"


@pytest.mark.parametrize("command", ["show", "check"])
def test_recording_says_nothing_to_the_terminal(
    dataset: Dataset, run_cli: RunCli, command: str
) -> None:
    manifest = dataset.directory / MANIFEST
    data = json.loads(manifest.read_text())
    for name in ("model", "weights", "device"):
        data["captures"][0][name] = f"{name} {ESCAPES}"
    for item in data["files"]:
        item["call"]["origin"].update(model=f"model {ESCAPES}", module=ESCAPES, phase=ESCAPES)
    data["files"].append({**data["files"][0], "file": f"x{ESCAPES[:-2]}.safetensors"})
    data["files"].append({**data["files"][0], "file": "y.safetensors", "call": ESCAPES})
    data["files"][1]["checksum"] = None
    manifest.write_text(json.dumps(data))
    code, out, err = run_cli(command, str(dataset.directory))
    assert code in (0, 1)
    told = out + err
    assert "y.safetensors" in told.replace("\n", "")
    assert all(line.isprintable() for line in told.replace("\r", "\n").splitlines())


def test_errors_say_nothing_to_the_terminal(tmp_path: Path, run_cli: RunCli) -> None:
    directory = tmp_path / "a\x1b[2Jb"
    directory.mkdir()
    code, out, err = run_cli("show", str(directory))
    assert (code, out) == (2, "")
    assert "\x1b" not in err
