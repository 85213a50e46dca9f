"""xFormers: `xformers.ops.memory_efficient_attention`, which chooses among kernels of its own.

It takes BSHD; grouped heads as views with a fifth dimension; a mask as a bias of the query's dtype;
and `LowerTriangularMask`, aligned top left as SDPA's causal mask is. A bool mask becomes a bias
inside the timed call. Bias rows must be aligned to 8 elements, so masks over another number of keys
are refused rather than padded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import all_of, dtypes, mask_or_causal, multiple_of_8, no_dropout
from replay.kernels.layout import refuse, unit_stride
from replay.kernels.library import Library
from replay.kernels.registry import Kernel, register

LIBRARY = Library(
    module="xformers.ops",
    package="xformers",
    install="pip install xformers",
    functions=("memory_efficient_attention", "LowerTriangularMask"),
    runs_on=lambda capability: capability >= (7, 0),
    needs="7.0 or higher",
)


def _aligned_mask(call: AttentionCall) -> str | None:
    if call.attn_mask is None or call.shape.kv_len % 8 == 0:
        return None
    return f"attn_mask over {call.shape.kv_len} keys: needs a multiple of 8"


def _bias(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as (B, Hq, Sq, Sk) of the query's dtype, as views where nothing must change."""
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = bias.masked_fill_(~attn_mask, -torch.inf)
    return attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, bias: object
) -> tuple[Tensor, Tensor, Tensor, object]:
    """BHSD tensors as BSHD, or with grouped heads (B, S, key heads, heads in a group, D)."""
    kv_heads = key.shape[1]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if query.shape[2] == kv_heads:
        return query, key, value, bias
    query = query.unflatten(2, (kv_heads, -1))
    group = query.shape[3]
    key, value = (each[:, :, :, None].expand(-1, -1, -1, group, -1) for each in (key, value))
    if isinstance(bias, Tensor):
        bias = bias.unflatten(1, (kv_heads, -1))
    return query, key, value, bias


def _run(query: Tensor, key: Tensor, value: Tensor, bias: object, scale: float | None) -> Tensor:
    output = LIBRARY.load().memory_efficient_attention(
        query, key, value, attn_bias=bias, scale=scale
    )
    return (output.flatten(2, 3) if output.ndim == 5 else output).transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`memory_efficient_attention` with SDPA's arguments."""
    refuse(None, dropout_p)
    bias: object = LIBRARY.load().LowerTriangularMask() if is_causal else None
    if attn_mask is not None:
        bias = _bias(attn_mask, query, key)
    query, key, value = (unit_stride(each) for each in (query, key, value))
    return _run(*_grouped(query, key, value, bias), scale)


def _prepare(call: AttentionCall) -> Callable[[], Tensor]:
    bias: object = LIBRARY.load().LowerTriangularMask() if call.is_causal else None
    if call.attn_mask is not None:
        bias = _bias(call.attn_mask, call.query, call.key)
    query, key, value = (
        each.transpose(1, 2).contiguous().transpose(1, 2)
        for each in (call.query, call.key, call.value)
    )
    arguments = _grouped(query, key, value, bias)
    return lambda: _run(*arguments, call.scale)


register(
    Kernel(
        "xformers",
        attention,
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(
            no_dropout,
            dtypes(torch.float16, torch.bfloat16, torch.float32),
            mask_or_causal,
            multiple_of_8,
            _aligned_mask,
        ),
        prepare=_prepare,
        about="xFormers' memory_efficient_attention",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
