"""Intercepts every call of `torch.nn.functional.scaled_dot_product_attention`.

The function is replaced in every loaded module that refers to it: in `torch.nn.functional` itself,
where models look it up at call time, and in modules that ran `from torch.nn.functional import
scaled_dot_product_attention`. Attention that does not go through SDPA (flash-attn's own functions,
FlexAttention) is not intercepted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TORCH_SDPA: Callable[..., Tensor] = F.scaled_dot_product_attention
"""PyTorch's own function, saved at import, before it is replaced."""


class Arguments(NamedTuple):
    """SDPA's arguments by name, positional or keyword in the original call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments:
    """Bind arguments to SDPA's signature (`inspect.signature` cannot read the builtin's)."""
    # SDPA also accepts numpy and tensor scalars; the census and headers need plain numbers.
    scale = None if scale is None else float(scale)
    # Three times as fast as the class itself, and this is on the path of every call.
    return _tuple(
        Arguments, (query, key, value, attn_mask, float(dropout_p), is_causal, scale, enable_gqa)
    )


_tuple = tuple.__new__


Handler = Callable[[Arguments, Callable[[], Tensor], Callable[..., Tensor]], Tensor]
"""`handler(arguments, proceed, sdpa) -> output`: `proceed()` makes the original call, `sdpa` is
the function it calls."""

Traced = Callable[[Arguments, Callable[[], Tensor]], Tensor]
"""`traced(arguments, proceed) -> output`: what `torch.compile` traces in place of the call. A model
compiled earlier is recompiled if the code of this function, or a value it reads, has changed since
it was traced."""

_active = threading.Lock()


class _Inside(threading.local):
    """Whether the calling thread is inside a handled call."""

    call = False


_inside = _Inside()


@contextlib.contextmanager
def intercept(handler: Handler, traced: Traced | None = None) -> Iterator[None]:
    """Route every SDPA call of this process, from any thread, through `handler`.

    While it is active, compiled modules run eagerly or, with `traced`, compiled with `traced` in
    place of the call. `nn.MultiheadAttention` leaves its fused fast path and diffusers' dispatcher
    uses its native (SDPA) backend, so that no call is missed. Everything is restored on exit, also
    after an exception, and earlier compiled code is used again. SDPA calls made by an SDPA
    implementation are part of the outer call and are not handled again.

    Raises:
        RuntimeError: another interception is active; each would count the other's calls.
    """
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "scaled_dot_product_attention is already intercepted; "
            "end that recording before starting another"
        )
    try:
        with contextlib.ExitStack() as stack:
            if traced is None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_everything_through_sdpa())
            stack.enter_context(_replaced_everywhere(handler, traced))
            yield
    finally:
        _active.release()


def answer(
    handler: Handler,
    arguments: Arguments,
    proceed: Callable[[], Tensor],
    sdpa: Callable[..., Tensor],
) -> Tensor:
    """Pass a call to `handler`, unless this thread is already inside a handled call."""
    if _inside.call:
        return proceed()
    _inside.call = True
    try:
        return handler(arguments, proceed, sdpa)
    finally:
        _inside.call = False


def _replacement(
    sdpa: Callable[..., Tensor],
    handler: Handler,
    traced: Traced | None,
    is_over: threading.Event,
) -> Callable[..., Tensor]:
    @functools.wraps(TORCH_SDPA, assigned=("__name__", "__doc__"))
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        # First, because nothing below can be traced.
        if traced is not None and torch.compiler.is_compiling():
            return traced(bind(*args, **kwargs), lambda: sdpa(*args, **kwargs))
        # A caller may still hold this function after the interception ended, e.g. in a closure.
        if is_over.is_set() or _inside.call:
            return sdpa(*args, **kwargs)
        try:
            arguments = bind(*args, **kwargs)
        except (TypeError, ValueError):
            arguments = None
        if arguments is None:
            return sdpa(*args, **kwargs)  # let SDPA raise its own error
        _inside.call = True  # as in `answer`, without one more function on every call's path
        try:
            return handler(arguments, lambda: sdpa(*args, **kwargs), sdpa)
        finally:
            _inside.call = False

    return scaled_dot_product_attention


@contextlib.contextmanager
def _replaced_everywhere(handler: Handler, traced: Traced | None) -> Iterator[None]:
    is_over = threading.Event()
    # F may already hold another replacement, which is then what models call.
    originals = {id(sdpa): sdpa for sdpa in (TORCH_SDPA, F.scaled_dot_product_attention)}
    replacements = {
        key: _replacement(sdpa, handler, traced, is_over) for key, sdpa in originals.items()
    }
    try:
        _swap_references(replacements)
        yield
    finally:
        is_over.set()
        # Everywhere, because modules imported meanwhile may have imported the replacement.
        _swap_references({id(replacements[key]): sdpa for key, sdpa in originals.items()})


def _swap_references(functions: dict[int, Callable[..., Tensor]]) -> None:
    """Replace functions, given by their id, in every loaded module except this one."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or vars(module) is globals():
            continue
        for name, held in list(vars(module).items()):
            if id(held) in functions and name != "TORCH_SDPA":
                setattr(module, name, functions[id(held)])


@contextlib.contextmanager
def _everything_through_sdpa() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        # Only if the model already imported diffusers: the import takes seconds.
        dispatch = sys.modules.get("diffusers.models.attention_dispatch")
        if dispatch is not None:
            stack.enter_context(dispatch.attention_backend("native"))
        yield
