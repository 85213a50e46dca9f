"""Planning and launch of `forward_kernel.py`, for `prefill.py`, `masked_prefill.py` and
`varlen.py`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attention_kernels.launch.descriptors import can_be_described, described, nowhere
from attention_kernels.launch.launcher import (
    Launch,
    PlanCache,
    PlannedCall,
    alignments,
    layout,
    named,
)
from attention_kernels.launch.shape_checks import (
    Sizes,
    check_head_dims,
    check_shapes,
    check_types,
    sizes_of,
)
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.portable.forward_kernel import forward_kernel
from attention_kernels.portable.forward_tiles import Blocks, blocks, is_small
from attention_kernels.tiles.head_dim_pieces import pieces
from attention_kernels.tiles.masking import mask_unit, window_sides
from attention_kernels.tiles.online_softmax import base_2
from attention_kernels.tiles.visited_blocks import VisitedBlocks

HEAD_GROUP_BYTES = 16 * 2**20
"""Size of the keys and values that programs with neighbouring numbers share, in bytes: a part of
the L2 cache."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    lengths: Lengths,
    has_lse: bool,
    cut: Blocks | None = None,
    *,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    visited: VisitedBlocks | None = None,
    skip: float | None = None,
    computed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, with `has_lse`, the log-sum-exp, else None.

    The output has the memory layout of the query (BHSD or BSHD).

    Args:
        query, key, value: BHSD; packed batches have one batch element.
        cut: sizes of a program's work; None for the result of `blocks`.
        options: bottom right, window and soft cap.
        sinks: (Hq,).
        visited: blocks to attend to, in tiles of the size of `cut`. With a mask, these are the
            blocks that it keeps visible, and the mask alone determines the keys that a query sees.
        skip: λ of `block_sparse_attention`, only with `visited`.
        computed: (B, Hq, tiles, blocks) int8, receives a 1 for each visited block that is not
            skipped.

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:  # the kernel finds the maximum before it scales scores
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    shape = (
        query.device,
        layout(query),
        layout(key),
        layout(value),
        layout(attn_mask),
        layout(sinks),
        visited and tuple(map(layout, visited)),
        skip,
        layout(computed),
        alignments(query, key, value),
        is_causal,
        scale,
        lengths.kind,
        lengths.batches,
        lengths.longest_query,
        lengths.kind == "full" or tuple(map(layout, lengths[3:])),
        has_lse,
        cut,
        options,
    )
    planned = _calls.get(shape) or _calls.keep(
        shape,
        _plan(
            query,
            key,
            value,
            attn_mask,
            is_causal,
            scale,
            lengths,
            has_lse,
            cut,
            options,
            visited,
            sizes_of(sinks),
            skip,
        ),
    )
    output = _allocated(query, *planned.output)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if has_lse else None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    planned.call.launch(
        query,
        *planned.call.operands(key, value),
        attn_mask,
        None if sinks is None else sinks.contiguous(),
        output,
        lse,
        *lengths[3:],
        *(visited or (None, None)),
        computed,
    )
    return output, lse


class _PlannedForward(NamedTuple):
    """Plan for calls of one shape."""

    call: PlannedCall
    output: tuple[tuple[int, ...], tuple[int, ...]]
    """Sizes and strides of the output."""


