"""Follows calls of modules as `module(...)`, and finds those as `module.forward(...)` in frames.

The latter call no hooks and no `nn.Module._call_impl`. A wrapper of `forward` on the instance would
be copied and pickled with its module, and one on the class cannot be scripted.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn


@contextlib.contextmanager
def replaced_calls(
    modules: Iterable[nn.Module], replace: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace `nn.Module._call_impl` until the exit.

    Args:
        modules: modules whose copy of the method, made by `Module.compile`, is replaced too.
        replace: function that returns the replacement of the method.
    """
    # Dynamo saves the method at its import, which must therefore precede the replacement.
    from torch._dynamo.eval_frame import skip_code

    call = nn.Module._call_impl
    replacement = replace(call)
    # A module that `Module.compile` compiles meanwhile keeps the replacement. Without this line,
    # Dynamo would compile the replacement too, and not only `forward`.
    skip_code(replacement.__code__)
    compiled = {
        module: own
        for module in modules
        if (own := vars(module).get("_compiled_call_impl")) is not None
    }
    try:
        setattr(nn.Module, "_call_impl", replacement)  # noqa: B010 - mypy forbids the assignment
        for module in compiled:
            vars(module)["_compiled_call_impl"] = types.MethodType(replacement, module)
        yield
    finally:
        if nn.Module._call_impl is replacement:
            setattr(nn.Module, "_call_impl", call)  # noqa: B010
        for module, own in compiled.items():
            if getattr(vars(module)["_compiled_call_impl"], "__func__", None) is replacement:
                vars(module)["_compiled_call_impl"] = own


_NAMES = frozenset({"forward", "_call_impl"})
"""Functions that run a module, their first argument."""

Found = TypeVar("Found")


def running_forward(find: Callable[[nn.Module], Found | None]) -> Found | None:
    """Return the facts about the innermost module that the calling thread runs, by its frames.

    Args:
        find: returns the facts about a module; None if the module does not count.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NAMES and code.co_argcount:
            variables = frame.f_locals
            module = variables.get(code.co_varnames[0])
            # Before Python 3.13, the frame keeps this copy, and with it tensors that the model
            # deletes. Three references are the frame's, ours and the argument's; a further one is
            # that of a debugger or of a model that called `locals()`.
            if sys.version_info < (3, 13) and sys.getrefcount(variables) == 3:
                variables.clear()
            if isinstance(module, nn.Module) and (found := find(module)) is not None:
                return found
        frame = frame.f_back
    return None
