"""Replaces a function in modules, dictionaries, closures and default arguments that refer to it.

A function written in Python keeps its identity but has its code object replaced, so that every
existing reference calls the new code. Other functions are replaced only in loaded modules.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from capture.hooks.interceptor import swap_references

_replacements = itertools.count()
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


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
    original = types.FunctionType(
        code, function.__globals__, function.__name__, defaults, function.__closure__
    )
    original.__kwdefaults__ = keywords
    original.__qualname__, original.__module__ = function.__qualname__, function.__module__
    # The new code finds the wrapper as a global of the function's module, by a unique name.
    name = f"__attention_replay_{next(_replacements)}__"
    function.__globals__[name] = wrap(original)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = _calling(name, code.co_freevars)
    _forget_signature(function)
    try:
        yield
    finally:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, keywords
        _forget_signature(function)
        del function.__globals__[name]


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
