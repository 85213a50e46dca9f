"""Rules for the values of a call's lengths and pages, for the writer and the reader of its file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from capture.call.attention_variant import VARIANT_TENSORS
from capture.storage.header import CallHeader, memory_excess


def value_fault(header: CallHeader, values: Mapping[str, Tensor], nbytes: int) -> str:
    """Return why a call's lengths or page table are invalid; empty if they are valid.

    Args:
        values: tensors on the CPU, as a file stores them (`Layout.stored`).
        nbytes: size of the file, or of all tensors in it.
    """
    given = {
        name: header.layouts[name].logical(values[name]).expand(header.layouts[name].size)
        for name in VARIANT_TENSORS
        if name in values
    }
    given = {name: each[(0,) * (4 - VARIANT_TENSORS[name])] for name, each in given.items()}
    return _sequences_fault(header, given) or _pages_fault(header, given, nbytes)


def _sequences_fault(header: CallHeader, given: Mapping[str, Tensor]) -> str:
    shape = header.shape
    starts_q, starts_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    for name, total in (("cu_seqlens_q", shape.q_len), ("cu_seqlens_k", shape.kv_len)):
        starts = given.get(name)
        if starts is None:
            continue
        if starts[0] != 0 or starts[-1] != total or bool((starts.diff() < 0).any()):
            return f"{name} does not rise from 0 to {total}"
    stated = header.variant.max_seqlen_q
    if stated is not None and starts_q is not None:
        longest = int(starts_q.diff().max())
        if stated < longest:  # kernels would not write the outputs after `stated`
            return f"max_seqlen_q is {stated}, but the longest sequence has {longest} queries"
    used, table = given.get("seqused_k"), given.get("page_table")
    if used is not None:
        room = shape.kv_len if starts_k is None else starts_k.diff()
        if table is not None:
            room = table.shape[1] * header.layouts["key"].size[2]
        if bool(((used < 0) | (used > room)).any()):
            return "seqused_k counts more keys than there are"
    return ""


def _pages_fault(header: CallHeader, given: Mapping[str, Tensor], nbytes: int) -> str:
    table, used = given.get("page_table"), given.get("seqused_k")
    if table is None or used is None:
        return ""
    pool, kv_heads, page_size, _ = header.layouts["key"].size
    if bool(((table < 0) | (table >= pool)).any()):
        return f"page_table names a page outside the pool of {pool}"
    longest = -(-int(used.max()) // page_size) * page_size
    numbers = table.shape[0] * longest * kv_heads * sum(header.shape[-2:])
    size = getattr(torch, header.dtypes["key"]).itemsize
    return memory_excess("its sequences", numbers * size, nbytes)
