"""Keys and values in pages, as inference servers keep their caches.

Key and value are pools of pages, (P, Hkv, page_size, D). Token t of a sequence lies in page
`page_table[sequence, t // page_size]`, at place `t % page_size`. The sequence has `seqused_k`
tokens; entries of the table after its last page mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_len(page_table: Sequence[int], page_size: int, *, is_packed: bool) -> int:
    """Return the keys that the pages of a sequence, or of all packed sequences, have room for.

    Args:
        page_table: sizes of the table, (sequences, pages of each).
    """
    sequences, pages = page_table
    return (sequences if is_packed else 1) * pages * page_size


def read_entries(page_table: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Return the entries of a page table that hold tokens, (N, n) bool."""
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    return first < lengths.to(page_table.device)[:, None]


def gathered(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy the pages (N, n) of N sequences, in order: (N, Hkv, n · page_size, D)."""
    return pool[pages.long()].transpose(1, 2).flatten(2, 3)
