"""Importing PyTorch without garbage collection does not affect later code."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from capture.large_imports import without_collecting


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collecting_goes_on_as_before(was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        with pytest.raises(ImportError), without_collecting():
            import nosuch  # noqa: F401
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("place", ["empty", "nowhere"])
def test_command_imports_pytorch_only_if_the_directory_exists(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    code = (
        "import sys; from capture.cli.main import main\n"
        "try: main(['show', sys.argv[1]])\n"
        "except SystemExit as stop: assert stop.code == 2\n"
        f"assert ('torch' in sys.modules) == {place == 'empty'}\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / place)], check=True)
