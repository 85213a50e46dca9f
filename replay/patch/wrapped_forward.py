"""Wraps functions of module instances, and looks through the wrappers of compiled modules."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


BELOW_HOOK = "_old_forward"
"""Attribute in which accelerate keeps the `forward` below its hook."""


@contextlib.contextmanager
def wrapped(module: nn.Module, wrapper: Wrapper, name: str = "forward") -> Iterator[None]:
    """Wrap a function of a module instance, even if it is wrapped already, until the exit."""
    # Bypass nn.Module.__setattr__, which a subclass may override.
    attributes = vars(module)
    if name == "forward" and BELOW_HOOK in attributes:
        # Pipelines that offload models replace the hooks in each run, with all that is around them.
        name = BELOW_HOOK
    before, inner = attributes.get(name), getattr(module, name)
    ours = attributes[name] = wrapper(inner)
    try:
        yield
    finally:
        # The program may have added or removed hooks meanwhile, which stay as they are.
        if attributes.get(name) is ours and before is None:
            del attributes[name]
        for place in (name, "forward", BELOW_HOOK):
            if attributes.get(place) is ours:
                attributes[place] = inner


@contextlib.contextmanager
def wrapped_outside(
    module: nn.Module, wrapper: Wrapper, compiled: Iterable[nn.Module]
) -> Iterator[None]:
    """Wrap a module's `forward` and the functions that run it compiled, until the exit.

    `torch.compile` traces the wrapper of `forward`, which must call `forward` alone while
    `torch.compiler.is_compiling()` is true. The others run outside the graph.

    Args:
        compiled: the module's wrappers that `compiled_wrappers` found.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrapped(module, wrapper))
        if is_compiled_in_place(module):
            stack.enter_context(wrapped(module, wrapper, "_compiled_call_impl"))
        for each in compiled:
            stack.enter_context(wrapped(each, wrapper))
        yield


def compiled_wrappers(modules: Collection[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return the live wrappers that `torch.compile` returned for some of the modules."""
    compiled: dict[nn.Module, list[nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            inner = uncompiled(each)
            if inner is not each and inner in modules:
                compiled.setdefault(inner, []).append(each)
    return compiled


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True after `module.compile()`."""
    return vars(module).get("_compiled_call_impl") is not None


def is_compiled(module: nn.Module) -> bool:
    """Return True for the wrapper that `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside such a wrapper, or else the module itself."""
    inner = child(module, "_orig_mod")
    return module if inner is None else inner


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a module's own submodule of a name; None if there is none."""
    children = module._modules
    if name not in children:  # the children of a scripted module have no `get`
        return None
    return children[name]