_calls: PlanCache[_PlannedForward] = PlanCache()


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    lengths: Lengths,
    has_lse: bool,
    cut: Blocks | None,
    options: AttentionOptions,
    visited: VisitedBlocks | None,
    sinks: Sizes | None,
    skip: float | None,
) -> _PlannedForward:
    """Plan everything about a call except the addresses of its tensors.

    The arguments are those of `forward`, except that the scale is positive and `sinks` is a shape.
    """
    check_types({}, options)
    check_shapes(query.shape, key.shape, value.shape, sinks)
    check_head_dims(query.shape[3], value.shape[3])
    memory, heads, q_len, head_dim = query.shape
    kv_heads, k_len, v_head_dim = key.shape[1], key.shape[2], value.shape[3]
    output = _output_of(query, v_head_dim)
    unit, output_unit = _unit(query, key, value), _unit(output)
    main, rest = pieces(head_dim, unit > 1)
    v_main, v_rest = pieces(v_head_dim, unit > 1 and skip is None)
    has_descriptors = (
        not rest
        and not v_rest
        and head_dim == main
        and v_head_dim == v_main
        and can_be_described(key)
        and can_be_described(value)
        and not options.invariant
        and not (cut is None and is_small(query, key, value))
    )
    mask, kind = _as_numbers(attn_mask, (memory, heads, q_len, k_len))
    of_mask = 1 if mask is None else mask_unit(mask)
    cut = cut or blocks(
        query,
        key,
        value,
        is_causal,
        has_descriptors,
        options,
        mask if kind in ("bool", "float") else None,
    )
    tiles = triton.cdiv(lengths.longest_query, cut.rows)
    is_causal, left, right = window_sides(is_causal, options, q_len, k_len)
    scale, cap = base_2(scale, options.softcap)
    kv_bytes = k_len * (head_dim + v_head_dim) * key.element_size() * kv_heads // max(1, heads)
    launch = Launch(
        forward_kernel,
        (tiles * lengths.batches * heads, 1, 1),
        query.device,
        named("stride_q", "bhmd", _strides(query, unit))
        | named("stride_k", "bhnd", _strides(key, unit))
        | named("stride_v", "bhnd", _strides(value, unit))
        | named("stride_m", "bhmn", (0, 0, 0, 0) if mask is None else _strides(mask, of_mask))
        | named("stride_w", "bh", (None, None) if visited is None else visited.strides())
        | named("stride_o", "bhmd", _strides(output, output_unit))
        | named("stride_l", "bhm", (heads * q_len, q_len, 1) if has_lse else (0, 0, 0))
        | {
            "scale": scale,
            "cap": cap,
            "left": left,
            "right": right,
            "skip": None if skip is None else math.log2(skip),
            "q_len": q_len,
            "k_len": k_len,
            "tiles": tiles,
            "heads": heads,
            "group": heads // kv_heads,
            "batches": lengths.batches,
            "head_group": max(1, HEAD_GROUP_BYTES // max(1, kv_bytes)) if is_causal else 1,
            "UNIT": unit,
            "MASK_UNIT": of_mask,
            "OUTPUT_UNIT": output_unit,
            "BLOCK_M": cut.rows,
            "BLOCK_N": cut.keys,
            "D": head_dim,
            "D_MAIN": main,
            "D_REST": rest,
            "DV": v_head_dim,
            "DV_MAIN": v_main,
            "DV_REST": v_rest,
            "MASK": kind,
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": options.bottom_right,
            "LENGTHS": lengths.kind,
            "HAS_LSE": has_lse,
            "HAS_DESCRIPTORS": has_descriptors,
            "IS_ALIGNED": options.invariant,
        },
        num_warps=cut.warps,
        num_stages=cut.stages,
        maxnreg=cut.registers,
    )
    descriptors = None
    if has_descriptors:
        of_key, of_value = described(key, cut.keys, main), described(value, cut.keys, v_main)
        descriptors = nowhere(of_key), nowhere(of_value)
    return _PlannedForward(PlannedCall(launch, descriptors), (tuple(output.shape), output.stride()))


def _allocated(query: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=query.dtype, device=query.device)


def _output_of(query: Tensor, v_head_dim: int) -> Tensor:
    """Return a meta tensor that has the output's layout."""
    batch, heads, q_len, _ = query.shape
    if query.stride(1) < query.stride(2):
        sizes = batch, q_len, heads, v_head_dim
        return torch.empty(sizes, dtype=query.dtype, device="meta").transpose(1, 2)
    return torch.empty((batch, heads, q_len, v_head_dim), dtype=query.dtype, device="meta")


def _as_numbers(
    attn_mask: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[Tensor | None, str]:
    """Return the mask, expanded to `shape` without a copy, and the kernel's name for its kind. A
    bool mask is returned as bytes."""
    if attn_mask is None:
        return None, "none"
    mask = attn_mask.expand(shape)
    kind = "float"
    if mask.dtype == torch.bool:
        mask, kind = mask.view(torch.uint8), "bool"
    return mask, f"{kind} keys" if mask.stride(2) == 0 else kind


def _unit(*tensors: Tensor) -> int:
    """Return 8 if the elements of rows are adjacent and rows begin at multiples of 16 bytes, else
    1."""
    for tensor in tensors:
        others_fit = all(stride % 8 == 0 for stride in tensor.stride()[:3])
        if tensor.stride(3) != 1 or tensor.data_ptr() % 16 or not others_fit:
            return 1
    return 8


def _strides(tensor: Tensor, unit: int) -> list[int]:
    """Return the strides of a tensor, all except the last in multiples of `unit`."""
    *others, last = tensor.stride()
    return [*(stride // unit for stride in others), last]
