"""FlashAttention 3: the module `flash_attn_interface`, built from `hopper/` of its repository.

`fa3-fp8` quantises query, key and value to float8_e4m3fn, with one scale for every batch element
and key head (the shape its `q_descale`, `k_descale` and `v_descale` have). The drop-in includes
that; the core does not. Its output is bfloat16, converted here to the dtype that SDPA would return.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import (
    all_of,
    causal_only_square,
    half_precision,
    head_dim_multiple_of,
    max_head_dim,
    multiple_of_8,
    no_dropout,
    no_mask,
    same_value_dim,
)
from replay.kernels.layout import on_bshd, refuse, unit_stride
from replay.kernels.library import Library
from replay.kernels.registry import Kernel, register

LIBRARY = Library(
    module="flash_attn_interface",
    package="flash_attn_3",
    install="git clone https://github.com/Dao-AILab/flash-attention && "
    "pip install --no-build-isolation ./flash-attention/hopper",
    functions=("flash_attn_func",),
    runs_on=lambda capability: capability == (9, 0),
    needs="9.0",
)

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max

_limits = (no_dropout, half_precision, same_value_dim, max_head_dim(256), no_mask)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    is_causal: bool,
    **descale: Tensor,
) -> Tensor:
    output = LIBRARY.load().flash_attn_func(
        query, key, value, softmax_scale=scale, causal=is_causal, **descale
    )
    # Before 3.0.0b1's last months it returned the log-sum-exp too.
    return output[0] if isinstance(output, tuple) else output


def quantise(tensor_BSHD: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """A tensor in float8 and the (B, Hkv) factors that turn it back."""
    grouped = tensor_BSHD.unflatten(2, (kv_heads, -1))
    largest = grouped.abs().amax(dim=(1, 3, 4)).float()
    descale = (largest / LARGEST_FP8).clamp(min=torch.finfo(torch.float32).tiny)
    quantised = (grouped / descale[:, None, :, None, None]).to(FP8)
    return quantised.flatten(2, 3), descale


def _quantised(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """The arguments of `_run`, from BHSD tensors."""
    arguments: dict[str, Tensor] = {}
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        arguments[name], arguments[f"{name[0]}_descale"] = quantise(
            unit_stride(tensor).transpose(1, 2), key.shape[1]
        )
    return arguments


def fp8(
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
    """FlashAttention 3 on float8 copies of query, key and value."""
    refuse(attn_mask, dropout_p)
    output = _run(scale=scale, is_causal=is_causal, **_quantised(query, key, value))
    return output.to(query.dtype).transpose(1, 2)


def _prepare_fp8(call: AttentionCall) -> Callable[[], Tensor]:
    arguments = _quantised(call.query, call.key, call.value)
    return lambda: _run(scale=call.scale, is_causal=call.is_causal, **arguments).transpose(1, 2)


_attention, _prepare = on_bshd(_run)
register(
    Kernel(
        "fa3",
        _attention,
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(*_limits, multiple_of_8, causal_only_square),
        prepare=_prepare,
        about="FlashAttention 3 (Hopper)",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
register(
    Kernel(
        "fa3-fp8",
        fp8,
        accuracy_class="quantised",
        unavailable=LIBRARY.unavailable,
        unsupported=all_of(*_limits, head_dim_multiple_of(16), causal_only_square),
        prepare=_prepare_fp8,
        about="FlashAttention 3 in float8, a scale for each batch element and key head",
        library=LIBRARY.package,
        install=LIBRARY.install,
    )
)
