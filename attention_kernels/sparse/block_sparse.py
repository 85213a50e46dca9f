"""Attention of each tile of queries to chosen blocks of keys only. `block_choice` chooses blocks.

The kernels are those of dense attention, `hopper_prefill` and `prefill`, with the tiles that are
fastest for long calls. A tile takes its blocks from a list instead of counting them. A block is
read if some query of the tile attends to it, so the time is nearly proportional to the number of
blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.descriptors import has_tma
from attention_kernels.launch.shape_checks import check_shapes, check_types
from attention_kernels.options import Lengths
from attention_kernels.portable.forward import forward
from attention_kernels.portable.forward_tiles import Blocks, blocks
from attention_kernels.tiles.visited_blocks import VisitedBlocks


def block_sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Return the number of queries in a tile and of keys in a block.

    The sizes depend on the GPU, the type, the head dimensions and the number of keys.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes do not fit together.
    """
    check_types({"query": query, "key": key, "value": value})
    check_shapes(query.shape, key.shape, value.shape)
    if _is_for_hopper(query, value):
        from attention_kernels.hopper.hopper_prefill import visited_tiles

        return visited_tiles(query, value)
    cut = _cut(query, key, value)
    return cut.rows, cut.keys


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visited: VisitedBlocks,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    skip: float | None = None,
    return_map: bool = False,
) -> Any:
    """Return softmax(scale · QKᵀ) · V over the keys of the visited blocks.

    Blocks that are not visited are not read, so a NaN in them has no effect.

    Args:
        query: (B, Hq, Sq, D) in float16, bfloat16, or float32 (slow: no tensor cores).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); Hq is a multiple of Hkv. D and Dv are at
            most 256.
        visited: result of `choose_blocks` or `visited_of`, with the same `is_causal`. A tile
            without blocks gets zeros.
        is_causal: query i sees keys 0 to i, as in SDPA.
        scale: factor of the scores; None for 1/√D.
        return_lse: return a tuple of the output and the natural logarithm of each row's sum of
            exponentials over the visited keys, (B, Hq, Sq) float32.
        skip: λ, more than 0 and less than 1: a block is skipped once its scores are known, without
            its values, if exp(s - m) < λ for each query's largest score s in the block and m in the
            blocks before (BLASST, 2025, arXiv:2512.12087). Each weight that is left out is less
            than λ times the largest weight of its query, and the first block of a query is not
            skipped. None skips nothing.
        return_map: append the map of the blocks in the output, bool (B, Hq, tiles, blocks), to the
            returned tuple: the visited blocks that were not skipped.

    Returns:
        The output, (B, Hq, Sq, Dv).

    Raises:
        TypeError: a tensor, `visited` or `skip` has another type.
        ValueError: the shapes do not fit together, a head dimension is larger than 256, `skip` is
            out of range, or `visited` belongs to tensors of other sizes.
        NotImplementedError: `skip` or `return_map` in 16 bits on Hopper, whose kernel does not
            skip.
    """
    rows, keys = block_sizes(query, key, value)
    if not isinstance(visited, VisitedBlocks):
        raise TypeError(
            "visited must be the result of choose_blocks(...) or visited_of(...), got "
            f"{type(visited).__name__}"
        )
    batches, heads, tiles = visited.counts.shape[:3]
    found = tiles, visited.blocks.shape[4]
    needed = triton.cdiv(query.shape[2], rows), triton.cdiv(key.shape[2], keys)
    if batches not in (1, query.shape[0]) or heads not in (1, query.shape[1]) or found != needed:
        raise ValueError(
            f"`visited` has {found[0]} tiles and {found[1]} blocks of {heads} heads and {batches} "
            f"batch elements: this call has {needed[0]} and {needed[1]} of {query.shape[1]} and "
            f"{query.shape[0]}"
        )
    if not isinstance(skip, float | int | None):
        raise TypeError(f"skip must be a number or None, got {type(skip).__name__}")
    if skip is not None and not 0 < skip < 1:
        raise ValueError(f"skip must be more than 0 and less than 1, got {skip:g}")
    if (skip is not None or return_map) and not can_skip(query):
        raise NotImplementedError(NO_SKIP)
    computed = None
    if _is_for_hopper(query, value):
        from attention_kernels.hopper.hopper_prefill import forward_hopper

        if scale is not None and scale <= 0:  # the kernel finds the maximum before it scales
            query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
        output, lse = forward_hopper(
            query, key, value, is_causal, scale, None, return_lse, visited=visited
        )
    else:
        if return_map:
            shape = (*query.shape[:2], *needed)
            computed = torch.zeros(shape, dtype=torch.int8, device=query.device)
        output, lse = forward(
            query,
            key,
            value,
            None,
            is_causal,
            scale,
            Lengths("full", query.shape[0], query.shape[2]),
            return_lse,
            _cut(query, key, value),
            visited=visited,
            skip=skip,
            computed=computed,
        )
    more = (lse, None if computed is None else computed.bool())
    given = tuple(each for each in more if each is not None)
    return (output, *given) if given else output


NO_SKIP = "on a Hopper GPU, only float32 has `skip` and `return_map`: leave them out"


def can_skip(query: Tensor) -> bool:
    """Return whether calls of this type on this device have the options `skip` and `return_map`."""
    return query.dtype == torch.float32 or not has_gluon_kernels(query.device)


def _is_for_hopper(query: Tensor, value: Tensor) -> bool:
    if not has_gluon_kernels(query.device):
        return False
    # Gluon is imported only if it may be used.
    from attention_kernels.hopper.hopper_prefill import takes

    return takes(query, value, None)


def _cut(query: Tensor, key: Tensor, value: Tensor) -> Blocks:
    """Return the sizes of a program's work in `prefill`, whatever the tensors' strides."""
    return blocks(query, key, value, False, has_tma(query.device))
