"""Prefill for Hopper GPUs (compute capability 9.0): planning and launch of the kernel."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention_kernels.hopper.head_groups import VisibleKeys, head_group_of, most_cut
from attention_kernels.hopper.hopper_prefill_kernel import prefill_kernel
from attention_kernels.hopper.operands import (
    are_loadable,
    block_layout,
    loadable_mask,
    loadable_type,
)
from attention_kernels.hopper.persistent import SHORT, multiprocessors, work_of
from attention_kernels.hopper.schedule import (
    LARGEST_HEAD_DIM,
    WholeCall,
    dims_of,
    room_for,
    schedule,
    schedule_of_visited_blocks,
)
from attention_kernels.hopper.scores import ROWS
from attention_kernels.hopper.stream_k import arguments_of, cut_for, memory_for
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.launcher import Launch, PlannedCall
from attention_kernels.launch.shape_checks import (
    Sizes,
    check_head_dims,
    check_shapes,
    check_types,
    sizes_of,
)
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import LOG2_E
from attention_kernels.tiles.visited_blocks import VisitedBlocks

UNLIMITED = 2**30
"""Minimum size of a window's side that is ignored in invariant calls, in keys."""


def hopper_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Return scaled dot-product attention on a Hopper GPU.

    Tensors are read in place if TMA can address them. The elements of a head must be adjacent, and
    the address and all other strides must be multiples of 16 bytes. Other tensors are copied first.

    Args:
        query: (B, Hq, Sq, D) float16 or bfloat16; D at most 256 and a multiple of 8.
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        value: (B, Hkv, Sk, Dv), Dv with the same limits as D.
        attn_mask: broadcasts to (B, Hq, Sq, Sk): bool (True = attend), or float (added). The mask
            is copied first if its rows are not multiples of 16 bytes, or if all queries share one
            row.
        is_causal: query i sees keys 0 to i (top left, as in SDPA), unless `options` specifies
            bottom right. An `attn_mask` applies in addition.
        scale: factor of the scores, not negative; None for 1/√D.
        options: bottom right, window and soft cap. Blocks of keys outside a window are not read.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        return_lse: return a tuple of the output and the natural logarithm of each row's sum of
            exponentials, sinks included.

    Returns:
        The output, (B, Hq, Sq, Dv), with the layout of `query` if that is dense; zeros for queries
            that see no key. With `return_lse`, the logarithms (B, Hq, Sq) too, in float32.

    Raises:
        ValueError: D or Dv is too large or not a multiple of 8, the scale is negative, the shapes
            do not fit together, the tensors' types differ, or they do not have 16 bits.
    """
    if not query.ndim == key.ndim == value.ndim == 4:  # the rest is checked once for each shape
        check_shapes(query.shape, key.shape, value.shape)
    for dim in (query.shape[3], value.shape[3]):
        if not 8 <= dim <= LARGEST_HEAD_DIM or dim % 8:
            raise ValueError(f"head_dim {dim}: needs a multiple of 8, at most {LARGEST_HEAD_DIM}")
    if scale is not None and scale < 0:
        raise ValueError(f"scale {scale}: must not be negative")
    if scale == 0:  # a masked score of -inf times 0 would be NaN
        query, scale = query * 0.0, 1.0
    output, lse = forward_hopper(
        query,
        key,
        value,
        is_causal,
        scale,
        None,
        return_lse,
        options=options,
        sinks=sinks,
        attn_mask=attn_mask,
    )
    return output if lse is None else (output, lse)


def forward_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    lengths: Lengths | None,
    has_lse: bool,
    *,
    options: AttentionOptions = PLAIN,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    visited: VisitedBlocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if `has_lse`, the log-sum-exp; batches may be padded or packed.

    Args:
        query, key, value: BHSD; packed batches have one batch element.
        lengths: valid rows of each batch element; None for all. Not together with a mask.
        visited: blocks to attend to, in tiles of the size of `visited_tiles`. With a mask, these
            are the blocks that it keeps visible, and the mask alone determines the keys that a
            query sees.

    Raises:
        ValueError: the shapes do not fit together, the types differ, or they do not have 16 bits.
    """
    if not (query.numel() and key.numel()):
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        of_nothing = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
        if sinks is not None:
            of_nothing.copy_(sinks[:, None])
        return output, of_nothing if has_lse else None
    if not are_loadable(query, key, value):
        query, key, value = (
            each if are_loadable(each) else each.clone(memory_format=torch.contiguous_format)
            for each in (query, key, value)
        )
    output = _output_of(query, value.shape[3])
    mask = None
    if attn_mask is not None:
        mask = loadable_mask(attn_mask, (*query.shape[:3], key.shape[2]))
    planned = _planned(
        (query.shape, key.shape, value.shape, output.shape),
        (query.stride(), key.stride(), value.stride(), output.stride()),
        (query.dtype, key.dtype, value.dtype),
        (query.device, key.device, value.device),
        is_causal,
        scale,
        None if options is PLAIN else options,
        None if lengths is None else (*lengths[:3], *map(_kind, lengths[3:])),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        None if visited is None else visited.strides(),
        (has_lse, *map(_kind, (sinks, mask, *(visited or ())))),
        sizes_of(sinks),
    )
    lse = None
    if has_lse:
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    again = (query, key) if planned.has_rest else (None, None)
    values_again = (value, output) if planned.has_value_rest else (None, None)
    planned.call.launch(
        *planned.call.operands(query, key, value, output, *again, *values_again, mask),
        output if planned.has_pointer else None,
        lse,
        None if sinks is None else sinks.contiguous(),
        *((None, None, None) if lengths is None else lengths[3:]),
        None,
        *(visited or (None, None)),
        *planned.call.room(query.device),
    )
    return output, lse


