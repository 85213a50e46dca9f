"""FlashInfer's prefill over pages: `BatchPrefillWithPagedKVCacheWrapper`, as in inference engines.

Sequences of any number of queries, packed or not, read their keys through the page table in place.
The drop-in includes `plan`, the core only `run`, as for the later layers of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from replay.kernels import constraints as limits
from replay.kernels.adapters import flashinfer
from replay.kernels.constraints import AnyCall
from replay.kernels.layout import bshd, even_offsets, thd
from replay.kernels.wrapping import register_adapted

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def _planned(call: AnyCall, wrapper: Any) -> Callable[[], Tensor]:
    batch, heads, q_len, head_dim = call.query.shape
    starts, device, pages = call.cu_seqlens_q, call.query.device, flashinfer.Pages.of(call, 0)
    wrapper.plan(
        even_offsets(batch, q_len, device) if starts is None else starts,
        pages.offsets,
        pages.numbers,
        pages.last_lengths,
        heads,
        call.key.shape[1],
        head_dim,
        pages.page_size,
        q_data_type=call.query.dtype,
        kv_data_type=call.key.dtype,
        **flashinfer.options(call),
    )
    query, cache = thd(call.query).contiguous(), (bshd(call.key), bshd(call.value))
    return lambda: wrapper.run(query, cache).unflatten(0, (batch, -1)).transpose(1, 2)


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    return _planned(call, flashinfer.new_wrapper(WRAPPER, call.query.device))


def _attend(call: AnyCall) -> Tensor:
    return _planned(call, flashinfer.shared_wrapper(WRAPPER, call.query.device, False))()


register_adapted(
    "flashinfer-paged",
    replace(flashinfer.LIBRARY, functions=(WRAPPER,)),
    _attend,
    (
        *flashinfer.LIMITS,
        limits.needs_pages,
        limits.no_mask,
        limits.causal_only_square,
        limits.left_window_only,
    ),
    "FlashInfer's prefill over pages, also of packed sequences",
    prepare=_prepare,
    features=("bottom-right", "window", "softcap", "packed", "paged"),
)
