"""Compiles an attention function once per kind of call.

`torch.compile` keeps its results on the function's code object and gives up after a few shapes
(`torch._dynamo.config.recompile_limit`). A replay meets many shapes, so every kind of call gets a
code object of its own, and its compilation is the one a model with that shape would see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


class CompiledPerSignature:
    """`function` compiled with `torch.compile(mode=…, fullgraph=True, dynamic=False)`.

    Called like `function`; tensors may be positional or keyword.
    """

    def __init__(self, function: FunctionType, mode: str = "default") -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._mode = mode
        self._compiled: dict[Hashable, Callable[..., Tensor]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        signature = tuple(_facts(value) for value in (*args, *kwargs.values()))
        if signature not in self._compiled:
            self._compiled[signature] = torch.compile(
                _with_own_code(self._function, f"{self._function.__name__}_{len(self._compiled)}"),
                mode=self._mode,
                fullgraph=True,
                dynamic=False,
            )
        return self._compiled[signature](*args, **kwargs)


def _facts(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    return value if isinstance(value, Hashable) else id(value)


def _with_own_code(function: FunctionType, name: str) -> Callable[..., Tensor]:
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
