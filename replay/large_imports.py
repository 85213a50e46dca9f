"""Imports of what makes hundreds of thousands of objects, as PyTorch does. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage meanwhile: that takes up to a third of such an import, and there is none.

    A process of our own also calls `gc.freeze` afterwards, so that no later search goes through all
    these objects. Not somebody else's: what it holds then is never collected.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
