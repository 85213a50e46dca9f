"""Replaces a function in modules, dictionaries, closures and default arguments that refer to it.

A function written in Python keeps its identity but has its code object replaced, so that every
existing reference calls the new code. Other functions are replaced only in loaded modules.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from capture.hooks.interceptor import swap_references

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _OtherCode(NamedTuple):
    original: types.FunctionType
    """Copy of the function with the code that is replaced."""
    name: str
    """Global of the function's module that the new code calls."""
    code: types.CodeType


_names = itertools.count()
_codes: weakref.WeakKeyDictionary[types.FunctionType, dict[types.CodeType, _OtherCode]]
_codes = weakref.WeakKeyDictionary()
"""New code of each function, by the code that it replaces. It is made once, because `torch.compile`
compiles a caller of the function again for every code object that it has not seen."""


@contextlib.contextmanager
def replaced(function: Callable[..., Any], wrap: Wrap) -> Iterator[None]:
    """Put `wrap(original)` in place of a function until the exit."""
    if isinstance(function, types.FunctionType):
        with _other_code(function, wrap):
            yield
        return
    wrapper = wrap(function)
    swap_references({id(function): wrapper})
    try:
        yield
    finally:
        swap_references({id(wrapper): function})


@contextlib.contextmanager
def _other_code(function: types.FunctionType, wrap: Wrap) -> Iterator[None]:
    code, defaults, keywords = function.__code__, function.__defaults__, function.__kwdefaults__
    known = _codes.setdefault(function, {})
    if code not in known:
        known[code] = _replacing(function)
    original, name, other = known[code]
    original.__defaults__, original.__kwdefaults__ = defaults, keywords
    function.__globals__[name] = wrap(original)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = other
    _forget_signature(function)
    try:
        yield
    finally:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, keywords
        _forget_signature(function)
        del function.__globals__[name]


def _replacing(function: types.FunctionType) -> _OtherCode:
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )
    original.__qualname__, original.__module__ = function.__qualname__, function.__module__
    name = f"__attention_replay_{next(_names)}__"
    return _OtherCode(original, name, _calling(name, function.__code__.co_freevars))


def _forget_signature(function: types.FunctionType) -> None:
    """Make `torch.compile` read a function's signature again instead of using its cached copy."""
    dynamo = sys.modules.get("torch._dynamo.variables.functions")
    known = getattr(dynamo, "_spec_cache", None)
    if known is not None:
        known.pop(function, None)


def _calling(name: str, closure: tuple[str, ...]) -> types.CodeType:
    """Return code that calls the global function `name`, for a function with this closure."""
    template: dict[str, Any] = {}
    exec(
        f"""def make({", ".join(closure)}):
            def call(*args, **kwargs):
                ({"".join(f"{each}, " for each in closure)})
                return {name}(*args, **kwargs)
            return call.__code__""",
        template,
    )
    code: types.CodeType = template["make"](*closure)
    return code
