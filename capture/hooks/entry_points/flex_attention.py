"""FlexAttention: `torch.nn.attention.flex_attention.flex_attention`, eager or compiled.

A block mask, which is a function of positions, is written out as a bool mask of at most
`MOST_PAIRS` pairs. A call with a `score_mod`, an arbitrary function of the scores, is only counted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.hooks.entry_points.wrapper import BHSD, OutputLayout, wrapped_everywhere
from capture.hooks.interceptor import Arguments, Handler
from capture.hooks.modes import outside_of_modes

ENTRY_POINT = "flex_attention"
_MODULE = "torch.nn.attention.flex_attention"
MOST_PAIRS = 2**28
"""Maximum number of (query, key) pairs in a written-out block mask, a quarter of a gigabyte."""


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of FlexAttention to `handler` until the exit."""
    function = getattr(sys.modules.get(_MODULE), "flex_attention", None)
    if function is None:
        yield
        return
    with wrapped_everywhere(function, _translated, handler):
        try:
            yield
        finally:
            _written_out.clear()


def _translated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *others: Any,
    return_aux: Any = None,
    **options: Any,
) -> tuple[Arguments, OutputLayout]:
    mask, refusal = mask_of(block_mask, query, key)
    if score_mod is not None:
        refusal = f"score_mod {getattr(score_mod, '__qualname__', score_mod)}"
    return Arguments.of(
        query,
        key,
        value,
        mask,
        scale=scale,
        entry_point=ENTRY_POINT,
        backend="flex",
        refusal=refusal,
        returns="the log-sum-exp" if return_lse or return_aux is not None else "",
    ), _OUTPUT


_OUTPUT = replace(BHSD, is_learned=False)


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles FlexAttention during a recording, as it does outside of one.

    Other compiled code runs eagerly during a recording, so that no call is missed. FlexAttention is
    an exception, because its eager results are not bit-identical.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("default"):
            return function(*args, **kwargs)

    return call


def mask_of(block_mask: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, str]:
    """Convert a block mask or a tensor to a mask for SDPA.

    Returns:
        The mask, which broadcasts to (B, Hq, Sq, Sk), or None; and the reason why a block mask
        cannot be written out, or an empty string.
    """
    if block_mask is None or isinstance(block_mask, Tensor):
        mask = block_mask
        return (mask if mask is None else mask[..., : key.shape[-2]]), ""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if batch * heads * q_len * kv_len > MOST_PAIRS:
        return None, f"a block mask of {batch}×{heads}×{q_len}×{kv_len} pairs"
    known = _written_out.get(id(block_mask))
    if known is not None and known[0] is block_mask and known[1].shape[-2:] == (q_len, kv_len):
        return known[1], ""
    from torch.nn.attention.flex_attention import create_mask

    with outside_of_modes():
        sizes = (batch, heads, q_len, kv_len)
        mask = create_mask(block_mask.mask_mod, *sizes, device=str(query.device))
    _written_out.clear()  # keeps only the latest mask, which all layers share
    _written_out[id(block_mask)] = (block_mask, mask)
    return mask, ""


_written_out: dict[int, tuple[Any, Tensor]] = {}
