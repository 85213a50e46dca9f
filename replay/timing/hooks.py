"""Code that a kernel could leave behind, to run once it returned and its time is taken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class LeftBehind(Exception):
    """A call returned with a hook or a mode in place that was not there before."""


def python_hooks() -> tuple[Any, Any]:
    """What Python calls at each call and return; asking is such a call."""
    return sys.getprofile(), sys.gettrace()


def function_modes() -> list[TorchFunctionMode]:
    """What PyTorch calls before each of its functions, the innermost last."""
    size: int = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(each) for each in range(size)]


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Leave just these."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def dispatch_modes() -> list[TorchDispatchMode]:
    """What PyTorch calls before each of its operators, the innermost last."""
    size: int = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(each) for each in range(size)]


def set_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Leave just these."""
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


class Watch:
    """What was in place before a call."""

    def __init__(self) -> None:
        self._modes = _numbers_of_modes()
        self._hooks = python_hooks()

    def compare(self, hooks: tuple[Any, Any]) -> None:
        """See whether the call left something behind.

        Args:
            hooks: `python_hooks()`, asked while the call's time was still taken, so that what a
                hook does then is in it.

        Raises:
            LeftBehind: it did.
        """
        if hooks != self._hooks:
            raise LeftBehind("a hook that runs after it returned")
        if _numbers_of_modes() != self._modes:
            raise LeftBehind("a mode of PyTorch's, in which others' functions run")


def _numbers_of_modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
