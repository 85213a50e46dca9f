"""What flash-attn 2's functions compute, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float
) -> Tensor:
    """flash-attn's definition on one sequence, (S, H, D): bottom right, windows inclusive."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    q_len, kv_len = scores.shape[-2:]
    offset = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if causal:
        seen &= offset <= 0
    if window[0] >= 0:
        seen &= offset >= -window[0]
    if window[1] >= 0:
        seen &= offset <= window[1]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    options = (softmax_scale, causal, window_size, softcap)
    return torch.stack([attend(*each, *options) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    options = (softmax_scale, causal, window_size, softcap)
    if block_table is not None:
        k, v = (in_one_piece(each, block_table, cu_seqlens_k.diff()) for each in (k, v))
    pairs = [
        attend(q[a:b], k[c:d], v[c:d], *options)
        for a, b, c, d in zip(
            cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
        )
    ]
    return torch.cat(pairs)


def in_one_piece(pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """(T, H, D) out of pages (P, page_size, H, D), as flash-attn's documentation has them."""
    size = pool.shape[1]
    tokens = [
        pool[int(row[t // size]), t % size]
        for row, length in zip(table, lengths.tolist(), strict=True)
        for t in range(length)
    ]
    return torch.stack(tokens)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """It writes the new keys and values into the cache."""
    if block_table is not None:
        assert isinstance(cache_seqlens, Tensor)
        outputs = []
        for n, length in enumerate(cache_seqlens.tolist()):
            where = (block_table[n : n + 1], torch.tensor([length]))
            key, value = (in_one_piece(each, *where) for each in (k_cache, v_cache))
            outputs.append(attend(q[n], key, value, None, causal, (-1, -1), 0.0))
        return torch.stack(outputs)
    length = int(torch.as_tensor(k_cache.shape[1] if cache_seqlens is None else cache_seqlens))
    if k is not None and v is not None:
        k_cache[:, length : length + k.shape[1]] += k
        v_cache[:, length : length + k.shape[1]] += v
        length += k.shape[1]
    parts = zip(q, k_cache[:, :length], v_cache[:, :length], strict=True)
    return torch.stack([attend(*each, None, causal, (-1, -1), 0.0) for each in parts])
