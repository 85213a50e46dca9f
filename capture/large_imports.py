"""Imports large packages such as PyTorch quickly and interruptibly."""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if Ctrl-C was pressed and a library swallowed it.

    Some libraries catch every exception around imports and continue with a partly loaded module.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:  # the program handles Ctrl-C
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
    """Switch off garbage collection, which takes up to a third of an import and frees nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_large(*names: str) -> None:
    """Import modules that take seconds."""
    with interruptible(), without_collecting():
        for name in names:
            importlib.import_module(name)
