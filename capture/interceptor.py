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
    return Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


Handler = Callable[[Arguments, Callable[[], Tensor], Callable[..., Tensor]], Tensor]
"""`handler(arguments, proceed, sdpa) -> output`: `proceed()` makes the call as the caller wrote it,
`sdpa` is the function it reaches."""

_active = threading.Lock()
_inside = threading.local()


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Route every SDPA call of this process, from any thread, through `handler` while active.

    Compiled modules run eagerly meanwhile, `nn.MultiheadAttention` leaves its fused fast path, and
    diffusers' dispatcher uses its native (SDPA) backend, so that no call goes unseen. Everything is
    put back on exit, whatever happened. SDPA calls that an SDPA implementation itself makes are
    part of the outer call and are not handled again.

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
            stack.enter_context(_everything_through_sdpa())
            stack.enter_context(_replaced_everywhere(handler))
            yield
    finally:
        _active.release()


def _replacement(sdpa: Callable[..., Tensor], handler: Handler) -> Callable[..., Tensor]:
    @functools.wraps(TORCH_SDPA, assigned=("__name__", "__doc__"))
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if getattr(_inside, "call", False):
            return sdpa(*args, **kwargs)
        arguments = bind(*args, **kwargs)
        _inside.call = True
        try:
            return handler(arguments, lambda: sdpa(*args, **kwargs), sdpa)
        finally:
            _inside.call = False

    return scaled_dot_product_attention


@contextlib.contextmanager
def _replaced_everywhere(handler: Handler) -> Iterator[None]:
    # F may already hold somebody's replacement: that one then is what models reach.
    replacements = {
        id(sdpa): (sdpa, _replacement(sdpa, handler))
        for sdpa in (TORCH_SDPA, F.scaled_dot_product_attention)
    }
    holders = [
        (module, name, replacements[id(held)])
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and module.__name__ != __name__
        for name, held in list(vars(module).items())
        if id(held) in replacements and name != "TORCH_SDPA"
    ]
    try:
        for module, name, (_, replacement) in holders:
            setattr(module, name, replacement)
        yield
    finally:
        for module, name, (sdpa, replacement) in holders:
            if vars(module).get(name) is replacement:
                setattr(module, name, sdpa)


@contextlib.contextmanager
def _everything_through_sdpa() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        # Only when the model brought diffusers along: its import takes seconds.
        dispatch = sys.modules.get("diffusers.models.attention_dispatch")
        if dispatch is not None:
            stack.enter_context(dispatch.attention_backend("native"))
        yield
