"""Imports of what makes hundreds of thousands of objects, as PyTorch does. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if Ctrl-C was pressed and somebody swallowed it.

    Libraries catch all there is around imports of theirs, and go on with half of a module, so that
    the command does too, or fails with a sentence about versions.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:  # the program's own way
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage meanwhile: that takes up to a third of such an import, and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_for_good(*names: str) -> None:
    """Import modules that stay as long as the process, which is a command's own.

    No search for garbage goes through their objects from then on, and the end of the process does
    not take them apart. Where the first is there already, there is more in the process than the
    command, and what that holds is still collected.
    """
    is_own = names[0] not in sys.modules
    with interruptible(), without_collecting():
        for name in names:
            importlib.import_module(name)
    if is_own:
        gc.freeze()
        atexit.register(gc.freeze)
