"""diffusers' attention dispatcher: the functions in `_AttentionBackendRegistry`, one per backend.

Models call `dispatch_attention_fn`, which looks up, at each call, the function of the backend that
is set for the processor or the process. The functions take BSHD. The `native` functions call SDPA,
so they are not wrapped here. The dispatcher silently drops arguments that a function does not
declare. A dropped mask is recorded as the model passed it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from capture.call.attention_variant import PLAIN, AttentionVariant
from capture.hooks.entry_points import flex_attention
from capture.hooks.entry_points.wrapper import BSHD, OutputLayout, wrapped
from capture.hooks.interceptor import Arguments, Handler

ENTRY_POINT = "diffusers"
_DISPATCH = "diffusers.models.attention_dispatch"

KERNELS = {
    "flash": "fa2",
    "flash_hub": "fa2",
    "flash_varlen": "fa2-varlen",
    "flash_varlen_hub": "fa2-varlen",
    "_flash_3": "fa3",
    "_flash_3_hub": "fa3",
    "flash_4_hub": "fa4",
    "flex": "flex",
    "xformers": "xformers",
}
"""Name of the kernel that each backend calls."""
_BOTTOM_RIGHT = ("flash", "_flash", "aiter")
"""Name prefixes of the backends whose causal mask is aligned bottom right."""


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of the dispatcher's functions to `handler` until the exit."""
    registry = getattr(sys.modules.get(_DISPATCH), "_AttentionBackendRegistry", None)
    if registry is None:
        yield
        return
    originals, declared = dict(registry._backends), dict(registry._supported_arg_names)
    for backend, function in originals.items():
        name = str(getattr(backend, "value", backend))
        if "native" in name:
            continue
        translate = functools.partial(_translated, name)
        if "attn_mask" not in declared[backend]:
            registry._supported_arg_names[backend] = {*declared[backend], "attn_mask"}
            function, translate = _without_mask(function), functools.partial(_dropped, name)
        registry._backends[backend] = wrapped(function, translate, handler)
    try:
        yield
    finally:
        registry._backends.update(originals)
        registry._supported_arg_names.update(declared)


def _without_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that drops a mask, as the dispatcher does."""

    @functools.wraps(function)
    def call(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _dropped(name: str, *args: Any, **kwargs: Any) -> tuple[Arguments, OutputLayout]:
    arguments, layout = _translated(name, *args, **kwargs)
    if arguments.attn_mask is not None:
        sentence = f"diffusers drops attn_mask, because its backend {name} does not take one"
        arguments = arguments._replace(dropped=sentence)
    return arguments, layout


def _translated(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> tuple[Arguments, OutputLayout]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    refusal = "context parallel" if _parallel_config is not None else ""
    if name == "flex":
        attn_mask, reason = flex_attention.mask_of(attn_mask, query, key)
        refusal = refusal or reason
    elif attn_mask is not None and attn_mask.ndim == 2:
        attn_mask = attn_mask[:, None, None]
    left, right = (None if side < 0 else side for side in window_size)
    bottom_right = name.startswith(_BOTTOM_RIGHT) and (is_causal or (left, right) != (None, None))
    variant = (
        AttentionVariant(bottom_right=bottom_right, window=(left, right)) if bottom_right else PLAIN
    )
    return Arguments.of(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        variant=variant,
        entry_point=ENTRY_POINT,
        backend=KERNELS.get(name, f"diffusers.{name}"),
        refusal=refusal,
        returns="the log-sum-exp" if return_lse else "",
    ), BSHD
