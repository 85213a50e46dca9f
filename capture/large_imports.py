"""Imports of what makes hundreds of thousands of objects, as PyTorch does. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


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
    with without_collecting():
        for name in names:
            importlib.import_module(name)
    if is_own:
        gc.freeze()
        atexit.register(gc.freeze)
