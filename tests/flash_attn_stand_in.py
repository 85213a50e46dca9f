"""Functions of flash-attn 2.8 and FlashMLA, rewritten in plain PyTorch.

Names, parameters and layouts are those of the libraries, which need a GPU and are not installed.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.replay.kernels import stand_ins
from tests.replay.kernels.stand_ins import parameters

HOW = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"
PROBABILITIES = "alibi_slopes=None, deterministic=False, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float
) -> Tensor:
    """Apply flash-attn's definition to one (S, H, D): aligned bottom right, windows inclusive."""
    parts = map(stand_ins.heads_second, (q, k, v))
    output = stand_ins.textbook(*parts, scale, causal, window=window, softcap=max(softcap, 0.0))
    return output[0].transpose(0, 1)


def options_of(given: SimpleNamespace) -> tuple[Any, ...]:
    return given.softmax_scale, given.causal, given.window_size, given.softcap


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Compute attention as a plain function, which `torch.compile` can trace."""
    options = (softmax_scale, causal, window_size, softcap)
    return torch.stack([attend(*each, *options) for each in zip(q, k, v, strict=True)])


@parameters(f"q, k, v, {LENGTHS}, dropout_p=0.0, {HOW}, {PROBABILITIES}, block_table=None")
def flash_attn_varlen_func(given: SimpleNamespace) -> Tensor:
    k, v, starts_q, starts_k = given.k, given.v, given.cu_seqlens_q, given.cu_seqlens_k
    if given.block_table is not None:
        k, v = (in_one_piece(each, given.block_table, starts_k.diff()) for each in (k, v))
    pairs = [
        attend(given.q[a:b], k[c:d], v[c:d], *options_of(given))
        for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    ]
    return torch.cat([*pairs, torch.zeros_like(given.q[starts_q[-1] :])])


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


@parameters(f"q, kv, {LENGTHS}, causal=False")
def flash_attn_varlen_kvpacked_func(given: SimpleNamespace) -> Tensor:
    q, kv, *others = vars(given).values()
    return flash_attn_varlen_func(q, *kv.unbind(-3), *others[:4], causal=given.causal)


def in_one_piece(pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Gather (T, H, D) from pages (P, page_size, H, D), which are laid out as in flash-attn."""
    size = pool.shape[1]
    tokens = [
        pool[int(row[t // size]), t % size]
        for row, length in zip(table, lengths.tolist(), strict=True)
        for t in range(length)
    ]
    return torch.stack(tokens)


@parameters(
    "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    f"cache_batch_idx=None, cache_leftpad=None, block_table=None, {HOW}, rotary_interleaved=True, "
    "alibi_slopes=None, num_splits=0, return_softmax_lse=False"
)
def flash_attn_with_kvcache(given: SimpleNamespace) -> Tensor:
    """Write the new keys and values into the cache, and attend to the cache."""
    caches, k, v = (given.k_cache, given.v_cache), given.k, given.v
    used = caches[0].shape[1] if given.cache_seqlens is None else given.cache_seqlens
    lengths = torch.as_tensor(used).expand(len(given.q)).clone()
    if k is not None and v is not None:
        for n, length in enumerate(lengths.tolist()):
            for cache, new in zip(caches, (k, v), strict=True):
                if given.block_table is None:
                    cache[n, length : length + new.shape[1]] += new[n]
                else:
                    page, slot = divmod(length, cache.shape[1])
                    cache[given.block_table[n, page], slot] = new[n, 0]
        lengths += k.shape[1]
    outputs = []
    for n, length in enumerate(lengths.tolist()):
        if given.block_table is not None:
            where = (given.block_table[n : n + 1], torch.tensor([length]))
            key, value = (in_one_piece(each, *where) for each in caches)
        else:
            first = 0 if given.cache_leftpad is None else int(given.cache_leftpad[n])
            key, value = (each[n, first:length] for each in caches)
        outputs.append(attend(given.q[n], key, value, *options_of(given)))
    return torch.stack(outputs)


@parameters(
    "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
    "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None"
)
def flash_mla_with_kvcache(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Compute what FlashMLA's `reference_torch` computes, with the arguments of its kernel."""
    outputs, q = [], given.q
    for n, length in enumerate(given.cache_seqlens.tolist()):
        table = given.block_table[n : n + 1]
        key = in_one_piece(given.k_cache, table, torch.tensor([length]))
        parts = (q[n], key, key[..., : given.head_dim_v])
        outputs.append(attend(*parts, given.softmax_scale, given.causal, (-1, -1), 0.0))
    return torch.stack(outputs), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
