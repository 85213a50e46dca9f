"""Attention of a few query tokens over a cache in 8 bits, including the quantisation."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels.decode.paging import shuffled
from attention_kernels.decode.quantised_cache import CACHE_BLOCK, quantise_cache
from attention_kernels.decode.split_kv import attend_to_cache
from attention_kernels.options import PLAIN, AttentionOptions


def random_pages(key: Tensor) -> Tensor:
    """Return a `block_table` for keys (B, Hkv, Sk, D), with pages in a random order.

    The order is the same at each call. As in a server that has run for a while, neighbouring tokens
    are not neighbours in memory.
    """
    batch, blocks = key.shape[0], -(-key.shape[2] // CACHE_BLOCK.value)
    return shuffled(batch * blocks, key.device, 0).view(batch, blocks).int()


def quantised_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    dtype: torch.dtype,
    scale: float | None = None,
    in_pages: bool = False,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Return softmax(scale · QKᵀ + mask) · V for a short query, with key and value in 8 bits.

    A server would instead quantise each token once and call `attend_to_cache` with a
    `QuantisedCache`.

    Args:
        dtype: type of the cache, int8 or float8_e4m3fn. FP8 needs compute capability 8.9.
        in_pages: whether the cache is in pages of `CACHE_BLOCK` tokens, in a random order.

    The other arguments and the result are those of `contiguous_decode`.
    """
    if key.shape[2] == 0 or query.numel() == 0:
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    table = random_pages(key) if in_pages else None
    return attend_to_cache(
        query,
        quantise_cache(key, value, dtype, lengths=seqused_k, block_table=table),
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        sinks=sinks,
        options=options,
    )
