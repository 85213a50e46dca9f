"""Planning and launch of `backward_kernel.py`: gradients of `prefill` and `packed_prefill`, and of
any other exact forward pass that returns the log-sum-exp, such as the Hopper kernel's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attention_kernels.launch.launcher import Launch, PlanCache, alignments, layout, named
from attention_kernels.launch.shape_checks import check_head_dims, check_shapes
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.portable.backward_kernel import (
    key_value_kernel,
    query_kernel,
)
from attention_kernels.portable.forward import HEAD_GROUP_BYTES
from attention_kernels.tiles.masking import mask_unit, window_sides
from attention_kernels.tiles.online_softmax import base_2
from attention_kernels.tiles.row_sums import (
    Gradients,
    empty_gradient,
    row_sum_tiles,
    row_sums_launch,
)
from attention_kernels.tiles.visited_blocks import find_visited_blocks


class Tiles(NamedTuple):
    """Sizes of a program's work."""

    rows: int
    """Number of queries in a tile or block."""
    keys: int
    """Number of keys in a block or tile."""
    warps: int
    stages: int
    """Number of blocks in flight."""


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    output: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Lengths | None = None,
    *,
    longest_key: int | None = None,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    grad_lse: Tensor | None = None,
    is_scanned: bool = False,
) -> Gradients:
    """Return the gradients of attention's query, key, value and sinks.

    The same call always gives the same bits: no program adds to what another one has written. A
    query that sees nothing has a gradient of zero and adds nothing to those of keys and values. A
    query whose mask values are all -1e30 or less counts as one that sees nothing.

    Args:
        grad_output: gradient of the output, (B, Hq, Sq, Dv), any strides.
        query, key, value, attn_mask, is_causal, scale, sinks: arguments of the forward pass, as for
            `prefill`; packed batches have one batch element.
        output, lse: results of that forward pass, (B, Hq, Sq, Dv) and (B, Hq, Sq) float32: the
            natural logarithm of each row's sum of exponentials, sinks included.
        lengths: "full" or "packed"; None for full.
        longest_key: number of keys of the longest packed sequence, or more; keys beyond have a
            gradient of zero. None for all keys.
        options: bottom right, window and soft cap of the forward pass.
        grad_lse: gradient of the log-sum-exp, (B, Hq, Sq) float32; None for zeros.
        is_scanned: scan the mask and skip fully masked blocks. The mask alone then determines the
            keys that a query sees.

    Returns:
        Gradients that are dense in BSHD if the tensor is, else in BHSD.

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    batch, heads, q_len, _ = query.shape
    lengths = lengths or Lengths("full", batch, q_len)
    longest_key = key.shape[2] if longest_key is None else longest_key
    scale = query.shape[3] ** -0.5 if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, q_len, key.shape[2])
    shape = (
        *map(layout, (grad_output, query, key, value, mask, output)),
        alignments(grad_output, query, key, value),
        is_causal,
        scale,
        lengths.kind,
        lengths.batches,
        lengths.longest_query,
        longest_key,
        lengths.kind == "full" or tuple(map(layout, lengths[3:])),
        layout(sinks),
        grad_lse is None,
        options,
        is_scanned,
    )
    planned = _plans.get(shape) or _plans.keep(
        shape,
        _plan(
            grad_output, query, key, value, mask, output, is_causal, scale, lengths, longest_key,
            options, is_scanned,
        ),
    )  # fmt: skip
    of_keys: tuple[Tensor | None, ...] = (None, None)
    of_queries: tuple[Tensor | None, ...] = (None, None)
    if mask is not None and is_scanned:
        of_keys = find_visited_blocks(mask, planned.query_tiles.rows, planned.query_tiles.keys)
        cut = planned.key_tiles
        of_queries = find_visited_blocks(mask.mT, cut.keys, cut.rows)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    grad_query, grad_key, grad_value = (
        empty_gradient(each, lengths.kind) for each in (query, key, value)
    )
    logarithms, deltas = lse.new_empty(2, *lse.shape).unbind()
    parts = None
    if sinks is not None:
        parts = lse.new_empty(lengths.batches, heads, row_sum_tiles(lengths))
    planned.row_sums(
        output,
        grad_output,
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        None if sinks is None else sinks.contiguous(),
        lengths.q_offsets,
        logarithms,
        deltas,
        parts,
        None,
    )
    shared = query, key, value, mask, grad_output, logarithms, deltas
    planned.of_keys(*shared, grad_key, grad_value, *lengths[3:], *of_queries)
    planned.of_queries(*shared, grad_query, *lengths[3:], *of_keys)
    grad_sinks = None
    if parts is not None and sinks is not None:
        grad_sinks = parts.sum((0, 2)).to(sinks.dtype)
    return Gradients(grad_query, grad_key, grad_value, grad_sinks)


def tiles_of_queries(dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return the sizes of `query_kernel`. In 16 bits, no register is spilled on Hopper (sm_90a)."""
    if dtype == torch.float32:
        return _tiles_of_float32(head_dim)
    if head_dim > 128:
        return Tiles(32, 32, 4, 1)
    return Tiles(128, 64, 8, 3 if head_dim <= 64 else 2)