def takes(query: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return whether `forward_hopper` supports these tensors on their device."""
    dims = query.shape[3], value.shape[3]
    return (
        has_gluon_kernels(query.device)
        and query.dtype in (torch.float16, torch.bfloat16)
        and all(8 <= dim <= LARGEST_HEAD_DIM and dim % 8 == 0 for dim in dims)
        and (scale is None or scale > 0)
    )


def visited_tiles(query: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> tuple[int, int]:
    """Return the numbers of queries in a tile and of keys in a block of `VisitedBlocks`."""
    size = 0 if attn_mask is None else loadable_type(attn_mask.dtype).itemsize
    plan = schedule_of_visited_blocks(dims_of(query.shape[3], value.shape[3]), size)
    return plan.consumers * ROWS.value, plan.keys


def _output_of(query: Tensor, v_head_dim: int) -> Tensor:
    if v_head_dim == query.shape[3]:
        output = torch.empty_like(query)
        if output.stride() == query.stride() or are_loadable(output):
            return output
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, v_head_dim).transpose(1, 2)
    return query.new_empty(batch, heads, length, v_head_dim)


class _PlannedPrefill(NamedTuple):
    """Plan for calls of one shape."""

    call: PlannedCall
    """Planned call. The call's operands are query, key, value, output, then the same tensors again
    for the second pieces of the head dimensions, and the mask."""
    has_rest: bool
    """True if the head dimension of query and key has a second piece."""
    has_value_rest: bool
    has_pointer: bool
    """True if the output is stored through pointers (`Outputs.pointer`)."""


@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[Sizes, ...],
    strides: tuple[Sizes, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    is_causal: bool,
    scale: float | None,
    options: AttentionOptions | None,
    lengths: tuple[Any, ...] | None,
    mask: tuple[Sizes, Sizes, torch.dtype] | None,
    visited_strides: tuple[int, int] | None,
    others: tuple[Any, ...],
    sinks: Sizes | None,
) -> _PlannedPrefill:
    """Plan all calls with these arguments.

    Args:
        devices: devices of query, key and value.
        lengths: kind, number of batch elements, longest query, and the tensors' types and devices.
        mask: shape, strides and type of the mask.
        visited_strides: strides of the visited blocks, in tiles.
        others: types and devices of the remaining tensors, or None.
        sinks: shape of the sinks.

    Raises:
        ValueError: as for `forward_hopper`.
    """
    check_shapes(shapes[0], shapes[1], shapes[2], sinks)
    check_head_dims(shapes[0][3], shapes[2][3])
    dtype = dtypes[0]
    if set(dtypes) not in ({torch.float16}, {torch.bfloat16}):
        names = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise ValueError(f"query, key and value in {names}: needs one type of 16 bits")
    options = PLAIN if options is None else options
    check_types({}, options)
    batch, q_heads, q_len, head_dim = shapes[0]
    kv_heads, kv_len, v_head_dim = (*shapes[1][1:3], shapes[2][3])
    rows = q_len
    is_packed = lengths is not None and lengths[0] == "packed"
    if lengths is not None:
        _, batch, q_len, *_ = lengths
    # A side that hides no key of a chunk may hide keys of the whole sequence.
    side_sizes = (UNLIMITED, 0) if options.invariant else (rows, kv_len)
    is_causal, left, right = window_sides(is_causal, options, *side_sizes)
    right = 0 if is_causal else right
    is_bottom_right = options.bottom_right and (lengths is not None or q_len != kv_len)
    hides = mask is not None and mask[2] == torch.uint16
    # A mask is added before scores are converted to base 2.
    unit = LOG2_E.value if mask is None or hides else 1.0
    scale = head_dim**-0.5 if scale is None else scale
    cap = None if options.softcap is None else options.softcap * unit
    scale = scale * unit if options.softcap is None else scale / options.softcap
    mask_size = 0 if mask is None else 1 if hides else mask[2].itemsize
    visit_batch, visit_head = visited_strides or (None, None)
    group = q_heads // kv_heads
    dims = dims_of(head_dim, v_head_dim)
    seen = max(1, kv_len // batch) if is_packed else kv_len
    if left is not None and right is not None:
        seen = min(seen, left + right + 1)
    longest = q_len if is_packed else kv_len
    diagonal = longest - q_len if is_bottom_right else 0
    visible = VisibleKeys(q_len, longest, diagonal, left, right, queries=1, keys=1)
    processors = multiprocessors(devices[0])
    call = None
    if lengths is None and not options.invariant:
        call = WholeCall(visible, batch * q_heads, processors)
    plan = schedule(dims, group, SHORT if options.invariant else seen, mask_size, call)
    if visited_strides is not None:
        plan = schedule_of_visited_blocks(dims, mask_size)
    room = room_for(dims, plan, mask_size)
    queries = ROWS.value * plan.consumers // plan.heads
    is_aligned = options.invariant and (left is not None or right is not None)
    early = 0  # maximum number of rows of a tile before the first query
    if is_aligned:
        early = diagonal % queries if lengths is None else queries - 1
    visible = VisibleKeys(q_len + early, longest, diagonal - early, left, right, queries, plan.keys)
    has_pointer = is_packed or early > 0
    blocks = -(-visible.q_len // queries)
    bundles = batch * q_heads // plan.heads
    tiles = blocks * bundles
    head_bytes = seen * (head_dim + v_head_dim) * dtype.itemsize
    cut = None
    if lengths is None and visited_strides is None and not options.invariant:
        cut = cut_for(visible, bundles, processors, plan.tile_times)
    programs = min(tiles, processors) if cut is None else processors
    head_group = head_group_of(visible, head_bytes, bundles, group // plan.heads, programs)
    launch = Launch(
        prefill_kernel,
        (programs, 1, 1),
        devices[0],
        {
            "rows": rows,
            "q_len": q_len,
            "kv_len": kv_len,
            "diagonal": None if is_bottom_right else 0,
            "left": left,
            "right": right,
            "most_cut": most_cut(visible, has_lengths=lengths is not None),
            "mask_batch": None if mask is None else int(mask[0][0] > 1),
            "mask_head": None if mask is None else int(mask[0][1] > 1),
            "visit_batch": visit_batch,
            "visit_head": visit_head,
            "stride_table": None,
            "sequences": None,
            "decoded": None,
            "stride_output_batch": strides[3][0] if has_pointer and not is_packed else None,
            "stride_output_head": strides[3][1] if has_pointer else None,
            "stride_output_token": strides[3][2] if has_pointer else None,
            "scale": scale,
            "cap": cap,
            "CONSUMERS": plan.consumers,
            "HEADS": plan.heads,
            "KEYS": plan.keys,
            "STAGES": plan.stages,
            "REGISTERS": plan.registers,
            "MASK_STAGES": room.mask_stages,
            "ADDS_MASK": mask is not None and not hides,
            "BY_LENGTH": right is not None,
            "ALIGNED_TO": queries if is_aligned else None,
            "V_HEAD_DIM": v_head_dim if has_pointer else dims.of_value,
            "PAGE_SIZE": 0,
            **work_of(q_heads, group, blocks, bundles, head_group, programs),
            **arguments_of(cut),
        },
        num_warps=4,
    )
    tiles_of = functools.partial(tile_descriptor, dtype=dtype)
    query, key, value, output = zip(shapes, strides, strict=True)
    descriptors = (
        tiles_of(*query, ROWS.value, dims.main),
        tiles_of(*key, plan.keys, dims.main),
        tiles_of(*value, plan.keys, dims.value),
        tiles_of(*output, ROWS.value, room.output_columns),
        tiles_of(*query, ROWS.value, dims.rest) if dims.rest else None,
        tiles_of(*key, plan.keys, dims.rest) if dims.rest else None,
        tiles_of(*value, plan.keys, dims.value_rest) if dims.value_rest else None,
        tiles_of(*output, ROWS.value, dims.value_rest) if dims.value_rest else None,
        mask and tile_descriptor(*mask[:2], ROWS.value, plan.keys // (1 + hides), dtype=mask[2]),
    )
    call_plan = PlannedCall(
        launch, descriptors, memory_for(cut, programs, plan.consumers, dims.of_value)
    )
    return _PlannedPrefill(call_plan, bool(dims.rest), bool(dims.value_rest), has_pointer)


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, torch.device] | None:
    return None if tensor is None else (tensor.dtype, tensor.device)


def tile_descriptor(
    shape: Sizes, strides: Sizes, rows: int, columns: int, *, dtype: torch.dtype
) -> TensorDescriptor:
    """Return a descriptor of tiles for TMA; it holds no memory and is moved by `at`.

    Elements outside the tensor are read as 0 and not written.
    """
    steps = [
        columns if length == 1 else stride
        for length, stride in zip(shape[:3], strides[:3], strict=True)
    ]
    return TensorDescriptor(
        torch.empty_strided(shape, strides, dtype=dtype, device="meta"),
        list(shape),
        [*steps, 1],
        [1, 1, rows, columns],
        block_layout((1, 1, rows, columns), dtype),
    )
