"""Planning and launch of `paged_prefill_kernel.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attention_kernels.launch.launcher import Launch, PlanCache, layout, named
from attention_kernels.launch.shape_checks import check_head_dims, check_shapes, sizes_of
from attention_kernels.options import AttentionOptions
from attention_kernels.portable.paged_prefill_kernel import paged_prefill_kernel
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import base_2


class PagedTiles(NamedTuple):
    """Sizes of a program's work."""

    rows: int
    keys: int
    warps: int
    stages: int


def paged_prefill(
    query_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q_offsets: Tensor,
    output: Tensor,
    lse: Tensor | None,
    is_causal: bool,
    *,
    scale: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    sinks: Tensor | None,
    options: AttentionOptions,
    decoded: int = 0,
    tiles: PagedTiles | None = None,
) -> None:
    """Write attention of packed queries over pages to `output` (Tq, Hq, Dv) and `lse` (Hq, Tq).

    Both are contiguous. The arguments are those of `paged_batch`, except that the scales, if any,
    have shape (B, Hkv). Sequences of at most `decoded` queries or of negative length are left out.
    `tiles` are the sizes of the work; None for the result of `paged_tiles`.

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    scale = query_THD.shape[2] ** -0.5 if scale is None else float(scale)
    if scale <= 0:  # the kernel finds the maximum before it scales scores
        query_THD, scale = (-query_THD, -scale) if scale else (query_THD * 0.0, 1.0)
    pools = (key_pages, value_pages, key_scale, value_scale)
    tensors = (query_THD, *pools, sinks, lengths, block_table, q_offsets)
    shape = (*map(layout, tensors), lse is None, is_causal, scale, options, decoded, tiles)
    launch = _launches.get(shape) or _launches.keep(
        shape,
        _plan(
            query_THD, key_pages, value_pages, block_table, sinks, (key_scale, value_scale),
            is_causal, scale, options, decoded, tiles,
        ),
    )  # fmt: skip
    launch(
        query_THD,
        key_pages,
        value_pages,
        None if sinks is None else sinks.contiguous(),
        lengths,
        block_table,
        q_offsets,
        key_scale,
        value_scale,
        output,
        lse,
    )


_launches: PlanCache[Launch] = PlanCache()


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    sinks: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    decoded: int,
    tiles: PagedTiles | None,
) -> Launch:
    """Plan everything about a call of `paged_prefill` except the addresses of its tensors."""
    q_tokens, heads, head_dim = query.shape
    sequences, page_size = table.shape[0], key.shape[1]
    kv_heads, v_dim = value.shape[2:]
    room = table.shape[1] * page_size
    check_shapes(
        (sequences, heads, q_tokens, head_dim),
        (sequences, key.shape[2], room, key.shape[3]),
        (sequences, kv_heads, room, v_dim),
        sizes_of(sinks),
    )
    check_head_dims(head_dim, v_dim)
    group = heads // kv_heads
    tiles = tiles or paged_tiles(query.dtype, max(head_dim, v_dim), key.element_size() == 1)
    packed = min(group, tiles.rows)
    is_causal, left, right = window_sides(is_causal, options, q_tokens, room)
    scale, cap = base_2(scale, options.softcap)
    key_strides, value_strides = (
        (None, None) if each is None else each.stride() for each in scales
    )
    return Launch(
        paged_prefill_kernel,
        (
            (q_tokens // (tiles.rows // packed) + sequences) * kv_heads * -(-group // packed),
            1,
            1,
        ),
        query.device,
        named("stride_query_", ("token", "head", "dim"), query.stride())
        | named("stride_key_", ("page", "token", "head", "dim"), key.stride())
        | named("stride_value_", ("page", "token", "head", "dim"), value.stride())
        | named("stride_key_factor_", ("sequence", "head"), key_strides)
        | named("stride_value_factor_", ("sequence", "head"), value_strides)
        | {
            "scale": scale,
            "cap": cap,
            "left": left,
            "right": right,
            "decoded": decoded,
            "sequences": sequences,
            "q_tokens": q_tokens,
            "kv_heads": kv_heads,
            "group": group,
            "stride_table": table.stride(0),
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": options.bottom_right,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "V_DIM": v_dim,
            "PACKED": packed,
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.keys,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_DV": max(16, triton.next_power_of_2(v_dim)),
            "BLOCK_SEQUENCES": triton.next_power_of_2(sequences),
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def paged_tiles(dtype: torch.dtype, head_dim: int, is_fp8: bool = False) -> PagedTiles:
    """Return the sizes of `forward_tiles.blocks` for loads through pointers.

    Each block of FP8 keys and values is converted through shared memory, and its warps wait for
    each other twice, so blocks are larger.
    """
    if dtype == torch.float32:  # exact products do not use the tensor cores
        return PagedTiles(32, 32, 4, 1)
    if head_dim <= 64:
        return PagedTiles(128, 64, 4, 3)
    if is_fp8 and head_dim <= 128:
        return PagedTiles(128, 128, 8, 2)
    return PagedTiles(128, 64, 8, 3) if head_dim <= 128 else PagedTiles(128, 32, 8, 2)
