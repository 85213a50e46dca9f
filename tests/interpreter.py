"""Triton's interpreter without what it does over and over to no effect.

It replaces the functions of `triton.language` by interpreted ones when a kernel is launched, and
again in every function that the kernel calls. It also computes whether each sum and product of
integers overflows, and without Triton's debug mode looks at none of the answers. Together that is
half of the time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Leave both out, for the rest of the process."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    function = interpreter.InterpretedFunction
    function.__call__ = _once(function.__call__)


def _once(patch_and_call: Any) -> Any:
    @functools.wraps(patch_and_call)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if _is_patched(self.fn):
            return self.rewrite()(*arguments, **named)
        return patch_and_call(self, *arguments, **named)

    return call


def _is_patched(function: Any) -> bool:
    """Return whether the function already sees an interpreted language."""
    functions = [tl.tensor.__add__, *(language.load for language in _languages(function))]
    return not any(map(tl.core.is_builtin, functions))


@functools.cache
def _languages(function: Any) -> list[Any]:
    """The modules that Triton looks for: `tl.load` and `core.load` are replaced one by one."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
