"""Keys and values in pages, as in the caches of inference servers.

Key and value are pools of pages, (P, Hkv, page_size, D). Token t of a sequence lies in page
`page_table[sequence, t // page_size]`, at position `t % page_size`. The sequence has `seqused_k`
tokens; entries of the table after its last page have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_len(page_table: Sequence[int], page_size: int, *, is_packed: bool) -> int:
    """Return the number of keys that fit in the pages of a sequence, or of all packed sequences.

    Args:
        page_table: sizes of the table, (sequences, pages per sequence).
    """
    sequences, pages = page_table
    return (sequences if is_packed else 1) * pages * page_size


def read_entries(page_table: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Return a mask (N, n) of the page table's entries whose pages hold tokens."""
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    return first < lengths.to(page_table.device)[:, None]


def gathered(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy the pages (N, n) of N sequences, in order, to a tensor (N, Hkv, n · page_size, D)."""
    return pool[pages.long()].transpose(1, 2).flatten(2, 3)
