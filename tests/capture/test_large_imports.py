"""Importing PyTorch without garbage collection does not affect later code."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capture.large_imports import import_large, interruptible, without_collecting


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


SWALLOWING = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""


@pytest.mark.parametrize("then", ["", "import nosuch"])
def test_ctrl_c_is_not_lost_in_a_library_that_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWING + then)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        import_large("swallowing")
    assert signal.getsignal(signal.SIGINT) is before
    sys.modules.pop("swallowing", None)


def test_programs_own_way_with_ctrl_c_is_left_to_it() -> None:
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]


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
