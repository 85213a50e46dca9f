"""Wraps functions of module instances, and looks through the wrappers of compiled modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
