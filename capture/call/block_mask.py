"""Masks of whole blocks of keys, which take no memory for each (query, key) pair.

A call of 17,776 tokens with 60 heads has 19·10⁹ pairs. A block mask has six dimensions, (B or 1, Hq
or 1, tiles, rows, blocks, keys): tile i has the queries from i · rows on, and block j the keys from
j · keys on. The rows of a tile and the keys of a block are expanded (stride 0), so that only a map
of tiles and blocks is stored. The last tile and the last block may reach beyond the call.
"""

from __future__ import annotations

from torch import Tensor


def block_mask(kept: Tensor, rows: int, keys: int) -> Tensor:
    """Return the block mask of a map.

    Args:
        kept: bool (B or 1, Hq or 1, tiles, blocks), True = attend.
        rows: number of queries in a tile.
        keys: number of keys in a block.
    """
    return kept[:, :, :, None, :, None].expand(-1, -1, -1, rows, -1, keys)


def is_block_mask(mask: Tensor) -> bool:
    return mask.ndim == 6


def rows_of(mask: Tensor, queries: Tensor, kv_len: int) -> Tensor:
    """Return the rows of some queries, bool (B or 1, Hq or 1, n, Sk).

    Args:
        mask: a block mask.
        queries: (n,) indices of queries.
    """
    return mask[:, :, queries // mask.shape[3], 0].flatten(3)[..., :kv_len]
