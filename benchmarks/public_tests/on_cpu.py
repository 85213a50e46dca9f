"""Runs tests written for `cuda` on the CPU, with `TRITON_INTERPRET=1`, to try the shims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.to:
            args = (args[0], *("cpu" if type(each) is int else _cpu(each) for each in args[1:]))
        return function(*args, **kwargs)


def _cpu(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if is_device else value


@contextmanager
def on_cpu() -> Iterator[None]:
    """Create all GPU tensors on the CPU, which reports itself as an H100."""
    stands_for: dict[str, Any] = {
        "get_device_capability": lambda *device: (9, 0),
        "get_device_properties": lambda *device: SimpleNamespace(total_memory=80 * 2**30),
        "manual_seed": lambda seed: None,
        "synchronize": lambda *device: None,
    }
    with mock.patch.multiple(torch.cuda, **stands_for), _OnCpu():
        yield
