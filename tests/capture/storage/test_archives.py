"""Datasets are read from archives, both normal and malicious."""

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from capture import load
from capture.call.attention_call import AttentionCall
from capture.errors import DatasetError
from capture.storage import archives
from capture.storage.names import MANIFEST
from tests.capture.storage.captures import copies, write_dataset

pytestmark = pytest.mark.usefixtures("cache")

MakeCall = Callable[..., AttentionCall]
Pack = Callable[[Path, Path], Path]
Members = Iterable[tuple[str, bytes]]


@pytest.fixture
def recorded(tmp_path: Path, make_call: MakeCall) -> Path:
    calls = (make_call(call_index=index) for index in range(2))
    return write_dataset(tmp_path / "calls", *calls).directory


def zipped(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def tarred(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def packed(path: Path, members: Members) -> Path:
    """Return an archive; the suffix of its path determines its kind."""
    return (zipped if path.suffix.lower() == ".zip" else tarred)(path, members)


def files(directory: Path, folder: str = "") -> list[tuple[str, bytes]]:
    return [(folder + path.name, path.read_bytes()) for path in sorted(directory.iterdir())]


@pytest.mark.parametrize("name", ["calls.zip", "calls.tar", "calls.tar.gz", "calls.tgz", "C.ZIP"])
@pytest.mark.parametrize("folder", ["", "./a/b/"])
def test_as_people_pack_them(
    recorded: Path, tmp_path: Path, cache: Path, name: str, folder: str
) -> None:
    others = [("README.md", b"hello"), ("__MACOSX/._model-0.safetensors", b"x"), (".DS_Store", b"")]
    archive = packed(tmp_path / name, [*files(recorded, folder), *others])
    dataset = load(archive)
    assert len(dataset) == 2
    assert not dataset.note
    assert copies(cache) == []  # a member is copied when it is loaded
    for ours, theirs in zip(dataset, load(recorded), strict=True):
        assert ours.query.equal(theirs.query)
    assert repr(dataset).startswith(f"Dataset({str(archive)!r}, ")


def test_missing_file_costs_itself(recorded: Path, tmp_path: Path, cache: Path) -> None:
    members = [each for each in files(recorded) if each[0] != "model-1.safetensors"]
    dataset = load(zipped(tmp_path / "calls.zip", members))
    assert dataset[0].origin.call_index == 0
    [missing] = dataset.fetch()
    assert "calls.zip: model-1.safetensors is missing" in str(missing.error)
    assert copies(cache) == ["model-0.safetensors"]


def test_damaged_entry_is_named_as_the_archive_is(recorded: Path, tmp_path: Path) -> None:
    content = dict(files(recorded))
    content[MANIFEST] = content[MANIFEST].replace(b'"bytes": ', b'"size": ', 1)
    [damaged] = load(zipped(tmp_path / "calls.zip", content.items())).damaged
    assert str(damaged.error).startswith(f"{tmp_path}/calls.zip/model-0.safetensors: its entry in")


def test_without_a_manifest_all_files_are_read(recorded: Path, tmp_path: Path) -> None:
    members = [each for each in files(recorded) if each[0] != MANIFEST]
    dataset = load(zipped(tmp_path / "calls.zip", members))
    assert len(dataset) == 2
    assert dataset.note == (
        f"{tmp_path}/calls.zip/manifest.json is missing: the files were read instead, without a "
        "census or checksums"
    )


def test_dataset_nearest_to_the_top_is_read(recorded: Path, tmp_path: Path) -> None:
    below = [each for each in files(recorded, "data/replaced/") if "model-0" not in each[0]]
    archive = zipped(tmp_path / "calls.zip", [*below, *files(recorded, "data/")])
    assert [call.origin.call_index for call in load(archive)] == [0, 1]


@pytest.mark.parametrize("name", ["calls.zip", "calls.tar"])
@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        (["../"], "its member ../manifest.json leads out of the archive"),
        (["a/../../"], "its member a/../../manifest.json leads out of the archive"),
        (["/etc/"], "its member /etc/manifest.json leads out of the archive"),
        (["C:/"], "its member C:/manifest.json leads out of the archive"),
        (["a/", "b/"], "holds 2 datasets, such as a and b: unpack it, and give the directory"),
        (["", "./"], "has two members called ./manifest.json: pack it again"),
        ([], "holds no recorded calls"),
    ],
)
def test_what_no_directory_packs_is_refused(
    recorded: Path, tmp_path: Path, cache: Path, name: str, folders: list[str], sentence: str
) -> None:
    members = [member for folder in folders for member in files(recorded, folder)]
    with pytest.raises(DatasetError) as told:
        load(packed(tmp_path / name, members))
    assert str(told.value).startswith(f"{tmp_path / name}: {sentence}")
    assert not copies(cache)
    assert {path.name for path in tmp_path.iterdir()} <= {"calls", "cache", name}


