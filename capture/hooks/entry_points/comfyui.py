"""ComfyUI's functions in `comfy.ldm.modules.attention`, and functions that custom nodes register.

The functions take and return (B, S, H·D) or, with `skip_reshape`, BHSD. Functions that only call
SDPA or flash-attn are handled at those entry points. A model's override
(`transformer_options["optimized_attention_override"]`) may compute anything: attention calls that
the override makes are handled, and a call that the override computes itself is only counted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from capture.hooks.entry_points.wrapper import BHSD, OutputLayout, Translate, wrapped_everywhere
from capture.hooks.interceptor import Arguments, Handler

ENTRY_POINT = "comfyui"
_ATTENTION = "comfy.ldm.modules.attention"

KERNELS = {"attention_flash": "fa2", "attention_xformers": "xformers"}
"""Name of the kernel that each function calls."""
_ADD_THE_MASK = ("attention_sub_quad", "attention_split", "attention_xformers")
"""Functions that add a mask to the scores even if it is a bool mask."""


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of ComfyUI's functions to `handler` until the exit."""
    # Translate before any code is replaced, because translations depend on the original code.
    translations = {function: _translation(function) for function in _functions()}
    with contextlib.ExitStack() as stack:
        for function, translate in translations.items():
            stack.enter_context(wrapped_everywhere(function, translate, handler))
        yield


def _functions() -> set[types.FunctionType]:
    """Return ComfyUI's functions, and the inner functions that its override layer wraps."""
    held = vars(sys.modules[_ATTENTION]) if _ATTENTION in sys.modules else {}
    named = [value for name, value in held.items() if name.startswith("attention")]
    outer = [*named, *held.get("REGISTERED_ATTENTION_FUNCTIONS", {}).values()]
    inner = [getattr(each, "__wrapped__", None) for each in outer]
    return {each for each in (*outer, *inner) if isinstance(each, types.FunctionType)}


def _translation(function: types.FunctionType) -> Translate:
    # Older versions accept `scale` as a keyword argument but ignore it.
    code = getattr(function, "__wrapped__", function).__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return functools.partial(_translated, function.__name__, "scale" in (*named, *code.co_consts))


def _translated(
    name: str,
    takes_scale: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **others: Any,
) -> tuple[Arguments, OutputLayout] | None:
    override = (others.get("transformer_options") or {}).get("optimized_attention_override")
    refusal = ""
    if override is not None and "_inside_attn_wrapper" not in others:
        refusal = f"the override {getattr(override, '__qualname__', type(override).__name__)}"
    elif name == "attention_pytorch" or (name == "attention_flash" and mask is not None):
        return None
    elif mask is not None and "sage" in name:
        refusal = "SageAttention may ignore a mask"
    elif mask is not None and mask.dtype == torch.bool and name in _ADD_THE_MASK:
        refusal = f"{name} adds a bool mask to the scores"
    if not skip_reshape:
        width = query.shape[-1] // heads
        query, key, value = (
            tensor.unflatten(-1, (-1, width)).transpose(1, 2) for tensor in (query, key, value)
        )
    scale = others.get("scale") if takes_scale else None
    return Arguments.of(
        query,
        key,
        value,
        _mask(mask, of_keys=name == "attention_basic"),
        scale=scale,
        entry_point=ENTRY_POINT,
        backend=KERNELS.get(name, f"comfyui.{name.removeprefix('attention_')}"),
        refusal=refusal,
    ), BHSD if skip_output_reshape else _merged(heads)


def _mask(mask: Tensor | None, *, of_keys: bool) -> Tensor | None:
    """Reshape a mask of two to four dimensions, or a bool mask of keys (B, Sk), for SDPA."""
    if mask is None:
        return mask
    if of_keys and mask.dtype == torch.bool:
        return mask.flatten(1)[:, None, None]
    if mask.ndim == 4:
        return mask
    return mask[None, None] if mask.ndim == 2 else mask[:, None]


@functools.cache
def _merged(heads: int) -> OutputLayout:
    """Return the layout of outputs (B, S, H·Dv)."""

    def to_sdpa(output: Tensor) -> Tensor:
        return output.unflatten(-1, (heads, -1)).transpose(1, 2)

    return OutputLayout(to_sdpa, lambda output: output.transpose(1, 2).flatten(2))
