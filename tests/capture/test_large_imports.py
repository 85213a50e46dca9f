"""PyTorch is imported without garbage collection, which does not affect later code."""

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


def test_missing_directory_is_reported_without_importing_pytorch(tmp_path: Path) -> None:
    code = (
        "import sys; from capture.cli.main import main\n"
        "try: main(['show', sys.argv[1]])\n"
        "except SystemExit as stop: assert stop.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "nowhere")], check=True)