SPECIAL = {
    "link": (tarfile.SYMTYPE, stat.S_IFLNK),
    "FIFO": (tarfile.FIFOTYPE, stat.S_IFIFO),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["calls.zip", "calls.tar"])
def test_what_is_no_regular_file_is_not_read(
    recorded: Path, tmp_path: Path, name: str, kind: str
) -> None:
    members = [each for each in files(recorded) if each[0] != "model-1.safetensors"]
    archive = packed(tmp_path / name, members)
    in_tar, in_zip = SPECIAL[kind]
    if name.endswith("zip"):
        info = zipfile.ZipInfo("model-1.safetensors")
        info.create_system, info.external_attr = 3, (in_zip | 0o644) << 16
        with zipfile.ZipFile(archive, "a") as opened:
            opened.writestr(info, str(recorded / "model-1.safetensors"))
    else:
        member = tarfile.TarInfo("model-1.safetensors")
        member.type, member.linkname = in_tar, str(recorded / "model-1.safetensors")
        with tarfile.open(archive, "a") as opened_tar:
            opened_tar.addfile(member)
    dataset = load(archive)
    assert dataset[0].origin.call_index == 0
    with pytest.raises(DatasetError, match=r"model-1\.safetensors is not a regular file"):
        dataset[1]


def test_bombs(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "EXPANSION_AT_LEAST", 1 << 20)
    bomb = [*files(recorded), ("model-9.safetensors", bytes(64 << 20))]
    for name, sentence in (
        ("calls.zip", r"calls\.zip: contains 67\d+ bytes \(at most \d+ are read"),
        ("calls.tar.gz", r"calls\.tar\.gz cannot be unpacked \(it has more than \d+ bytes\)"),
    ):
        with pytest.raises(DatasetError, match=sentence):
            load(packed(tmp_path / name, bomb))
    monkeypatch.setattr(archives, "MEMBERS", 3)
    with pytest.raises(DatasetError, match="has more than 3 members"):
        load(zipped(tmp_path / "many.zip", [*files(recorded), ("a", b""), ("b", b"")]))


@pytest.mark.parametrize("name", ["calls.zip", "calls.tar", "calls.tar.gz"])
def test_damage_is_one_sentence(recorded: Path, tmp_path: Path, name: str) -> None:
    whole = packed(tmp_path / name, files(recorded)).read_bytes()
    # The zeros at the end of a tar may be half of the file.
    half = whole.rindex(b"model-1") + 600 if name == "calls.tar" else len(whole) // 2
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 62
    long_header = info.tobuf() + bytes(10240)
    no_archives = (b"", b"PK", b"\x1f\x8b" + bytes(99), b"<html>" * 999)
    for content in (*no_archives, whole[:half], long_header):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DatasetError) as told:
            list(load(tmp_path / name))
        assert str(told.value).startswith(str(tmp_path / name))
        assert "\n" not in str(told.value)


def test_cache_that_cannot_be_written(recorded: Path, tmp_path: Path, cache: Path) -> None:
    cache.touch()
    with pytest.raises(DatasetError, match=r"cannot write to the cache .*: set XDG_CACHE_HOME"):
        load(zipped(tmp_path / "calls.zip", files(recorded)))
