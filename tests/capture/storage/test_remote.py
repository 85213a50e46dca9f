"""Datasets are read from addresses: local web, S3 and Hub servers, and fsspec's memory."""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from capture import load, record
from capture.call.attention_call import AttentionCall
from capture.errors import CaptureError, DatasetError
from capture.storage import remote
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.names import MANIFEST
from capture.storage.repair import repair
from tests.capture.storage.captures import copies, write_dataset
from tests.capture.storage.servers import Server, serving

for package in ("aiohttp", "s3fs", "huggingface_hub"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("cache")

MakeCall = Callable[..., AttentionCall]

CALLS = [f"model-{index}.safetensors" for index in range(3)]


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Directory `served`; each server serves its folder `org/name/calls` under that path."""
    return tmp_path / "served"


@pytest.fixture
def recorded(served: Path, make_call: MakeCall) -> Path:
    calls = (make_call(call_index=index) for index in range(3))
    return write_dataset(served / "org" / "name" / "calls", *calls).directory


@pytest.fixture(params=["http", "s3", "hub"])
def place(
    request: pytest.FixtureRequest, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, str]]:
    """Server, and the part of its addresses before `/calls`."""
    with serving(request.param, served) as server:
        yield server, address(request.param, server, tmp_path, monkeypatch)


def address(kind: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the libraries use this server, and return the address of `org/name`."""
    if kind == "http":
        return f"{server.url}/org/name"
    if kind == "s3":
        import fsspec
        from s3fs import S3FileSystem

        options = {"endpoint_url": server.url, "key": "mine", "secret": "mine"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        S3FileSystem.clear_instance_cache()
        return "s3://org/name"
    from huggingface_hub import HfFileSystem, constants

    answers_at(server.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    HfFileSystem.clear_instance_cache()
    return "hf://datasets/org/name"


def answers_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Hub's library use this server, as setting HF_ENDPOINT before its import would."""
    from huggingface_hub import constants

    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


Place = tuple[Server, str]


def test_directory(recorded: Path, place: Place, cache: Path) -> None:
    server, base = place
    dataset = load(f"{base}/calls")
    assert (len(dataset), dataset.note, server.got()) == (3, "", [])
    assert repr(dataset) == f"Dataset('{base}/calls', calls=3, models=['model'])"
    assert dataset[1].query.equal(load(recorded)[1].query)
    assert set(server.got()) == {CALLS[1]}
    for ours, theirs in zip(dataset, load(recorded), strict=True):
        assert ours.key.equal(theirs.key)
    assert copies(cache) == CALLS
    sent = len(server.got())
    assert len(list(load(f"{base}/calls"))) == 3
    assert len(server.got()) == sent


def test_several_at_a_time(recorded: Path, place: Place, cache: Path) -> None:
    heard: list[tuple[int, int]] = []
    dataset = load(f"{place[1]}/calls")
    chosen = dataset.entries[1:]
    assert dataset.fetch(chosen, lambda *counts: heard.append(counts)) == []
    assert copies(cache) == CALLS[1:]
    total = sum(entry.nbytes for entry in chosen)
    assert sum(count for count, _ in heard) == total
    assert {each for _, each in heard} == {total}


def test_one_that_changes_is_fetched_again(
    recorded: Path, place: Place, make_call: MakeCall
) -> None:
    _server, base = place
    assert load(f"{base}/calls")[0].origin.call_index == 0
    write_dataset(recorded, make_call(call_index=0))
    [call] = load(f"{base}/calls")
    assert call.query.equal(load(recorded)[0].query)


@pytest.mark.parametrize("dated", [True, False])
def test_archive_is_fetched_again_if_it_may_have_changed(
    recorded: Path, place: Place, make_call: MakeCall, dated: bool
) -> None:
    server, base = place
    server.dated, totals = dated, set[int]()
    for index in (5, 6):
        shutil.rmtree(recorded)
        write_dataset(recorded, make_call(call_index=index))
        shutil.make_archive(str(recorded), "tar", recorded.parent, recorded.name)
        for _ in range(2):
            [call] = Dataset.open(f"{base}/calls.tar", report=lambda *each: totals.add(each[1]))
            assert call.origin.call_index == index
    assert (recorded.parent / "calls.tar").stat().st_size in totals
    sent = [each for each in server.asked if each.startswith("GET ") and each.endswith(".tar")]
    assert len(sent) == 2 or not dated


def test_file_that_is_missing_or_altered_costs_itself(
    recorded: Path, place: Place, cache: Path
) -> None:
    (recorded / CALLS[0]).unlink()
    altered = recorded / CALLS[1]
    whole = altered.read_bytes()
    altered.write_bytes(whole[:-1] + b"\xff")
    dataset = load(f"{place[1]}/calls")
    reasons = {each.path.name: str(each.error) for each in dataset.fetch()}
    assert reasons.keys() == {CALLS[0], CALLS[1]}
    assert "missing" in reasons[CALLS[0]] or "not found" in reasons[CALLS[0]]
    assert reasons[CALLS[1]] == (
        f"{place[1]}/calls: {CALLS[1]} was altered since it was recorded (checksum differs)"
    )
    assert copies(cache) == [CALLS[2]]
    altered.write_bytes(whole)
    assert load(f"{place[1]}/calls")[1].origin.call_index == 1


def test_file_that_is_too_long_is_not_copied_whole(recorded: Path, place: Place) -> None:
    with (recorded / CALLS[0]).open("ab") as file:
        file.truncate(9 << 20)
    with pytest.raises(DatasetError, match=r"model-0\.safetensors:? has more than \d+ bytes"):
        load(f"{place[1]}/calls")[0]


def test_no_such_place(recorded: Path, place: Place) -> None:
    for wrong in ("nothing", "nothing.zip"):
        with pytest.raises(DatasetError, match=rf"{wrong}.*: not found; check the address"):
            load(f"{place[1]}/{wrong}")


def test_no_access(recorded: Path, place: Place) -> None:
    server, base = place
    server.status = 403
    with pytest.raises(DatasetError, match=r"access is denied .*: .*(log in|AWS_PROFILE)"):
        load(f"{base}/calls")


def test_unreachable_address_is_reported(
    recorded: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _server, base = place
    if base.startswith("s3://"):
        import fsspec
        from s3fs import S3FileSystem

        options = {"config_kwargs": {"retries": {"max_attempts": 1}}}
        monkeypatch.setitem(fsspec.config.conf["s3"], "endpoint_url", "http://127.0.0.1:1")
        monkeypatch.setitem(fsspec.config.conf, "s3", {**fsspec.config.conf["s3"], **options})
        monkeypatch.setattr(S3FileSystem, "retries", 1)
    elif base.startswith("hf://"):
        answers_at("http://127.0.0.1:1", monkeypatch)
    else:
        base = "http://127.0.0.1:1"
    with pytest.raises(remote.Unreachable, match=r"cannot be reached .*: check the network"):
        load(f"{base}/calls")


def test_call_without_a_network_ends_the_copying(recorded: Path, served: Path) -> None:
    """Copying ends at the first error instead of printing an error for each of a thousand files."""
    with serving("http", served) as server:
        dataset = load(f"{server.url}/org/name/calls")
        server.status = 500
        with pytest.raises(remote.Unreachable, match=r"cannot be reached .500"):
            dataset.fetch()


@pytest.mark.parametrize("place", ["hub"], indirect=True)
def test_revision_of_the_hub(recorded: Path, place: Place) -> None:
    assert len(list(load("hf://datasets/org/name@v1/calls"))) == 3
    for wrong in ("name@v2/calls", "other/calls"):
        with pytest.raises(DatasetError, match=f"org/{wrong}: not found; check the address"):
            load(f"hf://datasets/org/{wrong}")


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_without_a_manifest(recorded: Path, place: Place) -> None:
    (recorded / MANIFEST).unlink()
    dataset = load(f"{place[1]}/calls")
    assert len(dataset) == 3
    assert dataset.note.startswith(
        "s3://org/name/calls/manifest.json is missing: the files were read"
    )


@pytest.mark.parametrize("place", ["http"], indirect=True)
def test_link_with_a_signature(recorded: Path, place: Place, cache: Path) -> None:
    """The signature in a link is sent to the server, but not printed or used in file names."""
    server, base = place
    dataset = load(f"{base}/calls?signature=secret")
    dataset[0]
    assert f"GET /org/name/calls/{CALLS[0]}?signature=secret" in server.asked
    server.status = 500
    with pytest.raises(DatasetError) as told:
        dataset[1]
    assert "secret" not in f"{told.value} {dataset!r} {list(cache.rglob('*'))}"


@pytest.mark.parametrize("place", ["http"], indirect=True)
def test_names_that_mean_something_in_an_address(
    served: Path, place: Place, make_call: MakeCall
) -> None:
    directory = served / "odd"
    directory.mkdir(parents=True)
    entry = PackedCall.of(make_call()).write(directory / "a?b#c%20d.safetensors")
    Dataset(directory, [entry], [CaptureRecord("model", "random")]).save_manifest()
    assert len(list(load(f"{place[0].url}/odd"))) == 1


def test_memory(cache: Path) -> None:
    import fsspec

    with pytest.raises(DatasetError, match=r"memory://calls: not found"):
        load("memory://calls")
    fsspec.filesystem("memory").pipe("/empty/readme.txt", b"")
    with pytest.raises(DatasetError, match=r"memory://empty: holds no recorded calls"):
        load("memory://empty")


def test_two_processes_copy_the_same_file(recorded: Path, served: Path, cache: Path) -> None:
    with serving("http", served) as server:
        datasets = [load(f"{server.url}/org/name/calls") for _ in range(4)]
        threads = [threading.Thread(target=list, args=(each,)) for each in datasets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(each.fetch()) for each in datasets] == [0] * 4
    assert copies(cache) == CALLS
    assert not list(cache.rglob("*.part"))


def test_addresses_without_a_reader_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"nosuch://x: cannot be read .*: give a directory, an"):
        load("nosuch://x")


@pytest.mark.parametrize("where", ["s3://x", "gs://x", "https://x", "hf://datasets/org/name/x"])
def test_library_that_is_missing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("s3fs", "gcsfs", "aiohttp", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})
    with pytest.raises(
        DatasetError,
        match=r"is not installed: pip install (s3fs|gcsfs|'fsspec\[http\]'|huggingface_hub)$",
    ):
        load(where)


@pytest.mark.parametrize("where", ["s3://bucket/calls", "memory://calls", "calls.zip", "c.TGZ"])
def test_they_are_only_read(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for overwrite in (False, True):
        with (
            pytest.raises(CaptureError, match="which is read-only: record into a directory with"),
            record(torch.nn.Linear(1, 1), out=where, overwrite=overwrite),
        ):
            pass
    with pytest.raises(DatasetError, match="which is read-only: repair the directory"):
        repair(where)
    assert os.listdir() == []
