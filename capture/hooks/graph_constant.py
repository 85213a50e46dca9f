"""Marks functions that run once while a graph is traced, and not when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Do the same as `torch.compiler.assume_constant_result`, without importing the compiler.

    The import takes more than a second, also in programs that only read recordings.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
