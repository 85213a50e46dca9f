"""Suspicious kernel names are reported before PyTorch is imported."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from replay.kernels import kernel_names
from replay.kernels.kernel_names import look_known, shortened
from replay.kernels.registered_functions import sources


def test_misspelt_names_are_and_globs_and_options_are_not() -> None:
    names = ["nosuch", "flexx", "FLEX", "torch-fa5", "torch-math,sage4", "flex,none.py:f", "ﬂex"]
    assert [name for name in names if look_known(name)] == []
    patterns = ["all", "*", "nosuch*", "", "triton-sparse-decode[keep=0.1]"]
    assert [pattern for pattern in patterns if not look_known(pattern)] == []


def test_a_file_must_be_there_and_speak_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from elsewhere import attention\n")
    assert look_known(f"{tmp_path}/mine.py:attention,flex")
    assert not look_known(f"{tmp_path}/mine.py:atention")
    assert not look_known(f"{tmp_path}:attention.py:x")
    named = f"torch-*,{tmp_path}/mine.py:f,{tmp_path}/mine.py:g,{tmp_path}/none.py:f"
    assert sources(named) == [f"{tmp_path}/mine.py"]


def test_names_of_installed_packages_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [SimpleNamespace(name="plugged")]
    monkeypatch.setattr(kernel_names.importlib.metadata, "entry_points", lambda group: offered)
    assert look_known("plugged,flex")
    assert not look_known("plugged,nosuch")


def test_values_of_heads_are_shortened_for_people() -> None:
    assert shortened("sparse[keep=0.2/1/0.5]") == "sparse[keep by head]"
    assert shortened("sparse[keep=0.2/1,grid=1x2x3]") == "sparse[keep by head,grid=1x2x3]"
    for name in ("sparse[mass=0.9]", "files/mine.py:kernel", "triton-fp8"):
        assert shortened(name) == name
