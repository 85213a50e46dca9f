"""FlashAttention-2-style attention that skips fully masked blocks of keys."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.portable.forward import forward
from attention_kernels.portable.forward_tiles import blocks_of_mask
from attention_kernels.tiles.visited_blocks import VisitedBlocks, find_visited_blocks


def visited_blocks_of(query: Tensor, value: Tensor, attn_mask: Tensor) -> VisitedBlocks:
    """Return the blocks that `masked_prefill` visits. Calls with the same mask can share the
    result.

    The tensors are those of `masked_prefill`.
    """
    mask = attn_mask.expand(*query.shape[:3], value.shape[2])
    return find_visited_blocks(mask, *_tiles(query, value, mask))


def _tiles(query: Tensor, value: Tensor, mask: Tensor) -> tuple[int, int]:
    """Return the number of queries in a tile and of keys in a block."""
    if _is_for_hopper(query, value):
        from attention_kernels.hopper.hopper_prefill import visited_tiles

        return visited_tiles(query, value, mask)
    cut = blocks_of_mask(query, value, mask, skips=True)
    return cut.rows, cut.keys


def _is_for_hopper(query: Tensor, value: Tensor) -> bool:
    if not has_gluon_kernels(query.device):
        return False
    # Gluon is imported only if it may be used.
    from attention_kernels.hopper.hopper_prefill import takes

    return takes(query, value, None)


def masked_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    visited: VisitedBlocks | None = None,
    return_lse: bool = False,
) -> Any:
    """Return softmax(scale · QKᵀ + mask) · V, skipping fully masked blocks.

    A fully masked block of keys is not read, so a NaN in it has no effect. A key is masked by
    False, by -inf, or by at most -1e30 in a row that has larger values.

    Args:
        query, key, value, scale, sinks, return_lse: as for `prefill`.
        attn_mask: broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added).
        softcap: soft cap of the scores, as in `AttentionOptions`.
        visited: result of `visited_blocks_of`; None to find the blocks now.

    Raises:
        ValueError: the shapes do not fit together, a head dimension is larger than 256, or
            `visited` belongs to a mask with another shape or other strides.
    """
    check_shapes(query.shape, key.shape, value.shape)
    options = PLAIN if softcap is None else AttentionOptions(softcap=softcap)
    mask = attn_mask.expand(*query.shape[:3], value.shape[2])
    tiles = _tiles(query, value, mask)
    if visited is None:
        visited = find_visited_blocks(mask, *tiles)
    elif any(
        found not in (1, size)
        for found, size in zip(visited.counts.shape[:2], mask.shape[:2], strict=True)
    ):
        raise ValueError("`visited` is of a mask for other batch elements or heads")
    elif (visited.counts.shape[2], visited.blocks.shape[4]) != (
        triton.cdiv(query.shape[2], tiles[0]),
        triton.cdiv(value.shape[2], tiles[1]),
    ):
        raise ValueError("`visited` is of a mask with other strides, which is cut up otherwise")
    if _is_for_hopper(query, value):
        from attention_kernels.hopper.hopper_prefill import forward_hopper

        if scale is not None and scale <= 0:  # the kernel finds the maximum before it scales
            query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
        output, lse = forward_hopper(
            query,
            key,
            value,
            False,
            scale,
            None,
            return_lse,
            options=options,
            sinks=sinks,
            attn_mask=attn_mask,
            visited=visited,
        )
        return output if lse is None else (output, lse)
    output, lse = forward(
        query,
        key,
        value,
        attn_mask,
        False,
        scale,
        Lengths("full", query.shape[0], query.shape[2]),
        return_lse,
        blocks_of_mask(query, value, mask, skips=True),
        options=options,
        sinks=sinks,
        visited=visited,
    )
    return output if lse is None else (output, lse)
