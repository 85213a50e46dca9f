"""Keys and values in pages, as the caches of servers have them.

Key and value are then pools of pages, (P, Hkv, page_size, D). Token t of a sequence lies in page
`page_table[sequence, t // page_size]`, at place `t % page_size`, and the sequence has as many
tokens as `seqused_k` says. Entries of the table after its last page mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_len(page_table: Sequence[int], page_size: int, *, is_packed: bool) -> int:
    """Keys that the pages of a sequence have room for; in a packed call, those of all sequences.

    Args:
        page_table: its sizes, (sequences, pages of each).
    """
    sequences, pages = page_table
    return (sequences if is_packed else 1) * pages * page_size


def read_entries(page_table: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """(N, n) bool: the entries of a page table that the sequences' tokens lie in."""
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    return first < lengths.to(page_table.device)[:, None]


def gathered(pool: Tensor, pages: Tensor) -> Tensor:
    """(N, Hkv, n · page_size, D): for each of N sequences its pages (N, n), in order, copied."""
    return pool[pages.long()].transpose(1, 2).flatten(2, 3)
