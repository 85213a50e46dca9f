"""Compilation of an attention function, once for each kind of call.

`torch.compile` keeps its results on the function's code object and gives up after a few shapes
(`torch._dynamo.config.recompile_limit`). A replay has many shapes, so every kind of call gets its
own code object, and is compiled as in a model with that shape.

`max-autotune` records CUDA graphs on a GPU. The graphs of all functions share one memory pool and
one history, which break in two cases: if outputs are not marked as finished, and after a failed
recording (out of memory), when every later graph fails too, and the earlier ones after a reset. So
every call marks its outputs, and a failure resets the history and compiles all functions anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from capture.large_imports import without_collecting


def import_compiler() -> None:
    """Import PyTorch's compiler without garbage collection, in two thirds of the usual time."""
    with without_collecting():
        import torch._inductor.compile_fx  # noqa: F401


class CompiledPerSignature:
    """Function compiled with `torch.compile(mode=…, fullgraph=True, dynamic=False)`.

    The object is called like the function itself, with positional or keyword tensors.
    """

    def __init__(self, function: FunctionType, mode: str = "default") -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._mode = mode
        self._compiled: dict[Hashable, Callable[..., Tensor]] = {}
        if mode == "max-autotune":
            _SHARING_GRAPHS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        signature = tuple(_facts(value) for value in (*args, *kwargs.values()))
        if signature not in self._compiled:
            self._compiled[signature] = self._to_compile(len(self._compiled))
            with self._in_this_process():
                return self(*args, **kwargs)
        if self._mode != "max-autotune":
            return self._compiled[signature](*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        try:
            return self._compiled[signature](*args, **kwargs)
        except Exception:
            _forget_graphs()
            raise

    def _to_compile(self, number: int) -> Callable[..., Tensor]:
        """Return the function with its own code object, compiled at its first call."""
        import_compiler()
        # Without this, autotuning would report an error for every candidate that does not compile.
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
        return torch.compile(
            _with_own_code(self._function, f"{self._function.__name__}_{number}"),
            mode=self._mode,
            fullgraph=True,
            dynamic=False,
        )

    def _in_this_process(self) -> contextlib.AbstractContextManager[object]:
        """Compile without a pool of processes, unless many programs must be compiled.

        An attention call is one program or a few, which are compiled before the pool is ready,
        because its processes import PyTorch. The pool would start while other kernels are timed.
        """
        if self._mode == "max-autotune":
            return contextlib.nullcontext()
        from torch._inductor import config

        return config.patch(compile_threads=1)


_SHARING_GRAPHS: weakref.WeakSet[CompiledPerSignature] = weakref.WeakSet()


def _forget_graphs() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()
    for function in _SHARING_GRAPHS:
        function._compiled.clear()


def _facts(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return (*sizes, value.requires_grad)
    if isinstance(value, BlockMask):  # packed sequences get a new object at every call
        return value.shape
    return value if isinstance(value, Hashable) else id(value)


def _with_own_code(function: FunctionType, name: str) -> Callable[..., Tensor]:
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
