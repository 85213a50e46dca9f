"""Operators for packed sequences and key/value caches, which `flash_attention.py` calls.

`torch.ops.attention_kernels.varlen`, `.kvcache` and `.append_to_cache` are `attend_packed`,
`attend_to_kv_cache` and `append_to_cache` for PyTorch while it traces a model. Causal masks and
windows follow the bottom-right diagonal. The log-sum-exp is always computed, as in FlashAttention:
it costs one number per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_kernels import gradients
from attention_kernels.decode.cache_update import append_to_cache, gather_pages
from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.kv_cache import expanded_scales
from attention_kernels.decode.paged_batch import paged_batch
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.dispatch import MOST_DECODED_QUERIES, check_head_dims, check_tensors
from attention_kernels.gradients import NAMESPACE, check_gradients
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.options import AttentionOptions
from attention_kernels.portable.varlen import KeyRanges, packed_prefill, padded_prefill

WORTH_GATHERING = 2048
"""Minimum number of query rows of a key head and sequence, on average, for which the Hopper kernel
saves more time than a copy of the keys takes.

R rows times K keys of D numbers take 4 · R · K · D operations, at 620 TFLOPS instead of 420 (H200).
Copying the keys and values moves 8 · K · D bytes at some 2 TB/s, as long as R = 1,300. A causal
prefill sees half of the keys on average.
"""
MOST_GATHERED = 2**31
"""Maximum size of a copy of keys and values in bytes."""


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_query: int,
    seqused_k: Tensor | None,
    scale: float | None,
    is_causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    longest_key: int | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return attention within each sequence of a packed batch, (Tq, Hq, Dv), and the log-sum-exp,
    (Hq, Tq) float32.

    The arguments are those of `packed_prefill`, and two that the backward pass alone needs:
    `longest_key`, number of keys of the longest sequence, or more, None for Tk; and
    `deterministic`. The errors are those of `flash_attn_varlen_func`.
    """
    check_tensors(query, key, value)
    check_head_dims(key, value, is_decoded=False)
    output, lse = packed_prefill(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        longest_query,
        is_causal,
        scale=scale,
        seqused_k=seqused_k,
        sinks=sinks,
        options=AttentionOptions(True, (window_left, window_right), softcap),
        return_lse=True,
    )
    return output.contiguous(), lse


