"""PyTorch's own SDPA: `torch.nn.attention.activate_flash_attention_impl("attention_kernels")`.

The flash backend of `scaled_dot_product_attention` then runs the kernels of this package, in every
model, eager or compiled, also in models that diffusers' dispatcher does not reach. SDPA chooses the
flash backend for calls without a mask where its priority puts flash before cuDNN
(`torch.nn.attention.sdpa_kernel`). The backward pass remains PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from attention_kernels.dispatch import attend
from attention_kernels.integrations import NAME
from attention_kernels.options import PLAIN


def register() -> None:
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        message = f"{NAME} as SDPA's flash backend needs PyTorch 2.11 (this is {torch.__version__})"
        raise ImportError(message) from error
    register_flash_attention_impl(NAME, register_fn=Active)


class Active:
    """Replacement of the flash backend, until `remove` is called."""

    def __init__(self) -> None:
        self._library: Library | None = Library("aten", "IMPL")
        self._library.impl("_scaled_dot_product_flash_attention", flash_attention, "CUDA")

    def remove(self) -> None:
        """Restore PyTorch's own kernel."""
        self._library = None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return what `aten::_scaled_dot_product_flash_attention` returns.

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv).

    Returns:
        The output with the strides of the query, the log-sum-exp (B, Hq, Sq), two offsets that only
        packed batches have, the lengths, two numbers of random generators, and an empty mask.

    Raises:
        NotImplementedError: the call has dropout, or is refused by `attention_kernels.attention`.
    """
    if dropout_p or return_debug_mask:
        raise NotImplementedError(f"{NAME} has no dropout: restore_flash_attention_impl() has")
    output, lse = attend(
        query, key, value, None, is_causal, scale, True, "exact", None, PLAIN, return_lse=True
    )
    if output.stride() != query.stride():
        output = torch.empty_like(query).copy_(output)
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=query.device).unbind()
    nothing = query.new_empty(0)
    return output, lse, None, None, query.shape[2], key.shape[2], seed, offset, nothing
