"""Marks functions that run once when a graph is traced, not each time the graph is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Mark a function like `torch.compiler.assume_constant_result`, without importing the compiler.

    The import takes more than a second, even in programs that only read recordings.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
