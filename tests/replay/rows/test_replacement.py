"""What becomes of the file that another one takes the place of."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from replay.rows import replacement
from replay.rows.replacement import replacing


def write(path: Path, text: str = "new") -> None:
    with replacing(path) as file:
        file.write(text)


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_permissions_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    path.chmod(mode)
    write(path)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)


def test_a_link_and_all_names_of_a_file_lead_to_the_new_one(tmp_path: Path) -> None:
    path, other, link = (tmp_path / name for name in ("file", "other", "link"))
    path.write_text("earlier")
    other.hardlink_to(path)
    link.symlink_to("file")
    write(link)
    assert link.is_symlink()
    assert (path.read_text(), other.read_text()) == ("new", "new")


def test_a_link_to_nothing_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["n" * 255, "名" * 85])
def test_the_longest_name_that_a_file_can_have(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    assert (tmp_path / name).read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_a_hyphen_is_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("-"))
    assert capsys.readouterr().out == "new"
    assert not list(tmp_path.iterdir())


def test_a_pipe_that_has_no_path_of_its_own_is_written_to() -> None:
    """As `>(…)` gives, and `/dev/stdout` before a `|`."""
    reader, writer = os.pipe()
    write(Path(f"/dev/fd/{writer}"))
    os.close(writer)
    assert os.read(reader, 100) == b"new"
    os.close(reader)


def test_a_named_pipe_is_written_to(tmp_path: Path) -> None:
    path, found = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_text()), daemon=True)
    reader.start()
    write(path)
    reader.join(10)
    assert found == ["new"]


def test_a_file_in_a_directory_that_takes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check_place` has let it pass, perhaps hours ago."""
    path = tmp_path / "file"
    path.write_text("earlier")
    monkeypatch.setattr(replacement.os, "access", lambda where, _: where != tmp_path)
    monkeypatch.setattr(replacement.os, "replace", None)
    write(path)
    assert path.read_text() == "new"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_that_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A container may have mounted it, and nothing else of its directory."""

    def fixed(*_: Any) -> None:
        raise OSError(number, "it stays")

    path = tmp_path / "file"
    path.write_text("earlier")
    monkeypatch.setattr(replacement.os, "replace", fixed)
    write(path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_if_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError):
        write(path, "new \ud800")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
