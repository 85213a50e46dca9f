"""Makes Triton's interpreter twice as fast by skipping redundant work.

The interpreter replaces the functions of `triton.language` at each kernel launch, and again in
every function that the kernel calls. It also checks each integer sum and product for overflow, and
ignores the result outside Triton's debug mode.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Skip the repeated replacement and the overflow checks until the process ends."""
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
    """Return the modules whose functions Triton replaces, such as `tl` and `core`."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
