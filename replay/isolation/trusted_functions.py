"""The functions that measurements rely on, as they were before any kernel was imported.

A kernel's library may replace functions of PyTorch or Python for the whole process. All rows would
then be measured with the replacements.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import random
import secrets
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import attrgetter, is_
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional

OURS = ("replay", "capture", "attention_kernels")

MEASURING = ("replay.bench", "replay.isolation", "replay.timing")
"""Our packages whose functions must keep not only their identity but also code and defaults."""

MADE_OF = ("__code__", "__defaults__", "__kwdefaults__")

CONSTANTS = (int, float, str, tuple, frozenset, type(None))
"""Types of constants (names in capitals) in our modules that must keep their values."""

OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
"""Prefixes of functions that `torch.compile` adds to modules and removes again."""

ABSENT = object()
"""Marker for a method that a class inherits instead of defining."""

BORROWED: list[tuple[Any, tuple[str, ...]]] = [
    (time, ("perf_counter", "monotonic", "time", "sleep")),
    (timeit, ("default_timer",)),
    (os, ("write", "read", "urandom")),
    (json, ("dumps", "loads")),
    (gc, ("isenabled", "get_objects")),
    (statistics, ("median",)),
    (
        builtins,
        (
            "sorted",
            "min",
            "max",
            "sum",
            "len",
            "range",
            "zip",
            "isinstance",
            "float",
            "int",
            "list",
        ),
    ),
    (secrets, ("randbelow", "randbits", "SystemRandom", "_sysrand")),
    (random, ("Random", "SystemRandom", "_urandom")),
    (random.SystemRandom, ("getrandbits", "random")),
    (random.Random, ("randrange", "sample", "shuffle", "choice", "_randbelow")),
    (safetensors.torch, ("save_file",)),
    (torch.nn.functional, ("scaled_dot_product_attention",)),
    (
        torch,
        (
            *("empty", "full", "zeros", "equal", "isnan", "tensor", "arange", "cat"),
            *("no_grad", "inference_mode"),
        ),
    ),
    (torch.cuda, ("synchronize", "current_stream", "Event", "_sleep", "is_available")),
    (torch.cuda.Event, ("__new__", "record", "elapsed_time", "synchronize")),
    (
        torch.Tensor,
        (
            *("clone", "copy_", "neg_", "neg", "flip", "fill_", "zero_", "detach", "cpu", "to"),
            *("narrow", "as_strided", "expand", "transpose", "contiguous", "isnan", "isfinite"),
            "sum",
            *("__eq__", "__getitem__", "__setitem__"),
        ),
    ),
]
"""Functions of other packages to protect: pairs of an owner and the names of its functions."""


class _Standing(NamedTuple):
    """Original values of many attributes, as lists with one entry per attribute.

    Thousands of attributes are compared without Python loops. Values are read from the owners'
    dictionaries, because reading a method from its class makes a new object each time.
    """

    get: Callable[[Any, str, object], object]
    owners: list[Any]
    variables: list[Any]
    names: list[str]
    values: list[object]

    def is_as_it_was(self) -> bool:
        now = map(self.get, self.variables, self.names, repeat(ABSENT))
        return all(map(is_, now, self.values))


class TrustedFunctions:
    """Original functions, and constants of our own modules."""

    def __init__(self) -> None:
        self._standing = {
            kind: _Standing(kind.get, [], [], [], []) for kind in (dict, MappingProxyType)
        }
        for owner, name in dict.fromkeys(_names()):
            variables = vars(owner)
            standing = self._standing[type(variables)]
            standing.owners.append(owner)
            standing.variables.append(variables)
            standing.names.append(name)
            standing.values.append(variables.get(name, ABSENT))
        self._measuring = [
            value
            for standing in self._standing.values()
            for value in standing.values
            # A replacement from another package may have no module.
            if isinstance(value, FunctionType) and (value.__module__ or "").startswith(MEASURING)
        ]
        self._made_of = {part: list(map(attrgetter(part), self._measuring)) for part in MADE_OF}

    def restore(self) -> list[str]:
        """Restore replaced functions; return their names."""
        replaced: list[str] = []
        for standing in self._standing.values():
            if not standing.is_as_it_was():
                replaced += _put_back(standing)
        for part, was in self._made_of.items():
            if not all(map(is_, map(attrgetter(part), self._measuring), was)):
                replaced += self._remake(part)
        return replaced

    def _remake(self, part: str) -> Iterator[str]:
        for function, was in zip(self._measuring, self._made_of[part], strict=True):
            if getattr(function, part) is not was:
                setattr(function, part, was)
                yield f"{function.__module__}.{function.__qualname__}"


def _put_back(standing: _Standing) -> Iterator[str]:
    _, *entries = standing
    for owner, variables, name, value in zip(*entries, strict=True):
        if variables.get(name, ABSENT) is value:
            continue
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        yield f"{_name_of(owner)}.{name}"


def _names() -> Iterator[tuple[Any, str]]:
    for owner, names in BORROWED:
        yield from ((owner, name) for name in names if hasattr(owner, name))
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] not in OURS:
            continue
        for name, value in list(vars(module).items()):
            if name.startswith(OF_DYNAMO):
                continue
            if isinstance(value, FunctionType | type) or (
                name.isupper() and isinstance(value, CONSTANTS)
            ):
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
