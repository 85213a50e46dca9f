"""The functions that a measurement relies on, as they were before any kernel was imported.

A kernel's library may replace functions of PyTorch or Python for the whole process, and then every
row would be measured by what it put there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import timeit
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional

OURS = ("replay", "capture")

ABSENT = object()
"""In place of what a class only inherits."""

BORROWED: list[tuple[Any, tuple[str, ...]]] = [
    (time, ("perf_counter", "monotonic", "time", "sleep")),
    (timeit, ("default_timer",)),
    (os, ("write", "read")),
    (json, ("dumps", "loads")),
    (gc, ("isenabled", "get_objects")),
    (safetensors.torch, ("save_file",)),
    (torch.nn.functional, ("scaled_dot_product_attention",)),
    (torch, ("empty", "full", "equal", "isnan", "tensor", "no_grad", "inference_mode")),
    (torch.cuda, ("synchronize", "current_stream", "Event", "_sleep", "is_available")),
    (torch.cuda.Event, ("__new__", "record", "elapsed_time", "synchronize")),
    (
        torch.Tensor,
        (
            "clone",
            "copy_",
            "neg_",
            "fill_",
            "zero_",
            "detach",
            "cpu",
            "to",
            "__eq__",
            "__getitem__",
        ),
    ),
]
"""Functions of others, by where they stand."""


class Functions:
    """What they were."""

    def __init__(self) -> None:
        # Read where they stand: there are thousands, and a method that is asked of its class by
        # name is a new object each time.
        self._was = [
            (vars(owner), name, vars(owner).get(name, ABSENT), owner) for owner, name in _names()
        ]

    def restore(self) -> list[str]:
        """Put back those that were replaced; their names."""
        replaced = []
        for place, name, function, owner in self._was:
            if place.get(name, ABSENT) is function:
                continue
            if function is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, function)
            replaced.append(f"{_name_of(owner)}.{name}")
        return replaced


def _names() -> Iterator[tuple[Any, str]]:
    for owner, names in BORROWED:
        yield from ((owner, name) for name in names if hasattr(owner, name))
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] not in OURS:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | type):
                yield module, name
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield from (
                    (value, attribute)
                    for attribute, method in vars(value).items()
                    if isinstance(method, FunctionType)
                )


def _name_of(owner: Any) -> str:
    module = getattr(owner, "__module__", "")
    return owner.__name__ if isinstance(owner, ModuleType) else f"{module}.{owner.__qualname__}"
