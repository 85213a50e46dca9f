"""Functions of flash-attn 2.8 and FlashMLA, rewritten in plain PyTorch.

Names, parameters and layouts are those of the libraries, which need a GPU and are not installed.
"""

from typing import Any

import torch
from torch import Tensor

from tests.replay.kernels import stand_ins


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float
) -> Tensor:
    """Apply flash-attn's definition to one (S, H, D): aligned bottom right, windows inclusive."""
    parts = map(stand_ins.heads_second, (q, k, v))
    output = stand_ins.textbook(*parts, scale, causal, window=window, softcap=max(softcap, 0.0))
    return output[0].transpose(0, 1)


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
    deterministic: bool = False,
    return_attn_probs: bool = False,
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


def flash_attn_qkvpacked_func(
    qkv: Tensor, num_heads_q: int | None = None, causal: bool = False
) -> Tensor:
    """Compute flash-attn 3's function, which also takes (B, S, Hq + 2 Hkv, D)."""
    if num_heads_q is None:
        return flash_attn_func(*qkv.unbind(-3), causal=causal)
    heads = (num_heads_q, *2 * [(qkv.shape[-2] - num_heads_q) // 2])
    return flash_attn_func(*qkv.split(heads, -2), causal=causal)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, causal: bool = False) -> Tensor:
    return flash_attn_func(q, *kv.unbind(-3), causal=causal)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = False
) -> Tensor:
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(-3), *lengths, causal=causal)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, *kv.unbind(-3), *lengths, causal=causal)


def in_one_piece(pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Gather (T, H, D) from pages (P, page_size, H, D), which are laid out as in flash-attn."""
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
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Write the new keys and values into the cache, and attend to the cache."""
    used = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    lengths = torch.as_tensor(used).expand(len(q)).clone()
    if k is not None and v is not None:
        for n, length in enumerate(lengths.tolist()):
            k_cache[n, length : length + k.shape[1]] += k[n]
            v_cache[n, length : length + v.shape[1]] += v[n]
        lengths += k.shape[1]
    outputs = []
    for n, length in enumerate(lengths.tolist()):
        if block_table is not None:
            where = (block_table[n : n + 1], torch.tensor([length]))
            key, value = (in_one_piece(each, *where) for each in (k_cache, v_cache))
        else:
            first = 0 if cache_leftpad is None else int(cache_leftpad[n])
            key, value = k_cache[n, first:length], v_cache[n, first:length]
        outputs.append(attend(q[n], key, value, softmax_scale, causal, window_size, softcap))
    return torch.stack(outputs)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what FlashMLA's `reference_torch` computes, with the arguments of its kernel."""
    outputs = []
    for n, length in enumerate(cache_seqlens.tolist()):
        key = in_one_piece(k_cache, block_table[n : n + 1], torch.tensor([length]))
        given = (q[n], key, key[..., :head_dim_v])
        outputs.append(attend(*given, softmax_scale, causal, (-1, -1), 0.0))
    return torch.stack(outputs), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
