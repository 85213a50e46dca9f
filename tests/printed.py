"""Text that functions print to a console."""

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console


def printed(show: Callable[..., object], *given: Any, width: int = 80, **options: Any) -> str:
    """Return what `show` prints to the console that follows its other arguments."""
    file = io.StringIO()
    show(*given, Console(file=file, width=width, highlight=False), **options)
    return file.getvalue()
