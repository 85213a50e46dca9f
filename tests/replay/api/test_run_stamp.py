"""Rows name the commit that they were measured at."""

import subprocess
from pathlib import Path

import pytest

from replay.api.run_stamp import commit_here


def test_commit_has_a_plus_if_a_tracked_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    assert commit_here() == ""
    monkeypatch.setenv("GITHUB_SHA", "0123456789abcdef")
    assert commit_here() == "0123456"
    Path("kernel.py").write_text("1")
    name = "-c user.name=x -c user.email=x@example.com"
    for command in ("init -q", "add kernel.py", f"{name} commit -qm first"):
        subprocess.run(["git", *command.split()], check=True)
    Path("new.py").write_text("untracked")
    commit = commit_here()
    assert len(commit) >= 7
    (head,) = (path.read_text() for path in Path(".git/refs/heads").iterdir())
    assert head.startswith(commit)
    Path("kernel.py").write_text("2")
    assert commit_here() == f"{commit}+"
