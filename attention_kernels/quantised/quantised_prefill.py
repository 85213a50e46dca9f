"""Prefill with 8-bit operands: INT8 or FP8 QKᵀ, and 16-bit or FP8 PV.

`quantise.py` describes the quantisation of the operands. `quantised_prefill_kernel.py` computes
attention, or `quantised_hopper_kernel.py` on Hopper up to head_dim 128.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.descriptors import has_tma, nowhere
from attention_kernels.launch.launcher import Launch, PlanCache, PlannedCall, layout, named
from attention_kernels.launch.shape_checks import (
    check_head_dims,
    check_shapes,
    check_types,
    sizes_of,
)
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.quantised.quantise import (
    GROUP,
    QuantisedKeyValue,
    launch_of,
    padded_dim,
    quantise_key_value,
)
from attention_kernels.quantised.quantised_operands import (
    describable,
    is_describable,
    numbers_of,
    strides_of,
)
from attention_kernels.quantised.quantised_prefill_kernel import quantised_prefill_kernel
from attention_kernels.tiles.masking import mask_unit, window_sides
from attention_kernels.tiles.online_softmax import base_2
from attention_kernels.tiles.visited_blocks import VisitedBlocks, find_visited_blocks


class PortableTile(NamedTuple):
    """Sizes of a program's work."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_for(head_dim: int, q_len: int, has_tma: bool) -> PortableTile:
    """Return the tile for a padded head dimension.

    Without TMA, loads also take registers, so larger blocks of keys would not fit (not measured).
    """
    if q_len <= 64:
        return PortableTile(64, 64, 4, 3)
    if head_dim <= 128:
        return PortableTile(128, 128 if has_tma else 64, 8, 3)
    return PortableTile(64, 64, 8, 2)


def attend_to_quantised(
    query: Tensor,
    quantised: QuantisedKeyValue,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    in_tensor_cores: bool = False,
    attn_mask: Tensor | None = None,
    visited: VisitedBlocks | None = None,
) -> Tensor:
    """Return attention of `query` (B, Hq, Sq, D) with any strides to a quantised key and value.

    The result is (B, Hq, Sq, Dv) in the query's dtype; a query that sees no key gets zeros. If
    there are more query heads than key heads, groups of query heads share a key head.

    Args:
        is_causal: aligned top left, unless `options` specifies bottom right.
        scale: factor of the scores; None for 1/√D.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        in_tensor_cores: sum FP8 products in the tensor cores from the first key to the last, which
            is faster and less exact.
        attn_mask: bool (True = attend), broadcasts to (B, Hq, Sq, Sk). Masked blocks are not read.
        visited: result of `visited_blocks_of` for the mask; None to find the blocks now.

    Raises:
        NotImplementedError: `options` ask for invariance.
        ValueError: there is a soft cap or a sink, but the mean that was subtracted from the keys
            was not stored; a mask is combined with lengths, a diagonal or a window, or is not bool;
            or the shapes do not fit together.
    """
    check_types({}, options)
    if options.invariant:
        raise NotImplementedError(
            "8-bit kernels are not invariant: their scales depend on all keys"
        )
    sees_mean = options.softcap is not None or sinks is not None
    if sees_mean and quantised.is_smooth and quantised.key_mean is None:
        raise ValueError("soft caps and sinks need the mean of the keys: quantise with keep_mean")
    mask = None
    if attn_mask is not None:
        if is_causal or options.window != (None, None) or quantised.lengths is not None:
            raise ValueError("attn_mask beside a diagonal, a window or lengths of sequences")
        mask = _mask_of(query, quantised, attn_mask)
        visited = visited or visited_blocks_of(query, quantised, attn_mask)
    value = quantised.value
    if quantised.value_scale is None:
        value = describable(value)
    if has_gluon_kernels(query.device):
        query = describable(query)
    output = _empty_output(query, quantised.v_head_dim)
    planned = _planned(
        query,
        quantised,
        value,
        output,
        is_causal,
        scale,
        options,
        sinks,
        in_tensor_cores,
        mask,
        visited,
    )
    of_query, of_key, of_value, of_output, of_mask = planned.operands(
        query, quantised.key, value, output, mask
    )
    planned.launch(
        of_query,
        of_key,
        quantised.key_scale,
        of_value,
        quantised.key_scale if quantised.value_scale is None else quantised.value_scale,
        of_output,
        quantised.key_mean if sees_mean else None,
        None if sinks is None else sinks.contiguous(),
        of_mask,
        *((None, None, None) if quantised.lengths is None else quantised.lengths[3:]),
        *(visited or (None, None)),
        *planned.room(query.device),
    )
    return output


