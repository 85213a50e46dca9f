"""Importing PyTorch without garbage collection does not affect later code."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capture.large_imports import import_for_good, interruptible, without_collecting


def in_a_process(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)


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
        import_for_good("swallowing")
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


@pytest.mark.parametrize(("first", "is_frozen"), [("wave", True), ("sys", False)])
def test_only_the_objects_of_a_command_stay_for_good(first: str, is_frozen: bool) -> None:
    """A program that runs the command has objects of its own."""
    in_a_process(
        "import gc, sys; from capture.large_imports import import_for_good;"
        "import_for_good(sys.argv[1], 'colorsys'); assert 'colorsys' in sys.modules;"
        f"assert gc.isenabled(); assert bool(gc.get_freeze_count()) == {is_frozen}",
        first,
    )


@pytest.mark.parametrize("place", ["empty", "nowhere"])
def test_command_goes_through_pytorch_no_more(tmp_path: Path, place: str) -> None:
    """PyTorch is not imported if there is nothing to show."""
    (tmp_path / "empty").mkdir()
    in_a_process(
        "import gc, sys; from capture.cli.main import main\n"
        "try: main(['show', sys.argv[1]])\n"
        "except SystemExit as stop: assert stop.code == 2\n"
        "assert gc.isenabled()\n"
        f"assert ('torch' in sys.modules) == {place == 'empty'}\n"
        "assert (gc.get_freeze_count() > 100_000) == ('torch' in sys.modules)",
        str(tmp_path / place),
    )


def test_library_users_objects_do_not_stay_for_good() -> None:
    """Objects of a program that runs a command in its own process are not frozen either."""
    in_a_process(
        "import gc, torch; from replay.api.chosen_device import device_of; device_of('cpu');"
        "assert gc.get_freeze_count() == 0;"
        "found = []; gc.callbacks.append(lambda *each: found.append(each));"
        "from capture import record; assert gc.get_freeze_count() == 0; assert gc.isenabled();"
        "assert len(found) < 10, len(found)"  # objects right after it; each counts twice
    )
