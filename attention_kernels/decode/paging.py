"""A key/value cache in pages, as in serving engines (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.options import is_leading_part


class PagedCache(NamedTuple):
    """Arguments of `paged_decode` after the query, in the same order."""

    key_pages: Tensor
    """(P, page_size, Hkv, D)."""
    value_pages: Tensor
    """(P, page_size, Hkv, Dv)."""
    block_table: Tensor
    """(B, pages of a sequence) int32."""
    lengths: Tensor
    """(B,) int32, number of tokens of each sequence."""


def page(
    key: Tensor,
    value: Tensor,
    page_size: int,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    seed: int = 0,
) -> PagedCache:
    """Copy keys and values (B, Hkv, S, D) into pages that lie in a random order.

    If the pages were in order, neighbouring tokens would be neighbours in memory, and the
    indirection would cost nothing. The pages of a server that has run for a while are not in order.
    If the value is the first part of the key, it stays so in the pages.

    Args:
        lengths: (B,), number of tokens of each sequence; None for S.
        starts: (B,), first token of each sequence, less than S; None for 0.
        seed: seed for the order of the pages.
    """
    batch, _, length, _ = key.shape
    is_shared, v_dim = is_leading_part(value, key), value.shape[3]
    per_sequence = -(-length // page_size)
    block_table = shuffled(batch * per_sequence, key.device, seed).view(batch, per_sequence)
    if starts is not None:
        key, value = (_from(starts, tensor) for tensor in (key, value))
    if lengths is None:
        lengths = torch.full((batch,), length, dtype=torch.int32, device=key.device)
    key_pages = _into_pages(key, page_size, block_table)
    return PagedCache(
        key_pages,
        key_pages[..., :v_dim] if is_shared else _into_pages(value, page_size, block_table),
        block_table.to(torch.int32),
        lengths.to(torch.int32),
    )


def _into_pages(tensor_BHSD: Tensor, page_size: int, block_table: Tensor) -> Tensor:
    """Return pages (P, page_size, H, D). Memory after the last token is not written, because it is
    never read."""
    _, heads, length, head_dim = tensor_BHSD.shape
    tokens_BSHD = tensor_BHSD.transpose(1, 2)
    pages = tensor_BHSD.new_empty(block_table.numel(), page_size, heads, head_dim)
    full = length // page_size
    whole = tokens_BSHD[:, : full * page_size].unflatten(1, (full, page_size))
    pages[block_table[:, :full]] = whole
    if length > full * page_size:
        pages[block_table[:, full], : length - full * page_size] = tokens_BSHD[
            :, full * page_size :
        ]
    return pages


def _from(starts: Tensor, tensor_BHSD: Tensor) -> Tensor:
    """Move each sequence so that it starts at 0, and repeat its last token after its end."""
    length = tensor_BHSD.shape[2]
    tokens = starts[:, None] + torch.arange(length, device=starts.device)
    tokens = tokens.clamp_(max=length - 1)[:, None, :, None]
    return tensor_BHSD.take_along_dim(tokens, dim=2)


@functools.lru_cache(maxsize=16)
def shuffled(count: int, device: torch.device, seed: int) -> Tensor:
    """Return a permutation of the first `count` integers. The permutation is cached, because a
    server does not draw a new one at each call either."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.to(device)
