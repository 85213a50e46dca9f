"""Allocations without initial values, filled with a chosen number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Poisoned(TorchDispatchMode):
    """Dispatch mode that fills memory which Python code allocates without initial values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and made.is_floating_point():
            made.fill_(self._value)
        return made


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Fill memory that Python code in a `with` block allocates without initial values."""
    with _Poisoned(value):
        yield
