"""New tokens in a key/value cache, and pages in one piece, without waiting for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def append_to_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    """Write new keys and values into a cache after each sequence's last token.

    PyTorch's own operators compute the positions on the GPU and write to them.

    Args:
        k_cache, v_cache: (B, S, Hkv, D) and (B, S, Hkv, Dv), or pages (P, page_size, Hkv, D) and
            (P, page_size, Hkv, Dv); any strides.
        k, v: (B, Snew, Hkv, D) and (B, Snew, Hkv, Dv), or (Tnew, Hkv, D) and (Tnew, Hkv, Dv) with
            `cu_seqlens_k_new`.
        lengths: (B,) int32, number of tokens of each sequence before. There must be room for the
            new ones.
        block_table: (B, N) int32, pages of each sequence; None without pages.
        cu_seqlens_k_new: (B + 1,) int32, start of each sequence's new tokens and the end of all.
    """
    if cu_seqlens_k_new is None:
        sequences = torch.arange(k.shape[0], device=k.device)[:, None]
        tokens = lengths[:, None] + torch.arange(k.shape[1], device=k.device)
    else:
        new = torch.arange(k.shape[0], device=k.device)
        sequences = torch.searchsorted(cu_seqlens_k_new, new, right=True) - 1
        tokens = lengths[sequences] + new - cu_seqlens_k_new[sequences]
    if block_table is not None:
        page_size = k_cache.shape[1]
        sequences = block_table[sequences, tokens // page_size].long()
        tokens = tokens % page_size
    k_cache[sequences, tokens] = k
    v_cache[sequences, tokens] = v


def gather_pages(pages: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Return a copy of each sequence's pages in one piece, (B, N · page_size, Hkv, D).

    Page 0 stands for pages after a sequence's last one, whose entries in the table may have any
    value.

    Args:
        pages: (P, page_size, Hkv, D).
        block_table: (B, N) int32, pages of each sequence.
        lengths: (B,) int32, number of tokens of each sequence.
    """
    firsts = torch.arange(block_table.shape[1], device=pages.device) * pages.shape[1]
    is_used = firsts < lengths[:, None]
    return pages[torch.where(is_used, block_table, 0).long()].flatten(1, 2)
