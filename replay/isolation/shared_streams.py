"""Streams that kernels share: one that closes them would silence, or fail, all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TextIO


def keep_open(stream: TextIO) -> Callable[[], None]:
    """Let nobody close a stream, until what is returned is called."""
    stream.close = lambda: None  # type: ignore[method-assign]

    def undo() -> None:
        with contextlib.suppress(AttributeError):
            del stream.close

    return undo
