"""Suspicious kernel names are reported before PyTorch is imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from replay.kernels import kernel_names
from replay.kernels.kernel_names import look_known


@pytest.mark.parametrize(
    "patterns",
    ["nosuch", "flexx", "FLEX", "torch-fa5", "torch-math,sage4", "flex,nowhere.py:mine", "ﬂex"],
)
def test_misspelt_names_are(patterns: str) -> None:
    assert not look_known(patterns)


@pytest.mark.parametrize("patterns", ["all", "*", "nosuch*", "", "triton-sparse-decode[keep=0.1]"])
def test_globs_and_options_are_not(patterns: str) -> None:
    assert look_known(patterns)


def test_a_file_must_be_there_and_speak_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from elsewhere import attention\n")
    assert look_known(f"{tmp_path}/mine.py:attention,flex")
    assert not look_known(f"{tmp_path}/mine.py:atention")
    assert not look_known(f"{tmp_path}:attention.py:x")


def test_names_of_installed_packages_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [SimpleNamespace(name="plugged")]
    monkeypatch.setattr(kernel_names.importlib.metadata, "entry_points", lambda group: offered)
    assert look_known("plugged,flex")
    assert not look_known("plugged,nosuch")
