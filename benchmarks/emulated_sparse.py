"""Emulates block-sparse attention in PyTorch, for machines without such kernels.

    replay --dir captured_inputs --kernels torch-default,benchmarks/emulated_sparse.py:sparse_50

Mean queries and mean keys of blocks are compared, and each block of queries attends to the share of
blocks of keys with the highest products, as SpargeAttn's top-k does (arXiv 2502.18137). Masked
attention is computed in full, so only the errors are meaningful.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_replay import register_kernel
from capture.call.attention_call import AttentionCall

BLOCK = 64
"""Number of tokens in a block, for at least 8 blocks of keys."""
SHORT_BLOCK = 16
"""Number of tokens in a block of shorter sequences."""


def kept_keys(query: Tensor, key: Tensor, share: float, *, is_causal: bool) -> Tensor:
    """Return the keys to attend to, as a bool mask (B, Hq, Sq, Sk); True = attended.

    With a causal mask, the share is one of the visible blocks, and includes the diagonal block.
    """
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    q_len, kv_len = query.shape[2], key.shape[2]
    block = BLOCK if kv_len >= 8 * BLOCK else SHORT_BLOCK
    queries, keys = (
        torch.stack([part.float().mean(2) for part in each.split(block, 2)], 2)
        for each in (query, key)
    )
    scores = queries @ keys.transpose(-1, -2)
    rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        visible = columns <= rows[:, None]
        scores = scores.masked_fill(columns == rows[:, None], torch.inf)
    rank = scores.masked_fill(~visible, -torch.inf).argsort(-1, descending=True).argsort(-1)
    kept = visible & (rank < (share * visible.sum(-1, keepdim=True)).ceil())
    kept = kept.repeat_interleave(block, -2)[..., :q_len, :]
    kept = kept.repeat_interleave(block, -1)[..., :kv_len]
    if is_causal:
        kept = kept & torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril()
    return kept


def _no_mask(call: AttentionCall) -> str | None:
    return None if call.attn_mask is None else "takes no mask"


def _register(percent: int) -> Any:
    share = percent / 100

    def chosen(call: AttentionCall) -> Tensor:
        return kept_keys(call.query, call.key, share, is_causal=call.is_causal)

    @register_kernel(
        f"emulated-sparse-{percent}", unsupported=_no_mask, accuracy_class="sparse", chosen=chosen
    )
    def attend(
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
        mask = kept_keys(query, key, share, is_causal=is_causal)
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    attend.__doc__ = f"Block-sparse attention to {percent} % of the blocks."
    return attend


sparse_70, sparse_50, sparse_30 = (_register(percent) for percent in (70, 50, 30))
