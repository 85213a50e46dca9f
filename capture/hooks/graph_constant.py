"""Marks functions that a compiled graph calls once, while it is traced, and not again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing the compiler.

    That takes more than a second of processor time, also in programs that only read recordings.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
