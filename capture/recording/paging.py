"""Reduces a paged cache, which may fill a GPU, to the pages that one call reads."""

from __future__ import annotations

from dataclasses import replace

import torch

from capture.call.attention_call import AttentionCall
from capture.call.pages import read_entries
from capture.call.strides import picked
from capture.errors import InvalidCall


def with_pages_read(call: AttentionCall) -> AttentionCall:
    """Return the call with a pool of only the pages that it reads, in their order in memory.

    The pages in the pool are renumbered. A page that several sequences share is stored once. Page
    table entries beyond the used keys become 0. Waits for the GPU.

    Raises:
        InvalidCall: the page table names a page outside the pool.
    """
    assert call.page_table is not None
    assert call.seqused_k is not None
    is_read = read_entries(call.page_table, call.seqused_k, call.key.shape[2])
    kept, numbers = torch.unique(call.page_table[is_read], return_inverse=True)
    table = torch.zeros_like(call.page_table)
    table[is_read] = numbers.to(table.dtype)
    if not kept.numel():
        kept = kept.new_zeros(1)  # a pool must have a page
    first, last = int(kept[0]), int(kept[-1])
    if first < 0 or last >= call.key.shape[0]:  # reading this page would break the CUDA context
        reason = f"page_table names pages {first} to {last} of {call.key.shape[0]}"
        raise InvalidCall(reason, call.origin.module, call.origin.step)
    key = picked(call.key, 0, kept)
    shares = call.value_is_in_key
    value = key[..., : call.value.shape[-1]] if shares else picked(call.value, 0, kept)
    return replace(call, key=key, value=value, page_table=table)
