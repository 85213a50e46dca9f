"""Sees every call of `torch.nn.functional.scaled_dot_product_attention`, and can answer it.

The function is replaced wherever a loaded module holds it by name: `torch.nn.functional` itself,
which models look up at call time, and modules that ran `from torch.nn.functional import
scaled_dot_product_attention`. A call that reaches attention by another road (flash-attn's own
functions, FlexAttention) is not seen.
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
"""PyTorch's own function, taken at import, before anybody replaced it."""


class Arguments(NamedTuple):
    """SDPA's arguments under SDPA's names, however the caller passed them."""

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
    """SDPA's signature (a builtin that `inspect.signature` cannot read)."""
    # SDPA takes numpy and tensor scalars too; a census and a header hold plain numbers.
    scale = None if scale is None else float(scale)
    return Arguments(query, key, value, attn_mask, float(dropout_p), is_causal, scale, enable_gqa)


Handler = Callable[[Arguments, Callable[[], Tensor], Callable[..., Tensor]], Tensor]
"""`handler(arguments, proceed, sdpa) -> output`: `proceed()` makes the call as the caller wrote it,
`sdpa` is the function it reaches."""

Traced = Callable[[Arguments, Callable[[], Tensor]], Tensor]
"""`traced(arguments, proceed) -> output`: what `torch.compile` traces in place of the call. A model
compiled earlier is compiled anew when the code of this function, or a value that it reads, differs
from what was traced."""

_active = threading.Lock()
_inside = threading.local()


@contextlib.contextmanager
def intercept(handler: Handler, traced: Traced | None = None) -> Iterator[None]:
    """Route every SDPA call of this process, from any thread, through `handler` while active.

    Compiled modules run eagerly meanwhile, or, with `traced`, compiled with that in place of the
    call; `nn.MultiheadAttention` leaves its fused fast path, and diffusers' dispatcher uses its
    native (SDPA) backend, so that no call goes unseen. Everything is put back on exit, whatever
    happened: what was compiled before is used again. SDPA calls that an SDPA implementation itself
    makes are part of the outer call and are not handled again.

    Raises:
        RuntimeError: another interception is active; two would each count the other's calls.
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
    """Let `handler` answer a call, unless it is part of one that this thread is answering."""
    if getattr(_inside, "call", False):
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
        # First, and alone: nothing else here can be traced.
        if traced is not None and torch.compiler.is_compiling():
            return traced(bind(*args, **kwargs), lambda: sdpa(*args, **kwargs))
        # Somebody may have kept this function beyond its time, in a closure, say.
        if is_over.is_set() or getattr(_inside, "call", False):
            return sdpa(*args, **kwargs)
        try:
            arguments = bind(*args, **kwargs)
        except (TypeError, ValueError):
            arguments = None
        if arguments is None:
            return sdpa(*args, **kwargs)  # which refuses a wrong call in its own words
        return answer(handler, arguments, lambda: sdpa(*args, **kwargs), sdpa)

    return scaled_dot_product_attention


@contextlib.contextmanager
def _replaced_everywhere(handler: Handler, traced: Traced | None) -> Iterator[None]:
    is_over = threading.Event()
    # F may already hold somebody's replacement: that one then is what models reach.
    originals = {id(sdpa): sdpa for sdpa in (TORCH_SDPA, F.scaled_dot_product_attention)}
    replacements = {
        key: _replacement(sdpa, handler, traced, is_over) for key, sdpa in originals.items()
    }
    try:
        _exchange(replacements)
        yield
    finally:
        is_over.set()
        # Not only where it was put: a module imported meanwhile took the replacement by name.
        _exchange({id(replacements[key]): sdpa for key, sdpa in originals.items()})


def _exchange(functions: dict[int, Callable[..., Tensor]]) -> None:
    """Put each function where a loaded module holds, by name, the one with the id that is its key.

    This module keeps what it holds.
    """
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
        # Only when the model brought diffusers along: its import takes seconds.
        dispatch = sys.modules.get("diffusers.models.attention_dispatch")
        if dispatch is not None:
            stack.enter_context(dispatch.attention_backend("native"))
        yield
