"""ComfyUI's attention function, `comfy.ldm.modules.attention.attention_kernels`.

Custom nodes and models find it by name; `override` may be a model's
`transformer_options["optimized_attention_override"]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_kernels.integrations import PRECISIONS
from attention_kernels.operators import attention


def register() -> None:
    try:
        functions = importlib.import_module("comfy.ldm.modules.attention")
    except ImportError as error:
        raise ImportError(f"ComfyUI cannot be imported ({error}): call this in a node") from error
    for name, precision in PRECISIONS.items():
        functions.register_attention_function(
            name, partial(attention_function, precision=precision)
        )


def attention_function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    precision: str = "exact",
    **others: Any,
) -> Tensor:
    """Return attention with ComfyUI's arguments.

    Args:
        q, k, v: (B, S, H·D), or (B, H, S, D) with `skip_reshape`.
        mask: (Sq, Sk), (B, Sq, Sk) or broadcasts to (B, H, Sq, Sk); bool (True = attend) or float.
        attn_precision: ignored: scores and sums are float32.
        skip_output_reshape: return (B, H, S, D), not (B, S, H·D).
    """
    if not skip_reshape:
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
    if mask is not None and mask.ndim < 4:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    output = attention(q, k, v, mask, scale=scale, enable_gqa=True, precision=precision)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run `attention_function` in place of ComfyUI's `function`."""
    return attention_function(*args, **kwargs)