def tiles_of_keys(dtype: torch.dtype, head_dim: int, has_mask: bool) -> Tiles:
    """Return the sizes of `key_value_kernel`.

    At head dimensions 64 and 128 in 16 bits, no register is spilled in a loop on Hopper (sm_90a),
    except with a scanned mask at 128, where a program has 12 such instructions.
    """
    if dtype == torch.float32:
        return _tiles_of_float32(head_dim)
    if head_dim > 128:
        return Tiles(32, 32, 4, 1)
    if head_dim <= 64:
        return Tiles(32 if has_mask else 64, 128, 8, 2)
    return Tiles(32, 128, 8, 1 if has_mask else 2)


def _tiles_of_float32(head_dim: int) -> Tiles:
    """Return sizes for exact float32 products, which do not use the tensor cores."""
    return Tiles(32, 32, 4, 1) if head_dim <= 64 else Tiles(16, 32, 8, 1)


class _PlannedBackward(NamedTuple):
    """Launches for calls of one shape, and the sizes with which a mask is scanned."""

    row_sums: Launch
    of_queries: Launch
    of_keys: Launch
    query_tiles: Tiles
    key_tiles: Tiles


Strides = dict[str, int | None]
_plans: PlanCache[_PlannedBackward] = PlanCache()


def _plan(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    is_causal: bool,
    scale: float,
    lengths: Lengths,
    longest_key: int,
    options: AttentionOptions,
    is_scanned: bool,
) -> _PlannedBackward:
    """Plan everything about a call except the addresses of its tensors.

    The arguments are those of `backward`, except that the mask (B, Hq, Sq, Sk) is expanded.
    """
    check_shapes(query.shape, key.shape, value.shape)
    check_head_dims(query.shape[3], value.shape[3])
    _, heads, q_len, head_dim = query.shape
    kv_heads, k_len, v_head_dim = key.shape[1], key.shape[2], value.shape[3]
    is_causal, left, right = window_sides(is_causal, options, q_len, k_len)
    exponent, cap = base_2(scale, options.softcap)
    widths = {
        "D": head_dim,
        "D_WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "DV": v_head_dim,
        "DV_WIDTH": max(16, triton.next_power_of_2(v_head_dim)),
    }
    kind = "none"
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "float"
        kind = f"{kind} keys" if mask.stride(2) == 0 else kind
    shared = (
        named("stride_q", "bhmd", query.stride())
        | named("stride_k", "bhnd", key.stride())
        | named("stride_v", "bhnd", value.stride())
        | named("stride_m", "bhmn", (0, 0, 0, 0) if mask is None else mask.stride())
        | named("stride_g", "bhmd", grad_output.stride())
        | widths
        | {
            "scale": exponent,
            "cap": cap,
            "grad_scale": scale,
            "left": left,
            "right": 0 if is_causal else right,
            "q_len": q_len,
            "k_len": k_len,
            "heads": heads,
            "kv_heads": kv_heads,
            "batches": lengths.batches,
            "MASK_UNIT": 1 if mask is None else mask_unit(mask),
            "MASK": kind,
            "IS_BOTTOM_RIGHT": options.bottom_right,
            "LENGTHS": lengths.kind,
        }
    )
    row_bytes = (head_dim + v_head_dim) * query.element_size()
    widest = max(head_dim, v_head_dim)
    query_tiles = tiles_of_queries(query.dtype, widest)
    key_tiles = tiles_of_keys(query.dtype, widest, mask is not None)

    def launch(
        kernel: Any, cut: Tiles, tiles: int, of_heads: int, bytes_read: int, gradients: Strides
    ) -> Launch:
        """Return a launch; `bytes_read` is the size of the tensors that a head's tiles share."""
        head_group = max(1, HEAD_GROUP_BYTES // max(1, bytes_read)) if is_causal else 1
        return Launch(
            kernel,
            (tiles * lengths.batches * of_heads, 1, 1),
            query.device,
            shared
            | gradients
            | named("stride_w", "bh", _strides_of_lists(mask if is_scanned else None, tiles))
            | {
                "tiles": tiles,
                "head_group": head_group,
                "BLOCK_M": cut.rows,
                "BLOCK_N": cut.keys,
            },
            num_warps=cut.warps,
            num_stages=cut.stages,
        )

    of_queries = launch(
        query_kernel,
        query_tiles,
        triton.cdiv(lengths.longest_query, query_tiles.rows),
        heads,
        k_len * row_bytes * kv_heads // max(1, heads),
        named("stride_d", "bhmd", empty_gradient(query, device="meta").stride()),
    )
    of_keys = launch(
        key_value_kernel,
        key_tiles,
        triton.cdiv(longest_key, key_tiles.keys),
        kv_heads,
        q_len * row_bytes * heads // kv_heads,
        named("stride_d", "bhnd", empty_gradient(key, device="meta").stride())
        | named("stride_e", "bhnd", empty_gradient(value, device="meta").stride()),
    )
    row_sums = row_sums_launch(output, grad_output, lengths, q_len)
    return _PlannedBackward(row_sums, of_queries, of_keys, query_tiles, key_tiles)


def _strides_of_lists(mask: Tensor | None, tiles: int) -> tuple[int | None, int | None]:
    """Return the strides of a mask's `VisitedBlocks` between batch elements and heads, in tiles;
    None without a scan."""
    if mask is None:
        return None, None
    heads = 1 if mask.stride(1) == 0 else mask.shape[1]
    return (heads * tiles if mask.stride(0) else 0), (tiles if mask.stride(1) else 0)
