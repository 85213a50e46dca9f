"""Imports large packages such as PyTorch quickly."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator


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
    with without_collecting():
        for name in names:
            importlib.import_module(name)