def visited_blocks_of(
    query: Tensor, quantised: QuantisedKeyValue, attn_mask: Tensor
) -> VisitedBlocks:
    """Return the blocks that a bool mask keeps visible. Calls with the same mask can share the
    result.

    The tensors are those of `attend_to_quantised`.
    """
    largest_dim = max(quantised.key.shape[3], padded_dim(quantised.v_head_dim))
    if _is_for_hopper(query, largest_dim):
        from attention_kernels.quantised import quantised_hopper

        rows, keys = quantised_hopper.visited_tiles(largest_dim)
    else:
        rows, keys, *_ = tile_for(largest_dim, query.shape[2], has_tma(query.device))
    return find_visited_blocks(attn_mask.expand(*query.shape[:3], quantised.kv_len), rows, keys)


def _is_for_hopper(query: Tensor, largest_dim: int) -> bool:
    return largest_dim <= 128 and has_gluon_kernels(query.device)


def _mask_of(query: Tensor, quantised: QuantisedKeyValue, attn_mask: Tensor) -> Tensor:
    """Convert a bool mask to the form that the kernel reads for these tensors."""
    if attn_mask.dtype != torch.bool:
        raise ValueError(f"attn_mask in {attn_mask.dtype}: needs bool")
    shape = (*query.shape[:3], quantised.kv_len)
    if not _is_for_hopper(query, max(quantised.key.shape[3], padded_dim(quantised.v_head_dim))):
        return attn_mask.expand(shape).view(torch.uint8)
    # Gluon is imported only if it may be used.
    from attention_kernels.hopper.operands import loadable_mask

    return loadable_mask(attn_mask, shape)


_calls: PlanCache[PlannedCall] = PlanCache()


def _empty_output(query: Tensor, v_head_dim: int) -> Tensor:
    """Return an empty output (B, Hq, Sq, Dv). On Hopper, its rows are padded to multiples of 16
    bytes, as a tensor descriptor requires."""
    step = 8 if has_gluon_kernels(query.device) else 1
    if v_head_dim % step == 0:
        return query.new_empty((*query.shape[:3], v_head_dim))
    rows = query.new_empty((*query.shape[:3], v_head_dim + step - v_head_dim % step))
    return rows[..., :v_head_dim]


