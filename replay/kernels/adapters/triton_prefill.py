"""Our FlashAttention-2-style kernel in Triton: any mask, stride, length and head_dim up to 256."""

from __future__ import annotations

import torch
from torch import Tensor

from replay.kernels.constraints import all_of, dtypes, max_head_dim, no_dropout
from replay.kernels.layout import refuse
from replay.kernels.library import TRITON_INSTALL, triton_unavailable
from replay.kernels.registry import Kernel, register


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
    from replay.kernels.triton.prefill import prefill

    refuse(None, dropout_p)
    return prefill(query, key, value, attn_mask, is_causal, scale=scale)


register(
    Kernel(
        "triton-fa2",
        attention,
        unavailable=triton_unavailable,
        unsupported=all_of(
            no_dropout, dtypes(torch.float16, torch.bfloat16, torch.float32), max_head_dim(256)
        ),
        about="ours: FlashAttention 2 in Triton, of any mask, strides and head_dim",
        library="triton",
        install=TRITON_INSTALL,
    )
)