def attend_to_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    longest_query: int,
    longest_key: int | None,
    scale: float | None,
    is_causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention to a cache, and the log-sum-exp in float32.

    Args:
        query: (B, Sq, Hq, D), or (Tq, Hq, D) with `cu_seqlens_q`.
        k_cache, v_cache: (B, S, Hkv, D) and (B, S, Hkv, Dv), or pages (P, page_size, Hkv, D) and
            (P, page_size, Hkv, Dv).
        lengths: (B,) int32, number of tokens of each sequence.
        block_table: (B, N) int32, pages of each sequence; None without pages.
        cu_seqlens_q: (B + 1,) int32, start of each sequence's queries and the end of all.
        longest_query: number of queries of the longest sequence, or more.
        longest_key: number of tokens of the longest sequence, or more; None for the table's room.
        key_scale, value_scale: as for `paged_batch`, of an FP8 cache.

    Returns:
        The output, in the query's layout with Dv; and (B, Hq, Sq), or (Hq, Tq) with `cu_seqlens_q`.

    Raises:
        The errors of `flash_attn_with_kvcache`.
    """
    batch = lengths.shape[0]
    if block_table is None and key_scale is not None:  # each row of the cache is one page
        block_table = torch.arange(batch, dtype=torch.int32, device=query.device)[:, None]
    scales = (key_scale, value_scale)
    is_decoded = check_cache_call(
        query, k_cache, v_cache, batch, longest_query, block_table is not None, scales
    )
    given: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "sinks": sinks,
        "options": AttentionOptions(True, (window_left, window_right), softcap),
        "return_lse": True,
    }
    is_even = _are_even(query, batch, longest_query)
    if block_table is not None and not (is_decoded and is_even):
        table = block_table
        if longest_key is not None:
            table = block_table[:, : -(-longest_key // k_cache.shape[1])]
        if not _is_gathered(query, k_cache, v_cache, table, scale, is_even):
            starts = cu_seqlens_q
            if starts is None:
                starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
                starts *= longest_query
            query_THD = query if query.ndim == 3 else query.flatten(0, 1)
            output, lse = paged_batch(
                query_THD, k_cache, v_cache, block_table, lengths, starts, longest_query,
                key_scale=key_scale, value_scale=value_scale, **given,
            )  # fmt: skip
            if query.ndim == 3:
                return output, lse
            sizes = (batch, longest_query)
            return output.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1).contiguous()
        k_cache, v_cache = (gather_pages(each, table, lengths) for each in (k_cache, v_cache))
        is_decoded = False
    if cu_seqlens_q is not None and not is_even:
        room = k_cache.shape[1]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * room
        key, value = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        output, lse = packed_prefill(
            query, key, value, cu_seqlens_q, starts, longest_query, seqused_k=lengths, **given
        )
        return output.contiguous(), lse
    query_BSHD = query if cu_seqlens_q is None else query.unflatten(0, (batch, longest_query))
    query_BHSD = query_BSHD.transpose(1, 2)
    if is_decoded and block_table is not None:
        output, lse = paged_decode(
            query_BHSD, k_cache, v_cache, block_table, lengths,
            key_scale=key_scale, value_scale=value_scale, **given,
        )  # fmt: skip
    else:
        key, value = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if is_decoded:
            output, lse = contiguous_decode(query_BHSD, key, value, seqused_k=lengths, **given)
        else:
            output, lse = padded_prefill(query_BHSD, key, value, KeyRanges(None, lengths), **given)
    output_BSHD = output.transpose(1, 2).contiguous()
    if cu_seqlens_q is None:
        return output_BSHD, lse
    return output_BSHD.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def check_cache_call(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: int,
    longest_query: int,
    in_pages: bool,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> bool:
    """Check that a kernel supports a call of `attend_to_kv_cache`, and return whether the decode
    kernel computes all of it.

    Raises:
        The errors of `flash_attn_with_kvcache`.
    """
    if scales[0] is None and scales[1] is None:
        check_tensors(query, k_cache, v_cache)
    else:
        check_tensors(query, query, query)
        expanded_scales(query, k_cache, v_cache, *scales, batch)
    is_decoded = (
        (in_pages or _are_even(query, batch, longest_query))
        and longest_query <= MOST_DECODED_QUERIES
        and query.dtype != torch.float32
    )
    check_head_dims(k_cache, v_cache, is_decoded)
    return is_decoded


def _is_gathered(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float | None,
    is_even: bool,
) -> bool:
    """Return whether copying the pages of a prefill into one piece pays off, because the Hopper
    kernel reads it faster than pages.

    Only shapes tell, as the GPU knows the lengths. In a batch with many decodes, the average number
    of queries is small. Of an uneven batch, the copy would be as large as if all sequences had the
    longest one's keys. `paged_batch` itself copies an FP8 cache.
    """
    if not is_even or k_cache.dtype != query.dtype:
        return False
    batch, pages = block_table.shape
    rows = query.shape[:-1].numel() // v_cache.shape[2]
    room = batch * pages * v_cache.shape[1:3].numel()
    size = room * (k_cache.shape[3] + v_cache.shape[3]) * query.element_size()
    if rows < WORTH_GATHERING * batch or size > MOST_GATHERED:
        return False
    if not has_gluon_kernels(query.device):
        return False
    # Gluon is imported only on a GPU that supports it.
    from attention_kernels.hopper.hopper_prefill import takes

    return takes(query[None] if query.ndim == 3 else query, v_cache, scale)


def _are_even(query: Tensor, batch: int, longest_query: int) -> bool:
    """Return whether all sequences have the same number of queries.

    No sequence is longer than the longest, so the total of packed queries tells it.
    """
    return query.ndim == 4 or query.shape[0] == batch * longest_query


varlen = torch.library.custom_op(f"{NAMESPACE}::varlen", attend_packed, mutates_args=())
kvcache = torch.library.custom_op(f"{NAMESPACE}::kvcache", attend_to_kv_cache, mutates_args=())
append = torch.library.custom_op(
    f"{NAMESPACE}::append_to_cache", append_to_cache, mutates_args=("k_cache", "v_cache")
)


@varlen.register_fake
@kvcache.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *batch, heads, _ = query.shape
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    tokens = batch[-1]
    return output, query.new_empty(*batch[:-1], heads, tokens, dtype=torch.float32)


@append.register_fake
def _(*arguments: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, q_offsets, k_offsets, longest, seqused_k, scale, is_causal, *others = inputs
    window_left, window_right, softcap, sinks, longest_key, deterministic = others
    check_gradients(query, value, None)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "sinks": sinks,
        "cu_seqlens_q": q_offsets,
        "cu_seqlens_k": k_offsets,
        "longest_query": longest,
        "longest_key": longest_key,
        "seqused_k": seqused_k,
        "is_causal": is_causal,
        "scale": scale,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": softcap,
        "deterministic": deterministic,
    }
    gradients.save(ctx, output, arguments)


def _differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, sinks = gradients.differentiate(gradients.varlen_backward, ctx, *given)
    return query, key, value, *[None] * 9, sinks, None, None


varlen.register_autograd(_differentiate, setup_context=_save)
