"""The hooks and modes that a kernel could leave behind to run code after its timed interval."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class LeftBehind(Exception):
    """Error for a hook or mode that a call left in place."""


def python_hooks() -> tuple[Any, Any]:
    """Return the profile and trace functions; Python calls them during this function too."""
    return sys.getprofile(), sys.gettrace()


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes that PyTorch calls before each of its functions, innermost last."""
    size: int = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(size)]


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Replace PyTorch's stack of function modes with these modes."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the modes that PyTorch calls before each of its operators, innermost last."""
    size: int = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(place) for place in range(size)]


def set_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Replace PyTorch's stack of dispatch modes with these modes."""
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


class Watch:
    """Hooks and modes in place before a call."""

    def __init__(self) -> None:
        self._modes = _numbers_of_modes()
        self._hooks = python_hooks()

    def compare(self, hooks: tuple[Any, Any]) -> None:
        """Check that the call left nothing behind.

        Args:
            hooks: the result of `python_hooks()`, called within the timed interval, so that the
                time includes the work of a hook.

        Raises:
            LeftBehind: the call left a hook or mode in place.
        """
        if hooks != self._hooks:
            raise LeftBehind("a hook that runs after it returned")
        if _numbers_of_modes() != self._modes:
            raise LeftBehind("a mode of PyTorch's, in which others' functions run")


def _numbers_of_modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
