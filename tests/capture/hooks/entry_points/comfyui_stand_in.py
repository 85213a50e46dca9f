"""Stand-in for `comfy.ldm.modules.attention` with the same names, arguments and conventions."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REGISTERED_ATTENTION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {}


def wrap_attn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Call the override in the model's options, except from within the override itself."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            options = kwargs.get("transformer_options") or {}
            if "optimized_attention_override" in options:
                output: Tensor = options["optimized_attention_override"](function, *args, **kwargs)
                return output
        return function(*args, **kwargs)

    return wrapper


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None = None,
) -> Tensor:
    """Compute attention with the mask added to the scores."""
    if not skip_reshape:
        query, key, value = (
            each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value)
        )
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        batch = 1 if mask.ndim == 2 else mask.shape[0]
        scores = scores + mask.reshape(batch, -1, *mask.shape[-2:])
    output = scores.softmax(-1) @ value
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


@wrap_attn
def attention_basic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        mask = hidden.flatten(1)[:, None, None]
    return attend(q, k, v, heads, mask, skip_reshape, skip_output_reshape)


@wrap_attn
def attention_sub_quad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    return attend(query, key, value, heads, mask, skip_reshape, skip_output_reshape)


@wrap_attn
def attention_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Compute attention with a scale, which later versions of ComfyUI accept."""
    scale = kwargs.get("scale")
    return attend(q, k, v, heads, mask, skip_reshape, skip_output_reshape, scale)


@wrap_attn
def attention_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    if not skip_reshape:
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
    if mask is not None and mask.ndim < 4:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)