def _planned(
    query: Tensor,
    quantised: QuantisedKeyValue,
    value: Tensor,
    output: Tensor,
    is_causal: bool,
    scale: float | None,
    options: AttentionOptions,
    sinks: Tensor | None,
    in_tensor_cores: bool,
    mask: Tensor | None = None,
    visited: VisitedBlocks | None = None,
) -> PlannedCall:
    """Plan everything about a call except the addresses of its tensors. Calls of one shape share
    the plan.

    `value`, and `query` on Hopper, must suit a tensor descriptor. `mask` comes from `_mask_of`.
    """
    shape = (
        query.device,
        layout(query),
        quantised.layouts,
        layout(value),
        layout(sinks),
        layout(mask),
        visited and tuple(map(layout, visited)),
        is_causal,
        scale,
        options,
        in_tensor_cores,
    )
    if (kept := _calls.get(shape)) is not None:
        return kept
    batch, q_heads, q_rows, head_dim = query.shape
    lengths = quantised.lengths
    key = (*quantised.key.shape[:2], quantised.kv_len)
    check_shapes(query.shape, (*key, head_dim), (*key, quantised.v_head_dim), sizes_of(sinks))
    check_head_dims(head_dim, quantised.v_head_dim)
    is_causal, left, right = window_sides(is_causal, options, q_rows, quantised.kv_len)
    has_diagonal = is_causal or left is not None or right is not None
    is_square = lengths is None and q_rows == quantised.kv_len
    is_bottom_right = options.bottom_right and has_diagonal and not is_square
    block_dim, block_v_dim = quantised.key.shape[3], padded_dim(quantised.v_head_dim)
    fp8_value = quantised.value_scale is not None
    factor, cap = base_2(head_dim**-0.5 if scale is None else scale, options.softcap)
    numbers = numbers_of(query, quantised, factor, cap, in_tensor_cores)
    largest_dim = max(block_dim, block_v_dim)
    if _is_for_hopper(query, largest_dim):
        # Gluon is imported only if it may be used.
        from attention_kernels.quantised import quantised_hopper

        right = 0 if is_causal else right
        planned = quantised_hopper.plan(
            query, quantised, value, output, numbers, is_bottom_right, left, right, mask, visited
        )
        return _calls.keep(shape, planned)
    if lengths is not None:
        batch = lengths.batches
    q_len = numbers["q_len"]
    tile = tile_for(largest_dim, q_len, has_tma(query.device))
    key_desc = TensorDescriptor.from_tensor(quantised.key.flatten(0, 2), [tile.keys, block_dim])
    if fp8_value:
        value_desc = TensorDescriptor.from_tensor(value.flatten(0, 2), [block_v_dim, tile.keys])
    else:
        block = [1, 1, tile.keys, block_v_dim]
        value_desc = TensorDescriptor(value, list(value.shape), strides_of(value), block)
    launch = Launch(
        quantised_prefill_kernel,
        (-(-q_len // tile.queries) * batch * q_heads, 1, 1),
        query.device,
        numbers
        | named("stride_", "bhsd", query.stride())
        | named("stride_m", "bhmn", (None,) * 4 if mask is None else mask.stride())
        | named("stride_w", "bh", (None, None) if visited is None else visited.strides())
        | {
            "q_rows": q_rows if lengths is not None and lengths.kind == "packed" else None,
            "kv_heads": quantised.key.shape[1],
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": quantised.v_head_dim,
            "OUTPUT_STRIDE": output.stride(2),
            "BLOCK_D": block_dim,
            "BLOCK_DV": block_v_dim,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "GROUP": GROUP,
            "MASK_UNIT": 1 if mask is None else mask_unit(mask),
            "FP8_VALUE": fp8_value,
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": is_bottom_right,
            "left": left,
            "right": right,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    descriptors = (None, nowhere(key_desc), nowhere(value_desc), None, None)
    return _calls.keep(shape, PlannedCall(launch, descriptors))


def quantised_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    score_dtype: torch.dtype = torch.int8,
    fp8_value: bool = False,
    smooth_k: bool = True,
    in_tensor_cores: bool = False,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> Tensor:
    """Return softmax(scale · QKᵀ) · V with operands in 8 bits, including the quantisation.

    The result is (B, Hq, Sq, Dv) in the query's dtype. FP8 needs compute capability 8.9.

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) of any strides,
            float16 or bfloat16. Hq is a multiple of Hkv, D and Dv are at most 256.
        score_dtype: type in which QKᵀ is computed, int8 or float8_e4m3fn.
        fp8_value: whether PV is in FP8 instead of the call's dtype.
        smooth_k: whether a mean key is subtracted from all keys.
        lengths: valid rows. A packed batch has one batch element; a padded batch is handled as in
            `padded_prefill`.
        is_causal, scale, in_tensor_cores, options, sinks, attn_mask: as for `attend_to_quantised`.

    Raises:
        NotImplementedError, ValueError: as for `attend_to_quantised`.
    """
    is_aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    shape = (
        query.device,
        layout(query),
        layout(key),
        layout(value),
        is_aligned,
        is_causal,
        scale,
        score_dtype,
        fp8_value,
        smooth_k,
        in_tensor_cores,
        options,
    )
    is_plain = sinks is None and attn_mask is None and lengths is None
    if is_plain and (again := _repetitions.get(shape)) is not None:
        return again(query, key, value)
    is_empty = lengths is not None and 0 in (lengths.batches, lengths.longest_query)
    if key.shape[2] == 0 or query.numel() == 0 or is_empty:
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    check_types({}, options)
    check_shapes(query.shape, key.shape, value.shape, sizes_of(sinks))
    keep_mean = options.softcap is not None or sinks is not None
    quantised = quantise_key_value(key, value, score_dtype, fp8_value, smooth_k, keep_mean, lengths)
    output = attend_to_quantised(
        query,
        quantised,
        is_causal,
        scale=scale,
        options=options,
        sinks=sinks,
        in_tensor_cores=in_tensor_cores,
        attn_mask=attn_mask,
    )
    is_read_in_place = (fp8_value or is_describable(value)) and (
        is_describable(query) or not has_gluon_kernels(query.device)
    )
    if is_plain and is_aligned and is_read_in_place and not keep_mean:
        quantise = launch_of(key, value, score_dtype, fp8_value, smooth_k, keep_mean)
        planned = _planned(
            query,
            quantised,
            quantised.value,
            output,
            is_causal,
            scale,
            options,
            None,
            in_tensor_cores,
        )
        repetition = _Repetition.of(quantise, planned, quantised, output)
        if repetition is not None:
            _repetitions.keep(shape, repetition)
    return output


class _Repetition(NamedTuple):
    """Repetition of an earlier call of the same shape, at half the cost to the host.

    The quantised operands share one piece of memory and are not tensors.
    """

    quantise: Launch
    attend: PlannedCall
    places: tuple[int, ...]
    """Byte offsets of the key, its scales and, if the value is quantised, the value and its
    scales."""
    room: int
    """Size of the memory for quantised operands, in bytes."""
    output: tuple[tuple[int, ...], tuple[int, ...]]
    """Sizes and strides of the output."""

    @classmethod
    def of(
        cls, quantise: Launch, attend: PlannedCall, quantised: QuantisedKeyValue, output: Tensor
    ) -> _Repetition | None:
        """Return a repetition, or None if the launches cannot be repeated with addresses only."""
        if not (quantise.is_compiled and attend.launch.is_compiled):
            return None
        parts = [quantised.key, quantised.key_scale]
        if quantised.value_scale is not None:
            parts += [quantised.value, quantised.value_scale]
        *places, room = accumulate((-(-part.nbytes // 128) * 128 for part in parts), initial=0)
        return cls(quantise, attend, tuple(places), room, (tuple(output.shape), output.stride()))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        device = query.device
        memory = torch.empty_strided((self.room,), (1,), dtype=torch.uint8, device=device)
        output = torch.empty_strided(*self.output, dtype=query.dtype, device=device)
        begin, value_address = memory.data_ptr(), value.data_ptr()
        key_out, key_scale, *quantised = [begin + place for place in self.places]
        value_out, value_scale = quantised or (value_address, None)
        self.quantise.repeat(
            key.data_ptr(), value_address, key_out, key_scale, value_out, value_scale, *(None,) * 3
        )
        self.attend.launch.repeat(
            query.data_ptr(),
            key_out,
            key_scale,
            value_out,
            value_scale or key_scale,
            output.data_ptr(),
            *(None,) * 8,
            *[each.data_ptr() for each in self.attend.room(device)],
        )
        return output


_repetitions: PlanCache[_Repetition] = PlanCache()
