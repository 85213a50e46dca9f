"""Our Triton kernel for padded batches: it reads the keys that a padding mask leaves, in place.

Nothing is packed. The lengths are found on the GPU, without the host waiting for them; the core is
the call when they are known already, as for all layers of a model but the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import all_of, dtypes, max_head_dim, needs_padding, no_dropout
from replay.kernels.layout import padding_keys, refuse
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
    from replay.kernels.triton.varlen import key_ranges, padded

    refuse(None, dropout_p)
    if attn_mask is None:
        raise NotImplementedError("this kernel is for padded batches: it needs an attn_mask")
    keys = key_ranges(padding_keys(attn_mask, query.shape[0], key.shape[2]))
    return padded(query, key, value, keys, is_causal, scale=scale)


def _prepare(call: AttentionCall) -> Callable[[], Tensor]:
    from replay.kernels.triton.varlen import key_ranges, padded

    assert call.attn_mask is not None
    keys = key_ranges(padding_keys(call.attn_mask, call.shape.batch, call.shape.kv_len))
    return lambda: padded(
        call.query, call.key, call.value, keys, call.is_causal, scale=call.softmax_scale
    )


register(
    Kernel(
        "triton-varlen",
        attention,
        unavailable=triton_unavailable,
        unsupported=all_of(
            no_dropout,
            dtypes(torch.float16, torch.bfloat16, torch.float32),
            max_head_dim(256),
            needs_padding,
        ),
        prepare=_prepare,
        about="ours: padded batches in Triton, padding neither read nor computed",
        library="triton",
        install=TRITON_INSTALL,
    )
)
