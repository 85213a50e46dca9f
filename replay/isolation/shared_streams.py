"""The output streams that kernels share. A kernel that closed one would silence all kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TextIO


def keep_open(stream: TextIO) -> Callable[[], None]:
    """Prevent a stream from being closed until the returned function is called."""
    stream.close = lambda: None  # type: ignore[method-assign]

    def undo() -> None:
        with contextlib.suppress(AttributeError):
            del stream.close

    return undo
