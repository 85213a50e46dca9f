"""Prefill with 8-bit operands on Hopper: planning of `quantised_hopper_kernel.py`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention_kernels.hopper.head_groups import VisibleKeys, head_group_of, most_cut
from attention_kernels.hopper.operands import block_layout
from attention_kernels.hopper.persistent import SHORT, multiprocessors, work_of
from attention_kernels.hopper.scores import ROWS
from attention_kernels.hopper.stream_k import TileTimes, arguments_of, cut_for, memory_for
from attention_kernels.launch.descriptors import nowhere
from attention_kernels.launch.launcher import Launch, PlannedCall
from attention_kernels.quantised.quantise import QuantisedKeyValue, padded_dim
from attention_kernels.quantised.quantised_hopper_kernel import quantised_hopper_kernel
from attention_kernels.quantised.quantised_operands import strides_of
from attention_kernels.tiles.online_softmax import LN_2
from attention_kernels.tiles.visited_blocks import VisitedBlocks

SLOWER = 1.035
"""Slowdown of a block if programs share tiles, measured with 8,190 keys at head_dim 128 and 17,776
keys at head_dim 64 (H100, reason unknown)."""


class HopperTile(NamedTuple):
    """Sizes of a program's work."""

    consumers: int
    heads: int
    """Number of query heads of one group in a tile; a divisor of `consumers`."""
    keys: int
    stages: int
    registers: int
    """Registers per thread of a consumer; with the producer's 24 per thread, they must fill
    65536."""
    in_turn: bool
    """True if consumers use the tensor cores in turns."""
    tile_times: TileTimes
    """Times with FP8 operands."""


def tile_for(head_dim: int, group: int, seen: int) -> HopperTile:
    """Return the fastest tile on an H200 for a padded head dimension (docs/kernel-notes.md).

    There are `group` query heads per key head, and queries see up to `seen` keys.
    """
    if head_dim > 64:
        return HopperTile(2, 1, 128, 2, 240, True, TileTimes(1.1, 2.5))
    if seen <= SHORT:
        return HopperTile(4, math.gcd(group, 4), 64, 4, 112, False, TileTimes(0.8, 2.5))
    return HopperTile(3, 1, 128, 3, 160, False, TileTimes(1.4, 2.5))


def tile_of_visited_blocks(head_dim: int) -> HopperTile:
    """Return the tile for a mask that has been scanned; it has 128 queries of one head."""
    return HopperTile(2, 1, 128, 2 if head_dim > 64 else 3, 240, True, TileTimes(1.1, 2.5))


def visited_tiles(head_dim: int) -> tuple[int, int]:
    """Return the numbers of queries in a `tile_of_visited_blocks` and of keys in a block."""
    tile = tile_of_visited_blocks(head_dim)
    return tile.consumers * ROWS.value, tile.keys


def _descriptor(tensor: Tensor, strides: list[int], *block: int) -> TensorDescriptor:
    layout = block_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block), layout)


def plan(
    query: Tensor,
    quantised: QuantisedKeyValue,
    value: Tensor,
    output: Tensor,
    numbers: dict[str, Any],
    is_bottom_right: bool,
    left: int | None,
    right: int | None,
    mask: Tensor | None = None,
    visited: VisitedBlocks | None = None,
    tile: HopperTile | None = None,
) -> PlannedCall:
    """Plan everything about a call except the addresses of its tensors.

    `query`, `value` and `output` must suit a tensor descriptor, and `numbers` comes from
    `numbers_of`. Queries see `left` keys before the diagonal and `right` keys after it; None for
    all. `mask` comes from `loadable_mask`, and `visited` has its blocks for tiles of
    `tile_of_visited_blocks`.
    """
    batch, q_heads, _, _ = query.shape
    q_len = numbers["q_len"]
    lengths = quantised.lengths
    is_packed = lengths is not None and lengths.kind == "packed"
    if lengths is not None:
        batch = lengths.batches
    kv_heads, kv_rows, block_dim = quantised.key.shape[1:]
    block_v_dim = padded_dim(quantised.v_head_dim)
    group = q_heads // kv_heads
    seen = max(1, quantised.kv_len // batch) if is_packed else quantised.kv_len
    if left is not None and right is not None:
        seen = min(seen, left + right + 1)
    largest_dim = max(block_dim, block_v_dim)
    if tile is None:
        is_masked = visited is not None
        tile = (
            tile_of_visited_blocks(largest_dim) if is_masked else tile_for(largest_dim, group, seen)
        )
    query_desc = _descriptor(query, strides_of(query), 1, 1, ROWS.value, block_dim)
    key = quantised.key.view(-1, block_dim)
    key_desc = _descriptor(key, [block_dim, 1], tile.keys, block_dim)
    if quantised.value_scale is not None:
        value_desc = _descriptor(value.view(-1, kv_rows), [kv_rows, 1], block_v_dim, tile.keys)
    else:
        value_desc = _descriptor(value, strides_of(value), 1, 1, tile.keys, block_v_dim)
    output_desc = None
    if not is_packed:
        output_desc = _descriptor(output, strides_of(output), 1, 1, ROWS.value, block_v_dim)
    mask_desc = None
    if mask is not None:
        mask_desc = _descriptor(mask, strides_of(mask), 1, 1, ROWS.value, tile.keys // 2)
    visit_batch, visit_head = (None, None) if visited is None else visited.strides()
    queries = tile.consumers // tile.heads * ROWS.value
    blocks = -(-q_len // queries)
    bundles = batch * q_heads // tile.heads
    tiles = blocks * bundles
    longest = q_len if is_packed else quantised.kv_len
    diagonal = longest - q_len if is_bottom_right else 0
    visible = VisibleKeys(q_len, longest, diagonal, left, right, queries, tile.keys)
    head_bytes = min(kv_rows, seen) * (block_dim + block_v_dim * value.element_size())
    processors = multiprocessors(query.device)
    cut = None
    if lengths is None and visited is None:
        cut = cut_for(visible, bundles, processors, tile.tile_times, SLOWER)
    programs = min(tiles, processors) if cut is None else processors
    head_group = head_group_of(visible, head_bytes, bundles, group // tile.heads, programs)
    launch = Launch(
        quantised_hopper_kernel,
        (programs, 1, 1),
        query.device,
        numbers
        | {
            "diagonal": None if is_bottom_right else 0,
            "left": left,
            "right": right,
            "most_cut": most_cut(visible, has_lengths=lengths is not None),
            "mask_batch": None if mask is None else int(mask.shape[0] > 1),
            "mask_head": None if mask is None else int(mask.shape[1] > 1),
            "visit_batch": visit_batch,
            "visit_head": visit_head,
            "stride_output_head": output.stride(1) if is_packed else None,
            "stride_output_token": output.stride(2) if is_packed else None,
            "STAGES": tile.stages,
            "CONSUMERS": tile.consumers,
            "HEADS": tile.heads,
            "BY_LENGTH": right is not None,
            "IN_TURN": tile.in_turn,
            "REGISTERS": tile.registers,
            "factor": numbers["factor"] * (1.0 if numbers["cap"] is None else LN_2.value / 2),
            "V_HEAD_DIM": quantised.v_head_dim if is_packed else block_v_dim,
            **work_of(q_heads, group, blocks, bundles, head_group, programs),
            **arguments_of(cut),
        },
        num_warps=4,
    )
    descriptors = (query_desc, key_desc, value_desc, output_desc, mask_desc)
    shared = memory_for(cut, programs, tile.consumers, block_v_dim)
    return PlannedCall(launch, tuple(each and nowhere(each) for each in descriptors), shared)
