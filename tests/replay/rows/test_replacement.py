"""Files that are replaced in one step."""

import os
from pathlib import Path

import pytest

from replay.rows.replacement import replacing


def write(path: Path, text: str = "new") -> None:
    with replacing(path) as file:
        file.write(text)


def test_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    path.chmod(mode)
    write(path)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)


def test_link_is_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    for text in ("new", "newer"):
        write(link, text)
        assert (link.is_symlink(), path.read_text()) == (True, text)


@pytest.mark.parametrize("name", ["n" * 255, "名" * 85])
def test_file_with_the_longest_name_is_written(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    assert (tmp_path / name).read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_pipe_without_a_path_is_written_to() -> None:
    """Pipes without a path come from `>(…)` and from `/dev/stdout` before a `|`."""
    reader, writer = os.pipe()
    write(Path(f"/dev/fd/{writer}"))
    os.close(writer)
    assert os.read(reader, 100) == b"new"
    os.close(reader)


def test_old_file_stays_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError):
        write(path, "new \ud800")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
