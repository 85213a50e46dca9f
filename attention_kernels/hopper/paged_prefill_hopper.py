"""Planning and launch of `hopper_prefill_kernel.py` for packed queries over keys in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels.hopper.head_groups import HeadGroup, VisibleKeys, most_cut
from attention_kernels.hopper.hopper_prefill import tile_descriptor
from attention_kernels.hopper.hopper_prefill_kernel import prefill_kernel
from attention_kernels.hopper.operands import are_loadable
from attention_kernels.hopper.persistent import multiprocessors, work_of
from attention_kernels.hopper.schedule import dims_of, room_for, schedule
from attention_kernels.hopper.scores import ROWS
from attention_kernels.hopper.stream_k import arguments_of
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.launcher import Launch, PlanCache, PlannedCall, layout
from attention_kernels.options import AttentionOptions
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import LOG2_E

LEAST_BOX = 16
"""Minimum number of keys of a page that TMA copies at once."""
BOX_COLUMNS = 64
"""Number of columns that TMA copies at once: 128 bytes of a row."""


def reads_pages(query_THD: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return whether `attend_to_pages` supports the tensors on their device: pages in the query's
    type, or FP8 pages that `convert_pages` has copied."""
    dims = query_THD.shape[2], value.shape[3]
    page_size = key.shape[1]
    is_supported = (
        has_gluon_kernels(query_THD.device)
        and query_THD.dtype in (torch.float16, torch.bfloat16)
        and all(dim in (64, 128, 256) for dim in dims)
        and (scale is None or scale > 0)
        and are_loadable(query_THD.transpose(0, 1)[None])
    )
    if key.element_size() == 1:  # float16 may be too small for numbers multiplied by a scale
        return is_supported and query_THD.dtype == torch.bfloat16
    return (
        is_supported
        and key.dtype == value.dtype == query_THD.dtype
        and page_size & -page_size >= LEAST_BOX
        and are_loadable(key.transpose(1, 2), value.transpose(1, 2))
    )


def attend_to_pages(
    query_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q_offsets: Tensor,
    longest_query: int,
    output: Tensor,
    lse: Tensor | None,
    is_causal: bool,
    *,
    scale: float | None,
    sinks: Tensor | None,
    options: AttentionOptions,
    decoded: int,
) -> None:
    """Call `portable.paged_prefill.paged_prefill` with the same arguments, on Hopper."""
    query = query_THD.transpose(0, 1)[None]
    key, value = key_pages.transpose(1, 2), value_pages.transpose(1, 2)
    out = output.transpose(0, 1)[None]
    tensors = (query, key, value, out, sinks, lengths, block_table, q_offsets)
    shape = (*map(layout, tensors), longest_query, lse is None, is_causal, scale, options, decoded)
    planned = _calls.get(shape) or _calls.keep(
        shape,
        _plan(
            query, key, value, out, block_table, longest_query, is_causal, scale, options, decoded,
        ),
    )  # fmt: skip
    planned.launch(
        *planned.operands(query, key, value, out, None, None, None, None, None),
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        q_offsets,
        None,
        lengths,
        block_table,
        None,
        None,
    )


_calls: PlanCache[PlannedCall] = PlanCache()


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    table: Tensor,
    longest_query: int,
    is_causal: bool,
    scale: float | None,
    options: AttentionOptions,
    decoded: int,
) -> PlannedCall:
    _, q_heads, tokens, head_dim = query.shape
    page_size, v_head_dim = key.shape[2], value.shape[3]
    group, sequences = q_heads // key.shape[1], table.shape[0]
    room = table.shape[1] * page_size
    is_causal, left, right = window_sides(is_causal, options, tokens, room)
    right = 0 if is_causal else right
    scale = head_dim**-0.5 if scale is None else scale
    cap = None if options.softcap is None else options.softcap * LOG2_E.value
    scale = scale * LOG2_E.value if options.softcap is None else scale / options.softcap
    dims = dims_of(head_dim, v_head_dim)
    seen = room if left is None or right is None else min(room, left + right + 1)
    plan = schedule(dims, group, seen, 0, None)
    queries = ROWS.value * plan.consumers // plan.heads
    bundles = q_heads // plan.heads
    visible = VisibleKeys(longest_query, longest_query, 0, left, right, queries, plan.keys)
    tiles = (tokens // queries + sequences) * bundles
    programs = min(tiles, multiprocessors(query.device))
    box = min(plan.keys, page_size & -page_size)
    work = work_of(q_heads, group, 1, bundles, HeadGroup(1, 1), programs)
    launch = Launch(
        prefill_kernel,
        (programs, 1, 1),
        query.device,
        {
            "rows": tokens,
            "q_len": longest_query,
            "kv_len": room,
            "diagonal": None if options.bottom_right else 0,
            "left": left,
            "right": right,
            "most_cut": most_cut(visible, has_lengths=True),
            "mask_batch": None,
            "mask_head": None,
            "visit_batch": None,
            "visit_head": None,
            "stride_table": table.stride(0),
            "sequences": sequences,
            "decoded": decoded,
            "stride_output_batch": None,
            "stride_output_head": output.stride(1),
            "stride_output_token": output.stride(2),
            "scale": scale,
            "cap": cap,
            "CONSUMERS": plan.consumers,
            "HEADS": plan.heads,
            "KEYS": plan.keys,
            "STAGES": plan.stages,
            "REGISTERS": plan.registers,
            "MASK_STAGES": 0,
            "ADDS_MASK": False,
            "BY_LENGTH": False,
            "ALIGNED_TO": None,
            "V_HEAD_DIM": v_head_dim,
            "PAGE_SIZE": page_size,
            **(work | {"tiles": tiles, "turns": tiles // programs}),
            **arguments_of(None),
        },
        num_warps=4,
    )
    dtype = query.dtype
    return PlannedCall(
        launch,
        (
            tile_descriptor(query.shape, query.stride(), ROWS.value, head_dim, dtype=dtype),
            tile_descriptor(key.shape, key.stride(), box, BOX_COLUMNS, dtype=dtype),
            tile_descriptor(value.shape, value.stride(), box, BOX_COLUMNS, dtype=dtype),
            tile_descriptor(
                output.shape, output.stride(), ROWS.value, room_for(dims, plan).output_columns,
                dtype=dtype,
            ),
            *(None,) * 5,
        ),
    )  # fmt: skip
